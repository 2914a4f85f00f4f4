"""What the kernel benchmark measures: models, each op's shape at a context, bytes and floors.

A case is an op at one compression, such as `quant_decode_4bit`. Nothing here runs a kernel: bytes
come from the arrays that `api.example` would make, by `jax.eval_shape`.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

from kvjax.pallas.codebook_decode.api import Part

PAGE = 16  # tokens
KEPT = 8  # ragged_decode holds every eighth token
ANCHOR_RATIO = 20  # full bytes over those of anchor_decode


class Heads(NamedTuple):
    """What a layer of a model is to an attention kernel."""

    heads: int  # N, query heads
    kv_heads: int  # K
    head_dim: int  # H


# From the config.json of each model; TP 8 gives a device one KV head of eight and its queries.
MODELS = {
    "llama3_8b": Heads(32, 8, 128),
    "llama3_70b_tp8": Heads(8, 1, 128),
    "qwen2_5_7b": Heads(28, 4, 128),
    "smollm2_135m": Heads(9, 3, 64),
}


class Device(NamedTuple):
    """Peak rates from a data sheet."""

    gigabytes: float  # of memory traffic a second
    teraflops: float  # dense bfloat16 products a second


# NVIDIA data sheets: A100 80GB SXM (2,039 GB/s, 312 TFLOP/s), H100 SXM (3.35 TB/s, 989 TFLOP/s:
# five stacks of HBM3 at 5.2 Gbit/s are 3,352 GB/s) and H200 SXM (4.8 TB/s, 989 TFLOP/s).
DEVICES = {
    "A100": Device(2039, 312),
    "H100": Device(3352, 989),
    "H200": Device(4800, 989),
}


class Case(NamedTuple):
    """An op at one setting."""

    op: str  # folder in kvjax/pallas
    shape: Callable[[Heads, int, int], tuple]  # (heads, context, batch) -> a tuple as in SHAPES
    flops: Callable[[Heads, int, int], float]  # products, 2 a multiply-add
    decode: bool  # reads a cache once for one new token: compared with the full cache


def _prefill(m: Heads, context: int, batch: int) -> tuple:
    return batch, m.heads, m.kv_heads, context, m.head_dim


def _causal(m: Heads, context: int, batch: int) -> float:
    return float(batch * m.heads * context * context * m.head_dim)  # of one product, half of T x T


def _decode(m: Heads, context: int, batch: int) -> float:
    return 4.0 * batch * m.heads * context * m.head_dim


def _none(m: Heads, context: int, batch: int) -> float:
    return 0.0


def _window(context: int) -> int:
    return min(max(-(-context // 512) * 8, 8), 32)


def _anchors(context: int, head_dim: int) -> int:
    """Beside the window: a tenth of the bytes, with the window no more than 8 bits can name."""
    tenth = 4 * context * head_dim / ANCHOR_RATIO / 10 / (4 * head_dim)
    return int(min(max(tenth // 8 * 8, 8), 256 - 32))


def _anchor_shape(m: Heads, context: int, batch: int) -> tuple:
    """The share of residuals at which the stored bytes are a twentieth of the full cache's."""

    def shape(share):
        anchors = _anchors(context, m.head_dim)
        return (*_prefill(m, context, batch), anchors, _window(context), share)

    full = 4 * context * m.kv_heads * m.head_dim * batch
    low, high = 0.01, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        stored = array_bytes(arguments("anchor_decode", shape(middle)).arrays[1])
        low, high = (middle, high) if stored * ANCHOR_RATIO <= full else (low, middle)
    return shape(round(low, 3))


CASES = {
    "pooled_decode": Case("pooled_decode", _prefill, _decode, True),
    "paged_decode": Case(
        "paged_decode",
        lambda m, t, b: (
            b, m.heads, m.kv_heads, b * -(-t // PAGE), PAGE, m.head_dim, -(-t // PAGE),
        ),
        _decode,
        True,
    ),
    "quant_decode_4bit": Case(
        "quant_decode", lambda m, t, b: (*_prefill(m, t, b), 4, 32), _decode, True
    ),
    "anchor_decode_20x": Case("anchor_decode", _anchor_shape, _decode, True),
    "quant_decode_2bit": Case(
        "quant_decode", lambda m, t, b: (*_prefill(m, t, b), 2, 32), _decode, True
    ),
    "codebook_decode_4bit": Case(
        "codebook_decode",
        lambda m, t, b: (
            b, m.heads, m.kv_heads, t, (Part(m.head_dim, 4),), (Part(m.head_dim, 4),),
        ),
        _decode,
        True,
    ),
    "gear_decode_4bit": Case(
        "gear_decode", lambda m, t, b: (*_prefill(m, t, b), 4, 64, 4), _decode, True
    ),
    "ragged_decode_8x": Case(
        "ragged_decode",
        lambda m, t, b: (b, m.heads, m.kv_heads, 1, m.kv_heads * -(-t // KEPT), m.head_dim),
        lambda m, t, b: _decode(m, -(-t // KEPT), b),
        True,
    ),
    "flash_prefill": Case(
        "flash_prefill", _prefill, lambda m, t, b: 2 * _causal(m, t, b), False
    ),
    "attention_sums": Case("attention_sums", _prefill, _causal, False),
    "anchor_assign": Case(
        "anchor_assign",
        lambda m, t, b: (b, m.kv_heads, t, _anchors(t, m.head_dim) + _window(t), m.head_dim),
        lambda m, t, b: (
            2.0 * b * m.kv_heads * t * (_anchors(t, m.head_dim) + _window(t)) * m.head_dim
        ),
        False,
    ),
    "group_quantize_keys_4bit": Case(
        "group_quantize", lambda m, t, b: (b, m.kv_heads, t, m.head_dim, 4, 32, 2), _none, False
    ),
    "group_quantize_values_4bit": Case(
        "group_quantize", lambda m, t, b: (b, m.kv_heads, t, m.head_dim, 4, 32, 3), _none, False
    ),
    "codebook_encode_4bit": Case(
        "codebook_encode",
        lambda m, t, b: (b, m.kv_heads, t, m.head_dim, (Part(m.head_dim, 4),)),
        lambda m, t, b: 2.0 * b * m.kv_heads * t * m.head_dim**2,
        False,
    ),
}  # fmt: skip


# Where the tokens stand in a tuple of an op's SHAPES.
TOKENS_AT = {
    "flash_prefill": 3, "attention_sums": 3, "pooled_decode": 3, "ragged_decode": 4,
    "quant_decode": 3, "codebook_decode": 3, "gear_decode": 3, "anchor_decode": 3,
    "group_quantize": 2, "anchor_assign": 2, "codebook_encode": 2,
}  # fmt: skip


def api(op: str) -> ModuleType:
    """The module `kvjax.pallas.<op>.api`."""
    return importlib.import_module(f"kvjax.pallas.{op}.api")


class Arguments(NamedTuple):
    """What an op is called with, without its values."""

    arrays: tuple  # pytrees of ShapeDtypeStruct
    keywords: dict[str, Any]  # static


@functools.lru_cache(maxsize=4096)
def arguments(op: str, shape: tuple) -> Arguments:
    """Shapes of `api.example(shape)` and its keywords; allocates nothing."""
    keywords = {}

    def make():
        arrays, found = api(op).example(shape)
        keywords.update(found)
        return arrays

    return Arguments(jax.eval_shape(make), keywords)


def array_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of what would be arrays, in a pytree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


class Moved(NamedTuple):
    """Traffic of one call, each array once."""

    argument_bytes: int
    output_bytes: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.argument_bytes + self.output_bytes


@functools.lru_cache(maxsize=4096)
def moved(op: str, shape: tuple) -> Moved:
    """Bytes of an op's arguments and results at a shape of its SHAPES' form."""
    given = arguments(op, shape)
    function = functools.partial(getattr(api(op), op), **given.keywords, impl="xla")
    return Moved(array_bytes(given.arrays), array_bytes(jax.eval_shape(function, *given.arrays)))


class Floor(NamedTuple):
    """The least time that a call can take at given rates."""

    seconds: float
    limited_by: str  # "bytes" or "products"


def floor(total_bytes: float, flops: float, gigabytes: float, teraflops: float | None) -> Floor:
    """Time to move the bytes once, or to do the products, whichever is longer.

    Args:
        total_bytes: of arguments and results.
        flops: of products.
        gigabytes: of memory traffic a second, 1e9 bytes.
        teraflops: of products a second, 1e12; None: products cost nothing.
    """
    by_bytes = total_bytes / (gigabytes * 1e9)
    by_products = 0.0 if teraflops is None else flops / (teraflops * 1e12)
    return Floor(max(by_bytes, by_products), "bytes" if by_bytes >= by_products else "products")


def plan_row(
    name: str, model: str, context: int, batch: int, devices: Sequence[str], bandwidth: float | None
) -> dict[str, Any]:
    """Bytes and floors of a case; nothing is measured.

    Args:
        name: of `CASES`.
        model: of `MODELS`.
        context: tokens.
        batch: rows.
        devices: of `DEVICES`.
        bandwidth: GB/s in place of the devices; products then cost nothing.
    """
    case, heads = CASES[name], MODELS[model]
    shape = case.shape(heads, context, batch)
    traffic, flops = moved(case.op, shape), case.flops(heads, context, batch)
    full = moved("pooled_decode", _prefill(heads, context, batch)).total
    rates = {d: DEVICES[d] for d in devices} if bandwidth is None else {}
    if bandwidth is not None:
        rates = {f"{bandwidth:g} GB/s": Device(bandwidth, None)}
    floors = {d: floor(traffic.total, flops, *rate) for d, rate in rates.items()}
    return {
        "kind": "floor, not measured", "model": model, "context": context, "batch": batch,
        "case": name, "op": case.op, "shape": repr(shape), "argument_bytes": traffic.argument_bytes,
        "output_bytes": traffic.output_bytes, "bytes": traffic.total, "flops": flops,
        "full_over_bytes": full / traffic.total if case.decode else None,
        "floor_seconds": {d: f.seconds for d, f in floors.items()},
        "limited_by": {d: f.limited_by for d, f in floors.items()},
    }  # fmt: skip
