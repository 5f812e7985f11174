"""A dict of bounded size: the oldest entry leaves when there are too many."""

from collections import OrderedDict
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Newest(OrderedDict[_K, _V]):
    """Keeps the newest ``most`` entries. ``move_to_end`` makes an entry new again.

    Detectors and hooks that run for every call count by hand: this takes a microsecond for each new entry.
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            self.popitem(last=False)
