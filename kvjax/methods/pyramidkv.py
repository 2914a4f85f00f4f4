"""PyramidKV: SnapKV with more tokens in the lower layers."""

import dataclasses
from typing import Self

from jax import Array

from kvjax import scores, select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.types import LayerInfo, PromptKV, PromptShape

PRESETS = {
    "paper": {"window": 8, "kernel": 7, "pooling": "max", "beta": 20.0},
    "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "beta": 20.0},
}


@register("pyramidkv", presets=PRESETS)
@evictor
@pytree
class PyramidKV:
    """SnapKV's selection with a budget that falls linearly from the first layer to the last.

    `budget` is the mean over layers, exactly (`select.pyramid_budgets`).

    Source: arXiv 2406.02069, section 3.3; Zefan-Cai/KVCache-Factory pyramidkv_utils.py.
    Differs from the reference: the total is exact after rounding; a prompt between the budget and
    twice it is not handed to SnapKV, its pyramid is flattened only as far as the prompt demands.
    """

    budget: int = static(1024)  # tokens kept per KV head, the mean over layers
    window: int = static(8)  # W, tokens
    kernel: int = static(7)  # tokens, odd
    pooling: str = static("max")  # "max" or "avg"
    group_score: str = static("mean")  # over the query heads of a KV head: "mean", "max" or "sum"
    beta: float = static(20.0)  # >= 1: the last layer's share of the mean is 1 / beta
    prompt_tokens: int | None = static(None)  # set by `resolve`: no layer keeps more
    impl: str = static("auto")

    @property
    def smallest(self) -> int:
        """Tokens: the window."""
        return self.window

    def resolve(self, shape: PromptShape) -> Self:
        """Note the longest prompt: what one layer cannot use goes to the others."""
        return dataclasses.replace(self, prompt_tokens=shape.num_tokens)

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The layer's own budget."""
        check_budget(self)
        budgets = select.pyramid_budgets(
            self.budget, self.window, num_layers, self.beta, self.prompt_tokens
        )
        # Without the prompt's length, so that prompts of like lengths share a compilation.
        return dataclasses.replace(self, budget=budgets[layer], prompt_tokens=None)

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Pooled window scores f32[B, K, T]; the window itself is not scored."""
        return scores.observed(prompt, self.window, self.kernel, self.pooling, self.group_score)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget is below the window.
        """
        check_budget(self)
        recent = select.recent_columns(prompt.k.shape[2], self.window)[None, None]
        return select.top_columns(self.score(prompt, info), self.budget, prompt.starts, recent)
