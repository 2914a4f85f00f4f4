"""One group of the paired quantized-cache study: a prompt, the full cache, and its rivals.

The prompt is prefilled once and every arm compresses that prefill. Arms decode in turns, round by
round, so that a ratio compares what ran within the same minutes. An arm that fails leaves the stage
at which it did; the others go on.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import quantized_cache_memory as memory
from experiments.quantized_cache_decode import (
    Cell,
    Forced,
    Generated,
    compared,
    expected_flushes,
    flush,
    folded,
    forced,
    generate,
    likeliest,
    prompt_of,
)
from kvjax import accounting, decode, metrics, registry, timing
from models import hub

UNFIT = (ValueError, NotImplementedError)
"""What planning raises for a setting that these shapes cannot be stored with."""
FAILURES = (
    jax.errors.JaxRuntimeError, NotImplementedError, MemoryError, OSError, FloatingPointError,
)  # fmt: skip
"""What an arm that fits can fail with later: the device or its allocator, no implementation for the
device, a process that dies, logits that are not finite. Anything else is a defect of ours: it stops
the run."""


class Settings(NamedTuple):
    """How a group is measured."""

    quality_tokens: int  # scored a trajectory
    trajectory: str  # "greedy" or "text": which one the gates see
    warmups: int  # generations before the timed ones
    repeats: int  # timed generations
    dtype: str  # of the cache
    own_process: bool  # measure peaks in a process an arm
    peak_required: bool  # an arm without such a peak has failed
    model: str | None
    folder: str | None
    seed: int


class Failure(NamedTuple):
    """Where and why an arm stopped."""

    stage: str
    error: str


class Group:
    """The arms of one prompt, from prefill to rows.

    Attributes:
        failures: where each failed arm stopped.
        components: bytes of every array at the end of the warm-up, by layer.
    """

    def __init__(self, loaded: hub.Loaded, settings: Settings, cells: Sequence[Cell]):
        """Take the full cache's cell first, then its rivals'."""
        self.loaded, self.settings, self.cells = loaded, settings, list(cells)
        self.failures: dict[Cell, Failure] = {}
        self.facts: dict[Cell, dict[str, Any]] = {cell: {} for cell in cells}
        self.stages: dict[Cell, dict[str, float]] = {cell: {} for cell in cells}
        self.held: dict[Cell, Any] = {}
        self.greedy: dict[Cell, np.ndarray] = {}
        self.scored: dict[Cell, dict[str, Forced]] = {}
        self.times: dict[Cell, list[Generated]] = {cell: [] for cell in cells}
        self.components: dict[Cell, dict[str, Any]] = {}

    @property
    def full(self) -> Cell:
        """The reference."""
        return self.cells[0]

    def attempt(self, cell: Cell, stage: str, work: Callable[[], Any]) -> Any:
        """Run one stage of an arm that has not failed; on a failure note it and return None.

        Only planning may say that a setting does not fit; see `UNFIT` and `FAILURES`.
        """
        if cell in self.failures:
            return None
        expected = UNFIT if stage == "plan" else FAILURES
        begin = time.perf_counter()
        try:
            return work()
        except expected as error:
            message = " ".join(str(error).split()) or type(error).__name__
            self.failures[cell] = Failure(stage, f"{type(error).__name__}: {message[:300]}")
            self.held.pop(cell, None)
            return None
        finally:
            took = self.stages[cell]
            took[stage] = took.get(stage, 0.0) + time.perf_counter() - begin

    def measure(self, advance: Callable[[Cell, str], None]) -> dict[Cell, dict[str, Any]]:
        """Measure every arm.

        Args:
            advance: called as each arm ends a stage, for progress.

        Returns:
            What each arm's row holds beside its key.
        """
        filled = self.attempt(self.full, "prefill", self._prefill)
        if filled is None:
            self._give_up(self.failures[self.full])
            return {cell: self._failed(cell) for cell in self.cells}
        prompts, first = filled
        self._compress_all(prompts)
        del prompts, filled
        self._compile_all(first)
        for cell in self.cells:
            self._prepare(cell, first)
            advance(cell, "prepared")
            self._check_reference()
        for _ in range(self.settings.repeats):
            for cell in self.cells:
                self.attempt(cell, "timing", lambda cell=cell: self._time(cell, first))
                advance(cell, "timed")
        self._check_reference()
        return {cell: self._row(cell) for cell in self.cells}

    def _check_reference(self) -> None:
        """Fail every arm when the full cache has: there is nothing to compare it with."""
        if self.full in self.failures:
            self._give_up(Failure("reference", self.failures[self.full].error))

    def _give_up(self, failure: Failure) -> None:
        for cell in self.cells:
            self.failures.setdefault(cell, failure)
        self.held.clear()

    def _prefill(self) -> tuple[Any, jax.Array]:
        loaded, cell = self.loaded, self.full
        settings = self.settings
        self.prompt = prompt_of(
            loaded.tokenizer, cell.context, settings.quality_tokens + 1, settings.seed,
            settings.folder,
        )  # fmt: skip
        tokens = jnp.asarray([self.prompt.context], jnp.int32)
        filled = jax.block_until_ready(
            decode.prefill(
                loaded.model, loaded.params, tokens, jnp.zeros(1, jnp.int32),
                dtype=jnp.dtype(settings.dtype),
            )
        )  # fmt: skip
        return filled.prompts, likeliest(filled.logits)

    def _compress_all(self, prompts: Any) -> None:
        for cell in self.cells:
            self.attempt(cell, "plan", lambda cell=cell: self._plan(cell))
            self.attempt(cell, "compress", lambda cell=cell: self._compress(cell, prompts))
            self._check_reference()

    def _compile_all(self, first: jax.Array) -> None:
        def one(cell):
            self.attempt(cell, "compile", lambda: self._compile(cell, first))

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles a program in one thread
            list(pool.map(one, self.cells))
        self._check_reference()

    def _prepare(self, cell: Cell, first: jax.Array) -> None:
        """Everything of a compiled arm that is not timed against the others."""
        for _ in range(max(self.settings.warmups, 1)):  # one is needed for bytes and tokens
            self.attempt(cell, "warm-up", lambda: self._warm_up(cell, first))
        self.attempt(cell, "quality", lambda: self._score(cell, first))
        if self.settings.own_process:
            self.attempt(cell, "peak", lambda: self._peak(cell))

    def _plan(self, cell: Cell) -> None:
        predicted, _ = memory.predicted_bytes(
            registry.make(cell.label), self.loaded.model, cell.context, cell.new_tokens,
            self.settings.dtype,
        )  # fmt: skip
        self.facts[cell]["predicted_container_bytes"] = predicted

    def _compress(self, cell: Cell, prompts: Any) -> None:
        method = registry.make(cell.label)
        built = decode.compress(method, prompts, self.loaded.model, reserve=cell.new_tokens)
        self.held[cell] = jax.block_until_ready(built)
        after = memory.storage(self.held[cell])
        self.facts[cell]["live_bytes_after_prompt"] = after["live_bytes"]

    def _copy(self, cell: Cell) -> Any:
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.held[cell]))

    def _compile(self, cell: Cell, first: jax.Array) -> None:
        """Compile the step and, where blocks will be due, the flush; nothing of it is measured."""
        model, params = self.loaded.model, self.loaded.params
        held = self.held[cell]
        self.facts[cell]["step_scratch_bytes"] = memory.scratch_bytes(
            model, params, held, cell.context
        )
        position = jnp.asarray([cell.context], jnp.int32)
        _, caches = decode.decode_step(model, params, self._copy(cell), first, position)
        if self._expected(cell):
            caches = flush(caches)
        jax.block_until_ready(caches)

    def _expected(self, cell: Cell) -> int:
        if cell.residual_length is None:
            return 0
        whole = getattr(registry.make(cell.label), "requantize_all", False)
        return expected_flushes(cell.context, cell.new_tokens, cell.residual_length, whole)

    def _warm_up(self, cell: Cell, first: jax.Array) -> None:
        """A generation that is not timed: tokens, bytes and flushes.

        Raises:
            ValueError: if the blocks that were coded are not those that were due.
        """
        gc.collect()
        rss = memory.current_rss()
        timing.reset_peak_rss()
        before, peak, flushes = memory.live_array_bytes(), 0, 0

        def watch(old, caches):
            nonlocal peak, flushes
            peak = max(peak, memory.live_array_bytes())
            flushes += old is not None and folded(caches) != old

        made = generate(self.loaded, self._copy(cell), first, cell, watch)
        stored = memory.storage(made.caches)
        self.components[cell] = {
            f"layer_{i}": accounting.components(cache) for i, cache in enumerate(made.caches)
        }
        expected = self._expected(cell)
        if flushes != expected:
            raise ValueError(f"{flushes} blocks were coded while decoding, not {expected}.")
        self.greedy[cell] = made.tokens
        peak_rss = timing.peak_rss_bytes()
        self.facts[cell] |= stored | {
            "expected_flushes": expected,
            "measured_flushes": flushes,
            "incremental_live_peak_bytes": peak - before,
            "process_peak_rss_bytes": peak_rss,
            "incremental_process_peak_rss_bytes": None if rss is None else peak_rss - rss,
            "step_cache_bytes_read": (
                self.facts[cell]["live_bytes_after_prompt"] + stored["live_bytes"]
            ) // 2,
            "step_weight_bytes_read": memory.weight_bytes_read(self.loaded.params),
            "stop_tokens_passed": int(
                np.isin(made.tokens, list(self.loaded.tokenizer.stop_ids)).sum()
            ),
        }  # fmt: skip

    def _score(self, cell: Cell, first: jax.Array) -> None:
        count = self.settings.quality_tokens
        greedy = [int(first[0]), *self.greedy[self.full][:count].tolist()]
        text = list(self.prompt.follows[: count + 1])
        self.scored[cell] = {
            "greedy": forced(self.loaded, self._copy(cell), greedy, cell),
            "text": forced(self.loaded, self._copy(cell), text, cell),
        }
        if cell != self.full:  # a NaN fails this stage, not the report
            compared(self.scored[self.full]["greedy"], self.scored[cell]["greedy"])

    def _peak(self, cell: Cell) -> None:
        settings = self.settings
        spec = memory.Spec(
            settings.model, cell.label, cell.context, cell.new_tokens, settings.dtype,
            settings.folder, settings.seed,
        )  # fmt: skip
        try:
            found = memory.isolated(spec)
        except FAILURES as error:  # a device may refuse a second process
            if settings.peak_required:
                raise
            found = {"error": " ".join(str(error).split())[:300]}
        self.facts[cell] |= {f"own_process_{name}": value for name, value in found.items()}

    def _time(self, cell: Cell, first: jax.Array) -> None:
        made = generate(self.loaded, self._copy(cell), first, cell)
        self.times[cell].append(made._replace(caches=None))

    def _failed(self, cell: Cell) -> dict[str, Any]:
        failure = self.failures[cell]
        return {"label": cell.label, "group": cell.group, "failure_stage": failure.stage,
                "error": failure.error, "stage_seconds": self.stages[cell]}  # fmt: skip

    def _row(self, cell: Cell) -> dict[str, Any]:
        if cell in self.failures:
            return self._failed(cell)
        facts, base = self.facts[cell], self.facts[self.full]
        per_token = [made.seconds / cell.new_tokens for made in self.times[cell]]
        full_token = [made.seconds / cell.new_tokens for made in self.times[self.full]]
        pairs = [own / full for own, full in zip(per_token, full_token, strict=True)]
        steps = timing.summarize([s for made in self.times[cell] for s in made.step_seconds])
        flushes = [s for made in self.times[cell] for s in made.flush_seconds]
        latency = float(np.median(per_token) / np.median(full_token))
        speed = {
            "ms_per_token": 1e3 * float(np.median(per_token)),
            "ms_per_token_min": 1e3 * min(per_token),
            "ms_per_token_all": [1e3 * value for value in per_token],
            "full_ms_per_token": 1e3 * float(np.median(full_token)),
            "latency_ratio": latency,
            "latency_ratio_low": min(pairs),
            "latency_ratio_high": max(pairs),
            "latency_ratio_min": min(per_token) / min(full_token),
            "step_ms": 1e3 * steps.median_seconds,
            "flush_ms": 1e3 * float(np.median(flushes)) if flushes else None,
        }
        source, peak, full_peak = peaks_of(facts, base)
        peaks = {
            "incremental_peak_bytes": peak,
            "incremental_peak_source": source,
            "saved_bytes": full_peak - peak,
            "saved_percent": 100 * (1 - peak / full_peak),
        }
        text = compared(self.scored[self.full]["text"], self.scored[cell]["text"])
        greedy = compared(self.scored[self.full]["greedy"], self.scored[cell]["greedy"])
        gated, other = (greedy, text) if self.settings.trajectory == "greedy" else (text, greedy)
        other_name = "text" if self.settings.trajectory == "greedy" else "greedy"
        same = self.greedy[cell] == self.greedy[self.full]
        agreement = {
            "greedy_agreement": float(same.mean()),
            "first_divergence": int(
                metrics.first_divergence(self.greedy[self.full], self.greedy[cell])
            ),
        }
        return (
            {"label": cell.label, "group": cell.group, "prompt_sha256": self.prompt.sha256}
            | {"load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}
            | facts | peaks | speed | gated
            | {f"{other_name}_{field}": value for field, value in other.items()}
            | agreement
            | {"stage_seconds": self.stages[cell]}
        )  # fmt: skip


def peaks_of(facts: dict[str, Any], full: dict[str, Any]) -> tuple[str, int, int]:
    """Where the incremental peaks come from, the arm's and the full cache's.

    The device's own peaks where it reported both; else the live arrays that decoding holds.
    """
    field = "own_process_incremental_allocated_peak_bytes"
    if facts.get(field) is not None and full.get(field) is not None:
        return "allocated peak of the device", facts[field], full[field]
    field = "incremental_live_peak_bytes"
    return "live arrays", facts[field], full[field]
