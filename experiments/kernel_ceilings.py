"""What a kernel may use at most, on every target, shape and version of JAX: one table.

A number here is what was measured, with a little room; a kernel that grows beyond it fails
`python -m experiments.kernel_report`. Raise one only with a reason. No kernel spills a register.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Ceiling(NamedTuple):
    """The most of each figure; None where the compiler does not tell it."""

    registers: int | None = None  # of a thread; 255 is the hardware's own limit
    shared_bytes: int | None = None  # of a block
    vmem_bytes: int | None = None  # of a TPU core, beyond what XLA places there itself
    spill_bytes: int = 0


KIB, MIB = 1024, 1024 * 1024

# operation -> implementation
CEILINGS: dict[str, dict[str, Ceiling]] = {
    "anchor_assign": {"gpu": Ceiling(registers=208, shared_bytes=32 * KIB)},
    "anchor_decode": {
        "gpu": Ceiling(registers=255, shared_bytes=50 * KIB),
        "triton": Ceiling(registers=240, shared_bytes=76 * KIB),
        "tpu": Ceiling(vmem_bytes=3 * MIB),
    },
    "attention_sums": {"gpu": Ceiling(registers=168, shared_bytes=48 * KIB)},
    "codebook_decode": {"gpu": Ceiling(registers=255, shared_bytes=18 * KIB)},
    "codebook_encode": {"gpu": Ceiling(registers=255, shared_bytes=48 * KIB)},
    "flash_prefill": {
        "gpu": Ceiling(registers=240, shared_bytes=96 * KIB),
        "tpu": Ceiling(vmem_bytes=4 * MIB),
    },
    "gear_decode": {"gpu": Ceiling(registers=255, shared_bytes=20 * KIB)},
    "group_quantize": {"gpu": Ceiling(registers=96, shared_bytes=1 * KIB)},
    "paged_decode": {
        "gpu": Ceiling(registers=128, shared_bytes=54 * KIB),
        "tpu": Ceiling(vmem_bytes=3 * MIB),
    },
    "pooled_decode": {
        "gpu": Ceiling(registers=128, shared_bytes=54 * KIB),
        "tpu": Ceiling(vmem_bytes=2 * MIB),
    },
    "quant_decode": {
        "gpu": Ceiling(registers=168, shared_bytes=13 * KIB),
        "triton": Ceiling(registers=168, shared_bytes=40 * KIB),
        "tpu": Ceiling(vmem_bytes=1 * MIB),
    },
    "ragged_decode": {"gpu": Ceiling(registers=128, shared_bytes=54 * KIB)},
}
# The same for shapes in float32, whose tiles are twice as large, where it is not the one above.
FLOAT32: dict[tuple[str, str], Ceiling] = {
    ("attention_sums", "gpu"): Ceiling(registers=168, shared_bytes=5 * KIB),
    ("flash_prefill", "gpu"): Ceiling(registers=255, shared_bytes=50 * KIB),
    ("flash_prefill", "tpu"): Ceiling(vmem_bytes=10 * MIB),
    ("pooled_decode", "gpu"): Ceiling(registers=72, shared_bytes=35 * KIB),
    ("pooled_decode", "tpu"): Ceiling(vmem_bytes=5 * MIB),
}


def of_row(
    row: Mapping[str, Any], ceilings: Mapping[str, Mapping[str, Ceiling]] = CEILINGS
) -> Ceiling | None:
    """The ceiling of a compiled kernel and shape; None where there is none."""
    name = row["op"], row["impl"]
    if "float32" in row.get("shape", "") and name in FLOAT32:
        return FLOAT32[name]
    return ceilings.get(row["op"], {}).get(row["impl"])


def excess(row: Mapping[str, Any], ceilings: Mapping[str, Mapping[str, Ceiling]]) -> list[str]:
    """What is wrong with a compiled kernel's figures, in words.

    Args:
        row: of `kernel_report`: `op`, `impl`, `shape` and the figures.
        ceilings: as `CEILINGS`.
    """
    ceiling = of_row(row, ceilings)
    if ceiling is None:
        return [f"no ceiling for {row['op']}, impl={row['impl']}: add it to kernel_ceilings.py."]
    return [
        f"{field}={row[field]} is over the ceiling of {most}."
        for field, most in ceiling._asdict().items()
        if most is not None and row.get(field) is not None and row[field] > most
    ]


def problems(
    rows: Iterable[Mapping[str, Any]],
    expected: Iterable[Mapping[str, Any]],
    ceilings: Mapping[str, Mapping[str, Ceiling]],
    allow_missing: bool = False,
) -> list[str]:
    """Everything that keeps a report from passing: no verdict, a failure, a figure too large.

    Args:
        rows: finished cells of a report.
        expected: the keys that must each have a row.
        ceilings: as `CEILINGS`.
        allow_missing: a compiler that is not installed is no problem.
    """
    rows, found = list(rows), []
    for key in expected:
        name = " ".join(str(value) for field, value in key.items() if field != "kind")
        matching = [row for row in rows if all(row.get(f) == v for f, v in key.items())]
        if not matching:
            found.append(f"{name}: no verdict.")
        for row in matching:
            if row["status"] == "ok":
                wrong = excess(row, ceilings) if key["kind"] == "kernel" else []
            elif row["status"] == "not installed" and allow_missing:
                wrong = []
            else:
                wrong = [f"{row['status']}: {row['error']}"]
            found += [f"{name}: {text}" for text in wrong]
    return found
