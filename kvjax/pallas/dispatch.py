"""Which implementation of an op runs: the device's kernel, or the one that was asked for."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import jax

from kvjax.pallas import heads

Impl = Literal["auto", "xla", "gpu", "triton", "tpu", "interpret"]
_OF_DEVICE = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


def choose(
    op: str, impl: str, backends: Mapping[str, Callable], axes: tuple | None = None
) -> Callable:
    """Pick a backend of an op; a kernel runs sharded under `jax.set_mesh`.

    Args:
        op: name of the op, for messages.
        impl: "auto" takes this device's kernel where the op has one, else XLA; any other value is
            that backend or an error: an explicit request never falls back.
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
        impl = impl if impl in backends else "xla"
    if impl not in backends:
        raise NotImplementedError(f"{op} has no impl={impl!r}: it has {sorted(backends)}.")
    return backends["xla"] if impl == "xla" else heads.on_mesh(backends[impl], axes)
