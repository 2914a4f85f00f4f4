"""Whether a compressed cache may replace the full one: gates, onset, crossover, the candidate.

Pure functions over measured numbers; nothing is measured here. A point is a context length (or any
other axis) with a value measured there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ACCEPTED, REFUSED, FAILED, REFERENCE, PLANNED = (
    "accepted", "refused", "failed", "reference", "planned"
)  # fmt: skip


class Gates(NamedTuple):
    """What a compressed cache must keep to; a value on the bound passes."""

    max_nll_difference: float = 0.50  # nats a token, compressed minus full
    min_top5_overlap: float = 0.60  # mean share of the full cache's five likeliest tokens
    max_latency_ratio: float = 2.00  # time a token over the full cache's


class Verdict(NamedTuple):
    """What the gates say of one measurement."""

    decision: str  # ACCEPTED or REFUSED
    broken: tuple[str, ...]  # gates that refused it
    uncertain: tuple[str, ...]  # gates whose bound lies inside the measurement's interval


def judge(
    gates: Gates,
    nll_difference: float,
    top5_overlap: float,
    latency_ratio: float,
    intervals: Mapping[str, tuple[float, float] | None] | None = None,
) -> Verdict:
    """Hold one measurement against the gates.

    Args:
        gates: the bounds.
        nll_difference: nats a token, compressed minus full on the same tokens.
        top5_overlap: in [0, 1].
        latency_ratio: time a token over the full cache's in the same rounds, > 0.
        intervals: (low, high) by the name of the value, where there is one; None is left out.

    Raises:
        ValueError: for a value that is not a number: it is neither accepted nor refused.
    """
    values = {
        "nll_difference": (nll_difference, gates.max_nll_difference, 1),
        "top5_overlap": (top5_overlap, gates.min_top5_overlap, -1),
        "latency_ratio": (latency_ratio, gates.max_latency_ratio, 1),
    }
    for name, (value, _, _) in values.items():
        if value != value:
            raise ValueError(f"{name}={value} must be a number to be judged.")
    broken = tuple(n for n, (value, bound, sign) in values.items() if sign * (value - bound) > 0)
    found = {name: given for name, given in (intervals or {}).items() if given is not None}
    uncertain = tuple(n for n in values if n in found and found[n][0] < values[n][1] < found[n][1])
    return Verdict(REFUSED if broken else ACCEPTED, broken, uncertain)


def onset(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the least measured x from which on every value is positive, None where none is.

    Args:
        points: (x, value), such as (context, saved bytes), in any order.
    """
    found = None
    for x, value in sorted(points, reverse=True):
        if value <= 0:
            break
        found = x
    return found


def crossover(points: Sequence[tuple[float, float]], level: float = 0.0) -> float | None:
    """Return where the values last cross a level, linear between measured points.

    None where they stay on one side: the crossing, if there is one, is outside of what was
    measured.

    Args:
        points: (x, value) with distinct x, in any order.
        level: value that is crossed, such as the bound of a gate.
    """
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in reversed(list(zip(ordered, ordered[1:], strict=False))):
        below, above = y0 - level, y1 - level
        if (below > 0) != (above > 0):
            return x0 + (x1 - x0) * below / (below - above)
    return None


def candidate(cells: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the accepted cell that saves most bytes, the faster of two alike; None without one.

    Args:
        cells: each with `decision` and, where it is ACCEPTED, `saved_bytes` and `latency_ratio`.
            A cell that saves nothing is no candidate, whatever its quality.
    """
    accepted = [c for c in cells if c["decision"] == ACCEPTED and c["saved_bytes"] > 0]
    return max(accepted, key=lambda c: (c["saved_bytes"], -c["latency_ratio"]), default=None)


def conclude(cells: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return the decision over all cells, and the first stage that failed.

    ACCEPTED where there is a candidate; else REFUSED where the gates judged something; FAILED where
    nothing got so far; PLANNED where nothing was run.

    Args:
        cells: each with `decision` and, where it is FAILED, `failure_stage`.
    """
    stage = next((c["failure_stage"] for c in cells if c["decision"] == FAILED), None)
    if candidate(cells) is not None:
        return ACCEPTED, stage
    judged = {ACCEPTED, REFUSED} & {c["decision"] for c in cells}
    if judged:
        return REFUSED, stage
    return (FAILED if stage is not None else PLANNED), stage
