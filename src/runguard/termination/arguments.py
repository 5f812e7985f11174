"""Checks of constructor arguments: an invalid value is rejected at once, with the name of the argument."""

import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from runguard.core.errors import PolicyError


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise PolicyError(f"{name} = {value!r}: must be a non-empty string")
    return value


def flag_of(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{name} = {value!r}: give True or False")
    return value


def seconds_of(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name} = {value!r}: must be a number of seconds")
    if not math.isfinite(value) or not 0 < value <= 10**9:
        raise PolicyError(f"{name} = {value!r}: must be greater than 0 and at most a billion seconds")
    return value


def names_of(value: object, name: str) -> tuple[str, ...] | None:
    """Return the authors as a tuple; None means all."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise PolicyError(f"{name} = {value!r}: must be the name of an author or a list of names; omit it for all")
    ordered: Iterable[Any] = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    return tuple(dict.fromkeys(text_of(one, f"{name}.{position}") for position, one in enumerate(ordered)))


# ---- objects named by their import path -----------------------------------------------------------------------------


def import_path(thing: Any, name: str) -> str:
    """Return ``module:qualname`` of an importable object."""
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
        raise PolicyError(f"{name} = {path!r}: the module has no such name")
    return found


def _found(path: str) -> Any:
    module, _, qualname = path.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
