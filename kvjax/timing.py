"""Wall time of JAX calls and resident memory of this process.

Speeds depend on the machine and on what else runs there: report them only as ratios of two
measurements of one run, never as a difference between runs.
"""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_STATUS = Path("/proc/self/status")


class Timing(NamedTuple):
    """Wall times of repeated calls, in seconds."""

    median_seconds: float
    min_seconds: float
    p99_seconds: float
    all_seconds: tuple[float, ...]


def measure(fn: Callable[..., Any], *args: Any, warmup: int = 2, repeats: int = 10) -> Timing:
    """Time `fn(*args)` until every array of its result is ready.

    Args:
        fn: must not donate its arguments: it is called with the same ones (see `measure_steps`).
        *args: its arguments, made ready before the first call.
        warmup: calls that are not counted; the first one compiles.
        repeats: calls that are counted, at least 1.
    """
    jax.block_until_ready(args)
    return measure_steps(lambda _: fn(*args), None, warmup=warmup, repeats=repeats)[0]


def measure_steps(
    step: Callable[[Any], Any], state: Any, *, warmup: int = 2, repeats: int = 10
) -> tuple[Timing, Any]:
    """Time `state = step(state)`, which may donate its argument: a decode step.

    Args:
        step: takes the state and returns the next one.
        state: first state, any pytree; must not be used again when `step` donates it.
        warmup: steps that are not counted.
        repeats: steps that are counted, at least 1.

    Returns:
        The timing and the state after warmup + repeats steps.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats} must be at least 1 and warmup={warmup} at least 0.")
    seconds = []
    for i in range(warmup + repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        if i >= warmup:
            seconds.append(time.perf_counter() - start)
    return summarize(seconds), state


def summarize(seconds: list[float]) -> Timing:
    """Return the timing of calls that took `seconds` each; p99 interpolates between calls."""
    p99 = float(np.percentile(seconds, 99))
    return Timing(float(np.median(seconds)), min(seconds), p99, tuple(seconds))


def current_rss_bytes() -> int:
    """Return the resident memory of this process now, in bytes.

    Raises:
        NotImplementedError: on a system without /proc.
    """
    value = _status("VmRSS")
    if value is None:
        raise NotImplementedError(f"{_STATUS} is missing: only the peak is known on this system.")
    return value


def peak_rss_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    value = _status("VmHWM")
    if value is not None:
        return value
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes but on macOS


def reset_peak_rss() -> bool:
    """Start the peak again from the present memory; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int | None:
    """Return an entry of /proc/self/status in bytes, or None without it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(name + ":")]
    return int(found[0]) * 1024 if found else None
