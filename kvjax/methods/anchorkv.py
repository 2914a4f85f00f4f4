"""AnchorKV: a few exact anchors, every other token a scaled anchor, residuals where they matter."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax import anchor_bytes, anchor_choice, quant, scores
from kvjax.anchor_bytes import Layout
from kvjax.anchor_choice import choose_anchors
from kvjax.anchor_residuals import code_residuals, level_heads, quantize_gamma, rank
from kvjax.anchors import AnchorBody
from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.anchor_decode.api import Widths
from kvjax.pallas.dispatch import beside
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.storage import BodyTail, Tail, left_align
from kvjax.types import LayerInfo, PromptKV, PromptShape

PRESETS = {
    # The paper's numbers to the letter; refuses a context it cannot serve.
    "paper": {
        "theta": 0.05, "window": 32, "anchor_every": 128, "attention_floor": 0.0,
        "storage": "plain", "scale": "absmax", "bits": (2,), "wide_share": 0.0, "centered": False,
    },
    # The paper's ranking, codec and plain storage with windows and anchors for short contexts.
    "paper_short": {
        "attention_floor": 0.0, "storage": "plain", "scale": "absmax", "bits": (2, 4),
        "wide_share": 0.0, "centered": False,
    },
    # What measures best: a floor of attention, lean storage, centred tokens, two residual widths.
    "default": {},
    # The same with unequal layers, by the batch's own utilities.
    "pooled": {"layer_budget": "pooled"},
}  # fmt: skip

ALLOWED = {
    "storage": ("plain", "lean"),
    "anchor_choice": ("attention", "coverage"),
    "anchors_per_token": (1, 2),
    "layer_budget": ("equal", "pooled"),
    "ranking": ("utility", "cosine", "norm", "attention", "random"),
    "residual_quota": ("layer", "head"),
}


class _Coding(NamedTuple):
    """A layer between the choice of anchors and that of residuals."""

    stored: dict[str, Any]  # anchor arrays of `AnchorBody`
    mean: Array | None
    positions: Array  # i32[B, K, A]
    index: Array  # i32[B, 2, K, J, C]
    gamma: Array  # as stored, [B, 2, K, J, C]
    gamma_range: Array | None  # f16[B, 2, K, J, 2]
    x: Array  # [B, 2, K, C, H], the tokens
    chosen: Array  # f32[B, 2, K, C, H], what anchors and coefficients make of them
    useful: Array  # f32[B, 2, K, C], -1 where no residual is wanted
    seen: scores.Observation
    lengths: Array  # i32[B]


@register("anchorkv", presets=PRESETS)
@pytree
class AnchorKV:
    """Keep every position in the softmax within `theta` of the full cache's bytes.

    Anchors (the last W tokens, and others by window attention or at random) are stored; any other
    token is an anchor's index and a coefficient on each side; the bytes that are left buy coded
    residuals for the sides whose error would move the attention output most. All of it happens
    once, after the prompt; decoded tokens are appended exact.

    Plain storage: anchors exact, index 8 or 16 bits, coefficient and residual scale float16, anchor
    positions int32. Lean storage: anchors int8 with a row scale (they then compete for residuals),
    index ceil(log2 k) bits, coefficient `gamma_bits`, residual scale 8 bits; the window is int8
    too unless `exact_window`. With `centered`, each head's mean token is stored once, and anchors
    and tokens are taken relative to it: keys share a large common part, which would otherwise
    decide every cosine.

    Options, none of them the paper's: `key_share=None` lets keys and values compete for residuals
    in one pool (both utilities are squared errors of the output). `wide_share=None` spends bytes by
    marginal utility: residuals are coded in stages of the narrow width, a second stage refines the
    first, and all stages of all tokens compete; slots of one size keep the bytes static.
    `anchor_choice="coverage"` takes the anchors that attention leaves from the tokens that those so
    far represent worst. `anchors_per_token=2` projects what the first anchor leaves on a second.
    `ranking` and `residual_quota` are there for comparison: residuals by another order than that of
    the utilities, or as many in every KV head as in any other.
    `layer_budget="pooled"` gives layers unequal theta (`allocate`).

    Source: arXiv 2608.02901, sections 3 and 4 (equations 1 to 9).
    Differs from the reference: key residuals are coded after RoPE (the same error, and a query
    meets the codes without rotating them back). The paper's settings are the preset `paper`; the
    defaults here measure better at equal bytes (experiments/anchorkv_sweep.py).
    """

    attention_floor: float = 1.0  # phi: attention nobody has paid yet, in units of 1 / n
    attention_share: float = 0.7  # rho: anchors chosen by window attention, the rest at random
    random_seed: int = 42
    theta: float = static(0.1)  # keep ratio: stored bytes over full bfloat16 bytes
    window: int | None = static(None)  # W, tokens; None: n / 64, a multiple of 8 in [8, 32]
    extra_anchors: int | None = static(None)  # beside the window; None: see `resolve`
    anchor_every: int | None = static(None)  # k = n / anchor_every in all (the paper's rule)
    kernel: int = static(7)  # pooling of the window scores, tokens
    storage: str = static("lean")  # "lean" or "plain"
    scale: str = static("least_squares")  # of residuals: "absmax", "rms" or "least_squares"
    bits: tuple[int, ...] = static((2, 4, 8))  # residual widths, narrow first
    wide_share: float | None = static(0.3)  # of the residual bytes, for the wider of two widths
    key_share: float | None = static(0.5)  # of the residuals, for keys; None: one pool
    exact_window: bool = static(False)  # lean storage: window in the cache's dtype, not int8
    anchor_choice: str = static("attention")  # the others: "attention" (at random) or "coverage"
    anchors_per_token: int = static(1)  # 1 or 2
    layer_budget: str = static("equal")  # "equal" theta in all layers, or "pooled": see `allocate`
    ranking: str = static("utility")  # of residuals: see `anchor_residuals.rank`
    residual_quota: str = static("layer")  # the best of the "layer", or as many in each "head"
    centered: bool = static(True)  # subtract each head's mean token before anchors and projection
    gamma_bits: int = static(4)  # lean storage
    prefix_bits: int | None = static(None)  # of the slot counts; None: 32, or 16 where lean fits
    rotation_seed: int = static(0)
    impl: str = static("auto")
    flush_every = None

    @property
    def spreads(self) -> bool:
        """Whether `allocate` gives layers unequal budgets."""
        return self.layer_budget == "pooled"

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """Other random anchors in each layer, in the same compiled program."""
        return dataclasses.replace(self, random_seed=self.random_seed + 7919 * layer)

    def exact(self) -> Self:
        """Plain storage with every token an anchor."""
        return dataclasses.replace(
            self, storage="plain", centered=False, extra_anchors=2**31 - 1, anchor_every=None,
            bits=(), theta=math.inf, window=self.window or 8,
        )  # fmt: skip

    def layout(self, shape: PromptShape) -> Layout:
        """The sizes that decide the bytes; unset ones are 0."""
        return Layout(
            shape.kv_heads, shape.head_dim, shape.itemsize, self.theta, self.storage == "lean",
            self.centered, self.exact_window, self.anchors_per_token, self.gamma_bits,
            self.prefix_bits or 32, self.key_share, self.wide_share, self.bits, self.window or 0,
            self.extra_anchors or 0,
        )  # fmt: skip

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        return anchor_bytes.layer_bytes(self.resolve(shape).layout(shape), shape.num_tokens)

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """Theta for a byte target (or the nearest that a prompt of this shape can be stored in)."""
        smallest = self._smallest_theta(shape)
        return dataclasses.replace(self, theta=max(target_bytes / shape.full_bytes, smallest))

    def _smallest_theta(self, shape: PromptShape) -> float:
        method = dataclasses.replace(self, theta=0.0)._with_sizes(shape)
        return anchor_bytes.smallest_theta(method.layout(shape), shape.num_tokens)

    def resolve(self, shape: PromptShape) -> Self:
        """Fix every static size for prompts of up to `shape.num_tokens` tokens.

        One batch shares them. Unset, the window is n / 64 rounded up to a multiple of 8 in
        [8, 32], and the anchors beside it are a tenth of the bytes, a multiple of 8 in [8, 256].
        Of `bits`, the widest pair that the bytes can fill is used; what is left when every side
        has the widest residual goes to anchors.

        Raises:
            ValueError: if theta cannot pay for anchors and coefficients, naming the smallest that
                can, or if the paper's rule leaves no anchor beside the window.
        """
        self._check()
        method = self._with_sizes(shape)
        if anchor_bytes.free_bytes(method.layout(shape), shape.num_tokens) < 0:
            raise ValueError(
                f"theta={self.theta:.4g} cannot pay for the anchors and coefficients of"
                f" {shape.num_tokens} tokens: the smallest that can is"
                f" {math.ceil(self._smallest_theta(shape) * 1e4) / 1e4:g}."
            )
        return method

    def _has_sizes(self) -> bool:
        return None not in (self.window, self.extra_anchors) and len(self.bits) <= 2

    def _check(self) -> None:
        if not self.theta >= 0:
            raise ValueError(f"theta={self.theta} must be positive.")
        if self.centered and self.storage == "plain":
            raise ValueError("centered=True must go with storage='lean': plain anchors are exact.")
        if list(self.bits) != sorted(set(self.bits)) or any(not 1 <= b <= 8 for b in self.bits):
            raise ValueError(f"bits={self.bits} must be ascending widths between 1 and 8.")
        shares = [share for share in (self.wide_share, self.key_share) if share is not None]
        if any(not 0 <= share <= 1 for share in shares):
            raise ValueError(
                f"wide_share={self.wide_share} and key_share={self.key_share} must be in [0, 1]"
                " or None."
            )
        pairs = zip(self.bits, self.bits[1:], strict=False)
        if self.wide_share is None and any(b != 2 * a for a, b in pairs):
            raise ValueError(
                f"bits={self.bits} must double from one to the next when wide_share is None:"
                " a wider residual is two of the narrow ones."
            )
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}.")
        if self.spreads and (self.ranking, self.residual_quota) != ("utility", "layer"):
            raise ValueError(
                f"ranking={self.ranking!r} and residual_quota={self.residual_quota!r} must be"
                " 'utility' and 'layer' with layer_budget='pooled', which compares utilities."
            )

    def _with_sizes(self, shape: PromptShape) -> Self:
        n, method = shape.num_tokens, self
        if self.prefix_bits is None:
            stages = 2 if self.wide_share is None else 1
            fits = self.storage == "lean" and 2 * shape.kv_heads * n * stages <= 65535
            method = dataclasses.replace(method, prefix_bits=16 if fits else 32)
        if method._has_sizes():
            return method
        window = anchor_bytes.window_for(n) if self.window is None else self.window
        layout = method.layout(shape)._replace(window=window)
        if self.anchor_every is not None:
            extra = n // self.anchor_every - window
            if extra < 1:
                raise ValueError(
                    f"{n} tokens give {n // self.anchor_every} anchors, no more than the window of"
                    f" {window}: this preset needs {(window + 1) * self.anchor_every} tokens."
                )
            layout = layout._replace(extra=extra)
        elif self.extra_anchors is None:
            layout = anchor_bytes.with_anchors(layout, n)
        return method._laid_out(anchor_bytes.with_widths(layout, n, self.bits))

    def _laid_out(self, layout: Layout) -> Self:
        return dataclasses.replace(
            self, theta=layout.theta, window=layout.window, extra_anchors=layout.extra,
            anchor_every=None, bits=layout.bits,
        )  # fmt: skip

    def layer_statistics(self, prompt: PromptKV, info: LayerInfo) -> Array:
        """How many token-sides of a layer have which utility, for `allocate`.

        Utilities are relative to the mean squared output of the layer's observation queries, so
        that layers compare; bin j counts those about 2^(j / 2 - 48).

        Returns:
            f32[B, 128].
        """
        method, _ = self._resolved(prompt)
        coding = method._code(prompt, info)
        square = jnp.square(coding.seen.y).sum(-1) * coding.seen.seen[:, None]
        count = jnp.maximum(coding.seen.seen.sum(-1) * square.shape[1], 1)
        unit = square.sum((1, 2)) / count
        useful = coding.useful.reshape(coding.useful.shape[0], -1)
        relative = useful / jnp.maximum(unit, 1e-30)[:, None]
        octave = jnp.log2(jnp.maximum(relative, 2.0**-60))
        column = jnp.clip(jnp.round(2 * octave) + 96, 0, 127).astype(jnp.int32)
        zeros = jnp.zeros((useful.shape[0], 128))
        return jax.vmap(lambda row, at, x: row.at[at].add(x))(
            zeros, column, (useful >= 0).astype(jnp.float32)
        )

    def allocate(self, statistics: Sequence[Array], shape: PromptShape) -> list[Self]:
        """A method for every layer: one threshold on utility per byte for all of them.

        Runs on the host. A batch shares the allocation: sizes are static.

        Args:
            statistics: `layer_statistics` of every layer.
            shape: of the longest prompt.

        Returns:
            L resolved methods, before `for_layer`; together at most theta of L full layers.
        """
        method = self.resolve(shape)
        if self.layer_budget == "equal":
            return [method] * len(statistics)
        n = shape.num_tokens
        layout = method.layout(shape)._replace(bits=self.bits[:2])  # the most that a layer may use
        demand = np.stack([np.asarray(s, np.float64).mean(0) for s in statistics])
        thetas = anchor_bytes.spread(layout, n, self.bits, demand)
        layouts = [layout._replace(theta=theta) for theta in thetas]
        return [method._laid_out(anchor_bytes.with_widths(x, n, self.bits)) for x in layouts]

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Choose anchors, assign, rank, code. See `types.Method.compress`."""
        method, shape = self._resolved(prompt)
        coding = method._code(prompt, info)
        layout = method.layout(shape)
        residuals = code_residuals(method, coding, layout, shape.num_tokens, info.rope)
        lean = method.storage == "lean"
        index_bits = layout.index_bits if lean else 0
        small = jnp.uint8 if method.extra_anchors + method.window <= 256 else jnp.uint16
        index, window = coding.index, min(method.window, prompt.k.shape[2])
        positions = anchor_choice.anchor_positions(coding.positions, coding.lengths, window)
        body = AnchorBody(
            **coding.stored, mean=coding.mean,
            positions=None if lean else positions,
            index=quant.pack(index, index_bits) if lean else index.astype(small),
            gamma=coding.gamma, gamma_range=coding.gamma_range, **residuals,
            lengths=coding.lengths, capacity=index.shape[-1], window_size=window,
            widths=method._widths(index_bits), rope=info.rope, impl=method.impl,
        )  # fmt: skip
        return BodyTail(body, Tail.empty(prompt.k, info.reserve), rope=info.rope)

    def _resolved(self, prompt: PromptKV) -> tuple[Self, PromptShape]:
        _, heads, total, dim = prompt.k.shape
        shape = PromptShape(total, heads, dim, prompt.k.dtype.itemsize)
        fixed = self._has_sizes() and self.prefix_bits is not None
        return self if fixed else self.resolve(shape), shape

    def _widths(self, index_bits: int) -> Widths:
        staged = self.wide_share is None and len(self.bits) == 2
        bits = self.bits[:1] * 2 if staged else self.bits
        gamma_bits = self.gamma_bits if self.storage == "lean" else 0
        return Widths(index_bits, gamma_bits, bits, self.rotation_seed, staged)

    def _code(self, prompt: PromptKV, info: LayerInfo) -> _Coding:
        """Anchors, coefficients, and what a residual of each side is worth."""
        if prompt.next_positions is not None:
            raise ValueError(
                "a prompt that lost tokens cannot be compressed by anchorkv, which takes a token's"
                " position for its index: compress the whole prompt, or take a quantizer."
            )
        batch, heads, total, dim = prompt.k.shape
        window = min(self.window, total)
        lengths = (total - prompt.starts).astype(jnp.int32)
        num_coded = jnp.maximum(lengths - window, 0)
        capacity = max(-(-(total - window) // 32) * 32, 32)
        seen = scores.observe(prompt, window)

        mean = anchor_choice.mean_token(prompt) if self.centered else None
        stored, near, positions = choose_anchors(self, prompt, seen, window, mean)
        sides = jnp.stack([prompt.k_unrotated, prompt.v], 1)
        x = _aligned(sides.reshape(batch, 2 * heads, total, dim), prompt.starts, capacity)
        x = x.reshape(batch, 2, heads, capacity, dim)
        extra = positions.shape[2]
        slot = jnp.arange(extra + window, dtype=jnp.int32)[None]
        valid = jnp.where(
            slot < extra, slot < num_coded[:, None], slot - extra >= window - lengths[:, None]
        )
        valid = jnp.broadcast_to(valid[:, None, None], (batch, 2, heads, extra + window))
        token = jnp.arange(capacity, dtype=jnp.int32)[None]
        coded = (token < num_coded[:, None])[:, None, None]
        chosen = 0.0 if mean is None else mean.astype(jnp.float32)[:, :, :, None]
        at = jnp.broadcast_to(positions[:, None], (batch, 2, heads, extra))
        indices, gammas, ranges = [], [], []
        for turn in range(self.anchors_per_token):
            index, gamma = anchor_assign(x - chosen, near, valid, impl=beside(self.impl))
            if self.storage == "plain":  # an anchor is its own, whatever rounding says
                own = jnp.broadcast_to(jnp.arange(extra, dtype=jnp.int32), positions.shape)
                index = _put(index, at, own[:, None])
                gamma = _put(gamma, at, jnp.full(own.shape, 1.0 - turn)[:, None])
            packed, spread, gamma = self._store_gamma(gamma, coded)
            chosen += jnp.take_along_axis(near, index[..., None], 3) * gamma[..., None]
            indices.append(jnp.where(coded, index, 0))
            gammas.append(packed)
            ranges.append(spread)
        rotated = _aligned(prompt.k, prompt.starts, capacity)
        useful = rank(self, x, chosen, rotated, seen, lengths, info.rope)
        useful = jnp.nan_to_num(jnp.where(coded, useful, -1.0), nan=0.0, posinf=3e38, neginf=-1.0)
        if self.storage == "plain":
            useful = _put(useful, at, jnp.full((batch, 1, heads, extra), -1.0))
        if self.residual_quota == "head":
            useful = level_heads(useful)
        spread = None if ranges[0] is None else jnp.stack(ranges, 3)
        return _Coding(
            stored, mean, positions, jnp.stack(indices, 3), jnp.stack(gammas, 3), spread,
            x, chosen, useful, seen, lengths,
        )  # fmt: skip

    def _store_gamma(self, gamma: Array, coded: Array) -> tuple[Array, Array | None, Array]:
        """Stored coefficients, their range (lean), and the values f32 they stand for."""
        if self.storage == "lean":
            codes, spread, values = quantize_gamma(gamma, coded, self.gamma_bits)
            return quant.pack(jnp.where(coded, codes, 0), self.gamma_bits), spread, values
        real = coded & ~jnp.isnan(gamma)  # a norm that overflows
        stored = jnp.where(real, jnp.clip(gamma, -65504, 65504), 0).astype(jnp.float16)
        return stored, None, stored.astype(jnp.float32)


def _aligned(x: Array, starts: Array, size: int) -> Array:
    """The first `size` tokens of each row of [B, K, T, H], slot = position."""
    x = left_align(x, starts)[:, :, :size]
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)))


def _put(x: Array, at: Array, value: Array) -> Array:
    """x[b, s, k, at[b, s, k, j]] = value[b, s or 0, k, j]; entries out of range are dropped."""
    value = jnp.broadcast_to(value, at.shape).astype(x.dtype)
    put = jax.vmap(jax.vmap(jax.vmap(lambda row, at, v: row.at[at].set(v, mode="drop"))))
    return put(x, at, value)
