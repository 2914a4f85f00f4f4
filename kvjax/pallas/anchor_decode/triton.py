"""anchor_decode in the Triton language, through jax-triton."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import quant
from kvjax.pallas import compat, partial
from kvjax.pallas import triton_launch as common
from kvjax.pallas.dispatch import Refused
from kvjax.pallas.partial import combine
from kvjax.pallas.split_k import power
from kvjax.rope import Rope


def anchor_decode(q: Array, coded, *, widths, rope: Rope) -> tuple[Array, Array, Array]:
    """See `api.anchor_decode`."""
    compat.jax_triton()
    from kvjax.pallas.anchor_decode import triton_kernel

    (batch, heads, steps, dim), kv_heads = q.shape, coded.anchors.shape[2]
    parts = common.launch(triton_kernel.anchor_decode, plan(q, coded, widths, rope))
    (o, r), m, l = combine(parts[:2], *parts[2:], 1)  # noqa: E741
    rows = heads // kv_heads * steps
    shape = (batch, kv_heads, rows)
    o, r, m, l = (x[:, :rows].reshape(*shape, *x.shape[2:]) for x in (o, r, m, l))  # noqa: E741
    if coded.residuals:
        spin = quant.rotation(dim, widths.seed)
        o += jnp.einsum("bkrh,dh->bkrd", r, spin, precision=lax.Precision.HIGHEST)
    if coded.mean is not None:
        o += l[..., None] * coded.mean[:, 1, :, None].astype(jnp.float32)
    return partial.by_head(o, m, l, steps)


def plan(q: Array, coded, widths, rope: Rope) -> common.Plan:
    """How to call the kernel; the arguments are those of `anchor_decode`.

    Raises:
        Refused: for more than two widths or stages of residuals, and see
            `triton_launch.check`.
    """
    batch, dim, kv_heads = q.shape[0], q.shape[3], coded.anchors.shape[2]
    if len(coded.residuals) > 2:
        raise Refused(
            f'impl="triton" of anchor_decode: {len(coded.residuals)} residuals a token, at most 2.'
        )
    common.check("anchor_decode", q)
    capacity = coded.index.shape[-1]
    if widths.index:
        capacity = capacity * 8 // widths.index
    half, programs = len(rope.inv_freq), batch * kv_heads
    kind = common.product_type(q)
    queries = common.rows(q, kv_heads)
    tokens = 32 if power(dim) * jnp.dtype(kind).itemsize <= 256 else 16  # in registers
    spun = queries
    if coded.residuals:
        spin = quant.rotation(dim, widths.seed)
        spun = jnp.matmul(queries.astype(jnp.float32), spin, precision=lax.Precision.HIGHEST)
    split = common.splits(programs, -(-capacity // tokens))
    nothing = coded.lengths  # in the place of an array that the kernel does not read
    arrays = [
        queries.astype(kind),
        spun.astype(kind),
        *map(jnp.asarray, _tables(rope, capacity, tokens)),
        coded.anchors,
        *(nothing if x is None else x for x in (coded.anchor_scales, coded.window, coded.mean)),
        coded.index,
        coded.gamma,
        nothing if coded.gamma_range is None else coded.gamma_range,
    ]
    constants = {
        "HEADS": kv_heads,
        "ROWS": queries.shape[1],
        "BLOCK": common.ROWS,
        "DIM": dim,
        "WIDTH": power(dim),
        "HALF": half,
        "HALF_WIDTH": power(half),
        "REST_WIDTH": power(dim - 2 * half) if dim > 2 * half else 0,
        "CAPACITY": capacity,
        "TURNS": coded.index.shape[3],
        "ANCHORS": coded.anchors.shape[3],
        "NEAR": 0 if coded.window is None else coded.window.shape[3],
        "SCALED": coded.anchor_scales is not None,
        "MEAN": coded.mean is not None,
        "INDEX": widths.index,
        "GAMMA": widths.gamma,
        "INDEX_ROW": coded.index.shape[-1],
        "GAMMA_ROW": coded.gamma.shape[-1],
    }
    for i in range(2):
        if i >= len(coded.residuals):
            arrays += [nothing] * 5
            constants |= {f"{name}_{i}": 0 for name in ("BITS", "BYTES", "SLOTS", "FACTORS")}
            continue
        # Stages share one width, and one array of codes.
        r, bits = coded.residuals[i], widths.residuals[0 if widths.staged else i]
        factors = _factors(bits)
        arrays += [*r, jnp.asarray(factors, jnp.float32)]
        constants |= {
            f"BITS_{i}": bits,
            f"BYTES_{i}": r.codes.shape[-1],
            f"SLOTS_{i}": r.codes.shape[1],
            f"FACTORS_{i}": len(factors),
        }
    constants |= {
        "TOKENS": tokens,
        "SPLITS": split,
        "SCALE": dim**-0.5,
        "BF16": kind == jnp.bfloat16,
    }
    grid = (programs, split, queries.shape[1] // common.ROWS)
    outputs = common.outputs(programs, split, queries.shape[1], dim, dim)
    arrays = (*arrays, coded.lengths)
    return common.Plan(arrays, outputs, grid, constants, num_warps=8, num_stages=2)


@functools.lru_cache(maxsize=16)
def _tables(rope: Rope, capacity: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Cosine and sine of each block's first token, f32[blocks, R/2], and of tokens within one."""
    frequencies = np.asarray(rope.inv_freq, np.float32)
    first = np.arange(0, capacity, tokens, dtype=np.float32)[:, None] * frequencies
    own = np.arange(tokens, dtype=np.float32)[:, None] * frequencies
    scale = np.float32(rope.attention_scaling)  # counts once
    return np.cos(first) * scale, np.sin(first) * scale, np.cos(own), np.sin(own)


@functools.cache
def _factors(bits: int) -> tuple[float, ...]:
    """Of x, x^3, ... in the level of a code, x = 2 code / (2^bits - 1) - 1 (see `quant.codebook`).

    As many as make the polynomial meet every level; one where levels are equally spaced.
    """
    levels = quant.codebook(bits)[2 ** (bits - 1) :]
    if bits > 4:
        return (levels[-1],)
    x = np.arange(1, 2**bits, 2) / (2**bits - 1)
    powers = x[:, None] ** np.arange(1, 2 * len(x), 2)
    return tuple(np.linalg.solve(powers, levels).tolist())
