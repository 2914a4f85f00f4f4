"""pooled_decode on TPU: one pass over the valid blocks of each KV head."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kvjax.pallas import tpu_tiles as tiles


def pooled_decode(
    q: Array, k: Array, v: Array, lengths: Array, *, block: int = 1024, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """See `api.pooled_decode`.

    The index of a block of tokens stops at the head's last valid one: a block that repeats is not
    copied again, and nothing is computed for it.
    """
    heads, steps, dim = q.shape[1:]
    batch, kv_heads, slots, _ = k.shape
    q, rows = tiles.by_kv_head(q.astype(k.dtype), kv_heads)
    size = min(block, slots)

    turned = tiles.turned(dim)

    def tokens(b, h, r, j, lengths):
        j = jnp.minimum(j, tiles.last_block(lengths[b * kv_heads + h], size))
        return (b, h, 0, j) if turned else (b, h, j, 0)

    if turned:
        k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
    spec = pl.BlockSpec((None, None, *((dim, size) if turned else (size, dim))), tokens)
    out = tiles.call(
        functools.partial(_kernel, kv_heads=kv_heads, axis=int(turned), scale=dim**-0.5),
        (batch, kv_heads, q.shape[2] // rows, pl.cdiv(slots, size)),
        rows,
        (lengths.reshape(-1),),
        [
            (q, pl.BlockSpec((None, None, rows, dim), lambda b, h, r, j, _: (b, h, r, 0))),
            (k, spec),
            (v, spec),
        ],
        (dim, 1, 1),
        interpret=interpret,
    )
    o, m, l = (tiles.from_kv_head(x, heads, steps) for x in out)  # noqa: E741
    return o, m[..., 0], l[..., 0]


def _kernel(lengths, q, k, v, o, m, l, *, kv_heads, axis, scale):  # noqa: E741
    j, size = pl.program_id(3), k.shape[axis]
    # Axis 0 or 1 of k and v are the tokens.
    left = lengths[pl.program_id(0) * kv_heads + pl.program_id(1)] - j * size
    pl.when(j == 0)(lambda: tiles.clear(o, m, l))

    @pl.when(left > 0)
    def _():
        scores = tiles.dot(q[...], k[...], (1, 1 - axis), k.dtype) * scale
        p, shrink = tiles.soften(scores, tiles.iota(scores.shape, 1) < left, m, l)
        values = jnp.where(tiles.iota(v.shape, axis) < left, v[...], jnp.zeros((), v.dtype))
        o[...] = o[...] * shrink + tiles.dot(p, values, (1, axis), v.dtype)
