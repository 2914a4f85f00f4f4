"""The specification of group_quantize."""

from jax import Array

from kvjax import quant


def group_quantize(x: Array, *, bits: int, group: int, axis: int) -> tuple[Array, Array, Array]:
    """See `api.group_quantize`."""
    codes, scale, zero = quant.group_quantize(x, bits, group, axis=axis)
    return quant.pack(codes, bits), scale, zero
