"""StreamingLLM: attention sinks and the most recent tokens."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, keep, kept_bytes, kept_tokens
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("streaming_llm")
@pytree
class StreamingLLM:
    """Keep the first `sinks` tokens and the last `budget - sinks`, once, after the prompt.

    Source: arXiv 2309.17453; mit-han-lab/streaming-llm kv_cache.py (StartRecentKVCache).
    Differs from the reference: keys keep their true positions (as NVIDIA/kvpress and
    KVCache-Factory do) and decoded tokens stay, so that every method is compared on the prompt.
    """

    budget: int = static(1024)  # tokens kept per KV head
    sinks: int = static(4)  # tokens
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer."""
        return self

    def exact(self) -> Self:
        """A budget that no prompt exceeds."""
        return dataclasses.replace(self, budget=2**31 - 1)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return kept_bytes(self.budget, shape)

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """The largest budget within `target_bytes` a row and layer."""
        tokens = min(kept_tokens(target_bytes, shape), shape.num_tokens)
        return dataclasses.replace(self, budget=max(tokens, self.sinks + 1))

    def select(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget does not exceed the sinks.
        """
        if self.sinks < 0 or self.budget <= self.sinks:
            raise ValueError(f"budget={self.budget} must exceed sinks={self.sinks} >= 0.")
        batch, heads, total, _ = prompt.k.shape
        recency = jnp.arange(total, dtype=jnp.float32)[None, None]
        sinks = select.sink_columns(prompt.starts, total, self.sinks)[:, None]
        scores = jnp.broadcast_to(recency, (batch, heads, total))
        return select.top_columns(scores, self.budget, prompt.starts, sinks)

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep the selected columns."""
        return keep(prompt, *self.select(prompt), info, self.impl)
