"""TurboQuant against numpy written from its algorithms, and against the paper's numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kvjax import accounting, decode, quant, registry
from kvjax.attention import attend_dense
from kvjax.methods.full import Full
from kvjax.methods.turboquant import Coder, TurboQuant
from kvjax.pallas.codebook_decode.api import SHAPES, Part, codebook_decode
from kvjax.rope import Rope, rotate
from kvjax.types import LayerInfo, PromptKV, PromptShape
from tests.prompts import Shape, build, compress, fast_jit, info, step, step_inputs, tokens_of


def units(seed, count, dim):
    x = np.random.default_rng(seed).normal(size=(count, dim))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def still(keys, values=None, starts=(0,)):
    """A prompt of vectors [K, T, H] that no rotation of positions touches, and its layer."""
    k, v = (jnp.asarray(x, jnp.float32)[None] for x in (keys, keys if values is None else values))
    layer = LayerInfo(1, None, 4, Rope((0.0,) * (k.shape[-1] // 2)))
    return PromptKV(k, k, k, v, jnp.asarray(starts, jnp.int32)), layer


def coder(dim, bits, objective="mse", rotation="hadamard", corrected=False, seed=0):
    return Coder(
        None, None, parts=(Part(dim, bits, objective == "prod"),), rotation=rotation,
        corrected=corrected, seed=seed,
    )  # fmt: skip


def rebuilt(coder, x):
    """Not jitted: coders of one shape share what is compiled."""
    x = jnp.asarray(x, jnp.float32)[None, None]
    return np.asarray(coder.decode(*coder.encode(x))[0, 0], np.float64)


# The oracle: one vector, straight from algorithms 1 and 2.


def half(x):
    return float(np.float16(min(float(x), 65504.0)))


def oracle_part(x, bits, objective, corrected, kind, seed):
    """A vector as it comes back, and the code of each coordinate."""
    dim = len(x)
    turn = np.asarray(quant.rotation(dim, seed, kind), np.float64).T  # Pi, of column vectors
    sketch = np.asarray(quant.sketch(dim, seed), np.float64)
    length = np.linalg.norm(x)
    y = turn @ (x / length) if length else np.zeros(dim)
    width = bits - (objective == "prod")
    code, level = np.zeros(dim, int), np.zeros(dim)
    if width:
        levels = np.array(quant.coordinate_levels(width, dim))
        code = np.abs(y[:, None] - levels).argmin(-1)
        level = levels[code]
    if objective == "mse":
        stored = half(length / np.linalg.norm(level) if corrected else length)
        return stored * turn.T @ level, code
    rest = y - level
    sign = np.where(sketch @ rest > 0, 1, -1)
    sketched = math.sqrt(math.pi / 2) / dim * half(np.linalg.norm(rest)) * sketch.T @ sign
    return half(length) * turn.T @ (level + sketched), code + (sign > 0) * 2**width


def oracle(x, bits, objective, corrected, kind, seed):
    """Vectors [T, H] of one head; fractional bits split off the loudest quarter of channels."""
    whole, dim = int(bits), x.shape[1]
    groups = [(np.arange(dim), whole)]
    if bits != whole:
        order = np.argsort(-np.abs(x).mean(0), kind="stable")
        loud = np.sort(order[: dim // 4])
        groups = [(np.setdiff1d(np.arange(dim), loud), whole), (loud, whole + 1)]
    out = np.zeros(x.shape)
    for channels, width in groups:
        for t, row in enumerate(x[:, channels]):
            out[t, channels] = oracle_part(row, width, objective, corrected, kind, seed)[0]
    return out


@pytest.mark.parametrize(
    "dim,bits,objective,kind,corrected",
    [
        (64, 4, "mse", "hadamard", True),
        (64, 3, "mse", "hadamard", False),
        (64, 2.5, "mse", "hadamard", True),
        (64, 3.5, "prod", "haar", False),
        (80, 3, "prod", "hadamard", True),
        (64, 1, "prod", "haar", False),
        (16, 8, "mse", "haar", True),
    ],
)
def test_a_coded_prompt_is_the_oracles(dim, bits, objective, kind, corrected):
    """Rows of two lengths, pads that are loud, channels that stand out for one head only."""
    shape = Shape(dim, 2, 2, (19, 30), columns=33)
    rows = [tokens_of(i, n, shape) for i, n in enumerate(shape.lengths)]
    for row in rows:
        row["k"][0, :, 3:7] *= 6.0
        row["v"][1, :, ::5] *= 4.0
        row["v"][0, 2] = 0.0
    prompt = build(rows, shape)
    prompt = dataclasses.replace(prompt, k=prompt.k_unrotated)
    method = TurboQuant(
        k_bits=bits, v_bits=bits, key_objective=objective, value_objective=objective,
        rotation=kind, norm_correction=corrected, seed=3,
    )  # fmt: skip
    cache = compress(method, prompt, info(shape))
    k, v, where = (np.asarray(x) for x in cache.materialize())
    for b, row in enumerate(rows):
        n = row["k"].shape[1]
        slots = np.arange(where.shape[2])
        assert (where[b] == np.where(slots < n, slots, -1)).all()
        for got, x in ((k, row["k"]), (v, row["v"])):
            for head in range(2):
                want = oracle(x[head], bits, objective, corrected, kind, 3)
                miss = np.abs(got[b, head, :n] - want).max(-1) > 2e-3 * np.abs(want).max()
                # a coordinate on the border of two cells may fall to either side
                assert miss.mean() < 0.05, (b, head, np.nonzero(miss))


def test_outliers_are_the_loudest_channels_of_each_head_and_lower_the_error():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 40, 64))
    loud = np.array([range(0, 64, 4), range(16, 32)])
    for head in range(2):
        x[head][:, loud[head]] += 8 * rng.choice([-1, 1], 16)  # as a bias of the projection
    prompt, layer = still(x)
    errors = {}
    for bits in (2.5, 3.5, 2, 3):
        cache = compress(TurboQuant(k_bits=bits, v_bits=4), prompt, layer)
        if bits in (2.5, 3.5):
            assert cache.keys.outliers.dtype == jnp.uint8
            np.testing.assert_array_equal(cache.keys.outliers[0], loud)
        k = np.asarray(cache.materialize()[0])[0, :, :40]
        quiet = np.ones((2, 64), bool)
        np.put_along_axis(quiet, loud, False, 1)
        quiet = np.broadcast_to(quiet[:, None], x.shape)
        errors[bits] = np.square(k - x)[quiet].mean(), np.square(k - x).mean()
    # the quiet channels no longer pay for the loud ones: less than a tenth of their error
    assert errors[2.5][0] < 0.1 * errors[2][0] and errors[3.5][0] < 0.1 * errors[3][0]
    assert errors[2.5][1] < 0.5 * errors[2][1] and errors[3.5][1] < 0.5 * errors[3][1]
    mean = compress(TurboQuant(k_bits=2, v_bits=4, centered=True), prompt, layer)
    k = np.asarray(mean.materialize()[0])[0, :, :40]
    assert np.square(k - x).mean() < 0.1 * errors[2][1]  # a constant bias is all in the mean


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dim", [64, 96])
def test_the_error_of_every_width_is_the_codebooks(dim, bits):
    """One codebook, scaled once: the measured error is that of the exact law, at each width."""
    x = units(bits, 800, dim)
    got = np.square(rebuilt(coder(dim, bits), x) - x).sum(-1).mean()
    levels = np.array(quant.coordinate_levels(bits, dim))
    law = stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)
    coordinate = law.ppf((np.arange(20000) + 0.5) / 20000)
    want = dim * np.square(np.abs(coordinate[:, None] - levels).min(-1)).mean()
    assert got == pytest.approx(want, rel=0.06)
    assert got < math.sqrt(3) * math.pi / 2 * 4.0**-bits


def products(coder, dim, count=6000):
    """<q, x> and <q, decoded x> of random unit vectors."""
    x, q = units(1, count, dim), units(2, count, dim)
    return (x * q).sum(-1), (rebuilt(coder, x) * q).sum(-1)


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_variance_of_products_and_norm_correction(kind):
    """dim times the variance, and the slope of <q, decoded> over <q, x>: mse is biased low."""
    slopes = {2: (0.885, 0.941), 3: (0.968, 0.983), 4: (0.991, 0.995)}
    for bits, error in ((2, 0.116), (3, 0.034), (4, 0.0093)):
        exact, got = products(coder(128, bits, rotation=kind), 128)
        assert 128 * (got - exact).var() == pytest.approx(error, rel=0.08)
        x = units(1, 2000, 128)
        for corrected, want in zip((False, True), slopes[bits], strict=True):
            back = rebuilt(coder(128, bits, "mse", kind, corrected), x)
            assert (back * x).sum(-1).mean() == pytest.approx(want, abs=0.003)
            if corrected:
                np.testing.assert_allclose(np.linalg.norm(back, axis=-1), 1, atol=1e-3)
    for bits, error in ((1, 1.571), (2, 0.553), (3, 0.181), (4, 0.0543)):
        exact, got = products(coder(128, bits, "prod", kind), 128)
        assert 128 * (got - exact).var() == pytest.approx(error, rel=0.08)


def test_prod_is_unbiased_where_mse_is_not():
    """The mean over rotations and sketches of <x, decoded x>, where a bias is largest."""
    dim, x = 64, units(5, 1, 64)

    def mean(bits, objective, kind):
        got = [
            float((rebuilt(coder(dim, bits, objective, kind, seed=s), x) * x).sum())
            for s in range(60)
        ]
        return np.mean(got), np.std(got) / math.sqrt(len(got))

    for bits in (2, 3):
        value, error = mean(bits, "prod", "haar")
        assert abs(value - 1) < 3 * error and error < 0.02
    value, error = mean(2, "mse", "haar")
    assert value < 1 - 3 * error and abs(value - (1 - 0.114526)) < 3 * error


def test_the_sketch_contributes():
    """Without its signs the estimate is another, and a worse one for products."""
    exact, got = products(coder(64, 3, "prod"), 64)
    _, without = products(coder(64, 2, "mse"), 64)
    assert np.abs(got - without).mean() > 0.01
    slope, slope_without = ((x * exact).sum() / (exact * exact).sum() for x in (got, without))
    assert abs(slope - 1) < 0.03 and slope_without < 0.91
    shape = Shape(64, 4, 2, (40,))
    prompt, inputs = build([tokens_of(0, 40, shape)], shape), step_inputs(shape, 1)
    outs = []
    for method in (TurboQuant(k_bits=3, key_objective="prod"), TurboQuant(k_bits=2)):
        outs.append(np.asarray(step(compress(method, prompt, info(shape)), *inputs)[0]))
    assert np.abs(outs[0] - outs[1]).max() > 0.01


@pytest.mark.parametrize(
    "bits,objective,per_token",
    [
        (2, "mse", 68), (3, "mse", 100), (4, "mse", 132), (2, "prod", 72), (3, "prod", 104),
        (4, "prod", 136), (8, "mse", 260), (2.5, "mse", 80), (3.5, "mse", 112),
    ],
)  # fmt: skip
def test_bytes_of_a_token_and_head(bits, objective, per_token):
    """K and V at head_dim 128; with both norms, 2.5 and 3.5 bits are just that."""
    n, heads = 21, 2
    method = TurboQuant(
        k_bits=bits, v_bits=bits, key_objective=objective, value_objective=objective
    )
    x = np.random.default_rng(0).normal(size=(heads, n, 128))
    prompt, layer = still(x)
    cache = jax.eval_shape(lambda p: method.compress(p, layer), prompt)
    outliers = 2 * 32 if bits != int(bits) else 0  # a byte each, once for a head
    want = heads * (n * per_token + outliers) + 8  # a length and a shift
    assert method.layer_bytes(PromptShape(n, heads, 128)) == want
    slots = n + layer.reserve
    allocated = accounting.cache_bytes(cache)
    assert allocated.body == heads * slots * per_token and allocated.tail == 0
    assert allocated.metadata == heads * outliers + 8
    if bits in (2.5, 3.5):
        assert per_token * 8 / 256 == bits
    ratio = PromptShape(4096, heads, 128).full_bytes / method.layer_bytes(
        PromptShape(4096, heads, 128)
    )
    assert ratio == pytest.approx(512 / per_token, rel=2e-3)


def test_appended_tokens_are_coded_like_the_prompts():
    """One prompt of n + t tokens, or n and t appended: the same codes, for any chunking."""
    shape = Shape(64, 4, 2, (30, 22))
    rows = [tokens_of(i, n, shape) for i, n in enumerate(shape.lengths)]
    method = TurboQuant(k_bits=3, v_bits=4, key_objective="prod")
    short = [{name: x[:, :-5] for name, x in row.items()} for row in rows]
    cache = compress(method, build(short, shape), info(shape))
    new = [jnp.asarray(np.stack([r[n][:, -5:] for r in rows]), jnp.float32) for n in "qkv"]
    positions = jnp.asarray([[n - 5 + i for i in range(5)] for n in shape.lengths], jnp.int32)
    _, cache = step(cache, *(x[:, :, :2] for x in new), positions[:, :2])
    _, cache = step(cache, *(x[:, :, 2:] for x in new), positions[:, 2:])
    want = compress(method, build(rows, shape), info(shape))
    np.testing.assert_array_equal(cache.lengths, want.lengths)
    assert np.asarray(cache.room()).tolist() == [48, 56]
    for got, full in zip(cache.materialize()[:2], want.materialize()[:2], strict=True):
        for b, n in enumerate(shape.lengths):
            a, c = np.asarray(got)[b, :, :n], np.asarray(full)[b, :, :n]
            assert (np.abs(a - c) > 1e-4).mean() < 0.01  # borders of cells aside


@pytest.mark.parametrize("lost", [0, 7])
def test_tokens_lost_before_compression_keep_their_positions(lost):
    """An evicted prompt: the next position is not the length, and masks go by index."""
    shape = Shape(64, 4, 2, (30, 12))
    prompt = build([tokens_of(i, n, shape) for i, n in enumerate(shape.lengths)], shape)
    next_positions = jnp.asarray([30 + lost, 12 + 2 * lost], jnp.int32)
    prompt = dataclasses.replace(prompt, next_positions=next_positions)
    cache = compress(TurboQuant(k_bits=3.5, v_bits=4), prompt, info(shape))
    q, k, v, _ = step_inputs(shape, 3)
    positions = next_positions[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    positions = positions.at[1, 2].set(-1)
    out, after = step(cache, q, k, v, positions)
    keys, values, where = after.materialize()
    assert [int(where[b].max()) for b in range(2)] == [32 + lost, 13 + 2 * lost]
    turn = info(shape).rope
    want = attend_dense(rotate(turn, q, positions), keys, values, positions, where)
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=0)
    assert (np.asarray(out)[1, :, 2] == 0).all()
    np.testing.assert_array_equal(after.lengths, [33, 14])


@pytest.mark.parametrize("centered", [False, True])
def test_zero_huge_and_tiny_vectors_stay_finite(centered):
    x = np.random.default_rng(0).normal(size=(1, 12, 64))
    x[0, 0], x[0, 1], x[0, 2] = 0, x[0, 1] * 1e30, x[0, 2] * 1e-30
    x[0, 3], x[0, 4] = 65504 / 8, 3e38
    prompt, layer = still(x)
    split = TurboQuant(k_bits=3.5, v_bits=2.5, key_objective="prod", value_objective="prod")
    for method in (TurboQuant(), split):
        method = dataclasses.replace(method, centered=centered)
        cache = compress(method, prompt, layer)
        for leaf in jax.tree.leaves((cache, cache.materialize())):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()
        if not centered:
            k = np.asarray(cache.materialize()[0])[0, 0]
            assert (k[[0]] == 0).all() and np.abs(k[2]).max() < 1e-6
            np.testing.assert_allclose(np.linalg.norm(k[3]), 65504, rtol=0.2)
            out, _ = step(cache, *(jnp.ones((1, 1, 1, 64)),) * 3, jnp.full((1, 1), 12, jnp.int32))
            assert np.isfinite(np.asarray(out)).all()


def test_layers_that_are_left_alone():
    method = TurboQuant(full_layers=(0, -1))
    kinds = [type(method.for_layer(layer, 4)) for layer in range(4)]
    assert kinds == [Full, TurboQuant, TurboQuant, Full]
    with pytest.raises(ValueError, match=r"full_layers=\(4,\) must be layers of 4"):
        TurboQuant(full_layers=(4,)).for_layer(0, 4)
    assert decode.needs_flush(method.flush_every, np.array([64])) is False


def test_the_papers_setting():
    method = registry.make("paper:turboquant")
    assert (method.k_bits, method.v_bits, method.rotation) == (3.5, 3.5, "haar")
    assert (method.key_objective, method.value_objective) == ("prod", "mse")
    # 32 channels at 4 bits and 96 at 3; a norm each, for keys a residual's norm too
    per_token = 2 * (16 + 36) + 3 * 2 * 2
    assert method.layer_bytes(PromptShape(10, 1, 128)) == 10 * per_token + 2 * 32 + 8
    costs = [p.layer_bytes(PromptShape(100, 2, 128)) for p in method.points()]
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 6


@pytest.mark.parametrize(
    "kwargs,dim,message",
    [
        ({"k_bits": 9}, 64, "k_bits=9 must be a whole number from 1 to 8, or 2.5 or 3.5"),
        ({"v_bits": 4.5}, 64, "v_bits=4.5 must be"),
        ({"k_bits": 0}, 64, "k_bits=0 must be"),
        ({"key_objective": "qjl"}, 64, "key_objective='qjl' must be 'mse' or 'prod'"),
        ({"value_objective": ""}, 64, "value_objective='' must be"),
        ({"rotation": "qr"}, 64, "rotation='qr' must be 'hadamard' or 'haar'"),
        ({"k_bits": 3.5}, 18, "head_dim=18 must be a multiple of 4.*k_bits can be 3 or 4"),
    ],
)
def test_settings_that_cannot_be_stored_say_what_can(kwargs, dim, message):
    prompt, layer = still(np.ones((1, 4, dim)))
    with pytest.raises(ValueError, match=message):
        TurboQuant(**kwargs).compress(prompt, layer)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("signs", [False, True])
def test_the_op_reads_the_codes_of_every_width(bits, signs):
    """Against numpy over the same codes, unpacked one by one; queries that see different counts."""
    rng = np.random.default_rng(bits)
    parts = (Part(48, bits, signs), Part(16, bits, False))  # planes of 4-, 2- and 1-byte words
    slots, lengths = 9, np.array([[9, 4], [1, 2]])
    codes = [rng.integers(0, 2**bits, (2, 2, slots, p.dim)) for p in parts]
    packed = jnp.concatenate([quant.pack(jnp.asarray(c), bits) for c in codes], -1)
    scales = rng.uniform(0.5, 2, (2, 2, slots, sum(p.scales for p in parts))).astype(np.float16)
    features, at = [], 0
    for part, code in zip(parts, codes, strict=True):
        norm = scales[..., at, None].astype(np.float64)
        if part.level_bits:
            levels = np.array(quant.coordinate_levels(part.level_bits, part.dim))
            features.append(norm * levels[code % 2**part.level_bits])
        if part.signs:
            gamma = scales[..., at + 1, None].astype(np.float64)
            sign = np.where(code // 2**part.level_bits, 1, -1)
            features.append(norm * gamma * math.sqrt(math.pi / 2) / part.dim * sign)
        at += part.scales
    dense = np.concatenate(features, -1)
    assert dense.shape[-1] == sum(p.features for p in parts)
    q = rng.normal(size=(2, 4, 2, dense.shape[-1])).astype(np.float32) * 3
    op = fast_jit(codebook_decode, static_argnames=("keys", "values"))
    o, m, l = op(  # noqa: E741
        q, packed, scales, packed, scales, jnp.asarray(lengths, jnp.int32),
        keys=parts, values=parts,
    )  # fmt: skip
    for b, n, t in np.ndindex(2, 4, 2):
        x = dense[b, n // 2, : lengths[b, t]]
        s = x @ q[b, n, t] / 8.0  # sqrt(head_dim)
        p = np.exp(s - s.max())
        np.testing.assert_allclose(m[b, n, t], s.max(), atol=1e-4)
        np.testing.assert_allclose(l[b, n, t], p.sum(), rtol=1e-4)
        np.testing.assert_allclose(o[b, n, t], p @ x, atol=1e-4)


def test_the_op_refuses_what_its_parts_do_not_say():
    q, lengths = jnp.zeros((1, 2, 1, 64)), jnp.ones((1, 1), jnp.int32)
    codes, scales = jnp.zeros((1, 1, 4, 32), jnp.uint8), jnp.zeros((1, 1, 4, 1), jnp.float16)
    four, three = (Part(64, 4),), (Part(64, 3),)

    def call(q, keys, impl="auto"):
        args = (q, codes, scales, codes, scales, lengths)
        return codebook_decode(*args, keys=keys, values=four, impl=impl)

    assert call(q, four)[0].shape == (1, 2, 1, 64)
    with pytest.raises(ValueError, match=r"keys of 32 bytes and 1 scales must be \(24, 1\)"):
        call(q, three)
    with pytest.raises(ValueError, match="q of 32 features must be 64"):
        call(q[..., :32], four)
    with pytest.raises(ValueError, match="impl='bogus'"):
        call(q, four, "bogus")
    for _, heads, kv_heads, _, keys, values in SHAPES.values():
        assert heads % kv_heads == 0
        assert sum(p.dim for p in keys) == sum(p.dim for p in values)


def test_a_step_passes_the_request_on():
    shape = Shape(16, 2, 1, (20,))
    prompt = build([tokens_of(0, 20, shape)], shape)
    with pytest.raises(ValueError, match="impl='bogus'"):
        compress(TurboQuant(impl="bogus"), prompt, info(shape))
    cache = dataclasses.replace(compress(TurboQuant(), prompt, info(shape)), impl="bogus")
    with pytest.raises(ValueError, match="impl='bogus'"):
        cache.step(*step_inputs(shape, 1))
