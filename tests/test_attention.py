import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import attend_dense, dense_partial, finish, merge, visible
from kvjax.pallas.flash_prefill.api import flash_prefill
from tests.prompts import fast_jit

prefill = fast_jit(flash_prefill, static_argnames=("window", "impl"))


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(q, k, v, mask):
    """Softmax attention in float64; rows that see nothing give zero."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1) for x in (k, v))
    s = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)
    peak = s.max(-1, keepdims=True)
    p = np.where(mask, np.exp(s - np.where(np.isfinite(peak), peak, 0)), 0)
    total = p.sum(-1, keepdims=True)
    return p / np.where(total > 0, total, 1) @ v


@pytest.mark.parametrize(
    "columns,starts,heads,kv_heads,window",
    [
        (1, (0,), 2, 1, None),
        (7, (0, 3), 4, 2, None),
        (130, (0, 129), 3, 3, 5),
        (257, (0, 255), 4, 1, None),
        (300, (17, 0), 2, 2, 64),
        (515, (0, 270), 2, 1, 300),
    ],
)
def test_flash_prefill_is_dense_attention(columns, starts, heads, kv_heads, window):
    batch = len(starts)
    q, k, v = draw(0, batch, heads, columns, 16), *draw(1, 2, batch, kv_heads, columns, 16)
    for i, start in enumerate(starts):  # pads are loud, and finite
        for x in (q, k, v):
            x[i, :, :start] = 1e4
    at = np.arange(columns)
    mask = (at[None] <= at[:, None])[None, None] & (at >= np.array(starts)[:, None, None, None])
    if window is not None:
        mask = mask & (at[None] > at[:, None] - window)
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    out, lse = prefill(*arrays, jnp.asarray(starts, jnp.int32), window=window)
    got = np.asarray(out)
    want = dense(q, k, v, mask)
    for i, start in enumerate(starts):
        np.testing.assert_allclose(got[i, :, start:], want[i, :, start:], atol=2e-5)
        assert (got[i, :, :start] == 0).all()


def test_flash_prefill_in_bfloat16_and_its_checks():
    q, k, v = (jnp.asarray(draw(i, 1, 4 if i == 0 else 2, 90, 32), jnp.bfloat16) for i in range(3))
    got, _ = prefill(q, k, v, jnp.zeros(1, jnp.int32))
    assert got.dtype == jnp.bfloat16
    causal = np.tril(np.ones((90, 90), bool))[None, None]
    want = dense(*(np.asarray(x, np.float32) for x in (q, k, v)), causal)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=0.03)
    with pytest.raises(ValueError, match="2 KV heads must divide the 3"):
        flash_prefill(q[:, :3], k, v, jnp.zeros(1, jnp.int32))


def test_merge_of_any_split_is_the_whole():
    q, k, v = draw(0, 2, 4, 3, 16) * 4, draw(1, 2, 2, 20, 16) * 4, draw(2, 2, 2, 20, 16)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    mask = jnp.asarray(np.random.default_rng(0).random((2, 1, 3, 20)) < 0.7)
    mask = mask.at[0, 0, 1].set(False).at[1, 0, 2, :8].set(False)

    def part(a, b):
        return dense_partial(q, k[:, :, a:b], v[:, :, a:b], mask[..., a:b])

    want = dense(*(np.asarray(x) for x in (q, k, v)), np.asarray(mask))
    for parts in ([(0, 8), (8, 20)], [(8, 20), (0, 8)], [(0, 1), (1, 19), (19, 20)]):
        total = part(*parts[0])
        for bounds in parts[1:]:
            total = merge(total, part(*bounds))
        np.testing.assert_allclose(finish(total), want, atol=2e-6)
    assert (np.asarray(finish(part(0, 20)))[0, :, 1] == 0).all()  # saw nothing


def test_merge_survives_far_apart_maxima():
    q = jnp.asarray(draw(0, 1, 1, 1, 16))
    loud, quiet = q * 1e3, -q * 1e3
    v = jnp.asarray(draw(1, 1, 1, 1, 16))
    on = jnp.ones((1, 1, 1, 1), bool)
    both = merge(dense_partial(q, loud, v, on), dense_partial(q, quiet, v * 9, on))
    np.testing.assert_allclose(finish(both), v, atol=1e-6)


def test_visible_is_causal_windowed_and_blind_to_pads():
    queries, keys = jnp.asarray([[3, -1]]), jnp.asarray([[0, 2, 3, 4, -1]])
    assert visible(queries, keys)[0, 0].tolist() == [[1, 1, 1, 0, 0], [0] * 5]
    assert visible(queries, keys, 2)[0, 0].tolist() == [[0, 1, 1, 0, 0], [0] * 5]


def test_attend_dense_checks_its_shapes():
    q = jnp.zeros((1, 4, 1, 16))
    with pytest.raises(Exception, match="attend_dense"):
        positions = jnp.zeros((1, 4, 1), jnp.int32)
        attend_dense(q, q, q[..., :8], positions[:, 0], positions)
