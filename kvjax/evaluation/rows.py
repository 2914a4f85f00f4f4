"""A task's row, and its prompt cut where a cache is compressed: context, then question.

A row has the field's schema (context, question, answer_prefix, answer, max_new_tokens, task). Its
prompt is one chat turn, or plain text: header, context, question, footer, answer prefix. Rows with
the same context share one compressed cache.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvjax.evaluation.chat import Tokenizer, chat_frame, encode_prompt


class Row(NamedTuple):
    """One question about one context.

    Attributes:
        id: names the row within its task.
        context: what is compressed.
        question: what follows it, with whatever separates the two.
        answer_prefix: text that the model's turn begins with.
        answer: the references.
        max_new_tokens: limit of an answer, tokens.
        task: name of the task or dataset.
        chat: whether the prompt is a turn of a chat; plain text otherwise.
        metric: name of what scores a prediction.
        extra: further fields of a predictions file.
    """

    id: str
    context: str
    question: str
    answer_prefix: str
    answer: tuple[str, ...]
    max_new_tokens: int
    task: str
    chat: bool = True
    metric: str = "string_match_all"
    extra: Mapping[str, Any] = {}


class Encoded(NamedTuple):
    """A row as tokens; the prompt is context_ids followed by question_ids.

    Attributes:
        row: the row.
        context_ids: BOS where the model takes one, the chat's header, the context.
        question_ids: question, end of the turn, start of the model's, answer prefix; 1 or more.
        removed: tokens that truncation took out of the prompt's middle.
    """

    row: Row
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    removed: int = 0


def encode(tokenizer: Tokenizer, row: Row) -> Encoded:
    """Encode the prompt of a row whole, and cut it at the last token that is context alone.

    Raises:
        ValueError: for a row without a context or answers.
    """
    if not row.context.strip():
        raise ValueError(f"row {row.id} of {row.task} has an empty context: it must hold text.")
    if isinstance(row.answer, str) or not any(text.strip() for text in row.answer):
        raise ValueError(f"row {row.id} of {row.task}: answer must hold one or more references.")
    if row.max_new_tokens < 1:
        raise ValueError(f"row {row.id}: max_new_tokens={row.max_new_tokens} must be at least 1.")
    header, footer = chat_frame(tokenizer) if row.chat else ("", "")
    before = header + row.context
    alone = encode_prompt(tokenizer, before)
    whole = encode_prompt(tokenizer, before + row.question + footer + row.answer_prefix)
    split = 0
    while split < min(len(alone), len(whole) - 1) and alone[split] == whole[split]:
        split += 1
    context, question = whole[:split], whole[split:]
    if not context:
        raise ValueError(f"row {row.id} of {row.task}: no token belongs to the context alone.")
    return Encoded(row, tuple(context), tuple(question))


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl or .jsonl.gz file.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for a line that is no JSON object, with its number, or an empty file.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: name a .jsonl or .jsonl.gz file.")
    with open(path, "rb") as file:
        return parse_jsonl(file, str(path))


def parse_jsonl(file: IO[bytes], name: str) -> list[dict[str, Any]]:
    """Parse an opened .jsonl or .jsonl.gz file; `name` says which, in errors too.

    Raises:
        ValueError: for a line that is no JSON object, with its number, or an empty file.
    """
    found = []
    try:
        # line ends alone part lines: a string may hold other separators, such as U+2028
        data = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
        with io.TextIOWrapper(data, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    value = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{name}, line {number}: {error}.") from None
                if not isinstance(value, dict):
                    raise ValueError(f"{name}, line {number}: must be a JSON object.")
                found.append(value)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{name} cannot be read as text: {error}.") from None
    if not found:
        raise ValueError(f"{name} is empty: it must hold one JSON object a line.")
    return found


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object a line, replacing the file at once."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    text = "".join(json.dumps(dict(row)) + "\n" for row in rows)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path
