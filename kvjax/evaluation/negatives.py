"""Negative samples: what the full cache answers well and a compressed cache loses.

A sample is *benign* where the full cache scores at least its dataset's mean (or median). It is
*negative* for a set of methods where every one of them loses at least a margin of that score. A
table of scores holds method, config, dataset, id and score, one row a sample and arm. Numpy only.

Source: "Rethinking Key-Value Cache Compression Techniques for Large Language Model Serving", its
repository LLMkvsys/rethink-kv-compression, 3_neg_samples/0_neg_extractor.py (mean),
0_neg_extract_score_task.py (failure ratio), benchmark_neg/0_ratio_vs_no_negative.py (median).
"""

import csv
import gzip
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvjax.evaluation.rows import read_jsonl

Sample = tuple[str, str]  # dataset and id
Scored = Mapping[Sample, float]
Rule = Literal["mean", "median", "median_zeros"]

COLUMNS = ("method", "config", "dataset", "id", "score")
TASKS = {
    "QA": ("hotpotqa", "2wikimqa", "multifieldqa_en", "qasper", "qa_1", "qa_2",
           "narrativeqa", "musique"),
    "Summarisation": ("gov_report", "qmsum", "multi_news"),
    "Code": ("lcc", "repobench-p"),
    "Few-shot": ("trec", "triviaqa", "samsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en"),
    "Retrieval": ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1",
                  "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery"),
    "Tracing": ("vt",),
    "Aggregation": ("cwe", "fwe"),
}  # fmt: skip
_TASK_OF = {dataset: task for task, datasets in TASKS.items() for dataset in datasets}


class Arm(NamedTuple):
    """A method at one setting, as a table of scores names it."""

    method: str
    config: str

    def __str__(self) -> str:
        return f"{self.method}:{self.config}" if self.config else self.method


class Mined(NamedTuple):
    """A negative set and what was left out of it; the counts add up to the benign samples."""

    negatives: tuple[Sample, ...]  # kept, in the table's order
    positives: tuple[Sample, ...]  # benign, and not negative
    like_a_positive: tuple[Sample, ...]  # negatives with the text of a positive sample
    duplicates: tuple[Sample, ...]  # negatives with the text of an earlier negative


def task_of(dataset: str) -> str:
    """Return the task that a dataset belongs to; a dataset that no task lists is its own.

    A length behind the name, as in "vt@4096", makes no difference.
    """
    return _TASK_OF.get(dataset.split("@")[0].removesuffix("_e"), dataset.split("@")[0])


def read_scores(path: str | Path, full_score: float = 1.0) -> dict[Arm, dict[Sample, float]]:
    """Read a table of scores: .csv, .csv.gz or .jsonl with the fields of `COLUMNS`.

    Args:
        path: the table; `config` may be absent or empty.
        full_score: the score of a perfect answer: 1 or 100. Scores stay as they are: rescaling
            would move those that lie exactly on a margin.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a column that is missing, a value that is no number or beyond
            `full_score`, or a sample that an arm has twice with different scores.
    """
    path = Path(path)
    return from_rows(_table_rows(path), full_score, str(path))


def from_rows(
    rows: Iterable[Mapping[str, Any]], full_score: float, source: str
) -> dict[Arm, dict[Sample, float]]:
    """Return what `read_scores` returns, of rows that are there already.

    Args:
        rows: mappings with the fields of `COLUMNS`.
        full_score: the score of a perfect answer.
        source: named in errors.
    """
    table: dict[Arm, dict[Sample, float]] = {}
    for number, row in enumerate(rows, 1):
        missing = [c for c in COLUMNS if c != "config" and row.get(c) in (None, "")]
        if missing:
            raise ValueError(
                f"{source}, row {number} has no {', '.join(missing)}: a table of scores has the"
                f" columns {', '.join(COLUMNS)}."
            )
        try:
            score = float(row["score"])
        except (TypeError, ValueError):
            raise ValueError(
                f"{source}, row {number}: score={row['score']!r} is no number."
            ) from None
        if not math.isfinite(score) or abs(score) > full_score * (1 + 1e-9):
            raise ValueError(
                f"{source}, row {number}: score={score:g} must be at most {full_score:g}; say what"
                " a perfect answer scores with full_score (1 or 100)."
            )
        arm = Arm(str(row["method"]), str(row.get("config") or ""))
        sample = str(row["dataset"]), str(row["id"])
        known = table.setdefault(arm, {}).setdefault(sample, score)
        if not math.isclose(known, score, abs_tol=1e-9):
            raise ValueError(
                f"{source}, row {number}: {arm} has {'/'.join(sample)} twice, with {known:g} and"
                f" {score:g}; one sample has one score."
            )
    if not table:
        raise ValueError(f"{source} holds no scores.")
    return table


def cut(score: float | np.ndarray, margin: float) -> float | np.ndarray:
    """Return the score that counts as lost: score − |score| · margin, at or below `score`.

    The absolute value keeps the margin a loss for scores below 0 (log-likelihoods).
    """
    return score - np.abs(score) * margin


def benign(baseline: Scored, rule: Rule = "mean") -> list[Sample]:
    """Return the samples that the full cache answers at least as well as its dataset's rule asks.

    Args:
        baseline: the full cache's scores.
        rule: "mean" or "median" of the dataset. A baseline of exactly 0 is not benign, though it
            may reach a median of 0, except under "median_zeros", the study's figure, where it is.

    Raises:
        ValueError: for an unknown rule.
    """
    if rule not in ("mean", "median", "median_zeros"):
        raise ValueError(f"rule={rule!r} must be mean, median or median_zeros.")
    average = np.mean if rule == "mean" else np.median
    groups: dict[str, list[float]] = {}
    for (dataset, _), score in baseline.items():
        groups.setdefault(dataset, []).append(score)
    least = {dataset: average(scores) for dataset, scores in groups.items()}
    return [
        sample
        for sample, score in baseline.items()
        if score >= least[sample[0]] and (score != 0 or rule == "median_zeros")
    ]


def negatives(
    baseline: Scored, methods: Sequence[Scored], margin: float, rule: Rule = "mean"
) -> list[Sample]:
    """Return the benign samples on which *every* method scores at most `cut(baseline, margin)`.

    Args:
        baseline: the full cache's scores.
        methods: scores of one or several methods, each of every sample of the baseline.
        margin: share of the baseline's score that is lost at least, in (0, 1].
        rule: see `benign`.

    Raises:
        ValueError: for no method, a margin outside (0, 1], or a sample that a method lacks.
    """
    if not methods:
        raise ValueError("methods is empty; a negative sample is negative for at least one.")
    if not 0 < margin <= 1:
        raise ValueError(f"margin={margin} must be in (0, 1]: 0.1 is a tenth of the score.")
    require_samples(baseline, methods)
    return [
        sample
        for sample in benign(baseline, rule)
        if all(method[sample] <= cut(baseline[sample], margin) for method in methods)
    ]


def require_samples(baseline: Scored, methods: Sequence[Scored]) -> None:
    """Fail unless every method has a score of every sample of the baseline."""
    for number, method in enumerate(methods, 1):
        lacking = [sample for sample in baseline if sample not in method]
        if lacking:
            raise ValueError(
                f"method {number} of {len(methods)} has no score of {len(lacking)} of"
                f" {len(baseline)} samples of the baseline, such as {'/'.join(lacking[0])}."
            )


def mine(
    baseline: Scored,
    methods: Sequence[Scored],
    margin: float,
    rule: Rule = "mean",
    texts: Mapping[Sample, str] | None = None,
) -> Mined:
    """Return the negative set, without samples that share an id or a text with others.

    Args:
        baseline: the full cache's scores.
        methods: see `negatives`.
        margin: see `negatives`.
        rule: see `benign`.
        texts: prompt of each sample; those without one count as unlike every other.

    Raises:
        ValueError: as `negatives`.
    """
    good = benign(baseline, rule)
    found = set(negatives(baseline, methods, margin, rule))
    positives = tuple(sample for sample in good if sample not in found)
    prints = {sample: _print(text) for sample, text in (texts or {}).items()}
    taken = {prints[sample] for sample in positives if sample in prints}
    kept, like, twice = [], [], []
    seen: set[str] = set()
    for sample in good:
        if sample not in found:
            continue
        mark = prints.get(sample)
        if mark is not None and mark in taken:
            like.append(sample)
        elif mark is not None and mark in seen:
            twice.append(sample)
        else:
            kept.append(sample)
            seen |= {mark} - {None}
    return Mined(tuple(kept), positives, tuple(like), tuple(twice))


def by_task(samples: Iterable[Sample]) -> dict[str, int]:
    """Return the number of samples of each task, in the order of `TASKS`, then of appearance."""
    counts: dict[str, int] = {}
    for dataset, _ in samples:
        task = task_of(dataset)
        counts[task] = counts.get(task, 0) + 1
    order = [task for task in TASKS if task in counts]
    return {task: counts[task] for task in [*order, *(t for t in counts if t not in TASKS)]}


def mean_score(scores: Scored, samples: Collection[Sample]) -> float | None:
    """Return the mean score of some samples, None of none."""
    return float(np.mean([scores[sample] for sample in samples])) if samples else None


def write_negative_set(
    path: str | Path,
    samples: Iterable[Sample],
    methods: Mapping[str, Scored],
    rows: Mapping[Sample, Mapping[str, Any]] | None = None,
) -> int:
    """Write one JSON line a sample: dataset, id, task, methods, scores, and its row if given.

    Args:
        path: of the .jsonl file.
        samples: the negative set.
        methods: scores by name, the baseline's among them.
        rows: prompts by sample: fields of the task's own rows.

    Returns:
        The number of samples written.
    """
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for sample in samples:
            dataset, identity = sample
            line = {
                "dataset": dataset, "id": identity, "task": dataset.split("@")[0],
                "methods": list(methods), "scores": {m: s[sample] for m, s in methods.items()},
            }  # fmt: skip
            if rows and sample in rows:
                line["row"] = dict(rows[sample])
            file.write(json.dumps(line) + "\n")
            count += 1
    return count


def read_negative_set(path: str | Path) -> set[Sample]:
    """Return the (task, id) pairs of a negative set; the task is the dataset's name.

    Experiments that take `--only` run these samples alone. A length behind the dataset's name is
    left out: the sample is run at the lengths that the experiment asks for.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a line without dataset and id, or a file without lines.
    """
    path = Path(path)
    found = set()
    for number, row in enumerate(_table_rows(path), 1):
        dataset = row.get("dataset") or row.get("task")
        if not dataset or row.get("id") in (None, ""):
            raise ValueError(f"{path}, row {number} needs dataset and id: {str(row)[:60]!r}.")
        found.add((str(dataset).split("@")[0], str(row["id"])))
    if not found:
        raise ValueError(f"{path} holds no samples.")
    return found


def prompt_rows(path: str | Path) -> dict[Sample, dict[str, Any]]:
    """Read the prompts of samples: JSON lines of LongBench's schema or of the field's.

    A row's dataset is its field `dataset` or `task`. Its id is `id`; where rows have none, the
    number of the row within its dataset, as tables of LongBench scores count.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a row without dataset or text, or a sample that is there twice.
    """
    path = Path(path)
    found: dict[Sample, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    for number, row in enumerate(_table_rows(path), 1):
        dataset = row.get("dataset") or row.get("task")
        if not dataset or not isinstance(row.get("context"), str):
            raise ValueError(f"{path}, row {number} needs dataset (or task) and context.")
        place = counts.get(dataset, 0)
        counts[dataset] = place + 1
        sample = str(dataset), str(row["id"] if row.get("id") not in (None, "") else place)
        if sample in found:
            raise ValueError(f"{path}, row {number}: {'/'.join(sample)} is there twice.")
        found[sample] = dict(row)
    return found


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the text that identifies a prompt: context and question."""
    return f"{row['context']}\n{row.get('question') or row.get('input') or ''}"


def _print(text: str) -> str:
    """Return a fingerprint of a text without regard to case and white space."""
    return hashlib.sha256(re.sub(r"\s+", " ", text).strip().lower().encode()).hexdigest()


def _table_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give a .csv, .csv.gz or .jsonl file.")
    name = path.name.removesuffix(".gz")
    if not name.endswith((".csv", ".jsonl")):
        raise ValueError(f"{path} must be a .csv or .jsonl file, perhaps with .gz behind it.")
    if name.endswith(".jsonl"):
        yield from read_jsonl(path)
        return
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
