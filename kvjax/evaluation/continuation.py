"""Quality of a compressed prompt by teacher forcing: one continuation, the same for every method.

The continuation (a question and its gold answer, or the text that follows) goes through the model
in one extend over the *materialised view* of a cache: by law 1 the same numbers as its packed
form, at dense speed, and one compiled program for all methods of a shape. Bytes and speed are never
measured here.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import decode, metrics
from kvjax.attention import dense_partial, finish, merge, visible
from kvjax.rope import rotate
from kvjax.storage import Dense
from kvjax.types import Model


class Forced(NamedTuple):
    """What a teacher-forced continuation of T tokens leaves."""

    logits: Array  # f32[B, T, V], after each token
    queries: tuple[Array, ...]  # a layer: [B, N, P, H], rotated, at the probed columns
    outputs: tuple[Array, ...]  # a layer: f32[B, N, P, H], attention over the prompt alone
    positions: Array  # i32[B, P]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _view(cache: Any, slots: int, window: int | None) -> Dense:
    return Dense.of(cache, slots, window)


def view(caches: Sequence[Any], model: Model, slots: int) -> tuple[Dense, ...]:
    """The materialised view of every layer, in the same number of slots.

    Args:
        caches: a cache a layer, right after compress.
        model: the decoder.
        slots: at least what any of the caches holds; equal slots share one program.
    """
    pairs = zip(caches, model.windows, strict=True)
    return tuple(_view(cache, slots, window) for cache, window in pairs)


@functools.partial(jax.jit, static_argnums=0)
def force(
    model: Model,
    params: Any,
    views: tuple[Dense, ...],
    tokens: Array,
    positions: Array,
    probe: Array,
) -> Forced:
    """Run a continuation over the views.

    Args:
        model: the decoder.
        params: its weights.
        views: of `view`.
        tokens: i32[B, T], right-padded.
        positions: i32[B, T], -1 for pads.
        probe: i32[B, P], columns whose attention is kept for `output_errors`.

    Returns:
        Logits, and the layers' queries and outputs over the prompt.
    """
    queries, outputs = [], []

    def probed(x):
        return jnp.take_along_axis(x, probe[:, None, :, None], 2)

    def attend(q, k, v, state):
        body, window = state
        dtype = q.dtype
        q, k = rotate(model.rope, q, positions), rotate(model.rope, k, positions)
        far = body.attend(q, positions)
        near = dense_partial(q, k, v, visible(positions, positions, window))
        queries.append(probed(q))
        outputs.append(probed(finish(far)))
        return finish(merge(far, near)).astype(dtype), None

    x = model.embed(model.config, params, tokens)
    layers = zip(params["layers"], views, model.windows, strict=True)
    for layer, body, window in layers:
        x, _ = model.block(model.config, layer, x, attend, (body, window))
    logits = model.head(model.config, params, x)
    where = jnp.take_along_axis(positions, probe, 1)
    return Forced(logits, tuple(queries), tuple(outputs), where)


def packed(
    model: Model, params: Any, caches: Sequence[Any], tokens: Array, positions: Array
) -> Array:
    """Run a continuation through the caches themselves, for those that change as they decode.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer, right after compress; donated.
        tokens: i32[B, T], right-padded.
        positions: i32[B, T], -1 for pads.

    Returns:
        logits f32[B, T, V], after each token.
    """
    hidden, _ = decode.extend(model, params, tuple(caches), tokens, positions)
    return decode.head(model, params, hidden)


@jax.jit
def _error(view: Dense, q: Array, reference: Array, positions: Array) -> Array:
    out = finish(view.attend(q, positions))
    real = (positions >= 0)[:, None, :, None]
    difference = jnp.where(real, jnp.square(out - reference), 0.0).sum((1, 2, 3))
    total = jnp.where(real, jnp.square(reference), 0.0).sum((1, 2, 3))
    return jnp.sqrt(difference / jnp.maximum(total, 1e-30))


def output_errors(views: Sequence[Dense], full: Forced) -> np.ndarray:
    """Relative root-mean-square error of each layer's attention output over the prompt.

    The queries are the full cache's own, so that a layer's error is not its predecessors'.

    Returns:
        f64[B, L].
    """
    layers = zip(views, full.queries, full.outputs, strict=True)
    errors = [_error(view, q, out, full.positions) for view, q, out in layers]
    return np.stack([np.asarray(e, np.float64) for e in errors], 1)


class Quality(NamedTuple):
    """Metrics of one continuation against the full cache: f32[B] each."""

    nll: Array  # mean negative log-likelihood of the continuation, nats a token
    kl: Array  # mean KL(full || compressed), nats a token
    top5_overlap: Array  # mean share of the five likeliest tokens in common
    top1_agreement: Array  # mean share of equal likeliest tokens
    first_divergence: Array  # i32, first token whose likeliest differs; T if none
    answer_nll: Array  # mean negative log-likelihood of the gold answer, nats a token
    token_match: Array  # share of the answer's tokens that are the likeliest
    exact: Array  # 1 if all are


class Reference(NamedTuple):
    """What every comparison needs of the full cache's logits, computed once."""

    log_p: Array  # f32[B, T, V]
    top5: Array  # i32[B, T, 5]


@jax.jit
def reference(full_logits: Array) -> Reference:
    """The reference of `quality` from the full cache's logits f32[B, T, V]."""
    return Reference(jax.nn.log_softmax(full_logits, -1), jax.lax.top_k(full_logits, 5)[1])


@jax.jit
def quality(
    full: Reference, logits: Array, tokens: Array, positions: Array, answer_starts: Array
) -> Quality:
    """Compare a compressed run with the full cache's on the same continuation.

    Args:
        full: of `reference`.
        logits: f32[B, T, V].
        tokens: i32[B, T]; token i + 1 is the target of logits i.
        positions: i32[B, T], -1 for pads.
        answer_starts: i32[B], column of the answer's first token, >= 1; T where there is none.

    Returns:
        Metrics of each row, over targets 1 .. T - 1.
    """
    targets, real = tokens[:, 1:], positions[:, 1:] >= 0
    log_p, top5 = full.log_p[:, :-1], full.top5[:, :-1]
    log_q = jax.nn.log_softmax(logits[:, :-1], -1)
    column = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None]
    answer = real & (column >= answer_starts[:, None])
    loss = -jnp.take_along_axis(log_q, targets[..., None], -1)[..., 0]
    top = jax.lax.top_k(log_q, 5)[1]
    # not top[..., 0]: for a second slice XLA sorts the whole vocabulary
    likeliest, wanted = log_q.argmax(-1), top5[..., 0]
    hit = likeliest == targets

    def mean(x, mask):
        return metrics.masked_mean(x.astype(jnp.float32), mask, axis=-1)

    return Quality(
        mean(loss, real),
        mean(metrics.kl_of_log_probabilities(log_p, log_q), real),
        mean(metrics.overlap(top5, top), real),
        mean(likeliest == wanted, real),
        metrics.first_divergence(wanted, likeliest, real),
        mean(loss, answer),
        mean(hit, answer),
        (hit | ~answer).all(-1).astype(jnp.float32),
    )


def continuation_positions(lengths: np.ndarray, new: Sequence[int], width: int) -> Array:
    """Positions i32[B, width] of `new` tokens a row after prompts of `lengths`, -1 = pad."""
    column = np.arange(width)[None]
    positions = np.where(column < np.asarray(new)[:, None], lengths[:, None] + column, -1)
    return jnp.asarray(positions, jnp.int32)
