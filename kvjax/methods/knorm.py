"""Knorm: keep the keys of the smallest norm, a baseline that looks at no query."""

import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.types import LayerInfo, PromptKV


@register("knorm", presets={"kvpress": {}})
@evictor
@pytree
class Knorm:
    """Score of a column: minus the norm of its key.

    Source: Devoto et al., "A simple and effective L2 norm-based strategy for KV cache
    compression" (arXiv 2406.11430); NVIDIA/kvpress knorm_press.py.
    """

    budget: int = static(1024)  # tokens kept per KV head
    impl: str = static("auto")

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Minus the norms of the keys f32[B, K, T]."""
        return -jnp.linalg.norm(prompt.k.astype(jnp.float32), axis=-1)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        check_budget(self)
        return select.top_columns(self.score(prompt, info), self.budget, prompt.starts)
