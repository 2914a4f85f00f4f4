"""The one way to declare a cache: frozen dataclasses whose arrays carry axis names and a role.

An array field says what its axes are (`array("batch", "kv_head", "slot", "head_dim")`) and what
its bytes are charged to (`role`: body, tail or metadata). Accounting, sharding and reordering of
rows read that; nothing else about a cache has to be registered anywhere.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax

BODY, TAIL, METADATA = "body", "tail", "metadata"
ROLES = (BODY, TAIL, METADATA)

_Class = TypeVar("_Class", bound=type)


def array(
    *axes: str,
    role: str = BODY,
    valid: str | None = None,
    spans: str | None = None,
    default: Any = dataclasses.MISSING,
) -> Any:
    """Declare an array leaf (or a tuple of arrays of one kind).

    Args:
        *axes: name of each axis, from "batch", "kv_head", "pool", "slot", "head_dim" or any other
            word; sharding rules and live-byte counts look them up.
        role: what its bytes are charged to: "body", "tail" or "metadata".
        valid: attribute of the same node (i32[B], i32[B, K] or i32[B, P]) that counts the valid
            tokens of the "slot" axis; without it every entry is live.
        spans: attribute of the same node with the tokens that the whole slot axis covers, where
            an entry holds several (a group's scale, a packed word) or a token several entries;
            live entries are ceil(valid * size / spans).
        default: value where none is given, such as None for an array that may be absent.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r} must be one of {ROLES}.")
    meta = {"axes": axes, "role": role, "valid": valid, "spans": spans}
    return dataclasses.field(default=default, metadata=meta)


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declare a field that is part of the tree's structure: hashable, a change retraces."""
    return dataclasses.field(default=default, metadata={"static": True}, kw_only=True)


@dataclass_transform(frozen_default=True, field_specifiers=(array, static))
def pytree(cls: _Class) -> _Class:
    """Make `cls` a frozen dataclass that JAX knows as a pytree (fields: arrays, nodes, statics)."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


class Leaf(NamedTuple):
    """One declared array inside a tree of nodes."""

    path: str
    value: Any  # an array or a ShapeDtypeStruct
    axes: tuple[str, ...]
    role: str
    valid: Any  # i32[B], i32[B, K] or None: valid tokens of the slot axis
    spans: int | None  # tokens that the whole slot axis covers, None = one an entry


def walk(tree: Any, path: str = "", counts: bool = False) -> Iterator[Leaf]:
    """Yield every array of `tree` with its declaration.

    Args:
        tree: a @pytree node, or tuples, lists and dicts of them; None is skipped.
        path: prefix of the reported paths.
        counts: also compute `valid` of each leaf, which takes real arrays; else it is None.

    Yields:
        A `Leaf` an array, in declaration order.

    Raises:
        TypeError: for an array that no @pytree node declares: its bytes would have no role.
    """
    if tree is None:
        return
    if isinstance(tree, (list, tuple)):
        for i, child in enumerate(tree):
            yield from walk(child, f"{path}[{i}]", counts)
        return
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from walk(child, f"{path}.{key}", counts)
        return
    if not dataclasses.is_dataclass(tree):
        raise TypeError(f"{path or 'tree'} is a {type(tree).__name__}: not a declared array.")
    for field in dataclasses.fields(tree):
        meta = field.metadata
        if meta.get("static"):
            continue
        child, where = getattr(tree, field.name), f"{path}.{field.name}"
        if "axes" not in meta:
            yield from walk(child, where, counts)
        elif child is not None:
            valid = getattr(tree, meta["valid"]) if counts and meta["valid"] else None
            spans = getattr(tree, meta["spans"]) if meta["spans"] else None
            declared = (meta["axes"], meta["role"])
            if not isinstance(child, tuple):
                yield Leaf(where, child, *declared, valid, spans)
            else:
                for i, part in enumerate(child):
                    own = valid[i] if isinstance(valid, tuple) else valid
                    yield Leaf(f"{where}[{i}]", part, *declared, own, spans)
