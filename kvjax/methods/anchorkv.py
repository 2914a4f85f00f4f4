"""AnchorKV: a few exact anchors, every other token a scaled anchor, residuals where they matter."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax import anchors, quant, scores, select
from kvjax.anchors import AnchorBody
from kvjax.pallas.anchor_assign.api import anchor_assign
from kvjax.pallas.anchor_decode.api import Widths
from kvjax.pytree import pytree, static
from kvjax.registry import register
from kvjax.rope import rotate_with, tables
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
}  # fmt: skip


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
    wide_share: float = static(0.3)  # of the residual bytes, for the wider of two widths
    key_share: float = static(0.5)  # of the residuals, for keys
    exact_window: bool = static(False)  # lean storage: window in the cache's dtype, not int8
    centered: bool = static(True)  # subtract each head's mean token before anchors and projection
    gamma_bits: int = static(4)  # lean storage
    prefix_bits: int | None = static(None)  # of the slot counts; None: 32, or 16 where lean fits
    rotation_seed: int = static(0)
    impl: str = static("auto")
    flush_every = None

    def for_layer(self, layer: int, num_layers: int) -> Self:
        """Other random anchors in each layer, in the same compiled program."""
        return dataclasses.replace(self, random_seed=self.random_seed + 7919 * layer)

    def exact(self) -> Self:
        """Plain storage with every token an anchor."""
        return dataclasses.replace(
            self, storage="plain", centered=False, extra_anchors=2**31 - 1, anchor_every=None,
            bits=(), theta=math.inf, window=self.window or 8,
        )  # fmt: skip

    def layer_bytes(self, shape: PromptShape) -> int:
        """Live bytes of one row and layer, tail excluded."""
        method = self.resolve(shape)
        n = np.array([shape.num_tokens])
        counts = method._counts(n, shape)
        costs = [method._residual_bytes(bits, shape.head_dim) for bits in method.bits]
        base = method._base_bytes(n, shape)
        return int(base[0]) + sum(int(c.sum()) * b for c, b in zip(counts, costs, strict=True))

    def fit(self, target_bytes: float, shape: PromptShape) -> Self:
        """Theta for a byte target (or the nearest that a prompt of this shape can be stored in)."""
        smallest = self._smallest_theta(shape)
        return dataclasses.replace(self, theta=max(target_bytes / shape.full_bytes, smallest))

    def _smallest_theta(self, shape: PromptShape) -> float:
        n, least = np.array([shape.num_tokens]), dataclasses.replace(self, theta=0.0)
        method = least._with_prefix(shape)._with_sizes(shape, smallest=True)
        base = float(method._base_bytes(n, shape)[0])
        theta = base / shape.full_bytes
        return theta if theta * shape.full_bytes >= base else math.nextafter(theta, math.inf)

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
        method = self._with_prefix(shape)
        if not method._has_sizes():
            method = method._with_sizes(shape)
        base = method._base_bytes(np.array([shape.num_tokens]), shape)[0]
        if self.theta * shape.full_bytes < base:
            raise ValueError(
                f"theta={self.theta:.4g} cannot pay for the anchors and coefficients of"
                f" {shape.num_tokens} tokens: the smallest that can is"
                f" {math.ceil(self._smallest_theta(shape) * 1e4) / 1e4:g}."
            )
        return method

    def _has_sizes(self) -> bool:
        return None not in (self.window, self.extra_anchors) and len(self.bits) <= 2

    def _with_prefix(self, shape: PromptShape) -> Self:
        if self.prefix_bits is not None:
            return self
        fits = self.storage == "lean" and 2 * shape.kv_heads * shape.num_tokens <= 65535
        return dataclasses.replace(self, prefix_bits=16 if fits else 32)

    def _check(self) -> None:
        if not self.theta >= 0:
            raise ValueError(f"theta={self.theta} must be positive.")
        if self.storage not in ("plain", "lean"):
            raise ValueError(f"storage={self.storage!r} must be 'plain' or 'lean'.")
        if self.centered and self.storage == "plain":
            raise ValueError("centered=True must go with storage='lean': plain anchors are exact.")
        if list(self.bits) != sorted(set(self.bits)) or any(not 1 <= b <= 8 for b in self.bits):
            raise ValueError(f"bits={self.bits} must be ascending widths between 1 and 8.")
        if not (0 <= self.wide_share <= 1 and 0 <= self.key_share <= 1):
            raise ValueError(
                f"wide_share={self.wide_share} and key_share={self.key_share} must be in [0, 1]."
            )

    def _with_sizes(self, shape: PromptShape, smallest: bool = False) -> Self:
        n = shape.num_tokens
        window = self.window
        if window is None:
            window = min(max(-(-n // 512) * 8, 8), 32)
        if self.anchor_every is not None:
            extra = n // self.anchor_every - window
            if extra < 1:
                raise ValueError(
                    f"{n} tokens give {n // self.anchor_every} anchors, no more than the window of"
                    f" {window}: this preset needs {(window + 1) * self.anchor_every} tokens."
                )
        elif self.extra_anchors is not None:
            extra = self.extra_anchors
        else:
            anchor = 2 * shape.kv_heads * (shape.head_dim + 2)
            if self.storage == "plain":
                anchor = 2 * shape.kv_heads * (shape.head_dim * shape.itemsize + 2)
            share = 0.0 if smallest else 0.1 * self.theta * shape.full_bytes / anchor
            extra = int(min(max(share // 8 * 8, 8), 256))
        extra = min(extra, max(n - window, 0))
        method = dataclasses.replace(
            self, window=window, extra_anchors=extra, anchor_every=None, bits=self.bits[:2]
        )
        if smallest:
            return method
        if self.anchor_every is None and self.extra_anchors is None:
            while method.extra_anchors > 8 and method._free_bytes(shape) < 0:
                fewer = max(method.extra_anchors - 8, 8)
                method = dataclasses.replace(method, extra_anchors=fewer)
        return method._with_widths(shape, self.bits)

    def _with_widths(self, shape: PromptShape, ladder: tuple[int, ...]) -> Self:
        """The pair of widths that the bytes can fill, then more anchors."""
        if not ladder:
            return dataclasses.replace(self, bits=())
        chosen = ladder[:2]
        for i in range(1, len(ladder)):
            pair = dataclasses.replace(self, bits=ladder[i : i + 2])
            if pair._free_bytes(shape) >= pair._sides(shape) * pair._residual_bytes(
                ladder[i], shape.head_dim
            ):
                chosen = ladder[i : i + 2]
        method = dataclasses.replace(self, bits=chosen)
        widest = dataclasses.replace(self, bits=ladder[-1:])
        if not widest._is_full(shape):
            return method
        low, high = self.extra_anchors, shape.num_tokens - self.window
        while low < high:  # the most anchors that still leave every side its widest residual
            middle = (low + high + 1) // 2
            more = dataclasses.replace(widest, extra_anchors=middle)
            low, high = (middle, high) if more._is_full(shape) else (low, middle - 1)
        return dataclasses.replace(widest, extra_anchors=low)

    def _is_full(self, shape: PromptShape) -> bool:
        """Whether every side can have a residual of the only width."""
        cost = self._residual_bytes(self.bits[0], shape.head_dim)
        return self._free_bytes(shape) >= self._sides(shape) * cost

    def _free_bytes(self, shape: PromptShape) -> float:
        base = self._base_bytes(np.array([shape.num_tokens]), shape)[0]
        return self.theta * shape.full_bytes - float(base)

    def _sides(self, shape: PromptShape) -> int:
        return int(self._competing(np.array([shape.num_tokens]))[0]) * 2 * shape.kv_heads

    def _competing(self, n: np.ndarray) -> np.ndarray:
        """Tokens a KV head and side that may have a residual."""
        coded = np.maximum(n - self.window, 0)
        return np.maximum(coded - self.extra_anchors, 0) if self.storage == "plain" else coded

    def _residual_bytes(self, bits: int, head_dim: int) -> int:
        return quant.packed_size(head_dim, bits) + (2 if self.storage == "plain" else 1)

    def _index_bits(self) -> int:
        return max((self.extra_anchors + self.window - 1).bit_length(), 1)

    def _base_bytes(self, n: np.ndarray, shape: PromptShape) -> np.ndarray:
        """Live bytes of rows of n tokens before any residual, int64 like n."""
        heads, dim = shape.kv_heads, shape.head_dim
        n = n.astype(np.int64)
        near, coded = np.minimum(n, self.window), np.maximum(n - self.window, 0)
        held = np.minimum(coded, self.extra_anchors)
        words = -(-coded // 32)
        slots = 4 + self.prefix_bits // 8  # bytes of a mask word and of the count before it
        total = 2 * heads * words * slots * len(self.bits) + 8  # and lengths of body and tail
        if self.centered:
            total = total + 2 * heads * dim * shape.itemsize
        if self.storage == "plain":
            index = 1 if self.extra_anchors + self.window <= 256 else 2
            total += heads * (held + near) * (2 * dim * shape.itemsize + 4)
            return total + 2 * heads * coded * (index + 2)
        total += 2 * heads * held * (dim + 2)
        total += 2 * heads * near * (dim * shape.itemsize if self.exact_window else dim + 2)
        for bits in (self._index_bits(), self.gamma_bits):
            total += 2 * heads * -(-coded * bits // 8)
        return total + 2 * heads * 4

    def _counts(self, n: np.ndarray, shape: PromptShape) -> list[np.ndarray]:
        """Residuals of each of `bits` in rows of n tokens: int64 [*n, 2] (keys, values)."""
        heads = shape.kv_heads
        n = n.astype(np.int64)
        full = 4 * n * heads * shape.head_dim
        base = self._base_bytes(n, shape).astype(np.float64)
        budget = np.where(full > 0, self.theta * full if np.isfinite(self.theta) else 4.0 * full, 0)
        free = np.floor(np.maximum(budget - base, 0))
        side = self._competing(n) * heads  # the most that one side can have
        costs = [self._residual_bytes(b, shape.head_dim) for b in self.bits]
        if not costs:
            return []
        if len(costs) == 1:
            totals = [np.minimum(free // costs[0], 2 * side)]
        else:
            wide = np.minimum(free * self.wide_share // costs[1], 2 * side)
            narrow = (free - wide * costs[1]) // costs[0]
            over = narrow + wide > 2 * side
            spare = np.maximum(free - 2 * side * costs[0], 0) // (costs[1] - costs[0])
            wide = np.where(over, np.minimum(np.maximum(spare, 0), 2 * side), wide)
            totals = [np.where(over, 2 * side - wide, narrow), wide]
        counts, left = [], np.stack([side, side], -1)
        for total in totals[::-1]:  # widest first: it is chosen first
            keys = np.minimum(np.floor(total * self.key_share), left[..., 0])
            values = np.minimum(total - keys, left[..., 1])
            keys = np.minimum(total - values, left[..., 0])
            counts.append(np.stack([keys, values], -1).astype(np.int64))
            left = left - counts[-1]
        return counts[::-1]

    def compress(self, prompt: PromptKV, info: LayerInfo) -> BodyTail:
        """Choose anchors, assign, rank, code. See `types.Method.compress`."""
        batch, heads, total, dim = prompt.k.shape
        shape = PromptShape(total, heads, dim, prompt.k.dtype.itemsize)
        method = self
        if not self._has_sizes() or self.prefix_bits is None:
            method = self.resolve(shape)
        return method._compress(prompt, info, shape)

    def _compress(self, prompt: PromptKV, info: LayerInfo, shape: PromptShape) -> BodyTail:
        batch, heads, total, dim = prompt.k.shape
        window = min(self.window, total)
        lengths = (total - prompt.starts).astype(jnp.int32)
        num_coded = jnp.maximum(lengths - window, 0)
        capacity = max(-(-(total - window) // 32) * 32, 32)
        seen = scores.observe(prompt, window)

        mean = self._mean(prompt) if self.centered else None
        stored, near, positions = self._anchors(prompt, seen, window, mean)
        sides = jnp.stack([prompt.k_unrotated, prompt.v], 1)
        x = _aligned(sides.reshape(batch, 2 * heads, total, dim), prompt.starts, capacity)
        x = x.reshape(batch, 2, heads, capacity, dim)
        extra = positions.shape[2]
        slot = jnp.arange(extra + window, dtype=jnp.int32)[None]
        valid = jnp.where(
            slot < extra, slot < num_coded[:, None], slot - extra >= window - lengths[:, None]
        )
        valid = jnp.broadcast_to(valid[:, None, None], (batch, 2, heads, extra + window))
        offset = 0.0 if mean is None else mean.astype(jnp.float32)[:, :, :, None]
        index, gamma = anchor_assign(x - offset, near, valid, impl=self.impl)
        if self.storage == "plain":  # an anchor is its own, whatever rounding says
            own = jnp.broadcast_to(jnp.arange(extra, dtype=jnp.int32), positions.shape)
            at = jnp.broadcast_to(positions[:, None], (batch, 2, heads, extra))
            index = _put(index, at, own[:, None])
            gamma = _put(gamma, at, jnp.ones_like(own, jnp.float32)[:, None])

        token = jnp.arange(capacity, dtype=jnp.int32)[None]
        coded = (token < num_coded[:, None])[:, None, None]
        packed, spread, gamma = self._store_gamma(gamma, coded)
        chosen = jnp.take_along_axis(near, index[..., None], 3) * gamma[..., None] + offset
        rotated = _aligned(prompt.k, prompt.starts, capacity)
        useful = anchors.utility(x, chosen, rotated, seen, lengths, info.rope, self.attention_floor)
        useful = jnp.nan_to_num(jnp.where(coded, useful, -1.0), nan=0.0, posinf=3e38, neginf=-1.0)
        if self.storage == "plain":
            at = jnp.broadcast_to(positions[:, None], (batch, 2, heads, extra))
            useful = _put(useful, at, jnp.full((batch, 1, heads, extra), -1.0))
        residuals = self._residuals(x, chosen, useful, lengths, shape, info)

        lean = self.storage == "lean"
        index_bits = self._index_bits() if lean else 0
        small = jnp.uint8 if self.extra_anchors + self.window <= 256 else jnp.uint16
        index = jnp.where(coded, index, 0)
        body = AnchorBody(
            **stored, mean=mean,
            positions=None if lean else self._positions(positions, lengths, window),
            index=quant.pack(index, index_bits) if lean else index.astype(small),
            gamma=packed, gamma_range=spread, **residuals, lengths=lengths,
            capacity=capacity, window_size=window,
            widths=Widths(
                index_bits, self.gamma_bits if lean else 0, self.bits, self.rotation_seed
            ),
            rope=info.rope, impl=self.impl,
        )  # fmt: skip
        return BodyTail(body, Tail.empty(prompt.k, info.reserve), rope=info.rope)

    def _mean(self, prompt: PromptKV) -> Array:
        """Mean token of each side and KV head, in the cache's dtype: [B, 2, K, H]."""
        real = select.real_columns(prompt.starts, prompt.k.shape[2])[:, None, :, None]
        count = real.sum(2, keepdims=True)[:, :, 0]
        both = [
            jnp.where(real, x.astype(jnp.float32), 0.0).sum(2) / count
            for x in (prompt.k_unrotated, prompt.v)
        ]
        return jnp.stack(both, 1).astype(prompt.k.dtype)

    def _anchors(self, prompt, seen, window, mean):
        """Stored anchor arrays, their values f32[B, 2, K, A + W, H], positions i32[B, K, A]."""
        batch, heads, total, _ = prompt.k.shape
        before = total - window
        extra = min(self.extra_anchors, before)
        starts = jnp.minimum(prompt.starts, before)
        score = scores.pool(scores.window_scores(prompt, seen), self.kernel)[..., :before]
        real = select.real_columns(starts, before)[:, None]
        _, order = lax.top_k(jnp.where(real, score, -1.0), extra)
        attended = jnp.arange(extra) < jnp.round(self.attention_share * extra)
        attended = jnp.broadcast_to(attended[None, None], order.shape)
        protected = jax.vmap(jax.vmap(lambda row, at, on: row.at[at].set(on)))(
            jnp.zeros((batch, heads, before), bool), order, attended
        )
        noise = scores.hash_scores(self.random_seed, starts, heads, before)
        if extra:
            columns, _ = select.top_columns(noise, extra, starts, protected)
        else:
            columns = jnp.zeros((batch, heads, 0), jnp.int32)
        columns = jnp.minimum(columns, total - 1)
        positions = jnp.where(
            columns < before, columns - prompt.starts[:, None, None], 2**30
        )  # out of range: an unused anchor slot

        def take(x, at):
            return jnp.take_along_axis(x, at[..., None], 2)

        sides = [prompt.k_unrotated, prompt.v]
        far = jnp.stack([take(x, columns) for x in sides], 1)
        last = jnp.stack([x[:, :, before:] for x in sides], 1)
        if mean is not None:
            far, last = (x.astype(jnp.float32) - mean[:, :, :, None] for x in (far, last))
        held = jnp.arange(extra)[None] < jnp.minimum(before - starts, extra)[:, None]
        far = jnp.where(held[:, None, None, :, None], far, 0)
        filled = jnp.arange(before, total)[None] >= prompt.starts[:, None]
        last = jnp.where(filled[:, None, None, :, None], last, 0)
        if self.storage == "plain":
            together = jnp.concatenate([far, last], 3)
            stored = {"anchors": together, "anchor_scales": None, "window": None}
            return stored, together.astype(jnp.float32), positions
        rows = far if self.exact_window else jnp.concatenate([far, last], 3)
        peak = jnp.abs(rows.astype(jnp.float32)).max(-1)
        scale = jnp.clip(peak / 127, 0, 65504).astype(jnp.float16)
        step = scale.astype(jnp.float32)[..., None]
        ratio = rows.astype(jnp.float32) / jnp.where(step > 0, step, 1.0)
        codes = jnp.clip(jnp.round(ratio), -127, 127).astype(jnp.int8)
        near, stored = codes.astype(jnp.float32) * step, {"anchors": codes, "anchor_scales": scale}
        if not self.exact_window:
            return stored | {"window": None}, near, positions
        return (
            stored | {"window": last},
            jnp.concatenate([near, last.astype(near.dtype)], 3),
            positions,
        )

    def _positions(self, positions: Array, lengths: Array, window: int) -> Array:
        """Positions of all anchors, the window's last: i32[B, K, A + W], -1 = unused."""
        recent = lengths[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
        recent = jnp.broadcast_to(recent[:, None], (*positions.shape[:2], window))
        together = jnp.concatenate([positions, recent], 2)
        used = (together >= 0) & (together < lengths[:, None, None])
        return jnp.where(used, together, -1).astype(jnp.int32)

    def _store_gamma(self, gamma: Array, coded: Array) -> tuple[Array, Array | None, Array]:
        """Stored coefficients, their range (lean), and the values f32 they stand for."""
        if self.storage == "lean":
            codes, spread, values = anchors.quantize_gamma(gamma, coded, self.gamma_bits)
            return quant.pack(jnp.where(coded, codes, 0), self.gamma_bits), spread, values
        real = coded & ~jnp.isnan(gamma)  # a norm that overflows
        stored = jnp.where(real, jnp.clip(gamma, -65504, 65504), 0).astype(jnp.float16)
        return stored, None, stored.astype(jnp.float32)

    def _residuals(self, x, chosen, useful, lengths, shape, info) -> dict[str, tuple]:
        """The residual arrays of `AnchorBody`, one entry a width."""
        batch, _, heads, tokens, dim = x.shape
        lean = self.storage == "lean"
        # Every row's own counts, as a function of its length: data, while the sizes are static.
        table = self._counts(np.arange(shape.num_tokens + 1), shape)  # a width: [T + 1, 2]
        sizes = [tuple(int(v) for v in t.max(0)) for t in table][::-1]
        counts = [jnp.asarray(t, jnp.int32)[lengths] for t in table][::-1]
        masks = anchors.choose(useful, counts, sizes)[::-1]
        flat_x = x.reshape(batch, -1, dim)
        flat_chosen = chosen.reshape(batch, -1, dim)
        # One row of the table a token: far fewer sines than one a residual.
        cos, sin = tables(info.rope, jnp.arange(tokens, dtype=jnp.int32))
        arrays = {"words": (), "prefix": (), "codes": (), "scales": ()}
        for mask, bits, most in zip(masks, self.bits, sizes[::-1], strict=True):
            size = max(sum(most), 1)
            order = anchors.slot_order(mask, size)  # i32[B, N]

            def take(rows, order=order):
                return jnp.take_along_axis(rows, order[..., None], 1).astype(jnp.float32)

            error = take(flat_x) - take(flat_chosen)
            turned = rotate_with(cos[order % tokens], sin[order % tokens], error)
            is_key = order < heads * tokens
            error = jnp.where(is_key[..., None], turned, error)
            codes, scale = anchors.encode(error, bits, self.scale, self.rotation_seed, lean)
            words = quant.bit_words(mask)
            used = jnp.arange(size)[None] < mask.reshape(batch, -1).sum(-1)[:, None]
            prefix = quant.popcount_prefix(words)
            arrays["words"] += (words,)
            arrays["prefix"] += (prefix.astype(f"uint{self.prefix_bits}"),)
            arrays["codes"] += (jnp.where(used[..., None], codes, 0).astype(jnp.uint8),)
            arrays["scales"] += (jnp.where(used, scale, 0).astype(scale.dtype),)
        return arrays


def _aligned(x: Array, starts: Array, size: int) -> Array:
    """The first `size` tokens of each row of [B, K, T, H], slot = position."""
    x = left_align(x, starts)[:, :, :size]
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[2]), (0, 0)))


def _put(x: Array, at: Array, value: Array) -> Array:
    """x[b, s, k, at[b, s, k, j]] = value[b, s or 0, k, j]; entries out of range are dropped."""
    value = jnp.broadcast_to(value, at.shape).astype(x.dtype)
    put = jax.vmap(jax.vmap(jax.vmap(lambda row, at, v: row.at[at].set(v, mode="drop"))))
    return put(x, at, value)
