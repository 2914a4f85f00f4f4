"""Signature, checks and shapes of pooled_decode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.pooled_decode import gpu, tpu, xla
from kvjax.typed import typed

# batch, query heads, KV heads, slots, head dim, then "sums" where they are asked for, "float32"
# where arrays are that
SHAPES = {
    "smollm2_135m": (1, 9, 3, 2048, 64),
    "llama3_8b": (1, 32, 8, 32768, 128),
    "qwen2_5_7b": (1, 28, 4, 32768, 128),
    "gemma2_2b_float32": (1, 8, 4, 8192, 256, "float32"),
    "smollm2_135m_sums": (1, 9, 3, 2048, 64, "sums"),
    "llama3_8b_sums": (1, 32, 8, 32768, 128, "sums"),
}
_HEAD, _KV = ("batch", "head"), ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_HEAD, _KV, _KV, _KV), (_HEAD,) * 3)
_O, _M, _Sums = Float[Array, "B N T H"], Float[Array, "B N T"], Float[Array, "B K S"]


def example(shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of an entry of `SHAPES`: one new token, every slot filled."""
    batch, heads, kv_heads, slots, dim, *options = shape
    dtype = "float32" if "float32" in options else "bfloat16"
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (batch, heads, 1, dim), *[(batch, kv_heads, slots, dim)] * 2
    arrays = (jax.random.normal(x, s, dtype) for x, s in zip(keys, sizes, strict=True))
    lengths = jnp.full((batch, kv_heads), slots, jnp.int32)
    return (*arrays, lengths), {"sums": True} if "sums" in options else {}


@typed
def pooled_decode(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int32[Array, "B K"],
    *,
    skip: int = 0,
    sums: bool = False,
    impl: str = "auto",
) -> tuple[_O, _M, _M] | tuple[_O, _M, _M, _Sums]:
    """Attention of new queries over the slots [skip, lengths) of each KV head.

    Every query comes after every slot, so there is no causal mask.

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, S, H], rotated.
        v: [B, K, S, H].
        lengths: i32[B, K], valid slots of each KV head.
        skip: slots at the front that no query sees.
        sums: return what each slot gets of the attention, too: of the normalised probabilities the
            sum over the new tokens and the group's query heads.
        impl: see `dispatch.choose`.

    Returns:
        o f32[B, N, T, H], m f32[B, N, T], l f32[B, N, T]: an unnormalised online softmax; with
        `sums` also these, f32[B, K, S].

    Raises:
        ValueError: if `skip` is not a number of slots.
    """
    if not 0 <= skip < k.shape[2]:
        raise ValueError(f"skip={skip} must be from 0 to {k.shape[2] - 1}, less than all slots.")
    backends = {
        "xla": xla.pooled_decode,
        "gpu": gpu.pooled_decode,
        "interpret": functools.partial(gpu.pooled_decode, interpret=True),
        "tpu": tpu.pooled_decode,
    }
    axes = (AXES[0], (*AXES[1], _KV)) if sums else AXES
    return dispatch.choose("pooled_decode", impl, backends, axes)(
        q, k, v, lengths, skip=skip, sums=sums
    )
