"""Copies plain values at the speed of C: texts, numbers, and the lists and dicts that hold them.

A copy serves to compare values and to measure them. Its length is about that of the value's JSON. The work is bounded,
and no code of the value runs: a value that is large, very deep or cyclic, or that holds a type of its own, has no copy.
"""

from pickle import Pickler, loads
from typing import Any, Final, NoReturn

_MOST_BYTES: Final = 1_048_576
_MOST_FRAMED: Final = 262_144  # of them, in frames: a frame may consist of thousands of tiny values
_HEAD: Final = 12  # bytes of every copy, beside those of its value
_FRAME: Final = 2 * 65_536  # every frame is smaller; a long text is written beside the frames


class _NoCopyError(Exception):
    pass


class _Copy:
    """The file that a pickler writes to."""

    __slots__ = ("framed", "parts", "size")

    def __init__(self) -> None:
        self.framed = self.size = 0
        self.parts: list[bytes] = []

    def write(self, part: bytes) -> None:
        self.size += len(part)
        if len(part) < _FRAME:
            self.framed += len(part)
        if self.size > _MOST_BYTES or self.framed > _MOST_FRAMED:
            raise _NoCopyError
        self.parts.append(part)


class _PlainPickler(Pickler):
    def reducer_override(self, obj: Any) -> NoReturn:
        """Called for every value that is not of a built-in type."""
        raise _NoCopyError


def copy_of(value: Any) -> bytes | None:
    """Equal plain values have equal copies. None: not a plain value, or too large."""
    copy = _Copy()
    pickler = _PlainPickler(copy, 4)
    pickler.fast = True  # writes shared parts out: a copy does not depend on what a value shares
    try:
        pickler.dump(value)
    except (_NoCopyError, ValueError, RecursionError):  # too large or foreign; cyclic; too deep
        return None
    return copy.parts[0] if len(copy.parts) == 1 else b"".join(copy.parts)


def size_in(copy: bytes) -> int:
    """How large the value of a copy is: about the bytes of its JSON."""
    return len(copy) - _HEAD


def restored(copy: bytes) -> Any:
    """The value of a copy. Only for copies made here, which never left this process."""
    return loads(copy)
