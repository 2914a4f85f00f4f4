"""GEAR: a quantized backbone, a low-rank approximation of its error, and exact outliers."""

import dataclasses
from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.attention import dense_partial, finish, merge, visible
from kvjax.gear_body import Chunks, Recipe, channel_dtype, outlier_pairs
from kvjax.methods.full import full_at
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.ring import ring_tokens, take
from kvjax.rope import Rope, rotate
from kvjax.storage import left_align, position_dtype, shift, write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class GEARCache:
    """The prompt as one coded chunk, then a chunk every R tokens, then an exact ring.

    Invariants, a row at a time: tokens [0, prompt.lengths) are in `prompt`, the next
    `later.lengths` in `later`, and the rest, up to `lengths`, in the ring, whose slot is the token
    index modulo 2R. Both coded lengths are multiples of R.
    """

    prompt: Chunks
    later: Chunks
    k_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="recent")  # rotated
    v_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="recent")
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    shift: Array = array("batch", role=METADATA)  # i32[B], position minus index of a token
    rank: int = static()  # of later chunks
    rope: Rope = static()
    impl: str = static("auto")
    evicts = False

    @property
    def residual(self) -> int:
        """R, tokens."""
        return self.later.chunk

    @property
    def step_limit(self) -> int:
        """Tokens that one step can append: R."""
        return self.residual

    @property
    def flush_every(self) -> int:
        """A row's position reaches a multiple of it: `flush` codes R tokens."""
        return self.residual

    @property
    def folded(self) -> Array:
        """i32[B], tokens that are read from codes."""
        return self.prompt.lengths + self.later.lengths

    @property
    def recent(self) -> Array:
        """i32[B], tokens that are read exactly."""
        return self.lengths - self.folded

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        return self.prompt.lengths + self.later.capacity - self.lengths

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T <= R tokens, attend. See `types.LayerCache.step`.

        Raises:
            ValueError: for more tokens than the residual window.
        """
        steps, ring = k.shape[2], 2 * self.residual
        if steps > self.residual:
            raise ValueError(f"{steps} tokens at once exceed residual_length={self.residual}.")
        dtype, real = q.dtype, positions >= 0
        q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
        index = self.lengths[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        slots = jnp.where(real, index % ring, ring)
        cache = replace(
            self,
            k_ring=write_rows(self.k_ring, k, slots),
            v_ring=write_rows(self.v_ring, v, slots),
            lengths=self.lengths + real.sum(-1, dtype=jnp.int32),
        )
        part = merge(cache.prompt.attend(q, self.impl), cache.later.attend(q, self.impl))
        mask = visible(positions, cache._ring_positions())
        out = finish(merge(part, dense_partial(q, cache.k_ring, cache.v_ring, mask)))
        return jnp.where(real[:, None, :, None], out, 0.0).astype(dtype), cache

    def _ring_positions(self) -> Array:
        """i32[B, 2R], the position of the token in each ring slot, -1 = none."""
        index = ring_tokens(self.lengths, 2 * self.residual)
        here = (index >= self.folded[:, None]) & (index >= 0)
        return jnp.where(here, index + self.shift[:, None], -1)

    def flush(self) -> Self:
        """Code the oldest R recent tokens of every row that holds R of them."""
        residual = self.residual
        # What is folded is a multiple of R, so the block is one half of the ring.
        at = self.folded % (2 * residual)
        k, v = (
            jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, residual, 1))(ring, at)
            for ring in (self.k_ring, self.v_ring)
        )
        block = jnp.full_like(self.lengths, residual)
        one = Chunks.encode(k, v, block, self.rank, self.later.recipe)
        return replace(self, later=self.later.append(one, self.recent >= residual))

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense, in token order. See `types.LayerCache.materialize`."""
        batch, heads = self.k_ring.shape[:2]
        slots = self.prompt.capacity + self.later.capacity
        index = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        first = self.prompt.lengths[:, None]

        def tokens(x, at):
            return take(x.astype(self.k_ring.dtype), jnp.clip(at, 0, x.shape[2] - 1))

        out = []
        sides = zip(
            self.prompt.dense(), self.later.dense(), (self.k_ring, self.v_ring), strict=True
        )
        for old, later, ring in sides:
            x = tokens(ring, index % ring.shape[2])
            coded = (index < self.folded[:, None])[:, None, :, None]
            x = jnp.where(coded, tokens(later, index - first), x)
            out.append(jnp.where((index < first)[:, None, :, None], tokens(old, index), x))
        positions = jnp.where(index < self.lengths[:, None], index + self.shift[:, None], -1)
        return *out, jnp.broadcast_to(positions[:, None], (batch, heads, slots))


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

    def compress(self, prompt: PromptKV, info: LayerInfo) -> GEARCache:
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
        index = jnp.maximum(ring_tokens(lengths, 2 * residual), 0)
        k_ring, v_ring = take(k, index), take(v, index)
        return GEARCache(
            Chunks.encode(*head, coded, self._rank(self.prefill_rank, dim), recipe),
            Chunks.empty(prompt.k, later, rank, recipe),
            k_ring, v_ring, lengths, shift(prompt), rank=rank, rope=info.rope, impl=self.impl,
        )  # fmt: skip

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
