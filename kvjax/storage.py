"""Storage that methods share: a dense append-only tail, exact kept tokens, and their union."""

from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Partial, dense_partial, finish, merge, visible
from kvjax.pallas.pooled_decode.api import pooled_decode
from kvjax.pallas.ragged_decode.api import ragged_decode
from kvjax.pytree import METADATA, TAIL, array, pytree, static
from kvjax.rope import Rope, rotate
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class Tail:
    """The tokens appended since the prompt, dense and exact, R slots a row.

    Invariants: slots [0, lengths) hold tokens with `positions` >= 0 in order of arrival; the others
    are empty and have position -1.
    """

    k: Array = array("batch", "kv_head", "slot", "head_dim", role=TAIL, valid="lengths")  # rotated
    v: Array = array("batch", "kv_head", "slot", "head_dim", role=TAIL, valid="lengths")
    positions: Array = array("batch", "slot", role=TAIL, valid="lengths")  # i32[B, R]
    lengths: Array = array("batch", role=METADATA)  # i32[B]

    @classmethod
    def empty(cls, like: Array, capacity: int) -> Self:
        """A tail of `capacity` tokens for keys [B, K, *, H] like `like`."""
        if capacity < 1:
            raise ValueError(f"reserve={capacity} must be at least 1 token.")
        batch, heads, _, dim = like.shape
        zeros = jnp.zeros((batch, heads, capacity, dim), like.dtype)
        positions = jnp.full((batch, capacity), -1, jnp.int32)
        return cls(zeros, jnp.zeros_like(zeros), positions, jnp.zeros(batch, jnp.int32))

    def append(self, k: Array, v: Array, positions: Array) -> Self:
        """Write T rotated tokens a row at its own length; pads (position -1) are not written."""
        capacity, steps = self.k.shape[2], k.shape[2]
        real = positions >= 0
        slots = self.lengths[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        slots = jnp.where(real, slots, capacity)  # out of range: dropped
        return replace(
            self,
            k=write_rows(self.k, k, slots),
            v=write_rows(self.v, v, slots),
            positions=jax.vmap(lambda row, at, x: row.at[at].set(x, mode="drop"))(
                self.positions, slots, positions
            ),
            lengths=self.lengths + real.sum(-1, dtype=jnp.int32),
        )

    def attend(self, q: Array, positions: Array, window: int | None) -> Partial:
        """Causal attention of rotated queries [B, N, T, H] over the tail."""
        return dense_partial(q, self.k, self.v, visible(positions, self.positions, window))

    def materialize(self) -> tuple[Array, Array, Array]:
        """k, v [B, K, R, H] and positions i32[B, K, R]."""
        batch, heads, capacity, _ = self.k.shape
        positions = jnp.broadcast_to(self.positions[:, None], (batch, heads, capacity))
        return self.k, self.v, positions


def write_rows(buffer: Array, x: Array, slots: Array) -> Array:
    """Write x [B, K, T, ...] to slots i32[B, T] >= 0 of [B, K, S, ...]; S and more are dropped."""

    def scatter(buffer, x, slots):
        return jax.vmap(lambda row, x, at: row.at[:, at].set(x, mode="drop"))(buffer, x, slots)

    def select(buffer, x, slots):
        here = jnp.arange(buffer.shape[2], dtype=jnp.int32)[None] == slots  # [B, S]
        return jnp.where(here.reshape(here.shape[0], 1, -1, *(1,) * (buffer.ndim - 3)), x, buffer)

    x = x.astype(buffer.dtype)
    if x.shape[2] > 1 or buffer.dtype not in (jnp.bfloat16, jnp.float16):
        return scatter(buffer, x, slots)
    # XLA's CPU backend scatters 16-bit floats by way of a float32 copy of the whole buffer: borne
    # once a chunk, not at every step. The selection costs next to nothing beside the attention
    # that reads the buffer.
    return lax.platform_dependent(buffer, x, slots, cpu=select, default=scatter)


@pytree
class Pooled:
    """Kept tokens, exact: KV head h owns slots [0, lengths[h]) of its own pool.

    Invariants: keys are rotated at their true positions; kept columns are ascending. `positions`
    is None when slot = position (nothing was evicted).
    """

    k: Array = array("batch", "kv_head", "slot", "head_dim", valid="lengths")  # [B, K, S, H]
    v: Array = array("batch", "kv_head", "slot", "head_dim", valid="lengths")  # [B, K, S, H]
    positions: Array | None = array(
        "batch", "kv_head", "slot", role=METADATA, valid="lengths"
    )  # uint16 or int32 [B, K, S]
    lengths: Array = array("batch", "kv_head", role=METADATA)  # i32[B, K]
    window: int | None = static(None)
    impl: str = static("auto")

    def slot_positions(self) -> Array:
        """i32[B, K, S], -1 where empty."""
        shape = self.k.shape[:3]
        slots = jnp.broadcast_to(jnp.arange(shape[2], dtype=jnp.int32), shape)
        positions = slots if self.positions is None else self.positions.astype(jnp.int32)
        return jnp.where(slots < self.lengths[..., None], positions, -1)

    def attend(self, q: Array, positions: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] over the kept tokens."""
        if self.window is None:
            return Partial(*pooled_decode(q, self.k, self.v, self.lengths, impl=self.impl))
        mask = visible(positions, self.slot_positions(), self.window)
        return dense_partial(q, self.k, self.v, mask)

    def materialize(self) -> tuple[Array, Array, Array]:
        """k, v [B, K, S, H] and positions i32[B, K, S]."""
        return self.k, self.v, self.slot_positions()


@pytree
class SharedPool:
    """Kept tokens, exact, any number a KV head: K / P heads share a pool of slots.

    Invariants: KV head h owns slots [slot_starts[h], slot_starts[h] + lengths[h]) of pool
    h // (K / P); the runs of a pool follow each other from slot 0. Keys are rotated at their true
    positions; kept columns are ascending.
    """

    k: Array = array("batch", "pool", "slot", "head_dim", valid="filled")  # [B, P, S, H]
    v: Array = array("batch", "pool", "slot", "head_dim", valid="filled")  # [B, P, S, H]
    positions: Array = array("batch", "pool", "slot", role=METADATA, valid="filled")  # uint16, i32
    slot_starts: Array = array("batch", "kv_head", role=METADATA)  # i32[B, K]
    lengths: Array = array("batch", "kv_head", role=METADATA)  # i32[B, K]
    most: int = static()  # tokens that one KV head can hold at most
    impl: str = static("auto")

    @property
    def filled(self) -> Array:
        """i32[B, P], slots of each pool that hold a token."""
        batch, pools = self.k.shape[:2]
        return self.lengths.reshape(batch, pools, -1).sum(-1)

    def attend(self, q: Array, positions: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] over the kept tokens."""
        return Partial(
            *ragged_decode(q, self.k, self.v, self.slot_starts, self.lengths, impl=self.impl)
        )

    def materialize(self) -> tuple[Array, Array, Array]:
        """k, v [B, K, most, H] and positions i32[B, K, most]."""
        batch, pools, slots, _ = self.k.shape
        heads = self.lengths.shape[1]
        entry = jnp.arange(self.most, dtype=jnp.int32)[None, None]
        kept = entry < self.lengths[..., None]
        at = jnp.minimum(self.slot_starts[..., None] + entry, slots - 1)  # [B, K, most]
        at = at.reshape(batch, pools, -1)

        def take(x):
            rows = jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 3)), 2)
            return rows.reshape(batch, heads, self.most, *x.shape[3:])

        k, v = (jnp.where(kept[..., None], take(x), 0) for x in (self.k, self.v))
        return k, v, jnp.where(kept, take(self.positions).astype(jnp.int32), -1)


@pytree
class BodyTail:
    """A body built once from the prompt and a dense tail; attention merges the two partials."""

    body: Any  # has attend(q, positions) -> Partial and materialize()
    tail: Tail
    rope: Rope = static()
    window: int | None = static(None)
    step_limit = None
    flush_every = None
    evicts = False

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        return self.tail.k.shape[2] - self.tail.lengths

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T tokens, attend to body and tail. See `types.LayerCache.step`."""
        dtype, q = q.dtype, rotate(self.rope, q, positions)
        tail = self.tail.append(rotate(self.rope, k, positions), v, positions)
        part = merge(self.body.attend(q, positions), tail.attend(q, positions, self.window))
        out = jnp.where((positions >= 0)[:, None, :, None], finish(part), 0.0)
        return out.astype(dtype), replace(self, tail=tail)

    def flush(self) -> Self:
        """Nothing to fold: the tail keeps every token."""
        return self

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense. See `types.LayerCache.materialize`."""
        body, tail = self.body.materialize(), self.tail.materialize()
        k, v = (
            jnp.concatenate([a, b.astype(jnp.promote_types(a.dtype, b.dtype))], 2)
            for a, b in zip(body[:2], tail[:2], strict=True)
        )
        return k, v, jnp.concatenate([body[2], tail[2]], 2)


@pytree
class Dense:
    """A materialised cache: what any method attends to, as plain arrays of one shape."""

    k: Array = array("batch", "kv_head", "slot", "head_dim")  # [B, K, S, H], rotated
    v: Array = array("batch", "kv_head", "slot", "head_dim")  # [B, K, S, H]
    positions: Array = array("batch", "kv_head", "slot", role=METADATA)  # i32, -1 = empty
    window: int | None = static(None)

    @classmethod
    def of(cls, cache: Any, slots: int, window: int | None = None) -> Self:
        """The materialised view of a cache's prompt in `slots` slots (float32, so that it holds
        every storage exactly).

        Raises:
            ValueError: if the cache holds more slots than that.
        """
        source = cache.body if isinstance(cache, BodyTail) else cache  # an empty tail has no part
        k, v, positions = source.materialize()
        extra = slots - k.shape[2]
        if extra < 0:
            raise ValueError(f"slots={slots} must be at least the cache's {k.shape[2]}.")
        room = ((0, 0), (0, 0), (0, extra), (0, 0))
        k, v = (jnp.pad(x.astype(jnp.float32), room) for x in (k, v))
        positions = jnp.pad(positions, room[:3], constant_values=-1)
        return cls(k, v, positions, window=window)

    def attend(self, q: Array, positions: Array) -> Partial:
        """Attention of rotated queries [B, N, T, H] over the view."""
        mask = visible(positions, self.positions, self.window)
        return dense_partial(q, self.k, self.v, mask)


def left_align(x: Array, starts: Array) -> Array:
    """Shift each row of [B, K, T, ...] so that slot = position; what follows a row is its wrap."""
    return jax.vmap(lambda row, start: jnp.roll(row, -start, axis=1))(x, starts)


def shift(prompt: PromptKV) -> Array:
    """i32[B], position minus index of the tokens that come next: 0 unless tokens were evicted."""
    lengths = (prompt.k.shape[2] - prompt.starts).astype(jnp.int32)
    next_positions = lengths if prompt.next_positions is None else prompt.next_positions
    return next_positions - lengths


def position_dtype(columns: int) -> jnp.dtype:
    """The smallest unsigned type that holds the positions of a prompt of `columns` tokens."""
    return jnp.dtype(jnp.uint16) if columns <= 65536 else jnp.dtype(jnp.int32)


def keep(prompt: PromptKV, columns: Array, lengths: Array, info: LayerInfo, impl: str) -> BodyTail:
    """The cache of an evictor: the chosen columns, exact, and an empty tail.

    Args:
        prompt: the layer's finished prefill.
        columns: i32[B, K, C], ascending; entries from `lengths` on are ignored.
        lengths: i32[B, K], kept tokens of each KV head.
        info: the layer.
        impl: see `pallas.dispatch.choose`.

    Returns:
        A `BodyTail` with a `Pooled` body of C slots.
    """
    kept = jnp.arange(columns.shape[2])[None, None] < lengths[..., None]
    columns = jnp.where(kept, columns, 0)
    k, v = (jnp.take_along_axis(x, columns[..., None], 2) for x in (prompt.k, prompt.v))
    k, v = (jnp.where(kept[..., None], x, 0) for x in (k, v))
    if prompt.positions is None:
        positions = columns - prompt.starts[:, None, None]
    else:
        positions = jnp.take_along_axis(prompt.positions, columns, 2)
    # A recompressed prompt may have grown: its positions are not bounded by its columns.
    dtype = position_dtype(prompt.k.shape[2] if prompt.positions is None else 2**31)
    positions = jnp.where(kept, positions, 0).astype(dtype)
    body = Pooled(k, v, positions, lengths, window=info.window, impl=impl)
    tail = Tail.empty(prompt.k, info.reserve)
    return BodyTail(body, tail, rope=info.rope, window=info.window)


def keep_shared(prompt: PromptKV, mask: Array, slots: int, info: LayerInfo, impl: str) -> BodyTail:
    """The cache of an evictor whose heads keep different numbers of tokens.

    Args:
        prompt: the layer's finished prefill.
        mask: bool [B, P, K / P, T], the columns that each KV head keeps.
        slots: S, of a pool; no row keeps more in one.
        info: the layer.
        impl: see `pallas.dispatch.choose`.

    Returns:
        A `BodyTail` with a `SharedPool` body of S slots a pool.
    """
    batch, pools, heads, total = mask.shape
    lengths = mask.sum(-1, dtype=jnp.int32)
    slot_starts = jnp.cumsum(lengths, -1) - lengths

    # Head-major and ascending: the order of the pool.
    find = jax.vmap(jax.vmap(lambda row: jnp.nonzero(row, size=slots, fill_value=-1)[0]))
    at = find(mask.reshape(batch, pools, heads * total)).astype(jnp.int32)  # [B, P, S]
    kept, at = at >= 0, jnp.maximum(at, 0)

    def take(x):
        flat = x.reshape(batch, pools, heads * total, -1)
        return jnp.where(kept[..., None], jnp.take_along_axis(flat, at[..., None], 2), 0)

    positions = jnp.where(kept, at % total - prompt.starts[:, None, None], 0)
    body = SharedPool(
        take(prompt.k), take(prompt.v), positions.astype(position_dtype(total)),
        slot_starts.reshape(batch, -1), lengths.reshape(batch, -1),
        most=min(slots, total), impl=impl,
    )  # fmt: skip
    return BodyTail(body, Tail.empty(prompt.k, info.reserve), rope=info.rope, window=info.window)


def kept_bytes(tokens: int, shape: PromptShape) -> int:
    """Live bytes of `keep` with `tokens` tokens per KV head, in one row and layer."""
    slot = 2 * shape.head_dim * shape.itemsize + position_dtype(shape.num_tokens).itemsize
    return min(tokens, shape.num_tokens) * shape.kv_heads * slot + 4 * shape.kv_heads + 4
