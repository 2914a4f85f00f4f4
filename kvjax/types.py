"""The seams: what a model hands over, what a cache method gives back. No logic here.

Axis letters, used by every shape comment of the project:

    B batch      T prompt or new columns   S slots        N query heads   K KV heads
    G = N // K   H head dim                L layers       P pools         R tail capacity
    W observation window                   D model dim    V vocabulary
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from jax import Array

from kvjax.pytree import array, pytree
from kvjax.rope import Rope

# (layer, q [B,N,T,H], k [B,K,T,H], v [B,K,T,H], state) -> (out [B,N,T,H], state); q, k unrotated
Attend = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]


class Model(NamedTuple):
    """A decoder as the decode loop sees it: three pure functions and what is static about it.

    Hashable, so that it can be a static argument. `params["layers"]` is a list of L pytrees.
    """

    config: Any  # frozen and hashable; first argument of the three functions
    embed: Callable[[Any, Any, Array], Array]  # (config, params, tokens i32[B,T]) -> x [B,T,D]
    # (config, layer params, x, attend, state) -> (x, state); attend here is this layer's alone and
    # takes no layer number, (q, k, v, state) -> (out, state): all layers share one trace
    block: Callable[..., tuple[Array, Any]]
    head: Callable[[Any, Any, Array], Array]  # (config, params, x [..., D]) -> logits f32[..., V]
    rope: Rope
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens, None = global
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H


@pytree
class PromptKV:
    """One layer of a finished prefill, right-aligned (left-padded); its dtype is the cache's.

    Invariants: columns before `starts` are pads and hold anything finite; the position of column
    c of row b is c - starts[b]; `k` is `k_unrotated` rotated to those positions.
    """

    q: Array = array("batch", "head", "column", "head_dim")  # [B, N, T, H], rotated
    k: Array = array("batch", "kv_head", "column", "head_dim")  # [B, K, T, H], rotated
    k_unrotated: Array = array("batch", "kv_head", "column", "head_dim")  # [B, K, T, H]
    v: Array = array("batch", "kv_head", "column", "head_dim")  # [B, K, T, H]
    starts: Array = array("batch")  # i32[B], first real column
    # f32[B, K, T], the attention that each column got from all queries of its group, summed, where
    # prefill was asked for it
    column_sums: Array | None = array("batch", "kv_head", "column", default=None)
    # i32[B], the next token's position where it is not the number of columns: tokens were evicted
    next_positions: Array | None = array("batch", default=None)
    # i32[B, K, T], the position of each column of a KV head where it is not c - starts[b]; -1 = pad
    positions: Array | None = array("batch", "kv_head", "column", default=None)


class LayerInfo(NamedTuple):
    """What a method may know of the layer it compresses; all static."""

    num_layers: int
    window: int | None  # sliding window of the layer in tokens; such layers are never compressed
    reserve: int  # tokens that will be appended: capacity of the tail
    rope: Rope


class PromptShape(NamedTuple):
    """What the bytes of one row of one layer depend on."""

    num_tokens: int  # real tokens of the prompt
    kv_heads: int  # K
    head_dim: int  # H
    itemsize: int = 2  # bytes of an exact element of the cache

    @property
    def full_bytes(self) -> int:
        """Bytes of the full cache in bfloat16, what every ratio is taken of."""
        return 4 * self.num_tokens * self.kv_heads * self.head_dim


class LayerCache(Protocol):
    """The cache of one layer: a @pytree whose every array leaf is [B, ...]."""

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T >= 1 unrotated tokens and attend to everything including them, causally.

        Args:
            q: [B, N, T, H] unrotated.
            k: [B, K, T, H] unrotated.
            v: [B, K, T, H].
            positions: i32[B, T], right-padded with -1; a pad is never stored or attended, and
                its output is zero.

        Returns:
            The attention output [B, N, T, H] and the cache that was attended.
        """
        ...

    step_limit: int | None  # tokens that one step can append, None = as many as there is room
    evicts: bool  # a step may drop tokens: a step of T tokens is T steps of one
    flush_every: int | None  # flush when a row's position reaches a multiple of it, None = never

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        ...

    def flush(self) -> Self:
        """Fold each row's oldest whole block of a full tail into the body; masked per row."""
        ...

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense: rotated k, v [B,K,S,H], positions i32[B,K,S], -1 = empty."""
        ...


class Method(Protocol):
    """A compression method: a @pytree of hyperparameters, ints static and floats data."""

    flush_every: int | None  # flush when a row's position reaches a multiple of it

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """Per-layer integers, outside jit; equal results share one compilation."""
        ...

    def compress(self, prompt: PromptKV, info: LayerInfo) -> LayerCache:
        """Build the layer's cache from its finished prefill."""
        ...

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live body and metadata bytes of one row and layer, right after `compress`."""
        ...

    # resolve(shape) -> Self fixes static sizes that depend on the prompt, where there are any.
    # select(prompt, info) -> (columns, lengths) is what an evictor keeps.
    # One that spreads its budget over layers says `spreads` and has layer_statistics(prompt, info)
    # -> array, and allocate(statistics of all layers, shape) -> a resolved method a layer.
    # A method whose bytes move continuously has fit(target_bytes, shape) -> Self, the largest
    # setting that stays within target_bytes; one with discrete settings has points() -> list[Self].
    # exact() -> Self is the setting at which it equals the full cache, where it has one.
