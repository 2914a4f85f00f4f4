"""The TPU kernels in TPU interpret mode, races and unwritten memory on, against `xla.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import quant
from kvjax.pallas import compat
from kvjax.pallas.anchor_decode import tpu as anchor_tpu
from kvjax.pallas.anchor_decode import xla as anchor_xla
from kvjax.pallas.anchor_decode.api import Coded, Residuals, Widths
from kvjax.pallas.flash_prefill import tpu as flash_tpu
from kvjax.pallas.flash_prefill import xla as flash_xla
from kvjax.pallas.paged_decode import tpu as paged_tpu
from kvjax.pallas.paged_decode import xla as paged_xla
from kvjax.pallas.pooled_decode import tpu as pooled_tpu
from kvjax.pallas.pooled_decode import xla as pooled_xla
from kvjax.pallas.quant_decode import tpu as quant_tpu
from kvjax.pallas.quant_decode import xla as quant_xla
from kvjax.rope import Rope
from tests.pallas.tolerances import TOLERANCES
from tests.prompts import fast_jit

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 5)


def normal(seed, shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def run(kernel, *args, **static):
    return fast_jit(functools.partial(kernel, interpret=compat.tpu_interpret(), **static))(*args)


def specified(function, *args, **static):
    return fast_jit(functools.partial(function, **static))(*args)


def poison(x, lengths, axis):
    """NaN past `lengths` [B, ...] of an axis of x [B, ..., S, ...]."""
    shape = [1] * x.ndim
    shape[axis] = -1
    at = jnp.arange(x.shape[axis]).reshape(shape)
    return jnp.where(
        at < lengths.reshape(*lengths.shape, *[1] * (x.ndim - lengths.ndim)), x, jnp.nan
    )


def agree(found, wanted, op, dtype):
    limit = TOLERANCES[op][dtype]
    for name, a, b in zip("omls", found, wanted, strict=False):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max() <= limit * max(np.abs(b).max(), 1.0), name


@pytest.mark.parametrize(("dim", "dtype"), [(80, "float32"), (128, "bfloat16")])
def test_pooled_decode(dim, dtype):
    lengths = jnp.asarray([LENGTHS[:2], LENGTHS[2:]], jnp.int32)
    q = normal(0, (2, 6, 1, dim), dtype)
    k, v = (normal(seed, (2, 2, 4 * BLOCK - 3, dim), dtype) for seed in (1, 2))
    options = {"skip": 0, "sums": False}
    poisoned = (poison(x, lengths, 2) for x in (k, v))
    found = run(pooled_tpu.pooled_decode, q, *poisoned, lengths, block=BLOCK, **options)
    agree(found, specified(pooled_xla.pooled_decode, q, k, v, lengths, **options), "decode", dtype)


def test_pooled_decode_with_sums():
    lengths = jnp.asarray([[*LENGTHS[1:3], 0]], jnp.int32)
    options = {"skip": 3, "sums": True}
    q = normal(0, (1, 6, 2, 64))
    k, v = (normal(seed, (1, 3, 2 * BLOCK + 3, 64)) for seed in (1, 2))
    poisoned = (poison(x, lengths, 2) for x in (k, v))
    found = run(pooled_tpu.pooled_decode, q, *poisoned, lengths, block=BLOCK, **options)
    wanted = specified(pooled_xla.pooled_decode, q, k, v, lengths, **options)
    agree(found, wanted, "decode", "float32")
    assert np.asarray(found[3]).sum(-1) == pytest.approx(np.asarray([[4.0, 4.0, 0.0]]), rel=1e-4)


@pytest.mark.parametrize(("dim", "dtype", "window"), [(64, "bfloat16", None), (80, "float32", 20)])
def test_flash_prefill(dim, dtype, window):
    columns = 3 * BLOCK + 5
    starts = jnp.asarray([0, BLOCK + 1], jnp.int32)
    q = normal(0, (2, 3, columns, dim), dtype)
    k, v = (normal(seed, (2, 1, columns, dim), dtype) for seed in (1, 2))
    found = run(flash_tpu.flash_prefill, q, k, v, starts, window=window, block=BLOCK)
    wanted = specified(flash_xla.flash_prefill, q, k, v, starts, window=window)
    real = np.arange(columns)[None, None] >= np.asarray(starts)[:, None, None]
    found, wanted = ((x[0], jnp.where(real, x[1], 0.0)) for x in (found, wanted))
    agree(found, wanted, "prefill", dtype)


@pytest.mark.parametrize(
    ("dim", "dtype", "bits", "steps"), [(64, "bfloat16", (2, 4), 2), (80, "float32", (3, 8), 1)]
)
def test_quant_decode(dim, dtype, bits, steps):
    group, tokens = 8, 3 * BLOCK + 8
    lengths = jnp.asarray(LENGTHS[::2] if steps > 1 else LENGTHS[1::2], jnp.int32)
    q = normal(0, (2, 3, steps, dim), dtype)
    keys, values = (normal(seed, (2, 1, tokens, dim)) for seed in (1, 2))
    k, k_scale, k_zero = quant.group_quantize(keys, bits[0], group, 2)
    v, v_scale, v_zero = quant.group_quantize(values, bits[1], dim // 2)
    k, v = (quant.pack(x, b) for x, b in zip((k, v), bits, strict=True))
    widths = {"k_bits": bits[0], "v_bits": bits[1]}
    groups = -(-lengths // group)
    found = run(
        quant_tpu.quant_decode, q,
        k, poison(k_scale, groups, 2), poison(k_zero, groups, 2),
        v, poison(v_scale, lengths, 2), poison(v_zero, lengths, 2),
        lengths, groups=BLOCK // group, **widths,
    )  # fmt: skip
    wanted = specified(
        quant_xla.quant_decode, q, k, k_scale, k_zero, v, v_scale, v_zero, lengths, **widths
    )
    agree(found, wanted, "decode", dtype)


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (80, "float32")])
def test_paged_decode(dim, dtype):
    slots, most = 8, 7
    lengths = jnp.asarray((*LENGTHS[1:], 0), jnp.int32)
    held = -(-lengths // slots)[:, None]
    order = np.random.default_rng(0).permutation(4 * most).reshape(4, most)
    table = jnp.where(jnp.arange(most)[None] < held, jnp.asarray(order, jnp.int32), -1)
    q = normal(0, (4, 6, 1, dim), dtype)
    k, v = (normal(seed, (4 * most, 2, slots, dim), dtype) for seed in (1, 2))
    # Token t of a row is slot t % S of page t // S: poison what lies past each row's length.
    left = (
        jnp.zeros(4 * most, jnp.int32)
        .at[order]
        .set(lengths[:, None] - slots * jnp.arange(most, dtype=jnp.int32)[None])
    )
    bad_k, bad_v = (poison(x, left, 2) for x in (k, v))
    found = run(paged_tpu.paged_decode, q, bad_k, bad_v, table, lengths, block=BLOCK)
    agree(found, specified(paged_xla.paged_decode, q, k, v, table, lengths), "decode", dtype)


def anchor_residuals(seed, masks, bits, dim, scale_dtype):
    """Residuals of a mask bool [B, stages, 2, K, C]; slots past the count hold NaN scales."""
    count = masks[0].size
    words = quant.bit_words(masks)
    prefix = quant.popcount_prefix(words)
    codes = jax.random.bits(
        jax.random.key(seed), (masks.shape[0], count, quant.packed_size(dim, bits)), jnp.uint8
    )
    scales = jax.random.uniform(jax.random.key(seed + 1), codes.shape[:2], minval=0.1)
    if scale_dtype == "uint8":
        scales = quant.scale_encode(scales)
    else:
        used = masks.reshape(masks.shape[0], -1).sum(-1)
        scales = poison(scales, used, 1).astype(jnp.float16)
    stages = range(masks.shape[1])
    return tuple(Residuals(words[:, s], prefix[:, s], codes, scales) for s in stages)


def plain_anchors(tokens, dim, lengths):
    """Exact anchors, 2- and 4-bit residuals; NaN past every length."""
    batch, slots = lengths.shape[0], 21
    sides = (batch, 2, 1)
    draw = jax.random.split(jax.random.key(5), 3)
    kind = jax.random.randint(draw[0], (batch, 1, *sides[1:], tokens), 0, 3, jnp.int32)
    kind = jnp.where(
        jnp.arange(tokens).reshape(1, 1, 1, 1, -1) < lengths.reshape(-1, 1, 1, 1, 1), kind, 0
    )
    gamma = poison(1 + normal(1, (*sides, 1, tokens)), lengths, 4).astype(jnp.float16)
    anchors = normal(2, (*sides, slots, dim), "bfloat16").at[..., slots - 1, :].set(jnp.nan)
    index = jax.random.randint(draw[1], (*sides, 1, tokens), 0, slots - 1, jnp.int32)
    residuals = tuple(
        anchor_residuals(seed, kind == n, bits, dim, "float16")[0]
        for n, seed, bits in ((1, 10, 2), (2, 20, 4))
    )
    coded = Coded(
        anchors, None, None, None, index.astype(jnp.uint8), gamma, None, residuals, lengths
    )
    return coded


def lean_anchors(tokens, dim, lengths):
    """Everything packed: int8 anchors, two a token, residuals in two stages, means, a window."""
    batch, slots, window = lengths.shape[0], 50, 11
    sides = (batch, 2, 1)
    draw = jax.random.split(jax.random.key(6), 5)
    stage = jax.random.randint(draw[0], (batch, 1, *sides[1:], tokens), 0, 3, jnp.int32)
    residuals = anchor_residuals(30, jnp.concatenate([stage > 0, stage > 1], 1), 2, dim, "uint8")
    index = jax.random.randint(draw[1], (*sides, 2, tokens), 0, slots + window, jnp.int32)
    gamma = jax.random.randint(draw[2], (*sides, 2, tokens), 0, 16, jnp.int32)
    coded = Coded(
        jax.random.randint(draw[3], (*sides, slots, dim), -127, 128, jnp.int32).astype(jnp.int8),
        (0.01 + 0.01 * jax.random.uniform(draw[4], (*sides, slots))).astype(jnp.float16),
        normal(3, (*sides, window, dim)),
        normal(4, (*sides, dim)),
        quant.pack(index, 6),
        quant.pack(gamma, 4),
        jnp.broadcast_to(jnp.asarray([0.25, 0.05], jnp.float16), (*sides, 2, 2)),
        residuals,
        lengths,
    )
    return coded


@pytest.mark.parametrize(
    ("build", "widths", "dim", "dtype", "tokens", "block", "lengths"),
    [
        (plain_anchors, Widths(0, 0, (2, 4), 0), 64, "bfloat16", 160, 64, (1, 149)),
        (lean_anchors, Widths(6, 4, (2, 2), 0, True), 80, "float32", 352, 128, (349,)),
    ],
)
def test_anchor_decode(build, widths, dim, dtype, tokens, block, lengths):
    lengths = jnp.asarray(lengths, jnp.int32)
    coded = fast_jit(functools.partial(build, tokens, dim))(lengths)
    rope = Rope(tuple(float(1000.0 ** (-i / 16)) for i in range(32)))
    q = normal(0, (len(lengths), 3, 1, dim), dtype)
    static = {"widths": widths, "rope": rope}
    found = run(anchor_tpu.anchor_decode, q, coded, block=block, **static)
    clean = jax.tree.map(
        lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, coded
    )
    wanted = specified(anchor_xla.anchor_decode, q, clean, **static)
    agree(found, wanted, "decode", dtype)


def test_refuses_groups_that_no_tile_holds():
    q, codes = jnp.zeros((1, 1, 1, 16)), jnp.zeros((1, 1, 8, 8), jnp.uint8)
    k_scale, v_scale = jnp.zeros((1, 1, 2, 16), jnp.float16), jnp.zeros((1, 1, 8, 1), jnp.float16)
    args = (q, codes, k_scale, k_scale, codes, v_scale, v_scale, jnp.ones(1, jnp.int32))
    with pytest.raises(NotImplementedError, match="groups of 4 .* impl='xla'"):
        quant_tpu.quant_decode(*args, k_bits=4, v_bits=4)
