"""The group-quantized cache of common libraries, with explicit axes and HQQ's refined zeros."""

import dataclasses
from dataclasses import replace
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.attention import Partial
from kvjax.methods.full import full_at
from kvjax.pallas.quant_decode.api import quant_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.ring import RingCache, attend_decoded, take
from kvjax.storage import left_align, write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape

AXES = ("channel", "token")
REFINE = ("none", "exact", "best")
_BEST_ITERATIONS = 5  # at 4 bits they gain four fifths of what 20 do
_EXACT_ITERATIONS = 20
_BETA, _P = 10.0, 0.7  # of HQQ's proximal step
_SHRUNK_TO_ZERO = 0.17  # below beta^(-1 / (2 - p)) = 0.1701 the proximal step leaves nothing


def encode(
    x: Array, lengths: Array, *, axis: str, bits: int, group: int, refine: str
) -> tuple[Array, Array, Array]:
    """Quantize the first `lengths` tokens of each row; a partial last group repeats its last token.

    Args:
        x: [B, K, S, H]; what follows a row's tokens is not read.
        lengths: i32[B], tokens.
        axis: "channel": a group is consecutive tokens of a channel; "token": consecutive channels
            of a token.
        bits: 1 to 8.
        group: tokens or channels that share a scale; it divides S or H.
        refine: see `QuantizedCache`.

    Returns:
        codes uint8 [B, K, S, bytes], packed along H; scale and zero f16 [B, K, S / group, H]
        ("channel") or [B, K, S, H / group] ("token").
    """
    batch, heads, slots, dim = x.shape
    along = 2 if axis == "channel" else 3
    real = jnp.arange(slots, dtype=jnp.int32)[None] < lengths[:, None]  # [B, S]
    real = real[:, None, :, None]
    x = jnp.where(real, x, take(x, jnp.maximum(lengths - 1, 0)[:, None])).astype(jnp.float32)
    _, scale, zero = quant.group_quantize(x, bits, group, axis=along)
    if refine == "exact":  # HQQ's limits of the scale
        flat = scale.astype(jnp.float32) * (2**bits - 1) <= 1e-4
        scale = jnp.where(flat, 1.0, jnp.maximum(scale, 1 / 2e4)).astype(jnp.float16)

    split = x.shape[:along] + (x.shape[along] // group, group) + x.shape[along + 1 :]
    groups, weight = x.reshape(split), jnp.broadcast_to(real, x.shape).reshape(split)
    along += 1
    step = jnp.expand_dims(scale.astype(jnp.float32), along)
    start = jnp.expand_dims(zero.astype(jnp.float32), along)
    if refine != "none":
        solve = _refine_exact if refine == "exact" else _refine_best
        start = solve(groups, step, start, weight, bits, along)
        start = _as_stored(start)
    codes = _codes(groups, step, start, bits).astype(jnp.int32).reshape(x.shape)
    return quant.pack(codes, bits), scale, jnp.squeeze(start, along).astype(jnp.float16)


def _codes(groups: Array, step: Array, zero: Array, bits: int) -> Array:
    inverse = jnp.where(step > 0, 1 / jnp.where(step > 0, step, 1.0), 0.0)
    return jnp.clip(jnp.round((groups - zero) * inverse), 0, 2**bits - 1)


def _as_stored(zero: Array) -> Array:
    limit = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(zero, -limit, limit).astype(jnp.float16).astype(jnp.float32)


def _shrink(error: Array) -> Array:
    """sign(x) relu(|x| - |x|^(p - 1) / beta), without its pole at 0."""
    size = jnp.abs(error)
    # exp and log are vectorised on a CPU, a power is not
    less = size - jnp.exp((_P - 1) * jnp.log(jnp.maximum(size, _SHRUNK_TO_ZERO))) / _BETA
    return jnp.sign(error) * jnp.where(size > _SHRUNK_TO_ZERO, jnp.maximum(less, 0.0), 0.0)


def _proximal_step(groups, step, zero, weight, bits, along):
    """One iteration: the next zero, and the absolute errors of this one (0 where no token is)."""
    decoded = _codes(groups, step, zero, bits) * step
    error = groups - (decoded + zero)
    count = jnp.maximum(weight.sum(along, keepdims=True), 1)
    # mean(x - e - q s) = zero + mean(error - e): the difference does not cancel large offsets
    change = jnp.where(weight, error - _shrink(error), 0.0).sum(along, keepdims=True) / count
    return zero + change, jnp.where(weight, jnp.abs(error), 0.0)


def _refine_best(groups, step, zero, weight, bits, along):
    def wins(error, least):
        # Many zeros share one mean absolute error: the rounding of sums must not choose.
        return error < (1 - 1e-4) * least

    def body(_, carry):
        zero, best, least = carry
        following, error = _proximal_step(groups, step, zero, weight, bits, along)
        error = error.sum(along, keepdims=True)
        better = wins(error, least)
        best, least = jnp.where(better, zero, best), jnp.where(better, error, least)
        return _as_stored(following), best, least

    least = jnp.full_like(zero, jnp.inf)
    zero, best, least = lax.fori_loop(0, _BEST_ITERATIONS, body, (zero, zero, least))
    error = jnp.abs(groups - (_codes(groups, step, zero, bits) * step + zero))
    error = jnp.where(weight, error, 0.0).sum(along, keepdims=True)
    return jnp.where(wins(error, least), zero, best)


def _refine_exact(groups, step, zero, weight, bits, along):
    rows = (-1,) + (1,) * (groups.ndim - 1)

    def going(carry):
        i, _, _, alive = carry
        return (i < _EXACT_ITERATIONS) & alive.any()

    def body(carry):
        i, zero, least, alive = carry
        following, error = _proximal_step(groups, step, zero, weight, bits, along)
        error = error.reshape(error.shape[0], -1).sum(-1)
        zero = jnp.where(alive.reshape(rows), following, zero)  # the zero of the last one is kept
        return i + 1, zero, jnp.minimum(error, least), alive & (error < least)

    batch = groups.shape[0]
    least, alive = jnp.full(batch, jnp.inf), jnp.ones(batch, bool)
    return lax.while_loop(going, body, (jnp.int32(0), zero, least, alive))[1]


_SIDE = {"valid": "folded", "spans": "capacity"}


@pytree
class GroupCodes:
    """Quantized tokens [0, folded) of each row.

    Invariants: `folded` is a multiple of R unless the whole body is coded anew at every fold.
    """

    k_codes: Array = array("batch", "kv_head", "slot", "byte", valid="folded")
    k_scale: Array = array("batch", "kv_head", "slot", "group", **_SIDE)  # see `encode`
    k_zero: Array = array("batch", "kv_head", "slot", "group", **_SIDE)
    v_codes: Array = array("batch", "kv_head", "slot", "byte", valid="folded")
    v_scale: Array = array("batch", "kv_head", "slot", "group", **_SIDE)
    v_zero: Array = array("batch", "kv_head", "slot", "group", **_SIDE)
    folded: Array = array("batch", role=METADATA)  # i32[B]
    method: Any = static()  # the QuantizedCache: axes, bits, group, policy
    head_dim: int = static()

    @property
    def capacity(self) -> int:
        """Tokens that the codes have room for."""
        return self.k_codes.shape[2]

    def attend(self, q: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] that come after every coded token."""
        method = self.method
        if (method.key_axis, method.value_axis) != ("channel", "token"):
            return attend_decoded(type(self).materialize, q, self)
        return Partial(
            *quant_decode(
                q, self.k_codes, self.k_scale, self.k_zero, self.v_codes, self.v_scale, self.v_zero,
                self.folded, k_bits=method.k_bits, v_bits=method.v_bits, impl=method.impl,
            )
        )  # fmt: skip

    def materialize(self) -> tuple[Array, Array]:
        """k, v f32[B, K, S, H]; valid up to `folded`."""
        method = self.method

        def side(codes, scale, zero, bits, axis):
            codes = quant.unpack(codes, bits, self.head_dim)
            return quant.group_dequantize(codes, scale, zero, axis=2 if axis == "channel" else 3)

        return (
            side(self.k_codes, self.k_scale, self.k_zero, method.k_bits, method.key_axis),
            side(self.v_codes, self.v_scale, self.v_zero, method.v_bits, method.value_axis),
        )

    def fold(self, k: Array, v: Array, due: Array) -> Self:
        """Code blocks [B, K, R, H] behind the old tokens, in the rows bool[B] that are due."""
        residual, method = k.shape[2], self.method
        folded = self.folded + jnp.where(due, residual, 0)
        at = self.folded[:, None] + jnp.arange(residual, dtype=jnp.int32)[None]
        at = jnp.where(due[:, None], at, self.capacity)
        if method.requantize_all:
            old = self.materialize()
            k, v = (write_rows(x, block, at) for x, block in zip(old, (k, v), strict=True))
            new = method.encode(k, v, folded)
            mine = due[:, None, None, None]
            arrays = {name: jnp.where(mine, x, getattr(self, name)) for name, x in new.items()}
            return replace(self, **arrays, folded=folded)
        new = method.encode(k, v, jnp.full_like(folded, residual))

        def write(buffer, x):
            first = self.folded // residual * x.shape[2]
            rows = first[:, None] + jnp.arange(x.shape[2], dtype=jnp.int32)[None]
            return write_rows(buffer, x, jnp.where(due[:, None], rows, buffer.shape[2]))

        arrays = {name: write(getattr(self, name), x) for name, x in new.items()}
        return replace(self, **arrays, folded=folded)


@register(
    "quantized_cache",
    presets={
        "transformers": {
            "k_bits": 4, "v_bits": 4, "group": 64, "residual_length": 128,
            "requantize_all": True, "refine": "none",
        },
        "hqq": {
            "k_bits": 4, "v_bits": 4, "group": 64, "residual_length": 128,
            "requantize_all": True, "refine": "exact",
        },
    },
)  # fmt: skip
@pytree
class QuantizedCache:
    """Min/max groups along a chosen axis of keys and of values, with a residual window.

    A group is `group` consecutive tokens of one channel ("channel") or consecutive channels of one
    token ("token"). x is read as code * scale + zero, with scale = (max - min) / (2^bits - 1) and
    zero = min, or a zero refined by HQQ's proximal steps while the scale stays: e = shrink(x -
    x_read), zero <- mean(x - e - code * scale). `refine` is "none"; "exact", HQQ's loop: up to 20
    steps, a row stops when its mean absolute error does not fall, and its last zero stays; or
    "best", a few steps of which each group takes the best zero. Keys vary by channel and values by
    token, so these are the default axes.

    `requantize_all=False` codes each block of R tokens once: the last n mod R tokens of a prompt of
    n are exact, a prompt below R entirely. True is the policy of transformers: the whole prompt is
    coded, and after R more tokens everything is coded again from what can be read of it. With axes
    that keep groups where they are that changes only the group that was not full.

    Source: huggingface/transformers cache_utils.py (QuantizedLayer); mobiusml/hqq core/quantize.py,
    core/optimize.py.
    Differs from the reference: transformers' default axis 0 is not offered: it flattens batch,
    heads, tokens and channels, so that a group mixes heads and rows and depends on the length and
    the batch. Scale and zero are float16, codes are taken against what is stored, zero in units of
    x instead of codes. "exact" stops by row, not by batch. With `requantize_all` a block is folded
    when a row's position is a multiple of R, so it is read exactly for up to R - 1 steps more, and
    is requantized from float32. transformers runs HQQ without its refinement: preset
    "transformers" has "none", "hqq" has "exact".
    """

    k_bits: int = static(4)
    v_bits: int = static(4)
    group: int = static(64)  # tokens ("channel") or channels ("token")
    residual_length: int = static(128)  # R, tokens
    key_axis: str = static("channel")
    value_axis: str = static("token")
    refine: str = static("best")
    requantize_all: bool = static(False)
    full_layers: tuple[int, ...] = static(())  # kept in full precision, -1 = the last
    impl: str = static("auto")

    @property
    def flush_every(self) -> int:
        """Rows are looked at for whole blocks when a position is a multiple of R."""
        return self.residual_length

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer that `full_layers` does not list."""
        return full_at(self, layer, num_layers)

    def points(self) -> list[Self]:
        """The settings that trade bytes for quality, most bytes first (all else as set)."""
        return [dataclasses.replace(self, k_bits=b, v_bits=b) for b in (8, 4, 3, 2)]

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt."""
        n, dim = shape.num_tokens, shape.head_dim
        folded = n if self.requantize_all else n - n % self.residual_length
        each = 2 * (n - folded) * dim * shape.itemsize
        for bits, axis in ((self.k_bits, self.key_axis), (self.v_bits, self.value_axis)):
            groups = -(-folded // self.group) * dim
            if axis == "token":
                groups = folded * (dim // self.group)
            each += folded * quant.packed_size(dim, bits) + 4 * groups
        return shape.kv_heads * each + 12

    def encode(self, k: Array, v: Array, lengths: Array) -> dict[str, Array]:
        """Codes, scales and zeros of both sides, by their names in `GroupCodes`."""
        out = {}
        for side, x, bits, axis in (
            ("k", k, self.k_bits, self.key_axis),
            ("v", v, self.v_bits, self.value_axis),
        ):
            coded = encode(x, lengths, axis=axis, bits=bits, group=self.group, refine=self.refine)
            out |= zip((f"{side}_codes", f"{side}_scale", f"{side}_zero"), coded, strict=True)
        return out

    def compress(self, prompt: PromptKV, info: LayerInfo) -> RingCache:
        """Code the prompt, or its whole blocks of R tokens.

        Raises:
            ValueError: for words that are none of the choices; if the group does not divide what is
                grouped.
        """
        total, dim = prompt.k.shape[2:]
        self._check(dim)
        residual = self.residual_length
        lengths = (total - prompt.starts).astype(jnp.int32)
        capacity = -(-(total + info.reserve) // residual) * residual
        room = ((0, 0), (0, 0), (0, capacity - total), (0, 0))
        k, v = (jnp.pad(left_align(x, prompt.starts), room) for x in (prompt.k, prompt.v))
        folded = lengths if self.requantize_all else lengths - lengths % residual
        codes = self.encode(k, v, folded)
        body = GroupCodes(**codes, folded=folded, method=self, head_dim=dim)
        return RingCache.of(body, k, v, prompt, info, residual, 0)

    def _check(self, dim: int) -> None:
        group, residual, axes = self.group, self.residual_length, (self.key_axis, self.value_axis)
        for name, value, choices in (
            ("key_axis", self.key_axis, AXES),
            ("value_axis", self.value_axis, AXES),
            ("refine", self.refine, REFINE),
        ):
            if value not in choices:
                raise ValueError(f"{name}={value!r} must be one of {choices}.")
        if residual < 1:
            raise ValueError(f"residual_length={residual} must be at least 1.")
        if "channel" in axes and residual % group:
            raise ValueError(f"group={group} must divide residual_length={residual}.")
        if "token" in axes and dim % group:
            by_channel = "channel" in axes
            fits = [
                g for g in range(8, dim + 1) if dim % g == 0 and not (by_channel and residual % g)
            ]
            raise ValueError(f"group={group} must divide head_dim={dim}: it can be one of {fits}.")
