"""An object that is another one of the SDK with more behaviour: of a subclass of its class, with the same state."""

from functools import lru_cache
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_KINDS: Final = 512


@lru_cache(_KINDS)
def _kind(more: Any, kind: Any, slots: tuple[str, ...]) -> Any:
    made = type(kind.__name__, (more, kind), {"__slots__": slots, "__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def sharing(more: type[_T], inner: Any, **own: Any) -> _T:
    """Return an object with the methods of ``more`` before those of ``inner``, which has the same attributes.

    Both see what the other one changes, and ``isinstance`` and private marks hold. ``own``: attributes of this one.
    """
    kind: Any = type(inner)
    wanted: Any = more
    made: Any = object.__new__(_kind(wanted, kind, tuple(own)))
    if hasattr(inner, "__dict__"):
        object.__setattr__(made, "__dict__", inner.__dict__)
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            if name not in ("__dict__", "__weakref__") and hasattr(inner, name):
                object.__setattr__(made, name, getattr(inner, name))
    for name, value in own.items():
        object.__setattr__(made, name, value)
    shared: _T = made
    return shared
