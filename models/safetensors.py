"""Tensors of a Hugging Face directory, memory mapped: no torch, bfloat16 through ml_dtypes.

Source: the safetensors format, eight bytes of header length, a JSON header, then the data.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


def read_json(path: Path) -> Any:
    """Parse a JSON file of a model directory, or say what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}; a model directory needs one.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def open_directory(
    directory: Path,
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Map every tensor of a model directory, from one file or from the shards of its index.

    Args:
        directory: the folder.

    Returns:
        Shapes by name, without the prefix that a wrapper put before a decoder's names, and a
        function that maps one tensor.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ValueError: a file is truncated or no safetensors; later, an unexpected dtype.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(read_json(index)["weight_map"].values()))
    elif (directory / "model.safetensors").is_file():
        files = ["model.safetensors"]
    else:
        raise FileNotFoundError(
            f"{directory} has neither model.safetensors nor {index.name}; "
            "weights must be safetensors (a pytorch_model.bin must be converted first)."
        )
    entries: dict[str, tuple[Path, str, tuple[int, ...], int]] = {}
    for name in files:
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} lacks the shard {name} that {index.name} names.")
        entries |= _header(directory / name)
    named = {_canonical(name): entry for name, entry in entries.items()}

    def read(name: str) -> np.ndarray:
        path, kind, shape, offset = named[name]
        if kind not in TYPES:
            raise ValueError(f"{name!r} in {path} has dtype {kind}; known are {', '.join(TYPES)}.")
        return np.memmap(path, TYPES[kind], "r", offset, shape)

    return {n: e[2] for n, e in named.items()}, read


def _header(path: Path) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
    """Name -> (path, dtype, shape, offset in bytes), checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(
                f"{path} is truncated or no safetensors: {size:,} bytes, its header claims "
                f"{length:,}."
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors: its header is not JSON.") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
    if end > size:
        raise ValueError(f"{path} is truncated: {size:,} bytes of {end:,}; fetch it again.")
    return {
        name: (path, t["dtype"], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
        for name, t in header.items()
    }


def _canonical(name: str) -> str:
    """Drop what multimodal and causal wrappers put before a decoder's names."""
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
