"""Selections against numpy: protected columns, ties, odd numbers, budgets over layers and heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import select
from tests.prompts import fast_jit

STARTS = jnp.asarray([0, 9, 17], jnp.int32)
TOTAL = 20
top_columns = fast_jit(select.top_columns, static_argnums=1)
adaptive_mask = fast_jit(select.adaptive_mask, static_argnums=1)


def best(scores, budget, protected, start):
    """Columns kept of one row and head: protected, then larger scores, then earlier columns."""
    worth = np.where(protected, np.inf, scores)
    order = sorted(range(start, len(scores)), key=lambda c: (-worth[c], c))
    return sorted(order[:budget])


@pytest.mark.parametrize("budget", [1, 5, 20, 50])
def test_top_columns_are_numpys_with_ties_and_odd_numbers(budget):
    rng = np.random.default_rng(budget)
    odd = [np.nan, np.inf, -np.inf, 3e38, -3e38]
    for trial in range(20):
        scores = rng.integers(0, 4, (3, 2, TOTAL)).astype(np.float32)  # many ties
        scores.reshape(-1)[rng.integers(0, scores.size, 2 * trial)] = rng.choice(odd, 2 * trial)
        protected = rng.random((3, 1, TOTAL)) < 0.1
        columns, lengths = top_columns(jnp.asarray(scores), budget, STARTS, jnp.asarray(protected))
        columns, lengths = np.asarray(columns), np.asarray(lengths)
        assert columns.shape == (3, 2, min(budget, TOTAL))
        for row, start in enumerate(STARTS.tolist()):
            for head in range(2):
                n = lengths[row, head]
                worth = np.nan_to_num(scores[row, head], nan=-3e38, posinf=3e38, neginf=-3e38)
                want = best(worth, budget, protected[row, 0], start)
                assert columns[row, head, :n].tolist() == want
                assert (columns[row, head, n:] == TOTAL).all()


def test_a_protected_column_never_loses_to_an_equal_score():
    """The window's own maximum as its score, and an older token that ties with it."""
    scores = jnp.zeros((1, 1, TOTAL)).at[0, 0, 2:5].set(jnp.inf)
    recent = select.recent_columns(TOTAL, 3)[None, None]
    columns, _ = top_columns(scores, 4, STARTS[:1], recent)
    assert columns[0, 0].tolist() == [2, 17, 18, 19]


def test_columns_by_name():
    assert select.real_columns(STARTS, TOTAL).sum(1).tolist() == [20, 11, 3]
    sinks = np.asarray(select.sink_columns(STARTS, TOTAL, 4))
    assert [np.flatnonzero(row).tolist() for row in sinks] == [
        [0, 1, 2, 3], [9, 10, 11, 12], [17, 18, 19],
    ]  # fmt: skip
    assert np.flatnonzero(select.recent_columns(TOTAL, 2)).tolist() == [18, 19]
    with pytest.raises(ValueError, match="budget=0 must be at least 1 token"):
        select.top_columns(jnp.zeros((3, 1, TOTAL)), 0, STARTS)


def test_largest_remainder_is_the_nearest_rounding_with_that_sum():
    rng = np.random.default_rng(0)
    for _ in range(200):
        shares = rng.random(rng.integers(1, 9)) * 20
        total = int(round(shares.sum()))
        shares *= total / shares.sum()
        got = select.largest_remainder(shares.tolist(), total)
        assert sum(got) == total and (np.abs(np.array(got) - shares) < 1).all()
        up = [i for i, x in enumerate(got) if x > shares[i]]
        down = [i for i, x in enumerate(got) if x <= shares[i]]
        if up and down:
            fraction = shares - np.floor(shares)
            assert fraction[up].min() >= fraction[down].max() - 1e-9
    assert select.largest_remainder([0.5, 0.5, 1.0], 2) == [1, 0, 1]
    assert select.largest_remainder([0.1 + 0.2 + 0.7 - 1e-16, 2.0], 3) == [1, 2]


def shares_of(scores, budget, floor, free):
    """What each head of a pool deserves: real numbers [Q] and the columns in a head's own order."""
    count = min(int(free.sum()), budget)
    entries = [
        (-scores[h, c], h, c) for h in range(len(scores)) for c in np.flatnonzero(free)
    ]  # fmt: skip
    top = sorted(entries)[: count * len(scores)]
    deserved = np.array([sum(h == head for _, h, _ in top) for head in range(len(scores))])
    part = max(floor, 1 / count) if floor > 0 and count else floor
    own = [
        [c for _, c in sorted((-row[c], c) for c in np.flatnonzero(free))] for row in scores
    ]  # fmt: skip
    return deserved * (1 - part) + part * count, own, count


@pytest.mark.parametrize("pools,heads", [(1, 4), (2, 2), (1, 8), (4, 1)])
@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_adaptive_mask_shares_out_exactly(pools, heads, budget):
    rng = np.random.default_rng([pools, heads, budget])
    protected = np.zeros((3, TOTAL), bool)
    protected[:, -2:] = True
    for floor in (0.0, 0.05, 0.2, 0.7, 1.0):
        skewed = rng.normal(size=(3, pools, heads, 1))  # some heads deserve more
        scores = np.exp(2 * (skewed + rng.normal(size=(3, pools, heads, TOTAL)))).astype(np.float32)
        mask = np.asarray(
            adaptive_mask(
                jnp.asarray(scores), budget, jnp.float32(floor), STARTS, jnp.asarray(protected)
            )
        )
        for row, start in enumerate(STARTS.tolist()):
            free = (np.arange(TOTAL) >= start) & ~protected[row]
            assert mask[row][..., -2:].all() and not mask[row][..., :start].any()
            for pool in range(pools):
                share, own, count = shares_of(scores[row, pool], budget, floor, free)
                kept = [np.flatnonzero(mask[row, pool, h] & free).tolist() for h in range(heads)]
                caps = np.array([len(x) for x in kept])
                assert caps.sum() == count * heads, (floor, share, caps)
                assert (np.abs(caps - share) < 1).all(), (floor, share, caps)
                assert floor == 0 or count == 0 or caps.min() >= 1
                for h in range(heads):
                    assert kept[h] == sorted(own[h][: caps[h]])
                fraction = np.sort(share - np.floor(share + 1e-4))
                if (np.diff(fraction) > 1e-3).all():  # then there is one nearest rounding
                    assert caps.tolist() == select.largest_remainder(share.tolist(), caps.sum())


def test_many_poor_heads_and_one_rich():
    """Budgets of a token or two a head, most of it deserved by a few: nobody ends with none."""
    protected = jnp.zeros((3, TOTAL), bool)
    for heads, budget, rich in ((8, 1, 4), (4, 1, 2), (4, 2, 1), (16, 1, 5), (3, 1, 1)):
        scores = np.zeros((3, 1, heads, TOTAL), np.float32)
        scores[:, :, :rich] = 1 + np.random.default_rng(0).random((rich, TOTAL))
        for floor in (1e-3, 0.2, 0.5):
            mask = adaptive_mask(jnp.asarray(scores), budget, jnp.float32(floor), STARTS, protected)
            caps = np.asarray(mask).sum(-1)[0, 0]
            assert caps.sum() == heads * budget and caps.min() >= 1, (heads, budget, caps)


def test_adaptive_mask_at_its_ends():
    rng = np.random.default_rng(3)
    scores = rng.random((3, 1, 4, TOTAL)).astype(np.float32)
    none = jnp.zeros((3, TOTAL), bool)
    even = np.asarray(adaptive_mask(jnp.asarray(scores), 3, jnp.float32(1.0), STARTS, none))
    columns, _ = top_columns(jnp.asarray(scores[:, 0]), 3, STARTS)
    for row in range(3):
        for head in range(4):
            kept = np.flatnonzero(even[row, 0, head]).tolist()
            assert kept == columns[row, head].tolist()  # floor 1: as many for each, SnapKV's
    free = np.asarray(adaptive_mask(jnp.asarray(scores), 3, jnp.float32(0.0), STARTS, none))
    for row, start in enumerate(STARTS.tolist()):
        flat = np.where(np.arange(TOTAL) >= start, scores[row, 0], -1).reshape(-1)
        want = np.argsort(-flat, kind="stable")[:12]  # floor 0: the pool's best
        assert np.flatnonzero(free[row, 0].reshape(-1)).tolist() == sorted(want.tolist())
    odd = scores.copy()
    odd[:, :, 0] = np.nan
    odd[:, :, 1] = np.inf
    mask = np.asarray(adaptive_mask(jnp.asarray(odd), 3, jnp.float32(0.2), STARTS, none))
    assert (mask.sum((2, 3)) == 12).all()
    caps = mask.sum(-1)[0, 0]
    assert caps[1] == caps.max() and caps[0] == caps.min() == 1
