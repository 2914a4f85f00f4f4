"""Several turns on one compressed context, on a small random model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry, turns
from kvjax.types import PromptShape
from models import decoder
from models.config import Config

CONFIG = Config(
    architecture="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, vocab_size=61, norm_epsilon=1e-5, rope_theta=10000.0,
    max_position_embeddings=512, windows=(None, None),
)  # fmt: skip
LENGTHS = np.array([60, 45])
RNG = np.random.default_rng(0)
CONTEXT = [RNG.integers(0, 61, n).tolist() for n in LENGTHS]
FIRST, SECOND = [[5, 9, 3], [7, 7]], [[11], [2, 30, 8]]


@functools.cache
def tiny():
    return decoder.model(CONFIG), decoder.init(CONFIG, jax.random.key(3))


@functools.cache
def prefilled():
    model, params = tiny()
    return decode.prefill(model, params, *decode.left_pad(CONTEXT), dtype=jnp.float32)


def compressed(label, reserve=40, **changes):
    model, _ = tiny()
    return decode.compress(
        registry.make(label, **changes), prefilled().prompts, model, reserve=reserve
    )


def ask(caches, positions, questions, keep_answer, new=6, stop_ids=()):
    return turns.ask(
        *tiny(), caches, positions, questions, max_new_tokens=new, keep_answer=keep_answer,
        stop_ids=stop_ids, keep_logits=True,
    )  # fmt: skip


METHODS = [
    ("full", {}),
    ("snapkv", {"budget": 30, "window": 8}),
    ("kivi", {"group": 16, "residual_length": 16, "k_bits": 4, "v_bits": 4}),
    ("h2o", {"budget": 24}),
    ("paged", {}),
]


@pytest.mark.parametrize("label,changes", METHODS, ids=[m[0] for m in METHODS])
def test_a_dropped_answer_leaves_no_trace(label, changes):
    start = jax.tree.map(np.asarray, compressed(label, **changes))
    turn = ask(compressed(label, **changes), LENGTHS, FIRST, keep_answer=False)
    for a, b in zip(jax.tree.leaves(turn.caches), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    np.testing.assert_array_equal(turn.positions, LENGTHS)
    again = ask(turn.caches, turn.positions, FIRST, keep_answer=False)
    np.testing.assert_array_equal(again.generation.logits, turn.generation.logits)


def test_a_kept_answer_is_part_of_the_full_caches_conversation():
    first = ask(compressed("full"), LENGTHS, FIRST, keep_answer=True)
    said = np.asarray(first.generation.tokens)
    np.testing.assert_array_equal(first.positions, LENGTHS + [3, 2] + 6)
    second = ask(first.caches, first.positions, SECOND, keep_answer=True)
    model, params = tiny()
    whole = [
        c + q + said[i].tolist() + s
        for i, (c, q, s) in enumerate(zip(CONTEXT, FIRST, SECOND, strict=True))
    ]
    fresh = decode.prefill(model, params, *decode.left_pad(whole), dtype=jnp.float32)
    np.testing.assert_allclose(second.generation.logits[:, 0], fresh.logits, atol=2e-4)


def test_a_stop_token_is_not_stored():
    free = ask(compressed("full"), LENGTHS, FIRST, keep_answer=True)
    stop = int(np.asarray(free.generation.tokens)[0, 2])
    turn = ask(compressed("full"), LENGTHS, FIRST, keep_answer=True, stop_ids=[stop])
    ends = np.asarray(turn.generation.tokens)[0].tolist().index(stop)
    assert turn.positions[0] == LENGTHS[0] + 3 + ends
    held = np.asarray(turn.caches[0].materialize()[2])[0, 0]
    assert sorted(held[held >= 0].tolist()) == list(range(turn.positions[0]))


def recent_of(turn, questions, window):
    tokens = []
    for i, context in enumerate(CONTEXT):
        said = [t for t in np.asarray(turn.generation.tokens)[i].tolist() if t >= 0]
        tokens.append((context + questions[i] + said)[-window:])
    return jnp.asarray(tokens, jnp.int32)


def test_recompressing_the_full_cache_is_compressing_the_conversation():
    """Nothing was lost yet, so the prompt that comes back is the one a fresh prefill gives."""
    turn = ask(compressed("full"), LENGTHS, FIRST, keep_answer=True)
    method = registry.make("snapkv", budget=24, window=8)
    model, params = tiny()
    got = turns.recompress(model, params, turn.caches, method, recent_of(turn, FIRST, 8), reserve=8)
    whole = [
        c + q + np.asarray(turn.generation.tokens)[i].tolist()
        for i, (c, q) in enumerate(zip(CONTEXT, FIRST, strict=True))
    ]
    fresh = decode.prefill(model, params, *decode.left_pad(whole), dtype=jnp.float32)
    want = decode.compress(method, fresh.prompts, model, reserve=8)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.body.positions, b.body.positions)
        np.testing.assert_allclose(a.body.k, b.body.k, atol=1e-3)


@pytest.mark.parametrize("label", ["snapkv", "knorm", "streaming_llm", "random"])
def test_a_fixed_budget_holds_over_many_turns(label):
    changes = {"budget": 24} | ({"window": 8} if label == "snapkv" else {})
    method = registry.make(label, **changes)
    caches, positions = compressed(label, reserve=16, **changes), LENGTHS
    history = [list(c) for c in CONTEXT]
    for questions in (FIRST, SECOND, FIRST):
        turn = ask(caches, positions, questions, keep_answer=True)
        for row, question in enumerate(questions):
            said = np.asarray(turn.generation.tokens)[row]
            history[row] += question + said[said >= 0].tolist()
        recent = jnp.asarray([h[-8:] for h in history], jnp.int32)
        caches = turns.recompress(*tiny(), turn.caches, method, recent, reserve=16)
        positions = turn.positions
        for cache in caches:
            assert (np.asarray(cache.body.lengths) == 24).all()
            where = np.asarray(cache.body.slot_positions())
            assert (where.max((1, 2)) < positions).all() and (where >= 0).all()
            if label in ("snapkv", "streaming_llm"):  # the last tokens, at their true positions
                for row, end in enumerate(positions):
                    assert np.isin(np.arange(end - 8, end), where[row, 0]).all()
    assert positions.min() > 60


def test_recompressing_a_quantized_conversation_at_a_ratio():
    turn = ask(compressed("turboquant", k_bits=4, v_bits=4), LENGTHS, FIRST, keep_answer=True)
    shape = PromptShape(int(turn.positions.max()), 2, 16, 4)
    method = accounting.solve(registry.make("snapkv", window=8), shape.full_bytes * 2 / 3, shape)
    caches = turns.recompress(*tiny(), turn.caches, method, recent_of(turn, FIRST, 8), reserve=8)
    stored = accounting.live_bytes(caches).stored
    assert stored[0] <= 2 * shape.full_bytes * 2 / 3


def test_what_cannot_be_recompressed_says_so():
    turn = ask(compressed("snapkv", budget=24, window=8), LENGTHS, FIRST, keep_answer=True)
    recent = recent_of(turn, FIRST, 8)

    def again(method, recent=recent, caches=turn.caches):
        return turns.recompress(*tiny(), caches, method, recent, reserve=8)

    with pytest.raises(ValueError, match="all queries"):
        again(registry.make("expected_attention", budget=20))
    with pytest.raises(ValueError, match="h2o.kivi ranks by all queries"):
        again(registry.make("h2o+kivi"))
    with pytest.raises(ValueError, match="window=32"):
        again(registry.make("snapkv", budget=40))
    with pytest.raises(ValueError, match="window=32"):
        again(registry.make("snapkv+kivi"))
    with pytest.raises(ValueError, match="needs all of them"):
        again(registry.make("kivi", group=16, residual_length=16))
    with pytest.raises(ValueError, match="must have 1 or more"):
        ask(turn.caches, turn.positions, [[1], []], keep_answer=False)
    ragged = compressed("adakv", budget=24, window=8)
    counts = np.asarray(ragged[0].body.lengths)
    assert (counts[:, 0] != counts[:, 1]).any()
    with pytest.raises(ValueError, match="as many"):
        again(dataclasses.replace(registry.make("knorm"), budget=9), caches=ragged)
