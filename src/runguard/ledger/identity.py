"""Which store this is. A store carries a random id in its data, so replicas, failovers, dumps and restores have the
same one.

A process remembers the id of the store that it works with. When another id, or none, is found later at the same
address, the store was replaced: its accounts say nothing of what was spent. The process then makes nothing there and
refuses calls as in an outage, until the old store is back or an operator runs ``runguard store adopt``, which writes
into the new store whose place it takes. A process that starts accepts what it finds.

The id is kept in the document ``identity``: the store's own id, then the ids that it replaces, newest first, with
spaces between. Every operation that reads or changes an account compares the whole text in the same step, so there is
no moment between the check and the change.

A SQLite file can also go back in time, when an older copy is put in its place or its ``-wal`` file is deleted. So its
document counts changes in its version, and a process compares that with the count it has seen. Redis and Postgres have
no such check: there, a failover to a replica that lags behind goes back a little and is a documented loss.
"""

import re
import secrets
from typing import Final

from runguard.ledger.store import StoreError, StoreOutage, StoreSession

IDENTITY: Final = "identity"
_TEXT: Final = re.compile(r"[0-9a-f]{16}( [0-9a-f]{16})*")
_KEPT: Final = 20  # ids that a store replaces
_TRIES: Final = 20


class StoreReplacedError(StoreOutage):
    """Another store answers at the address of the one that this process has worked with, or it lost its data."""

    def __init__(self, name: str, why: str, seen: str) -> None:
        self.facts = name, why, seen
        # without an address: alerts and logs must not show one that holds a password
        self.command = f"runguard store adopt {seen}"
        super().__init__(
            f"{name}: {why}. What was spent before is not known there. Bring the old store back, or go on with "
            f"this one: {self.command}"
        )

    def again(self) -> "StoreReplacedError":
        """The same error, to be raised once more."""
        return StoreReplacedError(*self.facts)


class Seen:
    """The store that this process has worked with. One for each ``Store``; it outlives connections, and a forked
    child inherits it.

    There is no lock, which a fork could leave locked. Callers take ``text`` and ``generation`` before they ask the
    store and pass them to ``meet``: what another thread learns meanwhile is not held against an older answer.
    """

    __slots__ = ("files", "generation", "name", "text")

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = ""  # the identity document; "" before the first connection
        self.generation = 0  # SQLite: changes that are known to be in the file
        self.files = (0, 0)  # SQLite: the inodes of the file and of its -wal file

    def meet(self, expected: str, found: str, generation: int = 0, floor: int = 0) -> None:
        """Accept the identity that a store has, "" for none, or raise. ``expected`` and ``floor`` are what this process
        had seen before it asked.
        """
        own, *replaced = _ids(self.name, found)
        before = expected.partition(" ")[0]
        if before and own != before and before not in replaced:
            why = (
                f"another store answers here: its id is {own}, and this process has worked with {before}"
                if own
                else "the store was emptied or removed"
            )
            raise StoreReplacedError(self.name, why, before)
        if own == before and generation < floor:
            lost = (
                f"an older copy was put in its place, or its -wal file was deleted; {floor - generation} changes "
                "are missing"
            )
            raise StoreReplacedError(self.name, f"the file went back in time: {lost}", before)
        if not own:
            raise StoreError(f"{self.name}: the store lost its id while it was being opened; try again")
        if found != expected:
            self.text, self.generation = found, generation

    def changed(self, generation: int) -> None:
        """A change was committed."""
        if generation > self.generation:
            self.generation = generation


def new_id() -> str:
    return secrets.token_hex(8)


def is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def identity_of(session: StoreSession, name: str) -> list[str]:
    """The id of a store, then those that it replaces."""
    return _ids(name, session.get(IDENTITY)[1])


def adopt(session: StoreSession, name: str, replaced: str) -> list[str]:
    """Let a store take the place of another one, for processes that have seen that one; returns what
    ``identity_of`` would.

    To replace itself, after it went back in time, it gets a new id.
    """
    for _ in range(_TRIES):
        version, text = session.get(IDENTITY)
        own, *others = _ids(name, text)
        if replaced in others:
            return [own, *others]
        ids = [new_id() if replaced == own else own, replaced, *others][: _KEPT + 1]
        if session.put(IDENTITY, version, " ".join(ids)):
            return ids
    raise StoreOutage(f"{name}: too many processes change the store at the same time")


def _ids(name: str, text: str) -> list[str]:
    if text and not _TEXT.fullmatch(text):
        raise StoreError(f"{name}: the id of the store is damaged: {text[:60]!r}. Restore the store from a backup")
    return text.split(" ")
