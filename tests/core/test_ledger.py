"""The ledger of one process: whatever is reserved, settled, released and extended, no cap is ever broken and nothing is lost."""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runguard.budget import NOTHING, UNLIMITED, Amount
from runguard.ledger import Account, Hold, MemoryLedger, Refusal
from runguard.ledger import memory as memory_module

PATIENCE_S = 20  # far beyond anything that works
FREE: Amount = (UNLIMITED, UNLIMITED, UNLIMITED)


def now(coroutine: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waited")


def opened(ledger: MemoryLedger, key: str = "k", caps: Amount = (100, UNLIMITED, UNLIMITED), scope: str = "user:a/u", ends: float | None = None) -> Account:
    return ledger.account(key, scope, None if ends is None else "1h", ends, caps)


def held(result: Hold | Refusal) -> Hold:
    assert isinstance(result, Hold)
    return result


def refused(result: Hold | Refusal) -> Refusal:
    assert isinstance(result, Refusal)
    return result


# ---- against a plain model ------------------------------------------------------------------------------------------


class Told:
    """The ledger as one would write it on paper: every call with what it holds and what it took."""

    def __init__(self, caps: dict[str, list[int]]) -> None:
        self.caps = caps
        self.calls: dict[int, dict[str, Any]] = {}
        self.overrun = {key: [0, 0, 0] for key in caps}
        self.closed = dict.fromkeys(caps, False)

    def spent(self, key: str, unit: int) -> int:
        return sum(call["took"][unit] for call in self.calls.values() if key in call["keys"])

    def reserved(self, key: str, unit: int) -> int:
        return sum(call["holds"][unit] for call in self.calls.values() if key in call["keys"])

    def due(self, key: str, unit: int) -> int:
        return self.spent(key, unit) + self.reserved(key, unit)

    def fits(self, keys: tuple[str, ...], want: Amount) -> bool:
        return all(not self.closed[key] and self.due(key, unit) + want[unit] <= self.caps[key][unit] for key in keys for unit in range(3))


CAPS = {"run": [60, UNLIMITED, 6], "user": [100, 80, UNLIMITED], "app": [150, UNLIMITED, UNLIMITED], "free": [UNLIMITED] * 3}
amounts = st.tuples(st.integers(0, 40), st.integers(0, 30), st.integers(0, 2))
shares = st.sampled_from(["nothing", "less", "equal", "more"])


class LedgerMachine(RuleBasedStateMachine):
    """Random calls over overlapping accounts. ``honest`` stays true while no call has billed more than it held at that moment."""

    open_calls = Bundle("open_calls")
    ended_calls = Bundle("ended_calls")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger()
        self.accounts = {key: self.ledger.account(key, key, None, None, tuple(caps)) for key, caps in CAPS.items()}
        self.told = Told({key: list(caps) for key, caps in CAPS.items()})
        self.holds: dict[int, Hold] = {}
        self.honest = True

    @rule(target=open_calls, keys=st.lists(st.sampled_from(sorted(CAPS)), min_size=1, unique=True), want=amounts)
    def reserve(self, keys: list[str], want: Amount) -> int:
        number = len(self.holds)
        accounts = tuple(self.accounts[key] for key in keys)
        result = now(self.ledger.reserve(accounts, want))
        assert isinstance(result, Hold) == self.told.fits(tuple(keys), want)
        if isinstance(result, Refusal):
            self._check_refusal(result, keys, want)
            result = Hold((), NOTHING)
            keys, want = [], NOTHING
        self.holds[number] = result
        self.told.calls[number] = {"keys": set(keys), "holds": want, "took": NOTHING, "held": want}
        return number

    def _check_refusal(self, refusal: Refusal, keys: list[str], want: Amount) -> None:
        told, unit, key = self.told, refusal.unit, refusal.account.key
        assert key in keys
        room = {k: [0 if told.closed[k] else max(told.caps[k][u] - told.due(k, u), 0) for u in range(3)] for k in keys}
        assert told.closed[key] or want[unit] > room[key][unit]  # the one it names does refuse, in the unit it names
        assert list(refusal.room) == [min(room[k][u] for k in keys) for u in range(3)]
        # ... and none that refuses in the same unit has less left.
        assert all(room[key][unit] <= room[k][unit] for k in keys if not told.closed[k] and want[unit] > room[k][unit])

    @rule(target=ended_calls, number=consumes(open_calls), share=shares, more=amounts)
    def settle(self, number: int, share: str, more: Amount) -> int:
        self._settle(number, share, more)
        return number

    @rule(number=ended_calls, share=shares, more=amounts)
    def settle_again(self, number: int, share: str, more: Amount) -> None:
        self._settle(number, share, more)

    def _settle(self, number: int, share: str, more: Amount) -> None:
        call, hold = self.told.calls[number], self.holds[number]
        base = call["held"]
        took = {"nothing": NOTHING, "less": tuple(n // 2 for n in base), "equal": base, "more": tuple(n + m for n, m in zip(base, more, strict=True))}[share]
        before = [max(h, t) for h, t in zip(call["holds"], call["took"], strict=True)]  # only one of them is not zero
        self.ledger.settle(hold, took)
        call["holds"], call["took"] = NOTHING, took
        excess = [t - b for t, b in zip(took, before, strict=True)]
        if any(more > 0 for more in excess):  # also after a release or a smaller figure: what was given back may be gone
            self.honest = False
        for key in call["keys"]:
            for unit in range(3):
                beyond = self.told.due(key, unit) - self.told.caps[key][unit]
                if excess[unit] > 0 and beyond > 0:
                    self.told.closed[key] = True
                    self.told.overrun[key][unit] = max(self.told.overrun[key][unit], 1)  # some; how much is looked at below

    @rule(target=ended_calls, number=consumes(open_calls))
    def release(self, number: int) -> int:
        self.ledger.release(self.holds[number])
        self.told.calls[number] |= {"holds": NOTHING, "took": NOTHING}
        return number

    @rule(number=ended_calls)
    def release_again(self, number: int) -> None:
        self.ledger.release(self.holds[number])  # too late: nothing happens

    @rule(key=st.sampled_from(["run", "user", "app"]), more=amounts)
    def extend(self, key: str, more: Amount) -> None:
        self.ledger.extend(self.accounts[key], more)
        for unit in range(3):
            if self.told.caps[key][unit] < UNLIMITED:
                self.told.caps[key][unit] += more[unit]
        self.told.closed[key] = any(self.told.due(key, unit) > self.told.caps[key][unit] for unit in range(3))

    @rule(key=st.sampled_from(sorted(CAPS)))
    def look_up_again(self, key: str) -> None:
        """The policy's caps are told anew with every look: what was granted stays on top."""
        assert self.ledger.account(key, key, None, None, tuple(CAPS[key])) is self.accounts[key]

    @invariant()
    def everything_adds_up(self) -> None:
        for key, account in self.accounts.items():
            for unit in range(3):
                assert account.spent[unit] == self.told.spent(key, unit)
                assert account.held[unit] == self.told.reserved(key, unit)
                assert account.caps[unit] == self.told.caps[key][unit]
            assert account.closed == self.told.closed[key]
            assert [bool(n) for n in account.overrun] == [bool(n) for n in self.told.overrun[key]]
            if account.closed:
                assert account.room == NOTHING

    @invariant()
    def no_cap_is_broken_while_nobody_bills_more_than_it_held(self) -> None:
        if self.honest:
            for account in self.accounts.values():
                assert all(spent + kept <= cap for spent, kept, cap in zip(account.spent, account.held, account.caps, strict=True))
                assert not account.closed
                assert account.overrun == NOTHING


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


# ---- one call -------------------------------------------------------------------------------------------------------


async def test_exactly_the_cap_may_be_spent_and_not_one_more():
    ledger = MemoryLedger()
    account = opened(ledger)
    for _ in range(2):
        ledger.settle(held(await ledger.reserve([account], (50, 0, 1))), (50, 0, 1))
    assert account.spent == (100, 0, 2)
    assert refused(await ledger.reserve([account], (1, 0, 1))).account is account
    assert isinstance(await ledger.reserve([account], (0, 5, 1)), Hold)  # what costs nothing still fits


async def test_a_refusal_leaves_no_account_with_a_hold():
    ledger = MemoryLedger()
    wide, tight = opened(ledger, "wide", (1_000, UNLIMITED, UNLIMITED)), opened(ledger, "tight", (10, UNLIMITED, UNLIMITED))
    for order in ([wide, tight], [tight, wide]):
        assert refused(await ledger.reserve(order, (50, 5, 1))).account is tight
        assert wide.held == tight.held == NOTHING


async def test_the_tightest_is_named_and_the_room_is_what_all_have_together():
    ledger = MemoryLedger()
    a, b, c = (opened(ledger, name, caps) for name, caps in [("a", (30, 500, 9)), ("b", (20, 900, 9)), ("c", (90, 50, 9))])
    refusal = refused(await ledger.reserve([a, b, c], (40, 60, 1)))
    assert refusal.account is b  # $20 left of all dollars; c refuses too, but in tokens
    assert refusal.unit == 0
    assert refusal.room == (20, 50, 9)
    assert str(refusal) == "user:a/u has no room for 40 usd"
    assert refused(await ledger.reserve([a, b, c], (10, 60, 1))).account is c


async def test_settling_for_less_gives_the_rest_back():
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (100, 0, 1)))
    ledger.settle(hold, (30, 0, 1))
    assert (account.spent_usd, account.held[0], account.room[0]) == (30, 0, 70)


async def test_the_later_figure_replaces_the_earlier():
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (50, 0, 1)))
    for took in (10, 40, 20, 20):
        ledger.settle(hold, (took, 0, 1))
        assert account.spent == (took, 0, 1)
        assert account.held == NOTHING


async def test_a_call_that_was_released_and_left_after_all_is_billed():
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (50, 0, 1)))
    ledger.release(hold)
    ledger.settle(hold, (20, 5, 1))
    assert (account.spent, account.held) == ((20, 5, 1), NOTHING)


async def test_an_excess_within_the_cap_is_no_overrun():
    ledger = MemoryLedger()
    account = opened(ledger)
    ledger.settle(held(await ledger.reserve([account], (10, 0, 1))), (60, 0, 1))
    assert (account.spent_usd, account.closed, account.overrun) == (60, False, NOTHING)


async def test_an_excess_that_breaks_the_cap_is_booked_and_closes_the_scope_until_it_is_extended():
    ledger = MemoryLedger()
    account, other = opened(ledger), opened(ledger, "other", (1_000, UNLIMITED, UNLIMITED))
    ledger.settle(held(await ledger.reserve([account, other], (90, 0, 1))), (120, 0, 1))
    assert (account.closed, account.overrun, account.room) == (True, (20, 0, 0), NOTHING)
    assert not other.closed
    refusal = refused(await ledger.reserve([other, account], (0, 0, 0)))
    assert (refusal.account, refusal.unit, refusal.wait_helps) == (account, 0, False)
    ledger.extend(account, (10, 0, 0))
    assert account.closed  # 120 of 110
    ledger.extend(account, (15, 0, 0))
    assert not account.closed
    assert isinstance(await ledger.reserve([account], (5, 0, 1)), Hold)


async def test_overruns_of_several_calls_add_up():
    ledger = MemoryLedger()
    account = opened(ledger)
    first, second = [held(await ledger.reserve([account], (50, 0, 1))) for _ in range(2)]
    ledger.settle(first, (60, 0, 1))
    assert account.overrun == (10, 0, 0)  # the other call's hold is not ours to spend
    ledger.settle(second, (55, 0, 1))
    assert account.overrun == (15, 0, 0)


@pytest.mark.parametrize("why", ["forced", "the cap fell"])
async def test_a_call_that_bills_what_it_held_is_no_overrun_whatever_the_cap_says(why):
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (150, 0, 1) if why == "forced" else (80, 0, 1), force=why == "forced"))
    opened(ledger, caps=(50, UNLIMITED, UNLIMITED))
    ledger.settle(hold, hold.amount)
    assert (account.closed, account.overrun) == (False, NOTHING)
    opened(ledger, caps=(500, UNLIMITED, UNLIMITED))  # the cap is raised again: nothing stands in the way
    assert isinstance(await ledger.reserve([account], (100, 0, 1)), Hold)


async def test_forced_holds_are_counted_like_all_others():
    ledger = MemoryLedger()
    account = opened(ledger, caps=(10, 10, 1))
    holds = [held(await ledger.reserve([account], (20, 20, 1), force=True)) for _ in range(2)]
    assert account.held == (40, 40, 2)
    ledger.settle(holds[0], (5, 5, 1))
    ledger.release(holds[1])
    assert (account.spent, account.held) == ((5, 5, 1), NOTHING)


@pytest.mark.parametrize(
    ("spend", "hold_open", "helps"),
    [
        (0, 90, True),  # whoever holds it may take less
        (100, 0, False),  # spent is spent
        (50, 0, False),  # nobody else is on the way: nothing will change
        (50, 50, True),
    ],
)
async def test_waiting_helps_only_where_somebody_else_holds_what_is_missing(spend, hold_open, helps):
    ledger = MemoryLedger()
    account = opened(ledger)
    ledger.settle(held(await ledger.reserve([account], (spend, 0, 1))), (spend, 0, 1))
    held(await ledger.reserve([account], (hold_open, 0, 1))) if hold_open else None
    assert refused(await ledger.reserve([account], (60, 0, 1))).wait_helps is helps


async def test_waiting_does_not_help_when_one_of_two_accounts_is_spent():
    ledger = MemoryLedger()
    busy, spent = opened(ledger, "busy"), opened(ledger, "spent")
    held(await ledger.reserve([busy], (90, 0, 1)))
    ledger.settle(held(await ledger.reserve([spent], (100, 0, 1))), (100, 0, 1))
    assert not refused(await ledger.reserve([busy, spent], (50, 0, 1))).wait_helps
    assert refused(await ledger.reserve([busy], (50, 0, 1))).wait_helps


async def test_an_extension_moves_the_cap_and_leaves_the_spend():
    ledger = MemoryLedger()
    account = opened(ledger, caps=(100, UNLIMITED, 2))
    ledger.settle(held(await ledger.reserve([account], (100, 0, 1))), (100, 0, 1))
    ledger.extend(account, (50, 7, 0))
    assert (account.spent, account.caps) == ((100, 0, 1), (150, UNLIMITED, 2))
    assert opened(ledger, caps=(200, UNLIMITED, 2)).cap_usd == 250  # the policy's cap may change, the grant stays on top


# ---- thresholds -----------------------------------------------------------------------------------------------------


def test_a_mark_is_first_once_however_many_threads_ask():
    class Slow(dict[str, Any]):
        """Leaves time for the others between the look and the entry."""

        def __contains__(self, mark: object) -> bool:
            there = super().__contains__(mark)
            time.sleep(0.0005)
            return there

    ledger = MemoryLedger()
    account = opened(ledger)
    account.fired = Slow()
    firsts: list[bool] = []
    gate = threading.Barrier(8)

    def ask() -> None:
        for mark in range(20):
            gate.wait(PATIENCE_S)
            firsts.append(ledger.first(account, str(mark), 0.5, account.caps))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(firsts) == 160
    assert sum(firsts) == 20


async def test_an_extension_arms_again_what_is_above_the_new_level():
    ledger = MemoryLedger()
    account = opened(ledger)
    ledger.settle(held(await ledger.reserve([account], (90, 0, 1))), (90, 0, 1))
    for percent in (0.3, 0.5, 0.8):
        assert ledger.first(account, str(percent), percent, (100, UNLIMITED, UNLIMITED))
    ledger.extend(account, (100, 0, 0))  # 90 of 200: 45 %
    again = [ledger.first(account, str(percent), percent, (100, UNLIMITED, UNLIMITED)) for percent in (0.3, 0.5, 0.8)]
    assert again == [False, True, True]


# ---- waiting --------------------------------------------------------------------------------------------------------


async def full(ledger: MemoryLedger) -> tuple[Account, Hold, Refusal]:
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (100, 0, 1)))
    return account, hold, refused(await ledger.reserve([account], (10, 0, 1)))


@pytest.mark.parametrize("how", ["settle", "release", "extend"])
async def test_whoever_waits_is_woken_by(how):
    ledger = MemoryLedger()
    account, hold, refusal = await full(ledger)
    waiting = asyncio.create_task(ledger.changed(refusal, PATIENCE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    change(ledger, how, account, hold)
    assert await asyncio.wait_for(waiting, PATIENCE_S / 2)
    assert ledger._waiting == []


def change(ledger: MemoryLedger, how: str, account: Account, hold: Hold) -> None:
    if how == "settle":
        ledger.settle(hold, (1, 0, 1))
    elif how == "release":
        ledger.release(hold)
    else:
        ledger.extend(account, (10, 0, 0))


@pytest.mark.parametrize("how", ["settle", "release", "extend"])
async def test_what_changed_between_the_refusal_and_the_wait_is_not_waited_for(how):
    ledger = MemoryLedger()
    account, hold, refusal = await full(ledger)
    change(ledger, how, account, hold)
    assert await asyncio.wait_for(ledger.changed(refusal, PATIENCE_S), PATIENCE_S / 2)


async def test_a_wait_ends_when_its_time_is_over_and_leaves_nothing_behind():
    ledger = MemoryLedger()
    _, _, refusal = await full(ledger)
    assert not await ledger.changed(refusal, 0.01)
    assert ledger._waiting == []


async def test_a_cancelled_wait_leaves_nothing_behind():
    ledger = MemoryLedger()
    _, hold, refusal = await full(ledger)
    waiting = asyncio.create_task(ledger.changed(refusal, PATIENCE_S))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ledger._waiting == []
    ledger.settle(hold, (1, 0, 1))


async def test_a_loop_that_closes_in_the_moment_of_waking_holds_nobody_up():
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


def test_no_wake_up_is_lost_between_two_loops_in_two_threads():
    # One place, passed to and fro: whoever misses a single wake-up waits beyond all patience.
    ledger = MemoryLedger()
    account = opened(ledger, caps=(1, UNLIMITED, UNLIMITED))
    turns: list[int] = []

    async def play(player: int) -> None:
        for _ in range(150):
            while isinstance(result := await ledger.reserve([account], (1, 0, 0)), Refusal):
                assert await ledger.changed(result, PATIENCE_S), "nobody woke it"
            turns.append(player)
            assert account.due_usd == 1
            await asyncio.sleep(0)
            ledger.settle(result, (0, 0, 0))

    async def both() -> None:
        await asyncio.gather(play(1), play(2))

    run_in_threads([both, both])
    assert len(turns) == 600
    assert account.held == NOTHING


def run_in_threads(mains: list[Any]) -> None:
    failures: list[BaseException] = []

    def run(main: Any) -> None:
        try:
            asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(main,)) for main in mains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
    assert failures == []


# ---- many threads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns far more often than usual: what is not one atomic step shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_many_threads_on_one_budget_never_break_it_and_leave_nothing_held():
    ledger = MemoryLedger()
    shared = opened(ledger, "shared", (50_000, 40_000, UNLIMITED))
    own = [opened(ledger, f"own {n}", (20_000, UNLIMITED, UNLIMITED)) for n in range(8)]
    took = [0] * 8
    broken: list[Amount] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            with ledger._lock:
                if shared.due_usd > shared.cap_usd or shared.due_tokens > shared.cap_tokens:
                    broken.append(shared.held)

    async def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(700):
            want = (dice.randint(1, 300), dice.randint(1, 200), 1)
            result = await ledger.reserve([own[number], shared], want)
            if isinstance(result, Refusal):
                continue
            fate = dice.random()
            if fate < 0.2:
                ledger.release(result)
                continue
            bill = dice.randint(0, want[0])
            ledger.settle(result, (bill, dice.randint(0, want[1]), 1))
            if fate > 0.8:  # a second figure; not above the first, as what was given back may be gone
                bill = dice.randint(0, bill)
                ledger.settle(result, (bill, 0, 1))
            took[number] += bill

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_in_threads([lambda n=n: work(n) for n in range(8)])
    finally:
        done.set()
        watcher.join(PATIENCE_S)
    assert broken == []
    assert shared.held == NOTHING
    assert shared.spent_usd == sum(took)
    assert [account.spent_usd for account in own] == took
    assert not shared.closed
    assert sum(took) > 30_000  # it was a tight budget, and much of it was used


# ---- which accounts there are ---------------------------------------------------------------------------------------


def test_a_scope_lists_its_accounts_the_current_period_last():
    ledger = MemoryLedger()
    later, sooner = opened(ledger, "k@1h#2", ends=20.0), opened(ledger, "k@1d#1", ends=10.0)
    forever = opened(ledger, "k#")
    opened(ledger, "x#", scope="user:a/x")
    assert ledger.find("user:a/u") == [forever, sooner, later]
    assert ledger.find("user:a/nobody") == []
    assert len(ledger.accounts()) == 4


async def test_past_periods_go_when_nobody_is_on_the_way_in_them():
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


def test_other_windows_of_the_same_scope_stay():
    ledger = MemoryLedger()
    month, forever = opened(ledger, "k@month#1", ends=5.0), opened(ledger, "k#")
    opened(ledger, "k@1h#1", ends=10.0)
    opened(ledger, "k@1h#2", ends=20.0)
    assert month in ledger.accounts()
    assert forever in ledger.accounts()


async def test_a_forgotten_scope_is_gone_and_its_calls_can_still_end():
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (10, 0, 1)))
    ledger.forget("user:a/u")
    ledger.forget("user:a/u")
    assert ledger.accounts() == ledger.find("user:a/u") == []
    ledger.settle(hold, (5, 0, 1))
    assert opened(ledger).spent == NOTHING


async def test_memory_is_bounded_and_what_is_held_is_kept(monkeypatch, caplog):
    monkeypatch.setattr(memory_module, "_ACCOUNTS_KEPT", 10)
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
