"""Softmax partials and their merge; dense attention, the oracle of every cache."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from kvjax.pallas import partial as _partial
from kvjax.pytree import array, pytree
from kvjax.typed import typed


@pytree
class Partial:
    """Attention over a part of the tokens, before normalisation (online softmax).

    Invariants: o = sum exp(s - m) v and l = sum exp(s - m) over the part; a query that sees none
    of it has o = 0 and l = 0.
    """

    o: Array = array("batch", "head", "column", "head_dim")  # f32[B, N, T, H]
    m: Array = array("batch", "head", "column")  # f32[B, N, T]
    l: Array = array("batch", "head", "column")  # f32[B, N, T]  # noqa: E741


def merge(a: Partial, b: Partial) -> Partial:
    """The partial of the union of two disjoint parts.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    m = jnp.maximum(a.m, b.m)
    x, y = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Partial(a.o * x[..., None] + b.o * y[..., None], m, a.l * x + b.l * y)


def finish(part: Partial) -> Array:
    """Normalise: f32[B, N, T, H]; zero where a query saw nothing."""
    return part.o / jnp.where(part.l > 0, part.l, 1.0)[..., None]


@typed
def dense_partial(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B _ T S"],
) -> Partial:
    """Attention over dense keys and values under any mask.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, S, H], rotated.
        v: [B, K, S, H].
        mask: bool [B, 1 or K, T, S], what each query sees.

    Returns:
        The partial over the S slots.
    """
    return Partial(*_partial.dense(q, k, v, mask))


def visible(query_positions: Array, key_positions: Array, window: int | None = None) -> Array:
    """Which keys a query may see: real, not later than it, inside the sliding window.

    Args:
        query_positions: i32[B, T], -1 = pad.
        key_positions: i32[B, S] or i32[B, K, S], -1 = empty slot.
        window: sliding window of the layer in tokens, None = global.

    Returns:
        bool [B, 1 or K, T, S].
    """
    key = key_positions if key_positions.ndim == 3 else key_positions[:, None]
    key, query = key[:, :, None, :], query_positions[:, None, :, None]
    mask = (key >= 0) & (key <= query)
    if window is not None:
        mask &= key > query - window
    return mask


@typed
def attend_dense(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    query_positions: Int32[Array, "B T"],
    key_positions: Int32[Array, "B K S"],
    window: int | None = None,
) -> Float[Array, "B N T H"]:
    """Dense attention over a materialised cache: what every `step` must equal.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, S, H], rotated.
        v: [B, K, S, H].
        query_positions: i32[B, T], -1 = pad.
        key_positions: i32[B, K, S], -1 = empty.
        window: sliding window of the layer in tokens, None = global.

    Returns:
        f32[B, N, T, H]; zero at pads.
    """
    return finish(dense_partial(q, k, v, visible(query_positions, key_positions, window)))
