"""Random eviction: the floor that every scorer must beat."""

import dataclasses
from typing import Self

from jax import Array

from kvjax import scores, select
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, keep, kept_bytes, kept_tokens
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("random")
@pytree
class Random:
    """Keep a uniformly random set of columns: the top of a hash of (seed, layer, head, position).

    Source: NVIDIA/kvpress random_press.py.
    Differs from the reference: the choice does not depend on the batch, the row or padding.
    """

    seed: int = 42
    budget: int = static(1024)  # tokens kept per KV head
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """Another choice in each layer, in the same compiled program."""
        return dataclasses.replace(self, seed=self.seed + 7919 * layer)

    def exact(self) -> Self:
        """A budget that no prompt exceeds."""
        return dataclasses.replace(self, budget=2**31 - 1)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return kept_bytes(self.budget, shape)

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """The largest budget within `target_bytes` a row and layer."""
        tokens = min(kept_tokens(target_bytes, shape), shape.num_tokens)
        return dataclasses.replace(self, budget=max(tokens, 1))

    def select(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        _, heads, total, _ = prompt.k.shape
        noise = scores.hash_scores(self.seed, prompt.starts, heads, total)
        return select.top_columns(noise, self.budget, prompt.starts)

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep the selected columns."""
        return keep(prompt, *self.select(prompt), info, self.impl)
