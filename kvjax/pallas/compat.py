"""What differs between the versions of JAX that kernels are written for, and nothing else.

Every entry names the version that makes it unnecessary; tests/pallas/test_compat.py fails then.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh


class Target(NamedTuple):
    """A device that programs are compiled for without having one."""

    platform: str  # of lowering: "cuda" or "tpu"
    kind: str  # device kind
    cores: int


TARGETS = {
    "sm80": Target("cuda", "NVIDIA A100-SXM4-80GB", 108),
    "sm90": Target("cuda", "NVIDIA H100 80GB HBM3", 132),
    "v5e": Target("tpu", "TPU v5 lite", 1),
    "v5p": Target("tpu", "TPU v5", 2),
    "v6e": Target("tpu", "TPU v6 lite", 1),
}


@contextlib.contextmanager
def target_device(name: str) -> Iterator[None]:
    """Trace and lower for a device of `TARGETS`.

    From JAX 0.11 on, a kernel for a GPU is lowered for the abstract device's generation; 0.10
    does not ask, and takes Hopper's.
    """
    target = TARGETS[name]
    device = AbstractDevice(
        device_kind=target.kind,
        num_cores=target.cores,
        platform="gpu" if target.platform == "cuda" else "tpu",
    )
    mesh = AbstractMesh((1,), ("_target",), (AxisType.Explicit,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


def lower(function: Callable, shapes: Sequence[Any], target: str) -> Any:
    """Lower a function for a device of `TARGETS`, as `jax.jit(function).lower` would.

    The function must not compute a constant with JAX: there is no device to compute it on.
    """
    with target_device(target):
        traced = jax.jit(function).trace(*shapes)
        return traced.lower(lowering_platforms=(TARGETS[target].platform,))


def gpu_params(num_warps: int, num_stages: int) -> Any:
    """Compiler parameters of a GPU kernel: Triton's, always given.

    Without parameters JAX 0.10 compiles a kernel with Mosaic GPU, 0.12 with Triton.
    """
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def tpu_params(semantics: tuple[str, ...]) -> Any:
    """Compiler parameters of a TPU kernel: "parallel" or "arbitrary" for each grid axis."""
    return pltpu.CompilerParams(dimension_semantics=semantics)


def tpu_interpret() -> Any:
    """TPU interpret mode that detects races and poisons memory that nothing has written."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def version() -> tuple[int, ...]:
    """Of JAX, as numbers."""
    return tuple(int(part) for part in jax.__version__.split(".")[:3])


def jax_triton() -> Any:
    """The module jax_triton, made to work under jit.

    Until a release of jax-triton newer than 0.4.1: its rule for dead code takes two arguments where
    JAX 0.12 gives three.

    Raises:
        NotImplementedError: where it cannot be imported.
    """
    try:
        import jax_triton
        from jax._src.interpreters import partial_eval
        from jax_triton import triton_lib
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            'impl="triton" needs jax-triton and a GPU plugin of JAX: pip install "kvjax[gpu]".'
        ) from error
    if version() >= (0, 12):
        partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = lambda used, *rest: (
            [True] * len(rest[-1].invars),
            rest[-1],
        )
    return jax_triton


def triton_call(*arrays: jax.Array, out_type: Any, **options: Any) -> Any:
    """Call jax-triton.

    Before 0.4, which needs JAX 0.11, it names its outputs `out_shape`, and asks the driver for the
    GPU's generation even where the device is abstract.
    """
    call = jax_triton().triton_call
    if "out_type" in inspect.signature(call).parameters:
        return call(*arrays, out_type=out_type, **options)
    capability = _abstract_capability()
    return call(*arrays, out_shape=out_type, compute_capability=capability, **options)


def _abstract_capability() -> int | None:
    """Of the abstract GPU that is compiled for, 80 or 90; None where the device is a real one."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kinds = {target.kind: name for name, target in TARGETS.items() if name.startswith("sm")}
    name = kinds.get(device.device_kind) if device is not None else None
    return int(name[2:]) if name else None
