"""A ledger over a durable store. The event loop never waits for the store: threads do, and every wait has a deadline.

``ledger/memory`` opens it for the URL of a store. A few threads ask for reservations, which callers await. Settlements
and releases are facts: one writer (``ledger/write_queue``) sends them in order.
"""

import asyncio
import atexit
import contextlib
import copy
import itertools
import logging
import multiprocessing.util
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Final, TypeVar

from runguard.background import off_loop, start_thread
from runguard.core.identity import LruDict
from runguard.core.money import NOTHING, Amount, share_of, to_usd, unit_reached
from runguard.ledger.ledger import (
    STALE,
    Account,
    Balance,
    Hold,
    Ledger,
    Line,
    Record,
    Refusal,
    SettledCall,
    Sleeper,
    Stale,
    Store,
    StoreDeniedError,
    StoreError,
    StoreOutage,
    StoreReply,
    StoreSession,
    refusal_of,
)
from runguard.ledger.write_queue import Fact, FactWriter, Settlement, StoreGuards, StoreLink

_log: Final = logging.getLogger("runguard")
_T = TypeVar("_T")
_ASKERS: Final = 4
_POLL_S: Final = 0.03  # a waiting call checks this often what other workers have settled
_GOODBYE_S: Final = 2.0
_LONGEST_QUEUE: Final = 60  # times the deadline that a call may wait in the queue while others are served
_EXPIRY_MARGIN_S: Final = 60.0  # the store's clock may run ahead of ours


class _Job:
    """Something that a caller wants the store to do now."""

    __slots__ = ("again", "asked", "begun", "do", "is_given_up", "tell")

    def __init__(
        self, do: Callable[[StoreSession], Any], again: bool, tell: Callable[[Any, Exception | None], object]
    ) -> None:
        self.do, self.again, self.tell = do, again, tell  # again: doing it twice counts once
        self.asked = time.monotonic()
        self.begun: float | None = None
        self.is_given_up = False  # its caller has left: what was not begun need not be done


class StoreLedger(Ledger):
    """One per store and process, shared by all guards that name the same store.

    A reservation whose answer comes too late is given back. The threads survive every exception, also of a type that no
    store should raise. Every use of the ledger restarts a thread that has ended.
    """

    is_shared = True

    def __init__(self, store: Store, timeout: float, retention_s: float = 30 * 86_400.0) -> None:
        self.store, self.timeout, self.name = store, timeout, store.name
        self.link = StoreLink(store, timeout)
        self._guards = StoreGuards(self.link)
        self._writer = FactWriter(self.link, self._guards, retention_s, self._learn)
        self._restarts = 0  # threads that had to be started again
        self._accounts = StoredAccounts()
        self._offset = 0.0  # seconds by which the store's clock is ahead of ours
        self._checked = False
        self._start()
        _ledgers.add(self)

    def _start(self) -> None:
        super().__init__()
        self.worker = f"{os.uname().nodename if hasattr(os, 'uname') else 'worker'}:{os.getpid()}"
        self._prefix, self._ids = f"{secrets.token_hex(8)}-", itertools.count(1)
        self._threads = [threading.Thread()] * (_ASKERS + 1)  # not started yet; the writer is the last
        self._looked_at = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._served = 0.0  # when a job was last done

    def restart(self) -> None:
        """Begin anew in a forked child: threads, connections and waiting facts stay with the parent."""
        for part in (self.link, self._guards, self._writer, self._accounts):
            part.restart()
        self._start()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _ensure_writer(self) -> None:
        if not self._threads[-1].is_alive():
            # without a thread the fact waits, and every later use tries again
            with contextlib.suppress(StoreOutage):
                self._start_threads()

    def _start_threads(self) -> None:
        """Start the threads, and start again those that have ended.

        Raise ``StoreOutage`` when the system gives no thread.
        """
        restarted = 0
        with self._lock:
            if self._threads[-1].ident is None:
                # Children of multiprocessing end without atexit; this is registered in the process that uses it.
                multiprocessing.util.Finalize(None, self.end, exitpriority=10)
            for n, thread in enumerate(self._threads):
                if not thread.is_alive():
                    work = self._answer_jobs if n < _ASKERS else partial(self._writer.work, self.worker)
                    try:
                        self._threads[n] = start_thread(f"runguard-store-{n}", work, self.link.fault)
                    except (RuntimeError, MemoryError) as error:
                        raise StoreOutage(f"{self.name}: no thread can be started to ask it: {error}") from None
                    restarted += thread.ident is not None
            self._restarts += restarted
        if restarted:
            _log.error(
                "runguard.background_error: %s: %d threads had ended and were started again", self.name, restarted
            )

    def close(self) -> None:
        """End the threads and close their connections. Facts that are not booked yet are dropped: call ``flush`` first.

        The ledger opens again when it is used.
        """
        self._writer.tell_dropped(at_once=True)
        with self._lock:
            threads, self._threads = self._threads, [threading.Thread()] * (_ASKERS + 1)
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
            facts = self._writer.restart()
        facts.close()
        for _ in range(_ASKERS):
            jobs.put(None)
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(min(self.timeout, _GOODBYE_S))

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until every fact is booked. False when something is left, or could never be booked."""
        return self._writer.facts.wait_until_done(seconds, self._ensure_writer) and not self._writer.unbooked

    def end(self) -> None:
        """Wait a moment for the facts when the process ends, and report what was dropped."""
        self.flush(_GOODBYE_S)
        self._writer.tell_dropped(at_once=True)

    @property
    def is_away(self) -> bool:
        """Whether the store did not answer the last time."""
        return self.link.is_away

    def health(self) -> dict[str, Any]:
        """Return what is still on its way to the store, and what went wrong on the way, as plain data."""
        return {
            "name": self.name,
            "waiting": len(self._writer.facts),
            "lost": self._writer.lost,
            "dropped": self._writer.dropped,
            "dropped_usd": to_usd(self._writer.dropped_nano),
            "faults": self.link.faults,
            "restarts": self._restarts,
        }

    # ---- asking: threads ask the store, callers wait for the answer within a deadline -------------------------------

    async def ask(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        self.link.check_rest()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        asked = _Job(job, again, lambda *result: loop.call_soon_threadsafe(_answer, answer, *result))
        self._put_job(asked)
        alarm = loop.call_later(self.timeout, self._look_at, asked, answer, loop)
        try:
            return await answer
        except StoreOutage as error:
            self.link.outage(error)
            raise
        finally:
            alarm.cancel()

    def _look_at(self, asked: _Job, answer: "asyncio.Future[_T]", loop: asyncio.AbstractEventLoop) -> None:
        """End the wait of a caller whose time is over."""
        if answer.done():
            return
        if (left := self._time_left(asked)) > 0:
            loop.call_later(left, self._look_at, asked, answer, loop)
        else:
            asked.is_given_up = True
            answer.set_exception(StoreOutage(f"{self.name}: no answer within {self.timeout:g} s"))

    def call(self, job: Callable[[StoreSession], _T], *, again: bool = False) -> _T:
        """Run a job on a thread and wait for it here, for callers that are not on the path of a run."""
        answer: Future[_T] = Future()
        asked = _Job(job, again, partial(_answer, answer))
        self._put_job(asked)
        while (left := self._time_left(asked)) > 0:
            with contextlib.suppress(FutureTimeout):
                return answer.result(left)
            if answer.done():
                return answer.result()  # the answer came just after the wait had ended
        asked.is_given_up = True
        raise StoreOutage(
            f"{self.name}: no answer within {self.timeout:g} s; what was asked may still be done: look before you "
            "repeat it"
        )

    def _put_job(self, asked: _Job) -> None:
        """Queue a job. Look at one thread each time, because any of them can do it."""
        self._looked_at = (self._looked_at + 1) % _ASKERS
        if not self._threads[self._looked_at].is_alive():
            self._start_threads()
        self._jobs.put(asked)

    def _time_left(self, job: _Job) -> float:
        """Return the seconds that a caller still waits.

        While others are served, the deadline starts again until it is the job's turn: a long queue is not an outage. A
        job that begins late because the ones before it failed has no more time than they had.
        """
        served = self._served if job.begun is None else min(self._served, job.begun)
        since = max(job.asked, min(served, job.asked + _LONGEST_QUEUE * self.timeout))
        return since + self.timeout - time.monotonic()

    def _answer_jobs(self) -> None:
        """Do jobs until the queue ends. Several threads run this."""
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            if job.is_given_up:
                continue
            job.begun = time.monotonic()
            result, fault = None, None
            try:
                result = self.link.use(job.do, again=job.again)
                self._served = time.monotonic()
            except (StoreOutage, StoreError) as error:
                fault = error
            try:
                job.tell(result, fault)
            except RuntimeError:  # the loop of its caller is closed
                continue
        self.link.drop_session()

    # ---- the ledger -------------------------------------------------------------------------------------------------

    def now(self, at: float) -> float:
        return time.time() + self._offset  # noqa: TID251 - the store's clock, as last reported

    def period_time(self, at: float) -> float:
        # the store keeps the accounts of past periods, and refuses those that are not current
        now = self.now(at)
        self._tell_clock_back(self._latest - now)
        return max(now, self._latest)

    def account(
        self, key: str, scope: str, window: str | None, ends: float | None, caps: Amount, begins: float | None = None
    ) -> Account:
        return self._accounts.get(Line(key, scope, window, begins, ends, caps))

    async def reserve(
        self, accounts: Sequence[Account], want: Amount, *, force: bool = False, ttl: float = 900.0
    ) -> Hold | Refusal | Stale:
        hold = Hold(accounts, want, f"{self._prefix}{next(self._ids)}")
        hold.expires, lines = time.monotonic() + ttl, lines_of(accounts)
        self.link.check_rest()  # nothing was asked, so there is nothing to give back

        def job(session: StoreSession) -> Hold | Refusal | Stale:
            seen = self._changes
            reply = self._reserve(session, hold, ttl, lines, force)
            answer: Hold | Refusal | Stale = STALE if reply.stale else hold
            if not reply.ok and not reply.stale:
                answer = refusal_from(reply, accounts, want, seen)
            return answer

        try:
            return await self.ask(job, again=True)
        except BaseException:
            # whether it is held, or will be, is unknown: releasing an unknown hold makes sure that it never is
            self.release(hold)
            raise

    def _reserve(self, session: StoreSession, hold: Hold, ttl: float, lines: list[Line], force: bool) -> StoreReply:
        """Reserve, and book a settlement that lingers on the same accounts in the same step.

        A run settles one call and soon reserves the next. Together they take one round trip and one commit.
        """
        facts = self._writer.facts
        fact = facts.take(hold.accounts)
        if fact is not None:
            try:
                settled, reply = session.settle_and_reserve(fact.bill, hold.id, ttl, lines, hold.amount, force=force)
            except BaseException as error:
                facts.put_down(fact, is_booked=False)
                if not isinstance(error, StoreError):
                    raise
                fact = None  # the store may refuse the settlement alone, which must not refuse this call
        if fact is None:
            reply = session.reserve(hold.id, ttl, lines, hold.amount, force=force)
            self._learn_from(reply, hold.accounts, session, makes_room=False)
            return reply
        facts.put_down(fact, is_booked=True)
        if reply.stale:  # it brings no figures
            self._learn_from(settled, fact.accounts, session)
        self._learn_from(reply, hold.accounts, session)
        if fact.then is not None and reaches_alert(fact.accounts, NOTHING):
            self._put(Fact(lambda _: None, then=fact.then))
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
        bill = SettledCall(hold.id, lines_of(hold.accounts), actual, record)
        fact = Settlement(bill, hold.accounts, then, actual[0] - hold.booked[0])
        if (
            may_wait
            and not self.link.is_away
            and not self._waiting
            and not len(self.line)
            and is_unnoticed(hold, actual)
        ):
            self._writer.facts.linger(fact)
            self._ensure_writer()
        else:
            self._put(fact)
        hold.booked, hold.is_open = actual, False

    def release(self, hold: Hold) -> None:
        if not hold.is_open:
            return
        if time.monotonic() >= hold.expires - _EXPIRY_MARGIN_S:
            self.settle(hold, NOTHING)  # it may have been charged: take that back
            return
        self._put(Fact(lambda session: session.release(hold.id), hold.accounts))
        hold.is_open = False

    def tell(self, fact: Callable[[StoreSession], Any]) -> None:
        """Write a record, in order with the settlements. It is dropped when too many facts are waiting."""
        self._writer.record(fact)
        self._ensure_writer()

    def _put(self, fact: Fact) -> None:
        self._writer.put(fact)
        self._ensure_writer()

    def _learn(self, reply: StoreReply, fact: Fact) -> None:
        """Take over the reply to a fact that was booked. If this fails, the next answer brings the same news."""
        try:
            self._learn_from(reply, fact.accounts)
        except (StoreOutage, StoreError) as error:
            self.link.outage(error)

    def _learn_from(
        self,
        reply: StoreReply,
        accounts: Sequence[Account],
        session: StoreSession | None = None,
        *,
        makes_room: bool = True,
    ) -> None:
        """Take over what the store reported.

        A reservation makes no room: calls that wait need not ask again because of it. ``session``: the connection that
        this thread is using, if it is.
        """
        if self.link.is_away:
            self.link.is_back()
        self._offset = reply.now - time.time()  # noqa: TID251
        if reply.stale or reply.latest > self._latest:
            self._latest = reply.latest
        for balance in reply.balances:
            for account in accounts:
                if account.key == balance.key and isinstance(account, StoredAccount):
                    account.learn(balance)
        if self._guards.is_news(reply.control):
            self._guards.read(session) if session is not None else self.link.use(self._guards.read)
        if makes_room:
            self._wake_all()

    async def refresh(self) -> None:
        with contextlib.suppress(StoreOutage, StoreError):  # when the store is away, the known one stays in force
            await self.ask(self._guards.read, again=True)

    def refresh_now(self) -> None:
        self.call(self._guards.read, again=True)

    def check(self) -> None:
        """Raise ``StoreError`` or ``StoreDeniedError`` when the store cannot be used.

        A store that is only away may come back, so that is only logged.
        """
        if self._checked:
            return
        self._checked = True  # later callers, such as every run, do not wait for it
        try:
            off_loop(lambda: self.call(lambda session: session.now(), again=True))
        except (StoreError, StoreDeniedError):
            self._checked = False  # a mistake: report it to every caller
            raise
        except StoreOutage as error:
            self.link.outage(error)

    def watch(self, on_control: Callable[[str], None], running: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._guards.watch(on_control, running)

    def watch_dropped(self, on_dropped: Callable[[int, int], None]) -> None:
        self._guards.on_dropped.add(on_dropped)

    def change_control(self, change: Callable[[str], str]) -> str:
        return self.call(lambda session: self._guards.change(session, change))

    def first(self, account: Account, mark: str, percent: float, limit: Amount) -> bool | None:
        """Return whether this is the first caller with this mark, as the store says; None when it does not answer.

        The writer asks, after it has booked what reached the mark.
        """
        try:
            # not again: the store would say that it was asked before
            return self.link.use(lambda session: session.first(account.key, mark, percent, limit), again=False)
        except (StoreOutage, StoreError) as error:  # no threshold fires now; the next settlement asks again
            self.link.outage(error)
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
        await super().changed(since, min(seconds, _POLL_S) if sleeper is None else seconds, sleeper)
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


# ---- One ledger per store and process.

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
atexit.register(_for_each(StoreLedger.end))


def ledger_of(store: Store, url: str, timeout: float, retention_s: float) -> StoreLedger:
    """Return the ledger of this process for a store. Guards that name the same store share it."""
    with _opening:
        ledger = _open.get(url)
        if ledger is None:
            ledger = _open[url] = StoreLedger(store, timeout, retention_s)
        return ledger


# ---- A store's accounts as this process last saw them.

_SCOPES_KEPT: Final = 10_000  # copies only: the store keeps all of them


class StoredAccount(Account):
    """An account as the store last reported it."""

    __slots__ = ("line",)

    def __init__(self, line: Line) -> None:
        super().__init__(line.key, line.scope, line.window, line.ends)
        self.line = line
        self.limit(line.caps)

    def with_line(self, line: Line) -> "StoredAccount":
        """Return a copy with the same figures and other limits."""
        other = copy.copy(self)
        other.line = line
        other.limit(line.caps)
        return other

    def learn(self, balance: Balance) -> None:
        """Take over what the store reported."""
        self.granted, self.overrun, self.closed = balance.granted, balance.overrun, balance.closed
        self.limit(self.line.caps)
        self.spent_usd, self.spent_tokens, self.spent_calls = usd, tokens, calls = balance.spent
        held_usd, held_tokens, held_calls = balance.held
        self.due_usd, self.due_tokens, self.due_calls = usd + held_usd, tokens + held_tokens, calls + held_calls


class StoredAccounts:
    """The accounts that this process uses, by scope and key. Safe to use from many threads."""

    def __init__(self) -> None:
        self._by_scope = LruDict[str, dict[str, StoredAccount]](_SCOPES_KEPT)
        self.restart()

    def restart(self) -> None:
        """Make a new lock, also in a forked child: a thread of the parent may have held the old one."""
        self._lock = threading.Lock()

    def get(self, line: Line) -> StoredAccount:
        """Return the account of a line, made if new, with its limits."""
        with self._lock:
            mine = self._by_scope.get(line.scope)
            if mine is None:
                mine = self._by_scope[line.scope] = {}
            else:
                self._by_scope.move_to_end(line.scope)
            account = mine.get(line.key)
            if account is None:
                account = mine[line.key] = StoredAccount(line)
                for past in [a.key for a in mine.values() if a.ends is not None and a.ends <= (line.begins or 0.0)]:
                    del mine[past]
            elif account.line != line:  # limits of another guard, or new ones: users of the old one keep its limits
                account = mine[line.key] = account.with_line(line)
            return account

    def learn(self, balance: Balance) -> Account:
        """Return the account of a balance, with its figures. It is not kept where it is not in use."""
        with self._lock:
            account = self._by_scope.get(balance.scope, {}).get(balance.key)
        if account is None:
            account = StoredAccount(Line(balance.key, balance.scope, balance.window, None, balance.ends, balance.caps))
        account.learn(balance)
        return account

    def all(self) -> list[Account]:
        with self._lock:
            return [account for mine in self._by_scope.values() for account in mine.values()]

    def forget(self, scope: str) -> None:
        with self._lock:
            self._by_scope.pop(scope, None)


def lines_of(accounts: Sequence[Account]) -> list[Line]:
    return [account.line for account in accounts if isinstance(account, StoredAccount)]


def refusal_from(reply: StoreReply, accounts: Sequence[Account], want: Amount, seen: int) -> Refusal | Stale:
    """Return the refusal in a store's reply, by the figures of this reply: the accounts may know newer ones by now.

    Without figures there was no refusal: the reservation was given back before it arrived, and made no account.
    """
    reported = {balance.key: balance for balance in reply.balances}
    if any(line.key not in reported for line in lines_of(accounts)):
        return STALE
    copies: list[Account] = []
    for line in lines_of(accounts):
        copy = StoredAccount(line)
        copy.learn(reported[line.key])
        copies.append(copy)
    refusal = refusal_of(copies, want, seen)
    refusal.account = next(account for account in accounts if account.key == refusal.account.key)
    return refusal


def _answer(answer: "asyncio.Future[Any] | Future[Any]", result: Any, error: Exception | None) -> None:
    if not answer.done():
        answer.set_result(result) if error is None else answer.set_exception(error)


# ---- Settlements that may linger until the next reservation on the same accounts takes them along.


def reaches_alert(accounts: Sequence[Account], more: Amount) -> bool:
    """Return whether an account that spends ``more`` reaches its next threshold."""
    usd, tokens, calls = more
    for account in accounts:
        alert = account.alert
        if account.spent_usd + usd >= alert[0] or account.spent_tokens + tokens >= alert[1]:
            return True
        if account.spent_calls + calls >= alert[2]:
            return True
    return False


def is_unnoticed(hold: Hold, actual: Amount) -> bool:
    """Return whether it makes no difference to any call that a settlement is booked a moment later.

    Its hold covers it, so that nothing is lost with a process that is killed meanwhile. No threshold is reached. Half
    of every budget is free, so that no other worker is refused because of the hold.
    """
    held = hold.amount
    if not hold.is_open or actual[0] > held[0] or actual[1] > held[1] or actual[2] > held[2]:
        return False
    for account in hold.accounts:
        if account.closed or 2 * account.due_usd > account.cap_usd or 2 * account.due_tokens > account.cap_tokens:
            return False
        if 2 * account.due_calls > account.cap_calls:
            return False
    return not reaches_alert(hold.accounts, actual)
