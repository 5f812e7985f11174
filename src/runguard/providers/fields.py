"""Reads a field of any object by its name: of dicts, pydantic models, anything else.

Pydantic models keep their values in two plain dicts. Reading those takes a tenth of the time of ``getattr``, above all
for a missing field.
"""

from collections.abc import Callable, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

_KINDS: Final = 512  # classes remembered
_NOTHING: Final[dict[str, Any]] = {}  # never written to
_ATOMS: Final = (
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    list,
    tuple,
    set,
    frozenset,
    type,
    FunctionType,
    MethodType,
    ModuleType,
    type(None),
)
_ways: dict[type, Callable[[Any], Any]] = {}
_without_private: set[type] = set()  # classes known to keep nothing private


def fields(value: Any) -> Any:
    """Something with ``get(name)`` that gives None for what is not there.

    An object's own properties are asked, one by one.
    """
    kind = type(value)
    if kind is dict:
        return value
    way = _ways.get(kind)
    if way is _model:  # most of what is read, so without another call
        try:
            extra = value.__pydantic_extra__
        except AttributeError:  # made without its constructor
            extra = None
        # libraries keep there what a provider added to its API
        return {**value.__dict__, **extra} if extra else value.__dict__
    return (way or _learn(kind))(value)


def _learn(kind: type) -> Callable[[Any], Any]:
    """How objects of a class are asked: found out once, because answers are of few classes."""
    way: Callable[[Any], Any]
    if issubclass(kind, _ATOMS):
        way = _empty
    elif issubclass(kind, dict):
        way = dict.copy  # a subclass may have a ``get`` of its own
    elif issubclass(kind, Mapping):
        way = dict
    elif _is_model(kind):
        way = _model
    else:
        way = AttributeReader
    if len(_ways) >= _KINDS:  # so many classes are made on the fly, and none of them is worth keeping
        _ways.clear()
        _without_private.clear()
    _ways[kind] = way
    if way is _empty or (way is _model and not getattr(kind, "__private_attributes__", None)):
        _without_private.add(kind)
    return way


def _is_model(kind: type) -> bool:
    return any("__pydantic_extra__" in vars(base) and "__pydantic_private__" in vars(base) for base in kind.__mro__)


def _empty(_: Any) -> dict[str, Any]:
    return _NOTHING


def _model(value: Any) -> Any:
    return fields(value)  # whose class is known by now


class AttributeReader:
    """An object whose class may answer with code of its own, which may fail."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, name: str) -> Any:
        try:
            return getattr(self._value, name, None)
        except Exception:
            return None


def private(value: Any, name: str) -> Any:
    """A private attribute of a pydantic object, or a field of any other object."""
    kind = type(value)
    if kind in _without_private:  # a lookup that fails is slow
        return None
    if _ways.get(kind) is not _model:
        return fields(value).get(name)
    try:
        kept = value.__pydantic_private__
    except AttributeError:
        return None
    return kept.get(name) if type(kept) is dict else None


def attributes(value: Any) -> dict[Any, Any]:
    """What an object holds, without running any code of its own: for walking through arguments that are not ours."""
    kind = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    if issubclass(kind, dict):
        return dict.copy(value)
    if issubclass(kind, _ATOMS):
        return _NOTHING
    if (_ways.get(kind) or _learn(kind)) is _model:
        return fields(value)  # type: ignore[no-any-return]
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return _slots(value)
    return (
        {name: entry for name, entry in held.items() if type(name) is str and not name.startswith("_")}
        if type(held) is dict
        else _NOTHING
    )


def _slots(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if type(names) is str else names if type(names) is tuple or type(names) is list else ():
            try:
                found[name] = object.__getattribute__(value, name)
            except (AttributeError, TypeError):
                continue
    return found


def items(value: Any) -> Any:
    """A list or tuple as it is, anything else as an empty one; by its real class, which a mock cannot
    fake.
    """
    kind = type(value)
    return value if kind is list or kind is tuple or issubclass(kind, (list, tuple)) else ()
