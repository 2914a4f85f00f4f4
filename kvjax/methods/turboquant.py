"""TurboQuant: every vector randomly rotated and coded coordinate by coordinate, as it comes."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.attention import Partial, finish
from kvjax.methods.full import full_at
from kvjax.pallas.codebook_decode.api import Part, codebook_decode
from kvjax.pallas.codebook_encode.api import codebook_encode
from kvjax.pallas.codebook_encode.xla import product
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.rope import Rope, rotate
from kvjax.storage import left_align, shift, write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape

_FLOAT16_MAX = 65504.0


@pytree
class Coder:
    """How the vectors of one side of a layer (keys or values) are coded.

    Invariants: `outliers` are ascending and are the last part; the other channels are the first.
    A vector is `mean` plus what its codes stand for.
    """

    outliers: Array | None = array("batch", "kv_head", "channel", role=METADATA)  # uint8 or uint16
    mean: Array | None = array("batch", "kv_head", "head_dim", role=METADATA)  # f16[B, K, H]
    parts: tuple[Part, ...] = static()
    rotation: str = static()
    corrected: bool = static()  # norms are stored over the norm of the decoded levels
    seed: int = static()

    def encode(self, x: Array, impl: str = "auto") -> tuple[Array, Array]:
        """Code vectors [B, K, T, H]: codes uint8 [B, K, T, P] and scales f16[B, K, T, C]."""
        if self.mean is not None:
            x = x.astype(jnp.float32) - self.mean.astype(jnp.float32)[:, :, None]
        turn = self._matrix([self._rotation(part) for part in self.parts])
        return codebook_encode(
            x, turn, parts=self.parts, corrected=self.corrected, seed=self.seed, impl=impl
        )

    def decode(self, codes: Array, scales: Array) -> Array:
        """What codes stand for: f32[B, K, S, H]."""
        byte, at, features = 0, 0, []
        scales = scales.astype(jnp.float32)
        for part in self.parts:
            code = quant.unpack(codes[..., byte : byte + part.code_bytes], part.bits, part.dim)
            norm = scales[..., at, None]
            if part.level_bits:
                index = code & (2**part.level_bits - 1)
                features.append(norm * quant.coordinate_decode(index, part.level_bits, part.dim))
            if part.signs:
                sign = (2 * (code >> part.level_bits) - 1).astype(jnp.float32)
                features.append(norm * scales[..., at + 1, None] * part.sign_scale * sign)
            byte, at = byte + part.code_bytes, at + part.scales
        return self.from_features(jnp.concatenate(features, -1))

    def to_features(self, q: Array) -> Array:
        """What meets the codes in a product with vectors [B, K, R, H]: f32[B, K, R, F].

        The products with `mean` are left out: they are the same for all tokens.
        """
        return product(q.astype(jnp.float32), self._spread())

    def from_features(self, x: Array) -> Array:
        """Vectors f32[B, K, R, H] from sums of features [B, K, R, F] whose weights add to 1."""
        x = product(x, self._spread().swapaxes(-1, -2))
        return x if self.mean is None else x + self.mean.astype(jnp.float32)[:, :, None]

    def _rotation(self, part: Part) -> Array:
        return quant.rotation(part.dim, self.seed, self.rotation)

    def _spread(self) -> Array:
        """Channels to features: each part rotated, and a sketch of that where it has signs."""
        blocks = []
        for part in self.parts:
            turn = self._rotation(part)
            block = [turn] if part.level_bits else []
            if part.signs:
                block.append(product(turn, quant.sketch(part.dim, self.seed).T))
            blocks.append(jnp.concatenate(block, -1))
        return self._matrix(blocks)

    def _matrix(self, blocks: list[Array]) -> Array:
        """A block a part, by channel: f32[H, F], or [B, K, H, F] where each head has outliers."""
        if self.outliers is None:
            return blocks[0]
        matrix = jax.scipy.linalg.block_diag(*blocks)
        loud = jax.nn.one_hot(self.outliers, matrix.shape[0], dtype=jnp.int32).sum(2)
        return matrix[jnp.argsort(jnp.argsort(loud, -1, stable=True), -1)]


@pytree
class TurboQuantCache:
    """Codes of every token; slot = index of the token, prompt or appended.

    Invariants, a row at a time: slots [0, lengths) hold tokens; the others are never read. The
    position of token i is i + shift.
    """

    k_codes: Array = array("batch", "kv_head", "slot", "byte", valid="lengths")  # uint8
    k_scales: Array = array("batch", "kv_head", "slot", "scale", valid="lengths")  # f16
    v_codes: Array = array("batch", "kv_head", "slot", "byte", valid="lengths")
    v_scales: Array = array("batch", "kv_head", "slot", "scale", valid="lengths")
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    shift: Array = array("batch", role=METADATA)  # i32[B]
    keys: Coder
    values: Coder
    rope: Rope = static()
    impl: str = static("auto")
    step_limit = None
    flush_every = None
    evicts = False

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        return self.k_codes.shape[2] - self.lengths

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Code T tokens, attend to all codes up to each. See `types.LayerCache.step`."""
        dtype, real = q.dtype, positions >= 0
        batch, heads, steps, _ = q.shape
        q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
        index = self.lengths[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        slots = jnp.where(real, index, self.k_codes.shape[2])  # out of range: dropped
        coded = (*self.keys.encode(k, self.impl), *self.values.encode(v, self.impl))
        old = (self.k_codes, self.k_scales, self.v_codes, self.v_scales)
        new = [write_rows(buffer, x, slots) for buffer, x in zip(old, coded, strict=True)]
        lengths = self.lengths + real.sum(-1, dtype=jnp.int32)
        q = self.keys.to_features(q.reshape(batch, k.shape[1], -1, q.shape[-1]))
        part = codebook_decode(
            q.reshape(batch, heads, steps, -1), *new, index + 1,
            keys=self.keys.parts, values=self.values.parts, impl=self.impl,
        )  # fmt: skip
        out = finish(Partial(*part)).reshape(batch, k.shape[1], heads // k.shape[1] * steps, -1)
        out = self.values.from_features(out).reshape(batch, heads, steps, -1)
        out = jnp.where(real[:, None, :, None], out, 0.0).astype(dtype)
        return out, TurboQuantCache(
            *new, lengths, self.shift, self.keys, self.values, rope=self.rope, impl=self.impl
        )

    def flush(self) -> Self:
        """Nothing to fold: every token is coded as it comes."""
        return self

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense. See `types.LayerCache.materialize`."""
        batch, heads, capacity, _ = self.k_codes.shape
        k = self.keys.decode(self.k_codes, self.k_scales)
        v = self.values.decode(self.v_codes, self.v_scales)
        index = jnp.arange(capacity, dtype=jnp.int32)[None]
        positions = jnp.where(index < self.lengths[:, None], index + self.shift[:, None], -1)
        return k, v, jnp.broadcast_to(positions[:, None], (batch, heads, capacity))


# The paper codes keys for products with queries and values for their own error; 3.5 bits is where
# it finds no loss. It shows no norm correction, and rotates by QR.
_PAPER = {
    "k_bits": 3.5, "v_bits": 3.5, "key_objective": "prod", "value_objective": "mse",
    "rotation": "haar", "norm_correction": False,
}  # fmt: skip


@register("turboquant", presets={"paper": _PAPER})
@pytree
class TurboQuant:
    """Rotate each vector at random and code every coordinate with the levels of its known law.

    Every token is coded at once, the prompt's and each that is appended. The objective "mse" codes
    a vector for its own error; "prod" spends one of the bits on the sign of a sketch of what the
    other bits missed (and a float16 on its norm), which makes products unbiased. With
    `norm_correction`, a vector coded for "mse" comes back with its own norm.

    Bits are 1 to 8, or 2.5 and 3.5: the quarter of the channels that is loudest in the prompt (mean
    magnitude, for each KV head) gets 3 (4) bits and the others 2 (3), each with a rotation and a
    norm of its own; with both norms that makes 2.5 (3.5) bits a value where head_dim is 128.
    Bytes a token and KV head, both sides: 2 (H bits / 8 + 2), with "prod" 2 (H bits / 8 + 4).

    Source: arXiv 2504.19874, algorithms 1 and 2; section 4.3 (fractional bits).
    Differs from the reference: a Hadamard rotation where head_dim is a power of two (or
    rotation="haar"); norm correction, and mse for keys, by default (the preset `paper` has
    neither); section 4.3 does not say which channels are outliers; `centered`.
    """

    k_bits: float = static(4)
    v_bits: float = static(4)
    key_objective: str = static("mse")  # or "prod"
    value_objective: str = static("mse")
    rotation: str = static("hadamard")  # or "haar"
    norm_correction: bool = static(True)  # of vectors coded for "mse"
    centered: bool = static(False)  # code what is left of the prompt's mean, stored once a head
    full_layers: tuple[int, ...] = static(())  # kept exact, -1 = the last
    seed: int = static(0)
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Any:
        """The full cache in `full_layers`, the same everywhere else."""
        return full_at(self, layer, num_layers)

    def points(self) -> list[Self]:
        """The settings that trade bytes for quality, most bytes first (the objectives as set)."""
        return [dataclasses.replace(self, k_bits=b, v_bits=b) for b in (8, 4, 3.5, 3, 2.5, 2)]

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt."""
        dim, token, head = shape.head_dim, 0, 0
        for parts in self._sides(dim):
            token += sum(part.code_bytes + 2 * part.scales for part in parts)
            head += 2 * dim if self.centered else 0
            head += _channel_dtype(dim).itemsize * parts[-1].dim if len(parts) > 1 else 0
        return shape.kv_heads * (shape.num_tokens * token + head) + 8

    def compress(self, prompt: PromptKV, info: LayerInfo) -> TurboQuantCache:
        """Code the prompt.

        Raises:
            ValueError: for bits, an objective or a rotation that do not exist, or a head_dim that
                they cannot code.
        """
        total, dim = prompt.k.shape[2:]
        lengths = (total - prompt.starts).astype(jnp.int32)
        real = (jnp.arange(total)[None] < lengths[:, None])[:, None, :, None]
        coders, coded = [], []
        for x, parts in zip((prompt.k, prompt.v), self._sides(dim), strict=True):
            # What follows a row's end is its pads: zeros, so that codes do not depend on them.
            x = jnp.where(real, left_align(x, prompt.starts).astype(jnp.float32), 0.0)
            coder = self._coder(x, real, parts)
            coders.append(coder)
            coded += coder.encode(x, self.impl)
        room = ((0, 0), (0, 0), (0, info.reserve), (0, 0))
        return TurboQuantCache(
            *(jnp.pad(array, room) for array in coded), lengths, shift(prompt), *coders,
            rope=info.rope, impl=self.impl,
        )  # fmt: skip

    def _coder(self, x: Array, real: Array, parts: tuple[Part, ...]) -> Coder:
        """From left-aligned vectors f32[B, K, T, H] that are zero where not `real`."""
        mean = outliers = None
        if self.centered:
            mean = x.sum(2) / real.sum(2)
            mean = jnp.clip(mean, -_FLOAT16_MAX, _FLOAT16_MAX).astype(jnp.float16)
            x = jnp.where(real, x - mean.astype(jnp.float32)[:, :, None], 0.0)
        if len(parts) > 1:
            _, loudest = lax.top_k(jnp.abs(x).sum(2), parts[-1].dim)
            outliers = jnp.sort(loudest, -1).astype(_channel_dtype(x.shape[-1]))
        return Coder(
            outliers, mean, parts=parts, rotation=self.rotation, corrected=self.norm_correction,
            seed=self.seed,
        )  # fmt: skip

    def _sides(self, dim: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Parts of keys and of values."""
        return (
            _parts("k_bits", self.k_bits, "key_objective", self.key_objective, dim),
            _parts("v_bits", self.v_bits, "value_objective", self.value_objective, dim),
        )


@functools.cache
def _parts(name: str, bits: float, role: str, objective: str, dim: int) -> tuple[Part, ...]:
    if objective not in ("mse", "prod"):
        raise ValueError(f"{role}={objective!r} must be 'mse' or 'prod'.")
    if bits not in (1, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8):
        raise ValueError(f"{name}={bits} must be a whole number from 1 to 8, or 2.5 or 3.5.")
    signs, whole = objective == "prod", int(bits)
    if bits == whole:
        if dim < 3:
            raise ValueError(f"head_dim={dim} must be at least 3.")
        return (Part(dim, whole, signs),)
    if dim % 4 or dim < 12:
        raise ValueError(
            f"{name}={bits} codes a quarter of the channels apart: head_dim={dim} must be a"
            f" multiple of 4 from 12 on; {name} can be {whole} or {whole + 1}."
        )
    return Part(dim - dim // 4, whole, signs), Part(dim // 4, whole + 1, signs)


def _channel_dtype(dim: int) -> jnp.dtype:
    """The smallest unsigned type that holds a channel."""
    return jnp.dtype(jnp.uint8) if dim <= 256 else jnp.dtype(jnp.uint16)
