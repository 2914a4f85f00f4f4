"""The specification of anchor_decode: values never need their tokens rebuilt, keys do once."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.pallas import partial
from kvjax.rope import Rope, rotate


def anchor_decode(q: Array, coded, *, widths, rope: Rope) -> tuple[Array, Array, Array]:
    """See `api.anchor_decode`."""
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, coded = lax.optimization_barrier((q, coded))
    batch, heads, steps, dim = q.shape
    kv_heads = coded.anchors.shape[2]
    rows = heads // kv_heads * steps
    anchors = dense_anchors(coded)
    index, gamma = indices(coded, widths), gammas(coded, widths)
    tokens = index.shape[-1]
    spin = quant.rotation(dim, widths.seed)
    queries = q.astype(jnp.float32).reshape(batch, kv_heads, rows, dim) * dim**-0.5

    keys = jnp.take_along_axis(anchors[:, 0], index[:, 0, ..., None], 2) * gamma[:, 0, ..., None]
    if coded.mean is not None:
        mean = coded.mean.astype(jnp.float32)
        keys += mean[:, 0, :, None]
    keys = rotate(rope, keys, jnp.arange(tokens, dtype=jnp.int32)[None])
    scores = _product("brh,bsh->brs", queries, keys)
    spun = (queries @ spin).reshape(batch, kv_heads * rows, dim)
    where = [slots(r) for r in coded.residuals]
    for r, bits, (slot, present) in zip(coded.residuals, widths.residuals, where, strict=True):
        levels = residual_levels(r, bits, dim)  # [B, N, H]
        seen = jnp.einsum("bnh,brh->bnr", levels, spun)
        seen = seen.reshape(batch, -1, kv_heads, rows)
        add = jax.vmap(_own_head)(seen, slot[:, 0])  # [B, K, C, R]
        scores += jnp.where(present[:, 0, :, None], add.swapaxes(2, 3), 0.0)
    valid = jnp.arange(tokens)[None, None, None] < coded.lengths[:, None, None, None]
    p, m, l = partial.soften(scores, jnp.broadcast_to(valid, (batch, 1, rows, tokens)))  # noqa: E741

    bins = jax.vmap(jax.vmap(_bins, (0, 0, None)), (0, 0, None))(
        p * gamma[:, 1, :, None], index[:, 1], anchors.shape[3]
    )
    o = _product("brs,bsh->brh", bins, anchors[:, 1])
    if coded.mean is not None:
        o += l[..., None] * mean[:, 1, :, None]
    for r, bits, (slot, present) in zip(coded.residuals, widths.residuals, where, strict=True):
        levels = residual_levels(r, bits, dim)
        size = levels.shape[1]
        at = jnp.where(present[:, 1], slot[:, 1], size)  # [B, K, C]; out of range: dropped
        weights = jax.vmap(_by_slot, (0, 0, None))(p, at, size)  # [B, K, R, N]
        o += jnp.einsum("bkrn,bnh->bkrh", weights, levels) @ spin.T
    return partial.by_head(o, m, l, steps)


def _product(how: str, a: Array, b: Array) -> Array:
    """An einsum over [B, K, ...] pairs with batch and KV heads as one leading axis."""
    out = jnp.einsum(how, a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
    return out.reshape(*a.shape[:2], *out.shape[1:])


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
    """All anchors as values f32[B, 2, K, A + W, H], the window's last."""
    anchors = coded.anchors.astype(jnp.float32)
    if coded.anchor_scales is not None:
        anchors = anchors * coded.anchor_scales.astype(jnp.float32)[..., None]
    if coded.window is None:
        return anchors
    return jnp.concatenate([anchors, coded.window.astype(jnp.float32)], 3)


def indices(coded, widths) -> Array:
    """Anchor of each token: i32[B, 2, K, C]."""
    if not widths.index:
        return coded.index.astype(jnp.int32)
    return quant.unpack(coded.index, widths.index, coded.index.shape[-1] * 8 // widths.index)


def gammas(coded, widths) -> Array:
    """Coefficient of each token: f32[B, 2, K, C]."""
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


def residual_levels(residuals, bits: int, dim: int) -> Array:
    """Residuals in the rotated space: f32[B, N, H]."""
    codes = quant.unpack(residuals.codes, bits, dim)
    scales = residuals.scales
    if scales.dtype == jnp.uint8:
        scales = quant.scale_decode(scales)
    return quant.codebook_decode(codes, bits) * scales.astype(jnp.float32)[..., None]
