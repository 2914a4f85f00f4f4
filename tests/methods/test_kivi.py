"""KIVI against a token-by-token numpy simulation written from its reference's schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.methods.kivi import KIVI
from kvjax.rope import Rope
from kvjax.types import LayerInfo, PromptKV, PromptShape
from tests.prompts import compress, fast_jit, step

R, GROUP, DIM, HEADS, KV_HEADS = 16, 8, 16, 4, 2
view = fast_jit(lambda cache: cache.materialize())
STILL = Rope((0.0,) * (DIM // 2))  # rotates by nothing: codes are compared to the bit


def kivi(k_bits, v_bits, group, residual):
    return KIVI(k_bits=k_bits, v_bits=v_bits, group=group, residual_length=residual)


def quantize(x, bits, axis):
    """One group along an axis: min/max, stored as float16."""
    x = x.astype(np.float32)
    low = x.min(axis, keepdims=True).astype(np.float16)
    spread = (x.max(axis, keepdims=True) - low.astype(np.float32)) / np.float32(2**bits - 1)
    scale, zero = spread.astype(np.float16).astype(np.float32), low.astype(np.float32)
    code = np.clip(np.round((x - zero) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    return np.where(scale > 0, code, 0) * scale + zero


class Simulation:
    """One KV head. `keys` and `values` hold what attention reads, old tokens already rebuilt."""

    def __init__(self, k, v, k_bits, v_bits):
        self.bits = k_bits, v_bits
        n = len(k)
        self.k_old, self.k_new = [], list(k[n - n % R :])
        self.code_keys(k[: n - n % R])
        self.v_new = list(v[max(n - R, 0) :])
        self.v_old = [self.code_value(x) for x in v[: max(n - R, 0)]]

    def code_keys(self, block):
        for at in range(0, len(block), GROUP):  # a channel's group is GROUP consecutive tokens
            self.k_old += list(quantize(np.stack(block[at : at + GROUP]), self.bits[0], 0))

    def code_value(self, x):
        return quantize(x.reshape(-1, GROUP), self.bits[1], 1).reshape(-1)

    def step(self, q, k, v):
        """Attend for the query heads [G, D] of this KV head, then quantize what is due."""
        self.k_new.append(k)
        self.v_new.append(v)
        keys = np.stack(self.k_old + self.k_new).astype(np.float64)
        values = np.stack(self.v_old + self.v_new).astype(np.float64)
        s = q.astype(np.float64) @ keys.T / np.sqrt(DIM)
        p = np.exp(s - s.max(-1, keepdims=True))
        out = p / p.sum(-1, keepdims=True) @ values
        if len(self.k_new) == R:
            self.code_keys(self.k_new)
            self.k_new = []
        if len(self.v_new) == R + 1:
            self.v_old.append(self.code_value(self.v_new.pop(0)))
        return out


def rows_of(lengths, steps):
    rng = np.random.default_rng(5)
    return [
        {
            name: rng.normal(size=(heads, n + steps, DIM)).astype(np.float32)
            * (1 + 3 * (rng.random((heads, 1, DIM)) < 0.1))
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        }
        for n in lengths
    ]


def make_prompt(rows, lengths, columns, dtype="float32"):
    def stack(name):
        out = np.full((len(rows), rows[0][name].shape[0], columns, DIM), 77.0, np.float32)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            out[i, :, columns - n :] = row[name][:, :n]
        return jnp.asarray(out, dtype)

    q, k, v = (stack(n) for n in "qkv")
    return PromptKV(q, k, k, v, jnp.asarray([columns - n for n in lengths], jnp.int32))


def layer(reserve=40):
    return LayerInfo(1, None, reserve, STILL)


@pytest.mark.parametrize(
    "lengths,bits",
    [((R - 1, R, R + 1), (2, 2)), ((2 * R + 3, 3 * R), (4, 2)), ((3 * R, 5, 2 * R), (2, 8))],
)
def test_steps_match_the_simulation_at_every_residue(lengths, bits):
    steps = 2 * R + 3
    rows = rows_of(lengths, steps)
    method = kivi(bits[0], bits[1], GROUP, R)
    cache = compress(method, make_prompt(rows, lengths, max(lengths) + 2), layer())
    heads = [
        [Simulation(list(r["k"][h, :n]), list(r["v"][h, :n]), *bits) for h in range(KV_HEADS)]
        for r, n in zip(rows, lengths, strict=True)
    ]
    group = HEADS // KV_HEADS
    for i in range(steps):
        positions = np.asarray(lengths) + i
        if decode.needs_flush(method.flush_every, positions):
            cache = decode.flush((cache,))[0]
        new = [
            jnp.asarray(np.stack([r[x][:, n + i] for r, n in zip(rows, lengths, strict=True)]))
            for x in "qkv"
        ]
        q, k, v = (x[:, :, None] for x in new)
        for row, row_heads in enumerate(heads):  # what is read from codes before this step
            assert int(cache.k_folded[row]) == len(row_heads[0].k_old)
        out, cache = step(cache, q, k, v, jnp.asarray(positions[:, None], jnp.int32))
        for row, row_heads in enumerate(heads):
            assert int(cache.v_folded[row]) == len(row_heads[0].v_old)
            for h, head in enumerate(row_heads):
                at = slice(h * group, (h + 1) * group)
                mine = zip(new, (at, h, h), strict=True)
                want = head.step(*(np.asarray(x)[row, s] for x, s in mine))
                got = np.asarray(out)[row, at, 0]
                np.testing.assert_allclose(got, want, atol=2e-5, rtol=0, err_msg=f"{row} {i}")


def test_residual_schedule_golden():
    """Tokens coded on each side after a prompt, by the reference: K whole blocks, V all but R."""
    want = {1: (0, 0), 15: (0, 0), 16: (16, 0), 17: (16, 1), 31: (16, 15), 35: (32, 19),
            48: (48, 32)}  # fmt: skip
    rows = rows_of(tuple(want), 0)
    cache = compress(kivi(2, 2, GROUP, R), make_prompt(rows, tuple(want), 48), layer())
    got = list(zip(cache.k_folded.tolist(), cache.v_folded.tolist(), strict=True))
    assert got == list(want.values())
    assert cache.k_recent.tolist() == [n % R for n in want]
    assert cache.v_recent.tolist() == [min(n, R) for n in want]


def test_a_prompt_below_the_residual_window_is_the_full_cache_to_the_bit():
    lengths = (R - 1, 7)
    rows = rows_of(lengths, 0)
    prompt = make_prompt(rows, lengths, R + 3)
    cache = compress(kivi(2, 2, GROUP, R), prompt, layer())
    full = compress(Full(), prompt, layer())
    (k, v, where), (k2, v2, where2) = view(cache), view(full.body)
    for row, n in enumerate(lengths):
        for a, b in ((k, k2), (v, v2), (where, where2)):
            np.testing.assert_array_equal(np.asarray(a)[row, :, :n], np.asarray(b)[row, :, :n])


def test_every_residue_of_the_residual_window_is_coded_up_to_it_and_exact_after():
    lengths = tuple(range(1, 2 * R + 2))
    prompt = make_prompt(rows_of(lengths, 0), lengths, max(lengths) + 3)
    cache, full = (compress(m, prompt, layer(1)) for m in (kivi(2, 2, GROUP, R), Full()))
    got, want = view(cache), view(full.body)
    for row, n in enumerate(lengths):
        assert np.asarray(got[2])[row, 0].tolist()[:n] == list(range(n))
        assert (np.asarray(got[2])[row, :, n:] == -1).all()
        for side, old in ((0, n - n % R), (1, max(n - R, 0))):
            a, b = np.asarray(got[side])[row], np.asarray(want[side])[row]
            np.testing.assert_array_equal(a[:, old:n], b[:, old:n])
            assert old == 0 or 1e-3 < np.abs(a[:, :old] - b[:, :old]).max() < 4


def test_a_prompt_that_lost_tokens_keeps_index_and_position_apart():
    lengths, lost, steps = (R + 5, 3 * R), np.array([7, 100]), 3 * R + 1
    rows = rows_of(lengths, steps)
    moved = np.asarray(lengths) + lost
    prompt = make_prompt(rows, lengths, max(lengths))
    prompt = dataclasses.replace(prompt, next_positions=jnp.asarray(moved, jnp.int32))
    cache = compress(kivi(4, 4, GROUP, R), prompt, layer(steps + R))
    for i in range(steps):
        if decode.needs_flush(R, moved + i):
            cache = decode.flush((cache,))[0]
            assert (np.asarray(cache.k_recent) < R).all()
        new = [
            jnp.asarray(np.stack([r[x][:, n + i] for r, n in zip(rows, lengths, strict=True)]))
            for x in "qkv"
        ]
        new = (x[:, :, None] for x in new)
        _, cache = step(cache, *new, jnp.asarray((moved + i)[:, None], jnp.int32))
    # R tokens at once, where the ring is fullest: causal among themselves by position
    assert np.asarray(cache.k_recent).max() > R
    q, k_new, v_new = (jnp.asarray(np.stack([r[x][:, :R] for r in rows])) for x in "qkv")
    positions = jnp.asarray(moved[:, None] + steps + np.arange(R), jnp.int32)
    out, cache = step(cache, q, k_new, v_new, positions)
    k, v, where = view(cache)
    want = attend_dense(q, k, v, positions, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=0)
    for row, n in enumerate(lengths):
        total, folded = n + steps, int(cache.k_folded[row])
        found = np.asarray(where)[row, 0].tolist()[: total + R]
        assert found == [lost[row] + i for i in range(total + R)]
        assert folded >= n and folded % R == 0
        got = np.asarray(k)[row, :, :total]
        np.testing.assert_array_equal(got[:, folded:], rows[row]["k"][:, folded:total])
        error = np.abs(got[:, :folded] - rows[row]["k"][:, :folded])
        assert 1e-3 < error.max() < np.abs(rows[row]["k"]).max() / 15


def test_presets_points_and_layers_in_full_precision():
    for name, bits in (("paper", 2), ("rethink", 4)):
        method = registry.make(f"{name}:kivi")
        found = (method.k_bits, method.v_bits, method.group, method.residual_length)
        assert found == (bits, bits, 32, 128)
    points = KIVI().points()
    assert [(m.k_bits, m.v_bits) for m in points] == [(8, 8), (4, 4), (4, 2), (2, 2)]
    sizes = [m.layer_bytes(PromptShape(1024, 2, 64)) for m in points]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    method = KIVI(full_layers=(0, -1))
    layers = [method.for_layer(i, 4) for i in range(4)]
    assert [type(m) for m in layers] == [Full, KIVI, KIVI, Full]
    row = PromptShape(1024, 2, 64)
    want = (2 * Full().layer_bytes(row) + 2 * method.layer_bytes(row)) / 4
    assert accounting.layer_bytes(method, row, 4) == want
    with pytest.raises(ValueError, match=r"full_layers=\(4,\)"):
        KIVI(full_layers=(4,)).for_layer(0, 4)


def test_keys_are_grouped_by_channel_and_values_by_token():
    """A loud channel costs keys nothing and values a lot; a loud token the other way round."""
    rng = np.random.default_rng(0)
    n = 4 * R
    x = rng.normal(size=(1, KV_HEADS, n, DIM)).astype(np.float32)
    channel, token = x.copy(), x.copy()
    channel[..., 3] *= 100
    token[:, :, 5] *= 100

    def errors(x):
        x = jnp.asarray(x)
        prompt = PromptKV(jnp.zeros((1, HEADS, n, DIM)), x, x, x, jnp.zeros(1, jnp.int32))
        k, v, _ = compress(kivi(4, 4, GROUP, R), prompt, layer()).materialize()
        keep = np.ones((n, DIM), bool)
        keep[:, 3] = keep[5] = False
        keep[3 * R :] = False
        return [float(np.abs(np.asarray(a[:, :, :n] - x))[0][:, keep].mean()) for a in (k, v)]

    (k_channel, v_channel), (k_token, v_token) = errors(channel), errors(token)
    assert v_channel > 2 * k_channel and k_token > 1.1 * v_token


@pytest.mark.parametrize("bits,group", [((2, 2), 8), ((4, 2), 16), ((3, 8), 8)])
def test_bytes_are_the_formulas(bits, group):
    n = 3 * R + 5
    rows = rows_of((n,), 0)
    method = kivi(*bits, group, R)
    cache = compress(method, make_prompt(rows, (n,), n, "bfloat16"), layer())
    coded, old = 3 * R, n - R
    keys = coded * (DIM * bits[0] / 8 + 4 * DIM / group)
    values = old * (DIM * bits[1] / 8 + 4 * DIM / group)
    exact = 2 * DIM * (n % R + R)
    want = KV_HEADS * (keys + values + exact) + 16  # four counters a row
    assert accounting.live_bytes(cache).stored.tolist() == [want]
    assert method.layer_bytes(PromptShape(n, KV_HEADS, DIM)) == want


def test_settings_that_cannot_be_stored_say_what_can():
    prompt = make_prompt(rows_of((40,), 0), (40,), 40)
    with pytest.raises(ValueError, match="residual_length=20"):
        kivi(2, 2, 8, 20).compress(prompt, layer())
    with pytest.raises(ValueError, match=r"group=32 must divide head_dim=16.*\[8, 16\]"):
        kivi(2, 2, 32, 32).compress(prompt, layer())
    cache = compress(kivi(2, 2, 8, R), prompt, layer())
    x = jnp.zeros((1, KV_HEADS, R + 1, DIM))
    positions = jnp.arange(40, 41 + R, dtype=jnp.int32)[None]
    with pytest.raises(ValueError, match=f"residual_length={R}"):
        jax.eval_shape(cache.step, jnp.zeros((1, HEADS, R + 1, DIM)), x, x, positions)
