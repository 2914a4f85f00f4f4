import warnings

import pytest

from models.config import Config
from tests.models import tiny

LLAMA = tiny.CONFIGS["llama_gqa"]
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": 64,
}


def test_nested_text_config_is_the_text_part():
    text = {k: v for k, v in tiny.CONFIGS["mistral_window_wide_heads"].items()}
    text.pop("tie_word_embeddings")
    outer = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 7}}
    config = Config.from_hf(outer | {"tie_word_embeddings": True})
    assert (config.architecture, config.head_dim, config.tied) == ("mistral", 16, True)
    assert config == Config.from_hf(text | {"tie_word_embeddings": True})


def test_both_spellings_of_rope_agree_and_the_config_hashes():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = Config.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    fields = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new = Config.from_hf(fields | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert old.rope_theta == new.rope_theta == 5e5
    assert hash(old) != hash(Config.from_hf(LLAMA))


def test_fields_without_effect_are_silent_and_others_are_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_hf(LLAMA | {"torch_dtype": "bfloat16", "use_cache": True, "novel": None})
    with pytest.warns(UserWarning, match="not read: logit_scale=0.5"):
        Config.from_hf(LLAMA | {"logit_scale": 0.5})
    with pytest.warns(UserWarning, match="not read: attention.clamp_kqv=8"):
        Config.from_gguf(GGUF | {"llama.attention.clamp_kqv": 8.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is unknown; known are llama, mistral"),
        ({"model_type": None}, "lacks 'model_type'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; it must be 'silu'"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*not supported"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({"num_attention_heads": 5}, "hidden_size=32 is not a multiple of num_heads=5"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"intermediate_size": -1}, "intermediate_size=-1 must be a positive integer"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is unknown"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"sliding_window": 8}, "sliding_window=8 on model_type='llama' needs layer_types"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window=-1 must be a positive"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers; the model has 2"),
        ({"layer_types": ["chunked"] * 2}, r"layer_types has \['chunked'\]; known are"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "lacks 'num_key_value_heads'"),
    ],
)
def test_hf_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Config.from_hf(LLAMA | fields)


def test_gguf_equals_hf():
    assert Config.from_gguf(GGUF) == Config.from_hf(LLAMA)
    qwen = {k.replace("llama", "qwen2"): v for k, v in GGUF.items()}
    qwen["general.architecture"] = "qwen2"
    assert Config.from_gguf(qwen) == Config.from_hf(LLAMA | {"model_type": "qwen2"})


def test_gguf_rope_scaling():
    def scaling(factors=None, **keys):
        keys = {f"llama.rope.scaling.{k}": v for k, v in keys.items()}
        return dict(Config.from_gguf(GGUF | keys, factors).rope_scaling or ())

    assert scaling() == scaling(type="none") == {}
    assert scaling(factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    yarn = scaling(type="yarn", factor=4.0, original_context_length=16)
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert scaling([1.0, 2.0, 4.0, 8.0]) == {"rope_type": "factors", "factors": (1, 2, 4, 8)}
    with pytest.raises(ValueError, match="rope.scaling.type='longrope' is unknown"):
        scaling(type="longrope", factor=2.0)
    with pytest.raises(ValueError, match="exclude each other"):
        scaling([1.0, 2.0, 4.0, 8.0], factor=2.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "phi3"}, "general.architecture='phi3' is unknown; known are"),
        ({"llama.expert_count": 8}, "expert_count=8 is not supported"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 must be head_dim=8"),
        ({"llama.block_count": None}, "lacks 'block_count'"),
        ({"llama.vocab_size": None}, "neither llama.vocab_size nor tokenizer.ggml.tokens"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs by layer"),
    ],
)
def test_gguf_errors(keys, message):
    with pytest.raises(ValueError, match=message):
        Config.from_gguf(GGUF | keys)
