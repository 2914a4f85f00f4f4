"""The same scores and budgets as NVIDIA/kvpress on the same tensors (extra `peers`)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

kvpress = pytest.importorskip("kvpress")
torch = pytest.importorskip("torch")

from transformers import LlamaConfig  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from kvjax import registry, select  # noqa: E402
from kvjax.eviction import tokens_of  # noqa: E402
from kvjax.types import PromptKV  # noqa: E402
from tests import prompts  # noqa: E402
from tests.prompts import Shape, compress, fast_jit  # noqa: E402

SHAPE = Shape(16, 6, 2, (150, 150))
N = 150
CONFIG = LlamaConfig(
    hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=8, rope_theta=10000.0, max_position_embeddings=4096,
)  # fmt: skip
LAYER = prompts.info(SHAPE)


@pytest.fixture(scope="module")
def world():
    """One attention layer of random weights: its torch tensors, and the prompt they make."""
    torch.manual_seed(0)
    CONFIG._attn_implementation = "sdpa"
    module = LlamaAttention(CONFIG, layer_idx=3).float()
    module.rotary_emb = LlamaRotaryEmbedding(CONFIG)
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj, module.v_proj):
            projection.weight.normal_(0, 0.12)
        hidden = torch.randn(2, N, 96) + 0.5 * torch.randn(1, 1, 96)
        hidden *= torch.exp(0.4 * torch.randn(2, N, 1))
        q, k, v = (
            p(hidden).view(2, N, -1, 16).transpose(1, 2)
            for p in (module.q_proj, module.k_proj, module.v_proj)
        )
        embeddings = module.rotary_emb(hidden, torch.arange(N)[None])
        rotated_q, rotated_k = apply_rotary_pos_emb(q, k, *embeddings)
        s = rotated_q @ repeat_kv(rotated_k, 3).transpose(2, 3) / 4
        s = s.masked_fill(torch.ones(N, N).triu(1).bool(), float("-inf"))
        attentions = s.softmax(-1)
    theirs = {
        "hidden": hidden, "k": rotated_k, "v": v, "attentions": attentions, "module": module,
        "kwargs": {"position_embeddings": embeddings},
    }  # fmt: skip
    arrays = (jnp.asarray(x.numpy()) for x in (rotated_q, rotated_k, k, v))
    return theirs, PromptKV(*arrays, jnp.zeros(2, jnp.int32))


def their_scores(press, world, attentions=False):
    its = world[0]
    with torch.no_grad():
        return press.score(
            its["module"], its["hidden"], its["k"], its["v"],
            its["attentions"] if attentions else None, its["kwargs"],
        ).numpy()  # fmt: skip


def score(method, prompt):
    return np.asarray(fast_jit(type(method).score, static_argnums=2)(method, prompt, LAYER))


def columns(method, prompt):
    found = fast_jit(type(method).select, static_argnums=2)(method, prompt, LAYER)[0]
    return np.asarray(found).tolist()


def top(scores, kept):
    return np.sort(torch.from_numpy(scores).topk(kept, -1).indices.numpy(), -1).tolist()


# (kvjax, press, its first and last columns that it scores by a constant, its scores over ours)
CASES = [
    ("snapkv", "SnapKVPress", {}, 0, 64, 1, False),
    ("knorm", "KnormPress", {}, 0, 0, 1, False),
    ("keydiff", "KeyDiffPress", {}, 0, 0, 1, False),
    ("tova", "TOVAPress", {}, 0, 1, 1, False),
    ("expected_attention", "ExpectedAttentionPress", {}, 4, 0, 1, False),
    ("expected_attention", "ExpectedAttentionPress",
     {"covariance": False, "value_norm": False}, 4, 0, 1, False),
    # h2o sums over the three heads of a group where ObservedAttentionPress takes their mean
    ("h2o", "ObservedAttentionPress", {}, 0, 0, 1 / 3, True),
]  # fmt: skip


@pytest.mark.parametrize("name,press,change,first,last,factor,attentions", CASES, ids=str)
def test_scores_and_choices_agree(name, press, change, first, last, factor, attentions, world):
    theirs_change = {{"covariance": "use_covariance", "value_norm": "use_vnorm"}[k]: v
                     for k, v in change.items()}  # fmt: skip
    theirs = their_scores(getattr(kvpress, press)(0.5, **theirs_change), world, attentions)
    kept = tokens_of(1 - 0.45, N)
    method = registry.make(f"kvpress:{name}", budget=kept, **change)
    if name == "h2o":
        ours = score(method, world[1]) / np.arange(N, 0, -1)
    else:
        ours = score(method, world[1])
    scored = slice(first, N - last)
    np.testing.assert_allclose(
        ours[..., scored] * factor, theirs[..., scored], rtol=2e-4, atol=2e-6
    )
    assert np.std(theirs[..., scored]) > 1e-5
    assert columns(method, world[1]) == top(theirs, kept)


def test_streaming_llm_keeps_the_same(world):
    for ratio in (0.3, 0.9):
        press = kvpress.StreamingLLMPress(ratio)
        kept = int(N * (1 - ratio))
        method = registry.make("kvpress:streaming_llm", budget=kept)
        assert columns(method, world[1]) == top(their_scores(press, world), kept)


def test_pyramidkv_budgets(world):
    module = world[0]["module"]
    compared = 0
    for n, ratio in ((4000, 0.5), (4000, 0.4), (1500, 0.6), (150, 0.3)):
        press = kvpress.PyramidKVPress(ratio, window_size=8)
        ours = select.pyramid_budgets(round(n * (1 - ratio)) + 8, 8, 8, 20.0, n)
        theirs = []
        for layer in range(8):
            module.layer_idx = layer
            theirs.append(press.get_layer_budget(module, n))
        module.layer_idx = 3
        if len(set(theirs)) == 1:  # it fell back to the same for all
            assert theirs[0] == round(n * (1 - ratio))
            continue
        assert all(abs(a - 8 - b) <= 1 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_adakv_keeps_the_same_without_a_floor_and_as_many_with_one(ratio, world):
    """With a floor kvpress lifts a head to it; the paper, and kvjax, mix it into every head's."""
    its, prompt = world
    module = its["module"]
    kept = tokens_of(1 - ratio, N)
    for floor in (0.0, 0.2):
        press = kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, 16, 5), alpha_safeguard=floor)
        with torch.no_grad():
            press.compress(module, its["hidden"], its["k"], its["v"], None, its["kwargs"])
        hidden = np.zeros((2, 2, N), bool)
        hidden[tuple(x.numpy() for x in module.masked_key_indices)] = True
        method = registry.make("kvpress:adakv", budget=kept, window=16)
        cache = compress(dataclasses.replace(method, floor=floor), prompt, LAYER)
        where = np.asarray(cache.body.materialize()[2])
        ours = [[sorted(h[h >= 0].tolist()) for h in row] for row in where]
        theirs = [[np.flatnonzero(~h).tolist() for h in row] for row in hidden]
        for row in range(2):
            assert sum(map(len, ours[row])) == sum(map(len, theirs[row])) == 2 * kept
            if floor == 0.0:
                assert ours[row] == theirs[row]
            for a, b in zip(ours[row], theirs[row], strict=True):  # the better of a head's tokens
                assert set(a) <= set(b) or set(b) <= set(a)
