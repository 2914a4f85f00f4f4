"""A method's step runs its op's kernel, gives what the specification gives, and nothing dense."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.symmetric import Symmetric
from kvjax.methods.turboquant import TurboQuant
from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.group_quantize.api import group_quantize
from kvjax.types import PromptShape
from tests import prompts
from tests.pallas.tolerances import TOLERANCES
from tests.prompts import Shape, compress, step

# The op of every method whose step has a kernel.
OPS = {
    "full": "pooled_decode",
    "snapkv": "pooled_decode",
    "pyramidkv": "pooled_decode",
    "knorm": "pooled_decode",
    "keydiff": "pooled_decode",
    "random": "pooled_decode",
    "expected_attention": "pooled_decode",
    "streaming_llm-prompt": "pooled_decode",
    "streaming_llm-step": "pooled_decode",
    "streaming_llm-moved": "pooled_decode",
    "h2o-step": "pooled_decode",
    "tova-step": "pooled_decode",
    "h2o-prompt": "pooled_decode",
    "tova-prompt": "pooled_decode",
    "adakv-uniform": "ragged_decode",
    "adakv-pyramid": "ragged_decode",
    "paged": "paged_decode",
    "kivi": "quant_decode",
    "quantized_cache-append": "quant_decode",
    "quantized_cache-requantize": "quant_decode",
    "gear-plain": "gear_decode",
    "gear-kcvt": "gear_decode",
    "turboquant-mse": "codebook_decode",
    "turboquant-prod": "codebook_decode",
    "anchorkv-lean": "anchor_decode",
    "anchorkv-plain": "anchor_decode",
    "anchorkv-options": "anchor_decode",
}
WITHOUT = {"symmetric"}  # why: its `no_kernel`
PACKED = [
    c for c, op in OPS.items() if op not in ("pooled_decode", "ragged_decode", "paged_decode")
]


def equations(jaxpr, inside=True):
    """All equations of a jaxpr and, but for kernels unless `inside`, of those within."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call" and not inside:
            continue
        for value in equation.params.values():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                one = getattr(one, "jaxpr", one)
                if hasattr(one, "eqns"):
                    yield from equations(one, inside)


def traced(case, shape, impl, ratio=3.0):
    """The jaxpr of a step, and the shapes of the cache."""
    method = dataclasses.replace(prompts.setting(case, shape.row, ratio), impl="xla")
    layer = prompts.info(shape)
    cache = jax.eval_shape(lambda p: method.compress(p, layer), prompts.prompt(shape))
    cache = with_impl(cache, impl)
    inputs = prompts.step_inputs(shape, 1)
    return jax.make_jaxpr(lambda cache, *x: cache.step(*x))(cache, *inputs), cache


def with_impl(tree, impl):
    """The same cache with another implementation in every node that has the choice."""
    if not dataclasses.is_dataclass(tree) or isinstance(tree, jax.ShapeDtypeStruct):
        return tree
    changes = {
        f.name: impl if f.name == "impl" else with_impl(getattr(tree, f.name), impl)
        for f in dataclasses.fields(tree)
        if f.name == "impl" or dataclasses.is_dataclass(getattr(tree, f.name))
    }
    return dataclasses.replace(tree, **changes)


def test_a_request_names_the_decode_op_and_what_runs_beside_it():
    """ "tpu" and "triton" are the decode op's; ops without them refuse, methods run `BESIDE`."""
    shape = Shape(64, 6, 2, (150,))
    layer, prompt = prompts.info(shape), prompts.prompt(shape)
    for case, op in (("kivi", "group_quantize"), ("anchorkv-plain", "anchor_assign")):
        method = prompts.setting(case, shape.row)
        for impl, count in (("triton", 1), ("tpu", 0)):
            own = dataclasses.replace(method, impl=impl)
            program = jax.make_jaxpr(lambda p, own=own: own.compress(p, layer))(prompt)
            assert (str(program).count(f"name={op}") > 0) == count, (case, impl)
        program, _ = traced(case, shape, "tpu")
        assert "pallas_call" in str(program)
    x = jnp.zeros((1, 2, 32, 64))
    for impl in ("tpu", "triton"):
        calls = [
            lambda impl=impl: group_quantize(x, bits=2, group=32, axis=3, impl=impl),
            lambda impl=impl: anchor_assign(x, x, jnp.ones((1, 2, 32), bool), impl=impl),
            lambda impl=impl: compress(TurboQuant(impl=impl), prompt, layer),
            lambda impl=impl: compress(Symmetric(impl=impl), prompt, layer),
        ]
        for call in calls:
            with pytest.raises(NotImplementedError, match=f"has no impl='{impl}'"):
                call()


def test_every_case_is_listed_with_its_op_or_without_one():
    assert set(prompts.cases()) == set(OPS) | WITHOUT
    assert not set(OPS) & WITHOUT


@pytest.mark.parametrize("case", OPS)
def test_step_calls_its_op(case):
    jaxpr, _ = traced(case, Shape(64, 6, 2, (150,)), "interpret")
    called = [
        str(e.params.get("name") or e.params["name_and_src_info"])
        for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "pallas_call"
    ]
    assert any(OPS[case] in name for name in called), called
    plain, _ = traced(case, Shape(64, 6, 2, (150,)), "xla")
    assert not any(e.primitive.name == "pallas_call" for e in equations(plain.jaxpr))


@pytest.mark.parametrize("case", PACKED)
def test_no_dense_keys_or_values_outside_the_kernel(case):
    shape = Shape(64, 6, 2, (1000,))
    dense = shape.kv_heads * 900 * shape.dim // 2  # less than half of one side

    def largest(impl):
        # At 8x anchors, which are decoded a row each, are few against tokens.
        jaxpr, _ = traced(case, shape, impl, ratio=8.0)
        return max(
            (
                out.aval.size
                for e in equations(jaxpr.jaxpr, inside=False)
                for out in e.outvars
                if jnp.issubdtype(out.aval.dtype, jnp.floating)
            ),
            default=0,
        )

    assert largest("gpu") < dense
    assert largest("xla") >= dense  # where XLA rebuilds them, this test sees it


@pytest.mark.parametrize(
    "case,dtype",
    [
        ("kivi", "bfloat16"), ("gear-plain", "float32"), ("turboquant-prod", "float32"),
        ("anchorkv-lean", "float32"), ("anchorkv-options", "float32"),
        ("adakv-uniform", "bfloat16"), ("h2o-step", "float32"), ("tova-step", "bfloat16"),
        ("streaming_llm-step", "float32"),
    ],
)  # fmt: skip
def test_step_agrees_with_the_specification(case, dtype):
    shape = Shape(64, 6, 2, (150, 77), dtype)
    method = dataclasses.replace(prompts.setting(case, shape.row), impl="xla")
    assert isinstance(shape.row, PromptShape)
    cache = compress(method, prompts.prompt(shape), prompts.info(shape))
    inputs = prompts.step_inputs(shape, 2)
    want, _ = step(cache, *inputs)
    got, _ = step(with_impl(cache, "interpret"), *inputs)
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.isfinite(got).all()
    limit = 3 * TOLERANCES["decode"][dtype] * max(np.abs(want).max(), 1.0)
    assert np.abs(got - want).max() <= limit
