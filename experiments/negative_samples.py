"""Which samples does compression lose though the full cache answers them, and on which tasks?

    python -m experiments.negative_samples                              # $KVJAX_DATA's scores
    python -m experiments.negative_samples --scores runs/ruler/<run>    # this project's own rows
    python -m experiments.negative_samples --scores table.csv --full-score 100

Scores are a table (.csv, .csv.gz or .jsonl with method, config, dataset, id, score) or a run's
folder. The negative sets, one JSONL file each under negatives/, are tasks for `--only` of other
experiments; recommendation.json allows or denies each method on each task.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments import negative_report, negative_study
from experiments.negative_input import Table, choose, label, perfect, read
from experiments.record import write_json
from experiments.runner import Run, main
from kvjax.evaluation import negatives
from kvjax.evaluation.negatives import Arm
from kvjax.metrics import mean_interval

MOST_PAIRS = 4  # methods up to which every pair is a set
MOST_NAMED = 3  # methods up to which a set's name lists them


@dataclass(frozen=True)
class Config:
    """Negative samples of a table of scores."""

    scores: tuple[Path, ...] = ()
    """tables or folders of runs; default: longbench_scores in the folder that KVJAX_DATA names"""
    methods: tuple[str, ...] = ()
    """arms, as method or method:config (a run's config is its ratio, as in snapkv:4x); default: the
    study's three where the table has them, else every arm"""
    baseline: str = ""
    """the full cache's arm; default: full, hf, fp16 or no_press, whichever the table has"""
    full_score: Literal[1, 100] | None = None
    """score of a perfect answer; default 1 in tables and 100 in runs"""
    margins: tuple[float, ...] = (1, 2, 4, 8, 10, 16, 24, 32)
    """losses swept, % of the full cache's score"""
    rules: tuple[Literal["mean", "median", "median_zeros"], ...] = ("mean", "median")
    """what makes a sample benign: the baseline reaches this of its dataset; median_zeros counts a
    baseline of 0 where the median is 0, as the study's figure does"""
    margin: float = 10
    """loss of the negative sets that are written and of the recommendation, %"""
    rule: Literal["mean", "median", "median_zeros"] = "mean"
    """rule of the same"""
    rows: Path | None = None
    """JSONL of the samples' prompts (LongBench's schema or context and question): they are added to
    the sets, and samples with the same text are left out"""
    common: bool = False
    """take the samples that all arms have, instead of refusing a table with gaps"""
    max_loss: float = 2.0
    """most points of 100 that a method may lose on a task to be allowed, upper bound"""
    max_failures: float = 10.0
    """most benign samples of a task that may be negative, %, upper bound"""


TINY = Config(scores=(Path("tiny"),), margins=(4, 10), rules=("mean",))


def run(config: Config, run: Run) -> None:
    """Count, write the sets, recommend, report."""
    for margin in (config.margin, *config.margins):
        if not 0 < margin <= 100:
            raise ValueError(f"margin={margin:g} must be above 0 and at most 100, in %.")
    if config.margin not in config.margins or config.rule not in config.rules:
        config = dataclasses.replace(
            config,
            margins=tuple(sorted({*config.margins, config.margin})),
            rules=tuple(dict.fromkeys((*config.rules, config.rule))),
        )
    prompts = negatives.prompt_rows(config.rows) if config.rows else {}
    table, source = read(config)
    baseline, arms = choose(table, config)
    chosen = (baseline, *arms)
    cut = {label(arm, chosen): table[arm] for arm in chosen}
    if config.common:
        shared = set.intersection(*(set(scores) for scores in cut.values()))
        if not shared:
            raise ValueError("the arms share no sample; choose others with --methods.")
        source += f", {len(shared)} of {len(cut[baseline])} samples that all arms have"
        cut = {arm: {s: v for s, v in scores.items() if s in shared} for arm, scores in cut.items()}
    every = next(iter(cut.values()))
    for arm, scores in cut.items():
        gap = [sample for sample in every if sample not in scores]
        if gap:
            raise ValueError(
                f"{arm} has no score of {len(gap)} of {len(every)} samples of the full cache, such"
                f" as {'/'.join(gap[0])}; --common takes the samples that all arms have."
            )
    scale = 100 / perfect(config)
    baseline, arms = label(baseline, chosen), [label(arm, chosen) for arm in arms]
    if prompts and not any(sample in prompts for sample in cut[baseline]):
        raise ValueError(
            f"{config.rows} holds none of the samples: it has {'/'.join(next(iter(prompts)))}, the"
            f" scores have {'/'.join(next(iter(cut[baseline])))}."
        )
    if not any(cut[baseline].values()):
        raise ValueError(f"no sample is benign: every score of {baseline} is 0, some must not be.")
    run.watch(scalars)
    sets = sets_of(arms)
    with run.progress(len(sets) + len(arms) + 1, "sets of methods") as progress:
        for members in sets:
            for row in failures(cut, baseline, members, config, scale):
                add(run, row, ("kind", "methods", "rule", "margin_percent", "task"))
            progress.advance(set_name(members))
        for row in write_sets(run.path, cut, baseline, sets, config, prompts):
            add(run, row, ("kind", "file"))
        for arm in arms:
            for row in verdicts(cut, baseline, arm, config, scale):
                add(run, row, ("kind", "method", "task"))
            progress.advance(f"verdict on {arm}")
        if negative_study.applies(table):
            known = [row for row in run.rows if row["kind"] == "count"]
            for row in negative_study.rows(table) if not known else ():
                run.append(row)
        progress.advance("the study's figures")
    write_json(run.path / "recommendation.json", recommendations(run.rows))
    negative_report.report(config, run, source, list(map(str, chosen)))


def sets_of(arms: Sequence[Arm]) -> list[tuple[Arm, ...]]:
    """Each method alone, pairs where they are few, and all together."""
    sets: list[tuple[Arm, ...]] = [(arm,) for arm in arms]
    if 2 < len(arms) <= MOST_PAIRS:
        sets += itertools.combinations(arms, 2)
    return [*sets, tuple(arms)] if len(arms) > 1 else sets


def failures(
    table: Table, baseline: Arm, members: Sequence[Arm], config: Config, scale: float
) -> list[dict[str, Any]]:
    """Rows of one set of methods: every rule, margin and task."""
    base = table[baseline]
    found = []
    for rule in config.rules:
        good = negatives.benign(base, rule)
        denominators = negatives.by_task(good)
        for margin in config.margins:
            methods = [table[arm] for arm in members]
            lost = negatives.negatives(base, methods, margin / 100, rule)
            for task in ("all", *denominators):
                here = [s for s in lost if task in ("all", negatives.task_of(s[0]))]
                among = len(good) if task == "all" else denominators[task]
                middle, low, high, _ = share(len(here), among)
                scores = {}
                if here and margin == config.margin:
                    scores = {
                        str(arm): scale * negatives.mean_score(s, here) for arm, s in table.items()
                    }
                found.append({
                    "kind": "failures", "methods": set_name(members), "rule": rule,
                    "margin_percent": margin, "task": task, "benign": among,
                    "negatives": len(here), "failure_ratio": middle, "failure_ratio_low": low,
                    "failure_ratio_high": high, "share": len(here) / len(lost) if lost else 0.0,
                    "scores": scores,
                })  # fmt: skip
    return found


def share(part: int, whole: int) -> tuple[float, float, float, int]:
    """A proportion with its Wilson interval."""
    return mean_interval([1.0] * part + [0.0] * (whole - part), "wilson")


def write_sets(
    folder: Path,
    table: Table,
    baseline: Arm,
    sets: Sequence[Sequence[Arm]],
    config: Config,
    prompts: Mapping[negatives.Sample, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Write a file of negative samples for every set that has some; a row each."""
    place = folder / "negatives"
    place.mkdir(exist_ok=True)
    texts = {sample: negatives.prompt_text(row) for sample, row in prompts.items()}
    found = []
    for members in sets:
        methods = [table[arm] for arm in members]
        mined = negatives.mine(table[baseline], methods, config.margin / 100, config.rule, texts)
        name = file_name(members)
        scores = {str(arm): table[arm] for arm in (baseline, *members)}
        if mined.negatives:
            negatives.write_negative_set(place / name, mined.negatives, scores, prompts)
        found.append({
            "kind": "set", "file": f"negatives/{name}" if mined.negatives else f"none for {name}",
            "samples": len(mined.negatives), "positives": len(mined.positives),
            "like_a_positive": len(mined.like_a_positive), "duplicates": len(mined.duplicates),
            "benign": sum(map(len, mined)),
        })  # fmt: skip
    return found


def set_name(members: Sequence[Arm]) -> str:
    """A set of methods in words."""
    few = len(members) <= MOST_NAMED
    return " and ".join(map(str, members)) if few else f"all {len(members)} methods"


def file_name(members: Sequence[Arm]) -> str:
    """The file of a set of methods."""
    if len(members) > MOST_NAMED:
        return f"all_{len(members)}.jsonl"
    names = [re.sub(r"[^\w.-]", "_", str(arm)) for arm in members]
    return "+".join(names) + ".jsonl"


def verdicts(
    table: Table, baseline: Arm, arm: Arm, config: Config, scale: float
) -> list[dict[str, Any]]:
    """Allow or deny one method on each task, and on all."""
    base, method = table[baseline], table[arm]
    good = negatives.benign(base, config.rule)
    lost = set(negatives.negatives(base, [method], config.margin / 100, config.rule))
    found = []
    for task in ("all", *negatives.by_task(base)):
        members = [s for s in base if task in ("all", negatives.task_of(s[0]))]
        among = [s for s in good if task in ("all", negatives.task_of(s[0]))]
        loss = mean_interval([scale * (base[s] - method[s]) for s in members], "t")
        row = {
            "kind": "verdict", "method": str(arm), "task": task, "n": len(members),
            "baseline": scale * negatives.mean_score(base, members),
            "loss": loss.mean, "loss_low": loss.low, "loss_high": loss.high,
            "benign": len(among),
        }  # fmt: skip
        if among:
            ratio = share(sum(s in lost for s in among), len(among))
            row |= dict(zip(("failure_ratio", "failure_ratio_low", "failure_ratio_high"), ratio,
                            strict=False))  # fmt: skip
        found.append(row | judge(row, config.max_loss, config.max_failures / 100))
    return found


def judge(row: Mapping[str, Any], max_loss: float, max_failures: float) -> dict[str, str]:
    """Verdict and reason, from the bounds of loss (points) and failure ratio (a share)."""
    limits = {"loss": max_loss, "failure_ratio": max_failures}
    shown = [f for f, most in limits.items() if (row.get(f"{f}_low") or 0) > most]
    # Without an upper bound (one sample) nothing is ruled out.
    open_ = [
        f for f, most in limits.items() if row.get(f"{f}_high") is None or row[f"{f}_high"] > most
    ]
    words = {"loss": "loss", "failure_ratio": "failures"}
    if not open_:
        return {"verdict": "allow", "because": "both upper bounds hold"}
    if shown:
        return {"verdict": "deny", "because": f"{' and '.join(words[f] for f in shown)} shown"}
    named = " and ".join(words[f] for f in open_)
    return {"verdict": "deny", "because": f"{named} not ruled out"}


def recommendations(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What recommendation.json holds: method, task, verdict and its numbers."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["kind"] == "verdict":
            kept = {k: v for k, v in row.items() if k not in ("kind", "method", "task")}
            found.setdefault(row["method"], {})[row["task"]] = kept
    return found


def add(run: Run, row: dict[str, Any], key: Sequence[str]) -> None:
    """Append a row unless it is there."""
    if run.finished({name: row[name] for name in key}) is None:
        run.append(row)


def scalars(row: dict[str, Any]) -> Any:
    """TensorBoard scalars of a row."""
    if row["kind"] == "failures" and row["task"] == "all":
        name = re.sub(r"\W", "_", row["methods"])
        step = round(row["margin_percent"])
        yield f"negatives/{row['rule']}_count/{name}", row["negatives"], step


if __name__ == "__main__":
    main(Config, run)
