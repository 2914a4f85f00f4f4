"""What decides a decoder's computation, read from a config.json or from GGUF metadata.

Every field that is set is read, known to be without effect, or reported: a model whose option was
ignored answers almost right.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax import rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Config:
    """A decoder of the Llama family; frozen and hashable, a static argument of jit."""

    architecture: str  # one of FAMILIES
    num_layers: int  # L
    hidden_size: int  # D
    num_heads: int  # N
    num_kv_heads: int  # K, divides N
    head_dim: int  # H
    intermediate_size: int  # F
    vocab_size: int  # V
    norm_epsilon: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    windows: tuple[int | None, ...]  # per layer: a query sees itself and window - 1 keys before it
    rope_scaling: tuple[tuple[str, Any], ...] | None = None  # pairs, as `kvjax.rope` reads them
    partial_rotary_factor: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # the output head is the embedding

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Read a Hugging Face config.json, or the text part of a multimodal one.

        Args:
            config: the parsed JSON.

        Returns:
            The validated Config. `tied` is what the file says; the weights decide in the end.

        Raises:
            ValueError: unknown model_type, unsupported option, missing or inconsistent field.

        Warns:
            UserWarning: naming each field that is set and was not read.
        """
        return _checked(cls(**_read_hf(config)))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], rope_factors: Sequence[float] | None = None
    ) -> "Config":
        """Read the metadata of a GGUF file.

        Args:
            metadata: its key-value pairs.
            rope_factors: the tensor `rope_freqs.weight` where the file has one.

        Returns:
            The validated Config. `qkv_bias` and `tied` are the architecture's habit; the tensors
            decide in the end.

        Raises:
            ValueError: unknown architecture, unsupported option, missing or inconsistent key.

        Warns:
            UserWarning: naming each key of the architecture that was not read.
        """
        return _checked(cls(**_read_gguf(metadata, rope_factors)))


def _checked(config: Config) -> Config:
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    for name in (*sizes, "intermediate_size", "vocab_size", "max_position_embeddings"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer.")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_kv_heads={config.num_kv_heads} must divide num_heads={config.num_heads}."
        )
    if len(config.windows) != config.num_layers:
        raise ValueError(
            f"layer_types names {len(config.windows)} layers; the model has {config.num_layers}."
        )
    rope.build(config)  # an unknown rope type is an error here, not at the first token
    return config


def _frozen(value: Any) -> Any:
    """Lists as tuples, so that what came from JSON hashes."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


# Set in many files and without effect on a forward pass.
_NO_EFFECT = frozenset(
    "architectures attention_dropout auto_map bos_token_id dtype eos_token_id id2label "
    "initializer_range is_llama_config label2id mlp_dropout model_name name_or_path "
    "output_attentions pad_token_id pretraining_tp problem_type resid_pdrop return_dict "
    "torch_dtype transformers_version transformers.js_config use_cache chunk_size_feed_forward "
    "is_encoder_decoder max_length sep_token_id task_specific_params unk_token_id "
    "unsloth_fixed unsloth_version".split()
)


class _Fields:
    """A mapping that remembers what was read, under the name that its errors carry."""

    def __init__(self, fields: Mapping[str, Any], source: str):
        self.fields, self.source, self.read = fields, source, set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.fields.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.source} lacks {key!r}; a decoder needs it.")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but the allowed; the first is the default."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            right = " or ".join(repr(a) for a in allowed)
            raise ValueError(f"{key}={value!r} is not supported; it must be {right}.")

    def report_unread(self, ignored: frozenset[str]) -> None:
        unread = {
            key: value
            for key, value in self.fields.items()
            if key not in self.read | ignored
            and not key.startswith("_")
            and value not in (None, False, 0, "", [], {})
        }
        if unread:
            names = ", ".join(f"{k}={v!r:.60}" for k, v in sorted(unread.items()))
            warnings.warn(f"{self.source} sets fields that are not read: {names}.", stacklevel=5)


def _read_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        shared = ("tie_word_embeddings", "quantization_config")
        config = {**{k: config[k] for k in shared if k in config}, **text}
    fields = _Fields(config, "config.json")
    family = fields.need("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is unknown; known are {', '.join(FAMILIES)}.")
    fields.only("hidden_act", "silu", "swish")
    fields.only("mlp_bias", False)
    fields.only("rope_interleaved", False)
    fields.only("quantization_config", None)
    heads, layers = fields.need("num_attention_heads"), fields.need("num_hidden_layers")
    hidden = fields.need("hidden_size")
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if any(isinstance(v, Mapping) for v in scaling.values()):
        raise ValueError(f"rope_parameters={scaling} differ by layer type; one must serve all.")
    bias = family != "mistral" and fields.get("attention_bias", False)
    kv_heads = fields.get("num_key_value_heads", heads) if family == "llama" else None
    read = {
        "architecture": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads or fields.need("num_key_value_heads"),
        "head_dim": fields.get("head_dim") or _quotient(hidden, heads),
        "intermediate_size": fields.need("intermediate_size"),
        "vocab_size": fields.need("vocab_size"),
        "norm_epsilon": float(fields.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(fields.get("rope_theta", scaling.get("rope_theta", 10000.0))),
        "max_position_embeddings": fields.need("max_position_embeddings"),
        "windows": _windows(fields, family, layers),
        "rope_scaling": _frozen(sorted(scaling.items())) or None,
        "partial_rotary_factor": float(fields.get("partial_rotary_factor", 1.0)),
        "qkv_bias": family == "qwen2" or bool(bias),
        "out_bias": family != "qwen2" and bool(bias),
        "qk_norm": family == "qwen3",
        "tied": bool(fields.get("tie_word_embeddings", False)),
    }
    fields.report_unread(_NO_EFFECT)
    return read


def _quotient(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_heads={heads}; "
            "such a model must name its head_dim."
        )
    return hidden // heads


def _windows(fields: _Fields, family: str, layers: int) -> tuple[int | None, ...]:
    """Window of each layer.

    Mistral: `sliding_window` on every layer, 4,096 where the key is absent and none where it is
    null. Qwen: only with `use_sliding_window`, from layer `max_window_layers` on. `layer_types`,
    where present, says which layers.
    """
    qwen = family.startswith("qwen")
    window = fields.get("sliding_window")
    if family == "mistral" and "sliding_window" not in fields.fields:
        window = 4096
    first = fields.get("max_window_layers", 28) if qwen else 0
    if qwen and not fields.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window={window!r} must be a positive integer or null.")
    types = fields.get("layer_types")
    if types is None:
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = {"sliding_attention": window, "full_attention": None}
    if unknown := sorted(set(types) - set(known)):
        raise ValueError(f"layer_types has {unknown}; known are {sorted(known)}.")
    if family == "llama" and window is not None and "layer_types" not in fields.fields:
        raise ValueError(f"sliding_window={window} on model_type='llama' needs layer_types.")
    return tuple(known[t] for t in types)


def _read_gguf(metadata: Mapping[str, Any], factors: Sequence[float] | None) -> dict[str, Any]:
    family = metadata.get("general.architecture")
    known = ("llama", "qwen2", "qwen3")  # a Mistral GGUF says llama
    if family not in known:
        raise ValueError(
            f"general.architecture={family!r} is unknown; known are {', '.join(known)}."
        )
    prefix = f"{family}."
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    fields = _Fields(keys, f"the GGUF metadata ({family}.*)")
    fields.only("expert_count", 0)
    heads, hidden = fields.need("attention.head_count"), fields.need("embedding_length")
    kv_heads = fields.get("attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ValueError("attention.head_count differs by layer; one number must serve all.")
    head_dim = fields.get("attention.key_length") or _quotient(hidden, heads)
    fields.only("attention.value_length", head_dim)
    rotary = fields.get("rope.dimension_count", head_dim)
    if family == "llama" and rotary != head_dim:
        raise ValueError(
            f"rope.dimension_count={rotary} must be head_dim={head_dim}: the row order of a "
            "partly rotated llama GGUF is not defined."
        )
    layers, context = fields.need("block_count"), fields.need("context_length")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocabulary = fields.get("vocab_size", len(tokens) if tokens is not None else None)
    if vocabulary is None:
        raise ValueError(f"the GGUF has neither {prefix}vocab_size nor tokenizer.ggml.tokens.")
    window = fields.get("attention.sliding_window") or None
    scaling = _gguf_scaling(fields, context, factors)
    read = {
        "architecture": family,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.need("feed_forward_length"),
        "vocab_size": vocabulary,
        "norm_epsilon": float(fields.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(fields.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": context,
        "windows": (window,) * layers,
        "rope_scaling": _frozen(sorted(scaling.items())) or None,
        "partial_rotary_factor": rotary / head_dim,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "tied": False,
    }
    fields.report_unread(frozenset({"rope.scaling.finetuned"}))
    return read


def _gguf_scaling(fields: _Fields, context: int, factors: Sequence[float] | None) -> dict[str, Any]:
    """The rope_scaling that a GGUF describes; Llama 3's frequencies come as factors instead."""
    kind = fields.get("rope.scaling.type", "linear")
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear")
    original = fields.get("rope.scaling.original_context_length", context)
    fields.only("rope.scaling.attn_factor", 1.0)
    if factors is not None:
        if factor not in (None, 1.0):
            raise ValueError(
                f"rope_freqs.weight and rope.scaling.factor={factor} exclude each other."
            )
        return {"rope_type": "factors", "factors": tuple(float(f) for f in factors)}
    if kind == "none" or not factor:  # the file format's default is linear by a factor of 1
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type={kind!r} is unknown; known are none, linear, yarn.")
    scaling = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": original,
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if (value := fields.get(f"rope.scaling.{theirs}")) is not None:
            scaling[ours] = float(value)
    return scaling
