"""How right a prediction is, 0 to 1, by the rules of the benchmarks."""

from collections.abc import Callable

from kvjax.evaluation.rows import Row

Metric = Callable[[str, Row], float]


def string_match_all(prediction: str, row: Row) -> float:
    """Share of the references that stand in the prediction, whatever their case.

    Source: RULER's rule for all tasks but question answering (NVIDIA/RULER,
    scripts/eval/synthetic/constants.py, string_match_all).
    """
    found = [text.lower() in prediction.lower() for text in row.answer if text.strip()]
    return sum(found) / len(found)


def string_match_part(prediction: str, row: Row) -> float:
    """1 if any reference stands in the prediction, whatever its case.

    Source: RULER's rule for question answering (the same file, string_match_part).
    """
    return float(any(t.lower() in prediction.lower() for t in row.answer if t.strip()))


METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
}
