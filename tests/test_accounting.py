import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import accounting
from kvjax.accounting import UnreachableBytes
from kvjax.methods.full import Full
from kvjax.methods.kivi import KIVI
from kvjax.methods.snapkv import SnapKV
from kvjax.pytree import array, pytree, static, walk
from kvjax.types import PromptShape
from tests import prompts
from tests.prompts import Shape, compress


@pytree
class Node:
    codes: jax.Array = array("batch", "kv_head", "slot", "byte", valid="lengths")
    scales: jax.Array = array("batch", "kv_head", "slot", valid="lengths", spans="tokens")
    extra: tuple = array("batch", "slot", role="tail", valid="counts")
    lengths: jax.Array = array("batch", role="metadata")
    tokens: int = static(16)

    @property
    def counts(self):
        return self.lengths, self.lengths * 0


def node():
    return Node(
        jnp.zeros((2, 3, 16, 4), jnp.uint8), jnp.zeros((2, 3, 2), jnp.float16),
        (jnp.zeros((2, 16), jnp.float32), jnp.zeros((2, 5), jnp.int8)),
        jnp.asarray([9, 16], jnp.int32),
    )  # fmt: skip


def test_bytes_by_role_of_arrays_and_of_specs():
    tree = node()
    want = accounting.CacheBytes(2 * 3 * 16 * 4 + 2 * 3 * 2 * 2, 2 * 16 * 4 + 2 * 5, 8)
    assert accounting.cache_bytes(tree) == want
    assert accounting.cache_bytes(jax.eval_shape(lambda: node())) == want
    assert accounting.cache_bytes([tree, {"a": tree, "b": None}]).total == 2 * want.total
    assert want.total == sum(x.nbytes for x in jax.tree.leaves(tree))


def test_live_bytes_count_valid_entries_and_whole_groups():
    live = accounting.live_bytes(node())
    # row 0: 9 tokens of 4 bytes a head; 9 of 16 tokens need both scales of their head
    assert live.body.tolist() == [3 * 9 * 4 + 3 * 2 * 2, 3 * 16 * 4 + 3 * 2 * 2]
    assert live.tail.tolist() == [9 * 4, 16 * 4]
    assert live.metadata.tolist() == [4, 4]
    parts = accounting.components(node())
    assert parts["codes"] == {"role": "body", "allocated": 384, "live": 3 * 4 * 25}
    assert set(parts) == {"codes", "scales", "extra[0]", "extra[1]", "lengths"}


def test_an_undeclared_array_has_no_role():
    with pytest.raises(TypeError, match=r"\[1\].*not a declared array"):
        list(walk((node(), jnp.zeros(3))))
    with pytest.raises(ValueError, match="role='head'"):
        array("batch", role="head")


def test_ratio_is_of_the_rows_real_prompt():
    shape = Shape(64, 4, 2, (90, 45), "bfloat16", 96)
    cache = compress(Full(), prompts.prompt(shape), prompts.info(shape))
    ratio = accounting.compression_ratio([cache, cache], shape.row, np.array(shape.lengths))
    np.testing.assert_allclose(ratio, 1, rtol=2e-3)
    cache = compress(SnapKV(budget=30, window=8), prompts.prompt(shape), prompts.info(shape))
    ratio = accounting.compression_ratio([cache], shape.row, np.array(shape.lengths))
    np.testing.assert_allclose(ratio, [3.0, 1.5], rtol=0.02)


def test_solve_takes_the_largest_that_fits():
    shape = PromptShape(1000, 3, 64)
    found = accounting.solve(SnapKV(), shape.full_bytes / 4, shape)
    assert found.layer_bytes(shape) <= shape.full_bytes / 4
    more = dataclasses.replace(found, budget=found.budget + 1)
    assert more.layer_bytes(shape) > shape.full_bytes / 4


def test_solve_of_discrete_points_and_out_of_reach():
    shape = PromptShape(1024, 3, 64)
    method = KIVI()
    points = sorted(m.layer_bytes(shape) for m in method.points())
    assert len(set(points)) == len(points) > 2
    for target in (points[1], points[1] + 100, points[2] - 1):
        assert accounting.solve(method, target, shape).layer_bytes(shape) == points[1]
    with pytest.raises(UnreachableBytes) as error:
        accounting.solve(method, points[0] - 1, shape)
    assert error.value.nearest.layer_bytes(shape) == points[0]
    with pytest.raises(UnreachableBytes, match="full cannot be stored in"):
        accounting.solve(Full(), shape.full_bytes / 2, shape)
    window = SnapKV(window=32)
    with pytest.raises(UnreachableBytes) as error:
        accounting.solve(window, 100, shape)
    assert error.value.nearest.budget == 32
    with pytest.raises(UnreachableBytes) as error:  # more than all of it
        accounting.solve(window, 2 * shape.full_bytes, shape)
    assert error.value.nearest.budget == 1024
