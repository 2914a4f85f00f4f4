"""Signature, checks and shapes of pooled_decode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.pooled_decode import gpu, tpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, slots, head dim
SHAPES = {
    "smollm2_135m": (1, 9, 3, 2048, 64),
    "llama3_8b": (1, 32, 8, 32768, 128),
    "qwen2_5_7b": (1, 28, 4, 32768, 128),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, _KV, _KV, _KV), (_HEAD,) * 3)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: bfloat16, one new token, every slot filled."""
    batch, heads, kv_heads, slots, dim = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (batch, heads, 1, dim), *[(batch, kv_heads, slots, dim)] * 2
    arrays = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, sizes, strict=True))
    return (*arrays, jnp.full((batch, kv_heads), slots, jnp.int32)), {}


@typed
def pooled_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int32[Array, "B K"],
    *,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over the first `lengths` slots of each KV head.

    Every query comes after every slot, so there is no causal mask.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, S, H], rotated.
        v: [B, K, S, H].
        lengths: i32[B, K], valid slots of each KV head.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.
    """
    backends = {
        "xla": xla.pooled_decode,
        "gpu": gpu.pooled_decode,
        "interpret": functools.partial(gpu.pooled_decode, interpret=True),
        "tpu": tpu.pooled_decode,
    }
    return dispatch.choose("pooled_decode", impl, backends, AXES)(q, k, v, lengths)
