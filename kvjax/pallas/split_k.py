"""Decode attention on a GPU: one program a KV head and share of its tokens, then a combine step.

Each op says how to score a tile of tokens and how to add up its values; this file does the rest:
blocks of query rows, shares of the tokens (split-K), the online softmax, and the merge. A share is
a part of the *length*, so that time follows the length and all shares are as long.

The language is Pallas's Triton: every value has sizes that are powers of two, products have at
least 16 rows, and loads take arrays of indices, clamped into the array.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax import quant
from kvjax.pallas import compat, partial
from kvjax.pallas.partial import MASKED

ROWS = 16  # least rows of a product
_MOST_ROWS = 64
_PROGRAMS = 264  # two for each multiprocessor of a large GPU


class Operand(NamedTuple):
    """An array, and the part of it that a program sees."""

    array: Array
    block: tuple[int | None, ...]
    index: Callable[[Any, Any], tuple]  # of (row, KV head)


class Tile(NamedTuple):
    """What an op does with the tokens `at` i32[width] of a tile from `start` on."""

    scores: Callable[..., Array]  # (start, at) to f32[R, width]
    # (p f32[R, width], start, at, live bool[width], which tokens exist) to f32[R, power(w)] each
    weigh: Callable[..., tuple[Array, ...]]


def of_head(x: Array) -> Operand:
    """The part of [B, K, ...] that belongs to a KV head."""
    rest = x.shape[2:]
    return Operand(x, (None, None, *rest), lambda b, k: (b, k, *(0 for _ in rest)))


def of_sides(x: Array) -> Operand:
    """The part of [B, 2, K, ...], keys and values, that belongs to a KV head: [2, ...]."""
    rest = x.shape[3:]
    return Operand(x, (None, 2, None, *rest), lambda b, k: (b, 0, k, *(0 for _ in rest)))


def of_row(x: Array) -> Operand:
    """The part of [B, ...] that belongs to a row."""
    rest = x.shape[1:]
    return Operand(x, (None, *rest), lambda b, k: (b, *(0 for _ in rest)))


def whole(x: Array) -> Operand:
    """All of an array."""
    return Operand(x, x.shape, lambda b, k: (0,) * x.ndim)


def power(size: int, least: int = ROWS) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, pl.next_power_of_2(size))


def dot(a: Array, b: Array, dtype: Any) -> Array:
    """f32[R, X] = a [R, Y] . b [Y, X], operands rounded to a 16-bit dtype or exact float32."""
    if dtype == jnp.float32:
        return jnp.dot(a.astype(dtype), b.astype(dtype), precision=lax.Precision.HIGHEST)
    return jnp.dot(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def dot_rows(a: Array, b: Array, dtype: Any) -> Array:
    """f32[R, X] = a [R, Y] . b [X, Y], as `dot`."""
    how = (((1,), (1,)), ((), ()))
    a, b = a.astype(dtype), b.astype(dtype)
    if dtype == jnp.float32:
        return lax.dot_general(a, b, how, precision=lax.Precision.HIGHEST)
    return lax.dot_general(a, b, how, preferred_element_type=jnp.float32)


def columns(size: int, first: int = 0) -> Array:
    """Indices i32[power(size)] of `size` columns from `first`; what is beyond repeats the last."""
    column = jnp.arange(power(size), dtype=jnp.int32)
    if power(size) != size:  # a clamp hides that the columns are neighbours: loads get narrow
        column = jnp.minimum(column, size - 1)
    return first + column


def gather(ref: Any, *index: Any) -> Array:
    """The entries of a ref at index arrays that broadcast against each other."""
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    return ref[tuple(jnp.broadcast_to(jnp.asarray(i, jnp.int32), shape) for i in index)]


def rows(ref: Any, at: Array, size: int, first: int = 0) -> Array:
    """Rows `at`, clamped, of `size` columns of a ref [S, C]: [width, power(size)]."""
    at = jnp.minimum(at, ref.shape[0] - 1)
    return gather(ref, at[:, None], columns(size, first)[None])


def codes(ref: Any, at: Array, bits: int, size: int, channel: Array, first: int = 0) -> Array:
    """Codes of `quant.pack` at rows and channels: i32[width, channels].

    Args:
        ref: uint8 [S, bytes], each row `size` packed codes from byte `first` on.
        at: i32[width], rows, clamped.
        bits: 1 to 8.
        size: codes a row.
        channel: i32[channels], which codes.
        first: byte where a row's codes begin.
    """
    at = jnp.minimum(at, ref.shape[0] - 1)[:, None]
    return packed(ref, (at,), channel[None], bits, size, first)


def packed(ref: Any, lead: tuple, at: Array, bits: int, size: int, first: int = 0) -> Array:
    """Codes of `quant.pack` along the last axis of ref[lead] at places `at`, i32 of their shape."""
    total = 0
    for part, low in quant.parts(bits):
        count = -(-size * part // 8)
        byte = gather(ref, *lead, first + at % count).astype(jnp.int32)
        field = (byte >> (at // count * part)) & ((1 << part) - 1)
        total, first = total + (field << low), first + count
    return total


def count_bits(word: Array) -> Array:
    """Set bits of uint32 words, i32: Triton has no instruction for it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).astype(jnp.int32)


def decode(
    name: str,
    tile: Callable[..., Tile],
    queries: Sequence[Array],
    operands: Sequence[Operand],
    limits: Array,
    *,
    steps: int,
    tokens: int,
    widths: Sequence[int],
    block: int,
    capacity: int,
    interpret: bool,
    scores: bool = False,
    num_warps: int = 4,
    num_stages: int = 2,
) -> tuple[Any, ...]:
    """Attention of new queries over the tokens that a tile function can score and weigh.

    Args:
        name: of the kernel.
        tile: (queries [R, power(F)] each, refs of the operands, KV head) to the functions of a
            tile.
        queries: [B, N, T, F] each.
        operands: what the tile functions read.
        limits: i32[B, K, T], tokens that the queries of each step see, the first ones.
        steps: T.
        tokens: stride of the tiles; a tile has `block` places, of which the first `tokens` count.
        widths: columns of each output.
        block: a power of two, at least 16 and `tokens`.
        capacity: tokens there can be at most, for the number of shares.
        interpret: run the kernel's body with XLA instead.
        scores: return them too.
        num_warps: of a program.
        num_stages: of the software pipeline.

    Returns:
        o f32[B, N, T, widths[i]] each, m f32[B, N, T], l f32[B, N, T], and with `scores` these,
        f32[B, K, G*T, capacity], where a token is seen; elsewhere they may be anything.
    """
    batch, heads = queries[0].shape[:2]
    kv_heads = limits.shape[1]
    group = heads // kv_heads
    count = group * steps
    size = min(power(count), _MOST_ROWS)
    blocks = -(-count // size)
    pad = ((0, 0), (0, 0), (0, blocks * size - count), (0, 0))

    def by_row(x):  # [B, N, T, F] to [B, K, rows, F]
        return jnp.pad(x.reshape(batch, kv_heads, count, -1), pad)

    queries = [by_row(q) for q in queries]
    limits = jnp.broadcast_to(limits[:, :, None], (batch, kv_heads, group, steps))
    limits = jnp.pad(limits.reshape(batch, kv_heads, count), pad[:3]).astype(jnp.int32)
    splits = max(1, min(-(-capacity // (4 * tokens)), _PROGRAMS // (batch * kv_heads * blocks), 64))

    def kernel(limits_ref, *refs):
        refs, outs = refs[: len(queries) + len(operands)], refs[len(queries) + len(operands) :]
        o_refs, (m_ref, l_ref, *s_refs) = outs[: len(widths)], outs[len(widths) :]
        inputs = [
            jnp.where(
                jnp.arange(power(q.shape[-1]))[None] < q.shape[-1],
                rows(ref, jnp.arange(size, dtype=jnp.int32), q.shape[-1]),
                0,
            )
            for q, ref in zip(queries, refs, strict=False)
        ]
        limit = limits_ref[...]
        longest = limit.max()
        share = pl.cdiv(pl.cdiv(longest, splits), tokens)  # tiles of a program
        first = pl.program_id(2) * share
        last = jnp.minimum(first + share, pl.cdiv(longest, tokens))
        head = pl.program_id(0) % kv_heads
        op = tile(inputs, refs[len(queries) :], head)
        place = jnp.arange(block, dtype=jnp.int32)
        real = pl.program_id(1) * size + jnp.arange(size, dtype=jnp.int32) < count

        def step(j, carry):
            o, m, l = carry  # noqa: E741
            at = j * tokens + place
            live = (place < tokens) & (at < longest)
            mask = live[None] & (at[None] < limit[:, None])
            s = jnp.where(mask, op.scores(j * tokens, at), MASKED)
            for ref in s_refs:
                here = ref.at[:, pl.ds(j * tokens, block)]
                plgpu.store(here, s, mask=real[:, None] & live[None])
            new = jnp.maximum(m, s.max(1))
            p = jnp.where(mask, jnp.exp(s - new[:, None]), 0.0)
            shrink = jnp.exp(m - new)
            added = op.weigh(p, j * tokens, at, live)
            o = tuple(a * shrink[:, None] + b for a, b in zip(o, added, strict=True))
            return o, new, l * shrink + p.sum(1)

        empty = jnp.zeros((size,), jnp.float32)
        start = tuple(jnp.zeros((size, power(w)), jnp.float32) for w in widths)
        o, m, l = lax.fori_loop(first, last, step, (start, empty + MASKED, empty))  # noqa: E741
        for ref, x in zip(o_refs, o, strict=True):
            ref[...] = x
        m_ref[...] = m
        l_ref[...] = l

    def spec(operand):
        def index(i, r, s):
            return operand.index(i // kv_heads, i % kv_heads)

        return pl.BlockSpec(operand.block, index)

    def of_rows(*rest):
        zeros = (0,) * len(rest)
        return pl.BlockSpec(
            (None, None, size, *rest), lambda i, r, s: (i // kv_heads, i % kv_heads, r, *zeros)
        )

    def out(*rest):
        zeros = (0,) * len(rest)
        shape = (splits, batch * kv_heads, blocks * size, *rest)
        block = pl.BlockSpec((None, None, size, *rest), lambda i, r, s: (s, i, r, *zeros))
        return jax.ShapeDtypeStruct(shape, jnp.float32), block

    outs = [*(out(power(w)) for w in widths), out(), out()]
    if scores:  # a tile may end after the array does: masked, but it must be addressable
        shape = jax.ShapeDtypeStruct((batch * kv_heads, count, capacity), jnp.float32)
        wide = pl.BlockSpec((None, size, capacity + block), lambda i, r, s: (i, r, 0))
        outs.append((shape, wide))
    found = pl.pallas_call(
        kernel,
        grid=(batch * kv_heads, blocks, splits),
        in_specs=[
            of_rows(), *(of_rows(q.shape[-1]) for q in queries), *(spec(x) for x in operands),
        ],
        out_specs=[block for _, block in outs],
        out_shape=[shape for shape, _ in outs],
        compiler_params=compat.gpu_params(num_warps, num_stages),
        interpret=interpret,
        name=name,
    )(limits, *queries, *(x.array for x in operands))  # fmt: skip

    def of_queries(x):  # [B * K, rows, ...] to [B, N, T, ...]
        return x[:, :count].reshape(batch, heads, steps, *x.shape[2:])

    o, (m, l, *rest) = found[: len(widths)], found[len(widths) :]  # noqa: E741
    o, m, l = partial.combine(tuple(o), m, l, 0)  # noqa: E741
    o = [of_queries(x)[..., :w] for x, w in zip(o, widths, strict=True)]
    rest = [x.reshape(batch, kv_heads, count, capacity) for x in rest]
    return o, of_queries(m), of_queries(l), *rest


def exact(dtype: Any) -> Any:
    """The dtype of products of stored values: bfloat16's own, else float32."""
    return jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32


def dense_plan(dtype: Any) -> tuple[int, int, int]:
    """Tokens of a tile of exact keys and values, warps and stages.

    A float32 tile is twice as large, and its products are not the tensor cores'.
    """
    return (16, 8, 1) if exact(dtype) == jnp.float32 else (64, 4, 2)


def dense_tile(
    dim: int, dtype: Any, load: Callable[..., Array] | None = None
) -> Callable[..., Tile]:
    """The tile of exact keys and values, the first two refs.

    Args:
        dim: head dim H.
        dtype: of the stored keys.
        load: (refs, 0 for keys or 1 for values, tokens i32[width], KV head) to [width, power(H)];
            None = token t is row t of refs [S, H].
    """
    kind = exact(dtype)

    def tile(queries, refs, head):
        (q,) = queries

        def side(which, at):
            if load is None:
                return rows(refs[which], at, dim)
            return load(refs, which, at, head)

        def scores(start, at):
            return dot_rows(q, side(0, at), kind) * dim**-0.5

        def weigh(p, start, at, live):
            return (dot(p, jnp.where(live[:, None], side(1, at), 0), kind),)

        return Tile(scores, weigh)

    return tile
