"""Signature, checks and shapes of paged_decode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.paged_decode import gpu, tpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, pages of the pool, page size, head dim, pages of a row
SHAPES = {
    "smollm2_135m": (4, 9, 3, 512, 16, 64, 128),
    "llama3_8b": (8, 32, 8, 4096, 16, 128, 512),
    "qwen2_5_7b": (8, 28, 4, 1024, 64, 128, 128),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, ("page", "kv_head"), ("page", "kv_head"), ("batch",), ("batch",)), (_HEAD,) * 3)


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: bfloat16, one new token, pages in random order."""
    batch, heads, kv_heads, pages, size, dim, count = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    sizes = (batch, heads, 1, dim), *[(pages, kv_heads, size, dim)] * 2
    arrays = (jax.random.normal(x, s, jnp.bfloat16) for x, s in zip(keys, sizes, strict=False))
    table = jax.random.permutation(keys[3], pages)[: batch * count].astype(jnp.int32)
    lengths = jnp.full((batch,), count * size, jnp.int32)
    return (*arrays, table.reshape(batch, count), lengths), {}


@typed
def paged_decode(
    q: Float[Array, "B N T H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    table: Int32[Array, "B M"],
    lengths: Int32[Array, " B"],
    *,
    impl: str = "auto",
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Attention of new queries over the first `lengths` tokens of each row's pages.

    Every query comes after every token. Token t of a row is slot t % S of page table[t // S].

    Args:
        q: [B, N, T, H], rotated.
        k_pages: [P, K, S, H], rotated.
        v_pages: [P, K, S, H].
        table: i32[B, M], pages of each row in order, -1 = none.
        lengths: i32[B], tokens of each row.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax.
    """
    backends = {
        "xla": xla.paged_decode,
        "gpu": gpu.paged_decode,
        "interpret": functools.partial(gpu.paged_decode, interpret=True),
        "tpu": tpu.paged_decode,
    }
    return dispatch.choose("paged_decode", impl, backends, AXES)(
        q, k_pages, v_pages, table, lengths
    )
