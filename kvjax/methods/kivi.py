"""KIVI: keys quantized per channel, values per token, recent tokens in full precision."""

import dataclasses
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.attention import Partial, dense_partial, finish, merge, visible
from kvjax.methods.full import full_at
from kvjax.pallas.dispatch import beside
from kvjax.pallas.group_quantize.api import group_quantize
from kvjax.pallas.quant_decode.api import quant_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.ring import ring_tokens, take
from kvjax.rope import Rope, rotate
from kvjax.storage import left_align, shift, write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape

_GROUPS = {"valid": "k_folded", "spans": "capacity"}


@pytree
class KIVICache:
    """Codes for the old tokens, exact rings for the recent ones; slot = token index.

    Invariants, a row at a time: tokens [0, k_folded) of the keys and [0, v_folded) of the values
    are read from codes, the rest from the rings, whose slot is the token index modulo 2R. k_folded
    is a multiple of R. Values are coded when they arrive and read exactly for R tokens more; keys
    are coded R tokens at a time by `flush`. A token's position is its index plus `shift`, which is
    0 unless the prompt had lost tokens.
    """

    k_codes: Array = array("batch", "kv_head", "slot", "byte", valid="k_folded")
    k_scale: Array = array("batch", "kv_head", "slot", "head_dim", **_GROUPS)
    k_zero: Array = array("batch", "kv_head", "slot", "head_dim", **_GROUPS)
    v_codes: Array = array("batch", "kv_head", "slot", "byte", valid="v_folded")
    v_scale: Array = array("batch", "kv_head", "slot", "group", valid="v_folded")
    v_zero: Array = array("batch", "kv_head", "slot", "group", valid="v_folded")
    k_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="k_recent")  # rotated
    v_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="v_recent")
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    k_folded: Array = array("batch", role=METADATA)  # i32[B]
    v_folded: Array = array("batch", role=METADATA)  # i32[B]
    shift: Array = array("batch", role=METADATA)  # i32[B], position minus token index
    k_bits: int = static()
    v_bits: int = static()
    group: int = static()  # tokens (keys) or channels (values) that share a scale
    rope: Rope = static()
    impl: str = static("auto")
    evicts = False

    @property
    def capacity(self) -> int:
        """Tokens that the codes have room for."""
        return self.k_codes.shape[2]

    @property
    def residual(self) -> int:
        """R, tokens."""
        return self.k_ring.shape[2] // 2

    @property
    def step_limit(self) -> int:
        """Tokens that one step can append: R."""
        return self.residual

    @property
    def flush_every(self) -> int:
        """A row's position reaches a multiple of it: `flush` codes R keys."""
        return self.residual

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        return self.capacity - self.lengths

    @property
    def k_recent(self) -> Array:
        """i32[B], keys that are read exactly."""
        return self.lengths - self.k_folded

    @property
    def v_recent(self) -> Array:
        """i32[B], values that are read exactly."""
        return self.lengths - self.v_folded

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T <= R tokens, attend. See `types.LayerCache.step`.

        Raises:
            ValueError: for more tokens than the residual window.
        """
        steps, ring = k.shape[2], 2 * self.residual
        if steps > self.residual:
            raise ValueError(f"{steps} tokens at once exceed residual_length={self.residual}.")
        if steps > 1:  # the ring may be as full as single tokens leave it
            self = self.flush()
        dtype, real = q.dtype, positions >= 0
        q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
        index = self.lengths[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        slots = jnp.where(real, index % ring, ring)
        codes, scale, zero = group_quantize(
            v, bits=self.v_bits, group=self.group, axis=3, impl=beside(self.impl)
        )
        rows = jnp.where(real, index, self.v_codes.shape[2])
        cache = replace(
            self,
            v_codes=write_rows(self.v_codes, codes, rows),
            v_scale=write_rows(self.v_scale, scale, rows),
            v_zero=write_rows(self.v_zero, zero, rows),
            k_ring=write_rows(self.k_ring, k, slots),
            v_ring=write_rows(self.v_ring, v, slots),
            lengths=self.lengths + real.sum(-1, dtype=jnp.int32),
            v_folded=jnp.maximum(self.lengths - self.residual, 0),
        )
        out = finish(cache._attend(q, positions))
        return jnp.where(real[:, None, :, None], out, 0.0).astype(dtype), cache

    def _attend(self, q: Array, positions: Array) -> Partial:
        """The tokens that are coded on both sides, merged with the last 2R, rebuilt exactly."""
        both = jnp.minimum(self.k_folded, self.v_folded)
        old = Partial(
            *quant_decode(
                q, self.k_codes, self.k_scale, self.k_zero, self.v_codes, self.v_scale, self.v_zero,
                both, k_bits=self.k_bits, v_bits=self.v_bits, impl=self.impl,
            )
        )  # fmt: skip
        index = ring_tokens(self.lengths, 2 * self.residual)  # [B, 2R]
        k = jnp.where(_rows(index < self.k_folded[:, None]), self._keys(index), self.k_ring)
        v = jnp.where(_rows(index < self.v_folded[:, None]), self._values(index), self.v_ring)
        recent = jnp.where(index >= both[:, None], index + self.shift[:, None], -1)
        return merge(old, dense_partial(q, k, v, visible(positions, recent)))

    def _keys(self, index: Array) -> Array:
        """Keys of tokens i32[B, M] from their codes: [B, K, M, H]."""
        index = jnp.clip(index, 0, self.k_codes.shape[2] - 1)
        codes = quant.unpack(take(self.k_codes, index), self.k_bits, self.k_ring.shape[-1])
        scale, zero = (take(x, index // self.group) for x in (self.k_scale, self.k_zero))
        value = codes.astype(jnp.float32) * scale.astype(jnp.float32) + zero.astype(jnp.float32)
        return value.astype(self.k_ring.dtype)

    def _values(self, index: Array) -> Array:
        """Values of tokens i32[B, M] from their codes: [B, K, M, H]."""
        index = jnp.clip(index, 0, self.v_codes.shape[2] - 1)
        codes = quant.unpack(take(self.v_codes, index), self.v_bits, self.v_ring.shape[-1])
        scale, zero = (take(x, index) for x in (self.v_scale, self.v_zero))
        return quant.group_dequantize(codes, scale, zero, axis=3).astype(self.v_ring.dtype)

    def flush(self) -> Self:
        """Code the oldest R recent keys of every row that holds R of them."""
        residual = self.residual
        full = self.k_recent >= residual  # [B]
        # k_folded is a multiple of R, so the block is one half of the ring.
        at = self.k_folded % (2 * residual)
        block = jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, residual, 1))(
            self.k_ring, at
        )
        codes, scale, zero = group_quantize(
            block, bits=self.k_bits, group=self.group, axis=2, impl=beside(self.impl)
        )

        def fold(buffer, x):
            first = self.k_folded // residual * x.shape[2]
            rows = first[:, None] + jnp.arange(x.shape[2], dtype=jnp.int32)[None]
            return write_rows(buffer, x, jnp.where(full[:, None], rows, buffer.shape[2]))

        return replace(
            self,
            k_codes=fold(self.k_codes, codes),
            k_scale=fold(self.k_scale, scale),
            k_zero=fold(self.k_zero, zero),
            k_folded=self.k_folded + jnp.where(full, residual, 0),
        )

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense, in token order. See `types.LayerCache.materialize`."""
        batch, heads, capacity, _ = self.v_codes.shape
        index = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (batch, capacity))
        ring = index % (2 * self.residual)
        old_k, old_v = (_rows(index < n[:, None]) for n in (self.k_folded, self.v_folded))
        k = jnp.where(old_k, self._keys(index), take(self.k_ring, ring))
        v = jnp.where(old_v, self._values(index), take(self.v_ring, ring))
        positions = jnp.where(index < self.lengths[:, None], index + self.shift[:, None], -1)
        return k, v, jnp.broadcast_to(positions[:, None], (batch, heads, capacity))


def _rows(mask: Array) -> Array:
    """bool [B, S] to [B, 1, S, 1]."""
    return mask[:, None, :, None]


@register(
    "kivi",
    presets={
        "paper": {"k_bits": 2, "v_bits": 2, "group": 32, "residual_length": 128},
        "rethink": {"k_bits": 4, "v_bits": 4, "group": 32, "residual_length": 128},
    },
)
@pytree
class KIVI:
    """Keys by groups of consecutive tokens of a channel, values by channels of a token.

    The last `n mod residual_length` keys and the last `residual_length` values of a prompt of n
    tokens stay exact; a prompt shorter than the residual window is stored exactly. Later, keys are
    quantized R at a time and values one by one, always after a step has attended to them exactly.
    Bytes a quantized token and KV head: H (k_bits + v_bits) / 8 + 8 H / group.

    Source: arXiv 2402.02750; jy-yuan/KIVI models/llama_kivi.py, quant/new_pack.py.
    Differs from the reference: float16 statistics whatever the cache's dtype; rows of a batch
    flush at their own length; constant groups are exact.
    """

    k_bits: int = static(2)
    v_bits: int = static(2)
    group: int = static(32)  # tokens (keys) or channels (values)
    residual_length: int = static(128)  # R, tokens
    full_layers: tuple[int, ...] = static(())  # kept in full precision, -1 = the last
    impl: str = static("auto")

    @property
    def flush_every(self) -> int:
        """Keys are folded when a row's position reaches a multiple of R."""
        return self.residual_length

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer that `full_layers` does not list."""
        return full_at(self, layer, num_layers)

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt, tail excluded."""
        n, residual, dim = shape.num_tokens, self.residual_length, shape.head_dim
        folded, old = n - n % residual, max(n - residual, 0)
        keys = folded * quant.packed_size(dim, self.k_bits) + folded // self.group * 4 * dim
        values = old * (quant.packed_size(dim, self.v_bits) + 4 * dim // self.group)
        exact = (2 * n - folded - old) * dim * shape.itemsize
        return shape.kv_heads * (keys + values + exact) + 16

    def points(self) -> list[Self]:
        """The settings that trade bytes for quality, most bytes first (group and R as set).

        Keys suffer more than values from few bits, so the mixed setting gives them more.
        """
        bits = ((8, 8), (4, 4), (4, 2), (2, 2))
        return [dataclasses.replace(self, k_bits=k, v_bits=v) for k, v in bits]

    def compress(self, prompt: PromptKV, info: LayerInfo) -> KIVICache:
        """Code the old tokens, keep the recent ones.

        Raises:
            ValueError: if the group does not divide the residual window or the head dim.
        """
        residual, group = self.residual_length, self.group
        total, dim = prompt.k.shape[2:]
        if residual < 1 or residual % group:
            raise ValueError(f"group={group} must divide residual_length={residual}.")
        if dim % group:
            fits = [g for g in range(8, dim + 1) if dim % g == 0 and residual % g == 0]
            raise ValueError(f"group={group} must divide head_dim={dim}: it can be one of {fits}.")
        lengths = (total - prompt.starts).astype(jnp.int32)
        capacity = -(-(total + info.reserve) // residual) * residual
        room = ((0, 0), (0, 0), (0, capacity - total), (0, 0))
        k, v = (left_align(x, prompt.starts) for x in (prompt.k, prompt.v))
        k, v = jnp.pad(k, room), jnp.pad(v, room)
        impl = beside(self.impl)
        keys = group_quantize(k, bits=self.k_bits, group=group, axis=2, impl=impl)
        values = group_quantize(v, bits=self.v_bits, group=group, axis=3, impl=impl)
        index = jnp.maximum(ring_tokens(lengths, 2 * residual), 0)
        return KIVICache(
            *keys, *values,
            take(k, index), take(v, index),
            lengths, lengths - lengths % residual, jnp.maximum(lengths - residual, 0),
            shift(prompt),
            k_bits=self.k_bits, v_bits=self.v_bits, group=group, rope=info.rope, impl=self.impl,
        )  # fmt: skip
