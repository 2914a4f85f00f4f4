"""Signature, checks and shapes of anchor_assign."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.anchor_assign import gpu, xla
from kvjax.typed import typed

# batch, KV heads, tokens, anchors, head dim
SHAPES = {
    "smollm2_135m": (1, 3, 2048, 64, 64),
    "llama3_8b": (1, 8, 32768, 256, 128),
}
_KV = ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_KV,) * 3, (_KV,) * 2)


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments and keyword arguments for an entry of `SHAPES`."""
    batch, kv_heads, tokens, count, dim = shape
    one, two = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(one, (batch, kv_heads, tokens, dim), jnp.bfloat16)
    anchors = jax.random.normal(two, (batch, kv_heads, count, dim), jnp.float32)
    return (x, anchors, jnp.ones((batch, kv_heads, count), bool)), {}


@typed
def anchor_assign(
    x: Float[Array, "*B S H"],
    anchors: Float[Array, "*B A H"],
    valid: Bool[Array, "*B A"],
    *,
    impl: str = "auto",
) -> tuple[Int32[Array, "*B S"], Float[Array, "*B S"]]:
    """The anchor of largest |cosine| to each token, and the projection on it.

    index = argmax_a |<x, a>| / |a| over valid anchors (|x| does not change the argmax),
    gamma = <x, a> / |a|^2; gamma may be negative, and is 0 for a zero anchor.

    Args:
        x: [..., S, H], keys before RoPE, or values.
        anchors: f32[..., A, H], as stored (after their own quantization).
        valid: bool [..., A].
        impl: see `dispatch.choose`; no kernel for "tpu" or "triton" (`dispatch.beside`).

    Returns:
        index i32[..., S] and gamma f32[..., S].

    Source: AnchorKV (arXiv 2608.02901), equations 1 and 2.
    """
    backends = {
        "xla": xla.anchor_assign,
        "gpu": gpu.anchor_assign,
        "interpret": functools.partial(gpu.anchor_assign, interpret=True),
    }
    return dispatch.choose("anchor_assign", impl, backends, AXES if x.ndim == 4 else None)(
        x, anchors, valid
    )
