"""The symmetric segment cache: its eight contracts, and its arithmetic in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, quant
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.methods.symmetric import Symmetric, encode
from kvjax.types import PromptShape
from tests.methods.test_kivi import DIM, KV_HEADS, R, layer, make_prompt, rows_of
from tests.prompts import compress, fast_jit, step

METHOD = Symmetric(residual_length=R)
QMAX = 7
view = fast_jit(lambda cache: cache.materialize())
unpacked = fast_jit(lambda x: quant.unpack(x, 4, DIM) - QMAX)


def new_tokens(rows, lengths, i):
    """q, k, v [B, *, 1, H] of the i-th token after the prompts."""
    rows = list(zip(rows, lengths, strict=True))
    return [jnp.asarray(np.stack([row[x][:, n + i] for row, n in rows]))[:, :, None] for x in "qkv"]


def feed(cache, rows, lengths, steps, at=0):
    """Append `steps` tokens one by one, with the loop's flushes."""
    first = np.asarray(cache.lengths + cache.shift)
    for i in range(steps):
        positions = first + i
        if decode.needs_flush(METHOD.flush_every, positions):
            cache = decode.flush((cache,))[0]
        new = new_tokens(rows, lengths, at + i)
        _, cache = step(cache, *new, jnp.asarray(positions[:, None], jnp.int32))
    return cache


def prompt_of(lengths, steps=0, reserve=4 * R, dtype="float32", method=METHOD):
    rows = rows_of(lengths, steps)
    prompt = make_prompt(rows, lengths, max(lengths) + 2, dtype)
    return rows, prompt, compress(method, prompt, layer(reserve))


def segments_of(n, folded):
    """(start, end) of each segment of a row whose prompt had n tokens."""
    first = max(n - R, 0)
    cuts = ([0] if first else []) + list(range(first, folded + 1, R))
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def exact_scale(x, axis):
    return (np.abs(x).max(axis) / np.float32(QMAX)).astype(np.float16)


def test_contract_1_up_to_r_tokens_nothing_is_quantized():
    lengths = (1, R - 1, R)
    rows, prompt, cache = prompt_of(lengths, 1)
    full = compress(Full(), prompt, layer())
    assert cache.body.folded.tolist() == [0, 0, 0] and cache.body.segments.tolist() == [0, 0, 0]
    (k, v, where), (k2, v2, _) = view(cache), view(full.body)
    for row, n in enumerate(lengths):
        assert np.asarray(where)[row, 0].tolist() == [*range(n)] + [-1] * (where.shape[2] - n)
        for a, b in ((k, k2), (v, v2)):
            np.testing.assert_array_equal(np.asarray(a)[row, :, :n], np.asarray(b)[row, :, :n])
    new = new_tokens(rows, lengths, 0)
    positions = jnp.asarray(lengths, jnp.int32)[:, None]
    (got, _), (want, _) = (step(c, *new, positions) for c in (cache, full))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-6, rtol=0)


def test_contract_2_after_the_prompt_all_but_the_last_r_are_coded():
    lengths = tuple(range(R - 2, 2 * R + 3))
    _, prompt, cache = prompt_of(lengths)
    assert cache.body.folded.tolist() == [max(n - R, 0) for n in lengths]
    assert cache.recent.tolist() == [min(n, R) for n in lengths]
    (k, v, _), (k2, v2, _) = view(cache), view(compress(Full(), prompt, layer()).body)
    for row, n in enumerate(lengths):
        old = max(n - R, 0)
        for a, b in ((k, k2), (v, v2)):
            a, b = np.asarray(a)[row], np.asarray(b)[row]
            np.testing.assert_array_equal(a[:, old:n], b[:, old:n])
            assert old == 0 or np.abs(a[:, :old] - b[:, :old]).max() > 1e-4


def test_contract_3_key_scales_are_one_a_segment_and_channel():
    lengths, steps = (3 * R, R + 5, 3), 3 * R + 1
    rows, _, cache = prompt_of(lengths, steps)
    cache = feed(cache, rows, lengths, steps)
    scale = np.asarray(cache.body.k_scale)
    assert scale.shape == (3, KV_HEADS, 1 + 4, DIM) and scale.dtype == np.float16
    for row, n in enumerate(lengths):
        spans = segments_of(n, int(cache.body.folded[row]))
        assert len(spans) == int(cache.body.segments[row]) >= 2
        for i, (start, end) in enumerate(spans):
            want = exact_scale(rows[row]["k"][:, start:end], 1)
            np.testing.assert_array_equal(scale[row, :, i], want)


def test_contract_4_value_scales_are_one_a_token():
    lengths, steps = (3 * R, R + 5), 2 * R + 1
    rows, _, cache = prompt_of(lengths, steps)
    cache = feed(cache, rows, lengths, steps)
    scale = np.asarray(cache.body.v_scale)
    assert scale.shape[3] == 1
    for row in range(2):
        folded = int(cache.body.folded[row])
        assert folded > lengths[row] - R
        want = exact_scale(rows[row]["v"][:, :folded], 2)
        np.testing.assert_array_equal(scale[row, :, :folded, 0], want)


def test_contract_5_codes_are_within_qmax_and_errors_within_half_a_scale():
    lengths, steps = (3 * R, R + 5), 2 * R + 1
    rows, _, cache = prompt_of(lengths, steps)
    cache = feed(cache, rows, lengths, steps)
    k, v, _ = view(cache)
    for row, n in enumerate(lengths):
        folded = int(cache.body.folded[row])
        for side, got, packed in (("k", k, cache.body.k_codes), ("v", v, cache.body.v_codes)):
            codes = np.asarray(unpacked(packed))[row, :, :folded]
            assert codes.min() == -QMAX and codes.max() == QMAX
            x = rows[row][side][:, :folded]
            if side == "v":
                scale = np.repeat(exact_scale(x, 2)[:, :, None], DIM, 2).astype(np.float32)
            else:
                scale = np.concatenate(
                    [
                        np.repeat(exact_scale(x[:, a:b], 1)[:, None], b - a, 1)
                        for a, b in segments_of(n, folded)
                    ],
                    1,
                ).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(got)[row, :, :folded], codes * scale)
            # a scale that float16 rounded down clips the largest value by up to qmax 2^-11 of it
            bound = scale * (0.5 + QMAX * 2.0**-11) + 1e-6
            error = np.abs(codes * scale - x)
            assert (error <= bound).all() and error.max() > 0.45 * scale.min()


def test_contract_6_a_flush_leaves_earlier_segments_as_they_are():
    lengths, steps = (3 * R, R + 5, 3), 2 * R + 1
    rows, _, cache = prompt_of(lengths, 2 * steps)
    cache = feed(cache, rows, lengths, steps)
    before = jax.tree.map(np.asarray, cache.body)  # the cache is donated
    segments = before.segments
    cache = feed(cache, rows, lengths, steps, steps)
    after = jax.tree.map(np.asarray, cache.body)
    assert (after.segments > segments).all()
    for row in range(3):
        old = before.folded[row]
        np.testing.assert_array_equal(
            after.k_scale[row, :, : segments[row]], before.k_scale[row, :, : segments[row]]
        )
        for name in ("k_codes", "v_codes", "v_scale"):
            np.testing.assert_array_equal(
                getattr(after, name)[row, :, :old], getattr(before, name)[row, :, :old]
            )


@pytest.mark.parametrize("k_bits,v_bits", [(4, 4), (8, 2), (3, 5)])
def test_contract_7_packed_and_container_bytes_are_exact(k_bits, v_bits):
    lengths = (2 * R + 5, R, R + 1)
    method = dataclasses.replace(METHOD, k_bits=k_bits, v_bits=v_bits)
    _, _, cache = prompt_of(lengths, dtype="bfloat16", method=method)
    coded = np.array([R + 5, 0, 1])
    each = -(-DIM * k_bits // 8) + -(-DIM * v_bits // 8)
    packed, container = KV_HEADS * coded * each, KV_HEADS * coded * 2 * DIM
    assert cache.body.packed_bytes.tolist() == packed.tolist()
    assert cache.body.container_bytes.tolist() == container.tolist()
    scales = KV_HEADS * (2 * coded + 2 * DIM * (coded > 0))
    exact = KV_HEADS * np.minimum(lengths, R) * 4 * DIM
    want = packed + scales + exact + 16  # four counters a row
    assert accounting.live_bytes(cache).stored.tolist() == want.tolist()
    for n, size in zip(lengths, want, strict=True):
        assert method.layer_bytes(PromptShape(n, KV_HEADS, DIM)) == size
    # every code there is comes back
    qmax = 2 ** (k_bits - 1) - 1
    x = np.resize(np.arange(-qmax, qmax + 1), (1, 1, 40, DIM)).astype(np.float32)
    bits = encode(jnp.asarray(x), jnp.ones((1, 1, 1, 1), jnp.float16), k_bits)
    assert bits.dtype == jnp.uint8 and bits.shape[3] == -(-DIM * k_bits // 8)
    np.testing.assert_array_equal(np.asarray(quant.unpack(bits, k_bits, DIM)) - qmax, x)


def test_contract_8_zero_channels_and_tokens_come_back_as_zero():
    n = 3 * R
    rows = rows_of((n,), 0)
    for side in "kv":
        rows[0][side][:, :, 3] = rows[0][side][:, 5] = 0
    cache = compress(METHOD, make_prompt(rows, (n,), n), layer())
    for x in view(cache)[:2]:
        x = np.asarray(x)[0, :, :n]
        assert np.isfinite(x).all()
        assert (x[:, :, 3] == 0).all() and (x[:, 5] == 0).all() and np.abs(x).max() > 1
    tiny = np.full((1, 1, 1, DIM), 1e-9, np.float32)  # its scale underflows
    bits = encode(jnp.asarray(tiny), jnp.zeros((1, 1, 1, 1), jnp.float16), 4)
    assert (np.asarray(unpacked(bits)) == 0).all()


def test_a_prompt_that_lost_tokens_keeps_index_and_position_apart():
    lengths, lost, steps = (R + 5, 3 * R), np.array([7, 100]), 4 * R + 1
    rows = rows_of(lengths, steps)
    prompt = make_prompt(rows, lengths, max(lengths))
    moved = np.asarray(lengths) + lost
    prompt = dataclasses.replace(prompt, next_positions=jnp.asarray(moved, jnp.int32))
    cache = feed(compress(METHOD, prompt, layer(5 * R + 1)), rows, lengths, steps)
    k, _, where = (np.asarray(x) for x in view(cache))
    for row, n in enumerate(lengths):
        total, folded = n + steps, int(cache.body.folded[row])
        assert where[row, 0].tolist()[:total] == [lost[row] + i for i in range(total)]
        assert R <= total - folded < 3 * R and folded >= n
        np.testing.assert_array_equal(k[row, :, folded:total], rows[row]["k"][:, folded:total])
        error = np.abs(k[row, :, :folded] - rows[row]["k"][:, :folded])
        assert error.max() < np.abs(rows[row]["k"]).max() / QMAX
    # R tokens at once, where the ring is fullest: causal among themselves by position
    assert np.asarray(cache.recent).max() > 2 * R
    q, k_new, v_new = (jnp.asarray(np.stack([r[x][:, :R] for r in rows])) for x in "qkv")
    positions = jnp.asarray(moved[:, None] + steps + np.arange(R), jnp.int32)
    out, cache = step(cache, q, k_new, v_new, positions)
    k, v, where = view(cache)
    want = attend_dense(q, k, v, positions, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=0)


def test_points_full_layers_and_errors():
    sizes = [m.layer_bytes(PromptShape(1024, 2, 64)) for m in Symmetric().points()]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    listed = Symmetric(full_layers=(0, -1))
    assert [type(listed.for_layer(i, 3)).__name__ for i in range(3)] == [
        "Full",
        "Symmetric",
        "Full",
    ]
    prompt = make_prompt(rows_of((40,), 0), (40,), 40)
    for changes, message in (
        ({"k_bits": 1}, "k_bits=1 must be 2 to 8"),
        ({"v_bits": 9}, "v_bits=9 must be 2 to 8"),
        ({"residual_length": 0}, "residual_length=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(METHOD, **changes).compress(prompt, layer())
