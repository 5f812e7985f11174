"""The answers that a lane has seen, and the names by which they are compared."""

import marshal
from collections import OrderedDict, deque
from typing import Any, Final

from runguard.core.fingerprint import BIG, MAX_CHARS, MAX_NODES, answer_text, bounded_text
from runguard.core.masking import mask

_SCALARS: Final = frozenset({float, bool, type(None)})


class AnswerBook:
    """Names the answers of one lane so that two tellings of the same answer get the same name.

    Nothing is said about a call's first answer but a snapshot's hash. Only when the call repeats with another snapshot
    are both masked and compared. Snapshots are kept for the most recent calls alone: an older call that repeats
    differently is compared from its second repetition on. Names are numbers of this process, for comparing; ``digest``
    is for telling.
    """

    __slots__ = ("_calls", "_recent", "size")
    CALLS: Final = 512
    SNAPSHOTS: Final = 16
    SNAPSHOT_BYTES: Final = 16_384
    ANSWERS: Final = 64  # different answers remembered of one call

    def __init__(self) -> None:
        self._calls: OrderedDict[bytes, _Known] = OrderedDict()
        self._recent: deque[_Known] = deque(maxlen=self.SNAPSHOTS)
        self.size = 0  # of the last answer, about; -1 when it is too large to be copied

    def name(self, call: bytes, value: Any, by: str = "") -> tuple[int, bool]:
        """Return the answer's identity, and whether this (call, answer) pair is new to the agent: a reviewer may read
        what a writer has read.
        """
        shot = snapshot(value)
        self.size = len(shot) if type(shot) is bytes else -1
        exact = hash(shot)
        known = self._calls.get(call)
        if known is None:
            known = self._calls[call] = _Known(exact, by)
            if len(self._calls) > self.CALLS:
                self._calls.popitem(last=False)
            self._keep(known, shot)
            return exact, True
        self._calls.move_to_end(call)
        name, new = known.again(exact, value, by)
        self._keep(known, shot)
        return name, new

    def _keep(self, known: "_Known", shot: bytes | str) -> None:
        if known.shot is None:
            if len(self._recent) == self.SNAPSHOTS:
                self._recent[0].shot = None
            self._recent.append(known)
        known.shot = shot if len(shot) <= self.SNAPSHOT_BYTES else ""  # "" holds its place and says nothing

    def forget_pairs(self) -> None:
        """Something changed the world: what was known may be asked again."""
        for known in self._calls.values():
            known.received = set()


class _Known:
    """The answers of one call: their names by snapshot and by masked text, and which agent received which."""

    __slots__ = ("by", "exact", "names", "received", "shot")

    def __init__(self, exact: int, by: str) -> None:
        self.exact, self.by = exact, by
        self.names: dict[int, int] | None = None  # made when the call repeats: most never do
        self.received: set[tuple[str, int]] | None = None
        self.shot: bytes | str | None = None

    def again(self, exact: int, value: Any, by: str) -> tuple[int, bool]:
        """The name of one more answer, and whether it is news to ``by``."""
        if self.names is None:
            self.names = {self.exact: self.exact}
        if self.received is None:
            self.received = {(self.by, self.exact)}
        name = self.names.get(exact)
        if name is None:
            name = self._identify(exact, value, self.names)
        if (by, name) in self.received:
            return name, False
        if len(self.received) >= AnswerBook.ANSWERS:
            self.received.clear()  # a call with this many answers makes progress; its oldest answer may come again
        self.received.add((by, name))
        return name, True

    def _identify(self, exact: int, value: Any, names: dict[int, int]) -> int:
        """A name for a snapshot not seen before:
        that of an answer which differs in volatile parts alone, or its own.
        """
        if len(names) > 2 * AnswerBook.ANSWERS:
            names.clear()
        if self.shot:
            before = hash(self.shot)
            names.setdefault(_masked(_from_snapshot(self.shot)), names.get(before, before))
        name = names.setdefault(_masked(value), exact)
        names[exact] = name
        return name


def snapshot(value: Any) -> bytes | str:
    """A copy for comparing, as cheap as copying gets; larger or stranger values by their bounded text."""
    if _fits(value):
        try:
            return marshal.dumps(value, 2)
        except ValueError:  # a type of its own, or too deep
            pass
    return bounded_text(value)


def _from_snapshot(shot: bytes | str) -> Any:
    return marshal.loads(shot) if type(shot) is bytes else shot  # our own bytes, which never left this process


def _masked(value: Any) -> int:
    return hash(mask(answer_text(value)))


def _fits(value: Any) -> bool:
    """Whether copying ``value`` is cheap: the one look that every answer pays for, so it looks at sizes only."""
    size = nodes = 0
    pending: list[Any] = [value]
    for item in pending:
        kind = type(item)
        if kind is str:
            size += len(item)
            if size > MAX_CHARS:
                return False
        elif kind is dict:
            nodes += len(item)
            if nodes > MAX_NODES:
                return False
            pending += item  # keys have a size too
            pending += item.values()
        elif kind is list or kind is tuple:
            nodes += len(item)
            if nodes > MAX_NODES:
                return False
            pending += item
        elif kind is int:
            if not -BIG < item < BIG:
                return False
        elif kind not in _SCALARS:
            return False
    return True
