"""Which parts of AnchorKV matter, and does what its paper expects hold on this model?

    python -m experiments.anchorkv_ablation                              # all ten studies
    python -m experiments.anchorkv_ablation --studies ranking components
    python -m experiments.anchorkv_ablation --quick

Each study is a table and a plot; what the paper (or the notes on it) expects is confirmed, refuted
or left undecided by a rule on the measured 95 % interval (`ablation_verdict`). Settings are
compared at equal measured bytes of one prefill, the question unknown to the cache.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from experiments import (
    ablation_arms,
    ablation_batch,
    ablation_content,
    ablation_geometry,
    ablation_groups,
    ablation_linear,
    ablation_prompts,
    ablation_settings,
    ablation_texts,
    ablation_turns,
    equal_bytes,
)
from experiments.ablation_batch import Question, Setting
from experiments.ablation_verdict import Verdict, verdict_table
from experiments.runner import Run, bound_programs, main
from models import hub

Study = Literal[
    "ranking", "components", "rope", "split", "linear", "turns", "pile", "groups", "content",
    "two_anchors",
]  # fmt: skip
STUDIES: tuple[str, ...] = get_args(Study)
SHARED = ("ranking", "components", "split", "two_anchors")  # settings over the same questions


@dataclass(frozen=True)
class Config:
    """The ten studies of AnchorKV."""

    studies: tuple[Study, ...] = STUDIES
    """which studies run, in the order of the specification"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    length: int = 512
    """context length, tokens"""
    ratios: tuple[float, ...] = (5.0, 10.0, 20.0)
    """full bfloat16 bytes over stored bytes; components and two anchors: the first and last"""
    middle: float = 10.0
    """ratio of the studies that take one: sensitivities, turns, groups, demand"""
    linear_ratios: tuple[float, ...] = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
    """ratios at which the linear model is tested"""
    needles: tuple[str, ...] = ("noise_7", "text_7")
    """needle formats, haystack_digits"""
    digits: int = 7
    """digits of the needles in conversations"""
    prompts: int = 3
    """prompts of each needle format, running texts, and conversations"""
    texts: int = 2
    """texts of each kind (prose, code, table, languages) in the studies of single layers"""
    piles: int = 2
    """prompts of each kind (long answer, agent) on which tokens pile up"""
    batch: int = 12
    """prompts that are prefilled together"""
    layers: int = 6
    """layers that the studies of single layers look at, spread over the model"""
    later: int = 64
    """later tokens of a text whose queries measure a layer's error, tokens"""
    chunk: int = 96
    """tokens of a step in which tokens pile up"""
    steps: int = 3
    """such steps"""
    group_sizes: tuple[int, ...] = (1, 3, 4, 8)
    """query heads a KV head; all but the model's own are synthetic"""
    alone: int = 128
    """first tokens of a text that the leave-one-out comparison takes"""
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
    quick: bool = False
    """fewer prompts, ratios and layers: a look in a fraction of the time"""
    seed: int = 42
    """of needles, haystacks and texts"""


TINY = Config(
    model="tiny", length=640, ratios=(4.0,), middle=4.0, linear_ratios=(3.0,), needles=("noise_3",),
    digits=3, prompts=2, texts=1, piles=2, batch=6, layers=2, later=16, chunk=32, steps=2,
    group_sizes=(1, 3), alone=48, studies=("rope", "turns"),
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Measure what the chosen studies need, then make every table, plot and verdict from rows."""
    config = settle(config)
    loaded = hub.load(config.model)
    if config.matmul == "bfloat16":
        loaded = dataclasses.replace(loaded, params=equal_bytes.lighter(loaded.params))
    run.watch(scalars)
    for work in (answers, conversations, piles, layers):
        for _ in work(config, run, loaded):
            bound_programs()
    report(config, run, loaded)


def settle(config: Config) -> Config:
    """Fill in `quick`; refuse what cannot be.

    Raises:
        ValueError: for no study, or numbers that cannot be.
    """
    if not config.studies:
        raise ValueError(f"studies is empty: name some of {', '.join(STUDIES)}.")
    for name in ("length", "digits", "prompts", "texts", "piles", "batch", "layers", "later",
                 "chunk", "steps", "alone"):  # fmt: skip
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 1.")
    if min(config.group_sizes, default=0) < 1:
        raise ValueError(f"group_sizes={config.group_sizes} must be some, at least 1 each.")
    wrong = [name for name in config.needles if not re.fullmatch(r".+_[1-9]\d*", name)]
    if wrong:
        raise ValueError(f"needles={wrong[0]!r} must be haystack_digits, as in noise_7.")
    every = (*config.ratios, *config.linear_ratios, config.middle)
    if min(every) < 1 or not config.ratios or not config.linear_ratios:
        raise ValueError(f"ratios {every} must be at least 1, full bytes over stored bytes.")
    if not config.quick:
        return config
    return dataclasses.replace(
        config, ratios=(config.ratios[0], config.ratios[-1]), prompts=2, texts=1, piles=1,
        layers=3, steps=2, linear_ratios=config.linear_ratios[1::2],
    )  # fmt: skip


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the prompt's number."""
    parts = [row["group"], row.get("task"), row.get("method"), row.get("target_ratio"),
             row.get("layer"), row.get("side"), row.get("size"), row.get("step")]  # fmt: skip
    name = re.sub(r"[^\w.-]", "_", "_".join(str(part) for part in parts if part is not None))
    for field in ("token_match", "error", "kl", "absolute", "measured", "rank"):
        if field in row:
            yield f"ablation/{field}_value/{name}", row[field], row["prompt"]


def answers(config: Config, run: Run, loaded: hub.Loaded) -> Iterator[str]:
    """Studies 1, 2, 4 and 10: settings over needles and running text."""
    studies = [study for study in SHARED if study in config.studies]
    if not studies:
        return
    shape = ablation_batch.shape_of(loaded, config.length)
    settings = ablation_settings.settings(studies, config.ratios, config.middle, shape)
    tokenizer, length, seed = loaded.tokenizer, config.length, config.seed
    questions = ablation_prompts.needles(tokenizer, length, config.prompts, config.needles, seed)
    later = max([40, *(1 + len(q.follows) - q.answer_start for q in questions)])
    questions += ablation_prompts.continuations(tokenizer, length, later, config.prompts, seed + 50)
    yield from asked(config, run, loaded, ablation_arms.GROUP, questions, settings)


def conversations(config: Config, run: Run, loaded: hub.Loaded) -> Iterator[str]:
    """Study 6."""
    if "turns" not in config.studies:
        return
    questions = ablation_prompts.conversations(
        loaded.tokenizer, config.length, config.prompts, config.seed, config.digits
    )
    longest = max(len(q.context) for q in questions)
    settings = ablation_turns.settings(config.middle, ablation_batch.shape_of(loaded, longest))
    yield from asked(config, run, loaded, ablation_turns.TURNS, questions, settings)


def asked(
    config: Config,
    run: Run,
    loaded: hub.Loaded,
    group: str,
    questions: Sequence[Question],
    settings: Sequence[Setting],
) -> Iterator[str]:
    """Every setting's answers to some questions, under a progress bar."""
    cells = ablation_batch.measure(run, loaded, group, questions, settings, config.batch)
    batches = -(-len(questions) // config.batch)
    yield from counted(run, cells, batches * (len(settings) + 1), group)


def piles(config: Config, run: Run, loaded: hub.Loaded) -> Iterator[str]:
    """Study 7."""
    if "pile" not in config.studies:
        return
    questions: list[Question] = ablation_prompts.piling(
        loaded.tokenizer, config.length, config.chunk * config.steps, config.piles, config.seed
    )
    cells = ablation_turns.pile(run, loaded, questions, config.chunk, config.steps, config.middle)
    yield from counted(run, cells, len(ablation_turns.ARMS), "piling up")


def layers(config: Config, run: Run, loaded: hub.Loaded) -> Iterator[str]:
    """Studies 3, 5, 8, 9 and the shares of 10: single layers of texts, prefilled once."""
    wanted = {"rope", "linear", "groups", "content", "two_anchors"} & set(config.studies)
    if not wanted or run.finished({"group": "layers", "studies": sorted(wanted)}):
        return
    texts = ablation_texts.prefill(
        loaded, config.length, config.later, config.texts, config.layers, config.seed
    )
    number, length = len(texts.layers), config.length
    if wanted & {"rope", "content", "two_anchors"}:
        cells = ablation_geometry.geometry(run, texts, length, config)
        yield from counted(run, cells, number, "cosines")
    if "content" in wanted:
        cells = ablation_content.demand(run, texts, length, config.middle)
        yield from counted(run, cells, number, "demand")
    if "linear" in wanted:
        ratios = config.linear_ratios
        cells = ablation_linear.linear(run, texts, length, ratios, config.alone)
        yield from counted(run, cells, len(ratios) + 1, "linear model")
    if "groups" in wanted:
        sizes = config.group_sizes
        cells = ablation_groups.groups(run, texts, length, sizes, config.middle)
        yield from counted(run, cells, len(sizes) + 1, "groups")
    run.append({"group": "layers", "studies": sorted(wanted)})


def counted(run: Run, cells: Iterator[str], total: int, title: str) -> Iterator[str]:
    """The same cells under a progress bar."""
    with run.progress(total, title) as progress:
        for note in cells:
            progress.advance(note, skipped=not note)
            yield note


def report(config: Config, run: Run, loaded: hub.Loaded) -> None:
    """Every study's table, plot and verdicts, and summary.md."""
    model, ends = loaded.model, ablation_settings.ends(config.ratios)
    makers = {
        "ranking": lambda: ablation_arms.ranking_report(run, config.ratios),
        "components": lambda: ablation_arms.components_report(run, ends),
        "rope": lambda: ablation_geometry.rope_report(run),
        "split": lambda: ablation_arms.split_report(run, config.middle),
        "linear": lambda: ablation_linear.report(run),
        "turns": lambda: ablation_turns.turns_report(run, config.middle),
        "pile": lambda: ablation_turns.pile_report(run, config.middle),
        "groups": lambda: ablation_groups.report(
            run, config.middle, model.num_heads // model.num_kv_heads
        ),
        "content": lambda: ablation_content.content_report(run, config.middle),
        "two_anchors": lambda: ablation_geometry.two_anchors_report(run, ends),
    }
    sections: list[str] = []
    verdicts: list[Verdict] = []
    for study in STUDIES:
        if study in config.studies:
            section, found = makers[study]()
            sections.append(section)
            verdicts += found
    verdict = verdict_table(verdicts, f"{loaded.name}, {config.length:,} tokens")
    head = f"{loaded.name}, contexts of {config.length:,} tokens.\n"
    run.write_summary("\n".join([head, verdict, *sections, notes(config)]))


def notes(config: Config) -> str:
    """How to read the tables."""
    return (
        "Verdicts: an expectation is a bound on the number; confirmed where the whole 95 % interval"
        " keeps to it, refuted where none of it does, else undecided; of several parts all must"
        " hold. Brackets: 95 % intervals over prompts (layers of one text averaged first;"
        " intervals over pairs of texts share texts). Stored: full bfloat16 bytes over live body"
        " and metadata bytes, measured on the arrays. Settings change one option of anchorkv with"
        " one residual width of two bits (the paper's) and everything else at its defaults: lean"
        " storage, centred tokens, floor 1. Naive residuals are coded without rotation on four"
        " uniform levels up to the largest coordinate, in as many bytes. Points: answer tokens"
        " right, %, teacher forced, compressed before the question. Error: relative"
        " root-mean-square error of the attention output over the prompt. Groups other than the"
        f" model's own are synthetic. Seed {config.seed}.\n"
    )


if __name__ == "__main__":
    main(Config, run)
