"""anchor_decode on TPU: one-hot products where a GPU would gather.

A block of tokens lies on the lanes. Its anchors are a product of the head's anchors with one-hot
columns, its residual slots come from the bit mask by a population count, and the residuals whose
slots the block can touch are two blocks of rows, which a one-hot product spreads over the tokens.
RoPE turns keys by their places in the block, and queries back by the block's position.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax import quant
from kvjax.pallas import tpu_tiles as tiles
from kvjax.pallas.anchor_decode import xla
from kvjax.pallas.dispatch import Refused
from kvjax.rope import Rope, tables

_BLOCK = 256  # tokens of a grid step; a multiple of 128 and 32
_LANES = 128


class _Plan(NamedTuple):
    """What is static about a call."""

    kv_heads: int
    size: int  # tokens of a block
    blocks: int
    tokens: int  # C
    half: int  # pairs of dimensions that RoPE turns
    window: int  # anchors of the separate window, 0 = none
    index: int  # bits of a packed anchor index, 0 = unpacked
    gamma: int  # bits of a packed coefficient, 0 = unpacked
    bits: tuple[int, ...]  # of each kind of residuals
    rows: tuple[int, ...]  # residuals of a block, of each kind
    dtype: Any  # of the products

    def head(self) -> Array:
        """Number of this (batch row, KV head)."""
        return pl.program_id(0) * self.kv_heads + pl.program_id(1)


def anchor_decode(
    q: Array, coded, *, widths, rope: Rope, block: int = _BLOCK, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """See `api.anchor_decode`.

    What grows with tokens or residuals is read as it is stored; only packed indices and
    coefficients are padded to lines of 128 bytes where they do not fill them. float16 is viewed as
    int16, as Mosaic has no float16. Converted before the kernel are scales of anchors, ranges of
    coefficients, means, and the counts before each word. The sine of a position is made of those
    of its block and of its place there, so far contexts differ from one angle's by its rounding.

    Raises:
        Refused: for a head_dim that is no multiple of 8.
    """
    batch, heads, steps, dim = q.shape
    if dim % 8:
        raise Refused(
            f"anchor_decode has no impl='tpu' for head_dim={dim}: it must be a multiple of 8;"
            " impl='xla' takes any."
        )
    kv_heads = coded.anchors.shape[2]
    tokens = coded.index.shape[-1] * 8 // (widths.index or 8)
    size = min(block, tokens)
    spin = quant.rotation(dim, widths.seed)
    queries, rows = tiles.by_kv_head(q.astype(jnp.float32) * dim**-0.5, kv_heads)
    plan = _Plan(
        kv_heads, size, pl.cdiv(tokens, size), tokens, len(rope.inv_freq),
        0 if coded.window is None else coded.window.shape[3], widths.index, widths.gamma,
        widths.residuals[: len(coded.residuals)],
        tuple(min(size, r.codes.shape[1]) for r in coded.residuals), tiles.work_dtype(q),
    )  # fmt: skip
    give = _Inputs([], [], plan)
    give.of_rows("q", queries, rows)
    if plan.bits:
        spun = jnp.einsum("bkrh,hi->bkri", queries, spin, precision=lax.Precision.HIGHEST)
        give.of_rows("spun", spun.astype(plan.dtype), rows)
    _give_tables(give, rope)
    _give_anchors(give, coded)
    _give_coding(give, coded)
    for r, residuals in enumerate(coded.residuals):
        _give_residuals(give.add, r, residuals, plan)
    starts = [_starts(residuals, size).reshape(-1) for residuals in coded.residuals]
    first = jnp.concatenate(starts) if starts else jnp.zeros((1,), jnp.int32)
    ranges = coded.gamma_range if widths.gamma else jnp.zeros((1,))

    anchors = -(-(coded.anchors.shape[3] + plan.window) // 16) * 16
    o, m, l, *turned = tiles.call(  # noqa: E741
        functools.partial(_kernel, plan=plan, names=tuple(give.names)),
        (batch, kv_heads, queries.shape[2] // rows, plan.blocks),
        rows,
        (coded.lengths, first, ranges.astype(jnp.float32).reshape(-1)),
        give.inputs,
        (dim, 1, 1, *([dim] if plan.bits else [])),
        (
            pltpu.VMEM((anchors, dim), plan.dtype),
            pltpu.VMEM((anchors, dim), plan.dtype),
            pltpu.VMEM((rows, anchors), jnp.float32),
            pltpu.VMEM((rows, size), jnp.float32),
        ),
        interpret,
    )
    if coded.mean is not None:
        o += l * coded.mean[:, 1, :, None].astype(jnp.float32)
    for x in turned:
        o += jnp.einsum("bkri,hi->bkrh", x, spin, precision=lax.Precision.HIGHEST)
    o, m, l = (tiles.from_kv_head(x, heads, steps) for x in (o, m, l))  # noqa: E741
    return o, m[..., 0], l[..., 0]


class _Inputs(NamedTuple):
    """The inputs of the kernel: what they are called, and how they are cut."""

    names: list[str]
    inputs: list[tuple[Array, pl.BlockSpec]]
    plan: _Plan

    def here(self, j: Array, b: Array, lengths: Any) -> Array:
        """The block of tokens that step j reads: it stops at the row's last."""
        return jnp.minimum(j, tiles.last_block(lengths[b], self.plan.size))

    def add(self, name: str, x: Array, shape: tuple, at: Any) -> None:
        """An array cut by any index map."""
        self.names.append(name)
        self.inputs.append((x, pl.BlockSpec(shape, at)))

    def whole(self, name: str, x: Array) -> None:
        """Both sides of a head, [B, 2, K, ...]."""
        shape = (None, 2, None, *x.shape[3:])
        self.add(name, x, shape, lambda b, h, *_: (b, 0, h, *[0] * (len(shape) - 3)))

    def along(self, name: str, x: Array) -> None:
        """Both sides of a head and the block's tokens, [B, 2, K, J, C]."""
        shape = (None, 2, None, x.shape[3], self.plan.size)
        self.add(name, x, shape, lambda b, h, r, j, s, *_: (b, 0, h, 0, self.here(j, b, s)))

    def of_rows(self, name: str, x: Array, rows: int) -> None:
        """The block's query rows, [B, K, R', H]."""
        shape = (None, None, rows, x.shape[3])
        self.add(name, x, shape, lambda b, h, r, *_: (b, h, r, 0))


def _give_tables(give: _Inputs, rope: Rope) -> None:
    """The sines of the block's first position, and of the places in a block."""
    cos, sin, near_cos, near_sin = _tables(rope, give.plan.blocks, give.plan.size)
    for name, table in (("cos", cos), ("sin", sin)):
        shape = (None, *table.shape[1:])
        give.add(name, table, shape, lambda b, h, r, j, s, *_: (give.here(j, b, s), 0, 0))
    for name, table in (("near_cos", near_cos), ("near_sin", near_sin)):
        give.add(name, table, table.shape, lambda *_: (0, 0))


def _give_anchors(give: _Inputs, coded: Any) -> None:
    """The anchors of a head, their scales, the window and the mean, where there are any."""
    give.whole("anchors", coded.anchors)
    if coded.anchor_scales is not None:
        give.whole("anchor_scales", coded.anchor_scales.astype(jnp.float32)[..., None])
    if coded.window is not None:
        give.whole("window", coded.window)
    if coded.mean is not None:
        mean = coded.mean.astype(jnp.float32)
        give.whole("mean_row", mean[:, :, :, None])
        give.whole("mean_column", mean[..., None])


def _give_coding(give: _Inputs, coded: Any) -> None:
    """Indices and coefficients: the block's where unpacked, all bytes of the head where packed."""
    plan = give.plan
    for name, x, bits in (("index", coded.index, plan.index), ("gamma", coded.gamma, plan.gamma)):
        if bits:
            lanes = -(-max(x.shape[-1], plan.size + _LANES) // _LANES) * _LANES
            give.whole(name, jnp.pad(x, [(0, 0)] * 4 + [(0, lanes - x.shape[-1])]))
        else:
            give.along(name, tiles.half_bits(x) if x.dtype == jnp.float16 else x)


def _give_residuals(give: Any, r: int, residuals: Any, plan: _Plan) -> None:
    """The inputs of residuals r: words, counts, and for each side an even and an odd block."""
    words = residuals.words.shape[-1]
    held = min(_LANES, words)

    def word(b, h, _, j, lengths, *__):
        j = jnp.minimum(j, tiles.last_block(lengths[b], plan.size))
        return b, 0, h, 0, j * plan.size // 32 // held

    shape = (None, 2, None, 1, held)
    bits = lax.bitcast_convert_type(residuals.words, jnp.int32)
    give(f"words{r}", bits[:, :, :, None], shape, word)
    give(f"prefix{r}", residuals.prefix.astype(jnp.int32)[:, :, :, None], shape, word)
    codes, scales, rows = residuals.codes, residuals.scales, plan.rows[r]
    last = pl.cdiv(codes.shape[1], rows) - 1
    turned = tiles.turned(codes.shape[2])
    if turned:
        codes = codes.swapaxes(1, 2)
    if scales.dtype == jnp.float16:
        scales = tiles.half_bits(scales)
    batch = codes.shape[0]
    for side in (0, 1):
        for odd in (0, 1):

            def at(b, h, _, j, lengths, first, *__, side=side, odd=odd):
                j = jnp.minimum(j, tiles.last_block(lengths[b], plan.size))
                row = ((r * batch + b) * 2 + side) * plan.kv_heads + h
                block = _near(first[row * (plan.blocks + 1) + j] // rows, odd)
                return b, jnp.minimum(block, last)

            def lanes(*args, at=at):
                b, block = at(*args)
                return b, 0, block

            def lines(*args, at=at):
                return *at(*args), 0

            width = residuals.codes.shape[2]
            shape = (None, width, rows) if turned else (None, rows, width)
            give(f"codes{r}{side}{odd}", codes, shape, lanes if turned else lines)
            give(f"scales{r}{side}{odd}", scales[:, None], (None, 1, rows), lanes)


def _near(block: Array, odd: int) -> Array:
    """The even or the odd one of `block` and `block + 1`.

    So each of two operands meets every block of its kind once, and none is copied twice.
    """
    return block // 2 * 2 + 1 if odd else (block + 1) // 2 * 2


def _starts(residuals: Any, size: int) -> Array:
    """Slot before each block of tokens, and the last one's end: i32[B, 2, K, blocks + 1]."""
    prefix = residuals.prefix.astype(jnp.int32)
    end = prefix[..., -1:] + lax.population_count(residuals.words[..., -1:]).astype(jnp.int32)
    return jnp.concatenate([prefix[..., :: size // 32], end], -1)


def _tables(rope: Rope, blocks: int, size: int) -> tuple[Array, ...]:
    """cos, sin of the blocks' first positions f32[blocks, 1, R/2], and of places f32[R/2, size]."""
    first = jnp.arange(blocks, dtype=jnp.int32) * size
    plain = Rope(rope.inv_freq)
    near = tables(plain, jnp.arange(size, dtype=jnp.int32))
    return *(x[:, None] for x in tables(rope, first)), *(x.T for x in near)


def _kernel(lengths, first, ranges, *refs, plan, names):
    given = dict(zip(names, refs, strict=False))
    outputs, scratch = refs[len(names) : -4], refs[-4:]
    o, m, l = outputs[:3]  # noqa: E741
    near, far, bins, scores = scratch
    j = pl.program_id(3)
    left = lengths[pl.program_id(0)] - j * plan.size

    @pl.when(j == 0)
    def _():
        tiles.clear(o, m, l)
        bins[...] = jnp.zeros(bins.shape, bins.dtype)
        for out in outputs[3:]:
            out[...] = jnp.zeros(out.shape, out.dtype)
        for side, table in enumerate((near, far)):
            table[...] = _table(given, side, table.shape).astype(table.dtype)

    @pl.when(left > 0)
    def _():
        keys = _keys(given, ranges, near, plan)
        scores[...] = tiles.dot(_queries(given, plan), keys, (1, 0), plan.dtype)
        for r in range(len(plan.bits)):
            for slot, use in _residuals(given, first, r, 0, plan):

                def see(levels, scale, axis, ids, slot=slot):
                    seen = tiles.dot(given["spun"][...], levels, (1, 1 - axis), plan.dtype)
                    hot = ids == slot
                    scores[...] += tiles.dot(seen * scale, hot, (1, 0), plan.dtype)

                use(see)
        valid = tiles.iota(scores.shape, 1) < left
        p, shrink = tiles.soften(scores[...], valid, m, l)
        total = bins[...] * shrink
        for turn in range(given["index"].shape[1]):
            index, gamma = _coding(given, ranges, 1, turn, plan)
            hot = tiles.iota((bins.shape[1], plan.size), 0) == index
            weight = jnp.where(valid, p * gamma, 0.0)
            total += tiles.dot(weight, hot, (1, 1), plan.dtype)
        bins[...] = total
        for out in outputs[3:]:
            out[...] = out[...] * shrink
        for r in range(len(plan.bits)):
            for slot, use in _residuals(given, first, r, 1, plan):

                def weigh(levels, scale, axis, ids, slot=slot):
                    hot = ids == slot
                    weight = tiles.dot(p, hot, (1, 1), plan.dtype) * scale
                    outputs[3][...] += tiles.dot(weight, levels, (1, axis), plan.dtype)

                use(weigh)

    @pl.when(j == plan.blocks - 1)
    def _():
        o[...] = tiles.dot(bins[...], far[...], (1, 0), plan.dtype)


def _table(given: dict, side: int, shape: tuple[int, int]) -> Array:
    """All anchors of a head's side as values f32[anchors, H], the window's last, then zeros."""
    parts = [given["anchors"][side].astype(jnp.float32)]
    if "anchor_scales" in given:
        parts[0] = parts[0] * given["anchor_scales"][side]
    if "window" in given:
        window = given["window"][side].astype(jnp.float32)
        parts.append(window - given["mean_row"][side] if "mean_row" in given else window)
    missing = shape[0] - sum(part.shape[0] for part in parts)
    if missing:
        parts.append(jnp.zeros((missing, shape[1]), jnp.float32))
    table = parts[0] if len(parts) == 1 else jnp.concatenate(parts, 0)
    # Unused slots may hold anything, and a one-hot product reads them all.
    return jnp.where(jnp.abs(table) < math.inf, table, 0.0)


def _keys(given: dict, ranges: Any, table: Any, plan: _Plan) -> Array:
    """The block's keys without residuals, rotated by their places in it: f32[H, tokens]."""
    keys = given["mean_column"][0] if "mean_column" in given else 0.0
    for turn in range(given["index"].shape[1]):
        index, gamma = _coding(given, ranges, 0, turn, plan)
        hot = tiles.iota((table.shape[0], plan.size), 0) == index
        keys = keys + tiles.dot(table[...], hot, (0, 0), plan.dtype) * gamma
    a, b, rest = keys[: plan.half], keys[plan.half : 2 * plan.half], keys[2 * plan.half :]
    cos, sin = given["near_cos"][...], given["near_sin"][...]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(turned + [rest] * (rest.shape[0] > 0), 0)


def _queries(given: dict, plan: _Plan) -> Array:
    """The queries as they meet keys at their places in the block: turned back by its position."""
    q, cos, sin = given["q"][...], given["cos"][...], given["sin"][...]
    a, b, rest = q[:, : plan.half], q[:, plan.half : 2 * plan.half], q[:, 2 * plan.half :]
    turned = [a * cos + b * sin, b * cos - a * sin]
    return jnp.concatenate(turned + [rest] * (rest.shape[1] > 0), 1)


def _coding(given: dict, ranges: Any, side: int, turn: int, plan: _Plan) -> tuple[Array, Array]:
    """The block's anchors i32[1, tokens] and coefficients f32[1, tokens] of one turn."""
    index, gamma = given["index"], given["gamma"]
    turns = index.shape[1]
    if plan.index:
        at = _packed(index, side, turn, plan.index, plan)
    else:
        at = index[side, turn : turn + 1].astype(jnp.int32)
    if not plan.gamma:
        stored = gamma[side, turn : turn + 1]
        if stored.dtype == jnp.int16:
            return at, tiles.from_half_bits(stored)
        return at, stored.astype(jnp.float32)
    code = _packed(gamma, side, turn, plan.gamma, plan)
    b, h = pl.program_id(0), pl.program_id(1)
    row = (((b * 2 + side) * plan.kv_heads + h) * turns + turn) * 2
    return at, ranges[row] + ranges[row + 1] * code.astype(jnp.float32)


def _packed(ref: Any, side: int, turn: int, bits: int, plan: _Plan) -> Array:
    """The block's codes i32[1, tokens] from the bytes of all tokens.

    A byte holds codes of tokens far apart, so that a block lies in one run of bytes or, where it
    crosses the end of the row, in the end of one and the start of the next. Runs start anywhere:
    the lines of 128 around one are loaded and rolled.
    """
    length, room = ref.shape[-1], plan.size + _LANES if plan.size % _LANES == 0 else ref.shape[-1]
    total, at = jnp.zeros((1, plan.size), jnp.int32), 0
    token = pl.program_id(3) * plan.size + tiles.iota((1, plan.size), 1)
    for part, low in quant.parts(bits):
        width = plan.tokens * part // 8
        run = pl.program_id(3) * plan.size // width
        for k in range(-(-plan.size // width) + (width % plan.size > 0)):
            start = at + pl.program_id(3) * plan.size - (run + k) * width
            line = jnp.clip(start // _LANES, 0, (length - room) // _LANES) * _LANES
            held = ref[side, turn : turn + 1, pl.ds(pl.multiple_of(line, _LANES), room)]
            held = pltpu.roll(held.astype(jnp.int32), (line - start) % room, 1)[:, : plan.size]
            code = (held >> (part * jnp.minimum(run + k, 8 // part - 1))) & (2**part - 1)
            total = jnp.where(token // width == run + k, total | (code << low), total)
        at += width
    return total


def _residuals(given: dict, first: Any, r: int, side: int, plan: _Plan):
    """For both blocks of residuals: the slots of the tokens i32[1, tokens], and a way to use it.

    A token without a residual has slot -1. `use(body)` calls body(levels, scale, axis, ids) where
    the block holds a residual of these tokens: levels are f32 with the residuals on `axis`, scale
    is f32[1, n], ids i32[n, 1] are their slots.
    """
    j, rows = pl.program_id(3), plan.rows[r]
    row = (r * pl.num_programs(0) * 2 + pl.program_id(0) * 2 + side) * plan.kv_heads
    row = (row + pl.program_id(1)) * (plan.blocks + 1) + j
    low, high = first[row], first[row + 1]
    slot = _slots(given[f"words{r}"][side], given[f"prefix{r}"][side], plan)
    for odd in (0, 1):
        start = _near(low // rows, odd) * rows

        def use(body, odd=odd, start=start):
            @pl.when((start < high) & (start + rows > low))
            def _():
                codes, scale = given[f"codes{r}{side}{odd}"], given[f"scales{r}{side}{odd}"][...]
                bits, dim = plan.bits[r], given["q"].shape[1]
                axis = int(tiles.turned(quant.packed_size(dim, bits)))
                levels = xla.levels(tiles.unpack(codes[...], bits, dim, 1 - axis), bits)
                if scale.dtype == jnp.int16:
                    scale = tiles.from_half_bits(scale)
                else:
                    scale = quant.scale_decode(scale.astype(jnp.int32))
                lane = start + tiles.iota((1, rows), 1)
                scale = jnp.where((lane >= low) & (lane < high), scale, 0.0)
                body(levels, scale, axis, start + tiles.iota((rows, 1), 0))

        yield slot, use


def _slots(words: Array, prefix: Array, plan: _Plan) -> Array:
    """Residual slot of each token of the block, -1 without one: i32[1, tokens].

    Args:
        words: i32[1, n], the bit mask around the block.
        prefix: i32[1, n], set bits before each word.
        plan: of the call.
    """
    held = words.shape[1]
    token = pl.program_id(3) * plan.size + tiles.iota((1, plan.size), 1)
    base = pl.program_id(3) * plan.size // 32 // held * held
    hot = tiles.iota((held, plan.size), 0) == token // 32 - base
    line = tiles.iota((8, held), 0)
    low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
    # Halves of words and counts are whole numbers that float32 holds exactly.
    rows = jnp.where(line == 0, low, jnp.where(line == 1, high, jnp.where(line == 2, prefix, 0)))
    own = tiles.dot(rows.astype(jnp.float32), hot, (1, 0), jnp.float32).astype(jnp.int32)
    word, bit = own[0:1] | (own[1:2] << 16), token % 32
    x = word & ((1 << bit) - 1)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    before = ((x * 0x01010101) >> 24) & 0xFF
    return jnp.where(((word >> bit) & 1) == 1, own[2:3] + before, -1)
