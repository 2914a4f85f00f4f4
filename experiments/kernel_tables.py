"""What the kernel benchmark says: ratios, crossovers with the full cache, tables and notes."""

import math
import re
from collections.abc import Sequence
from typing import Any

from experiments.kernel_shapes import CASES
from experiments.report import Column

Rows = Sequence[dict[str, Any]]

# Field of a ratio and the implementations it is taken of, the first that was measured; a case of
# None: the row's own case by XLA.
_BASELINES = {
    "over_full_kernel": ("pooled_decode", ("gpu", "tpu", "xla")),
    "over_eager": ("pooled_decode", ("eager",)),
    "over_library": (
        "pooled_decode",
        ("dot_product_attention:cudnn", "dot_product_attention:xla"),
    ),
    "over_paged": ("paged_decode", ("gpu", "tpu", "xla")),
    "over_xla": (None, ("xla",)),
}


def crossover(points: Rows, base: Rows) -> float | None:
    """The context from which on `points` take no longer than `base`, in tokens.

    Linear interpolation of the difference in log context between the last measured context where
    they are slower and the next.

    Args:
        points: rows with context and seconds.
        base: likewise; contexts that both have count.

    Returns:
        Tokens; the smallest context where they are never slower; None where they are slower at the
        largest, or share no context.
    """
    other = {row["context"]: row["seconds"] for row in base}
    gaps = sorted(
        (row["context"], row["seconds"] - other[row["context"]])
        for row in points
        if row["context"] in other
    )
    slower = [i for i, (_, gap) in enumerate(gaps) if gap > 0]
    if not gaps or (slower and slower[-1] == len(gaps) - 1):
        return None
    if not slower:
        return float(gaps[0][0])
    (left, above), (right, below) = gaps[slower[-1]], gaps[slower[-1] + 1]
    part = above / (above - below)
    return math.exp(math.log(left) + part * (math.log(right) - math.log(left)))


def timed(rows: Rows, kind: str) -> list[dict[str, Any]]:
    """Rows of a kind that were measured."""
    return [row for row in rows if row.get("kind") == kind and row.get("skipped") is None]


def with_ratios(rows: Rows) -> list[dict[str, Any]]:
    """Copies of the ops' rows with the other ways' seconds over theirs, at the same shape.

    Ops that run once a prompt are compared with XLA alone.
    """
    measured = timed(rows, "op")
    by_place = {
        (r["model"], r["context"], r["batch"], r["case"], r["impl"]): r["seconds"] for r in measured
    }
    found = []
    for row in measured:
        ratios, place = {}, (row["model"], row["context"], row["batch"])
        for name, (case, impls) in _BASELINES.items():
            known = [by_place.get((*place, case or row["case"], impl)) for impl in impls]
            base = next((seconds for seconds in known if seconds is not None), None)
            fair = case is None or CASES[row["case"]].decode
            ratios[name] = base / row["seconds"] if base is not None and fair else None
        found.append(row | ratios)
    return found


def crossovers(rows: Rows) -> list[dict[str, Any]]:
    """Where each decode case, by each implementation, meets the full cache's kernel."""
    measured = [row for row in timed(rows, "op") if CASES[row["case"]].decode]
    found = []
    for key in dict.fromkeys((r["model"], r["batch"], r["case"], r["impl"]) for r in measured):
        model, batch, case, impl = key
        mine = [
            r for r in measured if (r["model"], r["batch"], r["case"], r["impl"]) == key
        ]  # fmt: skip
        base = full_kernel(measured, model, batch)
        if case == "pooled_decode" or not base:
            continue
        found.append(
            {"model": model, "batch": batch, "case": case, "impl": impl,
             "crossover_tokens": crossover(mine, base),
             "smallest_context": min(r["context"] for r in mine),
             "largest_context": max(r["context"] for r in mine)}
        )  # fmt: skip
    return found


def full_kernel(rows: Rows, model: str, batch: int) -> list[dict[str, Any]]:
    """Rows of the full cache by the device's own kernel, or by XLA where it has none."""
    for impl in ("gpu", "tpu", "xla"):
        key = (model, batch, "pooled_decode", impl)
        found = [r for r in rows if (r["model"], r["batch"], r["case"], r["impl"]) == key]
        if found:
            return found
    return []


def _scaled(field: str, factor: float):
    return lambda row: None if row.get(field) is None else row[field] * factor


_PLACE = [
    Column("model", "model"),
    Column("context", "context", ",d"),
    Column("batch", "batch", "d"),
]


def op_columns() -> list[Column]:
    """Columns of the measured ops."""

    def took(row):
        return f"{1e6 * row['seconds']:,.1f}" + "*" * row["dispatch_bound"]

    def least(row):
        return f"{1e6 * row['floor_seconds']:,.1f}" + "p" * (row["limited_by"] == "products")

    return [
        *_PLACE,
        Column("op", lambda row: f"{row['case']} {row['impl']}"),
        Column("MB", _scaled("bytes", 1e-6), ",.2f"),
        Column("floor us", least),
        Column("us", took),
        Column("of copy %", _scaled("bandwidth_share", 100), ".0f"),
        Column("TFLOP/s", "teraflops", ".1f"),
        Column("full kernel /", "over_full_kernel", ".2f"),
        Column("eager /", "over_eager", ".2f"),
        Column("library /", "over_library", ".2f"),
        Column("paged /", "over_paged", ".2f"),
        Column("XLA /", "over_xla", ".2f"),
    ]


def plan_columns(rows: Rows) -> list[Column]:
    """Columns of bytes and floors."""
    rates = list(dict.fromkeys(name for row in rows for name in row["floor_seconds"]))

    def floor(name):
        return lambda row: 1e6 * row["floor_seconds"][name]

    def limit(row):
        return ", ".join(dict.fromkeys(row["limited_by"].values()))

    return [
        *_PLACE,
        Column("op", "case"),
        Column("MB", _scaled("bytes", 1e-6), ",.2f"),
        *[Column(f"floor us, {name}", floor(name), ",.1f") for name in rates],
        Column("limited by", limit),
        Column("full cache / bytes", "full_over_bytes", ".2f"),
    ]


def method_columns() -> list[Column]:
    """Columns of the methods."""

    def micro(title, field):
        return Column(title, _scaled(f"{field}_seconds", 1e6), ",.0f")

    return [
        *_PLACE,
        Column("method", "method"),
        Column("full / stored", "ratio", ".1f"),
        micro("score us", "score"),
        micro("select us", "select"),
        micro("quantize us", "quantize"),
        micro("compress us", "compress"),
        micro("dequantize us", "dequantize"),
        micro("attend us", "attend"),
        micro("step p50 us", "step"),
        micro("p99", "step_p99"),
        micro("flush step p50 us", "flush_step"),
        micro("p99", "flush_step_p99"),
        Column("n", lambda row: f"{row['num_steps']} + {row['num_flush_steps']}"),
    ]


def check_columns() -> list[Column]:
    """Columns of the comparison with the specification."""
    return [
        Column("op", "op"),
        Column("shape", "shape_name"),
        Column("impl", "impl"),
        Column("length", lambda row: row["length"] or "full"),
        Column("error", "error", ".1e"),
        Column("codes that differ", "mismatch", ".1e"),
        Column("", lambda row: {True: "ok", False: "FAILED", None: "skipped"}[row["passed"]]),
        Column("why", "skipped"),
    ]


def skipped_columns() -> list[Column]:
    """Columns of the cells without a time."""
    return [
        *_PLACE,
        Column("what", lambda row: row.get("case") or row.get("method")),
        Column("impl", "impl"),
        Column("why", "skipped"),
    ]


def crossover_columns() -> list[Column]:
    """Columns of the crossovers."""

    def where(row):
        tokens = row["crossover_tokens"]
        if tokens is None:
            return f"slower at {row['largest_context']:,d}"
        if tokens <= row["smallest_context"]:
            return f"from {row['smallest_context']:,d} or less"
        return f"{tokens:,.0f}"

    return [
        Column("model", "model"),
        Column("batch", "batch", "d"),
        Column("op", "case"),
        Column("impl", "impl"),
        Column("as fast as the full-cache kernel from, tokens", where),
    ]


def tag(label: str) -> str:
    """A label as part of a TensorBoard tag."""
    return re.sub(r"[^\w.\-]+", "_", label)


def notes(time_seconds: float, cache_megabytes: int, device: dict[str, Any]) -> str:
    """How to read the tables."""
    text = (
        f"Measured in this run: copy {device['copy_gigabytes']:,.0f} GB/s (read and written),"
        f" products {device['teraflops']:,.1f} TFLOP/s, dispatch"
        f" {1e6 * device['dispatch_seconds']:.1f} us a queued call. Floor: every argument and"
        " result moved once at that rate, or (p) the products at theirs. us: median over rounds of"
        f" calls that are queued and waited for together, {time_seconds:g} s a cell, over"
        f" arguments of {cache_megabytes} MB or more in turn. A star: dispatch"
        " took the time, not the device; the order of such calls means little."
        " X /: seconds of X over this row's at the same shape. library:"
        " `jax.nn.dot_product_attention`, cuDNN where it runs. eager: keys and values repeated for"
        " every query head, dense softmax, an operation at a time. Crossover: linear in log"
        " context between measured ones.\n\n"
        "Methods: random tokens; quantize is compress without score and select, so for an evictor"
        " it gathers; dequantize builds dense keys and values, which no step does; attend is a"
        " step's output, nothing appended. Steps are donated and waited for one by one, so dispatch"
        " counts. A flush step folds a block first; n counts both kinds, and p99 of few is their"
        " largest.\n"
    )
    if device["backend"] == "cpu":
        text += "\nNo accelerator: these are the XLA specifications on a CPU, not the kernels.\n"
    return text


PLAN_NOTES = """Floor, not measured: every argument and result moved once at the peak memory rate
of a data sheet (A100 80GB SXM 2,039 GB/s, H100 SXM 3,352 GB/s, H200 SXM 4,800 GB/s, or what
`--bandwidth` says, where products then cost nothing), or the products at the dense bfloat16 peak
(312, 989, 989 TFLOP/s), whichever is longer. Kernels reach less: products in float32, for one, have
half of that peak or less. MB: 1e6 bytes of the arrays that `api.example` makes, by
`jax.eval_shape`, and of the results. Full cache / bytes: what a kernel at its floor would gain over
the full cache at its own.
"""
