"""RULER's retrieval, tracing and aggregation tasks before any tokenizer: parts of a prompt.

A draft's `body(n)` is the text of n units (sentences, assignments' lines, words), so that a context
can be filled to any length; everything else is fixed by the seed.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import zeta

from kvjax.evaluation import text
from kvjax.evaluation.ruler_words import all_words, distinct

SHORT = 4096  # tokens of context below which RULER lowers the frequencies of common words


class Draft(NamedTuple):
    """A prompt whose length is still open."""

    introduction: str
    body: Callable[[int], str]
    filler: str
    question: str
    answer_prefix: str
    answer: tuple[str, ...]
    gold: str  # what a perfect model would write after the prefix
    facts: tuple[str, ...]  # stand in the context once each, whole
    structure: Callable[[int], Mapping[str, Any]]  # counts, for so many units
    least: int = 1
    most: int | None = None


@dataclass(frozen=True)
class Needles:
    """Keys with values hidden in a haystack.

    Source: NVIDIA/RULER, scripts/synthetic.yaml and scripts/data/synthetic/niah.py.
    """

    haystack: str  # "noise", "text" (RULER: essays) or "needles", which are pairs nobody asks for
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1  # of each key
    queries: int = 1  # keys that the question names


@dataclass(frozen=True)
class Tracing:
    """Chains of assignments in noise; the question asks for all variables of the first chain.

    Source: NVIDIA/RULER, scripts/data/synthetic/variable_tracking.py.
    """

    chains: int = 1
    hops: int = 4


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which some words are more frequent than all others, with an example.

    Source: NVIDIA/RULER, scripts/data/synthetic/common_words_extraction.py; below 4,096 tokens the
    frequencies are its lower ones: 6 and 1, and an example of 20 words with 3 and 1.
    """

    common: int = 10
    frequency: int = 30
    uncommon_frequency: int = 3
    short: tuple[int, int] = (6, 1)
    example: tuple[int, int, int] = (40, 10, 3)  # words, frequency, uncommon frequency
    short_example: tuple[int, int, int] = (20, 3, 1)


@dataclass(frozen=True)
class FrequentWords:
    """Code words whose frequencies follow a zeta distribution; the most frequent one is dots.

    Source: NVIDIA/RULER, scripts/data/synthetic/freq_words_extraction.py: a vocabulary of one word
    for 50 tokens of context, six letters each, count of rank k: floor(n k^-alpha / zeta(alpha)).
    """

    alpha: float = 2.0
    letters: int = 6
    tokens_per_word: int = 50
    wanted: int = 3


_NOUNS = {"numbers": "number", "words": "word", "uuids": "code"}


def needles(task: Needles, seed: str, num_tokens: int, folder: str | Path | None) -> Draft:
    """Draft a retrieval task; `folder` holds .txt files for its haystack of natural text."""
    rng = random.Random(f"ruler needles {task} {seed}")
    noun, taken = _NOUNS[task.value_kind], set()
    keys = list(islice(distinct(rng, task.key_kind, taken), max(task.keys, task.queries)))
    values = [list(islice(distinct(rng, task.value_kind, taken), task.values)) for _ in keys]
    form = "The secret {noun} for {key} is: {value}."
    if task.values > 1:
        form = "One secret {noun} for {key} is: {value}."

    def sentence(key, value):
        return form.format(noun=noun, key=key, value=value)

    facts = [
        sentence(key, value) for key, found in zip(keys, values, strict=True) for value in found
    ]
    asked = rng.sample(range(len(keys)), task.queries)
    rng.shuffle(facts)
    depths = sorted(rng.random() for _ in facts)
    if task.haystack == "needles":
        others = random.Random(f"ruler distractors {task} {seed}")
        streams = (distinct(others, kind, taken) for kind in (task.key_kind, task.value_kind))
        source = _growing(sentence(key, value) for key, value in zip(*streams, strict=True))
        joint, filler = "\n", text.NOISE[0]
    else:
        found = text.sentences(folder if task.haystack == "text" and folder else task.haystack,
                               seed)  # fmt: skip
        source = _growing(cycle(found))
        joint, filler = " ", " ".join(found[-3:])

    def body(units):
        return joint.join(_insert(source(units), facts, depths))

    names = _listing([keys[i] for i in asked])
    answer = tuple(
        fact[len(sentence(keys[i], "")) - 1 : -1]  # a key's values in the order of the text
        for i in asked for fact in facts if fact.startswith(sentence(keys[i], "")[:-1])
    )  # fmt: skip
    if len(answer) == 1:
        question = f"What is the secret {noun} for {names} in the text above?"
        prefix, gold = f"The secret {noun} for {names} is:", answer[0]
    else:
        question = f"What are all the secret {noun}s for {names} in the text above?"
        prefix = f"The secret {noun}s for {names} are:\n1."  # small models write a list or nothing
        gold = "\n".join(f"{i}. {value}" for i, value in enumerate(answer, 1))[3:]
    several = len(facts) > 1 or task.haystack == "needles"
    hidden = f"Secret {noun}s are" if several else f"A secret {noun} is"

    def structure(units):
        return {
            "haystack": task.haystack, "keys": len(keys), "values": task.values,
            "queries": task.queries, "needles": len(facts),
            "distractors": units if task.haystack == "needles" else len(facts) - len(answer),
            "key_kind": task.key_kind, "value_kind": task.value_kind,
        }  # fmt: skip

    return Draft(
        f"{hidden} hidden in the text below. Remember {'them' if several else 'it'}.\n\n",
        body, filler, question, prefix, answer, gold, tuple(facts), structure,
    )  # fmt: skip


def tracing(task: Tracing, seed: str, num_tokens: int, folder: str | Path | None) -> Draft:
    """Draft a variable-tracking task, with one solved example of three-letter variables."""
    rng = random.Random(f"ruler tracing {task} {seed}")
    noise, taken = text.sentences("noise", seed), set()

    def chain(letters):
        names = []
        while len(names) <= task.hops:
            name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=letters))
            if name not in taken:
                taken.add(name)
                names.append(name)
        value = str(rng.randint(10_000, 99_999))
        while value in taken:
            value = str(rng.randint(10_000, 99_999))
        taken.add(value)
        lines = [f"SET {names[0]} = {value}"]
        lines += [f"SET {name} = {before}" for before, name in zip(names, names[1:], strict=False)]
        return names, value, lines

    def lines(units, chains, depths):
        found = list(islice(cycle(noise), units))
        placed = sorted(
            (depth, line) for own, places in zip(chains, depths, strict=True)
            for depth, line in zip(places, own[2], strict=True)
        )  # fmt: skip
        return "\n".join(_insert(found, [line for _, line in placed], [d for d, _ in placed]))

    def ask(value):
        return (
            f"Which {task.hops + 1} variables hold the value {value} in the text above, directly "
            "or through other variables?",
            f"The {task.hops + 1} variables that hold the value {value} are:",
        )

    def places():
        return sorted(rng.random() for _ in range(task.hops + 1))

    def draw_chains(letters):
        made = [chain(letters) for _ in range(task.chains)]
        return made, [places() for _ in made]

    example = draw_chains(3)
    chains, depths = draw_chains(5)
    shown = "Assignments of variables are hidden in the text below. Follow them.\n\n"
    question, prefix = ask(example[0][0][1])
    solved = f"{question}\n{prefix} {' '.join(example[0][0][0])}\n\n"
    names, value, _ = chains[0]
    question, prefix = ask(value)

    def structure(units):
        return {
            "haystack": "noise", "chains": task.chains, "hops": task.hops,
            "variables": task.chains * (task.hops + 1), "examples": 1,
        }  # fmt: skip

    return Draft(
        f"{shown}{lines(5, *example)}\n\n{solved}Now another text.\n",
        lambda units: lines(units, chains, depths), noise[-1], question, prefix, tuple(names),
        " ".join(names), tuple(line for own in chains for line in own[2]), structure,
    )  # fmt: skip


def common_words(task: CommonWords, seed: str, num_tokens: int, folder: str | Path | None) -> Draft:
    """Draft a common-words task, with one solved example."""
    rng = random.Random(f"ruler common {task} {seed}")
    short = num_tokens < SHORT
    often, seldom = task.short if short else (task.frequency, task.uncommon_frequency)
    shown = task.short_example if short else task.example
    pool = list(all_words())
    rng.shuffle(pool)
    wanted: list[str] = []
    for word in pool:
        if not any(word in other or other in word for other in wanted):
            wanted.append(word)
        if len(wanted) == 2 * task.common:
            break
    for_example, wanted = wanted[: task.common], wanted[task.common :]
    both = for_example + wanted
    rest = [word for word in pool if not any(other in word for other in both)]

    def numbered(common, uncommon, counts, order):
        listed = common * counts[0] + uncommon * counts[1]
        random.Random(order).shuffle(listed)
        return " ".join(f"{i + 1}. {word}" for i, word in enumerate(listed))

    def answered(common):
        return " ".join(f"{i + 1}. {word}" for i, word in enumerate(common))

    question = f"Which {task.common} words come up most often in the list above?"
    prefix = f"The {task.common} words that come up most often in the list are:"
    ask = "Below is a numbered list of words. Some come up more often than the others.\n"
    others, rest = rest[: shown[0] - task.common], rest[shown[0] - task.common :]
    example = numbered(for_example, others, shown[1:], f"example {seed}")

    def body(units):
        return numbered(wanted, rest[:units], (often, seldom), f"list {seed}")

    def structure(units):
        return {
            "common": task.common, "frequency": often, "uncommon": units,
            "uncommon_frequency": seldom, "list": task.common * often + units * seldom,
            "examples": 1, "example_list": task.common * shown[1] + len(others) * shown[2],
        }  # fmt: skip

    return Draft(
        f"{ask}{example}\n{question}\n{prefix} {answered(for_example)}\n\n{ask}",
        body, "The list begins here.", question, prefix, tuple(wanted), answered(wanted), (),
        structure, 1, len(rest),
    )  # fmt: skip


def frequent_words(
    task: FrequentWords, seed: str, num_tokens: int, folder: str | Path | None
) -> Draft:
    """Draft a frequent-words task."""
    rng = random.Random(f"ruler frequent {task} {seed}")
    size = max(num_tokens // task.tokens_per_word, task.wanted + 2)
    words: list[str] = []
    while len(words) < size:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=task.letters))
        if word not in words:
            words.append(word)
    words[0] = "..."
    shares = [rank**-task.alpha / float(zeta(task.alpha)) for rank in range(1, size + 1)]

    def counts(units):
        return [int(units * share) for share in shares]

    def body(units):
        listed = [w for w, n in zip(words, counts(units), strict=True) for _ in range(n)]
        random.Random(f"text {seed}").shuffle(listed)
        return " ".join(listed)

    least = 1
    while not _falling(counts(least)[: task.wanted + 2]):
        least += 1
    answer = tuple(words[1 : task.wanted + 1])

    def structure(units):
        made = counts(units)
        return {
            "vocabulary": sum(n > 0 for n in made), "dots": made[0],
            "frequencies": made[1 : task.wanted + 1], "next_frequency": made[task.wanted + 1],
            "words": sum(made),
        }  # fmt: skip

    return Draft(
        "Below is a text of code words. Note how often each of them comes up; dots are no words."
        "\n\n",
        body, "... ... ...",
        f"Which {task.wanted} code words come up most often in the text above? Dots do not count.",
        f"The {task.wanted} code words that come up most often are:",
        answer, " ".join(answer), (), structure, least,
    )  # fmt: skip


def _growing(source: Iterator[str]) -> Callable[[int], list[str]]:
    """Return a function that gives the first n items, drawn as far as they are asked for."""
    made: list[str] = []

    def first(count: int) -> list[str]:
        made.extend(islice(source, max(count - len(made), 0)))
        return made[:count]

    return first


def _insert(units: Sequence[str], facts: Sequence[str], depths: Sequence[float]) -> list[str]:
    """Facts in their order between units, each at its share of them; depths rise."""
    parts, at = [], 0
    for fact, depth in zip(facts, depths, strict=True):
        place = min(int(depth * (len(units) + 1)), len(units))
        parts += [*units[at:place], fact]
        at = place
    return [*parts, *units[at:]]


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _falling(counts: Sequence[int]) -> bool:
    return all(a > b for a, b in zip(counts, counts[1:], strict=False)) and counts[-2] > 0
