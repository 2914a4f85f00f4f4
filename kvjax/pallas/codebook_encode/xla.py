"""The specification of codebook_encode."""

import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.pallas.codebook_decode.api import Part

FLOAT16_MAX = 65504.0


def codebook_encode(
    x: Array, turn: Array, *, parts: tuple[Part, ...], corrected: bool, seed: int
) -> tuple[Array, Array]:
    """See `api.codebook_encode`."""
    x = x.astype(jnp.float32)
    peak = jnp.abs(x).max(-1, keepdims=True)  # squares of the rest neither over- nor underflow
    x, at = product(x / jnp.where(peak > 0, peak, 1.0), turn), 0
    codes, scales = [], []
    for part in parts:
        code, norm, *own = _encode(part, x[..., at : at + part.dim], corrected, seed)
        at += part.dim
        codes.append(quant.pack(code, part.bits))
        scales += [peak * norm, *own]
    scales = jnp.minimum(jnp.concatenate(scales, -1), FLOAT16_MAX)
    return jnp.concatenate(codes, -1), scales.astype(jnp.float16)


def product(x: Array, matrix: Array) -> Array:
    """x [..., H] by [H, F] or x [B, K, R, H] by [B, K, H, F], in full float32: it decides codes."""
    how = "...h,hf->...f" if matrix.ndim == 2 else "bkrh,bkhf->bkrf"
    return jnp.einsum(how, x, matrix, precision="highest")


def _encode(part: Part, x: Array, corrected: bool, seed: int) -> tuple[Array, ...]:
    """Codes i32[..., H] of a rotated part, its norm and (with signs) its residual's."""
    norm, code, levels = _norm(x), jnp.zeros(x.shape, jnp.int32), jnp.zeros_like(x)
    x = x / jnp.where(norm > 0, norm, 1.0)
    if part.level_bits:
        code = quant.coordinate_encode(x, part.level_bits, part.dim)
        levels = quant.coordinate_decode(code, part.level_bits, part.dim)
    if not part.signs:
        return code, norm / _norm(levels) if corrected else norm
    residual = x - levels
    sign = product(residual, quant.sketch(part.dim, seed).T) > 0
    return code | sign.astype(jnp.int32) << part.level_bits, norm, _norm(residual)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
