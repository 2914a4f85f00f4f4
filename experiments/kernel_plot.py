"""Latency against context, with the crossover to the full cache's kernel marked."""

import math
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments import plots
from experiments.kernel_shapes import CASES
from experiments.kernel_tables import Rows, crossover, full_kernel, timed


def draw(rows: Rows, title: str) -> Figure:
    """Latency against context, a panel a model and batch; circles mark where a line meets the
    full-cache kernel's."""
    measured = [
        r for r in timed(rows, "op") if CASES[r["case"]].decode and not _hidden(r, rows)
    ]  # fmt: skip
    places = list(dict.fromkeys((r["model"], r["batch"]) for r in measured))
    with matplotlib.rc_context({"figure.constrained_layout.use": True, "figure.dpi": 110}):
        width = min(len(places), 2) or 1
        height = -(-len(places) // width) or 1
        figure = Figure(figsize=(1.8 + 5.0 * width, 1.2 + 3.4 * height))
        panels = figure.subplots(height, width, squeeze=False).ravel()
        for axes, (model, batch) in zip(panels, places, strict=False):
            here = [r for r in measured if (r["model"], r["batch"]) == (model, batch)]
            base = full_kernel(here, model, batch)
            for name in dict.fromkeys(map(line_name, here)):
                points = [r for r in here if line_name(r) == name]
                points.sort(key=lambda r: r["context"])
                colour, marker, dash = _style(points[0])
                xs, ys = [r["context"] for r in points], [1e6 * r["seconds"] for r in points]
                axes.plot(xs, ys, color=colour, marker=marker, linestyle=dash, label=name)
                meet = crossover(points, base) if points[0]["case"] != "pooled_decode" else None
                if meet is not None and meet > xs[0]:
                    axes.plot([meet], [_at(base, meet)], "o", markersize=13, fillstyle="none",
                              color=colour)  # fmt: skip
            axes.set_title(f"{model}, batch {batch}", loc="left")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(sorted({r["context"] for r in here}))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.set_xlabel("context, tokens")
            axes.set_ylabel("one layer's attention, us")
        for axes in panels[len(places) :]:
            axes.set_axis_off()
        if places:
            figure.legend(*_labels(panels), loc="outside right upper", fontsize=8)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        return figure


def line_name(row: dict[str, Any]) -> str:
    """A case and how it ran."""
    name = row["case"] if row["impl"] in ("gpu", "tpu", "xla") else row["impl"]
    if row["impl"] == "triton":
        return f"{row['case']} (triton)"
    return "full cache: pooled_decode" if name == "pooled_decode" else name


def _hidden(row: dict[str, Any], rows: Rows) -> bool:
    """XLA is drawn only where it is the device's own way."""
    own = {r["impl"] for r in rows if r.get("kind") == "op"} & {"gpu", "tpu"}
    return row["impl"] == "xla" and bool(own)


_METHODS = {
    "pooled_decode": "full", "quant_decode": "kivi", "codebook_decode": "turboquant",
    "gear_decode": "gear", "anchor_decode": "anchorkv", "ragged_decode": "adakv",
}  # fmt: skip


_FULL_CACHE = {
    "eager": ("#8C8C8C", "v", ":"),
    "dot_product_attention:xla": ("#8C8C8C", "x", "--"),
    "dot_product_attention:cudnn": ("#8C8C8C", "+", "-"),
}


def _style(row: dict[str, Any]) -> tuple[str, str, str]:
    op = CASES[row["case"]].op
    if row["impl"] in _FULL_CACHE:
        return _FULL_CACHE[row["impl"]]
    if op == "paged_decode":
        return "#000000", "s", ":"
    colour, marker, _ = plots.style(_METHODS[op])
    dashes = (":", "-.") if row["impl"] == "triton" else ("-", "--")
    return colour, marker, dashes[row["case"].endswith("2bit")]


def _at(base: Rows, context: float) -> float:
    """Microseconds of the full cache at a context between two measured ones."""
    points = sorted((r["context"], r["seconds"]) for r in base)
    for (left, a), (right, b) in zip(points, points[1:], strict=False):
        if left <= context <= right:
            part = math.log(context / left) / math.log(right / left)
            return 1e6 * (a + part * (b - a))
    return 1e6 * points[-1][1]


def _labels(panels: Any) -> tuple[list, list[str]]:
    """Handles and labels of all panels, each label once."""
    pairs = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            pairs.setdefault(label, handle)
    return list(pairs.values()), list(pairs)
