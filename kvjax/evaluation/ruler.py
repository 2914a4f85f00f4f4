"""RULER-style tasks of an exact token length, for any tokenizer, and RULER's own prompts.

The 13 tasks have the structure of NVIDIA/RULER (Hsieh et al. 2024, arXiv 2404.06654): numbers of
keys, values, queries, hops and chains, kinds of keys, values and haystacks, frequencies, few-shot
examples, limits of new tokens, scoring. The wording is our own, so a score is "RULER-style" and
compares methods here; for scores that compare with others' run RULER's own files
(`read_official`).

What differs: the haystack of natural text is prose that every Python ships, or the user's folder,
instead of essays; without a file of SQuAD or HotpotQA the documents of qa_1 and qa_2 are synthetic,
and the task is named so; a context has exactly `num_tokens` tokens, chat header and BOS included,
while RULER's length includes the question and the tokens to generate. A short context holds fewer
distractors, documents and words; below 4,096 tokens cwe has RULER's lower frequencies.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.evaluation import needle, ruler_drafts, ruler_qa
from kvjax.evaluation.chat import Tokenizer, chat_frame, encode_after
from kvjax.evaluation.exact import fit
from kvjax.evaluation.rows import Encoded, Row, read_jsonl
from kvjax.evaluation.ruler_drafts import CommonWords, Draft, FrequentWords, Needles, Tracing


@dataclasses.dataclass(frozen=True)
class Answering:
    """A question among documents; see `ruler_qa`."""

    hops: int  # 1: SQuAD's format, 2: HotpotQA's


class Task(NamedTuple):
    """One of the 13 tasks."""

    setting: Needles | Tracing | CommonWords | FrequentWords | Answering
    max_new_tokens: int  # RULER's limit
    metric: str = "string_match_all"


TASKS = {
    "niah_single_1": Task(Needles("noise"), 128),
    "niah_single_2": Task(Needles("text"), 128),
    "niah_single_3": Task(Needles("text", value_kind="uuids"), 128),
    "niah_multikey_1": Task(Needles("text", keys=4), 128),
    "niah_multikey_2": Task(Needles("needles"), 128),
    "niah_multikey_3": Task(Needles("needles", "uuids", "uuids"), 128),
    "niah_multivalue": Task(Needles("text", values=4), 128),
    "niah_multiquery": Task(Needles("text", keys=4, queries=4), 128),
    "vt": Task(Tracing(), 30),
    "cwe": Task(CommonWords(), 120),
    "fwe": Task(FrequentWords(), 50),
    "qa_1": Task(Answering(1), 32, "string_match_part"),
    "qa_2": Task(Answering(2), 32, "string_match_part"),
}
_DRAFTS: dict[type, Callable[..., Draft]] = {
    Needles: ruler_drafts.needles,
    Tracing: ruler_drafts.tracing,
    CommonWords: ruler_drafts.common_words,
    FrequentWords: ruler_drafts.frequent_words,
}


def build(
    tokenizer: Tokenizer,
    task: str,
    *,
    num_tokens: int,
    number: int = 0,
    seed: int = 0,
    folder: str | Path | None = None,
    questions: str | Path | None = None,
    max_new_tokens: int | None = None,
) -> Encoded:
    """Build one prompt of a task.

    Args:
        tokenizer: the model's.
        task: one of `TASKS`.
        num_tokens: exact length of the context, chat header and BOS included, in tokens.
        number: of the prompt within the task; each has other keys, values, words, documents.
        seed: of the whole set.
        folder: .txt files for haystacks of natural text; None is prose that every Python ships.
        questions: JSON of SQuAD (qa_1) or HotpotQA (qa_2); None is a synthetic set.
        max_new_tokens: at most so many new tokens; None is RULER's limit.

    Returns:
        The row and its tokens. `row.extra` holds "structure" (counts of keys, distractors, hops,
        frequencies), "facts" (what stands in the context once, whole), "gold" (all references as a
        perfect model would write them) and "filler" (tokens that the exact length took).

    Raises:
        ValueError: for an unknown task, a context too short (with the minimum) or longer than the
            source fills, or a tokenizer that does not give back the text.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} must be one of {', '.join(TASKS)}.")
    own = TASKS[task]
    name = task
    if isinstance(own.setting, Answering):
        found = ruler_qa.documents(own.setting.hops, questions)
        draft = ruler_qa.draft(found, number, seed)
        if found.source == "synthetic":
            name = f"{task}_synthetic"
    else:
        make = _DRAFTS[type(own.setting)]
        draft = make(own.setting, f"{seed} {number}", num_tokens, folder)
    header, footer = chat_frame(tokenizer)
    try:
        fitted = fit(
            tokenizer, header=header, introduction=draft.introduction, body=draft.body,
            end=needle.SEPARATOR, filler=draft.filler, num_tokens=num_tokens, least=draft.least,
            most=draft.most,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{task}: {error}") from None
    for fact in draft.facts:
        if fitted.text.count(fact) != 1:
            raise ValueError(
                f"{task}: {fact!r} stands {fitted.text.count(fact)} times in the decoded context;"
                " it must stand there once: the tokenizer does not give back the text it encodes,"
                " or the source repeats itself."
            )
    limit = own.max_new_tokens if max_new_tokens is None else max_new_tokens
    row = Row(
        id=f"{seed}-{number}",
        context=fitted.text,
        question=draft.question,
        answer_prefix=draft.answer_prefix,
        answer=draft.answer,
        max_new_tokens=min(limit, own.max_new_tokens),
        task=name,
        metric=own.metric,
        extra={
            "structure": dict(draft.structure(fitted.units)),
            "facts": draft.facts,
            "gold": draft.gold,
            "filler": fitted.filler,
        },
    )
    follows = draft.question + footer + draft.answer_prefix
    return Encoded(row, fitted.ids, tuple(encode_after(tokenizer, needle.SEPARATOR, follows)))


def build_set(
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    num_tokens: int,
    prompts: int,
    seed: int = 0,
    folder: str | Path | None = None,
    squad: str | Path | None = None,
    hotpotqa: str | Path | None = None,
    max_new_tokens: int | None = None,
) -> list[Encoded]:
    """Build `prompts` prompts of each task; arguments as for `build`."""
    sources = {"qa_1": squad, "qa_2": hotpotqa}
    return [
        build(
            tokenizer, task, num_tokens=num_tokens, number=number, seed=seed, folder=folder,
            questions=sources.get(task), max_new_tokens=max_new_tokens,
        )
        for task in tasks
        for number in range(prompts)
    ]  # fmt: skip


def spans(tokenizer: Tokenizer, encoded: Encoded) -> list[tuple[int, int]]:
    """Columns [start, stop) of every fact of a prompt, in the order of `extra["facts"]`."""
    return [
        needle.locate(tokenizer, encoded.context_ids, fact) for fact in encoded.row.extra["facts"]
    ]


# Where the question begins in RULER's own prompts: the last of these that a prompt holds.
OFFICIAL_QUESTIONS = (
    "What is the special magic ", "What are all the special magic ", "Question: ",
    "Answer the question based on the given documents.",
)  # fmt: skip


def read_official(
    path: str | Path, task: str | None = None, *, chat: bool = False, marker: str | None = None
) -> list[Row]:
    """Read prompts that RULER's own scripts wrote, a line each: index, input, outputs, length.

    The input is one text; it is cut where its question begins, so that context + question is the
    input verbatim, and the prompt's tokens are those of the input. `answer_prefix`, which newer
    versions of RULER keep apart, follows.

    Args:
        path: .jsonl file; or RULER's folder of them, <task>/validation.jsonl.
        task: one of `TASKS`; None takes it from the name of the file or its folder.
        chat: put the input into the model's chat template; False runs it as it is.
        marker: text that the question begins with; None: that of RULER's prompts, or the last line.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a missing field, or a task that is not known.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = sorted([*path.glob("*/validation.jsonl"), *path.glob("*.jsonl")])
        if not files:
            raise FileNotFoundError(f"{path} holds no <task>/validation.jsonl or <task>.jsonl.")
        return [row for file in files for row in read_official(file, task, chat=chat,
                                                               marker=marker)]  # fmt: skip
    if not path.is_file():
        raise FileNotFoundError(f"{path} is neither a .jsonl file nor a folder of them.")
    if task is None:
        named = [name for name in (path.parent.name, path.name.split(".")[0]) if name in TASKS]
        if not named:
            raise ValueError(
                f"{path}: neither file nor folder is named like a task ({', '.join(TASKS)}); name"
                " the task."
            )
        task = named[-1]
    if task not in TASKS:
        raise ValueError(f"task {task!r} must be one of {', '.join(TASKS)}.")
    rows = []
    for number, line in enumerate(read_jsonl(path), 1):
        missing = [field for field in ("index", "input", "outputs") if field not in line]
        if missing:
            raise ValueError(f"{path}, row {number}: has no {', '.join(missing)}.")
        if not isinstance(line["input"], str) or not isinstance(line["outputs"], list):
            raise ValueError(f"{path}, row {number}: input must be text and outputs a list.")
        rows.append(_official_row(line, task, chat, marker))
    return rows


def _official_row(line: dict[str, Any], task: str, chat: bool, marker: str | None) -> Row:
    text = line["input"]
    places = [text.rfind(mark) for mark in ((marker,) if marker else OFFICIAL_QUESTIONS)]
    at = max(places)
    if at <= 0:
        at = text.rstrip().rfind("\n") + 1
    own = TASKS[task]
    return Row(
        id=str(line["index"]),
        context=text[:at],
        question=text[at:],
        answer_prefix=str(line.get("answer_prefix", "")),
        answer=tuple(str(output) for output in line["outputs"]),
        max_new_tokens=own.max_new_tokens,
        task=task,
        chat=chat,
        metric=own.metric,
        extra={"length": line.get("length"), "source": "NVIDIA/RULER"},
    )
