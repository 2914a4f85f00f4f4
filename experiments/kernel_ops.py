"""Time of the ops, and of the full cache's attention done the usual ways."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from experiments import kernel_shapes
from experiments.kernel_clock import (
    Clock,
    Program,
    Rates,
    compiled,
    num_copies,
    one_line,
    time_calls,
    too_large,
)
from experiments.kernel_shapes import CASES, MODELS

# The full cache by other means than its kernel; pages are a case of their own.
FULL_CACHE = ("eager", "dot_product_attention:xla", "dot_product_attention:cudnn")
SLOWEST = 6.0  # an estimate: calls of a cell, each this many times its floor


class Cell(NamedTuple):
    """What one row measures."""

    model: str
    context: int  # tokens
    batch: int
    case: str  # of kernel_shapes.CASES
    impl: str  # of the op, or of FULL_CACHE

    def key(self) -> dict[str, Any]:
        """What identifies its row."""
        return {"kind": "op", **self._asdict()}


class Prepared(NamedTuple):
    """Compiled, with the arguments' maker."""

    make: Program  # of no arguments
    call: Program


def implementations(case: str, device: str) -> list[str]:
    """Implementations to time, the most wanted first.

    Args:
        case: of `kernel_shapes.CASES`.
        device: "gpu", "tpu" or "xla" (`kernel_clock.implementation`).
    """
    found = [device]
    if device == "gpu" and CASES[case].op in ("quant_decode", "anchor_decode"):
        found.append("triton")
    if case == "pooled_decode":
        found += [name for name in FULL_CACHE if device == "gpu" or not name.endswith("cudnn")]
    return found + ["xla"] * (device != "xla")


def prepare(cell: Cell) -> Prepared:
    """Compile; runs beside others in threads, so it touches no device memory."""
    case = CASES[cell.case]
    shape = case.shape(MODELS[cell.model], cell.context, cell.batch)
    api = kernel_shapes.api(case.op)
    given = kernel_shapes.arguments(case.op, shape)
    library = cell.impl.startswith("dot_product_attention")

    make = maker(case.op, shape, library)
    if cell.impl == "eager":
        group = MODELS[cell.model].heads // MODELS[cell.model].kv_heads
        held = kernel_shapes.array_bytes(given.arrays) * (1 + group)
        return Prepared(make, Program(eager, held, None))
    if library:
        function = functools.partial(attention_of_library, which=cell.impl.rpartition(":")[2])
        return Prepared(make, compiled(function, *jax.eval_shape(by_token, *given.arrays)))
    function = functools.partial(getattr(api, case.op), **given.keywords, impl=cell.impl)
    return Prepared(make, compiled(function, *given.arrays))


@functools.lru_cache(maxsize=64)
def maker(op: str, shape: tuple, library: bool) -> Program:
    """Compiled maker of an op's arguments, in the layout of `by_token` if for the library."""

    def make():
        arrays = kernel_shapes.api(op).example(shape)[0]
        return by_token(*arrays) if library else arrays

    return compiled(make)


def eager(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """The full cache's attention as `transformers` writes it, an operation at a time.

    Keys and values are repeated for every query head; float32 in the softmax alone.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    scores = jnp.matmul(q, k.swapaxes(2, 3)) * q.shape[-1] ** -0.5
    valid = jnp.arange(k.shape[2])[None, None] < jnp.repeat(lengths, group, 1)[..., None]
    scores = jnp.where(valid[:, :, None], scores, jnp.finfo(scores.dtype).min)
    p = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(q.dtype)
    return jnp.matmul(p, v)


def by_token(q: Array, k: Array, v: Array, lengths: Array) -> tuple[Array, ...]:
    """The arguments of `pooled_decode` as `jax.nn.dot_product_attention` takes them."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return q, k, v, lengths[:, 0]


def attention_of_library(q: Array, k: Array, v: Array, lengths: Array, *, which: str) -> Array:
    """`jax.nn.dot_product_attention` over the first `lengths` i32[B] tokens of [B, S, K, H]."""
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=jnp.ones_like(lengths),
        implementation=which,
    )  # fmt: skip


def measure(
    cell: Cell,
    prepared: Prepared,
    rates: Rates,
    clock: Clock,
    cell_seconds: float,
    time_seconds: float,
    cache_bytes: int,
) -> dict[str, Any]:
    """The row of a cell: times, floor and share of the copy bandwidth, or why there are none.

    Args:
        cell: what to measure.
        prepared: of `prepare`.
        rates: of the device, measured in this run.
        clock: the time that is left.
        cell_seconds: a cell that is estimated to take longer is not started.
        time_seconds: spent on timing.
        cache_bytes: of arguments that are used in turn, so that no cache holds them all.
    """
    case = CASES[cell.case]
    heads = MODELS[cell.model]
    shape = case.shape(heads, cell.context, cell.batch)
    traffic = kernel_shapes.moved(case.op, shape)
    flops = case.flops(heads, cell.context, cell.batch)
    least = kernel_shapes.floor(traffic.total, flops, rates.copy_gigabytes, rates.teraflops)
    row = cell.key() | {
        "op": case.op, "shape": repr(shape), "backend": jax.default_backend(),
        "argument_bytes": traffic.argument_bytes, "output_bytes": traffic.output_bytes,
        "bytes": traffic.total, "flops": flops, "floor_seconds": least.seconds,
        "limited_by": least.limited_by,
    }  # fmt: skip
    sets = num_copies(traffic.argument_bytes, cache_bytes)
    # Arguments are drawn in float32 before they are rounded.
    need = prepared.call.bytes + max(sets * traffic.argument_bytes, prepared.make.bytes)
    guess = SLOWEST * 5 * least.seconds + 0.5
    reason = (
        prepared.make.refusal
        or prepared.call.refusal
        or (None if guess <= cell_seconds else f"time: about {guess:.0f} s for a cell")
        or clock.refusal(guess)
        or too_large(need)
    )
    if reason is None:
        try:
            arguments = [prepared.make.call() for _ in range(sets)]
            took = time_calls(prepared.call.call, arguments, time_seconds)
        except (RuntimeError, ValueError) as error:  # out of memory, a refused launch
            reason = f"does not run: {one_line(error)}"
    if reason is not None:
        return row | {"skipped": reason}
    bound = took.queued < 2 * rates.dispatch_seconds
    if jax.default_backend() != "cpu":  # where a queued call returns before it has run
        bound |= took.enqueue > 0.8 * took.queued
    return row | {
        "seconds": took.queued, "waited_seconds": took.waited, "enqueue_seconds": took.enqueue,
        "rounds": took.rounds,
        "calls": took.calls, "sets": sets,
        "gigabytes_per_second": traffic.total / took.queued / 1e9,
        "bandwidth_share": traffic.total / took.queued / (rates.copy_gigabytes * 1e9),
        "teraflops": flops / took.queued / 1e12,
        "dispatch_bound": bound, "skipped": None,
    }  # fmt: skip


def cells(
    models: Sequence[str],
    contexts: Sequence[int],
    batches: Sequence[int],
    cases: Sequence[str],
    longest_prefill: int,
    device: str,
) -> list[list[Cell]]:
    """Groups of cells in the order of their worth: a group is compiled together, then timed.

    A group is a model and a batch; the largest batch and the first model come first. In a group,
    ops that read a cache come before those that run once a prompt. What only compares, XLA beside a
    device's kernels, comes after all groups.
    """
    places = [
        (rank + order, model, batch)
        for rank, batch in enumerate(sorted(set(batches), reverse=True))
        for order, model in enumerate(models)
    ]
    groups, comparisons = [], []
    for _, model, batch in sorted(places, key=lambda place: place[0]):
        found = [
            Cell(model, context, batch, case, impl)
            for case in sorted(cases, key=lambda case: not CASES[case].decode)
            for context in sorted(set(contexts))
            if CASES[case].decode or context <= longest_prefill
            for impl in dict.fromkeys(implementations(case, device))
        ]
        groups.append([cell for cell in found if cell.impl == device or cell.impl != "xla"])
        comparisons.append([cell for cell in found if cell.impl == "xla" != device])
    return groups + [group for group in comparisons if group]
