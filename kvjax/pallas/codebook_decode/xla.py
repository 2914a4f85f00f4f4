"""The specification of codebook_decode."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import quant
from kvjax.pallas import partial


def codebook_decode(
    q: Array,
    k_codes: Array,
    k_scales: Array,
    v_codes: Array,
    v_scales: Array,
    lengths: Array,
    *,
    keys: tuple[Any, ...],
    values: tuple[Any, ...],
) -> tuple[Array, Array, Array]:
    """See `api.codebook_decode`."""
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, k_codes, v_codes = lax.optimization_barrier((q, k_codes, v_codes))
    batch, heads, steps, features = q.shape
    kv_heads, slots = k_codes.shape[1:3]
    lead, rows = batch * kv_heads, heads // kv_heads * steps

    def decode(q, body):
        queries = q.astype(jnp.float32).reshape(lead, rows, features)
        k_codes, v_codes = (x.reshape(lead, slots, -1) for x in body)
        dim = sum(part.dim for part in keys)
        return queries * dim**-0.5, _features(k_codes, keys), _features(v_codes, values)

    queries, k, v = partial.decoded(decode, lengths, q, (k_codes, v_codes))
    scales = _scales(k_scales.reshape(lead, slots, -1), keys)
    scores, at = 0.0, 0
    for x, order, scale in zip(k, _orders(keys), scales, strict=True):
        own = queries[..., at + order].reshape(lead, rows, *x.shape[2:])
        scores += partial.products(own, x) * scale[:, None]
        at += len(order)

    scores = scores.reshape(batch, kv_heads, rows, slots)
    seen = jnp.arange(slots)[None, None, None] < lengths[:, None, :, None]
    p, m, l = partial.soften(scores, partial.expand(seen, heads, kv_heads))  # noqa: E741

    # The scales of a value are its token's, so they go into p.
    p, out = p.reshape(lead, rows, slots), []
    scales = _scales(v_scales.reshape(lead, slots, -1), values)
    for x, order, scale in zip(v, _orders(values), scales, strict=True):
        product = jnp.einsum("brs,bsxy->brxy", p * scale[:, None], x)
        out.append(product.reshape(lead, rows, -1)[..., np.argsort(order)])
    o = jnp.concatenate(out, -1)
    return partial.by_head(o.reshape(batch, kv_heads, rows, -1), m, l, steps)


def _features(codes: Array, parts: tuple[Any, ...]) -> list[Array]:
    """Levels and signs of every part: f32[lead, S, X, Y] each, in the order of `_orders`."""
    out, at = [], 0
    for part in parts:
        own = partial.fields(codes[..., at : at + part.code_bytes], part.bits, part.dim)
        at += part.code_bytes
        if part.level_bits:
            index = own & (2**part.level_bits - 1)
            out.append(quant.coordinate_decode(index, part.level_bits, part.dim))
        if part.signs:
            out.append((own >> part.level_bits).astype(jnp.float32) * 2 - 1)
    return out


def _orders(parts: tuple[Any, ...]) -> list[np.ndarray]:
    """The channel of its part that each entry of `_features` is: int[H] each."""
    each = [(partial.field_order(p.bits, p.dim), (p.level_bits > 0) + p.signs) for p in parts]
    return [order for order, times in each for _ in range(times)]


def _scales(scales: Array, parts: tuple[Any, ...]) -> list[Array]:
    """What each entry of `_features` is multiplied by: f32[lead, S] each."""
    scales, out, at = scales.astype(jnp.float32), [], 0
    for part in parts:
        norm = scales[..., at]
        if part.level_bits:
            out.append(norm)
        if part.signs:
            out.append(norm * scales[..., at + 1] * part.sign_scale)
        at += part.scales
    return out
