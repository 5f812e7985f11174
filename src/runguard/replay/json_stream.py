"""A JSON document of any size, walked with one small value at a time in memory."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TextIO

from runguard.replay.bounded import MAX_RECORD, check_size

_PIECE: Final = 256 * 1024
_LONGEST_NUMBER: Final = 400
_NO_SPACE: Final = re.compile(r"[^ \t\r\n]")


class CutOffError(ValueError):
    """The document ends, or stops being JSON, in the middle."""


class JsonStream:
    """``members`` and ``elements`` walk into an object or an array; ``value`` takes whatever comes next as a whole."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at, self._done = "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """The next character that is no space, "" at the end."""
        while True:
            if (found := _NO_SPACE.search(self._text, self._at)) is not None:
                self._at = found.start()
                return found[0]
            self._at = len(self._text)
            if not self._more():
                return ""

    def take(self, wanted: str) -> None:
        if self.peek() != wanted:
            raise CutOffError(
                f"'{wanted}' expected, {self.peek()!r} found" if self.peek() else "the document ends in the middle"
            )
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                check_size(self._text, self._at)
            except ValueError as error:
                raise CutOffError(str(error)) from None
            try:
                value, end = self._decode(self._text, self._at)
            except ValueError as error:
                if not self._more(len(self._text) - self._at):
                    raise CutOffError(str(error)) from None
                continue
            except RecursionError:
                raise CutOffError("nested too deeply") from None
            if len(self._text) - end < _LONGEST_NUMBER and not isinstance(value, str | list | dict) and self._more():
                continue  # a number may go on
            self._at = end
            return value

    def members(self) -> Iterator[str]:
        """The keys of an object; the caller takes the value of each before asking for the next."""
        self.take("{")
        while self.peek() != "}":
            key = self.value()
            self.take(":")
            if not isinstance(key, str):
                raise CutOffError("a key that is not a text")
            yield key
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "}":
                self.take("}")
        self._at += 1

    def elements(self) -> Iterator[None]:
        """One step per element of an array; the caller takes it before asking for the next."""
        self.take("[")
        while self.peek() != "]":
            yield None
            if self.peek() == ",":
                self._at += 1
            elif self.peek() != "]":
                self.take("]")
        self._at += 1

    def _more(self, at_least: int = 0) -> bool:
        """Read on; a value that did not fit is tried again only after its text has doubled."""
        if self._done:
            return False
        piece = self._file.read(min(max(_PIECE, at_least), MAX_RECORD))
        self._done = not piece
        if piece:
            self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)
