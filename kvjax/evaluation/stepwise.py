"""Answers to their real end, a step at a time, and what each step chose between.

A Python loop over `decode.decode_step`. A row that has ended gives its place to a waiting prompt;
where none can take it, it is frozen, and once half of a batch has ended the other half goes on
alone: one long answer does not keep the others' places.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
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


class Wave(NamedTuple):
    """Compressed prompts that are answered together, or in the places of others."""

    caches: Any  # a cache a layer, right after the prompt; donated
    logits: Array  # f32[B, V], of the prompt's last token
    positions: np.ndarray  # int[B], the next position of each row
    real: int | None = None  # the first `real` rows are wanted, the others fill up; None: all


class Answer(NamedTuple):
    """One row's answer; arrays have an entry a token and are of the model's own distribution."""

    tokens: np.ndarray  # int[n], a stop token included
    stopped: bool  # ended by a stop token, else by the limit
    probability: np.ndarray  # f32[n], of the token that was taken
    gap: np.ndarray  # f32[n], of the likeliest token minus that of the second
    stop_probability: np.ndarray  # f32[n], of all stop tokens together
    kv_bytes: int  # live bytes of the row's cache at its end, all layers


@functools.partial(jax.jit, static_argnames=("greedy", "nucleus"))
def _choose(logits, stop, keys, steps, temperature, top_p, given, *, greedy, nucleus):
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
        keys = jax.vmap(jax.random.fold_in)(keys, steps)
        if nucleus:
            token = decode.sample(logits, keys, temperature, top_p)
        else:
            token = jax.vmap(jax.random.categorical)(keys, logits / temperature).astype(jnp.int32)
    taken = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    stops = jnp.exp(logits[:, stop] - total[:, None]).sum(-1)
    return token, jnp.stack([jnp.exp(taken - total), gap, stops], -1)


_select = jax.jit(decode.select_rows)


@functools.partial(jax.jit, donate_argnums=0)
def _place(arrays, others, here, rows):
    """Put row `rows[i]` of the others in place i, where `here`."""

    def place(a, b):
        return jnp.where(here.reshape(-1, *(1,) * (a.ndim - 1)), b[rows], a)

    return jax.tree.map(place, arrays, others)


class _Batch:
    """Rows that are being answered; row i has the number rows[i], -1 where it only fills up."""

    def __init__(self, wave: Wave, rows: np.ndarray):
        self.caches, self.logits = wave.caches, wave.logits
        self.positions, self.rows = np.array(wave.positions), rows
        self.steps, self.alive = np.zeros_like(rows), rows >= 0

    def takes(self, other: "_Batch") -> bool:
        """Whether rows of the other can take places here: the same static sizes."""
        own = any(hasattr(cache, "select_rows") for cache in self.caches)  # rows: no leading axis
        a, b = (jax.tree.map(jax.typeof, x.caches) for x in (self, other))
        return not own and a == b

    def refill(self, other: "_Batch") -> None:
        """Move rows of the other to the places of rows that have ended."""
        free, moved = np.flatnonzero(~self.alive), np.flatnonzero(other.alive)
        count = min(len(free), len(moved))
        free, moved = free[:count], moved[:count]
        rows = np.zeros_like(self.rows)
        rows[free] = moved
        here = np.isin(np.arange(len(rows)), free)
        self.caches, self.logits = _place(
            (self.caches, self.logits), (other.caches, other.logits), here, rows
        )
        for name in ("positions", "rows", "steps", "alive"):
            getattr(self, name)[free] = getattr(other, name)[moved]
        other.alive[moved] = False

    def halve(self, smallest: int) -> None:
        """Drop rows that have ended while no more than half of a batch goes on."""
        size = len(self.rows)
        while self.alive.sum() <= size // 2 and size // 2 >= smallest:
            size //= 2
        if size < len(self.rows):
            kept = np.argsort(~self.alive, kind="stable")[:size]
            self.caches, self.logits = _select(self.caches, kept), self.logits[kept]
            for name in ("positions", "rows", "steps", "alive"):
                setattr(self, name, getattr(self, name)[kept])


def _numbered(waves: Iterable[Wave], limit: int) -> Iterator[_Batch]:
    """Batches of numbered rows that have room for the answers."""
    first = 0
    for wave in waves:
        room = min(int(np.asarray(cache.room()).min()) for cache in wave.caches)
        if room < limit - 1:  # the last token is not stored
            raise ValueError(
                f"limit={limit} exceeds the room of the cache, {room} tokens: compress with a"
                " larger reserve."
            )
        size = wave.logits.shape[0]
        at = np.arange(size)
        yield _Batch(
            wave, np.where(at < (size if wave.real is None else wave.real), first + at, -1)
        )
        first += size


def answer(
    model: Model,
    params: Any,
    caches: Any,
    logits: Array,
    positions: np.ndarray,
    *,
    real: int | None = None,
    **options: Any,
) -> list[Answer]:
    """The answers of one batch, in order; arguments and errors as in `Wave` and `answers`."""
    wave = Wave(caches, logits, positions, real)
    found = dict(answers(model, params, [wave], **options))
    return [found[row] for row in sorted(found)]


def answers(
    model: Model,
    params: Any,
    waves: Iterable[Wave],
    *,
    limit: int,
    stop_ids: Sequence[int],
    sampling: Sampling = Sampling(),  # noqa: B008  (immutable)
    forced: Sequence[Sequence[int]] | None = None,
    smallest: int = 4,
) -> Iterator[tuple[int, Answer]]:
    """Generate each row's answer, or run given answers through the caches.

    A wave is asked for once an eighth of the batch has ended. Its rows take the places of those, if
    its caches have the same sizes; else it waits until all have ended.

    Args:
        model: the decoder.
        params: its weights.
        waves: compressed prompts, made when they are asked for; their rows are numbered in turn.
        limit: most tokens of an answer.
        stop_ids: a row ends with any of these.
        sampling: temperature, top-p and keys.
        forced: token ids of each row's answer: they are taken instead of the model's choice.
        smallest: rows below which a batch is not halved again.

    Yields:
        Number and answer of each row that is wanted, as soon as it ends.

    Raises:
        ValueError: for a limit below 1, sampling without keys, an empty forced answer, or caches
            without room for the answers.
    """
    check(limit, sampling, forced)
    if forced is not None:
        limit = min(limit, max(len(ids) for ids in forced))
    stop, chosen = np.array(sorted(stop_ids), np.int32), {}
    greedy = sampling.temperature == 0 or forced is not None
    waves, batch, waiting = _numbered(waves, limit), None, None
    while True:
        if batch is None or 8 * (~batch.alive).sum() >= len(batch.rows):
            if waiting is None or not waiting.alive.any():
                waiting = next(waves, None)
            if batch is None or not batch.alive.any():
                batch, waiting = waiting, None
                if batch is None:
                    return
                interval = decode.flush_interval(batch.caches)
            elif waiting is None or not batch.takes(waiting):
                batch.halve(smallest)
            else:
                batch.refill(waiting)
        # asked for the rows that go on: one that ended with a full block would ask at every step
        if decode.needs_flush(interval, batch.positions[batch.alive]):
            batch.caches = decode.flush(batch.caches)
        keys, given, ends = None, None, limit
        if sampling.keys is not None:
            keys = sampling.keys[np.maximum(batch.rows, 0)]
        if forced is not None:
            own = [forced[row] if row >= 0 else (0,) for row in batch.rows]
            ends = np.minimum([len(ids) for ids in own], limit)
            steps = np.minimum(batch.steps, ends - 1)  # one that has ended: any of its tokens
            given = np.array([ids[s] for ids, s in zip(own, steps, strict=True)], np.int32)
        token, statistics = _choose(
            batch.logits, stop, keys, batch.steps.astype(np.int32), sampling.temperature,
            sampling.top_p, given, greedy=greedy, nucleus=sampling.top_p < 1,
        )  # fmt: skip
        host, statistics = np.asarray(token), np.asarray(statistics)
        going = batch.alive.copy()
        for i in np.flatnonzero(batch.alive):
            chosen.setdefault(batch.rows[i], []).append((host[i], statistics[i]))
        stopped = batch.alive & np.isin(host, stop)
        batch.steps += batch.alive
        batch.alive &= ~stopped & (batch.steps < ends)
        if (over := going & ~batch.alive).any():  # now: what the others go on to do is not theirs
            live = accounting.live_bytes(batch.caches)
            stored = live.stored + live.tail
            for i in np.flatnonzero(over):
                tokens, seen = zip(*chosen.pop(batch.rows[i]), strict=True)
                yield (
                    int(batch.rows[i]),
                    Answer(np.array(tokens), bool(stopped[i]), *np.stack(seen, 1), int(stored[i])),
                )
        if batch.alive.any():
            at = np.where(batch.alive, batch.positions, -1).astype(np.int32)
            batch.logits, batch.caches = decode.decode_step(model, params, batch.caches, token, at)
            batch.positions = batch.positions + batch.alive


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
