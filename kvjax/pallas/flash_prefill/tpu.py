"""flash_prefill on TPU: blocks of keys under the diagonal, from each row's first column on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas import compat
from kvjax.pallas import tpu_tiles as tiles

_LANES = 128


def flash_prefill(
    q: Array,
    k: Array,
    v: Array,
    starts: Array,
    *,
    window: int | None,
    block: int = 512,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """See `api.flash_prefill`."""
    batch, heads, columns, dim = q.shape
    group, size = heads // k.shape[1], min(block, columns)
    count = pl.cdiv(columns, size)

    def low(i, start):
        first = start if window is None else jnp.maximum(start, i * size - window + 1)
        return jnp.maximum(first, 0) // size

    def keys(b, n, i, j, starts):
        return b, n // group, jnp.clip(j, jnp.minimum(low(i, starts[b]), i), i), 0

    row = pl.BlockSpec((None, None, size, dim), lambda b, n, i, j, _: (b, n, i, 0))
    out, lse = pl.pallas_call(
        functools.partial(_kernel, low=low, columns=columns, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, count, count),
            in_specs=[row, *[pl.BlockSpec((None, None, size, dim), keys)] * 2],
            out_specs=[
                row,
                pl.BlockSpec((None, None, 1, size), lambda b, n, i, j, _: (b, n, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((size, dim), jnp.float32),
                pltpu.VMEM((size, 1), jnp.float32),
                pltpu.VMEM((size, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, columns), jnp.float32),
        ],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(starts, q, k, v)
    return out, lse[:, :, 0]


def _kernel(starts, q, k, v, out, lse, o, m, l, *, low, columns, window):  # noqa: E741
    i, j = pl.program_id(2), pl.program_id(3)
    size, dim = q.shape
    first = starts[pl.program_id(0)]
    pl.when(j == 0)(lambda: tiles.clear(o, m, l))

    @pl.when((j >= low(i, first)) & (j <= i))
    def _():
        dtype = tiles.work_dtype(q, k)
        scores = tiles.dot(q[...], k[...], (1, 1), dtype) * dim**-0.5
        row = i * size + tiles.iota(scores.shape, 0)
        column = j * size + tiles.iota(scores.shape, 1)
        mask = (column <= row) & (column >= first)
        if window is not None:
            mask &= column > row - window
        p, shrink = tiles.soften(scores, mask, m, l)
        here = j * size + tiles.iota(v.shape, 0)
        real = (here >= first) & (here < columns)
        values = jnp.where(real, v[...], jnp.zeros((), v.dtype))
        o[...] = o[...] * shrink + tiles.dot(p, values, (1, 0), v.dtype)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        safe = jnp.where(l[...] > 0, l[...], 1.0)
        out[...] = (o[...] / safe).astype(out.dtype)
        # As a row: a column of one lane would be stored 128 times its size.
        lse[...] = jnp.broadcast_to(m[...] + jnp.log(safe), (size, _LANES)).T[:1]
