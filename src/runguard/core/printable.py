"""Names come from models and users: what would move a terminal's cursor, begin a line, or colour or turn its text is
shown, not obeyed.
"""

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(value: _T) -> _T:
    """The same value with every control character written out; also inside of lists, tables and dataclasses."""
    return _printable(value)  # type: ignore[no-any-return]


def printable_lines(text: str) -> str:
    """A text of our own, whose lines are meant as such."""
    return "\n".join(printable(text.split("\n")))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROLS.sub(_written_out, value)
    if isinstance(value, dict):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        made = (_printable(entry) for entry in value)
        return value._make(made) if isinstance(value, tuple) and hasattr(value, "_make") else type(value)(made)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _printable(getattr(value, field.name)) for field in fields(value)})
    return value


def _written_out(found: re.Match[str]) -> str:
    sign = found[0]
    return _SHORT.get(sign) or (f"\\x{ord(sign):02x}" if ord(sign) < 0x100 else f"\\u{ord(sign):04x}")
