"""One prefilled batch of questions for AnchorKV's studies: many settings, the answer's columns.

Like `equal_bytes`, with two economies that a study of some sixty settings needs: a cache and its
view are made by one compiled program, and logits are computed where an answer is scored only.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.arms import Arm
from experiments.equal_bytes import check_bytes
from experiments.runner import Run
from kvjax import accounting, decode, metrics, registry
from kvjax.attention import dense_partial, finish, merge, visible
from kvjax.evaluation import continuation
from kvjax.rope import rotate
from kvjax.storage import Dense, left_align
from kvjax.types import LayerInfo, PromptKV, PromptShape
from models import hub

Remake = Callable[[Any, PromptKV, Dense], Dense]  # (cache, its prompt, its view) -> another view


class Question(NamedTuple):
    """A context, and what follows it: its last tokens from `answer_start` on are scored."""

    task: str
    number: int
    context: tuple[int, ...]
    follows: tuple[int, ...]
    answer_start: int


class Setting(NamedTuple):
    """One way to compress, at one budget."""

    label: str
    target_ratio: float  # full bfloat16 bytes over stored bytes
    method: Any
    limit: str | None = None  # why the target was not met
    remake: Remake | None = None  # what the view shows instead, in the same bytes

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the setting in a row."""
        return {"method": self.label, "target_ratio": self.target_ratio}


class Batch(NamedTuple):
    """Prefilled questions and the full cache's answers to them."""

    loaded: hub.Loaded
    questions: tuple[Question, ...]
    prefill: decode.Prefill
    tokens: Array  # i32[B, T], what follows
    positions: Array  # i32[B, T], -1 = pad
    columns: Array  # i32[B, P], whose next token is predicted
    scored: Array  # bool[B, P], of them those that predict the answer
    slots: int  # of every view
    full: continuation.Forced
    log_p: Array  # f32[B, P, V], of the full cache


def prepare(loaded: hub.Loaded, questions: Sequence[Question], columns: int = 16) -> Batch:
    """Prefill the contexts and answer with the full cache.

    Args:
        loaded: the model.
        questions: of any lengths.
        columns: P, last tokens of each question that attention errors and KL are measured at;
            more where an answer is longer, or fewer where a question is shorter.

    Raises:
        ValueError: for a model with sliding windows, or an answer longer than another question.
    """
    model, params = loaded.model, loaded.params
    if any(window is not None for window in model.windows):
        raise ValueError("these studies take models without sliding windows.")
    new = [len(q.follows) for q in questions]
    answers = [len(q.follows) - q.answer_start for q in questions]
    columns = min(max(columns, *answers), min(new) - 1)
    if max(answers) > columns:
        raise ValueError(
            f"an answer has {max(answers)} tokens and another question only {columns + 1} in all:"
            " every question needs more tokens than the longest answer."
        )
    tokens, starts = decode.left_pad([q.context for q in questions])
    prefill = decode.prefill(model, params, tokens, starts)
    follows = np.zeros((len(questions), -(-max(new) // 8) * 8), np.int32)
    for row, question in zip(follows, questions, strict=True):
        row[: len(question.follows)] = question.follows
    positions = continuation.continuation_positions(prefill.lengths, new, follows.shape[1])
    last = np.array(new)[:, None] - 1 - np.arange(columns, 0, -1)[None]
    first = np.array([q.answer_start for q in questions])[:, None]
    slots = -(-(tokens.shape[1] + 128) // 64) * 64
    inputs = jnp.asarray(follows), positions, jnp.asarray(last, jnp.int32)
    views = [
        cache_and_view(registry.make("full"), prompt, _info(model), slots)[1]
        for prompt in prefill.prompts
    ]
    full = _force(model, params, tuple(views), *inputs)
    log_p = jax.nn.log_softmax(full.logits, -1)
    return Batch(
        loaded, tuple(questions), prefill, *inputs, jnp.asarray(last + 1 >= first), slots, full,
        log_p,
    )  # fmt: skip


def shape_of(loaded: hub.Loaded, num_tokens: int) -> PromptShape:
    """The shape of a prompt of `num_tokens` tokens."""
    return PromptShape(num_tokens, loaded.model.num_kv_heads, loaded.model.head_dim)


def _info(model: Any) -> LayerInfo:
    return LayerInfo(len(model.windows), None, 1, model.rope)


@functools.partial(jax.jit, static_argnums=(2, 3))
def cache_and_view(method: Any, prompt: PromptKV, info: LayerInfo, slots: int) -> tuple[Any, Dense]:
    """A layer's cache and what it attends to, in `slots` slots."""
    cache = method.compress(prompt, info)
    return cache, Dense.of(cache, slots)


def compressed(batch: Batch, setting: Setting) -> tuple[list[Any], list[Dense]]:
    """Caches and views of every layer under a setting."""
    model, prompts = batch.loaded.model, batch.prefill.prompts
    method, layers = setting.method, len(prompts)
    if hasattr(method, "resolve"):
        method = method.resolve(shape_of(batch.loaded, int(batch.prefill.lengths.max())))
    pairs = [
        cache_and_view(method.for_layer(i, layers), prompt, _info(model), batch.slots)
        for i, prompt in enumerate(prompts)
    ]
    caches, views = [cache for cache, _ in pairs], [view for _, view in pairs]
    if setting.remake is not None:
        views = [setting.remake(*trio) for trio in zip(caches, prompts, views, strict=True)]
    return caches, views


@functools.partial(jax.jit, static_argnums=0)
def _force(model, params, views, tokens, positions, columns) -> continuation.Forced:
    queries, outputs = [], []

    def chosen(x):
        return jnp.take_along_axis(x, columns[:, None, :, None], 2)

    def attend(q, k, v, body):
        dtype = q.dtype
        q, k = rotate(model.rope, q, positions), rotate(model.rope, k, positions)
        far = body.attend(q, positions)
        near = dense_partial(q, k, v, visible(positions, positions))
        queries.append(chosen(q))
        outputs.append(chosen(finish(far)))
        return finish(merge(far, near)).astype(dtype), None

    x = model.embed(model.config, params, tokens)
    for layer, body in zip(params["layers"], views, strict=True):
        x, _ = model.block(model.config, layer, x, attend, body)
    logits = model.head(model.config, params, jnp.take_along_axis(x, columns[..., None], 1))
    where = jnp.take_along_axis(positions, columns, 1)
    return continuation.Forced(logits, tuple(queries), tuple(outputs), where)


@jax.jit
def quality(log_p: Array, logits: Array, targets: Array, scored: Array) -> dict[str, Array]:
    """Compare P columns with the full cache's: f32[B] each.

    Args:
        log_p: f32[B, P, V], of the full cache.
        logits: f32[B, P, V].
        targets: i32[B, P].
        scored: bool[B, P], those that count; all of them do for KL.
    """
    log_q = jax.nn.log_softmax(logits, -1)
    hit = log_q.argmax(-1) == targets
    loss = -jnp.take_along_axis(log_q, targets[..., None], -1)[..., 0]
    return {
        "token_match": metrics.masked_mean(hit.astype(jnp.float32), scored, axis=-1),
        "exact": (hit | ~scored).all(-1).astype(jnp.float32),
        "answer_nll": metrics.masked_mean(loss, scored, axis=-1),
        "kl": metrics.kl_of_log_probabilities(log_p, log_q).mean(-1),
    }


def scores(batch: Batch, views: Sequence[Dense]) -> list[dict[str, Any]]:
    """What the views answer, a dict a question: shares, nats, relative errors."""
    model, params = batch.loaded.model, batch.loaded.params
    inputs = batch.tokens, batch.positions, batch.columns
    forced = _force(model, params, tuple(views), *inputs)
    targets = jnp.take_along_axis(batch.tokens, batch.columns + 1, 1)
    found = quality(batch.log_p, forced.logits, targets, batch.scored)
    errors = continuation.output_errors(views, batch.full)  # [B, L]
    found = {name: np.asarray(values, np.float64) for name, values in found.items()}
    return [
        {name: float(values[i]) for name, values in found.items()}
        | {"error": float(errors[i].mean())}
        for i in range(len(batch.questions))
    ]


@jax.jit
def exact_at(prompt: PromptKV, view: Dense) -> tuple[Array, Array]:
    """The exact keys and values f32[B, K, S, H] of the tokens that a view holds."""
    at = jnp.maximum(view.positions, 0)[..., None]
    return tuple(
        jnp.take_along_axis(left_align(x, prompt.starts), at, 2).astype(jnp.float32)
        for x in (prompt.k, prompt.v)
    )


def exact_keys(cache: Any, prompt: PromptKV, view: Dense) -> Dense:
    """The view with exact keys: what the values' errors cost alone."""
    return dataclasses.replace(view, k=exact_at(prompt, view)[0])


def exact_values(cache: Any, prompt: PromptKV, view: Dense) -> Dense:
    """The view with exact values: what the keys' errors cost alone."""
    return dataclasses.replace(view, v=exact_at(prompt, view)[1])


def measure(
    run: Run,
    loaded: hub.Loaded,
    group: str,
    questions: Sequence[Question],
    settings: Sequence[Setting],
    batch: int,
) -> Iterator[str]:
    """Rows of every setting and question that are not there yet; a label a setting and batch.

    Args:
        run: gets the rows, {group, task, prompt, method, target_ratio, ...}.
        loaded: the model.
        group: names the rows' kind.
        questions: answered in batches.
        settings: the full cache aside, which always runs.
        batch: questions that are prefilled together.
    """
    full = Setting("full", 1.0, registry.make("full"))
    for at in range(0, len(questions), batch):
        chunk, made = questions[at : at + batch], None
        for setting in [full, *settings]:
            keys = [
                {"group": group, "task": q.task, "prompt": q.number, **setting.key} for q in chunk
            ]
            if all(run.finished(key) is not None for key in keys):
                yield ""
                continue
            made = prepare(loaded, chunk) if made is None else made
            caches, views = compressed(made, setting)
            shape = shape_of(loaded, int(made.prefill.lengths.max()))
            ratios = accounting.compression_ratio(caches, shape, made.prefill.lengths)
            stored = accounting.live_bytes(caches).stored
            check_bytes(Arm(*setting[:4]), stored, shape, len(caches))
            results = scores(made, views)
            for i, (key, result) in enumerate(zip(keys, results, strict=True)):
                if run.finished(key) is None:
                    measured = {"ratio": ratios[i], "kv_bytes": int(stored[i])}
                    run.append(key | {"limit": setting.limit} | measured | result)
            yield f"{setting.label} {setting.target_ratio:.0f}x"
