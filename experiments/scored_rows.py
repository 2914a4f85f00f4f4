"""Rows of any experiment that scores answers, read into one form."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax import registry
from kvjax.evaluation.rows import read_jsonl


class Scored(NamedTuple):
    """One answer of one arm."""

    method: str
    target_ratio: float  # full bytes over stored bytes that were asked for
    task: str
    length: int | None  # of the context, tokens
    id: str  # names the prompt within its task and length
    score: float  # 0 to 100
    ratio: float | None  # full bytes over stored bytes, measured
    kv_bytes: int | None
    limit: str | None  # why the target was not met
    aware: bool  # compressed after the question
    basis: str  # bytes that the target counts
    check: float | None  # a likelihood: equal only for the same model and prompt


def scored(row: Mapping[str, Any]) -> Scored | None:
    """Return a row of metrics.jsonl or predictions.jsonl in one form; None where it has no score.

    Args:
        row: with method, target_ratio, task, an id (id, or prompt) and a score: `score` (0 to 100)
            or `token_match` (a share, teacher forced).
    """
    identity = next((row[name] for name in ("id", "prompt") if row.get(name) is not None), None)
    score = row.get("score")
    if score is None and row.get("token_match") is not None:
        score = 100 * row["token_match"]
    if any(v is None for v in (row.get("method"), row.get("task"), identity, score)):
        return None
    if row.get("target_ratio") is None:
        return None
    return Scored(
        one_spelling(str(row["method"])),
        float(row["target_ratio"]),
        str(row["task"]),
        row.get("length"),
        str(identity),
        float(score),
        row.get("ratio"),
        row.get("kv_bytes"),
        row.get("limit"),
        bool(row.get("aware", False)),
        row.get("basis", "measured"),
        row.get("answer_nll", row.get("nll")),
    )


def one_spelling(label: str) -> str:
    """A method's label with its preset first: "kivi:paper" and "paper:kivi" are one method."""
    first, separator, second = label.partition(":")
    return f"{second}:{first}" if separator and first in registry.names() else label


def read(path: str | Path) -> tuple[list[Scored], int]:
    """Read the scored rows of a run's folder or of a .jsonl file.

    Returns:
        The rows, and how many others there were (timings, running text).

    Raises:
        FileNotFoundError: when there is no record.
        ValueError: when no row is scored.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no metrics.jsonl: name a run's folder.")
    every = read_jsonl(file)
    rows = [row for row in map(scored, every) if row is not None]
    if not rows:
        hint = "" if path.is_dir() else " Name a run's folder: its metrics.jsonl may hold them."
        raise ValueError(
            f"{file} has no row with method, target_ratio, task, id (or prompt) and score (or"
            f" token_match); its first row has {', '.join(list(every[0])[:8])}.{hint}"
        )
    return rows, len(every) - len(rows)


def several_lengths(rows: Iterable[Scored]) -> bool:
    """Whether some task is there at more than one context length."""
    seen: dict[str, set[int | None]] = {}
    for row in rows:
        seen.setdefault(row.task, set()).add(row.length)
    return any(len(lengths) > 1 for lengths in seen.values())


def name(row: Scored, with_length: bool) -> str:
    """Name of a row's task, with the length behind it where that tells it from others."""
    return f"{row.task}@{row.length}" if with_length and row.length else row.task
