"""From which context does a quantized cache pay, and does it keep what the full one says?

    python -m experiments.quantized_cache_matrix
    python -m experiments.quantized_cache_matrix --dry-run   # cells, bytes, flushes
    python -m experiments.quantized_cache_matrix --model ORG/NAME --contexts 4096 16384

KIVI's mixed axes and HQQ's same-axis groups, in 4 and 2 bits, each paired with the full cache on
one prefill: a context matrix at one residual window, and a residual-window matrix at one context
(`--window-bits 4 2` for both widths there too, `--contexts` alone for windows only).
Token counts are fixed, a stop token stops nothing. Every cell passes or fails three gates (NLL,
top-5 overlap, latency); what passes competes by saved bytes. `study.json` holds all of it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from experiments import quantized_cache_report as report
from experiments.quantized_cache_decode import Cell, prompt_of
from experiments.quantized_cache_measure import Group, Settings
from experiments.quantized_cache_memory import device_peaks
from experiments.quantized_cache_plan import planned_row
from experiments.quantized_cache_study import Facts, gates_of, labels
from experiments.runner import Run, bound_programs, main
from kvjax.evaluation import admission
from models import hub


@dataclass(frozen=True)
class Config:
    """Full against quantized caches: a context matrix and a residual-window matrix."""

    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    contexts: tuple[int, ...] = (512, 2048, 4096)
    """context matrix: prompt lengths, exact, tokens"""
    context_new_tokens: int = 64
    """context matrix: tokens decoded, whatever they are"""
    context_residual: int = 128
    """context matrix: exact recent tokens of the quantized caches"""
    windows: tuple[int, ...] = (16, 32, 64)
    """window matrix: exact recent tokens of the quantized caches"""
    window_context: int = 512
    """window matrix: prompt length, tokens"""
    window_new_tokens: int = 128
    """window matrix: tokens decoded, whatever they are"""
    methods: tuple[str, ...] = ("kivi", "hqq")
    """kivi: keys by channel, values by token; hqq: both sides on `hqq_axis`"""
    bits: tuple[int, ...] = (4, 2)
    """context matrix: of keys and values"""
    window_bits: tuple[int, ...] = (4,)
    """window matrix: of keys and values; 4 2 takes half as long again"""
    group: int = 64
    """values that share a scale; groups along tokens are no longer than the residual window"""
    hqq_axis: Literal["token", "channel"] = "token"
    """axis of both sides of hqq; token is what transformers calls axis 1"""
    hqq_refine: Literal["exact", "best", "none"] = "exact"
    """exact: HQQ's refinement of zeros; none: as transformers runs it"""
    hqq_requantize: bool = True
    """code the whole prompt, and all of it anew at each flush, as transformers does"""
    quality_tokens: int = 16
    """scored tokens of each fixed trajectory"""
    trajectory: Literal["greedy", "text"] = "greedy"
    """which trajectory the gates see: the full cache's own tokens, or the text that follows"""
    warmups: int = 1
    """generations before the timed ones; they give tokens and bytes"""
    repeats: int = 3
    """timed generations an arm, in turns"""
    max_nll_difference: float = 0.50
    """gate: mean NLL over the full cache's, nats a token"""
    min_top5_overlap: float = 0.60
    """gate: mean share of the full cache's five likeliest tokens"""
    max_latency_ratio: float = 2.00
    """gate: time a token over the full cache's"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of exact tokens in the cache"""
    own_process: Literal["auto", "always", "never"] = "auto"
    """measure each arm's peak in a process of its own; auto: where the device reports peaks"""
    label: str | None = None
    """of this run, which no other run in the same folder may have; default: the folder's name"""
    dry_run: bool = False
    """list the cells with their bytes and flushes, from shapes; nothing is measured"""
    folder: str | None = None
    """folder of .txt files for the prompt; default: prose that every Python ships"""
    seed: int = 42
    """of the prompt's text"""


TINY = Config(
    model="tiny", contexts=(64,), context_new_tokens=8, context_residual=32, windows=(8,),
    window_context=64, window_new_tokens=16, bits=(4,), group=32, quality_tokens=4, repeats=1,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Plan, measure what is missing, report."""
    check(config)
    label = label_of(config, run)
    groups = plan(config)
    loaded = hub.load(config.model)
    check_length(config, loaded)
    facts = Facts(
        label, loaded, config, {c: prompt_hash(config, loaded, c) for c in contexts(config)}
    )
    if config.dry_run:
        rows = [planned_row(cell, loaded, config.dtype) for cells in groups for cell in cells]
        report.planned(facts, run, rows)
        return
    run.watch(scalars)
    settings = settings_of(config)
    total = sum(len(cells) for cells in groups) * (1 + config.repeats)
    with run.progress(total, "stages of arms") as progress:
        for cells in groups:
            todo = [cell for cell in cells if run.finished(cell.key) is None]
            for _ in range((len(cells) - len(todo)) * (1 + config.repeats)):
                progress.advance(skipped=True)
            if not todo:
                continue
            # the full cache is measured again beside what was missing: a ratio needs both
            group = Group(loaded, settings, [cells[0], *(c for c in todo if c != cells[0])])

            def advance(cell, stage, todo=todo):
                if cell in todo:
                    progress.advance(f"{cell.name} {stage}")

            for cell, measured in group.measure(advance).items():
                if cell in todo:
                    parts = group.components.get(cell)  # None where the arm failed before
                    named = parts and {f"{cell.matrix} matrix: {cell.name}": parts}
                    run.append(cell.key | judged(config, cell, measured), kv_bytes=named)
            bound_programs()
    report.report(facts, run)


def check(config: Config) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: for an unknown method, an empty matrix, or counts that do not fit each other.
    """
    unknown = sorted(set(config.methods) - {"kivi", "hqq"})
    if unknown or not config.methods or not config.bits or not config.window_bits:
        raise ValueError(
            f"methods={config.methods} with bits={config.bits} and window_bits="
            f"{config.window_bits} must be of kivi and hqq, each with at least one width."
        )
    if not config.contexts and not config.windows:
        raise ValueError("contexts and windows are both empty: one matrix must have a cell.")
    wrong = [n for n in (*contexts(config), *config.windows, config.context_residual) if n < 1]
    if wrong or min(config.context_new_tokens, config.window_new_tokens) < 1:
        raise ValueError("contexts, windows and numbers of tokens must be at least 1.")
    if config.group < 1:
        raise ValueError(f"group={config.group} must be at least 1.")
    repeated = {"contexts": config.contexts, "windows": config.windows, "bits": config.bits,
                "window_bits": config.window_bits, "methods": config.methods}  # fmt: skip
    for name, values in repeated.items():
        if len(set(values)) != len(values):
            raise ValueError(f"{name}={values} must name each value once.")
    shortest = min(
        ([config.context_new_tokens] if config.contexts else [])
        + ([config.window_new_tokens] if config.windows else [])
    )
    if not 1 <= config.quality_tokens <= shortest:
        raise ValueError(
            f"quality_tokens={config.quality_tokens} must be 1 to {shortest}, the tokens that are"
            " decoded."
        )
    if config.repeats < 1 or config.warmups < 1:
        raise ValueError(
            f"repeats={config.repeats} and warmups={config.warmups} must be at least 1: the first"
            " generation compiles."
        )
    if config.label is not None and not re.fullmatch(r"[\w.\-]+", config.label):
        raise ValueError(f"label={config.label!r} must be letters, digits, '_', '-' and '.'.")


def check_length(config: Config, loaded: hub.Loaded) -> None:
    """Refuse more tokens than the model has positions for.

    Raises:
        ValueError: naming the limit.
    """
    limit = loaded.config.max_position_embeddings
    longest = max(
        [n + config.context_new_tokens for n in config.contexts]
        + ([config.window_context + config.window_new_tokens] if config.windows else [])
    )
    if longest > limit:
        raise ValueError(
            f"{longest} tokens exceed the {limit} positions of {loaded.name}: shorten the contexts."
        )


def label_of(config: Config, run: Run) -> str:
    """The run's label.

    Raises:
        ValueError: when another run in the same folder has it.
    """
    label = config.label or run.path.name
    taken = labels(run.path.parent, run.path)
    if label in taken:
        raise ValueError(f"label={label!r} is that of {taken[label]}: choose another one.")
    return label


def contexts(config: Config) -> list[int]:
    """Every prompt length, once."""
    return sorted({*config.contexts, *([config.window_context] if config.windows else [])})


def prompt_hash(config: Config, loaded: hub.Loaded, context: int) -> str:
    """SHA-256 of a context's token ids."""
    follows = config.quality_tokens + 1
    return prompt_of(loaded.tokenizer, context, follows, config.seed, config.folder).sha256


def plan(config: Config) -> list[list[Cell]]:
    """The cells by prompt, the full cache's first."""
    groups = []
    for context in sorted(config.contexts):
        residuals = [config.context_residual]
        groups.append(("context", context, config.context_new_tokens, residuals, config.bits))
    if config.windows:
        window = (config.window_context, config.window_new_tokens, sorted(config.windows))
        groups.append(("window", *window, config.window_bits))
    made = []
    for matrix, context, new_tokens, residuals, widths in groups:
        where = (matrix, context, new_tokens)
        made.append([Cell(*where, "full", 16, None, None, "full")])
        for residual in residuals:
            for method in config.methods:
                for bits in widths:
                    group, label = setting(config, method, bits, residual)
                    made[-1].append(Cell(*where, method, bits, residual, group, label))
    return made


def setting(config: Config, method: str, bits: int, residual: int) -> tuple[int, str]:
    """The group and the registry's label of an arm.

    A group along tokens lies inside of one block of `residual` tokens, so it can be no longer.
    """
    along_tokens = method == "kivi" or config.hqq_axis == "channel"
    group = math.gcd(config.group, residual) if along_tokens else config.group
    common = f"k_bits={bits}, v_bits={bits}, group={group}, residual_length={residual}"
    if method == "kivi":
        return group, f"kivi({common})"
    axis = config.hqq_axis
    return group, (
        f"quantized_cache({common}, key_axis={axis!r}, value_axis={axis!r},"
        f" refine={config.hqq_refine!r}, requantize_all={config.hqq_requantize})"
    )


def settings_of(config: Config) -> Settings:
    """How every group is measured."""
    own = config.own_process == "always" or (
        config.own_process == "auto" and device_peaks() is not None
    )
    return Settings(
        config.quality_tokens, config.trajectory, config.warmups, config.repeats, config.dtype,
        own, config.own_process == "always", config.model, config.folder, config.seed,
    )  # fmt: skip


def judged(config: Config, cell: Cell, measured: dict[str, Any]) -> dict[str, Any]:
    """A row with its decision, the gates that it broke and those that are uncertain."""
    if "failure_stage" in measured:
        return measured | {"decision": admission.FAILED, "broken": [], "uncertain": []}
    if cell.method == "full":
        verdict = admission.Verdict(admission.REFERENCE, (), ())
    else:
        names = ("nll_difference", "top5_overlap", "latency_ratio")
        values = [measured[name] for name in names]
        intervals = {n: (measured[f"{n}_low"], measured[f"{n}_high"]) for n in names}
        verdict = admission.judge(gates_of(config), *values, intervals)
    return measured | {"failure_stage": None, "error": None} | verdict._asdict()


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the context or the residual window."""
    step = row["context"] if row["matrix"] == "context" else row["residual_length"] or 0
    arm = f"{row['matrix']}_{row['method']}_{row['bits']}"
    names = {
        "latency/ms_per_token": "ms_per_token",
        "latency/over_full_ratio": "latency_ratio",
        "memory/saved_bytes": "saved_bytes",
        "memory/incremental_peak_bytes": "incremental_peak_bytes",
        "quality/nll_difference_nats": "nll_difference",
        "quality/top5_overlap_share": "top5_overlap",
    }
    for tag, field in names.items():
        yield f"{tag}/{arm}", row.get(field), step


if __name__ == "__main__":
    main(Config, run)
