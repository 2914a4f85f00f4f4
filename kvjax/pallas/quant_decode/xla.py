"""The specification of quant_decode."""

import jax.numpy as jnp
from jax import Array, lax

from kvjax import quant
from kvjax.pallas import partial


def quant_decode(
    q: Array,
    k_codes: Array,
    k_scale: Array,
    k_zero: Array,
    v_codes: Array,
    v_scale: Array,
    v_zero: Array,
    lengths: Array,
    *,
    k_bits: int,
    v_bits: int,
) -> tuple[Array, Array, Array]:
    """See `api.quant_decode`."""
    # The barrier keeps XLA from hoisting the dequantization out of a decode loop.
    q, k_codes, v_codes = lax.optimization_barrier((q, k_codes, v_codes))
    dim = q.shape[-1]
    slots = min(k_codes.shape[2], v_codes.shape[2])
    k = quant.group_dequantize(quant.unpack(k_codes, k_bits, dim), k_scale, k_zero, axis=2)
    v = quant.group_dequantize(quant.unpack(v_codes, v_bits, dim), v_scale, v_zero, axis=3)
    valid = jnp.arange(slots)[None, None, None] < lengths[:, None, None, None]
    mask = jnp.broadcast_to(valid, (q.shape[0], 1, q.shape[2], slots))
    return partial.dense(q, k[:, :, :slots], v[:, :, :slots], mask)
