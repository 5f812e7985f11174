"""Compact forms of data that is kept but rarely used: integers as a few bytes, and values that many entries have in
common.
"""

from collections.abc import Hashable, Iterable
from typing import Generic, Self, TypeVar

T = TypeVar("T", bound=Hashable)


def write_numbers(numbers: Iterable[int]) -> bytes:
    """Integers of any size and sign: seven bits per byte, the sign in the lowest bit."""
    data = bytearray()
    for number in numbers:
        rest = number << 1 if number >= 0 else (-number << 1) - 1
        while rest > 127:
            data.append(rest & 127 | 128)
            rest >>= 7
        data.append(rest)
    return bytes(data)


def read_numbers(data: bytes) -> list[int]:
    numbers, rest, shift = [], 0, 0
    for byte in data:
        rest |= (byte & 127) << shift
        if byte > 127:
            shift += 7
            continue
        numbers.append(-(rest + 1 >> 1) if rest & 1 else rest >> 1)
        rest = shift = 0
    return numbers


class Shared(Generic[T]):
    """Values that many entries refer to by a number. Each is stored once, for as long as an entry refers to it."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._values: dict[int, T] = {}
        self._users: dict[int, int] = {}  # how many entries refer to a number
        self._free: list[int] = []  # numbers to use again, so that they stay small

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, number: int) -> T:
        return self._values[number]

    def take(self, value: T) -> int:
        """The number of a value, for one more entry."""
        number = self._numbers.get(value)
        if number is None:
            number = self._free.pop() if self._free else len(self._values)
            self._numbers[value], self._values[number], self._users[number] = number, value, 0
        self._users[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """One entry refers to it no longer."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._numbers[self._values.pop(number)], self._users[number]
            self._free.append(number)

    def snapshot(self) -> Self:
        """For reading only: numbers keep their values in it, whatever is given back here."""
        other = type(self)()
        other._values = dict(self._values)
        return other
