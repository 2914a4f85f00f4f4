"""A random two-layer decoder with a byte tokenizer: a dry run of an experiment in seconds."""

import jax
from tokenizers import pre_tokenizers

from models import decoder
from models.config import Config
from models.tokenizer import Tokenizer, from_gguf

NAME = "tiny"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> Tokenizer:
    """One token a byte, and the two of a chat turn."""
    special = ["<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "merges": [],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return from_gguf(metadata | {"tokenizer.chat_template": _TEMPLATE})


def config() -> Config:
    """Two layers, three query heads a KV head."""
    return Config(
        architecture="llama",
        num_layers=2,
        hidden_size=48,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=64,
        vocab_size=tokenizer().vocab_size,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=8192,
        windows=(None, None),
        tied=True,
    )


def params(dtype) -> dict:
    """The same random weights every time."""
    return decoder.init(config(), jax.random.key(0), dtype)
