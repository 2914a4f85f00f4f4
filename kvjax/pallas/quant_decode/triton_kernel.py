"""The kernel of quant_decode in the Triton language."""

import triton
import triton.language as tl

from kvjax.pallas.triton_kernel import MASKED, product, share, soften, unpack


@triton.jit
def quant_decode(
    q_ptr,
    k_codes,
    k_scale,
    k_zero,
    v_codes,
    v_scale,
    v_zero,
    lengths,
    o_ptr,
    m_ptr,
    l_ptr,
    HEADS: tl.constexpr,  # KV heads
    ROWS: tl.constexpr,  # query rows, padded
    BLOCK: tl.constexpr,  # query rows of this program
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM as a power of two
    K_BITS: tl.constexpr,
    V_BITS: tl.constexpr,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    K_SLOTS: tl.constexpr,
    V_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,  # the fewer of both
    K_GROUP: tl.constexpr,  # tokens that share a key scale
    V_GROUP: tl.constexpr,  # channels that share a value scale
    K_RUN: tl.constexpr,  # power of two that divides K_GROUP
    V_RUN: tl.constexpr,  # and V_GROUP
    TOKENS: tl.constexpr,  # of an iteration
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    BF16: tl.constexpr,
):
    """Partial attention of a block of queries over one split of the tokens of a KV head."""
    head, split = tl.program_id(0), tl.program_id(1)
    lead = head.to(tl.int64)
    row = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = channel[None, :] < DIM
    place = (lead * ROWS + row[:, None]) * DIM + channel[None, :]
    q = tl.load(q_ptr + place, mask=inside, other=0.0)
    length = tl.minimum(tl.load(lengths + head // HEADS), SLOTS)
    begin, end = share(length, split, SPLITS, TOKENS)

    k_codes += lead * K_SLOTS * K_BYTES
    k_scale += lead * (K_SLOTS // K_GROUP) * DIM
    k_zero += lead * (K_SLOTS // K_GROUP) * DIM
    v_codes += lead * V_SLOTS * V_BYTES
    v_scale += lead * V_SLOTS * (DIM // V_GROUP)
    v_zero += lead * V_SLOTS * (DIM // V_GROUP)

    # Tiles have a third axis, along which a scale is constant: it is loaded once for all of it.
    k_first = (tl.arange(0, TOKENS // K_RUN) * K_RUN)[:, None, None]
    k_offset = k_first + tl.arange(0, K_RUN)[None, :, None]
    k_channel = channel[None, None, :]
    v_offset = tl.arange(0, TOKENS)[:, None, None]
    v_first = (tl.arange(0, WIDTH // V_RUN) * V_RUN)[None, :, None]
    v_channel = v_first + tl.arange(0, V_RUN)[None, None, :]

    m = tl.full((BLOCK,), MASKED, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)  # noqa: E741
    o = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(begin, end, TOKENS):
        at = (start + k_first) // K_GROUP * DIM + k_channel
        seen = (start + k_first < end) & (k_channel < DIM)
        step = tl.load(k_scale + at, mask=seen, other=0.0).to(tl.float32)
        zero = tl.load(k_zero + at, mask=seen, other=0.0).to(tl.float32)
        seen = (start + k_offset < end) & (k_channel < DIM)
        code = unpack(k_codes + (start + k_offset) * K_BYTES, k_channel, seen, K_BITS, DIM)
        keys = tl.reshape(code.to(tl.float32) * step + zero, (TOKENS, WIDTH))
        scores = product(q, tl.trans(keys), BF16) * SCALE
        visible = start + tl.arange(0, TOKENS) < end
        p, fade, m, l = soften(scores, visible, m, l)  # noqa: E741

        at = (start + v_offset) * (DIM // V_GROUP) + v_first // V_GROUP
        seen = (start + v_offset < end) & (v_first < DIM)
        step = tl.load(v_scale + at, mask=seen, other=0.0).to(tl.float32)
        zero = tl.load(v_zero + at, mask=seen, other=0.0).to(tl.float32)
        seen = (start + v_offset < end) & (v_channel < DIM)
        code = unpack(v_codes + (start + v_offset) * V_BYTES, v_channel, seen, V_BITS, DIM)
        values = tl.reshape(code.to(tl.float32) * step + zero, (TOKENS, WIDTH))
        o = o * fade[:, None] + product(p, values, BF16)

    lines = (lead * SPLITS + split) * ROWS + row
    tl.store(o_ptr + lines[:, None] * DIM + channel[None, :], o, mask=inside)
    tl.store(m_ptr + lines, m)
    tl.store(l_ptr + lines, l)
