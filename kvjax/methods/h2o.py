"""H2O: keep the heavy hitters, what all queries so far attended to most, and the recent tokens."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from kvjax import scores, select
from kvjax.eviction import check_budget, check_when, evictor, tokens_of
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.rolling import Rolling, rolling_bytes
from kvjax.storage import keep, kept_bytes
from kvjax.types import LayerInfo, PromptKV, PromptShape

PRESETS = {
    "paper": {"share": 0.2},  # 10 % heavy and 10 % recent
    "rethink": {"budget": 512, "recent": 448},
    # ObservedAttentionPress: sums over the number of queries that saw the token, prompt only
    "kvpress": {"normalize": True, "recent": 0, "when": "prompt"},
}


@register("h2o", presets=PRESETS)
@evictor
@pytree
class H2O:
    """Keep `budget` tokens: the last `recent`, and those of the largest accumulated attention.

    The score of a token is the attention that every query from its own on gave it, summed over
    queries and over the query heads of a group. `when="step"`: the prompt is cut to the budget and
    every decoded token evicts one, its scores running on (heavy-hitter oracle, real drop).
    `when="prompt"`: the prompt alone is cut, decoded tokens stay.

    Prefill can gather the sums on its way (`decode.prefill(column_sums=True)`); without them they
    are computed here, at the price of the prompt's attention.

    Source: arXiv 2306.14048, algorithm 1; FMInference/H2O h2o_hf/utils_real_drop/modify_llama.py.
    Differs from the reference: a batch row has its own scores; one selection per KV head from its
    group's sum; a tie evicts the older token.
    """

    budget: int = static(1024)  # tokens kept per KV head, recent ones included
    recent: int | None = static(None)  # tokens; None: half of the budget
    share: float | None = static(None)  # of the prompt: sets the budget
    normalize: bool = static(False)  # mean over the queries that saw a token, not their sum
    when: str = static("step")  # "step": evict at every step; "prompt": once, after the prompt
    impl: str = static("auto")
    column_sums = True  # what `decode.prefill` should gather on its way

    @property
    def smallest(self) -> int:
        """Tokens: the recent ones and a heavy hitter."""
        return 1 if self.recent is None else self.recent + 1

    def resolve(self, shape: PromptShape) -> Self:
        """Turn a share of the prompt into tokens."""
        if self.share is None:
            return self
        return self.with_budget(tokens_of(self.share, shape.num_tokens))

    def with_budget(self, tokens: int) -> Self:
        """The same with a budget in tokens, in place of a share."""
        return dataclasses.replace(self, share=None, budget=tokens)

    def stored_bytes(self, tokens: int, shape: PromptShape) -> int:
        """Live bytes of one row and layer that keeps `tokens` tokens per KV head."""
        if self.when == "prompt":
            return kept_bytes(tokens, shape)
        return rolling_bytes(tokens, shape, scored=True)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return self.stored_bytes(min(self.resolve(shape).budget, shape.num_tokens), shape)

    def score(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Accumulated attention f32[B, K, T]."""
        sums = prompt.column_sums
        return scores.column_sums(prompt, self.impl) if sums is None else sums

    def _recent(self) -> int:
        return self.budget // 2 if self.recent is None else self.recent

    def _check(self) -> None:
        if self.share is not None:
            raise ValueError(f"share={self.share} must be made a budget first: resolve(shape).")
        check_budget(self)

    def _select(self, prompt: PromptKV, sums: Array) -> tuple[Array, Array]:
        total = prompt.k.shape[2]
        if self.normalize:
            sums = sums / jnp.arange(total, 0, -1, dtype=jnp.float32)[None, None]
        recent = select.recent_columns(total, min(self._recent(), total))[None, None]
        return select.top_columns(sums, self.budget, prompt.starts, recent)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget does not exceed the recent tokens, or is still a share.
        """
        self._check()
        return self._select(prompt, self.score(prompt, info))

    def compress(self, prompt: PromptKV, info: LayerInfo) -> Any:
        """Keep the selected columns; with `when="step"` go on evicting.

        Raises:
            ValueError: for an unknown `when` or a budget that is too small.
        """
        check_when(self)
        self._check()
        sums = self.score(prompt, info)
        columns, lengths = self._select(prompt, sums)
        if self.when == "prompt":
            return keep(prompt, columns, lengths, info, self.impl)
        return Rolling.of(
            prompt, columns, lengths, info, self.budget, sums, sinks=0, recent=self._recent(),
            scoring="sum", normalize=self.normalize, impl=self.impl,
        )  # fmt: skip
