"""anchor_decode as a GPU kernel: keys are rebuilt a tile at a time, values never.

The cosine of a position is that of its tile and of its place in the tile: both tables are small,
where one row a token would be more bytes than the token.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax import quant
from kvjax.pallas import split_k
from kvjax.pallas.anchor_decode import xla
from kvjax.pallas.dispatch import Refused
from kvjax.rope import Rope, tables


def anchor_decode(
    q: Array, coded: Any, *, widths: Any, rope: Rope, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """See `api.anchor_decode`."""
    batch, _, steps, dim = q.shape
    kv_heads, kind = coded.index.shape[2], split_k.exact(q.dtype)
    if kind == jnp.float32 and dim > 128:  # registers spill
        raise Refused(
            f"anchor_decode's GPU kernel: head_dim {dim} of {q.dtype} must be at most 128, or"
            " bfloat16."
        )
    block = 16 if kind == jnp.float32 else 32
    half, turns = len(rope.inv_freq), coded.index.shape[3]
    total = coded.index.shape[-1] * 8 // widths.index if widths.index else coded.index.shape[-1]
    # The anchors alone are decoded outside: a few rows, not a row a token.
    plain = coded.anchor_scales is None and coded.window is None
    anchors = coded.anchors if plain else xla.dense_anchors(coded)
    bits_of = widths.residuals
    if widths.staged:
        bits_of = bits_of[:1] * len(coded.residuals)
    stored = [(r, b) for r, b in zip(coded.residuals, bits_of, strict=False) if r.codes.shape[1]]

    sides = {"anchors": anchors, "index": coded.index, "gamma": coded.gamma}
    sides |= {"range": coded.gamma_range, "mean": coded.mean}
    sides = {name: split_k.of_sides(x) for name, x in sides.items() if x is not None}
    for i, (r, _) in enumerate(stored):
        sides[f"words{i}"], sides[f"prefix{i}"] = map(split_k.of_sides, (r.words, r.prefix))
        sides[f"codes{i}"], sides[f"scales{i}"] = map(split_k.of_row, (r.codes, r.scales))
    spins = _spins(rope, total, block)
    sides |= {f"spin{i}": split_k.whole(x) for i, x in enumerate(spins)}

    parts = [(0, half), (half, half), (2 * half, dim - 2 * half)]
    queries = [q[..., first : first + size] for first, size in parts if size]
    if stored:
        spin = quant.rotation(dim, widths.seed)
        queries.append((q.astype(jnp.float32) @ spin).astype(q.dtype))

    def tile(queries, refs, head):
        ref = dict(zip(sides, refs, strict=True))

        def pick(side, turn, at):  # i32[width], f32[width]: a token's anchor and coefficient
            where = (side, turn)
            at = jnp.minimum(at, total - 1)
            if widths.index:
                index = split_k.packed(ref["index"], where, at, widths.index, total)
            else:
                index = split_k.gather(ref["index"], *where, at).astype(jnp.int32)
            if widths.gamma:
                gamma = split_k.packed(ref["gamma"], where, at, widths.gamma, total)
                low, step = (ref["range"][(*where, i)].astype(jnp.float32) for i in (0, 1))
                return index, low + step * gamma.astype(jnp.float32)
            return index, split_k.gather(ref["gamma"], *where, at).astype(jnp.float32)

        def anchor(side, index, size, first=0):
            column = split_k.columns(size, first)[None]
            return split_k.gather(ref["anchors"], side, index[:, None], column).astype(jnp.float32)

        def residual(i, bits, side, at):  # levels [width, power(H)], scale f32[width] or 0
            at = jnp.minimum(at, total - 1)
            word = split_k.gather(ref[f"words{i}"], side, at // 32)
            bit = (at % 32).astype(jnp.uint32)
            below = word & ((jnp.uint32(1) << bit) - jnp.uint32(1))
            slot = split_k.gather(ref[f"prefix{i}"], side, at // 32).astype(jnp.int32)
            slot += split_k.count_bits(below)
            present = ((word >> bit) & jnp.uint32(1)) == 1
            slot = jnp.where(present, slot, 0)
            code = split_k.codes(ref[f"codes{i}"], slot, bits, dim, split_k.columns(dim))
            stored = split_k.gather(ref[f"scales{i}"], jnp.minimum(slot, _last(ref, i)))
            return xla.levels(code, bits), jnp.where(present, xla.scale_values(stored), 0.0)

        def scores(start, at):
            picked = [pick(0, turn, at) for turn in range(turns)]
            pieces = []
            for first, size in parts:
                if not size:
                    continue
                piece = sum(gamma[:, None] * anchor(0, index, size, first)
                            for index, gamma in picked)  # fmt: skip
                if "mean" in ref:
                    mean = split_k.gather(ref["mean"], 0, split_k.columns(size, first))
                    piece += mean.astype(jnp.float32)[None]
                pieces.append(piece)
            row, column = start // block, split_k.columns(half)
            fine = at[:, None] - start
            here, there = (
                split_k.gather(ref[f"spin{i}"], row, column)[None] for i in (0, 1)
            )  # cos, sin of the tile
            near, far = (split_k.gather(ref[f"spin{i}"], fine, column[None]) for i in (2, 3))
            cos, sin = here * near - there * far, there * near + here * far
            a, b = pieces[:2]
            pieces[:2] = a * cos - b * sin, b * cos + a * sin
            s = sum(split_k.dot_rows(x, y, kind) for x, y in zip(queries, pieces, strict=False))
            for i, (_, bits) in enumerate(stored):
                level, scale = residual(i, bits, 0, at)
                s += split_k.dot_rows(queries[-1], level, kind) * scale[None]
            return s * dim**-0.5

        def weigh(p, start, at, live):
            near = 0.0
            for turn in range(turns):
                index, gamma = pick(1, turn, at)
                gamma = jnp.where(live, gamma, 0.0)
                near += split_k.dot(p * gamma[None], anchor(1, index, dim), kind)
            out = [near]
            if stored:
                spun = 0.0
                for i, (_, bits) in enumerate(stored):
                    level, scale = residual(i, bits, 1, at)
                    spun += split_k.dot(p * jnp.where(live, scale, 0.0)[None], level, kind)
                out.append(spun)
            return tuple(out)

        return split_k.Tile(scores, weigh)

    def _last(ref, i):
        return ref[f"scales{i}"].shape[0] - 1

    o, m, l = split_k.decode(  # noqa: E741
        "anchor_decode", tile, queries, list(sides.values()),
        jnp.broadcast_to(coded.lengths[:, None, None], (batch, kv_heads, steps)),
        steps=steps, tokens=block, block=block, capacity=total,
        widths=[dim] * (1 + bool(stored)), interpret=interpret,
        num_warps=4 if dim <= 64 else 8, num_stages=1,
    )  # fmt: skip
    out = o[0] + o[1] @ spin.T if stored else o[0]
    if coded.mean is not None:
        mean = jnp.repeat(coded.mean[:, 1].astype(jnp.float32), q.shape[1] // kv_heads, 1)
        out += l[..., None] * mean[:, :, None]
    return out, m, l


def _spins(rope: Rope, tokens: int, block: int) -> tuple[Array, ...]:
    """cos, sin of the tiles' first positions f32[tiles, half], and of the places in a tile."""
    tiles = jnp.arange(-(-tokens // block), dtype=jnp.int32) * block
    plain = dataclasses.replace(rope, attention_scaling=1.0)
    return *tables(rope, tiles), *tables(plain, jnp.arange(block, dtype=jnp.int32))
