"""Signature, checks and shapes of codebook_encode."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float16, UInt8

from kvjax import quant
from kvjax.pallas import dispatch
from kvjax.pallas.codebook_decode.api import Part
from kvjax.pallas.codebook_encode import gpu, xla
from kvjax.typed import typed

# batch, KV heads, tokens, head dim, parts
SHAPES = {
    "smollm2_135m_4bit": (1, 3, 2048, 64, (Part(64, 4),)),
    "smollm2_135m_3.5bit": (1, 3, 2048, 64, (Part(48, 3), Part(16, 4))),
    "llama3_8b_3bit": (1, 8, 32768, 128, (Part(128, 3),)),
    "llama3_8b_4bit_prod": (1, 8, 32768, 128, (Part(128, 4, True),)),
    "llama3_8b_3.5bit_prod": (1, 8, 32768, 128, (Part(96, 3, True), Part(32, 4, True))),
    "qwen2_5_7b_2bit": (1, 4, 32768, 128, (Part(128, 2),)),
    "qwen2_5_7b_8bit": (1, 4, 32768, 128, (Part(128, 8),)),
}
_KV = ("batch", "kv_head")


def axes(x: Array, turn: Array) -> tuple:
    """Names of the leading axes of arguments and outputs, for `sharding.shard_over_heads`."""
    return (_KV, _KV if turn.ndim == 4 else ()), (_KV, _KV)


def example(shape: tuple, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments and keyword arguments for an entry of `SHAPES`."""
    *sizes, parts = shape
    x = jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16)
    blocks = [quant.rotation(part.dim, seed) for part in parts]
    turn = blocks[0]
    if len(parts) > 1:  # each head has its own loud channels
        turn = jax.scipy.linalg.block_diag(*blocks)
        turn = jnp.broadcast_to(turn, (*sizes[:2], *turn.shape))
    return (x, turn), {"parts": parts, "corrected": True, "seed": seed}


@typed
def codebook_encode(
    x: Float[Array, "B K T H"],
    turn: Float[Array, "*heads H F"],
    *,
    parts: tuple[Part, ...],
    corrected: bool,
    seed: int,
    impl: str = "auto",
) -> tuple[UInt8[Array, "B K T P"], Float16[Array, "B K T C"]]:
    """Rotate vectors and code every coordinate with the levels of its known law.

    code = nearest of `quant.coordinate_levels` to y / |y|, y = a part of x turn; with signs its
    highest bit is the sign of a sketch of what the levels miss.

    Args:
        x: [B, K, T, H].
        turn: f32[H, F], or [B, K, H, F] of each head: channels to the parts side by side, each
            rotated (F = H).
        parts: how the columns of `turn` are coded.
        corrected: store |y| over the norm of the levels (of a part without signs), so that a vector
            comes back with its own norm.
        seed: of `quant.sketch`, for parts with signs.
        impl: see `dispatch.choose`.

    Returns:
        codes uint8 [B, K, T, P], `quant.pack` of each part's codes, side by side, and f16[B, K, T,
        C], each part's norm and (with signs) its residual's, side by side.

    Raises:
        ValueError: if `turn` is not what the parts say.
        NotImplementedError: if the kernel that was asked for cannot do a part.

    Source: TurboQuant (arXiv 2504.19874), algorithms 1 and 2.
    """
    total = sum(part.dim for part in parts)
    if turn.shape not in ((x.shape[-1], total), (*x.shape[:2], x.shape[-1], total)):
        raise ValueError(
            f"turn of shape {turn.shape} must be {(x.shape[-1], total)}, or that for each of"
            f" {x.shape[:2]} heads, for {parts}."
        )
    backends = {
        "xla": xla.codebook_encode,
        "gpu": gpu.codebook_encode,
        "interpret": functools.partial(gpu.codebook_encode, interpret=True),
    }
    return dispatch.choose("codebook_encode", impl, backends, axes(x, turn))(
        x, turn, parts=parts, corrected=corrected, seed=seed
    )
