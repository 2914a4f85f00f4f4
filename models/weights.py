"""Weights of a Hugging Face directory or a GGUF file as the decoder's params, without torch.

Each format becomes a `_Source`: names, shapes and a reader of one tensor as [out, in]. One
function assembles params from either, checks every tensor and fuses q, k, v and gate, up.

Source: convert_hf_to_gguf.py of llama.cpp for a GGUF's names and row order.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from models import safetensors
from models.config import Config

Params = dict[str, Any]

GGML_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


@dataclasses.dataclass(frozen=True)
class _Source:
    """Tensors under the names of a Hugging Face decoder without its prefix."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Gguf:
    """An opened GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]  # name -> gguf.ReaderTensor, memory mapped


def load_hf(directory: str | Path, dtype: Any = np.float32) -> tuple[Config, Params]:
    """Read a directory of config.json and one or many safetensors files.

    Args:
        directory: the folder.
        dtype: of every array but the norms, which are float32.

    Returns:
        The Config (its `tied` says whether lm_head is absent) and params as numpy arrays.

    Raises:
        FileNotFoundError: no config.json, no safetensors, or a shard is missing.
        ValueError: unsupported config; a tensor is missing, has a wrong shape, an unexpected
            dtype or a value that is not finite; a file is truncated or no safetensors.
    """
    directory = Path(directory)
    config = Config.from_hf(safetensors.read_json(directory / "config.json"))
    source = _Source(str(directory), *safetensors.open_directory(directory))
    tied = "lm_head.weight" not in source.shapes
    config = dataclasses.replace(config, tied=tied)
    return config, _assemble(config, source, dtype)


def open_gguf(path: str | Path) -> Gguf:
    """Map a GGUF file and read its metadata.

    Args:
        path: the file.

    Returns:
        Metadata and tensors; nothing is dequantized yet.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a GGUF, or truncated.
    """
    import gguf  # a quarter of a second that a cached start does not need

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; a GGUF file is needed.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF: it begins with {magic!r}, not b'GGUF'.")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {t.name: t for t in reader.tensors}
    except Exception as error:  # the reader fails in many ways on bytes that are not there
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or damaged, fetch it again: "
            f"{type(error).__name__}: {error}"
        ) from error
    return Gguf(path, metadata, tensors)


def load_gguf(file: Gguf, dtype: Any = np.float32) -> tuple[Config, Params]:
    """Dequantize an opened GGUF file.

    Args:
        file: from `open_gguf`.
        dtype: of every array but the norms, which are float32.

    Returns:
        The Config (`tied` says whether output.weight is absent) and params as numpy arrays.

    Raises:
        ValueError: unsupported metadata; a tensor is missing, has a wrong shape, an unsupported
            ggml type or a value that is not finite.
    """
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = _dequantize(file.path, file.tensors["rope_freqs.weight"]).tolist()
    config = Config.from_gguf(file.metadata, factors)
    has = file.tensors.keys()
    config = dataclasses.replace(
        config,
        tied="output.weight" not in has,
        qkv_bias="blk.0.attn_q.bias" in has,
        out_bias="blk.0.attn_output.bias" in has,
    )
    return config, _assemble(config, _gguf_source(config, file), dtype)


def transposed_head(params: Params) -> Params:
    """Give a tied model a head of its own, [D, V]: a CPU multiplies it several times faster."""
    if "head" in params:
        return params
    return {**params, "head": np.ascontiguousarray(np.asarray(params["embedding"]).T)}


def _assemble(config: Config, source: _Source, dtype: Any) -> Params:
    d, h, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * h, config.num_kv_heads * h

    def read(name: str, *shape: int) -> np.ndarray:
        if name not in source.shapes:
            raise ValueError(
                f"{source.where} has no tensor {name!r} of shape {list(shape)}; "
                f"it has {len(source.shapes)} others."
            )
        if source.shapes[name] != shape:
            raise ValueError(
                f"{name!r} in {source.where} has shape {list(source.shapes[name])}; "
                f"the config asks for {list(shape)}."
            )
        value = source.read(name)
        if not np.isfinite(value).all():
            raise ValueError(f"{name!r} in {source.where} has NaN or Inf; weights must be finite.")
        out = value.astype(np.float32 if "norm" in name else dtype)
        if out.dtype == np.float16 and not np.isfinite(out).all():
            raise ValueError(f"{name!r} overflows float16; load it as bfloat16 or float32.")
        return out

    def matrix(*parts: tuple[str, int], inputs: int) -> np.ndarray:
        """[in, out] of several [out, in] side by side."""
        out = np.empty((inputs, sum(rows for _, rows in parts)), dtype)
        start = 0
        for name, rows in parts:
            out[:, start : start + rows] = read(f"{name}.weight", rows, inputs).T
            start += rows
        return out

    def layer(i: int) -> Params:
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        parts = [(f"{attention}.{n}_proj", r) for n, r in (("q", q), ("k", kv), ("v", kv))]
        params: Params = {
            "norm_attention": read(f"layers.{i}.input_layernorm.weight", d),
            "qkv": matrix(*parts, inputs=d),
            "out": matrix((f"{attention}.o_proj", d), inputs=q),
            "norm_mlp": read(f"layers.{i}.post_attention_layernorm.weight", d),
            "gate_up": matrix((f"{mlp}.gate_proj", f), (f"{mlp}.up_proj", f), inputs=d),
            "down": matrix((f"{mlp}.down_proj", d), inputs=f),
        }
        if config.qkv_bias:
            params["qkv_bias"] = np.concatenate([read(f"{n}.bias", r) for n, r in parts])
        if config.out_bias:
            params["out_bias"] = read(f"{attention}.o_proj.bias", d)
        if config.qk_norm:
            params["q_norm"] = read(f"{attention}.q_norm.weight", h)
            params["k_norm"] = read(f"{attention}.k_norm.weight", h)
        return params

    params: Params = {
        "embedding": read("embed_tokens.weight", config.vocab_size, d),
        "norm": read("norm.weight", d),
        "layers": [layer(i) for i in range(config.num_layers)],
    }
    if not config.tied:
        params["head"] = matrix(("lm_head", config.vocab_size), inputs=d)
    return params


_GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_source(config: Config, file: Gguf) -> _Source:
    named: dict[str, Any] = {}
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        if parts[0] == "blk" and len(parts) == 3 and parts[2] in _GGUF_LAYER_NAMES:
            named[f"layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{kind}"] = tensor
        elif stem in _GGUF_NAMES:
            named[f"{_GGUF_NAMES[stem]}.{kind}"] = tensor
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(name: str) -> np.ndarray:
        value = _dequantize(file.path, named[name])
        projection = name.split(".")[-2]
        if config.architecture == "llama" and projection in heads:
            return _unpermute(value, heads[projection])
        return value

    shapes = {n: tuple(int(s) for s in reversed(t.shape)) for n, t in named.items()}
    return _Source(str(file.path), shapes, read)


def _dequantize(path: Path, tensor: Any) -> np.ndarray:
    import gguf

    kind = tensor.tensor_type.name
    if kind not in GGML_TYPES:
        raise ValueError(
            f"{tensor.name!r} in {path} has ggml type {kind}; known are {', '.join(GGML_TYPES)}."
        )
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return value.reshape(tuple(int(s) for s in reversed(tensor.shape)))


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's row order: pairs (2i, 2i + 1) of a head become (i, i + H/2)."""
    half = rows.shape[0] // num_heads // 2
    if rows.shape[0] != math.prod((num_heads, half, 2)):
        raise ValueError(f"{rows.shape[0]} rows do not divide into {num_heads} even heads.")
    split = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
