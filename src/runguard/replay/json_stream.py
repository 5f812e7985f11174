"""Read a JSON document of any size with one small value at a time in memory."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TextIO

from runguard.replay.size_limits import MAX_RECORD, check_size

_PIECE: Final = 256 * 1024
_LONGEST_NUMBER: Final = 400
_NO_SPACE: Final = re.compile(r"[^ \t\r\n]")


class TruncatedError(ValueError):
    """The document ends, or stops being JSON, in the middle."""


class JsonStream:
    """``members`` and ``elements`` iterate an object or an array; ``value`` reads the whole next value."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at, self._done = "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is not white space, "" at the end."""
        while True:
            if (found := _NO_SPACE.search(self._text, self._at)) is not None:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more():
                return ""

    def take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise TruncatedError(
                f"'{wanted}' expected, {self.peek()!r} found" if self.peek() else "the document ends in the middle"
            )
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                check_size(self._text, self._at)
            except ValueError as error:
                raise TruncatedError(str(error)) from None
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError as error:
                if not self._more(len(self._text) - self._at):
                    raise TruncatedError(str(error)) from None
                continue
            except RecursionError:
                raise TruncatedError("nested too deeply") from None
            if len(self._text) - end < _LONGEST_NUMBER and not isinstance(value, str | list | dict) and self._more():
                continue  # a number may continue in the next piece
            self._at = end
            return value

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads the value of each before the next."""
        self.take("{")
        while self.peek() != "}":
            key = self.value()
            self.take(":")
            if not isinstance(key, str):
                raise TruncatedError("a key that is not a string")
            yield key
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "}":
                self.take("}")
        self._at += 1

    def elements(self) -> Iterator[None]:
        """Yield once per element of an array; the caller reads the element before the next."""
        self.take("[")
        while self.peek() != "]":
            yield None
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "]":
                self.take("]")
        self._at += 1

    def _more(self, at_least: int = 0) -> bool:
        """Read more text; a value that did not fit is parsed again only after its text has doubled."""
        if self._done:
            return False
        piece = self._file.read(min(max(_PIECE, at_least), MAX_RECORD))
        self._done = not piece
        if piece:
            self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)
