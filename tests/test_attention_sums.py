"""Column sums of the causal attention matrix: blocks against the whole, and nothing of its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import registry, scores
from kvjax.pallas.attention_sums.api import attention_sums
from kvjax.types import LayerInfo, PromptKV
from tests import prompts
from tests.prompts import Shape, fast_jit


def dense(prompt, row, n):
    """Column sums [K, n] of one row, float64, from the arrays as they are stored."""
    q, k = (np.asarray(x, np.float64)[row][:, -n:] for x in (prompt.q, prompt.k))
    group = q.shape[0] // k.shape[0]
    s = np.einsum("nth,nsh->nts", q, np.repeat(k, group, 0)) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(n, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p.sum(1).reshape(k.shape[0], group, n).sum(1)


SHAPES = [
    Shape(16, 3, 1, (256, 255, 7)),
    Shape(16, 4, 4, (257, 256), "bfloat16"),
    Shape(64, 2, 1, (513, 1, 256), "bfloat16", 530),
    Shape(80, 6, 2, (40, 13), columns=44),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_the_whole_matrix(shape):
    """U13, U17, U19: all queries, causally, whatever the block a column falls into."""
    prompt = prompts.prompt(shape)
    got = np.asarray(fast_jit(scores.column_sums)(prompt))
    assert got.dtype == np.float32
    total = shape.columns or max(shape.lengths)
    for row, n in enumerate(shape.lengths):
        want = dense(prompt, row, n)
        # sums of up to G * n probabilities
        np.testing.assert_allclose(got[row][:, total - n :], want, atol=1e-5, rtol=1e-5)
        assert (got[row][:, : total - n] == 0).all()
        mass = got[row].sum(-1)
        np.testing.assert_allclose(mass, n * shape.heads / shape.kv_heads, rtol=1e-5)


def test_an_implementation_that_is_not_there_is_refused():
    z = jnp.zeros((1, 1, 8, 16))
    with pytest.raises(NotImplementedError, match="attention_sums"):
        attention_sums(z, z, jnp.zeros((1, 1, 8)), jnp.zeros(1, jnp.int32), impl="tpu")


def sizes(jaxpr):
    """Elements of every intermediate of a program, its inner programs included."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(x.aval.shape)) for x in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)


COLUMNS = 2048
EVICTORS = [n for n in registry.names() if hasattr(registry.get(n), "with_budget")]


def long_prompt(columns=COLUMNS):
    def of(heads):
        return jax.ShapeDtypeStruct((1, heads, columns, 16), jnp.bfloat16)

    return PromptKV(of(2), of(1), of(1), of(1), jax.ShapeDtypeStruct((1,), jnp.int32))


@pytest.mark.parametrize("name", EVICTORS)
def test_nothing_grows_with_the_square_of_the_prompt(name):
    """U16, U17: compressing holds no array of T x T elements, of all heads together."""
    layer = LayerInfo(2, None, 4, prompts.rope(16))
    method = registry.make(name, budget=256)
    jaxpr = jax.make_jaxpr(lambda p: method.compress(p, layer))(long_prompt())
    found = list(sizes(jaxpr.jaxpr))
    assert COLUMNS <= max(found) < COLUMNS**2 / 4, max(found)
    assert len(EVICTORS) >= 10


def test_the_scan_of_sizes_sees_a_whole_matrix():
    def whole(x):
        return jax.lax.map(lambda row: jax.nn.softmax(row @ row.T, -1).sum(0), x)

    found = list(sizes(jax.make_jaxpr(whole)(jnp.zeros((1, 64, 4))).jaxpr))
    assert max(found) == 64 * 64
