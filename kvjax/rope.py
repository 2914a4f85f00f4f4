"""Rotary position embedding: float32 tables for every rope type a config can name.

Pairs are (i, i + R/2) of the first R of H dimensions, the half-split convention of GPT-NeoX and
Hugging Face. A `Rope` is static and hashable: the frequencies are constants of the trace.

Source: Su et al. 2021 (RoFormer); the scaled variants follow transformers'
modeling_rope_utils.py, YaRN (Peng et al. 2023, equations 17-23 and section 3.4) and the Llama 3.1
release.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Rope:
    """Frequencies of a model's rotary embedding; static.

    Invariants: 2 * len(inv_freq) <= H; dimensions past it pass through unrotated.
    """

    inv_freq: tuple[float, ...]  # radians a token, one for each pair of dimensions
    attention_scaling: float = 1.0  # factor on cos and sin, so on q and k alike


def build(config: Any, num_tokens: int | None = None) -> Rope:
    """Read the rotary embedding that a model config describes.

    Args:
        config: an object with `head_dim`, `rope_theta` and, where they apply,
            `max_position_embeddings`, `partial_rotary_factor` and `rope_scaling` (a dict, pairs or
            None). The newer `rope_parameters`, which holds all of it, wins where present.
        num_tokens: longest sequence to be served, in tokens. Only type "dynamic" reads it: one
            base serves the whole sequence, so that keys already cached stay valid. None means no
            more than `max_position_embeddings`, up to which "dynamic" changes nothing.

    Returns:
        The static `Rope`; computed in float64.

    Raises:
        ValueError: unknown rope type, a key that the type needs is missing, odd rotary size.

    Differs from the reference: transformers raises the base of "dynamic" while a sequence grows
        and leaves the keys cached before as they were.
    """
    scaling = dict(getattr(config, "rope_parameters", None) or {})
    scaling = scaling or dict(getattr(config, "rope_scaling", None) or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _TYPES:
        raise ValueError(f"rope_type={kind!r} is unknown; known are {', '.join(sorted(_TYPES))}.")
    base = scaling.get("rope_theta") or getattr(config, "rope_theta", None)
    if base is None:
        raise ValueError("rope_theta is missing; a config needs the base of its rotary embedding.")
    partial = scaling.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    size = int(config.head_dim * (1.0 if partial is None else partial))
    if size % 2 or not 0 < size <= config.head_dim:
        raise ValueError(
            f"rotary size {size} (head_dim={config.head_dim}, partial_rotary_factor={partial}) "
            "must be even, positive and at most head_dim."
        )
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    limit = getattr(config, "max_position_embeddings", None)
    inv_freq, attention_scaling = _TYPES[kind](
        _Inputs(float(base), exponents, scaling, kind, limit, num_tokens)
    )
    return Rope(tuple(float(f) for f in inv_freq), float(attention_scaling))


@dataclass(frozen=True)
class _Inputs:
    """What a rope type computes from; `get` reads a key of the scaling dict or names it missing."""

    base: float
    exponents: np.ndarray  # f64[R/2]: 0, 2/R, 4/R, ...
    scaling: Mapping[str, Any]
    kind: str
    max_position_embeddings: int | None
    num_tokens: int | None

    def get(self, key: str, default: Any = None) -> Any:
        value = self.scaling.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"rope_type={self.kind!r} needs {key!r}; got {dict(self.scaling)}.")
        return value

    def plain(self) -> np.ndarray:
        return self.base**-self.exponents


_Result = tuple[np.ndarray, float]


def _default(x: _Inputs) -> _Result:
    return x.plain(), 1.0


def _linear(x: _Inputs) -> _Result:
    return x.plain() / x.get("factor"), 1.0


def _dynamic(x: _Inputs) -> _Result:
    limit = x.max_position_embeddings
    if limit is None:
        raise ValueError("rope_type='dynamic' needs the config's max_position_embeddings.")
    size = 2 * len(x.exponents)
    factor, length = x.get("factor"), max(x.num_tokens or 0, limit)
    stretch = (factor * length / limit - (factor - 1)) ** (size / (size - 2))
    return (x.base * stretch) ** -x.exponents, 1.0


def _llama3(x: _Inputs) -> _Result:
    """Long waves are slowed by `factor`, short ones kept, those between blended linearly."""
    limit = x.get("original_max_position_embeddings", x.max_position_embeddings)
    low, high, factor = x.get("low_freq_factor"), x.get("high_freq_factor"), x.get("factor")
    plain = x.plain()
    turns = limit * plain / (2 * math.pi)  # full rotations within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / factor), 1.0


def _yarn(x: _Inputs) -> _Result:
    """Blend by dimension: fast ones keep their frequency, slow ones are interpolated."""
    limit = x.get("original_max_position_embeddings", x.max_position_embeddings)
    size, plain = 2 * len(x.exponents), x.plain()
    ratio = x.max_position_embeddings / limit if x.max_position_embeddings else None
    factor = x.get("factor", ratio)

    def dimension(turns: float) -> float:  # the pair that makes `turns` rotations in `limit`
        return size * math.log(limit / (turns * 2 * math.pi)) / (2 * math.log(x.base))

    low, high = dimension(x.get("beta_fast", 32.0)), dimension(x.get("beta_slow", 1.0))
    if x.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 1e-3
    slow = np.clip((np.arange(size // 2) - low) / width, 0.0, 1.0)

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = x.scaling.get("mscale"), x.scaling.get("mscale_all_dim")
    ratio = temperature(mscale) / temperature(all_dim) if mscale and all_dim else temperature(1.0)
    return plain * (1.0 - slow + slow / factor), x.get("attention_factor", ratio)


def _factors(x: _Inputs) -> _Result:
    """GGUF's `rope_freqs`: every frequency divided by its own factor."""
    factors = np.asarray(x.get("factors"), np.float64)
    if factors.shape != x.exponents.shape:
        raise ValueError(
            f"{len(factors)} rope factors were given; {len(x.exponents)} pairs need one each."
        )
    return x.plain() / factors, 1.0


_TYPES: dict[str, Callable[[_Inputs], _Result]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
}


def tables(rope: Rope, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine at the given positions, times the attention scaling.

    Args:
        rope: the model's rotary embedding; R/2 frequencies.
        positions: i32[...], in tokens; a negative one (a pad) counts as 0.

    Returns:
        cos and sin, f32[..., R/2].
    """
    # numpy's: for a device that is not there, JAX has nothing to compute a constant on
    inv_freq = np.asarray(rope.inv_freq, np.float32).reshape((1,) * positions.ndim + (-1,))
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[..., None] * inv_freq
    return jnp.cos(angles) * rope.attention_scaling, jnp.sin(angles) * rope.attention_scaling


def rotate(rope: Rope, x: Array, positions: Array) -> Array:
    """Rotate queries or keys to their positions.

    (a, b) -> (a cos - b sin, b cos + a sin) for each pair (a, b) of dimensions; in float32.

    Args:
        rope: the model's rotary embedding.
        x: [..., heads, T, H].
        positions: i32[..., T] shared by the heads, i32[..., heads, T], or i32[T]; in tokens,
            negative ones count as 0.

    Returns:
        The rotated x, of x's shape and dtype.
    """
    return rotate_with(*tables(rope, _per_head(positions, x)), x)


def unrotate(rope: Rope, x: Array, positions: Array) -> Array:
    """Undo `rotate` at the same positions, its attention scaling included.

    Args:
        rope: the model's rotary embedding.
        x: [..., heads, T, H], rotated.
        positions: as in `rotate`.

    Returns:
        The unrotated x, of x's shape and dtype.
    """
    cos, sin = tables(rope, _per_head(positions, x))
    square = rope.attention_scaling**2
    return rotate_with(cos / square, -sin / square, x)


def _per_head(positions: Array, x: Array) -> Array:
    """Give positions one axis for each axis of x but the last."""
    if positions.ndim == x.ndim - 1:
        return positions
    if positions.ndim == x.ndim - 2:
        return positions[..., None, :]
    if positions.ndim == 1:
        return positions.reshape((1,) * (x.ndim - 2) + positions.shape)
    raise ValueError(
        f"positions {positions.shape} do not fit x {x.shape}: they must be [..., T], "
        "[..., heads, T] or [T]."
    )


def rotate_with(cos: Array, sin: Array, x: Array) -> Array:
    """Rotate x [..., H] by rows [..., R/2] of `tables`; of x's shape and dtype."""
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"x has head_dim {x.shape[-1]}; the rope rotates {2 * half} dimensions.")
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1).astype(x.dtype)
