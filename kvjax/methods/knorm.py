"""Knorm: keep the keys of the smallest norm, a baseline that looks at no query."""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, keep, kept_bytes, kept_tokens
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("knorm")
@pytree
class Knorm:
    """Score of a column: minus the norm of its key.

    Source: Devoto et al., "A simple and effective L2 norm-based strategy for KV cache
    compression" (arXiv 2406.11430); NVIDIA/kvpress knorm_press.py.
    """

    budget: int = static(1024)  # tokens kept per KV head
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
        return dataclasses.replace(self, budget=max(tokens, 1))

    def select(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        norms = jnp.linalg.norm(prompt.k.astype(jnp.float32), axis=-1)
        return select.top_columns(-norms, self.budget, prompt.starts)

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep the selected columns."""
        return keep(prompt, *self.select(prompt), info, self.impl)
