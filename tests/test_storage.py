import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import registry, storage
from kvjax.methods.full import Full
from kvjax.methods.streaming_llm import StreamingLLM
from kvjax.rope import rotate, unrotate
from kvjax.types import LayerInfo, PromptShape
from tests import prompts
from tests.prompts import Shape, compress, step


def test_the_tail_writes_each_row_at_its_own_length():
    tail = storage.Tail.empty(jnp.zeros((2, 1, 3, 4)), 5)
    x = jnp.arange(2 * 3 * 4, dtype=jnp.float32).reshape(2, 1, 3, 4) + 1
    tail = tail.append(x, -x, jnp.asarray([[7, 8, 9], [3, -1, -1]]))
    tail = tail.append(x[:, :, :2], x[:, :, :2], jnp.asarray([[10, -1], [4, 5]]))
    assert tail.lengths.tolist() == [4, 3]
    assert tail.positions.tolist() == [[7, 8, 9, 10, -1], [3, 4, 5, -1, -1]]
    np.testing.assert_array_equal(tail.k[0, 0, :4], jnp.concatenate([x[0, 0], x[0, 0, :1]]))
    np.testing.assert_array_equal(tail.k[1, 0, :3], jnp.concatenate([x[1, 0, :1], x[1, 0, :2]]))
    assert (tail.k[0, 0, 4] == 0).all() and (tail.v[0, 0, :3] == -x[0, 0]).all()


def test_a_full_tail_drops_rather_than_overwrites():
    tail = storage.Tail.empty(jnp.zeros((1, 1, 1, 2)), 2)
    for position in range(3):
        x = jnp.full((1, 1, 1, 2), position + 1.0)
        tail = tail.append(x, x, jnp.asarray([[position]]))
    assert tail.positions.tolist() == [[0, 1]] and tail.k[0, 0, :, 0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="reserve=0"):
        storage.Tail.empty(jnp.zeros((1, 1, 1, 2)), 0)


def test_left_align_puts_position_zero_first():
    x = jnp.arange(12, dtype=jnp.float32).reshape(2, 1, 6, 1)
    got = storage.left_align(x, jnp.asarray([2, 0]))[..., 0]
    assert got[0, 0, :4].tolist() == [2, 3, 4, 5] and got[1, 0].tolist() == [6, 7, 8, 9, 10, 11]


def test_kept_tokens_are_exact_rotated_and_counted():
    shape = Shape(16, 4, 2, (30, 12), columns=32)
    prompt = prompts.prompt(shape)
    cache = compress(StreamingLLM(budget=8, sinks=2), prompt, prompts.info(shape))
    k, v, where = cache.body.materialize()
    for row, n in enumerate(shape.lengths):
        for slot, position in enumerate(np.asarray(where)[row, 0]):
            column = 32 - n + position
            np.testing.assert_array_equal(k[row, :, slot], prompt.k[row, :, column])
            np.testing.assert_array_equal(v[row, :, slot], prompt.v[row, :, column])
    back = unrotate(prompts.rope(16), k, where)
    np.testing.assert_allclose(back[0, :, 3], prompt.k_unrotated[0, :, 32 - 30 + 25], atol=1e-5)


def test_positions_fit_a_bucketed_prompt():
    """65,535 tokens in a bucket of 65,536 columns: positions still fit 16 bits."""
    assert storage.position_dtype(65536) == storage.position_dtype(65535) == jnp.uint16
    assert storage.position_dtype(65537) == jnp.int32
    assert np.iinfo(np.uint16).max == 65536 - 1


def test_a_fitted_budget_inverts_kept_bytes():
    method = registry.make("knorm")
    for shape in (PromptShape(100, 3, 64), PromptShape(70000, 8, 128), PromptShape(9, 1, 80, 4)):
        for tokens in (1, 5, min(shape.num_tokens, 60)):
            tokens = min(tokens, shape.num_tokens)
            spent = storage.kept_bytes(tokens, shape)
            assert method.fit(spent, shape).budget == tokens
            assert method.fit(spent - 1, shape).budget == max(tokens - 1, 1)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_sliding_window_holds_across_body_and_tail(window):
    shape = Shape(16, 4, 2, (30, 12), columns=32)
    prompt, rope = prompts.prompt(shape), prompts.rope(16)
    cache = compress(Full(), prompt, LayerInfo(1, window, 8, rope))
    q, k, v, positions = prompts.step_inputs(shape, 3)
    got = np.asarray(step(cache, q, k, v, positions)[0], np.float64)
    turned_q, turned_k = (np.asarray(rotate(rope, x, positions)) for x in (q, k))
    for row, n in enumerate(shape.lengths):
        keys = np.concatenate([np.asarray(prompt.k)[row, :, 32 - n :], turned_k[row]], 1)
        values = np.concatenate([np.asarray(prompt.v)[row, :, 32 - n :], np.asarray(v)[row]], 1)
        for t in range(3):
            at = slice(max(n + t - window + 1, 0), n + t + 1)
            for head in range(4):
                s = keys[head // 2, at] @ turned_q[row, head, t] / 4
                p = np.exp(s - s.max())
                want = p / p.sum() @ values[head // 2, at]
                np.testing.assert_allclose(got[row, head, t], want, atol=1e-5)


def test_dense_view_attends_as_the_cache_does():
    shape = Shape(16, 4, 2, (30, 12), columns=32)
    cache = compress(StreamingLLM(budget=8, sinks=2), prompts.prompt(shape), prompts.info(shape))
    view = storage.Dense.of(cache, 20)
    q = prompts.step_inputs(shape, 2)[0]
    positions = prompts.step_inputs(shape, 2)[3]
    a, b = view.attend(q, positions), cache.body.attend(q, positions)
    np.testing.assert_allclose(a.o / a.l[..., None], b.o / b.l[..., None], atol=1e-5)
    with pytest.raises(ValueError, match="slots=4 must be at least the cache's 8"):
        storage.Dense.of(cache, 4)


def test_one_token_is_selected_on_a_cpu_as_it_is_scattered_elsewhere():
    rng = np.random.default_rng(0)
    buffer, x = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((3, 2, 5, 4), (3, 2, 1, 4))
    )
    slots = jnp.asarray([[0], [4], [5]])  # the last is dropped
    exact = storage.write_rows(*(a.astype(jnp.float32) for a in (buffer, x)), slots)  # scattered
    found = storage.write_rows(buffer, x, slots)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), exact)
    assert not (found[:2] == buffer[:2]).all() and (found[2] == buffer[2]).all()

    def lowered(platform):
        traced = jax.jit(storage.write_rows).trace(buffer, x, slots)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "scatter" in lowered("cuda") and "scatter" not in lowered("cpu")
