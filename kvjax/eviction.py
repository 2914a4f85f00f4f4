"""What methods that keep `budget` tokens per KV head share; each adds how it selects them."""

import dataclasses
import math
from typing import Any, Self, TypeVar

import jax.numpy as jnp
from jax import Array

from kvjax.storage import BodyTail, keep, kept_bytes
from kvjax.types import LayerInfo, PromptKV, PromptShape

EVERYTHING = 2**31 - 1  # a budget that no prompt exceeds

_Class = TypeVar("_Class", bound=type)


def tokens_of(share: float, num_tokens: int) -> int:
    """A share of a prompt as tokens, rounded down, at least 1: the one place where that happens.

    Args:
        share: kept, in (0, 1]; a product that misses an integer by rounding counts as it.
        num_tokens: of the prompt.

    Raises:
        ValueError: for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share} must be in (0, 1]: the part of the tokens that is kept.")
    return max(math.floor(share * num_tokens + 1e-6), 1)


def evictor(cls: _Class) -> _Class:
    """Class decorator: the parts of `types.Method` that follow from a budget and a selection.

    The class declares `budget` (static, tokens per KV head), `impl`, and

        select(prompt, info) -> columns i32[B, K, C] (ascending), lengths i32[B, K]

    It may set `smallest` (the least budget that it can work with, 1 by default) and
    `stored_bytes(tokens, shape)` (of a row and layer with so many tokens a KV head, linear in
    them). What it defines itself is left alone.
    """

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer."""
        return self

    def with_budget(self, tokens: int) -> Self:
        """The same with another budget, tokens per KV head."""
        return dataclasses.replace(self, budget=tokens)

    def exact(self) -> Self:
        """A budget that no prompt exceeds."""
        return self.with_budget(EVERYTHING)

    def stored_bytes(self, tokens: int, shape: PromptShape) -> int:
        """Live bytes of one row and layer that keeps `tokens` tokens per KV head."""
        return kept_bytes(tokens, shape)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return self.stored_bytes(min(self.budget, shape.num_tokens), shape)

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """The largest budget within `target_bytes` a row and layer."""
        none, one = self.stored_bytes(0, shape), self.stored_bytes(1, shape)
        tokens = min(int((target_bytes - none) // (one - none)), shape.num_tokens)
        return self.with_budget(max(tokens, self.smallest))

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep the selected columns."""
        return keep(prompt, *self.select(prompt, info), info, self.impl)

    shared = {"flush_every": None, "smallest": 1}
    added = (for_layer, with_budget, exact, stored_bytes, layer_bytes, fit, compress)
    shared |= {function.__name__: function for function in added}
    for name, value in shared.items():
        if name not in vars(cls):
            setattr(cls, name, value)
    return cls


def check_budget(method: Any) -> None:
    """Refuse a budget that the method cannot work with.

    Raises:
        ValueError: if it is below `smallest`.
    """
    if method.budget < max(method.smallest, 1):
        least = max(method.smallest, 1)
        parts = [f"{n}={getattr(method, n)}" for n in ("window", "sinks") if hasattr(method, n)]
        why = f" ({', '.join(parts)})" if parts else ""
        raise ValueError(
            f"budget={method.budget} must be at least {least} token{'s' * (least > 1)} per KV"
            f" head{why}."
        )


def check_when(method: Any) -> None:
    """Refuse a word for the time of eviction that does not exist.

    Raises:
        ValueError: unless `when` is "step" or "prompt".
    """
    if method.when not in ("step", "prompt"):
        raise ValueError(f"when={method.when!r} must be 'step' or 'prompt'.")


def gather(prompt: PromptKV, columns: Array, lengths: Array) -> PromptKV:
    """The prompt that is left of one: its selected columns, right-aligned.

    Args:
        prompt: a layer's finished prefill.
        columns: i32[B, K, C], ascending; entries from `lengths` on are ignored.
        lengths: i32[B, K], the same for all KV heads of a row.

    Returns:
        A `PromptKV` of C columns with `next_positions`; its queries are the last C.
    """
    total, count = prompt.k.shape[2], columns.shape[2]
    kept = lengths[:, 0]
    # Entry j of the result is entry j - (C - length) of the selection.
    at = jnp.arange(count, dtype=jnp.int32)[None] - (count - kept)[:, None]
    at = jnp.broadcast_to(jnp.maximum(at, 0)[:, None], columns.shape)
    columns = jnp.minimum(jnp.take_along_axis(columns, at, 2), total - 1)

    def take(x):
        return jnp.take_along_axis(x, columns[..., None], 2)

    next_positions, positions = prompt.next_positions, prompt.positions
    if positions is None:
        next_positions = (total - prompt.starts).astype(jnp.int32)
        positions = columns - prompt.starts[:, None, None]
    else:
        positions = jnp.take_along_axis(positions, columns, 2)
    return PromptKV(
        prompt.q[:, :, total - count :],
        take(prompt.k),
        take(prompt.k_unrotated),
        take(prompt.v),
        (count - kept).astype(jnp.int32),
        next_positions=next_positions,
        positions=positions.astype(jnp.int32),
    )
