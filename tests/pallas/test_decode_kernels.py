"""Decode kernels, interpreted, against their specifications and a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas import split_k
from kvjax.pallas.anchor_decode import api as anchor
from kvjax.pallas.codebook_decode import api as codebook
from kvjax.pallas.codebook_decode.api import Part
from kvjax.pallas.gear_decode import api as gear
from kvjax.pallas.paged_decode import api as paged
from kvjax.pallas.pooled_decode import api as pooled
from kvjax.pallas.quant_decode import api as quantized
from kvjax.pallas.ragged_decode import api as ragged
from tests.pallas.tolerances import TOLERANCES

BLOCK = 64


def output(partial):
    """o / l, zero where nothing was seen, in float64."""
    o, _, l = (np.asarray(x, np.float64) for x in partial[:3])  # noqa: E741
    return o / np.where(l > 0, l, 1)[..., None]


def compare(op, args, kwargs, dtype):
    """The interpreted kernel gives what the specification gives, and no NaN of the arguments.

    The specification may multiply what is past the length by zero, so it gets zeros there.

    Returns:
        The kernel's output, float64 [B, N, T, H].
    """
    clean = jax.tree.map(
        lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, args
    )
    run = {
        "interpret": jax.jit(functools.partial(op, impl="interpret", **kwargs))(*args),
        "xla": jax.jit(functools.partial(op, impl="xla", **kwargs))(*clean),
    }
    got, want = output(run["interpret"]), output(run["xla"])
    assert np.isfinite(got).all()
    size = np.abs(want).max()
    assert size > 1e-2  # the comparison means something
    limit = TOLERANCES["decode"][dtype]
    assert np.abs(got - want).max() <= limit * max(size, 1.0)
    lse = [np.asarray(r[1] + jnp.log(jnp.maximum(r[2], 1e-30))) for r in run.values()]
    seen = np.asarray(run["xla"][2]) > 0
    np.testing.assert_array_equal(np.asarray(run["interpret"][2]) > 0, seen)
    room = 4 * limit * max(1, np.abs(lse[1])[seen].max())
    assert np.abs(lse[0] - lse[1])[seen].max() <= room
    return got


def cast(args, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, args)


def poison(x, lengths, axis=2):
    """NaN from `lengths` [B] or [B, K] on along the axis."""
    place = jnp.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    lengths = lengths.reshape(lengths.shape + (1,) * (x.ndim - lengths.ndim))
    return jnp.where(place < lengths, x, jnp.nan)


@pytest.mark.parametrize(
    "dim,heads,kv_heads,steps,dtype",
    [
        (64, 6, 2, 1, "float32"), (80, 4, 4, 3, "bfloat16"), (96, 8, 1, 2, "float32"),
        (128, 5, 1, 1, "bfloat16"), (256, 4, 2, 1, "float32"), (64, 9, 3, 1, "bfloat16"),
    ],
)  # fmt: skip
def test_pooled_decode_over_ragged_heads_against_float64(dim, heads, kv_heads, steps, dtype):
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 0, 4 * BLOCK, 7]
    lengths = jnp.asarray(lengths[: 2 * kv_heads], jnp.int32).reshape(2, kv_heads)
    (q, k, v, _), _ = pooled.example((2, heads, kv_heads, 4 * BLOCK, dim))
    q = jnp.concatenate([q * (i + 1) for i in range(steps)], 2)
    q, k, v = cast((q, k, v), dtype)
    args = q, poison(k, lengths), poison(v, lengths), lengths
    got = compare(pooled.pooled_decode, args, {}, dtype)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for row in range(2):
        for head in range(heads):
            own = head // (heads // kv_heads)
            n = int(lengths[row, own])
            s = q[row, head] @ k[row, own, :n].T * dim**-0.5
            p = np.exp(s - s.max(-1, initial=-1e30, keepdims=True))
            want = 0 * q[row, head]
            if n:
                want = (p / p.sum(-1, keepdims=True)) @ v[row, own, :n]
            limit = TOLERANCES["decode"][dtype]
            assert np.abs(got[row, head] - want).max() <= limit * max(np.abs(want).max(), 1.0)


@pytest.mark.parametrize(
    "heads,kv_heads,steps,skip,dtype", [(6, 2, 1, 0, "float32"), (5, 1, 4, 67, "bfloat16")]
)
def test_pooled_decode_gives_what_each_slot_gets(heads, kv_heads, steps, skip, dtype):
    """The sums over queries are those of the probabilities; slots that are skipped get nothing."""
    slots = 5 * BLOCK + 3  # several shares, and a tile that ends after the slots do
    lengths = {1: [[slots], [skip]], 2: [[slots, 0], [1, BLOCK + 1]]}[kv_heads]
    lengths = jnp.asarray(lengths, jnp.int32)
    (q, k, v, _), _ = pooled.example((2, heads, kv_heads, slots, 64))
    q = jnp.concatenate([q * (i + 1) for i in range(steps)], 2)
    q, k, v = cast((q, k, v), dtype)
    args = q, poison(k, lengths), poison(v, lengths), lengths
    options = {"skip": skip, "sums": True}
    compare(pooled.pooled_decode, args, options, dtype)
    q64, k64 = (np.asarray(x, np.float64) for x in (q, k))
    limit = TOLERANCES["decode"][dtype]
    for impl in ("interpret", "xla"):
        run = jax.jit(functools.partial(pooled.pooled_decode, impl=impl, **options))
        got = np.asarray(run(q, k, v, lengths)[3], np.float64)
        for row, head in np.ndindex(2, kv_heads):
            n, own = int(lengths[row, head]), slice(head * heads // kv_heads, None)
            s = q64[row, own][: heads // kv_heads] @ k64[row, head, skip:n].T * 64**-0.5
            p = np.exp(s - s.max(-1, initial=-1e30, keepdims=True))
            want = np.zeros(slots)
            want[skip:n] = (p / np.maximum(p.sum(-1, keepdims=True), 1e-30)).sum((0, 1))
            assert np.abs(got[row, head] - want).max() <= limit * max(want.max(), 1.0)


def test_time_follows_the_length_not_the_capacity():
    """Tiles beyond the longest length are never read: a trap there is not sprung."""
    lengths = jnp.asarray([[BLOCK]], jnp.int32)
    (q, k, v, _), _ = pooled.example((1, 1, 1, 8 * BLOCK, 64))
    visits = []

    def load(refs, side, at, head):
        jax.debug.callback(lambda first: visits.append(int(first)), at[0])
        return split_k.rows(refs[side], at, 64)

    split_k.decode(
        "trap", split_k.dense_tile(64, k.dtype, load), [q],
        [split_k.of_head(k), split_k.of_head(v)], lengths[..., None], steps=1, tokens=BLOCK,
        block=BLOCK, capacity=8 * BLOCK, widths=[64], interpret=True,
    )  # fmt: skip
    jax.effects_barrier()
    assert set(visits) == {0}


@pytest.mark.parametrize(
    "shape,dtype", [((2, 6, 2, 1, 300, 64), "bfloat16"), ((1, 8, 4, 2, 260, 80), "float32")]
)
def test_ragged_decode_over_pools(shape, dtype):
    args, _ = ragged.example(shape)
    q, k, v, starts, _ = cast(args, dtype)
    lengths = jnp.asarray([[1, 67], [200, 99]], jnp.int32)
    if shape[2] == 4:
        lengths = jnp.asarray([[64, 130, 0, 3]], jnp.int32)
    pools = shape[3]
    each = lengths.reshape(shape[0], pools, -1)
    starts = (jnp.cumsum(each, -1) - each).reshape(lengths.shape).astype(jnp.int32)
    filled = each.sum(-1)
    args = q, poison(k, filled), poison(v, filled), starts, lengths
    compare(ragged.ragged_decode, args, {}, dtype)


@pytest.mark.parametrize(
    "size,dim,dtype", [(16, 64, "float32"), (48, 80, "bfloat16"), (128, 128, "bfloat16")]
)
def test_paged_decode_by_block_table(size, dim, dtype):
    args, _ = paged.example((2, 6, 2, 20, size, dim, 6))
    q, k, v, table, _ = cast(args, dtype)
    lengths = jnp.asarray([1, 5 * size + 1], jnp.int32)
    table = table.at[0, 1:].set(-1)
    dead = jnp.isin(jnp.arange(20), table, invert=True)[:, None, None, None]
    k, v = (jnp.where(dead, jnp.nan, x) for x in (k, v))
    compare(paged.paged_decode, (q, k, v, table, lengths), {}, dtype)


QUANT = [  # dim, heads, KV heads, bits of keys and values, group, tokens, dtype
    (64, 6, 2, 2, 2, 32, 256, "float32"), (80, 4, 4, 3, 5, 16, 208, "float32"),
    (96, 8, 1, 4, 4, 32, 160, "bfloat16"), (128, 5, 1, 8, 1, 64, 256, "bfloat16"),
    (256, 4, 2, 4, 2, 64, 128, "float32"), (64, 3, 1, 6, 7, 32, 192, "bfloat16"),
    (64, 4, 2, 4, 4, 20, 200, "float32"), (64, 4, 2, 1, 8, 192, 192, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("case", QUANT, ids=str)
def test_quant_decode_over_bits_and_groups(case):
    dim, heads, kv_heads, k_bits, v_bits, group, tokens, dtype = case
    keys, _ = quantized.example((2, heads, kv_heads, tokens, dim, k_bits, group))
    own = next(g for g in (group, 32, 16) if dim % g == 0)
    values, _ = quantized.example((2, heads, kv_heads, tokens, dim, v_bits, own), 1)
    lengths = jnp.asarray([1, tokens - 3], jnp.int32)
    args = cast((*keys[:4], values[4], *(poison(x, lengths) for x in values[5:7]), lengths), dtype)
    compare(quantized.quant_decode, args, {"k_bits": k_bits, "v_bits": v_bits}, dtype)


PARTS = [
    ((Part(64, 4),), (Part(64, 2),), "bfloat16"),
    ((Part(48, 3), Part(16, 4)), (Part(64, 3, True),), "float32"),
    ((Part(80, 1, True),), (Part(80, 1),), "float32"),
    ((Part(128, 6),), (Part(96, 5), Part(32, 8)), "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("keys,values,dtype", PARTS, ids=str)
def test_codebook_decode_over_parts(keys, values, dtype):
    args, kwargs = codebook.example((2, 4, 2, 133, keys, values))
    q, k, ks, v, vs, _ = cast(args, dtype)
    last = jnp.asarray([64, 130], jnp.int32)
    lengths = jnp.asarray([[1, 64], [33, 130]], jnp.int32)
    args = jnp.concatenate([q, -q], 2), k, poison(ks, last), v, poison(vs, last), lengths
    compare(codebook.codebook_decode, args, kwargs, dtype)


@pytest.mark.parametrize(
    "absent,dtype",
    [((), "float32"), (("left", "right"), "bfloat16"), (("delta", "index"), "bfloat16")],
    ids=str,
)
def test_gear_decode_with_and_without_its_parts(absent, dtype):
    tokens, chunk = 192, 64
    (q, k, v, _), kwargs = gear.example((2, 6, 2, tokens, 64, 2, 64, 4))

    def chunks(side, outliers):  # the same arrays, read as chunks of 64 tokens
        right = jnp.tile(side.right, (1, 1, tokens // chunk, 1, 1))
        side = side._replace(right=right, index=side.index % outliers)
        return side._replace(**dict.fromkeys(absent))

    lengths = jnp.asarray([1, tokens - 5], jnp.int32)
    args = cast((q, chunks(k, chunk), chunks(v, 64), lengths), dtype)
    compare(gear.gear_decode, args, kwargs | {"chunk": chunk}, dtype)


@pytest.mark.parametrize(
    "dim,dtype,lean",
    [(64, "float32", ()), (80, "bfloat16", ()), (128, "bfloat16", ()), (64, "float32", ("lean",))],
)
def test_anchor_decode_with_two_widths_of_residuals(dim, dtype, lean):
    (q, coded), kwargs = anchor.example((2, 6, 2, 256, dim, 20, 16, 0.3, *lean))
    lengths = jnp.asarray([1, 251], jnp.int32)
    live = (jnp.arange(256)[None] < lengths[:, None])[:, None, None, None]
    coded = coded._replace(lengths=lengths)
    if not lean:
        coded = coded._replace(gamma=jnp.where(live, coded.gamma, jnp.nan))
    compare(anchor.anchor_decode, cast((q, coded), dtype), kwargs, dtype)


def test_lowering_needs_no_device():
    """An explicit "gpu" lowers here; without parameters for a backend it would not."""
    for api, shape in ((pooled, (1, 4, 2, 128, 64)), (quantized, (1, 4, 2, 128, 64, 2, 32))):
        args, kwargs = api.example(shape)
        op = getattr(api, api.__name__.split(".")[-2])
        traced = jax.jit(functools.partial(op, impl="gpu", **kwargs)).trace(*args)
        text = str(traced.jaxpr)
        assert "pallas_call" in text
