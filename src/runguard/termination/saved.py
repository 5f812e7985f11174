"""Convert conditions to plain data and back: ``{"version": 1, "type": "TextMentionTermination", "text": "DONE"}``."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runguard import termination
from runguard.core.errors import PolicyError, nearest
from runguard.termination.arguments import import_path, imported
from runguard.termination.condition import AndTerminationCondition, OrTerminationCondition, TerminationCondition

VERSION: Final = 1
_DEEPEST: Final = 100  # nesting of composites; real conditions are flatter
_HEAD: Final = ("version", "type")


def save(condition: TerminationCondition) -> dict[str, Any]:
    kind = type(condition)
    name = kind.__name__ if _built_in().get(kind.__name__) is kind else import_path(kind, "type")
    data: dict[str, Any] = {"version": VERSION, "type": name}
    if isinstance(condition, OrTerminationCondition | AndTerminationCondition):
        parts = [inner.to_dict() for inner in condition.conditions]
        data["conditions"] = [{key: value for key, value in part.items() if key != "version"} for part in parts]
    else:
        data.update(condition.settings())
    return data


def load(data: Mapping[str, Any]) -> TerminationCondition:
    if isinstance(data, Mapping) and "version" not in data:
        raise PolicyError(f"version: missing; this release writes {VERSION}")
    return _load(data, "", 0)


def _load(data: Any, path: str, depth: int) -> TerminationCondition:
    if not isinstance(data, Mapping):
        raise PolicyError(f"{path.rstrip('.') or 'condition'} = {data!r}: must be a mapping with a type")
    if depth > _DEEPEST:
        raise PolicyError(f"{path.rstrip('.')}: nested too deeply")
    if (version := data.get("version", VERSION)) != VERSION or isinstance(version, bool):
        raise PolicyError(f"{path}version = {version!r}: this release reads version {VERSION}")
    kind = _class_of(data.get("type"), path)
    given = {key: value for key, value in data.items() if key not in _HEAD}
    required, known = _keys_of(kind)
    for key in given:
        if key not in known:
            raise PolicyError(f"{path}{key}: no such setting of {kind.__name__}; {nearest(str(key), known)}")
    for key in required:
        if key not in given:
            raise PolicyError(f"{path}{key}: missing")
    if issubclass(kind, OrTerminationCondition | AndTerminationCondition):
        return kind(*_load_all(given["conditions"], path, depth))
    make = getattr(kind, "from_settings", kind)
    try:
        return make(**given)
    except PolicyError as error:  # with its path
        raise PolicyError(f"{path}{error}") from None


def _load_all(conditions: Any, path: str, depth: int) -> Iterator[TerminationCondition]:
    if not isinstance(conditions, list | tuple) or not conditions:
        raise PolicyError(f"{path}conditions = {conditions!r}: must be a list of conditions")
    for position, inner in enumerate(conditions):
        yield _load(inner, f"{path}conditions.{position}.", depth + 1)


def _class_of(name: Any, path: str) -> type[TerminationCondition]:
    if name is None:
        raise PolicyError(f"{path}type: missing")
    known = _built_in()
    if isinstance(name, str) and ":" in name:
        kind = imported(name, f"{path}type")
        if isinstance(kind, type) and issubclass(kind, TerminationCondition) and not inspect.isabstract(kind):
            return kind
        raise PolicyError(f"{path}type = {name!r}: is not a termination condition")
    if not isinstance(name, str) or name not in known:
        raise PolicyError(f"{path}type = {name!r}: no such condition; {nearest(str(name), known)}")
    return known[name]


def _built_in() -> dict[str, type[TerminationCondition]]:
    found = {name: getattr(termination, name) for name in termination.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if issubclass(kind, TerminationCondition) and not inspect.isabstract(kind)
    }


def _keys_of(kind: type[TerminationCondition]) -> tuple[list[str], list[str]]:
    """Return the required keys, and all allowed keys."""
    if issubclass(kind, OrTerminationCondition | AndTerminationCondition):
        return ["conditions"], ["conditions"]
    named = [
        p for p in inspect.signature(kind).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return [p.name for p in named if p.default is p.empty], [*(p.name for p in named), *getattr(kind, "saved_keys", ())]
