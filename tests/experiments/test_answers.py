"""Answers on random weights: shared contexts, packed and viewed caches, resume, refusals."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import answers
from experiments.arms import Arm, plan
from experiments.runner import Run
from kvjax import decode, registry
from kvjax.evaluation import rows, scoring
from models import hub


@dataclasses.dataclass(frozen=True)
class Config:
    batch: int = 2
    aware: bool = False


@pytest.fixture(scope="module")
def loaded():
    return hub.load("tiny")


@pytest.fixture(scope="module")
def questions(loaded):
    grass = "The grass is green. " * 14
    asked = [
        ("0", "The cat is called Tom. " + grass, "Tom"),
        ("1", "The dog is called Rex. " + grass, "Rex"),
        ("2", "The dog is called Rex. " + grass, "Rex"),  # of the same context
        ("3", "The cow is called Daisy. " + grass, "Daisy"),
    ]
    return [
        rows.encode(
            loaded.tokenizer,
            rows.Row(i, context, f"\nWhat is its name, {i}?", "It is", (name,), 5, "pets"),
        )
        for i, context, name in asked
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory, loaded, questions):
    shape = answers.reference_shape(questions, loaded)
    arms = plan(("snapkv", "h2o"), (2.0,), (), shape, len(loaded.model.windows))
    with Run.create(Config(), tmp_path_factory.mktemp("runs"), "answers") as run:
        answers.sweep(Config(), run, loaded, questions, arms, 300, scoring.METRICS)
    return run, arms


def alone(loaded, question, method):
    """One question by the plain road: its own prefill, the packed cache, a loop of steps."""
    model, params, limit = loaded.model, loaded.params, question.row.max_new_tokens
    filled = decode.prefill(model, params, *decode.left_pad([question.context_ids]))
    asked = len(question.question_ids)
    caches = decode.compress(method, filled.prompts, model, reserve=asked + limit)
    tokens = jnp.asarray([question.question_ids], jnp.int32)
    at = jnp.asarray(filled.lengths[:, None] + np.arange(asked)[None], jnp.int32)
    hidden, caches = decode.extend(model, params, caches, tokens, at)
    logits, ids = decode.head(model, params, hidden[:, -1]), []
    for i in range(limit):
        ids.append(int(logits[0].argmax()))
        if ids[-1] in loaded.tokenizer.stop_ids:
            return ids[:-1]
        at = jnp.asarray(filled.lengths + asked + i, jnp.int32)
        token = jnp.asarray(ids[-1:], jnp.int32)
        logits, caches = decode.decode_step(model, params, caches, token, at)
    return ids


def test_answers_are_those_of_each_question_alone(loaded, questions, made):
    run, arms = made
    for arm in [Arm("full", 1.0, registry.make("full"), None), *arms]:
        for question in (questions[0], questions[2]):
            row = run.finished(answers.key(arm, question, 300))
            want = loaded.tokenizer.decode(alone(loaded, question, arm.method))
            assert row["prediction"] == want


def test_every_row_is_there_once_with_bytes_ends_and_scores(questions, made):
    run, arms = made
    assert len(run.rows) == len(questions) * (1 + len(arms))
    for row in run.rows:
        assert 0 <= row["score"] <= 100 and row["answer_nll"] > 0 and 0 <= row["token_match"] <= 1
        assert row["finish_reason"] in ("end_of_sequence", "limit")
        assert 1 <= row["new_tokens"] <= 5 and row["context_tokens"] > 250
        if row["method"] != "full":
            assert 1.97 <= row["ratio"] < 2.1  # contexts of a batch differ by a few tokens
    full, kept = (
        {r["id"]: r["answer_nll"] for r in run.rows if r["method"] == m} for m in ("full", "snapkv")
    )
    assert full.keys() == kept.keys() and full != kept
    saved = rows.read_jsonl(run.path / "predictions.jsonl")
    assert [r["prediction"] for r in saved] == [r["prediction"] for r in run.rows]


def test_a_killed_run_goes_on_to_the_same_rows(tmp_path, loaded, questions, made):
    run, arms = made
    with Run.create(Config(), tmp_path, "answers") as again:
        for row in run.rows[:3]:  # in the middle of a batch
            again.append(row)
        answers.sweep(Config(), again, loaded, questions, arms, 300, scoring.METRICS)
    assert again.rows == run.rows


def test_with_the_question_known_every_context_is_its_own(loaded, questions):
    unaware = answers.plan_batches(Config(), loaded, questions)
    aware = answers.plan_batches(Config(aware=True), loaded, questions)
    assert [len(c.questions) for b in unaware for c in b.contexts[: b.real]] == [1, 2, 1]
    for batch in aware:
        for context in batch.contexts[: batch.real]:
            (question,) = context.questions
            assert len(question.question_ids) == 1
            whole = questions[int(question.row.id)]
            assert context.ids + question.question_ids == whole.context_ids + whole.question_ids


def test_bad_rows_are_refused(questions):
    with pytest.raises(ValueError, match="no rows"):
        answers.check_questions([], scoring.METRICS)
    with pytest.raises(ValueError, match="several rows with id='0'"):
        answers.check_questions([questions[0], questions[0]], scoring.METRICS)
    odd = questions[0]._replace(row=questions[0].row._replace(metric="bleu"))
    with pytest.raises(ValueError, match="metric 'bleu' must be one of string_match_all"):
        answers.check_questions([odd], scoring.METRICS)


def test_the_gold_answer_goes_on_where_the_prompt_ends(loaded, questions):
    tokenizer, row = loaded.tokenizer, questions[0].row

    def gold(**changes):
        question = questions[0]._replace(row=row._replace(**changes))
        return tokenizer.decode(answers.gold_ids(tokenizer, question))

    limit = {"max_new_tokens": 64}
    assert gold(**limit) == " Tom" and gold(answer_prefix="It is ", **limit) == "Tom"
    # without a prefix plain text goes on behind the question, a chat behind its template
    plain = {"answer_prefix": "", "question": "\nName:"}
    assert gold(**plain, chat=False, **limit) == " Tom" and gold(**plain, **limit) == "Tom"
    assert gold(answer_prefix="", question="Next:\n", chat=False, **limit) == "Tom"
    long = row._replace(max_new_tokens=2, answer=("Tom and Tom and Tom and Tom",))
    assert len(answers.gold_ids(tokenizer, questions[0]._replace(row=long))) == 2


def test_a_negative_set_picks_its_questions_alone(tmp_path, questions):
    path = tmp_path / "set.jsonl"
    path.write_text('{"dataset": "pets@300", "id": "2"}\n{"dataset": "birds", "id": "0"}\n')
    assert [q.row.id for q in answers.only(questions, str(path))] == ["2"]
    path.write_text('{"dataset": "birds", "id": "0"}\n')
    with pytest.raises(ValueError, match="names none of the 4 prompts, but such as birds/0"):
        answers.only(questions, str(path))


def test_a_batch_holds_contexts_of_nearly_one_length(loaded, questions):
    long = questions[0]._replace(
        row=questions[0].row._replace(id="9"), context_ids=questions[0].context_ids[:9] * 37
    )
    batches = answers.plan_batches(Config(batch=8), loaded, [*questions, long])
    sizes = [[len(c.ids) for c in batch.contexts] for batch in batches]
    assert sorted(map(len, sizes)) == [1, 3] and all(max(s) < 1.03 * min(s) for s in sizes)
    arm = Arm("snapkv", 3.0, registry.make("snapkv"), None)
    answers.check_ratios(arm, np.array([3.02, 2.95]))
    with pytest.raises(ValueError, match="nearly one length"):
        answers.check_ratios(arm, np.array([3.02, 2.11]))


def test_the_no_op_check_can_fail(loaded, questions):
    batch = answers.plan_batches(Config(), loaded, questions)[0]
    tokens, starts = decode.left_pad([c.ids for c in batch.contexts])
    filled = decode.prefill(loaded.model, loaded.params, tokens, starts)
    full, few = (
        decode.compress(method, filled.prompts, loaded.model, reserve=batch.width)
        for method in (registry.make("full"), registry.make("snapkv", budget=40, window=8))
    )
    with pytest.raises(ValueError, match="no-op arm differs"):
        answers.check_no_op({"full": full, "no-op": few}, loaded, batch, filled.lengths)
