"""Seconds of calls on this device: what a call takes, what a copy takes, what time is left."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_ROUND_SECONDS = 0.02  # of queued calls that are timed together
_MOST_CALLS = 64


class Clock:
    """The time that a run may take; a cell that would not fit is not started."""

    def __init__(self, minutes: float):
        """Start now; the last twelfth is for what runs over and for the report."""
        self._end = time.monotonic() + 55 * minutes

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def refusal(self, seconds: float) -> str | None:
        """Why something of so many seconds cannot start, or None."""
        left = self.left()
        if left >= seconds:
            return None
        return f"time: needs about {seconds:.0f} s, {max(left, 0):.0f} s are left"


class Program(NamedTuple):
    """A compiled function, or why there is none."""

    call: Callable | None
    bytes: int  # of arguments, results and temporaries
    refusal: str | None


def compiled(function: Callable, *arguments: Any, donate: Sequence[int] = ()) -> Program:
    """Compile for the shapes of `arguments`; a failure is a reason, not an exception."""
    try:
        traced = jax.jit(function, donate_argnums=donate).lower(*arguments)
        program = traced.compile()
    except NotImplementedError as error:
        return Program(None, 0, f"not implemented: {one_line(error)}")
    except Exception as error:  # a compiler's errors have no common class
        return Program(None, 0, f"does not compile: {one_line(error)}")
    sizes = program.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return Program(program, sum(getattr(sizes, name, 0) or 0 for name in names), None)


def one_line(error: BaseException) -> str:
    """The first 200 characters of a message."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def free_bytes() -> int | None:
    """Memory that arrays may still take on the device; None where nobody knows."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        pages = getattr(os, "sysconf_names", {}).get("SC_PHYS_PAGES")
        return None if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def too_large(needed: int) -> str | None:
    """Why arrays of `needed` bytes cannot be made, or None; a tenth of the memory stays free."""
    free = free_bytes()
    if free is None or needed <= 0.9 * free:
        return None
    return f"memory: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


class Seconds(NamedTuple):
    """Of one call."""

    queued: float  # median over rounds of calls that are queued and waited for together
    waited: float  # median of single calls, each waited for: dispatch included
    enqueue: float  # median over rounds until a queued call returns
    rounds: int
    calls: int  # of a round


def time_calls(
    call: Callable, sets: Sequence[tuple], budget: float, most_rounds: int = 30
) -> Seconds:
    """Median seconds of `call(*arguments)`.

    Args:
        call: compiled, must not donate.
        sets: several copies of the arguments, used in turn so that no cache holds them.
        budget: seconds to spend, at least three rounds.
        most_rounds: at most.
    """
    jax.block_until_ready(sets)
    jax.block_until_ready(call(*sets[0]))
    waited = []
    turns = itertools.cycle(sets)
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(call(*next(turns)))
        waited.append(time.perf_counter() - begin)
    calls = int(np.clip(_ROUND_SECONDS / min(waited), 1, _MOST_CALLS))
    end, rounds, enqueue = time.perf_counter() + budget, [], []
    while len(rounds) < 3 or (len(rounds) < most_rounds and time.perf_counter() < end):
        begin = time.perf_counter()
        for _ in range(calls):
            out = call(*next(turns))
        enqueue.append((time.perf_counter() - begin) / calls)
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - begin) / calls)
    medians = (float(np.median(x)) for x in (rounds, waited, enqueue))
    return Seconds(*medians, len(rounds), calls)


class Rates(NamedTuple):
    """What the device does at best, measured."""

    copy_gigabytes: float  # 1e9 bytes a second, read and written
    teraflops: float  # 1e12 a second, of square products
    dispatch_seconds: float  # of a queued call that does nothing


def measure_rates(copy_bytes: int, side: int, budget: float = 1.0) -> Rates:
    """Copy bandwidth, products and dispatch.

    Args:
        copy_bytes: of the array that is copied; its traffic is twice that.
        side: of the square matrices; bfloat16, float32 on a CPU.
        budget: seconds for each.
    """
    copied = jnp.zeros(copy_bytes // 4, jnp.uint32)
    copy = compiled(lambda x: x ^ jnp.uint32(1), copied).call
    copy_seconds = time_calls(copy, [(copied,)], budget).queued
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    square = jnp.ones((side, side), dtype)
    product = compiled(jnp.dot, square, square).call
    product_seconds = time_calls(product, [(square, square)], budget).queued
    small = jnp.zeros(8)
    nothing = compiled(lambda x: x + 1, small).call
    return Rates(
        2 * copied.nbytes / copy_seconds / 1e9,
        2 * side**3 / product_seconds / 1e12,
        time_calls(nothing, [(small,)], budget / 4).queued,
    )


def num_copies(bytes_each: int, least_bytes: int) -> int:
    """How many sets of arguments outgrow the caches, at most eight.

    Args:
        bytes_each: of one set.
        least_bytes: of all together.
    """
    return int(np.clip(-(-least_bytes // max(bytes_each, 1)), 1, 8))


def implementation(backend: str | None = None) -> str:
    """Name of the kernels of this device: "gpu" or "tpu"; "xla" on a CPU."""
    backend = backend or jax.default_backend()
    return {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}.get(backend, "xla")
