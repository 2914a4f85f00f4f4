"""flash_prefill on GPUs: a program holds a block of queries and walks the keys that it may see."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax.pallas import compat
from kvjax.pallas.partial import MASKED

_LOG2E = math.log2(math.e)


def blocks(dim: int, dtype: jnp.dtype, whole: bool) -> tuple[int, int, int, int]:
    """Queries and keys of a block (the first a multiple of the second), warps and stages.

    `whole`: all tiles are full; masks of those that are not need registers.
    """
    if dtype.itemsize > 2:
        return (32, 32, 8, 2) if dim <= 128 else (16, 16, 8, 1)
    if dim <= 64:
        return 128, 64, 8, 3
    return (128, 64 if whole else 32, 8, 2) if dim <= 128 else (64, 32, 8, 2)


def dot(a: Array, b: Array, contract: tuple[int, int], plain: bool) -> Array:
    """Product of two tiles over one axis of each: float32 sums, full products of float32.

    Tensor cores make a product of float32 of three of their own, which a CPU does not know; plain
    ones are slower.
    """
    dtype, precision = jnp.promote_types(a.dtype, b.dtype), None
    if dtype == jnp.float32:
        three = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        precision = lax.Precision.HIGHEST if plain else three
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def load(ref, lead: tuple, at: Array, count: int, size: int | None, dim: int) -> Array:
    """Rows [at, at + count) of a padded ref [*lead, .., width] whose arrays end at `dim` channels.

    With a size, rows from there on are zero; without, none are read. Other channels are zero.
    """
    width, mask = ref.shape[-1], None
    if size is not None and size % count:
        mask = (at + jnp.arange(count) < size)[:, None]
    if dim < width:
        real = (jnp.arange(width) < dim)[None]
        mask = real if mask is None else mask & real
    tile = ref.at[(*lead, pl.ds(at, count), slice(None))]
    if mask is None:
        return plgpu.load(tile)
    return plgpu.load(tile, mask=jnp.broadcast_to(mask, (count, width)), other=0.0)


def flash_prefill(
    q: Array, k: Array, v: Array, starts: Array, *, window: int | None, interpret: bool = False
) -> tuple[Array, Array]:
    """See `api.flash_prefill`."""
    batch, heads, columns, dim = q.shape
    group, width = heads // k.shape[1], max(16, pl.next_power_of_2(dim))
    rows, keys, warps, stages = blocks(
        dim, jnp.promote_types(q.dtype, k.dtype), dim == width and columns % 128 == 0
    )
    count = pl.cdiv(columns, rows)
    q, k, v = (x.reshape(-1, columns, dim) for x in (q, k, v))

    def mine(h, i):  # the longest first
        return h, count - 1 - i

    of_query = pl.BlockSpec((None, rows, width), lambda h, i: (*mine(h, i), 0))
    of_key = pl.BlockSpec((None, count * rows, width), lambda h, i: (h // group, 0, 0))
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            heads=heads,
            columns=columns,
            dim=dim,
            keys=keys,
            window=window,
            interpret=interpret,
        ),
        grid=(batch * heads, count),
        in_specs=[pl.BlockSpec((batch,), lambda h, i: (0,)), of_query, of_key, of_key],
        out_specs=[of_query, pl.BlockSpec((None, rows), mine)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ],
        compiler_params=compat.gpu_params(warps, stages),
        interpret=interpret,
        name="flash_prefill",
    )(starts, q, k, v)
    return out.reshape(batch, heads, columns, dim), lse.reshape(batch, heads, columns)


def _kernel(
    starts_ref,
    q_ref,
    k_ref,
    v_ref,
    out_ref,
    lse_ref,
    *,
    heads,
    columns,
    dim,
    keys,
    window,
    interpret,
):
    rows, width = q_ref.shape
    at = (pl.num_programs(1) - 1 - pl.program_id(1)) * rows
    first = starts_ref[pl.program_id(0) // heads]
    row = at + jnp.arange(rows)
    inside = jnp.broadcast_to(
        (row < columns)[:, None] & (jnp.arange(width) < dim)[None], (rows, width)
    )
    q = plgpu.load(q_ref, mask=inside, other=0.0)

    def step(j, carry, masked):
        o, m, l = carry  # noqa: E741
        size = columns if masked else None
        kb, vb = (load(ref, (), j * keys, keys, size, dim) for ref in (k_ref, v_ref))
        s = dot(q, kb, (1, 1), interpret) * (dim**-0.5 * _LOG2E)
        if masked:
            column = j * keys + jnp.arange(keys)
            mask = (column[None] <= row[:, None]) & (column >= first)[None]
            if window is not None:
                mask &= column[None] > row[:, None] - window
            s = jnp.where(mask, s, MASKED)
        new = jnp.maximum(m, s.max(1))
        p = jnp.exp2(s - new[:, None])
        if masked:
            p = jnp.where(mask, p, 0.0)
        shrink = jnp.exp2(m - new)
        o = o * shrink[:, None] + dot(p.astype(vb.dtype), vb, (1, 0), interpret)
        return o, new, l * shrink + p.sum(1)

    # Only the blocks at both ends of the range hold columns that some query does not see.
    low = first if window is None else jnp.maximum(first, at - window + 1)
    whole = first if window is None else jnp.maximum(first, at + rows - window)
    low, high = jnp.maximum(low, 0) // keys, pl.cdiv(jnp.minimum(at + rows, columns), keys)
    diagonal = jnp.maximum(at // keys, low)
    whole = jnp.clip((jnp.maximum(whole, 0) + keys - 1) // keys, low, diagonal)
    carry = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    carry = lax.fori_loop(low, whole, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(whole, diagonal, functools.partial(step, masked=False), carry)
    o, m, l = lax.fori_loop(  # noqa: E741
        diagonal, high, functools.partial(step, masked=True), carry
    )
    safe = jnp.where(l > 0, l, 1.0)
    plgpu.store(out_ref, (o / safe[:, None]).astype(out_ref.dtype), mask=inside)
    plgpu.store(lse_ref, m / _LOG2E + jnp.log(safe), mask=row < columns)
