"""Random eviction: the floor that every method must beat."""

import dataclasses
from typing import Self

from jax import Array

from kvjax import scores, select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.types import LayerInfo, PromptKV


@register("random")
@evictor
@pytree
class Random:
    """Keep a uniformly random set of columns: the top of a hash of (seed, layer, head, position).

    Source: NVIDIA/kvpress random_press.py.
    Differs from the reference: the choice does not depend on the batch, the row or padding.
    """

    seed: int = 42
    budget: int = static(1024)  # tokens kept per KV head
    impl: str = static("auto")

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """Another choice in each layer, in the same compiled program."""
        return dataclasses.replace(self, seed=self.seed + 7919 * layer)

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Hashes f32[B, K, T]."""
        _, heads, total, _ = prompt.k.shape
        return scores.hash_scores(self.seed, prompt.starts, heads, total)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        check_budget(self)
        return select.top_columns(self.score(prompt, info), self.budget, prompt.starts)
