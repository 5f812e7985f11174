"""What constructors check: whatever cannot be meant fails at once, with the name of the argument."""

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from runguard.core.exceptions import PolicyError


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise PolicyError(f"{name} = {value!r}: give a text that is not empty")
    return value


def flag_of(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{name} = {value!r}: give True or False")
    return value


def seconds_of(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name} = {value!r}: give a number of seconds")
    if not math.isfinite(value) or not 0 < value <= 10**9:
        raise PolicyError(f"{name} = {value!r}: must be more than 0 and at most a billion seconds")
    return value


def names_of(value: object, name: str) -> tuple[str, ...] | None:
    """An author, several, or None for all."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise PolicyError(f"{name} = {value!r}: give the name of an author or a list of names; leave it out for all")
    ordered: Iterable[Any] = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    return tuple(dict.fromkeys(text_of(one, f"{name}.{position}") for position, one in enumerate(ordered)))


# ---- things that are named by where they are imported from ----------------------------------------------------------


def import_path(thing: Any, name: str) -> str:
    """``module:qualname``, for what can be found there again."""
    module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    path = f"{module}:{qualname}"
    if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname or _found(path) is not thing:
        raise PolicyError(
            f"{name} = {thing!r}: cannot be saved, because it cannot be imported by name; define it at the top "
            "of a module"
        )
    return path


def imported(path: object, name: str) -> Any:
    module, colon, qualname = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not colon or not qualname:
        raise PolicyError(f"{name} = {path!r}: give 'module:name'")
    try:
        found = _found(str(path))
    except Exception as error:  # importing runs code, which may raise anything
        raise PolicyError(
            f"{name} = {path!r}: its module cannot be imported: {type(error).__name__}: {error}"
        ) from None
    if found is None:
        raise PolicyError(f"{name} = {path!r}: there is no such name in that module")
    return found


def _found(path: str) -> Any:
    module, _, qualname = path.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
