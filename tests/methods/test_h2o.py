"""H2O against a token-by-token simulation; its sums against the whole matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.methods.h2o import H2O
from kvjax.types import PromptShape
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step
from tests.test_conformance import LENGTHS, prompt_tokens, tiny

SHAPE = Shape(16, 6, 2, (40, 23, 6), columns=44)
STEPS = 30


def turn(x, positions):
    """Rotate float64 [..., T, H] to positions [T]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None] * 10000.0 ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sequence(shape, row, steps=STEPS, seed=0):
    """q, k unrotated and v of a row's prompt and the tokens after it, float64 (as stored)."""
    prompt = prompts.tokens_of(seed + row, shape.lengths[row], shape)
    new = prompts.tokens_of(99 + row, steps, shape)
    return [np.concatenate([prompt[n], new[n]], 1).astype(np.float32) for n in ("q", "k", "v")]


def attention_of(q, k, head, group, query, kept):
    """Probabilities [G, len(kept)] of one query of a group over the kept tokens of its head."""
    rows = q[head * group : (head + 1) * group, query]
    return softmax(rows @ k[head, kept].T / np.sqrt(q.shape[-1]))


def simulate(shape, row, budget, recent, normalize=False):
    """H2O of one row, one token at a time: outputs [steps][N, H], kept positions [steps][K]."""
    q, k, v = (x.astype(np.float64) for x in sequence(shape, row))
    n, total = shape.lengths[row], q.shape[1]
    q, k = turn(q, range(total)), turn(k, range(total))
    group = shape.heads // shape.kv_heads
    outs, kept_at = np.zeros((STEPS, shape.heads, shape.dim)), [[] for _ in range(STEPS)]
    for head in range(shape.kv_heads):
        score = dict.fromkeys(range(n), 0.0)
        for i in range(n):  # the prompt: every query gives its attention away
            given = attention_of(q, k, head, group, i, list(range(i + 1))).sum(0)
            for j in range(i + 1):
                score[j] += given[j]

        def worth(j, last, score=score):
            return score[j] / (last - j + 1) if normalize else score[j]

        def drop(count, last, score=score, worth=worth):
            for _ in range(count):  # the least of what is not recent, the older of equals
                able = [j for j in score if j <= last - recent]
                del score[min(able, key=lambda j: (worth(j, last), j))]

        drop(max(n - budget, 0), n - 1)
        for t in range(STEPS):
            at = n + t
            drop(max(len(score) - budget, 0), at - 1)
            score[at] = 0.0
            kept = sorted(score)
            p = attention_of(q, k, head, group, at, kept)
            outs[t, head * group : (head + 1) * group] = p @ v[head, kept]
            for j, given in zip(kept, p.sum(0), strict=True):
                score[j] += given
            kept_at[t].append(kept)
    return outs, kept_at


def run(method, shape):
    """Outputs [B, steps, N, H] and kept positions [steps][B][K] of a cache."""
    cache = compress(method, prompts.prompt(shape), prompts.info(shape))
    q, k, v, positions = prompts.step_inputs(shape, STEPS)
    outs, kept, caches = [], [], [cache]
    for t in range(STEPS):
        at = slice(t, t + 1)
        out, cache = step(cache, q[:, :, at], k[:, :, at], v[:, :, at], positions[:, at])
        where = np.asarray(cache.materialize()[2])
        kept.append([[sorted(h[h >= 0].tolist()) for h in row] for row in where])
        outs.append(np.asarray(out)[:, :, 0])
        caches.append(cache)
    return np.stack(outs, 1), kept, caches


@pytest.mark.parametrize("normalize,recent", [(False, None), (True, 3), (False, 0)])
def test_every_step_is_the_simulations(normalize, recent):
    budget = 12
    method = H2O(budget=budget, recent=recent, normalize=normalize)
    outs, kept, caches = run(method, SHAPE)
    last = budget // 2 if recent is None else recent
    for row in range(3):
        want, positions = simulate(SHAPE, row, budget, last, normalize)
        for t in range(STEPS):
            assert kept[t][row] == positions[t], (row, t)
        np.testing.assert_allclose(outs[row], want, atol=2e-5)
    # the budget after every step: what survives, and the token that was just attended
    for cache in caches:
        assert int(cache.lengths.max()) <= budget + 1
        assert cache.k.shape[2] == budget + 1 and cache.scores.dtype == jnp.float32
    assert caches[-1].lengths.tolist() == [[13, 13]] * 3
    assert any(row[0] != row[1] for row in kept[-1])  # KV heads choose alone
    if last:
        assert all(set(range(67, 70)) <= set(head) for head in kept[-1][0])


def test_a_row_without_a_token_is_left_as_it_is():
    cache = compress(H2O(budget=12), prompts.prompt(SHAPE), prompts.info(SHAPE))
    q, k, v, positions = prompts.step_inputs(SHAPE, 1)
    out, after = step(cache, q, k, v, positions.at[0].set(-1))
    assert (np.asarray(out)[0] == 0).all() and (np.asarray(out)[1] != 0).any()
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[0], np.asarray(b)[0])
    assert (np.asarray(after.lengths)[1:] == [[13, 13], [7, 7]]).all()


def test_scores_are_float32_in_any_dtype():
    shape = Shape(64, 4, 2, (70,), "bfloat16")
    method = H2O(budget=20)
    cache = jax.eval_shape(lambda p: method.compress(p, prompts.info(shape)), prompts.prompt(shape))
    assert cache.scores.dtype == jnp.float32 and cache.k.dtype == jnp.bfloat16
    _, after = jax.eval_shape(lambda c, *x: c.step(*x), cache, *prompts.step_inputs(shape, 1))
    assert after.scores.dtype == jnp.float32


def sums_of(shape, row, seed=0):
    """Column sums of the whole causal matrix of one row's prompt, summed over the group [K, n]."""
    n, group = shape.lengths[row], shape.heads // shape.kv_heads
    q, k, _ = (x[:, :n].astype(np.float64) for x in sequence(shape, row, seed=seed))
    q, k = turn(q, range(n)), turn(k, range(n))
    s = np.einsum("nth,nsh->nts", q, np.repeat(k, group, 0)) / np.sqrt(shape.dim)
    p = softmax(np.where(np.tri(n, dtype=bool), s, -np.inf))
    return p.sum(1).reshape(shape.kv_heads, group, n).sum(1)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_prompt_form_keeps_the_heavy_and_the_recent(normalize):
    """U13: the queries of the whole prompt count, not the last window's."""
    method = H2O(budget=10, recent=4, normalize=normalize, when="prompt")
    prompt = prompts.prompt(SHAPE)
    select = fast_jit(H2O.select, static_argnums=2)
    columns, lengths = (np.asarray(x) for x in select(method, prompt, prompts.info(SHAPE)))
    for row, n in enumerate(SHAPE.lengths):
        sums = sums_of(SHAPE, row)
        worth = sums / np.arange(n, 0, -1) if normalize else sums
        for head in range(2):
            old = np.argsort(-worth[head, : max(n - 4, 0)], kind="stable")[: 10 - 4]
            want = sorted(old.tolist()) + list(range(max(n - 4, 0), n))
            got = columns[row, head, : lengths[row, head]] - (44 - n)
            assert got.tolist() == want
    scores = np.asarray(fast_jit(H2O.score, static_argnums=2)(method, prompt, prompts.info(SHAPE)))
    np.testing.assert_allclose(scores[1, :, 44 - 23 :], sums_of(SHAPE, 1), atol=1e-5)
    assert (scores[1, :, : 44 - 23] == 0).all()


@functools.cache
def prefilled(column_sums):
    model, params = tiny()
    tokens, starts = decode.left_pad(prompt_tokens(LENGTHS))
    return decode.prefill(model, params, tokens, starts, dtype=jnp.float32, column_sums=column_sums)


def test_sums_gathered_by_prefill_are_those_computed_here():
    model, _ = tiny()
    method = H2O(budget=30)
    with_sums, without = prefilled(True), prefilled(False)
    assert without.prompts[0].column_sums is None
    want = decode.compress(method, without.prompts, model, reserve=4)
    got = decode.compress(method, with_sums.prompts, model, reserve=4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-5)
    assert float(want[0].scores.sum()) > 0


def test_presets_and_shares():
    row = PromptShape(1000, 2, 64)
    paper = registry.make("paper:h2o").resolve(row)
    assert (paper.budget, paper._recent(), paper.when) == (200, 100, "step")
    rethink = registry.make("rethink:h2o")
    assert rethink.budget - rethink._recent() == 64 and rethink._recent() == 448
    kvpress = registry.make("kvpress:h2o")
    assert kvpress.normalize and kvpress.when == "prompt" and kvpress._recent() == 0
    assert registry.make("paper:h2o").layer_bytes(row) == paper.layer_bytes(row)
    # a budget in another unit takes the place of the share
    for budget in (accounting.Budget(tokens=64), accounting.Budget(ratio=10)):
        found = accounting.within(registry.make("paper:h2o"), budget, row)
        assert accounting.layer_bytes(found, row) < 0.6 * paper.layer_bytes(row)
        assert found.resolve(row).budget == found.budget and found.share is None
    model, _ = tiny()
    caches = decode.compress(registry.make("paper:h2o"), prefilled(True).prompts, model, reserve=4)
    assert caches[0].budget == 25  # 0.2 of the longest row, 128


def test_refusals():
    prompt, layer = prompts.prompt(SHAPE), prompts.info(SHAPE)
    for method, message in (
        (H2O(budget=8, recent=8), "budget=8 must be at least 9"),
        (H2O(budget=0), "budget=0 must be at least 1"),
        (H2O(when="always"), "when='always' must be 'step' or 'prompt'"),
        (H2O(share=0.2), "share=0.2"),  # tokens of what? `resolve` was not called
    ):
        with pytest.raises(ValueError, match=message):
            method.compress(prompt, layer)
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="must be in"):
            dataclasses.replace(H2O(), share=share).resolve(SHAPE.row)
