import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kvjax import quant


@pytest.mark.parametrize("bits", range(1, 17))
def test_pack_round_trips_every_width_and_odd_sizes(bits):
    rng = np.random.default_rng(bits)
    for size in (1, 7, 8, 33):
        codes = rng.integers(0, 2**bits, (2, size))
        packed = quant.pack(jnp.asarray(codes), bits)
        assert packed.dtype == jnp.uint8 and packed.shape == (2, quant.packed_size(size, bits))
        np.testing.assert_array_equal(quant.unpack(packed, bits, size), codes)
    assert quant.packed_size(64, bits) == 8 * bits  # no waste where whole bytes allow it


def test_pack_layout_is_planes_least_significant_first():
    codes = jnp.arange(8, dtype=jnp.int32) % 4  # 0 1 2 3 0 1 2 3
    # 2 bits: byte j of 2 holds codes j, j + 2, j + 4, j + 6
    assert quant.pack(codes, 2).tolist() == [0b10001000, 0b11011101]
    assert quant.pack(jnp.asarray([1, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [0b10000001]
    assert quant.pack(jnp.asarray([0xA, 0x5]), 4).tolist() == [0x5A]
    # 3 = 2 + 1 bits: the low bits' plane, then the high bit's
    assert quant.pack(jnp.asarray([5, 2, 7, 0]), 3).tolist() == [0b00111001, 0b0101]
    assert quant.pack(jnp.asarray([0x2FF]), 10).tolist() == [0xFF, 0b10]


def test_pack_refuses_what_it_cannot_hold():
    for bits in (0, 17):
        with pytest.raises(ValueError, match=f"bits={bits}"):
            quant.pack(jnp.zeros(4, jnp.int32), bits)
    with pytest.raises(ValueError, match="it must be 4"):
        quant.unpack(jnp.zeros(3, jnp.uint8), 2, 16)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [1, 2])
def test_groups_are_within_half_a_step(bits, axis):
    x = np.random.default_rng(0).normal(size=(2, 32, 16)).astype(np.float32) + 100.3
    codes, scale, zero = quant.group_quantize(jnp.asarray(x), bits, 8, axis)
    shape = list(x.shape)
    shape[axis] //= 8
    assert scale.shape == zero.shape == tuple(shape) and scale.dtype == jnp.float16
    back = np.asarray(quant.group_dequantize(codes, scale, zero, axis))
    step = np.repeat(np.asarray(scale, np.float32), 8, axis)
    # the float16 zero may lie half an ulp above the smallest, a scale's rounding at the top
    offset = np.spacing(np.float16(100)).astype(np.float32) / 2
    assert (np.abs(back - x) <= step * (0.501 + 2**bits * 2.0**-11) + offset).all()
    assert (np.abs(back - x) <= step * 0.501).mean() > 0.8
    assert int(codes.max()) == 2**bits - 1 and int(codes.min()) == 0


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_degenerate_groups(bits):
    def back(x, group=8):
        x = jnp.asarray(x, jnp.float32)[None]
        return np.asarray(quant.group_dequantize(*quant.group_quantize(x, bits, group)))[0]

    assert (back(np.zeros(16)) == 0).all()
    for constant in (1.0, -0.1, 3e-5, 1000.7):
        np.testing.assert_allclose(back(np.full(8, constant)), constant, rtol=1e-3, atol=6e-8)
    tiny = 1 + np.linspace(0, 1e-6, 8)  # the scale underflows float16
    np.testing.assert_allclose(back(tiny), tiny, atol=2e-3)
    small = np.linspace(0, 1e-6, 8)
    assert np.abs(back(small) - small).max() <= 1.01e-6
    for huge in (1e4, 6e4, 1e6, 3e38):
        got = back(np.linspace(-huge, huge, 8))
        assert np.isfinite(got).all()
        if huge <= 3e4:
            assert np.abs(got).max() <= huge * 1.01
    wide = back(np.array([-40000.0] * 4 + [40000.0] * 4))  # max - min overflows float16
    np.testing.assert_allclose(wide, [-40000] * 4 + [40000] * 4, rtol=0.02 if bits > 1 else 0.7)


def test_group_must_divide():
    with pytest.raises(ValueError, match=r"group=32 must divide.* 80.*16.*20.*40"):
        quant.group_quantize(jnp.zeros((2, 80)), 2, 32)
    with pytest.raises(ValueError, match="bits=9"):
        quant.group_quantize(jnp.zeros((2, 80)), 9, 16)


DISTORTIONS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_lloyd_max_levels_have_their_published_distortion(bits):
    levels = np.array(quant.lloyd_max(bits))
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-7)
    x = stats.norm.ppf((np.arange(400_000) + 0.5) / 400_000)
    error = np.min((x[:, None] - levels) ** 2, -1).mean()
    assert error == pytest.approx(DISTORTIONS[bits], rel=2e-3)
    if bits == 2:  # Max (1960), table I
        np.testing.assert_allclose(levels, [-1.510, -0.4528, 0.4528, 1.510], atol=1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebook_is_the_nearest_level(bits):
    x = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    codes = quant.codebook_encode(jnp.asarray(x), bits)
    levels = np.asarray(quant.codebook_decode(jnp.arange(2**bits), bits))
    assert len(set(levels.tolist())) == 2**bits
    got = np.abs(levels[np.asarray(codes)] - x)
    np.testing.assert_allclose(got, np.abs(levels[None] - x[:, None]).min(-1), atol=1e-5)
    assert np.square(got).mean() < 1.1 * DISTORTIONS.get(bits, 0.009497 / 2.5 ** (bits - 4))


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 256])
def test_rotation_is_orthonormal_and_spreads(size):
    matrix = np.asarray(quant.rotation(size, 3), np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=2e-6)
    assert np.abs(np.eye(size)[0] @ matrix).max() < 0.6  # one loud channel is shared out
    assert (matrix != np.asarray(quant.rotation(size, 4))).any()
    np.testing.assert_array_equal(matrix.astype(np.float32), quant.rotation(size, 3))


def test_scale_in_eight_bits():
    scale = np.exp2(np.random.default_rng(0).uniform(-13, 8, 4000)).astype(np.float32)
    back = np.asarray(quant.scale_decode(quant.scale_encode(jnp.asarray(scale))))
    assert np.abs(back / scale - 1).max() < 0.0294
    edge = quant.scale_decode(quant.scale_encode(jnp.asarray([0.0, 1e-6, 1e9, jnp.inf])))
    assert edge[0] == edge[1] == 0 and 250 < edge[2] < 300 and jnp.isfinite(edge).all()


def test_bit_words_and_their_prefix():
    mask = np.random.default_rng(0).random((2, 3, 70)) < 0.4
    words = quant.bit_words(jnp.asarray(mask))
    assert words.shape == (2, 3, 3) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(quant.word_bits(words, 70), mask)
    assert int(quant.bit_words(jnp.asarray([True, False, True]))[0]) == 0b101
    padded = np.pad(mask, ((0, 0), (0, 0), (0, 26))).reshape(2, -1, 32).sum(-1)
    before = np.cumsum(padded, -1) - padded
    np.testing.assert_array_equal(quant.popcount_prefix(words).reshape(2, -1), before)
    full = quant.bit_words(jnp.ones((1, 64), bool))
    assert full.tolist() == [[2**32 - 1] * 2] and quant.popcount_prefix(full).tolist() == [[0, 32]]


# Positive levels times sqrt(dim), and dim times the distortion, of the exact law.
COORDINATES = {
    (128, 1): ([0.7994444], 0.360889),
    (128, 2): ([0.4524533, 1.5051930], 0.116000),
    (128, 3): ([0.2444249, 0.7533302, 1.3365989, 2.1314708], 0.033966),
    (128, 4): (
        [0.1278732, 0.3863809, 0.6536189, 0.9370970, 1.2477705, 1.6043427, 2.0459254, 2.6888593],
        0.009315,
    ),
    (64, 1): ([0.8010073], 0.358387),
    (64, 2): ([0.4521190, 1.4999748], 0.114526),
    (64, 3): ([0.2437534, 0.7506581, 1.3293429, 2.1113114], 0.033391),
    (64, 4): (
        [0.1273522, 0.3847183, 0.6504941, 0.9318940, 1.2394042, 1.5908491, 2.0233098, 2.6463705],
        0.009132,
    ),
    (96, 2): ([0.4523427, 1.5034528], None),
    (96, 3): ([0.2442013, 0.7524391, 1.3341742, 2.1247162], None),
    (32, 2): ([0.4514279, 1.4895595], None),
    (32, 3): ([0.2424048, 0.7453250, 1.3149955, 2.0719261], None),
}


def coordinate_distortion(levels, dim):
    """dim times the mean square error for a coordinate of a unit vector, by its quantiles."""
    u = (np.arange(100_000) + 0.5) / 100_000
    x = np.sort(2 * stats.beta.ppf(u, (dim - 1) / 2, (dim - 1) / 2) - 1)
    return dim * np.square(x - levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]).mean()


@pytest.mark.parametrize("dim,bits", COORDINATES)
def test_coordinate_levels_are_the_exact_laws(dim, bits):
    levels = np.array(quant.coordinate_levels(bits, dim))
    upper, error = COORDINATES[dim, bits]
    np.testing.assert_allclose(levels[len(upper) :] * dim**0.5, upper, atol=1e-7)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-12)
    got = coordinate_distortion(levels, dim)
    assert error is None or got == pytest.approx(error, rel=2e-3)
    assert got <= math.sqrt(3) * math.pi / 2 * 4.0**-bits  # TurboQuant, theorem 1
    gauss = np.array(quant.lloyd_max(bits))
    assert 1e-4 < np.abs(levels * dim**0.5 - gauss).max() < 0.15  # its limit, not the law itself


@pytest.mark.parametrize("dim", [4, 16, 80, 256])
@pytest.mark.parametrize("bits", range(1, 9))
def test_coordinate_codes_of_every_width(bits, dim):
    levels = np.array(quant.coordinate_levels(bits, dim))
    assert len(levels) == 2**bits and (np.diff(levels, prepend=-1, append=1) > 0).all()
    law = stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)
    edges = np.concatenate([[-1.0], (levels[1:] + levels[:-1]) / 2, [1.0]])
    middle = 2 ** (bits - 1)
    for cell in {middle, min(middle + 1, 2**bits - 1)}:  # a level is the mean of its cell
        t = np.linspace(edges[cell], edges[cell + 1], 2001)
        weight = law.pdf(t)
        mean = np.trapezoid(weight * t, t) / np.trapezoid(weight, t)
        assert levels[cell] == pytest.approx(mean, rel=1e-3 if bits == 1 else 1e-4)
    x = np.random.default_rng(0).normal(size=3000).clip(-3, 3) / max(dim**0.5, 3)
    x = np.append(x, [-1.0, 1.0, 0.0]).astype(np.float32)
    codes = np.asarray(quant.coordinate_encode(jnp.asarray(x), bits, dim))
    nearest = np.abs(x[:, None] - levels).min(-1)
    np.testing.assert_allclose(np.abs(levels[codes] - x), nearest, atol=2e-7)
    back = quant.coordinate_decode(jnp.arange(2**bits), bits, dim)
    np.testing.assert_allclose(back, levels, atol=3e-7)


def test_coordinate_levels_refuse_what_has_no_law():
    with pytest.raises(ValueError, match="dim=2 must be at least 3"):
        quant.coordinate_levels(2, 2)
    with pytest.raises(ValueError, match="bits=9"):
        quant.coordinate_levels(9, 64)


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_haar_rotation_is_orthonormal_and_not_hadamard(size):
    matrix = np.asarray(quant.rotation(size, 3, "haar"), np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=2e-6)
    flat = np.abs(np.asarray(quant.rotation(size, 3))) * size**0.5
    assert np.allclose(flat, 1, atol=1e-5) == (size & (size - 1) == 0)  # all entries +-1/sqrt(H)
    assert not np.allclose(np.abs(matrix) * size**0.5, 1, atol=0.1)
    if size & (size - 1):
        np.testing.assert_array_equal(matrix, quant.rotation(size, 3))
    with pytest.raises(ValueError, match="rotation='qr' must be 'hadamard' or 'haar'"):
        quant.rotation(size, 3, "qr")


def test_a_sketch_is_unbiased_over_its_matrix():
    r, q = np.random.default_rng(1).normal(size=(2, 16))
    got = []
    for seed in range(400):
        s = np.asarray(quant.sketch(16, seed), np.float64)
        got.append(np.sqrt(np.pi / 2) / 16 * np.linalg.norm(r) * np.sign(s @ r) @ (s @ q))
    error = np.std(got) / np.sqrt(len(got))
    assert abs(np.mean(got) - r @ q) < 3 * error and error < 0.05 * np.linalg.norm(q) ** 2
