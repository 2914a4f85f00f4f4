"""The symmetric relative of KIVI: segments of tokens coded by their largest magnitude."""

import dataclasses
from dataclasses import replace
from typing import Self

import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.attention import Partial
from kvjax.methods.full import full_at
from kvjax.pallas.dispatch import choose
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.ring import RingCache, attend_decoded, take
from kvjax.storage import left_align, write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape


def encode(x: Array, scale: Array, bits: int) -> Array:
    """Packed codes of round(x / scale) in [-qmax, qmax], stored with qmax added.

    Args:
        x: [B, K, S, H].
        scale: f16, broadcasts against x; 0 codes 0.
        bits: 2 to 8.
    """
    qmax = 2 ** (bits - 1) - 1
    step = scale.astype(jnp.float32)
    level = jnp.where(step > 0, x.astype(jnp.float32) / jnp.where(step > 0, step, 1.0), 0.0)
    return quant.pack((jnp.clip(jnp.round(level), -qmax, qmax) + qmax).astype(jnp.int32), bits)


def decode(packed: Array, scale: Array, bits: int, dim: int) -> Array:
    """Undo `encode`: f32[B, K, S, H]."""
    codes = quant.unpack(packed, bits, dim) - (2 ** (bits - 1) - 1)
    return codes.astype(jnp.float32) * scale.astype(jnp.float32)


def scale_of(x: Array, bits: int, axis: int) -> Array:
    """Largest magnitude / qmax along an axis, which is kept: float16."""
    largest = jnp.abs(x.astype(jnp.float32)).max(axis, keepdims=True)
    limit = float(jnp.finfo(jnp.float16).max)
    return jnp.minimum(largest / (2 ** (bits - 1) - 1), limit).astype(jnp.float16)


@pytree
class SegmentCodes:
    """Quantized tokens [0, folded) of each row, in segments that are never written again.

    Invariants: the first segment is the prompt's tokens [0, first), and there is none where
    first = 0; each later one is the next R tokens. A segment has one key scale a channel.
    """

    k_codes: Array = array("batch", "kv_head", "slot", "byte", valid="folded")
    k_scale: Array = array("batch", "kv_head", "slot", "head_dim", valid="segments")  # a segment
    v_codes: Array = array("batch", "kv_head", "slot", "byte", valid="folded")
    v_scale: Array = array("batch", "kv_head", "slot", "group", valid="folded")  # [B, K, S, 1]
    folded: Array = array("batch", role=METADATA)  # i32[B], coded tokens
    first: Array = array("batch", role=METADATA)  # i32[B], tokens of the prompt's segment
    k_bits: int = static()
    v_bits: int = static()
    residual: int = static()  # R, tokens of a later segment

    @property
    def capacity(self) -> int:
        """Tokens that the codes have room for."""
        return self.k_codes.shape[2]

    @property
    def segments(self) -> Array:
        """i32[B], segments of each row."""
        return (self.first > 0) + (self.folded - self.first) // self.residual

    @property
    def container_bytes(self) -> Array:
        """i32[B], what the live codes of a row would take at one int8 each, scales excluded."""
        heads, _, dim = self.k_scale.shape[1:]
        return 2 * self.folded * heads * dim

    @property
    def packed_bytes(self) -> Array:
        """i32[B], what the live codes of a row do take, scales excluded."""
        each = self.k_codes.shape[3] + self.v_codes.shape[3]
        return self.folded * self.k_codes.shape[1] * each

    def segment_of(self, index: Array) -> Array:
        """The segment of tokens i32[B, M]."""
        first = self.first[:, None]
        later = (first > 0) + (index - first) // self.residual
        return jnp.where(index < first, 0, later)

    def attend(self, q: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] that come after every coded token."""
        return attend_decoded(type(self).materialize, q, self)

    def materialize(self) -> tuple[Array, Array]:
        """k, v f32[B, K, S, H]; valid up to `folded`."""
        batch, dim = self.k_scale.shape[0], self.k_scale.shape[3]
        index = jnp.arange(self.capacity, dtype=jnp.int32)
        index = jnp.broadcast_to(index, (batch, self.capacity))
        segment = jnp.clip(self.segment_of(index), 0, self.k_scale.shape[2] - 1)
        keys = decode(self.k_codes, take(self.k_scale, segment), self.k_bits, dim)
        return keys, decode(self.v_codes, self.v_scale, self.v_bits, dim)

    def fold(self, k: Array, v: Array, due: Array) -> Self:
        """Code blocks [B, K, R, H] as a new segment, in the rows bool[B] that are due."""
        k_scale, v_scale = scale_of(k, self.k_bits, 2), scale_of(v, self.v_bits, 3)
        at = self.folded[:, None] + jnp.arange(self.residual, dtype=jnp.int32)[None]

        def write(buffer, x, at):
            return write_rows(buffer, x, jnp.where(due[:, None], at, buffer.shape[2]))

        return replace(
            self,
            k_codes=write(self.k_codes, encode(k, k_scale, self.k_bits), at),
            k_scale=write(self.k_scale, k_scale, self.segments[:, None]),
            v_codes=write(self.v_codes, encode(v, v_scale, self.v_bits), at),
            v_scale=write(self.v_scale, v_scale, at),
            folded=self.folded + jnp.where(due, self.residual, 0),
        )


@register("symmetric")
@pytree
class Symmetric:
    """Keys by channel of a segment, values by token, codes round(x / scale) in [-qmax, qmax].

    scale = max |x| / qmax, qmax = 2^(bits - 1) - 1. Of a prompt of n tokens the last min(n, R) stay
    exact and the others are one segment; after that, every R more tokens the oldest R exact ones
    become a segment. Bytes of a coded token and KV head: H (k_bits + v_bits) / 8 + 2, and 2 H a
    segment for its key scales.

    Source: KIVI (arXiv 2402.02750), section 3, in the symmetric form that tutorials give it.
    Differs from the reference: codes are packed, where tutorials keep a byte each
    (`SegmentCodes.container_bytes`); float16 scales, against which codes are taken; a segment is
    cut when a row's position is a multiple of R, so up to 3 R - 1 tokens are exact before it.
    """

    k_bits: int = static(4)
    v_bits: int = static(4)
    residual_length: int = static(128)  # R, tokens
    full_layers: tuple[int, ...] = static(())  # kept in full precision, -1 = the last
    impl: str = static("auto")  # "auto" or "xla": see `no_kernel`
    no_kernel = (
        "segments of absmax codes without zero: the prompt's keys have one scale a channel for as"
        " many tokens as there are, later segments start where it ends, at another token in every"
        " row; quant_decode reads groups of one size from token 0, with a float16 zero"
    )

    @property
    def flush_every(self) -> int:
        """Rows are looked at for a whole segment when a position is a multiple of R."""
        return self.residual_length

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer that `full_layers` does not list."""
        return full_at(self, layer, num_layers)

    def points(self) -> list[Self]:
        """The settings that trade bytes for quality, most bytes first (R as set)."""
        return [dataclasses.replace(self, k_bits=b, v_bits=b) for b in (8, 4, 2)]

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt."""
        n, dim = shape.num_tokens, shape.head_dim
        coded = max(n - self.residual_length, 0)
        codes = sum(quant.packed_size(dim, bits) for bits in (self.k_bits, self.v_bits))
        scales = 2 * coded + 2 * dim * (coded > 0)
        exact = 2 * (n - coded) * dim * shape.itemsize
        return shape.kv_heads * (coded * codes + scales + exact) + 16

    def compress(self, prompt: PromptKV, info: LayerInfo) -> RingCache:
        """Code all but the last R tokens as one segment.

        Raises:
            ValueError: for bits or a residual window out of range.
            NotImplementedError: for an `impl` that names a kernel.
        """
        choose("symmetric", self.impl, {"xla": SegmentCodes.attend})
        residual, total = self.residual_length, prompt.k.shape[2]
        if residual < 1:
            raise ValueError(f"residual_length={residual} must be at least 1.")
        for name, bits in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if not 2 <= bits <= 8:
                raise ValueError(f"{name}={bits} must be 2 to 8: a symmetric code needs a sign.")
        lengths = (total - prompt.starts).astype(jnp.int32)
        first = jnp.maximum(lengths - residual, 0)
        capacity = total + info.reserve
        room = ((0, 0), (0, 0), (0, info.reserve), (0, 0))
        k, v = (jnp.pad(left_align(x, prompt.starts), room) for x in (prompt.k, prompt.v))
        coded = (jnp.arange(capacity)[None] < first[:, None])[:, None, :, None]
        old_k, old_v = (jnp.where(coded, x, 0) for x in (k, v))
        k_scale, v_scale = scale_of(old_k, self.k_bits, 2), scale_of(old_v, self.v_bits, 3)
        later = ((0, 0), (0, 0), (0, -(-info.reserve // residual)), (0, 0))
        body = SegmentCodes(
            encode(old_k, k_scale, self.k_bits), jnp.pad(k_scale, later),
            encode(old_v, v_scale, self.v_bits), v_scale,
            first, first, k_bits=self.k_bits, v_bits=self.v_bits, residual=residual,
        )  # fmt: skip
        return RingCache.of(body, k, v, prompt, info, residual, residual)
