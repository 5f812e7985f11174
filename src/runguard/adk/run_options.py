"""Options for one call of a Runner:

``RunConfig(custom_metadata={"runguard": {"labels": {"team": "search"}, "max_usd": 1}})``.
"""

from collections.abc import Mapping
from typing import Any, Final

from runguard.core.decision import printable
from runguard.core.errors import PolicyError
from runguard.core.money import shown, to_count, to_nano

_KNOWN: Final = ("labels", "max_usd", "max_tokens")
_LABELS_KEPT: Final = 64


def run_options(given: Any) -> tuple[dict[str, str], int | None, int | None, str]:
    """Labels, nano-USD, tokens; and an error text when they are invalid, which stops the run before it pays."""
    if given is None:
        return {}, None, None, ""
    try:
        return (*_read(given), "")
    except PolicyError as error:
        return {}, None, None, f"RunConfig.custom_metadata['runguard']: {error}"


def _read(given: Any) -> tuple[dict[str, str], int | None, int | None]:
    if not isinstance(given, Mapping):
        raise PolicyError(f"must be a mapping with {', '.join(_KNOWN)}, not a {type(given).__name__}")
    unknown = [str(name) for name in given if name not in _KNOWN]
    if unknown:
        raise PolicyError(f"{', '.join(unknown)}: unknown option; known: {', '.join(_KNOWN)}")
    labels = given.get("labels") or {}
    if not isinstance(labels, Mapping) or len(labels) > _LABELS_KEPT:
        raise PolicyError(f"labels must be a mapping of at most {_LABELS_KEPT} names to values")
    for name, value in labels.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise PolicyError(f"labels.{printable(str(name))} = {shown(value)}: give a text for each label")
    max_usd, max_tokens = given.get("max_usd"), given.get("max_tokens")
    return (
        {str(name): str(value) for name, value in labels.items()},
        None if max_usd is None else to_nano(max_usd, "max_usd"),
        None if max_tokens is None else to_count(max_tokens, "max_tokens"),
    )
