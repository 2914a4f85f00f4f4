"""pooled_decode as a GPU kernel."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import split_k

_BLOCK = 64


def pooled_decode(
    q: Array, k: Array, v: Array, lengths: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See `api.pooled_decode`."""
    steps, dim = q.shape[2:]
    limits = jnp.broadcast_to(lengths[..., None], (*lengths.shape, steps))
    (o,), m, l = split_k.decode(  # noqa: E741
        "pooled_decode", split_k.dense_tile(dim, k.dtype),
        [q], [split_k.of_head(k), split_k.of_head(v)], limits,
        steps=steps, tokens=_BLOCK, block=_BLOCK, capacity=k.shape[2], widths=[dim],
        interpret=interpret,
    )  # fmt: skip
    return o, m, l
