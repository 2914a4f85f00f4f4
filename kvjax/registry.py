"""Method names: registered once, looked up by command lines, tests and plots."""

import ast
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_METHODS: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def register(name: str, presets: Mapping[str, Mapping[str, Any]] | None = None) -> Callable:
    """Class decorator: make a method known as `name`.

    Args:
        name: of the method.
        presets: named hyperparameters: "paper" (its own paper's), "rethink" (the main
            configuration of LLMkvsys/rethink-kv-compression), "kvpress" (that library's defaults),
            or the method's own words.

    Raises:
        ValueError: if the name is taken.
    """

    def add(cls: _Class) -> _Class:
        if name in _METHODS:
            raise ValueError(f"method {name!r} is already {_METHODS[name].__qualname__}.")
        _METHODS[name] = cls
        cls.name = name
        cls.presets = dict(presets or {})
        return cls

    return add


def get(name: str) -> type:
    """The class of a method.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    import kvjax.methods  # noqa: F401  (registers every method)

    if name not in _METHODS:
        raise ValueError(f"unknown method {name!r}: it must be one of {names()}.")
    return _METHODS[name]


def make(label: str, **overrides: Any) -> Any:
    """A method by its label: "snapkv", or with a preset in either order: "paper:snapkv".

    Args:
        label: a name, "preset:name" or "name:preset"; with hyperparameters, "kivi(k_bits=2)"; or
            two of them, "snapkv+rethink:kivi": evict, then quantize.
        **overrides: hyperparameters (of one method).

    Raises:
        ValueError: for an unknown name, preset or hyperparameter, or a label that does not parse.
    """
    if "+" in label:
        from kvjax.methods.compose import compose

        if overrides or label.count("+") > 1:
            raise ValueError(f"{label!r} must be two labels joined by one +, with no overrides.")
        return compose(*(make(part) for part in label.split("+")))
    label, _, inner = label.partition("(")
    if inner:
        overrides = _arguments(f"{label}({inner}") | overrides
    first, _, second = label.partition(":")
    name, preset = (second, first) if second and second in names() else (first, second)
    method = get(name)
    if preset and preset not in method.presets:
        raise ValueError(f"{name} has no preset {preset!r}: it has {sorted(method.presets)}.")
    known = [field.name for field in dataclasses.fields(method)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"{name} has no hyperparameter {unknown}: it has {known}.")
    return method(**{**method.presets.get(preset, {}), **overrides})


def _arguments(label: str) -> dict[str, Any]:
    """The hyperparameters that a label such as "kivi(k_bits=2, group=32)" writes out."""
    try:
        call = ast.parse(f"f({label.partition('(')[2]}", mode="eval").body
        if call.args:
            raise ValueError
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(f"{label!r} must read like 'kivi(k_bits=2, group=32)'.") from None


def names() -> list[str]:
    """All registered names, sorted."""
    import kvjax.methods  # noqa: F401

    return sorted(_METHODS)
