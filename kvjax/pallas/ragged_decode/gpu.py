"""ragged_decode as a GPU kernel: each KV head reads its own run of the pool only."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import split_k


def ragged_decode(
    q: Array, k: Array, v: Array, slot_starts: Array, lengths: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See `api.ragged_decode`."""
    steps, dim = q.shape[2:]
    block, warps, stages = split_k.dense_plan(k.dtype)
    share = lengths.shape[1] // k.shape[1]  # KV heads of a pool

    def of_pool(x):
        return split_k.Operand(x, (None, None, *x.shape[2:]), lambda b, h: (b, h // share, 0, 0))

    def load(refs, side, at, head):
        return split_k.rows(refs[side], refs[2][head] + at, dim)

    limits = jnp.broadcast_to(lengths[..., None], (*lengths.shape, steps))
    (o,), m, l = split_k.decode(  # noqa: E741
        "ragged_decode", split_k.dense_tile(dim, k.dtype, load),
        [q], [of_pool(k), of_pool(v), split_k.of_row(slot_starts)], limits,
        steps=steps, tokens=block, block=block, capacity=k.shape[2] // share, widths=[dim],
        interpret=interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return o, m, l
