"""Which columns to keep: top-k by score with protected columns, budgets over layers and heads."""

import math
from collections.abc import Sequence

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


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round non-negative shares to integers that sum to `total`, the nearest way.

    Args:
        shares: real, summing to about `total`.
        total: their exact sum.

    Returns:
        Every share rounded down, or up where its fraction is among the largest (the first of ties).
    """
    floors = [math.floor(share + 1e-9) for share in shares]
    missing = total - sum(floors)
    order = sorted(range(len(shares)), key=lambda i: (floors[i] - shares[i], i))
    for i in order[: max(missing, 0)]:
        floors[i] += 1
    return floors


def pyramid_budgets(
    budget: int, window: int, num_layers: int, beta: float, num_tokens: int | None = None
) -> list[int]:
    """PyramidKV's budgets: a straight line over layers, their mean exactly `budget`.

    The last layer gets least: (budget - window) / beta beside the window, the first as much more
    than the mean as the last gets less; no layer more than the prompt has.

    Args:
        budget: mean tokens kept per KV head and layer, the window included.
        window: W, tokens every layer keeps.
        num_layers: L.
        beta: the slope, >= 1; 1 is flat.
        num_tokens: of the prompt; None: any.

    Returns:
        Tokens of each layer, the window included, non-increasing, summing to L * budget.

    Raises:
        ValueError: for a beta below 1.

    Source: arXiv 2406.02069, section 3.3; Zefan-Cai/KVCache-Factory pyramidkv_utils.py.
    Differs from the reference: it rounds the step between layers down, which spends up to 11 %
    more than was asked for.
    """
    if beta < 1:
        raise ValueError(f"beta={beta} must be at least 1, where all layers are alike.")
    mean = budget - window
    least, most = mean / beta, 2 * mean - mean / beta
    limit = math.inf if num_tokens is None else max(num_tokens - window, 0)
    if mean >= limit:
        return [budget] * num_layers
    if most > limit:
        least, most = 2 * mean - limit, limit
    step = (most - least) / max(num_layers - 1, 1)
    line = [most - step * i for i in range(num_layers)] if num_layers > 1 else [float(mean)]
    return [window + tokens for tokens in largest_remainder(line, mean * num_layers)]


@typed
def adaptive_mask(
    scores: Float[Array, "B P Q T"],
    budget: int,
    floor: float | Array,
    starts: Int32[Array, " B"],
    protected: Bool[Array, "B T"],
) -> Bool[Array, "B P Q T"]:
    """Share a pool's budget over its heads by their scores, with a floor for each (AdaKV).

    The Q * budget largest scores of a pool say how many columns each head deserves; that is mixed
    with the even share, (1 - floor) deserved + floor * budget, rounded by largest remainder so
    that the sum is exact; each head keeps its best columns. Protected columns are kept on top.

    Args:
        scores: f32[B, P, Q, T], larger = kept; Q heads share a pool.
        budget: unprotected tokens per head, on average, >= 0.
        floor: alpha in [0, 1], the part that is shared evenly.
        starts: i32[B], first real column.
        protected: bool[B, T], columns that every head keeps.

    Returns:
        bool [B, P, Q, T]; a row with no more unprotected columns than the budget keeps all of them.

    Source: AdaKV (arXiv 2407.11550), algorithms 1 and 2; FFY0/AdaKV snapkv_utils.py.
    Differs from the reference: the head budgets sum to the pool's budget exactly; each row has its
    own; a positive floor is at least one token a head (if the budget is).
    """
    batch, pools, heads, total = scores.shape
    free = real_columns(starts, total) & ~protected  # [B, T]
    count = jnp.minimum(free.sum(-1), budget).astype(jnp.int32)[:, None]  # [B, 1], a head
    rank_of = jnp.where(jnp.isnan(scores), -3e38, jnp.clip(scores, -3e38, 3e38))
    rank_of = jnp.where(free[:, None, None], rank_of, -jnp.inf)

    def places(x):  # place of each entry in descending order, ties to the earlier
        order = jnp.argsort(-x, axis=-1, stable=True)
        return jnp.argsort(order, axis=-1)

    place = places(rank_of.reshape(batch, pools, heads * total)).reshape(scores.shape)
    top = (place < (count * heads)[..., None, None]) & free[:, None, None]
    deserved = top.sum(-1).astype(jnp.float32)  # [B, P, Q]
    # With a floor every head gets a token, also where its even share would not hold one.
    even = count[..., None].astype(jnp.float32)
    floor = jnp.where((floor > 0) & (even > 0), jnp.maximum(floor, 1 / jnp.maximum(even, 1)), floor)
    share = deserved * (1 - floor) + floor * even
    whole = jnp.floor(share + 1e-4)
    missing = count * heads - whole.sum(-1).astype(jnp.int32)
    caps = whole.astype(jnp.int32) + (places(share - whole) < missing[..., None])
    within = places(rank_of) < caps[..., None]
    return (within & free[:, None, None]) | (protected & real_columns(starts, total))[:, None, None]
