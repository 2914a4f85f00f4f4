"""How text becomes the tokens of a prompt: one BOS, the chat's frame, tokens that follow others."""

from collections.abc import Sequence
from typing import Protocol

_CONTENT = "@@content@@"  # stands for the user's turn while the chat template is cut in two


class Tokenizer(Protocol):
    """What a prompt needs of a tokenizer."""

    bos_id: int | None
    add_bos: bool

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the tokens of `text`, in which special tokens are recognised."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat."""
        ...


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode with one BOS where the model takes one, whether or not the template wrote it."""
    ids = list(tokenizer.encode(text, bos=False))
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    return ids


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the tokens of `text` as they are when it follows `before`."""
    head, both = list(tokenizer.encode(before)), list(tokenizer.encode(before + text))
    if both[: len(head)] == head:
        return both[len(head) :]
    return list(tokenizer.encode(text))


def chat_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return what stands before and after the content of one user turn.

    Raises:
        ValueError: when the chat template does not write the turn exactly once.
    """
    messages = [{"role": "user", "content": _CONTENT}]
    parts = tokenizer.chat(messages, add_generation_prompt=True).split(_CONTENT)
    if len(parts) != 2:
        raise ValueError(f"the chat template writes the user's turn {len(parts) - 1} times, not 1.")
    return parts[0], parts[1]
