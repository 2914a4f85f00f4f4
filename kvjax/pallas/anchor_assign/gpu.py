"""anchor_assign on GPUs: a program holds a block of tokens and streams the anchors past it."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvjax.pallas import compat
from kvjax.pallas.flash_prefill.gpu import dot

_CHANNELS = 32  # that a product takes at a time


def anchor_assign(
    x: Array, anchors: Array, valid: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """See `api.anchor_assign`. The index of a token with a NaN is the last anchor, its gamma 0."""
    lead, (tokens, dim) = x.shape[:-2], x.shape[-2:]
    width, count = max(_CHANNELS, pl.next_power_of_2(dim)), anchors.shape[-2]
    rows = min(64, max(16, pl.next_power_of_2(tokens)))
    slots = min(64, max(16, pl.next_power_of_2(count)))
    padded = pl.cdiv(count, slots) * slots
    x = x.reshape(-1, tokens, dim)
    anchors = anchors.reshape(-1, count, dim).astype(jnp.float32)
    square = (anchors * anchors).sum(-1)
    inverse = jnp.where(square > 0, 1.0 / jnp.where(square > 0, square, 1.0), 0.0)
    weight = jnp.where(valid.reshape(square.shape), jnp.sqrt(inverse), -1.0)
    room = ((0, 0), (0, padded - count))
    anchors = jnp.pad(anchors, (*room, (0, width - dim)))
    inverse, weight = jnp.pad(inverse, room), jnp.pad(weight, room, constant_values=-1.0)
    per_anchor = pl.BlockSpec((None, padded), lambda i, b: (b, 0))
    per_token = pl.BlockSpec((None, rows), lambda i, b: (b, i))
    index, gamma = pl.pallas_call(
        functools.partial(
            _kernel, tokens=tokens, dim=dim, count=count, slots=slots, interpret=interpret
        ),
        grid=(pl.cdiv(tokens, rows), x.shape[0]),
        in_specs=[
            pl.BlockSpec((None, rows, width), lambda i, b: (b, i, 0)),
            pl.BlockSpec((None, padded, width), lambda i, b: (b, 0, 0)),
            per_anchor,
            per_anchor,
        ],
        out_specs=[per_token, per_token],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape[:2], jnp.int32),
            jax.ShapeDtypeStruct(x.shape[:2], jnp.float32),
        ],
        compiler_params=compat.gpu_params(4, 2),
        interpret=interpret,
        name="anchor_assign",
    )(x, anchors, inverse, weight)
    return index.reshape(*lead, tokens), gamma.reshape(*lead, tokens)


def _kernel(
    x_ref,
    anchors_ref,
    inverse_ref,
    weight_ref,
    index_ref,
    gamma_ref,
    *,
    tokens,
    dim,
    count,
    slots,
    interpret,
):
    rows, width = x_ref.shape
    row = pl.program_id(0) * rows + jnp.arange(rows)

    def products(here):
        """With some anchors; a few channels at a time, for want of registers."""

        def add(j, sums):
            some = pl.ds(j * _CHANNELS, _CHANNELS)
            inside = (row < tokens)[:, None] & (j * _CHANNELS + jnp.arange(_CHANNELS) < dim)[None]
            x = plgpu.load(x_ref.at[:, some], mask=inside, other=0.0).astype(jnp.float32)
            return sums + dot(x, anchors_ref[here, some], (1, 1), interpret)

        return lax.fori_loop(0, width // _CHANNELS, add, jnp.zeros((rows, slots), jnp.float32))

    def step(j, carry):
        best, index, gamma = carry
        here = pl.ds(j * slots, slots)
        dots = products(here)
        weight = weight_ref[here][None]
        fit = jnp.where(weight >= 0, jnp.abs(dots) * weight, -1.0)
        slot = jnp.arange(slots)[None]
        top = fit.max(1)
        at = jnp.where(fit == top[:, None], slot, slots).min(1)
        won = jnp.where(slot == at[:, None], dots * inverse_ref[here][None], 0.0).sum(1)
        better = top > best  # not where equal: the first anchor keeps it
        return (
            jnp.where(better, top, best),
            jnp.where(better, j * slots + at, index),
            jnp.where(better, won, gamma),
        )

    start = (
        jnp.full((rows,), -2.0, jnp.float32),
        jnp.full((rows,), count - 1, jnp.int32),
        jnp.zeros((rows,), jnp.float32),
    )
    _, index, gamma = lax.fori_loop(0, anchors_ref.shape[0] // slots, step, start)
    plgpu.store(index_ref, index, mask=row < tokens)
    plgpu.store(gamma_ref, gamma, mask=row < tokens)
