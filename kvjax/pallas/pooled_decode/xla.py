"""The specification of pooled_decode."""

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import partial


def pooled_decode(
    q: Array, k: Array, v: Array, lengths: Array, *, skip: int, sums: bool
) -> tuple[Array, ...]:
    """See `api.pooled_decode`."""
    scores = partial.logits(q, k)  # [B, K, G*T, S]
    seen = visible(lengths, k.shape[2], skip)[:, :, None]
    p, m, l = partial.soften(scores, jnp.broadcast_to(seen, scores.shape))  # noqa: E741
    part = partial.by_head(partial.weigh(p, v), m, l, q.shape[2])
    if not sums:
        return part
    return *part, (p / jnp.where(l > 0, l, 1.0)[..., None]).sum(2)


def visible(lengths: Array, slots: int, skip: int) -> Array:
    """bool[B, K, S], the slots [skip, lengths) of each KV head."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    return (slot >= skip) & (slot < lengths[..., None])
