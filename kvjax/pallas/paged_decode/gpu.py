"""paged_decode as a GPU kernel: the block table is read where the tokens are."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import split_k


def paged_decode(
    q: Array, k_pages: Array, v_pages: Array, table: Array, lengths: Array, *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See `api.paged_decode`."""
    batch, _, steps, dim = q.shape
    pages, kv_heads, size, _ = k_pages.shape
    block, warps, stages = split_k.dense_plan(k_pages.dtype)

    def of_pool(x):
        return split_k.Operand(x, (pages, None, size, dim), lambda b, h: (0, h, 0, 0))

    def load(refs, side, at, head):
        entry = split_k.gather(refs[2], jnp.minimum(at // size, table.shape[1] - 1))
        page, slot = jnp.maximum(entry, 0)[:, None], (at % size)[:, None]
        return split_k.gather(refs[side], page, slot, split_k.columns(dim)[None])

    limits = jnp.broadcast_to(lengths[:, None, None], (batch, kv_heads, steps))
    (o,), m, l = split_k.decode(  # noqa: E741
        "paged_decode", split_k.dense_tile(dim, k_pages.dtype, load),
        [q], [of_pool(k_pages), of_pool(v_pages), split_k.of_row(table)], limits,
        steps=steps, tokens=block, block=block, capacity=table.shape[1] * size, widths=[dim],
        interpret=interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, m, l
