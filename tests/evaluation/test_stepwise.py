"""Answers step by step: those of the compiled loop, whatever else is in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import decode, registry
from kvjax.evaluation import stepwise
from kvjax.evaluation.stepwise import Sampling
from models import hub

PROMPTS = [[5, 9, 7], list(range(20, 60)), [3] * 11, [8, 4] * 30]
LIMIT = 24


@pytest.fixture(scope="module")
def loaded():
    return hub.load("tiny")


@pytest.fixture(scope="module")
def prefill(loaded):
    return decode.prefill(loaded.model, loaded.params, *decode.left_pad(PROMPTS, 64))


def answers(loaded, prefill, label="full", rows=None, **options):
    caches = decode.compress(registry.make(label), prefill.prompts, loaded.model, reserve=LIMIT)
    logits, positions = prefill.logits, prefill.lengths
    if rows is not None:
        caches = decode.select_rows(caches, jnp.asarray(rows))
        logits, positions = logits[jnp.asarray(rows)], positions[rows]
    options = {"limit": LIMIT, "stop_ids": (), "smallest": 1} | options
    return stepwise.answer(loaded.model, loaded.params, caches, logits, positions, **options)


def compiled(loaded, prefill, label, stop_ids):
    caches = decode.compress(registry.make(label), prefill.prompts, loaded.model, reserve=LIMIT)
    made, _ = decode.generate(
        loaded.model, loaded.params, caches, prefill.logits, prefill.lengths,
        max_new_tokens=LIMIT, stop_ids=stop_ids,
    )  # fmt: skip
    return [[int(t) for t in row if t >= 0] for row in np.asarray(made.tokens)]


@pytest.mark.parametrize("label", ["full", "h2o(budget=16)", "kivi(residual_length=32)"])
def test_answers_are_those_of_the_compiled_loop_while_the_batch_shrinks(loaded, prefill, label):
    free = compiled(loaded, prefill, label, ())
    stops = (free[0][1], free[2][5])  # ends some rows early, so that the batch is halved
    expected = compiled(loaded, prefill, label, stops)
    assert len({len(row) for row in expected}) > 1
    found = answers(loaded, prefill, label, stop_ids=stops)
    assert [list(a.tokens) for a in found] == expected
    assert [a.stopped for a in found] == [row[-1] in stops for row in expected]
    for answer in found:
        assert len(answer.gap) == len(answer.tokens) == len(answer.stop_probability)
        ends = answer.probability[-1] if answer.stopped else 0
        assert answer.stop_probability[-1] >= ends
        assert answer.kv_bytes > 0


@pytest.mark.parametrize("label", ["full", "h2o(budget=16)", "kivi(residual_length=32)", "paged"])
def test_a_row_that_ends_gives_its_place_to_a_waiting_one(loaded, prefill, monkeypatch, label):
    free = [list(a.tokens) for a in answers(loaded, prefill, label)]
    stops = (free[0][1], free[2][5])
    alone = answers(loaded, prefill, label, stop_ids=stops)
    steps, step = [], decode.decode_step
    monkeypatch.setattr(decode, "decode_step", lambda *a: steps.append(1) or step(*a))

    def wave(order, real=None):
        order = np.array(order)
        caches = decode.compress(registry.make(label), prefill.prompts, loaded.model, reserve=LIMIT)
        caches = decode.select_rows(caches, jnp.asarray(order))
        rows = prefill.logits[jnp.asarray(order)], prefill.lengths[order]
        return stepwise.Wave(caches, *rows, real)

    orders = ([0, 1, 2, 3], [3, 0, 1, 0], [2, 2, 0, 0])
    found = dict(
        stepwise.answers(
            loaded.model, loaded.params,
            (wave(order, 3 if i == 1 else None) for i, order in enumerate(orders)),
            limit=LIMIT, stop_ids=stops, smallest=1,
        )
    )  # fmt: skip
    expected = {4 * i + j: row for i, order in enumerate(orders) for j, row in enumerate(order)}
    del expected[7]  # it only filled up
    assert sorted(found) == sorted(expected)
    for number, row in expected.items():
        assert list(found[number].tokens) == list(alone[row].tokens)
        assert found[number].stopped == alone[row].stopped
        np.testing.assert_allclose(found[number].gap, alone[row].gap, atol=1e-5)
        if label != "paged":  # rows of one pool share its free list
            assert found[number].kv_bytes == alone[row].kv_bytes
    one_by_one = sum(max(len(alone[row].tokens) for row in order) - 1 for order in orders)
    if label == "paged":  # its rows cannot be moved: a wave after the other
        assert len(steps) == one_by_one
    else:
        assert len(steps) < one_by_one


def test_bytes_at_a_row_s_end_are_its_own_and_a_block_is_folded_once(loaded, prefill, monkeypatch):
    label, flushes, flush = "kivi(residual_length=32)", [], decode.flush
    given = [list(a.tokens) for a in answers(loaded, prefill, label)]
    stop = next(i for i in range(100) if all(i not in row for row in given))
    given[3][4:] = [stop]  # 60 tokens and 4 more: it ends just where its block is full
    monkeypatch.setattr(decode, "flush", lambda caches: flushes.append(1) or flush(caches))
    together = answers(loaded, prefill, label, forced=given, stop_ids=(stop,), smallest=9)
    assert together[3].stopped and len(flushes) == 2  # at 64 of this row, at 32 of the third
    for row, ids in enumerate(given):
        options = {"rows": np.array([row]), "forced": [ids], "stop_ids": (stop,)}
        (alone,) = answers(loaded, prefill, label, **options)
        assert alone.kv_bytes == together[row].kv_bytes


def test_caches_without_room_are_refused(loaded, prefill):
    with pytest.raises(ValueError, match="limit=26 exceeds the room of the cache, 24 tokens"):
        answers(loaded, prefill, limit=LIMIT + 2)


def test_statistics_are_those_of_the_logits(loaded, prefill):
    found = answers(loaded, prefill, stop_ids=(7,), limit=1)
    p = np.asarray(jax.nn.softmax(prefill.logits, -1))
    top = np.sort(p, -1)
    for i, answer in enumerate(found):
        assert answer.probability[0] == pytest.approx(top[i, -1], rel=1e-5)
        assert answer.gap[0] == pytest.approx(top[i, -1] - top[i, -2], rel=1e-4)
        assert answer.stop_probability[0] == pytest.approx(p[i, 7], rel=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_draws_depend_on_the_rows_key_alone(loaded, prefill, top_p):
    keys = jax.random.split(jax.random.key(3), 4)
    together = answers(loaded, prefill, sampling=Sampling(0.9, top_p, keys))
    order = np.array([2, 0])
    apart = answers(loaded, prefill, rows=order, sampling=Sampling(0.9, top_p, keys[order]))
    for row, answer in zip(order, apart, strict=True):
        assert list(answer.tokens) == list(together[row].tokens)
    again = answers(loaded, prefill, sampling=Sampling(0.9, top_p, jax.random.split(keys[0], 4)))
    assert [list(a.tokens) for a in again] != [list(a.tokens) for a in together]


def test_a_forced_answer_is_scored_and_not_chosen(loaded, prefill):
    free = answers(loaded, prefill)
    same = answers(loaded, prefill, forced=[a.tokens for a in free])
    for a, b in zip(free, same, strict=True):
        assert list(a.tokens) == list(b.tokens)
        np.testing.assert_array_equal(a.probability, b.probability)
    given = [[1, 2, 3], [4], [5, 6], [7]]
    forced = answers(loaded, prefill, forced=given)
    assert [list(a.tokens) for a in forced] == given
    first = answers(loaded, prefill, forced=given, limit=1)  # the last token is never stored
    more = [a.kv_bytes > b.kv_bytes for a, b in zip(forced, first, strict=True)]
    assert more == [True, False, True, False]
    assert all((a.probability < 1).all() for a in forced)


def test_rows_that_only_fill_the_batch_are_not_returned(loaded, prefill):
    found = answers(loaded, prefill, real=2)
    assert [list(a.tokens) for a in found] == [list(a.tokens) for a in answers(loaded, prefill)[:2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit=0"),
        ({"sampling": Sampling(0.5)}, "must be given keys"),
        ({"sampling": Sampling(0.0, 0.0)}, "top_p=0.0"),
        ({"forced": [[1], [], [1], [1]]}, "is empty"),
    ],
)
def test_settings_that_give_no_answer_are_refused(loaded, prefill, options, message):
    with pytest.raises(ValueError, match=message):
        answers(loaded, prefill, **options)
