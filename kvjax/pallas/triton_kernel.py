"""Device functions that the kernels in the Triton language share; imported only to launch one."""

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)


@triton.jit
def part(row, entry, mask, PART: tl.constexpr, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    """A part of PART bits of the codes, in place; parts lie one after the other in a row."""
    count: tl.constexpr = SIZE * PART // 8
    byte = tl.load(row + SIZE * SHIFT // 8 + entry % count, mask=mask, other=0).to(tl.int32)
    return ((byte >> (entry // count * PART)) & ((1 << PART) - 1)) << SHIFT


@triton.jit
def unpack(row, entry, mask, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Codes i32 at the entries of a packed axis of SIZE codes, as `quant.pack` lays them out.

    Every entry reads its own byte: entries that share one meet in the cache, and the tile has the
    axis in order.
    """
    code = 0
    if BITS == 8:
        code += part(row, entry, mask, 8, 0, SIZE)
    if BITS & 4:
        code += part(row, entry, mask, 4, 0, SIZE)
    if BITS & 2:
        code += part(row, entry, mask, 2, BITS & 4, SIZE)
    if BITS & 1:
        code += part(row, entry, mask, 1, BITS & 6, SIZE)
    return code


@triton.jit
def share(length, split, SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """First token and end of a split: whole blocks, by the row's length and not the capacity."""
    each = tl.cdiv(tl.cdiv(length, TOKENS), SPLITS) * TOKENS
    begin = split * each
    return begin, tl.minimum(length, begin + each)


@triton.jit
def product(a, b, BF16: tl.constexpr):
    """a . b in float32; six products make up for the short mantissa of float32 operands."""
    if BF16:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), out_dtype=tl.float32)
    else:
        return tl.dot(a, b, input_precision="bf16x6", out_dtype=tl.float32)


@triton.jit
def soften(scores, visible, m, l):  # noqa: E741
    """One step of an online softmax: p, the factor of earlier sums, and the new m and l."""
    scores = tl.where(visible[None, :], scores, MASKED)
    top = tl.maximum(m, tl.max(scores, 1))
    p = tl.where(visible[None, :], tl.exp(scores - top[:, None]), 0.0)
    fade = tl.exp(m - top)
    return p, fade, top, l * fade + tl.sum(p, 1)
