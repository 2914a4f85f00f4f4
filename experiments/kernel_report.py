"""Does every kernel compile for devices that are not here, within its registers and memory?

    python -m experiments.kernel_report                            # needs the extra `aot`
    python -m experiments.kernel_report --python-new PATH          # and with the newest JAX there
    python -m experiments.kernel_report --ops quant_decode --targets sm80

Every operation of `kvjax.pallas` that has a kernel is compiled in full, at every entry of its
SHAPES: by XLA:GPU for sm80 and sm90 (a spilled register is an error), by libtpu for v5e, v5p and
v6e. A second table says which kernels every method's decode step really calls. The command fails
if a kernel does not compile, has no verdict, or is over its ceiling (`kernel_ceilings.py`).
Nothing here ran on a GPU or a TPU: numbers and speed there are another question.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import kvjax.pallas
from experiments import kernel_compile, kernel_coverage
from experiments.kernel_ceilings import CEILINGS, of_row, problems
from experiments.report import Column, markdown, print_line, table
from experiments.runner import Run, main
from kvjax.pallas.compat import TARGETS

ROOT = Path(kvjax.__path__[0]).parent
IMPLS = {"gpu": "cuda", "triton": "cuda", "tpu": "tpu"}  # and the platform of their targets
FIGURES = (
    "registers", "shared_bytes", "spill_bytes", "stack_bytes", "hmma", "hgmma", "vmem_bytes",
    "temporary_bytes", "kernels", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Compile kernels without their hardware, and find out which of them methods run."""

    ops: tuple[str, ...] = ()
    """operations; default: all"""
    shapes: tuple[str, ...] = ()
    """names in an operation's SHAPES; default: all"""
    impls: tuple[Literal["gpu", "triton", "tpu"], ...] = ("gpu", "triton", "tpu")
    """kinds of kernel"""
    targets: tuple[Literal["sm80", "sm90", "v5e", "v5p", "v6e"], ...] = (
        "sm80", "sm90", "v5e", "v5p", "v6e",
    )  # fmt: skip
    """devices to compile for"""
    methods: tuple[str, ...] = ()
    """labels of methods; default: every method and preset, and some two in a row"""
    python_new: str | None = None
    """interpreter of an environment with the newest JAX; default PYTHON_NEW, "" = none"""
    processes: int = 2
    """compilers that run at a time"""
    seconds: float = 120.0
    """the longest that one compilation may take, seconds"""
    allow_missing: bool = False
    """a compiler that is not installed is a row that says so, not a failure"""


TINY = Config(
    ops=("pooled_decode",), shapes=("smollm2_135m",), targets=("sm90", "v5e"),
    methods=("full", "snapkv+kivi"), python_new="", allow_missing=True,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Compile what has no row yet, trace the methods, then judge all rows."""
    new = os.environ.get("PYTHON_NEW", "") if config.python_new is None else config.python_new
    pythons = {"this": sys.executable} | ({"newest": new} if new else {})
    cases = [case | {"python": name} for name in pythons for case in discover(config)]
    labels = config.methods or kernel_coverage.labels()
    run.watch(scalars)
    start = time.monotonic()
    with run.progress(len(cases) + len(labels), "kernels and methods") as progress:
        lock = threading.Lock()

        def record(row: Mapping[str, Any]) -> None:
            with lock:
                run.append(row)
                progress.advance(f"{row.get('op', row.get('label'))}: {row['status']}")

        jobs: dict[tuple[str, str], list[dict[str, str]]] = {}
        for case in cases:
            if run.finished(case):
                progress.advance(skipped=True)
            else:
                jobs.setdefault((case["python"], case["impl"]), []).append(case)
        with ThreadPoolExecutor(max(1, config.processes)) as pool:
            waiting = [
                pool.submit(compile_all, pythons[name], impl, todo, config.seconds, record)
                for (name, impl), todo in jobs.items()
            ]
            for job in waiting:
                job.result()
        for label in labels:
            key = {"kind": "method", "label": label}
            if run.finished(key):
                progress.advance(skipped=True)
            else:
                record(key | trace(label))
    print_line(f"kernel_report: {time.monotonic() - start:.0f} s")
    report(config, run, cases + [{"kind": "method", "label": label} for label in labels], new)


# What there is to compile


def kernels_of(op: str) -> list[str]:
    """The implementations of an operation that are kernels, by its folder."""
    folder = Path(kvjax.pallas.__path__[0]) / op
    return [impl for impl in IMPLS if (folder / f"{impl}.py").is_file()]


def operations() -> list[str]:
    """Every operation of `kvjax.pallas`."""
    return sorted(path.parent.name for path in Path(kvjax.pallas.__path__[0]).glob("*/api.py"))


def discover(config: Config) -> list[dict[str, str]]:
    """The keys of all kernel rows: operation, shape, implementation and target.

    Raises:
        ValueError: for an operation that is not there.
    """
    unknown = sorted(set(config.ops) - set(operations()))
    if unknown:
        raise ValueError(f"ops={unknown} must be of {operations()}.")
    cases = []
    for op in config.ops or operations():
        shapes = getattr(importlib.import_module(f"kvjax.pallas.{op}.api"), "SHAPES", {})
        cases += [
            {"kind": "kernel", "op": op, "shape": shape, "impl": impl, "target": target}
            for impl in kernels_of(op)
            if impl in config.impls
            for shape in shapes or ("no SHAPES",)  # compiling that fails, and is seen
            if not config.shapes or shape in config.shapes
            for target in config.targets
            if TARGETS[target].platform == IMPLS[impl]
        ]
    return cases


# Compiling


def compile_all(
    python: str,
    impl: str,
    cases: Sequence[dict[str, str]],
    seconds: float,
    record: Callable[[Mapping[str, Any]], None],
) -> None:
    """Compile in a process of its own; a compiler that dies costs one case, not the rest.

    Args:
        python: interpreter to compile with.
        impl: "gpu", "triton" or "tpu".
        cases: keys of the rows.
        seconds: the longest that one case may take.
        record: gets each row.
    """
    left, about = list(cases), {}
    while left:
        verdicts, said = _process(python, impl, left, seconds), None
        try:
            for verdict in verdicts:
                if "missing" in verdict:
                    said = f"lacks {', '.join(verdict['missing'])}"
                    for case in left:
                        record(_row(case, {"status": "not installed", "error": said}))
                    return
                if "jax" in verdict:
                    about = {"jax": verdict["jax"]}
                elif "ended" in verdict:
                    said = verdict["ended"]
                else:
                    record(_row(left.pop(0), about | verdict))
        finally:
            verdicts.close()
        if left and not about:
            for case in left:
                record(_row(case, {"status": "failed", "error": f"{python}: {said}"}))
            return
        if left:
            text = f"the compiler ended, or took more than {seconds:.0f} s: {said}"
            record(_row(left.pop(0), about | {"status": "no verdict", "error": text}))


def _process(python: str, impl: str, cases: Sequence[Any], seconds: float) -> Iterator[dict]:
    """Yield what a compiling process prints, and last how it ended."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name) / "dump", Path(name) / "log"
        folder.mkdir()
        todo = Path(name) / "cases.json"
        todo.write_text(json.dumps(list(cases)), encoding="utf-8")
        command = [python, "-m", "experiments.kernel_compile", impl, str(folder), str(seconds)]
        # JAX here leaves word of its own libtpu and flags, which are not the other interpreter's.
        ours = ("JAX_", "LIBTPU", "PJRT_", "TPU_", "XLA_")
        others = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables = others | kernel_compile.environment(impl, folder, ROOT)
        with open(log, "wb") as errors, open(todo, "rb") as stdin:
            try:
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors,
                    env=variables, cwd=ROOT,
                )  # fmt: skip
            except OSError as error:
                yield {"ended": str(error)}
                return
            try:
                for line in process.stdout:
                    text = line.decode(errors="replace")
                    if text.startswith(kernel_compile.MARK):
                        yield json.loads(text.removeprefix(kernel_compile.MARK))
                process.wait()
            finally:
                process.kill()
                process.stdout.close()
                process.wait()
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        yield {"ended": f"exit status {process.returncode}: {' '.join(last)[:300]}"}


def _row(case: Mapping[str, str], verdict: Mapping[str, Any]) -> dict[str, Any]:
    figures = {field: verdict.get(field) for field in ("jax", *FIGURES)}
    return {**case, "status": verdict["status"], "error": verdict["error"], **figures}


# Methods


def trace(label: str) -> dict[str, Any]:
    """The row of a method: what its step runs, or why that cannot be told."""
    try:
        return {"status": "ok", "error": None} | kernel_coverage.method_row(label)
    except Exception as error:
        return {"status": "failed", "error": kernel_compile.one_line(error)}


def runs(impl: str, part: str = "step") -> Callable[[Mapping[str, Any]], str | None]:
    """Return a column value: what a method runs where `impl` is the device's, or is asked for.

    Args:
        impl: of `IMPLS`.
        part: "step" or "compress".
    """
    field = impl if part == "step" else f"compress_{impl}"

    def text(row: Mapping[str, Any]) -> str | None:
        ran, ops = row.get(field), row.get(f"{part}_ops")
        if ops is None or part == "compress" and not ops:
            return None
        if any(isinstance(row.get(f), str) for f in (field, f"compress_{impl}")):
            return "refused" if impl == "triton" else "xla"
        kinds = {op: ran.get(op, "xla") for op in ops}
        main = impl if impl in kinds.values() else next(iter(kinds.values()), "xla")
        return main + "".join(f"; {op}: {kind}" for op, kind in kinds.items() if kind != main)

    return text


# Tables


def _joined(field: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda row: ", ".join(row[field]) if row.get(field) else None


def _ceiling(row: Mapping[str, Any]) -> int | None:
    ceiling = of_row(row)
    return ceiling and ceiling.registers


KERNELS = (
    Column("operation", "op"),
    Column("shape", "shape"),
    Column("kernel", "impl"),
    Column("target", "target"),
    Column("JAX", lambda row: row["jax"] or row["python"]),
    Column("verdict", "status"),
    Column("registers", "registers"),
    Column("at most", _ceiling),
    Column("spilled B", "spill_bytes"),
    Column("shared B", "shared_bytes", ",d"),
    Column("HMMA", "hmma"),
    Column("HGMMA", "hgmma"),
    Column("VMEM B", "vmem_bytes", ",d"),
    Column("temporary B", "temporary_bytes", ",d"),
    Column("s", "seconds", ".1f"),
)
METHODS = (
    Column("method", "label"),
    Column("its step's operations", _joined("step_ops")),
    Column("on a GPU", runs("gpu")),
    Column("Triton asked for", runs("triton")),
    Column("on a TPU", runs("tpu")),
    Column("why none", lambda row: row["error"] or row.get("fallback")),
    Column("operations of compress", _joined("compress_ops")),
    Column("on a GPU", runs("gpu", "compress")),
    Column("Triton asked for", runs("triton", "compress")),
    Column("on a TPU", runs("tpu", "compress")),
)
OPERATIONS = (
    Column("operation", "op"),
    *(Column(impl, lambda row, impl=impl: "kernel" if impl in row["has"] else "xla")
      for impl in IMPLS),
)  # fmt: skip


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float | None, int]]:
    """Registers of a kernel, or the number of kernels that a method's step runs."""

    def word(text: str) -> str:
        return re.sub(r"[^\w.\-]", "_", text)

    if row["kind"] == "method":
        ran = row.get("interpret")
        yield f"method/step_kernels/{word(row['label'])}", len(ran) if type(ran) is dict else 0, 0
        return
    arm = "/".join(word(row[f]) for f in ("python", "op", "shape", "impl", "target"))
    yield f"kernel/registers_count/{arm}", row["registers"], 0
    yield f"kernel/vmem_bytes/{arm}", row["vmem_bytes"], 0


def report(config: Config, run: Run, expected: Sequence[Mapping[str, Any]], new: str) -> None:
    """Write the tables, and stop where something is wrong.

    Raises:
        ValueError: if a kernel fails, has no verdict or is over its ceiling.
    """
    wrong = problems(run.rows, expected, CEILINGS, config.allow_missing)
    order = ("python", "op", "impl", "shape", "target", "label")
    rows = sorted(run.rows, key=lambda row: [str(row.get(field)) for field in order])
    kernels = [row for row in rows if row["kind"] == "kernel"]
    methods = [row for row in rows if row["kind"] == "method"]
    have = [{"op": op, "has": kernels_of(op)} for op in operations()]
    newest = "compiled too" if new else "skipped: PYTHON_NEW or --python-new names no interpreter"
    text = [
        f"The newest JAX in another interpreter: {newest}.",
        "Compiled by the devices' own compilers; nothing here ran on a GPU or a TPU.",
        "\n".join(
            ["## Problems", "", *(f"- {line}" for line in wrong)] if wrong else ["No problem."]
        ),
        markdown(kernels, KERNELS, "Kernels"),
        markdown(methods, METHODS, "Methods"),
        markdown(have, OPERATIONS, "Operations"),
    ]
    run.write_summary("\n\n".join(text))
    table(kernels, KERNELS, "kernels")
    table(methods, METHODS[:6], "methods")
    print_line(f"the newest JAX in another interpreter: {newest}")
    for line in wrong:
        print_line(f"problem: {line}")
    if wrong:
        raise ValueError(f"{len(wrong)} problems, the first of them {wrong[0]!r}")


if __name__ == "__main__":
    main(Config, run)
