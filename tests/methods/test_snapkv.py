"""SnapKV's selection against numpy, step by step as the reference describes it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.snapkv import SnapKV
from tests import prompts
from tests.prompts import Shape, fast_jit

LAYER = prompts.info(Shape(16, 2, 1, (9,)))


def select(method, prompt):
    return fast_jit(SnapKV.select, static_argnums=2)(method, prompt, LAYER)


def scores_of(q, k, kv_heads, window, kernel, pooling):
    """Pooled scores [K, n - W] of one row, float64; q [N, n, H], k [K, n, H], both rotated."""
    heads, n, dim = q.shape
    group = heads // kv_heads
    out = []
    for h in range(kv_heads):
        total = np.zeros(n)
        for g in range(group):
            s = q[h * group + g, n - window :] @ k[h].T / np.sqrt(dim)
            s[np.arange(n)[None] > np.arange(n - window, n)[:, None]] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            total += (p / p.sum(-1, keepdims=True)).sum(0)
        total = total[: n - window] / (group * window)
        half = kernel // 2
        fill = 0.0 if pooling == "avg" else -np.inf
        padded = np.pad(total, half, constant_values=fill)
        runs = np.stack([padded[i : i + n - window] for i in range(kernel)])
        out.append(runs.mean(0) if pooling == "avg" else runs.max(0))
    return np.stack(out)


def chosen(scores, budget, window, n):
    """Positions kept by one KV head: the window and the best before it, ties to the earlier."""
    order = np.argsort(-scores, kind="stable")[: budget - window]
    return sorted(order.tolist()) + list(range(n - window, n))


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("heads,kv_heads", [(4, 2), (3, 3)])
def test_selection_is_numpys_for_ragged_rows(pooling, heads, kv_heads):
    shape = Shape(16, heads, kv_heads, (90, 61), columns=96)
    prompt = prompts.prompt(shape)
    method = SnapKV(budget=24, window=8, kernel=5, pooling=pooling)
    columns, lengths = (np.asarray(x) for x in select(method, prompt))
    q, k = (np.asarray(x, np.float64) for x in (prompt.q, prompt.k))
    for row, n in enumerate(shape.lengths):
        scores = scores_of(q[row, :, 96 - n :], k[row, :, 96 - n :], kv_heads, 8, 5, pooling)
        assert (lengths[row] == 24).all()
        for h in range(kv_heads):
            want = chosen(np.round(scores[h], 7), 24, 8, n)
            assert (columns[row, h] - (96 - n)).tolist() == want
        assert len({tuple(c) for c in columns[row].tolist()}) == kv_heads  # heads choose alone


def test_ties_go_to_the_earlier_token_and_never_cost_the_window():
    shape = Shape(16, 2, 1, (50, 30), columns=50)
    rows = [prompts.tokens_of(0, n, shape) for n in shape.lengths]
    for row in rows:
        row["k"][:] = row["q"][:] = 0  # every token the same score
    prompt = prompts.build(rows, shape)
    columns, _ = select(SnapKV(budget=12, window=8, kernel=1), prompt)
    assert (np.asarray(columns)[0, 0]).tolist() == [0, 1, 2, 3, *range(42, 50)]
    assert (np.asarray(columns)[1, 0] - 20).tolist() == [0, 1, 2, 3, *range(22, 30)]


def test_the_window_survives_infinite_scores_before_it():
    shape = Shape(16, 2, 1, (40,))
    row = prompts.tokens_of(0, 40, shape)
    row["q"][:, 32:] = 1.0
    row["k"][:, :20] = 50.0  # all attention goes to 20 tokens
    columns, _ = select(SnapKV(budget=10, window=8, kernel=1), prompts.build([row], shape))
    assert np.asarray(columns)[0, 0, -8:].tolist() == list(range(32, 40))


def test_prompts_up_to_the_budget_are_kept_whole():
    shape = Shape(16, 2, 1, (20, 5), columns=24)
    columns, lengths = select(SnapKV(budget=64, window=8), prompts.prompt(shape))
    assert np.asarray(lengths)[:, 0].tolist() == [20, 5]
    assert np.asarray(columns)[0, 0, :20].tolist() == list(range(4, 24))
    assert np.asarray(columns)[1, 0, :5].tolist() == list(range(19, 24))


def test_the_window_counts_inside_the_budget():
    prompt = prompts.prompt(Shape(16, 2, 1, (40,)))
    with pytest.raises(ValueError, match="budget=7 must be at least 8 tokens .*window=8"):
        SnapKV(budget=7, window=8).select(prompt, LAYER)
    for change in ({"kernel": 4}, {"pooling": "mean"}):
        with pytest.raises(ValueError, match="must be"):
            dataclasses.replace(SnapKV(budget=16, window=8), **change).select(prompt, LAYER)
    lengths = SnapKV(budget=16, window=8).select(prompt, LAYER)[1]
    assert jnp.array_equal(lengths, jnp.full((1, 1), 16))
