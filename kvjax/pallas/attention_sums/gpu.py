"""attention_sums on GPUs: a program holds a block of keys and walks the queries that see it."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax.pallas import compat
from kvjax.pallas.flash_prefill.gpu import dot, load

_LOG2E = math.log2(math.e)
_CHANNELS = 64  # of a product of rows that are too wide
_UNSEEN = 1e30  # a log-sum-exp that leaves no probability


def attention_sums(
    q: Array,
    k: Array,
    lse: Array,
    starts: Array,
    *,
    last: int | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.attention_sums`."""
    batch, heads, columns, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    width = max(16, pl.next_power_of_2(dim))
    exact = jnp.promote_types(q.dtype, k.dtype).itemsize > 2
    size = 16 if exact else 64 if dim <= 128 else 32
    count = pl.cdiv(columns, size)
    whole = pl.BlockSpec((None, group, count * size, width), lambda i, h: (h, 0, 0, 0))
    sums = pl.pallas_call(
        functools.partial(
            _kernel,
            kv_heads=kv_heads,
            columns=columns,
            dim=dim,
            last=min(last or columns, columns),
            interpret=interpret,
        ),
        grid=(count, batch * kv_heads),
        in_specs=[
            pl.BlockSpec((batch,), lambda i, h: (0,)),
            whole,
            pl.BlockSpec((None, size, width), lambda i, h: (h, i, 0)),
            pl.BlockSpec((None, group, count * size), lambda i, h: (h, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, size), lambda i, h: (h, i)),
        out_shape=jax.ShapeDtypeStruct((batch * kv_heads, columns), jnp.float32),
        compiler_params=compat.gpu_params(8 if dim > 128 else 4, 1 if exact and dim > 128 else 2),
        interpret=interpret,
        name="attention_sums",
    )(
        starts,
        q.reshape(-1, group, columns, dim),
        k.reshape(-1, columns, dim),
        lse.reshape(-1, group, columns),
    )
    return sums.reshape(batch, kv_heads, columns)


def _kernel(
    starts_ref, q_ref, k_ref, lse_ref, sums_ref, *, kv_heads, columns, dim, last, interpret
):
    (size,) = sums_ref.shape
    group, width = q_ref.shape[0], k_ref.shape[-1]
    mine = pl.program_id(0)
    first = starts_ref[pl.program_id(1) // kv_heads]
    column = mine * size + jnp.arange(size)
    some = width if q_ref.dtype.itemsize == 2 or width <= 128 else _CHANNELS

    def keys(at):
        inside = (column < columns)[:, None] & (at + jnp.arange(some) < dim)[None]
        return plgpu.load(k_ref.at[:, pl.ds(at, some)], mask=inside, other=0.0)

    k = keys(0)

    def scores(head, j):
        """Of the keys and a block of queries."""
        if some == width:
            q = load(q_ref, (head,), j * size, size, columns, dim)
            return dot(k, q, (1, 1), interpret)

        def add(part, s):  # wide float32 rows do not stay in registers
            here = pl.ds(part * some, some)
            real = j * size + jnp.arange(size) < columns
            real = real[:, None] & (part * some + jnp.arange(some) < dim)[None]
            q = plgpu.load(q_ref.at[head, pl.ds(j * size, size), here], mask=real, other=0.0)
            return s + dot(keys(part * some), q, (1, 1), interpret)

        return lax.fori_loop(0, width // some, add, jnp.zeros((size, size), jnp.float32))

    def add(head, j, sums, masked):
        row = j * size + jnp.arange(size)
        norm = plgpu.load(
            lse_ref.at[head, pl.ds(j * size, size)], mask=row < columns, other=_UNSEEN
        )
        norm = jnp.where((row >= first) & (row >= columns - last), norm * _LOG2E, _UNSEEN)
        s = scores(head, j) * (dim**-0.5 * _LOG2E)
        p = jnp.exp2(s - norm[None])
        return sums + (jnp.where(column[:, None] <= row[None], p, 0.0) if masked else p)

    # Only the block on the diagonal is masked; the heads of the group share one loop.
    start = jnp.maximum(mine, (columns - last) // size)
    end = jnp.where((mine + 1) * size > first, pl.cdiv(columns, size), start)
    on_diagonal = group * ((start == mine) & (end > start)).astype(jnp.int32)
    sums = lax.fori_loop(
        jnp.int32(0),
        on_diagonal,
        lambda head, sums: add(head, mine, sums, True),
        jnp.zeros((size, size), jnp.float32),
    )
    start = jnp.maximum(start, mine + 1)
    span = jnp.maximum(end - start, 1)
    sums = lax.fori_loop(
        jnp.int32(0),
        group * jnp.maximum(end - start, 0),
        lambda i, sums: add(i // span, start + i % span, sums, False),
        sums,
    )
    sums = jnp.where(column >= first, sums.sum(1), 0.0)
    plgpu.store(sums_ref, sums, mask=column < columns)
