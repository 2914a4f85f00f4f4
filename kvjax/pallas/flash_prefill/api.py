"""Signature, checks and shapes of flash_prefill."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.flash_prefill import gpu, tpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, columns, head dim, and the dtype if it is not bfloat16
SHAPES = {
    "smollm2_135m": (1, 9, 3, 2048, 64),
    "llama3_8b": (1, 32, 8, 8192, 128),
    "qwen2_5_7b": (1, 28, 4, 8192, 128),
    "gemma2_2b_float32": (1, 8, 4, 8192, 256, "float32"),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, _KV, _KV, ("batch",)), (_HEAD, _HEAD))


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments and keyword arguments for an entry of `SHAPES`."""
    batch, heads, kv_heads, columns, dim, *dtype = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (batch, n, columns, dim), *(dtype or ["bfloat16"]))
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )
    return (q, k, v, jnp.zeros(batch, jnp.int32)), {}


@typed
def flash_prefill(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    starts: Int32[Array, " B"],
    *,
    window: int | None = None,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"]]:
    """Exact causal attention of right-aligned (left-padded) rows, never holding a T x T matrix.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, T, H], rotated.
        v: [B, K, T, H].
        starts: i32[B], first real column of each row; pads are neither seen nor give output.
        window: a query sees only the last `window` columns up to its own; None = all.
        impl: see `dispatch.choose`.

    Returns:
        The attention output [B, N, T, H] in v's dtype, zero at pads, and the log-sum-exp of each
        query's logits f32[B, N, T] (finite and meaningless at pads).

    Raises:
        ValueError: if the KV heads do not divide the query heads.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} KV heads must divide the {q.shape[1]} query heads.")
    backends = {
        "xla": xla.flash_prefill,
        "gpu": gpu.flash_prefill,
        "interpret": functools.partial(gpu.flash_prefill, interpret=True),
        "tpu": tpu.flash_prefill,
    }
    return dispatch.choose("flash_prefill", impl, backends, AXES)(q, k, v, starts, window=window)
