"""Kernels under shard_map over KV heads give what they give unsharded."""

import functools
import importlib

import jax
import numpy as np
import pytest

from kvjax.pallas.codebook_decode.api import Part
from kvjax.sharding import make_mesh, shard_over_heads

SHAPES = {
    "pooled_decode": (2, 6, 2, 96, 64),
    "paged_decode": (2, 6, 2, 12, 16, 64, 6),
    "quant_decode": (2, 6, 2, 96, 64, 2, 32),
    "codebook_decode": (2, 6, 2, 96, (Part(64, 4),), (Part(64, 2),)),
    "gear_decode": (2, 6, 2, 64, 64, 2, 64, 4),
    "anchor_decode": (2, 6, 2, 96, 64, 20, 16, 0.3),
}


# One kernel whole; the others share its driver, and interpreted kernels are slow to compile.
@pytest.mark.parametrize(
    "name,impl", [*((name, "xla") for name in SHAPES), ("quant_decode", "interpret")]
)
def test_two_devices_of_heads_equal_one(name, impl):
    api = importlib.import_module(f"kvjax.pallas.{name}.api")
    arguments, keywords = api.example(SHAPES[name])
    op = functools.partial(getattr(api, name), impl=impl, **keywords)
    axes = api.axes(arguments[1]) if hasattr(api, "axes") else api.AXES
    mesh = make_mesh(1 if name == "paged_decode" else 2, 2)  # pages belong to no row
    sharded = jax.jit(shard_over_heads(op, mesh, axes))
    got, want = sharded(*arguments), jax.jit(op)(*arguments)
    text = sharded.lower(*arguments).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text
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
