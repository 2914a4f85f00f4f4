"""group_quantize and codebook_encode: the GPU kernels, interpreted, against XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import quant
from kvjax.methods.kivi import KIVI
from kvjax.methods.turboquant import TurboQuant
from kvjax.pallas.codebook_decode.api import Part
from kvjax.pallas.codebook_encode import api as codebook_api
from kvjax.pallas.codebook_encode.api import codebook_encode
from kvjax.pallas.group_quantize.api import group_quantize
from tests import prompts
from tests.prompts import Shape, fast_jit


def run(function, impl, *args, **options):
    return fast_jit(functools.partial(function, impl=impl, **options))(*args)


def same(got, want):
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


# bits, tokens, head dim, group, axis
GROUPS = [
    (2, 33, 80, 20, 3),
    (3, 31, 96, 96, 3),
    (4, 101, 128, 32, 3),
    (8, 3, 256, 64, 3),
    (6, 1, 20, 5, 3),
    (1, 16, 256, 8, 2),
    (2, 36, 80, 12, 2),
    (3, 20, 96, 20, 2),
    (5, 8, 128, 1, 2),
    (7, 64, 20, 64, 2),
]


@pytest.mark.parametrize("bits, tokens, dim, group, axis", GROUPS)
def test_group_quantize_is_its_specification(bits, tokens, dim, group, axis):
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((2, 3, tokens, dim)).astype(np.float32)
    x[0, 0] = 0.1  # constant groups
    x[0, 1] *= 1e6  # beyond float16
    x[1, 0] = np.round(x[1, 0] * 2) / 2  # many levels that lie half way
    x = jnp.asarray(x)
    options = {"bits": bits, "group": group, "axis": axis}
    got = run(group_quantize, "interpret", x, **options)
    same(got, run(group_quantize, "xla", x, **options))
    codes = quant.unpack(got[0], bits, dim)
    y = np.asarray(quant.group_dequantize(codes, *got[1:], axis=axis), np.float64)
    step = np.asarray(got[1], np.float64).repeat(group, axis)
    keep = np.array([[1, 0, 1], [1, 1, 1]], bool)  # half a step, and what float16 rounds away
    error = np.abs(y - np.asarray(x, np.float64))[keep]
    assert (error <= step[keep] * (0.501 + 2.0**-11 * 2**bits) + 4e-3).all()


def test_group_quantize_of_a_row_does_not_read_another():
    x = jax.random.normal(jax.random.key(0), (1, 2, 5, 64))
    poisoned = x.at[:, :, 3:].set(jnp.nan).at[:, 1].set(jnp.nan)
    options = {"bits": 2, "group": 32, "axis": 3}
    clean = run(group_quantize, "interpret", x, **options)
    got = run(group_quantize, "interpret", poisoned, **options)
    same((a[:, 0, :3] for a in got), (a[:, 0, :3] for a in clean))


def test_group_quantize_of_another_axis_or_group_is_refused():
    x = jnp.zeros((1, 1, 32, 64))
    for wrong, word in (
        ({"axis": 1}, "axis=1"),
        ({"group": 24}, "group=24"),
        ({"bits": 9}, "bits=9"),
    ):
        with pytest.raises(ValueError, match=word):
            group_quantize(x, **{"bits": 2, "group": 32, "axis": 2, **wrong})


# tokens, parts, corrected; 32 tokens are a block (16 of wide vectors and with signs)
CODEBOOKS = [
    (1, (Part(64, 1),), True),
    (33, (Part(80, 2),), True),
    (31, (Part(96, 3),), False),
    (101, (Part(128, 4),), True),
    (17, (Part(256, 5),), True),
    (5, (Part(24, 7),), True),
    (3, (Part(80, 8),), True),
    (19, (Part(64, 3, True),), True),
    (9, (Part(48, 3), Part(16, 4)), True),
    (5, (Part(48, 3, True), Part(16, 4, True)), False),
]


@pytest.mark.parametrize("tokens, parts, corrected", CODEBOOKS)
def test_codebook_encode_is_its_specification(tokens, parts, corrected):
    dim = sum(part.dim for part in parts)
    (x, turn), options = codebook_api.example((1, 2, tokens, dim, parts), seed=tokens)
    x = (x.astype(jnp.float32) * 3).at[0, 0, 0].set(0.0)
    options["corrected"] = corrected
    codes, scales = run(codebook_encode, "interpret", x, turn, **options)
    want = run(codebook_encode, "xla", x, turn, **options)
    assert codes.shape == want[0].shape and scales.dtype == jnp.float16
    # Where a coordinate lies on an edge, the last bit of a product decides.
    assert (np.asarray(codes) != np.asarray(want[0])).mean() <= 0.002
    np.testing.assert_allclose(
        np.asarray(scales, np.float32), np.asarray(want[1], np.float32), rtol=2e-3
    )


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_codebook_encode_takes_the_nearest_level(bits):
    dim, parts = 64, (Part(64, bits),)
    (x, turn), options = codebook_api.example((1, 1, 20, dim, parts))
    codes, scales = run(codebook_encode, "interpret", x, turn, **options)
    codes = np.asarray(quant.unpack(codes, bits, dim))
    levels = np.asarray(quant.coordinate_levels(bits, dim))
    x64 = np.asarray(x, np.float64)
    y = x64 @ np.asarray(turn, np.float64)
    y /= np.linalg.norm(y, axis=-1, keepdims=True)
    distance = np.abs(y[..., None] - levels)
    taken = np.take_along_axis(distance, codes[..., None], -1)[..., 0]
    assert (taken <= distance.min(-1) + 1e-6).all()
    norm = np.asarray(scales, np.float64)[..., 0] * np.linalg.norm(levels[codes], axis=-1)
    np.testing.assert_allclose(norm, np.linalg.norm(x64, axis=-1), rtol=1e-3)


def test_what_the_codebook_kernel_cannot_do_is_xlas_unless_it_was_asked_for():
    parts = (Part(20, 3),)
    (x, turn), options = codebook_api.example((1, 1, 4, 20, parts))
    with pytest.raises(NotImplementedError, match="whole bytes of 8 codes"):
        codebook_encode(x, turn, impl="gpu", **options)
    same(
        run(codebook_encode, "auto", x, turn, **options),
        run(codebook_encode, "xla", x, turn, **options),
    )
    wide = (Part(160, 4, True),)
    (y, spin), options_of_wide = codebook_api.example((1, 1, 4, 160, wide))
    with pytest.raises(NotImplementedError, match="sketches up to 128 channels"):
        codebook_encode(y, spin, impl="interpret", **options_of_wide)
    with pytest.raises(ValueError, match="turn of shape"):
        codebook_encode(x, turn[:, :16], **options)


@pytest.mark.parametrize(
    "op, method",
    [
        ("group_quantize", KIVI(k_bits=2, v_bits=2, group=16, residual_length=16, impl="gpu")),
        ("codebook_encode", TurboQuant(impl="gpu")),
    ],
)
def test_methods_encode_with_the_kernel(op, method):
    shape = Shape(16, 2, 1, (20,))
    program = jax.make_jaxpr(lambda p: method.compress(p, prompts.info(shape)))
    assert str(program(prompts.prompt(shape))).count(f"name={op}") == 2  # keys and values
