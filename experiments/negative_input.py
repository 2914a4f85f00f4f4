"""Scores for negative samples: tables and runs read into one, and the arms chosen from it."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from experiments import negative_study, scored_rows
from kvjax.evaluation import negatives
from kvjax.evaluation.negatives import Arm, Sample
from kvjax.evaluation.rows import read_jsonl

Table = dict[Arm, dict[Sample, float]]

BASELINES = ("full", "hf", "fp16", "no_press")
SHARED = Path("longbench_scores") / "llama3_8b_instruct.csv.gz"


class Settings(Protocol):
    """What of a configuration is read here."""

    scores: tuple[Path, ...]  # tables or folders of runs
    methods: tuple[str, ...]  # arms; none: the study's three, or all
    baseline: str  # the full cache's arm
    full_score: int | None  # of a perfect answer


def read(config: Settings) -> tuple[Table, str]:
    """Read all tables and runs into one, and say in words what they are.

    Raises:
        ValueError: without scores, or when two files disagree on a sample.
    """
    paths = config.scores
    if not paths:
        folder = os.environ.get("KVJAX_DATA")
        if not folder:
            raise ValueError("no scores: name tables or runs with --scores, or set KVJAX_DATA.")
        paths = (Path(folder) / SHARED,)
    table: Table = {}
    for path in paths:
        for arm, scores in read_one(path, perfect(config)).items():
            known = table.setdefault(arm, {})
            clash = [s for s, v in scores.items() if s in known and known[s] != v]
            if clash:
                raise ValueError(f"{path} has another score of {arm} on {'/'.join(clash[0])}.")
            known.update(scores)
    names = [p.parent.name if re.match(r"\d{8}-\d{6}-", p.name) else p.name for p in paths]
    return table, " and ".join(name.split(".")[0] for name in names)


def read_one(path: Path, full_score: float) -> Table:
    """Read a table, a run's folder, or a run's .jsonl file; "tiny" makes a small one up."""
    if path == Path("tiny") and not path.exists():
        return made_up()
    if is_run(path):
        rows, _ = scored_rows.read(path)
        rows = [row for row in rows if row.basis == "measured"]
        lengths = scored_rows.several_lengths(rows)
        fields = [
            {
                "method": row.method,
                "config": "" if row.method in BASELINES else f"{row.target_ratio:g}x",
                "dataset": scored_rows.name(row, lengths),
                "id": row.id,
                "score": row.score,
            }
            for row in rows
        ]
        return negatives.from_rows(fields, 100, str(path))
    return negatives.read_scores(path, full_score)


def made_up() -> Table:
    """A small table from a fixed seed, for tests and a first look."""
    draw = np.random.default_rng(0)
    samples = [(d, str(i)) for d in ("gov_report", "qasper", "lcc") for i in range(30)]
    full = draw.uniform(0.2, 1, len(samples))
    kept = {"evictor": draw.uniform(0.3, 1.05, len(samples)),
            "quantizer": draw.uniform(0.85, 1.05, len(samples))}  # fmt: skip
    table = {Arm("full", ""): full} | {
        Arm(m, "4x"): np.clip(full * k, 0, 1) for m, k in kept.items()
    }
    return {arm: dict(zip(samples, map(float, v), strict=True)) for arm, v in table.items()}


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder or record, not a table.

    LongBench's predictions are a table: they name a config, and their scores are out of 1.
    """
    if path.name == "predictions.jsonl" and path.is_file():
        return "config" not in read_jsonl(path)[0]
    return path.is_dir() or path.name in ("metrics.jsonl", "predictions.jsonl")


def perfect(config: Settings) -> float:
    """The score of a perfect answer.

    Raises:
        ValueError: for runs and tables together, without a word on the tables' scores, or for runs
            said to be out of 1.
    """
    runs = {is_run(path) for path in config.scores}
    if config.full_score is None and len(runs) == 2:
        raise ValueError("runs are out of 100: say with --full-score 100 that the tables are too.")
    if config.full_score == 1 and True in runs:
        raise ValueError("full_score=1 cannot hold: a run's rows are out of 100.")
    return float(config.full_score or (100 if True in runs else 1))


def choose(table: Table, config: Settings) -> tuple[Arm, list[Arm]]:
    """The baseline and the arms that are compared.

    Raises:
        ValueError: for a name that fits none, or several, of the table's arms.
    """
    if config.baseline:
        baseline = find(table, config.baseline)
    else:
        found = [arm for arm in table if arm.method in BASELINES]
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} arms could be the full cache's; name it with --baseline, one of"
                f" {listed(table)}."
            )
        baseline = found[0]
    if config.methods:
        arms = [find(table, name) for name in dict.fromkeys(config.methods)]
    elif negative_study.applies(table):
        arms = list(negative_study.ARMS)
    else:
        arms = [arm for arm in table if arm != baseline]
    arms = [arm for arm in dict.fromkeys(arms) if arm != baseline]
    if not arms:
        raise ValueError(f"there is no arm beside {baseline}: the table has {listed(table)}.")
    return baseline, arms


def find(table: Table, name: str) -> Arm:
    """The arm of a name, method or method:config."""
    exact = [arm for arm in table if str(arm) == name]
    found = exact or [arm for arm in table if arm.method == name]
    if len(found) != 1:
        what = "several arms" if found else "no arm"
        raise ValueError(f"{name!r} names {what}; it must be one of {listed(found or table)}.")
    return found[0]


def label(arm: Arm, chosen: Sequence[Arm]) -> Arm:
    """The arm under its method's name alone where no other arm has that name."""
    alone = sum(other.method == arm.method for other in chosen) == 1
    return Arm(arm.method, "") if alone else arm


def listed(arms: Iterable[Arm]) -> str:
    """Names of arms."""
    return ", ".join(map(str, arms))
