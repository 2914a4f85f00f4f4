"""RULER's question answering among distracting documents: SQuAD, HotpotQA, or a synthetic set."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.evaluation.ruler_drafts import Draft


class Question(NamedTuple):
    """A question, its references, and where among the documents it is answered."""

    question: str
    answer: tuple[str, ...]
    gold: tuple[int, ...]  # documents that it takes
    near: tuple[int, ...] = ()  # distractors to take before all others
    prefix: str = "Answer:"  # of the model's turn


class Documents(NamedTuple):
    """Documents and questions on them."""

    source: str  # "squad", "hotpotqa" or "synthetic"
    texts: tuple[str, ...]
    questions: tuple[Question, ...]


def documents(hops: int, path: str | Path | None) -> Documents:
    """The documents of a file, or the synthetic set where no file is named.

    Args:
        hops: 1 for SQuAD's format, 2 for HotpotQA's; documents that a synthetic question takes.
        path: JSON file.
    """
    if path is None:
        return synthetic(hops)
    return _read(str(path), hops)


@functools.cache
def _read(path: str, hops: int) -> Documents:
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no file: name a JSON file of questions.")
    name, parse = ("squad", _squad) if hops == 1 else ("hotpotqa", _hotpot)
    try:
        found = parse(json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, IndexError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file} does not read like {name}'s JSON: {type(error).__name__} {error}."
        ) from None
    if not found.questions:
        raise ValueError(f"{file} holds no question that has an answer.")
    return found


def _squad(data: Any) -> Documents:
    """Version 1 or 2: data / paragraphs / qas; what is marked impossible is left out."""
    texts: dict[str, int] = {}
    questions = []
    for article in data["data"]:
        places = [texts.setdefault(p["context"], len(texts)) for p in article["paragraphs"]]
        for place, paragraph in zip(places, article["paragraphs"], strict=True):
            for asked in paragraph["qas"]:
                answer = tuple(dict.fromkeys(a["text"] for a in asked["answers"]))
                if answer and not asked.get("is_impossible", False):
                    near = tuple(other for other in places if other != place)
                    questions.append(Question(asked["question"], answer, (place,), near))
    return Documents("squad", tuple(texts), tuple(questions))


def _hotpot(data: Any) -> Documents:
    """The distractor setting: rows of question, answer, supporting_facts, context."""
    texts: dict[str, int] = {}
    questions = []
    for row in data:
        wanted = {fact[0] for fact in row["supporting_facts"]}
        gold, near = [], []
        for title, sentences in row["context"]:
            place = texts.setdefault(f"{title}\n{''.join(sentences)}", len(texts))
            (gold if title in wanted else near).append(place)
        questions.append(Question(row["question"], (row["answer"],), tuple(gold), tuple(near)))
    return Documents("hotpotqa", tuple(texts), tuple(questions))


_STARTS = (
    "Al Bar Bel Cor Dal Dun El Far Gal Har Hol In Jor Kel Kir Lam Lin Mar Mel Nor Ol Or Per Quel "
    "Ral Ros Sel Sor Tal Tor Ul Val Vel Wes Yar Zel"
).split()
_TOWN_ENDS = (
    "bridge bury combe den field ford gate ham haven holm land leigh mere mouth ness port stead "
    "thorpe ton wick worth"
).split()
_RIVER_ENDS = "ana arin asca edo elle ena era ia illo ina irra isk ola onda ora oss una ura yle yss"
_FIRST = (
    "Ada Alma Anton Arne Berta Bruno Carla Clara Cyril Dora Edgar Elsa Emil Ernst Frieda Gerda "
    "Greta Hanno Hedda Hilda Hugo Ida Ines Irma Ivo Jakob Judith Karla Klaus Konrad Lena Leo Lotte "
    "Magda Marta Max Nils Nora Oskar Otto Paula Rosa Rudolf Selma Theo Ulla Vera Viktor Wanda Willi"
).split()
_LAST = (
    "Abel Adler Bach Baum Becker Brandt Busch Dietz Eck Engel Falk Fink Fuchs Graf Gross Haas "
    "Hahn Hartwig Heller Herzog Horn Jung Kaiser Keller Klein Koch Krug Kurz Lang Lorenz Marx "
    "Moser Neumann Otten Pohl Rau Reiter Roth Sachs Sander Seidel Sommer Stark Thal Vogel Wagner "
    "Weber Winter Wolf Zander"
).split()
_TRADES = "baker clockmaker doctor engineer painter printer surveyor teacher tailor weaver".split()
_WORKS = (
    "a study of old bridges", "a book on garden birds", "a map of the northern coast",
    "a series of winter drawings", "a treatise on mills", "a collection of harvest songs",
)  # fmt: skip
_GOODS = "apples bells glass honey lace leather paper pottery rope salt".split()


@functools.cache
def synthetic(hops: int) -> Documents:
    """People and the towns they were born in, a paragraph each; every name stands for one thing.

    With one hop the question is in which town a person was born, with two at which river that town
    lies, which another paragraph says. All of it is made up.

    Args:
        hops: 1 or 2.
    """
    rng = random.Random("ruler synthetic documents")
    towns = [a + b for a in _STARTS for b in _TOWN_ENDS]
    rivers = [a + b for a in _STARTS for b in _RIVER_ENDS.split()]
    people = [f"{a} {b}" for a in _FIRST for b in _LAST]
    for names in (towns, rivers, people):
        rng.shuffle(names)
    rivers = [river for river in dict.fromkeys(rivers) if river not in towns]
    texts, questions = [], []
    for person, town, river in zip(people, towns, rivers, strict=False):
        year = rng.randint(1790, 1930)
        trade, work = rng.choice(_TRADES), rng.choice(_WORKS)
        texts.append(
            f"{person} was born in the town of {town} in {year}. After school {person} became a "
            f"{trade} and later wrote {work}, which was printed in {year + rng.randint(25, 50)}."
        )
        texts.append(
            f"The town of {town} lies at the river {river}. It is known for its "
            f"{rng.choice(_GOODS)}, and about {rng.randint(2, 90)},000 people live there. A market "
            f"has been held since {rng.randint(1150, 1600)}."
        )
        own = len(texts) - 2, len(texts) - 1
        asked = {
            1: Question(
                f"In which town was {person} born?",
                (town,),
                own[:1],
                prefix=f"{person} was born in the town of",
            ),
            2: Question(
                f"At which river lies the town where {person} was born?",
                (river,),
                own,
                prefix=f"The town where {person} was born lies at the river",
            ),
        }
        questions.append(asked[hops])
    if hops == 1:  # nothing but people: the town's own paragraph would name the answer again
        texts = texts[::2]
        questions = [q._replace(gold=(i,)) for i, q in enumerate(questions)]
    return Documents("synthetic", tuple(texts), tuple(questions))


def draft(found: Documents, number: int, seed: int) -> Draft:
    """Draft one question among documents, in an order that the seed decides.

    Args:
        found: documents and questions.
        number: counts prompts; each takes another question while there are some.
        seed: of the order of questions and documents.

    Source: NVIDIA/RULER, scripts/data/synthetic/qa.py: numbered documents, first those of the same
    article or row, then others.
    """
    order = list(range(len(found.questions)))
    random.Random(f"ruler questions {found.source} {seed}").shuffle(order)
    asked = found.questions[order[number % len(order)]]
    rng = random.Random(f"ruler documents {found.source} {seed} {number}")
    near = rng.sample(asked.near, len(asked.near))
    used = {*asked.gold, *near}
    far = [i for i in range(len(found.texts)) if i not in used]
    rng.shuffle(far)
    near += far
    last = near.pop() if near else asked.gold[0]
    keys = {i: rng.random() for i in [*asked.gold, *near]}

    def chosen(units: int) -> Sequence[int]:
        return sorted([*asked.gold, *near[: units - 1]], key=keys.__getitem__)

    def body(units):
        shown = enumerate(chosen(units), 1)
        return "\n\n".join(f"Document {i}:\n{found.texts[place]}" for i, place in shown)

    def structure(units):
        total = len(asked.gold) + units - 1
        return {
            "source": found.source, "documents": total, "gold_documents": len(asked.gold),
            "distractors": units - 1,
        }  # fmt: skip

    return Draft(
        "Below are documents. A question follows that they answer; answer it in a few words.\n\n",
        body, " ".join(found.texts[last].split()), asked.question, asked.prefix, asked.answer,
        asked.answer[0], tuple(found.texts[place] for place in asked.gold), structure,
        1, 1 + len(near),
    )  # fmt: skip
