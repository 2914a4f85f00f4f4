"""Method names: registered once, looked up by command lines, tests and plots."""

from collections.abc import Callable
from typing import TypeVar

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


def names() -> list[str]:
    """All registered names, sorted."""
    import kvjax.methods  # noqa: F401

    return sorted(_METHODS)
