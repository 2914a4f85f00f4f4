"""The prompts of AnchorKV's studies: needles, conversations, texts of four kinds, agents' turns.

Everything is drawn from a seed and needs no download: prose and code are what every Python ships,
tables and the sentences in other languages are filled in at random.
"""

import argparse
import csv
import fractions
import heapq
import inspect
import io
import json
import random
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.ablation_batch import Question
from kvjax.evaluation import needle
from kvjax.evaluation.chat import chat_frame, encode_after, encode_prompt

CONTENTS = ("prose", "code", "table", "languages")
_MODULES = (argparse, heapq, statistics, textwrap, fractions, json.decoder)
_PATTERNS = (
    "Im {n}. Jahr bringt {a} den Korb mit {b} zum Markt und erzählt von der Reise nach {c}.",
    "Am Abend liest {a} einen Brief aus {c}, in dem {b} nur am Rande erwähnt wird.",
    "Pendant {n} jours, {a} garde {b} dans la cuisine et rêve d'un voyage à {c}.",
    "Le matin, {a} écrit une longue lettre à {c} pour demander encore un peu de {b}.",
    "Durante {n} semanas {a} guarda {b} en la mesa y piensa en volver a {c}.",
    "Por la noche {a} cuenta una historia sobre {c} mientras todos prueban {b}.",
    "Per {n} mesi {a} vende {b} nella piazza e ricorda la strada verso {c}.",
)
_PEOPLE = "Anna Bruno Clara Dario Elena Fabian Greta Hugo Ines Jonas Katja Luca".split()
_GOODS = "miel käse olives brot naranjas tomates nüsse farina sal kirschen arroz pesce".split()
_PLACES = "Lyon Bremen Sevilla Parma Genf Nantes Bilbao Turin Graz Toledo Basel Dijon".split()


def needles(
    tokenizer: Any, length: int, each: int, formats: Sequence[str], seed: int
) -> list[Question]:
    """Single needles at depths on a grid, the question asked after compression.

    Args:
        tokenizer: the model's.
        length: of a context, tokens.
        each: prompts a format.
        formats: haystack_digits.
        seed: of keys, values and haystacks.
    """
    made = []
    for name in formats:
        haystack, _, digits = name.rpartition("_")
        for i, depth in enumerate(needle.depth_grid(each)):
            built = needle.build(
                tokenizer, num_tokens=length, depth=depth, haystack=haystack, digits=int(digits),
                seed=seed + i,
            )  # fmt: skip
            follows = built.question_ids + built.answer_ids
            made.append(Question(name, i, built.context_ids, follows, len(built.question_ids)))
    return made


def continuations(tokenizer: Any, length: int, later: int, count: int, seed: int) -> list[Question]:
    """Running prose: what follows a context is its own next tokens, the last 16 of them scored."""
    made = []
    for i in range(count):
        ids = needle.running_text(tokenizer, length + later, seed + i)
        made.append(Question("text", i, ids[:length], ids[length:], max(later - 16, 1)))
    return made


def conversations(
    tokenizer: Any, length: int, each: int, seed: int, digits: int = 7
) -> list[Question]:
    """One deep needle of three, asked for in three ways; contexts differ in what is compressed.

    "end of context": compression comes before the question, the window is on the haystack's end.
    "question": compression comes after the question, the window is on it. "turn 1": compression
    comes after a first question and answer about another needle; a third needle is asked for in
    turn 2, the deep one in turn 3.
    """
    _, asked = chat_frame(tokenizer)
    parts = _between_turns(tokenizer)
    made = []
    for i in range(each):
        depth = 0.05 + 0.4 * i / max(each - 1, 1)
        built = needle.build(
            tokenizer, num_tokens=length, depth=depth, digits=digits, num_needles=3, seed=seed + i
        )

        def turn(number, built=built):
            prefix = needle.MULTIKEY_ANSWER_PREFIX.format(key=built.keys[number])
            return needle.QUESTION.format(key=built.keys[number]) + asked + prefix

        def answered(number, built=built):
            answer = needle.ANSWER.format(value=built.values[number]) + needle.SENTENCE_END
            return turn(number) + answer + parts

        context, answer = built.context_ids, built.answer_ids
        ask = built.question_ids
        made.append(Question("end of context", i, context, ask + answer, len(ask)))
        made.append(Question("question", i, context + ask[:-1], ask[-1:] + answer, 1))
        before = needle.SEPARATOR
        first = tuple(encode_after(tokenizer, before, answered(1)))
        then = tuple(encode_after(tokenizer, before + answered(1), answered(2) + turn(0)))
        made.append(Question("turn 1", i, context + first, then + answer, len(then)))
    return made


def piling(tokenizer: Any, length: int, later: int, each: int, seed: int) -> list[Question]:
    """A needle in the context, then `later` tokens that pile up, then the question about it.

    "long answer": prose goes on; "agent": tool calls and their results alternate.
    """
    _, asked = chat_frame(tokenizer)
    parts = _between_turns(tokenizer)
    made = []
    for task in ("long answer", "agent"):
        for i, depth in enumerate(needle.depth_grid(each)):
            built = needle.build(
                tokenizer, num_tokens=length, depth=depth, haystack="text", seed=seed + i
            )
            start = "Go on with what you read." + asked if task == "long answer" else asked
            filler = needle.running_text(tokenizer, later, seed + 100 + i)
            if task == "agent":
                filler = encode_after(tokenizer, start, _calls(seed + i, later, asked, parts))
            begin = encode_after(tokenizer, needle.SEPARATOR, start)
            question = tuple(encode_after(tokenizer, "", parts)) + built.question_ids
            grown = (*begin, *filler)[:later]
            made.append(Question(
                task, i, built.context_ids, grown + question + built.answer_ids,
                later + len(question),
            ))  # fmt: skip
    return made


def texts(
    tokenizer: Any, content: str, length: int, count: int, seed: int
) -> list[tuple[int, ...]]:
    """Token ids of `count` texts of one kind, each exactly `length` tokens.

    Args:
        tokenizer: the model's.
        content: of `CONTENTS`.
        length: tokens.
        count: texts.
        seed: draws them.

    Raises:
        ValueError: for an unknown kind.
    """
    if content not in CONTENTS:
        raise ValueError(f"content={content!r} must be one of {CONTENTS}.")
    if content == "prose":
        return [needle.running_text(tokenizer, length, seed + i) for i in range(count)]
    write = {"code": _code, "table": _table, "languages": _languages}[content]
    made = []
    for i in range(count):
        size = 8 * length
        ids = encode_prompt(tokenizer, write(seed + i, size))
        if len(ids) < length:
            raise ValueError(f"a text of {content} has {len(ids)} tokens, not {length}.")
        made.append(tuple(ids[:length]))
    return made


def _between_turns(tokenizer: Any) -> str:
    """What the chat template writes between an answer and the next question."""
    roles = ("user", "one"), ("assistant", "@@two@@"), ("user", "@@three@@")
    text = tokenizer.chat([{"role": role, "content": content} for role, content in roles])
    return text.split("@@two@@")[1].split("@@three@@")[0]


def _calls(seed: int, size: int, asked: str, parts: str) -> str:
    draw, text = random.Random(f"agent {seed}"), ""
    while len(text) < 8 * size:
        place, day = draw.choice(_PLACES), draw.randrange(1, 29)
        call = {"tool": "weather", "place": place, "day": f"2024-06-{day:02d}"}
        result = {
            "celsius": draw.randrange(8, 33), "wind_kmh": draw.randrange(60),
            "sky": draw.choice(("clear", "cloudy", "rain")),
        }  # fmt: skip
        text += json.dumps(call) + parts + json.dumps(result) + asked
    return text


def _code(seed: int, size: int) -> str:
    source = inspect.getsource(_MODULES[seed % len(_MODULES)])
    start = random.Random(f"code {seed}").randrange(len(source) // 2)
    start = source.find("\n", start) + 1
    text = source[start:] + source[:start]
    return (text * (1 + size // len(text)))[:size]


def _table(seed: int, size: int) -> str:
    draw, out = random.Random(f"table {seed}"), io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("order", "customer", "city", "article", "pieces", "price", "paid"))
    while out.tell() < size:
        rows.writerow((
            draw.randrange(10_000, 99_999), draw.choice(_PEOPLE), draw.choice(_PLACES),
            draw.choice(_GOODS), draw.randrange(1, 40), f"{draw.uniform(1, 90):.2f}",
            draw.choice(("yes", "no")),
        ))  # fmt: skip
    return out.getvalue()


def _languages(seed: int, size: int) -> str:
    draw, parts = random.Random(f"languages {seed}"), []
    while sum(map(len, parts)) < size:
        a, b, c = draw.choice(_PEOPLE), draw.choice(_GOODS), draw.choice(_PLACES)
        parts.append(draw.choice(_PATTERNS).format(a=a, b=b, c=c, n=draw.randrange(2, 90)) + " ")
    return "".join(parts)
