"""One layer of a method: where the time of compress goes, and what its decode steps take."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_clock import Clock, Program, compiled, one_line, time_calls, too_large
from experiments.kernel_shapes import MODELS, array_bytes
from kvjax import accounting, registry, rope, scores, timing
from kvjax.types import LayerInfo, PromptKV, PromptShape

LAYERS = 32  # what PyramidKV's first layer is told
WARM_STEPS = 5
_ROPE = {"smollm2_135m": 1e5, "llama3_8b": 5e5, "llama3_70b_tp8": 5e5, "qwen2_5_7b": 1e6}


class Cell(NamedTuple):
    """What one row measures."""

    model: str
    context: int  # tokens of the prompt
    batch: int
    method: str  # label of registry.make
    impl: str

    def key(self) -> dict[str, Any]:
        """What identifies its row."""
        return {"kind": "method", **self._asdict()}


class Prepared(NamedTuple):
    """Compiled parts of a method; a part that it does not have is None."""

    method: Any
    make: Program  # seed -> PromptKV
    new: Program  # seed -> q, k, v of a new token
    score: Program | None
    select: Program | None
    compress: Program
    dequantize: Program | None
    attend: Program  # a step's output alone: what it appends is dropped
    step: Program
    flush: Program | None

    @property
    def programs(self) -> list[Program]:
        """All that there are."""
        return [p for p in self if isinstance(p, Program)]


def method_of(cell: Cell, ratio: float) -> Any:
    """The method at full bytes / ratio where it can be set so, else as its label says."""
    heads = MODELS[cell.model]
    shape = PromptShape(cell.context, heads.kv_heads, heads.head_dim)
    method = registry.make(cell.method)
    if hasattr(method, "fit"):
        method = method.fit(shape.full_bytes / ratio, shape)
    if hasattr(method, "resolve"):
        method = method.resolve(shape)
    return dataclasses.replace(method.for_layer(0, LAYERS), impl=cell.impl)


def prompt_maker(cell: Cell) -> Callable[[Any], PromptKV]:
    """Random normal queries, keys and values in bfloat16: times hardly depend on them."""
    n, k, h = MODELS[cell.model]

    def make(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        sizes = (n, k, k, k)
        arrays = (
            jax.random.normal(key, (cell.batch, size, cell.context, h), jnp.bfloat16)
            for key, size in zip(keys, sizes, strict=True)
        )
        return PromptKV(*arrays, jnp.zeros(cell.batch, jnp.int32))

    return make


def scorer(method: Any) -> Callable | None:
    """(method, prompt, info) -> its scores; of AnchorKV, the observation that it ranks by."""
    if hasattr(method, "score"):
        return lambda m, prompt, info: m.score(prompt, info)
    if hasattr(method, "group_score"):
        return lambda m, prompt, info: scores.observed(
            prompt, m.window, m.kernel, m.pooling, m.group_score
        )
    if method.name == "anchorkv":
        return lambda m, prompt, info: scores.observe(prompt, m.window)
    return None


def coded(cache: Any) -> bool:
    """Whether a cache holds codes, so that reading it densely would decode them."""
    return any(x.dtype == jnp.uint8 for x in jax.tree.leaves(cache))


def prepare(cell: Cell, ratio: float, steps: int) -> Prepared:
    """Compile every part; touches no device memory."""
    n, k, h = MODELS[cell.model]
    inv_freq = _ROPE[cell.model] ** -(np.arange(0, h, 2) / h)
    info = LayerInfo(LAYERS, None, steps + WARM_STEPS, rope.Rope(tuple(inv_freq.tolist())))
    method, make = method_of(cell, ratio), prompt_maker(cell)

    def new(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        return tuple(
            jax.random.normal(key, (cell.batch, size, 1, h), jnp.bfloat16)
            for key, size in zip(keys, (n, k, k), strict=True)
        )

    def of(function):
        return lambda m, prompt: function(m, prompt, info)

    def step(cache, q, k, v, positions):
        out, cache = cache.step(q, k, v, positions)
        return out, cache, positions + 1

    prompt, token = jax.eval_shape(make, 0), jax.eval_shape(new, 0)
    positions = jax.ShapeDtypeStruct((cell.batch, 1), jnp.int32)
    compress = of(lambda m, prompt, info: m.compress(prompt, info))
    cache = jax.eval_shape(compress, method, prompt)
    score = scorer(method)
    selects = hasattr(method, "select")
    return Prepared(
        method, compiled(make, 0), compiled(new, 0),
        None if score is None else compiled(of(score), method, prompt),
        compiled(of(lambda m, p, info: m.select(p, info)), method, prompt) if selects else None,
        compiled(compress, method, prompt),
        compiled(lambda c: c.materialize(), cache) if coded(cache) else None,
        compiled(lambda *given: step(*given)[0], cache, *token, positions),
        compiled(step, cache, *token, positions, donate=(0, 4)),
        None if cache.flush_every is None
        else compiled(lambda c: c.flush(), cache, donate=(0,)),
    )  # fmt: skip


def measure(
    cell: Cell,
    prepared: Prepared,
    clock: Clock,
    cell_seconds: float,
    time_seconds: float,
    steps: int,
) -> dict[str, Any]:
    """The row of a method, or why there is none.

    Args:
        cell: what to measure.
        prepared: of `prepare`.
        clock: the time that is left.
        cell_seconds: for the decode steps, at most; and what must be left to start.
        time_seconds: for each part of compress.
        steps: decode steps, at most.
    """
    row = cell.key() | {"backend": jax.default_backend()}
    refusals = [p.refusal for p in prepared.programs if p.refusal]
    sizes = [p.bytes for p in prepared.programs]
    reason = (
        next(iter(refusals), None)
        or clock.refusal(min(cell_seconds, 5.0))
        or too_large(max(sizes, default=0) + prepared.make.bytes)
    )
    if reason is None:
        try:
            return row | _measured(cell, prepared, cell_seconds, time_seconds, steps)
        except (RuntimeError, ValueError) as error:  # out of memory, a refused launch
            reason = f"does not run: {one_line(error)}"
    return row | {"skipped": reason}


def _measured(cell, prepared, cell_seconds, time_seconds, steps) -> dict[str, Any]:
    prompt = jax.block_until_ready(prepared.make.call(0))
    method = prepared.method

    def seconds(program, *arguments):
        if program is None:
            return None
        return time_calls(program.call, [arguments], time_seconds).queued

    parts = split(
        seconds(prepared.score, method, prompt),
        seconds(prepared.select, method, prompt),
        seconds(prepared.compress, method, prompt),
    )
    cache = jax.block_until_ready(prepared.compress.call(method, prompt))
    del prompt
    q, k, v = prepared.new.call(1)
    positions = jnp.full((cell.batch, 1), cell.context, jnp.int32)
    stored = int(accounting.live_bytes((cache,)).stored.sum())
    shape = PromptShape(cell.context, *MODELS[cell.model][1:])
    parts |= {
        "dequantize_seconds": seconds(prepared.dequantize, cache),
        "attend_seconds": seconds(prepared.attend, cache, q, k, v, positions),
        "allocated_bytes": array_bytes(cache), "stored_bytes": stored,
        "ratio": shape.full_bytes * cell.batch / stored,
    }  # fmt: skip
    every = cache.flush_every
    ordinary, flushing = [], []
    end = time.perf_counter() + cell_seconds
    for i in range(steps):
        if i > 2 * WARM_STEPS and time.perf_counter() > end:
            break
        due = every is not None and (cell.context + i) % every == 0
        begin = time.perf_counter()
        if due:
            cache = prepared.flush.call(cache)
        out, cache, positions = prepared.step.call(cache, q, k, v, positions)
        jax.block_until_ready((out, cache))
        took = time.perf_counter() - begin
        if i >= WARM_STEPS:
            (flushing if due else ordinary).append(took)
    return parts | step_times(ordinary, flushing) | {"skipped": None}


def split(score: float | None, select: float | None, compress: float) -> dict[str, Any]:
    """Where compress spends its seconds.

    Args:
        score: of scoring alone; None: there are no scores.
        select: of scoring and selecting; None: nothing is selected.
        compress: of everything.

    Returns:
        Seconds of score, of select without its score, and of the rest, which codes or gathers.
    """
    known = select if select is not None else score or 0.0
    return {
        "score_seconds": score,
        "select_seconds": None if select is None else max(select - (score or 0.0), 0.0),
        "quantize_seconds": max(compress - known, 0.0),
        "compress_seconds": compress,
    }


def step_times(ordinary: list[float], flushing: list[float]) -> dict[str, Any]:
    """p50 and p99 of ordinary steps and of those that flush first, seconds."""
    times = {"num_steps": len(ordinary), "num_flush_steps": len(flushing)}
    for name, seconds in (("step", ordinary), ("flush_step", flushing)):
        found = timing.summarize(seconds) if seconds else None
        times[f"{name}_seconds"] = found and found.median_seconds
        times[f"{name}_p99_seconds"] = found and found.p99_seconds
    return times
