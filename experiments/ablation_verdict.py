"""What a measured interval says about an expectation: confirmed, refuted or undecided, by rule.

An expectation is a bound on a number. It is confirmed when the whole 95 % interval keeps to the
bound, refuted when none of the interval does, else undecided; one value alone decides nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.report import Column, markdown, table
from kvjax.metrics import Interval, mean_interval

Row = Mapping[str, Any]


class Verdict(NamedTuple):
    """One expectation and what the run says about it."""

    study: str
    expected: str  # in words; who expects it
    measured: str  # the number with its interval and n
    word: str  # "confirmed", "refuted" or "undecided"


def below(interval: Interval, bound: float) -> str:
    """The word for "the number is below `bound`"."""
    if interval.low is None or interval.high is None:
        return "undecided"
    if interval.high < bound:
        return "confirmed"
    return "refuted" if interval.low >= bound else "undecided"


def above(interval: Interval, bound: float) -> str:
    """The word for "the number is above `bound`"."""
    if interval.low is None or interval.high is None:
        return "undecided"
    if interval.low > bound:
        return "confirmed"
    return "refuted" if interval.high <= bound else "undecided"


def within(interval: Interval, low: float, high: float) -> str:
    """The word for "the number is between `low` and `high`"."""
    if interval.low is None or interval.high is None:
        return "undecided"
    if low <= interval.low and interval.high <= high:
        return "confirmed"
    return "refuted" if interval.high < low or interval.low > high else "undecided"


def together(words: Iterable[str]) -> str:
    """The word for an expectation of several parts: all must hold."""
    words = list(words)
    if "refuted" in words:
        return "refuted"
    return "confirmed" if words and set(words) == {"confirmed"} else "undecided"


def shown(interval: Interval, form: str = "+.2f", unit: str = "") -> str:
    """An interval in words: mean, bounds, n."""
    if interval.low is None or interval.high is None:
        return f"{format(interval.mean, form)}{unit} (n = {interval.n})"
    low, high = format(interval.low, form), format(interval.high, form)
    return f"{format(interval.mean, form)}{unit} [{low}, {high}], n = {interval.n}"


def paired(
    rows: Sequence[Row],
    field: str,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    by: Sequence[str] = ("task", "prompt"),
    combine: Callable[[float, float], float] = lambda a, b: a - b,
) -> Interval | None:
    """One group minus another, prompt by prompt.

    Args:
        rows: of both groups.
        field: number to compare.
        one: fields that pick the first group.
        other: fields that pick the second.
        by: fields that name a prompt.
        combine: of a pair, their difference by default.

    Returns:
        The mean of the pairs with its interval, None where there are no pairs.
    """
    first, second = (
        {
            tuple(row[name] for name in by): row[field]
            for row in rows
            if row.get(field) is not None and all(row.get(k) == v for k, v in group.items())
        }
        for group in (one, other)
    )
    pairs = [combine(first[key], second[key]) for key in first if key in second]
    return mean_interval(pairs, "t") if pairs else None


def mean_of(rows: Iterable[Row], field: str, **group: Any) -> Interval | None:
    """Mean of `field` over the rows of a group with its interval, None for no rows."""
    values = [
        row[field]
        for row in rows
        if row.get(field) is not None and all(row.get(k) == v for k, v in group.items())
    ]
    return mean_interval(values, "t") if values else None


def by_text(rows: Iterable[Row], by: Sequence[str], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Means over layers: one row a text and group, since layers of one text are not independent."""
    made: dict[tuple, list[Row]] = {}
    for row in rows:
        made.setdefault(tuple(row[name] for name in ("prompt", *by)), []).append(row)
    return [
        dict(zip(("prompt", *by), key, strict=True))
        | {field: float(np.mean([r[field] for r in own])) for field in fields}
        for key, own in made.items()
    ]


def verdict_table(verdicts: Sequence[Verdict], title: str) -> str:
    """All verdicts: printed under a title, and as markdown."""
    rows = [v._asdict() for v in verdicts]
    columns = [Column("study", "study"), Column("expected", "expected"),
               Column("measured", "measured"), Column("verdict", "word")]  # fmt: skip
    table(rows, columns, title)
    return markdown(rows, columns, "Expected and measured")
