"""KeyDiff: keep the keys that differ most from the average key."""

import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.types import LayerInfo, PromptKV


@register("keydiff", presets={"kvpress": {}})
@evictor
@pytree
class KeyDiff:
    """Score of a column: minus the cosine of its (rotated) key to the mean of all unit keys.

    Source: Park et al., "KeyDiff" (arXiv 2504.15364), section 3; NVIDIA/kvpress keydiff_press.py.
    Differs from the paper: the prompt is cut once, not block by block.
    """

    budget: int = static(1024)  # tokens kept per KV head
    impl: str = static("auto")

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Minus the cosines to the mean direction f32[B, K, T]."""
        k = prompt.k.astype(jnp.float32)
        norm = jnp.linalg.norm(k, axis=-1, keepdims=True)
        unit = k / jnp.where(norm > 0, norm, 1.0)
        real = select.real_columns(prompt.starts, k.shape[2])[:, None, :, None]
        mean = jnp.where(real, unit, 0.0).sum(2, keepdims=True)
        size = jnp.linalg.norm(mean, axis=-1, keepdims=True)
        return -(unit * (mean / jnp.where(size > 0, size, 1.0))).sum(-1)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        check_budget(self)
        return select.top_columns(self.score(prompt, info), self.budget, prompt.starts)
