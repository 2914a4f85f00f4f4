"""What a needle grid shows: a heat map a method, and a table, made from the rows alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.report import Column, interval, markdown, scalar_name, table
from experiments.runner import Run

FIELDS = ("digits", "whole", "token_match", "answer_nll", "ratio", "kv_bytes")
SHARES = ("digits", "whole", "token_match", "asked", "other")
POSITIVE = {"answer_nll": (0.0, float("inf"))}


def name_of(config: Any, depth: float, seed: int) -> str:
    """Id of a prompt: all that makes it but its length."""
    many = f", {config.turns} numbers" if config.turns > 1 else ""
    return f"depth {depth:.3f}, seed {seed}, {config.digits} digits in {_haystack(config)}{many}"


def depth_of(row: Mapping[str, Any]) -> float:
    """Depth of a row's needle, a share of the haystack."""
    return float(re.match(r"depth ([\d.]+)", row["id"])[1])


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the context's length."""
    arm = f"{scalar_name(row['method'])}_{row['target_ratio']:.1f}x"
    where = f"{row['task']}/{scalar_name(row['id'])}/{arm}"
    yield f"needle/digits_percent/{where}", row["score"], row["length"]
    yield f"needle/token_match_percent/{where}", 100 * row["token_match"], row["length"]


def report(config: Any, run: Run, name: str, absent: Sequence[str]) -> None:
    """Heat maps, tables and the summary."""
    rows = [
        row
        | {"digits": row["score"] / 100, "whole": float(row["score"] == 100)}
        | {"depth": depth_of(row)}
        for row in run.rows
    ]
    forms = list(dict.fromkeys(row["task"] for row in rows))
    cell = f"{config.prompts} prompts a cell" if config.prompts > 1 else "1 prompt a cell"
    what = f"{name}, {config.digits} digits, haystack {_haystack(config)}, {cell}"
    for ratio in config.ratios:
        shown = [r for r in rows if r["method"] == "full" or r["target_ratio"] == round(ratio, 4)]
        title = f"{what}, {ratio:g}x asked"
        run.save_figure(f"grid_{ratio:g}x", heat_maps(shown, forms, title))
    sections = []
    by = ["task", "method", "target_ratio"]
    means = plots.group_means(per_number(rows, by, FIELDS), by, FIELDS, SHARES, POSITIVE)
    for form in forms:
        own = _with_lengths([m for m in means if m["task"] == form], rows, config.lengths)
        count, size = own[0]["n"], f"{max(config.lengths):,} tokens at most"
        title = f"{name}, {size}, {_spoken(form)}, n = {count} numbers at each length"
        table(own, _columns(config.lengths, brief=True), title)
        sections.append(markdown(own, _columns(config.lengths), title))
    if len(forms) > 1:
        sections.insert(0, compare(rows, forms))
    sections.append(notes(config, absent))
    run.write_summary("\n".join(sections))


def per_number(
    rows: Sequence[Mapping[str, Any]], by: Sequence[str], fields: Sequence[str]
) -> list[dict[str, Any]]:
    """Means over the lengths that a number was hidden in: such prompts are not independent.

    Args:
        rows: a prompt each, at one length.
        by: fields that are kept apart.
        fields: numeric fields to average.

    Returns:
        A row a number: `by`, id and `fields`.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in (*by, "id")), []).append(row)
    return [
        dict(zip((*by, "id"), key, strict=True))
        | {field: float(np.mean([row[field] for row in own])) for field in fields}
        for key, own in groups.items()
    ]


def _haystack(config: Any) -> str:
    return Path(config.haystack).name  # of a folder its last part: noise and text are no paths


def _spoken(form: str) -> str:
    """The form as a heading."""
    text = {
        "after_context": "compressed before the question",
        "after_question": "compressed after the question",
    }.get(form)
    return text or f"compressed after turn 1, asked in turn {form.rsplit('_', 1)[1]}"


def _with_lengths(
    means: Sequence[dict], rows: Sequence[Mapping], lengths: Sequence[int]
) -> list[dict]:
    """Add the mean score and the stored ratio at each length."""
    for mean in means:
        for length in lengths:
            own = [
                r for r in rows if r["length"] == length
                and all(r[f] == mean[f] for f in ("task", "method", "target_ratio"))
            ]  # fmt: skip
            if own:
                score, stored = (np.mean([r[f] for r in own]) for f in ("score", "ratio"))
                mean[f"at_{length}"] = f"{score:.0f} ({stored:.2f}x)"
                mean["limit"] = own[0]["limit"] and own[0]["limit"].partition(",")[0]
    return list(means)


def _columns(lengths: Sequence[int], brief: bool = False) -> list[Column]:
    columns = [
        Column("method", "method"),
        Column("asked", lambda r: f"{r['target_ratio']:.1f}x"),
        Column("n", "n"),
        Column("digits right %", interval("digits", ".0f", 100)),
        Column("exact %", interval("whole", ".0f", 100)),
        Column("tokens right, forced %", interval("token_match", ".0f", 100)),
    ]
    if not brief:
        columns.append(Column("answer NLL", interval("answer_nll", ".2f")))
        columns += [Column(f"{n:,} tokens (stored)", f"at_{n}") for n in lengths]
        columns.append(Column("note", "limit"))
    return columns


def compare(rows: Sequence[Mapping[str, Any]], forms: Sequence[str]) -> str:
    """What a method loses when the question that it was compressed after is another one.

    The difference is paired: the same context, number and method.
    """
    asked, other = forms
    named = ("method", "target_ratio", "length", "id")
    before = {tuple(r[f] for f in named): r for r in rows if r["task"] == asked}
    pairs = []
    for row in rows:
        if row["task"] == other:
            twin = before[tuple(row[f] for f in named)]
            pairs.append(
                {f: row[f] for f in named}
                | {"asked": twin["digits"], "other": row["digits"]}
                | {"lost": twin["digits"] - row["digits"]}
            )
    by, fields = ["method", "target_ratio"], ["asked", "other", "lost"]
    bounds = {"lost": (-1.0, 1.0)}
    means = plots.group_means(per_number(pairs, by, fields), by, fields, SHARES, bounds)
    last = other.rsplit("_", 1)[1]
    columns = [
        Column("method", "method"),
        Column("ratio", lambda r: f"{r['target_ratio']:.1f}x"),
        Column("n", "n"),
        Column("asked in turn 1, digits right %", interval("asked", ".0f", 100)),
        Column(f"asked in turn {last}, digits right %", interval("other", ".0f", 100)),
        Column("lost", interval("lost", ".0f", 100)),
    ]  # fmt: skip
    return markdown(means, columns, "The question that eviction saw, and another one")


def notes(config: Any, absent: Sequence[str]) -> str:
    """How to read maps and tables."""
    lines = [
        "Digits right: digits of the greedily generated number that stand in their place, over"
        " those of the answer; a wrong number of the right length gets about 10 % by chance."
        " Forced: share of the answer's tokens that are the likeliest when the answer is given."
        " Brackets: 95 % interval over numbers at all depths; one number is hidden in a context of"
        " each length, whose mean counts once. Stored: full bfloat16"
        " bytes over live body and metadata bytes, measured on the arrays.",
        f"Seed {config.seed}. An evictor that keeps everything reproduced the full cache exactly"
        " (checked on the first batch; the run fails otherwise).",
    ]
    if config.turns > 1:
        lines.insert(1, (
            f"The context holds {config.turns} numbers; turns 1 to {config.turns - 1} ask for the"
            " others and are answered rightly. All turns go through the compressed cache."
        ))  # fmt: skip
    return "\n\n".join([*lines, *absent]) + "\n"


def heat_maps(rows: Sequence[Mapping[str, Any]], forms: Sequence[str], title: str) -> Figure:
    """Draw one map a method and form: depth in percent down, length across, red to green.

    Args:
        rows: with task, method, length, depth (a share) and score (percent).
        forms: tasks, one row of maps each.
        title: of the figure.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    per_line = min(len(methods), 4)
    lines_each = -(-len(methods) // per_line)
    lines = len(forms) * lines_each
    width = max(1.7, 0.62 * len(lengths)) + 0.5
    height = max(1.9, 0.3 * len(depths)) + 0.6
    with matplotlib.rc_context({"font.size": 9, "figure.dpi": 130}):
        figure = Figure(
            figsize=(per_line * width + 1.2, lines * height + 0.7), layout="constrained"
        )
        every = figure.subplots(lines, per_line, squeeze=False)
        for axes in every.flat:
            axes.set_axis_off()
        for f, form in enumerate(forms):
            for m, method in enumerate(methods):
                axes = every[f * lines_each + m // per_line][m % per_line]
                axes.set_axis_on()
                own = [r for r in rows if r["task"] == form and r["method"] == method]
                image = _map(axes, own, lengths, depths)
                heading = f"{method}, {_stored(own)}"
                heading += f"\n{form.replace('_', ' ')}" if len(forms) > 1 else ""
                axes.set_title(heading, fontsize=9)
                first, last = m % per_line == 0, m // per_line == lines_each - 1
                axes.set_ylabel("depth, %" if first else "")
                axes.set_xlabel("length, tokens" if last and f == len(forms) - 1 else "")
        bar = figure.colorbar(image, ax=every, shrink=0.9, aspect=30)
        bar.set_label("digits right, % (generated)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        return figure


def _stored(rows: Sequence[Mapping[str, Any]]) -> str:
    """The stored ratios of a map."""
    least, most = (f"{end(row['ratio'] for row in rows):.1f}" for end in (min, max))
    return f"{least}x" if least == most else f"{least}–{most}x"


def _map(axes: Any, rows: Sequence[Mapping], lengths: Sequence[int], depths: Sequence[float]):
    """One map, with the mean score written in every cell."""
    cells = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
        for j, length in enumerate(lengths):
            scores = [r["score"] for r in rows if (r["depth"], r["length"]) == (depth, length)]
            if scores:
                cells[i, j] = np.mean(scores)
    image = plots.percent_map(axes, cells)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
    axes.tick_params(labelsize=8, length=2)
    return image
