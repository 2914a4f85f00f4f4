"""A context of exactly so many tokens, from parts whose number is free, for any tokenizer."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvjax.evaluation.chat import Tokenizer, encode_after, encode_prompt


class Fitted(NamedTuple):
    """A context and how much of its material went in."""

    ids: tuple[int, ...]
    units: int  # of the body
    text: str  # decoded, from the introduction on
    filler: int  # tokens of filler between introduction and body


def fit(
    tokenizer: Tokenizer,
    *,
    header: str,
    introduction: str,
    body: Callable[[int], str],
    end: str,
    filler: str,
    num_tokens: int,
    least: int = 1,
    most: int | None = None,
) -> Fitted:
    """Take as many units of the body as fit, and fill the few tokens that are left.

    The context is header, introduction, filler, body and end. What is left after the last whole
    unit is taken from the end of the filler's tokens, so that its last words and its line end are
    whole and nothing else is cut.

    Args:
        tokenizer: the model's.
        header: what a chat writes before the user's turn; "" without one.
        introduction: text before the body; ends with a newline.
        body: the text of so many units; more units are more text.
        end: text after the body.
        filler: text to fill with, repeated as often as needed, a line of its own.
        num_tokens: length of the context, BOS and header included, in tokens.
        least: fewest units that make sense.
        most: units that there are; None is no limit.

    Raises:
        ValueError: when `least` units do not fit (with the length that they take), when `most`
            units leave more room than four fillers take, or when the tokenizer does not give back
            the introduction.
    """
    sizes: dict[int, list[int]] = {}

    def ids_of(units: int) -> list[int]:
        if units not in sizes:
            text = header + introduction + body(units) + end
            sizes[units] = encode_prompt(tokenizer, text)
        return sizes[units]

    def fits(units: int) -> bool:
        return len(ids_of(units)) <= num_tokens

    if not fits(least):
        raise ValueError(
            f"num_tokens={num_tokens} must be at least {len(ids_of(least))} for this task with"
            " this tokenizer."
        )
    units = _most_units(lambda n: len(ids_of(n)), num_tokens, least, most)
    ids = ids_of(units)
    gap = num_tokens - len(ids)
    if most is not None and units == most and gap > 4 * len(tokenizer.encode(filler)):
        raise ValueError(
            f"num_tokens={num_tokens} is more than the {most} documents or words that there are"
            f" fill ({len(ids)} tokens): name a larger source."
        )
    if gap:
        split = columns_of(tokenizer, ids, introduction)
        line = encode_after(tokenizer, introduction, filler + "\n")
        while len(line) < gap:
            line = encode_after(tokenizer, introduction, filler + " ") + line
        ids = ids[:split] + line[len(line) - gap :] + ids[split:]
    text = tokenizer.decode(ids)
    if text.count(introduction) != 1:
        raise ValueError(
            f"{introduction[:40]!r} stands {text.count(introduction)} times in the decoded context:"
            " the tokenizer does not give back the text it encodes."
        )
    # a model that takes no BOS may use the same token to begin a turn
    if tokenizer.add_bos and ids.count(tokenizer.bos_id) > 1:
        raise ValueError("the context holds more than one BOS; the chat template must add one.")
    return Fitted(tuple(ids), units, text[text.index(introduction) :], gap)


def _most_units(size: Callable[[int], int], limit: int, least: int, most: int | None) -> int:
    """The most units within the limit: a guess from the first few, then bisection."""
    ceiling = most if most is not None else 1 << 40
    few = min(least + 8, ceiling)
    if few == least or size(few) > limit:
        low, high = least, few + 1
    else:
        each = max((size(few) - size(least)) / (few - least), 0.25)
        low = few
        high = min(few + 1 + int((limit - size(few)) / each), ceiling + 1)
        while high <= ceiling and size(high) <= limit:
            low, high = high, min(high + max(8, high // 16), ceiling + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low


def columns_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """The fewest first columns that hold `text` whole; all of them where none do."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if text in tokenizer.decode(ids[:middle]) else (middle + 1, high)
    return low
