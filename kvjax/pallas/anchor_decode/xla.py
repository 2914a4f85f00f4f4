"""The specification of anchor_decode: values never need their tokens rebuilt, keys do once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import quant
from kvjax.pallas import partial
from kvjax.rope import Rope, tables


def anchor_decode(q: Array, coded, *, widths, rope: Rope) -> tuple[Array, Array, Array]:
    """See `api.anchor_decode`."""
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, coded = lax.optimization_barrier((q, coded))
    batch, _, steps, dim = q.shape
    decode = functools.partial(_decode, widths=widths, half=len(rope.inv_freq))
    body = partial.decoded(decode, coded.lengths, q, coded)
    spins = [_spin(dim, bits, widths.seed) for bits in widths.residuals[: len(body.residuals)]]
    tokens, rows = body.index.shape[-1], body.queries.shape[2]

    cos, sin = _tables(rope, tokens, dim)
    turns = range(body.index.shape[3])
    keys = sum(
        _take(body.keys, body.index[:, 0, :, turn]) * body.gamma[:, 0, :, turn, :, None]
        for turn in turns
    )
    if body.key_mean is not None:
        keys += body.key_mean[:, :, None]
    here, ahead = jnp.split(keys, 2, -1)
    keys = here * cos[None, None] + ahead * sin[None, None]
    scores = _product("brh,bsh->brs", body.queries, keys)
    for r, spin in zip(body.residuals, spins, strict=True):
        seen = _seen(body.queries, r, spin)
        for slot, present in r.slots:
            own = jax.vmap(_own_head)(seen, slot[:, 0])  # [B, K, C, R]
            scores += jnp.where(present[:, 0, :, None], own.swapaxes(2, 3), 0.0)
    valid = jnp.arange(tokens)[None, None, None] < coded.lengths[:, None, None, None]
    p, m, l = partial.soften(scores, jnp.broadcast_to(valid, (batch, 1, rows, tokens)))  # noqa: E741

    bins = sum(
        jax.vmap(jax.vmap(_bins, (0, 0, None)), (0, 0, None))(
            p * body.gamma[:, 1, :, turn, None], body.index[:, 1, :, turn], body.values.shape[2]
        )
        for turn in turns
    )
    o = _product("brs,bsh->brh", bins, body.values)
    if coded.mean is not None:
        o += l[..., None] * coded.mean[:, 1, :, None].astype(jnp.float32)
    for r, spin in zip(body.residuals, spins, strict=True):
        size, weights = r.scales.shape[1], 0.0
        for slot, present in r.slots:
            at = jnp.where(present[:, 1], slot[:, 1], size)  # [B, K, C]; out of range: dropped
            weights += jax.vmap(_by_slot, (0, 0, None))(p, at, size)
        o += _sum(weights, r, spin)
    return partial.by_head(o, m, l, steps)


class _Residuals(NamedTuple):
    """The residuals of one codes array, in the rotated space, in the order of `partial.fields`."""

    levels: Array  # f32[B, N, X, Y]
    scales: Array  # f32[B, N]
    slots: tuple[tuple[Array, Array], ...]  # of each stage: i32[B, 2, K, C], and which have one


class _Body(NamedTuple):
    """Everything unpacked, nothing rebuilt."""

    queries: Array  # f32[B, K, R, H], over sqrt(H)
    index: Array  # i32[B, 2, K, J, C]
    gamma: Array  # f32[B, 2, K, J, C]
    keys: Array  # f32[B, K, A, 2 H]: anchors, and anchors a quarter turn ahead
    key_mean: Array | None  # f32[B, K, 2 H], likewise
    values: Array  # f32[B, K, A, H]
    residuals: tuple[_Residuals, ...]


def _decode(q: Array, coded, *, widths, half: int) -> _Body:
    batch, _, _, dim = q.shape
    anchors = dense_anchors(coded)

    def with_turn(x):
        a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), -1)
        return jnp.concatenate([a, b, rest, -b, a, jnp.zeros_like(rest)], -1)

    arrays, residuals = [(r,) for r in coded.residuals], []
    if widths.staged:  # the stages share one array: decode it once
        arrays = [coded.residuals]
    for stages, bits in zip(arrays, widths.residuals, strict=False):
        decoded = levels(partial.fields(stages[0].codes, bits, dim), bits)
        at = tuple(slots(r) for r in stages)
        residuals.append(_Residuals(decoded, scale_values(stages[0].scales), at))
    return _Body(
        q.astype(jnp.float32).reshape(batch, anchors.shape[2], -1, dim) * dim**-0.5,
        indices(coded, widths),
        gammas(coded, widths),
        with_turn(anchors[:, 0]),
        None if coded.mean is None else with_turn(coded.mean[:, 0]),
        anchors[:, 1],
        tuple(residuals),
    )


@functools.lru_cache(maxsize=16)
def _tables(rope: Rope, tokens: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin f32[C, H] of R_t x = x cos + (x a quarter turn ahead) sin; the same in every layer.

    Constants: on a CPU the sines would cost more than the attention.
    """
    with jax.ensure_compile_time_eval():
        cos, sin = tables(rope, jnp.arange(tokens, dtype=jnp.int32))
    room = ((0, 0), (0, dim - 2 * cos.shape[-1]))
    return np.pad(np.tile(cos, 2), room, constant_values=1.0), np.pad(np.tile(sin, 2), room)


def _spin(dim: int, bits: int, seed: int) -> Array:
    """The residuals' rotation with its columns in the order of `partial.fields`: f32[H, H]."""
    return quant.rotation(dim, seed)[:, partial.field_order(bits, dim)]


def _seen(queries: Array, r: _Residuals, spin: Array) -> Array:
    """Products f32[B, N, K, R] of every residual with queries [B, K, R, H]."""
    batch, kv_heads, rows, _ = queries.shape
    spun = (queries @ spin).reshape(batch, kv_heads * rows, *r.levels.shape[2:])
    seen = jnp.einsum("bnxy,brxy->bnr", r.levels, spun) * r.scales[..., None]
    return seen.reshape(batch, -1, kv_heads, rows)


def _sum(weights: Array, r: _Residuals, spin: Array) -> Array:
    """Sum f32[B, K, R, H] of all residuals under weights [B, K, R, N]."""
    batch, kv_heads, rows, size = weights.shape
    weights = weights.reshape(batch, kv_heads * rows, size) * r.scales[:, None]
    spun = jnp.einsum("brn,bnxy->brxy", weights, r.levels)
    return spun.reshape(batch, kv_heads, rows, -1) @ spin.T


def levels(codes: Array, bits: int) -> Array:
    """`quant.codebook_decode` as an odd polynomial, which vectorises where a table does not."""
    if bits > 4:
        return quant.codebook_decode(codes, bits)
    middle, factors = _polynomial(bits)
    x = codes.astype(jnp.float32) / middle - 1.0
    square, value = x * x, factors[-1]
    for factor in factors[-2::-1]:
        value = value * square + factor
    return value * x


@functools.cache
def _polynomial(bits: int) -> tuple[float, list[float]]:
    """The middle of the codes, and the factors of x, x^3, ... through all Lloyd-Max levels."""
    middle = (2**bits - 1) / 2
    x = np.arange(2 ** (bits - 1), 2**bits) / middle - 1.0
    powers = x[:, None] ** np.arange(1, 2 * len(x), 2)
    return middle, np.linalg.solve(powers, quant.lloyd_max(bits)[len(x) :]).tolist()


def _product(how: str, a: Array, b: Array) -> Array:
    """An einsum over [B, K, ...] pairs with batch and KV heads as one leading axis."""
    out = jnp.einsum(how, a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
    return out.reshape(*a.shape[:2], *out.shape[1:])


def _take(rows: Array, index: Array) -> Array:
    """Rows i32[B, K, C] of [B, K, A, H] as [B, K, C, H]."""
    batch, kv_heads, size, dim = rows.shape
    first = jnp.arange(batch * kv_heads, dtype=jnp.int32).reshape(batch, kv_heads, 1) * size
    return rows.reshape(-1, dim).at[index + first].get(mode="promise_in_bounds")


def _own_head(seen: Array, slot: Array) -> Array:
    """Rows `slot` i32[K, C] of seen [N, K, R], each from its own head: [K, C, R]."""
    return jax.vmap(lambda one, at: one[at], (1, 0))(seen, slot)


def _bins(p: Array, index: Array, size: int) -> Array:
    """Sum p [R, C] over the tokens of each anchor: [R, size]."""
    return jnp.zeros((size, p.shape[0]), p.dtype).at[index].add(p.T).T


def _by_slot(p: Array, at: Array, size: int) -> Array:
    """Spread p [K, R, C] over the residual slots i32[K, C]: [K, R, size]."""
    zeros = jnp.zeros((p.shape[1], size), p.dtype)
    return jax.vmap(lambda p, at: zeros.at[:, at].set(p, mode="drop"))(p, at)


def dense_anchors(coded) -> Array:
    """All anchors as values f32[B, 2, K, A + W, H], the window's last, relative to the mean."""
    anchors = coded.anchors.astype(jnp.float32)
    if coded.anchor_scales is not None:
        anchors = anchors * coded.anchor_scales.astype(jnp.float32)[..., None]
    if coded.window is None:
        return anchors
    window = coded.window.astype(jnp.float32)
    if coded.mean is not None:
        window = window - coded.mean.astype(jnp.float32)[:, :, :, None]
    return jnp.concatenate([anchors, window], 3)


def indices(coded, widths) -> Array:
    """Anchors of each token: i32[B, 2, K, J, C]."""
    if not widths.index:
        return coded.index.astype(jnp.int32)
    return quant.unpack(coded.index, widths.index, coded.index.shape[-1] * 8 // widths.index)


def gammas(coded, widths) -> Array:
    """Coefficients of each token: f32[B, 2, K, J, C]."""
    if not widths.gamma:
        return coded.gamma.astype(jnp.float32)
    size = coded.gamma.shape[-1] * 8 // widths.gamma
    codes = quant.unpack(coded.gamma, widths.gamma, size)
    low, step = (coded.gamma_range[..., i, None].astype(jnp.float32) for i in (0, 1))
    return low + step * codes.astype(jnp.float32)


def slots(residuals) -> tuple[Array, Array]:
    """Residual slot of each token i32[B, 2, K, C], and whether it has one."""
    bit = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 1, 32)
    words = residuals.words[..., None]
    before = lax.population_count(words & ((jnp.uint32(1) << bit) - 1)).astype(jnp.int32)
    slot = residuals.prefix.astype(jnp.int32)[..., None] + before
    present = ((words >> bit) & 1).astype(bool)
    shape = (*residuals.words.shape[:3], -1)
    return slot.reshape(shape), present.reshape(shape)


def scale_values(scales: Array) -> Array:
    """Stored scales of residuals as float32."""
    if scales.dtype == jnp.uint8:
        return quant.scale_decode(scales)
    return scales.astype(jnp.float32)


def residual_levels(residuals, bits: int, dim: int) -> Array:
    """Residuals in the rotated space: f32[B, N, H]."""
    codes = quant.unpack(residuals.codes, bits, dim)
    return quant.codebook_decode(codes, bits) * scale_values(residuals.scales)[..., None]
