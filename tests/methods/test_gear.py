"""GEAR against a numpy reimplementation: backbone, low rank and outliers of every chunk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting, gear_body, registry
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.methods.gear import GEAR
from kvjax.methods.kivi import KIVI
from kvjax.rope import Rope
from kvjax.types import LayerInfo, PromptKV, PromptShape
from tests.prompts import compress, fast_jit, step

R, GROUP, DIM, HEADS, KV_HEADS = 16, 8, 16, 4, 2
STILL = Rope((0.0,) * (DIM // 2))  # rotates by nothing
LENGTHS = (2 * R + 3, 3 * R, 5)
SHARE = 0.2  # of outliers: 2 + 2 of 16 values, 5 + 5 of 48


def gear(**changes):
    small = {"group": GROUP, "residual_length": R, "outliers": SHARE}
    return GEAR(**{**small, **changes})


# The oracle: one head, written from the paper's steps.


def pairs(share, size):
    return int(share * size / 2 + 0.5)


def outliers(x, axis, share):
    """bool of x's shape: the smallest and largest values of every vector along an axis."""
    order = np.argsort(np.argsort(x, axis), axis)
    count = pairs(share, x.shape[axis])
    return (order < count) | (order >= x.shape[axis] - count)


def quantize(x, bits, group, axis):
    """Groups of neighbours along an axis, min/max in float16, 2^bits - 1 steps."""
    x = x.swapaxes(axis, -1).astype(np.float32)
    g = x.reshape(x.shape[0], -1, group)
    low = g.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((g.max(-1, keepdims=True) - low) / np.float32(2**bits - 1)).astype(np.float16)
    step = step.astype(np.float32)
    code = np.clip(np.round((g - low) / np.where(step > 0, step, 1)), 0, 2**bits - 1)
    return (np.where(step > 0, code, 0) * step + low).reshape(x.shape).swapaxes(axis, -1)


def power_iteration(error, rank, loops):
    """As the reference: QR in the last pass only. Factors rounded to float16."""
    error = error.astype(np.float64)
    a = gear_body.start_matrix(error.shape[1], rank, 0).astype(np.float64)
    for i in range(loops):
        a = np.linalg.qr(a)[0] if i == loops - 1 else a
        q = error @ a
        q = np.linalg.qr(q)[0] if i == loops - 1 else q
        a = error.T @ q
    return q.astype(np.float16).astype(np.float64) @ a.T.astype(np.float16).astype(np.float64)


def oracle(x, axis, bits, group, share, rank, loops=3):
    """x [t, H] as GEAR reads it: vectors along axis 0 for keys, 1 for values."""
    apart = outliers(x, axis, share)
    filled = np.where(apart, x.mean(axis, keepdims=True), x)
    rebuilt = quantize(filled, bits, group or x.shape[axis], axis)
    error = np.where(apart, 0, x - rebuilt)
    out = np.where(apart, x, rebuilt)
    return out + power_iteration(error, rank, loops) if rank else out


def rows_of(lengths, extra, seed=5):
    rng = np.random.default_rng(seed)
    return [
        {
            name: rng.normal(size=(heads, n + extra, DIM)).astype(np.float32)
            + 2 * rng.normal(size=(heads, 1, DIM)).astype(np.float32)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        }
        for n in lengths
    ]


def make_prompt(rows, lengths, columns, dtype="float32", noise=77.0):
    def stack(name):
        out = np.full((len(rows), rows[0][name].shape[0], columns, DIM), noise, np.float32)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            out[i, :, columns - n :] = row[name][:, :n]
        return jnp.asarray(out, dtype)

    q, k, v = (stack(n) for n in "qkv")
    return PromptKV(q, k, k, v, jnp.asarray([columns - n for n in lengths], jnp.int32))


def layer(reserve=2 * R):
    return LayerInfo(1, None, reserve, STILL)


@fast_jit
def flush(cache):
    return cache.flush()


@fast_jit
def dense(cache):
    return cache.materialize()


@fast_jit
def read(chunks):
    return chunks.dense()


def grown(method, rows, lengths):
    """The cache after the prompt and R tokens more, folded."""
    cache = compress(method, make_prompt(rows, lengths, max(lengths) + 2), layer())
    new = [
        jnp.asarray(np.stack([r[x][:, n : n + R] for r, n in zip(rows, lengths, strict=True)]))
        for x in "qkv"
    ]
    positions = np.asarray(lengths)[:, None] + np.arange(R)
    _, cache = step(cache, *new, jnp.asarray(positions, jnp.int32))
    return flush(cache)


FORMS = {
    "gear": {},
    "gear-l, 4 and 3 bits": {"outliers": 0.0, "k_bits": 4, "v_bits": 3},
    "kcvt, 3 and 8 bits": {"kcvt": True, "k_bits": 3, "v_bits": 8},
    "no low rank": {"prefill_rank": 0, "decode_rank": 0},
    "one pass": {"iterations": 1, "prefill_rank": 1, "decode_rank": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_chunk_is_backbone_low_rank_and_outliers(form):
    """Ragged rows: each has its own number of tokens, outliers and factors."""
    method, rows = gear(**FORMS[form]), rows_of(LENGTHS, R)
    cache = grown(method, rows, LENGTHS)
    assert cache.body.prompt.lengths.tolist() == [n - n % R for n in LENGTHS]
    assert cache.body.later.lengths.tolist() == [R] * 3
    k, v, where = (np.asarray(x) for x in dense(cache))
    for row, n in enumerate(LENGTHS):
        coded = n - n % R
        for h in range(KV_HEADS):
            assert sorted(where[row, h][where[row, h] >= 0]) == list(range(n + R))
            for got, name, axis, bits in ((k, "k", 0, method.k_bits), (v, "v", 1, method.v_bits)):
                x = rows[row][name][h][: n + R]
                group = None if method.kcvt else GROUP
                want = x.copy()
                for first, last, rank in ((0, coded, method.prefill_rank),
                                          (coded, coded + R, method.decode_rank)):  # fmt: skip
                    if last > first:
                        chunk = x[first:last]
                        want[first:last] = oracle(
                            chunk, axis, bits, group, method.outliers, rank, method.iterations
                        )
                mine = got[row, h][where[row, h] >= 0][
                    np.argsort(where[row, h][where[row, h] >= 0])
                ]
                np.testing.assert_allclose(mine, want, atol=2e-3, rtol=0, err_msg=f"{row} {name}")
                np.testing.assert_array_equal(mine[coded + R :], x[coded + R :])


def unpacked(packed, bits, size):
    """Byte j of m holds codes j, j + m, j + 2m, ... low bits first."""
    return np.concatenate([(packed >> s) & (2**bits - 1) for s in range(0, 8, bits)], -1)[
        ..., :size
    ]


def test_the_stored_arrays_are_all_that_is_read():
    rows = rows_of(LENGTHS, R)
    cache = grown(gear(), rows, LENGTHS)
    for chunks in (cache.body.prompt, cache.body.later):
        fields = {
            f.name: np.asarray(getattr(chunks, f.name))
            for f in dataclasses.fields(chunks) if f.name[:2] in ("k_", "v_")
        }  # fmt: skip
        t = chunks.chunk
        for side, got in zip("kv", read(chunks), strict=True):
            a = {name[2:]: x for name, x in fields.items() if name[0] == side}
            codes = unpacked(a["codes"], 2, DIM)
            want = np.zeros(codes.shape)
            for b, h, s in np.ndindex(*codes.shape[:3]):
                at = (b, h, s // GROUP) if side == "k" else (b, h, s)
                scale, zero = (a[n][at].astype(np.float64) for n in ("scale", "zero"))
                if side == "v":
                    scale, zero = (np.repeat(x, GROUP) for x in (scale, zero))
                low = a["left"][b, h, s].astype(np.float64) @ a["right"][b, h, s // t]
                want[b, h, s] = codes[b, h, s] * scale + zero + low
            per = a["delta"].shape[2] * t // codes.shape[2]  # entries of a chunk, or t
            for b, h, e, c in np.ndindex(*a["delta"].shape):
                place = int(a["index"][b, h, e, c])
                at = (e // per * t + place, c) if side == "k" else (e, place)
                want[(b, h, *at)] += a["delta"][b, h, e, c]
            np.testing.assert_allclose(np.asarray(got), want, atol=1e-5, rtol=0)


@fast_jit
def coded(method, prompt):
    return method.compress(prompt, layer()).body.prompt.dense()


def errors(method, x):
    """Relative error of keys and values that are both x [n, H], n a multiple of R."""
    x = jnp.asarray(np.broadcast_to(x, (1, KV_HEADS, *x.shape)), jnp.float32)
    n = x.shape[2]
    prompt = PromptKV(jnp.zeros((1, HEADS, n, DIM)), x, x, x, jnp.zeros(1, jnp.int32))
    k, v = coded(method, prompt)
    return [float(jnp.linalg.norm(y - x) / jnp.linalg.norm(x)) for y in (k, v)]


def test_both_terms_lower_the_error_of_keys_and_of_values():
    rng = np.random.default_rng(0)
    n = 8 * R
    x = rng.normal(size=(n, 2)) @ rng.normal(size=(2, DIM)) + 0.3 * rng.normal(size=(n, DIM))
    loud = rng.random(x.shape) < 0.03
    x = np.where(loud, 8 * x, x)
    none = {"prefill_rank": 0, "outliers": 0.0}
    whole, no_low, no_sparse, backbone = (
        errors(gear(**{"outliers": 0.1, **changes}), x)
        for changes in ({}, {"prefill_rank": 0}, {"outliers": 0.0}, none)
    )
    for side in range(2):
        assert whole[side] < 0.9 * no_low[side] and whole[side] < 0.9 * no_sparse[side]
        assert no_low[side] < 0.95 * backbone[side] and no_sparse[side] < 0.95 * backbone[side]


def test_the_backbone_is_kivis_quantizer():
    rows = rows_of((3 * R,), 0)
    prompt = make_prompt(rows, (3 * R,), 3 * R)
    plain = gear(outliers=0.0, prefill_rank=0, decode_rank=0)
    mine = compress(plain, prompt, layer()).body.prompt
    kivi = compress(KIVI(group=GROUP, residual_length=R), prompt, layer())
    for name in ("codes", "scale", "zero"):
        for side, tokens in (("k", 3 * R), ("v", 2 * R)):
            a, b = (np.asarray(getattr(c, f"{side}_{name}")) for c in (mine, kivi))
            at = tokens // GROUP if side == "k" and name != "codes" else tokens
            np.testing.assert_array_equal(a[:, :, :at], b[:, :, :at])
    assert mine.k_left is mine.k_delta is mine.v_left is mine.v_delta is None


@pytest.mark.parametrize("bits", [3, 8])
def test_a_width_of_b_bits_has_all_of_its_levels(bits):
    """No fewer (63 of 256) and no more (8 steps of 3 bits) than 2^b - 1 steps."""
    x = np.random.default_rng(0).uniform(-1, 1, size=(8 * R, DIM))
    x[0], x[1] = -1, 1
    method = gear(k_bits=bits, v_bits=bits, outliers=0.0, prefill_rank=0, kcvt=True)
    k_error, _ = errors(method, x)
    step = 2 / (2**bits - 1)
    want = step / np.sqrt(12) / np.sqrt((x**2).mean())  # of a uniform error
    assert 0.9 * want < k_error < 1.1 * want


def test_few_keys_of_a_later_chunk_are_exact():
    """A share of the chunk's tokens, not of a token's values."""
    big, rows = 4 * R, rows_of((4 * R,), 0)
    recipe = GEAR(group=16, residual_length=big)._recipe(DIM)

    @fast_jit
    def flushed(k, v):
        return gear_body.Chunks.encode(k, v, jnp.full(1, big, jnp.int32), 0, recipe)

    chunk = flushed(*(jnp.asarray(rows[0][x][None]) for x in "kv"))
    exact = np.isclose(np.asarray(read(chunk)[0])[0], rows[0]["k"], atol=1e-5)
    share = exact.mean(1)  # of each channel
    assert share.max() <= 0.1 and abs(share.mean() - 2 / big) < 0.02
    assert chunk.k_outliers.tolist() == [2 * pairs(0.02, big)] == [2]


def test_bytes_of_a_chunk_are_the_formulas():
    n, share = 3 * R + 5, 0.2
    rows = rows_of((n,), 0)
    method = gear(k_bits=4, v_bits=2, outliers=share)
    cache = compress(method, make_prompt(rows, (n,), n + 9, "bfloat16"), layer())

    def chunk(t, rank):
        backbone = t * DIM * (4 + 2) / 8 + 2 * (t * DIM / GROUP) * 4
        factors = 2 * 2 * rank * (t + DIM)
        sparse = 2 * pairs(share, t) * DIM * (2 + 2) + 2 * pairs(share, DIM) * t * (2 + 1)
        return backbone + factors + sparse

    want = KV_HEADS * (chunk(3 * R, 4) + 2 * 5 * DIM * 2) + 16  # four counters a row
    assert accounting.live_bytes(cache).stored.tolist() == [want]
    assert method.layer_bytes(PromptShape(n, KV_HEADS, DIM)) == want
    after = flush(dataclasses.replace(cache, lengths=cache.lengths + R))
    want += KV_HEADS * chunk(R, 2)
    assert accounting.live_bytes(after).stored.tolist() == [want]
    parts = accounting.components(cache)
    assert {p.split(".")[-1] for p in parts} >= {"k_left", "k_index", "v_delta", "k_scale"}


def test_the_ratio_of_short_and_long_prompts():
    """A prompt below R costs its own bytes; the low rank is paid once there are R tokens."""
    method = GEAR(k_bits=4, v_bits=4, kcvt=True)
    ratios = {}
    for n in (1, 63, 64, 4096):
        shape = PromptShape(n, 8, 128)
        ratios[n] = shape.full_bytes / (method.layer_bytes(shape) - 16)
    assert ratios[1] == ratios[63] == 1.0
    assert 2.3 < ratios[64] < 2.6 and 2.9 < ratios[4096] < 3.3, ratios


def test_a_prompt_below_the_residual_window_is_the_full_cache_to_the_bit():
    lengths = (R - 1, 7)
    rows = rows_of(lengths, 0)
    cache = compress(gear(), make_prompt(rows, lengths, R - 1), layer())
    k, v, where = (np.asarray(x) for x in dense(cache))
    for row, n in enumerate(lengths):
        here = where[row, 0] >= 0
        assert where[row, 0][here].tolist() == list(range(n))
        for got, name in ((k, "k"), (v, "v")):
            np.testing.assert_array_equal(got[row][:, here], rows[row][name])


def test_pads_and_the_end_of_a_row_never_leak():
    rows = rows_of(LENGTHS, 0)
    for kcvt in (False, True):
        quiet, loud = (
            compress(gear(kcvt=kcvt), make_prompt(rows, LENGTHS, 53, noise=x), layer())
            for x in (0.0, -3e4)
        )
        for a, b in zip(
            jax.tree.leaves(quiet.body.prompt), jax.tree.leaves(loud.body.prompt), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_prompts_that_lost_tokens_keep_their_positions():
    """The next position is not the number of tokens, and closes blocks at its own pace."""
    n, moved = 2 * R + 3, 7
    rows = rows_of((n,), R)
    prompt = make_prompt(rows, (n,), n)
    prompt = dataclasses.replace(prompt, next_positions=jnp.asarray([n + moved], jnp.int32))
    cache, counts = compress(gear(), prompt, layer()), []
    for i in range(R):
        position = n + moved + i
        if position % R == 0:  # as the decode loop does
            cache = flush(cache)
        q, k, v = (jnp.asarray(rows[0][x][None, :, n + i : n + i + 1]) for x in "qkv")
        at = jnp.asarray([[position]], jnp.int32)
        out, cache = step(cache, q, k, v, at)
        counts.append(int(cache.body.folded[0]))
    k, v, where = dense(cache)
    assert sorted(set(np.asarray(where)[0, 0].tolist()) - {-1}) == list(range(moved, n + moved + R))
    want = attend_dense(q, k, v, at, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=1e-5, rtol=0)
    assert counts[0] == counts[-1] == 2 * R  # 9 tokens at position 3 R: not a block yet
    assert int(cache.recent[0]) == R + 3 and int(flush(cache).body.folded[0]) == 3 * R


def low_rank(error, rank):
    find = fast_jit(gear_body.low_rank, static_argnums=(1, 2, 3))
    left, right = find(jnp.asarray(error, jnp.float32)[None, None], rank, 3, 0)
    return np.asarray(left, np.float64)[0, 0], np.asarray(right, np.float64)[0, 0, 0]


def test_power_iteration_finds_the_largest_directions():
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(n, DIM)))[0] for n in (200, DIM))
    values = 10 * 0.6 ** np.arange(DIM)
    error = (u * values) @ v.T
    left, right = low_rank(error, 4)
    np.testing.assert_allclose(left.T @ left, np.eye(4), atol=2e-3)
    rest = np.linalg.norm(error - left @ right)
    best = np.linalg.norm(values[4:])
    assert best * 0.99 < rest < 1.1 * best < 0.5 * np.linalg.norm(error)


def test_power_iteration_without_a_direction_to_find_stays_finite():
    for error in (np.zeros((R, DIM)), np.outer(np.arange(R), np.linspace(-1, 2, DIM)),
                  np.full((R, DIM), 1e18)):  # fmt: skip
        left, right = low_rank(error, 4)
        assert np.isfinite(left).all() and np.isfinite(right).all()
        if error.max() < 1e18:  # a factor is stored in float16
            np.testing.assert_allclose(left @ right, error, atol=2e-3 * max(error.max(), 1))
    padded = np.concatenate([error := np.random.default_rng(0).normal(size=(R, DIM)), 0 * error])
    (left, right), (wide, other) = low_rank(error, 4), low_rank(padded, 4)
    np.testing.assert_allclose(wide[:R] @ other, left @ right, atol=2e-3)
    assert (wide[R:] == 0).all()


def test_offset_and_constant_channels():
    """Float16 statistics are compensated: a 2-bit step bounds the error of a channel at 100."""
    rng = np.random.default_rng(0)
    x = 100.3 + rng.uniform(-0.5, 0.5, size=(4 * R, DIM))
    x[:, 3] = -7.7
    plain = gear(outliers=0.0, prefill_rank=0)
    batch = jnp.asarray(np.broadcast_to(x, (1, KV_HEADS, *x.shape)), jnp.float32)
    prompt = PromptKV(
        jnp.zeros((1, HEADS, 4 * R, DIM)), batch, batch, batch, jnp.zeros(1, jnp.int32)
    )
    k, _ = coded(plain, prompt)
    off = np.abs(np.asarray(k)[0, 0] - x)
    assert off.max() < 1.1 / 3 / 2 + 0.07 and off[:, 3].max() < 4e-3
    k, v = coded(gear(), prompt)
    assert np.isfinite(np.asarray(k)).all() and np.isfinite(np.asarray(v)).all()


def test_settings_that_cannot_be_stored_say_what_can():
    prompt = make_prompt(rows_of((40,), 0), (40,), 40)
    with pytest.raises(ValueError, match="residual_length=20"):
        gear(residual_length=20).compress(prompt, layer())
    with pytest.raises(ValueError, match=r"group=6 must divide head_dim=16.*\[8, 16\]"):
        gear(group=6, residual_length=48).compress(prompt, layer())
    with pytest.raises(ValueError, match=r"outliers=0\.7"):
        gear(outliers=0.7).compress(prompt, layer())
    with pytest.raises(ValueError, match="decode_rank=-1"):
        gear(decode_rank=-1).compress(prompt, layer())
    cache = compress(gear(), prompt, layer())
    x = jnp.zeros((1, KV_HEADS, R + 1, DIM))
    positions = jnp.arange(40, 41 + R, dtype=jnp.int32)[None]
    with pytest.raises(ValueError, match=f"residual_length={R}"):
        jax.eval_shape(cache.step, jnp.zeros((1, HEADS, R + 1, DIM)), x, x, positions)


def test_presets_and_full_layers():
    paper = registry.make("paper:gear")
    assert (paper.k_bits, paper.group, paper.residual_length) == (2, 64, 64)
    assert (paper.prefill_rank, paper.decode_rank, paper.iterations) == (4, 2, 3)
    rethink = registry.make("rethink:gear")
    assert (rethink.outliers, rethink.prefill_rank, rethink.decode_rank) == (0.02, 2, 2)
    assert registry.make("gear:kcvt-gear-l").outliers == 0.0
    some = gear(full_layers=(0, -1))
    kinds = [type(some.for_layer(i, 4)) for i in range(4)]
    assert kinds == [Full, GEAR, GEAR, Full]
    assert [p.k_bits for p in some.points()] == [8, 4, 2]
