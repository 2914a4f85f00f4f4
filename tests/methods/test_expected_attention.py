"""Expected attention and KeyDiff against their definitions, in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import registry
from kvjax.methods.expected_attention import ExpectedAttention
from kvjax.methods.keydiff import KeyDiff
from kvjax.rope import Rope, rotate
from kvjax.types import LayerInfo, PromptKV
from tests import prompts
from tests.methods.test_h2o import softmax
from tests.prompts import Shape, fast_jit

SHAPE = Shape(16, 6, 2, (60, 33, 3), columns=64)
FULL = prompts.rope(16)
PARTIAL = Rope(tuple(float(100.0**-x) for x in (0, 0.25, 0.5)), 1.25)  # 6 of 16 dimensions


def matrix(rope, position, dim):
    """Rotation to a position as a matrix, the attention scaling included."""
    half, turn = len(rope.inv_freq), np.eye(dim)
    for i, frequency in enumerate(rope.inv_freq):
        c, s = np.cos(position * frequency), np.sin(position * frequency)
        c, s = c * rope.attention_scaling, s * rope.attention_scaling
        turn[i, i] = turn[i + half, i + half] = c
        turn[i, i + half], turn[i + half, i] = -s, s
    return turn


def prompt_with(rope):
    """A ragged prompt under a rope of its own; pads are garbage."""
    rng = np.random.default_rng(0)
    q, k, v = ((300 * rng.normal(size=(3, h, 64, 16))).astype(np.float32) for h in (6, 2, 2))
    for i, n in enumerate(SHAPE.lengths):
        row = prompts.tokens_of(i, n, SHAPE)
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            x[i, :, 64 - n :] = row[name]
        q[i] += 0.3  # queries have a mean
    starts = jnp.asarray([64 - n for n in SHAPE.lengths], jnp.int32)
    positions = jnp.arange(64, dtype=jnp.int32)[None] - starts[:, None]
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    return PromptKV(rotate(rope, q, positions), rotate(rope, k, positions), k, v, starts), q


def oracle(method, rope, q, prompt, row):
    """Scores [K, n - sinks] of a row, from the definition; q [N, n, H] unrotated."""
    n = SHAPE.lengths[row]
    k, v = (np.asarray(x, np.float64)[row, :, 64 - n :] for x in (prompt.k, prompt.v))
    q = np.asarray(q, np.float64)[row, :, 64 - n :]
    turn = np.mean([matrix(rope, n + i, 16) for i in range(method.future)], 0)
    out = np.zeros((2, n - method.sinks))
    for head in range(6):
        mean = q[head, method.sinks :].mean(0)
        spread = np.cov(q[head, method.sinks :].T, bias=True)
        keys = k[head // 3, method.sinks :]
        logits = keys @ turn @ mean / 4
        if method.covariance:
            logits += np.einsum("sh,hi,si->s", keys, turn @ spread @ turn.T, keys) / 2 / 16
        out[head // 3] += softmax(logits) / 3
    if not method.value_norm:
        return out
    return (out + method.epsilon) * np.linalg.norm(v[:, method.sinks :], axis=-1)


@pytest.mark.parametrize(
    "change,rope",
    [
        ({}, FULL),
        ({"covariance": False, "epsilon": 0.01, "future": 40}, FULL),
        ({"value_norm": False, "future": 40, "sinks": 0}, PARTIAL),
    ],
)
def test_expected_attention_is_the_definition(change, rope):
    method = registry.make("expected_attention", budget=20, **change)
    prompt, q = prompt_with(rope)
    layer = LayerInfo(2, None, 8, rope)
    got = np.asarray(fast_jit(ExpectedAttention.score, static_argnums=2)(method, prompt, layer))
    select = fast_jit(ExpectedAttention.select, static_argnums=2)
    columns, lengths = (np.asarray(x) for x in select(method, prompt, layer))
    assert np.isfinite(got).all()
    for row, n in enumerate(SHAPE.lengths[:2]):
        want = oracle(method, rope, q, prompt, row)
        first = 64 - n + method.sinks
        np.testing.assert_allclose(got[row, :, first:], want, atol=1e-5, rtol=2e-4)
        for head in range(2):
            best = np.argsort(-want[head], kind="stable")[: 20 - method.sinks] + method.sinks
            kept = columns[row, head, : lengths[row, head]] - (64 - n)
            assert kept.tolist() == sorted([*range(method.sinks), *best.tolist()])
    assert lengths[2].tolist() == [3, 3]  # a row of sinks alone is kept whole


def test_keydiff_is_the_definition():
    prompt = prompts.prompt(SHAPE)
    method, layer = KeyDiff(budget=15), prompts.info(SHAPE)
    got = np.asarray(fast_jit(KeyDiff.score, static_argnums=2)(method, prompt, layer))
    columns, lengths = (
        np.asarray(x) for x in fast_jit(KeyDiff.select, static_argnums=2)(method, prompt, layer)
    )
    for row, n in enumerate(SHAPE.lengths):
        k = np.asarray(prompt.k, np.float64)[row, :, 64 - n :]
        unit = k / np.linalg.norm(k, axis=-1, keepdims=True)
        mean = unit.mean(1, keepdims=True)
        want = -(unit * mean).sum(-1) / np.linalg.norm(mean, axis=-1)
        np.testing.assert_allclose(got[row, :, 64 - n :], want, atol=1e-5)
        for head in range(2):
            best = sorted(np.argsort(-want[head], kind="stable")[:15].tolist())
            kept = columns[row, head, : lengths[row, head]] - (64 - n)
            assert kept.tolist() == best


def test_refusals():
    with pytest.raises(ValueError, match="budget=4 must be at least 5 tokens per KV head .sinks=4"):
        registry.make("expected_attention", budget=4).select(
            prompts.prompt(SHAPE), prompts.info(SHAPE)
        )
