"""Prompts that need no file: worked sums with a known answer, and passages to write about.

All are in our own words and seeded. A sum comes after worked examples, a passage is natural text
that every Python ships, so that a prompt has something to compress.
"""

import random
from collections.abc import Callable

from kvjax.evaluation.prompts import Prompt
from kvjax.evaluation.text import sentences

_NAMES = ("Ada", "Bo", "Chidi", "Dana", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun")
_THINGS = ("apples", "stamps", "marbles", "pencils", "shells", "tickets", "buttons", "cards")
_WRITE = (
    "Summarise the text above in three sentences.",
    "List the main points of the text above.",
    "Explain the text above to somebody who has never programmed.",
    "Write three questions that the text above answers, each with its answer.",
    "Which terms does the text above introduce? Explain each in one sentence.",
    "Write a short title for the text above and say why it fits.",
)


def _problem(draw: random.Random) -> tuple[str, str, int]:
    """A question, its worked solution, its answer."""
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    a, b, c = draw.randint(3, 30), draw.randint(2, 9), draw.randint(2, 20)
    kind = draw.randrange(3)
    if kind == 0:
        question = (
            f"{name} has {a} {thing} and gets {b} more each day for {c} days."
            f" How many {thing} does {name} have then?"
        )
        steps = f"In {c} days {name} gets {b} * {c} = {b * c}. Together that is {a} + {b * c}"
        return question, f"{steps} = {a + b * c}.", a + b * c
    if kind == 1:
        question = (
            f"A box holds {a} {thing}. {name} buys {b} boxes and gives {c} {thing} away."
            f" How many {thing} are left?"
        )
        steps = f"{b} boxes hold {a} * {b} = {a * b}. Then {a * b} - {c}"
        return question, f"{steps} = {a * b - c}.", a * b - c
    question = (
        f"{name} shares {a * b} {thing} equally among {b} friends, and each friend already had {c}."
        f" How many {thing} does each friend have now?"
    )
    steps = f"Each gets {a * b} / {b} = {a}. With what they had that is {a} + {c}"
    return question, f"{steps} = {a + c}.", a + c


def _fill(text: str, draw: Callable[[], str], count_tokens: Callable[[str], int], most: int) -> str:
    """Append pieces while the text stays within `most` tokens."""
    while count_tokens(longer := text + draw()) <= most:
        text = longer
    return text


def make(count: int, tokens: int, count_tokens: Callable[[str], int], seed: int) -> list[Prompt]:
    """Make prompts of nearly one length: sums and passages in turn.

    Args:
        count: of prompts.
        tokens: most of a prompt's own text; worked examples or sentences fill it up.
        count_tokens: of a text.
        seed: another gives other prompts.

    Raises:
        ValueError: if no example or sentence fits.
    """
    found = []
    for number in range(count):
        draw = random.Random(f"prompt {seed} {number}")
        if number % 2:
            source = iter(sentences("text", seed * 1000 + number))
            ask = "\n\n" + draw.choice(_WRITE)

            def piece(lines=source):
                return next(lines) + " "

            task, references = "passage", ()
        else:
            question, _, answer = _problem(draw)
            ask = f"Solve the last problem in the same way.\n\nProblem: {question}\nSolution:"

            def piece(draw=draw):
                asked, solved, _ = _problem(draw)
                return f"Problem: {asked}\nSolution: {solved}\n\n"

            task, references = "sums", (str(answer),)
        body = _fill("", piece, count_tokens, tokens - count_tokens(ask))
        if not body:
            least = count_tokens(ask) + count_tokens(piece())
            raise ValueError(
                f"prompts of {tokens} tokens have no room for one worked example or sentence:"
                f" they must be longer, about {least}."
            )
        text = (body.strip() if task == "passage" else body) + ask
        found.append(Prompt(f"{task}-{number}", "built-in", task, (("user", text),), references))
    return found
