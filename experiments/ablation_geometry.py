"""Studies 3 and 10 of AnchorKV: how near the anchors are, and tokens between two of them.

Cosines to the nearest anchor before and after RoPE, absolute and signed, and with each head's mean
token taken away; how much a second anchor removes of what the first leaves.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments import ablation_arms, ablation_settings, plots
from experiments.ablation_plots import bars
from experiments.ablation_texts import DEPTHS, Texts, missing, shape_of
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
from kvjax import scores
from kvjax.anchor_choice import choose_anchors, mean_token
from kvjax.methods.anchorkv import AnchorKV
from kvjax.types import PromptKV

AFTER_ROPE = 0.27  # how much lower the paper finds the median cosine of keys after RoPE


def cosines(x: Array, at: Array) -> tuple[Array, Array]:
    """Cosines of each token to its nearest anchor.

    Args:
        x: f32[B, K, T, H], tokens.
        at: i32[B, K, A], columns of the anchors among them.

    Returns:
        The largest absolute and the largest signed cosine, f32[B, K, T].
    """
    norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    unit = x / jnp.where(norm > 0, norm, 1.0)
    near = jnp.take_along_axis(unit, at[..., None], 2)
    dots = jnp.einsum(
        "xth,xah->xta", unit.reshape(-1, *unit.shape[2:]), near.reshape(-1, *near.shape[2:])
    ).reshape(*x.shape[:3], at.shape[2])
    return jnp.abs(dots).max(-1), jnp.maximum(dots.max(-1), 0.0)


def second_gain(x: Array, at: Array) -> tuple[Array, Array]:
    """What two anchors leave of each token's energy.

    Args:
        x: f32[B, K, T, H].
        at: i32[B, K, A].

    Returns:
        Shares of |x|^2 that are left after the nearest anchor, and after a second projection on
        the anchor nearest to the rest, f32[B, K, T].
    """
    flat = x.reshape(-1, *x.shape[2:])
    anchors = jnp.take_along_axis(x, at[..., None], 2).reshape(len(flat), -1, x.shape[3])
    size = jnp.sqrt(jnp.square(anchors).sum(-1, keepdims=True))
    unit = anchors / jnp.where(size > 0, size, 1.0)

    def project(rest):
        dots = jnp.einsum("xth,xah->xta", rest, unit)
        best = jnp.abs(dots).argmax(-1)
        gamma = jnp.take_along_axis(dots, best[..., None], 2)
        return rest - gamma * jnp.take_along_axis(unit, best[..., None], 1)

    one = project(flat)
    two = project(one)
    whole = jnp.maximum(jnp.square(flat).sum(-1), 1e-30)
    shares = [jnp.square(rest).sum(-1) / whole for rest in (one, two)]
    return tuple(share.reshape(x.shape[:3]) for share in shares)


@jax.jit
def _geometry(method: AnchorKV, prompt: PromptKV) -> dict[str, Array]:
    """Medians over tokens and KV heads of every row, f32[B] each; anchors left out."""
    window = method.window
    seen = scores.observe(prompt, window)
    _, _, extra = choose_anchors(method, prompt, seen, window, None)
    total = prompt.k.shape[2]
    near = jnp.arange(total - window, total, dtype=jnp.int32)
    near = jnp.broadcast_to(near, (*extra.shape[:2], window))
    at = jnp.concatenate([extra, near], 2)  # rows have no pads: a position is a column
    is_anchor = jax.vmap(jax.vmap(lambda row, i: row.at[i].set(True)))(
        jnp.zeros(prompt.k.shape[:3], bool), at
    )
    mean = mean_token(prompt).astype(jnp.float32)[:, :, :, None]
    sides = {
        "keys": prompt.k_unrotated, "keys after RoPE": prompt.k, "values": prompt.v,
        "keys less their mean": prompt.k_unrotated - mean[:, 0],
        "values less their mean": prompt.v - mean[:, 1],
    }  # fmt: skip

    def median(x):
        return jnp.nanmedian(jnp.where(is_anchor, jnp.nan, x).reshape(len(x), -1), -1)

    found = {}
    for name, x in sides.items():
        x = x.astype(jnp.float32)
        absolute, signed = cosines(x, at)
        found[f"{name}/absolute"] = median(absolute)
        found[f"{name}/signed"] = median(signed)
        one, two = second_gain(x, at)
        between = (one - two) >= 0.5 * one  # the second removes half of what the first leaves
        share = jnp.where(is_anchor, jnp.nan, between.astype(jnp.float32))
        found[f"{name}/between"] = jnp.nanmean(share.reshape(len(x), -1), -1)
        found[f"{name}/left_one"], found[f"{name}/left_two"] = median(one), median(two)
    return found


def geometry(run: Run, texts: Texts, length: int, config: Any) -> Iterator[str]:
    """Rows of studies 3 and 10: {group, layer, depth, content, prompt, side, ...}."""
    shape = shape_of(texts.layers[0].prompt, length)
    method = AnchorKV(theta=0.1, bits=(2,)).resolve(shape)
    for layer in texts.layers:
        keys = [
            {"group": "geometry", "layer": layer.number, "prompt": i}
            for i in range(len(texts.contents))
        ]
        if not missing(run, [k | {"side": "keys"} for k in keys]):
            yield ""
            continue
        found = {name: np.asarray(x) for name, x in _geometry(method, layer.prompt).items()}
        for i, key in enumerate(keys):
            for side in dict.fromkeys(name.split("/")[0] for name in found):
                row = key | {"side": side, "depth": layer.depth, "content": texts.contents[i]}
                values = {n: float(found[f"{side}/{n}"][i]) for n in (
                    "absolute", "signed", "between", "left_one", "left_two")}  # fmt: skip
                if run.finished(key | {"side": side}) is None:
                    run.append(row | values)
        yield f"layer {layer.number}"


def rope_report(run: Run) -> tuple[str, list[Verdict]]:
    """Study 3."""
    rows = [r for r in run.rows if r["group"] == "geometry"]
    by_depth = by_text(rows, ["side", "depth"], ("absolute", "signed"))
    means = plots.group_means(by_depth, ["side", "depth"], ("absolute", "signed"))
    columns = [
        Column("side", "side"), Column("layers", "depth"),
        Column("nearest absolute cosine, median", interval("absolute", ".3f")),
        Column("signed", interval("signed", ".3f")), Column("n texts", "n"),
    ]  # fmt: skip
    texts = [markdown(means, columns, "3 Before and after RoPE, absolute and signed")]
    kinds = plots.group_means(
        by_text(rows, ["side", "content"], ("absolute", "signed")), ["side", "content"],
        ("absolute", "signed"),
    )  # fmt: skip
    columns[1] = Column("text", "content")
    texts.append(markdown(kinds, columns, "3 The same by kind of text"))
    keys = ("keys", "keys less their mean", "keys after RoPE")
    means, kinds = (
        sorted(rows, key=lambda m: keys.index(m["side"]) if m["side"] in keys else len(keys))
        for rows in (means, kinds)
    )
    run.save_figure("rope", bars(
        {"by layers": [m | {"at": m["depth"]} for m in means if m["side"] in keys],
         "by text": [m | {"at": m["content"]} for m in kinds if m["side"] in keys]},
        "at", "absolute", "side", y_label="median |cosine| to the nearest anchor",
        title=f"Keys before and after RoPE, n = {means[0]['n']} texts",
    ))  # fmt: skip
    found, parts = [], []
    for depth in dict.fromkeys(r["depth"] for r in rows):
        own = [r for r in by_depth if r["depth"] == depth]
        gap = paired(own, "absolute", {"side": "keys after RoPE"}, {"side": "keys"}, ("prompt",))
        parts.append((depth, gap))
    unseen = [depth for depth in DEPTHS if depth not in dict(parts)]
    text = "; ".join(
        [*(f"{d}: {shown(g, '+.3f')}" for d, g in parts), *(f"{d}: no layer" for d in unseen)]
    )
    words = [below(g, 0.0) for _, g in parts] + ["undecided"] * len(unseen)
    found.append(Verdict(
        "3 RoPE", "cosines are lower after RoPE in every third of the layers (paper: everywhere)",
        text, together(words),
    ))  # fmt: skip
    found.append(Verdict(
        "3 RoPE", "the median is lower by 0.27 (paper), to 0.05",
        text, together([within(g, -AFTER_ROPE - 0.05, -AFTER_ROPE + 0.05) for _, g in parts]),
    ))  # fmt: skip
    for side in ("keys", "keys less their mean", "values"):
        own = by_text([r for r in rows if r["side"] == side], ["side"], ("absolute", "signed"))
        gains = [r | {"gain": r["absolute"] - r["signed"]} for r in own]
        gain = mean_of(gains, "gain")
        found.append(Verdict(
            "3 RoPE", f"{side}: the absolute cosine is nearer than the signed by over 0.01",
            shown(gain, "+.4f"), above(gain, 0.01),
        ))  # fmt: skip
    return "\n".join(texts), found


def two_anchors_report(run: Run, ratios: Any) -> tuple[str, list[Verdict]]:
    """Study 10: tokens between two anchors, and answers with one and two at equal bytes."""
    fields = ("between", "left_one", "left_two")
    rows = [r for r in run.rows if r["group"] == "geometry" and "after" not in r["side"]]
    means = plots.group_means(
        by_text(rows, ["side", "depth"], fields), ["side", "depth"], fields
    )  # fmt: skip
    columns = [
        Column("side", "side"), Column("layers", "depth"),
        Column("tokens between two %", interval("between", ".1f", 100)),
        Column("energy left by one %", interval("left_one", ".1f", 100)),
        Column("by two %", interval("left_two", ".1f", 100)), Column("n texts", "n"),
    ]  # fmt: skip
    texts = [markdown(means, columns, "10 Tokens between two anchors")]
    two, title = ablation_settings.TWO, "Anchors a token, at equal bytes"
    texts.append(ablation_arms.compared(run, two, "10 Two anchors a token", "one anchor", ratios))
    ablation_arms.figure(run, two, "two_anchors", title, ratios)
    shares = [m | {f: 100 * m[f] for f in m if f.startswith("between")} for m in means]
    run.save_figure("between", bars(
        {"": shares}, "depth", "between", "side", y_label="tokens between two anchors, %",
        title=f"Second anchor removes half of the rest, n = {means[0]['n']} texts",
    ))  # fmt: skip
    found = []
    one, other = two.values()
    for ratio in ratios:
        gap = ablation_arms.error_ratio(run, other, one, ratio)
        found.append(Verdict(
            "10 two anchors", f"{ratio:.0f}x: a second anchor does not lower the error (the paper"
            " argues so)", f"ratio of errors {shown(gap, '.3f')}", above(gap, 1.0),
        ))  # fmt: skip
    share = mean_of(by_text([r for r in rows if "less" in r["side"]], [], fields), "between")
    found.append(Verdict(
        "10 two anchors", "under a tenth of the tokens lie between two anchors (means taken away)",
        shown(share, ".3f"), below(share, 0.1),
    ))  # fmt: skip
    return "\n".join(texts), found
