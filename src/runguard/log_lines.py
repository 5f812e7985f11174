"""Every line of the log on one line: names of users, sessions, tools and models, and texts of exceptions, are foreign.

One filter on the logger ``runguard``, which all modules use. What would end a line, move a terminal's cursor or turn
its text is written out.
"""

import logging
import traceback
from types import TracebackType
from typing import Any, Final

from runguard.core.decision import printable

_CAUSES_SHOWN: Final = 10
_PLAIN: Final = (int, float, type(None))  # bool is an int; formats such as %d need them as they are


class _Foreign:
    """An object whose text is asked for only when the line is written."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return _text(str, self._value)

    def __repr__(self) -> str:
        return _text(repr, self._value)


class OneLine(logging.Filter):
    """Lets every record pass, with its foreign texts written out."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(_safe(value) for value in record.args)
        elif record.args:
            record.args = {name: _safe(value) for name, value in record.args.items()}
        if record.exc_info and not record.exc_text:
            record.exc_text = _traceback(record.exc_info[1])  # a formatter takes what is there
        return True


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return printable(str(value))
    return value if isinstance(value, _PLAIN) else _Foreign(value)


def _text(write: Any, value: object) -> str:
    try:
        return printable(str(write(value)))
    except Exception:  # a foreign object's own code
        return f"(a {type(value).__name__} without a text)"


def _traceback(error: BaseException | None) -> str:
    """As Python writes it, with the text of each exception on one line."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(parts) < _CAUSES_SHOWN:
        seen.add(id(error))
        parts.append(_one(error, error.__traceback__))
        is_cause = error.__cause__ is not None
        error = error.__cause__ if is_cause else None if error.__suppress_context__ else error.__context__
        if error is not None:
            reason = "The above exception was the direct cause of the following exception:" if is_cause else _DURING
            parts[-1] = f"{reason}\n\n{parts[-1]}"
    return "\n\n".join(reversed(parts))


_DURING: Final = "During handling of the above exception, another exception occurred:"


def _one(error: BaseException, at: TracebackType | None) -> str:
    text = _text(str, error)
    frames = "".join(traceback.format_tb(at))
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    head = f"Traceback (most recent call last):\n{frames}" if frames else ""
    return f"{head}{printable(name)}{f': {text}' if text else ''}"


# Importing this module is all that is needed: policies, monitors, alerts, stores and background threads do, before
# anything is logged.
logging.getLogger("runguard").addFilter(OneLine())
