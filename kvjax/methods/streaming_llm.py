"""StreamingLLM: attention sinks and the most recent tokens."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import select
from kvjax.eviction import check_when, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.rolling import Rolling, rolling_bytes
from kvjax.rope import rotate
from kvjax.storage import keep, kept_bytes
from kvjax.types import LayerInfo, PromptKV, PromptShape

PRESETS = {
    "paper": {"sinks": 4, "budget": 2004, "when": "step", "positions": "cache"},
    "rethink": {"sinks": 64, "budget": 512, "when": "step"},
    "kvpress": {"sinks": 4},
}


@register("streaming_llm", presets=PRESETS)
@evictor
@pytree
class StreamingLLM:
    """Keep the first `sinks` tokens and the last `budget - sinks`.

    `when="prompt"`: once, after the prompt, decoded tokens stay, so that every method is compared
    on the prompt; `when="step"`: a window that slides at every step. `positions="absolute"`: keys
    stay where they were in the text; `positions="cache"`: a distance is counted in the cache, so
    the gap that eviction leaves behind the sinks is closed. Rotation knows distances only, hence
    only the sinks differ: they are met from the query's place in the cache (or, once after a
    prompt, moved up to the recent tokens), and nothing else is rotated again.

    Source: arXiv 2309.17453, section 3.2; mit-han-lab/streaming-llm kv_cache.py
    (StartRecentKVCache), pos_shift/modify_llama.py.
    Differs from the reference: the paper's sliding, cache-relative form is the preset "paper".
    """

    budget: int = static(1024)  # tokens kept per KV head, sinks included
    sinks: int = static(4)  # tokens
    when: str = static("prompt")  # "prompt": once; "step": at every step
    positions: str = static("absolute")  # "absolute": of the text; "cache": of the place in it
    impl: str = static("auto")

    @property
    def smallest(self) -> int:
        """Tokens: the sinks and one that is recent."""
        return self.sinks + 1

    def stored_bytes(self, tokens: int, shape: PromptShape) -> int:
        """Live bytes of one row and layer that keeps `tokens` tokens per KV head."""
        if self.when == "prompt":
            return kept_bytes(tokens, shape)
        return rolling_bytes(tokens, shape, scored=False)

    def select(self, prompt: PromptKV, info: LayerInfo) -> tuple[Array, Array]:
        """Columns i32[B, K, C] and lengths i32[B, K] that are kept.

        Raises:
            ValueError: if the budget does not exceed the sinks.
        """
        if self.sinks < 0 or self.budget <= self.sinks:
            raise ValueError(f"budget={self.budget} must exceed sinks={self.sinks} >= 0.")
        batch, heads, total, _ = prompt.k.shape
        recency = jnp.arange(total, dtype=jnp.float32)[None, None]
        sinks = select.sink_columns(prompt.starts, total, self.sinks)[:, None]
        scores = jnp.broadcast_to(recency, (batch, heads, total))
        return select.top_columns(scores, self.budget, prompt.starts, sinks)

    def compress(self, prompt: PromptKV, info: LayerInfo) -> Any:
        """Keep the selected columns; with `when="step"` go on evicting.

        Raises:
            ValueError: for an unknown `when` or `positions`, or a budget that is too small.
        """
        check_when(self)
        if self.positions not in ("absolute", "cache"):
            raise ValueError(f"positions={self.positions!r} must be 'absolute' or 'cache'.")
        columns, lengths = self.select(prompt, info)
        relative = self.positions == "cache"
        if self.when == "step":
            return Rolling.of(
                prompt, columns, lengths, info, self.budget, None, sinks=self.sinks,
                recent=self.budget - self.sinks, scoring="age", relative=relative, impl=self.impl,
            )  # fmt: skip
        if relative:
            prompt = dataclasses.replace(prompt, k=self._moved(prompt, info))
        return keep(prompt, columns, lengths, info, self.impl)

    def _moved(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """Keys [B, K, T, H] with the sinks rotated to stand right before the recent tokens."""
        total = prompt.k.shape[2]
        column = jnp.arange(total, dtype=jnp.int32)[None]
        gap = jnp.maximum(total - prompt.starts - self.budget, 0)[:, None]
        moved = rotate(info.rope, prompt.k_unrotated, column - prompt.starts[:, None] + gap)
        sinks = select.sink_columns(prompt.starts, total, self.sinks)[:, None, :, None]
        return jnp.where(sinks, moved, prompt.k)
