"""What only the ledger of one process does: it wakes whoever waits, forgets, and is bounded. What all ledgers do is in
tests/ledger/test_ledgers.py.
"""

import asyncio
from typing import Any

import pytest

from runguard.core.money import UNLIMITED, Amount
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
