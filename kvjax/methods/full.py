"""The full cache: every token, exact. The baseline, and what `exact()` of a method must equal."""

from typing import Any, Self

import jax.numpy as jnp

from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, Pooled, Tail, left_align
from kvjax.types import LayerInfo, PromptKV, PromptShape


@register("full")
@pytree
class Full:
    """Keep everything. Bytes: 4 * T * K * H a row and layer in bfloat16."""

    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer."""
        return self

    def exact(self) -> Self:
        """Itself."""
        return self

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        exact = 2 * shape.num_tokens * shape.head_dim * shape.itemsize
        return shape.kv_heads * (exact + 4) + 4

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Left-align the prompt: slot = position."""
        batch, heads, total, _ = prompt.k.shape
        lengths = jnp.broadcast_to((total - prompt.starts)[:, None], (batch, heads))
        k, v = (left_align(x, prompt.starts) for x in (prompt.k, prompt.v))
        body = Pooled(k, v, None, lengths.astype(jnp.int32), window=info.window, impl=self.impl)
        tail = Tail.empty(prompt.k, info.reserve)
        return BodyTail(body, tail, rope=info.rope, window=info.window)


def full_at(method: Any, layer: int, num_layers: int) -> Any:
    """`method`, or the full cache in the layers that its `full_layers` lists (-1 = the last).

    Raises:
        ValueError: for a layer that does not exist.
    """
    listed = method.full_layers
    if any(not -num_layers <= i < num_layers for i in listed):
        raise ValueError(f"full_layers={listed} must be layers of {num_layers}.")
    if layer in {i % num_layers for i in listed}:
        return Full(impl=method.impl)
    return method
