"""Laws on real keys and values: the first layers of the default model on a page of prose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.attention import attend_dense
from kvjax.evaluation import continuation, needle
from kvjax.rope import rotate
from kvjax.types import LayerInfo, PromptShape
from tests import prompts

LAYERS, TOKENS = 3, 320


@pytest.fixture(scope="module")
def slice_of(default_model):
    """Model and params of the first layers alone, and a prefill with rows of two lengths."""
    windows = (None,) * LAYERS
    config = dataclasses.replace(default_model.config, num_layers=LAYERS, windows=windows)
    model = default_model.model._replace(config=config, windows=windows)
    params = {**default_model.params, "layers": default_model.params["layers"][:LAYERS]}
    text = needle.running_text(default_model.tokenizer, TOKENS)
    tokens, starts = decode.left_pad([text, text[: TOKENS - 38]])
    return model, params, decode.prefill(model, params, tokens, starts)


@pytest.mark.parametrize("case", prompts.cases())
def test_step_is_dense_attention_and_stored_bytes_are_the_predicted_ones(slice_of, case):
    model, _, prefill = slice_of
    shape = PromptShape(TOKENS, model.num_kv_heads, model.head_dim)
    method = prompts.setting(case, shape)
    prompt = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, prefill.prompts[1]
    )
    info = LayerInfo(LAYERS, None, 8, model.rope)
    cache = jax.jit(lambda p: method.for_layer(1, LAYERS).compress(p, info))(prompt)
    resolved = method.resolve(shape) if hasattr(method, "resolve") else method
    rows = [shape._replace(num_tokens=int(n), itemsize=4) for n in prefill.lengths]
    predicted = [resolved.for_layer(1, LAYERS).layer_bytes(row) for row in rows]
    assert accounting.live_bytes((cache,)).stored.tolist() == predicted
    rng = np.random.default_rng(0)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, h, 3, model.head_dim)), jnp.float32) for h in heads
    )
    positions = continuation.continuation_positions(prefill.lengths, [3, 2], 3)
    out, after = jax.jit(lambda c, *x: c.step(*x))(cache, q, k, v, positions)

    @jax.jit
    def dense(cache):
        held_k, held_v, where = cache.materialize()
        return attend_dense(rotate(model.rope, q, positions), held_k, held_v, positions, where)

    want = dense(after)
    if cache.evicts:  # a step of several tokens is that many steps: the cache is the last one's
        last = jnp.asarray([2, 1])[:, None, None, None]
        out, want = (jnp.take_along_axis(x, last, 2) for x in (out, want))
    scale = float(jnp.abs(want).max())
    assert float(jnp.abs(out - want).max()) <= 1e-5 * max(scale, 1.0)


@pytest.mark.parametrize("name", [n for n in registry.names() if hasattr(registry.get(n), "exact")])
def test_the_exact_setting_gives_the_full_caches_tokens(slice_of, name):
    model, params, prefill = slice_of
    made = []
    for method in (registry.make("full"), registry.make(name).exact()):
        caches = decode.compress(method, prefill.prompts, model, reserve=12)
        out, _ = decode.generate(
            model, params, caches, prefill.logits, prefill.lengths, max_new_tokens=12
        )
        made.append(np.asarray(out.tokens))
    assert (made[0] == made[1]).all()
