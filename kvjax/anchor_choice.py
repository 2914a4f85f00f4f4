"""Which tokens are AnchorKV's anchors, and how they are stored."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import scores, select
from kvjax.types import PromptKV


def mean_token(prompt: PromptKV) -> Array:
    """Mean token of each side and KV head, in the cache's dtype: [B, 2, K, H]."""
    real = select.real_columns(prompt.starts, prompt.k.shape[2])[:, None, :, None]
    count = real.sum(2, keepdims=True)[:, :, 0]
    both = [
        jnp.where(real, x.astype(jnp.float32), 0.0).sum(2) / count
        for x in (prompt.k_unrotated, prompt.v)
    ]
    return jnp.stack(both, 1).astype(prompt.k.dtype)


def choose_anchors(
    method: Any, prompt: PromptKV, seen: scores.Observation, window: int, mean: Array | None
) -> tuple[dict[str, Any], Array, Array]:
    """Choose a layer's anchors and put them in storage.

    Args:
        method: the hyperparameters (`methods.anchorkv.AnchorKV`), sizes resolved.
        prompt: the layer's finished prefill.
        seen: of the observation window.
        window: W, tokens that are anchors anyway.
        mean: of `mean_token`, or None.

    Returns:
        The anchor arrays of `AnchorBody`, their values f32[B, 2, K, A + W, H], and the positions
        i32[B, K, A] of those outside the window.
    """
    batch, heads, total, _ = prompt.k.shape
    before = total - window
    extra = min(method.extra_anchors, before)
    starts = jnp.minimum(prompt.starts, before)
    score = scores.pool(scores.window_scores(prompt, seen), method.kernel)[..., :before]
    real = select.real_columns(starts, before)[:, None]
    _, order = lax.top_k(jnp.where(real, score, -1.0), extra)
    attended = jnp.arange(extra) < jnp.round(method.attention_share * extra)
    attended = jnp.broadcast_to(attended[None, None], order.shape)
    protected = jax.vmap(jax.vmap(lambda row, at, on: row.at[at].set(on)))(
        jnp.zeros((batch, heads, before), bool), order, attended
    )
    if method.anchor_choice == "coverage" and extra:
        sides = jnp.stack([prompt.k_unrotated, prompt.v], 1).astype(jnp.float32)
        sides = sides if mean is None else sides - mean[:, :, :, None].astype(jnp.float32)
        share = jnp.round(method.attention_share * extra).astype(jnp.int32)
        protected = cover(sides, protected, prompt.starts, window, extra, share)
    noise = scores.hash_scores(method.random_seed, starts, heads, before)
    if extra:
        columns, _ = select.top_columns(noise, extra, starts, protected)
    else:
        columns = jnp.zeros((batch, heads, 0), jnp.int32)
    columns = jnp.minimum(columns, total - 1)
    positions = jnp.where(
        columns < before, columns - prompt.starts[:, None, None], 2**30
    )  # out of range: an unused anchor slot

    def take(x, at):
        return jnp.take_along_axis(x, at[..., None], 2)

    sides = [prompt.k_unrotated, prompt.v]
    far = jnp.stack([take(x, columns) for x in sides], 1)
    last = exact = jnp.stack([x[:, :, before:] for x in sides], 1)
    if mean is not None:
        far, last = (x.astype(jnp.float32) - mean[:, :, :, None] for x in (far, last))
    held = jnp.arange(extra)[None] < jnp.minimum(before - starts, extra)[:, None]
    far = jnp.where(held[:, None, None, :, None], far, 0)
    filled = jnp.arange(before, total)[None] >= prompt.starts[:, None]
    last, exact = (jnp.where(filled[:, None, None, :, None], x, 0) for x in (last, exact))
    if method.storage == "plain":
        together = jnp.concatenate([far, last], 3)
        stored = {"anchors": together, "anchor_scales": None, "window": None}
        return stored, together.astype(jnp.float32), positions
    rows = far if method.exact_window else jnp.concatenate([far, last], 3)
    peak = jnp.abs(rows.astype(jnp.float32)).max(-1)
    scale = jnp.clip(peak / 127, 0, 65504).astype(jnp.float16)
    step = scale.astype(jnp.float32)[..., None]
    ratio = rows.astype(jnp.float32) / jnp.where(step > 0, step, 1.0)
    codes = jnp.clip(jnp.round(ratio), -127, 127).astype(jnp.int8)
    near, stored = codes.astype(jnp.float32) * step, {"anchors": codes, "anchor_scales": scale}
    if not method.exact_window:
        return stored | {"window": None}, near, positions
    return (
        stored | {"window": exact},  # as it is: the mean is taken from what is coded
        jnp.concatenate([near, last.astype(near.dtype)], 3),
        positions,
    )


def cover(
    x: Array, chosen: Array, starts: Array, window: int, size: int, first: Array | int
) -> Array:
    """Add the tokens that are farthest from every anchor so far, one after the other.

    The distance of a token is 1 - cos^2 to its nearest anchor, added over keys and values.

    Args:
        x: f32[B, 2, K, T, H], right-aligned keys before RoPE and values; the last `window` columns
            are anchors already.
        chosen: bool [B, K, T - window], the anchors before them so far, at most `size`.
        starts: i32[B], first real column.
        window: W, tokens.
        size: anchors a KV head beside the window when done.
        first: number of them that `chosen` holds.

    Returns:
        `chosen` with `size` anchors, fewer where there are no more tokens.
    """
    before = x.shape[3] - window
    real = jnp.arange(before, dtype=jnp.int32)[None] >= jnp.minimum(starts, before)[:, None]
    held = jnp.arange(before, x.shape[3])[None] >= starts[:, None]
    norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    unit = jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1.0), 0.0)
    far, near = unit[:, :, :, :before], unit[:, :, :, before:]
    batch, _, heads, _, dim = far.shape
    flat = far.reshape(-1, before, dim)

    def nearest(rows):  # f32[B, 2, K, A, H] -> [B, 2, K, T - W], largest cos^2
        dots = jnp.einsum("bth,bah->bta", flat, rows.reshape(-1, *rows.shape[3:]))
        return jnp.square(dots).max(-1).reshape(batch, 2, heads, before)

    _, columns = lax.top_k(chosen.astype(jnp.float32), size)
    on = jnp.take_along_axis(chosen, columns, 2)[:, None, :, :, None]
    rows = jnp.take_along_axis(far, columns[:, None, :, :, None], 3) * on
    rows = jnp.concatenate([rows, near * held[:, None, None, :, None]], 3)

    def add(_, carry):
        chosen, most = carry
        distance = (1 - most).sum(1)
        distance = jnp.where(chosen | ~real[:, None], -jnp.inf, distance)
        column = jnp.argmax(distance, -1).astype(jnp.int32)  # [B, K]
        new = jnp.take_along_axis(far, column[:, None, :, None, None], 3)
        hit = jnp.arange(before, dtype=jnp.int32)[None, None] == column[..., None]
        return chosen | (hit & real[:, None]), jnp.maximum(most, nearest(new))

    return lax.fori_loop(first, size, add, (chosen, nearest(rows)))[0]


def anchor_positions(positions: Array, lengths: Array, window: int) -> Array:
    """Positions of all anchors, the window's last: i32[B, K, A + W], -1 = unused."""
    recent = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
    recent = jnp.broadcast_to(recent[:, None], (*positions.shape[:2], window))
    together = jnp.concatenate([positions, recent], 2)
    used = (together >= 0) & (together < lengths[:, None, None])
    return jnp.where(used, together, -1).astype(jnp.int32)
