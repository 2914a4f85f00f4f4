"""Evict, then quantize: what is left of a prompt, its bytes and its steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.attention import attend_dense
from kvjax.eviction import gather
from kvjax.methods.compose import Composed, compose
from kvjax.rope import rotate
from tests import prompts
from tests.prompts import Shape, compress, fast_jit, step
from tests.test_conformance import LENGTHS, prefilled, tiny

SHAPE = Shape(64, 4, 2, (128, 90), columns=130)
QUANTIZERS = [n for n in registry.names() if hasattr(registry.get(n), "full_layers")]
LAYER = prompts.info(SHAPE)


def both(name, budget=64, **changes):
    snapkv = registry.make("snapkv", budget=budget, window=8, kernel=5)
    quantizer = dataclasses.replace(prompts.small(registry.make(name)), **changes)
    return compose(snapkv, quantizer).resolve(SHAPE.row)


@fast_jit
def dense(cache, q, positions):
    k, v, where = cache.materialize()
    q, k, v = (x.astype(jnp.float32) for x in (rotate(LAYER.rope, q, positions), k, v))
    return attend_dense(q, k, v, positions, where), where


def test_gather_is_the_prompt_that_is_left():
    method = registry.make("snapkv", budget=100, window=8, kernel=5)
    prompt = prompts.prompt(SHAPE)
    columns, lengths = fast_jit(type(method).select, static_argnums=2)(method, prompt, LAYER)
    left = fast_jit(gather)(prompt, columns, lengths)
    assert left.k.shape == (2, 2, 100, 64) and left.starts.tolist() == [0, 10]
    assert left.next_positions.tolist() == [128, 90]
    for row, n in enumerate((100, 90)):
        for head in range(2):
            at = np.asarray(columns)[row, head, :n]
            np.testing.assert_array_equal(left.k[row, head, -n:], prompt.k[row, head, at])
            np.testing.assert_array_equal(left.v[row, head, -n:], prompt.v[row, head, at])
    np.testing.assert_array_equal(left.q, prompt.q[:, :, -100:])


@pytest.mark.parametrize("name", QUANTIZERS)
def test_steps_are_dense_attention_over_what_is_left(name):
    method = both(name)
    cache = compress(method, prompts.prompt(SHAPE), LAYER)
    q, k, v, positions = prompts.step_inputs(SHAPE, 42)
    held = np.asarray(dense(cache, q[:, :, :3], positions[:, :3])[1])
    assert ((held >= 0).sum(-1) == 64).all()  # half of the first row's tokens
    at = folds = 0
    for count in (1, 3) + (1,) * 36:  # three at once, causal among themselves; else two pads
        now = slice(at, at + 3)
        place = jnp.where(jnp.arange(3)[None] < count, positions[:, now], -1)
        if method.flush_every and decode.needs_flush(method.flush_every, np.asarray(place[:, 0])):
            before = [np.array(x) for x in jax.tree.leaves(cache)]
            cache = decode.flush((cache,))[0]
            after = map(np.asarray, jax.tree.leaves(cache))
            folds += any((a != b).any() for a, b in zip(before, after, strict=True))
        out, cache = step(cache, q[:, :, now], k[:, :, now], v[:, :, now], place)
        want, where = dense(cache, q[:, :, now], place)
        np.testing.assert_allclose(out, want, atol=1e-5 * max(1, np.abs(want).max()))
        at += count
    assert folds >= 1 or not method.flush_every
    for row, n in enumerate(SHAPE.lengths):  # positions go on from the true length
        for head in np.asarray(where)[row]:
            mine = np.sort(head[head >= 0])
            assert mine[-40:].tolist() == list(range(n, n + 40)) and len(mine) == 64 + 40


def test_removed_fractions_multiply():
    """U06: half the tokens at a fraction f of the bytes is f / 2, measured on the arrays."""
    shape = Shape(16, 2, 1, (1024,))  # long, so that the residual window counts little
    prompt, layer = prompts.prompt(shape), prompts.info(shape)
    methods = {
        "full": registry.make("full"),
        "kivi": prompts.small(registry.make("kivi")),
        "both": both("kivi", 512),
    }
    stored = {
        name: int(accounting.live_bytes(compress(method, prompt, layer)).stored[0])
        for name, method in methods.items()
    }
    part = stored["kivi"] / stored["full"]
    assert part < 0.5
    assert stored["both"] / stored["full"] == pytest.approx(part / 2, rel=0.15)
    assert stored["both"] < 0.6 * stored["kivi"]
    assert stored["both"] == methods["both"].layer_bytes(shape.row)


def test_labels_and_what_cannot_be_composed():
    method = registry.make("snapkv+kivi")
    assert isinstance(method, Composed) and method.name == "snapkv+kivi"
    assert registry.make("rethink:h2o+kivi").evictor.when == "prompt"
    for label, message in (
        ("adakv+kivi", "adakv selects no columns that are the same for all KV heads"),
        ("full+kivi", "full selects no columns"),
        ("kivi+snapkv", "kivi selects no columns"),
        ("snapkv+anchorkv", "anchorkv is no quantizer"),
        ("snapkv+full", "full is no quantizer"),
        ("snapkv+h2o", "h2o is no quantizer"),
        # its keys move; the quantizer would be handed those that did not
        ("paper:streaming_llm+kivi", "positions='cache'"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.make(label)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_fit_never_exceeds_its_target(name):
    row = SHAPE.row._replace(num_tokens=500)
    method = compose(registry.make("snapkv", window=8), prompts.small(registry.make(name)))
    smallest = accounting.layer_bytes(method.with_budget(8), row)
    for target in np.linspace(smallest, row.full_bytes / 4, 9):
        found = method.fit(target, row)
        assert accounting.layer_bytes(found, row) <= target
        assert 8 <= found.budget <= 500


def test_full_layers_leave_the_evictor_alone():
    model, _ = tiny()
    snapkv = registry.make("snapkv", budget=64, window=8, kernel=5)
    kivi = dataclasses.replace(prompts.small(registry.make("kivi")), full_layers=(0,))
    caches = decode.compress(compose(snapkv, kivi), prefilled().prompts, model, reserve=8)
    want = decode.compress(snapkv, prefilled().prompts, model, reserve=8)
    for a, b in zip(jax.tree.leaves(caches[0]), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert type(caches[1]) is not type(want[1])
    stored = [accounting.live_bytes([cache]).stored[0] for cache in caches]
    assert stored[1] < 0.8 * stored[0]
    row = Shape(16, 4, 2, LENGTHS).row
    method = compose(snapkv, kivi)
    assert accounting.layer_bytes(method, row, 2) == sum(stored) / 2


def test_generation_goes_on_from_the_true_length():
    """At 8 bits and with every token kept, the full cache's tokens."""
    model, params = tiny()
    kivi = prompts.small(registry.make("kivi", k_bits=8, v_bits=8))
    results = []
    for method in (registry.make("full"), compose(registry.make("snapkv", budget=500), kivi)):
        caches = decode.compress(method, prefilled().prompts, model, reserve=40)
        found, _ = decode.generate(
            model, params, caches, prefilled().logits, LENGTHS, max_new_tokens=6, keep_logits=True
        )
        results.append(np.asarray(found.logits))
    np.testing.assert_allclose(results[1][:, 0], results[0][:, 0])
    assert np.abs(results[1][:, 1] - results[0][:, 1]).max() < 0.1 * np.abs(results[0]).max()
