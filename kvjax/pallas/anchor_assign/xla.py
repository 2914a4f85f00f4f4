"""The specification of anchor_assign."""

import jax.numpy as jnp
from jax import Array, lax

_TOKENS = 4096  # of a block: S x A products are never held whole for a long prompt


def anchor_assign(x: Array, anchors: Array, valid: Array) -> tuple[Array, Array]:
    """See `api.anchor_assign`."""
    lead, (tokens, dim) = x.shape[:-2], x.shape[-2:]
    x = x.reshape(-1, tokens, dim)
    anchors = anchors.reshape(-1, anchors.shape[-2], dim).astype(jnp.float32)
    square = (anchors * anchors).sum(-1)
    # Invalid anchors never win; a zero anchor only if all are.
    inverse = jnp.where(square > 0, 1.0 / jnp.where(square > 0, square, 1.0), 0.0)
    weight = jnp.where(valid.reshape(square.shape), jnp.sqrt(inverse), -1.0)

    def block(tokens):
        dots = jnp.einsum("bsh,bah->bsa", tokens.astype(jnp.float32), anchors)
        fit = jnp.where(weight[:, None] >= 0, jnp.abs(dots) * weight[:, None], -1.0)
        # Two plain reductions vectorise where an argmax does not; ties go to the first anchor.
        slot = jnp.arange(fit.shape[-1], dtype=jnp.int32)[None, None]
        index = jnp.where(fit == fit.max(-1, keepdims=True), slot, slot.size).min(-1)
        index = jnp.minimum(index, slot.size - 1)  # NaN
        best = jnp.take_along_axis(dots, index[..., None], -1)[..., 0]
        return index, best * jnp.take_along_axis(inverse, index, 1)

    if tokens <= _TOKENS:
        index, gamma = block(x)
    else:
        count = -(-tokens // _TOKENS)
        padded = jnp.pad(x, ((0, 0), (0, count * _TOKENS - tokens), (0, 0)))
        blocks = padded.reshape(x.shape[0], count, _TOKENS, dim).swapaxes(0, 1)
        index, gamma = (
            y.swapaxes(0, 1).reshape(x.shape[0], -1)[:, :tokens] for y in lax.map(block, blocks)
        )
    return index.reshape(*lead, tokens), gamma.reshape(*lead, tokens)
