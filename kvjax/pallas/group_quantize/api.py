"""Signature, checks and shapes of group_quantize."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float16, UInt8

from kvjax.pallas import dispatch
from kvjax.pallas.group_quantize import gpu, xla
from kvjax.typed import typed

# batch, KV heads, tokens, head dim, bits, group, axis
SHAPES = {
    "smollm2_135m_keys_2bit": (1, 3, 2048, 64, 2, 32, 2),
    "smollm2_135m_values_4bit": (1, 3, 2048, 64, 4, 32, 3),
    "llama3_8b_keys_4bit": (1, 8, 32768, 128, 4, 32, 2),
    "llama3_8b_values_2bit": (1, 8, 32768, 128, 2, 64, 3),
    "qwen2_5_7b_values_3bit": (1, 4, 32768, 128, 3, 32, 3),
}
_KV = ("batch", "kv_head")
# names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`
AXES = ((_KV,), (_KV,) * 3)


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments and keyword arguments for an entry of `SHAPES`."""
    *sizes, bits, group, axis = shape
    x = jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16)
    return (x,), {"bits": bits, "group": group, "axis": axis}


@typed
def group_quantize(
    x: Float[Array, "B K S H"],
    *,
    bits: int,
    group: int,
    axis: int,
    impl: str = "auto",
) -> tuple[UInt8[Array, "B K S P"], Float16[Array, "B K M C"], Float16[Array, "B K M C"]]:
    """Quantize groups of neighbours between their minimum and maximum, and pack the codes.

    scale = (max - min) / (2^bits - 1), code = round((x - zero) / scale), zero = min: see
    `quant.group_quantize`, whose codes `quant.pack` packs along the head dim.

    Args:
        x: [B, K, S, H].
        bits: 1 to 8.
        group: neighbours that share a scale; it divides the axis.
        axis: 2: a group is `group` tokens of a channel (keys); 3: channels of a token (values).
        impl: see `dispatch.choose`; no kernel for "tpu" or "triton" (`dispatch.beside`).

    Returns:
        packed codes uint8 [B, K, S, packed_size(H, bits)], scale and zero f16 [B, K, S / group, H]
        (axis 2) or [B, K, S, H / group] (axis 3).

    Raises:
        ValueError: for another axis, bits out of range, or a group that does not divide the axis.
    """
    if axis not in (2, 3):
        raise ValueError(f"axis={axis} must be 2 (tokens) or 3 (channels).")
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits} must be between 1 and 8.")
    if group < 1 or x.shape[axis] % group:
        raise ValueError(f"group={group} must divide axis {axis} of {x.shape[axis]}.")
    backends = {
        "xla": xla.group_quantize,
        "gpu": gpu.group_quantize,
        "interpret": functools.partial(gpu.group_quantize, interpret=True),
    }
    return dispatch.choose("group_quantize", impl, backends, AXES)(
        x, bits=bits, group=group, axis=axis
    )
