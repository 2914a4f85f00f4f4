"""Heat map of tasks against methods: what each arm scores, and what its gold tokens lose."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.plots import percent_map

Rows = Sequence[Mapping[str, Any]]


def heat_map(rows: Rows, solved: Sequence[str], title: str) -> Figure:
    """Draw two maps, tasks by arms: score, and share of the gold answer's tokens that are right.

    Args:
        rows: rows of the record with `task`, `method`, `target_ratio`, `score`, `token_match`.
        solved: tasks that the full cache solves; the others' names stand in parentheses.
        title: with the model and n.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    found = dict.fromkeys((row["method"], row["target_ratio"]) for row in rows)
    arms = sorted(found, key=lambda arm: arm[0] != "full")
    cells: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["method"], row["target_ratio"]), []).append(row)

    def grid(field: str, scale: float) -> np.ndarray:
        return np.array(
            [[scale * np.mean([row[field] for row in cells[task, *arm]]) for arm in arms]
             for task in tasks]
        )  # fmt: skip

    with matplotlib.rc_context({"font.size": 9, "figure.constrained_layout.use": True}):
        width = 2.6 + 0.46 * len(arms)
        figure = Figure(figsize=(max(width, 6.0), 2 * (1.2 + 0.3 * len(tasks)) + 1.0), dpi=130)
        panels = figure.subplots(2, 1, sharex=True)
        names = [task if task in solved else f"({task})" for task in tasks]
        _map(panels[0], grid("score", 1.0), names, "score of the generated answer, %")
        _map(panels[1], grid("token_match", 100.0), names, "gold tokens right, teacher forced, %")
        labels = [m if m == "full" else f"{m} {r:.1f}x" for m, r in arms]
        panels[1].set_xticks(range(len(arms)), labels, rotation=60, ha="right",
                             rotation_mode="anchor")  # fmt: skip
        panels[1].set_xlabel("method and compression asked for")
        for axes in panels:
            for i in range(1, len(arms)):
                if arms[i][0] != arms[i - 1][0]:
                    axes.axvline(i - 0.5, color="white", linewidth=2.5)
        figure.suptitle(
            f"{title}\n(in parentheses: not solved by the full cache)", x=0.01, ha="left",
            fontsize=10,
        )  # fmt: skip
        return figure


def _map(axes: Axes, values: np.ndarray, names: Sequence[str], title: str) -> None:
    """One map with its numbers written in."""
    image = percent_map(axes, values)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.figure.colorbar(image, ax=axes, pad=0.01, label="%", fraction=0.03)
