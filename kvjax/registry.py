"""Method names: registered once, looked up by command lines, tests and plots."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_METHODS: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def register(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a method known as `name`.

    Raises:
        ValueError: if the name is taken.
    """

    def add(cls: _Class) -> _Class:
        if name in _METHODS:
            raise ValueError(f"method {name!r} is already {_METHODS[name].__qualname__}.")
        _METHODS[name] = cls
        cls.name = name
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
    """A method by its label: "name", or "name:preset" where the method has presets.

    Args:
        label: such as "snapkv" or "anchorkv:paper_short".
        **overrides: hyperparameters.

    Raises:
        ValueError: for an unknown name, preset or hyperparameter.
    """
    name, _, preset = label.partition(":")
    method = get(name)
    if preset and not hasattr(method, "preset"):
        raise ValueError(f"{name} has no presets, so {label!r} must be {name!r}.")
    known = [field.name for field in dataclasses.fields(method)]
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"{name} has no hyperparameter {unknown}: it has {known}.")
    return method.preset(preset, **overrides) if preset else method(**overrides)


def names() -> list[str]:
    """All registered names, sorted."""
    import kvjax.methods  # noqa: F401

    return sorted(_METHODS)
