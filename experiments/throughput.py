"""How fast are prefill and decode, and what does each method's packed cache cost a step?

    python -m experiments.throughput                              # full cache and methods
    python -m experiments.throughput --methods --batches 1        # the full cache alone
    python -m experiments.throughput --peer transformers --peer-python PATH

Every method decodes in a Python loop of the donated `decode_step`. The methods of a shape take
turns, round by round, in one process, and so does the peer, in its own: a ratio compares what ran
within the same minutes. Speeds themselves depend on the machine and on what else it runs.
"""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.arms import Arm, plan
from experiments.peer_transformers import Peer
from experiments.report import Column, markdown, table
from experiments.runner import Run, main
from kvjax import accounting, decode, registry, timing
from kvjax.evaluation import needle
from kvjax.types import PromptShape
from models import hub

WARM_STEPS = 2  # of each round: caches cold after another method's turn


@dataclass(frozen=True)
class Config:
    """Prefill and decode speed, bytes and memory of methods, against the full cache and a peer."""

    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    methods: tuple[str, ...] = ("snapkv", "kivi", "anchorkv")
    """methods, as name or name:preset; the full cache is always there"""
    ratios: tuple[float, ...] = (4.0, 10.0)
    """full bfloat16 bytes over stored bytes; a method with discrete settings runs all of them"""
    contexts: tuple[int, ...] = (512, 2048)
    """prompt lengths, tokens"""
    batches: tuple[int, ...] = (1, 8)
    """prompts that run together"""
    new_tokens: int = 32
    """decode steps of each method a round, tokens a prompt"""
    repeats: int = 3
    """rounds: a prefill, then every method's compress and decode, then the peer"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of the cache; weights and arithmetic are float32 on a CPU"""
    memory: bool = True
    """measure each method's peak resident memory: one more prefill a method and shape"""
    peer: Literal["none", "transformers"] = "none"
    """also time the same weights elsewhere, on as many threads (extra `peers`)"""
    peer_python: str | None = None
    """interpreter of an environment that has the extra `peers`; default: this one"""
    seed: int = 42
    """of the prompts' text"""


TINY = Config(
    model="tiny", methods=("snapkv",), ratios=(2.0,), contexts=(128,), batches=(1, 2),
    new_tokens=4, repeats=1,
)  # fmt: skip


class Shape(NamedTuple):
    """What is timed together."""

    context: int  # tokens of each prompt
    batch: int  # prompts


class Times(NamedTuple):
    """Seconds of one method over all rounds."""

    compress: list[float]
    steps: list[float]
    flush_steps: list[float]  # a flush and the step after it


def run(config: Config, run: Run) -> None:
    """Measure what is missing, then report."""
    check(config)
    loaded = hub.load(config.model)
    run.watch(scalars)
    cells = {shape: planned(config, loaded.model, shape) for shape in shapes(config)}
    total = sum(len(arms) + (config.peer != "none") for arms in cells.values())
    with run.progress(total, "cells") as progress, Lazy(config) as peer:
        for shape, arms in cells.items():
            todo = missing(config, run, shape, arms)
            done = len(arms) + (config.peer != "none") - len(todo)
            for _ in range(done):
                progress.advance(skipped=True)
            if todo:
                for row in measure(config, run, loaded, shape, arms, peer):
                    if row["method"] in {name for name, _ in todo}:
                        progress.advance(f"{row['method']} at {shape.context} x {shape.batch}")
    report(config, run, loaded.name)


def check(config: Config) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: for too few steps or rounds, or a peer of random weights.
    """
    if config.new_tokens <= WARM_STEPS or config.repeats < 1:
        raise ValueError(
            f"new_tokens={config.new_tokens} must exceed the {WARM_STEPS} steps that warm up, and"
            f" repeats={config.repeats} must be at least 1."
        )
    if config.peer != "none" and config.model == "tiny":
        raise ValueError("peer='transformers' must be given a model with weights on disk.")


def shapes(config: Config) -> list[Shape]:
    """The shapes, small to large, each once."""
    return [
        Shape(context, batch)
        for context in sorted(set(config.contexts))
        for batch in sorted(set(config.batches))
    ]


def planned(config: Config, model: Any, shape: Shape) -> list[Arm]:
    """The full cache and every method at every ratio."""
    itemsize = jnp.dtype(config.dtype).itemsize
    one = PromptShape(shape.context, model.num_kv_heads, model.head_dim, itemsize)
    labels = [label for label in config.methods if label != "full"]
    return [
        Arm("full", 1.0, registry.make("full"), None),
        *plan(labels, config.ratios, (), one, len(model.windows)),
    ]


def key(shape: Shape, method: str, target_ratio: float | None) -> dict[str, Any]:
    """What identifies a row."""
    ratio = None if target_ratio is None else round(target_ratio, 4)
    return {**shape._asdict(), "method": method, "target_ratio": ratio}


def missing(
    config: Config, run: Run, shape: Shape, arms: Sequence[Arm]
) -> list[tuple[str, float | None]]:
    """The (method, target ratio) of a shape without a row; a peer has no ratio."""
    cells = [(arm.label, arm.target_ratio) for arm in arms]
    cells += [(config.peer, None)] if config.peer != "none" else []
    return [cell for cell in cells if run.finished(key(shape, *cell)) is None]


class Lazy:
    """The peer's process, started when first asked and closed at the end."""

    def __init__(self, config: Config):
        """Keep the configuration; nothing is started."""
        self.config, self.peer = config, None

    def __call__(self) -> Peer | None:
        """The running peer, or None where none was asked for."""
        if self.peer is None and self.config.peer != "none":
            self.peer = Peer(peer_source(self.config.model), self.config.peer_python, num_threads())
        return self.peer

    def __enter__(self) -> "Lazy":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.peer is not None:
            self.peer.close()


def peer_source(model: str | None) -> str:
    """What the peer loads: the same file, folder or hub id."""
    return str(hub.default_gguf(hub.cache_directory())) if model is None else model


def num_threads() -> int:
    """CPUs that this process may use: as many threads as XLA takes."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def measure(
    config: Config, run: Run, loaded: hub.Loaded, shape: Shape, arms: Sequence[Arm], lazy: Lazy
) -> list[dict]:
    """Time every method of a shape, in turns; append the rows that are missing."""
    model, params = loaded.model, loaded.params
    todo = missing(config, run, shape, arms)
    arms = [arm for arm in arms if arm.label == "full" or (arm.label, arm.target_ratio) in todo]
    peer = lazy()
    tokens = prompt_tokens(config, loaded.tokenizer, shape)
    starts = jnp.zeros(shape.batch, jnp.int32)

    peaks, stored = [], []
    for arm in arms:  # compiles everything; alone in memory
        gc.collect()
        timing.reset_peak_rss()
        method, limit = arm.method, config.new_tokens
        if config.memory:
            caches = prefill(config, model, params, tokens, starts, method, limit).prompts
        else:
            prompts = prefill(config, model, params, tokens, starts).prompts
            caches = decode.compress(method, prompts, model, reserve=limit)
            del prompts
        stored.append(bytes_of(caches, shape, model))
        if method.flush_every is not None:
            caches = decode.flush(caches)
        steps(loaded, arm, caches, shape, WARM_STEPS)
        peaks.append(timing.peak_rss_bytes())
        del caches
    if peer is not None:
        peer.ask(tokens, WARM_STEPS)

    prefills, times, answers = [], [Times([], [], []) for _ in arms], []
    jax.block_until_ready(prefill(config, model, params, tokens, starts))
    for _ in range(config.repeats):
        begin = time.perf_counter()
        filled = jax.block_until_ready(prefill(config, model, params, tokens, starts))
        prefills.append(time.perf_counter() - begin)
        first = np.asarray(filled.logits.argmax(-1))
        for arm, took in zip(arms, times, strict=True):
            begin = time.perf_counter()
            caches = jax.block_until_ready(
                decode.compress(arm.method, filled.prompts, model, reserve=config.new_tokens)
            )
            took.compress.append(time.perf_counter() - begin)
            ordinary, flushing = steps(loaded, arm, caches, shape, config.new_tokens)
            took.steps.extend(ordinary)
            took.flush_steps.extend(flushing)
            del caches
        del filled
        if peer is not None:
            answers.append(peer.ask(tokens, config.new_tokens))

    load, rows = os.getloadavg()[0], []
    for arm, took, held, peak in zip(arms, times, stored, peaks, strict=True):
        rows.append(
            key(shape, arm.label, arm.target_ratio)
            | {"limit": arm.limit, "load_average": load, **held}
            | speeds(shape, prefills, took.compress, took.steps, took.flush_steps)
            | {"peak_rss_bytes": peak if config.memory else None}
        )
    if answers:
        rows.append(key(shape, config.peer, None) | peer_row(shape, answers, first, load))
    with_ratios(rows, config.peer)
    for row in rows:
        if run.finished(key(shape, row["method"], row["target_ratio"])) is None:
            run.append(row)
    return rows


def prefill(config, model, params, tokens, starts, method=None, reserve=0) -> decode.Prefill:
    """`decode.prefill` in the cache's dtype."""
    return decode.prefill(
        model, params, tokens, starts, dtype=jnp.dtype(config.dtype), method=method, reserve=reserve
    )


def prompt_tokens(config: Config, tokenizer: Any, shape: Shape) -> jax.Array:
    """Running text, i32[B, T]."""
    rows = [
        needle.running_text(tokenizer, shape.context, config.seed + i)[: shape.context]
        for i in range(shape.batch)
    ]
    return jnp.asarray(rows, jnp.int32)


def bytes_of(caches: Any, shape: Shape, model: Any) -> dict[str, Any]:
    """Stored bytes of all prompts and layers, and the ratio to a full cache in bfloat16."""
    allocated = accounting.cache_bytes(caches)
    stored = int(accounting.live_bytes(caches).stored.sum())
    one = PromptShape(shape.context, model.num_kv_heads, model.head_dim)
    full = one.full_bytes * len(caches) * shape.batch
    return {"kv_bytes": stored, "allocated_bytes": allocated.total, "ratio": full / stored}


def steps(
    loaded: hub.Loaded, arm: Arm, caches: Any, shape: Shape, count: int
) -> tuple[list[float], list[float]]:
    """Decode greedily; seconds of ordinary steps (without the first ones) and of flushing ones."""
    positions = np.full(shape.batch, shape.context)
    token = jnp.zeros(shape.batch, jnp.int32)
    every = arm.method.flush_every
    ordinary, flushing = [], []
    for i in range(count):
        flush = decode.needs_flush(every, positions)
        begin = time.perf_counter()
        if flush:
            caches = decode.flush(caches)
        logits, caches = decode.decode_step(
            loaded.model, loaded.params, caches, token, jnp.asarray(positions, jnp.int32)
        )
        token = jax.block_until_ready(logits.argmax(-1).astype(jnp.int32))
        took = time.perf_counter() - begin
        positions = positions + 1
        if flush:
            flushing.append(took)
        elif i >= WARM_STEPS or count <= WARM_STEPS:
            ordinary.append(took)
    return ordinary, flushing


def speeds(
    shape: Shape,
    prefills: Sequence[float],
    compresses: Sequence[float],
    step_seconds: Sequence[float],
    flush_seconds: Sequence[float] = (),
) -> dict[str, Any]:
    """Speeds of one method from its times, seconds; medians over rounds and steps."""
    step = timing.summarize(list(step_seconds))
    once, build = float(np.median(prefills)), float(np.median(compresses)) if compresses else 0.0
    return {
        "prefill_tokens_per_second": shape.batch * shape.context / once,
        "prefill_seconds": once,
        "compress_seconds": build,
        "ttft_seconds": once + build,
        "tpot_seconds": step.median_seconds,
        "tpot_min_seconds": step.min_seconds,
        "tpot_p99_seconds": step.p99_seconds,
        "flush_step_seconds": float(np.median(flush_seconds)) if len(flush_seconds) else None,
        "decode_tokens_per_second": shape.batch / step.median_seconds,
        "num_steps": len(step_seconds),
    }


def peer_row(shape: Shape, answers: Sequence[dict], first: np.ndarray, load: float) -> dict:
    """The peer's row from its answers; it must have found our next tokens."""
    prefills = [answer["prefill_seconds"] for answer in answers]
    took = [s for answer in answers for s in answer["step_seconds"][WARM_STEPS:]]
    same = float(np.mean(np.asarray(answers[-1]["next_tokens"]) == first))
    return {"load_average": load, "same_next_token": same} | speeds(shape, prefills, [], took) | {
        "peak_rss_bytes": answers[-1]["peak_rss_bytes"]
    }  # fmt: skip


def with_ratios(rows: Sequence[dict], peer: str) -> None:
    """Add to the rows of one shape their ratio to the full cache's and to the peer's."""
    for name, other in (("full", "full"), ("peer", peer)):
        base = next((row for row in rows if row["method"] == other), None)
        if base is None:
            continue
        for row in rows:
            for speed in ("prefill", "decode"):
                field = f"{speed}_tokens_per_second"
                row[f"{speed}_over_{name}"] = row[field] / base[field]


def with_growth(rows: Sequence[dict]) -> list[dict]:
    """Copies with decode and prefill speed over those of the smallest batch of the same arm."""
    grown = []
    for row in rows:
        same = [
            r for r in rows if all(r[f] == row[f] for f in ("context", "method", "target_ratio"))
        ]
        least = min(same, key=lambda r: r["batch"])
        growth = row["decode_tokens_per_second"] / least["decode_tokens_per_second"]
        grown.append(row | {"growth": growth if row["batch"] > least["batch"] else None})
    return grown


def name_of(row: dict[str, Any]) -> str:
    """A method and the ratio that was asked of it."""
    if row["target_ratio"] is None or row["method"] == "full":
        return row["method"]
    return f"{row['method']} {row['target_ratio']:.3g}x"


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the context."""
    arm = f"batch_{row['batch']}/{name_of(row).replace(':', '_').replace(' ', '_')}"
    names = {
        "prefill/tokens_per_second": "prefill_tokens_per_second",
        "prefill/ttft_seconds": "ttft_seconds",
        "decode/tokens_per_second": "decode_tokens_per_second",
        "decode/tpot_seconds": "tpot_seconds",
        "decode/over_full_ratio": "decode_over_full",
        "memory/kv_bytes": "kv_bytes",
        "memory/peak_rss_bytes": "peak_rss_bytes",
    }
    for tag, field in names.items():
        yield f"{tag}/{arm}", row.get(field), row["context"]


def columns(config: Config) -> list[Column]:
    """Columns of the table."""

    def milliseconds(field):
        return lambda r: None if r.get(field) is None else 1e3 * r[field]

    def megabytes(field):
        return lambda r: None if r.get(field) is None else r[field] / 1e6

    listed = [
        Column("context", "context", ",d"),
        Column("batch", "batch", "d"),
        Column("method", name_of),
        Column("stored", lambda r: None if r.get("ratio") is None else f"{r['ratio']:.2f}x"),
        Column("KV MB", megabytes("kv_bytes"), ".2f"),
        Column("prefill tok/s", "prefill_tokens_per_second", ".0f"),
        Column("compress s", "compress_seconds", ".2f"),
        Column("TTFT s", "ttft_seconds", ".2f"),
        Column("TPOT ms", milliseconds("tpot_seconds"), ".1f"),
        Column("p99 ms", milliseconds("tpot_p99_seconds"), ".1f"),
        Column("flush ms", milliseconds("flush_step_seconds"), ".1f"),
        Column("decode tok/s", "decode_tokens_per_second", ".1f"),
        Column("/ full", "decode_over_full", ".2f"),
        Column("/ batch 1" if min(config.batches) == 1 else "growth", "growth", ".2f"),
        Column("peak MB", megabytes("peak_rss_bytes"), ".0f"),
    ]
    if config.peer != "none":
        listed[-1:-1] = [
            Column("prefill / peer", "prefill_over_peer", ".2f"),
            Column("decode / peer", "decode_over_peer", ".2f"),
        ]
    return listed


def report(config: Config, run: Run, name: str) -> None:
    """Table, plots and summary, from the rows alone."""
    rows = with_growth(run.rows)
    title = f"{name}, cache in {config.dtype}"
    table(rows, columns(config), title)
    for batch in sorted({row["batch"] for row in rows}):
        here = [row for row in rows if row["batch"] == batch]
        for speed, shown in (("decode", here), ("prefill", unique_prefills(here))):
            figure = draw(shown, speed, f"{title}, batch {batch}")
            run.save_figure(f"{speed}_batch_{batch}", figure)
    run.write_summary(markdown(rows, columns(config), title) + "\n" + notes(config, rows))


def unique_prefills(rows: Sequence[dict]) -> list[dict]:
    """One line of ours, as every method shares the prefill, and the peer's."""
    return [row for row in rows if row["method"] == "full" or row["target_ratio"] is None]


def draw(rows: Sequence[dict], speed: str, title: str) -> Figure:
    """Tokens a second against context, one line an arm."""
    with matplotlib.rc_context({"figure.constrained_layout.use": True, "figure.dpi": 130}):
        figure = Figure(figsize=(7.6, 4.3))
        axes = figure.add_subplot()
        for name in dict.fromkeys(map(name_of, rows)):
            colour, marker, dash = plots.style(name)
            points = sorted((r["context"], r[f"{speed}_tokens_per_second"]) for r in rows
                            if name_of(r) == name)  # fmt: skip
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=dash,
                      label=name)  # fmt: skip
        axes.set_title(title, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({r["context"] for r in rows}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("context, tokens")
        axes.set_ylabel(f"{speed}, tokens a second")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        return figure


def notes(config: Config, rows: Sequence[dict]) -> str:
    """How to read the table."""
    loads = [row["load_average"] for row in rows]
    text = (
        f"Medians over {config.repeats} rounds and their steps (the first {WARM_STEPS} of a round"
        " aside), each step a donated `decode_step` called from Python and waited for, with the"
        " choice of the next token. Stored: full bfloat16 bytes over live body and metadata bytes."
        " TTFT: prefill and compress. Flush: a step that folds a block first. / full: decode"
        " tokens a second over the full cache's at the same shape. Peak: of the process's resident"
        " memory while that method alone prefills layer by layer, compresses and decodes; weights"
        " included, and so are the compiled programs of the rows above it: compare peaks of"
        " methods only between runs of one method. Load average when measured:"
        f" {min(loads):.1f} to {max(loads):.1f}"
        f" on {num_threads()} CPUs.\n"
    )
    if max(loads) > num_threads() + 0.5:
        text += (
            "\nThe machine was busy with something else: threads that wait for each other suffer"
            " unequally, so ratios to a peer mean little. Repeat them on a quiet one.\n"
        )
    same = [row["same_next_token"] for row in rows if row.get("same_next_token") is not None]
    if same:
        text += (
            f"\nPeer: {config.peer}, float32, the same weights and prompts in its own process on as"
            f" many threads, in turns with ours; it chose our next token for {np.mean(same):.0%} of"
            " the prompts.\n"
        )
    return text


if __name__ == "__main__":
    main(Config, run)
