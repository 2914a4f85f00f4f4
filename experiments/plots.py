"""Figures made from rows: a method has one colour and one marker in every plot.

A row is a dict as metrics.jsonl holds it. Where a plot draws an interval it reads the bounds from
`<field>_low` and `<field>_high`, which `group_means` writes.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvjax.metrics import mean_interval

Rows = Sequence[Mapping[str, Any]]

# Paul Tol's and Okabe and Ito's palettes: told apart with every common colour blindness.
_STYLES = {
    "full": ("#000000", "*"),
    "full, float32": ("#555555", "P"),
    "full, other seed": ("#999999", "X"),
    "anchorkv": ("#D55E00", "o"),
    "snapkv": ("#0072B2", "s"),
    "streaming_llm": ("#009E73", "^"),
    "kivi": ("#CC79A7", "D"),
    "random": ("#8C8C8C", "x"),
    "knorm": ("#E69F00", "v"),
    "h2o": ("#56B4E9", "P"),
    "pyramidkv": ("#332288", "<"),
    "adakv": ("#117733", ">"),
    "gear": ("#882255", "h"),
    "turboquant": ("#999933", "p"),
    "expected_attention": ("#661100", "X"),
    "keydiff": ("#44AA99", "d"),
    "tova": ("#AA4499", "8"),
    "quantized_cache": ("#4477AA", "H"),
    "symmetric": ("#AA7744", "^"),
    "snapkv+kivi": ("#EE3377", "*"),
}
_SHARES = ("token_match", "top5", "top1")  # a share's interval ends at 0 and 1
_OTHERS = ("#6699CC", "#888800", "#AA4466", "#4477AA", "#228833", "#AA7744")
_DASHES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 3.2,
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
}


def style(method: str) -> tuple[str, str, str]:
    """Return the colour, marker and line style of a method; the same in every plot and run.

    A preset or variant, written beside the method's name as in `paper_short:anchorkv` or
    `kivi(k_bits=2)`, keeps the colour and marker and gets a dash pattern of its own.
    """
    known = [m for m in _STYLES if re.search(rf"(^|[:+]){re.escape(m)}($|[^a-z_])", method)]
    if not known:
        number = zlib.crc32(method.encode())
        return _OTHERS[number % len(_OTHERS)], "os^Dv<>"[number % 7], "-"
    base = max(known, key=len)
    variant = method.replace(base, "", 1).strip(" :_-/()")
    dash = _DASHES[1 + zlib.crc32(variant.encode()) % 3] if variant else "-"
    return *_STYLES[base], dash


def group_means(
    rows: Rows,
    by: Sequence[str],
    fields: Sequence[str],
    shares: Sequence[str] = _SHARES,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> list[dict[str, Any]]:
    """Return one row a group: `by`, n, and mean, `_low` and `_high` of each field.

    Args:
        rows: rows of one value each; None is left out.
        by: fields that name a group; groups keep the order of their first row.
        fields: numeric fields to average, with 95 % intervals (`kvjax.metrics.mean_interval`).
        shares: fields in [0, 1], whose bounds stay there; one that holds nothing but 0 and 1 is a
            proportion, unless it is of the shares that a mean over tokens makes (the default).
        bounds: least and greatest possible value of other fields; no interval passes them.
    """
    ends = dict.fromkeys(shares, (0.0, 1.0)) | dict(bounds or {})
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in by), []).append(row)
    means = []
    for key, members in groups.items():
        mean = dict(zip(by, key, strict=True)) | {"n": len(members)}
        for field in fields:
            values = [row[field] for row in members if row.get(field) is not None]
            if values:
                # A share of successes is a proportion; a mean that happens to be 0 or 1 is not.
                kind = "wilson" if field.endswith("exact") else "t"
                if field in shares and field not in _SHARES:
                    kind = "auto"
                middle, low, high, _ = mean_interval(values, kind)
                if field in ends and low is not None:
                    low, high = max(low, ends[field][0]), min(high, ends[field][1])
                mean |= {field: middle, f"{field}_low": low, f"{field}_high": high}
        means.append(mean)
    return means


def against_bytes(
    rows: Rows,
    y: str,
    *,
    title: str,
    y_label: str,
    x: str = "kv_bytes",
    x_label: str = "stored bytes of the KV cache, log scale",
    method: str = "method",
    full: str = "full",
    log_y: bool = False,
    y_limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw a score or an error against stored bytes on a log axis, one line a method.

    Args:
        rows: one a point, with `x` in bytes (> 0), `y` and perhaps `<y>_low`, `<y>_high`; rows
            without `y` are left out.
        y: field of the vertical axis.
        title: with the model and n.
        y_label: with the unit.
        x: field of the horizontal axis.
        x_label: with the unit.
        method: field that names the line.
        full: the method drawn as a star with a level line.
        log_y: log scale; values of 0 or less are left out.
        y_limits: limits of the vertical axis, such as (0, 100).
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.3))
        axes = figure.add_subplot()
        drawn = [r for r in rows if r.get(y) is not None and (not log_y or r[y] > 0)]
        for name in _methods(drawn, method):
            points = sorted((r for r in drawn if r[method] == name), key=lambda r: r[x])
            _draw(axes, points, x, y, name, star=name == full, log_y=log_y)
        axes.set_xscale("log")
        _log_ticks(axes, [r[x] for r in drawn])
        if log_y:
            axes.set_yscale("log")
        elif y_limits:
            margin = 0.03 * (y_limits[1] - y_limits[0])
            axes.set_ylim(y_limits[0] - margin, y_limits[1] + margin)
        _label(figure, axes, title, x_label, y_label)
        return figure


def panels_against_bytes(
    panels: Mapping[str, Rows],
    y: str,
    *,
    title: str,
    y_label: str,
    x: str = "kv_bytes",
    x_label: str = "stored bytes of the KV cache, log scale",
    method: str = "method",
    y_limits: tuple[float, float] | None = None,
) -> Figure:
    """Draw `against_bytes` for several groups of methods, one panel below the other.

    Args:
        panels: title of each panel and its rows.
        y: field of the vertical axis.
        title: with the model and n.
        y_label: with the unit.
        x: field of the horizontal axis.
        x_label: with the unit.
        method: field that names the line; "full" is a star with a level line.
        y_limits: limits of the vertical axis, such as (0, 100).
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.4 * len(panels)))
        every = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        values = [r[x] for rows in panels.values() for r in rows if r.get(y) is not None]
        for axes, (name, rows) in zip(every, panels.items(), strict=True):
            drawn = [r for r in rows if r.get(y) is not None]
            for line in _methods(drawn, method):
                points = sorted((r for r in drawn if r[method] == line), key=lambda r: r[x])
                _draw(axes, points, x, y, line, star=line == "full", log_y=False)
            axes.set_xscale("log")
            _log_ticks(axes, values)
            if y_limits:
                margin = 0.03 * (y_limits[1] - y_limits[0])
                axes.set_ylim(y_limits[0] - margin, y_limits[1] + margin)
            axes.set_title(name, loc="left")
            axes.set_ylabel(y_label)
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        every[-1].set_xlabel(x_label)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        return figure


def by_layer(
    rows: Rows,
    y: str,
    *,
    title: str,
    y_label: str,
    layer: str = "layer",
    method: str = "method",
    log_y: bool = False,
    in_order: bool = False,
) -> Figure:
    """Draw an error by layer, one line a method.

    Args:
        rows: one a layer and method, at one compression ratio.
        y: field of the vertical axis.
        title: with the ratio, the model and n.
        y_label: with the unit.
        layer: field of the horizontal axis.
        method: field that names the line.
        log_y: log scale; values of 0 or less are left out.
        in_order: lines are steps of one quantity: they keep the order of the rows and get the
            colours of a scale.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 4.3))
        axes = figure.add_subplot()
        drawn = [r for r in rows if r.get(y) is not None and (not log_y or r[y] > 0)]
        names = list(dict.fromkeys(r[method] for r in drawn)) if in_order else None
        for i, name in enumerate(names or _methods(drawn, method)):
            points = sorted((r for r in drawn if r[method] == name), key=lambda r: r[layer])
            if names is None:
                _draw(axes, points, layer, y, name, star=False, log_y=log_y)
                continue
            colour = matplotlib.colormaps["viridis"](0.9 * i / max(len(names) - 1, 1))
            axes.plot(
                [p[layer] for p in points], [p[y] for p in points], "o-", label=name, color=colour
            )
        layers = sorted({r[layer] for r in drawn})
        step = max(1, -(-len(layers) // 16))
        axes.set_xticks(layers[::step])
        if log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        _label(figure, axes, title, "layer", y_label)
        return figure


def by_method(rows: Rows, y: str, *, title: str, y_label: str) -> Figure:
    """Draw a field and its interval a method, best on top, where all hold about the same bytes.

    Args:
        rows: one a method, with `y`, `<y>_low` and `<y>_high` (None: no interval); a line at zero
            stands for no loss.
        y: field, such as a difference from the full cache.
        title: with the model, n and the bytes.
        y_label: with the unit.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.4 + 0.36 * len(rows)))
        axes = figure.add_subplot()
        drawn = sorted(rows, key=lambda r: r[y])
        for place, row in enumerate(drawn):
            colour, marker, _ = style(row["method"])
            low, high = row[f"{y}_low"], row[f"{y}_high"]
            reach = None if low is None else [[row[y] - low], [high - row[y]]]
            axes.errorbar(row[y], place, xerr=reach, fmt=marker, color=colour, capsize=3)
        axes.set_yticks(range(len(drawn)), [row["method"] for row in drawn])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.axvline(0, color="#000000", linewidth=0.9, linestyle=":")
        figure.suptitle(title, x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
        axes.set_xlabel(y_label)
        return figure


def percent_map(axes: Axes, values: np.ndarray) -> AxesImage:
    """Draw percents [rows, columns] as a map from red to green, written in; NaN stays grey."""
    image = axes.imshow(values, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#DDDDDD")
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if value < 15 or value > 92 else "black"
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7.5, color=colour)
    return image


def _draw(axes: Axes, points: Rows, x: str, y: str, name: str, *, star: bool, log_y: bool) -> None:
    colour, marker, dash = style(name)
    xs, ys = [r[x] for r in points], [r[y] for r in points]
    low = [_bound(r, y, "_low", log_y) for r in points]
    high = [_bound(r, y, "_high", log_y) for r in points]
    errors = [
        [max(0.0, middle - below) for middle, below in zip(ys, low, strict=True)],
        [max(0.0, above - middle) for middle, above in zip(ys, high, strict=True)],
    ]
    if star:
        axes.axhline(ys[-1], color=colour, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    if any(map(any, errors)):
        axes.errorbar(
            xs, ys, yerr=errors, fmt="none", color=colour, alpha=0.5, elinewidth=1.0, capsize=2.5
        )
    axes.plot(
        xs,
        ys,
        color=colour,
        marker=marker,
        linestyle="none" if star else dash,
        linewidth=1.6,
        markersize=15 if star else 6,
        markeredgecolor="white" if marker != "x" else colour,
        markeredgewidth=0.6 if marker != "x" else 1.8,
        label=name,
        zorder=5 if star else 3,
    )


def _bound(row: Mapping[str, Any], y: str, end: str, log_y: bool) -> float:
    """Return a bound of the interval, or the value itself where there is none to draw."""
    value = row.get(y + end)
    if value is None or (log_y and value <= 0):
        return row[y]
    return value


def _methods(rows: Rows, method: str) -> list[str]:
    """Return the methods in the order of the palette, then of their names."""

    def order(name: str) -> tuple[int, str]:
        known = (i for i, base in enumerate(_STYLES) if base in name)
        return next(known, len(_STYLES)), name

    return sorted({row[method] for row in rows}, key=order)


def _log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Label a byte axis at powers of two, fewer when the range is wide."""
    if not values:
        return
    low, high = min(values), max(values)
    axes.set_xlim(low / 1.15, high * 1.15)
    base = 2.0 if high / low < 300 else 8.0
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def bytes_text(value: float) -> str:
    """Return bytes as a short text in binary units: 1536 -> "1.5 KiB"."""
    units = ["GiB", "MiB", "KiB", "B"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.3g} {units[-1]}"


def _label(figure: Figure, axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper")
