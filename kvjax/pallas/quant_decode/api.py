"""Signature, checks and shapes of quant_decode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float16, Int32, UInt8

from kvjax import quant
from kvjax.pallas import dispatch
from kvjax.pallas.quant_decode import gpu, tpu, triton, xla
from kvjax.typed import typed

# batch, query heads, KV heads, tokens, head dim, bits, group
SHAPES = {
    "smollm2_135m_2bit": (1, 9, 3, 2048, 64, 2, 32),
    "llama3_8b_4bit": (1, 32, 8, 32768, 128, 4, 32),
    "qwen2_5_7b_2bit": (1, 28, 4, 32768, 128, 2, 32),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, *[_KV] * 6, ("batch",)), (_HEAD,) * 3)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: one new bfloat16 query, every token coded."""
    batch, heads, kv_heads, tokens, dim, bits, group = shape
    keys = iter(jax.random.split(jax.random.key(seed), 7))

    def codes():
        size = (batch, kv_heads, tokens, quant.packed_size(dim, bits))
        return jax.random.bits(next(keys), size, jnp.uint8)

    def statistics(*rest):
        scale = jax.random.uniform(next(keys), (batch, kv_heads, *rest)) / 2**bits
        zero = jax.random.normal(next(keys), (batch, kv_heads, *rest))
        return scale.astype(jnp.float16), zero.astype(jnp.float16)

    q = jax.random.normal(next(keys), (batch, heads, 1, dim), jnp.bfloat16)
    k, v = codes(), codes()
    arrays = (q, k, *statistics(tokens // group, dim), v, *statistics(tokens, dim // group))
    return (*arrays, jnp.full((batch,), tokens, jnp.int32)), {"k_bits": bits, "v_bits": bits}


@typed
def quant_decode(
    q: Float[Array, "B N T H"],
    k_codes: UInt8[Array, "B K SK PK"],
    k_scale: Float16[Array, "B K GK H"],
    k_zero: Float16[Array, "B K GK H"],
    v_codes: UInt8[Array, "B K SV PV"],
    v_scale: Float16[Array, "B K SV GV"],
    v_zero: Float16[Array, "B K SV GV"],
    lengths: Int32[Array, " B"],
    *,
    k_bits: int,
    v_bits: int,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over the first `lengths` tokens of a group-quantized prompt.

    Every query comes after every token. Codes are packed along the head dim (`quant.pack`).

    Args:
        q: [B, N, T, H], rotated.
        k_codes: uint8 [B, K, SK, H * k_bits / 8], rotated keys.
        k_scale: f16[B, K, SK / group, H], per channel, a group of consecutive tokens each.
        k_zero: as k_scale.
        v_codes: uint8 [B, K, SV, H * v_bits / 8].
        v_scale: f16[B, K, SV, H / group], per token, a group of consecutive channels each.
        v_zero: as v_scale.
        lengths: i32[B], tokens of each row to attend to.
        k_bits: 1 to 8.
        v_bits: 1 to 8.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.
    """
    backends = {
        "xla": xla.quant_decode,
        "gpu": gpu.quant_decode,
        "interpret": functools.partial(gpu.quant_decode, interpret=True),
        "triton": triton.quant_decode,
        "tpu": tpu.quant_decode,
    }
    return dispatch.choose("quant_decode", impl, backends, AXES)(
        q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, lengths, k_bits=k_bits, v_bits=v_bits
    )
