"""Where a cache lives on a mesh: rules from axis names to mesh axes, nothing method by method.

The declared axes of every array decide: batch over "data", heads and KV heads over "model". An axis
that its mesh axis does not divide stays whole, and so does one that has no rule (the residual slots
that AnchorKV pools over heads, for instance).

Kernels are opaque to the partitioner. Under `jax.set_mesh(mesh)` every op of `kvjax.pallas` runs
its kernel in a `shard_map` over rows and KV heads (`pallas.heads`); XLA's form needs none.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.pallas.heads import RULES as RULES
from kvjax.pallas.heads import shard_over_heads as shard_over_heads


def make_mesh(data: int, model: int) -> Mesh:
    """A mesh ("data", "model") whose axes the compiler partitions by itself.

    Args:
        data: devices that share out the rows.
        model: devices that share out the heads (tensor parallelism).

    Raises:
        ValueError: if there are fewer devices.
    """
    if data * model > jax.device_count():
        raise ValueError(
            f"data={data} x model={model} needs {data * model} devices:"
            f" there are {jax.device_count()}."
        )
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules=RULES) -> PartitionSpec:
    """The partition of one array: each axis by its rule, where the mesh axis divides it.

    Args:
        axes: names, as declared with `pytree.array`.
        shape: of the array.
        mesh: its axis names are the rules' values.
        rules: axis name to mesh axis.
    """
    parts = []
    for name, size in zip(axes, shape, strict=True):
        part = rules.get(name)
        parts.append(part if part in mesh.shape and size % mesh.shape[part] == 0 else None)
    return PartitionSpec(*parts)


def shardings(tree: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """The sharding of every array of a tree of declared nodes.

    Args:
        tree: a cache, a `PromptKV`, or tuples of them; arrays or ShapeDtypeStructs.
        mesh: of `make_mesh`.
        rules: axis name to mesh axis.

    Returns:
        The same tree with a NamedSharding for every array.
    """
    if tree is None:
        return None
    if isinstance(tree, (list, tuple)):
        return type(tree)(shardings(child, mesh, rules) for child in tree)
    changes = {}
    for field in dataclasses.fields(tree):
        meta, child = field.metadata, getattr(tree, field.name)
        if meta.get("static") or child is None:
            continue
        if "axes" not in meta:
            changes[field.name] = shardings(child, mesh, rules)
        elif isinstance(child, tuple):
            changes[field.name] = tuple(_place(meta["axes"], x, mesh, rules) for x in child)
        else:
            changes[field.name] = _place(meta["axes"], child, mesh, rules)
    return dataclasses.replace(tree, **changes)


def _place(axes: tuple[str, ...], x: Any, mesh: Mesh, rules: Mapping[str, str]) -> NamedSharding:
    return NamedSharding(mesh, spec(axes, x.shape, mesh, rules))


def shard(tree: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """Move a tree of declared nodes to its shardings."""
    return jax.device_put(tree, shardings(tree, mesh, rules))
