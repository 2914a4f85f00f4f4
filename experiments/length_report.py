"""What the response-length experiment shows: tables, plots, summary, made from the rows alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import plots
from experiments.report import Column, interval, markdown, scalar_name, table
from experiments.runner import Run
from kvjax.evaluation import length_shift

Rows = Sequence[Mapping[str, Any]]


def scalars(row: Mapping[str, Any]) -> Any:
    """TensorBoard scalars of a row."""
    method, step = scalar_name(row["method"]), row["prompt_tokens"]
    yield f"length/generated_tokens/{method}", row["generated_tokens"], step
    if row["kind"] == "timing":
        yield f"speed/e2e_seconds/{method}", row["e2e_seconds"], step
    elif "shift" in row:
        yield f"length/shift_relative/{method}", row["shift"], step
        yield f"quality/similarity_cosine/{method}", row["similarity"], step


def report(run: Run, config: Any, name: str, left_out: int) -> None:
    """Tables, plots and summary."""
    answers = [row for row in run.rows if row["kind"] == "answer"]
    timed = [row for row in run.rows if row["kind"] == "timing"]
    sections = [_what(config, answers, name, left_out)]
    for sampled in (False, True):
        rows = [row for row in answers if (row["temperature"] > 0) == sampled]
        if rows:
            how = f"sampled, {len(config.seeds)} seeds" if sampled else "greedy"
            sections += _tables(rows, how)
    if timed:
        sections.append(_timing(timed))
        run.save_figure("end_to_end", end_to_end(timed, f"{name}, batch 1, greedy"))
    if any(row.get("shift") is not None for row in answers):
        title = f"{name}, answers that ended under both caches"
        run.save_figure("length_shift", shifts(answers, title))
    sections.append(_NOTES)
    run.write_summary("\n".join(sections))


def _what(config: Any, answers: Rows, name: str, left_out: int) -> str:
    prompts = {row["prompt"]: row["prompt_tokens"] for row in answers}
    source = "built-in prompts" if config.prompts == "builtin" else "prompts of a file"
    text = (
        f"{name}: {len(prompts)} {source} of {min(prompts.values())} to {max(prompts.values())}"
        f" tokens, answers of at most {config.limit}."
    )
    if left_out:
        text += f" {left_out} longer prompts were left out."
    return text + "\n"


_NOTES = """
- *D* = (L_full − L_compressed) / L_full over answers that ended under both caches: positive is
  shorter. Choosing those that ended under the full cache favours longer answers of the other, so
  *ln ratio, all* = ln(L_compressed / L_full) counts every answer, a truncated one at the limit.
- *≥ 50 % longer*: of the answers that the full cache ended. *D beyond ±200 %*: share that the usual
  plot of D leaves out, and the mean D of the others.
- *Early*: both go on with different tokens. *At the end*: the same answer, and one stops first.
  *Gap*: probability of the likeliest token less the second's, where the answers part.
- *P(EOS), common*: compressed less full, where both had the same tokens so far. *Where full
  stopped*: the full cache's answer run through the other cache.
- *Alike*: cosine of the mean final hidden states of the model itself, less their mean over the full
  cache's answers; *common*: both cut to the shorter one's length. *Correct*: of the prompts with a
  reference; *in full's tokens*: within as many tokens as the full cache took. A longer answer is
  never counted as a better one.
- Controls: *full, float32* differs from the full cache in rounding alone; *full, other seed* is the
  full cache with other draws. What a method does beyond its control is the method's. The prompts
  are the unit of every interval, seeds are averaged first.
"""


def per_prompt(rows: Rows) -> list[dict[str, Any]]:
    """One row a prompt, method and sampling: the mean over the seeds of every number."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        names = ("prompt", "method", "temperature", "top_p")
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    found = []
    for members in groups.values():
        row = dict(members[0])
        for name in {name for member in members for name in member}:
            values = [m[name] for m in members if m.get(name) is not None]
            if values and all(isinstance(v, (bool, int, float)) for v in values):
                row[name] = float(np.mean(values))
        found.append(row)
    return found


def _tables(rows: Rows, how: str) -> list[str]:
    found = []
    for setting in dict.fromkeys((row["temperature"], row["top_p"]) for row in rows):
        chosen = [row for row in rows if (row["temperature"], row["top_p"]) == setting]
        title = how
        if setting[0] > 0:
            title += f", temperature {setting[0]:g}, top-p {setting[1]:g}"
        means = summarised(chosen)
        for heading, columns in (
            ("lengths", LENGTHS), ("where answers part", PARTING), ("what they say", QUALITY),
        ):  # fmt: skip
            table(means, columns, f"{title}: {heading}")
            found.append(markdown(means, columns, f"{title}: {heading}"))
    return found


def summarised(rows: Rows) -> list[dict[str, Any]]:
    """One row a method: means over prompts with 95 % intervals, and what is no mean."""
    each = [
        row
        | {kind: row["divergence"] == kind for kind in _KINDS if row.get("divergence") is not None}
        | {"length": None if row["truncated"] else row["generated_tokens"]}
        for row in rows
    ]
    means = plots.group_means(per_prompt(each), ["method"], _MEANS, _SHARES, _BOUNDS)
    for mean in means:
        own = [row for row in rows if row["method"] == mean["method"]]
        mean["answers"], mean["limit"] = len(own), own[0].get("limit")
        pairs = [row for row in own if row.get("shift") is not None]
        kept = length_shift.rethink_percent(
            [r["full_tokens"] for r in pairs], [r["generated_tokens"] for r in pairs]
        )
        mean["pairs"] = len(pairs)
        if pairs:
            mean["median_shift"] = float(np.median([row["shift"] for row in pairs]))
            mean["dropped"] = 1 - len(kept) / len(pairs)
            mean["kept_shift"] = float(np.mean(kept)) / 100 if kept else None
        at = [r["divergence_position"] for r in own if r.get("divergence_position") is not None]
        mean["median_position"] = float(np.median(at)) if at else None
    return means


_KINDS = ("early", "end", "same")
_MEANS = (
    *_KINDS, "length", "ratio", "ratio_at_end", "truncated", "empty", "shift", "length_ratio",
    "log_ratio_censored", "much_longer", "repeated", "gap_full", "gap_compressed",
    "stop_shift_common", "stop_at_end_full", "stop_at_end_compressed", "stop_before_full",
    "stop_before_compressed",
    "answer_nll_compressed", "similarity", "similarity_common", "similarity_floor", "correct",
    "correct_within",
)  # fmt: skip
_SHARES = (
    *_KINDS, "truncated", "empty", "much_longer", "correct", "correct_within",
)  # fmt: skip
_POSITIVE, _PROBABILITY, _COSINE = (0.0, float("inf")), (0.0, 1.0), (-1.0, 1.0)
_BOUNDS = (
    dict.fromkeys(("length", "ratio", "ratio_at_end", "length_ratio", "answer_nll_compressed"),
                  _POSITIVE)
    | dict.fromkeys(("repeated", "gap_full", "gap_compressed", "stop_at_end_full",
                     "stop_at_end_compressed", "stop_before_full", "stop_before_compressed"),
                    _PROBABILITY)
    | dict.fromkeys(("stop_shift_common", "similarity", "similarity_common", "similarity_floor"),
                    _COSINE)
    | {"shift": (-float("inf"), 1.0)}
)  # fmt: skip

LENGTHS = [
    Column("method", "method"),
    Column("bytes", lambda r: f"1/{r['ratio']:.2f}"),
    Column("note", "limit"),
    Column("answers", "answers", "d"),
    Column("tokens, ended", interval("length", ".0f")),
    Column("truncated %", interval("truncated", ".0f", 100)),
    Column("empty %", interval("empty", ".0f", 100)),
    Column("pairs", "pairs", "d"),
    Column("D %", interval("shift", "+.0f", 100)),
    Column("median D %", lambda r: _percent(r.get("median_shift"))),
    Column("length ratio", interval("length_ratio", ".2f")),
    Column("ln ratio, all", interval("log_ratio_censored", "+.2f")),
    Column("≥ 50 % longer %", interval("much_longer", ".0f", 100)),
    Column("D beyond ±200 %: share, D of others", lambda r: _dropped(r)),
]
PARTING = [
    Column("method", "method"),
    Column("early %", interval("early", ".0f", 100)),
    Column("at the end %", interval("end", ".0f", 100)),
    Column("same %", interval("same", ".0f", 100)),
    Column("median position", "median_position", ".0f"),
    Column("gap, full", interval("gap_full", ".2f")),
    Column("gap, compressed", interval("gap_compressed", ".2f")),
    Column("P(EOS), common ×1000", interval("stop_shift_common", "+.2f", 1000)),
    Column("P(EOS) where full stopped", interval("stop_at_end_compressed", ".2f")),
    Column("there, full", interval("stop_at_end_full", ".2f")),
    Column("P(EOS) before ×1000", interval("stop_before_compressed", ".2f", 1000)),
]
QUALITY = [
    Column("method", "method"),
    Column("alike", interval("similarity", ".2f")),
    Column("alike, common", interval("similarity_common", ".2f")),
    Column("unrelated", interval("similarity_floor", ".2f")),
    Column("correct %", interval("correct", ".0f", 100)),
    Column("in full's tokens %", interval("correct_within", ".0f", 100)),
    Column("NLL of full's answer", interval("answer_nll_compressed", ".3f")),
    Column("repeated 4-grams %", interval("repeated", ".0f", 100)),
    Column("bytes at the end", lambda r: f"1/{r['ratio_at_end']:.2f}"),
]


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:+.0f}"


def _dropped(row: Mapping[str, Any]) -> str | None:
    if row.get("dropped") is None:
        return None
    others = _percent(row["kept_shift"])
    return f"{100 * row['dropped']:.0f} %" + (f", {others}" if others else "")


def _timing(timed: Rows) -> str:
    """TTFT, TPOT and E2E as multiples of the full cache's on the same prompt."""
    full = {row["prompt"]: row for row in timed if row["method"] == "full"}
    relative = []
    for row in timed:
        base = full[row["prompt"]]
        relative.append(
            dict(row)
            | {
                f"{name}_ratio": row[f"{name}_seconds"] / base[f"{name}_seconds"]
                if row[f"{name}_seconds"] is not None and base[f"{name}_seconds"]
                else None
                for name in ("ttft", "tpot", "e2e")
            }
        )
    fields = ("ttft_seconds", "ttft_ratio", "tpot_ratio", "e2e_ratio", "generated_tokens")
    bounds = dict.fromkeys(fields, _POSITIVE)
    means = plots.group_means(relative, ["method"], fields, bounds=bounds)
    columns = [
        Column("method", "method"),
        Column("n", "n", "d"),
        Column("tokens", interval("generated_tokens", ".0f")),
        Column("TTFT / full's", interval("ttft_ratio", ".2f")),
        Column("TPOT / full's", interval("tpot_ratio", ".2f")),
        Column("E2E / full's", interval("e2e_ratio", ".2f")),
    ]
    title = "one request at a time: time over the full cache's on the same prompt"
    table(means, columns, title)
    return markdown(means, columns, title)


def _step(axes: Axes, values: Sequence[float], method: str) -> None:
    colour, marker, dash = plots.style(method)
    count = len(values)
    axes.ecdf(
        values, color=colour, linestyle=dash, linewidth=1.6, label=f"{method} (n = {count})",
        marker=marker, markevery=max(count // 8, 1), markersize=5,
    )  # fmt: skip


def _distribution(groups: Mapping[str, Sequence[float]], title: str, label: str) -> Figure:
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(8.6, 4.2))
        axes = figure.add_subplot()
        for method, values in groups.items():
            _step(axes, values, method)
        axes.set_ylim(0, 1.03)
        axes.set_title(title, loc="left")
        axes.set_xlabel(label)
        axes.set_ylabel("share of answers at or below")
        figure.legend(loc="outside right upper")
        return figure


def end_to_end(timed: Rows, title: str) -> Figure:
    """Distribution of the seconds from a request to the end of its answer, a line a method."""
    groups: dict[str, list[float]] = {}
    for row in timed:
        groups.setdefault(row["method"], []).append(row["e2e_seconds"])
    return _distribution(groups, title, "E2E, seconds from request to end of answer")


def shifts(answers: Rows, title: str) -> Figure:
    """Distribution of ln(L_compressed / L_full), greedy and sampled together, a line a method."""
    groups: dict[str, list[float]] = {}
    for row in answers:
        if row.get("log_ratio") is not None:
            groups.setdefault(row["method"], []).append(row["log_ratio"])
    label = "tokens over the full cache's, greedy and sampled answers, log scale"
    figure = _distribution(groups, title, label)
    axes = figure.axes[0]
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    axes.set_xticks(np.log(ticks), [f"{t:g}x" if t >= 1 else f"1/{1 / t:g}x" for t in ticks])
    axes.axvline(0, color="#8C8C8C", linewidth=0.8)
    return figure
