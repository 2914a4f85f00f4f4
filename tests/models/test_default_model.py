"""The default model against golden values of transformers in float32 on the same weights."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "smollm2_135m_instruct.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def run(default_model):
    """Ids -> (log-probabilities' logits) of every column; right-padded to two lengths only."""
    model, params = default_model.model, default_model.params
    attend = tiny.dense_attend(model.rope, (None,))

    @jax.jit
    def layer(p, x):
        return model.block(model.config, p, x, lambda q, k, v, s: attend(0, q, k, v, s), None)[0]

    def forward(ids):
        width = 64 if len(ids) <= 64 else 1024
        x = model.embed(model.config, params, jnp.array([ids + [0] * (width - len(ids))]))
        for p in params["layers"]:
            x = layer(p, x)
        return np.asarray(model.head(model.config, params, x[0, : len(ids)]))

    return forward


def test_config(default_model):
    config = default_model.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied and config.rope_theta == 1e5 and set(default_model.model.windows) == {None}
    assert default_model.revision == GOLDEN["gguf_sha256"]


def test_tokenizer(default_model):
    tokenizer = default_model.tokenizer
    assert len(GOLDEN["tokenizer"]) >= 7
    for case in GOLDEN["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], bos=True) == case["ids"]  # this model wants none
        assert tokenizer.decode(case["ids"], special=True) == case["text"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.chat(messages) == GOLDEN["chat_prompt"]
    assert tokenizer.stop_ids == {2} and tokenizer.bos_id == 1 and not tokenizer.add_bos


@pytest.mark.parametrize("index", range(len(GOLDEN["prompts"])))
def test_logits(run, index):
    prompt = GOLDEN["prompts"][index]
    logits = run(prompt["ids"])
    last = logits[-1]
    assert np.argsort(-last)[:10].tolist() == prompt["last_top10_ids"]
    np.testing.assert_allclose(
        last[prompt["last_top10_ids"]], prompt["last_top10_logits"], atol=2e-2
    )
    totals = np.asarray(jax.nn.logsumexp(logits, axis=-1))
    assert totals[-1] == pytest.approx(prompt["last_logsumexp"], abs=2e-2)
    targets = np.array(prompt["ids"][1:])
    nll = totals[:-1] - logits[np.arange(len(targets)), targets]
    assert nll.mean() == pytest.approx(prompt["mean_nll"], abs=1e-3)


def test_greedy_continuation_of_the_chat_prompt(run, default_model):
    prompt, answer = GOLDEN["prompts"][1]["ids"], GOLDEN["greedy_continuation_of_prompt_1"]
    assert prompt == default_model.tokenizer.encode(GOLDEN["chat_prompt"])
    chosen = run(prompt + answer)[len(prompt) - 1 : -1].argmax(-1)
    assert chosen.tolist() == answer and answer[-1] in default_model.tokenizer.stop_ids
