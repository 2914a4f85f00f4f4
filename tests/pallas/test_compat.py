"""What JAX's versions differ in; each test names the version that makes its entry unnecessary."""

import importlib.util
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas import compat

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
X = jax.ShapeDtypeStruct((128, 128), jnp.float32)


def oldest():
    """The oldest JAX that the project runs on."""
    found = re.search(r'^    "jax>=([\d.]+)"', PROJECT.read_text(encoding="utf-8"), re.M)
    return tuple(int(part) for part in found[1].split("."))


def double(x, params=None):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, compiler_params=params)(x)


def calls(lowered):
    return set(re.findall(r"custom_call @\"?([\w.$]+)", lowered.as_text()))


def test_the_running_version_is_read():
    assert jax.__version__.startswith(".".join(map(str, compat.version())))
    assert compat.version() >= oldest()


@pytest.mark.parametrize("target", sorted(compat.TARGETS))
def test_a_kernel_is_lowered_for_a_target_that_is_not_there(target):
    platform = compat.TARGETS[target].platform
    params = compat.gpu_params(4, 2) if platform == "cuda" else compat.tpu_params(())
    lowered = compat.lower(lambda x: double(x, params), [X], target)
    assert calls(lowered) == {"__gpu$xla.gpu.triton" if platform == "cuda" else "tpu_custom_call"}


def test_target_device_goes_when_lowering_needs_no_device():
    """From 0.11 on a GPU kernel is lowered only for a known device, on every version a TPU's
    memory sizes are."""

    def without():
        function = jax.jit(lambda x: double(x, compat.gpu_params(4, 2)))
        return function.trace(X).lower(lowering_platforms=("cuda",))

    if compat.version() < (0, 11):
        assert calls(without())
    else:
        with pytest.raises(RuntimeError, match="abstract GPU"):
            without()
    with pytest.raises(ValueError, match="Unsupported TPU device kind"):
        pltpu.get_tpu_info()
    with compat.target_device("v5e"):
        assert pltpu.get_tpu_info().vmem_capacity_bytes > 0


def test_gpu_params_go_when_every_version_chooses_triton():
    """Without parameters 0.10 takes Mosaic GPU; they can go with the last version that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions call Triton deprecated
        try:
            default = calls(compat.lower(double, [X], "sm90"))
        except NotImplementedError:
            default = {"mosaic_gpu"}  # it cannot lower everything
    is_triton = default == {"__gpu$xla.gpu.triton"}
    assert is_triton == (compat.version() >= (0, 12)), default
    assert oldest() < (0, 12), "no version takes Mosaic GPU by default: gpu_params can go"


def test_tpu_params_are_taken_as_they_are_written():
    """The name and its words were others before 0.7; 0.10 and 0.12 agree."""
    params = compat.tpu_params(("parallel", "arbitrary"))
    assert isinstance(params, pltpu.CompilerParams)
    assert len(params.dimension_semantics) == 2


def test_tpu_interpret_sees_memory_that_nothing_has_written():
    """Its parameters were named otherwise before 0.7; 0.10 and 0.12 agree."""

    def body(x_ref, o_ref, scratch):
        scratch[0:8, :] = x_ref[0:8, :]
        o_ref[...] = scratch[...]

    out = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((16, 128), jnp.float32)],
        interpret=compat.tpu_interpret(),
    )(jnp.ones((16, 128), jnp.float32))
    assert (out[:8] == 1).all() and jnp.isnan(out[8:]).all()


def test_jax_triton_goes_unrepaired_when_its_rule_takes_three_arguments():
    """jax-triton 0.4.1 is broken under JAX 0.12 until a release repairs its rule."""
    plugin = importlib.util.find_spec("jax_plugins")
    plugin = plugin and importlib.util.find_spec("jax_plugins.xla_cuda12")
    if not (importlib.util.find_spec("jax_triton") and plugin):
        with pytest.raises(NotImplementedError, match="jax-triton"):
            compat.jax_triton()
        pytest.skip("jax-triton or the CUDA plugin is not installed")
    import inspect

    from jax._src.interpreters import partial_eval
    from jax_triton import triton_lib

    released = getattr(triton_lib, "_triton_kernel_call_dce_rule", None)
    compat.jax_triton()
    if compat.version() < (0, 12):
        assert triton_lib.triton_kernel_call_p not in partial_eval.dce_rules or released is not None
        return
    assert released is not None and len(inspect.signature(released).parameters) == 2, (
        "jax-triton repairs its rule itself: require that release and drop the repair"
    )
    rule = partial_eval.dce_rules[triton_lib.triton_kernel_call_p]
    equation = type("Equation", (), {"invars": [1, 2]})
    assert rule([True], [True], equation) == ([True, True], equation)


def test_the_abstract_gpus_generation_is_told_for_as_long_as_jax_0_10_is_supported():
    assert compat._abstract_capability() is None
    for name in ("sm80", "sm90"):
        with compat.target_device(name):
            assert compat._abstract_capability() == int(name[2:])
    with compat.target_device("v5e"):
        assert compat._abstract_capability() is None
    assert oldest() < (0, 11), "jax-triton 0.4 asks the abstract device itself: drop the argument"
