"""The specification of pooled_decode."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial


def pooled_decode(q: Array, k: Array, v: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """See `api.pooled_decode`."""
    valid = jnp.arange(k.shape[2])[None, None, :] < lengths[..., None]  # [B, K, S]
    shape = (*valid.shape[:2], q.shape[2], valid.shape[2])
    return partial.dense(q, k, v, jnp.broadcast_to(valid[:, :, None], shape))
