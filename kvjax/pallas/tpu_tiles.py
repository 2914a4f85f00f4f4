"""What the TPU kernels share: products, an online softmax in refs, codes and halves in registers.

A kernel's grid is (batch, KV head, block of query rows, block of tokens); the last axis runs in
order, and the blocks of the outputs o, m, l stay in VMEM meanwhile, so that they accumulate there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax import quant
from kvjax.pallas import compat
from kvjax.pallas.partial import MASKED

ROWS = 256  # most query rows of a block


def dot(a: Array, b: Array, axes: tuple[int, int], dtype: Any) -> Array:
    """a . b over one axis of each, operands in `dtype`, summed in float32.

    A leading third axis of both is a batch. float32 operands are multiplied in full precision.
    """
    batch = ((0,), (0,)) if a.ndim == 3 else ((), ())
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((axes[0],), (axes[1],)), batch),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def work_dtype(*arrays: Array) -> Any:
    """The dtype of products: bfloat16 where all arrays are, else float32."""
    return jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in arrays) else jnp.float32


def clear(o: Any, m: Any, l: Any) -> None:  # noqa: E741
    """Start refs of an online softmax."""
    o[...] = jnp.zeros(o.shape, o.dtype)
    m[...] = jnp.full(m.shape, MASKED, m.dtype)
    l[...] = jnp.zeros(l.shape, l.dtype)


def soften(scores: Array, mask: Array, m: Any, l: Any) -> tuple[Array, Array]:  # noqa: E741
    """One step of an online softmax over the last axis.

    Args:
        scores: f32[..., R, S].
        mask: bool, broadcast to the scores.
        m: ref f32[..., R, 1], running maximum; updated.
        l: ref f32[..., R, 1], running sum; updated.

    Returns:
        p of the scores' shape, and the factor f32[..., R, 1] that earlier sums shrink by.
    """
    scores = jnp.where(mask, scores, MASKED)
    old = m[...]
    new = jnp.maximum(old, scores.max(-1, keepdims=True))
    p = jnp.where(mask, jnp.exp(scores - new), 0.0)
    shrink = jnp.exp(old - new)
    m[...] = new
    l[...] = l[...] * shrink + p.sum(-1, keepdims=True)
    return p, shrink


def iota(shape: tuple[int, ...], axis: int) -> Array:
    """i32 indices along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def turned(width: int) -> bool:
    """Whether rows of a long array [..., S, width] are best read as [..., width, S].

    XLA keeps such an array with S last where rows would not fill lines of 128 lanes. Then swapping
    the axes is free and a kernel that wants rows costs a copy of everything, padded.
    """
    return width % 128 != 0


def unpack(packed: Array, bits: int, size: int, axis: int) -> Array:
    """`quant.unpack` along an axis in registers: uint8 to i32; 8 must divide size."""
    packed, total, at = packed.astype(jnp.int32), None, 0
    for part, low in quant.parts(bits):
        width = size * part // 8
        byte = packed[:, at : at + width] if axis else packed[at : at + width]
        at += width
        runs = [(byte >> shift) & (2**part - 1) for shift in range(0, 8, part)]
        field = runs[0] if len(runs) == 1 else jnp.concatenate(runs, axis)
        total = field << low if total is None else total | (field << low)
    return total


def half_bits(x: Array) -> Array:
    """float16 as int16, a free view that Mosaic loads where it does not load float16."""
    return lax.bitcast_convert_type(x, jnp.int16)


def from_half_bits(bits: Array) -> Array:
    """Undo `half_bits` in registers, as float32; infinities and NaN become large numbers."""
    bits = bits.astype(jnp.int32)
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    value = jnp.where(size < 1 << 10, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -value, value)


def by_kv_head(q: Array, kv_heads: int) -> tuple[Array, int]:
    """Queries [B, N, T, H] as rows [B, K, R', H], zero rows added, and the rows of a block.

    A block is a multiple of 16 rows, the tile of a 16-bit type.
    """
    batch, heads, steps, dim = q.shape
    rows = heads // kv_heads * steps
    block = min(ROWS, -(-rows // 16) * 16)
    q = q.reshape(batch, kv_heads, rows, dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, -rows % block), (0, 0))), block


def from_kv_head(x: Array, heads: int, steps: int) -> Array:
    """Undo `by_kv_head` on a result [B, K, R', ...]: [B, N, T, ...]."""
    batch, kv_heads = x.shape[:2]
    x = x[:, :, : heads // kv_heads * steps]
    return x.reshape(batch, heads, steps, *x.shape[3:])


def call(
    kernel: Callable,
    grid: tuple[int, int, int, int],
    block: int,
    scalars: Sequence[Array],
    inputs: Sequence[tuple[Array, pl.BlockSpec]],
    widths: Sequence[int],
    scratch: Sequence[Any] = (),
    interpret: Any = False,
    others: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]] = (),
) -> list[Array]:
    """Run a decode kernel.

    Args:
        kernel: body; its refs are scalars, inputs, outputs, scratch.
        grid: batch, KV heads, blocks of query rows, blocks of tokens.
        block: query rows of a block.
        scalars: arrays in SMEM, also given to the index maps of the inputs.
        inputs: arrays and how they are cut.
        widths: last axis of each output.
        scratch: shapes.
        interpret: see pallas_call.
        others: further outputs.

    Returns:
        f32[B, K, R', width] for each width, and the others.
    """

    def out(width):
        return pl.BlockSpec((None, None, block, width), lambda b, h, r, j, *_: (b, h, r, 0))

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[*(out(width) for width in widths), *(spec for _, spec in others)],
            scratch_shapes=list(scratch),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*grid[:2], grid[2] * block, width), jnp.float32)
            for width in widths
        ]
        + [shape for shape, _ in others],
        compiler_params=compat.tpu_params(("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*scalars, *(x for x, _ in inputs))


def last_block(length: Array, block: int) -> Array:
    """The last block of tokens that a row reads, 0 where it has none."""
    return jnp.maximum((length + block - 1) // block - 1, 0)
