"""StreamingLLM against its papers' way: keys stored unrotated, rotated to their place in the cache
at every step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, registry, sharding
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.rolling import Rolling
from kvjax.types import PromptShape
from tests import prompts
from tests.methods.test_h2o import sequence, softmax, turn
from tests.prompts import Shape, compress, step

SHAPE = Shape(16, 4, 2, (40, 19, 2), columns=44)
STEPS = 44
BUDGET, SINKS = 12, 4


def attend(q, k, v, query, kept, places, place):
    """Output [N, H] of a query at `place` over kept tokens at `places`, from unrotated float64."""
    group = q.shape[0] // k.shape[0]
    q, k = turn(q[:, [query]], [place]), turn(k[:, kept], places)
    s = np.einsum("nth,nsh->nts", q, np.repeat(k, group, 0)) / np.sqrt(q.shape[-1])
    return np.einsum("nts,nsh->nth", softmax(s), np.repeat(v[:, kept], group, 0))[:, 0]


def reference(row, when, positions, start=None):
    """Outputs [STEPS, N, H] and kept tokens, everything rotated anew at every step."""
    q, k, v = (x.astype(np.float64) for x in sequence(SHAPE, row, STEPS))
    n = SHAPE.lengths[row]
    kept = list(range(n))
    if n > BUDGET:
        kept = kept[:SINKS] + kept[-(BUDGET - SINKS) :]
    outs, held = [], []
    for at in range(n, n + STEPS):
        if when == "step" and len(kept) > BUDGET:
            kept = kept[:SINKS] + kept[-(BUDGET - SINKS) :]
        kept = [*kept, at]
        where = list(range(len(kept))) if positions == "cache" else kept
        outs.append(attend(q, k, v, at, kept, where, where[-1]))
        held.append(kept)
    return np.stack(outs), held


def run(method, first=None):
    """Outputs [B, STEPS, N, H], kept positions and caches; tokens start at position `first`."""
    cache = compress(method, prompts.prompt(SHAPE), prompts.info(SHAPE))
    q, k, v, positions = prompts.step_inputs(SHAPE, STEPS)
    if first is not None:
        positions = jnp.broadcast_to(first + jnp.arange(STEPS, dtype=jnp.int32), positions.shape)
    outs, kept, caches = [], [], [cache]
    for t in range(STEPS):
        at = slice(t, t + 1)
        out, cache = step(cache, q[:, :, at], k[:, :, at], v[:, :, at], positions[:, at])
        where = np.asarray(cache.materialize()[2])
        kept.append([[sorted(h[h >= 0].tolist()) for h in row] for row in where])
        outs.append(np.asarray(out)[:, :, 0])
        caches.append(cache)
    return np.stack(outs, 1), kept, caches


@pytest.mark.parametrize("when", ["step", "prompt"])
@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_every_step_is_the_reference(when, positions):
    """U21, U22: both readings of a position, far past the budget."""
    method = StreamingLLM(budget=BUDGET, sinks=SINKS, when=when, positions=positions)
    outs, kept, caches = run(method)
    for row in range(3):
        want, held = reference(row, when, positions)
        for t in range(STEPS):
            assert kept[t][row] == [held[t]] * 2, (row, t)  # true positions, whatever is attended
        np.testing.assert_allclose(outs[row], want, atol=2e-5)
        # the first real tokens, pads before them or not
        assert kept[-1][row][0][:SINKS] == [0, 1, 2, 3]
    if when == "step":
        for cache in caches:
            assert int(cache.lengths.max()) <= BUDGET + 1 == cache.k.shape[2]
    else:
        assert (caches[-1].tail.lengths == STEPS).all()


def test_the_two_readings_differ_once_something_is_gone():
    cached, text = (reference(0, "step", p)[0] for p in ("cache", "absolute"))
    assert np.abs(cached - text).max() > 0.05
    cached, text = (reference(2, "step", p)[0][:8] for p in ("cache", "absolute"))
    np.testing.assert_allclose(cached, text, atol=1e-9)


def test_far_into_a_stream():
    """100,000 tokens on, angles of float32 are a little off and the reference's are not."""
    method = StreamingLLM(budget=BUDGET, sinks=SINKS, when="step", positions="cache")
    outs, _, _ = run(method, first=100_000)
    late = slice(BUDGET, None)  # the prompt's recent tokens are gone
    for row in range(2):
        want = reference(row, "step", "cache")[0]
        error = np.linalg.norm(outs[row, late] - want[late]) / np.linalg.norm(want[late])
        assert error < 0.02, error


def test_a_prompt_shorter_than_the_sinks():
    shape = Shape(16, 4, 2, (1, 1))
    method = StreamingLLM(budget=BUDGET, sinks=SINKS, when="step", positions="cache")
    cache = compress(method, prompts.prompt(shape), prompts.info(shape, reserve=1))
    k, _, where = jax.jit(Rolling.materialize)(cache)
    assert np.isfinite(k).all() and (where >= 0).sum((1, 2)).tolist() == [2, 2]
    out, cache = step(cache, *prompts.step_inputs(shape, 1))
    assert np.isfinite(out).all() and int(cache.positions.max()) == 1


def test_sharded_rows_and_heads_are_rotated_alike():
    """U27: the sinks' new place is worked out where their keys are."""
    mesh = sharding.make_mesh(data=2, model=4)
    shape = Shape(16, 8, 4, (40, 19))
    method = StreamingLLM(budget=BUDGET, sinks=SINKS, when="step", positions="cache")
    cache = compress(method, prompts.prompt(shape), prompts.info(shape))
    inputs = prompts.step_inputs(shape, 3)
    want, after = step(cache, *inputs)
    placed = sharding.shard(cache, mesh)
    assert not placed.k.sharding.is_fully_replicated
    got, new = step(placed, *inputs)
    np.testing.assert_allclose(got, want, atol=1e-5)
    k, also = (jax.jit(Rolling.materialize)(x)[0] for x in (new, after))
    np.testing.assert_allclose(k, also, atol=1e-5)


def test_presets_and_refusals():
    paper, rethink = (registry.make(f"{p}:streaming_llm") for p in ("paper", "rethink"))
    assert (paper.sinks, paper.budget, paper.when, paper.positions) == (4, 2004, "step", "cache")
    assert (rethink.sinks, rethink.budget - rethink.sinks) == (64, 448)
    kvpress = registry.make("kvpress:streaming_llm")
    assert (kvpress.sinks, kvpress.when, kvpress.positions) == (4, "prompt", "absolute")
    row = PromptShape(1000, 2, 64)
    found = accounting.solve(paper, row.full_bytes / 10, row)
    assert dataclasses.replace(found, budget=paper.budget) == paper
    prompt, layer = prompts.prompt(SHAPE), prompts.info(SHAPE)
    for change, message in (
        ({"when": "later"}, "when='later'"),
        ({"positions": "relative"}, "positions='relative'"),
        ({"budget": 4}, "budget=4 must exceed sinks=4"),
        ({"sinks": -1}, "sinks=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(StreamingLLM(), **change).compress(prompt, layer)
