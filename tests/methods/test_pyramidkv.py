"""PyramidKV's budgets: the total is exact; what the reference and kvpress spend instead."""

import itertools

import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.methods.pyramidkv import PyramidKV
from kvjax.select import pyramid_budgets
from kvjax.types import PromptShape
from tests import prompts
from tests.methods.test_snapkv import chosen, scores_of
from tests.prompts import Shape, fast_jit
from tests.test_conformance import LENGTHS, prefilled, tiny

SHORT = Shape(16, 2, 1, (9,))


def reference(budget, window, num_layers, beta, num_tokens):
    """Whole-number budgets as the paper's code computes them, the window included."""
    mean = budget - window
    if num_tokens < budget:
        return [num_tokens] * num_layers
    if num_tokens < 2 * mean:
        return [budget] * num_layers
    least = mean // beta
    most = 2 * mean - least
    if most >= num_tokens - window:
        most = num_tokens - window
        least = 2 * mean - most
    step = (most - least) // (num_layers - 1)
    return [most - layer * step + window for layer in range(num_layers)]


@pytest.mark.parametrize(
    "budget,num_tokens,mean", [(128, 4096, 142.5), (512, 4096, 518.5), (2048, 8192, 2057.5)]
)
def test_the_reference_spends_more_than_its_budget_and_ours_does_not(budget, num_tokens, mean):
    theirs = reference(budget, 32, 32, 20, num_tokens)
    ours = pyramid_budgets(budget, 32, 32, 20.0, num_tokens)
    assert np.mean(theirs) == mean > budget == np.mean(ours)
    # the same pyramid: the same base, and a top that differs by what rounding left over
    assert abs(ours[0] - theirs[0]) <= 1
    assert all(0 <= a - b <= 2 * (mean - budget) + 1 for a, b in zip(theirs, ours, strict=True))


def test_the_references_pyramid_goes_from_220_to_65():
    theirs = reference(128, 32, 32, 20, 4096)
    assert (theirs[0], theirs[-1]) == (220, 65)
    ours = pyramid_budgets(128, 32, 32, 20.0, 4096)
    assert ours[0] == 219 and ours[-1] == 37  # 32 + 96 / 20 = 36.8


def test_totals_are_exact_and_budgets_fall():
    grid = itertools.product(
        (33, 64, 100, 128, 511, 1024, 4000), (1, 8, 32), (1, 2, 3, 30, 32, 80),
        (1.0, 1.5, 20.0, 1e6), (None, 70, 150, 1100, 8192),
    )  # fmt: skip
    for budget, window, layers, beta, tokens in grid:
        got = pyramid_budgets(budget, window, layers, beta, tokens)
        case = (budget, window, layers, beta, tokens)
        assert sum(got) == layers * budget, case
        assert all(a >= b for a, b in itertools.pairwise(got)), case
        assert min(got) >= window, case
        if tokens is not None and budget <= tokens:
            assert max(got) <= tokens, case
        if beta == 1.0:
            assert max(got) - min(got) <= 1, case
        elif layers == 30 and beta == 20.0 and (tokens or 9999) > 2 * budget:
            assert got[-1] - window <= (budget - window) / 20 + 1 < got[0] - window
    with pytest.raises(ValueError, match="beta=0.5 must be at least 1"):
        pyramid_budgets(64, 8, 4, 0.5)


def kvpress_budget(layer, num_layers, num_tokens, fraction, window, beta):
    """PyramidKVPress's tokens kept in a layer, None where it falls back to the same for all."""
    mean = num_tokens * fraction
    least, most = mean / beta, 2 * mean - mean / beta
    if most >= num_tokens - window:
        most = num_tokens - window
        least = 2 * mean - most
    if not num_tokens >= most >= least >= window:
        return None
    return round(most - layer * (most - least) / (num_layers - 1))


@pytest.mark.parametrize("fraction", [0.4, 0.5, 0.6])
@pytest.mark.parametrize("beta", [4.0, 20.0])
def test_kvpress_keeps_as_many_where_it_does_not_fall_back(fraction, beta):
    """Its total counts the window inside a layer's number; ours adds the window to the line."""
    tokens, window, layers = 4000, 64, 32
    theirs = [kvpress_budget(i, layers, tokens, fraction, window, beta) for i in range(layers)]
    assert None not in theirs
    ours = pyramid_budgets(int(tokens * fraction) + window, window, layers, beta, tokens)
    assert all(abs(a - window - b) <= 1 for a, b in zip(ours, theirs, strict=True))
    assert kvpress_budget(0, layers, 4096, 0.1, window, 20.0) is None  # 90 % removed: SnapKV


def test_a_compressed_model_holds_the_total_exactly():
    """U05, U14: measured on the arrays, a whole model's bytes are layers times the budget."""
    model, _ = tiny()
    method = PyramidKV(budget=40, window=8)
    caches = decode.compress(method, prefilled().prompts, model, reserve=4)
    held = np.stack([np.asarray(c.body.lengths) for c in caches])  # [L, B, K]
    budgets = pyramid_budgets(40, 8, 2, 20.0, max(LENGTHS))
    assert held[:, 0, 0].tolist() == budgets and budgets[0] > 60 > 20 > budgets[1]
    assert (held.sum(0) == 2 * 40).all()
    row = PromptShape(max(LENGTHS), 2, 16, 4)
    stored = accounting.live_bytes(caches).stored
    assert (stored == 2 * accounting.layer_bytes(method, row, 2)).all()
    assert stored[0] == 2 * accounting.layer_bytes(registry.make("snapkv", budget=40), row)


def test_a_layer_selects_as_snapkv():
    shape = Shape(16, 4, 2, (90, 61), columns=96)
    prompt = prompts.prompt(shape)
    method = PyramidKV(budget=24, window=8, kernel=5, pooling="max").resolve(shape.row)
    layers = [method.for_layer(i, 4) for i in range(4)]
    assert sum(m.budget for m in layers) == 4 * 24 and layers[0].budget > layers[3].budget
    select = fast_jit(PyramidKV.select, static_argnums=2)
    q, k = (np.asarray(x, np.float64) for x in (prompt.q, prompt.k))
    for layer in (layers[0], layers[3]):
        columns, lengths = (np.asarray(x) for x in select(layer, prompt, prompts.info(shape)))
        assert (lengths == layer.budget).all()
        for row, n in enumerate(shape.lengths):
            own = slice(96 - n, 96)
            scores = scores_of(q[row, :, own], k[row, :, own], 2, 8, 5, "max")
            for h in range(2):
                want = chosen(np.round(scores[h], 7), layer.budget, 8, n)
                assert (columns[row, h] - (96 - n)).tolist() == want


def test_the_last_layers_keep_the_window_at_the_smallest_budget():
    model, _ = tiny()
    for label in ("pyramidkv", "pyramid:adakv"):
        method = registry.make(label, window=8, kernel=5)
        row = PromptShape(max(LENGTHS), 2, 16, 4)
        for budget in (method.smallest, 9):
            at = method.with_budget(budget)
            caches = decode.compress(at, prefilled().prompts, model, reserve=4)
            held = sum(np.asarray(c.body.lengths) for c in caches)
            assert (held.sum(1) == 2 * 2 * budget).all() and held.min() >= 16
            assert all(int(c.body.lengths.min()) >= 8 for c in caches)
            stored = accounting.live_bytes(caches).stored[0]
            assert stored == 2 * accounting.layer_bytes(at, row, 2)


def test_budgets_below_the_window_are_refused():
    with pytest.raises(ValueError, match="budget=7 must be at least 8 tokens per KV head"):
        PyramidKV(budget=7, window=8).for_layer(0, 2)
    for label in ("snapkv", "pyramidkv", "adakv"):  # no queries to observe with
        method = registry.make(label, window=0, budget=4)
        with pytest.raises(ValueError, match="window=0 must be at least 1"):
            method.compress(prompts.prompt(SHORT), prompts.info(SHORT))
