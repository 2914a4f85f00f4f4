"""What the AnchorKV sweep shows: tables, plots and summary, made from the rows alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments import plots
from experiments.report import Column, interval, markdown, table
from experiments.runner import Run

# The prototype's relative error on 2,048 tokens of natural English, layers 0, 4, ..., 29.
PROTOTYPE = {
    ("streaming_llm", 5): 0.295, ("streaming_llm", 10): 0.402, ("streaming_llm", 20): 0.470,
    ("snapkv", 5): 0.194, ("snapkv", 10): 0.295, ("snapkv", 20): 0.384,
    ("anchorkv:paper_short", 5): 0.401, ("anchorkv:paper_short", 10): 0.360,
    ("anchorkv", 5): 0.097, ("anchorkv", 10): 0.123, ("anchorkv", 20): 0.162,
}  # fmt: skip
PROBED = "0 4 9 14 19 24 29"


def probed(layers: int) -> list[int]:
    """The layers of the prototype's table, where the model has them."""
    return [layer for layer in (0, 4, 9, 14, 19, 24, 29) if layer < layers]


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the prompt's number."""
    arm = f"{row['method'].replace(':', '_')}_{row['target_ratio']:.1f}x"
    names = {
        "answer/token_match_share": "token_match", "answer/nll_nats": "answer_nll",
        "continuation/kl_nats": "kl", "continuation/nll_nats": "nll",
        "attention/error_share": "error", "memory/kv_bytes": "kv_bytes",
    }  # fmt: skip
    for tag, field in names.items():
        yield f"{tag}/{row['length']}_{row['task']}/{arm}", row.get(field), row["prompt"]


FIELDS = (
    "exact", "generated_exact", "token_match", "answer_nll", "kl", "nll", "top5", "top1", "error",
    "error_probed", "first_divergence", "ratio", "removed", "kv_bytes", "tail_bytes",
)  # fmt: skip


def report(config: Any, run: Run, name: str) -> None:
    """Tables, plots and summary, from the rows alone."""
    sections, unsolved = [], {}
    for length in config.lengths:
        here = [row for row in run.rows if row["length"] == length]
        if config.task == "needle":
            unsolved[length] = too_hard(here)
            here = [row for row in here if row["task"] not in unsolved[length]]
        if not here:
            sections.append(f"No format is solved by the full cache at {length:,} tokens.\n")
            continue
        means = plots.group_means(here, ["method", "target_ratio"], FIELDS)
        limits = {(r["method"], r["target_ratio"]): r["limit"] for r in here}
        for mean in means:
            mean["limit"] = limits[mean["method"], mean["target_ratio"]]
            mean["prototype"] = PROTOTYPE.get((mean["method"], mean["target_ratio"]))
            step = round(mean["ratio"] * 100)
            for field in ("exact", "kl", "error"):
                if mean.get(field) is not None:
                    run.log(f"sweep/{field}_share/{length}/{mean['method']}".replace(":", "_"),
                            mean[field], step)  # fmt: skip
        count = means[0]["n"]
        how = "question-aware" if config.aware else "question-agnostic"
        what = how if config.task == "needle" else "running text"
        title = f"{name}, {length:,} tokens, {what}, n = {count}"
        table(means, columns_of(config, brief=True), title)
        sections.append(markdown(means, columns_of(config), title))
        draw(run, config, here, means, title, length)
        if config.task == "needle":
            sections.append(by_format(here, length))
        if unsolved.get(length):
            left = ", ".join(f"{t} ({s:.0%})" for t, s in unsolved[length].items())
            sections.append(
                f"Left out, because the full cache itself solves too few of them: {left}.\n"
            )
    sections.append(notes(config))
    run.write_summary("\n".join(sections))


def too_hard(rows: Sequence[dict]) -> dict[str, float]:
    """Formats that the full cache solves in less than 95 % (four needles: 80 %) of the cases."""
    hard = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        scores = [r["exact"] for r in rows if r["task"] == task and r["method"] == "full"]
        least = 0.8 if "multikey" in task else 0.95
        if scores and np.mean(scores) < least:
            hard[task] = float(np.mean(scores))
    return {} if _tiny(rows) else hard


def _tiny(rows: Sequence[dict]) -> bool:
    """Whether the full cache never answers: random weights, where nothing can be compared."""
    return not any(row["exact"] for row in rows if row["method"] == "full")


def columns_of(config: Any, brief: bool = False) -> list[Column]:
    """Columns of the table; `brief` for a terminal."""
    columns = [
        Column("method", "method"),
        Column("asked", lambda r: f"{r['target_ratio']:.1f}x"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
    ]
    if not brief:
        columns.append(Column("removed", "removed", ".1%"))
    columns.append(Column("KV MB", lambda r: r["kv_bytes"] / 1e6, ".2f"))
    if config.task == "needle":
        columns.append(Column("exact %", interval("exact", ".0f", 100)))
        if config.generate:
            columns.append(Column("generated %", interval("generated_exact", ".0f", 100)))
        columns.append(Column("tokens right %", interval("token_match", ".0f", 100)))
        columns.append(Column("answer NLL", interval("answer_nll", ".2f")))
    columns.append(Column("KL", interval("kl", ".3f")))
    if not brief:
        columns += [
            Column("NLL", "nll", ".3f"),
            Column("top-5", "top5", ".2f"),
            Column("diverges at", "first_divergence", ".1f"),
        ]
    columns.append(Column("error", interval("error", ".3f")))
    if config.task == "text":
        columns.append(Column(f"error, layers {PROBED}", interval("error_probed", ".3f")))
        columns.append(Column("prototype", "prototype", ".3f"))
    return [*columns, Column("note", "limit")]


def lossy(means: Sequence[dict], field: str) -> list[dict]:
    """Rows with more than rounding in `field`: the full cache has no place on a log scale."""
    return [mean for mean in means if mean[field] > 1e-6] or list(means)


def draw(run: Run, config: Any, rows, means, title: str, length: int) -> None:
    """The plots of one length."""
    if config.task == "needle":
        shown = [m | {e: 100 * m[e] for e in m if e.startswith("token_match")} for m in means]
        run.save_figure(
            f"score_{length}",
            plots.against_bytes(shown, "token_match", title=title, y_limits=(0, 100),
                                y_label="answer tokens right, %"),
        )  # fmt: skip
    run.save_figure(
        f"kl_{length}",
        plots.against_bytes(lossy(means, "kl"), "kl", title=title, log_y=True,
                            y_label="KL to the full cache, nats a token"),
    )  # fmt: skip
    run.save_figure(
        f"error_{length}",
        plots.against_bytes(lossy(means, "error"), "error", title=title, log_y=True,
                            y_label="attention-output error, relative"),
    )  # fmt: skip
    layers = []
    for method in dict.fromkeys(r["method"] for r in rows if r["method"].startswith("anchorkv")):
        for ratio in sorted({r["target_ratio"] for r in rows if r["method"] == method}):
            own = [r for r in rows if (r["method"], r["target_ratio"]) == (method, ratio)]
            errors = np.mean([r["error_by_layer"] for r in own], 0)
            if method == "anchorkv" and ratio in config.ratios:
                name = f"{ratio:.0f}x"
                layers += [{"method": name, "layer": i, "error": e} for i, e in enumerate(errors)]
    if layers:
        run.save_figure(
            f"anchorkv_layers_{length}",
            plots.by_layer(layers, "error", in_order=True,
                           title=f"AnchorKV by ratio, {length:,} tokens, n = {means[0]['n']}",
                           y_label="attention-output error, relative"),
        )  # fmt: skip


def by_format(rows: Sequence[dict], length: int) -> str:
    """Token match of each format as markdown."""
    means = plots.group_means(rows, ["task", "method", "target_ratio"], ["token_match", "exact"])
    tasks = list(dict.fromkeys(m["task"] for m in means))
    lines = {}
    for m in means:
        line = lines.setdefault((m["method"], m["target_ratio"]), {
            "method": m["method"], "target_ratio": m["target_ratio"]})  # fmt: skip
        line[m["task"]] = f"{100 * m['token_match']:.0f} ({100 * m['exact']:.0f})"
    columns = [Column("method", "method"), Column("asked", "target_ratio", ".1f")]
    columns += [Column(task, task) for task in tasks]
    title = f"Token match (exact) in %, by format, {length:,} tokens"
    return markdown(list(lines.values()), columns, title)


def notes(config: Any) -> str:
    """How to read the table."""
    return (
        "Stored: full bfloat16 bytes over live body and metadata bytes, measured on the arrays."
        " Brackets: 95 % interval over prompts. NLL and KL: nats a token over the whole"
        " continuation, teacher forced. Error: relative root-mean-square error of the attention"
        " output over the prompt, mean of the layers, at the full cache's own queries (those around"
        " the answer, or of the whole later text)."
        f" Seed {config.seed}. An evictor that keeps everything reproduced the full cache exactly"
        " (checked on the first batch; the run fails otherwise).\n"
    )
