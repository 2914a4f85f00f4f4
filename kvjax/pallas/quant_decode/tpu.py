"""quant_decode on TPU: codes are unpacked in registers, a value's scale goes into p."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kvjax.pallas import tpu_tiles as tiles
from kvjax.pallas.dispatch import Refused

_GROUPS = 16  # of keys in a block of tokens


def quant_decode(
    q: Array,
    k_codes: Array,
    k_scale: Array,
    k_zero: Array,
    v_codes: Array,
    v_scale: Array,
    v_zero: Array,
    lengths: Array,
    *,
    k_bits: int,
    v_bits: int,
    groups: int = _GROUPS,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """See `api.quant_decode`.

    The codes are read as they are stored. Scales and zeros are viewed as int16, as Mosaic has no
    float16, and those of values get their tokens last, so that a block of them is rows of p.

    Raises:
        Refused: for a key group or head_dim that is no multiple of 8.
    """
    heads, steps, dim = q.shape[1:]
    batch, kv_heads, k_slots, _ = k_codes.shape
    slots = min(k_slots, v_codes.shape[2])
    group = k_slots // k_scale.shape[2]
    if group % 8 or dim % 8:
        raise Refused(
            f"quant_decode has no impl='tpu' for key groups of {group} tokens and head_dim={dim}:"
            " both must be multiples of 8; impl='xla' takes any."
        )
    dtype = tiles.work_dtype(q)
    q, rows = tiles.by_kv_head(q, kv_heads)
    groups = min(groups, k_scale.shape[2])
    size = groups * group

    def tokens(b, h, r, j, lengths):
        return b, h, jnp.minimum(j, tiles.last_block(jnp.minimum(lengths[b], slots), size)), 0

    def lanes(*at):
        b, h, j, _ = tokens(*at)
        return b, h, 0, j

    def cut(x, count):
        return x, pl.BlockSpec((None, None, count, x.shape[3]), tokens)

    def turned(x):
        x = x.swapaxes(2, 3)
        return x, pl.BlockSpec((None, None, x.shape[2], min(size, x.shape[3])), lanes)

    def codes(x):
        return turned(x) if tiles.turned(x.shape[3]) else cut(x, min(size, x.shape[2]))

    axes = tuple(int(tiles.turned(x.shape[3])) for x in (k_codes, v_codes))

    out = tiles.call(
        functools.partial(
            _kernel, k_bits=k_bits, v_bits=v_bits, axes=axes, slots=slots, dtype=dtype
        ),
        (batch, kv_heads, q.shape[2] // rows, pl.cdiv(slots, size)),
        rows,
        (lengths,),
        [
            (q, pl.BlockSpec((None, None, rows, dim), lambda b, h, r, j, _: (b, h, r, 0))),
            codes(k_codes),
            cut(tiles.half_bits(k_scale), groups),
            cut(tiles.half_bits(k_zero), groups),
            codes(v_codes),
            turned(tiles.half_bits(v_scale)),
            turned(tiles.half_bits(v_zero)),
        ],
        (dim, 1, 1),
        interpret=interpret,
    )
    o, m, l = (tiles.from_kv_head(x, heads, steps) for x in out)  # noqa: E741
    return o, m[..., 0], l[..., 0]


def _kernel(
    lengths, q, k, k_scale, k_zero, v, v_scale, v_zero, o, m, l,  # noqa: E741
    *, k_bits, v_bits, axes, slots, dtype,
):  # fmt: skip
    j, size, (rows, dim), groups = pl.program_id(3), k.shape[axes[0]], q.shape, v_scale.shape[0]
    left = jnp.minimum(lengths[pl.program_id(0)], slots) - j * size
    pl.when(j == 0)(lambda: tiles.clear(o, m, l))

    @pl.when(left > 0)
    def _():
        codes = k[...].astype(jnp.int32)
        codes = tiles.unpack(codes.T if axes[0] else codes, k_bits, dim, 1).astype(jnp.float32)
        codes = codes.reshape(k_scale.shape[0], -1, dim)
        scale, zero = (tiles.from_half_bits(x[...])[:, None] for x in (k_scale, k_zero))
        keys = (codes * scale + zero).reshape(size, dim)
        scores = tiles.dot(q[...], keys, (1, 1), dtype) * dim**-0.5
        held = v.shape[axes[1]]  # fewer than the keys where only one block holds all values
        scores = scores[:, :held]
        valid = tiles.iota(scores.shape, 1) < left
        p, shrink = tiles.soften(scores, valid, m, l)

        values = tiles.unpack(v[...], v_bits, dim, 1 - axes[1])
        own = tiles.iota((rows, dim), 1) // (dim // groups)
        total = o[...] * shrink
        for g in range(groups):
            scale, zero = (tiles.from_half_bits(x[g : g + 1]) for x in (v_scale, v_zero))
            seen = tiles.dot(jnp.where(valid, p * scale, 0.0), values, (1, axes[1]), dtype)
            seen += jnp.where(valid, p * zero, 0.0).sum(-1, keepdims=True)
            total = jnp.where(own == g, total + seen, total)
        o[...] = total
