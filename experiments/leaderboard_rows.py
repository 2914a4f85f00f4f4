"""From the rows of runs to the cells of a leaderboard: what may stand in one board, and means."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import scored_rows
from experiments.scored_rows import Scored
from kvjax.metrics import mean_interval
from models import hub

MEAN = "mean of tasks"
_NO_OP = 1.02  # a method that stores more than 1/1.02 of the full bytes compresses nothing
_CLOSE = 2e-3  # relative; records that are kept are rounded
_WORST = 1e-3  # points of 100


class Source(NamedTuple):
    """One run."""

    name: str  # experiment and folder
    model: str | None
    seed: int | None
    rows: tuple[Scored, ...]
    unscored: int  # rows without a score, such as timings, and those at idealised bytes


class Board(NamedTuple):
    """Rows that may be compared: one model, the same prompts, one way to compress."""

    title: str
    model: str | None
    aware: bool
    length: int | None
    sources: tuple[Source, ...]
    apart: str | None  # why it is not one with an earlier board


def read(path: Path) -> Source:
    """Read a run's folder, a folder of results, or a .jsonl file."""
    path = Path(path)
    rows, unscored = scored_rows.read(path)
    measured = [row for row in rows if row.basis == "measured"]
    folder = path if path.is_dir() else path.parent
    model, seed = described(folder)
    name = path.name if path.is_dir() else f"{folder.name}/{path.name}"
    if re.match(r"\d{8}-\d{6}-", name):
        name = f"{path.parent.name}/{name}"
    return Source(name, model, seed, tuple(measured), unscored + len(rows) - len(measured))


def described(folder: Path) -> tuple[str | None, int | None]:
    """Model and seed of a run, from its summary's title or its config.json; None if unknown."""
    model = seed = None
    summary = folder / "summary.md"
    if summary.is_file():
        text = summary.read_text(encoding="utf-8")
        found = re.search(r"^## (?:[^:\n]*: )?([\w./-]+), [\d,]+ tokens", text, re.M)
        model = found[1] if found else None
        found = re.search(r"\b[Ss]eed (\d+)", text)
        seed = int(found[1]) if found else None
    record = folder / "config.json"
    if record.is_file():
        config = json.loads(record.read_text(encoding="utf-8")).get("config", {})
        seed = config.get("seed", seed)
        if model is None and "model" in config:
            model = config["model"] or hub.DEFAULT_NAME
    return model, seed


def boards(sources: Sequence[Source], refuse: bool = False) -> list[Board]:
    """Group rows by model, compression before or after the question, and length; join what agrees.

    Two sources stand in one board when their models are the same (or one is unknown and they share
    prompts) and every row that both have is equal: the same arm on the same prompt has the same
    score and, where it is recorded, the same likelihood. Runs that share no prompt need the
    same model, and the same seed where both say one.

    Args:
        sources: runs.
        refuse: raise instead of making a board of its own.

    Raises:
        ValueError: when `refuse` and two sources differ, saying how.
    """
    made: list[Board] = []
    for source in sources:
        groups: dict[tuple[bool, int | None], list[Scored]] = {}
        for row in source.rows:
            groups.setdefault((row.aware, row.length), []).append(row)
        for (aware, length), rows in groups.items():
            part = source._replace(rows=tuple(rows))
            reasons = []
            for i, board in enumerate(made):
                if (board.aware, board.length) != (aware, length):
                    continue
                found = [difference(part, other) for other in board.sources]
                reason = next((r for r in found if r), None)
                if reason is None:
                    made[i] = board._replace(
                        sources=(*board.sources, part), model=board.model or part.model
                    )
                    break
                reasons.append(reason)
            else:
                if reasons and refuse:
                    raise ValueError(reasons[0] + ". Use --mismatch separate for boards apart.")
                reason = reasons[0] if reasons else None
                made.append(Board("", part.model, aware, length, (part,), reason))
    return [board._replace(title=title(board)) for board in made]


def title(board: Board) -> str:
    """Model, length and whether the cache had seen the question."""
    length = f"{board.length:,} tokens" if board.length else "lengths as they are"
    how = "question-aware" if board.aware else "question-agnostic"
    names = "" if board.apart is None else f" ({', '.join(s.name for s in board.sources)} alone)"
    return f"{board.model or 'unknown model'}, {length}, {how}{names}"


def difference(one: Source, other: Source) -> str | None:
    """Say why two sources may not stand in one board; None when they may."""
    who = f"{one.name} and {other.name}"
    if one.model and other.model and one.model != other.model:
        return f"{who} are of {one.model} and {other.model}"
    theirs = {identity(row): row for row in other.rows}
    shared = [(row, theirs[identity(row)]) for row in one.rows if identity(row) in theirs]
    for a, b in shared:
        if a.check is not None and b.check is not None:
            if not math.isclose(a.check, b.check, rel_tol=_CLOSE, abs_tol=_CLOSE):
                return (
                    f"{who} differ on prompt {a.id} of {a.task} under {a.method}: a likelihood of"
                    f" {a.check:.4g} and {b.check:.4g}; model, prompts or seed are not the same"
                )
        if abs(a.score - b.score) > _WORST * 100:
            return (
                f"{who} differ on prompt {a.id} of {a.task} under {a.method}: {a.score:.4g} and"
                f" {b.score:.4g} points; model, prompts or seed are not the same"
            )
    if any(a.method == "full" for a, _ in shared):
        return None
    if {row.task for row in one.rows} & {row.task for row in other.rows}:
        return f"{who} have tasks of one name and no full-cache row on a prompt in common"
    if one.model is None or other.model is None:
        return f"{who} share no prompt, and one does not say its model"
    if one.seed != other.seed and None not in (one.seed, other.seed):
        return f"{who} have seeds {one.seed} and {other.seed}"
    return None


def arm_of(row: Scored) -> tuple[str, float]:
    """Method and target, to the two decimals that a board shows.

    The target of a discrete setting is what it stores, which moves a little with the shape it was
    planned for: 4.196 in one run and 4.197 in another are one arm.
    """
    return row.method, round(row.target_ratio, 2)


def identity(row: Scored) -> tuple:
    """What two runs must agree on: an arm on a prompt."""
    return row.task, row.id, *arm_of(row)


def cells(board: Board, number: int, tolerance: float) -> list[dict[str, Any]]:
    """Rows of the record: every arm of a board on every task, and on the mean of the tasks.

    Args:
        board: rows that may be compared.
        number: names the board in the record.
        tolerance: share by which an arm may exceed a target's bytes and still count for it.
    """
    rows = list({identity(row): row for source in board.sources for row in source.rows}.values())
    tasks = list(dict.fromkeys(row.task for row in rows))
    arms: dict[tuple[str, float], list[Scored]] = {}
    for row in rows:
        arms.setdefault(arm_of(row), []).append(row)
    measured = {arm: ratio(found) for arm, found in arms.items()}
    targets = nominal(measured, {arm: found[0].limit for arm, found in arms.items()}, tolerance)
    made = []
    for arm, found in arms.items():
        group = None if arm[0] == "full" else group_of(measured[arm], targets, tolerance)
        kept = {
            "board": number, "title": board.title, "group": group, "method": arm[0],
            "target_ratio": arm[1], "ratio": measured[arm],
            "kv_bytes": round(float(np.mean([r.kv_bytes for r in found])))
            if all(r.kv_bytes is not None for r in found) else None,
            "limit": found[0].limit,
            "no_op": arm[0] != "full" and measured[arm] is not None and measured[arm] < _NO_OP,
        }  # fmt: skip
        parts = []
        for task in tasks:
            scores = [row.score / 100 for row in found if row.task == task]
            if not scores:
                continue
            middle, low, high, n = mean_interval(scores)
            bounds = {"low": _points(low), "high": _points(high)}
            parts.append({"task": task, "score": 100 * middle, **bounds, "n": n})
        made += [kept | part for part in parts]
        if len(parts) == len(tasks) > 1:
            made.append(kept | mean_of(parts))
    return made


def _points(share: float | None) -> float | None:
    return None if share is None else float(np.clip(100 * share, 0, 100))


def mean_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Unweighted mean of the tasks, its interval from theirs.

    The distance of each bound is the root of the tasks' squared distances over their number (the
    method of variance estimates recovery, Zou and Donner 2008).
    """
    count = len(parts)
    middle = sum(part["score"] for part in parts) / count
    row = {"task": MEAN, "score": middle, "n": sum(part["n"] for part in parts)}
    if any(part["low"] is None for part in parts):
        return row | {"low": None, "high": None}
    below = math.sqrt(sum((p["score"] - p["low"]) ** 2 for p in parts)) / count
    above = math.sqrt(sum((p["high"] - p["score"]) ** 2 for p in parts)) / count
    return row | {"low": max(0.0, middle - below), "high": min(100.0, middle + above)}


def ratio(rows: Iterable[Scored]) -> float | None:
    """Full bytes over stored bytes of an arm: the mean bytes of its prompts count."""
    ratios = [row.ratio for row in rows]
    if any(r is None for r in ratios):
        return None
    return float(1 / np.mean([1 / r for r in ratios]))


def nominal(
    measured: dict[tuple[str, float], float | None],
    limits: dict[tuple[str, float], str | None],
    tolerance: float,
) -> list[float]:
    """Targets at which arms are compared: those that a method meets by choice of its budget.

    A discrete setting is a target only where nothing else is.
    """
    met = [
        (target, "discrete" in (limits[method, target] or ""))
        for (method, target), found in measured.items()
        if method != "full"
        and (limits[method, target] is None or "discrete" in limits[method, target])
        and (found is None or found >= target / (1 + tolerance))
    ]
    chosen = {target for target, discrete in met if not discrete}
    return sorted(chosen or {target for target, _ in met})


def group_of(measured: float | None, targets: Sequence[float], tolerance: float) -> float | None:
    """The largest target whose bytes an arm does not exceed; None where it exceeds all."""
    if measured is None:
        return None
    under = [target for target in targets if measured * (1 + tolerance) >= target]
    return max(under, default=None)


def note(board: Board) -> str:
    """Where a board's rows come from."""
    parts = []
    for source in board.sources:
        seed = "" if source.seed is None else f", seed {source.seed}"
        parts.append(f"{source.name} ({len(source.rows):,} rows{seed})")
    apart = f" A board of its own: {board.apart}." if board.apart else ""
    return "From " + ", ".join(parts) + "." + apart
