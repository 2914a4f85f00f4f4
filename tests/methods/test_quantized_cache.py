"""The quantized cache against numpy groups, HQQ's loop and a simulation of both policies."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, decode, registry
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.methods.quantized_cache import QuantizedCache, encode
from kvjax.quant import group_dequantize, unpack
from kvjax.types import PromptShape
from tests.methods.test_kivi import DIM, HEADS, KV_HEADS, R, layer, make_prompt, rows_of
from tests.prompts import compress, fast_jit, step
from tests.test_conformance import floats_carried

GROUP = 8
SMALL = QuantizedCache(group=GROUP, residual_length=R)
view = fast_jit(lambda cache: cache.materialize())
coded = fast_jit(encode, static_argnames=("axis", "bits", "group", "refine"))


def make(**changes):
    return dataclasses.replace(SMALL, **changes)


def decoded(x, lengths, axis, bits, refine, group=GROUP):
    """x [B, K, S, H] after a round trip, its scale and its zero, as numpy."""
    lengths = jnp.asarray(lengths, jnp.int32)
    packed, scale, zero = coded(
        jnp.asarray(x), lengths, axis=axis, bits=bits, group=group, refine=refine
    )
    codes = unpack(packed, bits, x.shape[-1])
    along = 2 if axis == "channel" else 3
    out = (group_dequantize(codes, scale, zero, along), scale, zero)
    return tuple(np.asarray(a) for a in out)


def shrink(x):
    size = np.abs(x)
    with np.errstate(divide="ignore"):
        return np.sign(x) * np.maximum(size - 0.1 * size**-0.3, 0)


def hqq(groups, real, bits, refine):
    """Groups [..., g] of one row, with HQQ's scale (codes a unit) and zero (in codes)."""
    top = 2**bits - 1
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    low = low.astype(np.float16).astype(np.float64)
    step = ((high - low) / top).astype(np.float16).astype(np.float64)  # as it is stored
    scale = 1 / step
    zero = -low * scale

    def quantize(zero):
        return np.clip(np.round(groups * scale + zero), 0, top)

    best = np.inf
    for _ in range(20 if refine == "exact" else 0):
        code = quantize(zero)
        read = (code - zero) / scale
        e = shrink(groups - read)
        zero = ((code - (groups - e) * scale) * real).sum(-1, keepdims=True)
        zero = zero / np.maximum(real.sum(-1, keepdims=True), 1)
        error = np.abs(groups - read)[real].mean()
        if error >= best:
            break
        best = error
    zero = -(-zero * step).astype(np.float16).astype(np.float64) * scale
    return (quantize(zero) - zero) * step


def oracle(x, n, axis, bits, refine):
    """The first n tokens of a row [K, S, H]."""
    x = x[:, :n].astype(np.float64)
    heads, _, dim = x.shape
    if axis == "token":
        groups = x.reshape(heads, n, dim // GROUP, GROUP)
        return hqq(groups, np.ones(groups.shape, bool), bits, refine).reshape(heads, n, dim)
    extra = -n % GROUP
    real = np.arange(n + extra) < n
    x = np.concatenate([x, np.repeat(x[:, -1:], extra, 1)], 1)
    groups = x.reshape(heads, -1, GROUP, dim).swapaxes(2, 3)
    real = np.broadcast_to(real.reshape(1, -1, 1, GROUP), groups.shape)
    return hqq(groups, real, bits, refine).swapaxes(2, 3).reshape(heads, -1, dim)[:, :n]


def random(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


@pytest.mark.parametrize("refine", ["none", "exact"])
@pytest.mark.parametrize("axis,bits", [("channel", 2), ("channel", 4), ("token", 3), ("token", 1)])
def test_codes_are_the_oracles_row_by_row(axis, bits, refine):
    lengths = (40, 21, 3)
    x = random(3, KV_HEADS, 40, DIM)
    for row, n in enumerate(lengths):
        x[row, :, n:] = 1e4  # what follows a row is not read
    got, *_ = decoded(x, lengths, axis, bits, refine)
    for row, n in enumerate(lengths):
        want = oracle(x[row], n, axis, bits, refine)
        np.testing.assert_allclose(got[row, :, :n], want, atol=2e-4, rtol=2e-3)


def test_the_exact_loop_moves_zeros_and_stops_by_row():
    x = random(2, KV_HEADS, 16, DIM)
    x[1] *= 30  # stops elsewhere
    both, _, zero = decoded(x, (16, 16), "channel", 2, "exact")
    _, _, plain = decoded(x, (16, 16), "channel", 2, "none")
    assert np.abs(zero - plain).max() > 0.01
    for row in (0, 1):
        alone, *_ = decoded(x[row : row + 1], (16,), "channel", 2, "exact")
        np.testing.assert_array_equal(alone[0], both[row])


@pytest.mark.parametrize("axis,bits", list(itertools.product(("channel", "token"), (1, 3, 8))))
def test_error_is_at_most_half_a_step(axis, bits):
    x = random(2, KV_HEADS, 24, DIM, seed=bits)
    got, scale, zero = decoded(x, (24, 24), axis, bits, "none")
    along = 2 if axis == "channel" else 3
    step = np.repeat(scale.astype(np.float32), GROUP, along)
    # float16 rounds the zero, and the scale by which the top code is reached
    offset = np.repeat(np.abs(zero.astype(np.float32)), GROUP, along)
    rounding = 2.0**-11 * (offset + 2**bits * step)
    assert (np.abs(got - x) <= step / 2 + rounding + 1e-6).all()
    assert np.abs(got - x).max() > step.min() / 4


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_the_best_zero_is_never_worse_than_the_minimum_and_better_in_all(axis):
    x = random(2, KV_HEADS, 64, DIM)
    along = 3 if axis == "channel" else 4
    split = (2, KV_HEADS, 8, 8, DIM) if axis == "channel" else (2, KV_HEADS, 64, 2, 8)
    error = {}
    for refine in ("none", "exact", "best"):
        got, *_ = decoded(x, (64, 64), axis, 2, refine)
        error[refine] = np.abs(got - x).reshape(split).sum(along)
    assert (error["best"] <= error["none"] * (1 + 1e-3)).all()
    assert error["best"].sum() < 0.98 * error["none"].sum()
    assert error["exact"].sum() < 0.98 * error["none"].sum()


@pytest.mark.parametrize("refine", ["none", "exact", "best"])
def test_constant_groups_come_back_and_nothing_is_nan(refine):
    for value in (0.0, 0.75, -3.5):  # all float16
        x = np.full((1, 1, 16, DIM), value, np.float32)
        for axis in ("channel", "token"):
            np.testing.assert_array_equal(decoded(x, (16,), axis, 2, refine)[0], x)
    x = np.zeros((1, 1, 16, DIM), np.float32)
    x[..., 3] = np.linspace(-4e4, 4e4, 16)  # max - min overflows float16
    x[..., 5] = 1e-6 * np.arange(16)  # its scale underflows
    got, *_ = decoded(x, (16,), "channel", 4, refine)
    assert np.isfinite(got).all()
    assert np.abs(got - x)[..., 3].max() < 0.55 * 4e4 / 15
    assert np.abs(got - x)[..., 5].max() < 2e-5


def test_offset_channels_lose_no_more_than_their_own_step():
    rng = np.random.default_rng(1)
    x = rng.uniform(-0.5, 0.5, (1, 1, 64, DIM)).astype(np.float32)
    x[..., ::2] += 100.3
    for refine in ("none", "best"):
        got, scale, _ = decoded(x, (64,), "channel", 2, refine)
        assert scale.max() < 0.4
        assert np.abs(got - x).max() < 0.4 / 2 + 0.0625 + 0.05 * (refine == "best")
        shifted, plain = (np.abs(got - x)[..., i::2].mean() for i in (0, 1))
        assert shifted < 1.3 * plain


def test_blocks_of_r_are_coded_at_every_residue_and_the_rest_is_exact():
    lengths = tuple(range(1, 2 * R + 2))
    rows = rows_of(lengths, 0)
    prompt = make_prompt(rows, lengths, max(lengths) + 3)
    cache = compress(SMALL, prompt, layer(1))
    full = compress(Full(), prompt, layer(1))
    (k, v, where), (k2, v2, _) = view(cache), view(full.body)
    assert cache.body.folded.tolist() == [n - n % R for n in lengths]
    for row, n in enumerate(lengths):
        old = n - n % R
        assert np.asarray(where)[row, 0].tolist()[:n] == list(range(n))
        assert (np.asarray(where)[row, :, n:] == -1).all()
        for a, b in ((k, k2), (v, v2)):
            a, b = np.asarray(a)[row], np.asarray(b)[row]
            np.testing.assert_array_equal(a[:, old:n], b[:, old:n])
            assert old == 0 or 1e-3 < np.abs(a[:, :old] - b[:, :old]).max() < 1.5


def decode_rows(method, rows, lengths, steps, after=lambda cache: None, prompt=None):
    """Append token by token as the loop does; the last output and the cache."""
    prompt = prompt or make_prompt(rows, lengths, max(lengths) + 2)
    cache, out = compress(method, prompt, layer(steps + R)), None
    first = np.asarray(cache.lengths + cache.shift)
    for i in range(steps):
        positions = first + i
        if decode.needs_flush(method.flush_every, positions):
            cache = decode.flush((cache,))[0]
            after(cache)
        q, k, v = (
            jnp.asarray(np.stack([r[x][:, n + i] for r, n in zip(rows, lengths, strict=True)]))
            for x in "qkv"
        )
        new = (x[:, :, None] for x in (q, k, v))
        out, cache = step(cache, *new, jnp.asarray(positions[:, None], jnp.int32))
    return out, cache


@pytest.mark.parametrize("requantize_all", [False, True])
def test_policies_match_a_simulation(requantize_all):
    n, steps = 2 * R, 2 * R + 3
    rows = rows_of((n,), steps)
    method = make(requantize_all=requantize_all, refine="none", k_bits=3, v_bits=2)
    _, cache = decode_rows(method, rows, (n,), steps)
    k, v, _ = view(cache)
    for name, got, axis, bits in (("k", k, "channel", 3), ("v", v, "token", 2)):
        x = rows[0][name][:, : n + steps].astype(np.float64)
        read = np.concatenate([oracle(x, n, axis, bits, "none"), x[:, n:]], 1)
        for end in (n + R, n + 2 * R):  # a flush after R appended tokens
            start = 0 if requantize_all else end - R
            again = oracle(read[:, start:end], end - start, axis, bits, "none")
            read[:, start:end] = again
        np.testing.assert_allclose(np.asarray(got)[0, :, : n + steps], read, atol=2e-4, rtol=2e-3)


def test_requantizing_everything_compounds_and_appending_does_not():
    """Fixed groups are idempotent but for the one that a flush completes: its tokens lose twice."""
    n, steps = 3 * R + 5, 3 * R
    rows = rows_of((n,), steps)
    seen = {}
    for requantize_all in (False, True):
        views = seen[requantize_all] = []
        method = make(requantize_all=requantize_all, k_bits=2, v_bits=2, refine="none")
        decode_rows(method, rows, (n,), steps, lambda cache, views=views: views.append(view(cache)))
        assert len(views) == 3
        views[:] = [[np.asarray(x)[0, :, :n] for x in pair[:2]] for pair in views]
        _, cache = decode_rows(method, rows, (n,), 0)
        views.insert(0, [np.asarray(x)[0, :, :n] for x in view(cache)[:2]])
    old = slice(0, 3 * R)
    for pair in seen[False]:
        for a, b in zip(pair, seen[False][0], strict=True):
            np.testing.assert_array_equal(a[:, old], b[:, old])
    errors = [np.abs(k - rows[0]["k"][:, :n])[:, n - n % GROUP :].mean() for k, _ in seen[True]]
    assert errors[1] == errors[0]  # that flush found no whole block
    assert min(errors[2:]) > 1.2 * errors[0]
    for k, v in seen[True]:
        np.testing.assert_allclose(v, seen[True][0][1], atol=2e-3, rtol=0)
        kept = slice(0, n - n % GROUP)
        np.testing.assert_allclose(k[:, kept], seen[True][0][0][:, kept], atol=2e-3, rtol=0)


@pytest.mark.parametrize("axes", list(itertools.product(("channel", "token"), repeat=2)), ids=str)
def test_every_pair_of_axes_attends_to_what_it_stores(axes):
    lengths = (R + 5, 3 * R)
    rows = rows_of(lengths, 3)
    method = make(key_axis=axes[0], value_axis=axes[1], k_bits=2, v_bits=3)
    out, cache = decode_rows(method, rows, lengths, 3)
    k, v, where = view(cache)
    q = np.stack([r["q"][:, n + 2] for r, n in zip(rows, lengths, strict=True)])[:, :, None]
    last = (cache.lengths - 1)[:, None]
    want = attend_dense(jnp.asarray(q), k, v, last, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=0)
    slots = cache.body.capacity
    groups = [slots // GROUP if axis == "channel" else slots for axis in axes]
    assert [cache.body.k_scale.shape[2], cache.body.v_scale.shape[2]] == groups


def test_other_axes_are_not_decoded_outside_a_loop_either():
    n = 12 * R
    rows = rows_of((n,), 1)
    cache = compress(make(key_axis="token", value_axis="channel"), make_prompt(rows, (n,), n),
                     layer(R))  # fmt: skip
    q, k, v = (jnp.asarray(rows[0][x][None, :, n:]) for x in "qkv")

    def loop(cache):
        def body(i, carry):
            out, cache = carry
            return cache.step(q + out, k, v, (n + i)[None, None])

        return jax.lax.fori_loop(0, R, body, (jnp.zeros_like(q), cache))

    text = jax.jit(loop).lower(cache).compile().as_text()
    sizes = floats_carried(text)
    assert sizes and max(sizes) < KV_HEADS * n * DIM / 2


@pytest.mark.parametrize("requantize_all", [False, True])
def test_a_prompt_that_lost_tokens_keeps_index_and_position_apart(requantize_all):
    lengths, lost, steps = (R + 5, 2 * R), (7, 100), 2 * R + 1
    rows = rows_of(lengths, steps)
    prompt = make_prompt(rows, lengths, max(lengths) + 2)
    moved = np.asarray(lengths) + lost
    prompt = dataclasses.replace(prompt, next_positions=jnp.asarray(moved, jnp.int32))
    method = make(requantize_all=requantize_all, refine="none")
    most = []
    out, cache = decode_rows(
        method, rows, lengths, steps, lambda c: most.append(np.asarray(c.recent).max()), prompt
    )
    k, v, where = (np.asarray(x) for x in view(cache))
    for row, n in enumerate(lengths):
        assert where[row, 0].tolist()[: n + steps] == [lost[row] + i for i in range(n + steps)]
        first = int(cache.body.folded[row])
        assert first >= n  # blocks were folded
        want = rows[row]["k"][:, first : n + steps]
        np.testing.assert_array_equal(k[row, :, first : n + steps], want)
        assert np.abs(k[row, :, :first] - rows[row]["k"][:, :first]).max() < 1.5
    assert max(most) < R  # a flush leaves less than a block
    # R tokens at once, where the ring is fullest: causal among themselves by position
    assert np.asarray(cache.recent).max() >= R
    q, k_new, v_new = (jnp.asarray(np.stack([r[x][:, :R] for r in rows])) for x in "qkv")
    positions = jnp.asarray(moved[:, None] + steps + np.arange(R), jnp.int32)
    out, cache = step(cache, q, k_new, v_new, positions)
    k, v, where = view(cache)
    want = attend_dense(q, k, v, positions, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"k_bits": 3, "v_bits": 2}, {"requantize_all": True, "k_bits": 3},
     {"key_axis": "token", "value_axis": "channel", "requantize_all": True}],
    ids=str,
)  # fmt: skip
def test_bytes_are_the_formulas(changes):
    n = 2 * R + 5
    method = make(**changes)
    cache = compress(method, make_prompt(rows_of((n,), 0), (n,), n, "bfloat16"), layer())
    folded = n if method.requantize_all else 2 * R
    want = 4 * DIM * (n - folded)
    for bits, axis in ((method.k_bits, method.key_axis), (method.v_bits, method.value_axis)):
        groups = -(-folded // GROUP) * DIM if axis == "channel" else folded * DIM // GROUP
        want += folded * DIM * bits / 8 + 4 * groups
    want = KV_HEADS * want + 12  # three counters a row
    assert accounting.live_bytes(cache).stored.tolist() == [want]
    assert method.layer_bytes(PromptShape(n, KV_HEADS, DIM)) == want


def test_every_setting_changes_the_cache():
    n = 2 * R + 3
    prompt = make_prompt(rows_of((n,), 0), (n,), n)

    def allocated(method):
        return accounting.cache_bytes(jax.eval_shape(lambda p: method.compress(p, layer()), prompt))

    for changes in ({"k_bits": 2}, {"v_bits": 1}, {"group": 16}, {"residual_length": 2 * R},
                    {"key_axis": "token", "group": 16}):  # fmt: skip
        assert allocated(make(**changes)) != allocated(SMALL), changes
    caches = [
        compress(make(**changes), prompt, layer())
        for changes in ({}, {"requantize_all": True}, {"refine": "none"}, {"refine": "exact"})
    ]
    stored = [int(accounting.live_bytes(cache).stored[0]) for cache in caches]
    assert stored[1] < stored[0] == stored[2] == stored[3]
    plain, _, *others = (np.asarray(view(cache)[0])[:, :, :n] for cache in caches)
    for k in others:
        assert np.abs(k - plain).max() > 1e-3
    listed = make(full_layers=(0, -1))
    assert [type(listed.for_layer(i, 3)).__name__ for i in range(3)] == [
        "Full", "QuantizedCache", "Full"
    ]  # fmt: skip


def test_presets_and_points():
    peer = registry.make("transformers:quantized_cache")
    assert (peer.k_bits, peer.v_bits, peer.group, peer.residual_length) == (4, 4, 64, 128)
    assert peer.requantize_all and peer.refine == "none"
    assert registry.make("hqq:quantized_cache").refine == "exact"
    row = PromptShape(1024, 2, 64)
    sizes = [m.layer_bytes(row) for m in QuantizedCache().points()]
    assert [m.k_bits for m in QuantizedCache().points()] == [8, 4, 3, 2]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_settings_that_cannot_be_stored_say_what_can():
    prompt = make_prompt(rows_of((40,), 0), (40,), 40)
    for changes, message in (
        ({"residual_length": 20}, "group=8 must divide residual_length=20"),
        ({"group": 32, "residual_length": 32}, r"group=32 must divide head_dim=16.*\[8, 16\]"),
        ({"key_axis": 0}, "key_axis=0 must be one of"),
        ({"value_axis": "head"}, "value_axis='head' must be one of"),
        ({"refine": "fast"}, "refine='fast' must be one of"),
        ({"k_bits": 9}, "bits=9 must be between 1 and 8"),
        ({"residual_length": 0}, "residual_length=0 must be at least 1"),
    ):
        method = make(**changes)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda p, method=method: method.compress(p, layer()), prompt)
    # any group that divides what it groups
    odd = make(group=5, residual_length=20, key_axis="channel", value_axis="channel")
    jax.eval_shape(lambda p: odd.compress(p, layer()), prompt)
    cache = compress(SMALL, prompt, layer())
    x = jnp.zeros((1, KV_HEADS, R + 1, DIM))
    positions = jnp.arange(40, 41 + R, dtype=jnp.int32)[None]
    with pytest.raises(ValueError, match=f"residual_length={R}"):
        jax.eval_shape(cache.step, jnp.zeros((1, HEADS, R + 1, DIM)), x, x, positions)
