"""Several turns on one compressed context: ask, keep or drop the answer, compress what piled up."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import decode
from kvjax.attention import attend_dense
from kvjax.rope import Rope, rotate, unrotate
from kvjax.types import Method, Model, PromptKV


class Turn(NamedTuple):
    """A question and its answer."""

    generation: decode.Generation
    caches: Any  # with the turn, or as they were before it
    positions: np.ndarray  # int[B], the next position of each row in `caches`


def ask(
    model: Model,
    params: Any,
    caches: Any,
    positions: np.ndarray,
    questions: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    keep_answer: bool,
    stop_ids: Sequence[int] = (),
    **sampling: Any,
) -> Turn:
    """Append a question to every row and generate its answer.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer; donated.
        positions: int[B], the next position of each row.
        questions: token ids of each row's question, at least one.
        max_new_tokens: limit, tokens a row.
        keep_answer: True leaves question and answer in the cache (a conversation); False gives the
            caches back as they were before the question, for the next question on one context.
        stop_ids: a row ends with any of these, which is not stored.
        **sampling: of `decode.generate`.

    Returns:
        The turn.

    Raises:
        ValueError: for an empty question, or too little room in the caches.
    """
    # Caches are small and a step writes in place: a copy undoes a turn whatever the method.
    before = None if keep_answer else jax.tree.map(jnp.copy, caches)
    logits, caches = append(model, params, caches, positions, questions)
    lengths = np.array([len(question) for question in questions])
    generation, caches = decode.generate(
        model, params, caches, logits, positions + lengths, max_new_tokens=max_new_tokens,
        stop_ids=stop_ids, **sampling,
    )  # fmt: skip
    if not keep_answer:
        return Turn(generation, before, np.asarray(positions))
    stored = np.asarray(generation.lengths) - np.asarray(generation.stopped)
    return Turn(generation, caches, np.asarray(positions) + lengths + stored)


def append(
    model: Model,
    params: Any,
    caches: Any,
    positions: np.ndarray,
    questions: Sequence[Sequence[int]],
) -> tuple[Array, Any]:
    """Append tokens to every row, as many as it has.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer; donated.
        positions: int[B], the next position of each row.
        questions: token ids of each row, at least one.

    Returns:
        Logits f32[B, V] after each row's last token, and the caches.

    Raises:
        ValueError: for an empty question, or too little room in the caches.
    """
    lengths = np.array([len(question) for question in questions])
    if len(lengths) != len(positions) or lengths.min(initial=1) < 1:
        raise ValueError(
            f"questions of {lengths} tokens: each of the {len(positions)} rows must have 1 or more."
        )
    width = int(lengths.max())
    column = np.arange(width)[None]
    tokens = np.zeros((len(lengths), width), np.int32)
    for row, question in zip(tokens, questions, strict=True):
        row[: len(question)] = question
    at = np.where(column < lengths[:, None], np.asarray(positions)[:, None] + column, -1)
    hidden, caches = decode.extend(
        model, params, caches, jnp.asarray(tokens), jnp.asarray(at, jnp.int32)
    )
    return decode.head(model, params, hidden[jnp.arange(len(lengths)), lengths - 1]), caches


@functools.partial(jax.jit, static_argnums=0)
def _queries(model, params, caches, tokens, positions) -> list[Array]:
    """Rotated queries [B, N, W, H] of every layer for tokens that the caches already hold."""
    found = []

    def attend(q, k, v, cache):
        dtype, q = q.dtype, rotate(model.rope, q, positions)
        found.append(q)
        k, v, where = cache.materialize()
        return attend_dense(q, k, v, positions, where).astype(dtype), None

    x = model.embed(model.config, params, tokens)
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, _ = model.block(model.config, layer, x, attend, cache)
    return found


@functools.partial(jax.jit, static_argnums=2)
def _prompt(cache: Any, q: Array, rope: Rope) -> tuple[PromptKV, Array]:
    """What a cache attends to as a prompt, and the tokens of each KV head i32[B, K]."""
    k, v, where = cache.materialize()
    order = jnp.argsort(where, -1, stable=True)  # empty slots first: right-aligned
    k, v = (jnp.take_along_axis(x, order[..., None], 2) for x in (k, v))
    where = jnp.take_along_axis(where, order, 2)
    counts = (where >= 0).sum(-1, dtype=jnp.int32)
    batch, heads, window, dim = q.shape
    queries = jnp.zeros((batch, heads, k.shape[2], dim), k.dtype)
    queries = queries.at[:, :, k.shape[2] - window :].set(q.astype(k.dtype))
    prompt = PromptKV(
        queries, k, unrotate(rope, k, where), v, k.shape[2] - counts[:, 0],
        next_positions=where.max((1, 2)) + 1, positions=where,
    )  # fmt: skip
    return prompt, counts


def recompress(
    model: Model,
    params: Any,
    caches: Any,
    method: Method,
    recent: Array,
    *,
    reserve: int,
) -> tuple[Any, ...]:
    """Compress body and tail again: decode-time compression at a fixed budget or ratio.

    What the caches attend to becomes the prompt of `method`: set its budget, or solve it for the
    tokens that are there. Codes are coded again; the error adds up. Methods that evict at every
    step (`when="step"`) never need this.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer, with tails; not consumed.
        method: needs no more than the last W queries (the prompt's are gone).
        recent: i32[B, W], each row's last W tokens, all of them in the cache; the model is run on
            them once more for their queries.
        reserve: tokens that will be appended, the capacity of the new tails.

    Returns:
        A cache a layer.

    Raises:
        ValueError: if the method needs other queries, or tokens that were evicted; if the KV heads
            of a layer hold different numbers of tokens.
    """
    name, window = getattr(method, "name", type(method).__name__), recent.shape[1]
    ranker = getattr(method, "evictor", method)  # of two methods in a row, the first
    if getattr(ranker, "queries", "") == "all" or getattr(ranker, "column_sums", False):
        raise ValueError(
            f"{name} ranks by all queries of the prompt, which are gone: take another."
        )
    if (getattr(ranker, "window", 0) or 0) > window:
        raise ValueError(f"recent holds {window} tokens: it must hold window={ranker.window}.")
    if getattr(ranker, "positions", "absolute") != "absolute":
        raise ValueError(f"{name} with positions='cache' moves its sinks: it must be 'absolute'.")
    positions = np.asarray(_next_positions(caches[0]))[:, None] - np.arange(window, 0, -1)[None]
    queries = _queries(model, params, tuple(caches), recent, jnp.asarray(positions, jnp.int32))
    prompts = []
    for index, (cache, q) in enumerate(zip(caches, queries, strict=True)):
        prompt, counts = _prompt(cache, q, model.rope)
        counts, total = np.asarray(counts), np.asarray(prompt.next_positions)
        if (counts != counts[:, :1]).any():
            raise ValueError(
                f"layer {index}: KV heads hold {counts.tolist()} tokens: recompress needs as many"
                " for every head of a row."
            )
        if (counts[:, 0] == total).all():  # nothing was evicted: a prompt like any other
            prompt = replace(prompt, positions=None, next_positions=None)
        elif not hasattr(ranker, "select"):
            raise ValueError(
                f"layer {index} holds {counts[:, 0].tolist()} of {total.tolist()} tokens:"
                f" {name} needs all of them."
            )
        prompts.append(prompt)
    return decode.compress(method, prompts, model, reserve=reserve)


@jax.jit
def _next_positions(cache: Any) -> Array:
    return cache.materialize()[2].max((1, 2)) + 1
