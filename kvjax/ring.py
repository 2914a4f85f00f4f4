"""Codes for old tokens and an exact ring for recent ones: storage that quantizers share."""

from dataclasses import replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Partial, dense_partial, finish, merge, visible
from kvjax.pallas import partial
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.rope import Rope, rotate
from kvjax.storage import shift, write_rows
from kvjax.types import LayerInfo, PromptKV


@pytree
class RingCache:
    """Codes for tokens [0, folded) of a row, an exact ring for the others; slot = token index.

    Invariants, a row at a time: token i >= folded is in ring slot i modulo the ring's size, which
    no row outgrows as long as `flush` is called whenever R single tokens were appended. A token's
    position is its index plus `shift`.
    """

    # attend(q) -> Partial over [0, folded), materialize() -> k, v, fold(k, v, rows) -> Self
    body: Any
    k_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="recent")  # rotated
    v_ring: Array = array("batch", "kv_head", "slot", "head_dim", valid="recent")
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    shift: Array = array("batch", role=METADATA)  # i32[B], position minus token index
    residual: int = static()  # R, tokens that are folded at once
    kept: int = static()  # newest tokens that a fold leaves exact
    rope: Rope = static()
    evicts = False

    @classmethod
    def of(
        cls, body: Any, k: Array, v: Array, prompt: PromptKV, info: LayerInfo, residual: int,
        kept: int,
    ) -> Self:  # fmt: skip
        """The cache of a prompt that `body` has coded; k, v [B, K, S, H] are left-aligned."""
        lengths = (prompt.k.shape[2] - prompt.starts).astype(jnp.int32)
        ring = kept + 2 * residual - 1  # kept + R - 1 after a flush, R more before the next one
        index = jnp.maximum(ring_tokens(lengths, ring), 0)
        return cls(
            body, take(k, index), take(v, index), lengths, shift(prompt),
            residual=residual, kept=kept, rope=info.rope,
        )  # fmt: skip

    @property
    def step_limit(self) -> int:
        """Tokens that one step can append: R."""
        return self.residual

    @property
    def flush_every(self) -> int:
        """Rows are looked at for a whole block of R tokens when a position is a multiple of it."""
        return self.residual

    @property
    def recent(self) -> Array:
        """i32[B], tokens that are read exactly."""
        return self.lengths - self.body.folded

    def room(self) -> Array:
        """i32[B], tokens that can still be appended."""
        return self.body.capacity - self.lengths

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T <= R tokens, attend. See `types.LayerCache.step`.

        Raises:
            ValueError: for more tokens than the residual window.
        """
        steps, ring = k.shape[2], self.k_ring.shape[2]
        if steps > self.residual:
            raise ValueError(f"{steps} tokens at once exceed residual_length={self.residual}.")
        if steps > 1:  # the ring may be as full as single tokens leave it
            self = self.flush()
        dtype, real = q.dtype, positions >= 0
        q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
        index = self.lengths[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        slots = jnp.where(real, index % ring, ring)
        cache = replace(
            self,
            k_ring=write_rows(self.k_ring, k, slots),
            v_ring=write_rows(self.v_ring, v, slots),
            lengths=self.lengths + real.sum(-1, dtype=jnp.int32),
        )
        index = ring_tokens(cache.lengths, ring)
        exact = jnp.where(index >= self.body.folded[:, None], index + self.shift[:, None], -1)
        part = dense_partial(q, cache.k_ring, cache.v_ring, visible(positions, exact))
        out = finish(merge(self.body.attend(q), part))
        return jnp.where(real[:, None, :, None], out, 0.0).astype(dtype), cache

    def flush(self) -> Self:
        """Code the oldest R exact tokens of every row that then still has `kept` of them."""
        block = self.body.folded[:, None] + jnp.arange(self.residual, dtype=jnp.int32)[None]
        slots = block % self.k_ring.shape[2]
        due = self.recent >= self.kept + self.residual
        body = self.body.fold(take(self.k_ring, slots), take(self.v_ring, slots), due)
        return replace(self, body=body)

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense float32, in token order. See `types.LayerCache`."""
        k, v = self.body.materialize()
        batch, heads, slots, _ = k.shape
        index = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
        old = (index < self.body.folded[:, None])[:, None, :, None]
        ring = index % self.k_ring.shape[2]
        k, v = (
            jnp.where(old, x, take(exact, ring).astype(x.dtype))
            for x, exact in ((k, self.k_ring), (v, self.v_ring))
        )
        positions = jnp.where(index < self.lengths[:, None], index + self.shift[:, None], -1)
        return k, v, jnp.broadcast_to(positions[:, None], (batch, heads, slots))


def ring_tokens(lengths: Array, size: int) -> Array:
    """i32[B, size], the index of the token in each slot of a ring, -1 = none."""
    last = lengths[:, None] - 1
    index = last - (last - jnp.arange(size, dtype=jnp.int32)[None]) % size
    return jnp.where((index >= 0) & (last >= 0), index, -1)


def take(x: Array, index: Array) -> Array:
    """Slots i32[B, M] of [B, K, S, ...]: [B, K, M, ...]."""
    return jax.vmap(lambda row, at: row[:, at])(x, index)


def attend_decoded(materialize: Any, q: Array, body: Any) -> Partial:
    """Attention over a body that is decoded as it is read, by queries that come after all of it.

    Args:
        materialize: body -> k, v [B, K, S, H].
        q: [B, N, T, H], rotated.
        body: a node with `folded` i32[B], the valid slots of each row.
    """
    # The barrier keeps XLA from hoisting the decoding of the body out of a decode loop.
    q, body = lax.optimization_barrier((q, body))
    q, k, v = partial.decoded(lambda q, body: (q, *materialize(body)), body.folded, q, body)
    valid = jnp.arange(k.shape[2])[None] < body.folded[:, None]
    shape = (q.shape[0], 1, q.shape[2], k.shape[2])
    return dense_partial(q, k, v, jnp.broadcast_to(valid[:, None, None], shape))
