"""Figures of the paired quantized-cache study: latency, saved bytes and NLL, one line an arm."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import plots
from experiments.quantized_cache_published import TUTORIAL
from kvjax.evaluation.admission import Gates

Arms = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]

_METHODS = {"kivi": "kivi", "hqq": "quantized_cache"}  # whose colour and marker


def matrix(arms: Arms, name: str, gates: Gates, title: str) -> Figure:
    """Draw latency ratio, saved MiB and NLL difference against context or residual window.

    Args:
        arms: measured rows by (method, bits).
        name: "context" or "window".
        gates: drawn as level lines.
        title: with the model and what is fixed.
    """
    x, x_label = {
        "context": ("context", "context, tokens, log scale"),
        "window": ("residual_length", "residual window, tokens, log scale"),
    }[name]
    panels = (
        ("latency_ratio", 1.0, "time a token / full cache's", gates.max_latency_ratio),
        ("saved_bytes", 2.0**-20, "saved bytes, MiB", None),
        ("nll_difference", 1.0, "NLL - full cache's, nats a token", gates.max_nll_difference),
    )
    published = {"saved_bytes": "saved_mib"}
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(12.4, 4.2))
        every = figure.subplots(1, len(panels))
        for axes, (field, scale, label, gate) in zip(every, panels, strict=True):
            for arm, rows in arms.items():
                _line(axes, arm, rows, x, field, scale)
            _published(axes, name, x, published.get(field, field))
            if gate is not None:
                axes.axhline(gate, color="#B00020", linewidth=1.0, linestyle=(0, (4, 3)),
                             label="gate")  # fmt: skip
            axes.axhline(1.0 if field == "latency_ratio" else 0.0, color="#000000", linewidth=0.8)
            axes.set_xscale("log", base=2)
            ticks = {r[x] for rows in arms.values() for r in rows} | {r[x] for r in TUTORIAL[name]}
            axes.set_xticks(sorted(ticks))
            axes.minorticks_off()
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            axes.set_xlabel(x_label)
            axes.set_ylabel(label)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        handles = dict(zip(*reversed(every[0].get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center",
                      ncols=max(len(handles), 1))  # fmt: skip
        return figure


def _line(axes: Axes, arm: tuple[str, int], rows: Sequence[Mapping], x: str, field: str,
          scale: float) -> None:  # fmt: skip
    """One arm; whiskers where the field has an interval."""
    method, bits = arm
    colour, marker, _ = plots.style(_METHODS[method])
    rows = sorted(rows, key=lambda row: row[x])
    xs, ys = [row[x] for row in rows], [scale * row[field] for row in rows]
    if all(row.get(f"{field}_low") is not None for row in rows):
        errors = [
            [max(0.0, sign * (y - row[field + end])) for y, row in zip(ys, rows, strict=True)]
            for sign, end in ((1, "_low"), (-1, "_high"))
        ]
        axes.errorbar(xs, ys, yerr=errors, fmt="none", color=colour, alpha=0.5, capsize=2.5)
    axes.plot(
        xs, ys, color=colour, marker=marker, linestyle="-" if bits >= 4 else "--",
        markerfacecolor=colour if bits >= 4 else "white", label=f"{method} {bits}-bit",
    )  # fmt: skip


def _published(axes: Axes, name: str, x: str, field: str) -> None:
    """The published run's points, where it has the field."""
    points = [(row[x], row[field]) for row in TUTORIAL[name] if field in row]
    if points:
        axes.plot(
            *zip(*points, strict=True), color="#7A7A7A", marker="^", linestyle=":", zorder=1,
            label=f"published: {TUTORIAL['method']}, {TUTORIAL['model']}",
        )  # fmt: skip
