"""The arms of a comparison at equal bytes: each method at each ratio, or the nearest it reaches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax import accounting, registry
from kvjax.types import Method, PromptShape


class Arm(NamedTuple):
    """One method at one setting."""

    label: str  # of the method, as `registry.make` takes it
    target_ratio: float  # asked for: full bfloat16 bytes over stored bytes
    method: Method
    limit: str | None  # why the target was not met, None = it was

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the arm in a row."""
        return {"method": self.label, "target_ratio": round(self.target_ratio, 4)}


def plan(
    labels: Sequence[str], ratios: Sequence[float], matched: Sequence[str], shape: PromptShape
) -> list[Arm]:
    """Solve every method for every ratio.

    Args:
        labels: methods, "full" aside.
        ratios: full bfloat16 bytes over stored bytes, > 1 is smaller.
        matched: labels that are also run at exactly the bytes of every discrete point of a method
            that cannot meet a ratio (KIVI's bit widths).
        shape: of one prompt.

    Returns:
        The arms; a setting that answers several targets stands once, at the nearest of them.

    Raises:
        ValueError: for an unknown label or a ratio that is not positive.
    """
    if any(ratio <= 0 for ratio in ratios):
        raise ValueError(f"ratios={tuple(ratios)} must be positive.")
    made = {label: registry.make(label) for label in labels}
    discrete = {label: m for label, m in made.items() if hasattr(m, "points")}
    extra = []
    arms = []
    for label, method in discrete.items():
        for point in method.points():
            ratio = shape.full_bytes / point.layer_bytes(shape)
            arms.append(Arm(label, ratio, point, "discrete setting"))
            extra.append(ratio)
    for label, method in made.items():
        if label in discrete:
            continue
        for ratio in [*ratios, *(extra if label in matched else [])]:
            arm = solve(label, method, ratio, shape)
            twin = [a for a in arms if a.label == label and a.method == arm.method]
            if not twin:
                arms.append(arm)
    return sorted(arms, key=lambda arm: ([*labels].index(arm.label), arm.target_ratio))


def solve(label: str, method: Method, ratio: float, shape: PromptShape) -> Arm:
    """One method at one ratio, or at the nearest that it reaches."""
    try:
        return Arm(label, ratio, accounting.solve(method, shape.full_bytes / ratio, shape), None)
    except accounting.UnreachableBytes as error:
        reached = shape.full_bytes / error.nearest.layer_bytes(shape)
        return Arm(label, ratio, error.nearest, f"limit {reached:.1f}x")
