"""StreamingLLM, Knorm and Random: which tokens stay."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.knorm import Knorm
from kvjax.methods.random import Random
from kvjax.methods.streaming_llm import StreamingLLM
from tests import prompts
from tests.prompts import Shape, compress

RAGGED = Shape(16, 4, 2, (40, 23, 3), columns=48)


def kept(method, shape):
    """Positions kept, [row][head] lists."""
    columns, lengths = (
        np.asarray(x) for x in method.select(prompts.prompt(shape), prompts.info(shape))
    )
    total = shape.columns or max(shape.lengths)
    return [
        [(columns[i, h, : lengths[i, h]] - (total - n)).tolist() for h in range(shape.kv_heads)]
        for i, n in enumerate(shape.lengths)
    ]


def test_streaming_llm_keeps_the_first_real_tokens_and_the_last():
    got = kept(StreamingLLM(budget=12, sinks=4), RAGGED)
    assert got[0] == [[0, 1, 2, 3, *range(32, 40)]] * 2
    assert got[1] == [[0, 1, 2, 3, *range(15, 23)]] * 2
    assert got[2] == [[0, 1, 2]] * 2
    with pytest.raises(ValueError, match="budget=4 must exceed sinks=4"):
        kept(StreamingLLM(budget=4, sinks=4), RAGGED)


def test_streaming_llm_keeps_true_positions():
    shape = Shape(16, 2, 1, (40,))
    cache = compress(StreamingLLM(budget=8, sinks=2), prompts.prompt(shape), prompts.info(shape))
    assert cache.body.slot_positions()[0, 0].tolist() == [0, 1, 34, 35, 36, 37, 38, 39]
    np.testing.assert_array_equal(cache.body.k[0, 0, 2], prompts.prompt(shape).k[0, 0, 34])


def test_knorm_keeps_the_smallest_keys_of_each_head():
    prompt = prompts.prompt(RAGGED)
    norms = np.linalg.norm(np.asarray(prompt.k, np.float64), axis=-1)
    got = kept(Knorm(budget=9), RAGGED)
    for i, n in enumerate(RAGGED.lengths):
        for h in range(2):
            want = np.argsort(norms[i, h, 48 - n :], kind="stable")[:9]
            assert got[i][h] == sorted(want.tolist())
    assert got[0][0] != got[0][1]


def test_random_is_a_function_of_seed_head_and_position():
    method = Random(budget=9)
    got = kept(method, RAGGED)
    assert kept(method, RAGGED._replace(columns=61)) == got  # not of padding
    alone = kept(method, Shape(16, 4, 2, (40,)))
    assert alone[0] == got[0]  # nor of the batch
    other = dataclasses.replace(method, seed=7)
    assert kept(other, RAGGED)[0] != got[0]
    assert got[0][0] != got[0][1]
    layers = [kept(method.for_layer(i, 4), RAGGED)[0] for i in range(4)]
    assert layers[0] == got[0] and len({str(x) for x in layers}) == 4


def test_random_is_uniform():
    shape = Shape(16, 8, 8, (200,))
    counts = np.zeros(200)
    for seed in range(40):
        for head in kept(Random(seed=seed, budget=50), shape)[0]:
            counts[head] += 1
    expected = 40 * 8 * 50 / 200
    chi = ((counts - expected) ** 2 / expected).sum() / 0.75
    assert 130 < chi < 290  # 199 degrees of freedom: about five sigma each way
    assert abs(np.corrcoef(counts, np.arange(200))[0, 1]) < 0.3


def test_a_budget_of_one_keeps_one():
    for method in (Random(budget=1), Knorm(budget=1), StreamingLLM(budget=1, sinks=0)):
        assert all(len(head) == 1 for row in kept(method, RAGGED) for head in row)
        with pytest.raises(ValueError, match="budget=0"):
            kept(dataclasses.replace(method, budget=0), RAGGED)
    assert jnp.isfinite(prompts.prompt(RAGGED).k).all()
