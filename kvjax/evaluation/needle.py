"""Needle prompts of an exact token length, scored by teacher forcing of the answer.

A prompt is one chat turn in three parts: the context (chat header, introduction, haystack with its
needles), the question (with the end of the turn and an answer prefix that mirrors the needle's own
sentence) and the answer. A cache is compressed after the context (question-agnostic) or after the
context and the question (question-aware); question and answer then go in as one extend, and the
logits at the last question column and at all answer columns but the last predict the answer.

With four needles each has a key of its own and the question asks for the first ("multikey"). How
well a model answers depends on these sentences more than on most methods: report them with scores.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvjax.evaluation.chat import Tokenizer, chat_frame, encode_after, encode_prompt
from kvjax.evaluation.exact import columns_of
from kvjax.evaluation.text import sentences

INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. "
    "Memorize them: a question about one of them follows.\n\n"
)
ANSWER_PREFIX = "One of the special magic numbers for {key} is:"
MULTIKEY_ANSWER_PREFIX = "The special magic number for {key} is:"  # small models mix keys up less
ANSWER = " {value}"
SENTENCE_END = "."  # a needle is its answer prefix, its answer and this
SEPARATOR = "\n\n"  # ends the context, so that no token spans context and question
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"

_FIRST = "amber brisk calm daring eager faint gentle hollow ivory jolly keen lucid mellow noble"
_SECOND = "anchor basin candle dune ember falcon garden harbor island jungle kettle lantern meadow"


class NeedlePrompt(NamedTuple):
    """One prompt; columns count from the first token of the context.

    Attributes:
        context_ids: exactly `num_tokens` tokens, BOS included where the model takes one.
        question_ids: the question up to and with the answer prefix.
        answer_ids: the gold answer, such as " 1234567".
        keys: key of every needle; the first is asked for.
        values: value of every needle.
        spans: columns [start, stop) of every needle's sentence.
        depth: share of the haystack's tokens before the first needle, as asked for.
        haystack: "noise", "text" or a folder.
        task: name of the cell, such as "needle_text_7_multikey4".
        question: text of the question.
        answer_prefix: text that the model's turn begins with.
        answer: text of the value asked for.
        max_new_tokens: enough to generate the answer.
    """

    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    keys: tuple[str, ...]
    values: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    depth: float
    haystack: str
    task: str
    question: str
    answer_prefix: str
    answer: str
    max_new_tokens: int


def build(
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    depth: float,
    haystack: str | Path = "noise",
    digits: int = 7,
    num_needles: int = 1,
    seed: int = 0,
) -> NeedlePrompt:
    """Build a prompt whose context is exactly `num_tokens` long and holds every needle whole.

    Args:
        tokenizer: the model's.
        num_tokens: length of the context, chat header and BOS included, in tokens.
        depth: share of the haystack before the needle asked for, 0 to 1; it goes to the nearest
            end of a sentence. The others follow at equal distances, wrapping round.
        haystack: "noise" (neutral sentences, repeated), "text" (prose that every Python ships) or
            a folder of .txt files.
        digits: digits of a value; often a token each, so 3 is milder than 7.
        num_needles: needles with keys of their own.
        seed: picks keys, values and the slice of the haystack.

    Raises:
        ValueError: for an argument out of range, a context too short for the needles (with the
            minimum), or a tokenizer that does not give back the needle's text.
        FileNotFoundError: when a folder holds no text.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must be between 0 and 1.")
    if not 1 <= digits <= 64 or not 1 <= num_needles <= 16:
        raise ValueError(f"digits={digits} must be 1..64, num_needles={num_needles} 1..16.")
    source = sentences(haystack, seed)
    keys, values = _draw(random.Random(f"needle {seed}"), digits, num_needles, " ".join(source))
    form = ANSWER_PREFIX if num_needles == 1 else MULTIKEY_ANSWER_PREFIX
    sentence = form + ANSWER + SENTENCE_END
    needles = [sentence.format(key=k, value=v) for k, v in zip(keys, values, strict=True)]
    depths = [depth, *((depth + i / num_needles) % 1.0 for i in range(1, num_needles))]
    header, footer = chat_frame(tokenizer)
    context_ids = _context(tokenizer, header, source, needles, depths, num_tokens)

    text = tokenizer.decode(context_ids)
    for needle in needles:
        if text.count(needle) != 1:
            raise ValueError(
                f"{needle!r} stands {text.count(needle)} times in the decoded context; it must "
                "stand there once: the tokenizer does not give back the text it encodes."
            )
    # a model that takes no BOS may use the same token to begin a turn
    if tokenizer.add_bos and context_ids.count(tokenizer.bos_id) > 1:
        raise ValueError("the context holds more than one BOS; the chat template must add one.")

    question, prefix = QUESTION.format(key=keys[0]), form.format(key=keys[0])
    turn = question + footer + prefix
    question_ids = encode_after(tokenizer, SEPARATOR, turn)
    answer_ids = encode_after(tokenizer, prefix, ANSWER.format(value=values[0]))
    name = haystack if haystack in ("noise", "text") else "folder"
    task = f"needle_{name}_{digits}" + (f"_multikey{num_needles}" if num_needles > 1 else "")
    return NeedlePrompt(
        context_ids=tuple(context_ids),
        question_ids=tuple(question_ids),
        answer_ids=tuple(answer_ids),
        keys=keys,
        values=values,
        spans=tuple(locate(tokenizer, context_ids, needle) for needle in needles),
        depth=depth,
        haystack=str(haystack),
        task=task,
        question=question,
        answer_prefix=prefix,
        answer=values[0],
        max_new_tokens=len(answer_ids),
    )


def depth_grid(num_depths: int) -> tuple[float, ...]:
    """Return the middles of `num_depths` equal parts of a context."""
    return tuple((i + 0.5) / num_depths for i in range(num_depths))


def running_text(
    tokenizer: Tokenizer, num_tokens: int, seed: int = 0, folder: str | Path | None = None
) -> tuple[int, ...]:
    """Return `num_tokens` tokens of prose from a seeded place, BOS first where the model takes one.

    Args:
        tokenizer: the model's.
        num_tokens: length in tokens, at least 2.
        seed: picks the slice; texts longer than the source start it again.
        folder: .txt files to read instead of the prose that every Python ships.
    """
    if num_tokens < 2:
        raise ValueError(f"num_tokens={num_tokens} must be at least 2.")
    source = sentences("text" if folder is None else folder, seed)
    count = 1 + num_tokens // 8
    while True:
        text = " ".join(source[i % len(source)] for i in range(count))
        ids = encode_prompt(tokenizer, text)
        if len(ids) >= num_tokens:
            return tuple(ids[:num_tokens])
        count *= 2


def locate(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> tuple[int, int]:
    """Return the columns [start, stop) of the first place where `ids` decode to `text`.

    Raises:
        ValueError: when the text is not there.
    """
    if text not in tokenizer.decode(ids):
        raise ValueError(f"{text!r} is not in the decoded tokens.")
    stop = columns_of(tokenizer, ids, text)
    low, high = 0, stop - 1  # the greatest start with the text after it
    while low < high:
        middle = (low + high + 1) // 2
        inside = text in tokenizer.decode(ids[middle:stop])
        low, high = (middle, high) if inside else (low, middle - 1)
    return low, stop


def _context(
    tokenizer: Tokenizer,
    header: str,
    source: list[str],
    needles: list[str],
    depths: list[float],
    num_tokens: int,
) -> list[int]:
    """Fill the haystack sentence by sentence, then cut what is too much off its first sentence."""
    lengths = {s: len(tokenizer.encode(" " + s)) for s in dict.fromkeys(source[:1])}

    def tokens(index: int) -> int:
        sentence = source[index % len(source)]
        if sentence not in lengths:
            lengths[sentence] = len(tokenizer.encode(" " + sentence))
        return lengths[sentence]

    def encode(first: int, count: int) -> list[int]:
        before = [0]  # tokens of the haystack before each end of a sentence
        for i in range(count):
            before.append(before[-1] + tokens(first + i))
        placed: dict[int, list[str]] = {}
        for needle, depth in zip(needles, depths, strict=True):
            place = min(range(count + 1), key=lambda i: abs(before[i] - depth * before[-1]))
            placed.setdefault(place, []).append(needle)
        parts = list(placed.get(0, []))
        for i in range(count):
            parts += [source[(first + i) % len(source)], *placed.get(i + 1, [])]
        return encode_prompt(tokenizer, header + INTRODUCTION + " ".join(parts) + SEPARATOR)

    ids = encode(0, 0)
    if len(ids) > num_tokens:
        raise ValueError(
            f"num_tokens={num_tokens} must be at least {len(ids)} for {len(needles)} needles "
            "with this tokenizer's chat header."
        )
    first = count = 0
    estimate = len(ids)
    while estimate < num_tokens:
        estimate += tokens(count)
        count += 1
    ids = encode(0, count)
    while len(ids) < num_tokens:
        count += 1
        ids = encode(0, count)
    while len(ids) > num_tokens:
        excess = len(ids) - num_tokens
        start, stop = locate(tokenizer, ids, source[first % len(source)])
        if excess <= stop - start:
            return ids[:start] + ids[start + excess :]
        first, count = first + 1, count - 1
        ids = encode(first, count)
    return ids


def _draw(
    rng: random.Random, digits: int, num_needles: int, text: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Draw keys and values that differ and that the haystack does not hold."""
    pairs = [f"{a}-{b}" for a in _FIRST.split() for b in _SECOND.split()]
    keys = rng.sample([pair for pair in pairs if pair not in text], num_needles)
    values: list[str] = []
    for _ in range(1000 * num_needles):
        value = str(rng.randrange(10 ** (digits - 1), 10**digits))
        if value not in text and value not in values:
            values.append(value)
        if len(values) == num_needles:
            return tuple(keys), tuple(values)
    raise ValueError(f"the haystack holds nearly every number of digits={digits}; use more digits.")
