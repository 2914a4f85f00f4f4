"""Which implementation of an op runs: the device's kernel, or the one that was asked for."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import jax

from kvjax.pallas import heads

Impl = Literal["auto", "xla", "gpu", "triton", "tpu", "interpret"]
# What a method runs beside its decode op where an op has no implementation of that name.
BESIDE = {"triton": "gpu", "tpu": "xla"}
_OF_DEVICE = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


class Refused(NotImplementedError):
    """A kernel cannot do the arguments that it was given."""


def choose(
    op: str, impl: str, backends: Mapping[str, Callable], axes: tuple | None = None
) -> Callable:
    """Pick a backend of an op; a kernel runs sharded under `jax.set_mesh`.

    Args:
        op: name of the op, for messages.
        impl: "auto" takes this device's kernel where the op has one that does the arguments, else
            XLA; any other value is that backend or an error: an explicit request never falls back.
        backends: name to function; always holds "xla".
        axes: names of the op's axes (`heads.shard_over_heads`).

    Returns:
        The function to call.

    Raises:
        ValueError: for a word that is no implementation.
        NotImplementedError: if the op has no such backend.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} must be one of {get_args(Impl)}.")
    if impl == "auto":
        impl = _OF_DEVICE.get(jax.default_backend(), "xla")
        if impl in backends and impl != "xla":
            return _else(heads.on_mesh(backends[impl], axes), backends["xla"])
        impl = "xla"
    if impl not in backends:
        raise NotImplementedError(f"{op} has no impl={impl!r}: it has {sorted(backends)}.")
    return backends["xla"] if impl == "xla" else heads.on_mesh(backends[impl], axes)


def _else(kernel: Callable, xla: Callable) -> Callable:
    """The kernel, or XLA for arguments that it refuses."""

    def run(*args, **keywords):
        try:
            return kernel(*args, **keywords)
        except Refused:
            return xla(*args, **keywords)

    return run


def beside(impl: str) -> str:
    """The implementation of the ops beside a method's decode op, those that code a prompt or score.

    A method's `impl` names its decode op's implementation. Ops with kernels for "gpu" and
    "interpret" alone run "gpu" (Pallas) beside "triton", and "xla" beside "tpu": `BESIDE`. Called
    themselves with either name they refuse, as every op does.

    Args:
        impl: of the method.
    """
    return BESIDE.get(impl, impl)
