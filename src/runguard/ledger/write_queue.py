"""The writer of a ledger: settlements, releases and records go to the store in order, each until it is booked.

``ledger/remote`` has one writer, one link to its store and one list of its guards.
"""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from runguard.background import log_fault
from runguard.core.money import usd_text
from runguard.ledger.ledger import (
    Account,
    Seen,
    SettledCall,
    Store,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    StoreReply,
    StoreSession,
    UnforeseenError,
    change_control,
    fault_of,
    purge,
    read_control,
    sum_up,
)

_log: Final = logging.getLogger("runguard")

# ---- Facts that wait to be booked: settlements, releases and records, in the order in which they were handed over.

FACTS_KEPT: Final = 100_000
_LINGER_S: Final = 0.1  # far less than a model call, during which its hold stands anyway
_LINGERING_KEPT: Final = 64


class Fact:
    """Something that happened and that the store must book."""

    __slots__ = ("accounts", "bill", "due", "keys", "nano", "repeatable", "then", "tries", "write")

    def __init__(
        self,
        write: Callable[[StoreSession], object],
        accounts: Sequence[Account] = (),
        then: Callable[[], None] | None = None,
        *,
        repeatable: bool,
        bill: SettledCall | None = None,
        nano: int = 0,
    ) -> None:
        self.write, self.accounts = write, accounts
        self.then = then  # called once, when the store has it
        # whether writing it twice counts once: yes for a settlement and a release, no for a record
        self.repeatable = repeatable
        self.tries = 0  # attempts to write it
        self.bill = bill  # of a settlement
        self.nano = nano  # what a settlement adds to what is spent, in nano-dollars
        self.keys = tuple(account.key for account in accounts) if bill is not None else ()
        self.due = 0.0  # when the writer books a settlement that lingers


class Facts:
    """A bounded queue of facts. Any thread puts, one thread takes.

    The first fact stays in the queue until it is done. So a writer that dies in the middle of it loses nothing: the
    next writer finds it there.

    A settlement may linger for a moment. The next reservation on the same accounts then takes it along, so that both
    are one step of the store. The writer books what no reservation took.
    """

    def __init__(self) -> None:
        self._queue: deque[Fact] = deque()
        self._lingering: OrderedDict[Fact, None] = OrderedDict()  # the oldest first
        self._taken: dict[str, Fact] = {}  # by their hold: a reservation takes them along right now
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._looks_at = 0.0  # when the writer, which waits, looks by itself again
        self.closed = threading.Event()  # the writer takes no more facts

    def __len__(self) -> int:
        return len(self._queue) + len(self._lingering) + len(self._taken)

    def put(self, fact: Fact) -> bool:
        """Queue a fact, after the settlements that linger, so that facts stay in order.

        Return False when the queue is full.
        """
        with self._lock:
            self._hurry_locked()
            if len(self._queue) >= FACTS_KEPT:
                return False
            self._queue.append(fact)
            self._changed.notify()
        return True

    def linger(self, fact: Fact) -> None:
        """Let a settlement wait for the next reservation on its accounts."""
        with self._lock:
            fact.due = time.monotonic() + _LINGER_S
            self._lingering[fact] = None
            is_full = len(self._lingering) > _LINGERING_KEPT
            if is_full:
                self._queue.append(self._lingering.popitem(last=False)[0])
            if is_full or self._looks_at > fact.due:
                self._changed.notify()

    def take(self, keys: tuple[str, ...]) -> Fact | None:
        """Return a settlement that lingers on the same accounts as a reservation, if any.

        Then call ``booked`` or ``give_back``.
        """
        if not self._lingering:
            return None
        with self._lock:
            fact = next((each for each in self._lingering if each.keys == keys), None)
            if fact is not None and fact.bill is not None:
                del self._lingering[fact]
                self._taken[fact.bill.hold] = fact
            return fact

    def booked(self, fact: Fact) -> None:
        """Note that the reservation has booked the settlement it took along."""
        with self._lock:
            self._put_down_locked(fact)
            if self._queue:  # a later fact about the same call may wait for this one
                self._changed.notify()

    def give_back(self, fact: Fact) -> None:
        """Queue a settlement that may or may not be booked before all others, so that the writer books it next.

        Later facts about the same call must come after it.
        """
        with self._lock:
            self._put_down_locked(fact)
            self._queue.appendleft(fact)
            self._changed.notify()

    def _put_down_locked(self, fact: Fact) -> None:
        if fact.bill is not None:
            self._taken.pop(fact.bill.hold, None)

    def hurry(self) -> None:
        """Queue all settlements that linger now, for a reader who wants to see them booked."""
        if self._lingering:
            with self._lock:
                self._hurry_locked()
                self._changed.notify()

    def _hurry_locked(self) -> None:
        self._queue.extend(self._lingering)
        self._lingering.clear()

    def first(self, seconds: float) -> Fact | None:
        """Return the first fact, which stays in the queue. Wait for one at most ``seconds``; None when none came."""
        end = time.monotonic() + seconds
        with self._lock:
            while not self.closed.is_set():
                now = time.monotonic()
                while self._lingering and (oldest := next(iter(self._lingering))).due <= now:
                    del self._lingering[oldest]
                    self._queue.append(oldest)
                if self._queue and not self._is_taken_locked(self._queue[0]):
                    return self._queue[0]
                if now >= end:
                    return None
                self._looks_at = min(end, next(iter(self._lingering)).due) if self._lingering else end
                self._changed.wait(self._looks_at - now)
                self._looks_at = 0.0
            return None

    def _is_taken_locked(self, fact: Fact) -> bool:
        """Return whether an earlier settlement of the same call is under way."""
        return fact.bill is not None and fact.bill.hold in self._taken

    def close(self) -> None:
        """End every wait for a fact."""
        self.closed.set()
        with self._lock:
            self._changed.notify_all()

    def done(self, fact: Fact) -> None:
        """Take a fact out of the queue."""
        with self._lock:
            if fact in self._queue:
                self._queue.remove(fact)

    def wait_until_done(self, seconds: float, meanwhile: Callable[[], object]) -> bool:
        """Wait at most ``seconds`` until every fact is booked, and return whether all are.

        ``meanwhile`` is called again and again.
        """
        end = time.monotonic() + seconds
        while len(self) and time.monotonic() < end:
            self.hurry()
            meanwhile()
            time.sleep(0.005)
        return not len(self)


# ---- The way of this process to one store: a session for each thread, and whether the store is away.

_REST_S: Final = 1.0  # after an outage no call waits for the store for this long


class StoreLink:
    """The way of all threads of one ledger to their store."""

    def __init__(self, store: Store, timeout: float) -> None:
        self.store, self.timeout, self.name = store, timeout, store.name
        # a store that wraps another one may have none
        self.seen: Seen = getattr(store, "seen", None) or Seen(store.name)
        self.outages = 0
        self.faults = 0  # exceptions that no store should raise
        self.is_away, self.down_until, self.era = False, 0.0, 0  # each outage begins an era with new sessions
        self._replaced: StoreReplacedError | None = None  # why the store is away, when another one took its place
        self.restart()

    def restart(self) -> None:
        """Begin anew, also in a forked child: the connections stay with the parent."""
        self.local = threading.local()
        self._lock, self._inside, self._forking = threading.Lock(), 0, False
        self._gate = threading.Condition(self._lock)

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def session(self) -> StoreSession:
        """Return this thread's connection, a new one when the store was away since it was made."""
        session: StoreSession | None = getattr(self.local, "session", None)
        if session is not None and self.local.era != self.era:
            self.drop_session()
            session = None
        self.local.is_new = session is None
        if session is None:
            self.local.era = self.era
            session = self.local.session = self.store.connect(self.timeout)
        return session

    @property
    def has_session(self) -> bool:
        """Whether this thread has a connection already."""
        return getattr(self.local, "session", None) is not None

    @property
    def session_is_new(self) -> bool:
        """Whether this thread's connection was made for the last use. An older one may have been cut while idle."""
        return getattr(self.local, "is_new", True)

    def drop_session(self) -> None:
        session, self.local.session = getattr(self.local, "session", None), None
        if session is not None:
            try:
                session.close()
            except BaseException:
                with contextlib.suppress(BaseException):
                    _log.debug("runguard.store_close: a broken connection could not be closed", exc_info=True)

    def fault(self) -> None:
        """Count an exception that no store should raise, and drop the connection, which may be in any state."""
        self.faults += 1
        self.drop_session()

    # ---- outages ----------------------------------------------------------------------------------------------------

    def outage(self, error: Exception) -> None:
        self.outages += 1
        if isinstance(error, StoreReplacedError):
            if self._replaced is None:
                _log.error("runguard.store_replaced: %s", error)
            self._replaced = error
        elif not self.is_away:
            _log.error("runguard.store_outage: %s", error)
        if not self.is_away:
            self.is_away = True
            self.era += 1
        self.down_until = time.monotonic() + _REST_S

    def is_back(self) -> None:
        if self.is_away:
            self.is_away, self.down_until, self._replaced = False, 0.0, None
            _log.warning("runguard.store_back: %s answers again", self.name)

    def check_rest(self) -> None:
        """Raise when the store was away a moment ago."""
        if time.monotonic() < self.down_until:
            raise (
                self._replaced.again()
                if self._replaced is not None
                else StoreOutage(f"{self.name}: did not answer a moment ago")
            )

    # ---- forks ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Use the store in this block. A fork waits for its end; every exception leaves as a store error."""
        with self._lock:
            if self._forking:
                self._gate.wait_for(lambda: not self._forking, self.timeout)
            self._inside += 1

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._forking:
                self._gate.notify_all()
        if error is not None and (fault := fault_of(self.name, error)) is not error:
            raise fault from error

    def before_fork(self) -> None:
        """Wait, bounded, until no thread uses the store.

        A fork copies the locks of a client library as they are, and one that is held would stay held in the child.
        """
        with self._gate:
            self._forking = True
            self._gate.wait_for(lambda: not self._inside, self.timeout)

    def after_fork(self) -> None:
        """Let the threads of the parent use the store again."""
        with self._gate:
            self._forking = False
            self._gate.notify_all()


# ---- The guards of this process that share a store.

_BEATS_AT_ONCE: Final = 200


class StoreGuards:
    """Tells the store which runs of the guards are alive, and the guards when the control document has changed.

    Guards are referenced weakly: a guard may go, the ledger stays.
    """

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self.version, self._text = 0, ""  # of the control document, as last seen
        self._identity = ""  # of the store that the control document is from
        self._unreadable = ""  # why the document could not be read, as last logged
        self._guards: list[tuple[weakref.WeakMethod[Any], weakref.WeakMethod[Any]]] = []
        self._on_dropped: list[weakref.WeakMethod[Any]] = []
        self.restart()

    def restart(self) -> None:
        """Make a new lock, also in a forked child: the parent may have held the old one."""
        self._reading = threading.RLock()

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        with self._reading:
            alive = [entry for entry in self._guards if entry[0]() is not None]
            self._guards = [*alive, (weakref.WeakMethod(on_control), weakref.WeakMethod(running))]
            if self._text:
                self._inform(on_control)

    # ---- settlements that are lost ----------------------------------------------------------------------------------

    def watch_dropped(self, on_dropped: Callable[[int, int], None]) -> None:
        alive = [reference for reference in self._on_dropped if reference() is not None]
        own = weakref.WeakMethod(on_dropped)
        self._on_dropped = alive if own in alive else [*alive, own]

    def tell_dropped(self, count: int, nano: int) -> None:
        for reference in self._on_dropped:
            if (listener := reference()) is not None:
                listener(count, nano)

    # ---- the control document ---------------------------------------------------------------------------------------

    def is_news(self, version: int) -> bool:
        """Return whether the control document must be read: it has another version, or belongs to an adopted store."""
        if self._identity != self._link.seen.text:
            if self._identity:
                self.version = -1
            self._identity = self._link.seen.text
        return version != self.version

    def read(self, session: StoreSession) -> None:
        with self._reading:  # read, inform and remember as one step: no older document after a newer one
            version, self._text = self._checked(session)
            for reference, _ in self._guards:
                if (listener := reference()) is not None:
                    self._inform(listener)
            self.version = version  # last: once this version shows, all guards know the document

    def change(self, session: StoreSession, change: Callable[[str], str]) -> str:
        changed = change_control(session, self._link.name, change)
        self.read(session)
        return changed

    def _checked(self, session: StoreSession) -> tuple[int, str]:
        try:
            return read_control(session, self._link.name)
        except StoreError as error:
            if str(error) != self._unreadable:  # log once; needs manual repair
                self._unreadable = str(error)
                _log.error("runguard.control_unreadable: %s. The stops known here stay in force", error)
            raise

    def _inform(self, listener: Callable[[str], None]) -> None:
        try:
            listener(self._text)
        except Exception:  # the reservation that brought the news must not fail
            _log.exception("runguard.store_error: a guard could not take over the control document")

    # ---- on the writer's thread -------------------------------------------------------------------------------------

    def beat(self, worker: str) -> None:
        """Report which runs are alive, and check for stops, also while a model takes its time."""
        guards = [running for _, reference in self._guards if (running := reference()) is not None]
        alive: list[tuple[str, str]] = []
        for running in guards:
            try:
                alive.extend(itertools.islice(running(), _BEATS_AT_ONCE))
            except Exception:  # the writer must survive: without it nothing is ever booked again
                _log.exception("runguard.store_error: a guard cannot say which of its runs are alive")
        if not alive:
            return
        link = self._link
        try:
            with link:
                session, version = link.session(), self.version
                for run, text in alive:
                    version = session.beat(run, worker, text)
                link.is_back()
                if self.is_news(version):
                    self.read(session)
        except StoreOutage as error:
            if link.session_is_new:  # an older one may only have been cut while idle
                link.outage(error)
            link.drop_session()
        except UnforeseenError:
            raise  # counted and logged by the writer
        except StoreError:
            link.drop_session()  # a call that needs an account reports it

    def look_for_stops(self) -> None:
        """Read the control document if it has changed between two beats.

        The kill switch may have been used while a model takes its time.
        """
        if not any(reference() is not None for _, reference in self._guards):
            return
        link = self._link
        try:
            with link:
                session = link.session()
                if self.is_news(session.get("control")[0]):
                    self.read(session)
        except UnforeseenError:
            raise  # counted and logged by the writer
        except (StoreOutage, StoreError):
            link.drop_session()  # a call that needs the store reports it


# ---- The writer.

_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
TRIES: Final = 5  # of a settlement that meets an exception which no store should raise
_BEAT_S: Final = 1.0
_PURGE_S: Final = 3_600.0
_SUMS_S: Final = 60.0
_TELL_S: Final = 60.0  # between two reports of settlements that were dropped


class FactWriter:
    """One thread runs ``work``. Between facts it reports the running guards and purges the store."""

    def __init__(
        self, link: StoreLink, guards: StoreGuards, retention_s: float, learn: Callable[[StoreReply, Fact], None]
    ) -> None:
        self._link, self._guards, self._learn = link, guards, learn  # learn: called with the store's reply to a fact
        self._retention_s = retention_s
        self.lost = 0  # facts that the store refused, or that did not fit into the queue
        self.unbooked = 0  # of them settlements and releases
        self.dropped, self.dropped_nano = 0, 0  # of them settlements, and what they cost
        self._told, self._told_at, self._untold_since = 0, -_TELL_S, 0.0  # how many were reported, and when
        self.facts = Facts()
        self._losing = threading.Lock()

    def restart(self) -> Facts:
        """Begin a new queue and return the old one."""
        old, self.facts = self.facts, Facts()
        self._losing = threading.Lock()  # in a forked child: a thread of the parent may have held it
        self._told = self.dropped  # the parent reports its own
        return old

    def put(self, fact: Fact) -> None:
        if not self.facts.put(fact):
            self._lose(fact)

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
            self.tell_dropped()
            fact = facts.first(_BEAT_S)
            if fact is not None and not facts.closed.is_set() and self._write(fact, facts):
                facts.done(fact)
        self._link.drop_session()

    def _purge(self, session: StoreSession) -> None:
        purge(session, self._retention_s)

    def _safely(self, what: str, job: Callable[[], None]) -> None:
        """Do something that is not a fact. Whatever it raises, the writer continues with its facts."""
        try:
            job()
        except BaseException:
            self._link.fault()
            log_fault(f"{self._link.name}: {what} failed", self._link.faults)

    def _write(self, fact: Fact, facts: Facts) -> bool:
        """Write one fact. Return False when it is to be tried again later."""
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
        with self._losing:
            self.lost += 1
            self.unbooked += fact.repeatable
            if fact.bill is not None:
                if self.dropped == self._told:
                    self._untold_since = time.monotonic()
                self.dropped += 1
                self.dropped_nano += fact.nano

    def tell_dropped(self, *, at_once: bool = False) -> None:
        """Log and alert how many settlements were dropped, and what they cost, once the store is back.

        During a long outage it is reported after a minute, and again whenever the number has doubled.
        """
        if self.dropped != self._told:
            self._safely("the report of dropped settlements", lambda: self._report_dropped(at_once))

    def _report_dropped(self, at_once: bool) -> None:
        with self._losing:
            count, nano, now = self.dropped, self.dropped_nano, time.monotonic()
            is_over = not self._link.is_away and len(self.facts) < max(FACTS_KEPT // 2, 1)
            grows = now - self._untold_since >= _TELL_S and count >= 2 * self._told
            if count == self._told or not (at_once or (now - self._told_at >= _TELL_S and (is_over or grows))):
                return
            self._told, self._told_at = count, now
        _log.error(
            "runguard.settlements_dropped: %s: %d settlements of %s were dropped since this process began: the store "
            "refused them, or more than %d facts were waiting to be booked",
            self._link.name,
            count,
            usd_text(nano),
            FACTS_KEPT,
        )
        self._guards.tell_dropped(count, nano)

    def _write_until_booked(self, fact: Fact, facts: Facts) -> None:
        link = self._link
        outages = errors = 0
        while True:
            try:
                with link:
                    reply = fact.write(link.session())
                break
            except UnforeseenError:
                raise
            except StoreError:
                errors += 1
                if errors >= TRIES or not fact.repeatable:
                    raise
                # a damaged answer, or one to another request, may look like this; a lasting error is met again on a
                # new connection
                link.drop_session()
            except StoreOutage as error:
                was_new = link.session_is_new
                link.drop_session()
                outages += 1
                if outages == 1 and not was_new:
                    continue  # a connection that was cut while idle is not an outage: try again on a new one
                link.outage(error)
                self.tell_dropped()
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
