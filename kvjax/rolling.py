"""A cache of fixed size that evicts at every step: H2O, TOVA and StreamingLLM as their papers run.

A step first drops what the previous one released (the token of the least score, where the budget is
exceeded), writes the new token in its place, then attends: one slot more than the budget.
"""

from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Partial, dense_partial, finish, merge
from kvjax.pallas.pooled_decode.api import pooled_decode
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.rope import Rope, rotate, unrotate
from kvjax.storage import write_rows
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class Rolling:
    """At most `budget` tokens a KV head survive a step; slots are reused in place.

    Invariants: slots [0, lengths) hold tokens, `positions` >= 0, the others -1; until a first
    eviction slot = order of arrival, so the `sinks` first tokens stay in slots [0, sinks). `scores`
    is what attention has given each token, None where only age decides; that is so where positions
    are `relative`.
    """

    k: Array = array("batch", "kv_head", "slot", "head_dim", valid="lengths")  # rotated
    v: Array = array("batch", "kv_head", "slot", "head_dim", valid="lengths")
    positions: Array = array("batch", "kv_head", "slot", role=METADATA, valid="lengths")  # i32
    scores: Array | None = array("batch", "kv_head", "slot", role=METADATA, valid="lengths")  # f32
    lengths: Array = array("batch", "kv_head", role=METADATA)  # i32[B, K]
    budget: int = static()  # tokens that survive a step
    sinks: int = static()  # first tokens that are never evicted
    recent: int = static()  # last tokens that are never evicted
    scoring: str = static()  # "sum" of all attention so far, "last" query's attention, or "age"
    normalize: bool = static(False)  # a sum is divided by the number of queries that saw the token
    relative: bool = static(False)  # positions are places in the cache, not in the text
    rope: Rope = static()
    impl: str = static("auto")
    step_limit = None
    flush_every = None
    evicts = True

    @classmethod
    def of(
        cls, prompt: PromptKV, columns: Array, lengths: Array, info: LayerInfo, budget: int,
        scores: Array | None, **rules,
    ) -> Self:  # fmt: skip
        """Start from the selected columns of a prompt.

        Args:
            prompt: the layer's finished prefill.
            columns: i32[B, K, C], ascending; entries from `lengths` on are ignored.
            lengths: i32[B, K].
            info: the layer.
            budget: tokens that survive a step, at least 1.
            scores: f32[B, K, T] that the columns start with, or None.
            **rules: the static fields.
        """
        total = prompt.k.shape[2]
        slots = min(budget, total + info.reserve) + 1
        room = slots - columns.shape[2]
        columns = jnp.pad(columns, ((0, 0), (0, 0), (0, room)))
        kept = jnp.arange(slots, dtype=jnp.int32)[None, None] < lengths[..., None]
        columns = jnp.where(kept, columns, 0)
        k, v = (
            jnp.where(kept[..., None], jnp.take_along_axis(x, columns[..., None], 2), 0)
            for x in (prompt.k, prompt.v)
        )
        if scores is not None:
            scores = jnp.where(kept, jnp.take_along_axis(scores, columns, 2), 0.0)
        if prompt.positions is None:
            positions = columns - prompt.starts[:, None, None]
        else:
            positions = jnp.take_along_axis(prompt.positions, columns, 2)
        positions = jnp.where(kept, positions, -1)
        return cls(
            k, v, positions.astype(jnp.int32), scores, lengths,
            budget=budget, rope=info.rope, **rules,
        )  # fmt: skip

    def room(self) -> Array:
        """i32[B], tokens that can still be appended: no limit where a budget makes room."""
        slots = self.k.shape[2]
        room = slots - self.lengths.max(1)
        return room if self.budget >= slots else jnp.full_like(room, 2**30)

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Evict, append and attend, one token after the other. See `types.LayerCache.step`."""
        steps = k.shape[2]
        if steps == 1:
            return self._step(q, k, v, positions[:, 0])

        def one(cache, x):
            out, cache = cache._step(*(a[:, :, None] for a in x[:3]), x[3])
            return cache, out[:, :, 0]

        inputs = tuple(jnp.moveaxis(a, 2, 0) for a in (q, k, v)) + (positions.T,)
        cache, outs = lax.scan(one, self, inputs)
        return jnp.moveaxis(outs, 0, 2), cache

    def _step(self, q, k, v, position) -> tuple[Array, Self]:
        """One token a row: q [B, N, 1, H], k and v [B, K, 1, H], position i32[B], -1 = none."""
        dtype, real = q.dtype, position >= 0
        at = position[:, None]
        k = rotate(self.rope, k, at)
        cache = self._write(k, v, position)
        out, given = cache._attend(rotate(self.rope, q, at), q)
        if self.scoring == "sum":
            scores = jnp.where(real[:, None, None], cache.scores + given, cache.scores)
            cache = replace(cache, scores=scores)
        elif self.scoring == "last":
            given = jnp.broadcast_to(given.mean(1, keepdims=True), given.shape)
            cache = replace(cache, scores=jnp.where(real[:, None, None], given, cache.scores))
        return jnp.where(real[:, None, None, None], out, 0.0).astype(dtype), cache

    def _write(self, k: Array, v: Array, position: Array) -> Self:
        """Put each row's token in a free slot or in place of the one that goes."""
        batch, heads, slots, _ = self.k.shape
        full = self.lengths == slots
        slot = jnp.where(full, self._victim(), self.lengths)
        slot = jnp.where(position[:, None] >= 0, slot, slots)  # out of range: dropped

        @jax.vmap
        def row(buffer, value, slot):  # heads as rows of their own: each has its own slot
            return write_rows(buffer[:, None], value[:, None, None], slot[:, None])[:, 0]

        def put(buffer, value):
            return row(buffer, value, slot)

        new = jnp.broadcast_to(position[:, None], (batch, heads))
        scores = self.scores
        if scores is not None:
            scores = put(scores, jnp.zeros((batch, heads), jnp.float32))
        grown = ~full & (position[:, None] >= 0)
        return replace(
            self,
            k=put(self.k, k[:, :, 0]),
            v=put(self.v, v[:, :, 0]),
            positions=put(self.positions, new),
            scores=scores,
            lengths=self.lengths + grown.astype(jnp.int32),
        )

    def _victim(self) -> Array:
        """i32[B, K], the slot of the least score that nothing protects; the older of equals."""
        last = self.positions.max(-1, keepdims=True)
        if self.scores is None:
            worth = self.positions.astype(jnp.float32)
        elif self.normalize:
            worth = self.scores / (last - self.positions + 1).astype(jnp.float32)
        else:
            worth = self.scores
        protected = (self.positions < self.sinks) & (self.positions >= 0)
        # Among a KV head's own tokens: after an eviction the last `recent` are still in a row.
        protected |= self.positions > last - self.recent
        worth = jnp.where(protected, jnp.inf, worth)
        oldest = jnp.where(worth == worth.min(-1, keepdims=True), self.positions, 2**30)
        return oldest.argmin(-1).astype(jnp.int32)

    def _attend(self, rotated: Array, q: Array) -> tuple[Array, Array | None]:
        """Output f32[B, N, 1, H] and, unless age decides, what each slot gets f32[B, K, S]."""
        scored = self.scoring != "age"
        # Where all slots are sinks, nothing was evicted.
        first = self.sinks if self.relative and self.sinks < self.k.shape[2] else 0
        *part, given = pooled_decode(
            rotated, self.k, self.v, self.lengths, skip=first, sums=scored, impl=self.impl
        ) + (() if scored else (None,))
        part = Partial(*part)
        if first:
            # Only the distance to the sinks differs from the text's: the query meets them from its
            # own place in the cache.
            near = rotate(self.rope, q, self.lengths[:, :1] - 1)
            k, v = self.k[:, :, :first], self.v[:, :, :first]
            slot = jnp.arange(first, dtype=jnp.int32)[None, None]
            held = (slot < self.lengths[..., None])[:, :, None]
            part = merge(dense_partial(near, k, v, held), part)
        return finish(part), given

    def flush(self) -> Self:
        """Nothing to fold."""
        return self

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense. See `types.LayerCache.materialize`.

        With `relative` the keys of the sinks stand where the last query sees them.
        """
        k = self.k
        if self.relative and self.sinks:
            last = self.positions.max(-1)
            shift = jnp.maximum(last - (self.lengths - 1), 0)[:, 0]  # i32[B], tokens dropped
            first = k[:, :, : self.sinks]
            sinks = jnp.arange(first.shape[2], dtype=jnp.int32)[None]
            sinks = jnp.broadcast_to(sinks, (k.shape[0], first.shape[2]))
            first = unrotate(self.rope, first, sinks)
            first = rotate(self.rope, first, sinks + shift[:, None])
            k = jnp.concatenate([first.astype(k.dtype), k[:, :, self.sinks :]], 2)
        return k, self.v, self.positions


def rolling_bytes(tokens: int, shape: PromptShape, scored: bool) -> int:
    """Live bytes of `Rolling` with `tokens` tokens per KV head, in one row and layer."""
    slot = 2 * shape.head_dim * shape.itemsize + 4 + (4 if scored else 0)
    return shape.kv_heads * (tokens * slot + 4)
