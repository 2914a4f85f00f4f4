"""Signature, arguments and shapes of anchor_decode."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from kvjax import quant
from kvjax.pallas import dispatch
from kvjax.pallas.anchor_decode import gpu, tpu, triton, xla
from kvjax.rope import Rope
from kvjax.typed import typed

# batch, query heads, KV heads, tokens, head dim, anchors, window, share of sides with a residual,
# and "lean" for packed storage
SHAPES = {
    "smollm2_135m": (1, 9, 3, 2048, 64, 64, 16, 0.2),
    "llama3_8b": (1, 32, 8, 32768, 128, 256, 32, 0.2),
    "smollm2_135m_lean": (1, 9, 3, 2048, 64, 64, 16, 0.2, "lean"),
    "llama3_8b_lean": (1, 32, 8, 32768, 128, 256, 32, 0.2, "lean"),
}


class Residuals(NamedTuple):
    """The residuals of one width or stage: which sides have one, and their codes in token order.

    The slot of token t is prefix[t // 32] + popcount(words[t // 32] & ((1 << t % 32) - 1)).
    """

    words: Array  # uint32 [B, 2, K, C / 32], bit mask of the tokens
    prefix: Array  # [B, 2, K, C / 32], set bits before each word, over (stage, side, head, word)
    codes: Array  # uint8 [B, N, packed_size(H, bits)]
    scales: Array  # f16 or uint8 (quant.scale_encode) [B, N]


class Coded(NamedTuple):
    """The tokens before the window, coded; axis 2 of size 2 is the side: keys, values."""

    anchors: Array  # [B, 2, K, A, H] bf16/f32, or int8 with scales
    anchor_scales: Array | None  # f16[B, 2, K, A]
    window: Array | None  # [B, 2, K, W, H], further anchors, exact, where anchors has them not
    mean: Array | None  # [B, 2, K, H], what anchors and tokens are taken relative to
    index: Array  # uint8/uint16 [B, 2, K, J, C], or uint8 bytes of index_bits codes; J anchors each
    gamma: Array  # f16[B, 2, K, J, C], or uint8 bytes of gamma_bits codes
    gamma_range: Array | None  # f16[B, 2, K, J, 2], smallest gamma and step
    residuals: tuple[Residuals, ...]  # a token has one of several widths, or several stages
    lengths: Array  # i32[B], coded tokens


class Widths(NamedTuple):
    """Static widths of a `Coded`, in bits; 0 = stored unpacked."""

    index: int
    gamma: int
    residuals: tuple[int, ...]  # of each of Coded.residuals
    seed: int  # of the residuals' rotation
    staged: bool = False  # residuals are stages, added up, with the same codes and scales arrays


_HEAD, _SIDES, _ROW = ("batch", "head"), ("batch", "side", "kv_head"), ("batch",)
_EACH = Residuals(_SIDES, _SIDES, _ROW, _ROW)  # residual slots are shared by all heads: stay whole


def axes(q: Array, coded: Coded) -> tuple:
    """Names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`."""
    names = Coded(*[_SIDES] * 7, tuple(_EACH for _ in coded.residuals), _ROW)
    return (_HEAD, names), (_HEAD,) * 3


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: 2- and 4-bit residuals, one new bfloat16 query.

    A third of the residuals have 4 bits. Plain storage has the window's tokens among the anchors;
    lean storage packs the index, has 4-bit gamma, int8 anchors, 8-bit scales, a window and a mean.
    """
    batch, heads, kv_heads, tokens, dim, anchors, window, share, *lean = shape
    draw = iter(jax.random.split(jax.random.key(seed), 16))
    sides, total = (batch, 2, kv_heads), anchors + window

    def normal(*rest, dtype=jnp.bfloat16):
        return jax.random.normal(next(draw), (*sides, *rest)).astype(dtype)

    def residuals(bits, share):
        # Every n-th token of each side: the slots are known without a look at the mask.
        every = max(1, round(1 / share))
        each = len(range(0, tokens, every))
        mask = jnp.broadcast_to(jnp.arange(tokens) % every == 0, (*sides, tokens))
        words = quant.bit_words(mask)
        slots = (batch, 2 * kv_heads * each)
        codes = jax.random.bits(next(draw), (*slots, quant.packed_size(dim, bits)), jnp.uint8)
        scales = jax.random.uniform(next(draw), slots) + 0.1
        scales = quant.scale_encode(scales) if lean else scales.astype(jnp.float16)
        return Residuals(words, quant.popcount_prefix(words), codes, scales)

    q = jax.random.normal(next(draw), (batch, heads, 1, dim), jnp.bfloat16)
    index = jax.random.randint(next(draw), (*sides, 1, tokens), 0, total, jnp.int32)
    coded = residuals(2, share * 2 / 3), residuals(4, share / 3)
    lengths = jnp.full((batch,), tokens, jnp.int32)
    rope = Rope(tuple(float(f) for f in 1e4 ** (-np.arange(0, dim, 2) / dim)))
    if not lean:
        size = jnp.uint8 if total <= 256 else jnp.uint16
        stored = Coded(
            normal(total, dim), None, None, None, index.astype(size),
            normal(1, tokens, dtype=jnp.float16), None, coded, lengths,
        )  # fmt: skip
        return (q, stored), {"widths": Widths(0, 0, (2, 4), 0), "rope": rope}
    bits = (total - 1).bit_length()
    gamma = jax.random.bits(next(draw), (*sides, 1, quant.packed_size(tokens, 4)), jnp.uint8)
    stored = Coded(
        (normal(anchors, dim, dtype=jnp.float32) * 40).astype(jnp.int8),
        jnp.full((*sides, anchors), 1 / 40, jnp.float16), normal(window, dim), normal(dim),
        quant.pack(index, bits), gamma, normal(1, 2, dtype=jnp.float16) / 8, coded, lengths,
    )  # fmt: skip
    return (q, stored), {"widths": Widths(bits, 4, (2, 4), 0), "rope": rope}


@typed
def anchor_decode(
    q: Float[Array, "B N T H"], coded: Coded, *, widths: Widths, rope: Rope, impl: str = "auto"
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over coded tokens; token t has position t.

    key_t = R_t (mean + gamma_t a_t) + r_t, value_t = mean + gamma_t a_t + r_t, with a_t the token's
    anchor (a sum over its J anchors), r_t the sum of its residuals, and mean zero where there is
    none. Key residuals are those of
    rotated keys, so that a query meets their codes after one rotation of its own.

    Args:
        q: [B, N, T, H], rotated; every query comes after every coded token.
        coded: the stored arrays.
        widths: their bit widths.
        rope: of the layer.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.

    Source: AnchorKV (arXiv 2608.02901), equation 3.
    """
    backends = {
        "xla": xla.anchor_decode,
        "gpu": gpu.anchor_decode,
        "interpret": functools.partial(gpu.anchor_decode, interpret=True),
        "tpu": tpu.anchor_decode,
        "triton": triton.anchor_decode,
    }
    return dispatch.choose("anchor_decode", impl, backends, axes(q, coded))(
        q, coded, widths=widths, rope=rope
    )
