"""The writer of a ledger: settlements, releases and records go to the store in order, each until it is booked.

``ledger/remote`` has one writer, one link to its store and one list of its guards.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

from runguard.background import log_fault
from runguard.core.money import usd_text
from runguard.ledger.ledger import (
    Account,
    Listeners,
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
_T = TypeVar("_T")

# ---- Facts that wait to be booked: settlements, releases and records, in the order in which they were handed over.

FACTS_KEPT: Final = 100_000
_LINGER_S: Final = 0.1  # far less than a model call, during which its hold stands anyway
_LINGERING_KEPT: Final = 64


class Fact:
    """Something that happened and that the store must book."""

    __slots__ = ("accounts", "repeatable", "then", "tries", "write")
    hold = ""

    def __init__(
        self,
        write: Callable[[StoreSession], object],
        accounts: Sequence[Account] = (),
        then: Callable[[], None] | None = None,
        *,
        repeatable: bool = True,
    ) -> None:
        self.write, self.accounts = write, accounts
        self.then = then  # called once, when the store has it
        # whether writing it twice counts once: yes for a settlement and a release, no for a record
        self.repeatable = repeatable
        self.tries = 0  # attempts to write it


class Settlement(Fact):
    """A settlement, which may linger until the next reservation takes it along."""

    __slots__ = ("bill", "due", "hold", "nano")

    def __init__(
        self, bill: SettledCall, accounts: Sequence[Account], then: Callable[[], None] | None, nano: int
    ) -> None:
        super().__init__(partial(_settle, bill), accounts, then)
        self.bill, self.hold = bill, bill.hold
        self.nano = nano  # what it adds to what is spent, in nano-dollars
        self.due = 0.0  # when the writer books it although no reservation took it along


def _settle(bill: SettledCall, session: StoreSession) -> StoreReply:
    return session.settle(bill.hold, bill.lines, bill.actual, bill.record)


class Facts:
    """A bounded queue of facts. Any thread puts, one thread takes.

    The first fact stays in the queue until it is done. So a writer that dies in the middle of it loses nothing: the
    next writer finds it there.

    A settlement may linger for a moment. The next reservation on the same accounts then takes it along, so that both
    are one step of the store. The writer books what no reservation took.
    """

    def __init__(self) -> None:
        self._queue: deque[Fact] = deque()
        self._lingering: OrderedDict[Settlement, None] = OrderedDict()  # the oldest first
        self._taken: set[str] = set()  # holds of those that a reservation takes along right now
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

    def linger(self, fact: Settlement) -> None:
        """Let a settlement wait for the next reservation on its accounts."""
        with self._lock:
            fact.due = time.monotonic() + _LINGER_S
            self._lingering[fact] = None
            is_full = len(self._lingering) > _LINGERING_KEPT
            if is_full:
                self._queue.append(self._lingering.popitem(last=False)[0])
            if is_full or self._looks_at > fact.due:
                self._changed.notify()

    def take(self, accounts: Sequence[Account]) -> Settlement | None:
        """Return a settlement that lingers on the same accounts as a reservation, if any.

        Then call ``put_down``.
        """
        if not self._lingering:
            return None
        with self._lock:
            fact = next((each for each in self._lingering if each.accounts == accounts), None)
            if fact is not None:
                del self._lingering[fact]
                self._taken.add(fact.hold)
            return fact

    def put_down(self, fact: Fact, *, is_booked: bool) -> None:
        """Note what became of a settlement that a reservation took along.

        If it may not be booked, the writer books it next: later facts about the same call must come after it.
        """
        with self._lock:
            self._taken.discard(fact.hold)
            if not is_booked:
                self._queue.appendleft(fact)
            if self._queue:
                self._changed.notify()

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
                # an earlier settlement of the same call may be under way
                if self._queue and self._queue[0].hold not in self._taken:
                    return self._queue[0]
                if now >= end:
                    return None
                self._looks_at = min(end, next(iter(self._lingering)).due) if self._lingering else end
                self._changed.wait(self._looks_at - now)
                self._looks_at = 0.0
            return None

    def close(self) -> None:
        """End every wait for a fact."""
        with self._lock:
            self.closed.set()
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
        self._lock, self._inside, self._is_forking = threading.Lock(), 0, False
        self._gate = threading.Condition(self._lock)

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def use(self, job: Callable[[StoreSession], _T], *, again: bool = True) -> _T:
        """Return what a job finds out on this thread's connection. Whatever it raises leaves as a store error.

        A connection that was cut while idle is no outage: a job that may be done ``again`` is, on a new one. A fork
        waits for the end of the job.
        """
        with self._lock:
            if self._is_forking:
                self._gate.wait_for(lambda: not self._is_forking, self.timeout)
            self._inside += 1
        try:
            was_open, began = getattr(self.local, "session", None) is not None, time.monotonic()
            try:
                return job(self._session())
            except StoreOutage:
                if not (was_open and again) or time.monotonic() - began > self.timeout / 2:
                    raise
                self.drop_session()
                return job(self._session())
        except BaseException as error:
            self.drop_session()
            if (fault := fault_of(self.name, error)) is error:
                raise
            raise fault from error
        finally:
            with self._lock:
                self._inside -= 1
                if self._is_forking:
                    self._gate.notify_all()

    def _session(self) -> StoreSession:
        """Return this thread's connection, a new one when the store was away since it was made."""
        session: StoreSession | None = getattr(self.local, "session", None)
        if session is not None and self.local.era != self.era:
            self.drop_session()
            session = None
        if session is None:
            self.local.era = self.era
            session = self.local.session = self.store.connect(self.timeout)
        return session

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

    def before_fork(self) -> None:
        """Wait, bounded, until no thread uses the store.

        A fork copies the locks of a client library as they are, and one that is held would stay held in the child.
        """
        with self._lock:
            self._is_forking = True
            self._gate.wait_for(lambda: not self._inside, self.timeout)

    def after_fork(self) -> None:
        """Let the threads of the parent use the store again."""
        with self._lock:
            self._is_forking = False
            self._gate.notify_all()


# ---- The guards of this process that share a store.

_BEATS_AT_ONCE: Final = 200


class StoreGuards:
    """Tells the store which runs of the guards are alive, and the guards when the control document has changed.

    A guard may go, the ledger stays.
    """

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self.version, self._text = 0, ""  # of the control document, as last seen
        self._identity = ""  # of the store that the control document is from
        self._unreadable = ""  # why the document could not be read, as last logged
        self.on_control = Listeners[Callable[[str], None]]()
        self.running = Listeners[Callable[[], Iterable[tuple[str, str]]]]()
        self.on_dropped = Listeners[Callable[[int, int], None]]()
        self.restart()

    def restart(self) -> None:
        """Make a new lock, also in a forked child: the parent may have held the old one."""
        self._reading = threading.RLock()

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        with self._reading:
            self.on_control.add(on_control)
            self.running.add(running)
            if self._text:
                self._inform(on_control)

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
            for listener in self.on_control:
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

    def look(self, worker: str, *, beat: bool) -> None:
        """Check for stops, also while a model takes its time; ``beat``: report which runs are alive as well."""
        alive: list[tuple[str, str]] = []
        for running in self.running:
            try:
                alive.extend(itertools.islice(running(), _BEATS_AT_ONCE))
            except Exception:  # the writer must survive: without it nothing is ever booked again
                _log.exception("runguard.store_error: a guard cannot say which of its runs are alive")
        if not alive:
            return

        def job(session: StoreSession) -> None:
            versions = [session.beat(run, worker, text) for run, text in alive] if beat else [session.get("control")[0]]
            self._link.is_back()
            if self.is_news(versions[-1]):
                self.read(session)

        try:
            self._link.use(job)
        except UnforeseenError:
            raise  # counted and logged by the writer
        except StoreOutage as error:
            self._link.outage(error)
        except StoreError:
            pass  # a call that needs an account reports it


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
        facts, began = self.facts, time.monotonic()
        next_beat = next_look = 0.0
        next_sums, next_purge = began + _SUMS_S, began + _PURGE_S
        while not facts.closed.is_set():
            now = time.monotonic()
            if now >= next_purge:
                next_purge = now + _PURGE_S
                self.record(self._purge)
            if now >= next_sums:
                next_sums = now + _SUMS_S
                self.record(_sum_up_once)
            if now >= next_look:
                is_beat = now >= next_beat
                self._safely("signs of life", partial(self._guards.look, worker, beat=is_beat))
                next_look = time.monotonic() + _BEAT_S
                if is_beat:  # a tenth of the writer's time at most: facts come first
                    next_beat = time.monotonic() + max(_BEAT_S, 9 * (time.monotonic() - now))
            self.tell_dropped()
            fact = facts.first(_BEAT_S)
            if fact is not None and not facts.closed.is_set():
                self._write(fact, facts)
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

    def _write(self, fact: Fact, facts: Facts) -> None:
        """Write a fact until it is booked, or until the store has refused it a few times."""
        link, outages = self._link, 0
        most = TRIES if fact.repeatable else 1  # a record whose writer ended in the middle may have been written
        why: Exception = StoreError("its writer ended in the middle")
        while fact.tries < most:
            fact.tries += 1
            try:
                reply = link.use(fact.write)
            except StoreOutage as error:
                fact.tries -= 1
                outages += 1
                link.outage(error)
                self.tell_dropped()
                if facts.closed.wait(_BACKOFF_S[min(outages, len(_BACKOFF_S)) - 1]):
                    return
            except StoreError as error:  # a damaged answer, or one to another request, may look like this
                why = error
                if isinstance(error, UnforeseenError):
                    link.fault()
                    if fact.tries < most:
                        log_fault(f"{link.name}: a settlement met an exception and is tried again", link.faults)
                        time.sleep(_BACKOFF_S[fact.tries - 1])
            else:
                if isinstance(reply, StoreReply):
                    self._safely("the look at an answer", partial(self._learn, reply, fact))
                then, fact.then = fact.then, None
                if then is not None:
                    self._safely("what follows a settlement", then)
                facts.done(fact)
                return
        self._lose(fact, why)
        facts.done(fact)

    def _lose(self, fact: Fact, why: Exception | None = None) -> None:
        """Count a fact that is not booked, and log why the store refused it: the first one, the second, fourth, …"""
        with self._losing:
            self.lost += 1
            self.unbooked += fact.repeatable
            if isinstance(fact, Settlement):
                if self.dropped == self._told:
                    self._untold_since = time.monotonic()
                self.dropped += 1
                self.dropped_nano += fact.nano
        what, count = ("a settlement", self.unbooked) if fact.repeatable else ("a record", self.lost)
        if why is not None and count & (count - 1) == 0:
            with contextlib.suppress(BaseException):
                _log.error("runguard.store_error: %s could not be booked: %s", what, why, exc_info=why.__cause__)

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
        for listener in self._guards.on_dropped:
            listener(count, nano)


def _sum_up_once(session: StoreSession) -> None:
    """Sum up new records, unless another worker did so in this minute."""
    if session.claim("spend sums", _SUMS_S) == "yes":
        sum_up(session)
