"""Where in a context, and at which length, does each method lose a number at equal bytes?

    python -m experiments.needle_grid                # heat maps: depth down, length across
    python -m experiments.needle_grid --ratios 4 10  # a figure each
    python -m experiments.needle_grid --digits 64    # a key of 64 digits, for larger models
    python -m experiments.needle_grid --turns 3      # compressed at turn 1, asked for in turn 3

Each prompt is prefilled once and compressed by every method to the same measured bytes. With
--turns n the context holds n numbers and turn i asks for one of them. It is compressed after the
question of turn 1, which is what eviction methods then see; the number of the grid is asked for in
turn n. Beside it stands the same context compressed after the question for that very number.

Score: digits of the generated number that stand in their place, over those of the answer. A wrong
number of the right length gets about 10 % by chance. Teacher forcing of the answer is beside it.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from experiments import answers, equal_bytes, needle_grid_report
from experiments.ratio_arms import at_ratios, check
from experiments.runner import Run, main
from kvjax.evaluation import needle
from kvjax.evaluation.chat import encode_after
from kvjax.evaluation.rows import Encoded, Row

AGNOSTIC, ASKED = "after_context", "after_question"
REPEATED = 24  # tokens beside the answer's: some answers repeat the question's sentence first


@dataclass(frozen=True)
class Config:
    """Needles over depth and length at equal measured bytes."""

    lengths: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--length"])] = (512, 1024, 2048)
    """context lengths, tokens"""
    depths: int = 5
    """depths of the grid: the middles of so many equal parts of the context"""
    prompts: int = 2
    """numbers hidden at each depth, each in a context of every length"""
    digits: int = 7
    """digits of the number; 64 is customary for larger models"""
    haystack: str = "text"
    """noise, text (prose that every Python ships) or a folder of .txt files"""
    turns: int = 1
    """turns of the conversation; the number is asked for in the last"""
    only: str | None = None
    """JSONL of samples (experiments.negative_samples writes such sets): these prompts alone"""
    aware: bool = False
    """with one turn: compress after the question instead of before it"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    methods: tuple[str, ...] = ("anchorkv", "snapkv", "streaming_llm", "h2o", "kivi", "random")
    """methods: name, preset:name, name(option=value), evictor+quantizer; "full" is always there"""
    ratios: tuple[float, ...] = (4.0,)
    """full bfloat16 bytes over stored bytes"""
    batch: int = 5
    """prompts that are prefilled together"""
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
    quick: bool = False
    """two lengths, three depths, one prompt a cell, one ratio"""
    seed: int = 42
    """of numbers and haystacks"""


TINY = Config(
    lengths=(300,), depths=2, prompts=1, digits=3, haystack="noise", model="tiny",
    methods=("snapkv", "kivi"), ratios=(3.0,), batch=2,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Answer every cell with every method, then make heat maps and tables from the rows."""
    config = settle(config)
    check(config.methods, config.ratios)  # fails before a model is loaded
    loaded = equal_bytes.load(config.model, config.matmul)
    run.watch(needle_grid_report.scalars)
    absent = []
    for length in config.lengths:
        questions = prompts(config, loaded.tokenizer, length)
        shape = answers.reference_shape(questions, loaded)
        planned = at_ratios(config.methods, config.ratios, shape, len(loaded.model.windows))
        absent += planned.absent
        for aware in (True, False):
            own = [q for q in questions if (q.row.task == ASKED) == aware]
            if own:
                form = dataclasses.replace(config, aware=aware)
                answers.sweep(form, run, loaded, own, planned.arms, length, SCORES)
    needle_grid_report.report(config, run, loaded.name, absent)


def settle(config: Config) -> Config:
    """Check what the command line cannot, and apply `quick`.

    Raises:
        ValueError: for a number out of range, or --aware with several turns.
    """
    for name, least in (("depths", 1), ("prompts", 1), ("turns", 1), ("batch", 1)):
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} must be at least {least}.")
    if not config.lengths:
        raise ValueError("lengths must name at least one context length.")
    if config.turns > 1 and config.aware:
        raise ValueError("--turns compresses after a question anyway: leave --aware out.")
    if config.quick:
        config = dataclasses.replace(
            config, lengths=config.lengths[:2], depths=3, prompts=1, ratios=config.ratios[:1],
            batch=3,
        )  # fmt: skip
    return config


def prompts(config: Config, tokenizer: Any, length: int) -> list[Encoded]:
    """The prompts of one length: every depth, each in the forms that are compared."""
    found = []
    for at, depth in enumerate(needle.depth_grid(config.depths)):
        for i in range(config.prompts):
            seed = config.seed + at * config.prompts + i  # the same number at every length
            built = needle.build(
                tokenizer, num_tokens=length, depth=depth, haystack=config.haystack,
                digits=config.digits, num_needles=config.turns, seed=seed,
            )  # fmt: skip
            name = needle_grid_report.name_of(config, depth, seed)
            if config.turns == 1:
                form = ASKED if config.aware else AGNOSTIC
                found.append(encoded(built, form, name, built.question_ids))
                continue
            found.append(encoded(built, ASKED, name, built.question_ids))
            talk, first = conversation(tokenizer, built)
            found.append(encoded(built, later(config.turns), name, talk, first - 1))
    if config.only is not None:  # a prompt in all its forms: they are compared
        kept = {question.row.id for question in answers.only(found, config.only)}
        found = [question for question in found if question.row.id in kept]
    return found


def later(turns: int) -> str:
    """Name of the form whose question comes in a later turn than the compression."""
    return f"after_turn_1_of_{turns}"


def encoded(
    built: needle.NeedlePrompt, form: str, name: str, question: Sequence[int], cut: int = 0
) -> Encoded:
    """A prompt whose context takes `cut` tokens of what follows it along."""
    row = Row(
        id=name,
        context="",
        question=built.question,
        answer_prefix=built.answer_prefix,
        answer=(built.answer,),
        max_new_tokens=built.max_new_tokens + REPEATED,
        task=form,
        metric="digits_in_place",
    )
    return Encoded(row, built.context_ids + tuple(question[:cut]), tuple(question[cut:]))


def conversation(tokenizer: Any, built: needle.NeedlePrompt) -> tuple[tuple[int, ...], int]:
    """What follows the context when the other numbers are asked for first, with their answers.

    The answers of earlier turns are the right ones, so that every method decodes the same tokens.

    Returns:
        The tokens up to the last answer's prefix, and how many of them are turn 1's question.
    """
    order = [*range(1, len(built.keys)), 0]
    turns = [
        (
            needle.QUESTION.format(key=built.keys[i]),
            needle.MULTIKEY_ANSWER_PREFIX.format(key=built.keys[i]),
            needle.ANSWER.format(value=built.values[i]) + needle.SENTENCE_END,
        )
        for i in order
    ]
    # the chat template writes what stands between turns; the first turn's header is the context's
    mark = "@@context@@"
    messages = [{"role": "user", "content": mark + turns[0][0]}]
    for (_, prefix, answer), (question, _, _) in zip(turns, turns[1:], strict=False):
        messages.append({"role": "assistant", "content": prefix + answer})
        messages.append({"role": "user", "content": question})
    whole = tokenizer.chat(messages, add_generation_prompt=True).partition(mark)[2] + turns[-1][1]
    first = whole[: whole.index(turns[0][1]) + len(turns[0][1])]
    ids = encode_after(tokenizer, needle.SEPARATOR, whole)
    return tuple(ids), len(encode_after(tokenizer, needle.SEPARATOR, first))


def digits_in_place(prediction: str, row: Row) -> float:
    """Share of the answer's digits that the first number of a text has in the same place."""
    found = re.search(r"\d[\d,]*", prediction)
    said, wanted = found[0].replace(",", "") if found else "", row.answer[0]
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / len(wanted)


SCORES = {"digits_in_place": digits_in_place}


if __name__ == "__main__":
    main(Config, run)
