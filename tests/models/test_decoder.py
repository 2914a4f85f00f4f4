import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decoder, weights
from models.config import Config
from tests.models import tiny

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tiny.json").read_text())


def random_params(config, seed, dtype=jnp.float32):
    """The layout of `init`, filled by numpy: nothing to compile."""
    draw = np.random.RandomState(seed)
    layout = jax.eval_shape(lambda k: decoder.init(config, k, dtype), jax.random.key(0))

    def fill(leaf):
        noise = draw.normal(size=leaf.shape) * leaf.shape[0] ** -0.5
        return jnp.asarray(noise if len(leaf.shape) == 2 else 1.0 + 0.1 * noise, leaf.dtype)

    return jax.tree.map(fill, layout)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    hf = tiny.CONFIGS[name]
    config, params = weights.load_hf(tiny.write_hf(tmp_path, hf, tiny.tensors(hf)))
    got = tiny.logits(config, params, tiny.TOKENS)
    assert got.shape == (1, 24, 64)
    np.testing.assert_allclose(got[0, GOLDEN["columns"]], GOLDEN[name], atol=1e-4)


def test_windows_are_per_layer():
    def windows(**fields):
        return Config.from_hf(tiny.CONFIGS["llama_gqa"] | fields).windows

    assert windows(model_type="mistral", sliding_window=None) == (None, None)
    assert windows(model_type="mistral") == (4096, 4096)
    assert windows(model_type="qwen2", sliding_window=8) == (None, None)
    qwen = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}
    assert windows(**qwen, max_window_layers=1) == (None, 8)
    types = ["sliding_attention", "full_attention"]
    assert windows(**qwen, layer_types=types) == (8, None)
    assert windows(model_type="mistral", sliding_window=8, layer_types=types) == (8, None)


def test_blocks_of_all_layers_share_one_trace():
    config = Config.from_hf(tiny.CONFIGS["qwen3_tied_wide_heads"] | {"num_hidden_layers": 4})
    params = random_params(config, 0)
    model = decoder.model(config)
    traces = []

    @jax.jit
    def layer(p, x):
        traces.append(1)
        return model.block(config, p, x, lambda q, k, v, s: (q, s), None)[0]

    x = model.embed(config, params, jnp.asarray(tiny.TOKENS))
    for p in params["layers"]:
        x = layer(p, x)
    assert len(traces) == 1 and hash(model) == hash(decoder.model(config))
    assert model.head(config, params, x[:, -1]).shape == (1, 64)


def test_attend_gets_unrotated_heads_first_and_the_layer_number():
    config = Config.from_hf(tiny.CONFIGS["mistral_window_wide_heads"])
    params = random_params(config, 0)
    seen = []

    def attend(layer, q, k, v, state):
        seen.append((layer, q.shape, k.shape, v.shape))
        return q, state + 1

    same = jnp.full((1, 3), 5, jnp.int32)
    _, states = decoder.forward(params, config, same, attend, (0, 10))
    assert states == (1, 11)
    assert seen == [(i, (1, 4, 3, 16), (1, 2, 3, 16), (1, 2, 3, 16)) for i in (0, 1)]

    def constant(layer, q, k, v, state):
        np.testing.assert_allclose(q[:, :, 0], q[:, :, 2], atol=1e-6)  # same token, no rotation
        return q, state

    decoder.forward(params, config, same, constant, (0, 0))
    with pytest.raises(ValueError, match="1 states were given; 2 layers"):
        decoder.forward(params, config, same, attend, (0,))


def test_layout_and_tied_head_equals_its_transposed_copy():
    for name in ("llama_mha_bias", "qwen3_tied_wide_heads"):
        config = Config.from_hf(tiny.CONFIGS[name])
        params = random_params(config, 1, jnp.bfloat16)
        shapes = decoder.layer_shapes(config)
        assert [{k: v.shape for k, v in p.items()} for p in params["layers"]] == [shapes] * 2
        assert params["layers"][0]["qkv"].dtype == jnp.bfloat16
        assert params["layers"][0]["norm_mlp"].dtype == jnp.float32
        assert ("head" in params) != config.tied
    x = jnp.asarray(np.random.RandomState(2).normal(size=(1, 3, 32)), jnp.bfloat16)
    logits = decoder.head(config, params, x)
    assert logits.dtype == jnp.float32
    copied = decoder.head(config, weights.transposed_head(params), x)
    np.testing.assert_allclose(logits, copied, atol=1e-2)


def test_init_draws_weights_of_unit_gain():
    config = Config.from_hf(tiny.CONFIGS["llama_gqa"] | {"num_hidden_layers": 1})
    params = decoder.init(config, jax.random.key(0))
    assert params["layers"][0]["down"].std() == pytest.approx(48**-0.5, rel=0.1)
    assert params["norm"].mean() == pytest.approx(1.0, abs=0.1) and params["norm"].std() > 0
    assert not np.array_equal(params["head"], params["embedding"].T)


def test_forward_is_differentiable_and_bfloat16_is_close(tmp_path):
    hf = tiny.CONFIGS["llama_gqa"]
    config = Config.from_hf(hf)
    _, params = weights.load_hf(tiny.write_hf(tmp_path, hf, tiny.tensors(hf)))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim == 2 else x, params)
    full, half = (tiny.logits(config, p, tiny.TOKENS) for p in (params, low))
    assert np.abs(full - half).max() < 0.2 and np.abs(full).max() > 1.0
    attend = tiny.dense_attend(decoder.model(config).rope, config.windows)

    def loss(p):
        tokens = jnp.asarray(tiny.TOKENS)
        return decoder.forward(p, config, tokens, attend, (None, None))[0].std()

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss))(params))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)


def test_out_of_vocabulary_pads_do_not_poison():
    config = Config.from_hf(tiny.CONFIGS["llama_gqa"])
    params = random_params(config, 4)
    x = decoder.embed(config, params, jnp.array([[-1, 0, 63, 64]]))
    assert np.isfinite(x).all()
    assert dataclasses.replace(config, tied=True) != config
