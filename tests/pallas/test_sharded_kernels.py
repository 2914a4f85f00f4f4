"""Kernels under shard_map over KV heads give what they give unsharded."""

import dataclasses
import functools
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax.pallas
from kvjax.pallas.codebook_decode.api import Part
from kvjax.sharding import make_mesh, shard, shard_over_heads
from tests import prompts
from tests.pallas.test_methods import equations, with_impl
from tests.prompts import Shape

SHAPES = {
    "pooled_decode": (2, 6, 2, 96, 64),
    "paged_decode": (2, 6, 2, 12, 16, 64, 6),
    "quant_decode": (2, 6, 2, 96, 64, 2, 32),
    "codebook_decode": (2, 6, 2, 96, (Part(64, 4),), (Part(64, 2),)),
    "gear_decode": (2, 6, 2, 64, 64, 2, 64, 4),
    "anchor_decode": (2, 6, 2, 96, 64, 20, 16, 0.3),
    "ragged_decode": (2, 6, 2, 2, 48, 64),
    "flash_prefill": (2, 6, 2, 40, 64),
    "attention_sums": (2, 6, 2, 40, 64),
    "group_quantize": (2, 2, 64, 64, 2, 32, 2),
    "anchor_assign": (2, 2, 40, 8, 64),
    "codebook_encode": (2, 2, 40, 64, (Part(48, 3), Part(16, 4))),
}


def test_every_op_is_listed():
    folder = Path(kvjax.pallas.__file__).parent
    assert set(SHAPES) == {path.parent.name for path in folder.glob("*/api.py")}


# One kernel whole; the others share its driver, and interpreted kernels are slow to compile.
@pytest.mark.parametrize(
    "name,impl", [*((name, "xla") for name in SHAPES), ("quant_decode", "interpret")]
)
def test_two_devices_of_heads_equal_one(name, impl):
    api = importlib.import_module(f"kvjax.pallas.{name}.api")
    arguments, keywords = api.example(SHAPES[name])
    op = functools.partial(getattr(api, name), impl=impl, **keywords)
    axes = api.axes(*arguments) if hasattr(api, "axes") else api.AXES
    mesh = make_mesh(1 if name == "paged_decode" else 2, 2)  # pages belong to no row
    sharded = jax.jit(shard_over_heads(op, mesh, axes))
    got, want = sharded(*arguments), jax.jit(op)(*arguments)
    text = sharded.lower(*arguments).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert got[0].sharding.spec[1] == "model"
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max()


def test_heads_that_do_not_divide_stay_whole():
    api = importlib.import_module("kvjax.pallas.pooled_decode.api")
    arguments, _ = api.example((2, 9, 3, 64, 64))
    op = functools.partial(api.pooled_decode, impl="xla")
    out = jax.jit(shard_over_heads(op, make_mesh(2, 2), api.AXES))(*arguments)
    assert out[0].sharding.spec[0] == "data"
    assert len(out[0].sharding.spec) < 2 or out[0].sharding.spec[1] is None
    np.testing.assert_allclose(out[0], op(*arguments)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["kivi", "anchorkv-lean", "snapkv"])
def test_a_method_on_a_mesh_runs_its_kernel_on_each_device(case):
    """Under `jax.set_mesh` the compressed cache stays where it is, and the output is the same."""
    shape = Shape(64, 6, 2, (90, 70))
    method = dataclasses.replace(prompts.setting(case, shape.row), impl="xla")
    cache = prompts.compress(method, prompts.prompt(shape), prompts.info(shape))
    cache = with_impl(cache, "interpret")
    inputs = prompts.step_inputs(shape, 1)
    want, _ = prompts.step(cache, *inputs)
    mesh = make_mesh(1, 2)
    apart = shard(cache, mesh)
    program = jax.jit(lambda cache, *x: cache.step(*x))
    with jax.set_mesh(mesh):
        got, _ = program(apart, *inputs)
        jaxpr = jax.make_jaxpr(lambda cache, *x: cache.step(*x))(apart, *inputs)
    maps = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "shard_map"]
    inner = [e.primitive.name for m in maps for e in equations(m.params["jaxpr"])]
    assert "pallas_call" in inner
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= 2e-5 * max(np.abs(want).max(), 1.0)
