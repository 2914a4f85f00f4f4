"""Signature, checks and shapes of ragged_decode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.ragged_decode import gpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, pools, slots of a pool, head dim
SHAPES = {
    "smollm2_135m": (1, 9, 3, 1, 3 * 512, 64),
    "llama3_8b": (1, 32, 8, 1, 8 * 4096, 128),
    "qwen2_5_7b": (1, 28, 4, 2, 2 * 4096, 128),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
# A pool goes with its KV heads: there must be a multiple of a pool a device.
AXES = ((_HEAD, *[_KV] * 4), (_HEAD,) * 3)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: bfloat16, one new token, pools shared out evenly."""
    batch, heads, kv_heads, pools, slots, dim = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (batch, heads, 1, dim), *[(batch, pools, slots, dim)] * 2
    arrays = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, sizes, strict=True))
    each = slots * pools // kv_heads
    starts = jnp.arange(kv_heads, dtype=jnp.int32) % (kv_heads // pools) * each
    starts = jnp.broadcast_to(starts, (batch, kv_heads))
    return (*arrays, starts, jnp.full((batch, kv_heads), each, jnp.int32)), {}


@typed
def ragged_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B P S H"],
    v: Float[Array, "B P S H"],
    slot_starts: Int32[Array, "B K"],
    lengths: Int32[Array, "B K"],
    *,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries, each KV head over its own run of slots in a shared pool.

    Every query comes after every slot. KV heads [p K/P, (p+1) K/P) share pool p.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, P, S, H], rotated.
        v: [B, P, S, H].
        slot_starts: i32[B, K], first slot of each KV head in its pool.
        lengths: i32[B, K], slots of each KV head.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.

    Raises:
        ValueError: if the pools do not divide the KV heads, or those the query heads.
    """
    if lengths.shape[1] % k.shape[1] or q.shape[1] % lengths.shape[1]:
        raise ValueError(
            f"{k.shape[1]} pools must divide the {lengths.shape[1]} KV heads, and those the"
            f" {q.shape[1]} query heads."
        )
    backends = {
        "xla": xla.ragged_decode,
        "gpu": gpu.ragged_decode,
        "interpret": functools.partial(gpu.ragged_decode, interpret=True),
    }
    return dispatch.choose("ragged_decode", impl, backends, AXES)(q, k, v, slot_starts, lengths)
