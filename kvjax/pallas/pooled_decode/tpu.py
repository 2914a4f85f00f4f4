"""pooled_decode on TPU: one pass over the valid blocks of each KV head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kvjax.pallas import partial
from kvjax.pallas import tpu_tiles as tiles
from kvjax.pallas.pooled_decode.xla import visible


def pooled_decode(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    skip: int,
    sums: bool,
    block: int = 1024,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """See `api.pooled_decode`.

    The index of a block of tokens stops at the head's last valid one: a block that repeats is not
    copied again, and nothing is computed for it. For the sums the kernel stores the scores.
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

    def place(b, h, r, j, lengths):
        return b, h, r, jnp.minimum(j, tiles.last_block(lengths[b * kv_heads + h], size))

    scores = jax.ShapeDtypeStruct((*q.shape[:3], pl.cdiv(slots, size) * size), jnp.float32)
    others = [(scores, pl.BlockSpec((None, None, rows, size), place))] if sums else []
    out = tiles.call(
        functools.partial(_kernel, kv_heads=kv_heads, axis=int(turned), scale=dim**-0.5, skip=skip),
        (batch, kv_heads, q.shape[2] // rows, pl.cdiv(slots, size)),
        rows,
        (lengths.reshape(-1),),
        [
            (q, pl.BlockSpec((None, None, rows, dim), lambda b, h, r, j, _: (b, h, r, 0))),
            (k, spec),
            (v, spec),
        ],
        (dim, 1, 1),
        others=others,
        interpret=interpret,
    )
    o, m, l = (tiles.from_kv_head(x, heads, steps) for x in out[:3])  # noqa: E741
    m, l = m[..., 0], l[..., 0]  # noqa: E741
    if not sums:
        return o, m, l
    scores = out[3][:, :, : heads // kv_heads * steps, :slots]
    return o, m, l, partial.slot_sums(scores, m, l, visible(lengths, slots, skip))


def _kernel(lengths, q, k, v, o, m, l, *others, kv_heads, axis, scale, skip):  # noqa: E741
    j, size = pl.program_id(3), k.shape[axis]
    # Axis 0 or 1 of k and v are the tokens.
    left = lengths[pl.program_id(0) * kv_heads + pl.program_id(1)] - j * size
    pl.when(j == 0)(lambda: tiles.clear(o, m, l))

    @pl.when(left > 0)
    def _():
        scores = tiles.dot(q[...], k[...], (1, 1 - axis), k.dtype) * scale
        for ref in others:
            ref[...] = scores
        seen = tiles.iota(scores.shape, 1) < left
        if skip:
            seen &= tiles.iota(scores.shape, 1) >= skip - j * size
        p, shrink = tiles.soften(scores, seen, m, l)
        values = jnp.where(tiles.iota(v.shape, axis) < left, v[...], jnp.zeros((), v.dtype))
        o[...] = o[...] * shrink + tiles.dot(p, values, (1, axis), v.dtype)
