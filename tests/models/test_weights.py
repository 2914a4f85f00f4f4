import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import weights
from tests.models import tiny

LLAMA, QWEN = tiny.CONFIGS["llama_gqa"], tiny.CONFIGS["qwen2_window_from_layer_1"]
QWEN = QWEN | {"use_sliding_window": False}


def assert_equal_params(a, b):
    leaves = [(k, x) for k, x in a.items() if k != "layers"]
    leaves += [(i, x) for i, layer in enumerate(a["layers"]) for x in layer.items()]
    assert len(leaves) > 10 and a.keys() == b.keys()
    for key in a.keys() - {"layers"}:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)
    for one, two in zip(a["layers"], b["layers"], strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert one[key].dtype == two[key].dtype
            np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def test_sharded_prefixed_and_single_files_hold_the_same(tmp_path):
    drawn = tiny.tensors(LLAMA)
    config, params = weights.load_hf(tiny.write_hf(tmp_path / "one", LLAMA, drawn))
    np.testing.assert_array_equal(
        params["layers"][1]["qkv"],
        np.concatenate([drawn[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]).T,
    )
    again, sharded = weights.load_hf(tiny.write_hf(tmp_path / "three", LLAMA, drawn, shards=3))
    assert again == config
    assert_equal_params(params, sharded)
    for i, prefix in enumerate(("model.language_model.", "language_model.model.")):
        renamed = {n.replace("model.", prefix, 1): x for n, x in drawn.items()}
        if i:
            renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
        renamed["vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
        outer = {"model_type": "mistral3", "text_config": LLAMA}
        nested = weights.load_hf(tiny.write_hf(tmp_path / f"nested{i}", outer, renamed))
        assert nested[0] == config
        assert_equal_params(params, nested[1])


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_without_torch(stored, tmp_path):
    drawn = {n: x.astype(stored) for n, x in tiny.tensors(LLAMA).items()}
    folder = tiny.write_hf(tmp_path, LLAMA, drawn, shards=2)
    _, params = weights.load_hf(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(params["layers"][0]["down"], drawn[name].astype(np.float32).T)
    _, params = weights.load_hf(folder, ml_dtypes.bfloat16)
    assert params["layers"][0]["down"].dtype == params["head"].dtype == ml_dtypes.bfloat16
    assert params["norm"].dtype == params["layers"][0]["norm_mlp"].dtype == np.float32


def test_presence_of_lm_head_decides(tmp_path):
    drawn = tiny.tensors(LLAMA)
    claims_tied = LLAMA | {"tie_word_embeddings": True}
    config, params = weights.load_hf(tiny.write_hf(tmp_path / "a", claims_tied, drawn))
    assert not config.tied and params["head"].shape == (32, 64)
    drawn.pop("lm_head.weight")
    config, params = weights.load_hf(tiny.write_hf(tmp_path / "b", LLAMA, drawn))
    assert config.tied and "head" not in params
    np.testing.assert_array_equal(
        weights.transposed_head(params)["head"], drawn["model.embed_tokens.weight"].T
    )


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa_tied_llama3", "llama_mha_bias", "qwen2"])
def test_gguf_holds_the_same_as_the_hf_directory(name, tmp_path):
    hf = QWEN if name == "qwen2" else tiny.CONFIGS[name]
    drawn, scaled = tiny.tensors(hf), "rope_scaling" in hf
    config, params = weights.load_hf(tiny.write_hf(tmp_path, hf, drawn))
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    extra = {"rope_freqs.weight": factors} if scaled else {}
    file = weights.open_gguf(tiny.write_gguf(tmp_path / "m.gguf", hf, drawn, extra))
    again, same = weights.load_gguf(file)
    assert_equal_params(params, same)
    if scaled:
        assert dict(again.rope_scaling)["factors"] == tuple(factors)
    else:
        assert again.rope_scaling is None
        assert (again.qkv_bias, again.out_bias) == (config.qkv_bias, config.out_bias)
        assert (again.head_dim, again.tied) == (config.head_dim, config.tied)


# Blocks of every ggml type, decoded by the letter of ggml-quants.h.


def half(block, at):
    return float(block[at : at + 2].view(np.float16)[0])


def nibbles(q):
    return np.concatenate((q & 15, q >> 4)).astype(float)


def scale_min(scales):
    q = scales.astype(int)
    low = [(q[j] & 63, q[j + 4] & 63) for j in range(4)]
    high = [
        ((q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4))
        for j in range(4, 8)
    ]
    return low + high


def k_blocks(block, quants, high_bits=None):
    d, dmin, pairs, out = half(block, 0), half(block, 2), scale_min(block[4:16]), []
    for j, (scale, low) in enumerate(pairs):
        q = quants[32 * (j // 2) : 32 * (j // 2) + 32]
        q = (q >> 4 if j % 2 else q & 15).astype(float)
        if high_bits is not None:
            q += 16.0 * ((high_bits >> j) & 1)
        out.append(d * scale * q - dmin * low)
    return np.concatenate(out)


def q6_k(block):
    d, out = half(block, 208), np.empty(256)
    scales = block[192:208].view(np.int8).astype(float)
    for n in range(2):
        low = block[64 * n : 64 * n + 64].astype(int)
        high = block[128 + 32 * n : 128 + 32 * n + 32].astype(int)
        for quarter in range(4):
            q = low[32 * (quarter % 2) :][:32]
            q = (q >> 4 if quarter > 1 else q & 15) | ((high >> 2 * quarter & 3) << 4)
            factors = np.repeat(scales[8 * n + 2 * quarter :][:2], 16)
            out[128 * n + 32 * quarter :][:32] = d * factors * (q - 32)
    return out


DECODERS = {  # type -> (bytes a block, where its float16 scales are, decoder)
    "F16": (64, range(0, 64, 2), lambda b: b.view(np.float16).astype(float)),
    "BF16": (64, range(0, 64, 2), lambda b: b.view(ml_dtypes.bfloat16).astype(float)),
    "Q8_0": (34, (0,), lambda b: half(b, 0) * b[2:].view(np.int8).astype(float)),
    "Q4_0": (18, (0,), lambda b: half(b, 0) * (nibbles(b[2:]) - 8)),
    "Q4_1": (20, (0, 2), lambda b: half(b, 0) * nibbles(b[4:]) + half(b, 2)),
    "Q4_K": (144, (0, 2), lambda b: k_blocks(b, b[16:])),
    "Q5_K": (176, (0, 2), lambda b: k_blocks(b, b[48:], b[16:48])),
    "Q6_K": (210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_ggml_blocks_decode(kind, tmp_path):
    size, halves, decode = DECODERS[kind]
    draw = np.random.RandomState(3)
    rows, blocks = 4, 2
    raw = draw.randint(0, 256, (rows * blocks, size)).astype(np.uint8)
    for at in halves:
        scale = draw.uniform(-1, 1, (rows * blocks, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    raw_type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("x.weight", raw.reshape(rows, -1), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = weights.open_gguf(tmp_path / "m.gguf")
    got = weights._dequantize(file.path, file.tensors["x.weight"])
    want = np.stack([decode(block) for block in raw]).reshape(rows, -1)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def edited(tmp_path, change):
    drawn = tiny.tensors(LLAMA)
    change(drawn)
    return tiny.write_hf(tmp_path, LLAMA, drawn)


NAME = "model.layers.1.mlp.up_proj.weight"


def poison(drawn):
    drawn[NAME][3, 3] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NAME), r"no tensor 'layers.1.mlp.up_proj.weight' of shape \[48, 32\]"),
        (lambda w: w.update({NAME: w[NAME].T.copy()}), r"has shape \[32, 48\]; .* \[48, 32\]"),
        (lambda w: w.update({NAME: w[NAME].astype(np.int8)}), "dtype I8; known are F32, F16, BF16"),
        (poison, "'layers.1.mlp.up_proj.weight' .* has NaN or Inf"),
    ],
)
def test_bad_tensors_are_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        weights.load_hf(edited(tmp_path, change))


def test_float16_overflow_is_refused(tmp_path):
    folder = edited(tmp_path, lambda w: w.update({NAME: w[NAME] * 1e6}))
    weights.load_hf(folder)
    with pytest.raises(ValueError, match="overflows float16"), np.errstate(over="ignore"):
        weights.load_hf(folder, np.float16)


def test_bad_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        weights.load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        weights.load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        weights.load_hf(tmp_path)
    folder = tiny.write_hf(tmp_path / "s", LLAMA, tiny.tensors(LLAMA), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="lacks the shard model-00002"):
        weights.load_hf(folder)
    folder = tiny.write_hf(tmp_path / "t", LLAMA, tiny.tensors(LLAMA))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged, message in ((whole[:-100], "is truncated"), (b"x" * 50, "no safetensors")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            weights.load_hf(folder)


def test_bad_ggufs(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(FileNotFoundError, match="is not a file"):
        weights.open_gguf(path)
    path.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ValueError, match=r"not a GGUF: it begins with b'PK"):
        weights.open_gguf(path)
    drawn = tiny.tensors(LLAMA)
    tiny.write_gguf(path, LLAMA, drawn)
    whole = path.read_bytes()
    for length in (6, 300, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated or damaged"):
            weights.open_gguf(path)
    missing = {n: x for n, x in drawn.items() if n != NAME}
    with pytest.raises(ValueError, match="no tensor 'layers.1.mlp.up_proj.weight'"):
        weights.load_gguf(weights.open_gguf(tiny.write_gguf(path, LLAMA, missing)))
    odd = {**drawn, NAME: drawn[NAME].astype(np.float64)}
    with pytest.raises(ValueError, match="has ggml type F64; known are F32"):
        weights.load_gguf(weights.open_gguf(tiny.write_gguf(path, LLAMA, odd)))
    save_file({"a": np.ones(2)}, path)
    with pytest.raises(ValueError, match="not a GGUF"):
        weights.open_gguf(path)
