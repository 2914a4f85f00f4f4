import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.methods.anchorkv import AnchorKV
from kvjax.methods.full import Full
from kvjax.methods.kivi import KIVI
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.rope import rotate
from kvjax.types import PromptShape
from models import decoder
from models.config import Config

CONFIG = Config(
    architecture="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=48, vocab_size=61, norm_epsilon=1e-5, rope_theta=10000.0,
    max_position_embeddings=512, windows=(None, 9),
)  # fmt: skip
LENGTHS = (20, 11)


@functools.cache
def setup():
    model, params = decoder.model(CONFIG), decoder.init(CONFIG, jax.random.key(3))
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 61, n).tolist() for n in LENGTHS]
    tokens, starts = decode.left_pad(rows)
    return model, params, rows, decode.prefill(model, params, tokens, starts, dtype=jnp.float32)


def caches(method=None, reserve=12):
    model, _, _, filled = setup()
    return decode.compress(method or Full(), filled.prompts, model, reserve=reserve)


def generate(steps=6, **options):
    model, params, _, filled = setup()
    return decode.generate(
        model, params, caches(), filled.logits, filled.lengths, max_new_tokens=steps, **options
    )[0]


def test_left_pad():
    tokens, starts = decode.left_pad([[1, 2, 3], [4]], multiple=4, pad=9)
    assert tokens.tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]] and starts.tolist() == [1, 3]
    for rows in ([], [[1], []]):
        with pytest.raises(ValueError, match="at least 1 token"):
            decode.left_pad(rows)


def forward_logits(tokens):
    """Logits of every token by one dense pass, no cache."""
    model, params, *_ = setup()

    def attend(layer, q, k, v, state):
        at = jnp.arange(q.shape[2], dtype=jnp.int32)
        q, k = rotate(model.rope, q, at), rotate(model.rope, k, at)
        k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / 4
        mask = at[None] <= at[:, None]
        if CONFIG.windows[layer] is not None:
            mask &= at[None] > at[:, None] - CONFIG.windows[layer]
        p = jax.nn.softmax(jnp.where(mask[None, None], s, -1e30), -1)
        return jnp.einsum("bnts,bnsh->bnth", p, v), state

    tokens = jnp.asarray([tokens], jnp.int32)
    return np.asarray(decoder.forward(params, CONFIG, tokens, attend, [None, None])[0][0])


def test_greedy_decoding_is_the_cacheless_model():
    _, _, rows, filled = setup()
    result = generate(5, keep_logits=True)
    for i, row in enumerate(rows):
        want = forward_logits(row + result.tokens[i].tolist())[len(row) - 1 :]
        np.testing.assert_allclose(filled.logits[i], want[0], atol=1e-4)
        np.testing.assert_allclose(result.logits[i], want[:5], atol=1e-4)
        assert result.tokens[i].tolist() == want[:5].argmax(-1).tolist()


def test_stop_tokens_and_the_limit():
    free = generate(6)
    assert free.lengths.tolist() == [6, 6] and free.stopped.tolist() == [False, False]
    stop = int(free.tokens[0, 2])
    first = free.tokens[0].tolist().index(stop)
    ended = generate(6, stop_ids=[stop])
    assert ended.tokens[0].tolist() == free.tokens[0, : first + 1].tolist() + [-1] * (5 - first)
    assert int(ended.lengths[0]) == first + 1 and bool(ended.stopped[0])
    if stop not in free.tokens[1].tolist():  # its neighbour goes on as before
        assert ended.tokens[1].tolist() == free.tokens[1].tolist() and not bool(ended.stopped[1])
    both = generate(6, stop_ids=[int(free.tokens[0, 0]), int(free.tokens[1, 0])])
    assert both.lengths.tolist() == [1, 1] and both.stopped.all()


def test_sampling_is_reproducible_and_rows_are_independent():
    key = jax.random.key(5)
    a, b = generate(8, temperature=1.5, key=key), generate(8, temperature=1.5, key=key)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    other = generate(8, temperature=1.5, key=jax.random.key(6))
    assert (np.asarray(a.tokens) != np.asarray(other.tokens)).any()
    cold = generate(8, temperature=1e-4, key=key)
    np.testing.assert_array_equal(cold.tokens, generate(8).tokens)
    nucleus = generate(8, temperature=1.0, top_p=1e-6, key=key)
    np.testing.assert_array_equal(nucleus.tokens, generate(8).tokens)
    rows = jax.random.split(key, 2)
    swapped = np.asarray(generate(8, temperature=1.5, key=rows[::-1]).tokens)
    assert (swapped != np.asarray(generate(8, temperature=1.5, key=rows).tokens)).any()


def test_sample_keeps_the_nucleus_and_its_probabilities():
    p = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32))[None], (6000, 5))
    keys = jax.random.split(jax.random.key(0), 6000)

    def shares(temperature, top_p):
        drawn = np.asarray(decode.sample(logits, keys, temperature, top_p))
        return np.bincount(drawn, minlength=5) / 6000

    np.testing.assert_allclose(shares(1.0, 1.0), p, atol=0.03)
    got = shares(1.0, 0.8)  # 0.5 + 0.25 < 0.8 <= 0.9
    assert (got[3:] == 0).all()
    np.testing.assert_allclose(got[:3], p[:3] / 0.9, atol=0.03)
    assert shares(1.0, 0.49)[0] == 1 and shares(1.0, 0.51)[1] > 0.2
    hot = p**0.5 / (p**0.5).sum()
    np.testing.assert_allclose(shares(2.0, 1.0), hot, atol=0.03)


def test_bad_settings_are_named():
    for options, message in [
        ({"steps": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0}, "must be given a key"),
        ({"steps": 13}, "exceeds the room of the cache, 12 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(**options)


def test_extend_is_decode_steps_and_checks_its_room():
    model, params, _, filled = setup()
    question = np.random.default_rng(1).integers(0, 61, (2, 5))
    positions = filled.lengths[:, None] + np.arange(5)[None]
    positions[1, 3:] = -1  # a shorter question, right-padded
    tokens, at = jnp.asarray(question, jnp.int32), jnp.asarray(positions, jnp.int32)
    hidden, after = decode.extend(model, params, caches(), tokens, at)
    logits = np.asarray(decode.head(model, params, hidden))
    stepped = caches()
    for t in range(5):
        want, stepped = decode.decode_step(model, params, stepped, tokens[:, t], at[:, t])
        for row in range(2):
            if positions[row, t] >= 0:
                np.testing.assert_allclose(logits[row, t], want[row], atol=1e-4)
    assert [c.tail.lengths.tolist() for c in after] == [[5, 3], [5, 3]]
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(stepped), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(ValueError, match=r"room for \[3 3\] more tokens and \[5 3\].*>= 2 more"):
        decode.extend(model, params, caches(reserve=3), tokens, at)
    full = decode.extend(model, params, caches(reserve=5), tokens, at)[1]  # exactly enough
    assert full[0].room().tolist() == [0, 2]


def test_extend_splits_what_a_cache_cannot_take_at_once():
    model, params, _, filled = setup()
    method = KIVI(k_bits=8, v_bits=8, group=8, residual_length=8)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 19)), jnp.int32)
    at = jnp.asarray(filled.lengths[:, None] + np.arange(19)[None], jnp.int32)
    start = caches(method, 24)
    hidden, after = decode.extend(model, params, start, tokens, at)
    exact, _ = decode.extend(model, params, caches(reserve=24), tokens, at)
    want = decode.head(model, params, exact)
    got = decode.head(model, params, hidden)
    assert float(jnp.abs(got - want).max()) < 0.1 * float(jnp.abs(want).max())
    assert after[0].lengths.tolist() == [39, 30] and after[0].k_folded.tolist() == [32, 24]


def test_layers_with_a_sliding_window_are_never_compressed():
    kept = caches(StreamingLLM(budget=8, sinks=2))
    assert kept[0].body.k.shape[2] == 8 and kept[1].body.k.shape[2] == 20
    assert kept[1].window == 9


def test_needs_flush():
    assert not decode.needs_flush(None, [8])
    assert decode.needs_flush(8, np.array([7, 16])) and not decode.needs_flush(8, [7, 9])


def test_prefill_refuses_an_empty_row():
    model, params, *_ = setup()
    with pytest.raises(ValueError, match="at least 1 token"):
        decode.prefill(model, params, jnp.zeros((1, 4), jnp.int32), jnp.asarray([4], jnp.int32))
    with pytest.raises(ValueError, match=r"must be \[B, T\] and \[B\]"):
        decode.prefill(model, params, jnp.zeros((1, 4), jnp.int32), jnp.zeros(2, jnp.int32))


def test_a_row_that_cannot_be_stored_within_its_own_bytes_is_refused():
    model, params, *_ = setup()
    tokens, starts = decode.left_pad([list(range(1, 60)) * 5, [1, 2, 3]])
    prompts = decode.prefill(model, params, tokens, starts).prompts
    method = AnchorKV(theta=0.7)
    with pytest.raises(ValueError, match="cannot pay for the anchors and coefficients of 3 tokens"):
        decode.compress(method, prompts, model, reserve=1)


def test_caches_say_themselves_when_they_fold():
    model, params, *_ = setup()
    tokens, starts = decode.left_pad([[1, 2, 3, 4]])
    prompts = decode.prefill(model, params, tokens, starts).prompts
    for method, interval in (
        (KIVI(group=8, residual_length=16), 16),
        (Full(), None),
    ):
        assert decode.flush_interval(decode.compress(method, prompts, model, reserve=1)) == interval


def test_a_budget_spread_over_layers_stays_within_its_total():
    config = dataclasses.replace(CONFIG, num_layers=4, windows=(None, None, 9, None))
    model, params = decoder.model(config), decoder.init(config, jax.random.key(3))
    rows = [list(range(1, 61)) * 2, list(range(3, 50)) * 2]
    filled = decode.prefill(model, params, *decode.left_pad(rows), dtype=jnp.float32)
    method = registry.make("pooled:anchorkv", theta=0.3, window=8, extra_anchors=8)
    caches = decode.compress(method, filled.prompts, model, reserve=4)
    full = PromptShape(120, model.num_kv_heads, model.head_dim).full_bytes
    each = [int(accounting.live_bytes(cache).stored[0]) for cache in caches]
    assert each[2] > full  # the layer with a window stays full, in float32
    del each[2]
    assert 0.25 * 3 * full < sum(each) <= 0.3 * 3 * full
    assert len(set(each)) > 1  # layers do differ
    with pytest.raises(ValueError, match="compress after prefill"):
        decode.prefill(model, params, *decode.left_pad(rows), method=method)
