"""Accounts that are not in use are packed.

Nothing is lost by it: a ledger that packs after every operation equals one that never packs.
"""

import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core.money import NOTHING, UNLIMITED
from runguard.engine import spending as spending_module
from runguard.engine.charges import Entry, add_tally
from runguard.engine.spending import History, Spending
from runguard.ledger import memory as memory_module
from runguard.ledger.ledger import Account, Hold
from runguard.ledger.memory import MemoryLedger, PackedAccounts, Shared, can_be_packed, read_numbers, write_numbers

CAPS = [(100, UNLIMITED, UNLIMITED), (100, 50, 4), (0, UNLIMITED, 3), (UNLIMITED, 50, UNLIMITED)]
SCOPES = ["session:app/u/s1", "session:app/u/s2", "user:app/ü%2F"]
MARKS = [("0.0:0.5:warn", 0.5), ("0.1:0.8:stop", 0.8)]


@given(st.lists(st.integers()))
def test_numbers_of_any_size_and_sign_come_back(numbers: list[int]) -> None:
    assert read_numbers(write_numbers(numbers)) == numbers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_shared_values_live_as_long_as_an_entry_refers_to_them(steps: list[tuple[bool, int]]) -> None:
    shared: Shared[str] = Shared()
    taken: list[tuple[int, str]] = []
    for is_more, which in steps:
        if is_more:
            taken.append((shared.take(f"value {which}"), f"value {which}"))
        elif taken:
            shared.give_back(taken.pop(which % len(taken))[0])
        assert [(number, shared[number]) for number, _ in taken] == taken
        assert len(shared) == len({value for _, value in taken})
        assert all(number < 6 for number, _ in taken), "numbers are used again"


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


@settings(max_examples=300, deadline=None)
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
        not can_be_packed(account) for scope in {a.scope for a in busy} for account in packing.ledger._by_scope[scope]
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


def finished(number: int) -> Account:
    account = Account(f"session:{number}#", f"session:{number}", None, None)
    account.spent_usd = account.due_usd = number
    account.fired = {"0.0:0.5:warn": (0.5, CAPS[1])}
    return account


def test_what_all_sessions_have_in_common_is_stored_once() -> None:
    packed = PackedAccounts(page_size=30)
    for number in range(100):
        packed.put(f"session:{number}", [finished(number)])
    assert len(packed._kinds) == 1
    packed.drop_oldest()
    assert [account.spent_usd for account in packed.copies()] == list(range(30, 100))
    for number in range(30, 100):
        assert [account.spent_usd for account in packed.take(f"session:{number}")] == [number]
    assert (len(packed), len(packed._kinds), packed.take("session:1")) == (0, 0, [])


def test_scopes_that_come_back_again_and_again_do_not_add_pages() -> None:
    packed = PackedAccounts(page_size=10)
    for number in range(2_000):
        packed.put(f"session:{number}", [finished(number)])
        if number % 10:
            packed.take(f"session:{number}")
        for back in (number - 7, number - 53):
            for account in packed.take(f"session:{back}"):
                packed.put(account.scope, [account])
        if len(packed) > 100:
            packed.drop_oldest()
        assert len(packed._pages) <= 22, "a hundred accounts need ten"
    copies = packed.copies()
    packed.drop_oldest()
    assert len(list(copies)) > len(list(packed.copies())), "a listing shows one moment"


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

entries = st.builds(Entry, *[st.integers(-5, 10**12)] * 8)
names = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["m", ""]), st.sampled_from(["", "t"]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), names, entries), max_size=40))
def test_figures_survive_packing(added: list[tuple[int, tuple[str, str, str], Entry]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending_module, "_UNPACKED_KEPT", 2)
        history = History()
        plain: dict[str, dict[tuple[str, str, str], Entry]] = {}
        for number, key, entry in added:
            scope = f"session:{number}"
            add_tally(plain.setdefault(scope, {}), {key: entry})
            add_tally(history.changing(scope), {key: entry})
            assert {scope: history.of(scope) for scope in plain} == plain
        assert len(history) == len(plain)
        assert len(history._recent) <= 2
        history.keep(0)
        assert (len(history), len(history._names)) == (0, 0)


def test_the_oldest_figures_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending_module, "_UNPACKED_KEPT", 10)
    spending = Spending()
    for number in range(200):
        add_tally(spending.history.changing(f"session:{number}"), {("a", "m", ""): Entry(calls=1, nano=number)})
        spending.history.keep(100)
        assert len(spending.history) <= 100
    assert len(spending.history) >= 90
    kept = [number for number in range(200) if spending.of_scope(f"session:{number}")["calls"]]
    assert kept == list(range(200 - len(kept), 200))
