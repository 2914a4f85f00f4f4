"""AnchorKV's bytes spent otherwise: all of them on anchors, or the same two bits coded naively."""

import bisect
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.ablation_batch import Setting
from kvjax import anchors, quant
from kvjax.methods.anchorkv import AnchorKV
from kvjax.pallas.anchor_decode import xla
from kvjax.rope import rotate
from kvjax.storage import Dense, left_align
from kvjax.types import PromptKV, PromptShape


def all_anchors(label: str, ratio: float, shape: PromptShape, **options: Any) -> Setting:
    """AnchorKV without residuals: as many anchors as the bytes pay for; options are its own."""
    target = shape.full_bytes / ratio
    method = AnchorKV(bits=(), theta=1.0, extra_anchors=0, **options).resolve(shape)

    def with_extra(extra):
        return dataclasses.replace(method, extra_anchors=extra)

    def stored(extra):
        return with_extra(extra).layer_bytes(shape)

    counts = range(shape.num_tokens - method.window + 1)
    fitting = bisect.bisect_right(counts, target, key=stored)
    if not fitting:
        return Setting(label, ratio, with_extra(0), f"limit {shape.full_bytes / stored(0):.1f}x")
    found = dataclasses.replace(with_extra(counts[fitting - 1]), theta=1 / ratio)
    return Setting(label, ratio, found)


@functools.partial(jax.jit, static_argnames=("spin", "uniform"))
def recoded(cache: Any, prompt: PromptKV, view: Dense, *, spin: bool, uniform: bool) -> Dense:
    """The view of a cache whose 2-bit residuals are coded anew, each in as many bytes as before.

    Args:
        cache: of AnchorKV with lean storage and one residual width.
        prompt: that it was made from.
        view: of the cache.
        spin: rotate residuals before they are coded.
        uniform: four equal steps up to the largest coordinate, instead of the Lloyd-Max levels and
            the least-squares scale.
    """
    body = cache.body
    coded, widths = body.coded(), body.widths
    rough = anchors.rebuild(coded, widths)  # [B, 2, K, C, H]
    tokens = rough.shape[3]
    sides = [left_align(x, prompt.starts) for x in (prompt.k_unrotated, prompt.v)]
    room = ((0, 0), (0, 0), (0, max(tokens - sides[0].shape[2], 0)), (0, 0))
    exact = jnp.stack([jnp.pad(x.astype(jnp.float32), room)[:, :, :tokens] for x in sides], 1)
    error = exact - rough
    place = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (len(error), tokens))
    turned = jnp.stack([rotate(body.rope, error[:, 0], place), error[:, 1]], 1)
    _, present = xla.slots(coded.residuals[0])
    residual = jnp.where(present[..., None], _coded(turned, spin, uniform, widths.seed), 0.0)
    k = rotate(body.rope, rough[:, 0], place) + residual[:, 0]
    v = rough[:, 1] + residual[:, 1]
    return dataclasses.replace(
        view, k=view.k.at[:, :, :tokens].set(k), v=view.v.at[:, :, :tokens].set(v)
    )


def _coded(x: Array, spin: bool, uniform: bool, seed: int) -> Array:
    """What two bits a coordinate and an 8-bit scale make of vectors f32[..., H]."""
    matrix = quant.rotation(x.shape[-1], seed) if spin else jnp.eye(x.shape[-1])
    turned = x @ matrix
    if uniform:
        levels = jnp.array([-1.0, -1 / 3, 1 / 3, 1.0])
        scale = quant.scale_decode(quant.scale_encode(jnp.abs(turned).max(-1)))[..., None]
        unit = turned / jnp.where(scale > 0, scale, 1.0)
        codes = jnp.clip(jnp.round((unit + 1) * 1.5), 0, 3).astype(jnp.int32)
        return levels[codes] * scale @ matrix.T
    scale = jnp.sqrt(jnp.square(turned).mean(-1))
    unit = turned / jnp.where(scale > 0, scale, 1.0)[..., None]
    values = quant.codebook_decode(quant.codebook_encode(unit, 2), 2)
    best = jnp.maximum((turned * values).sum(-1) / jnp.square(values).sum(-1), 0.0)
    return values * quant.scale_decode(quant.scale_encode(best))[..., None] @ matrix.T


def naive(cache: Any, prompt: PromptKV, view: Dense) -> Dense:
    """Residuals without rotation, on four uniform levels up to the largest coordinate."""
    return recoded(cache, prompt, view, spin=False, uniform=True)
