"""What compression does to answers: lengths, where two answers part, repetition, correctness.

Numbers and token ids only; nothing here runs a model. A length counts the stop token. An answer
that the limit cut off has no length: it is counted as truncated.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

LONGER = 1.5  # an answer at least this many times as long counts as much longer
OUTLIER_PERCENT = 200  # the Rethink artifact drops shifts beyond it


def relative_shift(full: int, compressed: int) -> float:
    """Return D = (L_full - L_compressed) / L_full; positive = the compressed answer is shorter.

    Args:
        full: tokens of the full cache's answer, at least 1.
        compressed: tokens of the other.

    Raises:
        ValueError: for an answer of no tokens under the full cache.
    """
    if full < 1 or compressed < 0:
        raise ValueError(f"lengths {full} and {compressed} must be at least 1 and 0.")
    return (full - compressed) / full


def log_ratio(full: int, compressed: int) -> float:
    """Return ln(L_compressed / L_full): twice as long and half as long are equally far from 0."""
    return math.log(max(compressed, 1) / max(full, 1))


def rethink_percent(full: Sequence[int], compressed: Sequence[int]) -> list[int]:
    """Return the shifts as the Rethink artifact plots them.

    round(100 (L_full - L_compressed) / L_full) in percent, without those where L_full is 0 or whose
    absolute value exceeds 200. Dropping them hides the answers that became three times as long, so
    this stands beside the statistics that keep them.

    Source: LLMkvsys/rethink-kv-compression, benchmark_len/plot_kde_shift_dist.py.
    """
    pairs = [(f, c) for f, c in zip(full, compressed, strict=True) if f > 0]
    shifts = [round(100 * (f - c) / f) for f, c in pairs]
    return [shift for shift in shifts if abs(shift) <= OUTLIER_PERCENT]


class Divergence(NamedTuple):
    """Where two answers to one prompt part.

    Attributes:
        position: index of the first token that differs, None where none does.
        kind: "same": no token differs; "early": both go on, with different tokens; "end": up to
            there they are the same, and one of them stops.
    """

    position: int | None
    kind: Literal["same", "early", "end"]


def divergence(
    full: Sequence[int], compressed: Sequence[int], stop_ids: Sequence[int] | frozenset[int]
) -> Divergence:
    """Compare two answers token by token.

    Args:
        full: token ids, the stop token included where there is one.
        compressed: the other's.
        stop_ids: tokens that end an answer.

    Returns:
        Where they part; answers that reach the same limit without parting are the same.
    """
    for i, (a, b) in enumerate(zip(full, compressed, strict=False)):
        if a != b:
            return Divergence(i, "end" if a in stop_ids or b in stop_ids else "early")
    if len(full) == len(compressed):
        return Divergence(None, "same")
    return Divergence(min(len(full), len(compressed)), "end")


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of an answer's n-grams that occurred in it before; 0 for shorter answers."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number of a text, None where there is none; "1,200.50" is one."""
    found = [m.replace(",", "").replace("$", "") for m in _NUMBER.findall(text)]
    return float(found[-1]) if found else None


def correct(text: str, references: Sequence[str]) -> float:
    """Return 1 if an answer gives one of the references, else 0.

    A reference that ends in "#### number" or is a number itself is compared with the answer's last
    number; any other must occur in the answer, whatever the case and spacing.
    """
    return float(any(_matches(text, reference) for reference in references))


def _matches(text: str, reference: str) -> bool:
    tail = reference.rsplit("####", 1)[-1].strip()
    if "####" in reference or re.fullmatch(r"-?\$?[\d,]*\.?\d+", tail):
        wanted, given = last_number(tail), last_number(text)
        return wanted is not None and given is not None and math.isclose(wanted, given)
    plain = " ".join(reference.lower().split())
    return bool(plain) and plain in " ".join(text.lower().split())


def similarity(vectors: np.ndarray, others: np.ndarray, center: np.ndarray) -> np.ndarray:
    """Return the cosine between the embeddings of two answers, each less a common center.

    The embeddings of a decoder all point in nearly one direction; without the center unrelated
    answers score 0.9 as well.

    Args:
        vectors: f32[n, D].
        others: f32[n, D], or [m, D] against one vector.
        center: f32[D], such as the mean over all answers under the full cache.

    Returns:
        f64[n], in [-1, 1]; 0 where a vector equals the center.
    """
    a, b = (np.asarray(x, np.float64) - center for x in (vectors, others))
    norm = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return np.where(norm > 0, (a * b).sum(-1) / np.where(norm > 0, norm, 1), 0.0)


def shift_of_pair(full: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the lengths of two answers to one prompt say about each other.

    Args:
        full: row with `generated_tokens` and `truncated`, under the full cache.
        other: the same prompt's row under another.

    Returns:
        `shift` (D) and `length_ratio` where both ended, `log_ratio` over all with the limit as the
        length of a truncated answer (censored), and `much_longer`, which a truncated compressed
        answer decides only where it is long enough already: else None.
    """
    a, b = full["generated_tokens"], other["generated_tokens"]
    ended = not full["truncated"] and not other["truncated"]
    longer = None
    if not full["truncated"] and (not other["truncated"] or b >= LONGER * a):
        longer = float(b >= LONGER * a)
    return {
        "shift": relative_shift(a, b) if ended else None,
        "length_ratio": b / a if ended else None,
        "log_ratio": log_ratio(a, b) if ended else None,
        "log_ratio_censored": log_ratio(a, b),
        "much_longer": longer,
    }
