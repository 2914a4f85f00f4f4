"""The page pool: allocation, return and reuse, rows that share it, its two kinds of bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode
from kvjax.methods.full import Full
from kvjax.methods.paged import Paged
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step

PAGE = 8
SHAPE = Shape(16, 4, 2, (25, 8, 1), columns=27)
release = fast_jit(lambda cache, rows: cache.release(rows))
admit = fast_jit(lambda cache, row, prompt: cache.admit(row, prompt))


def cache_of(shape=SHAPE, reserve=16, **changes):
    method = Paged(page_size=PAGE, **changes)
    return compress(method, prompts.prompt(shape), prompts.info(shape, reserve))


def pages_of(cache):
    """Pages of each row, and the free ones; every page must be in exactly one place."""
    rows = [[int(p) for p in row if p >= 0] for row in cache.table]
    free = [int(p) for p in cache.free if p >= 0]
    every = sorted(free + [p for row in rows for p in row])
    assert every == list(range(cache.free.shape[0]))
    for row, length in zip(rows, cache.lengths, strict=True):
        assert len(row) == -(-int(length) // PAGE)
    return rows, free


def test_a_page_belongs_to_one_row_or_to_none_through_steps():
    cache = cache_of()
    assert [len(row) for row in pages_of(cache)[0]] == [4, 1, 1]
    inputs = prompts.step_inputs(SHAPE, 16)
    for i in range(16):
        _, cache = step(cache, *(x[:, :, i : i + 1] for x in inputs[:3]), inputs[3][:, i : i + 1])
        rows, _ = pages_of(cache)
        assert [len(row) for row in rows] == [-(-(n + i + 1) // PAGE) for n in SHAPE.lengths]


def test_every_residue_of_the_last_page_is_the_full_cache():
    shape = Shape(16, 4, 2, tuple(range(9, 18)))
    inputs = prompts.step_inputs(shape, 9)
    want = step(compress(Full(), prompts.prompt(shape), prompts.info(shape)), *inputs)[0]
    got = step(cache_of(shape), *inputs)[0]
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


def test_released_pages_are_reused_and_the_other_rows_do_not_notice():
    cache = cache_of(num_pages=10)
    rows, free = pages_of(cache)
    cache = release(cache, jnp.asarray([True, False, False]))
    assert int(cache.lengths[0]) == 0
    assert set(pages_of(cache)[1]) == set(free) | set(rows[0])
    new = Shape(16, 4, 2, (30,))
    cache = admit(cache, 0, prompts.prompt(new, 7))
    assert set(pages_of(cache)[0][0]) & set(rows[0])  # its first pages are those given back
    rows = [prompts.tokens_of(seed, n, SHAPE) for seed, n in ((7, 30), (1, 8), (2, 1))]
    together = prompts.build(rows, SHAPE._replace(lengths=(30, 8, 1), columns=30))
    inputs = prompts.step_inputs(SHAPE, 4, lengths=(30, 8, 1))
    want = step(compress(Full(), together, prompts.info(SHAPE)), *inputs)[0]
    np.testing.assert_allclose(np.asarray(step(cache, *inputs)[0]), np.asarray(want), atol=1e-5)


def test_repeated_rows_write_to_pages_of_their_own():
    cache = decode.select_rows((cache_of(),), jnp.asarray([1, 1, 0, 1]))[0]
    rows, _ = pages_of(cache)
    assert len({p for row in rows for p in row}) == sum(len(row) for row in rows)
    lengths = (8, 8, 25, 8)
    inputs = prompts.step_inputs(SHAPE, 3, lengths=lengths)  # other new tokens in each row
    out, after = step(cache, *inputs)
    pages_of(after)
    own = [prompts.tokens_of(seed, n, SHAPE) for seed, n in ((1, 8), (1, 8), (0, 25), (1, 8))]
    same = prompts.build(own, SHAPE._replace(lengths=lengths, columns=25))
    want, _ = step(compress(Full(), same, prompts.info(SHAPE)), *inputs)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=1e-5)
    again = prompts.step_inputs(SHAPE, 1, seed=5, lengths=[n + 3 for n in lengths])
    assert np.ptp(np.asarray(step(after, *again)[0])[[0, 1, 3]], axis=0).max() > 1e-3


def test_a_pool_that_is_too_small_is_refused_before_anything_is_decoded():
    cache = cache_of(num_pages=5)  # the rows need 4 + 1 + 1
    assert int(cache.room().min()) < 0
    enough = cache_of(num_pages=9)
    assert enough.room().tolist() == [7 + PAGE, 0 + PAGE, 7 + PAGE]
    with pytest.raises(ValueError, match="page_size=0"):
        compress(Paged(page_size=0), prompts.prompt(SHAPE), prompts.info(SHAPE))


def test_bytes_are_pages_and_tokens():
    cache = cache_of()
    token = 2 * 2 * 16 * 4
    tokens, pages = np.array(SHAPE.lengths), np.array([4, 1, 1])
    assert accounting.live_bytes(cache).body.tolist() == (pages * PAGE * token).tolist()
    assert accounting.live_bytes(cache, page=1).body.tolist() == (tokens * token).tolist()
    wider = accounting.live_bytes(cache, page=32).body
    assert wider.tolist() == [32 * token] * 3
    assert float(cache.fragmentation()) == pytest.approx(1 - 34 / 48)
    assert accounting.cache_bytes(cache).total == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_evicted_tokens_free_pages_only_whole():
    """The same rounding for a cache that is not paged: what a paged allocator would hold."""
    from kvjax.methods.adakv import AdaKV

    shape = Shape(16, 4, 2, (60,))
    method = AdaKV(budget=20, window=8)
    cache = compress(method, prompts.prompt(shape), prompts.info(shape))
    lengths = np.asarray(cache.body.lengths)[0]
    token = 2 * 16 * 4
    assert accounting.live_bytes(cache, page=1).body[0] == lengths.sum() * token
    filled = int(np.asarray(cache.body.filled)[0, 0])
    assert accounting.live_bytes(cache, page=PAGE).body[0] == -(-filled // PAGE) * PAGE * token
