"""The arms of a comparison at equal bytes: each method at each budget, or the nearest to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvjax import accounting, registry
from kvjax.accounting import Budget
from kvjax.types import Method, PromptShape


class Arm(NamedTuple):
    """One method at one setting."""

    label: str  # of the method, as `registry.make` takes it
    target_ratio: float  # asked for: full bfloat16 bytes over stored bytes
    method: Method
    limit: str | None  # why the target was not met, None = it was
    basis: str = "measured"  # bytes that the target counts; "idealised": 4 H a kept token and head

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the arm in a row."""
        ratio = round(self.target_ratio, 4)
        return {"method": self.label, "target_ratio": ratio, "basis": self.basis}


def plan(
    labels: Sequence[str],
    budgets: Sequence[float | Budget],
    matched: Sequence[str],
    shape: PromptShape,
    num_layers: int = 1,
) -> list[Arm]:
    """Solve every method for every budget.

    Args:
        labels: methods, "full" aside.
        budgets: `Budget`s, or ratios of full bfloat16 bytes over stored bytes (> 1 is smaller).
        matched: labels that are also run at exactly the bytes of every discrete point of a method
            that cannot meet a ratio (KIVI's bit widths).
        shape: of one prompt.
        num_layers: layers of the model.

    Returns:
        The arms; a setting that answers several targets stands once, at the nearest of them.

    Raises:
        ValueError: for an unknown label or a budget that is not positive.
    """
    budgets = [b if isinstance(b, Budget) else Budget(ratio=float(b)) for b in budgets]
    for budget in budgets:
        if budget.tokens is None:
            budget.target_bytes(shape)  # refuses what makes no sense before anything is solved
    made = {label: registry.make(label) for label in labels}
    discrete = {label: m for label, m in made.items() if hasattr(m, "points")}
    extra = []
    arms = []
    for label, method in discrete.items():
        for point in method.points():
            stored = accounting.layer_bytes(point, shape, num_layers)
            ratio = shape.full_bytes / stored
            arms.append(Arm(label, ratio, point, "discrete setting"))
            extra.append(Budget(ratio=ratio))
    for label, method in made.items():
        if label in discrete:
            continue
        for budget in [*budgets, *(extra if label in matched else [])]:
            arm = solve(label, method, budget, shape, num_layers)
            twin = [a for a in arms if a.label == label and a.method == arm.method]
            if not twin:
                arms.append(arm)
    return sorted(arms, key=lambda arm: ([*labels].index(arm.label), arm.target_ratio))


def solve(
    label: str, method: Method, budget: Budget, shape: PromptShape, num_layers: int = 1
) -> Arm:
    """One method at one budget, or at the nearest that it reaches.

    A budget in tokens is the bytes of so many exact tokens for a method that keeps them all.
    """
    if budget.tokens is not None:
        ratio = shape.num_tokens / budget.tokens
        if hasattr(method, "budget"):
            tokens = dataclasses.replace(method, budget=budget.tokens)
            return Arm(label, ratio, tokens, None, "idealised")
        budget = Budget(ratio=ratio)
    ratio = shape.full_bytes / budget.target_bytes(shape)
    try:
        return Arm(label, ratio, accounting.within(method, budget, shape, num_layers), None)
    except accounting.UnreachableBytes as error:
        reached = accounting.layer_bytes(error.nearest, shape, num_layers)
        return Arm(label, ratio, error.nearest, f"limit {shape.full_bytes / reached:.1f}x")


def idealised(labels: Sequence[str], ratio: float, shape: PromptShape) -> list[Arm]:
    """Evictors at the same number of tokens, as papers count bytes: 4 H a kept token and KV head.

    Args:
        labels: methods; those that keep no budget of tokens are left out.
        ratio: tokens of the prompt over kept tokens.
        shape: of one prompt.
    """
    made = {label: registry.make(label) for label in labels}
    tokens = Budget(tokens=max(int(shape.num_tokens / ratio), 1))
    evictors = {label: m for label, m in made.items() if hasattr(m, "budget") and "+" not in label}
    return [solve(label, method, tokens, shape) for label, method in evictors.items()]
