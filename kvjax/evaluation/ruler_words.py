"""English words for RULER's keys and lists, from the package that RULER itself draws them from."""

import functools
import random
import uuid
from collections.abc import Iterator

_KINDS = ("noun", "adjective", "verb")


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Lower-case words of three letters or more, in alphabetical order.

    Args:
        kind: "noun", "adjective" or "verb".

    Source: wonderwords, as in NVIDIA/RULER, scripts/data/synthetic/niah.py.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(_KINDS)}.")
    from wonderwords import RandomWord

    found = RandomWord().filter(include_categories=[kind])
    plain = {w for w in found if w.isascii() and w.isalpha() and w.islower() and len(w) > 2}
    return tuple(sorted(plain))


@functools.cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, in alphabetical order."""
    return tuple(sorted({word for kind in _KINDS for word in words(kind)}))


def draw(rng: random.Random, kind: str) -> str:
    """Draw a key or value.

    Args:
        rng: random numbers.
        kind: "words" (adjective-noun), "numbers" (seven digits) or "uuids".

    Source: NVIDIA/RULER, scripts/data/synthetic/niah.py, generate_random.
    """
    if kind == "words":
        return f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise ValueError(f"kind={kind!r} must be words, numbers or uuids.")


def distinct(rng: random.Random, kind: str, taken: set[str]) -> Iterator[str]:
    """Draw without end, never what is in `taken`, which grows."""
    while True:
        drawn = draw(rng, kind)
        if drawn not in taken:
            taken.add(drawn)
            yield drawn
