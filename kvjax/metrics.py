"""Quality of a compressed cache against the full one, and means with 95 % intervals.

The array functions are jit-safe and compute in float32; each returns one value a token (or a row),
which `masked_mean` reduces without the pads.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import stdtrit

_Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


class Interval(NamedTuple):
    """A mean with its 95 % interval; the bounds are None where one value gives none."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(
    values: Sequence[float] | np.ndarray,
    kind: Literal["auto", "t", "wilson", "bootstrap"] = "auto",
    seed: int = 0,
) -> Interval:
    """Return the mean of independent values and its 95 % interval.

    Args:
        values: [n], one a prompt.
        kind: "t": mean ± t(n−1) · s / √n; "wilson": Wilson's score interval of a proportion, for
            values 0 and 1; "bootstrap": percentiles of 2,000 resampled means, for skewed values;
            "auto": "wilson" when every value is 0 or 1, else "t".
        seed: of the bootstrap.

    Raises:
        ValueError: for no values, a value that is not finite, or "wilson" on other than 0 and 1.
    """
    x = np.asarray(values, np.float64).reshape(-1)
    if x.size == 0:
        raise ValueError("values is empty; a mean needs at least one.")
    if not np.isfinite(x).all():
        raise ValueError(f"{int((~np.isfinite(x)).sum())} of {x.size} values are NaN or infinite.")
    binary = bool(((x == 0) | (x == 1)).all())
    if kind == "auto":
        kind = "wilson" if binary else "t"
    n, mean = x.size, float(x.mean())
    if kind == "wilson":
        if not binary:
            raise ValueError('kind="wilson" takes values 0 and 1; use "t" for others.')
        z2 = _Z95 * _Z95
        centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # the mean itself is inside; rounding must not put it a hair outside
        return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, centre + half), n)
    if kind == "bootstrap":
        draws = np.random.default_rng(seed).integers(0, n, (2000, n))
        low, high = np.percentile(x[draws].mean(axis=1), [2.5, 97.5])
        return Interval(mean, float(low), float(high), n)
    if kind != "t":
        raise ValueError(f'kind={kind!r} must be "auto", "t", "wilson" or "bootstrap".')
    if n == 1:
        return Interval(mean, None, None, 1)
    half = float(stdtrit(n - 1, 0.975)) * float(x.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def mean_of_means(groups: Sequence[Sequence[float] | np.ndarray], seed: int = 0) -> Interval:
    """Return the mean of groups' means, each group counting as much, and its 95 % interval.

    The interval is over values within groups, not over groups: percentiles of 2,000 means whose
    values are resampled group by group. A group of one value gives none.

    Args:
        groups: values of each group, at least one.
        seed: of the bootstrap.

    Raises:
        ValueError: for no groups, or one without values.
    """
    cells = [np.asarray(group, np.float64).reshape(-1) for group in groups]
    if not cells or min(map(len, cells)) == 0:
        raise ValueError(f"groups of {[len(c) for c in cells]} values: each needs at least one.")
    middle, n = float(np.mean([cell.mean() for cell in cells])), sum(map(len, cells))
    if min(map(len, cells)) < 2:
        return Interval(middle, None, None, n)
    draws = np.random.default_rng(seed)
    resampled = np.mean(
        [cell[draws.integers(0, len(cell), (2000, len(cell)))].mean(1) for cell in cells], axis=0
    )
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(middle, float(low), float(high), n)


def masked_mean(values: Array, mask: Array | None = None, axis: int | None = None) -> Array:
    """Average without the pads: Σ values · mask / Σ mask, 0 where nothing is left.

    Args:
        values: [...]; what stands at a pad, NaN included, has no influence.
        mask: bool of the same shape, True = counts; None counts all.
        axis: axis to reduce; None reduces all.
    """
    if mask is None:
        return jnp.mean(values, axis=axis)
    total = jnp.sum(jnp.where(mask, values, 0), axis=axis)
    return total / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def nll(logits: Array, targets: Array) -> Array:
    """Return −log softmax(logits)[target] of every token, in nats.

    Args:
        logits: [..., T, V].
        targets: i32[..., T].

    Returns:
        f32[..., T].
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


def kl_divergence(full_logits: Array, logits: Array) -> Array:
    """Return KL(full ‖ compressed) = Σ p_full · (log p_full − log p) of every token, in nats.

    Args:
        full_logits: [..., V], of the full cache.
        logits: [..., V], of the compressed one.

    Returns:
        f32[...], never negative.
    """
    log_p = jax.nn.log_softmax(full_logits.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return kl_of_log_probabilities(log_p, log_q)


def kl_of_log_probabilities(log_p: Array, log_q: Array) -> Array:
    """Return `kl_divergence` where both log-softmaxes are there already: f32[...] from [..., V]."""
    p = jnp.exp(log_p)
    terms = jnp.where(p > 0, p * (log_p - log_q), 0)  # a masked vocabulary entry has p = 0
    return jnp.maximum(jnp.sum(terms, axis=-1), 0)


def top_k_overlap(full_logits: Array, logits: Array, k: int = 5) -> Array:
    """Return the share of the full cache's k likeliest tokens that are in the other's k.

    Args:
        full_logits: [..., V].
        logits: [..., V].
        k: number of tokens.

    Returns:
        f32[...] in {0, 1/k, ..., 1}.
    """
    full = jax.lax.top_k(full_logits, k)[1]  # [..., k]
    return overlap(full, jax.lax.top_k(logits, k)[1])


def overlap(full: Array, other: Array) -> Array:
    """Return the share of the tokens i32[..., k] of one set that are in the other: f32[...]."""
    same = full[..., :, None] == other[..., None, :]
    return jnp.mean(jnp.any(same, axis=-1).astype(jnp.float32), axis=-1)


def top1_agreement(full_logits: Array, logits: Array) -> Array:
    """Return 1 where both have the same likeliest token, else 0: f32[...] from [..., V]."""
    same = jnp.argmax(full_logits, axis=-1) == jnp.argmax(logits, axis=-1)
    return same.astype(jnp.float32)


def first_divergence(tokens_a: Array, tokens_b: Array, mask: Array | None = None) -> Array:
    """Return the index of the first token that differs, T where none does.

    Args:
        tokens_a: i32[..., T].
        tokens_b: i32[..., T].
        mask: bool[..., T], True = a real token of either; None takes all.

    Returns:
        i32[...].
    """
    differs = jnp.asarray(tokens_a) != jnp.asarray(tokens_b)
    if mask is not None:
        differs = differs & mask
    first = jnp.argmax(differs, axis=-1)
    return jnp.where(jnp.any(differs, axis=-1), first, differs.shape[-1]).astype(jnp.int32)


def relative_error(out: Array, reference: Array, mask: Array | None = None) -> Array:
    """Return √(Σ (out − reference)² / Σ reference²) of each row.

    Args:
        out: [B, N, T, H], an attention output.
        reference: [B, N, T, H], the full cache's.
        mask: bool[B, T], True = a real token; None takes all.

    Returns:
        f32[B]; 0 where both sums are 0, infinite where only the reference's is.
    """
    reference = reference.astype(jnp.float32)
    error = out.astype(jnp.float32) - reference
    if mask is not None:
        real = mask[:, None, :, None]
        error, reference = jnp.where(real, error, 0), jnp.where(real, reference, 0)
    axes = tuple(range(1, error.ndim))
    wrong, whole = jnp.sum(error**2, axis=axes), jnp.sum(reference**2, axis=axes)
    ratio = wrong / jnp.where(whole > 0, whole, 1)
    return jnp.sqrt(jnp.where(whole > 0, ratio, jnp.where(wrong > 0, jnp.inf, 0)))
