"""The kernel of anchor_decode in the Triton language."""

import triton
import triton.language as tl

from kvjax.pallas.triton_kernel import MASKED, product, share, soften, unpack


@triton.jit
def popcount(word):
    """Set bits of uint32 words."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def tokens_anchors(index, gamma, ranges, token, seen, TOKENS: tl.constexpr, INDEX: tl.constexpr,
                   GAMMA: tl.constexpr):  # fmt: skip
    """Anchor and coefficient of each token, from the arrays of one side, head and turn."""
    if INDEX:
        which = unpack(index, token, seen, INDEX, TOKENS)
    else:
        which = tl.load(index + token, mask=seen, other=0).to(tl.int32)
    if GAMMA:
        code = unpack(gamma, token, seen, GAMMA, TOKENS).to(tl.float32)
        low, step = tl.load(ranges).to(tl.float32), tl.load(ranges + 1).to(tl.float32)
        factor = tl.where(seen, low + step * code, 0.0)
    else:
        factor = tl.load(gamma + token, mask=seen, other=0.0).to(tl.float32)
    return which, factor


@triton.jit
def rows(anchors, anchor_scales, window, mean, which, channel, seen, ANCHORS: tl.constexpr,
         DIM: tl.constexpr, SCALED: tl.constexpr, WINDOW: tl.constexpr,
         MEAN: tl.constexpr):  # fmt: skip
    """Rows of anchors f32[tokens, channels], relative to the mean; the window's come last."""
    held = (which < ANCHORS)[:, None]
    at = which[:, None] * DIM + channel
    if WINDOW:
        x = tl.load(anchors + at, mask=seen & held, other=0.0).to(tl.float32)
    else:
        x = tl.load(anchors + at, mask=seen, other=0.0).to(tl.float32)
    if SCALED:
        x *= tl.load(anchor_scales + which, mask=which < ANCHORS, other=0.0).to(tl.float32)[:, None]
    if WINDOW:
        near = seen & (which >= ANCHORS)[:, None]
        x += tl.load(window + at - ANCHORS * DIM, mask=near, other=0.0).to(tl.float32)
        if MEAN:
            x -= tl.load(mean + channel, mask=near, other=0.0).to(tl.float32)
    return x


@triton.jit
def residuals(words, prefix, codes, scales, factors, token, seen, channel, DIM: tl.constexpr,
              BYTES: tl.constexpr, BITS: tl.constexpr, FACTORS: tl.constexpr):  # fmt: skip
    """Residuals f32[tokens, channels] in the rotated space, zero where a token has none."""
    word = tl.load(words + token // 32, mask=seen, other=0)
    bit = (token % 32).to(tl.uint32)
    present = seen & (((word >> bit) & 1) != 0)
    below = (tl.full(token.shape, 1, tl.uint32) << bit) - 1
    slot = tl.load(prefix + token // 32, mask=seen, other=0).to(tl.int32) + popcount(word & below)
    scale = tl.load(scales + slot, mask=present, other=0)
    if scales.dtype.element_ty == tl.uint8:  # see quant.scale_decode
        exponent = (scale.to(tl.float32) - 157.0) / 12.0
        scale = tl.where(scale > 0, tl.exp2(exponent), 0.0)
    scale = scale.to(tl.float32)
    start = slot.to(tl.int64)[:, None] * BYTES
    code = unpack(codes + start, channel, present[:, None] & (channel < DIM), BITS, DIM)
    # The levels lie on an odd polynomial; a table would be a gather for every channel.
    x = code.to(tl.float32) * (2.0 / ((1 << BITS) - 1)) - 1.0
    level = tl.load(factors + FACTORS - 1)
    for i in tl.static_range(1, FACTORS):
        level = level * x * x + tl.load(factors + FACTORS - 1 - i)
    return level * x * scale[:, None]


@triton.jit
def anchor_decode(
    q_ptr,  # queries [P, ROWS, DIM]
    spun_ptr,  # queries in the residuals' space
    start_cos,  # [C / TOKENS, HALF], of the first token of a block
    start_sin,
    inner_cos,  # [TOKENS, HALF], of a token within its block
    inner_sin,
    anchors,
    anchor_scales,
    window,
    mean,
    index,
    gamma,
    ranges,
    words_0,
    prefix_0,
    codes_0,
    scales_0,
    factors_0,
    words_1,
    prefix_1,
    codes_1,
    scales_1,
    factors_1,
    lengths,
    o_ptr,
    r_ptr,  # sum of p r in the residuals' space
    m_ptr,
    l_ptr,
    HEADS: tl.constexpr,  # KV heads
    ROWS: tl.constexpr,  # query rows, padded
    BLOCK: tl.constexpr,  # query rows of this program
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM as a power of two
    HALF: tl.constexpr,  # pairs that turn
    HALF_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,  # of the channels that do not turn, 0 = none
    CAPACITY: tl.constexpr,  # C
    TURNS: tl.constexpr,  # J
    ANCHORS: tl.constexpr,  # A
    NEAR: tl.constexpr,  # W where the window is apart, else 0
    SCALED: tl.constexpr,
    MEAN: tl.constexpr,
    INDEX: tl.constexpr,  # bits, 0 = not packed
    GAMMA: tl.constexpr,
    INDEX_ROW: tl.constexpr,  # elements of a turn
    GAMMA_ROW: tl.constexpr,
    BITS_0: tl.constexpr,  # 0 = no residuals
    BYTES_0: tl.constexpr,
    SLOTS_0: tl.constexpr,
    FACTORS_0: tl.constexpr,
    BITS_1: tl.constexpr,
    BYTES_1: tl.constexpr,
    SLOTS_1: tl.constexpr,
    FACTORS_1: tl.constexpr,
    TOKENS: tl.constexpr,  # of an iteration
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    BF16: tl.constexpr,
):
    """Partial attention of a block of queries over one split of the coded tokens of a KV head."""
    head, split = tl.program_id(0), tl.program_id(1)
    lead, batch = head.to(tl.int64), (head // HEADS).to(tl.int64)
    row = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    lines = (lead * ROWS + row)[:, None] * DIM
    channel = tl.arange(0, WIDTH)[None, :]
    half = tl.arange(0, HALF_WIDTH)[None, :]
    turning = half < HALF
    q_here = tl.load(q_ptr + lines + half, mask=turning, other=0.0)
    q_ahead = tl.load(q_ptr + lines + HALF + half, mask=turning, other=0.0)
    length = tl.minimum(tl.load(lengths + head // HEADS), CAPACITY)
    begin, end = share(length, split, SPLITS, TOKENS)

    key = batch * 2 * HEADS + head % HEADS  # of arrays [B, 2, K, ...]
    value = key + HEADS
    m = tl.full((BLOCK,), MASKED, tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)  # noqa: E741
    o = tl.zeros((BLOCK, WIDTH), tl.float32)
    r = tl.zeros((BLOCK, WIDTH), tl.float32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        seen = token < end
        visible = seen[:, None]

        # The angle of a token is its block's and its own within the block: no sines here.
        block = start // TOKENS * HALF + half
        within = tl.arange(0, TOKENS)[:, None] * HALF + half
        cos = tl.load(start_cos + block, mask=turning, other=0.0)
        sin = tl.load(start_sin + block, mask=turning, other=0.0)
        own_cos = tl.load(inner_cos + within, mask=turning, other=0.0)
        own_sin = tl.load(inner_sin + within, mask=turning, other=0.0)
        cos, sin = cos * own_cos - sin * own_sin, sin * own_cos + cos * own_sin

        here = tl.zeros((TOKENS, HALF_WIDTH), tl.float32)
        ahead = tl.zeros((TOKENS, HALF_WIDTH), tl.float32)
        for turn in tl.static_range(TURNS):
            line = key * TURNS + turn
            which, factor = tokens_anchors(
                index + line * INDEX_ROW, gamma + line * GAMMA_ROW, ranges + line * 2, token,
                seen, CAPACITY, INDEX, GAMMA,
            )  # fmt: skip
            at, near = anchors + key * ANCHORS * DIM, window + key * NEAR * DIM
            scales, middle = anchor_scales + key * ANCHORS, mean + key * DIM
            some = visible & turning
            here += factor[:, None] * rows(
                at, scales, near, middle, which, half, some, ANCHORS, DIM, SCALED, NEAR, MEAN
            )
            ahead += factor[:, None] * rows(
                at, scales, near, middle, which, HALF + half, some, ANCHORS, DIM, SCALED, NEAR, MEAN
            )
        if MEAN:
            here += tl.load(mean + key * DIM + half, mask=turning, other=0.0).to(tl.float32)
            ahead += tl.load(mean + key * DIM + HALF + half, mask=turning, other=0.0).to(tl.float32)
        scores = product(q_here, tl.trans(here * cos - ahead * sin), BF16)
        scores += product(q_ahead, tl.trans(ahead * cos + here * sin), BF16)
        if REST_WIDTH:
            rest = tl.arange(0, REST_WIDTH)[None, :]
            inside = 2 * HALF + rest < DIM
            q_rest = tl.load(q_ptr + lines + 2 * HALF + rest, mask=inside, other=0.0)
            keys = tl.zeros((TOKENS, REST_WIDTH), tl.float32)
            for turn in tl.static_range(TURNS):
                line = key * TURNS + turn
                which, factor = tokens_anchors(
                    index + line * INDEX_ROW, gamma + line * GAMMA_ROW, ranges + line * 2, token,
                    seen, CAPACITY, INDEX, GAMMA,
                )  # fmt: skip
                keys += factor[:, None] * rows(
                    anchors + key * ANCHORS * DIM, anchor_scales + key * ANCHORS,
                    window + key * NEAR * DIM, mean + key * DIM, which, 2 * HALF + rest,
                    visible & inside, ANCHORS, DIM, SCALED, NEAR, MEAN,
                )  # fmt: skip
            if MEAN:
                at = mean + key * DIM + 2 * HALF + rest
                keys += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            scores += product(q_rest, tl.trans(keys), BF16)
        if BITS_0:
            spun = tl.load(spun_ptr + lines + channel, mask=channel < DIM, other=0.0)
            line = key * (CAPACITY // 32)
            extra = residuals(
                words_0 + line, prefix_0 + line, codes_0 + batch * SLOTS_0 * BYTES_0,
                scales_0 + batch * SLOTS_0, factors_0, token, seen, channel, DIM, BYTES_0, BITS_0,
                FACTORS_0,
            )  # fmt: skip
            if BITS_1:
                extra += residuals(
                    words_1 + line, prefix_1 + line, codes_1 + batch * SLOTS_1 * BYTES_1,
                    scales_1 + batch * SLOTS_1, factors_1, token, seen, channel, DIM, BYTES_1,
                    BITS_1, FACTORS_1,
                )  # fmt: skip
            scores += product(spun, tl.trans(extra), BF16)
        p, fade, m, l = soften(scores * SCALE, seen, m, l)  # noqa: E741

        values = tl.zeros((TOKENS, WIDTH), tl.float32)
        for turn in tl.static_range(TURNS):
            line = value * TURNS + turn
            which, factor = tokens_anchors(
                index + line * INDEX_ROW, gamma + line * GAMMA_ROW, ranges + line * 2, token,
                seen, CAPACITY, INDEX, GAMMA,
            )  # fmt: skip
            values += factor[:, None] * rows(
                anchors + value * ANCHORS * DIM, anchor_scales + value * ANCHORS,
                window + value * NEAR * DIM, mean + value * DIM, which, channel,
                visible & (channel < DIM), ANCHORS, DIM, SCALED, NEAR, MEAN,
            )  # fmt: skip
        o = o * fade[:, None] + product(p, values, BF16)
        if BITS_0:
            line = value * (CAPACITY // 32)
            extra = residuals(
                words_0 + line, prefix_0 + line, codes_0 + batch * SLOTS_0 * BYTES_0,
                scales_0 + batch * SLOTS_0, factors_0, token, seen, channel, DIM, BYTES_0, BITS_0,
                FACTORS_0,
            )  # fmt: skip
            if BITS_1:
                extra += residuals(
                    words_1 + line, prefix_1 + line, codes_1 + batch * SLOTS_1 * BYTES_1,
                    scales_1 + batch * SLOTS_1, factors_1, token, seen, channel, DIM, BYTES_1,
                    BITS_1, FACTORS_1,
                )  # fmt: skip
            r = r * fade[:, None] + product(p, extra, BF16)

    lines = (lead * SPLITS + split) * ROWS + row
    at = lines[:, None] * DIM + channel
    tl.store(o_ptr + at, o, mask=channel < DIM)
    tl.store(r_ptr + at, r, mask=channel < DIM)
    tl.store(m_ptr + lines, m)
    tl.store(l_ptr + lines, l)
