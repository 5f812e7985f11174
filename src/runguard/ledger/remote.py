"""A ledger over a durable store. The event loop never waits for the store: threads do, and every wait has a deadline.

A few threads ask for reservations, which callers await (``store_jobs``). Settlements and releases are facts: one writer
sends them in order and repeats each until the store has booked it (``fact_writer``). A reservation whose answer comes
too late is given back.

The threads survive every exception, also of a type that no store should raise. Every use of the ledger restarts a
thread that has ended.
"""

import atexit
import contextlib
import itertools
import logging
import multiprocessing.util
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from runguard.background import start_thread
from runguard.core.money import NOTHING, Amount, share_of, unit_reached
from runguard.ledger.base import STALE, Account, Hold, Refusal, Stale, Waiting
from runguard.ledger.fact_writer import FactWriter
from runguard.ledger.facts import Fact
from runguard.ledger.lingering import is_unnoticed, reaches_alert, reserve_along, settlement_of
from runguard.ledger.store import Balance, Line, Record, Store, StoreError, StoreOutage, StoreReply, StoreSession
from runguard.ledger.store_guards import StoreGuards
from runguard.ledger.store_jobs import StoreJobs
from runguard.ledger.store_link import StoreLink
from runguard.ledger.stored_account import StoredAccount, StoredAccounts, lines_of, refusal_from
from runguard.ledger.waiting_line import Sleeper, wake

_log: Final = logging.getLogger("runguard")
_T = TypeVar("_T")
_ASKERS: Final = 4
_POLL_S: Final = 0.03  # a waiting call checks this often what other workers have settled
_GOODBYE_S: Final = 2.0


class StoreLedger(Waiting):
    """One per store and process, shared by all guards that name the same store."""

    def __init__(self, store: Store, timeout: float, retention_s: float = 30 * 86_400.0) -> None:
        self.store, self.timeout, self.name, self.is_shared = store, timeout, store.name, True
        self.link = StoreLink(store, timeout)
        self._guards = StoreGuards(self.link)
        self._jobs = StoreJobs(self.link, self._ensure_threads)
        self._writer = FactWriter(self.link, self._guards, retention_s, self._learn)
        self._restarts = 0  # threads that had to be started again
        self._accounts = StoredAccounts()
        self._offset = 0.0  # the store's clock less ours
        self._checked = False
        self._start()
        _ledgers.add(self)

    def _start(self) -> None:
        super().__init__()
        self.worker = f"{os.uname().nodename if hasattr(os, 'uname') else 'worker'}:{os.getpid()}"
        self._prefix, self._ids = f"{secrets.token_hex(8)}-", itertools.count(1)
        self._threads: list[threading.Thread | None] = [None] * (_ASKERS + 1)  # the writer is the last

    def restart(self) -> None:
        """In a forked child: threads, connections and waiting facts stay with the parent."""
        for part in (self.link, self._guards, self._jobs, self._writer, self._accounts):
            part.restart()
        self._start()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _ensure_threads(self) -> None:
        """Start the threads, and start again what has ended. ``StoreOutage`` when the system has no thread to give."""
        if all(thread is not None and thread.is_alive() for thread in self._threads):
            return
        restarts = self._restarts
        with self._lock:
            if self._threads[-1] is None:
                # Children of multiprocessing end without atexit; this is registered in the process that uses it.
                multiprocessing.util.Finalize(None, self.flush, args=(_GOODBYE_S,), exitpriority=10)
            for n, thread in enumerate(self._threads):
                if thread is None or not thread.is_alive():
                    try:
                        self._threads[n] = start_thread(
                            f"runguard-store-{n}", self._jobs.work if n < _ASKERS else self._write, self.link.fault
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

    def _write(self) -> None:
        self._writer.work(self.worker)

    def close(self) -> None:
        """End the threads and close their connections. Facts that are not booked yet are dropped: call ``flush`` first.

        The ledger opens again when it is used.
        """
        with self._lock:
            threads, self._threads = self._threads, [None] * (_ASKERS + 1)
            jobs, facts = self._jobs.restart(), self._writer.restart()
        facts.close()
        for _ in range(_ASKERS):
            jobs.put(None)
        for thread in threads:
            if thread is not None and thread is not threading.current_thread():
                thread.join(min(self.timeout, _GOODBYE_S))

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every fact is booked. False when something is left, or could never be booked."""

        def ensure() -> None:
            with contextlib.suppress(StoreOutage):
                self._ensure_threads()

        return self._writer.facts.wait_until_done(seconds, ensure) and not self._writer.unbooked

    @property
    def is_away(self) -> bool:
        """Whether the store did not answer the last time."""
        return self.link.is_away

    @property
    def lost(self) -> int:
        """Facts that the store refused, or that did not fit into the queue."""
        return self._writer.lost

    def health(self) -> dict[str, Any]:
        """What is still on its way to the store, and what went wrong on the way. Plain data."""
        return {
            "name": self.name,
            "waiting": len(self._writer.facts),
            "lost": self.lost,
            "faults": self.link.faults,
            "restarts": self._restarts,
        }

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def ask(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        """Run a job on a thread and await it, within the deadline. ``again``: doing it twice counts once."""
        return await self._jobs.ask(job, again=again)

    def call(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        """For callers that are not on the path of a run: ask, and wait here."""
        return self._jobs.call(job, again=again)

    # ---- the ledger -------------------------------------------------------------------------------------------------

    def now(self, at: float) -> float:
        return time.time() + self._offset  # noqa: TID251 - the store's clock, as last reported

    def period_time(self, at: float) -> float:
        # the store keeps the accounts of past periods, and refuses those that are not current by its own clock
        return self.now(at)

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        return self._accounts.get(Line(key, scope, window, begins, ends, caps))

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        hold = Hold(accounts, want, f"{self._prefix}{next(self._ids)}")
        lines = lines_of(accounts)

        def job(session: StoreSession) -> Hold | Refusal | Stale:
            seen = self._changes
            reply = self._reserve(session, hold, ttl, lines, force)
            answer: Hold | Refusal | Stale = STALE if reply.stale else hold
            if not reply.ok and not reply.stale:
                answer = refusal_from(reply, accounts, want, seen)
            self._learn_from(reply, accounts, session, makes_room=False)
            return answer

        try:
            return await self.ask(job, again=True)
        except BaseException:
            # whether it is held, or will be, is unknown: releasing an unknown hold makes sure that it never is
            self.release(hold)
            raise

    def _reserve(self, session: StoreSession, hold: Hold, ttl: float, lines: list[Line], force: bool) -> StoreReply:
        """Reserve. A settlement that lingers on the same accounts goes along."""
        reply, along = reserve_along(self._writer.facts, session, hold, ttl, lines, force)
        if along is not None:
            fact, settled = along
            self._learn_from(settled, fact.accounts, session)
            if fact.then is not None and reaches_alert(fact.accounts, NOTHING):
                self._put(Fact(lambda _: None, then=fact.then, repeatable=True))
        return reply

    def hold_now(self, accounts: Sequence[Account], want: Amount, ttl: float = 900.0) -> Hold | None:
        return None  # the store has to be asked

    def book(self, accounts: Sequence[Account]) -> Hold:
        return Hold(accounts, NOTHING, f"{self._prefix}{next(self._ids)}")

    def settle(
        self,
        hold: Hold,
        actual: Amount,
        then: Callable[[], None] | None = None,
        record: Record | None = None,
        *,
        may_wait: bool = False,
    ) -> None:
        fact = settlement_of(hold, actual, then, record)
        if may_wait and not self.is_away and not self._waiting and not len(self.line) and is_unnoticed(hold, actual):
            self._writer.facts.linger(fact)
            self._ensure_writer()
        else:
            self._put(fact)
        hold.booked, hold.is_open = actual, False

    def release(self, hold: Hold) -> None:
        if hold.is_open:
            self._put(Fact(lambda session: session.release(hold.id), hold.accounts, repeatable=True))
            hold.is_open = False

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """Write a record, in order with the settlements. It is dropped when too many facts are waiting."""
        self._writer.record(fact)
        self._ensure_writer()

    def _put(self, fact: Fact) -> None:
        self._writer.put(fact)
        self._ensure_writer()

    def _ensure_writer(self) -> None:
        with contextlib.suppress(
            StoreOutage
        ):  # no thread is available: the fact waits, and every later use tries again
            self._ensure_threads()

    def _learn(self, reply: StoreReply, fact: Fact) -> None:
        """The fact is booked. If this fails, the next answer brings the same news."""
        try:
            with self.link.in_use():
                self._learn_from(reply, fact.accounts)
        except (StoreOutage, StoreError) as error:
            self.link.outage(error)
            self.link.drop_session()

    def _learn_from(
        self,
        reply: StoreReply,
        accounts: Sequence[Account],
        session: StoreSession | None = None,
        *,
        makes_room: bool = True,
    ) -> None:
        """Take over what the store reported.

        A reservation makes no room: calls that wait need not ask again because of it.
        """
        self.link.is_back()
        self._offset = reply.now - time.time()  # noqa: TID251
        reported = {balance.key: balance for balance in reply.balances}
        for account in accounts:
            balance = reported.get(account.key)
            if balance is not None and isinstance(account, StoredAccount):
                account.learn(balance)
        if self._guards.is_news(reply.control):
            self._guards.read(session or self.link.session())
        if makes_room:
            self._wake_all()

    def _wake_all(self) -> None:
        with self._lock:
            self._changes += 1
            waiting, self._waiting = self._waiting, []
        wake(waiting)

    async def refresh(self) -> None:
        """Read the control document again. When the store is away, the known one stays in force."""
        with contextlib.suppress(StoreOutage, StoreError):
            await self.ask(self._guards.read, again=True)

    def refresh_now(self) -> None:
        self.call(self._guards.read, again=True)

    def check(self) -> None:
        """Raise ``StoreError`` once when the store cannot be used. One that is only away may come back: log it."""
        if self._checked:
            return
        self._checked = True  # later callers, such as every run, do not wait for it
        try:
            self.call(lambda session: session.now(), again=True)
        except StoreOutage as error:
            self.link.outage(error)
        except StoreError:
            self._checked = False  # a mistake: report it to every caller
            raise

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._guards.watch(on_control, running)

    def change_control(self, change: Callable[[str], str]) -> str:
        return self.call(lambda session: self._guards.change(session, change))

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool | None:
        """Asked by the writer, after it has booked what reached the mark."""
        try:
            with self.link.in_use():
                return self.link.session().first(account.key, mark, percent, limit)
        except (StoreOutage, StoreError) as error:  # no threshold fires now; the next settlement asks again
            self.link.outage(error)
            self.link.drop_session()
            return None

    def extend(self, account: Account, more: Amount) -> None:
        assert isinstance(account, StoredAccount)

        def job(session: StoreSession) -> Balance:
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

    async def changed(self, since: Refusal, seconds: float, sleeper: Sleeper | None = None) -> bool:
        await self._wait(since, min(seconds, _POLL_S) if sleeper is None else seconds, sleeper)
        return True  # other workers may have settled without notice: ask again

    def find(self, scope: str) -> list[Account]:
        return sorted(self._read(scope), key=lambda account: account.ends or 0.0)

    def accounts(self) -> list[Account]:
        return self._read(None)

    def _read(self, scope: str | None) -> list[Account]:
        self._writer.facts.hurry()
        balances, now = self.call(lambda session: (session.read(scope), session.now()), again=True)
        self._offset = now - time.time()  # noqa: TID251
        return [self._accounts.learn(balance) for balance in balances]

    def known(self) -> list[Account]:
        return self._accounts.all()

    def forget(self, scope: str) -> None:
        self._accounts.forget(scope)


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
        before=_for_each(lambda ledger: ledger.link.before_fork()),
        after_in_parent=_for_each(lambda ledger: ledger.link.after_fork()),
        after_in_child=_for_each(StoreLedger.restart),
    )
atexit.register(_for_each(lambda ledger: ledger.flush(_GOODBYE_S)))


def ledger_of(store: Store, url: str, timeout: float, retention_s: float) -> StoreLedger:
    """The ledger of this process for a store: guards that name the same one share it."""
    with _opening:
        ledger = _open.get(url)
        if ledger is None:
            ledger = _open[url] = StoreLedger(store, timeout, retention_s)
        return ledger
