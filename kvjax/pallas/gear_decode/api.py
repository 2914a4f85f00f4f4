"""Signature, checks and shapes of gear_decode."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax import quant
from kvjax.pallas import dispatch
from kvjax.pallas.gear_decode import gpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, tokens, head dim, bits, group, rank
SHAPES = {
    "smollm2_135m_2bit": (1, 9, 3, 2048, 64, 2, 64, 4),
    "llama3_8b_4bit": (1, 32, 8, 32768, 128, 4, 64, 4),
}


class Coded(NamedTuple):
    """The keys or the values of C chunks of t tokens each: x = codes scale + zero + low + sparse.

    The low-rank and the sparse part may be absent (None). An entry of the sparse part adds its
    value at (token, channel); an unused one has value 0.
    """

    codes: Array  # uint8 [B, K, C * t, packed_size(H)]
    scale: Array  # f16, keys [B, K, groups of tokens, H], values [B, K, C * t, groups of channels]
    zero: Array  # as scale
    left: Array | None  # f16 [B, K, C * t, r]
    right: Array | None  # f16 [B, K, C, r, H]
    delta: Array | None  # keys [B, K, C * e, H], values [B, K, C * t, e]
    index: Array | None  # unsigned, as delta: keys the token in its chunk, values the channel


_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, _KV, _KV, ("batch",)), (_HEAD,) * 3)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: one chunk, one new bfloat16 query, 2 % outliers."""
    batch, heads, kv_heads, tokens, dim, bits, group, rank = shape
    draw = iter(jax.random.split(jax.random.key(seed), 16))
    lead = (batch, kv_heads)

    def half(*rest):
        return (jax.random.normal(next(draw), (*lead, *rest)) / 8).astype(jnp.float16)

    def side(statistics, outliers, most):
        codes = (*lead, tokens, quant.packed_size(dim, bits))
        index = jax.random.randint(next(draw), (*lead, *outliers), 0, most, jnp.int32)
        return Coded(
            jax.random.bits(next(draw), codes, jnp.uint8), half(*statistics), half(*statistics),
            half(tokens, rank), half(1, rank, dim), half(*outliers), index.astype(jnp.uint16),
        )  # fmt: skip

    q = jax.random.normal(next(draw), (batch, heads, 1, dim), jnp.bfloat16)
    keys = side((tokens // group, dim), (max(1, tokens // 50), dim), tokens)
    values = side((tokens, max(1, dim // group)), (tokens, max(1, dim // 50)), dim)
    lengths = jnp.full((batch,), tokens, jnp.int32)
    return (q, keys, values, lengths), {"chunk": tokens, "k_bits": bits, "v_bits": bits}


@typed
def gear_decode(
    q: Float[Array, "B N T H"],
    keys: Coded,
    values: Coded,
    lengths: Int32[Array, " B"],
    *,
    chunk: int,
    k_bits: int,
    v_bits: int,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over the first `lengths` tokens of chunks coded by GEAR.

    Every query comes after every token. Codes are packed along the head dim (`quant.pack`).

    Args:
        q: [B, N, T, H], rotated.
        keys: rotated keys, scales per channel.
        values: scales per token.
        lengths: i32[B], tokens of each row to attend to.
        chunk: tokens t of a chunk.
        k_bits: 1 to 8.
        v_bits: 1 to 8.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.

    Raises:
        ValueError: if the chunk does not divide the tokens, or both sides do not hold as many.
    """
    tokens = keys.codes.shape[2]
    if tokens % chunk or values.codes.shape[2] != tokens:
        raise ValueError(
            f"{tokens} keys and {values.codes.shape[2]} values must be as many, and a multiple of"
            f" chunk={chunk}."
        )
    backends = {
        "xla": xla.gear_decode,
        "gpu": gpu.gear_decode,
        "interpret": functools.partial(gpu.gear_decode, interpret=True),
    }
    return dispatch.choose("gear_decode", impl, backends, AXES)(
        q, keys, values, lengths, chunk=chunk, k_bits=k_bits, v_bits=v_bits
    )
