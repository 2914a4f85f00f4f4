import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import scores
from tests import prompts
from tests.prompts import Shape, fast_jit

SHAPE = Shape(16, 6, 2, (70, 9, 3), columns=75)
W = 8


def oracle(prompt, length, row):
    """lse, output and probabilities of the last W queries by KV head, float64 over real columns."""
    q, k, v = (np.asarray(x, np.float64)[row] for x in (prompt.q, prompt.k, prompt.v))
    total = k.shape[1]
    start, group = total - length, q.shape[0] // k.shape[0]
    out = []
    for h in range(k.shape[0]):
        for g in range(group):
            for w in range(total - W, total):
                if w < start:
                    out.append((None, None, np.zeros(total)))
                    continue
                s = k[h, start : w + 1] @ q[h * group + g, w] / 4
                lse = np.log(np.exp(s - s.max()).sum()) + s.max()
                p = np.zeros(total)
                p[start : w + 1] = np.exp(s - lse)
                out.append((lse, p @ np.where(p[:, None] > 0, v[h], 0), p))
    return [out[i * group * W : (i + 1) * group * W] for i in range(k.shape[0])]


def check(prompt, seen, seen_scores):
    for row, n in enumerate(SHAPE.lengths):
        for h, queries in enumerate(oracle(prompt, n, row)):
            for i, (lse, y, _) in enumerate(queries):
                assert bool(seen.seen[row, i]) == (lse is not None)
                if lse is not None:
                    assert abs(float(seen.lse[row, h, i]) - lse) < 1e-4
                    np.testing.assert_allclose(seen.y[row, h, i], y, atol=1e-4)
            want = sum(p for _, _, p in queries)
            np.testing.assert_allclose(seen_scores[row, h], want, atol=1e-4)


def test_observe_and_window_scores_are_dense_attention():
    prompt = prompts.prompt(SHAPE)
    seen = fast_jit(scores.observe, static_argnums=1)(prompt, W)
    total = np.asarray(fast_jit(scores.window_scores)(prompt, seen))
    check(prompt, seen, total)
    assert total[0].sum() == pytest.approx(2 * 3 * W, rel=1e-4)
    assert (total[1, :, : 75 - 9] == 0).all()


def test_blocks_are_one_block(monkeypatch):
    plain = scores.in_blocks
    monkeypatch.setattr(scores, "in_blocks", lambda f, columns: plain(f, columns, 16))
    prompt = prompts.prompt(SHAPE)
    seen = scores.observe(prompt, W)
    check(prompt, seen, np.asarray(scores.window_scores(prompt, seen)))


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 32, 50])
def test_in_blocks_covers_every_column_once(columns):
    got = scores.in_blocks(lambda first, size: first + jnp.arange(size), columns, 16)
    assert jnp.concatenate(got).tolist() == list(range(columns))


def test_a_window_longer_than_the_prompt():
    prompt = prompts.prompt(Shape(16, 2, 1, (5,)))
    seen = scores.observe(prompt, 32)
    assert seen.q.shape[2] == 10 and np.isfinite(seen.lse).all()
    assert float(scores.window_scores(prompt, seen).sum()) == pytest.approx(10, rel=1e-4)


def test_pool():
    x = jnp.asarray([[0.0, 3.0, 0.0, 0.0, 6.0]])
    np.testing.assert_allclose(scores.pool(x, 3)[0], [1, 1, 1, 2, 2])
    np.testing.assert_allclose(scores.pool(x, 3, "max")[0], [3, 3, 3, 6, 6])
    np.testing.assert_array_equal(scores.pool(x, 1, "max"), x)
    np.testing.assert_array_equal(scores.pool(-x, 3, "max")[0], [0, 0, 0, 0, 0])
    for kernel, kind in ((2, "avg"), (0, "avg"), (3, "median")):
        with pytest.raises(ValueError, match="must be"):
            scores.pool(x, kernel, kind)


def test_hash_scores_are_uniform_and_independent():
    x = np.asarray(scores.hash_scores(1, jnp.zeros(1, jnp.int32), 4, 5000), np.float64)[0]
    assert 0 <= x.min() and x.max() < 1
    counts = np.histogram(x, 64, (0, 1))[0]
    expected = x.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(126)
    other = np.asarray(scores.hash_scores(2, jnp.zeros(1, jnp.int32), 4, 5000), np.float64)[0]
    pairs = [(x[0], x[1]), (x[0], other[0]), (x[0, 1:], x[0, :-1]), (x[0], np.arange(5000))]
    assert all(abs(np.corrcoef(*pair)[0, 1]) < 0.07 for pair in pairs)
    padded = scores.hash_scores(1, jnp.asarray([0, 7], jnp.int32), 4, 5007)
    np.testing.assert_array_equal(padded[0, :, :5000], x.astype(np.float32))
    np.testing.assert_array_equal(padded[1, :, 7:], x.astype(np.float32))
