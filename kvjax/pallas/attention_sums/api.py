"""Signature, checks and shapes of attention_sums."""

from jax import Array
from jaxtyping import Float, Int32

from kvjax.pallas import dispatch
from kvjax.pallas.attention_sums import xla
from kvjax.pallas.flash_prefill.api import SHAPES as SHAPES
from kvjax.typed import typed


@typed
def attention_sums(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    lse: Float[Array, "B N T"],
    starts: Int32[Array, " B"],
    *,
    impl: str = "auto",
) -> Float[Array, "B K T"]:
    """Column sums of the causal attention matrix, never holding it.

    sums[j] = sum of exp(q_i . k_j / sqrt(H) - lse_i) over the group's heads and queries i >= j

    Args:
        q: [B, N, T, H], rotated.
        k: [B, K, T, H], rotated.
        lse: f32[B, N, T], log-sum-exp of each query's logits (`flash_prefill`).
        starts: i32[B], first real column of each row.
        impl: see `dispatch.choose`.

    Returns:
        f32[B, K, T]; zero at pads.
    """
    return dispatch.choose("attention_sums", impl, {"xla": xla.attention_sums})(q, k, lse, starts)
