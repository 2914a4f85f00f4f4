"""Exact bytes of a cache, read off the pytree; a method's setting for a byte budget."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from kvjax.pytree import BODY, METADATA, ROLES, TAIL, Leaf, walk
from kvjax.types import Method, PromptShape


class CacheBytes(NamedTuple):
    """Allocated bytes of all rows and layers, by role."""

    body: int
    tail: int
    metadata: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class LiveBytes(NamedTuple):
    """Bytes of a row's own valid entries, summed over layers: int64 [B] by role."""

    body: np.ndarray
    tail: np.ndarray
    metadata: np.ndarray

    @property
    def stored(self) -> np.ndarray:
        """What a compression ratio counts: body and metadata."""
        return self.body + self.metadata


class UnreachableBytes(ValueError):
    """A byte target that no setting of a method meets; `nearest` is the closest setting."""

    def __init__(self, message: str, nearest: Method):
        super().__init__(message)
        self.nearest = nearest


def _size(leaf: Leaf) -> int:
    return math.prod(leaf.value.shape) * np.dtype(leaf.value.dtype).itemsize


def cache_bytes(caches: Any) -> CacheBytes:
    """Allocated bytes of a cache: the sum of nbytes of its arrays.

    Args:
        caches: a layer's cache or any nest of them; arrays or ShapeDtypeStructs.

    Returns:
        Bytes by role.
    """
    total = dict.fromkeys(ROLES, 0)
    for leaf in walk(caches):
        total[leaf.role] += _size(leaf)
    return CacheBytes(total[BODY], total[TAIL], total[METADATA])


def _live(leaf: Leaf, page: int | None = None) -> np.ndarray:
    """Live bytes of one array for each row: int64 [B] (0 for what belongs to no row)."""
    if leaf.axes[0] == "page":
        if leaf.valid is None:
            return np.int64(0)
        pages, slots = leaf.value.shape[0], leaf.value.shape[leaf.axes.index("slot")]
        tokens = _rounded(np.asarray(leaf.valid, np.int64), page or slots)
        return tokens * (_size(leaf) // (pages * slots))
    batch = leaf.value.shape[0]
    if leaf.valid is None:
        return np.full(batch, _size(leaf) // batch, np.int64)
    slot = leaf.axes.index("slot")
    slots = leaf.value.shape[slot]
    valid = _rounded(np.asarray(leaf.valid, np.int64), page or 1)
    entries = -(-valid * slots // (leaf.spans or slots))
    counted = 1 if valid.ndim == 1 else valid.shape[1]
    entry = _size(leaf) // (batch * slots * counted)
    return entries.reshape(batch, -1).sum(1) * entry


def _rounded(tokens: np.ndarray, page: int) -> np.ndarray:
    return -(-tokens // page) * page


def live_bytes(caches: Any, page: int | None = None) -> LiveBytes:
    """Bytes of the valid entries of each row.

    Args:
        caches: a layer's cache or any nest of them, with real arrays.
        page: round the tokens of every KV head (or row) up to whole pages of so many tokens, as a
            paged allocator would have to; 1 counts tokens alone. None: as the cache stores them.

    Returns:
        int64 [B] by role.
    """
    total: dict[str, Any] = dict.fromkeys(ROLES, np.int64(0))
    for leaf in walk(caches, counts=True):
        total[leaf.role] = total[leaf.role] + _live(leaf, page)
    return LiveBytes(total[BODY], total[TAIL], total[METADATA])


def components(caches: Any) -> dict[str, dict[str, int]]:
    """Allocated and live bytes of every array of a cache, over all rows.

    Args:
        caches: one layer's cache.

    Returns:
        {path: {"role", "allocated", "live"}}.
    """
    rows: dict[str, dict] = defaultdict(dict)
    for leaf in walk(caches, counts=True):
        rows[leaf.path.lstrip(".")] = {
            "role": leaf.role,
            "allocated": _size(leaf),
            "live": int(_live(leaf).sum()),
        }
    return dict(rows)


def compression_ratio(caches: Any, shape: PromptShape, num_tokens: np.ndarray) -> np.ndarray:
    """Full bfloat16 bytes of each row's real prompt over its live body and metadata bytes.

    Args:
        caches: the layers' caches, a sequence.
        shape: of the layers (its num_tokens is not read).
        num_tokens: int[B], real prompt tokens of each row.

    Returns:
        f64[B], >= 1 when the cache is smaller.
    """
    full = np.array([shape._replace(num_tokens=int(n)).full_bytes for n in num_tokens])
    return full * len(caches) / live_bytes(caches).stored


def layer_bytes(method: Method, shape: PromptShape, num_layers: int = 1) -> float:
    """Live body and metadata bytes of one row after `compress`, a layer, averaged over layers.

    Args:
        method: any; its `resolve` and `for_layer` are applied.
        shape: of the prompt.
        num_layers: layers of the model (a method may treat them differently).
    """
    if hasattr(method, "resolve"):
        method = method.resolve(shape)
    layers = (method.for_layer(layer, num_layers) for layer in range(num_layers))
    return sum(layer.layer_bytes(shape) for layer in layers) / num_layers


class Budget(NamedTuple):
    """How much of a prompt may be stored: exactly one of the four."""

    tokens: int | None = None  # kept per KV head and layer; evictors only
    ratio: float | None = None  # full bfloat16 bytes over stored bytes, 1 = nothing saved
    bytes: float | None = None  # a row and layer
    bits_per_value: float | None = None  # stored bits over the elements of K and V

    def check(self) -> None:
        """Refuse a budget in no unit or in several.

        Raises:
            ValueError: unless exactly one is given and it is positive.
        """
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if len(given) != 1 or not min(given.values()) > 0:
            raise ValueError(
                f"budget {given or 'nothing'} must be exactly one positive value of"
                f" {', '.join(self._fields)}."
            )

    def target_bytes(self, shape: PromptShape) -> float:
        """Bytes of a row and layer.

        Raises:
            ValueError: see `check`; for a budget in tokens.
        """
        self.check()
        if self.ratio is not None:
            return shape.full_bytes / self.ratio
        if self.bits_per_value is not None:
            return shape.full_bytes * self.bits_per_value / 16
        if self.bytes is not None:
            return self.bytes
        raise ValueError(f"tokens={self.tokens} has no bytes of its own: they are the method's.")


def within(method: Method, budget: Budget, shape: PromptShape, num_layers: int = 1) -> Method:
    """A method set to a budget, in whichever unit: tokens of an evictor, or solved bytes.

    Raises:
        ValueError: for a budget in tokens of a method that keeps every token, or for several.
        UnreachableBytes: see `solve`.
    """
    budget.check()
    if budget.tokens is None:
        return solve(method, budget.target_bytes(shape), shape, num_layers)
    if not hasattr(method, "with_budget"):
        raise ValueError(
            f"{_name(method)} keeps every token: give ratio, bytes or bits_per_value, not"
            f" tokens={budget.tokens}."
        )
    return method.with_budget(budget.tokens)


def solve(method: Method, target_bytes: float, shape: PromptShape, num_layers: int = 1) -> Method:
    """The setting of a method with the most bytes that do not exceed a target.

    Args:
        method: its other hyperparameters are kept.
        target_bytes: live body and metadata bytes of one row and layer, averaged over layers.
        shape: of the prompt.
        num_layers: layers of the model.

    Returns:
        The method with its knob set: tokens, theta, or the nearest of its discrete points below.

    Raises:
        UnreachableBytes: if the smallest setting costs more, or the largest less (beyond
            max(2 %, one token per KV head)) than the target; it carries the nearest setting.
    """

    def cost(candidate):
        return layer_bytes(candidate, shape, num_layers)

    if hasattr(method, "points"):
        points = sorted(method.points(), key=cost)
        affordable = [point for point in points if cost(point) <= target_bytes]
        found = affordable[-1] if affordable else points[0]
    elif hasattr(method, "fit"):
        found = method.fit(target_bytes, shape)
        if hasattr(found, "with_budget"):
            # Layers with budgets of their own: where a quantizer codes whole blocks, they may cost
            # more than as many layers alike.
            while cost(found) > target_bytes and found.budget > found.smallest:
                found = found.with_budget(found.budget - 1)
    else:
        found = method
    reached = cost(found)
    slack = max(0.02 * target_bytes, 4 * shape.kv_heads * shape.head_dim * shape.itemsize // 2)
    if reached > target_bytes or (reached < target_bytes - slack and not hasattr(method, "points")):
        raise UnreachableBytes(
            f"{_name(method)} cannot be stored in {target_bytes:.0f} bytes a layer for"
            f" {shape.num_tokens} tokens, {shape.kv_heads} KV heads, head_dim {shape.head_dim}:"
            f" the nearest it reaches is {reached:.0f} bytes"
            f" ({shape.full_bytes / reached:.2f}x of the full cache).",
            found,
        )
    return found


def _name(method: Method) -> str:
    return getattr(method, "name", type(method).__name__)
