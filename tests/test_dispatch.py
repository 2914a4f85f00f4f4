import jax.numpy as jnp
import pytest

from kvjax.methods.full import Full
from kvjax.methods.kivi import KIVI
from kvjax.pallas import dispatch
from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.flash_prefill.api import flash_prefill
from kvjax.pallas.pooled_decode.api import pooled_decode
from tests import prompts
from tests.prompts import Shape


def test_auto_takes_the_devices_kernel_or_xla(monkeypatch):
    backends = {"xla": len, "gpu": max, "tpu": min}
    assert dispatch.choose("op", "auto", backends) is len  # a CPU here
    for device, want in (("gpu", max), ("cuda", max), ("tpu", min)):
        monkeypatch.setattr(dispatch.jax, "default_backend", lambda device=device: device)
        assert dispatch.choose("op", "auto", backends)((3, 9)) == want((3, 9))
        assert dispatch.choose("op", "auto", {"xla": len}) is len
        assert dispatch.choose("op", "xla", backends) is len


def test_auto_is_xla_for_arguments_that_the_kernel_refuses(monkeypatch):
    def refuse(x):
        raise dispatch.Refused("too wide")

    def broken(x):
        raise NotImplementedError("of JAX's own")

    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "gpu")
    backends = {"xla": len, "gpu": refuse}
    assert dispatch.choose("op", "auto", backends)((3, 9)) == 2
    with pytest.raises(NotImplementedError, match="too wide"):
        dispatch.choose("op", "gpu", backends)((3, 9))
    with pytest.raises(NotImplementedError, match="JAX's own"):
        dispatch.choose("op", "auto", {"xla": len, "gpu": broken})((3, 9))


@pytest.mark.parametrize("impl", ["gpu", "triton", "tpu", "interpret"])
def test_an_explicit_request_never_falls_back(impl):
    with pytest.raises(NotImplementedError, match=rf"op has no impl='{impl}': it has \['xla'\]"):
        dispatch.choose("op", impl, {"xla": len})
    assert dispatch.choose("op", impl, {"xla": len, impl: max}) is max


def test_a_word_that_is_no_implementation_is_an_error():
    for impl in ("pallas", "", "AUTO"):
        with pytest.raises(ValueError, match="must be one of"):
            dispatch.choose("op", impl, {"xla": len, impl: max})


def test_every_op_and_method_passes_the_request_on():
    q, lengths = jnp.zeros((1, 2, 4, 16)), jnp.ones((1, 2), jnp.int32)
    starts = jnp.zeros(1, jnp.int32)
    calls = [
        lambda: flash_prefill(q, q, q, starts, impl="bogus"),
        lambda: pooled_decode(q, q, q, lengths, impl="bogus"),
        lambda: anchor_assign(q, q, jnp.ones((1, 2, 4), bool), impl="bogus"),
    ]
    shape = Shape(16, 2, 1, (20,))
    for method in (Full(impl="bogus"), KIVI(group=16, residual_length=16, impl="bogus")):

        def use(method=method):  # a quantizer asks for a kernel when it compresses, full in a step
            cache = prompts.compress(method, prompts.prompt(shape), prompts.info(shape))
            return cache.step(*prompts.step_inputs(shape, 1))

        calls.append(use)
    for call in calls:
        with pytest.raises(ValueError, match="impl='bogus'"):
            call()
