"""Bytes of a cache while it decodes: live arrays, kinds of storage, peaks of device and process.

Run as a module it measures one arm alone in a process of its own, which is the only way to a
device's peak that no other arm has raised: JAX's allocators keep one peak a process. Its input is
one JSON line, a `Spec`; its answer is one JSON line.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.quantized_cache_decode import Cell, generate, likeliest, prompt_of
from kvjax import accounting, decode, registry, timing
from kvjax.types import LayerInfo, Method, Model, PromptKV

# last part of an array's path, by what it stores; all else is lengths, positions and offsets
_KINDS = {
    "codes": ("k_codes", "v_codes"),
    "scales": ("k_scale", "k_zero", "v_scale", "v_zero"),
    "exact": ("k", "v", "k_ring", "v_ring"),
}
_TIMEOUT_SECONDS = 900


class Spec(NamedTuple):
    """One arm, for a process of its own."""

    model: str | None  # as `hub.load` takes it
    method: str  # label, as `registry.make` takes it
    context: int  # tokens
    new_tokens: int
    dtype: str  # of the cache
    folder: str | None  # of .txt files
    seed: int


def live_array_bytes() -> int:
    """Bytes of all JAX arrays of this process that are still held."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def storage(caches: Sequence[Any]) -> dict[str, int]:
    """Bytes of a cache by what they store, over all layers and rows.

    The container is what is allocated, spare slots included; packed are the valid entries.

    Returns:
        container_bytes, packed_bytes (codes alone), scale_bytes, exact_bytes (tokens that are not
        quantized), bookkeeping_bytes, and the same with `container_` in front.
    """
    total = dict.fromkeys((*_KINDS, "bookkeeping"), 0)
    allocated = dict(total)
    for cache in caches:
        for path, part in accounting.components(cache).items():
            kind = kind_of(path)
            total[kind] += part["live"]
            allocated[kind] += part["allocated"]
    names = {"codes": "packed", "scales": "scale"}
    fields = {"container_bytes": sum(allocated.values()), "live_bytes": sum(total.values())}
    for kind in total:
        name = names.get(kind, kind)
        fields[f"{name}_bytes"] = total[kind]
        fields[f"container_{name}_bytes"] = allocated[kind]
    return fields


def kind_of(path: str) -> str:
    """What the array at a path stores: codes, scales, exact or bookkeeping."""
    last = path.rsplit(".", 1)[-1].partition("[")[0]
    return next((kind for kind, names in _KINDS.items() if last in names), "bookkeeping")


def predicted_bytes(
    method: Method, model: Model, context: int, reserve: int, dtype: Any
) -> tuple[int, int]:
    """Container bytes of the arm and of the full cache, from shapes alone: nothing is run.

    Args:
        method: of the arm.
        model: the decoder.
        context: prompt, tokens.
        reserve: tokens that will be appended.
        dtype: of the cache.

    Raises:
        ValueError: for a setting that these shapes cannot be stored with.
    """
    both = []
    for each in (method, registry.make("full")):
        known, total = {}, 0
        for layer, window in enumerate(model.windows):
            own = registry.make("full") if window is not None else each
            own = own.for_layer(layer, len(model.windows))
            if (own, window) not in known:
                info = LayerInfo(len(model.windows), window, reserve, model.rope)
                prompt = _prompt_shape(model, context, dtype)
                shapes = jax.eval_shape(lambda p, own=own, info=info: own.compress(p, info), prompt)
                known[own, window] = accounting.cache_bytes(shapes).total
            total += known[own, window]
        both.append(total)
    return both[0], both[1]


def _prompt_shape(model: Model, context: int, dtype: Any) -> PromptKV:
    def shape(heads):
        return jax.ShapeDtypeStruct((1, heads, context, model.head_dim), jnp.dtype(dtype))

    k = shape(model.num_kv_heads)
    return PromptKV(shape(model.num_heads), k, k, k, jax.ShapeDtypeStruct((1,), jnp.int32))


def weight_bytes_read(params: dict[str, Any]) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that is not the head.

    Args:
        params: of a model; of an embedding table beside a head of its own a step reads one row.
    """
    read = {k: v for k, v in params.items() if not (k.startswith("embed") and "head" in params)}
    return sum(x.nbytes for x in jax.tree.leaves(read))


def scratch_bytes(model: Model, params: Any, caches: Any, context: int) -> int | None:
    """Temporary bytes that the compiled decode step holds beside its arguments; None if unknown.

    Compiles the step, which a later call of `decode.decode_step` with the same shapes reuses.
    """
    token, position = jnp.zeros(1, jnp.int32), jnp.asarray([context], jnp.int32)
    program = decode.decode_step.lower(model, params, caches, token, position).compile()
    analysis = program.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def device_peaks() -> dict[str, int] | None:
    """Allocated and reserved bytes of the first device, now and at most; None where it is silent.

    "Reserved" is what the allocator holds of the device, used or not.
    """
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        return None
    reserved = (stats.get(name) for name in ("peak_pool_bytes", "peak_bytes_reserved"))
    return {
        "allocated_bytes": int(stats.get("bytes_in_use", 0)),
        "allocated_peak_bytes": int(stats["peak_bytes_in_use"]),
        "reserved_peak_bytes": next((int(value) for value in reserved if value), None),
    }


def current_rss() -> int | None:
    """Resident bytes of this process, None on a system that does not tell."""
    try:
        return timing.current_rss_bytes()
    except NotImplementedError:
        return None


def isolated(spec: Spec) -> dict[str, Any]:
    """Measure an arm in a process of its own.

    Returns:
        incremental_allocated_peak_bytes and reserved_peak_bytes of the device, None where it does
        not report them, and incremental_process_peak_rss_bytes, None where the system does not.

    Raises:
        ChildProcessError: when the process fails, with the last line that it wrote.
        TimeoutError: when it does not end.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "experiments.quantized_cache_memory"],
            input=json.dumps(spec._asdict()), env=environment, capture_output=True, text=True,
            check=False, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the arm's own process took over {_TIMEOUT_SECONDS} s.") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ChildProcessError(
            f"the arm's own process failed: {' '.join(last) or done.returncode}"
        )
    return json.loads(lines[-1])


def alone(spec: Spec) -> dict[str, Any]:
    """Measure an arm in this process, which has run nothing else. See `isolated`.

    The prompt is prefilled and compressed layer by layer, so one layer's prompt is live at a time,
    as in use.
    """
    from experiments.runner import enable_compilation_cache
    from models import hub

    with contextlib.suppress(OSError):
        enable_compilation_cache()
    loaded = hub.load(spec.model)
    ids = prompt_of(loaded.tokenizer, spec.context, 0, spec.seed, spec.folder).context
    tokens, starts = jnp.asarray([ids], jnp.int32), jnp.zeros(1, jnp.int32)
    method = registry.make(spec.method)
    gc.collect()
    before, rss = device_peaks(), current_rss()
    timing.reset_peak_rss()
    filled = decode.prefill(
        loaded.model, loaded.params, tokens, starts, dtype=jnp.dtype(spec.dtype), method=method,
        reserve=spec.new_tokens,
    )  # fmt: skip
    caches, first = filled.prompts, likeliest(filled.logits)
    del filled
    cell = Cell("context", spec.context, spec.new_tokens, "", 0, None, None, spec.method)
    jax.block_until_ready(generate(loaded, caches, first, cell).caches)
    after = device_peaks()
    allocated = after and after["allocated_peak_bytes"] - before["allocated_bytes"]
    return {
        "incremental_allocated_peak_bytes": allocated,
        "reserved_peak_bytes": after and after["reserved_peak_bytes"],
        "incremental_process_peak_rss_bytes": rss and timing.peak_rss_bytes() - rss,
    }


if __name__ == "__main__":
    print(json.dumps(alone(Spec(**json.loads(sys.stdin.read())))), flush=True)
