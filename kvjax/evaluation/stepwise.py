"""Answers to their real end, a step at a time, and what each step chose between.

A Python loop over `decode.decode_step`: rows that have ended are frozen, and once half of a batch
has ended the other half goes on alone, so that one long answer does not keep the others' places.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import accounting, decode
from kvjax.types import Model


class Sampling(NamedTuple):
    """How a token is chosen; a row's draws depend on its own key and the step alone."""

    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # nucleus mass in (0, 1]
    keys: Array | None = None  # a key a row; needed where temperature > 0


class Answer(NamedTuple):
    """One row's answer; arrays have an entry a token and are of the model's own distribution."""

    tokens: np.ndarray  # int[n], a stop token included
    stopped: bool  # ended by a stop token, else by the limit
    probability: np.ndarray  # f32[n], of the token that was taken
    gap: np.ndarray  # f32[n], of the likeliest token minus that of the second
    stop_probability: np.ndarray  # f32[n], of all stop tokens together
    kv_bytes: int  # live bytes of the row's cache at its end, all layers


@functools.partial(jax.jit, static_argnames=("greedy", "nucleus"))
def _choose(logits, stop, keys, step, temperature, top_p, given, *, greedy, nucleus):
    total = jax.nn.logsumexp(logits, -1)
    likeliest = logits.argmax(-1).astype(jnp.int32)
    first = logits.max(-1)
    others = jnp.where(jnp.arange(logits.shape[1])[None] == likeliest[:, None], -jnp.inf, logits)
    gap = jnp.exp(first - total) - jnp.exp(others.max(-1) - total)
    if given is not None:
        token = given
    elif greedy:
        token = likeliest
    else:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
        if nucleus:
            token = decode.sample(logits, keys, temperature, top_p)
        else:
            token = jax.vmap(jax.random.categorical)(keys, logits / temperature).astype(jnp.int32)
    taken = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], 1)[:, 0]
    stops = jnp.exp(logits[:, stop] - total[:, None]).sum(-1)
    return token, jnp.stack([jnp.exp(taken - total), gap, stops], -1)


_select = jax.jit(decode.select_rows)


def answer(
    model: Model,
    params: Any,
    caches: Any,
    logits: Array,
    positions: np.ndarray,
    *,
    limit: int,
    stop_ids: Sequence[int],
    real: int | None = None,
    sampling: Sampling = Sampling(),  # noqa: B008  (immutable)
    forced: Sequence[Sequence[int]] | None = None,
    smallest: int = 4,
) -> list[Answer]:
    """Generate each row's answer, or run given answers through the caches.

    Args:
        model: the decoder.
        params: its weights.
        caches: a cache a layer, right after the prompt; donated.
        logits: f32[B, V], of the prompt's last token.
        positions: int[B], the next position of each row.
        limit: most tokens of an answer.
        stop_ids: a row ends with any of these.
        real: the first `real` rows are wanted, the others only fill the batch; None: all are.
        sampling: temperature, top-p and keys.
        forced: token ids of each row's answer: they are taken instead of the model's choice.
        smallest: rows below which a batch is not halved again.

    Returns:
        An answer for each of the `real` rows.

    Raises:
        ValueError: for a limit below 1, sampling without keys, an empty forced answer, or caches
            without room for the answers.
    """
    batch = logits.shape[0]
    real = batch if real is None else real
    check(limit, sampling, forced)
    if forced is not None:
        limit = min(limit, max(len(ids) for ids in forced[:real]))
    room = min(int(np.asarray(cache.room()).min()) for cache in caches)
    if room < limit - 1:  # the last token is not stored
        raise ValueError(
            f"limit={limit} exceeds the room of the cache, {room} tokens: compress with a larger"
            " reserve."
        )
    stop, interval = np.array(sorted(stop_ids), np.int32), decode.flush_interval(caches)
    rows, alive = np.arange(batch), np.arange(batch) < real
    positions, keys = np.array(positions), sampling.keys
    greedy = sampling.temperature == 0 or forced is not None
    tokens = np.full((batch, limit), -1, np.int64)
    seen = np.zeros((batch, limit, 3), np.float32)
    stored, stopped = np.zeros(batch, np.int64), np.zeros(batch, bool)

    for step in range(limit):
        # asked for the rows that go on: one that ended with a full block would ask at every step
        if decode.needs_flush(interval, positions[alive]):
            caches = decode.flush(caches)
        given, going = None, alive.copy()
        if forced is not None:
            given = np.array(
                [forced[r][step] if step < len(forced[r]) else -1 for r in rows], np.int32
            )
        token, statistics = _choose(
            logits, stop, keys, step, sampling.temperature, sampling.top_p, given, greedy=greedy,
            nucleus=sampling.top_p < 1,
        )  # fmt: skip
        host, statistics = np.asarray(token), np.asarray(statistics)
        if given is not None:
            alive &= host >= 0
        tokens[rows[alive], step] = host[alive]
        seen[rows[alive], step] = statistics[alive]
        ended = alive & np.isin(host, stop)
        stopped[rows[ended]] = True
        alive &= ~ended & (step + 1 < limit)
        if (over := going & ~alive).any():  # now: what the others go on to do is not theirs
            live = accounting.live_bytes(caches)
            stored[rows[over]] = (live.stored + live.tail)[over]
        if not alive.any():
            break
        half = len(rows) // 2
        if alive.sum() <= half and half >= smallest:
            while alive.sum() <= half // 2 and half // 2 >= smallest:
                half //= 2
            order = np.argsort(~alive, kind="stable")
            kept = order[:half]
            caches, token = _select(caches, jnp.asarray(kept)), token[kept]
            rows, alive, positions = rows[kept], alive[kept], positions[kept]
            keys = None if keys is None else keys[kept]
        at = jnp.asarray(np.where(alive, positions, -1), jnp.int32)
        logits, caches = decode.decode_step(model, params, caches, jnp.maximum(token, 0), at)
        positions = positions + alive

    counts = (tokens >= 0).sum(1)
    return [
        Answer(
            tokens[row, :n], bool(stopped[row]), *(seen[row, :n, i] for i in range(3)),
            int(stored[row]),
        )
        for row, n in enumerate(counts[:real])
    ]  # fmt: skip


def check(limit: int, sampling: Sampling, forced: Sequence[Sequence[int]] | None) -> None:
    """Refuse settings that give no answer.

    Raises:
        ValueError: as `answer` says.
    """
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 token.")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature={sampling.temperature} must be >= 0 and top_p={sampling.top_p} in (0, 1]."
        )
    if sampling.temperature > 0 and sampling.keys is None and forced is None:
        raise ValueError("sampling (temperature > 0) must be given keys, one a row.")
    if forced is not None and not all(len(ids) for ids in forced):
        raise ValueError("a forced answer is empty: each must hold at least 1 token.")
