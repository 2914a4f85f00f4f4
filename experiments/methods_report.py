"""What the comparison of methods shows: tables, plots and summary, made from the rows alone."""

from collections.abc import Sequence
from typing import Any

from experiments import plots
from experiments.anchorkv_report import too_hard
from experiments.report import Column, interval, markdown, table
from experiments.runner import Run
from kvjax import registry
from kvjax.metrics import mean_interval

FIELDS = ("exact", "token_match", "answer_nll", "kl", "top1", "error", "ratio", "kv_bytes")
MOST_OF_PREFILL = 0.25  # what compressing may take of the prefill that it follows


def report(config: Any, run: Run, name: str) -> None:
    """Tables, plots and summary."""
    scored = [row for row in run.rows if row["task"] != "timing"]
    timed = [row for row in run.rows if row["task"] == "timing"]
    hard = too_hard(scored) if config.task == "needle" else {}
    scored = [row for row in scored if row["task"] not in hard]
    sections = []
    if scored:
        sections += quality(config, run, scored, name)
    if hard:
        left = ", ".join(f"{task} ({share:.0%})" for task, share in hard.items())
        sections.append(f"Left out, because the full cache itself solves too few: {left}.\n")
    if timed:
        sections.append(timing(timed, name))
    sections.append(settings([row["method"] for row in run.rows]))
    run.write_summary("\n".join(sections))


def quality(config: Any, run: Run, rows: Sequence[dict], name: str) -> list[str]:
    """Scores at equal bytes, at equal tokens, and the plot."""
    score = "token_match" if config.task == "needle" else "top1"
    measured = [row for row in rows if row["basis"] == "measured"]
    means = plots.group_means(measured, ["method", "target_ratio"], FIELDS)
    limits = {(row["method"], row["target_ratio"]): row["limit"] for row in measured}
    for mean in means:
        mean["limit"] = limits[mean["method"], mean["target_ratio"]]
    how = "question-aware" if config.aware else "question-agnostic"
    what = how if config.task == "needle" else "running text"
    title = f"{name}, {config.length:,} tokens, {what}, n = {means[0]['n']}"
    columns = [
        Column("method", "method"),
        Column("asked", lambda r: f"{r['target_ratio']:.1f}x"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("removed", lambda r: f"{1 - 1 / r['ratio']:.1%}"),
    ]
    if config.task == "needle":
        columns.append(Column("tokens right %", interval("token_match", ".0f", 100)))
        columns.append(Column("exact %", interval("exact", ".0f", 100)))
    columns += [
        Column("KL", interval("kl", ".3f")),
        Column("top-1 %", interval("top1", ".1f", 100)),
        Column("error", interval("error", ".3f")),
        Column("note", "limit"),
    ]
    table(means, columns, title)
    percent = [m | {f: 100 * m[f] for f in m if f.startswith(score)} for m in means]
    run.save_figure(
        f"score_{config.length}",
        plots.panels_against_bytes(
            panels(percent), score, title=title, y_limits=(0, 100),
            y_label="answer tokens right, %" if config.task == "needle" else "top-1 agreement, %",
        ),
    )  # fmt: skip
    sections = [markdown(means, columns, title), NOTES.format(seed=config.seed)]
    if any(row["method"].startswith("anchorkv(") for row in measured):
        sections.append(differences(measured, "anchorkv", score))
    same_tokens = [row for row in rows if row["basis"] == "idealised"]
    if same_tokens and config.idealised_ratio:
        sections.append(idealised(config, means, same_tokens, score))
    return sections


def differences(rows: Sequence[dict], base: str, score: str) -> str:
    """Every method minus `base`, prompt by prompt at the same bytes: what each option is worth."""
    cells: dict[tuple, dict[tuple, dict]] = {}
    for row in rows:
        arm = cells.setdefault((row["target_ratio"], row["method"]), {})
        arm[row["task"], row["prompt"]] = row
    lines = []
    for (ratio, method), arm in sorted(cells.items(), key=lambda item: item[0][0]):
        own = cells.get((ratio, base))
        if own is None or method == base:
            continue
        line = {"method": method, "ratio": ratio, "n": len(arm)}
        for field in (score, "answer_nll", "kl"):
            pairs = [(row.get(field), own[key].get(field)) for key, row in arm.items()]
            values = [a - b for a, b in pairs if a is not None and b is not None]
            if values:
                middle, low, high, _ = mean_interval(values, "t")
                line |= {field: middle, f"{field}_low": low, f"{field}_high": high}
        lines.append(line)
    columns = [
        Column("method", "method"),
        Column("asked", lambda r: f"{r['ratio']:.1f}x"),
        Column("n", "n", "d"),
        Column("points", interval(score, "+.0f", 100)),
        Column("answer NLL", interval("answer_nll", "+.3f")),
        Column("KL", interval("kl", "+.3f")),
    ]
    return markdown(lines, columns, f"Minus {base}, paired by prompt, 95 % intervals")


def panels(means: Sequence[dict]) -> dict[str, list[dict]]:
    """Evictors, quantizers, and AnchorKV beside both."""
    groups: dict[str, list[dict]] = {"tokens are evicted": [], "tokens are quantized": []}
    for mean in means:
        method = registry.make(mean["method"])
        both = mean["method"] == "full" or "anchorkv" in mean["method"]
        if both or hasattr(method, "budget"):
            groups["tokens are evicted"].append(mean)
        if both or not hasattr(method, "budget") or "+" in mean["method"]:
            groups["tokens are quantized"].append(mean)
    return {title: rows for title, rows in groups.items() if rows}


def idealised(config: Any, means: Sequence[dict], rows: Sequence[dict], score: str) -> str:
    """Evictors at equal tokens beside equal bytes, and what that does to their order."""
    ratio = config.idealised_ratio
    tokens = {m["method"]: m for m in plots.group_means(rows, ["method"], FIELDS)}
    near = {m["method"]: m for m in means if abs(m["target_ratio"] - ratio) < 1e-6}
    lines = []
    for method, at_tokens in tokens.items():
        at_bytes = near.get(method)
        if at_bytes is None:
            continue
        lines.append({
            "method": method, "ideal": ratio, "measured": at_tokens["ratio"],
            "more": ratio / at_tokens["ratio"] - 1, "tokens": 100 * at_tokens[score],
            "bytes": 100 * at_bytes[score],
        })  # fmt: skip
    for field in ("tokens", "bytes"):
        order = sorted(lines, key=lambda line: -line[field])
        for line in lines:
            line[f"{field}_rank"] = 1 + sum(other[field] > line[field] for other in order)
    moved = [x["method"] for x in lines if x["tokens_rank"] != x["bytes_rank"]]
    text = markdown(
        sorted(lines, key=lambda line: line["bytes_rank"]),
        [
            Column("method", "method"),
            Column("4 B H D counts", "ideal", ".2f"),
            Column("arrays hold", "measured", ".2f"),
            Column("uncounted", "more", ".1%"),
            Column("score at equal tokens", "tokens", ".1f"),
            Column("rank", "tokens_rank", "d"),
            Column("score at equal bytes", "bytes", ".1f"),
            Column("rank", "bytes_rank", "d"),
        ],
        f"Evictors at {ratio:g}x: the same tokens, and the same bytes",
    )
    what = f"changes the rank of {', '.join(moved)}" if moved else "changes no rank"
    return text + f"\nCounting the arrays instead of 4 B H D {what}.\n"


def timing(rows: Sequence[dict], name: str) -> str:
    """Compress and step times, as shares of prefill and of the full cache's step."""
    full = next((row for row in rows if row["method"] == "full"), None)
    lines = []
    for row in rows:
        line = dict(row)
        line["share"] = row["compress_seconds"] / row["prefill_seconds"]
        line["sums"] = row["column_sums_seconds"] / row["prefill_seconds"] or None
        line["step_ratio"] = row["step_seconds"] / full["step_seconds"] if full else None
        line["over"] = "over 25 %" if line["share"] > MOST_OF_PREFILL else None
        lines.append(line)
    columns = [
        Column("method", "method"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
        Column("compress, s", "compress_seconds", ".3f"),
        Column("of prefill", "share", ".1%"),
        Column("column sums in prefill", "sums", ".1%"),
        Column("step, ms", lambda r: 1e3 * r["step_seconds"], ".1f"),
        Column("of full's", "step_ratio", ".2f"),
        Column("", "over"),
    ]
    first = rows[0]
    title = (
        f"Time at {first['length']:,} tokens, batch 1: {name}, prefill"
        f" {first['prefill_seconds']:.2f} s"
    )
    table(lines, columns, title)
    worst = max(lines, key=lambda line: line["share"])
    return markdown(lines, columns, title) + (
        f"\nThe dearest compression is {worst['method']}'s: {worst['share']:.1%} of the prefill."
        " Medians on a shared machine; ratios compare what ran within the same minutes.\n"
    )


def settings(labels: Sequence[str]) -> str:
    """What each label stands for; the budget is solved for, every other hyperparameter holds."""
    lines = []
    for label in dict.fromkeys(labels):
        lines.append({"method": label, "setting": f"`{registry.make(label)!r}`"})
    return markdown(lines, [Column("method", "method"), Column("", "setting")], "Settings")


NOTES = (
    "Stored: full bfloat16 bytes over live body and metadata bytes, measured on the arrays."
    " Brackets: 95 % interval over prompts. KL: nats a token over question and answer, teacher"
    " forced. Top-1: share of equal likeliest tokens. Error: relative root-mean-square error of the"
    " attention output over the prompt, mean of the layers. Methods that evict at every step run"
    " through their own steps. Seed {seed}. An evictor that keeps everything reproduced the full"
    " cache exactly (the run fails otherwise).\n"
)
