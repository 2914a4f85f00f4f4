"""The specification of ragged_decode: one product with all heads of a pool, then a mask.

The pool is read once, whatever the number of heads; gathering each slot's own queries instead
copies G * T rows of H for every slot.
"""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial


def ragged_decode(
    q: Array, k: Array, v: Array, slot_starts: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    """See `api.ragged_decode`."""
    batch, heads, steps, _ = q.shape
    pools, slots = k.shape[1:3]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    own = (slot >= slot_starts[..., None]) & (slot < (slot_starts + lengths)[..., None])
    own = own.reshape(batch, pools, -1, 1, slots)  # [B, P, K / P, 1, S]
    rows = heads // lengths.shape[1] * steps
    own = jnp.broadcast_to(own, (*own.shape[:3], rows, slots)).reshape(batch, pools, -1, slots)
    p, m, l = partial.soften(partial.logits(q, k), own)  # noqa: E741
    return partial.by_head(partial.weigh(p, v), m, l, steps)
