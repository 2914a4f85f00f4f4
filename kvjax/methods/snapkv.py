"""SnapKV: keep what the prompt's last queries attend to."""

import dataclasses
from typing import Self

from jax import Array

from kvjax import scores, select
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, keep, kept_bytes, kept_tokens
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("snapkv")
@pytree
class SnapKV:
    """Keep the observation window and the columns that it attends to most, after pooling.

    Score of a column: softmax of the last `window` queries over all keys, averaged over window and
    query group, pooled along columns. The window counts inside the budget.

    Source: arXiv 2404.14469, section 4; FasterDecoding/SnapKV snapkv_utils.py.
    Differs from the reference: one selection per KV head (mean over its group, then pooling)
    instead of one per query head; ties go to the earlier column.
    """

    budget: int = static(1024)  # tokens kept per KV head
    window: int = static(32)  # W, tokens
    kernel: int = static(7)  # tokens, odd
    pooling: str = static("max")  # "max" (the paper's LongBench configs) or "avg"
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer."""
        return self

    def exact(self) -> Self:
        """A budget that no prompt exceeds."""
        return dataclasses.replace(self, budget=2**31 - 1)

    def score(self, prompt: PromptKV) -> Array:
        """Pooled window scores f32[B, K, T]; the window itself is not scored."""
        seen = scores.window_scores(prompt, scores.observe(prompt, self.window))
        total = prompt.k.shape[2]
        seen = seen.at[..., max(total - self.window, 0) :].set(0.0)
        group = prompt.q.shape[1] // prompt.k.shape[1]
        return scores.pool(seen / (group * self.window), self.kernel, self.pooling)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return kept_bytes(self.budget, shape)

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """The largest budget within `target_bytes` a row and layer."""
        tokens = min(kept_tokens(target_bytes, shape), shape.num_tokens)
        return dataclasses.replace(self, budget=max(tokens, self.window))

    def select(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget is below the window.
        """
        if self.budget < self.window:
            raise ValueError(f"budget={self.budget} must be at least window={self.window}.")
        recent = select.recent_columns(prompt.k.shape[2], self.window)[None, None]
        return select.top_columns(self.score(prompt), self.budget, prompt.starts, recent)

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep the selected columns."""
        return keep(prompt, *self.select(prompt), info, self.impl)
