"""Lines of files of any size, plain or gzipped: one at a time, each with where it began. A line that is too long is
skipped and reported.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from runguard.replay.size_limits import DAMAGED, MAX_RECORD, MAX_UNPACKED, UnpackedError, open_bytes, size_text
from runguard.replay.steps import Faults

_PIECE: Final = 1024 * 1024
_EMPTY_LINES: Final = 1_000_000


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
    while piece := file.readline(_PIECE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
