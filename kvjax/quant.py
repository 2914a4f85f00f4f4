"""Scalar quantization: bit packing, min/max groups, Lloyd-Max codebooks, random rotations."""

import functools
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, UInt8

from kvjax.typed import typed

_FLOAT16_MAX = 65504.0
_PARTS = (8, 4, 2, 1)


def parts(bits: int) -> list[tuple[int, int]]:
    """Split a width into (part width, shift) with parts that divide a byte, low bits first."""
    found, shift = [], 0
    for part in _PARTS:
        while bits - shift >= part:
            found.append((part, shift))
            shift += part
    return found


def packed_size(size: int, bits: int) -> int:
    """Bytes that `pack` makes of `size` codes of `bits` bits."""
    return sum(-(-size * part // 8) for part, _ in parts(bits))


def pack(codes: Array, bits: int) -> Array:
    """Pack codes along the last axis into bytes, planes side by side.

    A width of 1, 2, 4 or 8 bits puts 8 / bits codes into a byte: byte j of m holds codes j, j + m,
    j + 2m, ... at bits 0, bits, 2 bits, ... (least significant first). A kernel then unpacks by a
    shift and a mask into contiguous runs of the axis. Any other width is the concatenation of such
    parts, low bits first (3 = 2 + 1, 6 = 4 + 2, 10 = 8 + 2).

    Args:
        codes: integers [..., n] in [0, 2^bits); padded with zeros to whole bytes.
        bits: 1 to 16.

    Returns:
        uint8 [..., packed_size(n, bits)].

    Raises:
        ValueError: for a width outside 1 to 16.
    """
    _check_bits(bits, 16)
    codes, size = codes.astype(jnp.uint32), codes.shape[-1]
    planes = []
    for part, shift in parts(bits):
        per = 8 // part
        width = -(-size // per)
        low = (codes >> shift) & ((1 << part) - 1)
        low = jnp.pad(low, [(0, 0)] * (codes.ndim - 1) + [(0, width * per - size)])
        low = low.reshape(*codes.shape[:-1], per, width)
        byte = functools.reduce(jnp.bitwise_or, (low[..., i, :] << (i * part) for i in range(per)))
        planes.append(byte.astype(jnp.uint8))
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes, -1)


def unpack(packed: Array, bits: int, size: int) -> Array:
    """Undo `pack`.

    Args:
        packed: uint8 [..., packed_size(size, bits)].
        bits: 1 to 16.
        size: number of codes n.

    Returns:
        int32 [..., n].

    Raises:
        ValueError: if the last axis is not packed_size(size, bits) bytes long.
    """
    _check_bits(bits, 16)
    if packed.shape[-1] != packed_size(size, bits):
        raise ValueError(
            f"{packed.shape[-1]} bytes cannot hold {size} codes of {bits} bits:"
            f" it must be {packed_size(size, bits)}."
        )
    total, at = None, 0
    for part, shift in parts(bits):
        per = 8 // part
        width = -(-size // per)
        byte = packed[..., at : at + width]
        at += width
        mask = (1 << part) - 1
        if per > 1:
            shifts = jnp.arange(per, dtype=jnp.uint8) * part
            shifts = shifts.reshape((1,) * (packed.ndim - 1) + (per, 1))
            byte = (byte[..., None, :] >> shifts) & jnp.uint8(mask)
            byte = byte.reshape(*packed.shape[:-1], per * width)[..., :size]
        low = byte.astype(jnp.int32) << shift
        total = low if total is None else total | low
    return total


def _check_bits(bits: int, most: int) -> None:
    if not 1 <= bits <= most:
        raise ValueError(f"bits={bits} must be between 1 and {most}.")


@typed
def group_quantize(
    x: Float[Array, "*shape"], bits: int, group: int, axis: int = -1
) -> tuple[Array, Array, Array]:
    """Quantize groups of neighbours along an axis between their minimum and maximum.

    scale = (max - min) / (2^bits - 1), code = round((x - zero) / scale), zero = min; the codes are
    computed against the *stored* (float16) scale and zero, so their rounding is compensated. A
    constant group has scale 0 and comes back as its (stored) constant.

    Args:
        x: [..., n, ...], any float; statistics are taken in float32.
        bits: 1 to 8.
        group: neighbours that share a scale; it must divide n.
        axis: the axis that is grouped.

    Returns:
        codes int32 of x's shape, scale and zero float16 with n / group on the grouped axis.

    Raises:
        ValueError: if group does not divide n, or bits is out of range.

    Source: KIVI (arXiv 2402.02750), section 3; jy-yuan/KIVI quant/new_pack.py.
    Differs from the reference: codes against the stored statistics; no 0/0 for constant groups.
    """
    _check_bits(bits, 8)
    axis %= x.ndim
    size = x.shape[axis]
    if group < 1 or size % group:
        divisors = [g for g in (16, 20, 32, 40, 64, 128) if size % g == 0]
        raise ValueError(f"group={group} must divide axis {axis} of {size}, as {divisors} do.")
    split = x.shape[:axis] + (size // group, group) + x.shape[axis + 1 :]
    groups = x.astype(jnp.float32).reshape(split)
    low, high = groups.min(axis + 1), groups.max(axis + 1)
    zero = _to_float16(low)
    scale = _to_float16((high - zero.astype(jnp.float32)) / (2**bits - 1))
    step, offset = (jnp.expand_dims(a.astype(jnp.float32), axis + 1) for a in (scale, zero))
    level = jnp.where(step > 0, (groups - offset) / jnp.where(step > 0, step, 1.0), 0.0)
    codes = jnp.clip(jnp.round(level), 0, 2**bits - 1).astype(jnp.int32)
    return codes.reshape(x.shape), scale, zero


def _to_float16(x: Array) -> Array:
    return jnp.clip(x, -_FLOAT16_MAX, _FLOAT16_MAX).astype(jnp.float16)


def group_dequantize(codes: Array, scale: Array, zero: Array, axis: int = -1) -> Array:
    """Undo `group_quantize`: code * scale + zero, float32 of the codes' shape."""
    axis %= codes.ndim
    groups = scale.shape[axis]
    split = codes.shape[:axis] + (groups, codes.shape[axis] // groups) + codes.shape[axis + 1 :]
    step, offset = (jnp.expand_dims(a.astype(jnp.float32), axis + 1) for a in (scale, zero))
    return (codes.reshape(split).astype(jnp.float32) * step + offset).reshape(codes.shape)


def _cells(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mass and first moment of a unit Gaussian in the cell of each level."""
    edges = np.concatenate([[-40.0], (levels[1:] + levels[:-1]) / 2, [40.0]])
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    return np.diff(np.vectorize(NormalDist().cdf)(edges)), -np.diff(density)


@functools.cache
def lloyd_max(bits: int) -> tuple[float, ...]:
    """Levels of the scalar quantizer of a unit Gaussian with the least mean square error.

    Args:
        bits: 1 to 8; 2^bits levels, ascending and symmetric.

    Returns:
        The levels. Their distortions are 0.3634, 0.1175, 0.03454, 0.009497 for 1 to 4 bits.

    Source: Lloyd, "Least squares quantization in PCM" (1982); Max (1960), table I.
    """
    _check_bits(bits, 8)
    count, gauss = 2**bits, NormalDist()
    # Companding start (point density ~ p^(1/3)), then fixed-point iterations of both conditions.
    levels = np.array([gauss.inv_cdf((i + 0.5) / count) * math.sqrt(3) for i in range(count)])
    for _ in range(3000 if bits <= 4 else 300):
        mass, moment = _cells(levels)
        new = moment / np.maximum(mass, 1e-300)
        new = (new - new[::-1]) / 2
        done = np.abs(new - levels).max() < 1e-9
        levels = new
        if done:
            break
    return tuple(float(level) for level in levels)


@functools.cache
def _equal_step(bits: int) -> float:
    """Step of the equally spaced levels with the least mean square error for a unit Gaussian."""
    unit = np.arange(2**bits) - (2**bits - 1) / 2

    def error(step: float) -> float:
        mass, moment = _cells(unit * step)
        return float((unit * step) ** 2 @ mass - 2 * (unit * step) @ moment)

    low, high = 1.0 / 2**bits, 12.0 / 2**bits
    for _ in range(60):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        low, high = (low, b) if error(a) < error(b) else (a, high)
    return (low + high) / 2


@functools.cache
def codebook(bits: int) -> tuple[float, ...]:
    """Levels for unit Gaussian coordinates: Lloyd-Max up to 4 bits, equally spaced above.

    From 5 bits on equal steps cost little (8 bits: a relative error of 1.0 % for 0.6 %) and turn
    coding into a rounding.
    """
    _check_bits(bits, 8)
    if bits <= 4:
        return lloyd_max(bits)
    return tuple((i - (2**bits - 1) / 2) * _equal_step(bits) for i in range(2**bits))


@typed
def codebook_encode(x: Float[Array, "*shape"], bits: int) -> Array:
    """Index of the nearest level of `codebook(bits)`: int32 of x's shape."""
    if bits > 4:
        code = jnp.round(x.astype(jnp.float32) / _equal_step(bits) + (2**bits - 1) / 2)
        return jnp.clip(code, 0, 2**bits - 1).astype(jnp.int32)
    levels = np.asarray(lloyd_max(bits), np.float32)
    edges = (levels[1:] + levels[:-1]) / 2  # a sum of comparisons vectorises, a search does not
    return functools.reduce(jnp.add, ((x > float(edge)).astype(jnp.int32) for edge in edges))


def codebook_decode(codes: Array, bits: int) -> Array:
    """Level of each code, float32 of the codes' shape."""
    if bits > 4:
        return (codes.astype(jnp.float32) - (2**bits - 1) / 2) * _equal_step(bits)
    return jnp.asarray(lloyd_max(bits), jnp.float32)[codes]


@functools.cache
def _rotation(size: int, seed: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "hadamard" and size & (size - 1) == 0:
        matrix = np.ones((1, 1))
        while matrix.shape[0] < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        matrix = matrix * rng.choice([-1.0, 1.0], size)[:, None] / math.sqrt(size)
    else:
        matrix, triangle = np.linalg.qr(rng.standard_normal((size, size)))
        matrix = matrix * np.sign(np.diag(triangle))
    return np.ascontiguousarray(matrix, np.float32)


def rotation(size: int, seed: int, kind: str = "hadamard") -> Array:
    """An orthonormal matrix that spreads a vector's energy over all coordinates.

    A randomised Hadamard matrix when `size` is a power of two, else a Haar rotation (QR of a
    Gaussian matrix). A function of its arguments alone: shared by every layer, never stored.

    Args:
        size: head_dim H.
        seed: fixed by the method.
        kind: "hadamard", or "haar" for a Haar rotation of every size.

    Returns:
        f32[H, H]; rotate a row vector by x @ R and back by y @ R.T.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("hadamard", "haar"):
        raise ValueError(f"rotation={kind!r} must be 'hadamard' or 'haar'.")
    return jnp.asarray(_rotation(size, seed, kind))


@typed
def scale_encode(scale: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """A positive scale in 8 bits: 12 steps an octave from 2^-13 to 2^8, code 0 for zero.

    The largest error of a scale in range is 2.9 %; larger ones are clipped, and one below 2^-14 is
    0: coding a residual must not add more than it removes.
    """
    code = jnp.round(jnp.log2(jnp.maximum(scale.astype(jnp.float32), 1e-30)) * 12 + 157)
    return jnp.where(scale >= 2.0**-14, jnp.clip(code, 1, 255), 0).astype(jnp.uint8)


def scale_decode(code: Array) -> Array:
    """Undo `scale_encode`, float32."""
    value = jnp.exp2((code.astype(jnp.float32) - 157) / 12)
    return jnp.where(code > 0, value, 0.0)


def bit_words(mask: Array) -> Array:
    """Pack bool [..., n] into uint32 words [..., ceil(n / 32)]; i is bit i % 32 of i // 32."""
    size = mask.shape[-1]
    words = -(-size // 32)
    bits = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * 32 - size)])
    bits = bits.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32)
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * mask.ndim + (32,))
    return (bits << shifts).sum(-1, dtype=jnp.uint32)


def word_bits(words: Array, size: int) -> Array:
    """Undo `bit_words`: bool [..., size]."""
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * words.ndim + (32,))
    bits = (words[..., None] >> shifts) & 1
    return bits.reshape(*words.shape[:-1], words.shape[-1] * 32)[..., :size].astype(bool)


def popcount_prefix(words: Array) -> Array:
    """Number of set bits before each word, counted over the last axes in order.

    Args:
        words: uint32 [B, ...].

    Returns:
        int32 of the same shape: an exclusive running sum over everything but the batch axis.
    """
    counts = jax.lax.population_count(words).astype(jnp.int32).reshape(words.shape[0], -1)
    return (jnp.cumsum(counts, -1) - counts).reshape(words.shape)


@functools.cache
def _half_mass(dim: int) -> float:
    """Integral of cos^(dim - 2) from 0 to pi / 2."""
    return math.sqrt(math.pi) / 2 * math.exp(math.lgamma((dim - 1) / 2) - math.lgamma(dim / 2))


def _coordinate_cells(levels: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    """Cells of a unit vector's coordinate around levels: mass, first moment, density at edges.

    With x = sin t the law is cos^(dim - 2) t / (2 `_half_mass`), whose integral is a sum of
    positive terms and whose first moment is a power of the cosine.
    """
    edges = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    cos = np.sqrt(np.maximum(1 - edges**2, 0.0))
    total = edges if dim % 2 else np.arcsin(edges)  # of cos^1 or cos^0; then by parts
    for power in range(2 + dim % 2, dim - 1, 2):
        total = edges * cos ** (power - 1) / power + total * (power - 1) / power
    scale = 2 * _half_mass(dim)
    moment = -(cos ** (dim - 1)) / ((dim - 1) * scale)
    return np.diff(total) / scale, np.diff(moment), cos ** (dim - 3) / scale


@functools.cache
def coordinate_levels(bits: int, dim: int) -> tuple[float, ...]:
    """Least-squares levels for a coordinate of a random unit vector.

    The law is f(x) ~ (1 - x^2)^((dim - 3) / 2) on [-1, 1]; times sqrt(dim) it tends to a unit
    Gaussian's, and the levels to `lloyd_max`.

    Args:
        bits: 1 to 8; 2^bits levels, ascending and symmetric.
        dim: of the vector, at least 3.

    Raises:
        ValueError: for bits or a dimension out of range.

    Source: TurboQuant (arXiv 2504.19874), section 3.1, equation 4.
    Differs from the reference: Newton's method on Lloyd's condition, whose integrals are exact.
    """
    _check_bits(bits, 8)
    if dim < 3:
        raise ValueError(f"dim={dim} must be at least 3: below, the law has its mass at the ends.")
    count = 2**bits
    angle = np.linspace(-np.pi / 2, np.pi / 2, 20001)
    # Companding start: as many levels per length as the cube root of the density.
    share = np.cumsum(np.cos(angle) ** (dim / 3))
    levels = np.sin(np.interp((np.arange(count) + 0.5) / count, share / share[-1], angle))
    for i in range(40):
        mass, moment, density = _coordinate_cells(levels, dim)
        miss = levels * mass - moment
        if np.abs(miss).max() < 1e-15:
            break
        if i < 20:  # Lloyd's own step; Newton's starts close, or runs into the tails
            levels = moment / mass
        else:
            # An inner edge moves half as much as either of its levels.
            inner = (levels[1:] - levels[:-1]) / 4 * density[1:-1]
            slope = np.diag(mass) - np.diag(inner, 1) - np.diag(inner, -1)
            slope -= np.diag(np.append(inner, 0.0) + np.append(0.0, inner))
            levels = levels - np.linalg.solve(slope, miss)
        levels = (levels - levels[::-1]) / 2
    return tuple(float(level) for level in levels)


@typed
def coordinate_encode(x: Float[Array, "*shape"], bits: int, dim: int) -> Array:
    """Index of the nearest of `coordinate_levels(bits, dim)`: int32 of x's shape."""
    levels = np.asarray(coordinate_levels(bits, dim))
    edges = (levels[1:] + levels[:-1]) / 2
    if bits <= 4:  # a sum of comparisons vectorises, a search does not
        edges = edges.astype(np.float32)
        return functools.reduce(jnp.add, ((x > float(edge)).astype(jnp.int32) for edge in edges))
    bins = 4096  # narrower than a cell, so that a bin has one edge at most: two look-ups
    below = np.searchsorted(edges, np.arange(bins) * 2 / bins - 1)
    bin = jnp.clip(((x + 1) * (bins / 2)).astype(jnp.int32), 0, bins - 1)
    code = jnp.asarray(below, jnp.int32)[bin]
    return code + (x > jnp.asarray(np.append(edges, np.inf), jnp.float32)[code]).astype(jnp.int32)


def coordinate_decode(codes: Array, bits: int, dim: int) -> Array:
    """Level of each code, float32 of the codes' shape.

    Up to 4 bits it is an odd polynomial through all levels: a table does not vectorise.
    """
    if bits > 4:
        return jnp.asarray(coordinate_levels(bits, dim), jnp.float32)[codes]
    middle, factors = _polynomial(bits, dim)
    x = codes.astype(jnp.float32) / middle - 1.0
    square, value = x * x, factors[-1]
    for factor in factors[-2::-1]:
        value = value * square + factor
    return value * x


@functools.cache
def _polynomial(bits: int, dim: int) -> tuple[float, list[float]]:
    """The middle of the codes, and the factors of x, x^3, ... through all levels."""
    middle = (2**bits - 1) / 2
    x = np.arange(2 ** (bits - 1), 2**bits) / middle - 1.0
    powers = x[:, None] ** np.arange(1, 2 * len(x), 2)
    return middle, np.linalg.solve(powers, coordinate_levels(bits, dim)[len(x) :]).tolist()


@functools.cache
def _sketch(size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, 1])
    return np.ascontiguousarray(rng.standard_normal((size, size)), np.float32)


def sketch(size: int, seed: int) -> Array:
    """A Gaussian matrix S f32[H, H], whose signs of S r hold a direction in a bit a coordinate.

    sqrt(pi / 2) / H |r| S' sign(S r) is r in the mean over S.

    Source: QJL (arXiv 2406.03482), definition 1.
    """
    return jnp.asarray(_sketch(size, seed))
