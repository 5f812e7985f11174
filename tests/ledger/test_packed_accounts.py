"""Accounts that are not in use are packed.

Nothing is lost by it: a ledger that packs after every operation equals one that never packs.
"""

import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.events import RunInfo
from runguard.core.money import NOTHING, UNLIMITED
from runguard.engine import spending as spending_module
from runguard.engine.spending import Entry, Spending, add_tally
from runguard.ledger import memory as memory_module
from runguard.ledger.ledger import Account, Hold
from runguard.ledger.memory import MemoryLedger
from tests.kit.examples import examples

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
        assert len(plain.ledger._packed) == 0


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


def opened(ledger: MemoryLedger, name: str) -> Account:
    return ledger.account(f"{name}#", name, None, None, (10**9, UNLIMITED, UNLIMITED))


def test_an_account_in_use_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 0)
    ledger = MemoryLedger()
    used = opened(ledger, "session:used")
    hold = ledger.hold_now([opened(ledger, "session:held")], (5, 0, 1))
    late = ledger.hold_now([opened(ledger, "session:late")], (5, 0, 1))
    assert hold is not None
    assert late is not None
    ledger.settle(late, (5, 0, 1))
    opened(ledger, "session:over")
    pack_everything(ledger)
    assert "session:over" in ledger._packed
    assert len(ledger._packed) == 1
    assert opened(ledger, "session:used") is used
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
        hold = ledger.hold_now([opened(ledger, f"session:{number}")], (1_000, 0, 1))
        assert hold is not None
        ledger.settle(hold, (number, 0, 1))
    assert len(ledger._accounts) <= 25
    assert len(ledger.accounts()) == len(ledger.known()) == 200
    assert {account.scope: account.spent_usd for account in ledger.accounts()} == {
        f"session:{number}": number for number in range(200)
    }
    assert [opened(ledger, f"session:{number}").spent_usd for number in range(200)] == list(range(200))


def test_the_number_of_accounts_is_bounded_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "_UNPACKED_KEPT", 10)
    monkeypatch.setattr(memory_module, "_ACCOUNTS_KEPT", 100)
    ledger = MemoryLedger()
    busy = opened(ledger, "session:busy")
    for number in range(1_000):
        opened(ledger, f"session:{number}")
        assert len(ledger.accounts()) <= 100
    assert busy in ledger.accounts()
    known = {account.scope for account in ledger.accounts()}
    assert len(known) >= 90
    assert known == {"session:busy", *(f"session:{number}" for number in range(1_001 - len(known), 1_000))}
    assert sum("ledger_full" in record.message for record in caplog.records) == 1


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
