"""Kernels in the Triton language against their specifications, in Triton's interpreter.

`TRITON_INTERPRET=1 python triton_interpreter.py OP` prints the relative error of o, m and l of each
case as JSON. It has a process of its own because the variable is read when Triton is imported.
Queries are float32: products of bfloat16 are wrong in the interpreter.
"""

import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import quant
from kvjax.pallas import compat
from kvjax.pallas.anchor_decode.api import Coded, Residuals, Widths, anchor_decode
from kvjax.pallas.quant_decode.api import quant_decode
from kvjax.rope import Rope


class Tensor:
    """What the interpreter asks of an argument, over an array in place."""

    def __init__(self, data):
        self.data = data

    @property
    def dtype(self):
        return self.data.dtype

    def data_ptr(self):
        return self.data.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.data is self.data  # the kernel wrote in place

    def new_empty(self, *_, **__):
        return Tensor(np.empty(0, self.dtype))

    def set_(self, storage, *_):
        self.data = storage.data

    def storage_offset(self):
        return 0

    def size(self):
        return self.data.shape

    stride = size


def triton_call(*arrays, kernel, out_type, grid, num_warps, num_stages, **constants):
    """Like jax-triton's, on concrete arrays; what the kernel leaves out stays NaN."""
    del num_warps, num_stages
    given = [Tensor(np.array(a)) for a in arrays]
    outputs = [Tensor(np.full(o.shape, np.nan, o.dtype)) for o in out_type]
    kernel[grid](*given, *outputs, **constants)
    return tuple(jnp.asarray(o.data) for o in outputs)


# batch, query heads, KV heads, queries, tokens, head dim, bits and group of keys, the same of
# values, lengths
QUANT = {
    "ragged": (2, 3, 1, 1, 160, 64, (2, 32), (2, 32), (1, 97)),
    "nothing": (2, 2, 1, 1, 64, 64, (2, 32), (2, 32), (0, 31)),
    "width80": (1, 4, 1, 2, 160, 80, (4, 40), (4, 16), (160,)),
    "width96": (1, 4, 2, 1, 96, 96, (8, 32), (8, 32), (96,)),
    "splits": (1, 8, 1, 1, 512, 128, (4, 128), (2, 64), (511,)),
    "parts": (1, 4, 2, 1, 64, 128, (3, 64), (7, 64), (33,)),
    "width256": (1, 4, 2, 1, 64, 256, (1, 16), (5, 64), (33,)),
    "rows": (1, 16, 1, 3, 64, 64, (4, 32), (4, 32), (32,)),
}


def quant_case(batch, heads, kv_heads, steps, tokens, dim, keys, values, lengths):
    """Arguments of `quant_decode`, the same with NaN past the lengths, and keyword arguments."""
    draw = np.random.default_rng(0)
    lengths, pool = np.asarray(lengths, np.int32), (batch, kv_heads, tokens)
    q = draw.standard_normal((batch, heads, steps, dim), np.float32)

    def side(bits, *shape):
        codes = draw.integers(0, 256, (*pool, quant.packed_size(dim, bits)), np.uint8)
        scale, zero = draw.random((2, batch, kv_heads, *shape)).astype(np.float16)
        return codes, scale / 2**bits, zero - np.float16(0.5)

    def poison(x, each):
        past = np.arange(x.shape[2]) * each >= lengths[:, None]
        return np.where(past[:, None, :, None], np.float16(np.nan), x)

    k = side(keys[0], tokens // keys[1], dim)
    v = side(values[0], tokens, dim // values[1])
    poisoned = [(s[0], *(poison(x, each) for x in s[1:])) for s, each in ((k, keys[1]), (v, 1))]
    widths = {"k_bits": keys[0], "v_bits": values[0]}
    return (q, *k, *v, lengths), (q, *poisoned[0], *poisoned[1], lengths), widths


# batch, query heads, KV heads, queries, capacity, head dim, channels that turn, anchors, residual
# bits, lengths, and what is stored otherwise than plainly
ANCHOR = {
    "plain": (2, 3, 1, 1, 96, 64, 64, 12, (2, 4), (1, 95), ()),
    "bare": (1, 4, 2, 2, 64, 80, 80, 8, (), (64,), ()),
    "lean": (2, 4, 2, 1, 64, 128, 128, 9, (2, 4), (0, 33), ("int8", "packed", "mean", "small")),
    "partial_rope": (1, 2, 1, 1, 64, 96, 48, 9, (1, 3), (63,), ("window", "mean", "two")),
    "stages": (
        1, 4, 2, 1, 32, 256, 256, 9, (2, 2), (31,),
        ("int8", "window", "small", "staged", "two", "packed"),
    ),
    "splits": (1, 8, 1, 1, 512, 64, 64, 30, (8,), (385,), ("long",)),
}  # fmt: skip


def anchor_case(
    batch, heads, kv_heads, steps, capacity, dim, turning, anchors, bits, lengths, stored
):
    """Arguments of `anchor_decode`, the same with NaN past the lengths, and keyword arguments."""
    draw = np.random.default_rng(1)
    sides, turns = (batch, 2, kv_heads), 2 if "two" in stored else 1
    lengths = np.asarray(lengths, np.int32)

    def normal(*shape):
        return draw.standard_normal(shape, np.float32)

    q, held = normal(batch, heads, steps, dim), normal(*sides, anchors, dim)
    scales = window = mean = ranges = None
    if "int8" in stored:
        held = np.round(held * 30).astype(np.int8)
        scales = draw.random((*sides, anchors)).astype(np.float16) / 30
    if "window" in stored:
        window = normal(*sides, 5, dim).astype(jnp.bfloat16)
    if "mean" in stored:
        mean = normal(*sides, dim)
    most = anchors + (0 if window is None else 5)
    index = draw.integers(0, most, (*sides, turns, capacity), np.int32)
    index_bits = gamma_bits = 0
    if "packed" in stored:
        index_bits, gamma_bits = (most - 1).bit_length(), 4
        index = quant.pack(index, index_bits)
        gamma = poisoned = draw.integers(0, 256, (*sides, turns, capacity // 2), np.uint8)
        ranges = normal(*sides, turns, 2).astype(np.float16) / np.float16(4)
    else:
        index = index.astype(np.uint16 if "long" in stored else np.uint8)
        gamma = normal(*index.shape).astype(np.float16)
        past = np.arange(capacity) >= lengths[:, None, None, None, None]
        poisoned = np.where(past, np.float16(np.nan), gamma)

    before, coded_residuals = 0, []
    for i, width in enumerate(bits):
        mask = draw.random((*sides, capacity)) < 0.4
        words = np.packbits(mask, -1, bitorder="little").view(np.uint32)
        each = mask.reshape(batch, -1, 32).sum(-1)
        prefix = (np.cumsum(each, -1) - each).reshape(words.shape).astype(np.int32)
        slots = (batch, int(each.sum(-1).max()))
        if "staged" in stored:  # the second stage's slots come after the first's, in one array
            slots, prefix = (batch, 2 * 2 * kv_heads * capacity), prefix + before
            before = each.sum(-1)[:, None, None, None]
        codes = draw.integers(0, 256, (*slots, quant.packed_size(dim, width)), np.uint8)
        scale = draw.random(slots).astype(np.float16)
        if "small" in stored:
            scale = draw.integers(0, 180, slots, np.uint8)
            prefix = prefix.astype(np.uint16)
        if "staged" in stored and i:
            codes, scale = coded_residuals[0].codes, coded_residuals[0].scales
        coded_residuals.append(Residuals(words, prefix, codes, scale))

    def arguments(gamma):
        parts = held, scales, window, mean, index, gamma, ranges
        return q, Coded(*parts, tuple(coded_residuals), lengths)

    widths = Widths(index_bits, gamma_bits, tuple(bits), 3, "staged" in stored)
    frequencies = 1e4 ** (-np.arange(0, turning, 2) / turning)
    rope = Rope(tuple(float(f) for f in frequencies), 1.1)
    return arguments(gamma), arguments(poisoned), {"widths": widths, "rope": rope}


def errors(op, clean, poisoned, options):
    """Largest difference of o, m and l over the specification's largest entry."""
    clean, poisoned = (jax.tree.map(jnp.asarray, x) for x in (clean, poisoned))
    want = jax.jit(functools.partial(op, impl="xla", **options))(*clean)
    got = op(*poisoned, impl="triton", **options)
    # Where nothing is visible the maximum is no number to compare by.
    (o, m, l), seen = want, want[2] > 0  # noqa: E741
    m, top = (jnp.where(seen, x, 0.0) for x in (m, got[1]))
    pairs = ((o, got[0]), (m, top), (l, got[2]))
    return [float(np.abs(np.subtract(a, b)).max() / np.abs(a).max()) for a, b in pairs]


def main(name):
    """Print the errors of every case of an op."""
    from triton.runtime import interpreter

    # Its products are exact whatever the precision, but it knows few names of one.
    options = interpreter.interpreter_builder.options
    known = (*options.allowed_dot_input_precisions, "bf16x6")
    object.__setattr__(options, "allowed_dot_input_precisions", known)
    compat.jax_triton = lambda: types.SimpleNamespace(triton_call=triton_call)
    if name == "quant_decode":
        op, cases = quant_decode, {key: quant_case(*case) for key, case in QUANT.items()}
    else:
        op, cases = anchor_decode, {key: anchor_case(*case) for key, case in ANCHOR.items()}
    print(json.dumps({key: errors(op, *case) for key, case in cases.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
