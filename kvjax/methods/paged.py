"""The paged full cache: one pool of pages that all rows of a batch share."""

from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.attention import Partial, dense_partial, finish, merge, visible
from kvjax.pallas.paged_decode.api import paged_decode
from kvjax.pallas.paged_decode.xla import gather_pages
from kvjax.pytree import METADATA, array, pytree, static
from kvjax.registry import register
from kvjax.rope import Rope, rotate
from kvjax.storage import left_align
from kvjax.types import LayerInfo, PromptKV, PromptShape


@pytree
class PagedCache:
    """Every token, exact, in pages of S slots; the rows take pages from one free list.

    Invariants: token t of row b is slot t % S of page table[b, t // S]; a row holds
    ceil(lengths / S) pages, table entries beyond are -1; `free` lists the pages of no row, then -1.
    The pool and the free list belong to no row: select rows with `select_rows`, not by indexing.
    """

    k_pages: Array = array("page", "kv_head", "slot", "head_dim", valid="lengths")  # [P,K,S,H]
    v_pages: Array = array("page", "kv_head", "slot", "head_dim", valid="lengths")  # [P,K,S,H]
    free: Array = array("page", role=METADATA)  # i32[P]
    table: Array = array("batch", "slot", role=METADATA, valid="num_pages")  # i32[B, M]
    lengths: Array = array("batch", role=METADATA)  # i32[B], tokens
    rope: Rope = static()
    impl: str = static("auto")
    step_limit = None
    flush_every = None
    evicts = False

    @property
    def page_size(self) -> int:
        """S, tokens."""
        return self.k_pages.shape[2]

    @property
    def num_pages(self) -> Array:
        """i32[B], pages that each row holds."""
        return -(-self.lengths // self.page_size)

    @property
    def num_free(self) -> Array:
        """i32[], pages of no row."""
        return (self.free >= 0).sum(dtype=jnp.int32)

    def fragmentation(self) -> Array:
        """f32[], share of the held slots that hold no token."""
        held = self.num_pages.sum() * self.page_size
        return 1 - self.lengths.sum() / jnp.maximum(held, 1)

    def room(self) -> Array:
        """i32[B], tokens that every row can append at once, in its last page and fair new ones.

        Negative where the pool had too few pages for what the row was given: tokens were lost.
        """
        batch, most = self.table.shape
        fair = jnp.minimum(self.num_free // batch, most - self.num_pages)
        room = (self.num_pages + fair) * self.page_size - self.lengths
        held = (self.table >= 0).sum(-1, dtype=jnp.int32)
        return jnp.where(held < self.num_pages, -1, room)

    def _take(self, counts: Array, most: int) -> tuple[Array, Self]:
        """Pages i32[B, most] for rows that need counts i32[B], -1 beyond; the free list shrinks."""
        first = jnp.cumsum(counts) - counts
        entry = jnp.arange(most, dtype=jnp.int32)[None]
        at = first[:, None] + entry
        pages = jnp.where(entry < counts[:, None], at, self.free.shape[0])
        pages = self.free.at[pages].get(mode="fill", fill_value=-1)
        taken = jnp.arange(self.free.shape[0]) < counts.sum()
        return pages, replace(self, free=_compact(jnp.where(taken, -1, self.free)))

    def _grow(self, new: Array, most: int) -> Self:
        """Hold pages for `new` i32[B] more tokens a row, at most `most`; lengths follow."""
        after = -(-(self.lengths + new) // self.page_size)
        pages, cache = self._take(after - self.num_pages, -(-most // self.page_size) + 1)
        entry = self.num_pages[:, None] + jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
        entry = jnp.where(entry < after[:, None], entry, self.table.shape[1])
        put = jax.vmap(lambda row, at, page: row.at[at].set(page, mode="drop"))
        return replace(cache, table=put(self.table, entry, pages), lengths=self.lengths + new)

    def _write(self, k: Array, v: Array, index: Array) -> Self:
        """Put k, v [B, K, T, H] at tokens i32[B, T] (-1 = nowhere) of pages that are held."""
        entry = jnp.clip(index // self.page_size, 0, self.table.shape[1] - 1)
        page = jnp.take_along_axis(self.table, entry, 1)
        page = jnp.where((index >= 0) & (page >= 0), page, self.free.shape[0])
        slot = jnp.maximum(index, 0) % self.page_size

        def put(pages, x):
            rows = x.swapaxes(1, 2).astype(pages.dtype)  # [B, T, K, H]
            return pages.at[page, :, slot].set(rows, mode="drop")

        return replace(self, k_pages=put(self.k_pages, k), v_pages=put(self.v_pages, v))

    def step(self, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Self]:
        """Append T tokens, attend. See `types.LayerCache.step`."""
        dtype, real = q.dtype, positions >= 0
        q, k = rotate(self.rope, q, positions), rotate(self.rope, k, positions)
        old = Partial(
            *paged_decode(q, self.k_pages, self.v_pages, self.table, self.lengths, impl=self.impl)
        )
        k, v = (x.astype(self.k_pages.dtype) for x in (k, v))
        new = dense_partial(q, k, v, visible(positions, positions))
        out = jnp.where(real[:, None, :, None], finish(merge(old, new)), 0.0)
        index = self.lengths[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)[None]
        cache = self._grow(real.sum(-1, dtype=jnp.int32), k.shape[2])
        return out.astype(dtype), cache._write(k, v, jnp.where(real, index, -1))

    def flush(self) -> Self:
        """Nothing to fold."""
        return self

    def materialize(self) -> tuple[Array, Array, Array]:
        """What step attends to, dense. See `types.LayerCache.materialize`."""
        k, v = (gather_pages(pages, self.table) for pages in (self.k_pages, self.v_pages))
        slots = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), k.shape[:3])
        return k, v, jnp.where(slots < self.lengths[:, None, None], slots, -1)

    def release(self, rows: Array) -> Self:
        """Give the pages of finished rows back.

        Args:
            rows: bool[B]; these rows are empty afterwards.
        """
        gone = jnp.where(rows[:, None], self.table, -1).reshape(-1)
        every = _compact(jnp.concatenate([self.free, gone]))[: self.free.shape[0]]
        return replace(
            self,
            free=every,
            table=jnp.where(rows[:, None], -1, self.table),
            lengths=jnp.where(rows, 0, self.lengths),
        )

    def admit(self, row: int | Array, prompt: PromptKV) -> Self:
        """Put a prompt of one row in the place of an empty row, in pages that are free.

        Args:
            row: i32[], which one; it must be empty (`release`).
            prompt: B = 1, a layer's finished prefill.
        """
        mine = jnp.arange(self.lengths.shape[0]) == row
        total = prompt.k.shape[2]
        count = jnp.where(mine, total - prompt.starts[0], 0).astype(jnp.int32)
        cache = self._grow(count, total)
        token = jnp.arange(total, dtype=jnp.int32)[None]
        index = jnp.where(token < count[:, None], token, -1)
        k, v = (left_align(x, prompt.starts) for x in (prompt.k, prompt.v))
        k, v = (jnp.broadcast_to(x, (len(mine), *x.shape[1:])) for x in (k, v))
        return cache._write(k, v, index)

    def select_rows(self, rows: Array) -> Self:
        """Reorder, repeat or drop rows: i32[R]; each gets pages of its own, in a pool as large or
        as R full rows need."""
        most = self.table.shape[1]
        pool = max(self.free.shape[0], rows.shape[0] * most)
        shape = (pool, *self.k_pages.shape[1:])
        table, lengths = self.table[rows], self.lengths[rows]
        empty = replace(
            self,
            k_pages=jnp.zeros(shape, self.k_pages.dtype),
            v_pages=jnp.zeros(shape, self.v_pages.dtype),
            free=jnp.arange(pool, dtype=jnp.int32),
            table=jnp.full_like(table, -1),
            lengths=jnp.zeros_like(lengths),
        )
        copy = empty._grow(lengths, most * self.page_size)
        to = jnp.where(copy.table >= 0, copy.table, pool)

        def put(pages, old):
            return pages.at[to].set(old[jnp.maximum(table, 0)], mode="drop")

        return replace(
            copy,
            k_pages=put(copy.k_pages, self.k_pages),
            v_pages=put(copy.v_pages, self.v_pages),
        )


def _compact(pages: Array) -> Array:
    """Move the entries of -1 to the end, the others in ascending order."""
    ascending = jnp.sort(jnp.where(pages < 0, 2**30, pages))
    return jnp.where(ascending < 2**30, ascending, -1)


@register("paged")
@pytree
class Paged:
    """Keep everything, in pages of `page_size` tokens.

    A row's unused slots are at most page_size - 1; live bytes count whole pages and table entries,
    `accounting.live_bytes(caches, page=1)` the tokens alone.

    Source: Kwon et al., PagedAttention (arXiv 2309.06180), section 4.
    Differs from the reference: a pool and a table for each layer.
    """

    page_size: int = static(16)  # S, tokens
    num_pages: int | None = static(None)  # of the pool; None: enough for every row to fill up
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """The same in every layer."""
        return self

    def exact(self) -> Self:
        """Itself."""
        return self

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer right after the prompt, whole pages."""
        pages = -(-shape.num_tokens // self.page_size)
        slots = pages * self.page_size * shape.kv_heads
        return 2 * slots * shape.head_dim * shape.itemsize + 4 * pages + 4

    def compress(self, prompt: PromptKV, info: LayerInfo) -> PagedCache:
        """Put every row's tokens in pages of its own.

        Raises:
            ValueError: for a page size or a pool below 1.
        """
        if self.page_size < 1 or (self.num_pages is not None and self.num_pages < 1):
            raise ValueError(
                f"page_size={self.page_size} and num_pages={self.num_pages} must be at least 1."
            )
        batch, heads, total, dim = prompt.k.shape
        most = -(-(total + info.reserve) // self.page_size)
        pool = batch * most if self.num_pages is None else self.num_pages
        pages = jnp.zeros((pool, heads, self.page_size, dim), prompt.k.dtype)
        empty = PagedCache(
            pages, jnp.zeros_like(pages), jnp.arange(pool, dtype=jnp.int32),
            jnp.full((batch, most), -1, jnp.int32), jnp.zeros(batch, jnp.int32),
            rope=info.rope, impl=self.impl,
        )  # fmt: skip
        lengths = (total - prompt.starts).astype(jnp.int32)
        k, v = (left_align(x, prompt.starts) for x in (prompt.k, prompt.v))
        token = jnp.arange(total, dtype=jnp.int32)[None]
        index = jnp.where(token < lengths[:, None], token, -1)
        return empty._grow(lengths, total)._write(k, v, index)
