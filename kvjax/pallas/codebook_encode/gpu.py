"""codebook_encode on GPUs: a program rotates a block of vectors, codes and packs a part of them.

A byte holds coordinates that are a fixed number of channels apart. The rotation's columns come in
such runs ("planes"), so that what a byte holds is at the same place of several tiles.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax import quant
from kvjax.pallas import compat
from kvjax.pallas.codebook_decode.api import Part
from kvjax.pallas.dispatch import Refused
from kvjax.pallas.flash_prefill.gpu import dot

_FLOAT16_MAX = 65504.0
_CHANNELS = 32  # that a product takes at a time


def _planes(part: Part) -> int:
    """Codes in the byte that holds most of them."""
    return max(8 // width for width, _ in quant.parts(part.bits))


def refusal(parts: tuple[Part, ...]) -> str | None:
    """Why the kernel cannot do these parts."""
    for part in parts:
        if part.dim % _planes(part):
            return f"codebook_encode's kernel needs whole bytes of {_planes(part)} codes: {part}."
        if part.signs and part.dim > 128:  # registers spill
            return f"codebook_encode's kernel sketches up to 128 channels: {part}."
    return None


def codebook_encode(
    x: Array,
    turn: Array,
    *,
    parts: tuple[Part, ...],
    corrected: bool,
    seed: int,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `api.codebook_encode`."""
    if why := refusal(parts):
        raise Refused(why)
    codes, scales, at = [], [], 0
    for part in parts:
        found = _one(x, turn[..., at : at + part.dim], part, corrected, seed, interpret)
        at += part.dim
        codes.append(found[0])
        scales.append(found[1])
    return jnp.concatenate(codes, -1), jnp.concatenate(scales, -1)


def _one(
    x: Array, turn: Array, part: Part, corrected: bool, seed: int, interpret: bool
) -> tuple[Array, Array]:
    """Codes and scales of a part, whose columns `turn` has alone."""
    shape, dim = x.shape[:-1], x.shape[-1]
    x = x.reshape(*((-1, shape[2]) if turn.ndim == 4 else (1, -1)), dim)
    turn = turn.reshape(-1, dim, turn.shape[-1]).astype(jnp.float32)
    lead, tokens = x.shape[:2]
    width = max(_CHANNELS, pl.next_power_of_2(dim))
    rows = 32 if dim <= 128 and not part.signs else 16
    inputs = _inputs(part, turn, width, seed)
    wide = pl.next_power_of_2(part.code_bytes + width)  # a tile may end after the bytes do

    def of_token(size):
        return pl.BlockSpec((None, rows, size), lambda i, b: (b, i, 0))

    codes, scales = pl.pallas_call(
        functools.partial(
            _kernel, part=part, tokens=tokens, dim=dim, corrected=corrected, interpret=interpret
        ),
        grid=(pl.cdiv(tokens, rows), lead),
        in_specs=[of_token(width), *(_whole(y, y.ndim == 4) for y in inputs)],
        out_specs=[of_token(wide), of_token(part.scales)],
        out_shape=[
            jax.ShapeDtypeStruct((lead, tokens, part.code_bytes), jnp.uint8),
            jax.ShapeDtypeStruct((lead, tokens, part.scales), jnp.float16),
        ],
        compiler_params=compat.gpu_params(8 if rows < 32 else 4, 2),
        interpret=interpret,
        name="codebook_encode",
    )(x, *inputs)
    return codes.reshape(*shape, -1), scales.reshape(*shape, -1)


def _whole(x: Array, by_head: bool) -> pl.BlockSpec:
    """A program sees all of an array, or all of its head's."""
    if by_head:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, b: (b, *(0,) * (x.ndim - 1)))
    return pl.BlockSpec(x.shape, lambda i, b: (0,) * x.ndim)


def _inputs(part: Part, turn: Array, width: int, seed: int) -> list[Array]:
    """The matrix [heads, planes, width, columns], a sketch by planes, edges and levels."""
    heads, dim = turn.shape[:2]
    count = _planes(part)
    size = part.dim // count
    columns = max(16, pl.next_power_of_2(size))
    extra = (0, columns - size)
    turn = turn.reshape(heads, dim, count, size).swapaxes(1, 2)
    found = [jnp.pad(turn, ((0, 0), (0, 0), (0, width - dim), extra))]
    if part.signs:
        sketch = quant.sketch(part.dim, seed).T.reshape(count, size, count, size)
        sketch = jnp.pad(sketch.swapaxes(1, 2), ((0, 0), (0, 0), extra, extra))
        found.append(sketch.reshape(count * count, columns, columns))
    if part.level_bits > 4:
        levels = np.asarray(quant.coordinate_levels(part.level_bits, part.dim))
        edges = np.append((levels[1:] + levels[:-1]) / 2, np.inf)
        found += [jnp.asarray(edges, jnp.float32), jnp.asarray(levels, jnp.float32)]
    return found


def _kernel(x_ref, *refs, part, tokens, dim, corrected, interpret):
    turn_ref, *refs, codes_ref, scales_ref = refs
    rows, width = x_ref.shape
    real = pl.program_id(0) * rows + jnp.arange(rows) < tokens
    inside = real[:, None] & (jnp.arange(width) < dim)[None]
    x = plgpu.load(x_ref, mask=jnp.broadcast_to(inside, (rows, width)), other=0.0)
    peak = jnp.abs(x.astype(jnp.float32)).max(1)

    def add(j, planes):  # of x turn; a few channels at a time, for want of registers
        some = j * _CHANNELS + jnp.arange(_CHANNELS) < dim
        here = pl.ds(j * _CHANNELS, _CHANNELS)
        x = plgpu.load(x_ref.at[:, here], mask=real[:, None] & some[None], other=0.0)
        x = x.astype(jnp.float32) / jnp.where(peak > 0, peak, 1.0)[:, None]
        return tuple(
            plane + dot(x, turn_ref[i, here, :], (1, 0), interpret)
            for i, plane in enumerate(planes)
        )

    count, _, columns = turn_ref.shape
    planes = (jnp.zeros((rows, columns), jnp.float32),) * count
    planes = lax.fori_loop(0, width // _CHANNELS, add, planes)

    sketch_ref = refs.pop(0) if part.signs else None
    codes, norm, *own = _encode(planes, part, sketch_ref, refs, corrected, interpret)
    for at, scale in enumerate((peak * norm, *own)):
        scale = jnp.minimum(scale, _FLOAT16_MAX).astype(jnp.float16)
        plgpu.store(scales_ref.at[:, pl.ds(at, 1)], scale[:, None], mask=real[:, None])
    _pack(codes_ref, codes, part, real)


def _encode(y, part, sketch_ref, tables, corrected, interpret):
    """Codes of each plane, the norm, and with signs the residual's."""
    count, columns = len(y), y[0].shape[1]
    real = (jnp.arange(columns) < part.dim // count)[None]
    norm = _norm(y)
    y = [plane / jnp.where(norm > 0, norm, 1.0)[:, None] for plane in y]
    codes = [jnp.zeros(plane.shape, jnp.int32) for plane in y]
    levels = [jnp.zeros_like(plane) for plane in y]
    if part.level_bits:
        codes = [_nearest(plane, part, tables) for plane in y]
        levels = [jnp.where(real, _level(code, part, tables), 0.0) for code in codes]
    if not part.signs:
        return codes, norm / _norm(levels) if corrected else norm
    y = [plane - level for plane, level in zip(y, levels, strict=True)]
    plain = interpret or columns <= 16  # else each of the warps holds all of many small tiles

    def sketched(j, signs):  # bit j: of plane j
        total = sum(dot(y[i], sketch_ref[i * count + j], (1, 0), plain) for i in range(count))
        return signs | ((total > 0).astype(jnp.int32) << j)

    signs = lax.fori_loop(0, count, sketched, jnp.zeros(y[0].shape, jnp.int32))
    codes = [code | (((signs >> j) & 1) << part.level_bits) for j, code in enumerate(codes)]
    return codes, norm, _norm(y)


def _norm(planes):
    return jnp.sqrt(sum((plane * plane).sum(1) for plane in planes))


def _nearest(x, part, tables):
    if not tables:
        return quant.coordinate_encode(x, part.level_bits, part.dim)
    code = jnp.zeros(x.shape, jnp.int32)  # by halves: how many edges are below
    for bit in reversed(range(part.level_bits)):
        above = code + (1 << bit)
        code = jnp.where(x > tables[0][above - 1], above, code)
    return code


def _level(code, part, tables):
    if not tables:
        return quant.coordinate_decode(code, part.level_bits, part.dim)
    return tables[1][code]


def _pack(codes_ref, codes, part, real):
    """`quant.pack` of planes: codes `len(codes) / per` planes apart share a byte."""
    size, columns, byte = part.dim // len(codes), codes[0].shape[1], 0
    mask = real[:, None] & (jnp.arange(columns) < size)[None]
    for width, shift in quant.parts(part.bits):
        per = 8 // width
        runs = len(codes) // per
        for run in range(runs):
            packed = 0
            for i in range(per):
                low = (codes[i * runs + run] >> shift) & ((1 << width) - 1)
                packed |= low << (i * width)
            tile = codes_ref.at[:, pl.ds(byte, columns)]
            plgpu.store(tile, packed.astype(jnp.uint8), mask=mask)
            byte += size
