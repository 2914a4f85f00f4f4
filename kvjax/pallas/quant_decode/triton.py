"""quant_decode in the Triton language, through jax-triton."""

from jax import Array

from kvjax.pallas import compat, partial
from kvjax.pallas import triton_launch as common
from kvjax.pallas.partial import combine
from kvjax.pallas.split_k import power


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
    compat.jax_triton()
    from kvjax.pallas.quant_decode import triton_kernel

    arrays = (q, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, lengths)
    o, m, l = common.launch(triton_kernel.quant_decode, plan(arrays, k_bits, v_bits))  # noqa: E741
    (batch, heads, steps), kv_heads = q.shape[:3], k_codes.shape[1]
    (o,), m, l = combine((o,), m, l, 1)  # noqa: E741
    rows = heads // kv_heads * steps
    o, m, l = (x[:, :rows].reshape(batch, kv_heads, rows, *x.shape[2:]) for x in (o, m, l))  # noqa: E741
    return partial.by_head(o, m, l, steps)


def plan(arrays: tuple[Array, ...], k_bits: int, v_bits: int) -> common.Plan:
    """How to call the kernel.

    Args:
        arrays: the array arguments of `quant_decode`, in order.
        k_bits: 1 to 8.
        v_bits: 1 to 8.

    Raises:
        Refused: see `triton_launch.check`.
    """
    q, k_codes, k_scale, _, v_codes, v_scale, *_ = arrays
    batch, dim, (kv_heads, k_slots) = q.shape[0], q.shape[3], k_codes.shape[1:3]
    common.check("quant_decode", q)
    v_slots, width, programs = v_codes.shape[2], power(dim), batch * kv_heads
    # A pool without a whole group has no scale, and nothing to attend to.
    k_group, v_group = k_slots // max(k_scale.shape[2], 1) or 1, dim // v_scale.shape[3]
    queries = common.rows(q, kv_heads).astype(common.product_type(q))
    # What registers hold: twice the tokens where operands and rows are short.
    tokens = 64 if queries.dtype.itemsize == 2 and width <= 128 else 32
    split = common.splits(programs, -(-min(k_slots, v_slots) // tokens))
    constants = {
        "HEADS": kv_heads,
        "ROWS": queries.shape[1],
        "BLOCK": common.ROWS,
        "DIM": dim,
        "WIDTH": width,
        "K_BITS": k_bits,
        "V_BITS": v_bits,
        "K_BYTES": k_codes.shape[3],
        "V_BYTES": v_codes.shape[3],
        "K_SLOTS": k_slots,
        "V_SLOTS": v_slots,
        "SLOTS": min(k_slots, v_slots),
        "K_GROUP": k_group,
        "V_GROUP": v_group,
        "K_RUN": common.run(k_group, tokens),
        "V_RUN": common.run(v_group, width),
        "TOKENS": tokens,
        "SPLITS": split,
        "SCALE": dim**-0.5,
        "BF16": queries.dtype.itemsize == 2,
    }
    grid = (programs, split, queries.shape[1] // common.ROWS)
    outputs = common.outputs(programs, split, queries.shape[1], dim)
    return common.Plan((queries, *arrays[1:]), outputs, grid, constants, num_warps=4, num_stages=2)
