"""How near are the kernels to what the memory allows, and what does each method's step cost?

    python -m experiments.kernel_bench            # on a GPU or TPU: 8 minutes at most
    python -m experiments.kernel_bench --plan     # bytes and floors only, on any machine
    python -m experiments.kernel_bench --check    # device kernels against their specification

An op's floor is the time to move its arguments and results once at the copy bandwidth measured in
the same run, or to do its products at the measured rate of a large matrix product. It is timed
against its XLA specification and, at the same shape, the full cache: by its own kernel, by
`jax.nn.dot_product_attention`, in pages, and eagerly, an operation at a time. Then one layer of
each method is compressed, its parts timed, and decoded for some hundreds of donated steps.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any

import jax

from experiments import (
    kernel_check,
    kernel_clock,
    kernel_methods,
    kernel_ops,
    kernel_plot,
    kernel_tables,
)
from experiments.kernel_clock import Clock, Rates, implementation
from experiments.kernel_shapes import CASES, DEVICES, MODELS, plan_row
from experiments.record import write_json
from experiments.report import markdown, print_line, table
from experiments.runner import Run, bound_programs, main

CHUNK = 4  # cells a compiling thread: compiled together, then timed while nothing compiles


@dataclass(frozen=True)
class Config:
    """Time of every kernel and method against floors and full caches."""

    plan: bool = False
    """bytes and floors only; runs nothing, needs no accelerator"""
    check: bool = False
    """compare the device's kernels with XLA at small shapes and edge lengths; on a CPU in
    interpret mode"""
    models: tuple[str, ...] = tuple(MODELS)
    """whose heads to take, the most wanted first"""
    contexts: tuple[int, ...] = (2048, 8192, 32768, 65536, 131072)
    """tokens"""
    batches: tuple[int, ...] = (1, 8)
    """rows"""
    cases: tuple[str, ...] = tuple(CASES)
    """ops and their settings"""
    longest_prefill: int = 32768
    """tokens; ops that run once a prompt are not timed beyond"""
    methods: tuple[str, ...] = (
        "full", "kivi", "anchorkv", "snapkv", "adakv", "gear", "turboquant", "h2o", "paged",
    )  # fmt: skip
    """labels of methods, one layer of the first model each"""
    method_contexts: tuple[int, ...] = (32768,)
    """tokens of the prompts that methods compress"""
    method_batch: int = 8
    """rows of them"""
    ratio: float = 20.0
    """full bfloat16 bytes over stored bytes, of methods whose bytes can be set"""
    steps: int = 300
    """decode steps of a method, at most"""
    bandwidth: float | None = None
    """GB/s of --plan, in place of the data sheets of A100, H100 and H200"""
    minutes: float = 8.0
    """of the whole run; what does not fit is a row that says so"""
    cell_seconds: float = 15.0
    """a cell that is estimated to take longer is skipped; of a method, for its steps"""
    time_seconds: float = 0.15
    """of timing one op, and one part of a method"""
    cache_megabytes: int = 256
    """arguments are used in turn until they exceed this, so that no cache holds them"""
    copy_megabytes: int = 1024
    """of the array whose copy is the bandwidth"""
    product_side: int = 8192
    """of the square matrices whose product is the rate; 1024 at most on a CPU"""


TINY = Config(
    models=("smollm2_135m",), contexts=(128, 256), batches=(1,), longest_prefill=0,
    cases=("pooled_decode", "quant_decode_4bit"), methods=("kivi(residual_length=32)",),
    method_contexts=(128,), method_batch=1, ratio=2.0, steps=40, time_seconds=0.01,
    cache_megabytes=1, copy_megabytes=4, product_side=64,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Plan, check or measure."""
    check(config)
    run.watch(scalars)
    if config.plan:
        plan(config, run)
    elif config.check:
        compare(config, run)
    else:
        bench(config, run)


def check(config: Config) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: for unknown names or settings that leave nothing to do.
    """
    for name, given, known in (("models", config.models, MODELS), ("cases", config.cases, CASES)):
        wrong = [x for x in given if x not in known]
        if wrong:
            raise ValueError(f"{name}={wrong} must be of {sorted(known)}.")
    if config.plan and config.check:
        raise ValueError("--plan runs nothing and --check runs the kernels: give one of them.")
    if config.bandwidth is not None and (config.bandwidth <= 0 or not config.plan):
        raise ValueError(
            f"bandwidth={config.bandwidth} must be positive and go with --plan: elsewhere it is"
            " measured."
        )
    uneven = [n for n in (*config.contexts, *config.method_contexts) if n < 64 or n % 64]
    if uneven:
        raise ValueError(f"contexts={uneven} must be multiples of 64 tokens, as groups are.")


def plan(config: Config, run: Run) -> None:
    """Rows of bytes and floors, and their table."""
    print_line("plan: bytes and floors only; nothing is run or measured")
    places = [
        (case, model, context, batch)
        for model in config.models
        for batch in sorted(set(config.batches))
        for context in sorted(set(config.contexts))
        for case in config.cases
    ]
    with run.progress(len(places), "cells") as progress:
        for case, model, context, batch in places:
            key = {"case": case, "model": model, "context": context, "batch": batch}
            done = run.finished(key) is not None
            if not done:
                run.append(plan_row(case, model, context, batch, tuple(DEVICES), config.bandwidth))
            progress.advance(skipped=done)
    columns = kernel_tables.plan_columns(run.rows)
    title = "Bytes and floors, not measured"
    table(run.rows, columns, title)
    run.write_summary(markdown(run.rows, columns, title) + "\n" + kernel_tables.PLAN_NOTES)


def compare(config: Config, run: Run) -> None:
    """Rows of errors, and an error at the end where a kernel is wrong.

    Raises:
        ValueError: naming the ops that failed.
    """
    device, clock = implementation(), Clock(config.minutes)
    impls = {"gpu": ("gpu", "triton"), "xla": ("interpret",)}.get(device, (device,))
    print_line(f"check: impl={' and '.join(impls)} against impl=xla on {jax.default_backend()}")
    ops = list(dict.fromkeys(CASES[case].op for case in config.cases))
    found = kernel_check.cells(ops, impls)
    with run.progress(len(found), "comparisons") as progress:
        for cell in found:
            done = run.finished(cell.key()) is not None
            if not done:
                run.append(kernel_check.measure(cell, clock))
                bound_programs()
            progress.advance(f"{cell.op} {cell.shape_name}", skipped=done)
    columns = kernel_tables.check_columns()
    title = f"Kernels against impl=xla on {jax.default_backend()}"
    table(run.rows, columns, title)
    run.write_summary(markdown(run.rows, columns, title) + "\n" + kernel_check.NOTES)
    counts = [sum(row["passed"] is x for row in run.rows) for x in (True, False, None)]
    print_line("{} comparisons passed, {} failed, {} were skipped".format(*counts))
    failed = sorted({f"{r['op']} ({r['impl']})" for r in run.rows if r["passed"] is False})
    if failed:
        raise ValueError(f"kernels that differ from impl='xla' or fail: {', '.join(failed)}.")


def bench(config: Config, run: Run) -> None:
    """Measure what is missing while there is time, then report."""
    clock, device = Clock(config.minutes), implementation()
    if device == "xla":
        print_line(
            "no accelerator: times the XLA specifications on this CPU for at most"
            f" {config.minutes:g} minutes and skips what is too slow; --plan prints bytes and"
            " floors only"
        )
    rates = measured_rates(config, run)
    groups = kernel_ops.cells(
        config.models, config.contexts, config.batches, config.cases, config.longest_prefill, device
    )
    methods = [
        kernel_methods.Cell(config.models[0], context, config.method_batch, method, "auto")
        for context in sorted(set(config.method_contexts))
        for method in config.methods
    ]
    groups.insert(1, methods)
    total = sum(map(len, groups))
    threads = min(16, os.cpu_count() or 1)
    with run.progress(total, "cells") as progress, ThreadPoolExecutor(threads) as pool:
        for group in groups:
            for at in range(0, len(group), CHUNK * threads):
                chunk = group[at : at + CHUNK * threads]
                todo = [cell for cell in chunk if run.finished(cell.key()) is None]
                for _ in range(len(chunk) - len(todo)):
                    progress.advance(skipped=True)
                for row in measure(config, rates, clock, todo, pool):
                    run.append(row)
                    progress.advance(f"{row.get('case') or row.get('method')} {row['context']}")
                bound_programs()
    report(config, run)


def measured_rates(config: Config, run: Run) -> Rates:
    """Bandwidth, products and dispatch of this device, the first row of a run."""
    row = run.finished({"kind": "device"})
    if row is None:
        cpu = jax.default_backend() == "cpu"
        side = min(config.product_side, 1024) if cpu else config.product_side
        rates = kernel_clock.measure_rates(config.copy_megabytes * 2**20, side)
        device = jax.devices()[0]
        row = run.append(
            {"kind": "device", "backend": jax.default_backend(), "device": device.device_kind,
             **rates._asdict()}
        )  # fmt: skip
    return Rates(*(row[field] for field in Rates._fields))


def measure(
    config: Config, rates: Rates, clock: Clock, cells: Sequence[Any], pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Rows of cells: all compiled first, on all threads, then timed one by one."""

    def prepared(cell):
        if isinstance(cell, kernel_methods.Cell):
            return kernel_methods.prepare(cell, config.ratio, config.steps)
        return kernel_ops.prepare(cell)

    late = clock.refusal(2.0)
    futures = [None if late else pool.submit(prepared, cell) for cell in cells]
    results = []
    for future in futures:
        try:
            results.append(late if future is None else future.result(max(clock.left(), 0.1)))
        except Late:
            future.cancel()
            results.append("time: not compiled before the end")
        except (ValueError, NotImplementedError) as error:
            results.append(f"cannot be made: {kernel_clock.one_line(error)}")
    for cell, result in zip(cells, results, strict=True):
        if isinstance(result, str):
            yield cell.key() | {"backend": jax.default_backend(), "skipped": result}
        elif isinstance(cell, kernel_methods.Cell):
            yield kernel_methods.measure(
                cell, result, clock, config.cell_seconds, config.time_seconds, config.steps
            )
        else:
            yield kernel_ops.measure(
                cell, result, rates, clock, config.cell_seconds, config.time_seconds,
                config.cache_megabytes * 2**20,
            )  # fmt: skip


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the context."""
    place = f"{row.get('model')}_batch_{row.get('batch')}"
    if row.get("kind") == "op":
        arm = f"{place}/{row['case']}_{row['impl'].replace(':', '_')}"
        yield f"op/seconds/{arm}", row.get("seconds"), row["context"]
        yield f"op/bandwidth_share/{arm}", row.get("bandwidth_share"), row["context"]
    elif row.get("kind") == "method":
        arm = f"{place}/{kernel_tables.tag(row['method'])}"
        yield f"method/step_seconds/{arm}", row.get("step_seconds"), row["context"]
        yield f"method/compress_seconds/{arm}", row.get("compress_seconds"), row["context"]
    elif row.get("kind") == "check":
        arm = f"{row['op']}_{row['impl']}/{kernel_tables.tag(row['shape_name'])}"
        yield f"check/error_relative/{arm}", row.get("error"), row["length"]
    elif row.get("kind") == "device":
        yield "device/copy_gigabytes_per_second", row["copy_gigabytes"], 0
    else:
        yield f"plan/bytes/{place}/{row['case']}", row["bytes"], row["context"]


def report(config: Config, run: Run) -> None:
    """JSON, table, plot and summary, from the rows alone."""
    device = run.finished({"kind": "device"})
    ops = kernel_tables.with_ratios(run.rows)
    methods = kernel_tables.timed(run.rows, "method")
    skipped = [row for row in run.rows if row.get("skipped")]
    meets = kernel_tables.crossovers(run.rows)
    write_json(
        run.path / "kernel_bench.json",
        {"device": device, "ops": ops, "crossovers": meets, "methods": methods, "skipped": skipped},
    )
    title = f"{device['device']}, {device['copy_gigabytes']:,.0f} GB/s copied"
    sections = [
        ("Ops", ops, kernel_tables.op_columns()),
        ("Crossover with the full-cache kernel", meets, kernel_tables.crossover_columns()),
        ("One layer of each method", methods, kernel_tables.method_columns()),
        ("Skipped", skipped, kernel_tables.skipped_columns()),
    ]
    text = ""
    for name, rows, columns in sections:
        if rows:
            table(rows, columns, f"{name}: {title}")
            text += markdown(rows, columns, f"{name}: {title}") + "\n"
    run.save_figure("latency", kernel_plot.draw(run.rows, f"Latency by context, {title}"))
    run.write_summary(
        text + kernel_tables.notes(config.time_seconds, config.cache_megabytes, device)
    )


if __name__ == "__main__":
    main(Config, run)
