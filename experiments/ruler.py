"""At which compression does each method lose which long-context task?

    python -m experiments.ruler                             # 1,024 tokens, all 13 tasks
    python -m experiments.ruler --lengths 1024 2048 --tasks niah_multikey_1 cwe --prompts 20
    python -m experiments.ruler --preset llama-3.1-8b       # 32,768 and 65,536 tokens
    python -m experiments.ruler --official data/4096        # RULER's own prompts, as they are

Contexts have exactly the length asked for. Each is prefilled once; every method compresses that
same prefill to the same measured bytes; then the question comes, the model answers greedily to its
end of sequence, and RULER's string match scores the answer, 0 to 100. The gold answer is scored by
teacher forcing too (NLL, share of its tokens that are the likeliest): a small model fails many
tasks outright, and there the score cannot fall.

Scaled to short contexts, as `kvjax.evaluation.ruler` says: fewer distractors, documents and words;
below 4,096 tokens the common words of cwe come up 6 times and the others once (RULER's own lower
setting; 30 and 3 above), after an example of 20 words. The small preset ends an answer after 64
tokens at most, where RULER allows 128 (needles) and 120 (cwe).

The larger presets are for accelerators: until it is compressed a context holds queries, keys with
and without rotation, and values, 2 (heads + 3 KV heads) head_dim bytes a token and layer: at 32,768
tokens 15 GB (8B), 19 GB (24B) and 59 GB (70B), at 65,536 twice that, beside the weights.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from experiments import answers, equal_bytes, ruler_report
from experiments.arms import plan
from experiments.runner import Run, main
from kvjax import registry
from kvjax.evaluation import ruler, scoring
from kvjax.evaluation.rows import Encoded, Row, encode
from models import hub


@dataclass(frozen=True)
class Config:
    """RULER-style tasks under every method at equal measured bytes."""

    preset: Literal["small", "llama-3.1-8b", "llama-3.1-70b", "mistral-small-3.1-24b"] = "small"
    """model, lengths, budgets, batch and prompts where no flag sets them; see PRESETS"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; small: SmolLM2-135M-Instruct"""
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--length"])] | None = None
    """context lengths, tokens, chat header and BOS included; small: 1024"""
    tasks: tuple[str, ...] = tuple(ruler.TASKS)
    """of the 13 tasks"""
    prompts: int | None = None
    """prompts of each task; small: 2, of official files all"""
    ratios: tuple[float, ...] | None = None
    """full bfloat16 bytes over stored bytes; small: 2 4 8"""
    methods: tuple[str, ...] = ("anchorkv", "snapkv", "streaming_llm", "random")
    """methods: name, preset:name, name(option=value), evictor+quantizer; "full" is always there"""
    matched: tuple[str, ...] = ()
    """methods that also run at exactly the bytes of each discrete setting of the others"""
    batch: int | None = None
    """contexts that are prefilled together, at most; small: 18"""
    new_tokens: int | None = None
    """most new tokens of an answer; small: 48, otherwise RULER's limit of each task"""
    aware: bool = False
    """compress after the question instead of before it"""
    official: str | None = None
    """RULER's own prompts instead: a .jsonl file, or a folder of <task>/validation.jsonl"""
    chat: bool = False
    """put official prompts into the model's chat template; otherwise they run as they are"""
    squad: str | None = None
    """JSON file in SQuAD's format for qa_1; default: a synthetic set"""
    hotpotqa: str | None = None
    """JSON file in HotpotQA's format for qa_2; default: a synthetic set"""
    only: str | None = None
    """JSONL of samples (experiments.negative_samples writes such sets): these prompts alone"""
    folder: str | None = None
    """folder of .txt files for natural text; default: prose that every Python ships"""
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
    quick: bool = False
    """two prompts a task, 4 times, without StreamingLLM and random"""
    seed: int = 42
    """of keys, values, words, documents and haystacks"""


SHORT_QUESTION, SHORT_ANSWER = 64, 32  # tokens; uuids as keys make longer questions
_LARGE = {"lengths": (32_768, 65_536), "ratios": (2.0, 4.0, 6.0, 10.0), "prompts": 50, "batch": 1}
PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "model": None, "lengths": (1024,), "ratios": (2.0, 4.0, 8.0), "prompts": 2, "batch": 18,
        "new_tokens": 48,
    },
    "llama-3.1-8b": {"model": "meta-llama/Llama-3.1-8B-Instruct", **_LARGE},
    "llama-3.1-70b": {"model": "meta-llama/Llama-3.1-70B-Instruct", **_LARGE},
    "mistral-small-3.1-24b": {
        "model": "mistralai/Mistral-Small-3.1-24B-Instruct-2503", **_LARGE,
    },
}  # fmt: skip
TINY = Config(
    model="tiny", lengths=(700,), tasks=("niah_single_1", "vt"), ratios=(3.0,), prompts=2, batch=4,
    methods=("snapkv",), new_tokens=4,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Answer, score, report."""
    asked, config = config, settle(config)
    for label in config.methods:
        registry.make(label)  # an unknown method fails before a model is loaded
    read = official(config if config.quick else asked) if config.official else []
    loaded = equal_bytes.load(config.model, config.matmul)
    run.watch(ruler_report.scalars)
    if config.official:
        rows = [encode(loaded.tokenizer, limited(row, config.new_tokens)) for row in read]
        sets = {max((len(row.context_ids) for row in rows), default=0): rows}
    else:
        sets = {length: generated(config, loaded, length) for length in config.lengths}
    layers = len(loaded.model.windows)
    for length, questions in sets.items():
        answers.check_questions(questions, scoring.METRICS)
        if config.only is not None:
            questions = answers.only(questions, config.only)
        shape = answers.reference_shape(questions, loaded)
        arms = plan(config.methods, config.ratios, config.matched, shape, layers)
        for together in by_size(questions):
            contexts = len({row.context_ids for row in together})
            batch = -(-contexts // -(-contexts // config.batch))  # batches of one size
            own = dataclasses.replace(config, batch=batch)
            answers.sweep(own, run, loaded, together, arms, length, scoring.METRICS)
    ruler_report.report(config, run, loaded.name)


def settle(config: Config) -> Config:
    """Fill in what the preset decides, and refuse what makes no sense.

    Raises:
        ValueError: for an unknown task, or counts below 1.
    """
    unknown = [task for task in config.tasks if task not in ruler.TASKS]
    if unknown or not config.tasks:
        named = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"tasks: {named} must be one of {', '.join(ruler.TASKS)}.")
    chosen = PRESETS[config.preset] | ({"prompts": 2, "ratios": (4.0,)} if config.quick else {})
    fields = {name: value for name, value in chosen.items() if getattr(config, name) is None}
    if config.quick:
        left_out = ("streaming_llm", "random")
        fields["methods"] = tuple(m for m in config.methods if m not in left_out) or config.methods
    config = dataclasses.replace(config, **fields)
    for name in ("prompts", "batch", "new_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if not config.lengths or not config.ratios:
        raise ValueError("lengths and ratios must each hold at least one number.")
    return dataclasses.replace(config, ratios=tuple(float(ratio) for ratio in config.ratios))


def official(config: Config) -> list[Row]:
    """RULER's own prompts of the tasks that are asked for, so many of each as a flag says."""
    rows = ruler.read_official(config.official, chat=config.chat)
    tasks = {task: [row for row in rows if row.task == task] for task in config.tasks}
    return [row for found in tasks.values() for row in found[: config.prompts]]


def generated(config: Config, loaded: hub.Loaded, length: int) -> list[Encoded]:
    """Our own prompts of one length, all tasks."""
    return ruler.build_set(
        loaded.tokenizer, config.tasks, num_tokens=length, prompts=config.prompts,
        seed=config.seed, folder=config.folder, squad=config.squad, hotpotqa=config.hotpotqa,
        max_new_tokens=config.new_tokens,
    )  # fmt: skip


def by_size(questions: list[Encoded]) -> list[list[Encoded]]:
    """Short questions with short answers, with long answers, and long questions, shortest first.

    A batch is as wide as its longest question and takes as many steps as its longest answer.
    """
    parts: dict[tuple[bool, bool], list[Encoded]] = {}
    for row in sorted(questions, key=lambda row: len(row.question_ids)):
        size = len(row.question_ids) > SHORT_QUESTION, row.row.max_new_tokens > SHORT_ANSWER
        parts.setdefault(size, []).append(row)
    return [parts[size] for size in sorted(parts)]


def limited(row: Row, new_tokens: int | None) -> Row:
    """A row with at most so many new tokens."""
    if new_tokens is None:
        return row
    return row._replace(max_new_tokens=min(row.max_new_tokens, new_tokens))


if __name__ == "__main__":
    main(Config, run)
