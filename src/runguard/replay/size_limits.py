"""Size limits of sources: bytes of an unpacked file, bytes and values of one record.

A file of 13 MB can unpack to more than a gigabyte, and a line of 60 MB can hold twenty million lists. Readers stop at
these limits and report it as they report any other damage.
"""

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final

MAX_UNPACKED: Final = 1024**3  # bytes of one compressed file, by default
MAX_RECORD: Final = 64 * 1024**2  # bytes of one line, one event or one element of a document
_MAX_VALUES: Final = 4_000_000  # of one record; each takes fifty bytes or more in memory
_SMALL: Final = 4 * 1024**2  # a record of this size cannot hold too many values

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
    return io.BufferedReader(_Limited(path, max_unpacked), 256 * 1024)


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
