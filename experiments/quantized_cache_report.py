"""Tables, figures and summary of the paired quantized-cache study, from its rows."""

from collections.abc import Sequence
from typing import Any

from experiments import quantized_cache_plots as plots
from experiments.quantized_cache_published import TUTORIAL
from experiments.quantized_cache_study import (
    STUDY,
    WORKLOAD_ID,
    WORKLOAD_VERSION,
    Facts,
    by_arm,
    study,
    transitions,
)
from experiments.record import plain, read_record, write_json
from experiments.report import Column, interval, markdown, print_line, table
from experiments.runner import Run
from kvjax.evaluation import admission

MIB = 2**20


def planned(facts: Facts, run: Run, rows: Sequence[dict]) -> None:
    """Show and write a dry run."""
    title = f"{facts.loaded.name}: planned, nothing was measured"
    listed = [
        Column("matrix", "matrix"),
        Column("context", "context", ",d"),
        Column("R", "residual_length", "d"),
        Column("new", "new_tokens", "d"),
        Column("arm", name_of),
        Column("group", "group", "d"),
        Column("container MiB", _mib("predicted_container_bytes"), ".2f"),
        Column("saved MiB", _mib("predicted_saved_bytes"), ".2f"),
        Column("flushes", "expected_flushes", "d"),
        Column("does not fit", "error"),
    ]
    table(rows, listed, title)
    write_json(run.path / STUDY, plain(study(facts, read_record(run.path), rows)))
    run.write_summary(markdown(rows, listed, title))


def report(facts: Facts, run: Run) -> None:
    """Show and write a finished run, from its rows."""
    rows = with_scratch(run.rows)
    record = read_record(run.path)
    made = study(facts, record, run.rows)
    write_json(run.path / STUDY, plain(made))
    config = facts.config
    title = f"{facts.loaded.name}, cache in {config.dtype}"
    parts = []
    for matrix, heading in (
        ("context", f"context matrix, {config.context_new_tokens} new tokens, residual"
         f" {config.context_residual}"),
        ("window", f"residual windows, {config.window_context:,} tokens,"
         f" {config.window_new_tokens} new tokens"),
    ):  # fmt: skip
        here = [row for row in rows if row["matrix"] == matrix]
        if not here:
            continue
        table(here, brief_columns(), f"{title}: {heading}")
        parts.append(markdown(here, columns(), f"{title}: {heading}"))
        parts.append(markdown(here, byte_columns(), f"Bytes: {heading}"))
        figure = plots.matrix(by_arm(rows, matrix), matrix, facts.gates, f"{title}: {heading}")
        run.save_figure(matrix, figure)
    parts.append(markdown(transitions(rows, facts.gates), transition_columns(), "Transitions"))
    parts.append(markdown(beside(rows), beside_columns(), "Beside the published run"))
    parts.append(notes(facts, made, rows))
    print_line(verdict_line(made))
    run.write_summary(verdict_line(made) + "\n\n" + "\n".join(parts))


def name_of(row: dict[str, Any]) -> str:
    """A method and its bits."""
    return row["method"] if row["method"] == "full" else f"{row['method']} {row['bits']}-bit"


def _mib(field: str) -> Any:
    return lambda row: None if row.get(field) is None else row[field] / MIB


def with_scratch(rows: Sequence[dict]) -> list[dict]:
    """The rows, with the share that is saved where the compiled step's temporaries count too.

    Live arrays are what is held between two steps; within a step its temporary buffers come on top,
    and a quantized cache's are larger. None where the peak is the device's own, which has them.
    """
    full = {(r["matrix"], r["context"]): r for r in rows if r["method"] == "full"}

    def saved(row):
        pair = (row, full[row["matrix"], row["context"]])
        if any(r.get("step_scratch_bytes") is None or "saved_bytes" not in r for r in pair):
            return None
        if row["incremental_peak_source"] != "live arrays":
            return None
        own, base = (r["incremental_live_peak_bytes"] + r["step_scratch_bytes"] for r in pair)
        return 100 * (1 - own / base)

    return [dict(row) | {"saved_with_scratch_percent": saved(row)} for row in rows]


def columns() -> list[Column]:
    """Columns of quality, latency and decision."""
    return [
        Column("context", "context", ",d"),
        Column("R", "residual_length", "d"),
        Column("arm", name_of),
        Column("peak MiB", _mib("incremental_peak_bytes"), ".2f"),
        Column("saved MiB", _mib("saved_bytes"), ".2f"),
        Column("saved %", "saved_percent", ".1f"),
        Column("with scratch %", "saved_with_scratch_percent", ".1f"),
        Column("ms/token", "ms_per_token", ".1f"),
        Column("min", "ms_per_token_min", ".1f"),
        Column("/ full [range]", interval("latency_ratio", ".2f")),
        Column("NLL - full [95 %]", interval("nll_difference", ".3f")),
        Column("NLL / full", "nll_ratio", ".2f"),
        Column("top-5 [95 %]", interval("top5_overlap", ".2f")),
        Column("other trajectory", other_trajectory),
        Column("greedy", "greedy_agreement", ".2f"),
        Column("diverges at", "first_divergence", "d"),
        Column("decision", decision_of),
    ]


def other_trajectory(row: dict[str, Any]) -> str | None:
    """NLL difference along the trajectory that the gates do not see."""
    name = "text" if "text_nll_difference" in row else "greedy"
    return interval(f"{name}_nll_difference", ".3f")(row)


def brief_columns() -> list[Column]:
    """The same for a terminal: no intervals."""
    shown = {"latency_ratio": "/ full", "nll_difference": "NLL - full", "top5_overlap": "top-5"}
    kept = ("context", "R", "arm", "saved MiB", "saved %", "ms/token", "greedy", "decision")
    listed = [column for column in columns() if column.title in kept]
    listed[-2:-2] = [Column(title, field, ".2f") for field, title in shown.items()]
    return listed


def decision_of(row: dict[str, Any]) -> str:
    """The decision, the gates that broke or the stage that failed."""
    if row["decision"] == admission.FAILED:
        return f"failed: {row['failure_stage']} ({row['error'][:80]})"
    text = row["decision"]
    if row["broken"]:
        text += ": " + ", ".join(row["broken"])
    if row["uncertain"]:
        text += "; uncertain: " + ", ".join(row["uncertain"])
    return text


def byte_columns() -> list[Column]:
    """Columns of what the cache stores and a step reads."""
    return [
        Column("context", "context", ",d"),
        Column("R", "residual_length", "d"),
        Column("arm", name_of),
        Column("group", "group", "d"),
        Column("container MiB", _mib("container_bytes"), ".2f"),
        Column("packed codes MiB", _mib("packed_bytes"), ".2f"),
        Column("scales MiB", _mib("scale_bytes"), ".2f"),
        Column("exact MiB", _mib("exact_bytes"), ".2f"),
        Column("step scratch MiB", _mib("step_scratch_bytes"), ".2f"),
        Column("cache read a step MiB", _mib("step_cache_bytes_read"), ".2f"),
        Column("weights read a step MiB", _mib("step_weight_bytes_read"), ".0f"),
        Column("flushes", lambda r: _pair(r, "measured_flushes", "expected_flushes")),
        Column("flush ms", "flush_ms", ".0f"),
        Column("step ms", "step_ms", ".1f"),
        Column("process peak MiB", _mib("process_peak_rss_bytes"), ".0f"),
        Column("device reserved MiB", _mib("own_process_reserved_peak_bytes"), ".0f"),
    ]


def _pair(row: dict[str, Any], first: str, second: str) -> str | None:
    return None if row.get(first) is None else f"{row[first]} of {row[second]}"


def transition_columns() -> list[Column]:
    """Columns of onset and crossover."""
    return [
        Column("arm", name_of),
        Column("saves from", "onset_context", ",.0f"),
        Column("saved bytes cross 0 at", "crossover_context", ",.0f"),
        Column("latency crosses full at", "latency_crossover_context", ",.0f"),
        Column("NLL crosses its gate at", "quality_crossover_context", ",.0f"),
        Column("first refused", "first_refused_context", ",.0f"),
    ]


def beside(rows: Sequence[dict]) -> list[dict[str, Any]]:
    """Our HQQ 4-bit cells and the published ones at the same places."""
    found = []
    for matrix, place in (("context", "context"), ("window", "residual_length")):
        ours = {r[place]: r for r in by_arm(rows, matrix).get(("hqq", 4), [])}
        theirs = {r[place]: r for r in TUTORIAL[matrix]}
        for at in sorted({*ours, *theirs}):
            mine = ours.get(at)
            if mine is not None:
                saved = {"saved_mib": mine["saved_bytes"] / MIB,
                         "peak_change_percent": -mine["saved_percent"]}  # fmt: skip
                found.append({"matrix": matrix, "at": at, "run": "ours"} | mine | saved)
            if at in theirs:
                found.append({"matrix": matrix, "at": at, "run": "published"} | theirs[at])
    return found


def beside_columns() -> list[Column]:
    """Columns that both runs have."""
    return [
        Column("matrix", "matrix"),
        Column("at", "at", ",d"),
        Column("run", "run"),
        Column("peak change %", "peak_change_percent", "+.1f"),
        Column("saved MiB", "saved_mib", ".1f"),
        Column("latency ratio", "latency_ratio", ".3f"),
        Column("NLL - full", "nll_difference", "+.3f"),
        Column("top-5", "top5_overlap", ".2f"),
        Column("decision", "decision"),
    ]


def verdict_line(made: dict[str, Any]) -> str:
    """The study's decision in one line."""
    best, text = made["candidate"], f"Decision: {made['decision']}"
    if best is not None:
        text += (
            f", candidate {name_of(best)} at {best['context']:,} tokens with a residual window of"
            f" {best['residual_length']}: {best['saved_bytes'] / MIB:.1f} MiB saved"
            f" ({best['saved_percent']:.0f} %), {best['latency_ratio']:.2f}x the time a token, NLL"
            f" {best['nll_difference']:+.3f}, overlap {best['top5_overlap']:.2f}"
        )
    elif made["decision"] == admission.REFUSED:
        text += ": no cell passes every gate and saves bytes"
    if made["failure_stage"]:
        text += f"; first failed stage: {made['failure_stage']}"
    return text + "."


def shares(rows: Sequence[dict]) -> dict[str, float]:
    """Seconds that the arms spent in each stage."""
    total: dict[str, float] = {}
    for row in rows:
        for stage, seconds in row["stage_seconds"].items():
            total[stage] = total.get(stage, 0.0) + seconds
    return total


def notes(facts: Facts, made: dict[str, Any], rows: Sequence[dict]) -> str:
    """How to read the tables."""
    config, evidence = facts.config, made["evidence"]
    spent = shares(rows)
    listed = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in spent.items())
    load = evidence["largest_load_average"]
    greedy, text = "the full cache's own greedy tokens", "the text that follows"
    if config.trajectory == "text":
        greedy, text = text, greedy
    text = (
        f"Label {facts.label}; workload {WORKLOAD_ID} version {WORKLOAD_VERSION}; prompts"
        f" {made['prompt']['sha256'][:16]}; model revision {facts.loaded.revision[:16]}; evidence:"
        f" {made['evidence_level']}. One prompt a context (n = 1), compressed by every arm from one"
        f" prefill; {config.quality_tokens} tokens are scored along {greedy}, from the first logits"
        f" that read the compressed cache onwards; `other trajectory` is {text}. Brackets of NLL"
        " and overlap are 95 % bootstrap intervals over these tokens, which are of one text and not"
        " independent; `uncertain` names a gate whose bound lies inside."
        f" Time: medians and minima of {config.repeats} generations in turns after"
        f" {config.warmups} warm-up; the bracket is the range of the rounds' ratios. Every flush is"
        f" in the time. Peak: {evidence['peak_source'] or 'not measured'}, beyond what was held"
        " before the cache, between steps; `with scratch` also counts the temporary buffers of the"
        " compiled step (not those of a flush); `process peak` is the whole process's resident"
        " memory, weights and programs included, and does not rank arms. Cache read a step: live"
        " bytes, mean of first and last step."
        f" hqq: {config.hqq_axis} axis on both sides, refinement {config.hqq_refine},"
        f" {'whole cache' if config.hqq_requantize else 'one block'} coded at a flush. Groups along"
        " tokens are no longer than the residual window.\n"
        f"\nSeconds by stage: {listed}."
    )
    if load is not None:
        text += f" Largest load average: {load:.1f} on {made['hardware']['usable_cpus']} CPUs."
    text += f"\n\nPublished: {TUTORIAL['model']}, {TUTORIAL['method']}, {TUTORIAL['device']}"
    return text + f" ({TUTORIAL['source']}).\n"
