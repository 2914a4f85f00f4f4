"""What negative samples show: tables, plots and the verdict on each method and task."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments import negative_study, plots
from experiments.report import Column, interval, markdown, table
from experiments.runner import Run

_TASK_COLOURS = ("#4477AA", "#CC6677", "#DDCC77", "#117733", "#88CCEE", "#AA4499", "#999933")
_NAMES = {"streamingllm": "streaming_llm"}  # as the palette has it


def report(config: Any, run: Run, source: str, arms: Sequence[str]) -> None:
    """Tables, plots and summary.md, from the rows alone."""
    failures = [row for row in run.rows if row["kind"] == "failures"]
    rule, margin = config.rule, config.margin
    chosen = [r for r in failures if r["rule"] == rule and r["margin_percent"] == margin]
    found = [counts(failures, rule, config.margins), ratios(chosen, rule, margin)]
    found += [losses(chosen, rule, margin)]
    sets = [row for row in run.rows if row["kind"] == "set"]
    found.append(written(sets, config))
    verdicts = [row for row in run.rows if row["kind"] == "verdict"]
    found.append(recommendation(verdicts, config))
    if any(row["kind"] == "count" for row in run.rows):
        found += negative_study.sections(run.rows)
    run.write_summary(
        f"Scores: {source}; arms {', '.join(f'`{arm}`' for arm in arms)}.\n\n" + "\n".join(found)
    )
    for each in config.rules:
        run.save_figure(f"failures_{each}", failure_plot(failures, each, source))
    run.save_figure("composition", composition_plot(chosen, rule, margin, source))


def counts(failures: Sequence[Mapping[str, Any]], rule: str, margins: Sequence[float]) -> str:
    """Number of negative samples by set of methods and margin."""
    lines = []
    for methods in dict.fromkeys(row["methods"] for row in failures):
        line: dict[str, Any] = {"methods": methods}
        for row in failures:
            if (row["methods"], row["rule"], row["task"]) == (methods, rule, "all"):
                line |= {"benign": row["benign"], f"{row['margin_percent']:g}": row["negatives"]}
        lines.append(line)
    columns = [Column("negative for", "methods"), Column("benign", "benign", "d")]
    columns += [Column(f"{m:g} %", f"{m:g}", "d") for m in margins]
    title = f"Negative samples by loss (benign: baseline at least its dataset's {rule})"
    table(lines, columns, title)
    return markdown(lines, columns, title)


def ratios(rows: Sequence[Mapping[str, Any]], rule: str, margin: float) -> str:
    """Failure ratio of each task at one margin."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = []
    for methods in dict.fromkeys(row["methods"] for row in rows):
        cells = {r["task"]: r for r in rows if r["methods"] == methods}
        text = interval("failure_ratio", ".1f", 100)
        lines.append({"methods": methods} | {t: text(cells[t]) for t in tasks})
    sizes = {row["task"]: row["benign"] for row in rows}
    columns = [Column("negative for", "methods")]
    columns += [Column(f"{t}, % of {sizes[t]}", t) for t in tasks]
    title = f"Failure ratio at a loss of {margin:g} %: negative over benign samples"
    table(lines, columns, title)
    return markdown(lines, columns, f"{title} ({rule}; 95 % Wilson intervals)")


def losses(rows: Sequence[Mapping[str, Any]], rule: str, margin: float) -> str:
    """Scores of the full cache and of each method on the negative samples themselves."""
    lines = []
    for row in rows:
        if row["negatives"]:
            lines.append(dict(row) | {f"score {m}": v for m, v in row["scores"].items()})
    methods = list(dict.fromkeys(m for row in rows for m in row["scores"]))
    columns = [Column("negative for", "methods"), Column("task", "task"), Column("n", "negatives")]
    columns += [Column("share %", lambda r: 100 * r["share"], ".1f")]
    columns += [Column(m, f"score {m}", ".1f") for m in methods]
    title = f"Mean scores on the negative samples ({rule}, {margin:g} %), 0 to 100"
    return markdown(lines, columns, title)


def written(rows: Sequence[Mapping[str, Any]], config: Any) -> str:
    """The files of negative samples."""
    columns = [
        Column("file", "file"),
        Column("samples", "samples", "d"),
        Column("positives", "positives", "d"),
        Column("left out: text of a positive", "like_a_positive", "d"),
        Column("left out: text twice", "duplicates", "d"),
        Column("benign", "benign", "d"),
    ]
    note = "" if config.rows else " Texts were not compared: no --rows.\n"
    text = f"\nRead by `--only` of the experiments that take these tasks.{note}\n"
    return markdown(rows, columns, f"Negative sets at {config.margin:g} %") + text


def recommendation(rows: Sequence[Mapping[str, Any]], config: Any) -> str:
    """Allow or deny each method on each task."""
    columns = [
        Column("method", "method"),
        Column("task", "task"),
        Column("n", "n", "d"),
        Column("score", "baseline", ".1f"),
        Column("loss, points", interval("loss", "+.1f")),
        Column("failures %", interval("failure_ratio", ".1f", 100)),
        Column("verdict", "verdict"),
        Column("because", "because"),
    ]
    table(rows, columns, "recommendation")
    rule = (
        f"\nAllow where both upper bounds hold: mean loss at most {config.max_loss:g} points over"
        f" all samples of the task, and at most {config.max_failures:g} % of its benign samples"
        f" lose {config.margin:g} % or more of their score ({config.rule}). Deny otherwise:"
        " *shown* where a lower bound is already beyond its limit, *not ruled out* where there are"
        " too few samples to say. 95 % intervals: t for the paired loss, Wilson for the ratio.\n"
    )
    return markdown(rows, columns, "Recommendation for each task") + rule


def failure_plot(rows: Sequence[Mapping[str, Any]], rule: str, source: str) -> Figure:
    """Number of negative samples against the loss, a line a method or intersection."""
    drawn = [r for r in rows if r["rule"] == rule and r["task"] == "all"]
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(8.2, 4.3))
        axes = figure.add_subplot()
        names = list(dict.fromkeys(r["methods"] for r in drawn))
        joint = [name for name in names if " and " in name or name.startswith("all ")]
        for name in names:
            points = sorted((r["margin_percent"], r["negatives"]) for r in drawn
                            if r["methods"] == name)  # fmt: skip
            if name in joint:
                shade = 0.25 + 0.45 * joint.index(name) / max(len(joint) - 1, 1)
                look = {"color": str(shade), "marker": "os^Dv<>"[joint.index(name) % 7],
                        "linestyle": "--", "markersize": 5}  # fmt: skip
            else:
                colour, marker, _ = plots.style(palette_name(name))
                settings = [n for n in names if n.split(":")[0] == name.split(":")[0]]
                dash = ("-", (0, (4, 1)), (0, (1, 1)), "-.")[settings.index(name) % 4]
                look = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 6}
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.6, **look)
        margins = sorted({r["margin_percent"] for r in drawn})
        axes.set_xscale("log", base=2)
        axes.set_xticks(margins, [f"{m:g}" for m in margins])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("loss of at least, % of the full cache's score (log scale)")
        axes.set_ylabel("negative samples")
        benign = drawn[0]["benign"]
        axes.set_title(
            f"{source}\n{benign} benign samples (full cache at least the dataset's {rule})",
            loc="left", fontsize=10,
        )  # fmt: skip
        figure.legend(loc="outside right upper")
        return figure


def composition_plot(
    rows: Sequence[Mapping[str, Any]], rule: str, margin: float, source: str
) -> Figure:
    """What the negative samples of each set are made of, a stacked bar each."""
    names = list(dict.fromkeys(r["methods"] for r in rows))
    tasks = [t for t in dict.fromkeys(r["task"] for r in rows) if t != "all"]
    cells = {(r["methods"], r["task"]): r for r in rows}
    with matplotlib.rc_context(plots.STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(8.6, 1.5 + 0.42 * len(names)))
        axes = figure.add_subplot()
        for y, name in enumerate(names):
            left = 0.0
            for i, task in enumerate(tasks):
                share = 100 * cells[name, task]["share"]
                bar = axes.barh(y, share, left=left, height=0.7, edgecolor="white",
                                color=_TASK_COLOURS[i % len(_TASK_COLOURS)],
                                label=task if y == 0 else None)  # fmt: skip
                if share >= 6:
                    dark = i % len(_TASK_COLOURS) in (0, 1, 3, 5)
                    colour = "white" if dark else "black"
                    axes.bar_label(bar, [f"{share:.0f}"], label_type="center", color=colour,
                                   fontsize=8)  # fmt: skip
                left += share
        labels = [f"{name}  (n = {cells[name, 'all']['negatives']})" for name in names]
        axes.set_yticks(range(len(names)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the negative samples, %")
        what = f"loss of at least {margin:g} % (full cache at least the dataset's {rule})"
        axes.set_title(f"{source}\n{what}", loc="left", fontsize=10)
        figure.legend(loc="outside right upper")
        return figure


def palette_name(arm: str) -> str:
    """The method of an arm, as the palette names it."""
    method = arm.split(":")[0] if arm.split(":")[0] in _NAMES else arm
    return _NAMES.get(method, arm)
