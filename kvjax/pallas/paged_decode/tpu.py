"""paged_decode on TPU: the index maps of the pipeline read the block table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas import compat
from kvjax.pallas import tpu_tiles as tiles

_TOKENS = 256  # of a grid step


def paged_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    lengths: Array,
    *,
    block: int = _TOKENS,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """See `api.paged_decode`.

    A grid step takes several pages, each an operand of its own that the table points anywhere, and
    all KV heads, which a page holds side by side.
    Where head_dim is no multiple of 128, XLA stores a pool with another axis last and copies all of
    it before each call.
    """
    batch, heads, steps, dim = q.shape
    kv_heads, slots = k_pages.shape[1:3]
    q, rows = tiles.by_kv_head(q.astype(k_pages.dtype), kv_heads)
    count, most = max(1, min(block // slots, table.shape[1])), table.shape[1]

    def page(i):
        def at(b, r, j, table, lengths):
            last = tiles.last_block(lengths[b], slots)
            entry = jnp.minimum(jnp.minimum(j * count + i, last), most - 1)
            return jnp.maximum(table[b * most + entry], 0), 0, 0, 0

        return pl.BlockSpec((None, kv_heads, slots, dim), at)

    def row(width):
        return pl.BlockSpec((None, kv_heads, rows, width), lambda b, r, j, *_: (b, 0, r, 0))

    out = pl.pallas_call(
        functools.partial(_kernel, count=count, scale=dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, q.shape[2] // rows, pl.cdiv(most, count)),
            in_specs=[row(dim), *[page(i) for i in range(count)] * 2],
            out_specs=[row(dim), row(1), row(1)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:3], width), jnp.float32) for width in (dim, 1, 1)
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(table.reshape(-1), lengths, q, *[k_pages] * count, *[v_pages] * count)
    o, m, l = (tiles.from_kv_head(x, heads, steps) for x in out)  # noqa: E741
    return o, m[..., 0], l[..., 0]


def _kernel(table, lengths, q, *refs, count, scale):
    pages, (o, m, l) = refs[:-3], refs[-3:]  # noqa: E741
    j, slots = pl.program_id(2), pages[0].shape[1]
    left = lengths[pl.program_id(0)] - j * count * slots
    pl.when(j == 0)(lambda: tiles.clear(o, m, l))

    @pl.when(left > 0)
    def _():
        k, v = (
            jnp.concatenate([page[...] for page in half], 1)
            for half in (pages[:count], pages[count:])
        )
        scores = tiles.dot(q[...], k, (2, 2), k.dtype) * scale
        p, shrink = tiles.soften(scores, tiles.iota(scores.shape, 2) < left, m, l)
        values = jnp.where(tiles.iota(v.shape, 1) < left, v, jnp.zeros((), v.dtype))
        o[...] = o[...] * shrink + tiles.dot(p, values, (2, 1), v.dtype)
