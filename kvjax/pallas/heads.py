"""Ops over a mesh: each device runs a kernel on its own rows and KV heads."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

RULES: Mapping[str, str] = {"batch": "data", "kv_head": "model", "head": "model"}


def on_mesh(op: Callable[..., Any], axes: tuple[Any, Any] | None) -> Callable[..., Any]:
    """The op, sharded over the mesh of `jax.set_mesh` where there is one that the rules name.

    Args:
        op: a kernel.
        axes: as `shard_over_heads`; None leaves the op as it is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    named = set(mesh.axis_names) & set(RULES.values())
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if named else {}
    if axes is None or not named or any(kinds[name] == AxisType.Manual for name in named):
        return op
    return shard_over_heads(op, mesh, axes)


def shard_over_heads(
    op: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    axes: tuple[Any, Any],
    rules: Mapping[str, str] = RULES,
) -> Callable[..., Any]:
    """An op of `kvjax.pallas`, run by each device over its own rows and KV heads.

    The partitioner cannot look into a kernel: without this it gathers all heads on every device.
    Query heads and KV heads are cut alike, or not at all where the mesh does not divide the KV
    heads. There is no communication: a KV head's attention is its own.

    Args:
        op: of arrays (or tuples of them), in and out.
        mesh: of `sharding.make_mesh`.
        axes: `AXES` of the op's api: for each argument, and for each output, the names of the
            leading axes of an array ("batch", "kv_head", "head", another name for one that stays
            whole), or a tuple of such with the argument's structure, or None for no array.
        rules: axis name to mesh axis.

    Returns:
        The same function of global arrays.
    """
    inputs, outputs = axes

    def is_names(x: Any) -> bool:
        return isinstance(x, tuple) and all(isinstance(name, str) for name in x)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        sizes: dict[str, list[int]] = {}

        def note(names, x):
            for name, size in zip(names, x.shape, strict=False):
                sizes.setdefault(name, []).append(size)

        def pairs(names, tree):
            if is_names(names):
                yield from ((names, x) for x in jax.tree.leaves(tree))
            elif names is not None and tree is not None:
                for own, child in zip(names, tree, strict=True):
                    yield from pairs(own, child)

        for names, x in pairs(inputs, arguments):
            note(names, x)
        cut = {
            name: rules[name]
            for name, found in sizes.items()
            if name in rules
            and rules[name] in mesh.shape
            and not any(size % mesh.shape[rules[name]] for size in found)
        }
        if not {"head", "kv_head"} & set(sizes) <= set(cut):
            cut = {name: axis for name, axis in cut.items() if name not in ("head", "kv_head")}

        def specs(names, tree):
            if is_names(names):
                part = PartitionSpec(*(cut.get(name) for name in names))
                return jax.tree.map(lambda _: part, tree)
            if names is None or tree is None:
                return None
            children = [specs(own, child) for own, child in zip(names, tree, strict=True)]
            return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)

        out = tuple(PartitionSpec(*(cut.get(name) for name in names)) for names in outputs)
        return jax.shard_map(
            functools.partial(op, **keywords), mesh=mesh, in_specs=specs(inputs, arguments),
            out_specs=out if len(out) > 1 else out[0], check_vma=False,
        )(*arguments)  # fmt: skip

    return wrapped
