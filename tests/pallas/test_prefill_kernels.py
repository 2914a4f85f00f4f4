"""flash_prefill, attention_sums and anchor_assign: the GPU kernels, interpreted, against both."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.attention_sums.api import attention_sums
from kvjax.pallas.flash_prefill.api import flash_prefill
from tests.pallas.tolerances import TOLERANCES
from tests.prompts import fast_jit

# query heads, KV heads, head dim, columns, starts, window, dtype; 128 queries are a block (32 f32)
CASES = [
    (3, 1, 64, 389, (0, 130), None, "bfloat16"),
    (2, 2, 80, 1, (0,), None, "float32"),
    (4, 2, 96, 31, (0, 7), 5, "float32"),
    (8, 1, 128, 33, (32,), 8, "bfloat16"),
    (2, 1, 256, 101, (40,), 17, "float32"),
    (2, 1, 80, 127, (0, 126), None, "bfloat16"),
    (1, 1, 64, 101, (70,), 1, "float32"),
]


def run(function, impl, *args, **options):
    return fast_jit(functools.partial(function, impl=impl, **options))(*args)


def inputs(case, seed=0):
    """q, k, v with garbage in the pads, and starts."""
    heads, kv_heads, dim, columns, starts, _, dtype = case
    rng, batch = np.random.default_rng(seed), len(starts)
    found = []
    for n in (heads, kv_heads, kv_heads):
        x = rng.standard_normal((batch, n, columns, dim))
        for row, start in enumerate(starts):
            x[row, :, :start] = 1e4
        found.append(jnp.asarray(x, dtype))
    return *found, jnp.asarray(starts, jnp.int32)


def oracle(q, k, v, start, window):
    """Output [N, n, H], log-sum-exp [N, n] and probabilities [N, n, n] of a row, float64."""
    q, k, v = (np.asarray(x, np.float64)[:, start:] for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], 0) for x in (k, v))
    s = np.einsum("nth,nsh->nts", q, k) / np.sqrt(q.shape[-1])
    row, column = np.indices(s.shape[1:])
    seen = (column <= row) & (column > row - (window or row.size))
    s = np.where(seen, s, -np.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("nts,nsh->nth", p / total, v), (top + np.log(total))[..., 0], p / total


def close(got, want, dtype):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = max(np.abs(want).max(initial=0), 1.0)
    assert np.abs(got - want).max(initial=0) <= TOLERANCES["prefill"][dtype] * scale


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_prefill_is_attention(case):
    *_, starts, window, dtype = case
    args = inputs(case)
    got = run(flash_prefill, "interpret", *args, window=window)
    specified = run(flash_prefill, "xla", *args, window=window)
    assert got[0].dtype == args[2].dtype and got[1].dtype == jnp.float32
    for row, start in enumerate(starts):
        out, lse, _ = oracle(*(x[row] for x in args[:3]), start, window)
        for one, other, want in zip(got, specified, (out, lse), strict=True):
            close(one[row, :, start:], want, dtype)
            close(one[row, :, start:], other[row, :, start:], dtype)
        assert (np.asarray(got[0][row, :, :start], np.float32) == 0).all()
        assert np.isfinite(np.asarray(got[1])).all()


@pytest.mark.parametrize(
    "case, last",
    [
        (CASES[0], None), (CASES[0], 70), (CASES[1], 1), (CASES[2], None), (CASES[4], 40),
        (CASES[6], 64),
    ],
)  # fmt: skip
def test_attention_sums_are_column_sums(case, last):
    heads, kv_heads, _, columns, starts, *_ = case
    q, k, _, first = inputs((*case[:6], "float32"))
    lse = np.full((len(starts), heads, columns), np.nan)  # what a pad holds is not read
    wants = []
    for row, start in enumerate(starts):
        _, lse[row, :, start:], p = oracle(q[row], k[row], k[row], start, None)
        p = p[:, max(columns - start - (last or columns), 0) :].sum(1)
        wants.append(p.reshape(kv_heads, heads // kv_heads, -1).sum(1))
    lse = jnp.asarray(lse, jnp.float32)
    got = np.asarray(run(attention_sums, "interpret", q, k, lse, first, last=last))
    specified = np.asarray(run(attention_sums, "xla", q, k, lse, first, last=last))
    for row, start in enumerate(starts):
        close(got[row, :, start:], wants[row], "float32")
        close(specified[row, :, start:], wants[row], "float32")
        assert (got[row, :, :start] == 0).all() and (specified[row, :, :start] == 0).all()


def test_attention_sums_of_no_query_are_refused():
    q, k, _, first = inputs(CASES[1])
    with pytest.raises(ValueError, match="last=0"):
        attention_sums(q, k, jnp.zeros(q.shape[:3]), first, last=0)


# tokens, anchors, head dim; 64 are a block of either
@pytest.mark.parametrize(
    "tokens, count, dim", [(1, 1, 64), (63, 65, 80), (65, 5, 96), (197, 197, 128)]
)
def test_anchor_assign_takes_the_nearest_direction(tokens, count, dim):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((1, 2, tokens, dim)).astype(np.float32)
    anchors = rng.standard_normal((1, 2, count, dim)).astype(np.float32)
    anchors[:, :, count // 2] = anchors[:, :, 0]  # a tie
    valid = rng.random((1, 2, count)) < 0.7
    valid[..., 0] = valid[..., count // 2] = True
    if count > 3:
        anchors[:, :, 3], valid[..., 3] = 0.0, True
        anchors[:, :, 1], valid[..., 1] = 1e3 * x[:, :, 0], False
    args = jnp.asarray(x), jnp.asarray(anchors), jnp.asarray(valid)
    index, gamma = (np.asarray(a) for a in run(anchor_assign, "interpret", *args))
    specified = [np.asarray(a) for a in run(anchor_assign, "xla", *args)]
    assert (index == specified[0]).all()
    np.testing.assert_allclose(gamma, specified[1], rtol=1e-5, atol=1e-6)
    x, anchors = x.astype(np.float64), anchors.astype(np.float64)
    dots = np.einsum("bksh,bkah->bksa", x, anchors)
    length = np.linalg.norm(anchors, axis=-1)[:, :, None]
    fit = np.abs(dots) / np.where(length > 0, length, np.inf)
    fit = np.where(valid[:, :, None], fit, -1.0)
    np.testing.assert_allclose(
        np.take_along_axis(fit, index[..., None], -1)[..., 0], fit.max(-1), rtol=1e-6
    )
    assert not (index == count // 2).any() or count == 1  # the first of equals
    want = np.take_along_axis(dots, index[..., None], -1)[..., 0]
    want /= np.take_along_axis(length[:, :, 0], index.reshape(1, 2, -1), -1) ** 2
    np.testing.assert_allclose(gamma, want, rtol=1e-4, atol=1e-6)


def test_anchor_assign_without_a_valid_anchor_takes_the_first():
    x, anchors = jnp.ones((1, 1, 3, 64)), jnp.ones((1, 1, 40, 64))
    none = jnp.zeros((1, 1, 40), bool)
    index, _ = run(anchor_assign, "interpret", x, anchors, none)
    assert (np.asarray(index) == 0).all()
