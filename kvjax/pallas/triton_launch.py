"""What the ops in the Triton language share outside their kernels: shapes, launch, combine."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.pallas import compat
from kvjax.pallas.dispatch import Refused

ROWS = 16  # query rows of a program: the fewest that tensor cores take
_FILL = 528  # programs that keep a large GPU (132 cores) busy to the end


class Plan(NamedTuple):
    """The call of a decode kernel: everything but the kernel."""

    arrays: tuple[Array, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]  # o, m, l of every split
    grid: tuple[int, int, int]  # batch and KV head, split, block of query rows
    constants: dict[str, Any]  # the kernel's constexpr parameters
    num_warps: int
    num_stages: int


def launch(kernel: Any, plan: Plan) -> tuple[Array, Array, Array]:
    """Run a kernel through jax-triton."""
    return compat.triton_call(
        *plan.arrays,
        kernel=kernel,
        out_type=plan.outputs,
        grid=plan.grid,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **plan.constants,
    )


def run(group: int, most: int) -> int:
    """The largest power of two that divides a group, at most `most`."""
    return min(group & -group, most)


def rows(q: Array, kv_heads: int) -> Array:
    """Queries [B, N, T, H] by KV head, [B * K, G*T padded to whole blocks, H]."""
    batch, heads, steps, dim = q.shape
    count = heads // kv_heads * steps
    q = q.reshape(batch * kv_heads, count, dim)
    return jnp.pad(q, ((0, 0), (0, -count % ROWS), (0, 0)))


def splits(programs: int, blocks: int) -> int:
    """Programs that share the tokens of one row and KV head, each with 4 blocks if there are."""
    return max(1, min(-(-_FILL // programs), -(-blocks // 4)))


def outputs(programs: int, split: int, rows: int, *dims: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of sums of `dims` channels each, of m and of l: f32[programs, split, rows, ...]."""
    shape = (programs, split, rows)
    shapes = [(*shape, dim) for dim in dims] + [shape, shape]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def check(op: str, q: Array) -> None:
    """Refuse queries that the kernels cannot hold.

    Raises:
        Refused: for a head dim whose codes of a width leave a byte partly filled, or
            float32 rows of more than 128 channels, for which there are too few registers.
    """
    dim = q.shape[3]
    if dim % 8:
        raise Refused(f'impl="triton" of {op}: head_dim {dim} is not 8 * n.')
    if q.dtype.itemsize > 2 and dim > 128:
        raise Refused(
            f'impl="triton" of {op}: head_dim {dim} of {q.dtype} must be at most 128, or bfloat16.'
        )


def product_type(q: Array) -> Any:
    """Of the operands of products: bfloat16 where the queries have 16 bits, else float32."""
    return jnp.bfloat16 if q.dtype.itemsize == 2 else jnp.float32
