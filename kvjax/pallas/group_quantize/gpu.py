"""group_quantize on GPUs: a program reads a tile once from memory and writes it packed."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax import quant
from kvjax.pallas import compat

_FLOAT16_MAX = 65504.0
_TOKENS = 32  # of a program that groups channels


def group_quantize(
    x: Array, *, bits: int, group: int, axis: int, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See `api.group_quantize`."""
    batch, heads, tokens, dim = x.shape
    if axis == 3:
        x = x.reshape(1, -1, dim)
        size, rows, kernel = dim // group, min(_TOKENS, pl.next_power_of_2(x.shape[1])), _channels
        grid, room = (pl.cdiv(x.shape[1], rows), 1), (x.shape[1], size)
    else:
        x = x.reshape(-1, tokens, dim)
        rows, kernel = pl.next_power_of_2(group), _tokens
        grid, room = (tokens // group, x.shape[0]), (tokens // group, dim)
    # A tile may end after the array does: what is there is masked, but it must be addressable.
    padded = x.shape[1] + rows
    bytes_ = quant.packed_size(dim, bits)

    def whole(width):
        return pl.BlockSpec((None, padded, width), lambda i, b: (b, 0, 0))

    wide = 2 * max(16, pl.next_power_of_2(dim))
    out = pl.pallas_call(
        functools.partial(kernel, bits=bits, group=group, rows=rows, size=x.shape[1], dim=dim),
        grid=grid,
        in_specs=[whole(wide)],
        out_specs=[whole(wide), whole(wide), whole(wide)],
        out_shape=[
            jax.ShapeDtypeStruct((x.shape[0], x.shape[1], bytes_), jnp.uint8),
            jax.ShapeDtypeStruct((x.shape[0], *room), jnp.float16),
            jax.ShapeDtypeStruct((x.shape[0], *room), jnp.float16),
        ],
        compiler_params=compat.gpu_params(4, 2),
        interpret=interpret,
        name="group_quantize",
    )(x)
    return tuple(a.reshape(batch, heads, -1, a.shape[-1]) for a in out)


def planes(dim: int, bits: int) -> list[tuple[int, int, list[tuple[int, int]], int]]:
    """How `quant.pack` lays out bytes: a run of bytes for each part of the width.

    Returns:
        For each part: its mask, its shift within a code, (first channel, shift within a byte) of
        every plane, and the bytes (a plane's channels; the last may run out of the array).
    """
    found = []
    for part, shift in quant.parts(bits):
        width = -(-dim // (8 // part))
        firsts = [(i * width, i * part) for i in range(8 // part) if i * width < dim]
        found.append(((1 << part) - 1, shift, firsts, width))
    return found


def _statistics(x: Array, real: Array, axis: int, bits: int) -> tuple[Array, Array]:
    """Stored scale and zero, float16, of the real entries along an axis."""
    low = jnp.where(real, x, jnp.inf).min(axis)
    high = jnp.where(real, x, -jnp.inf).max(axis)
    zero = _to_float16(low)
    return _to_float16((high - zero.astype(jnp.float32)) / (2**bits - 1)), zero


def _to_float16(x: Array) -> Array:
    return jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX).astype(jnp.float16)


def _codes(x: Array, scale: Array, zero: Array, bits: int) -> Array:
    step, offset = scale.astype(jnp.float32), zero.astype(jnp.float32)
    level = jnp.where(step > 0, (x - offset) / jnp.where(step > 0, step, 1.0), 0.0)
    level = jnp.clip(level, 0.0, 2.0**bits - 1)
    code = level.astype(jnp.int32)  # Triton has no rounding to even
    rest = level - code.astype(jnp.float32)
    return code + ((rest > 0.5) | ((rest == 0.5) & (code % 2 == 1))).astype(jnp.int32)


def _read(x_ref, at, rows, first, width, last_row, last):
    """Tile [rows, width] from row `at` and channel `first`, and which of it is real."""
    real = (at + jnp.arange(rows) < last_row)[:, None] & (first + jnp.arange(width) < last)[None]
    real = jnp.broadcast_to(real, (rows, width))
    tile = x_ref.at[pl.ds(at, rows), pl.ds(first, width)]
    return plgpu.load(tile, mask=real, other=0.0).astype(jnp.float32), real


def _write(codes_ref, at, byte, value, width, last_row):
    rows, padded = value.shape
    mask = (at + jnp.arange(rows) < last_row)[:, None] & (jnp.arange(padded) < width)[None]
    tile = codes_ref.at[pl.ds(at, rows), pl.ds(byte, padded)]
    plgpu.store(tile, value.astype(jnp.uint8), mask=jnp.broadcast_to(mask, value.shape))


def _tokens(x_ref, codes_ref, scale_ref, zero_ref, *, bits, group, rows, size, dim):
    """One group of tokens: every plane of channels has statistics of its own."""
    mine = pl.program_id(0)
    at, end, byte = mine * group, (mine + 1) * group, 0
    for number, (mask, shift, firsts, width) in enumerate(planes(dim, bits)):
        padded, packed = pl.next_power_of_2(width), 0
        for first, bit in firsts:
            x, real = _read(x_ref, at, rows, first, padded, end, min(first + width, dim))
            scale, zero = _statistics(x, real, 0, bits)
            codes = _codes(x, scale[None], zero[None], bits)
            packed |= jnp.where(real, (codes >> shift) & mask, 0) << bit
            if number == 0:
                kept = first + jnp.arange(padded) < min(first + width, dim)
                here = (mine, pl.ds(first, padded))
                plgpu.store(scale_ref.at[here], scale, mask=kept)
                plgpu.store(zero_ref.at[here], zero, mask=kept)
        _write(codes_ref, at, byte, packed, width, end)
        byte += width


def _channels(x_ref, codes_ref, scale_ref, zero_ref, *, bits, group, rows, size, dim):
    """Some tokens: the statistics of all groups of channels, then the planes that they cut."""
    at, stored = pl.program_id(0) * rows, []
    kept = at + jnp.arange(rows) < size
    for g in range(dim // group):
        width = pl.next_power_of_2(group)
        x, real = _read(x_ref, at, rows, g * group, width, size, (g + 1) * group)
        stored.append(_statistics(x, real, 1, bits))
        for ref, value in zip((scale_ref, zero_ref), stored[-1], strict=True):
            tile = ref.at[pl.ds(at, rows), pl.ds(g, 1)]
            plgpu.store(tile, value[:, None], mask=kept[:, None])
    byte = 0
    for mask, shift, firsts, width in planes(dim, bits):
        padded, packed = pl.next_power_of_2(width), 0
        for first, bit in firsts:
            last = min(first + width, dim)
            x, real = _read(x_ref, at, rows, first, padded, size, last)
            scale, zero = _spread(stored, first, last, group, padded)
            codes = _codes(x, scale, zero, bits)
            packed |= jnp.where(real, (codes >> shift) & mask, 0) << bit
        _write(codes_ref, at, byte, packed, width, size)
        byte += width


def _spread(stored, first, last, group, padded):
    """Scale and zero of each channel of a plane, from those of the groups that it cuts."""
    lowest = first // group
    scale, zero = (a[:, None] for a in stored[lowest])
    channel = (first + jnp.arange(padded))[None]
    for g in range(lowest + 1, (last - 1) // group + 1):
        scale, zero = (
            jnp.where(channel >= g * group, new[:, None], old)
            for new, old in zip(stored[g], (scale, zero), strict=True)
        )
    return scale, zero
