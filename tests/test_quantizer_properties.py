"""What holds for every quantizer whatever the prompt: drawn lengths, seeds and odd values."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from kvjax import accounting, registry
from tests import prompts
from tests.prompts import compress, step
from tests.test_properties import BASE, COLUMNS, FAST, LAYER, ROWS, row_of

QUANTIZERS = [n for n in registry.names() if hasattr(registry.get(n), "points")]


@functools.cache
def method_of(name):
    return prompts.small(registry.make(name, k_bits=4, v_bits=4))


@jax.jit
def materialize(cache):
    return cache.materialize()


def run(name, rows):
    prompt = prompts.build([row_of(*row) for row in rows], BASE)
    cache = compress(method_of(name), prompt, LAYER)
    inputs = prompts.step_inputs(BASE, 2, lengths=[row[0] for row in rows])
    return prompt, cache, np.asarray(step(cache, *inputs)[0])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_token_is_there_and_close(name):
    @settings(FAST, max_examples=15)
    @given(ROWS)
    def check(rows):
        prompt, cache, out = run(name, rows)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, run(name, rows)[2])
        k, v, where = (np.asarray(x) for x in materialize(cache))
        stored = accounting.live_bytes(cache).stored
        for i, (n, _, value) in enumerate(rows):
            assert stored[i] == method_of(name).layer_bytes(BASE.row._replace(num_tokens=n))
            for h in range(BASE.kv_heads):
                assert sorted(where[i, h][where[i, h] >= 0].tolist()) == list(range(n))
                at = np.argsort(where[i, h], kind="stable")[-n:]
                for read, given_ in ((k, prompt.k), (v, prompt.v)):
                    exact = np.asarray(given_)[i, h, COLUMNS - n :]
                    gap = np.linalg.norm(read[i, h, at] - exact)
                    # 4 bits: a fifteenth of the range a group, or a tenth of the norm
                    assert gap <= 0.2 * np.linalg.norm(exact) + 1e-6, (value, gap)

    check()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_row_is_independent_of_its_neighbours(name):
    @settings(FAST, max_examples=8)
    @given(ROWS, ROWS)
    def check(rows, others):
        _, cache, out = run(name, rows)
        _, beside, near = run(name, [others[0], rows[1], others[2]])
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(beside), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])
        np.testing.assert_array_equal(out[1], near[1])

    check()
