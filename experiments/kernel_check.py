"""Does each op's kernel on this device say what its specification says? Small shapes, odd lengths.

Shapes keep the heads, bits and groups of the op's SHAPES at a few hundred tokens. Where lengths
are an argument, the first row of the batch gets an edge length and the others keep theirs.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_shapes
from experiments.kernel_clock import Clock, compiled, one_line

EDGES = (1, 63, 64, 65, 129, 333)
# Relative to the largest entry; the operands are bfloat16 and rounded once more on their way.
TOLERANCE = 2e-2
# Integers: share of codes and indices that may differ, where a value lies between two of them.
MISMATCH = 5e-3


class Cell(NamedTuple):
    """What one row compares."""

    op: str
    shape_name: str  # of the op's SHAPES
    impl: str
    length: int  # of the first row; 0: as the example has it

    def key(self) -> dict[str, Any]:
        """What identifies its row."""
        return {"kind": "check", **self._asdict()}


def small(op: str, shape: tuple, tokens: int = 512, batch: int = 2) -> tuple:
    """A shape of an op's SHAPES with two rows and few tokens; heads, bits and groups stay."""
    if op == "paged_decode":
        _, heads, kv_heads, _, size, dim, _ = shape
        pages = -(-tokens // size)
        return (batch, heads, kv_heads, batch * pages, size, dim, pages)
    if op == "ragged_decode":
        _, heads, kv_heads, pools, _, dim = shape
        return (batch, heads, kv_heads, pools, kv_heads // pools * tokens, dim)
    at = kernel_shapes.TOKENS_AT[op]
    changed = (batch, *shape[1:at], min(shape[at], tokens), *shape[at + 1 :])
    if op == "anchor_assign":
        return (*changed[:3], min(shape[3], 64), *changed[4:])
    if op == "anchor_decode":
        return (*changed[:5], min(shape[5], 64), min(shape[6], 16), *changed[7:])
    return changed


def cells(ops: Sequence[str], impls: Sequence[str]) -> list[Cell]:
    """All comparisons, edge lengths where the op has lengths after everything else."""
    found = []
    for op in ops:
        for name, shape in kernel_shapes.api(op).SHAPES.items():
            given = kernel_shapes.arguments(op, small(op, shape))
            edges = EDGES if has_lengths(op, given.arrays) else ()
            found += [Cell(op, name, impl, n) for impl in impls for n in (0, *edges)]
    return sorted(found, key=lambda cell: cell.length > 0)


def has_lengths(op: str, arrays: tuple) -> bool:
    """Whether an op takes lengths that may be anything up to the example's."""
    return "lengths" in _names(op) or any(hasattr(x, "lengths") for x in arrays)


def with_length(op: str, arrays: tuple, length: int) -> tuple:
    """The arguments with another length in the first row, no longer than it was."""

    def cut(lengths):
        return lengths.at[0].set(jnp.minimum(lengths[0], length))

    names = _names(op)
    return tuple(
        cut(x) if name == "lengths"
        else x._replace(lengths=cut(x.lengths)) if hasattr(x, "_replace") and hasattr(x, "lengths")
        else x
        for name, x in zip(names, arrays, strict=False)
    )  # fmt: skip


def measure(cell: Cell, clock: Clock) -> dict[str, Any]:
    """The row of a comparison: the largest error, or why there is none."""
    row = cell.key() | {"backend": jax.default_backend()}
    reason = clock.refusal(5.0)
    if reason is None:
        shape = small(cell.op, kernel_shapes.api(cell.op).SHAPES[cell.shape_name])
        row |= {"shape": repr(shape)}
        programs = _programs(cell.op, shape, cell.impl)
        reason = next((p.refusal for p in programs if p.refusal), None)
    if reason is None:
        try:
            make, kernel, specification = (program.call for program in programs)
            arrays = make()
            if cell.length:
                arrays = with_length(cell.op, arrays, cell.length)
            errors = compare(cell.op, kernel(*arrays), specification(*arrays))
        except (RuntimeError, ValueError) as error:
            reason = f"does not run: {one_line(error)}"
    if reason is not None:
        known = reason.startswith(("not implemented", "time"))
        return row | {"skipped": reason, "passed": None if known else False}
    passed = errors["error"] <= TOLERANCE and errors["mismatch"] <= MISMATCH
    return row | errors | {"skipped": None, "passed": bool(passed)}


@functools.lru_cache(maxsize=128)
def _programs(op: str, shape: tuple, impl: str) -> tuple:
    """Example, kernel and specification of a shape, compiled once for all its lengths."""
    given = kernel_shapes.arguments(op, shape)
    function = functools.partial(getattr(kernel_shapes.api(op), op), **given.keywords)
    return (
        compiled(lambda: kernel_shapes.api(op).example(shape)[0]),
        compiled(functools.partial(function, impl=impl), *given.arrays),
        compiled(functools.partial(function, impl="xla"), *given.arrays),
    )


def compare(op: str, got: Any, want: Any) -> dict[str, float]:
    """Largest relative error of the numbers and share of integers that differ.

    A partial (o, m, l) is compared as attention o / l and log-sum-exp m + log l: its maximum may be
    any number as long as these agree.
    """
    got, want = (_finished(op, jax.tree.leaves(x)) for x in (got, want))
    errors, mismatch = [0.0], [0.0]
    for a, b in zip(got, want, strict=True):
        if b.dtype.kind in "iub":
            mismatch.append(float(np.mean(a != b)))
        else:
            gap = np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)
            errors.append(float(gap) if np.isfinite(gap) else 1e9)
    return {"error": max(errors), "mismatch": max(mismatch)}


def _finished(op: str, leaves: Sequence[Any]) -> list[np.ndarray]:
    found = [np.asarray(x) for x in leaves]
    found = [x if x.dtype.kind in "iub" else x.astype(np.float32) for x in found]
    if op.endswith("_decode"):
        o, m, total, *sums = found
        safe = np.where(total > 0, total, 1.0)
        return [o / safe[..., None], np.where(total > 0, m + np.log(safe), 0.0), *sums]
    return found


def _names(op: str) -> list[str]:
    signature = inspect.signature(getattr(kernel_shapes.api(op), op))
    return [p.name for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]


NOTES = f"""Error: largest difference over the largest entry, of attention and log-sum-exp for a
partial; at most {TOLERANCE:g}, as operands are bfloat16. Codes and indices: at most {MISMATCH:g} of
them may differ, where a value lies between two. The first of two rows has the length, the second
all tokens. Skipped: the op has no such kernel, or there was no time.
"""
