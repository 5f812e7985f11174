"""The model calls that a token budget counts. Chunks of one call report its usage again and again."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from runguard.core.identity import Newest
from runguard.core.money import Threshold
from runguard.providers.usage import CallUsage

_STREAMS_KEPT: Final = 10_000  # calls that are being streamed
_ENDED_KEPT: Final = 64  # calls that have ended: a second whole response may follow at once


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A threshold in one monitor.

    What has fired is kept here, so neither order nor sharing of thresholds can mix it up.
    """

    threshold: Threshold
    fired: bool = False
    stopping: bool = False
    nudging: bool = False

    def rearm(self) -> None:
        self.fired = self.stopping = self.nudging = False


@dataclass(slots=True, eq=False)
class CountedCall:
    """One model call. Its chunks report usage again and again: figures only grow, and they are not added up."""

    key: Callable[[], object | None] = lambda: None
    tokens: int | None = None
    usage: CallUsage = field(default_factory=CallUsage)
    estimated: bool = False
    fired: set[Checkpoint] = field(default_factory=set)  # recurring thresholds that have fired for it


class CountedCalls:
    """The calls under way, and those that ended lately. Not safe for threads: the monitor has a lock."""

    def __init__(self) -> None:
        self._streams = Newest[int, CountedCall](_STREAMS_KEPT)
        self._ended = Newest[int, CountedCall](_ENDED_KEPT)
        self._nameless: CountedCall | None = None

    def of(self, key: object | None, whole: bool) -> CountedCall:
        if key is None:
            call = self._nameless or CountedCall()
            self._nameless = None if whole else call
            return call
        number = id(key)
        found = self._ended.get(number) or self._streams.get(number)
        if found is None or found.key() is not key:  # the number of an object that is gone may be given again
            found = CountedCall(_weak(key))
            self._ended.pop(number, None)
            self._streams[number] = found
        if whole and number not in self._ended:
            self._streams.pop(number, None)
            self._ended[number] = found
        return found


def _weak(key: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(key)
    except TypeError:  # some objects cannot be referred to weakly; a few are held
        return lambda: key
