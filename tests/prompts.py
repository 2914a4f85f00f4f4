"""Random prompts, one layer at a time, and small settings of every registered method."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import accounting, registry
from kvjax.rope import Rope, rotate
from kvjax.types import LayerInfo, PromptKV, PromptShape

# What a method with such a field is shrunk to, so that prompts of 40 to 200 tokens compress.
SMALL = {"group": 16, "residual_length": 32}
# The forms in which a method is tested: its preset and hyperparameters.
VARIANTS = {
    "anchorkv": {
        "lean": ("default", {}),
        "plain": ("paper_short", {}),
        "options": (
            "",
            {
                "exact_window": True,
                "key_share": None,
                "wide_share": None,
                "bits": (1, 2, 4),
                "anchor_choice": "coverage",
                "anchors_per_token": 2,
            },
        ),
    },
    "adakv": {"uniform": ("", {}), "pyramid": ("pyramid", {})},
    "gear": {"plain": ("", {}), "kcvt": ("kcvt-gear", {"outliers": 0.1})},
    "h2o": {"step": ("", {}), "prompt": ("", {"when": "prompt", "normalize": True})},
    "quantized_cache": {"append": ("", {}), "requantize": ("transformers", {})},
    "streaming_llm": {
        "prompt": ("", {}),
        "step": ("paper", {}),
        "moved": ("", {"positions": "cache"}),
    },
    "turboquant": {"mse": ("", {}), "prod": ("paper", {})},
    "tova": {"step": ("", {}), "prompt": ("kvpress", {})},
}


class Shape(NamedTuple):
    """Sizes of one test prompt."""

    dim: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    dtype: str = "float32"
    columns: int | None = None  # None: the longest length

    @property
    def row(self) -> PromptShape:
        """The longest row."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return PromptShape(max(self.lengths), self.kv_heads, self.dim, itemsize)


def rope(dim: int) -> Rope:
    return Rope(tuple(float(f) for f in 10000.0 ** -(np.arange(0, dim, 2) / dim)))


def info(shape: Shape, reserve: int = 48) -> LayerInfo:
    return LayerInfo(2, None, reserve, rope(shape.dim))


def tokens_of(seed: int, length: int, shape: Shape) -> dict[str, np.ndarray]:
    """q, k, v of a row alone: [N or K, length, H]; some tokens stand out, as in real keys."""
    rng = np.random.default_rng([seed, length])
    loud = np.exp(0.7 * rng.normal(size=(1, length, 1)))
    lean = rng.normal(size=(shape.kv_heads, 1, shape.dim))

    def draw(heads):
        return rng.normal(size=(heads, length, shape.dim))

    k = lean + loud * draw(shape.kv_heads)
    return {"q": 0.7 * draw(shape.heads), "k": k, "v": draw(shape.kv_heads) * loud}


def build(rows: list[dict[str, np.ndarray]], shape: Shape) -> PromptKV:
    """Right-align the rows; pads are loud garbage, to be noticed where they leak."""
    columns = shape.columns or max(shape.lengths)
    noise = np.random.default_rng(0)
    out = {}
    for name in ("q", "k", "v"):
        heads = shape.heads if name == "q" else shape.kv_heads
        out[name] = 300 * noise.normal(size=(len(rows), heads, columns, shape.dim))
        for i, row in enumerate(rows):
            out[name][i, :, columns - row[name].shape[1] :] = row[name]
    starts = jnp.asarray([columns - row["k"].shape[1] for row in rows], jnp.int32)
    q, k, v = (jnp.asarray(out[n], shape.dtype) for n in ("q", "k", "v"))
    positions = jnp.arange(columns, dtype=jnp.int32)[None] - starts[:, None]
    turn = rope(shape.dim)
    return PromptKV(rotate(turn, q, positions), rotate(turn, k, positions), k, v, starts)


def prompt(shape: Shape, seed: int = 0) -> PromptKV:
    """A random prompt; row i depends on (seed + i, its length) only."""
    return build([tokens_of(seed + i, n, shape) for i, n in enumerate(shape.lengths)], shape)


def step_inputs(shape: Shape, steps: int, seed: int = 99, lengths=None):
    """q, k, v [B, *, steps, H] unrotated and positions i32[B, steps] of new tokens."""
    lengths = shape.lengths if lengths is None else lengths
    rows = [tokens_of(seed + i, steps, shape) for i in range(len(lengths))]
    q, k, v = (jnp.asarray(np.stack([r[n] for r in rows]), shape.dtype) for n in ("q", "k", "v"))
    positions = np.asarray(lengths)[:, None] + np.arange(steps)[None]
    return q, k, v, jnp.asarray(positions, jnp.int32)


def small(method):
    """The method with its sizes shrunk for short prompts."""
    names = {f.name for f in dataclasses.fields(method)}
    changes = {name: value for name, value in SMALL.items() if name in names}
    if "window" in names and method.window is not None:
        changes["window"] = 8
    return dataclasses.replace(method, **changes)


def cases() -> list[str]:
    """Ids of every registered method, and of the forms that a method is tested in."""
    return [
        f"{name}-{variant}" if variant else name
        for name in registry.names()
        for variant in VARIANTS.get(name, {"": ""})
    ]


def base(case: str):
    """The method of a case, small, its knob untouched."""
    name, _, variant = case.partition("-")
    preset, changes = VARIANTS[name][variant] if variant else ("", {})
    return small(registry.make(f"{preset}:{name}" if preset else name, **changes))


@functools.cache
def setting(case: str, row: PromptShape, ratio: float = 3.0):
    """The method at `ratio` of the full cache in its own dtype, or the nearest that it reaches."""
    target = row.full_bytes * row.itemsize / 2 / ratio
    try:
        method = accounting.solve(base(case), target, row)
    except accounting.UnreachableBytes as error:
        method = error.nearest
    return method.resolve(row) if hasattr(method, "resolve") else method


# Tests compile many programs and run each once.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.partial(fast_jit, static_argnums=2)
def compress(method, prompt_kv, layer: LayerInfo):
    return method.compress(prompt_kv, layer)


@fast_jit
def step(cache, q, k, v, positions):
    return cache.step(q, k, v, positions)
