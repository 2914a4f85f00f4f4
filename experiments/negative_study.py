"""The study's figures on negative samples, and the definition that comes closest to them.

Source: "Rethinking Key-Value Cache Compression Techniques for Large Language Model Serving" and
its released scores of Llama-3-8B-Instruct on LongBench. The scores of GEAR are not among those
that we have, so its figures, and every set that it took part in, cannot be computed again.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.report import Column, markdown
from kvjax.evaluation import negatives
from kvjax.evaluation.negatives import Arm, Sample

BASELINE = Arm("hf", "")
KIVI = Arm("kivi", "4bits_group32_residual128")
H2O = Arm("h2o", "c2048_w32_k7_maxpool")
STREAM = Arm("streamingllm", "c2048_w32_k7_maxpool")
ARMS = (KIVI, H2O, STREAM)
NAMES = ("KIVI", "H2O", "StreamingLLM")

# Share of the negative samples that are summarisation (and question answering), %.
COMPOSITION = {
    ("KIVI", "Summarisation"): 66.7,
    ("H2O", "Summarisation"): 54.6,
    ("StreamingLLM", "Summarisation"): 43.0,
    ("StreamingLLM", "QA"): 32.6,
    ("GEAR", "Summarisation"): 73.0,
}
# Scores on the released negative samples: full cache, KIVI, H2O, StreamingLLM; GEAR's stand apart.
SCORES = {
    "Summarisation": (31.6, 24.8, 24.7, 24.3),
    "QA": (52.0, 28.8, 33.8, 30.4),
    "Code": (97.0, 30.0, 57.2, 61.3),
}
GEAR_SCORES = {"Summarisation": 23.7, "QA": 28.7, "Code": 30.0}
# Counted from the released scores with the study's own extractors: mean rule at these margins (%),
# and its figure's median rule at 10 %.
MARGINS = (1, 2, 4, 8, 10, 16, 24, 32)
COUNTS = {
    (H2O,): (338, 332, 307, 266, 242, 192, 134, 103),
    (STREAM,): (431, 421, 395, 368, 344, 292, 224, 177),
    (KIVI,): (182, 168, 145, 107, 87, 64, 41, 26),
    (H2O, STREAM): (218, 211, 190, 162, 136, 97, 51, 35),
}
COUNTS_MEDIAN = {(H2O,): 460, (STREAM,): 569, (KIVI,): 294, (H2O, STREAM): 342}

RULES = ("mean", "median", "median_zeros")
COUNTED = {
    "all tasks": ("QA", "Summarisation", "Code", "Few-shot", "Synthetic"),
    "without few-shot": ("QA", "Summarisation", "Code", "Synthetic"),
    "without synthetic": ("QA", "Summarisation", "Code", "Few-shot"),
    "QA, summarisation, code": ("QA", "Summarisation", "Code"),
    "all tasks, passage_count twice": ("QA", "Summarisation", "Code", "Few-shot", "Synthetic"),
}
# LongBench files both under few-shot; by what they ask for they are these.
BY_NATURE = {"samsum": "Summarisation", "triviaqa": "QA"}
GROUPINGS = ("LongBench's tasks", "samsum and triviaqa by nature")


class Table(NamedTuple):
    """Scores as arrays over the same samples, for a search."""

    baseline: np.ndarray  # f64[n]
    scores: dict[Arm, np.ndarray]  # f64[n] each
    datasets: tuple[str, ...]  # D names
    number: np.ndarray  # i64[n], which of them
    tasks: dict[str, np.ndarray]  # grouping: str[D]
    benign: dict[str, np.ndarray]  # rule: bool[n]


class Definition(NamedTuple):
    """One way to read the study's text, and how far its figures are from the published ones."""

    distance: float  # root mean square, points
    arms: tuple[Arm, ...]
    rule: str
    margin: int  # %
    detail: tuple[str, ...]
    figures: tuple[float, ...]
    counts: tuple[int, ...]  # samples that the figures are of


def applies(table: Mapping[Arm, Mapping[Sample, float]]) -> bool:
    """Whether a table of scores is the study's."""
    return all(arm in table for arm in (BASELINE, *ARMS))


def arrays(table: Mapping[Arm, Mapping[Sample, float]]) -> Table:
    """Arrays of the arms that have every sample."""
    baseline = table[BASELINE]
    whole = {arm: s for arm, s in table.items() if set(s) == set(baseline) and arm != BASELINE}
    samples = list(baseline)
    datasets = tuple(dict.fromkeys(dataset for dataset, _ in samples))
    number = {dataset: i for i, dataset in enumerate(datasets)}
    usual = {d: negatives.task_of(d) for d in datasets}
    good = {rule: set(negatives.benign(baseline, rule)) for rule in RULES}
    return Table(
        np.array([baseline[s] for s in samples]),
        {arm: np.array([scores[s] for s in samples]) for arm, scores in whole.items()},
        datasets,
        np.array([number[s[0]] for s in samples]),
        {
            GROUPINGS[0]: np.array([usual[d] for d in datasets]),
            GROUPINGS[1]: np.array([BY_NATURE.get(d, usual[d]) for d in datasets]),
        },
        {rule: np.array([s in good[rule] for s in samples]) for rule in RULES},
    )


def settings(table: Table) -> list[tuple[Arm, Arm, Arm]]:
    """Settings of the three methods, the study's own first; equal scores count once."""
    each: list[list[Arm]] = []
    for own in ARMS:
        found: list[Arm] = [own]
        for arm in table.scores:
            same = [np.array_equal(table.scores[arm], table.scores[f]) for f in found]
            if arm.method == own.method and not any(same):
                found.append(arm)
        each.append(found)
    return list(itertools.product(*each))


def lost(table: Table, arm: Arm, rule: str, margin: int, strict: bool = False) -> np.ndarray:
    """bool[n]: the negative samples of one arm."""
    cut = negatives.cut(table.baseline, margin / 100)
    below = table.scores[arm] < cut if strict else table.scores[arm] <= cut
    return table.benign[rule] & below


def compositions(table: Table) -> Iterator[Definition]:
    """Every reading of the composition: settings, rule, margin, strictness, tasks counted."""
    wanted = [(m, t, v) for (m, t), v in COMPOSITION.items() if m in NAMES]
    for arms in settings(table):
        for rule, margin, strict in itertools.product(RULES, MARGINS, (False, True)):
            lines = [lost(table, arm, rule, margin, strict) for arm in arms]
            sets = [np.bincount(table.number[x], minlength=len(table.datasets)) for x in lines]
            for (name, tasks), grouping in itertools.product(COUNTED.items(), GROUPINGS):
                task = table.tasks[grouping]
                weight = np.isin(task, tasks).astype(int)
                if name.endswith("twice"):
                    weight += np.array(table.datasets) == "passage_count"
                totals = [int(weight @ s) for s in sets]
                if not all(totals):
                    continue
                shares = [
                    100 * ((task == t) @ sets[NAMES.index(m)]) / totals[NAMES.index(m)]
                    for m, t, _ in wanted
                ]
                gap = [s - v for s, (_, _, v) in zip(shares, wanted, strict=True)]
                yield Definition(
                    float(np.sqrt(np.mean(np.square(gap)))), arms, rule, margin,
                    ("below" if strict else "at most", name, grouping), tuple(map(float, shares)),
                    tuple(totals),
                )  # fmt: skip


def sets_of(single: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Intersections and unions of the negative samples of KIVI, H2O and StreamingLLM."""
    k, h, s = single
    return {
        "KIVI": k, "H2O": h, "StreamingLLM": s, "KIVI and H2O": k & h,
        "KIVI and StreamingLLM": k & s, "H2O and StreamingLLM": h & s, "all three": k & h & s,
        "two of three": (k.astype(int) + h + s) >= 2, "any": k | h | s,
    }  # fmt: skip


def negative_set_scores(table: Table) -> Iterator[Definition]:
    """Every reading of the scores on negative samples: settings, rule, margin, set, averaging."""
    wanted = np.array([v for values in SCORES.values() for v in values])
    for arms in settings(table):
        columns = np.stack([table.baseline, *(table.scores[arm] for arm in arms)], 1) * 100
        for rule, margin in itertools.product(RULES, MARGINS):
            single = [lost(table, arm, rule, margin) for arm in arms]
            for name, chosen in sets_of(single).items():
                sums, counts = by_dataset(table, columns, chosen)
                for averaging, grouping in itertools.product(("samples", "datasets"), GROUPINGS):
                    members = [table.tasks[grouping] == task for task in SCORES]
                    n = tuple(int(counts[m].sum()) for m in members)
                    if not all(n):
                        continue
                    found = np.concatenate([_mean(sums[m], counts[m], averaging) for m in members])
                    distance = float(np.sqrt(np.mean((found - wanted) ** 2)))
                    detail = (name, averaging, grouping)
                    figures = tuple(map(float, found))
                    yield Definition(distance, arms, rule, margin, detail, figures, n)


def by_dataset(
    table: Table, columns: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums f64[D, C] of the chosen samples' scores f64[n, C], and how many there are i64[D]."""
    number = table.number[chosen]
    sums = np.zeros((len(table.datasets), columns.shape[1]))
    np.add.at(sums, number, columns[chosen])
    return sums, np.bincount(number, minlength=len(table.datasets))


def _mean(sums: np.ndarray, counts: np.ndarray, averaging: str) -> np.ndarray:
    if averaging == "samples":
        return sums.sum(0) / counts.sum()
    filled = counts > 0
    return (sums[filled] / counts[filled, None]).mean(0)


def rows(table: Mapping[Arm, Mapping[Sample, float]], least: int = 10) -> list[dict[str, Any]]:
    """Rows of the record: counts, and the nearest readings of both sets of figures.

    Args:
        table: the study's scores.
        least: samples of each task that a reading of the scores must have to be "with enough".
    """
    baseline = table[BASELINE]
    found = []
    for arms, counts in COUNTS.items():
        methods = [table[arm] for arm in arms]
        cells = [("mean", m, c) for m, c in zip(MARGINS, counts, strict=True)]
        for rule, margin, count in [*cells, ("median_zeros", 10, COUNTS_MEDIAN[arms])]:
            mined = negatives.negatives(baseline, methods, margin / 100, rule)
            found.append({
                "kind": "count", "methods": " and ".join(a.method for a in arms), "rule": rule,
                "margin_percent": margin, "negatives": len(mined), "study": count,
            })  # fmt: skip
    data = arrays(table)
    shares = sorted(compositions(data), key=lambda d: d.distance)
    scores = sorted(negative_set_scores(data), key=lambda d: d.distance)
    own = {
        "composition": lambda d: d.detail == ("at most", "all tasks", GROUPINGS[0]),
        "scores": lambda d: d.detail == ("all three", "samples", GROUPINGS[0]),
    }
    for figure, every in (("composition", shares), ("scores", scores)):
        picks = {
            "as the study's code reads": lambda d, figure=figure: (
                d.arms == ARMS and d.rule == "mean" and d.margin == 10 and own[figure](d)
            ),
            "nearest at the study's settings, 10 %, mean": lambda d: (
                d.arms == ARMS and d.rule == "mean" and d.margin == 10
            ),
            f"nearest with {least} samples a task or more": lambda d: min(d.counts) >= least,
            "nearest of all": lambda d: True,
        }
        if figure == "composition":  # its counts are of a method, not of a task
            picks = {pick: holds for pick, holds in picks.items() if "a task" not in pick}
        for pick, holds in picks.items():
            best = next((d for d in every if holds(d)), None)
            if best is not None:
                found.append(_row(figure, pick, best, len(every)))
    return found


def _row(figure: str, pick: str, best: Definition, tried: int) -> dict[str, Any]:
    return {
        "kind": f"study_{figure}", "pick": pick, "tried": tried, "distance": best.distance,
        "arms": [str(arm) for arm in best.arms], "rule": best.rule, "margin_percent": best.margin,
        "detail": list(best.detail), "figures": list(best.figures), "counts": list(best.counts),
    }  # fmt: skip


def sections(record: Sequence[Mapping[str, Any]]) -> list[str]:
    """Text of summary.md from the rows of `rows`."""
    return [_counts(record), _composition(record), _scores(record)]


def _counts(record: Sequence[Mapping[str, Any]]) -> str:
    counts = [row for row in record if row["kind"] == "count"]
    wrong = sum(row["negatives"] != row["study"] for row in counts)
    lines = []
    for methods in dict.fromkeys(row["methods"] for row in counts):
        cells = {
            (r["rule"], r["margin_percent"]): f"{r['negatives']}"
            + ("" if r["negatives"] == r["study"] else f" (study {r['study']})")
            for r in counts
            if r["methods"] == methods
        }
        lines.append({"methods": methods} | {f"{k[0]} {k[1]}": v for k, v in cells.items()})
    columns = [Column("negative for", "methods")]
    columns += [Column(f"mean, {m} %", f"mean {m}") for m in MARGINS]
    columns.append(Column("median with zeros, 10 %", "median_zeros 10"))
    verdict = (
        f"All {len(counts)} counts are those of the study's own extractors.\n"
        if not wrong
        else f"{wrong} of {len(counts)} counts differ from the study's own extractors.\n"
    )
    return markdown(lines, columns, "Counts that the study's extractors give") + "\n" + verdict


def _composition(record: Sequence[Mapping[str, Any]]) -> str:
    found = [row for row in record if row["kind"] == "study_composition"]
    names = [f"{m} {t.lower() if t != 'QA' else t}" for m, t in COMPOSITION if m in NAMES]
    published = [v for (m, _), v in COMPOSITION.items() if m in NAMES]
    lines = [{"pick": "published", **dict(zip(names, published, strict=True))}]
    for row in found:
        lines.append({
            "pick": row["pick"], **dict(zip(names, row["figures"], strict=True)),
            "distance": row["distance"], "n": " / ".join(map(str, row["counts"])),
            "definition": definition(row),
        })  # fmt: skip
    columns = [Column("", "pick"), *(Column(f"{n}, %", n, ".1f") for n in names)]
    columns += [Column("distance, points", "distance", ".1f"), Column("n of each", "n")]
    columns += [Column("definition", "definition")]
    text = (
        f"\n{found[0]['tried']:,} definitions were tried, so a near one may be near by"
        f" chance. GEAR's {COMPOSITION['GEAR', 'Summarisation']} % cannot be computed: the"
        " shared scores lack GEAR.\n"
    )
    title = "What negative samples are made of, beside the study's figures"
    return markdown(lines, columns, title) + text


def _scores(record: Sequence[Mapping[str, Any]]) -> str:
    found = [row for row in record if row["kind"] == "study_scores"]
    lines = [{"pick": "published", **_groups([v for s in SCORES.values() for v in s])}]
    for row in found:
        lines.append({
            "pick": row["pick"], **_groups(row["figures"]), "distance": row["distance"],
            "n": " / ".join(map(str, row["counts"])), "definition": definition(row),
        })  # fmt: skip
    columns = [Column("", "pick"), *(Column(task, task) for task in SCORES)]
    columns += [Column("distance, points", "distance", ".1f"), Column("n of each", "n")]
    columns += [Column("definition", "definition")]
    gear = ", ".join(f"{task} {value}" for task, value in GEAR_SCORES.items())
    text = (
        f"\nFull cache, then KIVI, H2O, StreamingLLM. {found[0]['tried']:,} definitions were tried,"
        " so a near one may be near by chance. The study had GEAR's scores too, which the shared"
        f" table lacks (published for GEAR: {gear}): a set that GEAR took part in cannot be made"
        f" again; the nearest definition is {found[-1]['distance']:.1f} points away.\n"
    )
    return markdown(lines, columns, "Scores on negative samples, beside the study's figures") + text


def _groups(figures: Sequence[float]) -> dict[str, str]:
    width = 1 + len(ARMS)
    return {
        task: " / ".join(f"{v:.1f}" for v in figures[i * width : (i + 1) * width])
        for i, task in enumerate(SCORES)
    }


def definition(row: Mapping[str, Any]) -> str:
    """A definition in words."""
    short = [
        arm.replace("_k7_maxpool", "").replace("_group32_residual128", "") for arm in row["arms"]
    ]
    arms = ", ".join(short)
    return f"{row['rule']}, {row['margin_percent']} %, {', '.join(row['detail'])}; {arms}"
