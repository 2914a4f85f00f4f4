"""Text to hide needles in and to score running text on: noise, what Python ships, or a folder.

Every source is a list of sentences or paragraphs; the tokenizer decides later how many are needed.
"""

import functools
import random
import re
import string
from pathlib import Path
from pydoc_data import topics

# Neutral sentences, repeated: nothing in them resembles a needle.
NOISE = (
    "The morning is quiet.",
    "The grass is green.",
    "The water is clear.",
    "The road goes on.",
    "Here we walk again.",
)

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def sentences(source: str | Path, seed: int | str) -> list[str]:
    """Return the sentences of a source, turned so that a seeded one comes first.

    Args:
        source: "noise", "text" (the documentation topics that every Python ships) or a folder
            whose .txt files are read in the order of their names.
        seed: picks where the slice starts.

    Raises:
        FileNotFoundError: when the folder does not exist or holds no text.
    """
    if source == "noise":
        found = list(NOISE)
    else:
        paragraphs = _shipped() if source == "text" else _folder(str(source))
        found = [s for paragraph in paragraphs for s in _SENTENCE_END.split(paragraph)]
    start = random.Random(f"slice {seed}").randrange(len(found))
    return found[start:] + found[:start]


@functools.cache
def _shipped() -> tuple[str, ...]:
    """Return the prose paragraphs of `pydoc_data.topics`: no grammar, code, lists or headings."""
    blocks = (b for name in sorted(topics.topics) for b in topics.topics[name].split("\n\n"))
    kept = dict.fromkeys(p for p in map(_prose, blocks) if p)  # topics repeat each other
    return tuple(kept)


def _prose(block: str) -> str | None:
    lines = block.splitlines()
    if any(line.startswith("     ") for line in lines) or "::=" in block or ">>>" in block:
        return None
    text = " ".join(block.split())
    text = re.sub(r"[*`]+|\"\"|\[\d+\]", "", text).replace('" "', " ")
    words = text.split()
    letters = sum(c.isalpha() or c == " " for c in text)
    whole = len(words) >= 12 and text[0].isupper() and text[-1] == "." and text.isascii()
    return text if whole and letters >= 0.9 * len(text) else None


@functools.cache
def _folder(folder: str) -> tuple[str, ...]:
    """Return the paragraphs of the .txt files in `folder`."""
    files = sorted(Path(folder).expanduser().glob("*.txt"))
    texts = [file.read_text(encoding="utf-8", errors="strict") for file in files]
    blocks = (" ".join(b.split()) for text in texts for b in re.split(r"\n\s*\n", text))
    kept = tuple(b for b in blocks if b.strip(string.punctuation + " "))
    if not kept:
        raise FileNotFoundError(
            f"{folder} holds no text: give a folder with .txt files, or noise or text."
        )
    return kept
