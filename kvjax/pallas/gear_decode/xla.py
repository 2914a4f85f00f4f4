"""The specification of gear_decode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.pallas import partial


def gear_decode(
    q: Array, keys: Any, values: Any, lengths: Array, *, chunk: int, k_bits: int, v_bits: int
) -> tuple[Array, Array, Array]:
    """See `api.gear_decode`."""
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, keys, values = lax.optimization_barrier((q, keys, values))
    batch, heads, steps, dim = q.shape
    kv_heads, slots = keys.codes.shape[1:3]
    lead, rows, chunks = batch * kv_heads, heads // kv_heads * steps, slots // chunk
    k_order, v_order = (partial.field_order(bits, dim) for bits in (k_bits, v_bits))

    def flat(x):  # [B, K, ...] to f32[B * K, ...]
        return x.reshape(lead, *x.shape[2:]).astype(jnp.float32)

    def decode(q, body):
        keys, values = body
        codes = flat(partial.fields(keys.codes, k_bits, dim))  # [B * K, S, X, Y]
        split = (lead, keys.scale.shape[2], -1, *codes.shape[2:])
        scale, zero = (
            flat(x)[..., k_order].reshape(lead, -1, 1, *codes.shape[2:])
            for x in (keys.scale, keys.zero)
        )
        rebuilt = (codes.reshape(split) * scale + zero).reshape(codes.shape)
        queries = flat(q.reshape(batch, kv_heads, rows, dim))[..., k_order] * dim**-0.5
        return queries.reshape(lead, rows, *codes.shape[2:]), rebuilt, dense_values(values)

    def dense_values(values):
        codes = flat(partial.fields(values.codes, v_bits, dim))
        channel = v_order.reshape(1, 1, *codes.shape[2:])
        own = channel[0, 0] // (dim // values.scale.shape[3])
        scale, zero = (flat(x)[..., own] for x in (values.scale, values.zero))
        rebuilt = codes * scale + zero
        if values.delta is not None:
            delta, index = flat(values.delta), values.index.reshape(lead, slots, -1)
            for entry in range(delta.shape[2]):  # few: comparing is cheaper than a scatter
                hit = index[..., entry, None, None] == channel
                rebuilt += jnp.where(hit, delta[..., entry, None, None], 0.0)
        return rebuilt

    queries, dense_k, dense_v = partial.decoded(decode, lengths, q, (keys, values))
    scores = partial.products(queries, dense_k)
    plain = flat(q.reshape(batch, kv_heads, rows, dim)) * dim**-0.5
    if keys.left is not None:
        left = flat(keys.left).reshape(lead, chunks, chunk, -1)
        small = jnp.einsum("brh,bckh->brck", plain, flat(keys.right))
        scores += jnp.einsum("brck,bctk->brct", small, left).reshape(scores.shape)
    if keys.delta is not None:
        scores += _sparse_scores(plain, flat(keys.delta), keys.index, slots, chunk)
    scores = scores.reshape(batch, kv_heads, rows, slots)
    valid = jnp.arange(slots)[None, None, None] < lengths[:, None, None, None]
    p, m, l = partial.soften(scores, jnp.broadcast_to(valid, (batch, 1, rows, slots)))  # noqa: E741

    p = p.reshape(lead, rows, slots)
    o = jnp.einsum("brs,bsxy->brxy", p, dense_v).reshape(lead, rows, dim)[..., np.argsort(v_order)]
    if values.left is not None:
        left = flat(values.left).reshape(lead, chunks, chunk, -1)
        small = jnp.einsum("brct,bctk->brck", p.reshape(lead, rows, chunks, chunk), left)
        o += jnp.einsum("brck,bckh->brh", small, flat(values.right))
    return partial.by_head(o.reshape(batch, kv_heads, rows, dim), m, l, steps)


def _sparse_scores(q: Array, delta: Array, index: Array, slots: int, chunk: int) -> Array:
    """What the sparse part of the keys adds to the scores of q [L, R, H]: f32[L, R, S]."""
    lead, rows, dim = q.shape
    chunks = slots // chunk
    token = index.reshape(lead, chunks, -1, dim).astype(jnp.int32)
    token += (jnp.arange(chunks, dtype=jnp.int32) * chunk)[None, :, None, None]
    added = delta.reshape(lead, -1, dim, 1) * q.swapaxes(1, 2)[:, None]  # [L, C * e, H, R]
    zeros = jnp.zeros((lead, slots, rows), jnp.float32)
    add = jax.vmap(lambda to, at, x: to.at[at].add(x))
    out = add(zeros, token.reshape(lead, -1), added.reshape(lead, -1, rows))
    return out.swapaxes(1, 2)
