"""Where a cache lives on a mesh: rules from axis names to mesh axes, nothing method by method.

The declared axes of every array decide: batch over "data", heads and KV heads over "model". An axis
that its mesh axis does not divide stays whole, and so does one that has no rule (the residual slots
that AnchorKV pools over heads, for instance).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: Mapping[str, str] = {"batch": "data", "kv_head": "model", "head": "model"}


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


def shard_over_heads(
    op: Callable[..., Any],
    mesh: Mesh,
    axes: tuple[Any, Any],
    rules: Mapping[str, str] = RULES,
) -> Callable[..., Any]:
    """An op of `kvjax.pallas`, run by each device over its own rows and KV heads.

    The partitioner cannot look into a kernel: without this it gathers all heads on every device.
    Query heads and KV heads are cut alike, or not at all where the mesh does not divide the KV
    heads. There is no communication: a KV head's attention is its own.

    Args:
        op: of arrays (or tuples of them), in and out.
        mesh: of `make_mesh`.
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

    def wrapped(*arguments: Any) -> Any:
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
            op, mesh=mesh, in_specs=specs(inputs, arguments),
            out_specs=out if len(out) > 1 else out[0], check_vma=False,
        )(*arguments)  # fmt: skip

    return wrapped
