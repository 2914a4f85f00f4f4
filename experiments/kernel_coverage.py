"""Which kernels a method's decode step runs on which device, found in the step's own program.

Nothing is computed: the method compresses and steps on shapes, once for each implementation, and
the Pallas calls of the traced programs name the files that made them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import registry
from kvjax.rope import Rope
from kvjax.types import LayerInfo, PromptKV, PromptShape

# SmolLM2-135M, and a prompt that every preset has enough tokens with
BATCH, HEADS, KV_HEADS, COLUMNS, DIM = 1, 9, 3, 4608, 64
COMPOSED = ("snapkv+kivi", "snapkv+turboquant", "adakv+kivi", "snapkv+anchorkv")
IMPLS = ("gpu", "triton", "tpu", "interpret")

_FILE = re.compile(r"kvjax/pallas/(\w+)/(xla|gpu|triton|tpu)\.py$")
_KERNELS = {"pallas_call", "triton_kernel_call"}


def labels() -> list[str]:
    """Every registered method, each of its presets, and what composes of two methods in a row."""
    alone = []
    for name in registry.names():
        alone += [name, *(f"{preset}:{name}" for preset in sorted(registry.get(name).presets))]
    return alone + [label for label in COMPOSED if _composes(label)]


def method_row(label: str) -> dict[str, Any]:
    """What a method's step and its compression run, by implementation.

    Returns:
        `step_ops` and `compress_ops`, the operations of `kvjax.pallas` in the XLA programs; for
        every implementation the operations whose kernels the step really calls, each with its
        kernel's file, or why it cannot be traced; the same of compress (`compress_gpu`, ...); and
        `fallback`, why no kernel runs, None where interpret mode ran every one.
    """
    shape = PromptShape(COLUMNS, KV_HEADS, DIM)
    method = registry.make(label)
    method = method.resolve(shape) if hasattr(method, "resolve") else method
    method = method.for_layer(5, 10)
    rope = Rope(tuple(float(f) for f in 10000.0 ** -(np.arange(0, DIM, 2) / DIM)))
    info = LayerInfo(10, None, 256, rope)

    def compress(impl: str) -> Callable:
        return lambda prompt: with_impl(method, impl).compress(prompt, info)

    prompt, new = _prompt(), _new_token()
    cache = jax.eval_shape(compress("xla"), prompt)
    row = {
        "step_ops": sorted(_ops(_step, with_impl(cache, "xla"), *new)),
        "compress_ops": sorted(_ops(compress("xla"), prompt)),
    }
    row |= {impl: kernels(_step, with_impl(cache, impl), *new) for impl in IMPLS}
    row |= {f"compress_{impl}": kernels(compress(impl), prompt) for impl in IMPLS[:-1]}
    why = getattr(method, "no_kernel", None)
    return row | {"fallback": fallback(row["step_ops"], row["interpret"], why)}


def fallback(ops: list[str], ran: Mapping[str, str] | str, reason: str | None = None) -> str | None:
    """Why a step runs without a kernel: None where every operation's kernel ran."""
    if not ops:
        return f"plain XLA: {reason or 'its step has no operation of kvjax.pallas'}"
    if isinstance(ran, str):
        return ran
    without = sorted(set(ops) - set(ran))
    return f"no kernel in the step for {', '.join(without)}: XLA" if without else None


def with_impl(tree: Any, impl: str) -> Any:
    """A method or cache whose every part runs `impl`."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            field.name: impl if field.name == "impl" else with_impl(value, impl)
            for field in dataclasses.fields(tree)
            if (value := getattr(tree, field.name)) is not None
        }
        return dataclasses.replace(tree, **changes)
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(with_impl(part, impl) for part in tree)
    return tree


def kernels(function: Callable, *args: Any) -> dict[str, str] | str:
    """The operations whose kernels a program calls, and the kernels' files ("gpu", "triton",
    "tpu"); the reason where it cannot be traced."""
    try:
        program = jax.make_jaxpr(function)(*args)
    except (NotImplementedError, ImportError) as error:
        return " ".join(str(error).split())
    return {op: file for name, op, file in _sources(program.jaxpr) if name in _KERNELS}


def _ops(function: Callable, *args: Any) -> set[str]:
    program = jax.make_jaxpr(function)(*args)
    return {op for _, op, file in _sources(program.jaxpr) if file == "xla"}


def _step(cache: Any, q: Any, k: Any, v: Any, positions: Any) -> Any:
    return cache.step(q, k, v, positions)


def _sources(jaxpr: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (primitive, operation, file) of every equation that an operation's file made."""
    for equation in jaxpr.eqns:
        trace = equation.source_info.traceback
        paths = [frame.file_name.replace("\\", "/") for frame in trace.frames] if trace else []
        found = [match for path in paths if (match := _FILE.search(path))]
        if found:  # the outermost: an operation may be built on another's kernel
            yield equation.primitive.name, found[-1][1], found[-1][2]
        if equation.primitive.name in _KERNELS:
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _sources(inner)


def _bfloat16(heads: int, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((BATCH, heads, columns, DIM), jnp.bfloat16)


def _prompt() -> PromptKV:
    kv = _bfloat16(KV_HEADS, COLUMNS)
    starts = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    return PromptKV(_bfloat16(HEADS, COLUMNS), kv, kv, kv, starts)


def _new_token() -> tuple[Any, ...]:
    kv = _bfloat16(KV_HEADS, 1)
    return _bfloat16(HEADS, 1), kv, kv, jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)


def _composes(label: str) -> bool:
    try:
        registry.make(label)
    except ValueError:
        return False
    return True
