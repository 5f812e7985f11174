"""Names come from models and users: what would move a terminal's cursor or colour its text is shown, not obeyed."""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(value: _T) -> _T:
    """The same value with every control character written out, tabs and line ends aside; also inside of lists, tables and dataclasses."""
    return _printable(value)  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", value)
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_printable(entry) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _printable(getattr(value, field.name)) for field in fields(value)})
    return value
