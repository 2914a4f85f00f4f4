"""Generated answers of every arm to a task's rows, scored; a row of the record for each.

Each context is prefilled once; every arm compresses that same prefill; each of its questions
follows, and the answer is generated greedily to a real end of sequence or the row's limit. The gold
answer is scored by teacher forcing too, which still moves where a small model's own answers are all
wrong. Bytes are those of the packed caches; questions and answers run over the packed cache where
it changes while it decodes (it evicts, or folds its tail), else over its materialised view with an
exact tail: the same numbers, and one compiled program for all such arms.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arms import Arm, solve
from experiments.equal_bytes import arm_name, check_bytes
from experiments.runner import Run, bound_programs
from kvjax import accounting, decode, metrics, registry, turns
from kvjax.accounting import Budget
from kvjax.evaluation import continuation, negatives
from kvjax.evaluation.chat import encode_after
from kvjax.evaluation.rows import Encoded, write_jsonl
from kvjax.evaluation.scoring import Metric
from kvjax.rope import Rope
from kvjax.storage import BodyTail, Dense, Tail
from kvjax.types import PromptShape
from models import hub

BUCKET = 1.02  # contexts of a batch differ by less: a budget is that of the longest


class Settings(Protocol):
    """What of a configuration is read here."""

    batch: int  # contexts that are prefilled together
    aware: bool  # compress after the question instead of before it


class Context(NamedTuple):
    """A context and the questions on it."""

    ids: tuple[int, ...]
    questions: tuple[Encoded, ...]


class Batch(NamedTuple):
    """Contexts of nearly one length, filled up to one batch size for all."""

    contexts: tuple[Context, ...]
    real: int  # the others repeat the last one
    columns: int  # of the prompt
    width: int  # columns of the longest question with its gold answer
    limit: int  # new tokens


class Gold(NamedTuple):
    """Teacher forcing of the first reference: f32[B] each."""

    nll: jax.Array  # mean negative log-likelihood, nats a token
    token_match: jax.Array  # share of its tokens that are the likeliest


class Asked(NamedTuple):
    """Caches that hold the questions too."""

    caches: Any
    logits: jax.Array  # f32[B, V], after each question's last token
    positions: np.ndarray  # int[B], the next position of each row


def reference_shape(questions: Sequence[Encoded], loaded: hub.Loaded) -> PromptShape:
    """The shape that arms are planned for: the longest context."""
    longest = max(len(question.context_ids) for question in questions)
    return PromptShape(longest, loaded.model.num_kv_heads, loaded.model.head_dim)


def sweep(
    config: Settings,
    run: Run,
    loaded: hub.Loaded,
    questions: Sequence[Encoded],
    arms: Sequence[Arm],
    length: int,
    scores: Mapping[str, Metric],
) -> None:
    """Answer all questions under the full cache and all arms; finished rows are skipped.

    Rows of the record: {task, id, length, method, target_ratio, basis}, score (0 to 100), answers
    and their ends, answer_nll and token_match of the first reference, bytes. Contexts of other
    lengths than the longest get the arm's ratio solved for their own.

    Args:
        config: the experiment's.
        run: where rows go.
        loaded: the model.
        questions: rows as tokens; those with the same context_ids share a cache.
        arms: planned for `reference_shape`; "full" is added.
        length: names this set of rows in the record, tokens.
        scores: metrics by name, of which `row.metric` names one.

    Raises:
        ValueError: for no questions, two of one task and id, an unknown metric, bytes that are not
            those asked for, or a no-op arm that differs from the full cache.
    """
    check_questions(questions, scores)
    cells = [Arm("full", 1.0, registry.make("full"), None), *arms]
    batches = plan_batches(config, loaded, questions)
    with run.progress(len(cells) * len(batches), f"{length:,} tokens") as progress:
        for batch in batches:
            todo = [arm for arm in cells if not finished(run, arm, batch, length)]
            for _ in range(len(cells) - len(todo)):
                progress.advance(skipped=True)
            if not todo:
                continue
            for arm in answer(config, run, loaded, batch, cells, todo, length, scores):
                progress.advance(f"{arm.label} {arm.target_ratio:.1f}x")
                bound_programs()
    write_jsonl(run.path / "predictions.jsonl", predictions(run.rows))


def only(questions: Sequence[Encoded], path: str) -> list[Encoded]:
    """The questions of a negative set (`experiments.negative_samples` writes such files).

    Raises:
        ValueError: when none is in the set.
    """
    named = negatives.read_negative_set(path)
    kept = [question for question in questions if (question.row.task, question.row.id) in named]
    if not kept:
        task, id_ = min(named)
        raise ValueError(
            f"{path} names none of the {len(questions)} prompts, but such as {task}/{id_}: take the"
            " tasks, prompts and seed of the run that the set was made from."
        )
    return kept


def check_questions(questions: Sequence[Encoded], scores: Mapping[str, Metric]) -> None:
    """Refuse what would end in a row that cannot be told from another, or scored."""
    if not questions:
        raise ValueError("there are no rows: name tasks or files that hold some.")
    names = [(question.row.task, question.row.id) for question in questions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"task {twice[0]} has several rows with id={twice[1]!r}: ids must differ.")
    unknown = {question.row.metric for question in questions} - set(scores)
    if unknown:
        raise ValueError(f"metric {sorted(unknown)[0]!r} must be one of {', '.join(scores)}.")


def predictions(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a predictions file: what was answered, by which method, and the score."""
    kept = (
        "task", "id", "length", "method", "target_ratio", "ratio", "prediction", "answer", "score",
        "new_tokens", "finish_reason",
    )  # fmt: skip
    return [{name: row[name] for name in kept} for row in rows if "prediction" in row]


def key(arm: Arm, question: Encoded, length: int) -> dict[str, Any]:
    """What identifies a row."""
    return {"length": length, "task": question.row.task, "id": question.row.id, **arm.key}


def finished(run: Run, arm: Arm, batch: Batch, length: int) -> bool:
    """Whether every row of an arm and batch is there."""
    return all(
        run.finished(key(arm, question, length)) is not None
        for context in batch.contexts[: batch.real]
        for question in context.questions
    )


def plan_batches(config: Settings, loaded: hub.Loaded, questions: Sequence[Encoded]) -> list[Batch]:
    """Group questions by context, and contexts of nearly one length into batches."""
    groups: dict[tuple[int, ...], list[Encoded]] = {}
    for question in questions:
        ids = question.context_ids
        if config.aware:  # the last question token is always run after compression
            ids, last = ids + question.question_ids[:-1], question.question_ids[-1:]
            question = question._replace(question_ids=last)
        groups.setdefault(ids, []).append(question)
    contexts = [Context(ids, tuple(found)) for ids, found in groups.items()]
    buckets: dict[tuple[int, int], list[Context]] = {}
    for context in contexts:
        limit = max(question.row.max_new_tokens for question in context.questions)
        size = int(math.log(len(context.ids), BUCKET)), (limit - 1).bit_length()
        buckets.setdefault(size, []).append(context)
    batches = []
    for _, found in sorted(buckets.items()):
        limit = max(q.row.max_new_tokens for c in found for q in c.questions)
        columns = max(len(context.ids) for context in found)
        width = max(
            len(q.question_ids) + len(gold_ids(loaded.tokenizer, q)) for c in found
            for q in c.questions
        )  # fmt: skip
        size = min(config.batch, len(found))
        for at in range(0, len(found), size):
            chunk = found[at : at + size]
            filled = chunk + [chunk[-1]] * (size - len(chunk))
            width_8 = -(-width // 8) * 8
            batches.append(Batch(tuple(filled), len(chunk), columns, width_8, limit))
    return batches


def gold_ids(tokenizer: Any, question: Encoded) -> list[int]:
    """The tokens of the first reference as they follow the prompt, at most the row's limit."""
    row = question.row
    # a chat without a prefix ends with the template's own separator
    before = row.answer_prefix or ("" if row.chat else row.question)
    gap = "" if not before or before[-1].isspace() else " "
    return encode_after(tokenizer, before, gap + row.answer[0])[: row.max_new_tokens]


def arm_for(arm: Arm, shape: PromptShape, layers: int) -> Arm:
    """The arm solved for another context length, under the same key."""
    if arm.label == "full" or arm.basis != "measured" or hasattr(arm.method, "points"):
        return arm
    own = solve(arm.label, registry.make(arm.label), Budget(ratio=arm.target_ratio), shape, layers)
    return arm._replace(method=own.method, limit=own.limit)


def answer(
    config: Settings,
    run: Run,
    loaded: hub.Loaded,
    batch: Batch,
    arms: Sequence[Arm],
    todo: Sequence[Arm],
    length: int,
    scores: Mapping[str, Metric],
) -> Iterator[Arm]:
    """One batch: prefill once, then every arm that is to do and every question; a row each."""
    model, params, layers = loaded.model, loaded.params, len(loaded.model.windows)
    tokens, starts = decode.left_pad([context.ids for context in batch.contexts])
    missing = batch.columns - tokens.shape[1]
    tokens, starts = jnp.pad(tokens, ((0, 0), (missing, 0))), starts + missing
    sums = any(getattr(arm.method, "column_sums", False) for arm in arms)
    prefill = decode.prefill(model, params, tokens, starts, column_sums=sums)
    shape = PromptShape(batch.columns, model.num_kv_heads, model.head_dim)
    block = max([arm.method.flush_every or 0 for arm in arms] + [64])

    reserve = -(-(batch.width + batch.limit) // block) * block
    slots = -(-(batch.columns + block) // 64) * 64

    def compressed(method):
        return decode.compress(method, prefill.prompts, model, reserve=reserve)

    def attended(caches):
        if any(cache.evicts or cache.flush_every is not None for cache in caches):
            return caches
        return tuple(
            _with_tail(body, reserve, model.rope)
            for body in continuation.view(caches, model, slots)
        )

    if all(row.get("length") != length for row in run.rows):
        made = {n: attended(compressed(m)) for n, m in no_op_methods().items()}
        check_no_op(made, loaded, batch, prefill.lengths)
    for planned in todo:
        arm = arm_for(planned, shape, layers)
        caches = compressed(arm.method)
        stored = accounting.live_bytes(caches).stored
        check_bytes(arm, stored, shape, len(caches))
        ratios = accounting.compression_ratio(caches, shape, prefill.lengths)
        check_ratios(arm, ratios)
        table = {arm_name(arm, length): [accounting.components(cache) for cache in caches]}
        caches = attended(caches)
        most = max(len(context.questions) for context in batch.contexts)
        for asked in range(most):
            chosen = [c.questions[min(asked, len(c.questions) - 1)] for c in batch.contexts]
            own = caches if asked == most - 1 else jax.tree.map(jnp.copy, caches)
            reached = ask(loaded, own, chosen, prefill.lengths)
            gold = teacher_forced(loaded, reached, chosen)
            generation, _ = decode.generate(
                model, params, reached.caches, reached.logits, reached.positions,
                max_new_tokens=batch.limit, stop_ids=sorted(loaded.tokenizer.stop_ids),
            )  # fmt: skip
            made = np.asarray(generation.tokens)
            for i, question in enumerate(chosen[: batch.real]):
                again = asked >= len(batch.contexts[i].questions)
                if again or run.finished(key(arm, question, length)) is not None:
                    continue
                row = key(arm, question, length) | {
                    "aware": config.aware,
                    "limit": arm.limit,
                    "setting": repr(arm.method),
                    "ratio": ratios[i],
                    "removed": 1 - 1 / ratios[i],
                    "kv_bytes": int(stored[i]),
                    "context_tokens": len(batch.contexts[i].ids),
                    "truncated_tokens": question.removed,
                    **scored(loaded.tokenizer, question, made[i], scores),
                    "answer_nll": gold.nll[i],
                    "token_match": gold.token_match[i],
                }
                run.append(row, kv_bytes=table)
                table = None
        yield planned


@functools.partial(jax.jit, static_argnums=(1, 2))
def _with_tail(body: Dense, reserve: int, rope: Rope) -> BodyTail:
    """A cache that attends to a view and appends to a tail of `reserve` tokens."""
    return BodyTail(body, Tail.empty(body.k, reserve), rope=rope, window=body.window)


def scored(
    tokenizer: Any, question: Encoded, made: np.ndarray, scores: Mapping[str, Metric]
) -> dict[str, Any]:
    """What a row says of a generation i32[T], -1 after its end."""
    row = question.row
    ids = [int(t) for t in made if t >= 0][: row.max_new_tokens]
    ended = bool(ids) and ids[-1] in tokenizer.stop_ids
    text = tokenizer.decode(ids[:-1] if ended else ids)
    return {
        "score": 100 * scores[row.metric](text, row),
        "metric": row.metric,
        "prediction": text,
        "answer": list(row.answer),
        "new_tokens": len(ids),
        "finish_reason": "end_of_sequence" if ended else "limit",
        "empty": not text.strip(),
    }


def ask(
    loaded: hub.Loaded, caches: Any, questions: Sequence[Encoded], lengths: np.ndarray
) -> Asked:
    """Run the questions through the caches, which are donated."""
    ids = [question.question_ids for question in questions]
    logits, caches = turns.append(loaded.model, loaded.params, caches, lengths, ids)
    return Asked(caches, logits, np.asarray(lengths) + [len(i) for i in ids])


def teacher_forced(loaded: hub.Loaded, asked: Asked, questions: Sequence[Encoded]) -> Gold:
    """Run the gold answers through a copy of the caches that hold the questions."""
    golds = [gold_ids(loaded.tokenizer, question) for question in questions]
    width = -(-max(len(gold) for gold in golds) // 8) * 8
    tokens = np.zeros((len(golds), width), np.int32)
    for row, gold in zip(tokens, golds, strict=True):
        row[: len(gold)] = gold
    counts = [len(gold) for gold in golds]
    at = continuation.continuation_positions(asked.positions, counts, width)
    hidden, _ = decode.extend(
        loaded.model, loaded.params, jax.tree.map(jnp.copy, asked.caches), jnp.asarray(tokens), at
    )
    later = decode.head(loaded.model, loaded.params, hidden[:, :-1])
    logits = jnp.concatenate([asked.logits[:, None], later], 1)  # each before its token
    return _gold(logits, jnp.asarray(tokens), at >= 0)


@jax.jit
def _gold(logits, targets, real):
    log_p = jax.nn.log_softmax(logits, -1)
    loss = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    hit = (log_p.argmax(-1) == targets).astype(jnp.float32)
    nll, match = (metrics.masked_mean(x, real, axis=-1) for x in (loss, hit))
    return Gold(nll, match)


def check_ratios(arm: Arm, ratios: np.ndarray) -> None:
    """Fail unless every row of a batch is as small as was asked for, up to `BUCKET`."""
    met = arm.label != "full" and arm.limit is None and arm.basis == "measured"
    if met and min(ratios) * BUCKET * 1.005 < arm.target_ratio:  # a row's metadata
        raise ValueError(
            f"{arm.label} holds a context {min(ratios):.3f} times smaller where"
            f" {arm.target_ratio} was asked for: contexts of a batch must be of nearly one length."
        )


def no_op_methods() -> dict[str, Any]:
    """The full cache, and an evictor that keeps everything."""
    return {"full": registry.make("full"), "no-op": registry.make("snapkv").exact()}


def check_no_op(
    caches: Mapping[str, Any], loaded: hub.Loaded, batch: Batch, lengths: np.ndarray
) -> None:
    """Fail unless the arm that keeps everything gives the full cache's logits exactly."""
    questions = [context.questions[0] for context in batch.contexts]
    full, kept = (
        ask(loaded, jax.tree.map(jnp.copy, caches[name]), questions, lengths)
        for name in ("full", "no-op")
    )
    nll = [teacher_forced(loaded, asked, questions).nll for asked in (full, kept)]
    if not bool((full.logits == kept.logits).all()) or not bool((nll[0] == nll[1]).all()):
        worst = float(jnp.abs(full.logits - kept.logits).max())
        raise ValueError(f"the no-op arm differs from the full cache by {worst}: it must not.")
