"""AdaKV's selection against numpy; one pool of slots for all heads of a layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, registry, scores, select
from kvjax.attention import attend_dense
from kvjax.methods.adakv import AdaKV
from kvjax.pallas.ragged_decode.api import ragged_decode
from kvjax.rope import rotate
from kvjax.storage import BodyTail
from tests import prompts
from tests.methods.test_snapkv import chosen, scores_of
from tests.prompts import Shape, compress, fast_jit, step
from tests.test_select import shares_of

SHAPE = Shape(16, 8, 4, (90, 61, 20, 5), columns=96)
METHOD = AdaKV(budget=24, window=8, kernel=5, pooling="max", floor=0.2)
materialize = jax.jit(BodyTail.materialize)


def kept(method, prompt, shape, cache=None):
    """Positions kept, [row][head] lists."""
    cache = cache or compress(method, prompt, prompts.info(shape))
    where = np.asarray(materialize(cache)[2])
    return [[sorted(h[h >= 0].tolist()) for h in row] for row in where]


def pooled_scores(prompt, shape, row, method):
    n, own = shape.lengths[row], slice(96 - shape.lengths[row], 96)
    q, k = (np.asarray(x, np.float64)[row, :, own] for x in (prompt.q, prompt.k))
    if n <= method.window:
        return None
    scores = scores_of(q, k, shape.kv_heads, method.window, method.kernel, method.pooling)
    return np.round(scores, 7)


@pytest.mark.parametrize("pools", [1, 2, 4])
def test_heads_share_a_budget_as_numpy_says(pools):
    method = dataclasses.replace(METHOD, pools=pools)
    prompt = prompts.prompt(SHAPE)
    cache = compress(method, prompt, prompts.info(SHAPE))
    got = kept(method, prompt, SHAPE, cache)
    for row, n in enumerate(SHAPE.lengths):
        window = list(range(max(n - 8, 0), n))
        assert all(head[-len(window) :] == window for head in got[row])
        if n <= 24:  # nothing to drop
            assert got[row] == [list(range(n))] * 4
            continue
        scores = pooled_scores(prompt, SHAPE, row, method)
        for pool in range(pools):  # a pool is shared out within itself
            mine = slice(pool * 4 // pools, (pool + 1) * 4 // pools)
            share, own, count = shares_of(scores[mine], 16, method.floor, np.ones(n - 8, bool))
            caps = [len(head) - 8 for head in got[row][mine]]
            assert count == 16 and sum(caps) == 16 * 4 // pools
            assert (np.abs(np.array(caps) - share) < 1).all()
            for head, cap, order in zip(got[row][mine], caps, own, strict=True):
                assert head[:-8] == sorted(order[:cap])
    lengths = np.asarray(cache.body.lengths)
    assert lengths[0].std() > 0 or pools == 4  # heads do differ
    # allocated is kept, for the longest row: no slot of a pool is empty
    assert cache.body.k.shape == (4, pools, 24 * 4 // pools, 16)
    assert (np.asarray(cache.body.filled)[0] == 24 * 4 // pools).all()
    stored = accounting.live_bytes(cache).stored
    assert stored[0] == method.layer_bytes(SHAPE.row)
    assert stored[3] == 4 * 5 * (2 * 16 * 4 + 2) + 2 * 4 * 4 + 4  # a short row is charged its own


def test_the_ends_are_snapkv_and_a_plain_top_k():
    prompt = prompts.prompt(SHAPE)
    even = kept(dataclasses.replace(METHOD, floor=1.0), prompt, SHAPE)
    snapkv = registry.make("snapkv", budget=24, window=8, kernel=5, pooling="max")
    assert even == kept(snapkv, prompt, SHAPE)
    free = kept(dataclasses.replace(METHOD, floor=0.0), prompt, SHAPE)
    for row in range(2):
        scores = pooled_scores(prompt, SHAPE, row, METHOD)
        want = np.argsort(-scores.reshape(-1), kind="stable")[: 4 * 16]
        n = SHAPE.lengths[row]
        for head in range(4):
            mine = sorted((want[want // (n - 8) == head] % (n - 8)).tolist())
            assert free[row][head] == mine + list(range(n - 8, n))
            assert even[row][head] == chosen(scores[head], 24, 8, n)
    assert free != even


@pytest.mark.parametrize("group", ["sum", "mean", "max"])
def test_the_score_of_a_group(group):
    """U15: how query heads count is a setting; each head's own scores from numpy."""
    prompt = prompts.prompt(SHAPE)
    observed = fast_jit(scores.observed, static_argnums=(1, 2, 3, 4))
    got = np.asarray(observed(prompt, 8, 3, "avg", group))
    for row, n in enumerate(SHAPE.lengths[:2]):
        q, k = (np.asarray(x, np.float64)[row, :, 96 - n :] for x in (prompt.q, prompt.k))
        heads = scores_of(q, np.repeat(k, 2, 0), 8, 8, 1, "avg").reshape(4, 2, n - 8)
        want = getattr(heads, group)(1)
        padded = np.pad(want, ((0, 0), (1, 1)))
        want = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
        np.testing.assert_allclose(got[row, :, 96 - n : 88], want, atol=1e-6)
    with pytest.raises(ValueError, match="group='median'"):
        scores.observed(prompt, 8, 3, "avg", "median")


def test_a_head_whose_attention_is_spread_out_gets_more():
    """U30: not the other way round, and never the same for all."""
    shape = Shape(16, 4, 4, (90,), columns=96)
    row = prompts.tokens_of(0, 90, shape)
    row["k"] -= row["k"].mean(1, keepdims=True)  # nothing that all keys have in common
    row["q"][[0, 2]] *= 0.02  # all but even attention: every token counts
    for head in (1, 3):  # a few tokens take it all
        row["q"][head] = 6 * row["q"][head, -1:]
    prompt = prompts.build([row], shape)
    for floor in (0.0, 0.2, 0.6):
        method = dataclasses.replace(METHOD, floor=floor, kernel=1)
        lengths = [len(head) for head in kept(method, prompt, shape)[0]]
        assert sum(lengths) == 4 * 24
        assert min(lengths[0], lengths[2]) > max(lengths[1], lengths[3])
    assert min(lengths) - 8 >= int(0.6 * 16)


def test_no_head_is_left_without_a_token_of_its_own():
    """U02: a floor of half a token is a token; also where a few heads deserve everything."""
    shape = Shape(16, 8, 8, (90,), columns=96)
    row = prompts.tokens_of(0, 90, shape)
    row["q"][3:] *= 8
    row["k"][3:, 82:] *= 4  # five heads look at the window alone
    prompt = prompts.build([row], shape)
    for budget in (9, 13):
        method = dataclasses.replace(METHOD, budget=budget, floor=0.05, kernel=1)
        lengths = [len(head) for head in kept(method, prompt, shape)[0]]
        assert sum(lengths) == 8 * budget and min(lengths) >= 9, (budget, lengths)
        assert max(lengths) > budget or budget == 9


def test_steps_see_what_the_pool_holds():
    method, inputs = dataclasses.replace(METHOD, pools=2), prompts.step_inputs(SHAPE, 3)
    cache = compress(method, prompts.prompt(SHAPE), prompts.info(SHAPE))
    out, after = step(cache, *inputs)
    k, v, where = materialize(after)
    q = rotate(prompts.rope(16), inputs[0], inputs[3])
    np.testing.assert_allclose(out, attend_dense(q, k, v, inputs[3], where), atol=1e-5)


@pytest.mark.parametrize(
    "heads,kv_heads,pools,steps", [(8, 4, 1, 1), (8, 4, 2, 3), (6, 2, 2, 2), (4, 1, 1, 3)]
)
def test_ragged_decode_is_dense_attention_per_head(heads, kv_heads, pools, steps):
    rng = np.random.default_rng([heads, kv_heads, pools, steps])
    batch, slots, dim, each = 3, 20, 16, kv_heads // pools
    q = rng.normal(size=(batch, heads, steps, dim)).astype(np.float32)
    k, v = (rng.normal(size=(batch, pools, slots, dim)).astype(np.float32) for _ in range(2))
    k[:, :, -1] = v[:, :, -1] = 1e4  # an empty slot's garbage
    lengths = np.zeros((batch, pools, each), np.int32)
    for b in range(batch):
        for p in range(pools):
            cuts = np.sort(rng.integers(0, slots, each - 1)) if each > 1 else []
            lengths[b, p] = np.diff([0, *cuts, slots - 1])
    lengths[1, 0, 0] = 0  # a head without a slot
    starts = np.cumsum(lengths, -1) - lengths
    o, m, l = fast_jit(ragged_decode)(  # noqa: E741
        *(jnp.asarray(x) for x in (q, k, v)),
        jnp.asarray(starts.reshape(batch, -1), jnp.int32),
        jnp.asarray(lengths.reshape(batch, -1), jnp.int32),
    )
    group = heads // kv_heads
    for b in range(batch):
        for h in range(kv_heads):
            p, at = h // each, starts[b, h // each, h % each]
            own = slice(at, at + lengths[b, p, h % each])
            for g in range(h * group, (h + 1) * group):
                if own.start == own.stop:
                    assert (np.asarray(l)[b, g] == 0).all() and (np.asarray(o)[b, g] == 0).all()
                    continue
                s = q[b, g].astype(np.float64) @ k[b, p, own].T / 4
                e = np.exp(s - s.max(-1, keepdims=True))
                want = e / e.sum(-1, keepdims=True) @ v[b, p, own]
                np.testing.assert_allclose(o[b, g] / l[b, g][:, None], want, atol=1e-5)
                np.testing.assert_allclose(m[b, g] + np.log(l[b, g]),
                                           s.max(-1) + np.log(e.sum(-1)), atol=1e-5)  # fmt: skip


def test_refusals_and_presets():
    prompt = prompts.prompt(SHAPE)
    for change, message in (
        ({"pools": 3}, "pools=3 must divide the 4 KV heads"),
        ({"pools": 0}, "pools=0 must divide"),
        ({"budget": 7}, "budget=7 must be at least 8"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(METHOD, **change).compress(prompt, prompts.info(SHAPE))
    with pytest.raises(ValueError, match="layers='steps'"):
        dataclasses.replace(METHOD, layers="steps").for_layer(0, 2)
    with pytest.raises(ValueError, match="1 pools must divide"):
        z = jnp.zeros((1, 1, 4, 16))
        ragged_decode(
            jnp.zeros((1, 3, 1, 16)),
            z,
            z,
            jnp.zeros((1, 2), jnp.int32),
            jnp.zeros((1, 2), jnp.int32),
        )
    pyramid = registry.make("pyramid:adakv", budget=100)
    budgets = [pyramid.for_layer(i, 6).budget for i in range(6)]
    assert budgets == select.pyramid_budgets(100, 32, 6, 20.0)
    paper = registry.make("adakv:paper")
    assert (paper.floor, paper.window, paper.kernel, paper.pooling) == (0.2, 32, 7, "max")
