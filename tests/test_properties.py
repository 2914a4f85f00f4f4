"""What holds for every evictor whatever the prompt: drawn lengths, seeds and odd values."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import accounting, registry
from tests import prompts
from tests.prompts import Shape, compress, step

# Few shapes and budgets, so that programs are reused; what is drawn is data.
COLUMNS, BATCH, BUDGET = 48, 3, 12
BASE = Shape(16, 4, 2, (COLUMNS,) * BATCH, columns=COLUMNS)
LAYER = prompts.info(BASE)
FORMS = {
    "h2o": {"recent": 3},
    "tova": {},
    "streaming_llm": {"when": "step", "positions": "cache"},
    "snapkv": {"window": 4, "kernel": 3},
    "pyramidkv": {"window": 4, "kernel": 3},
    "adakv": {"window": 4, "kernel": 3},
    "expected_attention": {"future": 32},
    "knorm": {},
    "keydiff": {},
    "random": {},
}
FAST = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = st.sampled_from(["plain", "zero", "constant", "ties", "huge", "tiny", "one loud token"])
ROWS = st.lists(
    st.tuples(st.integers(1, COLUMNS), st.integers(0, 10**6), VALUES), min_size=BATCH,
    max_size=BATCH,
)  # fmt: skip


def row_of(length, seed, value):
    row = prompts.tokens_of(seed, length, BASE)
    rng = np.random.default_rng(seed)
    for x in row.values():
        if value in ("zero", "constant"):
            x[:] = 0.3 * (value == "constant")
        elif value == "ties":
            x[:] = x[:, :1]
        elif value in ("huge", "tiny"):
            x *= {"huge": 1e4, "tiny": 1e-12}[value] / np.abs(x).max()
        elif value == "one loud token":
            x[:, rng.integers(length)] *= 1e3
    return row


@functools.cache
def method_of(name):
    method = registry.make(name, budget=BUDGET, **FORMS[name])
    return method.resolve(BASE.row) if hasattr(method, "resolve") else method


def run(name, rows, steps=2):
    """The cache after the prompt, and outputs and cache after `steps` tokens, as numpy."""
    prompt = prompts.build([row_of(*row) for row in rows], BASE)
    cache = compress(method_of(name), prompt, LAYER)
    inputs = prompts.step_inputs(BASE, steps, lengths=[row[0] for row in rows])
    out, after = step(cache, *inputs)
    return prompt, cache, np.asarray(out), after


@functools.partial(jax.jit)
def materialize(cache):
    return cache.materialize()


def test_every_evictor_is_drawn():
    assert set(FORMS) == {n for n in registry.names() if hasattr(registry.get(n), "with_budget")}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_kept(name):
    """U01, U03, U25: finite, within budget, protected kept, real tokens only, itself alone."""
    method = method_of(name)

    @FAST
    @given(ROWS)
    def check(rows):
        prompt, cache, out, after = run(name, rows)
        assert np.isfinite(out).all()
        again = run(name, rows)
        for a, b in zip(jax.tree.leaves((cache, out)), jax.tree.leaves(again[1:3]), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        # at the grain of KV heads, U15: never a query head's copy
        room = BATCH * 2 * (BUDGET + 1) * 2 * BASE.dim * 4
        assert accounting.cache_bytes(cache).body <= room
        k, v, where = (np.asarray(x) for x in materialize(cache))
        stored = accounting.live_bytes(cache).stored
        for i, (n, _, _) in enumerate(rows):
            kept = [head[head >= 0] for head in where[i]]
            if name == "adakv":
                assert sum(map(len, kept)) == 2 * min(BUDGET, n)
            else:
                assert all(len(head) == min(BUDGET, n) for head in kept)
            assert stored[i] == method.layer_bytes(BASE.row._replace(num_tokens=n))
            for h, head in enumerate(kept):
                assert len(set(head.tolist())) == len(head) >= 1
                assert head.min() >= 0 and head.max() < n  # no pad
                for name_, first, last in (
                    ("window", n - 4, n), ("recent", n - 3, n), ("sinks", 0, 4),
                ):  # fmt: skip
                    if hasattr(method, name_):
                        must = np.arange(max(first, 0), min(last, n))
                        assert np.isin(must, head).all(), (name_, head)
                at = np.argsort(where[i, h], kind="stable")[-len(head) :]
                own = np.asarray(prompt.v)[i, h, COLUMNS - n + np.sort(head)]
                np.testing.assert_array_equal(v[i, h, at], own)  # a token's own value
        new = np.asarray(materialize(after)[2])
        for i, (n, _, _) in enumerate(rows):
            for head in new[i]:
                assert (n + 1) in head  # the last token is attended at once

    check()


@pytest.mark.parametrize("name", FORMS)
def test_a_row_is_independent_of_its_neighbours(name):
    @settings(FAST, max_examples=8)
    @given(ROWS, ROWS)
    def check(rows, others):
        _, cache, out, _ = run(name, rows)
        _, beside, near, _ = run(name, [others[0], rows[1], others[2]])
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(beside), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])
        np.testing.assert_array_equal(out[1], near[1])

    check()


def test_one_program_for_all_of_it():
    """U31: other lengths, seeds and values are data."""
    before = compress._cache_size()
    for rows in (
        [(48, 1, "plain")] * 3, [(5, 2, "zero"), (1, 3, "ties"), (40, 4, "huge")],
    ):  # fmt: skip
        run("snapkv", rows)
        run("h2o", rows)
    assert compress._cache_size() - before <= 2
