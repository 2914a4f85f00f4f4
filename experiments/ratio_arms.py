"""One arm a method and ratio: solved, or the discrete setting whose bytes come nearest."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.arms import Arm, solve
from kvjax import accounting, registry
from kvjax.accounting import Budget
from kvjax.methods.full import Full
from kvjax.types import Method, PromptShape

FARTHEST = 1.6  # a discrete setting this many times off a ratio does not stand for it


class Planned(NamedTuple):
    """The arms, and what has none."""

    arms: list[Arm]
    absent: list[str]  # sentences


def check(labels: Sequence[str], ratios: Sequence[float]) -> None:
    """Refuse what leaves nothing to compare with the full cache.

    Raises:
        ValueError: for no method or ratio, the full cache among them, or an unknown method.
    """
    if not labels or not ratios:
        raise ValueError(
            f"methods={tuple(labels)} and ratios={tuple(ratios)} must each hold at least one."
        )
    for label in labels:
        if isinstance(registry.make(label), Full):
            raise ValueError(f'methods must not name {label!r}: "full" is always there.')


def at_ratios(
    labels: Sequence[str], ratios: Sequence[float], shape: PromptShape, num_layers: int
) -> Planned:
    """Every method at every ratio; `key` of an arm names the ratio asked for.

    A method with a few settings alone (KIVI's bit widths) takes the one whose bytes come nearest,
    unless it is more than `FARTHEST` times off or stands for another ratio already.

    Args:
        labels: methods, "full" aside.
        ratios: full bfloat16 bytes over stored bytes.
        shape: of one prompt.
        num_layers: layers of the model.

    Raises:
        ValueError: as `check`, or for a ratio that is not positive.
    """
    check(labels, ratios)
    arms, absent = [], []
    for label in labels:
        method = registry.make(label)
        taken = []
        for ratio in ratios:
            budget = Budget(ratio=ratio)
            budget.check()
            if not hasattr(method, "points"):
                arms.append(solve(label, method, budget, shape, num_layers))
                continue
            point, stored = nearest_point(method, ratio, shape, num_layers)
            if abs(math.log(stored / ratio)) > math.log(FARTHEST) or point in taken:
                absent.append(
                    f"{label} has no setting of its own near {ratio:g}x at {shape.num_tokens:,}"
                    f" tokens (nearest: {stored:.1f}x)."
                )
                continue
            taken.append(point)
            arms.append(Arm(label, ratio, point, f"discrete setting, {stored:.1f}x"))
    return Planned(arms, absent)


def nearest_point(
    method: Method, ratio: float, shape: PromptShape, num_layers: int
) -> tuple[Method, float]:
    """The one of a method's discrete settings whose ratio is nearest, and that ratio."""
    stored = {
        point: shape.full_bytes / accounting.layer_bytes(point, shape, num_layers)
        for point in method.points()
    }
    point = min(stored, key=lambda p: abs(math.log(stored[p] / ratio)))
    return point, stored[point]
