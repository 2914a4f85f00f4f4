"""Prompts of real requests, read from JSON lines, CSV or ShareGPT's JSON, plain or gzipped.

Only what a request asks is read: of a conversation the turns up to the last one of the user's that
an answer followed, or the first where none did.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEXT_FIELDS = ("prompt", "Prompt", "instruction", "question", "text")
ANSWER_FIELDS = ("answer", "reference", "answers")
FORMATS = (".jsonl", ".csv", ".json")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_SYSTEM = {"system": "system"}


class Prompt(NamedTuple):
    """One request."""

    id: str
    source: str  # where the request comes from
    task: str  # its kind, "" where the file does not tell
    messages: tuple[tuple[str, str], ...]  # (role, text) of each turn; the last is the user's
    references: tuple[str, ...] = ()  # correct answers, where the file has some

    @property
    def chat(self) -> list[dict[str, str]]:
        """The turns as a chat template takes them."""
        return [{"role": role, "content": text} for role, text in self.messages]


def read(path: str | Path) -> list[Prompt]:
    """Read every prompt of a file.

    JSON lines and CSV: a field `prompt` (or instruction, question, text), optional `id`, `source`,
    `task` and a reference in `answer`, `reference` or `answers`. JSON: a list of ShareGPT's
    records, {"id", "conversations": [{"from": "human", "value": ...}, ...]}, or of objects like a
    line's.

    Args:
        path: a .jsonl, .csv or .json file, or one of them with .gz.

    Returns:
        The prompts in the file's order; records without a user's turn are left out of ShareGPT.

    Raises:
        FileNotFoundError: for no such file.
        ValueError: for another kind of file, a line or record that cannot be read, a missing
            column, an empty prompt, or two prompts of one id.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: name a prompt file, {_kinds()}.")
    name = path.name.removesuffix(".gz")
    kind = next((end for end in FORMATS if name.endswith(end)), None)
    if kind is None:
        raise ValueError(f"{path} must be {_kinds()}.")
    try:
        packed = path.read_bytes()
        data = gzip.decompress(packed) if path.suffix == ".gz" else packed
        text = data.decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as text: {error}.") from None
    records = {".jsonl": _lines, ".csv": _csv, ".json": _json}[kind](path, text)
    stem = name.removesuffix(kind)
    prompts = [p for i, r in records if (p := _prompt(path, i, r, stem)) is not None]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: it must hold at least one.")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise ValueError(f"{path} has several prompts with id={twice!r}: ids must differ.")
    return prompts


def _kinds() -> str:
    return "a .jsonl, .csv or .json file, or one of them with .gz"


def _lines(path: Path, text: str) -> list[tuple[str, Any]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # a JSON text may hold other line ends
        if not line.strip():
            continue
        try:
            found.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}.") from None
    return found


def _csv(path: Path, text: str) -> list[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text))
    columns = reader.fieldnames or []
    if not set(columns) & set(TEXT_FIELDS):
        raise ValueError(f"{path} has columns {columns}: one must be {_one_of(TEXT_FIELDS)}.")
    try:
        return [(f"line {reader.line_num}", row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}.") from None


def _json(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}.") from None
    if not isinstance(records, list):
        raise ValueError(f"{path} must hold a JSON list of records.")
    return [(f"record {number}", record) for number, record in enumerate(records, 1)]


def _prompt(path: Path, place: str, record: Any, stem: str) -> Prompt | None:
    """One record as a prompt; None for a conversation without a user's turn."""
    if not isinstance(record, dict):
        raise ValueError(f"{path}, {place}: must be a JSON object.")
    name = str(record.get("id") or f"{stem}-{place.split()[1]}")
    source, task = str(record.get("source") or stem), str(record.get("task") or "")
    if "conversations" in record or "messages" in record:
        turns = _turns(path, place, record)
        return Prompt(name, source, task, turns) if turns else None
    field = next((f for f in TEXT_FIELDS if f in record), None)
    if field is None:
        raise ValueError(
            f"{path}, {place}: has {sorted(map(str, record))}, one must be {_one_of(TEXT_FIELDS)}."
        )
    text = record[field]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{path}, {place}: {field}={text!r} must be a text that is not empty.")
    return Prompt(name, source, task, (("user", text),), _references(record))


def _turns(path: Path, place: str, record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The turns up to the last of the user's that an answer follows, else to the first."""
    turns = record.get("conversations", record.get("messages"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{path}, {place}: conversations must be a list of objects.")
    found = []
    for turn in turns:
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = (_ROLES | _SYSTEM).get(who)
        if role is None or not isinstance(text, str):
            raise ValueError(
                f"{path}, {place}: a turn is from {who!r} with a {type(text).__name__}:"
                f" it must be a text from {_one_of([*_ROLES, *_SYSTEM])}."
            )
        if text.strip():
            found.append((role, text))
    asked = [i for i, (role, _) in enumerate(found) if role == "user"]
    answered = [i for i in asked if i + 1 < len(found) and found[i + 1][0] == "assistant"]
    if not asked:
        return ()
    last = answered[-1] if answered else asked[0]
    return tuple(found[: last + 1])


def _references(record: Mapping[str, Any]) -> tuple[str, ...]:
    found = next((record[f] for f in ANSWER_FIELDS if record.get(f) not in (None, "")), ())
    values = found if isinstance(found, list) else [found] if found != () else []
    return tuple(str(value) for value in values)


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Path:
    """Write `fields` of every row as CSV, gzipped where the name ends so, the same bytes always."""
    path = Path(path)
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path
