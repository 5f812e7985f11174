"""What runs that are over have spent, by scope. Scopes that were not used lately are packed into a few bytes."""

from collections import OrderedDict
from itertools import islice
from typing import Final

from runguard.accounting.figures import Entry, Tally
from runguard.ledger.packing import Shared, read_numbers, write_numbers

_UNPACKED_KEPT: Final = 512  # scopes; beyond that the older half is packed
# a sixteenth of the packed scopes is forgotten together, as that costs more than to forget one
_FORGOTTEN_AT_ONCE: Final = 16
_NUMBERS: Final = 1 + len(Entry.__slots__)  # per line: its names and the figures of an entry


class History:
    """Tallies by scope. Not safe for threads: ``Spending`` has a lock."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, Tally] = OrderedDict()  # the latest used last
        self._packed: dict[str, bytes] = {}  # the oldest first
        self._names: Shared[tuple[str, str, str]] = Shared()  # agent, model, tool

    def __len__(self) -> int:
        return len(self._recent) + len(self._packed)

    def of(self, scope: str) -> Tally:
        """The figures of a scope, to look at; empty where there are none."""
        tally = self._recent.get(scope)
        return tally if tally is not None else self._read(self._packed.get(scope, b""))

    def changing(self, scope: str) -> Tally:
        """The figures of a scope, to be changed in place. The scope counts as used now."""
        tally = self._recent.get(scope)
        if tally is None:
            data = self._packed.pop(scope, b"")
            tally = self._recent[scope] = self._read(data)
            self._give_back(data)
            if len(self._recent) > _UNPACKED_KEPT:
                self._pack()
        else:
            self._recent.move_to_end(scope)
        return tally

    def keep(self, count: int) -> None:
        """Forget the scopes that were not used for longest, so that at most ``count`` are left."""
        if len(self) > count and self._packed:
            for scope in list(islice(self._packed, max(len(self) - count, len(self._packed) // _FORGOTTEN_AT_ONCE))):
                self._give_back(self._packed.pop(scope))
            self._packed = dict(self._packed)  # without the gaps, which would cost time and memory
        while len(self) > count:
            self._recent.popitem(last=False)

    def _pack(self) -> None:
        while len(self._recent) > _UNPACKED_KEPT // 2:
            scope, tally = self._recent.popitem(last=False)
            lines = (
                (self._names.take(names), *(getattr(entry, name) for name in Entry.__slots__))
                for names, entry in tally.items()
            )
            self._packed[scope] = write_numbers(number for line in lines for number in line)

    def _read(self, data: bytes) -> Tally:
        numbers = read_numbers(data)
        return {
            self._names[numbers[at]]: Entry(*numbers[at + 1 : at + _NUMBERS]) for at in range(0, len(numbers), _NUMBERS)
        }

    def _give_back(self, data: bytes) -> None:
        for number in read_numbers(data)[::_NUMBERS]:
            self._names.give_back(number)
