"""What one user waits for: first token, each further one, the whole answer, one request at a time.

A longer answer takes longer even where each token is faster: end to end counts both.
"""

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

WARM_TOKENS = 3  # of a first answer, not counted: it compiles


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
    """Time every request under every arm, greedily, at batch 1; a row each."""
    with run.progress(len(arms) * len(requests), "batch 1") as progress:
        for arm in arms:
            todo = [r for r in requests if run.finished(key(arm, r)) is None]
            for _ in range(len(requests) - len(todo)):
                progress.advance(skipped=True)
            if not todo:
                continue
            columns = -(-max(len(r.ids) for r in requests) // 128) * 128
            answer_alone(loaded, methods[arm.label], todo[0], columns, limit, WARM_TOKENS)
            for request in todo:
                found = answer_alone(loaded, methods[arm.label], request, columns, limit, limit)
                run.append(key(arm, request) | found, nan_allowed=("tpot_seconds",))
                progress.advance(arm.label)
            bound_programs()


def answer_alone(
    loaded: hub.Loaded, method: Any, request: Request, columns: int, reserve: int, limit: int
) -> dict[str, Any]:
    """Prefill, compress and decode one prompt; seconds from its arrival."""
    model, params, stops = loaded.model, loaded.params, loaded.tokenizer.stop_ids
    tokens, starts = decode.left_pad([request.ids], columns)
    begin = time.perf_counter()
    sums = getattr(method, "column_sums", False)
    prefill = decode.prefill(model, params, tokens, starts, column_sums=sums)
    caches = decode.compress(method, prefill.prompts, model, reserve=reserve)
    token = int(prefill.logits[0].argmax())
    jax.block_until_ready(caches)
    first = time.perf_counter() - begin
    position, made = len(request.ids), 1
    interval = decode.flush_interval(caches)
    while token not in stops and made < limit:
        if decode.needs_flush(interval, np.array([position])):
            caches = decode.flush(caches)
        logits, caches = decode.decode_step(
            model, params, caches, jnp.asarray([token], jnp.int32),
            jnp.asarray([position], jnp.int32),
        )  # fmt: skip
        token = int(logits[0].argmax())
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
