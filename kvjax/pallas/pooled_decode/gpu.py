"""pooled_decode as a GPU kernel."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial, split_k
from kvjax.pallas.pooled_decode.xla import visible


def pooled_decode(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    *,
    skip: int,
    sums: bool,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """See `api.pooled_decode`.

    What a slot gets of a query is known when all shares of the tokens are merged: the kernel
    stores the scores, a number a slot and query, and the sums are made of them afterwards.
    """
    steps, dim = q.shape[2:]
    block, warps, stages = split_k.dense_plan(k.dtype)
    slots = k.shape[2] - skip

    def load(refs, side, at, head):
        return split_k.rows(refs[side], at + skip, dim)

    limits = jnp.maximum(lengths - skip, 0)[..., None]
    (o,), m, l, *scores = split_k.decode(  # noqa: E741
        "pooled_decode", split_k.dense_tile(dim, k.dtype, load if skip else None),
        [q], [split_k.of_head(k), split_k.of_head(v)],
        jnp.broadcast_to(limits, (*lengths.shape, steps)),
        steps=steps, tokens=block, block=block, capacity=slots, widths=[dim],
        scores=sums, interpret=interpret, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if not sums:
        return o, m, l
    mass = partial.slot_sums(*scores, m, l, visible(lengths - skip, slots, 0))
    return o, m, l, jnp.pad(mass, ((0, 0), (0, 0), (skip, 0)))
