"""Which token-sides get a residual, and its code: utilities, the choice, slots, codes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import anchor_bytes, quant
from kvjax.anchor_bytes import DISTORTION, Layout
from kvjax.pallas.anchor_decode import xla
from kvjax.rope import Rope, rotate, rotate_with, tables
from kvjax.scores import Observation, hash_scores, in_blocks

KEYS, VALUES = 0, 1


def utility(
    x: Array,
    rebuilt: Array,
    rotated: Array,
    seen: Observation,
    lengths: Array,
    rope: Rope,
    floor: Array | float,
) -> Array:
    """Squared change of the attention output that each side's error causes, to first order.

    u^K_t = mean_w (alpha_t^2 + floor / n^2) (q_w . R_t r^K_t)^2 / H |V_t - y_w|^2 and
    u^V_t = mean_w (alpha_t^2 + floor / n^2) |r^V_t|^2, over the observation queries w.

    Args:
        x: [B, 2, K, C, H], the tokens, keys before RoPE.
        rebuilt: f32[B, 2, K, C, H], their approximation.
        rotated: [B, K, C, H], the keys at their positions.
        seen: the observation window.
        lengths: i32[B], prompt tokens.
        rope: of the layer.
        floor: attention that a token may yet get, in units of 1 / n (phi).

    Returns:
        f32[B, 2, K, C].

    Source: AnchorKV (arXiv 2608.02901), equations 5 and 6.
    Differs from the reference: floor (0 there).
    """
    batch, _, heads, tokens, dim = x.shape
    queries = seen.q * dim**-0.5
    count = jnp.maximum(seen.seen.sum(-1), 1)[:, None, None]  # [B, 1, 1]
    rest = floor / jnp.square(lengths.astype(jnp.float32))[:, None, None, None]
    y_square = jnp.square(seen.y).sum(-1)[..., None]

    def product(a, b):  # [B, K, m, H] . [B, K, S, H]
        out = jnp.einsum("brh,bsh->brs", a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
        return out.reshape(*a.shape[:3], b.shape[2])

    def block(first, size):
        token = first + jnp.arange(size, dtype=jnp.int32)
        here = lax.dynamic_slice_in_dim(x, first, size, 3).astype(jnp.float32)
        error = here - lax.dynamic_slice_in_dim(rebuilt, first, size, 3)
        keys = lax.dynamic_slice_in_dim(rotated, first, size, 2).astype(jnp.float32)
        alpha = jnp.exp(jnp.minimum(product(queries, keys) - seen.lse[..., None], 0.0))
        weight = jnp.where(seen.seen[:, None, :, None], jnp.square(alpha) + rest, 0.0)
        moved = product(queries, rotate(rope, error[:, KEYS], token))
        values = here[:, VALUES]
        distance = jnp.square(values).sum(-1)[:, :, None] + y_square - 2 * product(seen.y, values)
        u_keys = (weight * jnp.square(moved) * jnp.maximum(distance, 0.0)).sum(2)
        u_values = weight.sum(2) * jnp.square(error[:, VALUES]).sum(-1)
        return jnp.stack([u_keys / count, u_values / count], 1)

    return jnp.concatenate(in_blocks(block, tokens), -1)


def rank(
    method: Any,
    x: Array,
    rebuilt: Array,
    rotated: Array,
    seen: Observation,
    lengths: Array,
    rope: Rope,
) -> Array:
    """What the tokens of both sides compete with for residuals; the arguments of `utility`.

    `method.ranking` names it: "utility"; or, to compare with, "cosine" (1 - cos^2 to what stands
    for the token), "norm" (|r|^2), "attention" (mean_w alpha_t^2, and the floor) or "random".

    Returns:
        f32[B, 2, K, C], 0 or more.
    """
    batch, _, heads, tokens, dim = x.shape
    floor = method.attention_floor
    if method.ranking == "utility":
        return utility(x, rebuilt, rotated, seen, lengths, rope, floor)
    if method.ranking == "attention":  # what an error of norm 1 in a value would cost
        unit = jnp.full(x.shape, dim**-0.5)
        paid = utility(unit, jnp.zeros_like(unit), rotated, seen, lengths, rope, floor)[:, 1]
        return jnp.broadcast_to(paid[:, None], (batch, 2, heads, tokens))
    if method.ranking == "random":
        starts = jnp.zeros(batch, jnp.int32)
        scores = hash_scores(method.random_seed + 1, starts, 2 * heads, tokens)
        return scores.reshape(batch, 2, heads, tokens)
    exact = x.astype(jnp.float32)
    square = jnp.square(exact - rebuilt).sum(-1)
    if method.ranking == "norm":
        return square
    whole = jnp.square(exact).sum(-1)
    return square / jnp.where(whole > 0, whole, 1.0)


def level_heads(useful: Array) -> Array:
    """Ranks within each side and KV head instead of values, so that all heads win equally often.

    Args:
        useful: f32[B, 2, K, C], negative where a token does not compete.
    """
    order = jnp.argsort(jnp.argsort(-useful, -1), -1)
    return jnp.where(useful >= 0, (useful.shape[-1] - order).astype(useful.dtype), -1.0)


def choose(utilities: Array, counts: list[Array], capacities: list[tuple[int, int]]) -> list[Array]:
    """The tokens that get a residual of each width, widest first by utility.

    Args:
        utilities: f32[B, 2, ...], sides first, negative where a token does not compete.
        counts: i32[B, P] a width, widest first: residuals of each pool, over all KV heads. P = 2
            is a pool a side, P = 1 one for both.
        capacities: the largest of each count, static.

    Returns:
        A mask bool [B, 2, ...] a width.
    """
    batch, pools = utilities.shape[0], counts[0].shape[1] if counts else 1
    flat = utilities.reshape(batch, pools, -1)
    masks = [[] for _ in range(pools)]
    for side in range(pools):
        most = min(sum(c[side] for c in capacities), flat.shape[-1])
        _, order = lax.top_k(flat[:, side], most)
        rank, start = jnp.arange(most, dtype=jnp.int32)[None], jnp.zeros((batch, 1), jnp.int32)
        for count in counts:
            end = start + count[:, side, None]
            chosen = (rank >= start) & (rank < end)
            empty = jnp.zeros((batch, flat.shape[-1]), bool)
            masks[side].append(
                jax.vmap(lambda row, at, on: row.at[at].set(on))(empty, order, chosen)
            )
            start = end
    return [jnp.stack(pair, 1).reshape(utilities.shape) for pair in zip(*masks, strict=True)]


def choose_stages(utilities: Array, count: Array, capacity: tuple[int, ...], bits: int) -> Array:
    """The tokens that get a first code of their residual, and those that get a second.

    A code of `bits` leaves a known share of the squared error, so that a first one is worth
    u (1 - share) and a second u share (1 - share), at the same bytes: the most worthy win.

    Args:
        utilities: f32[B, 2, K, C], negative where a token does not compete.
        count: i32[B, P], codes of each pool (see `choose`).
        capacity: the largest of each, static.
        bits: of one code.

    Returns:
        Masks bool [B, 2 stages, 2, K, C]; who has a second code has a first.
    """
    share = DISTORTION[bits - 1]
    worth = jnp.stack([utilities * (1 - share), utilities * share * (1 - share)], 2)
    return choose(worth, [count], [capacity])[0].swapaxes(1, 2)


def slot_order(mask: Array, size: int) -> Array:
    """Flat indices of the set entries of bool [B, ...], in order: i32[B, size], padded with 0."""
    flat = mask.reshape(mask.shape[0], -1)
    at = jnp.where(flat, jnp.cumsum(flat, -1, dtype=jnp.int32) - 1, size)
    entry = jnp.broadcast_to(jnp.arange(flat.shape[1], dtype=jnp.int32), flat.shape)
    empty = jnp.zeros((flat.shape[0], size), jnp.int32)
    return jax.vmap(lambda row, at, x: row.at[at].set(x, mode="drop"))(empty, at, entry)


def encode(residuals: Array, bits: int, how: str, seed: int, small: bool) -> tuple[Array, Array]:
    """Code residual vectors: rotate, scale, nearest Lloyd-Max level, pack.

    Args:
        residuals: f32[..., H].
        bits: 1 to 8.
        how: the scale: "absmax" (the paper's: largest coordinate, codebook of a unit Gaussian),
            "rms", or "least_squares" (rms codes, then <r, c> / <c, c>).
        seed: of the rotation.
        small: store the scale in 8 bits instead of float16.

    Returns:
        codes uint8 [..., packed_size(H, bits)] and scales f16 or uint8 [...].

    Raises:
        ValueError: for an unknown scale.

    Source: AnchorKV (arXiv 2608.02901), residual code.
    """
    dim = residuals.shape[-1]
    spun = residuals @ quant.rotation(dim, seed)
    if how == "absmax":
        scale = jnp.abs(spun).max(-1)
    elif how in ("rms", "least_squares"):
        scale = jnp.sqrt(jnp.square(spun).mean(-1))
    else:
        raise ValueError(f"scale={how!r} must be 'absmax', 'rms' or 'least_squares'.")
    unit = spun / jnp.where(scale > 0, scale, 1.0)[..., None]
    codes = quant.codebook_encode(unit, bits)
    if how == "least_squares":
        levels = quant.codebook_decode(codes, bits)
        scale = (spun * levels).sum(-1) / jnp.square(levels).sum(-1)
        scale = jnp.maximum(scale, 0.0)
    if small:
        return quant.pack(codes, bits), quant.scale_encode(scale)
    return quant.pack(codes, bits), jnp.minimum(scale, 65504.0).astype(jnp.float16)


def decode(codes: Array, scale: Array, bits: int, dim: int, seed: int) -> Array:
    """Undo `encode`: f32[..., H]."""
    scale = xla.scale_values(scale)[..., None]
    levels = quant.codebook_decode(quant.unpack(codes, bits, dim), bits)
    return (levels * scale) @ quant.rotation(dim, seed).T


def quantize_gamma(gamma: Array, coded: Array, bits: int) -> tuple[Array, Array, Array]:
    """Coefficients between their smallest and largest, a row, side and KV head at a time.

    Args:
        gamma: f32[B, 2, K, C].
        coded: bool [B, 1, 1, C], tokens that count.
        bits: 1 to 8.

    Returns:
        codes i32[B, 2, K, C], range f16[B, 2, K, 2] (smallest, step), and the values they stand
        for, f32[B, 2, K, C].
    """
    low = jnp.where(coded, gamma, jnp.inf).min(-1)
    high = jnp.where(coded, gamma, -jnp.inf).max(-1)
    low, high = (jnp.where(jnp.isfinite(x), x, 0.0) for x in (low, high))
    limit = 65504.0
    low = jnp.clip(low, -limit, limit).astype(jnp.float16)
    step = (jnp.clip(high, -limit, limit) - low.astype(jnp.float32)) / (2**bits - 1)
    step = jnp.minimum(step, limit).astype(jnp.float16)
    a, b = (x.astype(jnp.float32)[..., None] for x in (low, step))
    codes = jnp.clip(jnp.round((gamma - a) / jnp.where(b > 0, b, 1.0)), 0, 2**bits - 1)
    codes = jnp.where(b > 0, codes, 0.0).astype(jnp.int32)
    return codes, jnp.stack([low, step], -1), a + b * codes.astype(jnp.float32)


def code_residuals(
    method: Any, coding: Any, layout: Layout, num_tokens: int, rope: Rope
) -> dict[str, tuple]:
    """The residual arrays of `AnchorBody`: an entry a width, or one pool of codes in stages.

    Args:
        method: the hyperparameters (`methods.anchorkv.AnchorKV`), sizes resolved.
        coding: the layer between the choice of anchors and that of residuals.
        layout: of the method.
        num_tokens: columns of the prompt.
        rope: of the model; key residuals are coded rotated.
    """
    batch, _, heads, tokens, dim = coding.x.shape
    lengths = coding.lengths
    # Every row's own counts, as a function of its length: data, while the sizes are static.
    table = anchor_bytes.counts(layout, np.arange(num_tokens + 1))  # [T + 1, pools]
    sizes = [tuple(int(v) for v in t.max(0)) for t in table]
    counts = [jnp.asarray(t, jnp.int32)[lengths] for t in table]
    if layout.staged:
        masks = [choose_stages(coding.useful, counts[0], sizes[0], method.bits[0])]
    else:
        masks = [m[:, None] for m in choose(coding.useful, counts[::-1], sizes[::-1])]
        masks = masks[::-1]
    flat_x = coding.x.reshape(batch, -1, dim)
    flat_chosen = coding.chosen.reshape(batch, -1, dim)
    # One row of the table a token: far fewer sines than one a residual.
    cos, sin = tables(rope, jnp.arange(tokens, dtype=jnp.int32))
    arrays = {"words": (), "prefix": (), "codes": (), "scales": ()}
    for mask, bits, most in zip(masks, method.bits, sizes, strict=False):
        size = max(sum(most), 1)
        entry = slot_order(mask, size)  # i32[B, N], over (stage, side, head, token)
        order = entry % (2 * heads * tokens)

        def take(rows, order=order):
            return jnp.take_along_axis(rows, order[..., None], 1).astype(jnp.float32)

        error = take(flat_x) - take(flat_chosen)
        turned = rotate_with(cos[order % tokens], sin[order % tokens], error)
        is_key = order < heads * tokens
        error = jnp.where(is_key[..., None], turned, error)
        second = entry != order if layout.staged else None
        codes, scale = _encode_stages(method, error, bits, second)
        used = jnp.arange(size)[None] < mask.reshape(batch, -1).sum(-1)[:, None]
        words = quant.bit_words(mask)  # [B, stage, 2, K, C / 32]
        prefix = quant.popcount_prefix(words).astype(f"uint{method.prefix_bits}")
        arrays["words"] += tuple(jnp.moveaxis(words, 1, 0))
        arrays["prefix"] += tuple(jnp.moveaxis(prefix, 1, 0))
        arrays["codes"] += (jnp.where(used[..., None], codes, 0).astype(jnp.uint8),)
        arrays["scales"] += (jnp.where(used, scale, 0).astype(scale.dtype),)
    return arrays


def _encode_stages(
    method: Any, error: Array, bits: int, second: Array | None
) -> tuple[Array, Array]:
    """Codes and scales of residuals; where `second`, of what a first code leaves of them."""
    how = (bits, method.scale, method.rotation_seed, method.storage == "lean")
    codes, scale = encode(error, *how)
    if second is None:
        return codes, scale
    left = error - decode(codes, scale, bits, error.shape[-1], method.rotation_seed)
    again, fine = encode(left, *how)
    return jnp.where(second[..., None], again, codes), jnp.where(second, fine, scale)
