"""SnapKV: keep what the prompt's last queries attend to."""

from jax import Array

from kvjax import scores, select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.types import LayerInfo, PromptKV

# The paper's LongBench configs; kvpress's SnapKVPress.
PRESETS = {
    "paper": {"budget": 1024, "window": 32, "kernel": 7, "pooling": "max"},
    "kvpress": {"window": 64, "kernel": 5, "pooling": "avg"},
}


@register("snapkv", presets=PRESETS)
@evictor
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
    pooling: str = static("max")  # "max" or "avg"
    group_score: str = static("mean")  # over the query heads of a KV head: "mean", "max" or "sum"
    impl: str = static("auto")

    @property
    def smallest(self) -> int:
        """Tokens: the window."""
        return self.window

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
