"""Attributes of any object, read without running its code: an address in a repr would make equal things differ."""

from collections.abc import Iterable
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

_READ: Final = 256  # attributes of one class or one object
_CLASSES_KEPT: Final = 256
_places: Final[dict[type, list[tuple[str, Any]]]] = {}  # by class: where its objects keep their attributes


def stored_attributes(item: Any) -> Iterable[tuple[str, Any]]:
    """Names and values in the dict and the slots of an object."""
    kind = type(item)
    places = _places.get(kind)
    if places is None:
        if len(_places) >= _CLASSES_KEPT:
            _places.clear()
        places = _places[kind] = _places_of(kind)
    for name, found in places:
        if name == "__dict__":
            held = found.__get__(item)
            if type(held) is dict:
                yield from [entry for entry in list(held.items())[:_READ] if type(entry[0]) is str]
        else:
            try:
                yield name, found.__get__(item)
            except AttributeError:  # a slot without a value
                continue


def _places_of(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, found)
        for base in kind.__mro__
        for name, found in list(vars(base).items())[:_READ]
        if type(found) is MemberDescriptorType or (type(found) is GetSetDescriptorType and name == "__dict__")
    ]
