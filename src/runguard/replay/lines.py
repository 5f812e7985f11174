"""Lines of files of any size, plain or gzipped: one at a time, each with where it began; what is too long is skipped and told."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from runguard.replay.steps import Faults

MAX_LINE: Final = 256 * 1024 * 1024
_PIECE: Final = 1024 * 1024


def lines_of(path: Path, faults: Faults, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines that begin within [start, end): where each begins, and its text. A range is for plain files."""
    with _open(path) as file:
        position = start
        if start:
            file.seek(start - 1)
            position += _skip_line(file) - 1  # the line that began before belongs to the range before
        while end is None or position < end:
            try:
                line = file.readline(MAX_LINE)
            except (EOFError, OSError, zlib.error) as error:
                faults.add(f"{path.name} at byte {position}", f"the file is damaged or cut off here: {error}")
                return
            if not line:
                return
            begins, position = position, position + len(line)
            if len(line) >= MAX_LINE and not line.endswith(b"\n"):
                faults.add(f"{path.name} at byte {begins}", f"a line of more than {MAX_LINE >> 20} MB")
                position += _skip_line(file)
            elif line.strip():
                yield begins, line


def _open(path: Path) -> IO[bytes]:
    file: Any = gzip.open(path, "rb") if is_gzip(path) else path.open("rb")  # noqa: SIM115 - its reader closes it
    return cast("IO[bytes]", file)


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def ranges(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """A plain file in parts of about so many bytes; each line belongs to the part in which it begins."""
    total = path.stat().st_size
    for start in range(0, total, size):
        yield start, min(start + size, total)


def _skip_line(file: IO[bytes]) -> int:
    skipped = 0
    while piece := file.readline(_PIECE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
