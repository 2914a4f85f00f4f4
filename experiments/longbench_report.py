"""What a LongBench run shows: tables by dataset and length, a plot, made from the rows alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import plots
from experiments.report import Column, interval, markdown, scalar_name, table
from experiments.runner import Run
from kvjax.evaluation.longbench import BUCKETS, DATASETS, bucket
from kvjax.evaluation.rows import Encoded
from kvjax.metrics import mean_interval, mean_of_means

FIELDS = (
    "score", "token_match", "answer_nll", "ratio", "kv_bytes", "new_tokens", "context_tokens",
)  # fmt: skip


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the row's number."""
    arm = f"{scalar_name(row['method'])}_{row['target_ratio']:.1f}x"
    where = f"{row['task']}/{arm}"
    yield f"longbench/score_percent/{where}", row["score"], int(row["id"])
    yield f"longbench/new_tokens/{where}", row["new_tokens"], int(row["id"])
    yield f"memory/kv_bytes/{where}", row["kv_bytes"], int(row["id"])


def report(
    config: Any,
    run: Run,
    name: str,
    questions: Sequence[Encoded],
    left_out: Mapping[str, int],
    absent: Sequence[str],
) -> None:
    """Tables, a plot and the summary."""
    rows = with_differences(run.rows)
    how = "question-aware" if config.aware else "question-agnostic"
    sections, every = [], []
    for dataset in dict.fromkeys(row["task"] for row in rows):
        means = means_of([row for row in rows if row["task"] == dataset])
        every += [mean | {"task": dataset} for mean in means]
        title = (
            f"{name}, {config.max_tokens:,} tokens, {how}, {dataset} ({DATASETS[dataset].metric},"
            f" {DATASETS[dataset].group}), n = {means[0]['n']}"
        )
        table(means, COLUMNS[:6], title)
        sections.append(markdown(means, COLUMNS, title))
    overall = mean_of_datasets(every, rows)
    if len({mean["task"] for mean in every}) > 1:
        sections.insert(0, markdown(overall, _overall_columns(every), "Mean of the datasets"))
        drawn, title = overall, f"LongBench, mean of {len(left_out)} datasets, {name}, {how}"
    else:
        drawn, title = every, f"LongBench {every[0]['task']}, {name}, {how}, n = {every[0]['n']}"
    compressed = [mean for mean in drawn if mean["method"] != "full"]
    if len(ratios := {mean["target_ratio"] for mean in compressed}) == 1:
        title, label = f"{title}, {ratios.pop():g}x", "score less the full cache's, points"
        figure = plots.by_method(compressed, "difference", title=title, y_label=label)
    else:
        figure = plots.against_bytes(drawn, "score", title=title, y_label="score, %")
    run.save_figure("score", figure)
    if config.extended:
        sections.append(by_length(rows, questions))
    sections.append(notes(config, questions, left_out, absent))
    run.write_summary("\n".join(sections))


def with_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its score less the full cache's on the same sample."""
    full = {(r["task"], r["id"]): r["score"] for r in rows if r["method"] == "full"}
    return [row | {"difference": row["score"] - full[row["task"], row["id"]]} for row in rows]


def means_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a method and ratio: means, intervals, and shares in percent."""
    means = plots.group_means(rows, ["method", "target_ratio"], FIELDS)
    for mean in means:
        own = [r for r in rows if all(r[f] == mean[f] for f in ("method", "target_ratio"))]
        for field in ("score", "difference"):
            middle, low, high, _ = mean_interval([r[field] for r in own], "bootstrap")
            mean |= {field: middle}
            if mean["method"] != "full" or field == "score":
                mean |= {f"{field}_low": low, f"{field}_high": high}
        mean["empty"] = 100 * float(np.mean([r["empty"] for r in own]))
        mean["cut_short"] = 100 * float(np.mean([r["finish_reason"] == "limit" for r in own]))
        mean["limit"] = own[0]["limit"]
    return means


def mean_of_datasets(
    means: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row a method and ratio: every dataset counts as much, as LongBench averages.

    Args:
        means: of `means_of`, with the dataset as `task`.
        rows: of `with_differences`, for the intervals.
    """
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for mean in means:
        groups.setdefault((mean["method"], mean["target_ratio"]), []).append(mean)
    found = []
    for (method, ratio), own in groups.items():
        found.append(
            {"method": method, "target_ratio": ratio, "limit": own[0]["limit"]}
            | {f: float(np.mean([m[f] for m in own])) for f in ("kv_bytes", "ratio")}
            | {m["task"]: m["score"] for m in own}
        )
        for field in ("score", "difference") if method != "full" else ("score",):
            middle, low, high, _ = mean_of_means([
                [r[field] for r in rows
                 if (r["task"], r["method"], r["target_ratio"]) == (m["task"], method, ratio)]
                for m in own
            ])  # fmt: skip
            found[-1] |= {field: middle, f"{field}_low": low, f"{field}_high": high}
    return found


COLUMNS = [
    Column("method", "method"),
    Column("asked", lambda r: f"{r['target_ratio']:.1f}x"),
    Column("stored", lambda r: f"{r['ratio']:.2f}x"),
    Column("KV MB", lambda r: r["kv_bytes"] / 1e6, ".2f"),
    Column("score %", interval("score", ".1f")),
    Column("less full", interval("difference", "+.1f")),
    Column("reference tokens right %", interval("token_match", ".1f", 100)),
    Column("reference NLL", interval("answer_nll", ".2f")),
    Column("new tokens", "new_tokens", ".0f"),
    Column("empty %", "empty", ".0f"),
    Column("cut short %", "cut_short", ".0f"),
    Column("note", "limit"),
]


def _overall_columns(means: Sequence[Mapping[str, Any]]) -> list[Column]:
    tasks = dict.fromkeys(mean["task"] for mean in means)
    return [
        *COLUMNS[:4],
        Column("mean %", interval("score", ".1f")),
        Column("less full", interval("difference", "+.1f")),
        *(Column(t, t, ".1f") for t in tasks),
    ]


def by_length(rows: Sequence[Mapping[str, Any]], questions: Sequence[Encoded]) -> str:
    """LongBench-E's table: mean score by the row's length in words, with n in brackets."""
    lengths = {(q.row.task, q.row.id): q.row.extra.get("length") or 0 for q in questions}
    lines: dict[tuple[str, str, float], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault((row["task"], row["method"], row["target_ratio"]), {
            "task": row["task"], "method": row["method"], "target_ratio": row["target_ratio"],
        })  # fmt: skip
        line.setdefault(bucket(lengths[row["task"], row["id"]]), []).append(row["score"])

    def cell(name):
        return lambda r: f"{np.mean(r[name]):.1f} ({len(r[name])})" if name in r else None

    columns = [Column("dataset", "task"), Column("method", "method"),
               Column("asked", "target_ratio", ".1f")]  # fmt: skip
    columns += [Column(name, cell(name)) for name in BUCKETS]
    return markdown(list(lines.values()), columns, "Score in % by length in words (n)")


def notes(
    config: Any, questions: Sequence[Encoded], left_out: Mapping[str, int], absent: Sequence[str]
) -> str:
    """How to read the tables."""
    cut = [q.removed for q in questions if q.removed]
    middle = f", on average {np.mean(cut):,.0f} of them" if cut else ""
    wording = "the official prompts" if config.prompts else "prompts in our own wording"
    short = ", ".join(f"{name} {count}" for name, count in left_out.items() if count)
    lines = [
        f"Harness: kvjax, {wording}; LongBench's metrics and first-line rule; greedy; a chat turn"
        " except for trec, triviaqa, samsum, lcc and repobench-p. Scores are comparable within this"
        " table only.",
        f"Prompts are cut to {config.max_tokens:,} tokens in the middle: {len(cut)} of"
        f" {len(questions)} rows lost tokens{middle}. An answer has at most"
        f" {config.max_new_tokens or 'the dataset limit of'} tokens; cut short: it reached the"
        " limit. Left out as shorter than"
        f" {config.min_tokens:,} tokens: {short or 'none'}.",
        "Stored: full bfloat16 bytes over live body and metadata bytes, measured on the arrays."
        " Brackets: 95 % bootstrap interval over samples (within datasets), of the paired"
        " differences in `less full`. Reference: the first one, teacher forced, at most as many"
        " tokens as an answer.",
        "An evictor that keeps everything reproduced the full cache exactly (checked on the first"
        " batch; the run fails otherwise).",
    ]
    return "\n\n".join([*lines, *absent]) + "\n"
