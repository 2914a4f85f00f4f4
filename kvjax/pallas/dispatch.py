"""Which implementation of an op runs: the device's kernel, or the one that was asked for."""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import jax

Impl = Literal["auto", "xla", "gpu", "triton", "tpu", "interpret"]
_OF_DEVICE = {"gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}


def choose(op: str, impl: str, backends: Mapping[str, Callable]) -> Callable:
    """Pick a backend of an op.

    Args:
        op: name of the op, for messages.
        impl: "auto" takes this device's kernel where the op has one, else XLA; any other value is
            that backend or an error: an explicit request never falls back.
        backends: name to function; always holds "xla".

    Returns:
        The function to call.

    Raises:
        ValueError: for a word that is no implementation.
        NotImplementedError: if the op has no such backend.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} must be one of {get_args(Impl)}.")
    if impl == "auto":
        return backends.get(_OF_DEVICE.get(jax.default_backend(), "xla"), backends["xla"])
    if impl not in backends:
        raise NotImplementedError(f"{op} has no impl={impl!r}: it has {sorted(backends)}.")
    return backends[impl]
