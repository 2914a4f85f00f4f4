"""What a run writes down: JSON values, rows, and what surrounds them: versions, devices."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]

_RECORD = ("experiment", "arguments", "config", "config_hash", "resumed")
_PACKAGES = ("kvjax", "jax", "jaxlib", "flax", "numpy", "transformers", "gguf", "tensorboardX")


def config_hash(config: Any) -> str:
    """Return 8 hex digits that two configurations share when all their fields are equal."""
    text = json.dumps(plain(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_record(path: Path) -> dict[str, Any]:
    """Read the config.json of a run's folder.

    Raises:
        FileNotFoundError: when there is none.
        ValueError: when it is not a run's.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} holds no config.json: give a run's folder, runs/<experiment>/<stamp>-<hash>."
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, as a run writes it: {error}.") from None
    if not isinstance(record, dict) or not set(_RECORD) <= set(record):
        raise ValueError(
            f"{file} is not a run's, which holds {', '.join(_RECORD)}: give a run's folder,"
            " runs/<experiment>/<stamp>-<hash>."
        )
    return record


def surroundings() -> dict[str, Any]:
    """Return versions, devices, platform, number of CPUs and git revision."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    devices = [f"{device.platform}:{device.device_kind}" for device in jax.devices()]
    return {
        "versions": versions,
        "devices": devices,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "revision": _revision(),
    }


def plain(value: Any) -> Any:
    """Turn a value into what JSON holds: scalars of any dtype, arrays, paths, dataclasses.

    Raises:
        TypeError: for anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        array = np.asarray(value)
        return (array if array.dtype.kind in "biu" else array.astype(np.float64)).tolist()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be recorded as JSON.")


def new_folder(parent: Path, name: str) -> Path:
    """Make `parent/name`, or `parent/name-2` and so on where that exists already."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent.resolve() / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def read_rows(file: Path) -> list[Row]:
    """Read the rows and cut a last line that was not written to its end."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(file, "r+b") as record:
            record.truncate(whole)
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{file}, line {number} is not JSON: {line[:60]!r}.") from None
    return rows


def write_json(file: Path, value: Any) -> None:
    """Write `value` as JSON so that a kill leaves the old file or the new one."""
    replace_text(file, json.dumps(value, indent=2) + "\n")


def replace_text(file: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def _revision() -> str | None:
    """Return the git revision that this file belongs to, `+` when the tree has changes."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def is_finite(value: Any) -> bool:
    """Tell whether no number inside a JSON value is NaN or infinite."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def finite_or_none(value: Any) -> Any:
    """Replace each NaN and infinity inside a JSON value by None."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_or_none(item) for item in value]
    return value if is_finite(value) else None
