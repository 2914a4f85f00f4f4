"""What AnchorKV's storage costs to the byte, and what a byte budget buys of it. No arrays of JAX.

A row's bytes are a base (anchors, and of every coded token its anchors and coefficients) and as
many residuals as the keep ratio leaves room for.
"""

import math
from typing import NamedTuple

import numpy as np

from kvjax import quant
from kvjax.select import largest_remainder

# Squared error of a unit Gaussian after coding by 1 to 8 bits (J. Max, 1960; equal steps from 5).
DISTORTION = (0.3634, 0.1175, 0.03454, 0.009497, 0.0025, 0.00069, 0.00019, 0.0001)


class Layout(NamedTuple):
    """Every size that the bytes of a layer depend on, beside the number of its tokens."""

    kv_heads: int  # K
    head_dim: int  # H
    itemsize: int  # bytes of an exact element
    theta: float  # keep ratio
    lean: bool  # packed indices and coefficients, int8 anchors
    centered: bool
    exact_window: bool
    per_token: int  # anchors a coded token and side
    gamma_bits: int
    prefix_bits: int
    key_share: float | None  # of the residuals; None: keys and values share one pool
    wide_share: float | None  # of the residual bytes, for the wider of two widths; None: stages
    bits: tuple[int, ...]  # residual widths, at most two once it is solved
    window: int  # W
    extra: int  # anchors beside the window, a KV head

    @property
    def staged(self) -> bool:
        """Whether a second code of the narrow width refines the first, instead of a wider one."""
        return self.wide_share is None and len(self.bits) == 2

    @property
    def index_bits(self) -> int:
        """Bits that name an anchor."""
        return max((self.extra + self.window - 1).bit_length(), 1)

    @property
    def costs(self) -> list[int]:
        """Bytes of a residual of each kind: a width each, or the one width of all stages."""
        return [residual_bytes(self, bits) for bits in self.bits[: 1 if self.staged else 2]]

    @property
    def pools(self) -> int:
        """Competitions for residuals: one a side, or one over both."""
        return 1 if self.key_share is None else 2


def residual_bytes(layout: Layout, bits: int) -> int:
    """Bytes of one residual and its scale."""
    return quant.packed_size(layout.head_dim, bits) + (1 if layout.lean else 2)


def full_bytes(layout: Layout, n: np.ndarray) -> np.ndarray:
    """Bytes of the full bfloat16 cache of rows of n tokens."""
    return 4 * n * layout.kv_heads * layout.head_dim


def base_bytes(layout: Layout, n: np.ndarray) -> np.ndarray:
    """Live bytes of rows of n tokens before any residual, int64 like n."""
    heads, dim, item = layout.kv_heads, layout.head_dim, layout.itemsize
    n = np.asarray(n, np.int64)
    near, coded = np.minimum(n, layout.window), np.maximum(n - layout.window, 0)
    held = np.minimum(coded, layout.extra)
    words = -(-coded // 32)
    slots = 4 + layout.prefix_bits // 8  # bytes of a mask word and of the count before it
    total = 2 * heads * words * slots * len(layout.bits) + 8  # and lengths of body and tail
    if layout.centered:
        total = total + 2 * heads * dim * item
    if not layout.lean:
        index = 1 if layout.extra + layout.window <= 256 else 2
        total += heads * (held + near) * (2 * dim * item + 4)
        return total + 2 * heads * coded * (index + 2) * layout.per_token
    total += 2 * heads * held * (dim + 2)
    total += 2 * heads * near * (dim * item if layout.exact_window else dim + 2)
    for bits in (layout.index_bits, layout.gamma_bits):
        total += 2 * heads * layout.per_token * -(-coded * bits // 8)
    return total + 2 * heads * 4 * layout.per_token


def competing(layout: Layout, n: np.ndarray) -> np.ndarray:
    """Tokens a KV head and side that may have a residual."""
    coded = np.maximum(n - layout.window, 0)
    return coded if layout.lean else np.maximum(coded - layout.extra, 0)


def counts(layout: Layout, n: np.ndarray) -> list[np.ndarray]:
    """Residuals of each kind (see `Layout.costs`) in rows of n tokens: int64 [*n, pools].

    Two widths split the bytes by `wide_share`, until every side has a residual: what is left then
    widens them. Two stages cost the same, so that their number is fixed and the utilities decide
    how many are second ones.
    """
    n = np.asarray(n, np.int64)
    full, costs = full_bytes(layout, n), layout.costs
    if not costs:
        return []
    theta = layout.theta if math.isfinite(layout.theta) else 4.0
    free = np.floor(np.maximum(theta * full - base_bytes(layout, n).astype(np.float64), 0))
    free = np.where(full > 0, free, 0)
    side = competing(layout, n) * layout.kv_heads  # the most that one side can have
    if len(costs) == 1:
        side = side * (2 if layout.staged else 1)
        totals = [np.minimum(free // costs[0], 2 * side)]
    else:
        wide = np.minimum(free * layout.wide_share // costs[1], 2 * side)
        narrow = (free - wide * costs[1]) // costs[0]
        over = narrow + wide > 2 * side
        spare = np.maximum(free - 2 * side * costs[0], 0) // (costs[1] - costs[0])
        wide = np.where(over, np.minimum(np.maximum(spare, 0), 2 * side), wide)
        totals = [np.where(over, 2 * side - wide, narrow), wide]
    if layout.key_share is None:
        return [total[..., None].astype(np.int64) for total in totals]
    split, left = [], np.stack([side, side], -1)
    for total in totals[::-1]:  # widest first: it is chosen first
        keys = np.minimum(np.floor(total * layout.key_share), left[..., 0])
        values = np.minimum(total - keys, left[..., 1])
        keys = np.minimum(total - values, left[..., 0])
        split.append(np.stack([keys, values], -1).astype(np.int64))
        left = left - split[-1]
    return split[::-1]


def layer_bytes(layout: Layout, num_tokens: int) -> int:
    """Live bytes of one row and layer, residuals included."""
    n = np.array([num_tokens])
    residuals = zip(counts(layout, n), layout.costs, strict=True)
    return int(base_bytes(layout, n)[0]) + sum(int(c.sum()) * cost for c, cost in residuals)


def smallest_theta(layout: Layout, num_tokens: int) -> float:
    """The keep ratio that pays for the base alone."""
    base, full = int(base_bytes(layout, num_tokens)), int(full_bytes(layout, num_tokens))
    theta = base / full
    return theta if theta * full >= base else math.nextafter(theta, math.inf)


def free_bytes(layout: Layout, num_tokens: int) -> float:
    """What theta leaves for residuals; negative if it cannot pay for the base."""
    return layout.theta * int(full_bytes(layout, num_tokens)) - float(
        base_bytes(layout, num_tokens)
    )


def window_for(num_tokens: int) -> int:
    """The default window: n / 64 rounded up to a multiple of 8 in [8, 32], tokens."""
    return min(max(-(-num_tokens // 512) * 8, 8), 32)


def with_anchors(layout: Layout, num_tokens: int) -> Layout:
    """As many anchors as a tenth of the bytes, a multiple of 8 in [8, 256]."""
    anchor = layout.head_dim + 2 if layout.lean else layout.head_dim * layout.itemsize + 2
    share = 0.1 * layout.theta * int(full_bytes(layout, num_tokens))
    extra = int(min(max(share / (2 * layout.kv_heads * anchor) // 8 * 8, 8), 256))
    layout = layout._replace(extra=_at_most(extra, layout, num_tokens), bits=layout.bits[:2])
    while layout.extra > 8 and free_bytes(layout, num_tokens) < 0:
        layout = layout._replace(extra=max(layout.extra - 8, 8))
    return layout


def _at_most(extra: int, layout: Layout, num_tokens: int) -> int:
    return min(extra, max(num_tokens - layout.window, 0))


def with_widths(layout: Layout, num_tokens: int, ladder: tuple[int, ...]) -> Layout:
    """The widest pair of neighbours of `ladder` that the bytes can fill, then more anchors."""
    layout = layout._replace(
        extra=_at_most(layout.extra, layout, num_tokens), bits=tuple(ladder[:2])
    )
    if not ladder:
        return layout
    chosen = layout
    for i in range(1, len(ladder)):
        pair = layout._replace(bits=tuple(ladder[i : i + 2]))
        if _fills(pair, num_tokens):
            chosen = pair
    widest = layout._replace(bits=tuple(ladder[-1:]))
    if not _fills(widest, num_tokens):
        return chosen
    low, high = layout.extra, num_tokens - layout.window
    while low < high:  # the most anchors that still leave every side its widest residual
        middle = (low + high + 1) // 2
        more = _fills(widest._replace(extra=middle), num_tokens)
        low, high = (middle, high) if more else (low, middle - 1)
    return widest._replace(extra=low)


def _fills(layout: Layout, num_tokens: int) -> bool:
    """Whether every side can have a residual of the narrowest width."""
    sides = int(competing(layout, num_tokens)) * 2 * layout.kv_heads
    cost = residual_bytes(layout, layout.bits[0])
    return free_bytes(layout, num_tokens) >= sides * cost


def spread(
    layout: Layout, num_tokens: int, ladder: tuple[int, ...], demand: np.ndarray, steps: int = 4
) -> list[float]:
    """A keep ratio for every layer, by the error that each byte would remove anywhere.

    Args:
        layout: of every layer before the spread; its theta is the mean, its base is kept.
        num_tokens: of the longest row.
        ladder: residual widths, narrow first.
        demand: f64[L, J], token-sides of each layer whose utility is about 2^(j / 2), up to a
            common factor.
        steps: shares of an equal layer's residual bytes that move as one: layers with equally many
            have one shape, and one compilation.

    Returns:
        L ratios; the bytes that they buy are together at most those of L equal layers.
    """
    layers, width = demand.shape
    free = max(free_bytes(layout, num_tokens), 0.0)
    costs = [0, *(residual_bytes(layout, bits) for bits in ladder)]
    left = [1.0, *(DISTORTION[bits - 1] for bits in ladder)]
    rates, prices = [], []
    for i in range(len(ladder)):  # a step up the ladder for every side: its gain and its bytes
        step, gain = costs[i + 1] - costs[i], left[i] - left[i + 1]
        rates.append(np.broadcast_to(np.log2(gain / step) + np.arange(width) / 2, demand.shape))
        prices.append(demand * step)
    best = np.argsort(-np.stack(rates, 1).ravel(), kind="stable")
    price = np.stack(prices, 1).ravel()[best]  # [L, steps, J]
    owner = np.repeat(np.arange(layers), len(ladder) * width)[best]
    before = np.cumsum(price) - price
    bought = np.bincount(owner, np.clip(layers * free - before, 0, price), layers)
    if not bought.sum():  # nothing to gain anywhere
        bought = np.ones(layers)
    shares = largest_remainder(bought / bought.sum() * layers * steps, layers * steps)
    base, full = int(base_bytes(layout, num_tokens)), int(full_bytes(layout, num_tokens))
    # Half a byte: a quotient that rounds down must not cost a residual.
    return [(base + math.floor(free * share / steps) + 0.5) / full for share in shares]
