"""Signature, checks and shapes of anchor_assign."""

from jax import Array
from jaxtyping import Bool, Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.anchor_assign import xla
from kvjax.typed import typed

# batch, KV heads, tokens, anchors, head dim
SHAPES = {
    "smollm2_135m": (1, 3, 2048, 64, 64),
    "llama3_8b": (1, 8, 32768, 256, 128),
}


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
        impl: see `dispatch.choose`.

    Returns:
        index i32[..., S] and gamma f32[..., S].

    Source: AnchorKV (arXiv 2608.02901), equations 1 and 2.
    """
    return dispatch.choose("anchor_assign", impl, {"xla": xla.anchor_assign})(x, anchors, valid)
