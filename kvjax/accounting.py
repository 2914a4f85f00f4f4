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


def _live(leaf: Leaf) -> np.ndarray:
    """Live bytes of one array for each row: int64 [B]."""
    batch = leaf.value.shape[0]
    if leaf.valid is None:
        return np.full(batch, _size(leaf) // batch, np.int64)
    slot = leaf.axes.index("slot")
    slots = leaf.value.shape[slot]
    valid = np.asarray(leaf.valid, np.int64)
    entries = -(-valid * slots // (leaf.spans or slots))
    counted = 1 if valid.ndim == 1 else leaf.value.shape[leaf.axes.index("kv_head")]
    entry = _size(leaf) // (batch * slots * counted)
    return entries.reshape(batch, -1).sum(1) * entry


def live_bytes(caches: Any) -> LiveBytes:
    """Bytes of the valid entries of each row.

    Args:
        caches: a layer's cache or any nest of them, with real arrays.

    Returns:
        int64 [B] by role.
    """
    total: dict[str, Any] = dict.fromkeys(ROLES, np.int64(0))
    for leaf in walk(caches, counts=True):
        total[leaf.role] = total[leaf.role] + _live(leaf)
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


def solve(method: Method, target_bytes: float, shape: PromptShape) -> Method:
    """The setting of a method with the most bytes that do not exceed a target.

    Args:
        method: its other hyperparameters are kept.
        target_bytes: live body and metadata bytes of one row and layer.
        shape: of the prompt.

    Returns:
        The method with its knob set: tokens, theta, or the nearest of its discrete points below.

    Raises:
        UnreachableBytes: if the smallest setting costs more, or the largest less (beyond
            max(2 %, one token per KV head)) than the target; it carries the nearest setting.
    """
    if hasattr(method, "points"):
        points = sorted(method.points(), key=lambda m: m.layer_bytes(shape))
        within = [m for m in points if m.layer_bytes(shape) <= target_bytes]
        found = within[-1] if within else points[0]
    elif hasattr(method, "fit"):
        found = method.fit(target_bytes, shape)
    else:
        found = method
    reached = found.layer_bytes(shape)
    slack = max(0.02 * target_bytes, 4 * shape.kv_heads * shape.head_dim * shape.itemsize // 2)
    if reached > target_bytes or (reached < target_bytes - slack and not hasattr(method, "points")):
        raise UnreachableBytes(
            f"{_name(method)} cannot be stored in {target_bytes:.0f} bytes a layer for"
            f" {shape.num_tokens} tokens, {shape.kv_heads} KV heads, head_dim {shape.head_dim}:"
            f" the nearest it reaches is {reached} bytes"
            f" ({shape.full_bytes / reached:.2f}x of the full cache).",
            found,
        )
    return found


def _name(method: Method) -> str:
    return getattr(method, "name", type(method).__name__)
