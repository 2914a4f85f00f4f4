"""The specification of quant_decode."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.pallas import partial


def quant_decode(
    q: Array,
    k_codes: Array,
    k_scale: Array,
    k_zero: Array,
    v_codes: Array,
    v_scale: Array,
    v_zero: Array,
    lengths: Array,
    *,
    k_bits: int,
    v_bits: int,
) -> tuple[Array, Array, Array]:
    """See `api.quant_decode`."""
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, k_codes, v_codes = lax.optimization_barrier((q, k_codes, v_codes))
    batch, heads, steps, dim = q.shape
    kv_heads, k_groups, v_groups = k_codes.shape[1], k_scale.shape[2], v_scale.shape[3]
    lead, rows = batch * kv_heads, heads // kv_heads * steps
    slots = min(k_codes.shape[2], v_codes.shape[2])
    k_order, v_order = (partial.field_order(bits, dim) for bits in (k_bits, v_bits))

    def flat(x):  # [B, K, S, ...] to f32[B * K, S, ...]
        return x.reshape(lead, *x.shape[2:]).astype(jnp.float32)

    def decode(q, body):
        k_codes, k_scale, k_zero, v_codes = body
        codes = flat(partial.fields(k_codes, k_bits, dim))  # [B * K, S, X, Y]
        split = (lead, k_groups, -1, *codes.shape[2:])
        scale, zero = (flat(x)[..., k_order].reshape(split) for x in (k_scale, k_zero))
        keys = (codes.reshape(split) * scale + zero).reshape(codes.shape)[:, :slots]
        queries = flat(q.reshape(batch, kv_heads, rows, dim))[..., k_order] * dim**-0.5
        queries = queries.reshape(lead, rows, *codes.shape[2:])
        return queries, keys, flat(partial.fields(v_codes, v_bits, dim))[:, :slots]

    queries, keys, codes = partial.decoded(decode, lengths, q, (k_codes, k_scale, k_zero, v_codes))
    scores = partial.products(queries, keys).reshape(batch, kv_heads, rows, slots)
    valid = jnp.arange(slots)[None, None, None] < lengths[:, None, None, None]
    p, m, l = partial.soften(scores, jnp.broadcast_to(valid, (batch, 1, rows, slots)))  # noqa: E741

    # The scale of a value is its token's, so it goes into p, once for each group of channels.
    scale, zero = (flat(x)[:, :slots].swapaxes(1, 2)[:, :, None] for x in (v_scale, v_zero))
    p = p.reshape(lead, 1, rows, slots)
    weights = (p * scale).reshape(lead, v_groups * rows, slots)
    products = jnp.einsum("brs,bsxy->brxy", weights, codes)
    products = products.reshape(lead, v_groups, rows, dim)[..., np.argsort(v_order)]
    own = np.arange(dim) // (dim // v_groups) == np.arange(v_groups)[:, None]
    o = jnp.where(own[None, :, None], products + (p * zero).sum(-1, keepdims=True), 0.0).sum(1)
    return partial.by_head(o.reshape(batch, kv_heads, rows, dim), m, l, steps)
