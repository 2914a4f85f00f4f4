"""How important is a token: what the observation window saw, norms, and hashes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from kvjax.pallas import partial
from kvjax.pallas.attention_sums.api import attention_sums
from kvjax.pallas.dispatch import beside
from kvjax.pallas.flash_prefill.api import flash_prefill
from kvjax.pallas.partial import MASKED
from kvjax.pytree import array, pytree
from kvjax.typed import typed
from kvjax.types import PromptKV


@pytree
class Observation:
    """The exact attention of the last W queries of each group, without its T x W matrix.

    Invariants: m = G * W observation queries a KV head; a query before the row's first token is
    `seen` False and has weight 0 everywhere. alpha = exp(q . k / sqrt(H) - lse).
    """

    q: Array = array("batch", "kv_head", "query", "head_dim")  # f32[B, K, m, H], rotated
    columns: Array = array("query")  # i32[m], column of each query
    seen: Array = array("batch", "query")  # bool[B, m]
    lse: Array = array("batch", "kv_head", "query")  # f32[B, K, m], log-sum-exp of the logits
    y: Array = array("batch", "kv_head", "query", "head_dim")  # f32[B, K, m, H], exact output


def group_queries(q: Array, kv_heads: int, window: int) -> Array:
    """The last `window` queries of [B, N, T, H] by KV head: f32[B, K, G * window, H]."""
    batch, heads, columns, dim = q.shape
    last = q[:, :, columns - window :].astype(jnp.float32)
    return last.reshape(batch, kv_heads, heads // kv_heads * window, dim)


def probabilities(
    q: Array, columns: Array, seen: Array, k: Array, starts: Array, first: Array | int = 0
) -> tuple[Array, Array]:
    """Logits of observation queries over keys [B, K, S, H] whose columns start at `first`.

    Returns:
        logits f32[B, K, m, S], MASKED where not visible, and the mask bool [B, 1, m, S].
    """
    batch, heads, rows, dim = q.shape
    keys = k.shape[2]
    logits = jnp.einsum(
        "brh,bsh->brs",
        q.reshape(batch * heads, rows, dim),
        k.astype(jnp.float32).reshape(batch * heads, keys, dim),
    ).reshape(batch, heads, rows, keys)
    column = first + jnp.arange(keys, dtype=jnp.int32)
    mask = (column[None, None] <= columns[None, :, None]) & seen[..., None]
    mask &= column[None, None] >= starts[:, None, None]
    return jnp.where(mask[:, None], logits * dim**-0.5, MASKED), mask[:, None]


def in_blocks(block: Callable[[Any, int], Any], columns: int, size: int = 4096) -> list[Any]:
    """Run `block(first, size)` over runs of columns, so that nothing of the whole width is held.

    Args:
        block: function of a first column (traced) and a static number of columns.
        columns: T.
        size: columns of a run.

    Returns:
        The results in order of columns, one a run.
    """
    full = columns // size
    results = []
    if full == 1:
        results = [block(0, size)]
    elif full > 1:
        stacked = lax.map(lambda i: block(i * size, size), jnp.arange(full, dtype=jnp.int32))
        results = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(full)]
    if columns % size:
        results.append(block(full * size, columns % size))
    return results


def observe(prompt: PromptKV, window: int) -> Observation:
    """Log-sum-exp and output of the last `window` queries of every query head.

    Args:
        prompt: one layer of a finished prefill.
        window: W, tokens.

    Returns:
        The observation of m = G * W queries per KV head.

    Raises:
        ValueError: for a window below 1.
    """
    if window < 1:
        raise ValueError(f"window={window} must be at least 1 token: it observes the others.")
    kv_heads, total = prompt.k.shape[1:3]
    window = min(window, total)
    q = group_queries(prompt.q, kv_heads, window)
    group = q.shape[2] // window
    columns = jnp.tile(total - window + jnp.arange(window, dtype=jnp.int32), group)
    seen = columns[None] >= prompt.starts[:, None]

    def block(first, size):
        k, v = (lax.dynamic_slice_in_dim(x, first, size, 2) for x in (prompt.k, prompt.v))
        logits, mask = probabilities(q, columns, seen, k, prompt.starts, first)
        p, m, l = partial.soften(logits, mask)  # noqa: E741
        return partial.weigh(p, v.astype(jnp.float32)), m, l

    parts = in_blocks(block, total)
    m = functools.reduce(jnp.maximum, (part[1] for part in parts))
    l = sum(part[2] * jnp.exp(part[1] - m) for part in parts)  # noqa: E741
    o = sum(part[0] * jnp.exp(part[1] - m)[..., None] for part in parts)
    safe = jnp.where(l > 0, l, 1.0)
    return Observation(q, columns, seen, m + jnp.log(safe), o / safe[..., None])


def window_scores(prompt: PromptKV, observation: Observation, group: str = "sum") -> Array:
    """Probability that the observation queries give each column, summed over the window.

    Args:
        prompt: one layer of a finished prefill.
        observation: of `observe`.
        group: how the G query heads of a KV head count: "sum", "mean" or "max".

    Returns:
        f32[B, K, T].

    Raises:
        ValueError: for another word.

    Source: SnapKV (arXiv 2404.14469), section 4; FasterDecoding/SnapKV snapkv_utils.py.
    """
    if group not in ("sum", "mean", "max"):
        raise ValueError(f"group={group!r} must be 'sum', 'mean' or 'max'.")
    seen = observation
    heads = prompt.q.shape[1] // prompt.k.shape[1]

    def block(first, size):
        k = lax.dynamic_slice_in_dim(prompt.k, first, size, 2)
        logits, mask = probabilities(seen.q, seen.columns, seen.seen, k, prompt.starts, first)
        p = jnp.where(mask, jnp.exp(logits - seen.lse[..., None]), 0.0)
        if group != "max":
            return p.sum(2) / (heads if group == "mean" else 1)
        return p.reshape(*p.shape[:2], heads, -1, size).sum(3).max(2)

    return jnp.concatenate(in_blocks(block, prompt.k.shape[2]), -1)


def observed(prompt: PromptKV, window: int, kernel: int, pooling: str, group: str) -> Array:
    """SnapKV's scores: mean attention of the last `window` queries, pooled along columns.

    Args:
        prompt: one layer of a finished prefill.
        window: W, tokens; the window's own columns are not scored (0).
        kernel: of `pool`, tokens.
        pooling: "avg" or "max".
        group: of `window_scores`.

    Returns:
        f32[B, K, T].
    """
    total = prompt.k.shape[2]
    seen = window_scores(prompt, observe(prompt, window), group) / window
    seen = seen.at[..., max(total - window, 0) :].set(0.0)
    return pool(seen, kernel, pooling)


def column_sums(prompt: PromptKV, impl: str = "auto") -> Array:
    """Attention that each column got from all queries, summed over queries and group.

    Returns:
        f32[B, K, T]; computed here in two passes over the prompt's attention. Prefill gathers the
        same in one (`decode.prefill(column_sums=True)`).
    """
    _, lse = flash_prefill(prompt.q, prompt.k, prompt.v, prompt.starts, impl=impl)
    return attention_sums(prompt.q, prompt.k, lse, prompt.starts, impl=beside(impl))


@typed
def pool(scores: Float[Array, "*rows T"], kernel: int, kind: str = "avg") -> Array:
    """Pool along columns with stride 1 and the same length.

    Args:
        scores: f32[..., T].
        kernel: odd width in tokens; 1 leaves the scores alone.
        kind: "avg" (zeros outside count in the divisor, as torch's default) or "max".

    Returns:
        f32[..., T].

    Raises:
        ValueError: for an even or non-positive kernel, or an unknown kind.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel} must be a positive odd number of tokens.")
    if kind not in ("avg", "max"):
        raise ValueError(f"pooling={kind!r} must be 'avg' or 'max'.")
    half = kernel // 2
    fill = 0.0 if kind == "avg" else -jnp.inf
    padded = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(half, half)], constant_values=fill)
    shifted = [padded[..., i : i + scores.shape[-1]] for i in range(kernel)]
    return sum(shifted) / kernel if kind == "avg" else jnp.stack(shifted).max(0)


def hash_scores(seed: int | Array, starts: Array, heads: int, columns: int) -> Array:
    """Uniform pseudo-random scores that depend on (seed, KV head, position) and nothing else.

    Args:
        seed: of the method and the layer (data).
        starts: i32[B], first real column.
        heads: K.
        columns: T.

    Returns:
        f32[B, K, T] in [0, 1): the same for a token whatever its row, neighbours or padding.
    """
    column = jnp.arange(columns, dtype=jnp.int32)[None, None]
    x = (column - starts[:, None, None]).astype(jnp.uint32)
    head = jnp.arange(heads, dtype=jnp.uint32)[None, :, None]
    salt = head * jnp.uint32(0x85EBCA6B) + jnp.asarray(seed).astype(jnp.uint32)
    x = x * jnp.uint32(0x9E3779B1) ^ salt
    for multiplier in (0x7FEB352D, 0x846CA68B):  # two rounds of an avalanche mixer
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    x = x ^ (x >> 15)
    return (x >> 8).astype(jnp.float32) * jnp.float32(2**-24)
