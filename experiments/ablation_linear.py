"""Study 5 of AnchorKV: does the linear model that ranks residuals predict the error?

The change of an attention output is, to first order, sum_t alpha_t ds_t (V_t - y) + sum_t alpha_t
dV_t (equation 5); dropping every product of two terms gives the predicted mean square (5b). Both
are compared with the measured change, for the queries of later tokens, from light to extreme
compression; and one token at a time, where the exact change has a closed form.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.stats import spearmanr

from experiments import ablation_recode, ablation_settings, plots
from experiments.ablation_batch import Setting, cache_and_view
from experiments.ablation_plots import as_y, lines
from experiments.ablation_texts import Texts, missing, shape_of, slots_for
from experiments.ablation_verdict import (
    Verdict,
    above,
    below,
    by_text,
    mean_of,
    paired,
    shown,
    together,
    within,
)
from experiments.report import Column, interval, markdown
from experiments.runner import Run
from kvjax.methods.anchorkv import AnchorKV
from kvjax.storage import Dense
from kvjax.types import PromptKV, PromptShape

FACTOR = 1.5  # how far prediction and measurement may be apart for the model to hold


def squares(q: Array, k: Array, v: Array, rough_k: Array, rough_v: Array) -> dict[str, Array]:
    """Mean squared changes of attention outputs: measured, predicted, linear.

    Args:
        q: f32[m, H], rotated queries of one KV head.
        k: f32[S, H], exact rotated keys.
        v: f32[S, H], exact values.
        rough_k: f32[S, H], what stands for the keys.
        rough_v: f32[S, H], what stands for the values.

    Returns:
        Means over queries: "whole" |y|^2, "measured" |y' - y|^2, "linear" of the first-order
        change with all its products, "predicted" the sum of the tokens' own squares (5b).
    """
    scale = q.shape[-1] ** -0.5
    logits = q @ k.T * scale
    alpha = jax.nn.softmax(logits, -1)
    y = alpha @ v
    after = jax.nn.softmax(q @ rough_k.T * scale, -1) @ rough_v
    moved = alpha * (q @ (rough_k - k).T * scale)  # alpha ds
    wrong = rough_v - v
    linear = moved @ v - moved.sum(-1, keepdims=True) * y + alpha @ wrong
    distance = _distances(y, v)
    own = (jnp.square(moved) * distance).sum(-1)
    own += jnp.square(alpha) @ jnp.square(wrong).sum(-1)

    def mean(x):
        return jnp.square(x).sum(-1).mean()

    return {
        "whole": mean(y), "measured": mean(after - y), "linear": mean(linear),
        "predicted": own.mean(),
    }  # fmt: skip


def _distances(y: Array, v: Array) -> Array:
    """|V_t - y_m|^2, f32[m, S]."""
    square = jnp.square(v).sum(-1)[None] + jnp.square(y).sum(-1, keepdims=True)
    return jnp.maximum(square - 2 * y @ v.T, 0)


def leave_one_out(q: Array, k: Array, v: Array, rough_k: Array) -> tuple[Array, Array]:
    """First-order and exact mean square of one key's error at a time.

    Replacing key t alone moves y by alpha (e^ds - 1) (V_t - y) / (1 + alpha (e^ds - 1)).

    Args:
        q: f32[m, H], rotated queries of one KV head.
        k: f32[S, H], exact rotated keys.
        v: f32[S, H], values.
        rough_k: f32[S, H], what stands for the keys.

    Returns:
        f32[S] each.
    """
    scale = q.shape[-1] ** -0.5
    alpha = jax.nn.softmax(q @ k.T * scale, -1)
    y = alpha @ v
    change = q @ (rough_k - k).T * scale
    distance = _distances(y, v)
    grown = alpha * jnp.expm1(change)
    exact = jnp.square(grown / (1 + grown)) * distance
    return (jnp.square(alpha * change) * distance).mean(0), exact.mean(0)


def _by_head(queries: Array, view: Dense, prompt: PromptKV) -> tuple[Array, ...]:
    """q [B K, m, H], and exact and rough keys and values [B K, S, H] in the order of positions."""
    batch, heads, total, dim = prompt.k.shape
    at = jnp.where(view.positions >= 0, view.positions, total)
    put = jax.vmap(jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop")))
    zeros = jnp.zeros((batch, heads, total, dim), jnp.float32)
    rough = (put(zeros, at, view.k), put(zeros, at, view.v))
    q = queries.astype(jnp.float32).reshape(batch * heads, -1, dim)
    flat = (x.astype(jnp.float32).reshape(batch * heads, total, dim)
            for x in (prompt.k, prompt.v, *rough))  # fmt: skip
    return q, *flat


@jax.jit
def _squares(queries: Array, view: Dense, prompt: PromptKV) -> dict[str, Array]:
    parts = _by_head(queries, view, prompt)
    found = jax.lax.map(lambda x: squares(*x), parts)
    batch = prompt.k.shape[0]
    return {name: x.reshape(batch, -1).sum(-1) for name, x in found.items()}


@functools.partial(jax.jit, static_argnums=3)
def _one_by_one(queries: Array, view: Dense, prompt: PromptKV, tokens: int) -> tuple[Array, Array]:
    q, k, v, rough_k, _ = _by_head(queries, view, prompt)
    return jax.lax.map(
        lambda x: leave_one_out(*x),
        (q, k[:, :tokens], v[:, :tokens], rough_k[:, :tokens]),
    )


def settings(ratios: Sequence[float], shape: PromptShape) -> list[Setting]:
    """Two-bit residuals as long as the bytes pay for them, then only anchors, few and narrow."""
    few = {"label": ablation_settings.NO_RESIDUALS, "shape": shape, "gamma_bits": 2}
    made = []
    for ratio in ratios:
        found = ablation_settings.setting(ablation_settings.BASE, ratio, shape)
        for window in (8, 4):
            if found.limit is not None:
                found = ablation_recode.all_anchors(ratio=ratio, window=window, **few)
        made.append(found)
    return made


def linear(
    run: Run, texts: Texts, length: int, ratios: Sequence[float], alone: int
) -> Iterator[str]:
    """Rows of study 5: {group: linear, layer, prompt, target_ratio, spin, ...}.

    Args:
        run: gets the rows.
        texts: prefilled.
        length: tokens of a prompt.
        ratios: of compression.
        alone: first tokens of each text in the comparison with leave-one-out.
    """
    shape = shape_of(texts.layers[0].prompt, length)
    for setting in settings(ratios, shape):
        method = setting.method.resolve(shape)
        stored = shape.full_bytes / method.layer_bytes(shape)
        has_residuals = bool(method.bits)
        for layer in texts.layers:
            kinds = [True, False] if has_residuals else [True]
            cells = [
                {"group": "linear", "layer": layer.number, "prompt": i, "spin": spin,
                 "target_ratio": setting.target_ratio}
                for spin in kinds for i in range(len(texts.contents))
            ]  # fmt: skip
            if not missing(run, cells):
                continue
            own = method.for_layer(layer.number, texts.info.num_layers)
            cache, view = cache_and_view(own, layer.prompt, texts.info, slots_for(length))
            for spin in kinds:
                seen = view if spin else ablation_recode.recoded(
                    cache, layer.prompt, view, spin=False, uniform=False
                )  # fmt: skip
                found = _squares(layer.queries, seen, layer.prompt)
                found = {name: np.asarray(x, np.float64) for name, x in found.items()}
                for i, content in enumerate(texts.contents):
                    key = {**cells[0], "prompt": i, "spin": spin}
                    if run.finished(key) is None:
                        run.append(key | {"content": content, "method": setting.label,
                                          "limit": setting.limit, "ratio": stored}
                                   | {n: float(x[i]) for n, x in found.items()})  # fmt: skip
        yield f"{setting.label} {setting.target_ratio:.0f}x"
    yield from _alone(run, texts, shape, alone)


def _alone(run: Run, texts: Texts, shape: PromptShape, alone: int) -> Iterator[str]:
    """Rows {group: one token, layer, prompt, rank, top}: keys stand for by anchors only."""
    method = AnchorKV(theta=1.0, bits=(), extra_anchors=16).resolve(shape)
    tokens = min(alone, shape.num_tokens - method.window)
    for layer in texts.layers:
        cells = [
            {"group": "one token", "layer": layer.number, "prompt": i}
            for i in range(len(texts.contents))
        ]
        if not missing(run, cells):
            continue
        own = method.for_layer(layer.number, texts.info.num_layers)
        _, view = cache_and_view(own, layer.prompt, texts.info, slots_for(shape.num_tokens))
        first, exact = (
            np.asarray(x).reshape(len(cells), -1, tokens)
            for x in _one_by_one(layer.queries, view, layer.prompt, tokens)
        )
        for i, key in enumerate(cells):
            if run.finished(key) is None:
                pairs = list(zip(first[i], exact[i], strict=True))
                run.append(key | {
                    "rank": float(np.mean([spearmanr(a, b).statistic for a, b in pairs])),
                    "top": float(np.mean([_common(a, b) for a, b in pairs])),
                    "size": float(np.mean([a.sum() / b.sum() for a, b in pairs])),
                })  # fmt: skip
    yield "one token at a time"


def _common(one: np.ndarray, other: np.ndarray, share: float = 0.1) -> float:
    """Share of the largest tenth of one that is in the largest tenth of the other."""
    count = max(int(share * len(one)), 1)
    return len({*np.argsort(-one)[:count]} & {*np.argsort(-other)[:count]}) / count


def report(run: Run) -> tuple[str, list[Verdict]]:
    """Tables, figure and verdicts of study 5."""
    rows = _per_text([r for r in run.rows if r["group"] == "linear"])
    fields = ("over", "linear_over", "cross", "error")
    means = plots.group_means(rows, ["target_ratio", "spin", "ratio"], fields)
    columns = [
        Column("asked", lambda r: f"{r['target_ratio']:.0f}x"),
        Column("stored", lambda r: f"{r['ratio']:.1f}x"),
        Column("residuals turned", lambda r: "yes" if r["spin"] else "no"),
        Column("relative error", interval("error", ".3f")),
        Column("measured / predicted (5b)", interval("over", ".2f")),
        Column("measured / linear", interval("linear_over", ".2f")),
        Column("products of tokens / predicted", interval("cross", "+.2f")),
        Column("n texts", "n"),
    ]  # fmt: skip
    table = markdown(means, columns, "5 The linear model, relative squares averaged over layers")
    alone = [r for r in run.rows if r["group"] == "one token"]
    alone = by_text(alone, [], ("rank", "top", "size"))
    table += "\n" + markdown(
        plots.group_means(alone, [], ("rank", "top", "size")),
        [Column("n texts", "n"), Column("rank correlation", interval("rank", ".3f")),
         Column("largest tenth in common", interval("top", ".3f")),
         Column("first order / exact", interval("size", ".2f"))],
        "5 One key at a time: first order against leave-one-out",
    )  # fmt: skip
    drawn = [m | {"line": "turned" if m["spin"] else "not turned"} for m in means]
    run.save_figure("linear", lines(
        {"measured / predicted": [m | as_y("over", m) for m in drawn],
         "products of tokens / predicted": [m | as_y("cross", m) for m in drawn],
         "relative error": [m | as_y("error", m) for m in drawn]},
        "ratio", "y", "line", log_x=True, x_label="compression ratio, stored", y_label="ratio",
        title=f"The linear model of the error, n = {means[0]['n']} texts",
    ))  # fmt: skip
    return table, _verdicts(rows, alone)


def _per_text(rows: list[dict]) -> list[dict]:
    """Layers of one text together; each relative to its own output, so that layers count alike."""
    groups: dict[tuple, list] = {}
    for row in rows:
        groups.setdefault((row["prompt"], row["target_ratio"], row["spin"]), []).append(row)
    made = []
    for (prompt, target, spin), own in groups.items():
        sums = {
            name: float(np.mean([r[name] / r["whole"] for r in own]))
            for name in ("measured", "predicted", "linear")
        }
        made.append({
            "prompt": prompt, "target_ratio": target, "spin": spin, "ratio": own[0]["ratio"],
            "over": sums["measured"] / sums["predicted"],
            "linear_over": sums["measured"] / sums["linear"],
            "cross": (sums["linear"] - sums["predicted"]) / sums["predicted"],
            "error": float(np.sqrt(sums["measured"])),
        })  # fmt: skip
    return made


def _verdicts(rows: list[dict], alone: list[dict]) -> list[Verdict]:
    found = []
    turned = [r for r in rows if r["spin"]]
    ratios = sorted({r["target_ratio"] for r in turned})
    for name, kept in (("up to 20x", [r for r in ratios if r <= 20]),
                       ("beyond 20x", [r for r in ratios if r > 20])):  # fmt: skip
        if kept:
            parts = [(r, mean_of(turned, "over", target_ratio=r)) for r in kept]
            words = [within(i, 1 / FACTOR, FACTOR) for _, i in parts]
            found.append(Verdict(
                "5 linear model", f"{name}: measured / predicted (5b) within a factor {FACTOR}",
                "; ".join(f"{r:.0f}x {shown(i, '.2f')}" for r, i in parts), together(words),
            ))  # fmt: skip
    both = sorted({r["target_ratio"] for r in rows if not r["spin"]})
    for ratio in both[:2]:
        cross = mean_of(turned, "cross", target_ratio=ratio)
        found.append(Verdict(
            "5 linear model", f"{ratio:.0f}x: products of different tokens are under a tenth of the"
            " prediction (the paper drops them)", shown(cross, "+.3f"), within(cross, -0.1, 0.1),
        ))  # fmt: skip
    gaps = [
        (r, paired(rows, "cross", {"target_ratio": r, "spin": False},
                   {"target_ratio": r, "spin": True}, ("prompt",)))
        for r in both
    ]  # fmt: skip
    if gaps:
        found.append(Verdict(
            "5 linear model", "without the rotation these products grow by over a tenth of the"
            " prediction (the paper's reason for it)",
            "; ".join(f"{r:.0f}x {shown(g, '+.3f')}" for r, g in gaps),
            together([above(g, 0.1) for _, g in gaps]),
        ))  # fmt: skip
    if len(ratios) > 2 and max(ratios) > 20:
        steep = _steps_beyond(turned)
        if steep:
            found.append(Verdict(
                "5 linear model", "beyond 20x no step of the error is steeper than the slope up to"
                " 20x by over 0.25 (gradual; log-log)",
                f"steepest step minus slope {shown(steep, '+.2f')}", below(steep, 0.25),
            ))  # fmt: skip
    top = mean_of(alone, "top")
    if top:
        found.append(Verdict(
            "5 linear model", "the largest tenth by first order is that by leave-one-out, to 90 %",
            shown(top, ".3f"), above(top, 0.9),
        ))  # fmt: skip
    return found


def _steps_beyond(rows: list[dict]) -> Any:
    """Steepest step of log error over log ratio beyond 20x minus the slope up to it, by text."""
    made = []
    for prompt in sorted({r["prompt"] for r in rows}):
        own = sorted((r for r in rows if r["prompt"] == prompt), key=lambda r: r["ratio"])
        light, heavy = (
            [(np.log(r["ratio"]), np.log(r["error"])) for r in own if part(r["target_ratio"])]
            for part in (lambda x: x <= 20, lambda x: x >= 20)
        )
        if len(light) < 2 or len(heavy) < 2:
            return None
        steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(heavy, heavy[1:], strict=False)]
        made.append({"slope": float(max(steps) - np.polyfit(*zip(*light, strict=True), 1)[0])})
    return mean_of(made, "slope")
