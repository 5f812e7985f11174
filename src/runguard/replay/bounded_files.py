"""Read files of any size, plain or gzipped, within limits: line by line, or a JSON document value by value.

A file of 13 MB can unpack to more than a gigabyte, and a line of 60 MB can hold twenty million lists. Readers stop at
these limits and report it as they report any other damage.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from runguard.replay.steps import Faults

MAX_UNPACKED: Final = 1024**3  # bytes of one compressed file, by default
MAX_RECORD: Final = 64 * 1024**2  # bytes of one line, one event or one element of a document
_MAX_VALUES: Final = 4_000_000  # of one record; each takes fifty bytes or more in memory
_SMALL: Final = 4 * 1024**2  # a record of this size cannot hold too many values
_SKIPPED_AT_ONCE: Final = 1024**2  # bytes
_READ_AT_ONCE: Final = 256 * 1024
_EMPTY_LINES: Final = 1_000_000
_LONGEST_NUMBER: Final = 400
_NO_SPACE: Final = re.compile(r"[^ \t\r\n]")
DAMAGED: Final = (OSError, EOFError, zlib.error)  # exceptions from reading a damaged or truncated file


class UnpackedError(OSError):
    """A compressed file is larger than the limit."""


class _Limited(io.RawIOBase):
    """Reads a compressed file up to a limit."""

    def __init__(self, path: Path, limit: int) -> None:
        self._file = gzip.open(path, "rb")  # noqa: SIM115 - closed with this
        self._limit, self._read = limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._read += count
        if self._read > self._limit:
            raise UnpackedError(
                f"it unpacks to more than {size_text(self._limit)}; raise --max-unpacked, or unpack it first"
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: Path, max_unpacked: int = MAX_UNPACKED) -> BinaryIO:
    """Open a file for reading; decompress it if necessary."""
    if not is_gzip(path):
        return path.open("rb")
    return io.BufferedReader(_Limited(path, max_unpacked), _READ_AT_ONCE)


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def load_json(text: str | bytes) -> Any:
    """Parse one record; raise ValueError if it is not JSON, too large or nested too deeply."""
    check_size(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_size(text: str | bytes, start: int = 0) -> None:
    """Raise ValueError for a record that would take too much memory.

    Every value but the first follows a comma, a bracket or a colon.
    """
    size = len(text) - start
    if size > MAX_RECORD:
        raise ValueError(f"a record of more than {size_text(MAX_RECORD)}")
    if size > _SMALL:
        signs: tuple[Any, ...] = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
        if sum(text.count(sign, start) for sign in signs) > _MAX_VALUES:
            raise ValueError(f"a record of more than {_MAX_VALUES:,} values")


def size_text(size: int) -> str:
    """Format a number of bytes."""
    for unit, name in ((1024**3, "GB"), (1024**2, "MB"), (1024, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}" if size % unit == 0 else f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def lines_of(
    path: Path, faults: Faults, start: int = 0, end: int | None = None, max_unpacked: int = MAX_UNPACKED
) -> Iterator[tuple[int, bytes]]:
    """The lines that begin within [start, end): where each begins, and its text. A range is for plain files."""
    position, empty = start, 0
    try:
        with open_bytes(path, max_unpacked) as file:
            if start:
                file.seek(start - 1)
                position += _skip_line(file) - 1  # the line that began before belongs to the range before
            while end is None or position < end:
                line = file.readline(MAX_RECORD)
                if not line:
                    return
                begins, position = position, position + len(line)
                if len(line) >= MAX_RECORD and not line.endswith(b"\n"):
                    faults.add(f"{path.name} at byte {begins}", f"a line of more than {size_text(MAX_RECORD)}")
                    position += _skip_line(file)
                elif line.strip():
                    empty = 0
                    yield begins, line
                elif (empty := empty + 1) > _EMPTY_LINES:
                    faults.add(
                        f"{path.name} at byte {begins}", f"{_EMPTY_LINES:,} empty lines in a row: the rest is left out"
                    )
                    return
    except UnpackedError as error:
        faults.add(f"{path.name} at byte {position}", f"read up to here: {error}")
    except DAMAGED as error:
        faults.add(f"{path.name} at byte {position}", f"the file is damaged or cut off here: {error}")


def ranges(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """A plain file in parts of about so many bytes; each line belongs to the part in which it begins."""
    total = path.stat().st_size
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while piece := file.readline(_SKIPPED_AT_ONCE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


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
        piece = self._file.read(min(max(_READ_AT_ONCE, at_least), MAX_RECORD))
        self._done = not piece
        if piece:
            self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)
