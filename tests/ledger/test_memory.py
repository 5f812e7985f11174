"""What only the ledger of one process does: it wakes whoever waits, forgets, and is bounded. What all ledgers do is in
tests/ledger/test_ledgers.py.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from runguard.core.money import NOTHING, UNLIMITED, Amount
from runguard.ledger import memory as memory_module
from runguard.ledger.ledger import Account, Hold, Refusal, Stale
from runguard.ledger.memory import MemoryLedger

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


def test_a_mark_is_first_once_however_many_threads_ask() -> None:
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


# ---- waiting --------------------------------------------------------------------------------------------------------


async def full(ledger: MemoryLedger) -> tuple[Account, Hold, Refusal]:
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (100, 0, 1)))
    return account, hold, refused(await ledger.reserve([account], (10, 0, 1)))


@pytest.mark.parametrize("how", ["settle", "release", "extend"])
async def test_whoever_waits_is_woken_by(how: str) -> None:
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


async def test_a_wait_ends_when_its_time_is_over_and_leaves_nothing_behind() -> None:
    ledger = MemoryLedger()
    _, _, refusal = await full(ledger)
    assert not await ledger.changed(refusal, 0.01)
    assert ledger._waiting == []


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    ledger = MemoryLedger()
    _, hold, refusal = await full(ledger)
    waiting = asyncio.create_task(ledger.changed(refusal, PATIENCE_S))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert ledger._waiting == []
    ledger.settle(hold, (1, 0, 1))


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


def test_no_wake_up_is_lost_between_two_loops_in_two_threads() -> None:
    # One place, passed to and fro: whoever misses a single wake-up waits beyond all patience.
    ledger = MemoryLedger()
    account = opened(ledger, caps=(1, UNLIMITED, UNLIMITED))
    turns: list[int] = []

    async def play(player: int) -> None:
        for _ in range(150):
            while isinstance(result := await ledger.reserve([account], (1, 0, 0)), Refusal):
                assert await ledger.changed(result, PATIENCE_S), "nobody woke it"
            assert isinstance(result, Hold)
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
def test_many_threads_on_one_budget_never_break_it_and_leave_nothing_held() -> None:
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
            if not isinstance(result, Hold):
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


async def test_a_forgotten_scope_is_gone_and_its_calls_can_still_end() -> None:
    ledger = MemoryLedger()
    account = opened(ledger)
    hold = held(await ledger.reserve([account], (10, 0, 1)))
    ledger.forget("user:a/u")
    ledger.forget("user:a/u")
    assert ledger.accounts() == ledger.find("user:a/u") == []
    ledger.settle(hold, (5, 0, 1))
    assert opened(ledger).spent == NOTHING


async def test_memory_is_bounded_and_what_is_held_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
