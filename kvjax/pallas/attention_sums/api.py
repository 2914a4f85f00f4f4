"""Signature, checks and shapes of attention_sums."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.attention_sums import gpu, xla
from kvjax.pallas.flash_prefill.api import SHAPES as SHAPES
from kvjax.typed import typed

_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, _KV, _HEAD, ("batch",)), (_KV,))


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments and keyword arguments for an entry of `SHAPES`."""
    batch, heads, kv_heads, columns, dim, *dtype = shape
    dtype = dtype[0] if dtype else "bfloat16"
    one, two = jax.random.split(jax.random.key(seed))
    q = jax.random.normal(one, (batch, heads, columns, dim), dtype)
    k = jax.random.normal(two, (batch, kv_heads, columns, dim), dtype)
    # What logits of a unit Gaussian sum to.
    lse = jnp.log(jnp.arange(1, columns + 1, dtype=jnp.float32)) + 0.5
    lse = jnp.broadcast_to(lse, (batch, heads, columns))
    return (q, k, lse, jnp.zeros(batch, jnp.int32)), {}


@typed
def attention_sums(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    lse: Float[Array, "B N T"],
    starts: Int32[Array, " B"],
    *,
    last: int | None = None,
    impl: str = "auto",
) -> Float[Array, "B K T"]:
    """Column sums of the causal attention matrix, never holding it.

    sums[j] = sum of exp(q_i . k_j / sqrt(H) - lse_i) over the group's heads and queries i >= j

    With `last` only the queries of the last columns count: the scores of an observation window.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, T, H], rotated.
        lse: f32[B, N, T], log-sum-exp of each query's logits (`flash_prefill`).
        starts: i32[B], first real column of each row.
        last: columns whose queries count, all if None; at least 1.
        impl: see `dispatch.choose`.

    Returns:
        f32[B, K, T]; zero at pads.

    Raises:
        ValueError: for `last` below 1.
    """
    if last is not None and last < 1:
        raise ValueError(f"last={last} must be at least 1 column.")
    backends = {
        "xla": xla.attention_sums,
        "gpu": gpu.attention_sums,
        "interpret": functools.partial(gpu.attention_sums, interpret=True),
    }
    return dispatch.choose("attention_sums", impl, backends, AXES)(q, k, lse, starts, last=last)
