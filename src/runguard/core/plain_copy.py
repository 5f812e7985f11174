"""Copies plain values at the speed of C: texts, numbers, and the lists and dicts that hold them.

A copy serves to compare values and to measure them. Its length, without its head, is
about that of the value's JSON. The work is bounded,
and no code of the value runs: a value that is large, very deep or cyclic, or that holds a type of its own, has no copy.
"""

from pickle import Pickler, loads
from typing import Any, Final, NoReturn

HEAD: Final = 12  # bytes of a copy beside those of its value; the copy of a tiny value is shorter than that
_MOST_BYTES: Final = 1_048_576
_FEW: Final = 8  # fields whose length is looked at beforehand
_MOST_FRAMED: Final = 262_144  # of them, in frames: a frame may consist of thousands of tiny values
_FRAME: Final = 2 * 65_536  # every frame is smaller; a long text is written beside the frames


class _NoCopyError(Exception):
    pass


class _Parts(list[bytes]):
    """The file that a pickler writes to: a small value is one part."""

    __slots__ = ()

    def write(self, part: bytes) -> None:
        self.append(part)
        if len(part) > _FRAME or len(self) > 1:
            sizes = [*map(len, self)]
            if sum(sizes) > _MOST_BYTES or sum(size for size in sizes if size < _FRAME) > _MOST_FRAMED:
                raise _NoCopyError


class _PlainPickler(Pickler):
    def reducer_override(self, obj: Any) -> NoReturn:
        """Called for every value that is not of a built-in type."""
        raise _NoCopyError


def copy_of(value: Any) -> bytes | None:
    """Equal plain values have equal copies. None: not a plain value, or too large."""
    for part in value.values() if type(value) is dict and len(value) <= _FEW else (value,):
        if type(part) is str and len(part) > _MOST_BYTES:
            return None  # before it is copied in vain
    parts = _Parts()
    pickler = _PlainPickler(parts, 4)
    pickler.fast = True  # writes shared parts out: a copy does not depend on what a value shares
    try:
        pickler.dump(value)
    except (_NoCopyError, ValueError, RecursionError):  # too large or foreign; cyclic; too deep
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def restored(copy: bytes) -> Any:
    """The value of a copy. Only for copies made here, which never left this process."""
    return loads(copy)
