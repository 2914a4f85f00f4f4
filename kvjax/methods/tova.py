"""TOVA: keep what the last query attends to."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import scores, select
from kvjax.eviction import check_budget, check_when, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.rolling import Rolling, rolling_bytes
from kvjax.storage import keep, kept_bytes
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("tova", presets={"paper": {}, "kvpress": {"when": "prompt"}})
@evictor
@pytree
class TOVA:
    """Keep the tokens to which the last query of all heads gives the most attention.

    One score a token and layer: the last query's softmax, averaged over all query heads, so every
    KV head keeps the same tokens. `when="step"`: each decoded token scores anew and evicts the
    least; `when="prompt"`: the prompt alone is cut.

    Source: Oren et al., "Transformers are multi-state RNNs" (arXiv 2401.06104), section 3.2;
    NVIDIA/kvpress tova_press.py.
    Differs from the reference: the prompt is cut once, by its last query, not token by token; the
    last token itself is never evicted.
    """

    budget: int = static(1024)  # tokens kept per KV head
    when: str = static("step")  # "step": evict at every step; "prompt": once, after the prompt
    impl: str = static("auto")

    def stored_bytes(self, tokens: int, shape: PromptShape) -> int:
        """Live bytes of one row and layer that keeps `tokens` tokens per KV head."""
        if self.when == "prompt":
            return kept_bytes(tokens, shape)
        return rolling_bytes(tokens, shape, scored=True)

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """The last query's attention, a mean over all heads: f32[B, K, T]."""
        seen = scores.window_scores(prompt, scores.observe(prompt, 1))
        return jnp.broadcast_to(seen.sum(1, keepdims=True) / prompt.q.shape[1], seen.shape)

    def _select(self, prompt: PromptKV, seen: Array) -> tuple[Array, Array]:
        check_budget(self)
        last = select.recent_columns(prompt.k.shape[2], 1)[None, None]
        return select.top_columns(seen, self.budget, prompt.starts, last)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept."""
        return self._select(prompt, self.score(prompt, info))

    def compress(self, prompt: PromptKV, info: LayerInfo) -> Any:
        """Keep the selected columns; with `when="step"` go on evicting.

        Raises:
            ValueError: for an unknown `when` or a budget below 1.
        """
        check_when(self)
        seen = self.score(prompt, info)
        columns, lengths = self._select(prompt, seen)
        if self.when == "prompt":
            return keep(prompt, columns, lengths, info, self.impl)
        return Rolling.of(
            prompt, columns, lengths, info, self.budget, seen, sinks=0, recent=1, scoring="last",
            impl=self.impl,
        )  # fmt: skip
