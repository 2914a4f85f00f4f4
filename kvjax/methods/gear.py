"""GEAR: a quantized backbone, a low-rank approximation of its error, and exact outliers."""

import dataclasses
from dataclasses import replace
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.attention import Partial, merge
from kvjax.gear_body import Chunks, Recipe, channel_dtype, outlier_pairs
from kvjax.methods.full import full_at
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.ring import RingCache, take
from kvjax.storage import left_align, position_dtype
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class GEARCodes:
    """The prompt as one coded chunk, then a chunk every R tokens: the body of a `RingCache`.

    Invariants, a row at a time: tokens [0, prompt.lengths) are in `prompt`, the next
    `later.lengths` in `later`; both are multiples of R.
    """

    prompt: Chunks
    later: Chunks
    impl: str = static("auto")

    @property
    def folded(self) -> Array:
        """i32[B], coded tokens."""
        return self.prompt.lengths + self.later.lengths

    @property
    def capacity(self) -> Array:
        """i32[B], tokens that the codes have room for: a row's own prompt and the later chunks."""
        return self.prompt.lengths + self.later.capacity

    def attend(self, q: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] that come after every coded token."""
        return merge(self.prompt.attend(q, self.impl), self.later.attend(q, self.impl))

    def fold(self, k: Array, v: Array, due: Array) -> Self:
        """Code blocks [B, K, R, H] as a new chunk, in the rows bool[B] that are due."""
        block = jnp.full_like(self.prompt.lengths, k.shape[2])
        rank = 0 if self.later.k_left is None else self.later.k_left.shape[3]
        one = Chunks.encode(k, v, block, rank, self.later.recipe)
        return replace(self, later=self.later.append(one, due))

    def materialize(self) -> tuple[Array, Array]:
        """k, v f32[B, K, S, H] in token order; valid up to `folded`."""
        batch = self.prompt.lengths.shape[0]
        slots = self.prompt.capacity + self.later.capacity
        index = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        first = self.prompt.lengths[:, None]

        def tokens(old, later):
            late = take(later, jnp.clip(index - first, 0, later.shape[2] - 1))
            early = take(old, jnp.minimum(index, old.shape[2] - 1))
            return jnp.where((index < first)[:, None, :, None], early, late)

        k, v = map(tokens, self.prompt.dense(), self.later.dense())
        return k, v


@register(
    "gear",
    presets={
        "paper": {},
        "rethink": {"k_bits": 4, "v_bits": 4, "prefill_rank": 2, "decode_rank": 2},
        "gear-l": {"outliers": 0.0},
        "kcvt-gear": {"k_bits": 4, "v_bits": 4, "kcvt": True},
        "kcvt-gear-l": {"k_bits": 4, "v_bits": 4, "kcvt": True, "outliers": 0.0},
    },
)
@pytree
class GEAR:
    """Keys per channel and values per token, quantized; x = backbone + low rank + outliers.

    Of a prompt of n tokens the first n - n mod R are one chunk and the others stay exact; later
    every R tokens are one. In a chunk, of every channel of the keys (over its tokens) and of every
    token of the values (over a head's channels), the outliers are set aside and the mean stands
    for them; the rest is quantized in groups; r directions of the error of each head, found by
    power iteration, and the exact outliers are added back. No calibration: all comes from the
    prompt itself. Bytes of a chunk of t tokens and KV head: the backbone's as KIVI's, 4 r (t + H),
    and for a pair of outliers 2 (itemsize + index bytes) a channel of K and a token of V.

    Source: arXiv 2403.05527; opengear-project/GEAR GenerationBench/GenerationTest/GEARLM/Simulated.
    Differs from the reference: outliers of a key channel are a share of its tokens (there, of a
    token's values: 40 + 40 of 64 tokens), rounded to the nearest number of pairs; outliers and
    groups of a value stay within its head, so that heads can live apart; 2^bits - 1 steps at every
    width; a row has its own factors and its own number of tokens; later chunks are always coded
    once, from exact values; factors and statistics are float16 whatever the cache's dtype.
    The preset "rethink" has the sparsity and the rank which that paper states, at 4 bits; its code
    is an earlier GEAR (one scale a tensor, outliers set to 0, a chunk every 20 tokens).
    """

    k_bits: int = static(2)
    v_bits: int = static(2)
    group: int = static(64)  # tokens (keys) or channels (values, at most the head dim)
    kcvt: bool = static(False)  # one group a channel and chunk (keys), a token and head (values)
    residual_length: int = static(64)  # R, tokens
    prefill_rank: int = static(4)  # of the prompt's chunk, 0 = no low rank
    decode_rank: int = static(2)  # of later chunks
    iterations: int = static(3)  # of the power iteration
    outliers: float = static(0.02)  # share of the values that stay exact, 0 = GEAR-L
    seed: int = static(0)  # of the power iteration's start
    full_layers: tuple[int, ...] = static(())  # stored in full, -1 = the last
    impl: str = static("auto")

    @property
    def flush_every(self) -> int:
        """A chunk is coded when a row's position reaches a multiple of R."""
        return self.residual_length

    def for_layer(self, layer: int, num_layers: int) -> Any:
        """The same in every layer but those that stay full."""
        return full_at(self, layer, num_layers)

    def points(self) -> list[Self]:
        """The settings that trade bytes for quality, most bytes first (the rest as set)."""
        return [dataclasses.replace(self, k_bits=b, v_bits=b) for b in (8, 4, 2)]

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt, tail excluded."""
        n, dim, recipe = shape.num_tokens, shape.head_dim, self._recipe(shape.head_dim)
        coded = n - n % self.residual_length
        groups = coded // self.group if recipe.group else min(coded, 1)
        keys = coded * quant.packed_size(dim, self.k_bits) + groups * 4 * dim
        values = coded * (quant.packed_size(dim, self.v_bits) + 4 * (dim // recipe.v_group))
        rank = self._rank(self.prefill_rank, dim)
        factors = 4 * rank * (coded + dim) if coded else 0
        k_pair = 2 * (shape.itemsize + position_dtype(coded).itemsize) * dim
        v_pair = 2 * (shape.itemsize + channel_dtype(dim).itemsize) * coded
        sparse = outlier_pairs(self.outliers, coded) * k_pair
        sparse += outlier_pairs(self.outliers, dim) * v_pair
        exact = 2 * (n - coded) * dim * shape.itemsize
        return shape.kv_heads * (keys + values + factors + sparse + exact) + 16

    def compress(self, prompt: PromptKV, info: LayerInfo) -> RingCache:
        """Code the whole blocks of the prompt as one chunk, keep the other tokens.

        Raises:
            ValueError: for a group that does not divide the residual window or the head dim, or a
                setting out of its range.
        """
        residual = self.residual_length
        total, dim = prompt.k.shape[2:]
        recipe = self._checked(dim)
        lengths = (total - prompt.starts).astype(jnp.int32)
        coded = lengths - lengths % residual
        chunk = max(total // residual, 1) * residual
        k, v = (left_align(x, prompt.starts) for x in (prompt.k, prompt.v))
        room = ((0, 0), (0, 0), (0, max(chunk - total, 0)), (0, 0))
        head = (jnp.pad(x, room)[:, :, :chunk] for x in (k, v))
        rank = self._rank(self.decode_rank, dim)
        # The most tokens that are not yet coded, and those to come.
        later = -(-(residual - 1 + info.reserve) // residual)
        body = GEARCodes(
            Chunks.encode(*head, coded, self._rank(self.prefill_rank, dim), recipe),
            Chunks.empty(prompt.k, later, rank, recipe),
            impl=self.impl,
        )
        return RingCache.of(body, k, v, prompt, info, residual, 0)

    def _rank(self, rank: int, dim: int) -> int:
        """At most what an error of one block can have."""
        return min(rank, dim, self.residual_length)

    def _recipe(self, dim: int) -> Recipe:
        v_group = dim if self.kcvt else min(self.group, dim)
        return Recipe(
            self.k_bits, self.v_bits, None if self.kcvt else self.group, v_group,
            self.outliers, self.iterations, self.seed, self.residual_length,
        )  # fmt: skip

    def _checked(self, dim: int) -> Recipe:
        recipe, residual = self._recipe(dim), self.residual_length
        if residual < 1 or (not self.kcvt and residual % self.group):
            raise ValueError(f"group={self.group} must divide residual_length={residual}.")
        if dim % recipe.v_group:
            fits = [g for g in range(8, dim + 1) if dim % g == 0 and residual % g == 0]
            raise ValueError(
                f"group={self.group} must divide head_dim={dim} or exceed it: it can be one of"
                f" {fits}, or kcvt=True."
            )
        if not 0 <= self.outliers <= 0.5:
            raise ValueError(f"outliers={self.outliers} must be a share from 0 to 0.5.")
        if min(self.prefill_rank, self.decode_rank) < 0 or self.iterations < 1:
            raise ValueError(
                f"prefill_rank={self.prefill_rank}, decode_rank={self.decode_rank} and"
                f" iterations={self.iterations} must be at least 0, 0 and 1."
            )
        return recipe
