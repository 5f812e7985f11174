"""The writer of a ledger: settlements, releases and records go to the store in order, each until it is booked."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from runguard.background import log_fault
from runguard.ledger.daily_sums import purge, sum_up
from runguard.ledger.facts import FACTS_KEPT, Fact, Facts
from runguard.ledger.store import StoreError, StoreOutage, StoreReply, StoreSession
from runguard.ledger.store_faults import UnforeseenError
from runguard.ledger.store_guards import StoreGuards
from runguard.ledger.store_link import StoreLink

_log: Final = logging.getLogger("runguard")
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
TRIES: Final = 5  # of a settlement that meets an exception which no store should raise
_BEAT_S: Final = 1.0
_PURGE_S: Final = 3_600.0
_SUMS_S: Final = 60.0


class FactWriter:
    """One thread runs ``work``. Between facts it reports the running guards and purges the store."""

    def __init__(
        self, link: StoreLink, guards: StoreGuards, retention_s: float, learn: Callable[[StoreReply, Fact], None]
    ) -> None:
        self._link, self._guards, self._learn = link, guards, learn  # learn: called with the store's reply to a fact
        self._retention_s = retention_s
        self.lost = 0  # facts that the store refused, or that did not fit into the queue
        self.unbooked = 0  # of them settlements and releases
        self.facts = Facts()

    def restart(self) -> Facts:
        """Begin a new queue; returns the old one."""
        old, self.facts = self.facts, Facts()
        return old

    def put(self, fact: Fact) -> None:
        if not self.facts.put(fact):
            self._lose(fact)
            _log.error(
                "runguard.store_full: %s: %d facts are waiting to be booked; one was dropped",
                self._link.name,
                FACTS_KEPT,
            )

    def record(self, write: Callable[[StoreSession], object]) -> None:
        """Write a record, in order with the settlements. It is dropped when too many facts are waiting."""
        if len(self.facts) < FACTS_KEPT // 2:
            self.put(Fact(write, repeatable=False))

    def work(self, worker: str) -> None:
        """Write every fact in order until the queue is closed."""
        facts = self.facts
        next_beat, next_look, next_sums, purged = 0.0, 0.0, time.monotonic() + _SUMS_S, time.monotonic()
        while not facts.closed.is_set():
            if time.monotonic() - purged >= _PURGE_S:
                purged = time.monotonic()
                self.record(self._purge)
            if time.monotonic() >= next_sums:
                next_sums = time.monotonic() + _SUMS_S
                self.record(_sum_up_once)
            if time.monotonic() >= next_beat:
                began = time.monotonic()
                self._safely("signs of life", lambda: self._guards.beat(worker))
                took = time.monotonic() - began
                # a tenth of the writer's time at most: facts come first
                next_beat = time.monotonic() + max(_BEAT_S, 9 * took)
                next_look = time.monotonic() + _BEAT_S
            elif time.monotonic() >= next_look:
                next_look = time.monotonic() + _BEAT_S
                self._safely("the look for stops", self._guards.look_for_stops)
            fact = facts.first(_BEAT_S)
            if fact is not None and not facts.closed.is_set() and self._write(fact, facts):
                facts.done(fact)
        self._link.drop_session()

    def _purge(self, session: StoreSession) -> None:
        purge(session, self._retention_s)

    def _safely(self, what: str, job: Callable[[], None]) -> None:
        """Do something that is not a fact. Whatever it raises, the writer goes on with its facts."""
        try:
            job()
        except BaseException:
            self._link.fault()
            log_fault(f"{self._link.name}: {what} failed", self._link.faults)

    def _write(self, fact: Fact, facts: Facts) -> bool:
        """Write one fact; False: try again later."""
        if fact.tries and not fact.repeatable:  # its writer ended in the middle: it may have been written
            self._lose(fact)
            return True
        fact.tries += 1
        try:
            self._write_until_booked(fact, facts)
        except BaseException as error:
            if isinstance(error, StoreError) and not isinstance(error, UnforeseenError):
                self._lose(fact)
                # always counted, logged once: the store needs manual repair
                if self.lost == 1 or (fact.repeatable and self.unbooked == 1):
                    _log.error(
                        "runguard.store_error: %s cannot be booked: %s",
                        "what was spent" if fact.repeatable else "a record",
                        error,
                    )
                self._link.drop_session()
                return True
            self._link.fault()
            if fact.repeatable and fact.tries < TRIES:
                log_fault(f"{self._link.name}: a settlement met an exception and is tried again", self._link.faults)
                time.sleep(_BACKOFF_S[fact.tries - 1])
                return False
            self._lose(fact)
            with contextlib.suppress(BaseException):
                _log.exception(
                    "runguard.store_error: %s: a %s could not be booked",
                    self._link.name,
                    "settlement" if fact.repeatable else "record",
                )
        return True

    def _lose(self, fact: Fact) -> None:
        self.lost += 1
        self.unbooked += fact.repeatable

    def _write_until_booked(self, fact: Fact, facts: Facts) -> None:
        link = self._link
        outages = errors = 0
        while True:
            try:
                with link.in_use():
                    reply = fact.write(link.session())
                break
            except UnforeseenError:
                raise
            except StoreError:
                errors += 1
                if errors >= TRIES or not fact.repeatable:
                    raise
                # a damaged answer, or one to another request, may look like this: only what new connections repeat is
                # final
                link.drop_session()
            except StoreOutage as error:
                was_new = link.session_is_new
                link.drop_session()
                outages += 1
                if outages == 1 and not was_new:
                    continue  # a connection that was cut while idle is not an outage: try again on a new one
                link.outage(error)
                if facts.closed.wait(_BACKOFF_S[min(outages - 1, len(_BACKOFF_S) - 1)]):
                    return  # the ledger was closed
        if isinstance(reply, StoreReply):
            self._safely("the look at an answer", lambda: self._learn(reply, fact))
        then, fact.then = fact.then, None
        if then is not None:
            self._safely("what follows a settlement", then)


def _sum_up_once(session: StoreSession) -> None:
    """Sum up new records, unless another worker did so in this minute."""
    if session.claim("spend sums", _SUMS_S) == "yes":
        sum_up(session)
