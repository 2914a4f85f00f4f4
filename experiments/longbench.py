"""How much of LongBench does each method keep at equal bytes?

    python -m experiments.longbench --folder DIR               # <dataset>.jsonl(.gz) files
    python -m experiments.longbench --folder THUDM/LongBench --datasets all   # from the hub
    python -m experiments.longbench --prompts dataset2prompt.json --limits dataset2maxlen.json

Without --folder it reads the folder longbench of KVJAX_DATA. Each context is prefilled once and
compressed by every method to the same measured bytes; the answer is generated greedily to a real
end or the dataset's limit and scored by LongBench's own rules. `scores.csv` holds a score (0 to 1)
of every sample and method, `predictions.jsonl` what was said.
"""

import csv
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments import answers, equal_bytes, longbench_report
from experiments.ratio_arms import at_ratios, check
from experiments.runner import Run, main
from kvjax.evaluation import longbench, negatives, text
from kvjax.evaluation.rows import Encoded, write_jsonl

SAMPLE = "sample"


@dataclass(frozen=True)
class Config:
    """LongBench at equal measured bytes."""

    folder: str | None = None
    """folder, .jsonl(.gz) or .zip file, hub id, or "sample" (a few made-up rows, for a check);
    default: longbench in KVJAX_DATA"""
    datasets: tuple[str, ...] = ()
    """datasets, or "all" for the 16 English ones; default: those that are in the folder"""
    extended: bool = False
    """take LongBench-E (<dataset>_e) and report by length"""
    rows: int = 12
    """rows of each dataset, the first ones that are long enough; 0: all"""
    max_tokens: int = 1500
    """tokens of a prompt; more are cut out of the middle, half and half"""
    min_tokens: int = 1500
    """rows with shorter prompts are left out; 0 keeps all, as the benchmark does"""
    max_new_tokens: int = 64
    """tokens of an answer, at most; 0: the dataset's own limit (up to 512)"""
    only: str | None = None
    """JSONL of samples (experiments.negative_samples writes such sets): these rows alone"""
    prompts: str | None = None
    """dataset2prompt.json with the official prompts; default: our own wording"""
    limits: str | None = None
    """dataset2maxlen.json; default: the official limits"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    methods: tuple[str, ...] = (
        "anchorkv", "snapkv", "streaming_llm", "h2o", "kivi", "random",
    )  # fmt: skip
    """methods: name, preset:name, name(option=value), evictor+quantizer; "full" is always there"""
    ratios: tuple[float, ...] = (4.0,)
    """full bfloat16 bytes over stored bytes"""
    batch: int = 6
    """contexts that are prefilled together"""
    aware: bool = False
    """compress after the question instead of before it"""
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
    quick: bool = False
    """four rows, 32 new tokens, one ratio"""
    seed: int = 42
    """of the made-up rows"""


TINY = Config(
    folder=SAMPLE, datasets=("trec",), model="tiny", methods=("snapkv", "kivi(residual_length=64)"),
    ratios=(2.0,), rows=2, batch=2, max_tokens=260, min_tokens=0, max_new_tokens=8,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Answer every row with every method, then make tables and plots from the rows."""
    config = settle(config)
    check(config.methods, config.ratios)  # fails before a model is loaded
    records = read(config)
    run.watch(longbench_report.scalars)
    loaded = equal_bytes.load(config.model, config.matmul)
    questions, left_out = select(config, records, loaded.tokenizer)
    shape = answers.reference_shape(questions, loaded)
    planned = at_ratios(config.methods, config.ratios, shape, len(loaded.model.windows))
    answers.sweep(
        config, run, loaded, questions, planned.arms, config.max_tokens, longbench.METRICS
    )
    write_predictions(run, questions)
    write_scores(run)
    longbench_report.report(config, run, loaded.name, questions, left_out, planned.absent)


def settle(config: Config) -> Config:
    """Check what the command line cannot, and apply `quick`.

    Raises:
        ValueError: for a number out of range.
    """
    for name in ("rows", "min_tokens", "max_new_tokens"):
        if getattr(config, name) < 0:
            raise ValueError(f"{name}={getattr(config, name)} must be 0 or more.")
    if config.batch < 1:
        raise ValueError(f"batch={config.batch} must be at least 1.")
    if config.min_tokens > 0 and config.max_tokens < 16:
        raise ValueError(f"max_tokens={config.max_tokens} must be at least 16.")
    if config.quick:
        config = dataclasses.replace(
            config, rows=4, batch=4, max_new_tokens=32, ratios=config.ratios[:1]
        )
    return config


def read(config: Config) -> dict[str, list[dict[str, Any]]]:
    """The records of each dataset.

    Raises:
        FileNotFoundError: when neither the folder nor KVJAX_DATA has any.
    """
    if config.folder == SAMPLE:
        made = sample(config.seed)
        unknown = set(config.datasets) - set(made)
        if unknown:
            raise ValueError(f"the sample has no {sorted(unknown)[0]}: it has {', '.join(made)}.")
        return {name: made[name] for name in config.datasets or made}
    folder = config.folder
    if folder is None:
        data = os.environ.get("KVJAX_DATA")
        folder = Path(data) / "longbench" if data else None
        if folder is None or not folder.is_dir():
            raise FileNotFoundError(
                "no LongBench rows: name them with --folder (a folder of <dataset>.jsonl files, a"
                " .jsonl or .jsonl.gz file, or THUDM/LongBench for the hub), or set KVJAX_DATA to a"
                " folder that has a folder longbench."
            )
    return longbench.read(folder, config.datasets, config.extended)


def sample(seed: int) -> dict[str, list[dict[str, Any]]]:
    """A few rows in LongBench's schema, made from prose that every Python ships."""
    prose = text.sentences("text", seed)
    news, questions = [], []
    for i in range(4):
        own = prose[12 * i : 12 * i + 12]
        shared = {"length": sum(len(s.split()) for s in own), "language": "en", "_id": f"made-{i}"}
        news.append(shared | {
            "input": "", "context": " ".join(own), "answers": own[:2], "all_classes": None,
            "dataset": "multi_news",
        })  # fmt: skip
        questions.append(shared | {
            "input": "Question: How many are there?\nType:", "context": "\n".join(
                f"Question: {s}\nType: {'Number' if 'number' in s else 'Entity'}" for s in own),
            "answers": ["Number"], "all_classes": ["Number", "Entity"], "dataset": "trec",
        })  # fmt: skip
    return {"multi_news": news, "trec": questions}


def select(
    config: Config, records: Mapping[str, Sequence[Mapping[str, Any]]], tokenizer: Any
) -> tuple[list[Encoded], dict[str, int]]:
    """The rows that are asked, as tokens, and how many of each dataset were too short.

    Raises:
        ValueError: when no row is long enough, or none is in the set that `only` names.
    """
    only = negatives.read_negative_set(config.only) if config.only else None
    templates = longbench.read_table(config.prompts) if config.prompts else None
    limits = longbench.read_table(config.limits) if config.limits else None
    questions, left_out = [], {}
    for dataset, found in records.items():
        kept, short = [], 0
        for row in longbench.make_rows(dataset, found, templates, limits):
            if only is not None and (dataset, row.id) not in only:
                continue
            if config.max_new_tokens:
                row = row._replace(max_new_tokens=min(row.max_new_tokens, config.max_new_tokens))
            question = longbench.encode(tokenizer, row, config.max_tokens)
            tokens = len(question.context_ids) + len(question.question_ids) + question.removed
            if tokens < config.min_tokens:
                short += 1
                continue
            kept.append(question)
            if config.rows and len(kept) == config.rows:
                break
        questions += kept
        left_out[dataset] = short
    if not questions and only is not None and not sum(left_out.values()):
        raise ValueError(f"{config.only} names no row of {', '.join(records)}.")
    if not questions:
        raise ValueError(f"no row has a prompt of min_tokens={config.min_tokens} tokens: lower it.")
    return questions, left_out


def config_name(row: Mapping[str, Any]) -> str:
    """How the table of scores names a setting; the full cache has none."""
    return "" if row["method"] == "full" else f"{row['target_ratio']:g}x"


def write_scores(run: Run) -> Path:
    """Write scores.csv: method, config, dataset, id, score (0 to 1), a line a sample and method."""
    path = run.path / "scores.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "config", "dataset", "id", "score"))
        for row in run.rows:
            score = round(row["score"] / 100, 6)
            writer.writerow((row["method"], config_name(row), row["task"], row["id"], score))
    return path


def write_predictions(run: Run, questions: Sequence[Encoded]) -> Path:
    """Write predictions.jsonl in LongBench's schema, with the method and its setting beside it."""
    known = {(q.row.task, q.row.id): q.row for q in questions}
    lines = []
    for row in run.rows:
        asked = known[row["task"], row["id"]]
        lines.append(
            {"method": row["method"], "config": config_name(row), "id": row["id"]}
            | {"pred": row["prediction"], "score": row["score"] / 100}
            | {name: asked.extra.get(name) for name in longbench.PREDICTION_FIELDS}
        )
    return write_jsonl(run.path / "predictions.jsonl", lines)


if __name__ == "__main__":
    main(Config, run)
