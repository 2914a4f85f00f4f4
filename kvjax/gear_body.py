"""Chunks of tokens coded by GEAR: a quantized backbone, the low rank of its error, the outliers."""

import functools
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import quant
from kvjax.attention import Partial
from kvjax.pallas.gear_decode.api import Coded, gear_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.storage import position_dtype, write_rows

_SPREAD = {"valid": "lengths", "spans": "capacity"}  # several tokens an entry
_FLOAT16_MAX = 65504.0


class Recipe(NamedTuple):
    """How a chunk is coded; all static."""

    k_bits: int
    v_bits: int
    group: int | None  # tokens of a channel (keys) that share a scale, None = the chunk's
    v_group: int  # channels of a token (values) that share a scale
    outliers: float  # share of a vector's values
    iterations: int
    seed: int
    block: int  # R, tokens: the tokens of a chunk are a multiple


def outlier_pairs(share: float, size: int) -> int:
    """Largest (and as many smallest) values of a vector of `size` that are outliers.

    The integer nearest to share * size / 2, a half upwards.
    """
    return min(math.floor(share * size / 2 + 0.5), size // 2)


def channel_dtype(dim: int) -> jnp.dtype:
    """The smallest unsigned type that holds a channel's number."""
    return jnp.dtype(jnp.uint8) if dim <= 256 else jnp.dtype(jnp.uint16)


@functools.cache
def start_matrix(dim: int, rank: int, seed: int) -> np.ndarray:
    """Where every power iteration starts: f32[H, r], uniform in [0, 1)."""
    return np.random.default_rng([seed, dim, rank]).random((dim, rank)).astype(np.float32)


@pytree
class Chunks:
    """C chunks of `chunk` tokens, coded one by one; the first `lengths` tokens are there.

    Invariants: lengths is a multiple of the recipe's block, and of `chunk` where there are several
    chunks. The outliers of a channel are pairs (smallest, largest) in the order of their rank, so
    that those that a row has fewer of come last; unused entries have delta 0.
    """

    k_codes: Array = array("batch", "kv_head", "slot", "byte", valid="lengths")
    k_scale: Array = array("batch", "kv_head", "slot", "head_dim", **_SPREAD)
    k_zero: Array = array("batch", "kv_head", "slot", "head_dim", **_SPREAD)
    k_left: Array | None = array("batch", "kv_head", "slot", "rank", valid="lengths")
    k_right: Array | None = array("batch", "kv_head", "slot", "rank", "head_dim", **_SPREAD)
    k_delta: Array | None = array("batch", "kv_head", "slot", "head_dim", valid="k_outliers")
    k_index: Array | None = array("batch", "kv_head", "slot", "head_dim", valid="k_outliers")
    v_codes: Array = array("batch", "kv_head", "slot", "byte", valid="lengths")
    v_scale: Array = array("batch", "kv_head", "slot", "group", valid="lengths")
    v_zero: Array = array("batch", "kv_head", "slot", "group", valid="lengths")
    v_left: Array | None = array("batch", "kv_head", "slot", "rank", valid="lengths")
    v_right: Array | None = array("batch", "kv_head", "slot", "rank", "head_dim", **_SPREAD)
    v_delta: Array | None = array("batch", "kv_head", "slot", "entry", valid="lengths")
    v_index: Array | None = array("batch", "kv_head", "slot", "entry", valid="lengths")
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    chunk: int = static()  # tokens
    recipe: Recipe = static()

    @classmethod
    def encode(cls, k: Array, v: Array, lengths: Array, rank: int, recipe: Recipe) -> Self:
        """One chunk: the first `lengths` tokens a row of k, v [B, K, t, H]; the others are ignored.

        Args:
            k: rotated keys, token 0 first.
            v: values.
            lengths: i32[B], a multiple of the recipe's block.
            rank: of the low-rank part, 0 = none.
            recipe: how.
        """
        chunk, dim = k.shape[2:]
        real = jnp.arange(chunk)[None, None, :, None] < lengths[:, None, None, None]
        counts = [outlier_pairs(recipe.outliers, n) for n in range(0, chunk + 1, recipe.block)]
        k_pairs = jnp.asarray(counts, jnp.int32)[lengths // recipe.block]
        v_pairs = jnp.full_like(lengths, most := outlier_pairs(recipe.outliers, dim))
        group = chunk if recipe.group is None else recipe.group
        k_type, v_type = position_dtype(chunk), channel_dtype(dim)
        k_bits, v_bits = recipe.k_bits, recipe.v_bits
        keys, k_error = _code(k, real, 2, counts[-1], k_pairs, k_type, k_bits, group)
        values, v_error = _code(v, real, 3, most, v_pairs, v_type, v_bits, recipe.v_group)
        if rank:
            errors = jnp.stack([k_error, v_error])  # one program for both
            find = functools.partial(
                low_rank, rank=rank, iterations=recipe.iterations, seed=recipe.seed
            )
            left, right = jax.vmap(find)(errors)
            keys, values = (
                side._replace(left=left[i], right=right[i]) for i, side in enumerate((keys, values))
            )
        return cls(*keys, *values, lengths, chunk=chunk, recipe=recipe)

    @classmethod
    def empty(cls, like: Array, chunks: int, rank: int, recipe: Recipe) -> Self:
        """Room for chunks of one block, for keys [B, K, *, H] like `like`."""
        shape = (*like.shape[:2], recipe.block, like.shape[3])
        x = jax.ShapeDtypeStruct(shape, like.dtype)
        lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        one = jax.eval_shape(lambda k, n: cls.encode(k, k, n, rank, recipe), x, lengths)

        def zeros(x):
            sizes = [n * chunks if axis == 2 else n for axis, n in enumerate(x.shape)]
            return jnp.zeros(sizes, x.dtype)

        return jax.tree.map(zeros, one)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.k_codes.shape[2]

    @property
    def k_outliers(self) -> Array:
        """i32[B], outliers of every channel of the keys."""
        share, block = self.recipe.outliers, self.recipe.block
        counts = [outlier_pairs(share, n) for n in range(0, self.chunk + 1, block)]
        whole, rest = self.lengths // self.chunk, self.lengths % self.chunk
        return 2 * (whole * counts[-1] + jnp.asarray(counts, jnp.int32)[rest // block])

    @property
    def keys(self) -> Coded:
        """The keys as the op takes them."""
        return Coded(
            self.k_codes, self.k_scale, self.k_zero, self.k_left, self.k_right,
            self.k_delta, self.k_index,
        )  # fmt: skip

    @property
    def values(self) -> Coded:
        """The values as the op takes them."""
        return Coded(
            self.v_codes, self.v_scale, self.v_zero, self.v_left, self.v_right,
            self.v_delta, self.v_index,
        )  # fmt: skip

    def append(self, one: Self, rows: Array) -> Self:
        """Write a chunk after each row's last, in the rows bool[B]."""
        at = self.lengths // self.chunk

        def fold(buffer, x):
            if buffer.ndim == 1:
                return buffer + jnp.where(rows, self.chunk, 0)
            first = at[:, None] * x.shape[2]
            slots = first + jnp.arange(x.shape[2], dtype=jnp.int32)[None]
            return write_rows(buffer, x, jnp.where(rows[:, None], slots, buffer.shape[2]))

        return jax.tree.map(fold, self, one)

    def attend(self, q: Array, impl: str) -> Partial:
        """Attention of rotated queries [B, N, T, H], all later than these tokens."""
        return Partial(
            *gear_decode(
                q, self.keys, self.values, self.lengths, chunk=self.chunk,
                k_bits=self.recipe.k_bits, v_bits=self.recipe.v_bits, impl=impl,
            )
        )  # fmt: skip

    def dense(self) -> tuple[Array, Array]:
        """k, v f32[B, K, S, H]: backbone, low rank and outliers summed."""
        dim = self.k_scale.shape[3]
        out = []
        for side, bits, axis in ((self.keys, self.recipe.k_bits, 2),
                                 (self.values, self.recipe.v_bits, 3)):  # fmt: skip
            codes = quant.unpack(side.codes, bits, dim)
            x = quant.group_dequantize(codes, side.scale, side.zero, axis=axis)
            chunks = (*x.shape[:2], -1, self.chunk, dim)
            x = x.reshape(chunks)  # [B, K, C, t, H]
            if side.left is not None:
                left = side.left.reshape(*x.shape[:4], -1).astype(jnp.float32)
                x += jnp.einsum("bkctr,bkcrh->bkcth", left, side.right.astype(jnp.float32))
            if side.delta is not None:
                apart = (*x.shape[:3], -1, side.delta.shape[3])  # entries by chunk
                index = side.index.reshape(apart).astype(jnp.int32)
                delta = side.delta.reshape(apart).astype(jnp.float32)
                x = _by_vector(_add, axis + 1)(x, index, delta)
            out.append(x.reshape(*codes.shape))
        return out[0], out[1]


def _by_vector(f, axis: int):
    """`f(x, index, values)` over the vectors along `axis` of all three."""

    def run(x, *rest):
        moved = (jnp.moveaxis(a, axis, -1) for a in (x, *rest))
        return jnp.moveaxis(jnp.vectorize(f, signature="(n),(e),(e)->(n)")(*moved), -1, axis)

    return run


def _set(x: Array, index: Array, values: Array) -> Array:
    return x.at[index].set(values, mode="drop")


def _add(x: Array, index: Array, values: Array) -> Array:
    return x.at[index].add(values, mode="drop")


def _code(
    x: Array, real: Array, axis: int, most: int, pairs: Array, index_type: jnp.dtype, bits: int,
    group: int,
) -> tuple[Coded, Array]:  # fmt: skip
    """Code x [B, K, t, H]; vectors with outliers and groups run along `axis` (2 keys, 3 values).

    Returns:
        Backbone and outliers, and the error f32[B, K, t, H] that they leave.
    """
    dtype = x.dtype
    x = jnp.where(real, x, 0).astype(jnp.float32)
    filled, index, delta = x, None, None
    if most:
        index = extremes(x, real, axis, most, pairs)
        count = jnp.maximum(jnp.broadcast_to(real, x.shape).sum(axis, keepdims=True), 1)
        mean = x.sum(axis, keepdims=True) / count
        filled = _by_vector(_set, axis)(x, index, jnp.broadcast_to(mean, index.shape))
    filled = jnp.where(real, filled, filled[:, :, :1])  # neutral for a scale of the whole chunk
    codes, scale, zero = quant.group_quantize(filled, bits, group, axis=axis)
    error = jnp.where(real, x - quant.group_dequantize(codes, scale, zero, axis=axis), 0.0)
    if most:
        used = index < x.shape[axis]
        taken = jnp.take_along_axis(error, jnp.where(used, index, 0), axis)
        delta = jnp.where(used, taken, 0.0).astype(dtype)
        error = _by_vector(_set, axis)(error, index, jnp.zeros_like(taken))
        index = jnp.where(used, index, 0).astype(index_type)
    return Coded(quant.pack(codes, bits), scale, zero, None, None, delta, index), error


def extremes(x: Array, real: Array, axis: int, most: int, pairs: Array) -> Array:
    """Where the outliers of every vector are: its `pairs` smallest and largest values.

    Args:
        x: f32[B, K, t, H].
        real: bool [B, 1, t, 1], tokens that count.
        axis: along which a vector runs.
        most: static bound of `pairs`.
        pairs: i32[B], outliers of a row on either side.

    Returns:
        i32 of x's shape but 2 * most on `axis`: smallest, largest, second smallest, ...; the size
        of the axis where a row has no more. No place is listed twice.
    """
    size = x.shape[axis]
    high, low = (
        jnp.moveaxis(jnp.where(real, a, -jnp.inf) if axis == 2 else a, axis, -1) for a in (x, -x)
    )
    # The second order is the reverse of the first also among equals, so that both are disjoint.
    largest = jax.lax.top_k(high, most)[1]
    smallest = size - 1 - jax.lax.top_k(low[..., ::-1], most)[1]
    index = jnp.stack([smallest, largest], -1).reshape(*smallest.shape[:-1], 2 * most)
    rank = jnp.arange(2 * most, dtype=jnp.int32)[None, None, None] // 2
    used = rank < pairs[:, None, None, None]
    return jnp.moveaxis(jnp.where(used, index, size), -1, axis).astype(jnp.int32)


def low_rank(error: Array, rank: int, iterations: int, seed: int) -> tuple[Array, Array]:
    """Factors of the best approximation of each head's error that power iteration finds.

    Args:
        error: f32[B, K, t, H]; rows of zeros stay zero.
        rank: r.
        iterations: passes over the error, at least 1.
        seed: of `start_matrix`.

    Returns:
        left f16[B, K, t, r] with orthonormal columns, right f16[B, K, 1, r, H]; their product
        approximates the error.

    Source: GEAR (arXiv 2403.05527), fake_poweriteration_group of compress_function.py.
    Differs from the reference: both factors are orthonormalised in every pass, not in the last
    alone (the same span, without overflow or loss of the smaller directions).
    """
    batch, heads, tokens, dim = error.shape
    error = error.reshape(batch * heads, tokens, dim)
    size = jnp.abs(error).max((1, 2), keepdims=True)
    scaled = error / jnp.where(size > 0, size, 1.0)
    right = jnp.broadcast_to(start_matrix(dim, rank, seed), (batch * heads, dim, rank))

    def again(_, factors):
        left = _orthonormal(jnp.einsum("bth,bhr->btr", scaled, _orthonormal(factors[1])))
        return left, jnp.einsum("bth,btr->bhr", scaled, left)

    left = jnp.zeros((batch * heads, tokens, rank), jnp.float32)
    left, right = jax.lax.fori_loop(0, iterations, again, (left, right))
    right = jnp.clip((right * size).swapaxes(1, 2), -_FLOAT16_MAX, _FLOAT16_MAX)
    left = left.reshape(batch, heads, tokens, rank).astype(jnp.float16)
    return left, right.reshape(batch, heads, 1, rank, dim).astype(jnp.float16)


def _orthonormal(x: Array) -> Array:
    """Gram-Schmidt, twice, on the columns of [L, n, r]; what is no new direction becomes zero.

    A Householder QR would fill the rows of zeros, which stand for no token, of a rank that is not
    full; and its output would depend on their number.
    """
    done = jnp.zeros_like(x)
    for column in range(x.shape[2]):
        v = x[:, :, column]
        before = jnp.linalg.norm(v, axis=1, keepdims=True)
        for _ in range(2):
            v = v - (done * (done * v[..., None]).sum(1, keepdims=True)).sum(-1)
        norm = jnp.linalg.norm(v, axis=1, keepdims=True)
        new = norm > 1e-5 * before
        v = jnp.where(new, v / jnp.where(new, norm, 1.0), 0.0)
        done = done.at[:, :, column].set(v)
    return done
