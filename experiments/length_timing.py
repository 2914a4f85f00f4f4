"""What one user waits for: first token, each further one, the whole answer, one request at a time.

A longer answer takes longer even where each token is faster: end to end counts both.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.arms import Arm
from experiments.length_dataset import Request
from experiments.runner import Run, bound_programs
from kvjax import decode
from models import hub


def key(arm: Arm, request: Request) -> dict[str, Any]:
    """What identifies a row."""
    return {"kind": "timing", "prompt": request.prompt.id, **arm.key}


def time_requests(
    run: Run,
    loaded: hub.Loaded,
    arms: Sequence[Arm],
    methods: Mapping[str, Any],
    requests: Sequence[Request],
    limit: int,
) -> None:
    """Time every request under every arm, greedily, at batch 1; a row each.

    The arms answer a request in turns, so that its ratios compare what ran within the same minute.
    """
    columns = -(-max(len(r.ids) for r in requests) // 128) * 128
    missing = {(a.label, r.prompt.id) for r in requests for a in arms if not finished(run, a, r)}
    with run.progress(len(arms) * len(requests), "batch 1") as progress:
        for arm in arms:
            if any(label == arm.label for label, _ in missing):
                warm_up(loaded, methods[arm.label], requests[0], columns, limit)
        for request, arm in itertools.product(requests, arms):
            if (arm.label, request.prompt.id) not in missing:
                progress.advance(skipped=True)
                continue
            found = answer_alone(loaded, methods[arm.label], request, columns, limit)
            run.append(key(arm, request) | found, nan_allowed=("tpot_seconds",))
            progress.advance(arm.label)
    bound_programs()


def finished(run: Run, arm: Arm, request: Request) -> bool:
    """Whether the row is there."""
    return run.finished(key(arm, request)) is not None


def start(
    loaded: hub.Loaded, method: Any, request: Request, columns: int, limit: int
) -> tuple[Any, int]:
    """Prefill and compress one prompt: the caches and the first token, both ready."""
    tokens, starts = decode.left_pad([request.ids], columns)
    sums = getattr(method, "column_sums", False)
    prefill = decode.prefill(loaded.model, loaded.params, tokens, starts, column_sums=sums)
    caches = decode.compress(method, prefill.prompts, loaded.model, reserve=limit)
    token = int(prefill.logits[0].argmax())
    return jax.block_until_ready(caches), token


def step(loaded: hub.Loaded, caches: Any, token: int, position: int) -> tuple[Any, int]:
    """The caches with one more token, and the next one."""
    logits, caches = decode.decode_step(
        loaded.model, loaded.params, caches, jnp.asarray([token], jnp.int32),
        jnp.asarray([position], jnp.int32),
    )  # fmt: skip
    return caches, int(logits[0].argmax())


def warm_up(loaded: hub.Loaded, method: Any, request: Request, columns: int, limit: int) -> None:
    """Compile all that an answer runs, a flush included: it may be due late in a timed one."""
    caches, token = start(loaded, method, request, columns, limit)
    caches, token = step(loaded, caches, token, len(request.ids))
    if decode.flush_interval(caches) is not None:
        caches = decode.flush(caches)
    if limit > 2:
        step(loaded, caches, token, len(request.ids) + 1)


def answer_alone(
    loaded: hub.Loaded, method: Any, request: Request, columns: int, limit: int
) -> dict[str, Any]:
    """Prefill, compress and decode one prompt; seconds from its arrival."""
    stops = loaded.tokenizer.stop_ids
    begin = time.perf_counter()
    caches, token = start(loaded, method, request, columns, limit)
    first = time.perf_counter() - begin
    position, made = len(request.ids), 1
    interval = decode.flush_interval(caches)
    while token not in stops and made < limit:
        if decode.needs_flush(interval, np.array([position])):
            caches = decode.flush(caches)
        caches, token = step(loaded, caches, token, position)
        position, made = position + 1, made + 1
    whole = time.perf_counter() - begin
    return {
        "prompt_tokens": len(request.ids),
        "generated_tokens": made,
        "truncated": token not in stops,
        "ttft_seconds": first,
        "tpot_seconds": (whole - first) / (made - 1) if made > 1 else float("nan"),
        "e2e_seconds": whole,
    }
