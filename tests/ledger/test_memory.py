"""What only the ledger of one process does: it wakes whoever waits, forgets, and is bounded. What all ledgers do is in
tests/ledger/test_ledgers.py.
"""

import asyncio
import gc
import sqlite3
import sys
import tracemalloc
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import Budget
from runguard.core.events import ROOT_LANE, Answer, ModelCall, ModelResult, RunInfo, ToolCall, ToolResults
from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.engine import runs as session_growth
from runguard.engine import spending
from runguard.engine import spending as spending_module
from runguard.engine.guard import Guard
from runguard.engine.spending import Entry, Spending, add_tally
from runguard.ledger import memory, remote
from runguard.ledger import memory as memory_module
from runguard.ledger.ledger import Account, Hold, Refusal, Stale
from runguard.ledger.memory import MemoryLedger
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.examples import examples

PATIENCE_S = 20  # far beyond anything that works


def opened(
    ledger: MemoryLedger,
    key: str = "k",
    caps: Amount = (100, UNLIMITED, UNLIMITED),
    scope: str = "user:a/u",
    ends: float | None = None,
) -> Account:
    return ledger.account(key, scope, None if ends is None else "1h", ends, caps)


def held(result: Hold | Refusal | Stale) -> Hold:
    assert isinstance(result, Hold)
    return result


def refused(result: Hold | Refusal | Stale) -> Refusal:
    assert isinstance(result, Refusal)
    return result


# ---- thresholds -----------------------------------------------------------------------------------------------------


# ---- waiting --------------------------------------------------------------------------------------------------------


async def full(ledger: MemoryLedger) -> tuple[Account, Hold, Refusal]:
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (100, 0, 1)))
    return account, hold, refused(await ledger.reserve([account], (10, 0, 1)))


async def test_a_loop_that_closes_in_the_moment_of_waking_holds_nobody_up() -> None:
    ledger = MemoryLedger()
    _, hold, refusal = await full(ledger)

    class Closing:
        """Open when it is looked at, closed when it is called."""

        def is_closed(self) -> bool:
            return False

        def call_soon_threadsafe(self, *_: Any) -> None:
            raise RuntimeError("Event loop is closed")

    ledger._waiting.append((Closing(), None))  # type: ignore[arg-type]
    waiting = asyncio.create_task(ledger.changed(refusal, PATIENCE_S))
    await asyncio.sleep(0)
    ledger.settle(hold, (1, 0, 1))
    assert await asyncio.wait_for(waiting, PATIENCE_S / 2)


# ---- many threads ---------------------------------------------------------------------------------------------------


# ---- which accounts there are ---------------------------------------------------------------------------------------


async def test_past_periods_go_when_nobody_is_on_the_way_in_them() -> None:
    ledger = MemoryLedger()
    first = opened(ledger, "k@1h#1", ends=10.0)
    hold = held(await ledger.reserve([first], (10, 0, 1)))
    opened(ledger, "k@1h#2", ends=20.0)
    assert first in ledger.accounts()  # a call of the first period is still out
    ledger.settle(hold, (5, 0, 1))
    for period in range(3, 50):
        opened(ledger, f"k@1h#{period}", ends=period * 10.0)
    assert [account.key for account in ledger.accounts()] == ["k@1h#49"]
    assert [account.key for account in ledger.find("user:a/u")] == ["k@1h#49"]


def test_other_windows_of_the_same_scope_stay() -> None:
    ledger = MemoryLedger()
    month, forever = opened(ledger, "k@month#1", ends=5.0), opened(ledger, "k#")
    opened(ledger, "k@1h#1", ends=10.0)
    opened(ledger, "k@1h#2", ends=20.0)
    assert month in ledger.accounts()
    assert forever in ledger.accounts()


async def test_memory_is_bounded_and_what_is_held_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "_PACKED_KEPT", 6)
    monkeypatch.setattr(memory_module, "_PARTS", 1)
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 4)
    ledger = MemoryLedger()
    account = opened(ledger, "busy", scope="busy")
    hold = held(await ledger.reserve([account], (10, 0, 1)))
    for number in range(100):
        opened(ledger, f"k{number}", scope=f"s{number}")
    assert len(ledger.accounts()) <= 10
    assert account in ledger.accounts()
    assert ledger.find("s0") == []
    assert sum("ledger_full" in record.message for record in caplog.records) == 1
    ledger.settle(hold, (10, 0, 1))
    assert ledger.find("busy")[0].spent_usd == 10


# ---- Accounts that are not in use are packed. Nothing is lost by it: a ledger that packs after every operation
# equals one that never packs


CAPS = [(100, UNLIMITED, UNLIMITED), (100, 50, 4), (0, UNLIMITED, 3), (UNLIMITED, 50, UNLIMITED)]
SCOPES = ["session:app/u/s1", "session:app/u/s2", "user:app/ü%2F"]
MARKS = [("0.0:0.5:warn", 0.5), ("0.1:0.8:stop", 0.8)]


# ---- the same operations on two ledgers -----------------------------------------------------------------------------


@dataclass
class Side:
    """A ledger, and what callers of it hold on to."""

    packs: bool
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    accounts: list[Account] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)

    def do(self, step: tuple[Any, ...]) -> Any:
        told = getattr(self, step[0])(*step[1:])
        if self.packs:
            pack_everything(self.ledger)
        return told

    def open(self, scope: int, caps: int, period: int | None) -> Any:
        name = SCOPES[scope]
        window, ends, suffix = (None, None, "#") if period is None else ("1h", 3_600.0 * (period + 1), f"@1h#{period}")
        account = self.ledger.account(name + suffix, name, window, ends, CAPS[caps])
        if not any(account is known for known in self.accounts):
            self.accounts.append(account)
        return seen(account)

    def let_go(self, which: int) -> None:
        if self.accounts:
            del self.accounts[which % len(self.accounts)]

    def let_go_of_a_hold(self, which: int) -> None:
        if self.holds:
            del self.holds[which % len(self.holds)]

    def reserve(self, which: int, both: bool, want: tuple[int, int, int], force: bool, expires: bool) -> Any:
        if not self.accounts:
            return None
        first = which % len(self.accounts)
        chosen = self.accounts[first : first + 1 + both]
        result = at_once(self.ledger.reserve(chosen, want, force=force, ttl=0.0 if expires else 900.0))
        if isinstance(result, Hold):
            self.holds.append(result)
            return "held"
        return result.account.key, result.unit, result.room, result.wait_helps, result.spent, result.held

    def book(self, which: int) -> None:
        if self.accounts:
            self.holds.append(self.ledger.book([self.accounts[which % len(self.accounts)]]))

    def settle(self, which: int, actual: tuple[int, int, int]) -> Any:
        if not self.holds:
            return None
        hold = self.holds[which % len(self.holds)]
        self.ledger.settle(hold, actual)
        return [seen(account) for account in hold.accounts]

    def release(self, which: int) -> None:
        if self.holds:
            self.ledger.release(self.holds[which % len(self.holds)])

    def extend(self, scope: int, more: tuple[int, int, int]) -> None:
        for account in self.ledger.find(SCOPES[scope]):
            self.ledger.extend(account, more)

    def first(self, scope: int, mark: int) -> Any:
        return [self.ledger.first(account, *MARKS[mark], account.caps) for account in self.ledger.find(SCOPES[scope])]

    def forget(self, scope: int) -> None:
        self.ledger.forget(SCOPES[scope])

    def all(self) -> Any:
        listed = sorted(seen(account) for account in self.ledger.accounts())
        assert listed == sorted(seen(account) for scope in SCOPES for account in self.ledger.find(scope))
        return listed


def at_once(reserve: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        reserve.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def seen(account: Account) -> tuple[Any, ...]:
    """All that an account is, but for its alert: that is found again with the next settlement."""
    return (
        *(
            account.key,
            account.scope,
            account.window or "",
            account.ends or 0.0,
            account.caps,
            account.spent,
            account.held,
            account.granted,
        ),
        *(account.overrun, account.closed, sorted(account.fired.items())),
    )


def pack_everything(ledger: MemoryLedger) -> None:
    """All that can be packed; what is in use cannot."""
    with ledger._lock:
        ledger._pack_locked()


some = st.integers(0, 7)
amounts = st.tuples(st.integers(0, 120), st.integers(0, 60), st.integers(0, 3))
scopes = st.integers(0, len(SCOPES) - 1)
step = st.one_of(
    st.tuples(st.just("open"), scopes, st.integers(0, len(CAPS) - 1), st.none() | st.integers(0, 2)),
    st.tuples(st.sampled_from(["let_go", "let_go_of_a_hold", "book", "release"]), some),
    st.tuples(st.just("reserve"), some, st.booleans(), amounts, st.booleans(), st.booleans()),
    st.tuples(st.just("settle"), some, amounts),
    st.tuples(st.just("extend"), scopes, amounts),
    st.tuples(st.just("first"), scopes, st.integers(0, len(MARKS) - 1)),
    st.tuples(st.just("forget"), scopes),
)


@examples(300)
@given(st.lists(step, max_size=30))
def test_a_ledger_that_packs_after_every_operation_equals_one_that_never_packs(steps: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "_UNPACKED_KEPT", 0)
        packing, plain = Side(packs=True), Side(packs=False)
        plain.ledger._pack_at = sys.maxsize
        compare(packing, plain, steps)
        assert not any(plain.ledger._packed)


def compare(packing: Side, plain: Side, steps: list[tuple[Any, ...]]) -> None:
    for one in steps:
        assert packing.do(one) == plain.do(one)
        assert packing.all() == plain.all()
    for side in (packing, plain):
        side.accounts.clear()
        side.holds.clear()
    pack_everything(packing.ledger)
    # an open hold refers to its accounts, even where it holds nothing
    held = {account.scope for holds in packing.ledger._open.values() for hold in holds for account in hold.accounts}
    busy = [a for a in packing.ledger._accounts.values() if a.held == NOTHING and a.scope not in held]
    assert not busy or any(
        account.held != NOTHING for scope in {a.scope for a in busy} for account in packing.ledger._by_scope[scope]
    )
    assert packing.all() == plain.all()


# ---- what is packed, and when ---------------------------------------------------------------------------------------


def opened_packed_accounts(ledger: MemoryLedger, name: str) -> Account:
    return ledger.account(f"{name}#", name, None, None, (10**9, UNLIMITED, UNLIMITED))


def test_an_account_in_use_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 0)
    ledger = MemoryLedger()
    used = opened_packed_accounts(ledger, "session:used")
    hold = ledger.hold_now([opened_packed_accounts(ledger, "session:held")], (5, 0, 1))
    late = ledger.hold_now([opened_packed_accounts(ledger, "session:late")], (5, 0, 1))
    assert hold is not None
    assert late is not None
    ledger.settle(late, (5, 0, 1))
    opened_packed_accounts(ledger, "session:over")
    pack_everything(ledger)
    assert [list(part) for part in ledger._packed if part] == [["session:over"]]
    assert opened_packed_accounts(ledger, "session:used") is used
    ledger.settle(hold, (4, 0, 1))
    ledger.settle(late, (3, 0, 1))  # the provider's later figure
    del hold, late
    pack_everything(ledger)
    assert [(name, account.spent) for name in ("held", "late") for account in ledger.find(f"session:{name}")] == [
        ("held", (4, 0, 1)),
        ("late", (3, 0, 1)),
    ]


def test_accounts_are_packed_by_themselves_and_come_back_with_what_they_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 20)
    ledger = MemoryLedger()
    for number in range(200):
        hold = ledger.hold_now([opened_packed_accounts(ledger, f"session:{number}")], (1_000, 0, 1))
        assert hold is not None
        ledger.settle(hold, (number, 0, 1))
    assert len(ledger._accounts) <= 25
    assert len(ledger.accounts()) == len(ledger.known()) == 200
    assert {account.scope: account.spent_usd for account in ledger.accounts()} == {
        f"session:{number}": number for number in range(200)
    }
    assert [opened_packed_accounts(ledger, f"session:{number}").spent_usd for number in range(200)] == list(range(200))


def test_the_number_of_accounts_is_bounded_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 10)
    monkeypatch.setattr(memory_module, "_PACKED_KEPT", 90)
    monkeypatch.setattr(memory_module, "_PARTS", 1)
    ledger = MemoryLedger()
    busy = opened_packed_accounts(ledger, "session:busy")
    for number in range(1_000):
        opened_packed_accounts(ledger, f"session:{number}")
        assert len(ledger.accounts()) <= 100
    assert busy in ledger.accounts()
    known = {account.scope for account in ledger.accounts()}
    assert len(known) >= 90
    assert known == {"session:busy", *(f"session:{number}" for number in range(1_001 - len(known), 1_000))}
    assert sum("ledger_full" in record.message for record in caplog.records) == 1


async def test_an_account_that_a_run_refers_to_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 4)
    monkeypatch.setattr(memory_module, "_PACKED_KEPT", 6)
    ledger = MemoryLedger()
    used = [opened_packed_accounts(ledger, f"session:{number}") for number in range(50)]
    assert [opened_packed_accounts(ledger, account.scope) for account in used] == used


# ---- figures of runs that are over ----------------------------------------------------------------------------------


def test_the_oldest_figures_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending_module, "_HISTORY_KEPT", 100)
    spending = Spending()
    for number in range(200):
        run_costs = spending.begin(RunInfo(f"r{number}", "app", "u", f"s{number}"))
        add_tally(run_costs.tally, {("a", "m", ""): Entry(calls=1, nano=number)})
        spending.end(run_costs)
    assert len(spending.history) == 100
    kept = [number for number in range(200) if spending.of_scope(f"session:app/u/s{number}")["calls"]]
    assert kept == list(range(200 - len(kept), 200))
    assert [spending.of_scope(scope)["calls"] for scope in ("user:app/u", "app:app", None)] == [200] * 3


# ---- Finished sessions leave nothing that grows: not in memory, and not in the file of a store whose retention drops
# them


FEW = 100  # accounts and scopes kept, so that a few hundred sessions fill them
THIRD = 400
FLAT_BLOCKS = THIRD  # one kept object of each session would be more: an object has a name or a number of its own
BUDGETS = [Budget(usd=5, per="session"), Budget(usd=10**6, per="user", window="1d"), Budget(usd=10**6, per="app")]


def a_guard(url: str, budgets: list[Budget]) -> Guard:
    policy: dict[str, Any] = {
        "store": url,
        "prices": {"m": {"input": 1, "output": 1}},
        "max_usd": 1,
        "budgets": budgets,
        "store_timeout": 20,
    }
    with mock.patch.dict(remote._open, clear=True):
        return Guard(Policy.validated(policy, ""))


async def session(guard: Guard, number: int) -> None:
    """One user's turn: two model calls and a tool call; every tenth is abandoned in the middle of a call."""
    run = f"run-{number}"
    guard.start(RunInfo(run, "app", f"user-{number % 20}", f"session-{number}", at=guard.clock()))
    for step in range(2):
        event = ModelCall(run, ROOT_LANE, "agent", guard.clock(), "m", 100, 0, 50)
        assert not guard.check(event)
        assert not await guard.reserve(event, slot=False)
        assert event.charge is not None
        if step and number % 10 == 0:
            guard.abandon(event.charge)
            break
        guard.settle(event.charge, Usage(100, 50))
        guard.after(ModelResult(run, ROOT_LANE, "agent", guard.clock(), 100))
        if step == 0:
            call = guard.tools.fingerprint("search", {"q": number})
            guard.check(ToolCall(run, ROOT_LANE, "agent", guard.clock(), "search", call, "batch", "1"))
            guard.after(
                ToolResults(
                    run, ROOT_LANE, "agent", guard.clock(), "batch", [Answer("search", call, {"found": number}, "1")]
                )
            )
    guard.end(run)


async def sessions(guard: Guard, first: int, count: int) -> None:
    for number in range(first, first + count):
        await session(guard, number)
    assert await asyncio.to_thread(guard.accounts.ledger.flush, 50)


async def growth_of_the_last_third(guard: Guard) -> int:
    """Blocks of memory that are in use after the third third and were not after the second."""
    blocks = []
    for third in range(3):
        await sessions(guard, third * THIRD, THIRD)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    return blocks[2] - blocks[1]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds on what is kept, small enough to be met."""
    monkeypatch.setattr(memory, "_PACKED_KEPT", FEW // 2)
    monkeypatch.setattr(memory, "_PARTS", 1)
    monkeypatch.setattr(memory, "_UNPACKED_KEPT", FEW // 4)
    monkeypatch.setattr(remote, "_SCOPES_KEPT", FEW)
    monkeypatch.setattr(spending, "_HISTORY_KEPT", FEW)
    monkeypatch.setattr(session_growth, "SESSIONS_KEPT", FEW)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer keeps memory of its own")
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_finished_sessions_leave_memory_flat(kind: str, tmp_path: Path) -> None:
    guard = a_guard("memory" if kind == "memory" else f"sqlite:///{tmp_path}/guard.db?synchronous=normal", BUDGETS)
    await session(guard, -1)
    assert await growth_of_the_last_third(guard) < FLAT_BLOCKS
    assert (len(guard.runs), len(guard.accounts.spending.costs_by_run)) == (0, 0)
    known = guard.accounts.ledger.known()
    assert 20 <= len(known) <= FEW
    assert not [account.key for account in known if account.scope.startswith("run:")], (
        "a run's own account ends with it"
    )
    assert guard.accounts.budgets("app:app")[0].reserved == 0


async def test_a_finished_session_leaves_a_few_bytes_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its account is kept, as it may come back: as objects 1,000 bytes, packed less than 400."""
    monkeypatch.setattr(memory, "_UNPACKED_KEPT", 64)
    monkeypatch.setattr(spending, "_HISTORY_KEPT", FEW)
    monkeypatch.setattr(session_growth, "SESSIONS_KEPT", FEW)
    guard = a_guard("memory", BUDGETS)
    tracemalloc.start()
    try:
        await sessions(guard, 0, 200)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        await sessions(guard, 200, 600)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(guard.accounts.ledger.known()) >= 800
    assert (after - before) / 600 < 400, "bytes per session"


async def test_a_session_that_comes_back_goes_on_with_what_it_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_UNPACKED_KEPT", 8)
    guard = a_guard("memory", [Budget(calls=3, per="session")])
    await sessions(guard, 0, 100)  # two calls each
    assert guard.accounts.budgets("session:app/user-1/session-1")[0].spent == 2
    await sessions(guard, 100, 100)
    with pytest.raises(AssertionError):  # its second call is the fourth of the session
        await session(guard, 1)
    assert guard.accounts.budgets("session:app/user-1/session-1")[0].spent == 3
    assert guard.accounts.extend("session:app/session-2", calls=2)[0].limit == 5, (
        "a session's short name finds it where it is packed"
    )
    await sessions(guard, 200, 100)
    assert [(b.spent, b.limit) for b in guard.accounts.budgets("session:app/user-2/session-2")] == [(2, 5)]


def size(path: Path) -> int:
    """Of the file, with everything that is still in its log."""
    db = sqlite3.connect(path, timeout=20)
    try:
        assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    finally:
        db.close()
    return path.stat().st_size


async def test_a_file_does_not_grow_with_sessions_that_retention_drops(tmp_path: Path) -> None:
    path = tmp_path / "guard.db"
    guard = a_guard(f"sqlite:///{path}?synchronous=normal", BUDGETS[1:])
    ledger = guard.accounts.ledger
    assert isinstance(ledger, remote.StoreLedger)
    sizes = []
    for part in range(4):
        await sessions(guard, part * 120, 120)
        sizes.append(size(path))
        await asyncio.to_thread(ledger.call, lambda session: session.purge(0.0))
        scopes = [account.scope for account in ledger.accounts()]
        assert not [scope for scope in scopes if scope.startswith("run:")]
        assert len(scopes) == 21, "the budgets of users and of the app are kept"
    assert sizes[0] > 120 * 1_000, "there was something to drop"
    assert max(sizes[1:]) <= sizes[0] * 1.1, "what was dropped is used again"
    assert guard.accounts.budgets("app:app")[0].spent > 0
