"""A ledger over a durable store. The event loop never waits for the store: threads do, and every wait has a deadline.

Reservations are asked on a few threads and awaited. Settlements and releases are facts: they go to one writer in order,
and are told again until the store has heard them. A reservation that answers too late is given back.

The threads survive every exception, also of a type that no store should raise, and every use of the ledger starts one
again that is gone.
"""

import asyncio
import atexit
import contextlib
import itertools
import logging
import multiprocessing.util
import os
import queue
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Generic, TypeVar

from runguard.background import log_fault, start_thread
from runguard.core.budget import NOTHING, UNLIMITED, Amount, share_of, unit_reached
from runguard.ledger.base import STALE, Account, Hold, Refusal, Stale, Waiting, refusal_of, wake
from runguard.ledger.control import change_control, read_control
from runguard.ledger.facts import FACTS_KEPT, Fact, Facts
from runguard.ledger.faults import UnforeseenError, fault_of, store_faults
from runguard.ledger.identity import Seen, StoreReplacedError
from runguard.ledger.store import Balance, Line, Reply, Session, Store, StoreError, StoreOutage

_log: Final = logging.getLogger("runguard")
_T = TypeVar("_T")
_ASKERS: Final = 4
_POLL_S: Final = 0.03  # a waiting call looks this often for what other workers have settled
_REST_S: Final = 1.0  # after an outage: so long nobody is made to wait for the store again
_BACKOFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_ACCOUNTS_KEPT: Final = 10_000
TRIES: Final = 5  # of a settlement that meets an exception which no store should raise
_GOODBYE_S: Final = 2.0
_BEAT_S: Final = 1.0
_PURGE_S: Final = 3_600.0
_BEATS_AT_ONCE: Final = 200
_LONGEST_LINE: Final = 60  # times the deadline that a call may stand in line while others are served


class StoredAccount(Account):
    """An account as the store last told it."""

    __slots__ = ("line",)

    def __init__(self, line: Line) -> None:
        super().__init__(line.key, line.scope, line.window, line.ends)
        self.line = line
        self.limit(line.caps)

    def with_line(self, line: Line) -> "StoredAccount":
        other = StoredAccount(line)
        other.granted, other.overrun, other.closed, other.alert = self.granted, self.overrun, self.closed, self.alert
        other.spent_usd, other.spent_tokens, other.spent_calls = self.spent
        other.due_usd, other.due_tokens, other.due_calls = self.due_usd, self.due_tokens, self.due_calls
        other.limit(line.caps)
        return other

    def limit(self, caps: Amount) -> None:
        self.cap_usd, self.cap_tokens, self.cap_calls = (
            UNLIMITED if cap >= UNLIMITED else cap + more for cap, more in zip(caps, self.granted, strict=True)
        )

    def learn(self, balance: Balance) -> None:
        self.granted, self.overrun, self.closed = balance.granted, balance.overrun, balance.closed
        self.limit(self.line.caps)
        self.spent_usd, self.spent_tokens, self.spent_calls = balance.spent
        self.due_usd, self.due_tokens, self.due_calls = (
            s + h for s, h in zip(balance.spent, balance.held, strict=True)
        )


class _Job(Generic[_T]):
    """Something that a caller wants the store to do now."""

    __slots__ = ("again", "asked", "begun", "do", "future")

    def __init__(self, do: Callable[[Session], _T], again: bool) -> None:
        self.do, self.again = do, again  # again: done twice it counts once
        self.asked = time.monotonic()
        self.begun: float | None = None
        self.future: Future[_T] = Future()


class StoreLedger(Waiting):
    """One per store and process, shared by all guards that name the same store."""

    def __init__(self, store: Store, timeout: float, retention_s: float = 30 * 86_400.0) -> None:
        self.retention_s = retention_s
        self.store, self.timeout, self.name, self.is_shared = store, timeout, store.name, True
        self.outages = 0
        self.lost = 0  # facts that the store refused, or that did not fit into the line
        self._unbooked = 0  # of them settlements and releases
        self._faults = self._restarts = 0  # exceptions that no store should raise; threads that had to be started again
        self.control, self._control_text = 0, ""  # the control document as it was last seen, and its version
        self._unreadable = ""  # why the document could not be read, as last logged
        # a guard may go; the ledger stays
        self._guards: list[tuple[weakref.WeakMethod[Any], weakref.WeakMethod[Any]]] = []
        self._accounts: OrderedDict[str, StoredAccount] = OrderedDict()
        self._by_scope: dict[str, set[str]] = {}
        self._offset = 0.0  # the store's clock less ours
        self._down_until, self.is_away, self._era = 0.0, False, 0
        self._replaced: StoreReplacedError | None = None  # why the store is away, when another one has its place
        # a store that wraps another one may have none
        self._seen: Seen = getattr(store, "seen", None) or Seen(store.name)
        self._control_of = ""  # the identity of the store that the control document is from
        self._checked = False
        self._lock = threading.Lock()
        self._start()
        _ledgers.add(self)

    def _start(self) -> None:
        """Also in a forked child: threads and connections stay with the parent."""
        super().__init__()
        self.worker = f"{os.uname().nodename if hasattr(os, 'uname') else 'worker'}:{os.getpid()}"
        self._prefix, self._ids = f"{secrets.token_hex(8)}-", itertools.count(1)
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._facts = Facts()
        self._served = 0.0  # when a job was last done
        self._local = threading.local()
        self._threads: list[threading.Thread | None] = [None] * (_ASKERS + 1)  # the writer is the last
        self._gate, self._inside, self._forking = threading.Condition(), 0, False
        self._reading = threading.RLock()

    def _hush(self) -> None:
        """Before a fork, let whoever is inside the store finish, bounded: a client library's locks are copied as they
        are, held for ever.
        """
        with self._gate:
            self._forking = True
            self._gate.wait_for(lambda: not self._inside, self.timeout)

    def _go_on(self) -> None:
        with self._gate:
            self._forking = False
            self._gate.notify_all()

    @contextlib.contextmanager
    def _in_store(self) -> Iterator[None]:
        with self._gate:
            self._gate.wait_for(lambda: not self._forking, self.timeout)
            self._inside += 1
        try:
            with store_faults(self.name, BaseException):
                yield
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _ensure_threads(self) -> None:
        """Start the threads, and start again what has ended. ``StoreOutage`` when the system has no thread to give."""
        if all(thread is not None and thread.is_alive() for thread in self._threads):
            return
        restarts = self._restarts
        with self._lock:
            if self._threads[-1] is None:
                # Children of multiprocessing leave without atexit; this is made in the process that uses it.
                multiprocessing.util.Finalize(None, self.flush, args=(_GOODBYE_S,), exitpriority=10)
            for n, thread in enumerate(self._threads):
                if thread is None or not thread.is_alive():
                    try:
                        self._threads[n] = start_thread(
                            f"runguard-store-{n}", self._answer if n < _ASKERS else self._tell, self._fault
                        )
                    except (RuntimeError, MemoryError) as error:
                        raise StoreOutage(f"{self.name}: no thread can be started to ask it: {error}") from None
                    self._restarts += thread is not None
        if self._restarts != restarts:
            _log.error(
                "runguard.background_error: %s: %d threads had ended and were started again",
                self.name,
                self._restarts - restarts,
            )

    def close(self) -> None:
        """End the threads and close their connections. Facts that the store has not heard are dropped: call
        ``flush`` first.

        The ledger opens again when it is used.
        """
        with self._lock:
            threads, self._threads = self._threads, [None] * (_ASKERS + 1)
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
            facts, self._facts = self._facts, Facts()
        facts.close()
        for _ in range(_ASKERS):
            jobs.put(None)
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(min(self.timeout, _GOODBYE_S))

    def _fault(self) -> None:
        """An exception that no store should raise: the connection may be in any state."""
        self._faults += 1
        self._drop_session()

    def health(self) -> dict[str, Any]:
        """What is still on its way to the store, and what went wrong on the way. Plain data."""
        return {
            "name": self.name,
            "waiting": len(self._facts),
            "lost": self.lost,
            "faults": self._faults,
            "restarts": self._restarts,
        }

    def session(self) -> Session:
        """This thread's connection; a new one when the store was away since it was made."""
        session: Session | None = getattr(self._local, "session", None)
        if session is not None and self._local.era != self._era:
            self._drop_session()
            session = None
        self._local.fresh = session is None
        if session is None:
            self._local.era = self._era
            session = self._local.session = self.store.connect(self.timeout)
        return session

    def _drop_session(self) -> None:
        session, self._local.session = getattr(self._local, "session", None), None
        if session is not None:
            try:
                session.close()
            except BaseException:
                with contextlib.suppress(BaseException):
                    _log.debug("runguard.store_close: a broken connection could not be closed", exc_info=True)

    def _answer(self) -> None:
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            job.begun = time.monotonic()
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = self._do(job)
            except BaseException as error:
                # The answer comes first: its caller must not wait for anything else that may go wrong.
                job.future.set_exception(fault_of(self.name, error))
                self._drop_session()
            else:
                self._served = time.monotonic()
                job.future.set_result(result)
        self._drop_session()

    def _do(self, job: "_Job[_T]") -> _T:
        used, began = getattr(self._local, "session", None) is not None, time.monotonic()
        with self._in_store():
            try:
                return job.do(self.session())
            except StoreOutage:
                if not (used and job.again) or time.monotonic() - began > self.timeout / 2:
                    raise
                # a connection that was cut while it was not used is not an outage: once more on a new one
                self._drop_session()
                return job.do(self.session())

    def _tell(self) -> None:
        """The writer: every fact in order, each until it is heard."""
        facts = self._local.facts = self._facts
        next_beat, next_look, purged = 0.0, 0.0, time.monotonic()
        while not facts.closed.is_set():
            if time.monotonic() - purged >= _PURGE_S:
                purged = time.monotonic()
                self.tell(lambda session: session.purge(self.retention_s))
            if time.monotonic() >= next_beat:
                began = time.monotonic()
                self._safely("signs of life", self._beat)
                took = time.monotonic() - began
                # a tenth of the writer's time at most: facts come first
                next_beat = time.monotonic() + max(_BEAT_S, 9 * took)
                next_look = time.monotonic() + _BEAT_S
            elif time.monotonic() >= next_look:
                next_look = time.monotonic() + _BEAT_S
                self._safely("the look for stops", self._look_for_stops)
            fact = facts.first(_BEAT_S)
            if fact is not None and not facts.closed.is_set() and self._told(fact):
                facts.done(fact)
        self._drop_session()

    def _safely(self, what: str, job: Callable[[], None]) -> None:
        """Do what is not a fact. Whatever it raises, the writer goes on with its facts."""
        try:
            job()
        except BaseException:
            self._fault()
            log_fault(f"{self.name}: {what} failed", self._faults)

    def _told(self, fact: Fact) -> bool:
        """Write one fact; False: try again later."""
        if fact.tries and not fact.repeatable:  # its writer was ended in the middle: it may have been written
            self._lose(fact)
            return True
        fact.tries += 1
        try:
            self._tell_one(fact)
        except BaseException as error:
            if isinstance(error, StoreError) and not isinstance(error, UnforeseenError):
                self._lose(fact)
                # counted always, logged once: the store needs manual repair
                if self.lost == 1 or (fact.repeatable and self._unbooked == 1):
                    _log.error(
                        "runguard.store_error: %s cannot be booked: %s",
                        "what was spent" if fact.repeatable else "a record",
                        error,
                    )
                self._drop_session()
                return True
            self._fault()
            if fact.repeatable and fact.tries < TRIES:
                log_fault(f"{self.name}: a settlement met an exception and is told again", self._faults)
                time.sleep(_BACKOFF_S[fact.tries - 1])
                return False
            self._lose(fact)
            with contextlib.suppress(BaseException):
                _log.exception(
                    "runguard.store_error: %s: a %s could not be booked",
                    self.name,
                    "settlement" if fact.repeatable else "record",
                )
        return True

    def _lose(self, fact: Fact) -> None:
        self.lost += 1
        self._unbooked += fact.repeatable

    def _beat(self) -> None:
        """Say which runs are alive, and see whether somebody has stopped something:
        also while a model takes its time.
        """
        guards = [running for _, reference in self._guards if (running := reference()) is not None]
        alive: list[tuple[str, str]] = []
        for running in guards:
            try:
                alive.extend(itertools.islice(running(), _BEATS_AT_ONCE))
            except Exception:  # the writer must live: without it nothing is ever booked again
                _log.exception("runguard.store_error: a guard cannot say which of its runs are alive")
        if not alive:
            return
        try:
            with self._in_store():
                session, version = self.session(), self.control
                for run, text in alive:
                    version = session.beat(run, self.worker, text)
                self._is_back()
                if self._is_news(version):
                    self._read_control(session)
        except StoreOutage as error:
            if self._local.fresh:  # else it may only have been cut while nobody used it
                self._outage(error)
            self._drop_session()
        except UnforeseenError:
            raise  # counted and logged by the writer
        except StoreError:
            self._drop_session()  # a call that wants an account says why

    def _look_for_stops(self) -> None:
        """Between two rounds of signs of life: somebody may have thrown the switch while a model takes its time."""
        if not any(reference() is not None for _, reference in self._guards):
            return
        try:
            with self._in_store():
                session = self.session()
                if self._is_news(session.get("control")[0]):
                    self._read_control(session)
        except UnforeseenError:
            raise  # counted and logged by the writer
        except (StoreOutage, StoreError):
            self._drop_session()  # whoever needs the store finds out

    def _tell_one(self, fact: Fact) -> None:
        cuts = errors = 0
        while True:
            try:
                with self._in_store():
                    reply = fact.tell(self.session())
                break
            except UnforeseenError:
                raise
            except StoreError:
                errors += 1
                if errors >= TRIES or not fact.repeatable:
                    raise
                # a damaged answer, or one to another request, may look like this: only what new connections say as well
                # is final
                self._drop_session()
            except StoreOutage as error:
                fresh = getattr(self._local, "fresh", True)
                self._drop_session()
                cuts += 1
                if cuts == 1 and not fresh:
                    continue  # a connection that was cut while it was not used is not an outage: once more on a new one
                self._outage(error)
                if self._local.facts.closed.wait(_BACKOFF_S[min(cuts - 1, len(_BACKOFF_S) - 1)]):
                    return  # the ledger was closed
        if reply is not None:
            self._safely("the look at an answer", lambda: self._learn(reply, fact))
        then, fact.then = fact.then, None
        if then is not None:
            self._safely("what follows a settlement", then)

    def _learn(self, reply: Reply, fact: Fact) -> None:
        """The fact is booked. What else there was to learn comes with the next answer if it fails here."""
        try:
            with self._in_store():
                self._heard(reply, fact.accounts)
        except (StoreOutage, StoreError) as error:
            self._outage(error)
            self._drop_session()

    def _outage(self, error: Exception) -> None:
        self.outages += 1
        if isinstance(error, StoreReplacedError):
            if self._replaced is None:
                _log.error("runguard.store_replaced: %s", error)
            self._replaced = error
        elif not self.is_away:
            _log.error("runguard.store_outage: %s", error)
        if not self.is_away:
            self.is_away = True
            self._era += 1
        self._down_until = time.monotonic() + _REST_S

    def _is_back(self) -> None:
        if self.is_away:
            self.is_away, self._down_until, self._replaced = False, 0.0, None
            _log.warning("runguard.store_back: %s answers again", self.name)

    async def ask(self, job: Callable[[Session], _T], *, again: bool = False) -> _T:
        """Run a job on a thread and await it, within the deadline. ``again``: it may be done twice and counts once."""
        if time.monotonic() < self._down_until:
            raise (
                self._replaced.again()
                if self._replaced is not None
                else StoreOutage(f"{self.name}: did not answer a moment ago")
            )
        self._ensure_threads()
        asked: _Job[_T] = _Job(job, again)
        self._jobs.put(asked)
        wrapped = asyncio.wrap_future(asked.future)
        try:
            while (left := self._time_left(asked)) > 0:
                await asyncio.wait((wrapped,), timeout=left)
                if wrapped.done():
                    return wrapped.result()
        except StoreOutage as error:
            self._outage(error)
            raise
        asked.future.cancel()
        wrapped.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody waits for it any more
        outage = StoreOutage(f"{self.name}: no answer within {self.timeout:g} s")
        self._outage(outage)
        raise outage

    def call(self, job: Callable[[Session], _T], *, again: bool = False) -> _T:
        """For callers that are not on the path of a run: ask, and wait here."""
        self._ensure_threads()
        asked: _Job[_T] = _Job(job, again)
        self._jobs.put(asked)
        while (left := self._time_left(asked)) > 0:
            with contextlib.suppress(FutureTimeout):
                return asked.future.result(left)
            if asked.future.done():
                return asked.future.result()  # it came in this very moment
        asked.future.cancel()
        raise StoreOutage(
            f"{self.name}: no answer within {self.timeout:g} s; what was asked may still be done: look before "
            "you repeat it"
        )

    def _time_left(self, job: "_Job[Any]") -> float:
        """Seconds that a caller waits on. The deadline begins anew while others are served, until it is the
        job's turn: a long line is not an outage.

        A job that begins late because the ones before it failed has no more time than they had.
        """
        served = self._served if job.begun is None else min(self._served, job.begun)
        since = max(job.asked, min(served, job.asked + _LONGEST_LINE * self.timeout))
        return since + self.timeout - time.monotonic()

    # ---- the ledger -------------------------------------------------------------------------------------------------

    def now(self, at: float) -> float:
        return time.time() + self._offset  # noqa: TID251 - the store's clock, as last told

    def period_time(self, at: float) -> float:
        # the store keeps the accounts of past periods, and refuses those that are not current by its own clock
        return self.now(at)

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        with self._lock:
            line = Line(key, scope, window, begins, ends, caps)
            account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = StoredAccount(line)
                self._by_scope.setdefault(scope, set()).add(key)
                if len(self._accounts) > _ACCOUNTS_KEPT:  # copies only: the store keeps them
                    old, dropped = self._accounts.popitem(last=False)
                    self._unlist(dropped.scope, old)
            elif (
                account.line != line
            ):  # another guard's limits, or new ones: whoever holds the old one keeps what it was told
                account = self._accounts[key] = account.with_line(line)
                self._accounts.move_to_end(key)
            else:
                self._accounts.move_to_end(key)
            return account

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        hold = Hold(accounts, want, f"{self._prefix}{next(self._ids)}")
        lines = _lines(accounts)

        def job(session: Session) -> Hold | Refusal | Stale:
            seen = self._changes
            reply = session.reserve(hold.id, ttl, lines, want, force=force)
            answer: Hold | Refusal | Stale = STALE if reply.stale else hold
            # from what this reply says: others may be told something newer in the same moment
            if not reply.ok and not reply.stale:
                answer = _refusal(reply, lines, accounts, want, seen)
            self._heard(reply, accounts, session, makes_room=False)
            return answer

        try:
            return await self.ask(job, again=True)
        except (
            BaseException
        ):  # whether it is held is not known, or will be: a release of what is not there makes sure that it never is
            self.release(hold)
            raise

    def hold_now(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0) -> Hold | None:
        return None  # the store has to be asked

    def book(self, accounts: Sequence[Account]) -> Hold:
        return Hold(accounts, NOTHING, f"{self._prefix}{next(self._ids)}")

    def settle(self, hold: Hold, actual: Amount, then: Callable[[], None] | None = None) -> None:
        lines = _lines(hold.accounts)
        self._put(Fact(lambda session: session.settle(hold.id, lines, actual), hold.accounts, then, repeatable=True))
        hold.booked, hold.is_open = actual, False

    def release(self, hold: Hold) -> None:
        if hold.is_open:
            self._put(Fact(lambda session: session.release(hold.id), hold.accounts, repeatable=True))
            hold.is_open = False

    def tell(self, fact: Callable[[Session], Any]) -> None:
        """Something for the records: told in order with the settlements, dropped when too much is waiting."""
        if len(self._facts) < FACTS_KEPT // 2:
            self._put(Fact(lambda session: _nothing(fact(session)), repeatable=False))

    def _put(self, fact: Fact) -> None:
        if not self._facts.put(fact):
            self._lose(fact)
            _log.error(
                "runguard.store_full: %s: %d facts are waiting to be told; one was dropped", self.name, FACTS_KEPT
            )
        with contextlib.suppress(StoreOutage):  # no thread to be had: the fact waits, and every later use tries again
            self._ensure_threads()

    def _heard(
        self, reply: Reply, accounts: Sequence[Account], session: Session | None = None, *, makes_room: bool = True
    ) -> None:
        """Learn what the store told.

        A reservation makes no room: whoever waits is not to ask again because another was answered.
        """
        self._is_back()
        self._offset = reply.now - time.time()  # noqa: TID251
        told = {balance.key: balance for balance in reply.balances}
        for account in accounts:
            balance = told.get(account.key)
            if balance is not None and isinstance(account, StoredAccount):
                account.learn(balance)
        if self._is_news(reply.control):
            self._read_control(session or self.session())
        if makes_room:
            self._wake_all()

    def _is_news(self, version: int) -> bool:
        """Whether the control document must be read: it has another version, or it is that of an adopted store."""
        if self._control_of != self._seen.text:
            if self._control_of:
                self.control = -1
            self._control_of = self._seen.text
        return version != self.control

    def _wake_all(self) -> None:
        with self._lock:
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        wake(waiting)

    def _read_control(self, session: Session) -> None:
        with self._reading:  # read, tell and remember as one step: no older document after a newer one
            version, self._control_text = self._checked_control(session)
            for reference, _ in self._guards:
                if (listener := reference()) is not None:
                    self._inform(listener)
            self.control = version  # last: who sees this version knows that the guards have heard it

    def _checked_control(self, session: Session) -> tuple[int, str]:
        try:
            return read_control(session, self.name)
        except StoreError as error:
            if str(error) != self._unreadable:  # log once; needs manual repair
                self._unreadable = str(error)
                _log.error("runguard.control_unreadable: %s. The stops known here stay in force", error)
            raise

    def _inform(self, listener: Callable[[str], None]) -> None:
        try:
            listener(self._control_text)
        except Exception:  # the reservation that brought the news is not to blame
            _log.exception("runguard.store_error: a guard could not take over the control document")

    async def refresh(self) -> None:
        """Read the control document again; when the store is away, what is known here holds."""
        with contextlib.suppress(StoreOutage, StoreError):
            await self.ask(self._read_control, again=True)

    def refresh_now(self) -> None:
        self.call(self._read_control, again=True)

    def check(self) -> None:
        """Whether the store can be worked with, asked once.

        One that is only away may come back: that is said, and no error.
        """
        if self._checked:
            return
        self._checked = True  # whoever comes later, say with every run, does not wait for it
        try:
            self.call(lambda session: session.now(), again=True)
        except StoreOutage as error:
            self._outage(error)
        except StoreError:
            self._checked = False  # a mistake: to be told to everybody who makes it
            raise

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        with self._reading:
            alive = [entry for entry in self._guards if entry[0]() is not None]
            self._guards = [*alive, (weakref.WeakMethod(on_control), weakref.WeakMethod(running))]
            if self._control_text:
                self._inform(on_control)

    def change_control(self, change: Callable[[str], str]) -> str:
        def job(session: Session) -> str:
            changed = change_control(session, self.name, change)
            self._read_control(session)
            return changed

        return self.call(job)

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool | None:
        """Asked by the writer, after it has booked what reached the mark."""
        try:
            with self._in_store():
                return self.session().first(account.key, mark, percent, limit)
        except (StoreOutage, StoreError) as error:  # unheard: nobody fires now, the next settlement asks again
            self._outage(error)
            self._drop_session()
            return None

    def extend(self, account: Account, more: Amount) -> None:
        assert isinstance(account, StoredAccount)

        def job(session: Session) -> Balance:
            balance = session.extend(account.line, more)
            reached = {
                m: unit_reached(balance.spent, share_of(limit, balance.granted, p))
                for m, (p, limit) in session.marks(account.key).items()
            }
            session.unmark(account.key, [mark for mark, unit in reached.items() if unit is None])
            return balance

        account.learn(self.call(job))
        account.alert = NOTHING
        self._wake_all()

    async def changed(self, since: Refusal, seconds: float) -> bool:
        await self._wait(since, min(seconds, _POLL_S))
        return True  # others may have settled: nobody tells us, so ask

    def find(self, scope: str) -> list[Account]:
        return sorted(self._read(scope), key=lambda account: account.ends or 0.0)

    def accounts(self) -> list[Account]:
        return self._read(None)

    def _read(self, scope: str | None) -> list[Account]:
        balances, now = self.call(lambda session: (session.read(scope), session.now()), again=True)
        self._offset = now - time.time()  # noqa: TID251
        return [self._known(balance) for balance in balances]

    def known(self) -> list[Account]:
        with self._lock:
            return list(self._accounts.values())

    def _known(self, balance: Balance) -> Account:
        with self._lock:
            account = self._accounts.get(balance.key)
        if account is None:
            account = StoredAccount(Line(balance.key, balance.scope, balance.window, None, balance.ends, balance.caps))
        account.learn(balance)
        return account

    def forget(self, scope: str) -> None:
        with self._lock:
            for key in self._by_scope.pop(scope, ()):
                self._accounts.pop(key, None)

    def _unlist(self, scope: str, key: str) -> None:
        keys = self._by_scope.get(scope)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._by_scope[scope]

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every fact handed over is booked.

        False when something is left, or could never be booked.
        """

        def ensure() -> None:
            with contextlib.suppress(StoreOutage):
                self._ensure_threads()

        return self._facts.wait_until_done(seconds, ensure) and not self._unbooked


def _refusal(reply: Reply, lines: Sequence[Line], accounts: Sequence[Account], want: Amount, seen: int) -> Refusal:
    told = {balance.key: balance for balance in reply.balances}
    copies: list[Account] = []
    for line in lines:
        copy = StoredAccount(line)
        copy.learn(told[line.key])
        copies.append(copy)
    refusal = refusal_of(copies, want, seen)
    refusal.account = next(account for account in accounts if account.key == refusal.account.key)
    return refusal


def _nothing(_: Any) -> None:
    return None


def _lines(accounts: Sequence[Account]) -> list[Line]:
    return [account.line for account in accounts if isinstance(account, StoredAccount)]


# ---- one per store --------------------------------------------------------------------------------------------------

_open: Final[dict[str, StoreLedger]] = {}
_opening: Final = threading.Lock()
_ledgers: Final[weakref.WeakSet[StoreLedger]] = weakref.WeakSet()


def _for_each(do: Callable[[StoreLedger], object]) -> Callable[[], None]:
    def done() -> None:
        for ledger in list(_ledgers):
            do(ledger)

    return done


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_for_each(StoreLedger._hush),
        after_in_parent=_for_each(StoreLedger._go_on),
        after_in_child=_for_each(StoreLedger._start),
    )
atexit.register(_for_each(lambda ledger: ledger.flush(_GOODBYE_S)))


def ledger_of(store: Store, url: str, timeout: float, retention_s: float) -> StoreLedger:
    """The ledger of this process for a store: guards that name the same one share it."""
    with _opening:
        ledger = _open.get(url)
        if ledger is None:
            ledger = _open[url] = StoreLedger(store, timeout, retention_s)
        return ledger


__all__ = ["StoreError", "StoreLedger", "StoreOutage", "ledger_of"]
