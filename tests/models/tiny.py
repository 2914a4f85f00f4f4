"""Tiny checkpoints of every family, drawn from a frozen stream, and a plain dense attend.

Imports numpy and safetensors only at the top, so that golden/generate.py can use it beside torch.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama_gqa": {"model_type": "llama"},
    "llama_mha_bias": {"model_type": "llama", "num_key_value_heads": 4, "attention_bias": True},
    "llama_mqa_tied_llama3": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_scaling": _LLAMA3,
    },
    "llama_linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral_window_wide_heads": {"model_type": "mistral", "head_dim": 16, "sliding_window": 5},
    "qwen2_window_from_layer_1": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3_tied_wide_heads": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
CONFIGS = {name: _BASE | config for name, config in CONFIGS.items()}
TOKENS = np.random.RandomState(7).randint(0, 64, (1, 24)).astype(np.int32)


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Hugging Face's names and shapes [out, in]; RandomState's stream never changes."""
    draw = np.random.RandomState(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config.get("head_dim") or d // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    family = config["model_type"]
    out: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        out[name] = (around + 0.3 * draw.uniform(-1, 1, shape)).astype(np.float32)

    add("model.embed_tokens.weight", v, d)
    for i in range(config["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        add(f"{layer}.input_layernorm.weight", d, around=1.0)
        add(f"{layer}.post_attention_layernorm.weight", d, around=1.0)
        rows = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        for name, shape in rows.items():
            add(f"{attention}.{name}.weight", *shape)
            biased = name != "o_proj" if family == "qwen2" else config.get("attention_bias")
            if biased:
                add(f"{attention}.{name}.bias", shape[0])
        if family == "qwen3":
            add(f"{attention}.q_norm.weight", h, around=1.0)
            add(f"{attention}.k_norm.weight", h, around=1.0)
        for name, shape in {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}.items():
            add(f"{layer}.mlp.{name}.weight", *shape)
    add("model.norm.weight", d, around=1.0)
    if not config["tie_word_embeddings"]:
        add("lm_head.weight", v, d)
    return out


def write_hf(
    folder: Path, config: dict[str, Any], weights: dict[str, Any], shards: int = 1
) -> Path:
    """Write a Hugging Face directory, single or sharded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    files = {
        n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)
    }
    for file in set(files.values()):
        save_file({n: weights[n] for n in names if files[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: (i, i + H/2) of a head become rows (2i, 2i + 1)."""
    head_dim = rows.shape[0] // heads
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)
    order = np.concatenate([h * head_dim + order for h in range(heads)])
    return rows[order]


def write_gguf(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    extra: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF; `extra` tensors and `tokenizer` (tokens, merges, template) on demand."""
    import gguf

    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem in _GGUF_TOP_NAMES:
            writer.add_tensor(f"{_GGUF_TOP_NAMES[stem]}.{kind}", value)
            continue
        _, _, layer, part = stem.split(".", 3)
        if family == "llama" and part.split(".")[-1] in heads:
            value = permuted(value, config[heads[part.split(".")[-1]]])
        writer.add_tensor(f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}", value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    if tokenizer is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokenizer["tokens"])
        writer.add_token_types(tokenizer["types"])
        writer.add_token_merges(tokenizer["merges"])
        writer.add_eos_token_id(tokenizer["eos"])
        writer.add_chat_template(tokenizer["template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_attend(rope: Any, windows: tuple[int | None, ...]) -> Any:
    """Exact causal attention over one prompt that starts at position 0; no cache."""
    import jax
    import jax.numpy as jnp

    from kvjax.rope import rotate

    def attend(layer: int, q: Any, k: Any, v: Any, state: Any) -> Any:
        batch, n, t, h = q.shape
        positions = jnp.arange(t)
        q, k = rotate(rope, q, positions), rotate(rope, k, positions)
        grouped = q.reshape(batch, k.shape[1], n // k.shape[1], t, h)
        scores = jnp.einsum("bkgth,bksh->bkgts", grouped, k) * h**-0.5
        age = positions[:, None] - positions[None, :]
        seen = (age >= 0) & (age < (windows[layer] or t))
        weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkgts,bksh->bkgth", weights, v).reshape(q.shape), state

    return attend


def logits(config: Any, params: Any, tokens: np.ndarray) -> np.ndarray:
    """f32[B, T, V] of a plain forward."""
    import jax
    import jax.numpy as jnp

    from models import decoder

    model = decoder.model(config, num_tokens=tokens.shape[1])
    attend = dense_attend(model.rope, model.windows)
    run = jax.jit(
        lambda p, x: decoder.forward(p, config, x, attend, (None,) * config.num_layers)[0]
    )
    return np.asarray(run(jax.tree.map(jnp.asarray, params), jnp.asarray(tokens)))
