"""The answers that a lane has seen, and the names by which they are compared."""

from collections import deque
from typing import Any, Final

from runguard.core.bounded_text import MAX_CHARS, bounded_text
from runguard.core.fingerprint import encode
from runguard.core.masking import are_alike, mask
from runguard.core.plain_copy import HEAD, copy_of, restored


class AnswerBook:
    """Names the answers of one lane so that two versions of the same answer get the same name.

    The first answer of a call is named by the hash of its snapshot, and nothing is masked. When the call repeats with
    another snapshot, the two are compared, and only what differs is masked. Snapshots are kept for the most recent
    calls, and of one call for its latest different answers. Where the snapshots of a call were dropped, whole masks
    are compared instead: such a call is recognised from its second repetition on. Names are numbers of this process.
    """

    __slots__ = ("_calls", "_held", "_recent", "size")
    CALLS: Final = 512
    SNAPSHOTS: Final = 16  # calls with snapshots
    SNAPSHOT_BYTES: Final = 262_144  # of all snapshots
    VERSIONS: Final = 4  # different answers of one call whose snapshots are kept
    ANSWERS: Final = 64  # different answers remembered of one call

    def __init__(self) -> None:
        self._calls: dict[bytes, _Known] = {}  # the one used last at the end
        self._recent: deque[_Known] = deque()  # calls with snapshots, the oldest first
        self._held = 0  # bytes of their snapshots
        self.size = 0  # bytes of the last answer; -1 when it is too large to be copied

    def name(self, call: bytes, value: Any, by: str = "") -> tuple[int, bool]:
        """Return the answer's identity, and whether this (call, answer) pair is new to the agent: a reviewer may read
        what a writer has read.
        """
        copy = copy_of(value)
        self.size = max(len(copy) - HEAD, 0) if copy is not None else -1
        shot = copy if copy is not None else bounded_text(value)
        exact = hash(shot)
        known = self._calls.get(call)
        if known is None:
            known = self._calls[call] = _Known(exact, by)
            if len(self._calls) > self.CALLS:
                del self._calls[next(iter(self._calls))]
            self._keep(known, exact, shot)
            return exact, True
        self._calls[call] = self._calls.pop(call)
        name, new = known.again(exact, shot, by)
        self._keep(known, name, shot)
        return name, new

    def _keep(self, known: "_Known", name: int, shot: bytes | str) -> None:
        """Keep the latest snapshot of each answer, and drop those of the oldest calls where they become too many."""
        if len(shot) > self.SNAPSHOT_BYTES // 2:
            known.was_dropped = True
            return
        if known.shots:
            self._held += known.keep(name, shot)
        else:
            known.shots, known.held = ((name, shot),), len(shot)
            self._recent.append(known)
            self._held += known.held
        while len(self._recent) > self.SNAPSHOTS or self._held > self.SNAPSHOT_BYTES:
            oldest = self._recent.popleft()
            self._held -= oldest.held
            oldest.shots, oldest.held, oldest.was_dropped = (), 0, True

    def forget_pairs(self) -> None:
        """Something changed the world: what was known may be asked again."""
        for known in self._calls.values():
            known.received = set()


class _Known:
    """The answers of one call: their names by snapshot and by masked text, and which agent received which."""

    __slots__ = ("by", "exact", "held", "names", "received", "shots", "was_dropped")

    def __init__(self, exact: int, by: str) -> None:
        self.exact, self.by = exact, by
        self.names: dict[int, int] | None = None  # made when the call repeats: most never do
        self.received: set[tuple[str, int]] | None = None
        self.shots: tuple[tuple[int, bytes | str], ...] = ()  # names and their latest snapshots, the newest first
        self.held = 0  # bytes of them
        self.was_dropped = False  # an answer has no snapshot any more: masks are compared, too

    def keep(self, name: int, shot: bytes | str) -> int:
        """Returns how many bytes more it holds."""
        others = [entry for entry in self.shots if entry[0] != name][: AnswerBook.VERSIONS - 1]
        self.shots, before = ((name, shot), *others), self.held
        self.held = sum(len(kept) for _, kept in self.shots)
        return self.held - before

    def again(self, exact: int, shot: bytes | str, by: str) -> tuple[int, bool]:
        """The name of one more answer, and whether it is news to ``by``."""
        if self.names is None:
            self.names = {self.exact: self.exact}
        if self.received is None:
            self.received = {(self.by, self.exact)}
        name = self.names.get(exact)
        if name is None:
            name = self._identify(exact, shot, self.names)
        if (by, name) in self.received:
            return name, False
        if len(self.received) >= AnswerBook.ANSWERS:
            self.received.clear()  # a call with this many answers makes progress; its oldest answer may come again
        self.received.add((by, name))
        return name, True

    def _identify(self, exact: int, shot: bytes | str, names: dict[int, int]) -> int:
        """A name for a snapshot not seen before: that of an answer which differs in volatile parts alone, or its
        own.
        """
        if len(names) > 2 * AnswerBook.ANSWERS:
            names.clear()
        text = _text_of(shot)
        name = next((name for name, kept in self.shots if are_alike(_text_of(kept), text)), exact)
        if name == exact and self.was_dropped and len(text) <= MAX_CHARS:
            name = names.setdefault(hash(mask(text)), exact)
        names[exact] = name
        return name


def snapshot(value: Any) -> bytes | str:
    """A copy for comparing, as cheap as copying gets; larger or stranger values by their bounded text."""
    copy = copy_of(value)
    return bounded_text(value) if copy is None else copy


def _text_of(shot: bytes | str) -> str:
    """The text of a snapshot, for masking."""
    if not isinstance(shot, bytes):
        return shot
    value = restored(shot)
    if type(value) is str:
        return value
    try:
        return encode(value)
    except (TypeError, ValueError, RecursionError):  # keys of several types, huge integers, or too deep
        return bounded_text(value)
