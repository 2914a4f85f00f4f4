import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import rope
from kvjax.rope import Rope


def config(**fields):
    base = {"head_dim": 64, "rope_theta": 10000.0, "max_position_embeddings": 4096}
    return SimpleNamespace(**(base | fields))


LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain(head_dim=64, base=10000.0):
    return [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def test_default_frequencies_and_static():
    built = rope.build(config())
    np.testing.assert_allclose(built.inv_freq, plain(), rtol=1e-12)
    assert built.attention_scaling == 1.0
    assert hash(built) == hash(rope.build(config(rope_scaling=None)))


def test_llama_31_changes_35_of_64_frequencies_and_divides_the_last_by_8():
    got = np.array(rope.build(config(head_dim=128, rope_theta=5e5, rope_scaling=LLAMA31)).inv_freq)
    want = np.array(plain(128, 5e5))
    assert (~np.isclose(got, want, rtol=1e-6)).sum() == 35
    assert got[-1] == pytest.approx(want[-1] / 8, rel=1e-12)
    for f, g in zip(want, got, strict=True):  # the release's own case distinction
        wave = 2 * math.pi / f
        if wave > 8192:
            expected = f / 8
        elif wave < 8192 / 4:
            expected = f
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            expected = (1 - smooth) * f / 8 + smooth * f
        assert g == pytest.approx(expected, rel=1e-12)


def test_new_rope_parameters_and_pairs_read_the_same():
    old = config(rope_theta=5e5, rope_scaling=LLAMA31)
    new = SimpleNamespace(
        head_dim=64,
        max_position_embeddings=4096,
        rope_theta=None,
        rope_parameters=LLAMA31 | {"rope_theta": 5e5},
    )
    pairs = config(rope_theta=5e5, rope_scaling=tuple(LLAMA31.items()))
    assert rope.build(old) == rope.build(new) == rope.build(pairs)


def test_linear_divides_by_the_factor():
    got = rope.build(config(rope_scaling={"type": "linear", "factor": 4.0})).inv_freq
    np.testing.assert_allclose(got, np.array(plain()) / 4, rtol=1e-12)


@pytest.mark.parametrize("num_tokens", [None, 100, 4096, 8192])
def test_dynamic_raises_the_base_only_past_the_limit(num_tokens):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    got = rope.build(config(rope_scaling=scaling), num_tokens).inv_freq
    length = max(num_tokens or 0, 4096)
    base = 10000.0 * (2.0 * length / 4096 - 1.0) ** (64 / 62)
    np.testing.assert_allclose(got, plain(64, base), rtol=1e-12)


def test_yarn_follows_the_paper():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    built = rope.build(config(rope_scaling=scaling, max_position_embeddings=16384))
    assert built.attention_scaling == pytest.approx(0.1 * math.log(4.0) + 1.0)
    got, want = np.array(built.inv_freq), np.array(plain())
    turns = 4096 * want / (2 * math.pi)
    np.testing.assert_allclose(got[turns > 64], want[turns > 64], rtol=1e-12)
    np.testing.assert_allclose(got[turns < 0.5], want[turns < 0.5] / 4, rtol=1e-12)
    ratio = got / want
    assert (np.diff(ratio) <= 1e-12).all() and ((0.25 - 1e-12 <= ratio) & (ratio <= 1.0)).all()
    assert ((ratio > 0.26) & (ratio < 0.99)).sum() > 5  # a ramp, not a step


def test_yarn_attention_factor_and_mscale():
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}
    assert rope.build(config(rope_scaling=scaling)).attention_scaling == 1.25
    scaling = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.4}
    want = (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1)
    assert rope.build(config(rope_scaling=scaling)).attention_scaling == pytest.approx(want)


def test_gguf_factors_divide_each_frequency():
    factors = tuple(1.0 + i for i in range(32))
    got = rope.build(config(rope_scaling={"rope_type": "factors", "factors": factors})).inv_freq
    np.testing.assert_allclose(got, np.array(plain()) / factors, rtol=1e-12)
    with pytest.raises(ValueError, match="3 rope factors were given; 32 pairs"):
        rope.build(config(rope_scaling={"rope_type": "factors", "factors": (1.0, 2.0, 3.0)}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "mrope"}},
            "rope_type='mrope' is unknown; known are .*yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs 'low_freq_factor'"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"partial_rotary_factor": 0.36}, "rotary size 23 .* must be even"),
    ],
)
def test_errors_name_what_is_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        rope.build(config(**fields))


def rotate_numpy(inv_freq, x, positions, scaling=1.0):
    """Complex multiplication of (x_i + i x_{i+R/2}) by exp(i position f_i), in float64."""
    half = len(inv_freq)
    z = x[..., :half].astype(np.float64) + 1j * x[..., half : 2 * half]
    z = z * scaling * np.exp(1j * positions[..., None] * np.array(inv_freq))
    return np.concatenate((z.real, z.imag, x[..., 2 * half :]), axis=-1)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotate_is_complex_multiplication_and_unrotate_its_inverse(partial):
    built = rope.build(
        config(
            partial_rotary_factor=partial,
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
        )
    )
    assert 2 * len(built.inv_freq) == 64 * partial
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 64))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 8, 90, 200, 3000]])
    y = rope.rotate(built, x, positions)
    want = rotate_numpy(built.inv_freq, np.asarray(x), np.asarray(positions)[:, None], 1.3)
    np.testing.assert_allclose(y, want, atol=2e-3)  # float32 angles up to 3,000 radians
    np.testing.assert_allclose(y[0], want[0], atol=2e-6)
    np.testing.assert_allclose(rope.unrotate(built, y, positions), x, atol=3e-6)


def test_positions_broadcast_over_heads_and_pads_count_as_zero():
    built = rope.build(config())
    x = jax.random.normal(jax.random.key(1), (2, 3, 4, 64))
    row = jnp.array([-1, -1, 0, 1])
    one = rope.rotate(built, x, row)
    np.testing.assert_array_equal(one, rope.rotate(built, x, jnp.tile(row, (2, 1))))
    np.testing.assert_array_equal(one, rope.rotate(built, x, jnp.tile(row, (2, 3, 1))))
    np.testing.assert_array_equal(one[:, :, :3], x[:, :, :3])
    with pytest.raises(ValueError, match="positions .* do not fit x"):
        rope.rotate(built, x, jnp.zeros((2, 3, 4, 64), jnp.int32))


def test_scores_depend_on_distance_only():
    built = rope.build(config())
    q, k = jax.random.normal(jax.random.key(2), (2, 1, 1, 64))

    def score(at, back):
        left = rope.rotate(built, q[None], jnp.array([at]))
        return (left * rope.rotate(built, k[None], jnp.array([at - back]))).sum()

    np.testing.assert_allclose(score(50, 9), score(900, 9), rtol=1e-3, atol=1e-3)
    assert abs(score(50, 9) - score(50, 30)) > 1e-2


def test_tables_are_float32_whatever_the_dtype():
    built = Rope((1.0, 0.5))
    cos, sin = rope.tables(built, jnp.array([257, 15962]))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos[:, 0], np.cos([257.0, 15962.0]), atol=1e-6)
    x = jnp.ones((1, 1, 2, 4), jnp.bfloat16)
    y = rope.rotate(built, x, jnp.array([257, 15962]))
    assert y.dtype == jnp.bfloat16
    want = rotate_numpy(built.inv_freq, np.ones((2, 4)), np.array([257, 15962]))
    np.testing.assert_allclose(np.asarray(y, np.float32)[0, 0], want, atol=8e-3)
