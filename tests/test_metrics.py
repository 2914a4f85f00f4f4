import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kvjax import metrics


def random_logits(seed, shape=(3, 7, 50), scale=3.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def test_t_interval_is_scipys():
    x = np.random.default_rng(0).normal(3.0, 2.0, 11)
    mean, low, high, n = metrics.mean_interval(x)
    want = stats.t.interval(0.95, 10, loc=x.mean(), scale=stats.sem(x))
    np.testing.assert_allclose((low, high), want, rtol=1e-9)
    assert (mean, n) == (pytest.approx(x.mean()), 11)


@pytest.mark.parametrize("hits,n", [(0, 24), (24, 24), (17, 24), (1, 1)])
def test_proportions_get_wilsons_interval(hits, n):
    got = metrics.mean_interval([1] * hits + [0] * (n - hits))
    want = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
    np.testing.assert_allclose((got.low, got.high), (want.low, want.high), atol=1e-9)
    assert 0 <= got.low <= got.mean <= got.high <= 1


def test_intervals_cover_the_mean_about_95_times_in_100():
    rng = np.random.default_rng(1)
    for kind in ("t", "bootstrap"):
        inside = [
            i.low <= 5 <= i.high
            for i in (metrics.mean_interval(rng.normal(5, 1, 30), kind) for _ in range(300))
        ]
        assert 0.89 <= np.mean(inside) <= 0.99


def test_bootstrap_depends_on_the_seed_only():
    x = np.random.default_rng(2).exponential(size=20)
    one, same, other = (metrics.mean_interval(x, "bootstrap", seed=s) for s in (1, 1, 2))
    assert one == same != other


def test_degenerate_intervals():
    assert metrics.mean_interval([2.5]) == (2.5, None, None, 1)
    assert metrics.mean_interval([2.5, 2.5]) == (2.5, 2.5, 2.5, 2)
    for values, message in [([], "empty"), ([1.0, float("nan")], "1 of 2 values")]:
        with pytest.raises(ValueError, match=message):
            metrics.mean_interval(values)
    with pytest.raises(ValueError, match="wilson"):
        metrics.mean_interval([0.5, 1.0], "wilson")


def test_kl_and_nll_equal_a_float64_oracle():
    full, other = random_logits(0), random_logits(1)
    p, q = (np.exp(np.asarray(x, np.float64)) for x in (full, other))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    got = jax.jit(metrics.kl_divergence)(full, other)
    np.testing.assert_allclose(got, (p * np.log(p / q)).sum(-1), rtol=1e-5)
    targets = jnp.asarray(np.random.default_rng(3).integers(0, 50, (3, 7)))
    got = jax.jit(metrics.nll)(full, targets)
    want = -np.log(np.take_along_axis(p, np.asarray(targets)[..., None], -1)[..., 0])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_kl_of_equals_is_zero_and_masked_entries_are_harmless():
    full = random_logits(0).at[..., 0].set(-jnp.inf)
    np.testing.assert_allclose(metrics.kl_divergence(full, full), 0.0, atol=1e-6)
    assert np.isfinite(metrics.kl_divergence(full, random_logits(1))).all()
    assert metrics.kl_divergence(full.astype(jnp.bfloat16), full).dtype == jnp.float32


def test_kl_is_taken_from_the_full_caches_side():
    sharp, flat = jnp.asarray([[8.0, 0.0, 0.0]]), jnp.zeros((1, 3))
    assert metrics.kl_divergence(sharp, flat)[0] == pytest.approx(np.log(3), abs=0.02)
    assert metrics.kl_divergence(flat, sharp)[0] > 4


def test_top_k_overlap_counts_the_set_not_the_order():
    full = jnp.asarray([[5.0, 4, 3, 2, 1, 0, -1, -2]])
    swapped = jnp.asarray([[4.0, 5, 3, 2, 1, 0, -1, -2]])
    two_new = jnp.asarray([[5.0, 4, 3, -3, -4, 9, 8, -2]])
    assert metrics.top_k_overlap(full, swapped)[0] == 1
    assert metrics.top1_agreement(full, swapped)[0] == 0
    assert metrics.top_k_overlap(full, two_new)[0] == pytest.approx(0.6)
    assert metrics.top_k_overlap(full, -full, k=2)[0] == 0


def test_first_divergence():
    a = jnp.asarray([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    b = jnp.asarray([[1, 2, 3, 4], [1, 2, 0, 4], [1, 2, 3, 0]])
    assert metrics.first_divergence(a, b).tolist() == [4, 2, 0]
    mask = jnp.asarray([[True] * 4, [True, True, False, False], [False, True, True, True]])
    assert jax.jit(metrics.first_divergence)(a, b, mask).tolist() == [4, 4, 3]


def test_relative_error_ignores_pads_and_is_per_row():
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(2, 3, 5, 4)).astype(np.float32)
    out = reference * np.asarray([1.1, 0.5], np.float32)[:, None, None, None]
    mask = np.ones((2, 5), bool)
    mask[0, 4] = False
    out[0, :, 4] = np.nan
    got = jax.jit(metrics.relative_error)(out, reference, mask)
    np.testing.assert_allclose(got, [0.1, 0.5], rtol=1e-4)
    zeros = jnp.zeros((2, 3, 5, 4))
    assert metrics.relative_error(zeros, zeros).tolist() == [0, 0]
    assert np.isinf(metrics.relative_error(zeros + 1, zeros)).all()


def test_masked_mean_ignores_what_stands_at_a_pad():
    values = jnp.asarray([[1.0, 3.0, jnp.nan], [5.0, jnp.inf, jnp.nan]])
    mask = jnp.asarray([[True, True, False], [True, False, False]])
    assert metrics.masked_mean(values, mask) == 3
    assert metrics.masked_mean(values, mask, axis=1).tolist() == [2, 5]
    assert metrics.masked_mean(values, jnp.zeros_like(mask)) == 0


def test_mean_of_means_counts_groups_alike_and_resamples_within_them():
    rng = np.random.default_rng(3)
    groups = [rng.normal(0, 1, 40), rng.normal(10, 1, 8)]
    found = metrics.mean_of_means(groups)
    assert found.mean == pytest.approx((groups[0].mean() + groups[1].mean()) / 2)
    assert found.n == 48
    # the groups' distance of 10 is no noise: half the root of the summed variances of the means
    half = 1.96 * np.sqrt(sum(g.var() / len(g) for g in groups)) / 2
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert metrics.mean_of_means([[1.0, 3.0], [5.0]])[:3] == (3.5, None, None)
    for bad in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="at least one"):
            metrics.mean_of_means(bad)
