"""LongBench's rows as tasks: read from files or the hub, put into prompts, cut in the middle.

A record has LongBench's schema: input, context, answers, length (words), dataset, language,
all_classes, _id. Prompts are in our wording, or in the official one where the user names
dataset2prompt.json; then the prompt is the official one character for character, and a cache is
compressed after the part that ends with the context.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation import rows
from kvjax.evaluation.chat import Tokenizer, encode_prompt
from kvjax.evaluation.longbench_metrics import METRICS  # noqa: F401  (what DATASETS names)
from kvjax.evaluation.longbench_prompts import DATASETS
from kvjax.evaluation.rows import Encoded, Row

REQUIRED = ("context", "answers")
PREDICTION_FIELDS = ("input", "answers", "all_classes", "length", "dataset", "language", "_id")
BUCKETS = ("0-4k", "4-8k", "8k+")  # of LongBench-E, words

_CONTEXT, _INPUT = "{context}", "{input}"


def read(
    source: str | Path, datasets: Sequence[str] = (), extended: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Read the records of each dataset.

    Args:
        source: a folder with <dataset>.jsonl or .jsonl.gz, one such file, a .zip of them, or the
            hub id of a data set that holds a data.zip, such as THUDM/LongBench.
        datasets: names, "all", or none for those that are there.
        extended: take LongBench-E, whose files are called <dataset>_e.

    Returns:
        Records by dataset.

    Raises:
        FileNotFoundError: when there is no such source, or a dataset is not in it.
        ValueError: for an unknown dataset, bad JSON, or a record without context or answers, or
            whose context or input is no text.
    """
    wanted = list(DATASETS) if list(datasets) == ["all"] else list(datasets)
    for name in wanted:
        if name not in DATASETS:
            raise ValueError(f"unknown dataset {name!r}: it must be one of {', '.join(DATASETS)}.")
        if extended and not DATASETS[name].extended:
            raise ValueError(f"LongBench-E has no {name}.")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix != ".zip":
        return _one_file(path, wanted)
    if path.is_dir():
        files = _in_folder(path)
    elif path.is_file():
        files = _in_zip(path)
    else:
        files = _in_zip(_from_hub(str(source)))
    stems = {name: f"{name}_e" if extended else name for name in DATASETS}
    here = {name: files[stem] for name, stem in stems.items() if stem in files}
    missing = [name for name in wanted if name not in here]
    if missing or not here:
        raise FileNotFoundError(
            f"{source} holds no {stems[missing[0]] if missing else 'dataset of LongBench'}: it"
            f" holds {', '.join(sorted(files)) or 'no .jsonl file'}."
        )
    return {name: _checked(here[name](), name) for name in wanted or here}


def make_rows(
    dataset: str,
    records: Sequence[Mapping[str, Any]],
    templates: Mapping[str, str] | None = None,
    limits: Mapping[str, int] | None = None,
) -> list[Row]:
    """The rows of a dataset; a row's id is its number in the file.

    Args:
        dataset: its name.
        records: in LongBench's schema.
        templates: prompts by dataset, with {context} and perhaps {input}; None takes ours.
        limits: new tokens by dataset; None takes the official ones.

    Raises:
        ValueError: for a template that does not hold {context} once, or has {input} before it, or
            a limit that is no number of tokens.
    """
    known = DATASETS[dataset]
    template = known.template if templates is None else _named(templates, dataset, "prompts")
    limit = known.max_new_tokens if limits is None else _named(limits, dataset, "limits")
    if type(limit) is not int or limit < 1:
        raise ValueError(f"the limit of {dataset}={limit!r} must be a whole number, at least 1.")
    if not isinstance(template, str):
        raise ValueError(f"the prompt of {dataset}={template!r} must be text with {_CONTEXT}.")
    if template.count(_CONTEXT) != 1 or _INPUT in template.partition(_CONTEXT)[0]:
        raise ValueError(
            f"the prompt of {dataset} must hold {_CONTEXT} once, and {_INPUT} only after it."
        )
    before, _, after = template.partition(_CONTEXT)
    return [
        Row(
            id=str(number),
            context=before + record["context"],
            question=after.replace(_INPUT, record.get("input") or ""),
            answer_prefix=known.answer_prefix if templates is None else "",
            answer=tuple(str(answer) for answer in record["answers"]),
            max_new_tokens=limit,
            task=dataset,
            chat=known.chat,
            metric=known.metric,
            extra={name: record.get(name) for name in PREDICTION_FIELDS} | {"dataset": dataset},
        )
        for number, record in enumerate(records)
    ]


def encode(tokenizer: Tokenizer, row: Row, max_tokens: int) -> Encoded:
    """Encode a row, its prompt cut to `max_tokens` in the middle as LongBench does.

    The first and the last max_tokens // 2 tokens of the prompt (before the chat template) are kept
    and read as text again. What is left of the question is the question: one that is longer than
    a half loses its beginning, and the context its end.

    Args:
        tokenizer: the model's.
        row: of `make_rows`.
        max_tokens: of the prompt, chat template and answer prefix not counted; at least 2.

    Returns:
        The row as tokens; `removed` counts the prompt's tokens that are gone.

    Source: THUDM/LongBench, pred.py, get_pred.
    """
    if max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be at least 2.")
    ids = encode_prompt(tokenizer, row.context + row.question)
    if len(ids) <= max_tokens:
        return rows.encode(tokenizer, row)
    half = max_tokens // 2
    begin = int(ids[0] == tokenizer.bos_id)  # the encoder below adds it again
    head, tail = (tokenizer.decode(part) for part in (ids[begin:half], ids[-half:]))
    if tail.endswith(row.question):
        head, tail = head + tail[: len(tail) - len(row.question)], row.question
    cut = rows.encode(tokenizer, row._replace(context=head, question=tail))
    return cut._replace(removed=len(ids) - 2 * half)


def bucket(length: int) -> str:
    """The bucket of LongBench-E that a length in words falls into."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def read_table(path: str | Path) -> dict[str, Any]:
    """Read dataset2prompt.json or dataset2maxlen.json: an object with a value a dataset.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it does not hold a JSON object.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file: name a JSON file with a value a dataset.")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: {error}.") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} must hold a JSON object with a value a dataset.")
    return table


def _named(table: Mapping[str, Any], dataset: str, what: str) -> Any:
    if dataset not in table:
        raise ValueError(f"the {what} name no {dataset}: they name {', '.join(table)}.")
    return table[dataset]


def _bare(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _one_file(path: Path, wanted: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The records of one file, by the dataset that each names, else by the file's name."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in rows.read_jsonl(path):
        name = str(record.get("dataset") or _bare(path)).removesuffix("_e")
        groups.setdefault(name, []).append(record)
    unknown = sorted(set(groups) - set(DATASETS))
    if unknown:
        raise ValueError(
            f"{path} holds dataset {unknown[0]!r}: it must be one of {', '.join(DATASETS)}."
        )
    missing = [name for name in wanted if name not in groups]
    if missing:
        raise FileNotFoundError(f"{path} holds no {missing[0]}; it holds {', '.join(groups)}.")
    return {name: _checked(groups[name], name) for name in wanted or groups}


def _in_folder(folder: Path) -> dict[str, Any]:
    """A reader for each .jsonl or .jsonl.gz file of a folder or its folder `data`."""
    found = {}
    for place in (folder / "data", folder):
        for path in sorted(place.glob("*.jsonl*")):
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                found[_bare(path)] = lambda path=path: rows.read_jsonl(path)
    return found


def _in_zip(path: Path) -> dict[str, Any]:
    """A reader for each .jsonl file of an archive."""

    def lines(name):
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            return rows.parse_jsonl(file, f"{path}/{name}")

    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith((".jsonl", ".jsonl.gz"))]
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: {error}.") from None
    return {_bare(Path(name)): lambda name=name: lines(name) for name in names}


def _from_hub(name: str) -> Path:
    """The archive of a data set on the hub, from the cache or the network."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(name, "data.zip", repo_type="dataset"))
    except Exception as error:  # no network, no such name: the hub raises many kinds
        first = (str(error).splitlines() or [""])[0]
        raise FileNotFoundError(
            f"{name!r} is no folder or file here, and the hub did not give it"
            f" ({type(error).__name__}: {first:.120}). Name a folder with <dataset>.jsonl files, a"
            " .jsonl, .jsonl.gz or .zip file, or a hub id such as THUDM/LongBench."
        ) from None


def _checked(records: list[dict[str, Any]], dataset: str) -> list[dict[str, Any]]:
    """Refuse records that cannot be asked or scored."""
    for number, record in enumerate(records):
        missing = [name for name in REQUIRED if not record.get(name)]
        if missing:
            raise ValueError(
                f"{dataset}, row {number}: {missing[0]} is missing or empty; a row must have"
                f" {' and '.join(REQUIRED)}, it has {', '.join(record)}."
            )
        if not isinstance(record["answers"], list):
            raise ValueError(f"{dataset}, row {number}: answers must be a list of references.")
        for name in ("context", "input"):
            if not isinstance(record.get(name) or "", str):
                raise ValueError(f"{dataset}, row {number}: {name}={record[name]!r} must be text.")
    return records
