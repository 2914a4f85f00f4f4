"""Which columns to keep: top-k by score with protected columns, for each KV head."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from kvjax.typed import typed


def real_columns(starts: Array, columns: int) -> Array:
    """bool [B, T]: which columns hold a token."""
    return jnp.arange(columns, dtype=jnp.int32)[None] >= starts[:, None]


def recent_columns(columns: int, count: int) -> Array:
    """bool [T]: the last `count` columns."""
    return jnp.arange(columns, dtype=jnp.int32) >= columns - count


def sink_columns(starts: Array, columns: int, count: int) -> Array:
    """bool [B, T]: the first `count` real columns of each row."""
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    return (column >= starts[:, None]) & (column < starts[:, None] + count)


@typed
def top_columns(
    scores: Float[Array, "B K T"],
    budget: int,
    starts: Int32[Array, " B"],
    protected: Bool[Array, "_ _ T"] | None = None,
) -> tuple[Int32[Array, "B K C"], Int32[Array, "B K"]]:
    """The columns of the largest scores, protected ones first, never a pad.

    Args:
        scores: f32[B, K, T], larger = kept; NaN counts as the smallest.
        budget: tokens kept per KV head, at least 1.
        starts: i32[B], first real column.
        protected: bool [1 or B, 1 or K, T], columns that are kept before all others (if they fit).

    Returns:
        columns i32[B, K, C], ascending, C = min(budget, T), and lengths i32[B, K] = min(C, real
        columns); entries from the length on are T.

    Raises:
        ValueError: for a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} must be at least 1 token per KV head.")
    batch, heads, total = scores.shape
    count = min(budget, total)
    real = real_columns(starts, total)[:, None]
    finite = jnp.where(jnp.isnan(scores), -jnp.inf, scores.astype(jnp.float32))
    # Classes, not large scores: a score can tie with any number, never with a class.
    rank = jnp.clip(finite, -3e38, 3e38)
    if protected is not None:
        rank = jnp.where(protected, jnp.inf, rank)
    rank = jnp.where(real, rank, -jnp.inf)
    _, columns = lax.top_k(rank, count)
    lengths = jnp.minimum(total - starts, count).astype(jnp.int32)
    valid = jnp.arange(count, dtype=jnp.int32)[None, None] < lengths[:, None, None]
    columns = jnp.sort(jnp.where(valid, columns, total).astype(jnp.int32), -1)
    return columns, jnp.broadcast_to(lengths[:, None], (batch, heads))
