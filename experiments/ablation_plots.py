"""The two figures of AnchorKV's studies: a number along an axis, and bars by group."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments.plots import STYLE

Rows = Sequence[Mapping[str, Any]]
_COLOURS = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#332288", "#56B4E9", "#882255",
    "#000000", "#999933",
)  # fmt: skip
_MARKERS = "osD^vP<>X*"


def lines(
    panels: Mapping[str, Rows],
    x: str,
    y: str,
    line: str,
    *,
    title: str,
    x_label: str,
    y_label: str | Mapping[str, str],
    log_x: bool = False,
    level: float | None = None,
) -> Figure:
    """Draw means with their 95 % intervals along an axis, a line a group, panels side by side.

    Args:
        panels: title and rows of each panel; a row has `x`, `line`, `y` and perhaps its bounds.
        x: field of the horizontal axis, a number or a category.
        y: field of the vertical axis.
        line: field that names a line.
        title: of the figure, with n.
        x_label: with the unit.
        y_label: with the unit; by panel where they differ.
        log_x: log scale.
        level: a level to draw, such as a bound that was expected.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(1.6 + 4.1 * len(panels), 7.6), 4.0))
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        names = list(dict.fromkeys(r[line] for rows in panels.values() for r in rows))
        for axes, (panel, rows) in zip(every, panels.items(), strict=True):
            ticks = list(dict.fromkeys(r[x] for r in rows))
            words = any(isinstance(tick, str) for tick in ticks)
            for i, name in enumerate(names):
                points = [r for r in rows if r[line] == name and r.get(y) is not None]
                if not points:
                    continue
                at = [ticks.index(r[x]) if words else r[x] for r in points]
                if log_x:  # side by side: intervals of several lines at one place
                    at = [place * (1 + 0.02 * (i - (len(names) - 1) / 2)) for place in at]
                middle = np.array([r[y] for r in points], float)
                bounds = [_bounds(r, y) for r in points]
                axes.errorbar(
                    at, middle, yerr=[middle - [b[0] for b in bounds],
                                      np.array([b[1] for b in bounds]) - middle],
                    color=_COLOURS[i % 10], marker=_MARKERS[i % 10], capsize=2.5, elinewidth=0.9,
                    linewidth=1.4, markersize=5, label=name,
                    linestyle="-" if i < 5 else "--",
                )  # fmt: skip
            if words:
                axes.set_xticks(range(len(ticks)), ticks)
            if log_x:
                axes.set_xscale("log")
                axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks], minor=False)
                axes.minorticks_off()
            if level is not None:
                axes.axhline(level, color="#555555", linewidth=0.9, linestyle=":")
            axes.set_title(panel, loc="left")
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label if isinstance(y_label, str) else y_label[panel])
        if len(names) > 1:
            handles = {}
            for axes in every:
                for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                    handles.setdefault(name, handle)
            figure.legend(handles.values(), handles.keys(), loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        return figure


def bars(
    panels: Mapping[str, Rows],
    group: str,
    y: str,
    bar: str,
    *,
    title: str,
    y_label: str | Mapping[str, str],
) -> Figure:
    """Draw bars with their 95 % intervals: a cluster a group, a colour a bar.

    Args:
        panels: title and rows of each panel.
        group: field that names a cluster.
        y: field of the height.
        bar: field that names a bar.
        title: of the figure, with n.
        y_label: with the unit; by panel where they differ.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(2.2 + 4.2 * len(panels), 8.4), 4.0))
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        names = list(dict.fromkeys(r[bar] for rows in panels.values() for r in rows))
        for axes, (panel, rows) in zip(every, panels.items(), strict=True):
            groups = list(dict.fromkeys(r[group] for r in rows))
            width = 0.82 / len(names)
            for i, name in enumerate(names):
                own = [r for r in rows if r[bar] == name and r.get(y) is not None]
                at = [groups.index(r[group]) + (i - (len(names) - 1) / 2) * width for r in own]
                middle = np.array([r[y] for r in own], float)
                bounds = [_bounds(r, y) for r in own]
                errors = [
                    middle - [b[0] for b in bounds], np.array([b[1] for b in bounds]) - middle
                ]  # fmt: skip
                axes.bar(
                    at, middle, 0.94 * width, yerr=errors, color=_COLOURS[i % 10], label=name,
                    capsize=2, error_kw={"elinewidth": 0.9},
                )  # fmt: skip
            axes.set_xticks(range(len(groups)), [str(g) for g in groups])
            if max(len(str(g)) for g in groups) > 9:
                axes.tick_params(axis="x", rotation=25)
            axes.set_title(panel, loc="left")
            axes.set_ylabel(y_label if isinstance(y_label, str) else y_label[panel])
        handles, labels = every[0].get_legend_handles_labels()
        if len(names) > 1:
            figure.legend(handles, labels, loc="outside right upper")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        return figure


def as_y(field: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """`field` of a row and its bounds under the name "y", so that panels share an axis field."""
    return {f"y{end}": row.get(field + end) for end in ("", "_low", "_high")}


def _bounds(row: Mapping[str, Any], y: str) -> tuple[float, float]:
    low, high = row.get(f"{y}_low"), row.get(f"{y}_high")
    middle = row[y]
    return (
        middle if low is None else min(low, middle),
        middle if high is None else max(high, middle),
    )
