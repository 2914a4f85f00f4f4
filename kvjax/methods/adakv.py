"""AdaKV: the heads of a layer share one budget."""

import dataclasses
from typing import Self

import jax.numpy as jnp

from kvjax import scores, select
from kvjax.eviction import check_budget, evictor
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, keep_shared, kept_bytes
from kvjax.types import LayerInfo, PromptKV, PromptShape

PRESETS = {
    "paper": {"window": 32, "kernel": 7, "pooling": "max", "floor": 0.2},
    "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "floor": 0.2},
    "pyramid": {"layers": "pyramid"},
}


@register("adakv", presets=PRESETS)
@evictor
@pytree
class AdaKV:
    """SnapKV's scores, ranked over all heads of a layer at once, with a floor for each head.

    Heads whose attention is spread out keep more tokens, concentrated ones fewer; the sum is the
    layer's budget, exactly, and so are the bytes: all heads of a layer live in one pool of slots.
    Under tensor parallelism a pool a shard (`pools`) shares out within the shard only.

    Source: arXiv 2407.11550, algorithms 1 and 2; FFY0/AdaKV snapkv_utils.py.
    Differs from the reference: exact head budgets (`select.adaptive_mask`), any batch. kvpress's
    AdaKVPress frees no memory: it hides the evicted keys behind fake ones.
    """

    floor: float = 0.2  # alpha: part of the budget that every head gets
    budget: int = static(1024)  # tokens kept per KV head, the mean over heads
    window: int = static(32)  # W, tokens
    kernel: int = static(7)  # tokens, odd
    pooling: str = static("max")  # "max" or "avg"
    group_score: str = static("mean")  # over the query heads of a KV head: "mean", "max" or "sum"
    layers: str = static("uniform")  # "uniform" (SnapKV) or "pyramid" (PyramidKV) layer budgets
    beta: float = static(20.0)  # of the pyramid
    pools: int = static(1)  # pools a layer; a divisor of the KV heads
    prompt_tokens: int | None = static(None)  # set by `resolve`
    impl: str = static("auto")

    @property
    def smallest(self) -> int:
        """Tokens: the window."""
        return self.window

    def resolve(self, shape: PromptShape) -> Self:
        """Note the longest prompt: no layer of a pyramid keeps more."""
        return dataclasses.replace(self, prompt_tokens=shape.num_tokens)

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The layer's own budget.

        Raises:
            ValueError: for an unknown `layers`.
        """
        if self.layers not in ("uniform", "pyramid"):
            raise ValueError(f"layers={self.layers!r} must be 'uniform' or 'pyramid'.")
        own = self.budget
        if self.layers == "pyramid":
            check_budget(self)
            own = select.pyramid_budgets(
                self.budget, self.window, num_layers, self.beta, self.prompt_tokens
            )[layer]
        # Without the prompt's length, so that prompts of like lengths share a compilation.
        return dataclasses.replace(self, budget=own, prompt_tokens=None)

    def stored_bytes(self, tokens: int, shape: PromptShape) -> int:
        """Live bytes of one row and layer that keeps `tokens` tokens per KV head, on average."""
        return kept_bytes(tokens, shape) + 4 * shape.kv_heads

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Keep each head's share.

        Raises:
            ValueError: if the budget is too small, or the pools do not divide the KV heads.
        """
        check_budget(self)
        batch, heads, total, _ = prompt.k.shape
        if self.pools < 1 or heads % self.pools:
            raise ValueError(f"pools={self.pools} must divide the {heads} KV heads.")
        score = scores.observed(prompt, self.window, self.kernel, self.pooling, self.group_score)
        recent = select.recent_columns(total, self.window)
        mask = select.adaptive_mask(
            score.reshape(batch, self.pools, heads // self.pools, total),
            self.budget - min(self.window, total), self.floor, prompt.starts,
            jnp.broadcast_to(recent[None], (batch, total)),
        )  # fmt: skip
        slots = heads // self.pools * min(self.budget, total)
        return keep_shared(prompt, mask, slots, info, self.impl)
