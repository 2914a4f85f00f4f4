"""Tiles of group-quantized keys and values, for the GPU kernels that read them.

A tile lies in one group of key tokens, so its scale is one row, which goes into the query; values
are added up one group of channels at a time, so their scale goes into the probabilities. Codes are
then small integers, exact in bfloat16.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.pallas import split_k


def tile_tokens(*sizes: int, most: int = 128) -> int:
    """Tokens of a tile, at most a power of two, that lies within one group of each size."""
    common = math.gcd(*sizes)
    return common if common <= most else math.gcd(common, most)


def key_scores(
    q: Array, refs: Any, start: Array, at: Array, *, group: int, bits: int, dim: int, dtype: Any
) -> Array:
    """q . (codes * scale + zero) of the tokens `at`, all in group start // group: f32[R, width].

    Args:
        q: [R, power(H)], zero beyond H.
        refs: codes uint8 [S, bytes], scale and zero f16[S / group, H].
        start: first token.
        at: i32[width].
        group: tokens that share a scale.
        bits: 1 to 8.
        dim: head dim H.
        dtype: of the products.
    """
    codes, scale, zero = refs
    channel = split_k.columns(dim)
    row = jnp.minimum(start // group, scale.shape[0] - 1)
    scale, zero = (split_k.gather(x, row, channel).astype(jnp.float32) for x in (scale, zero))
    q = q.astype(jnp.float32)
    code = split_k.codes(codes, at, bits, dim, channel)
    return split_k.dot_rows(q * scale[None], code, dtype) + (q * zero[None]).sum(1)[:, None]


def weighed_values(
    p: Array, refs: Any, at: Array, live: Array, *, groups: int, bits: int, dim: int, dtype: Any
) -> list[Array]:
    """Sum of p * (codes * scale + zero), each group of channels apart: f32[R, power(H / groups)].

    Args:
        p: f32[R, width].
        refs: codes uint8 [S, bytes], scale and zero f16[S, groups].
        at: i32[width].
        live: bool[width], tokens that exist.
        groups: of channels.
        bits: 1 to 8.
        dim: head dim H.
        dtype: of the products.
    """
    codes, scales, zeros = refs
    size, out = dim // groups, []
    row = jnp.minimum(at, scales.shape[0] - 1)
    for group in range(groups):
        scale, zero = (
            jnp.where(live, split_k.gather(x, row, group).astype(jnp.float32), 0.0)
            for x in (scales, zeros)
        )
        code = split_k.codes(codes, at, bits, dim, split_k.columns(size, group * size))
        total = split_k.dot(p * scale[None], code, dtype)
        out.append(total + (p * zero[None]).sum(1)[:, None])
    return out
