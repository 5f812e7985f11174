"""A reserve and settle cycle that is cancelled at its n-th await, for every n: nothing stays held, and the books say
what was spent.
"""

import asyncio
from pathlib import Path

import pytest

from runguard.ledger.ledger import Hold, Ledger
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from runguard.ledger.sqlite import SqliteStore

CAP, CALL = (10**9, 10**6, 1_000), (100, 10, 1)
MOST_AWAITS = 50


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    return MemoryLedger() if request.param == "memory" else StoreLedger(SqliteStore(f"sqlite:///{tmp_path}/a.db"), 10.0)


async def cycle(ledger: Ledger, steps: list[int]) -> None:
    """One call: reserve, think, settle; whatever happens in between, what was held is given back."""
    account = ledger.account("user:a#", "user:a", None, None, CAP)
    hold = await ledger.reserve([account], CALL, ttl=60)
    assert isinstance(hold, Hold)
    try:
        await asyncio.sleep(0)
        steps.append(1)
    except BaseException:
        ledger.release(hold)
        raise
    ledger.settle(hold, CALL)


async def test_wherever_a_cycle_is_cancelled_nothing_stays_held(ledger: Ledger) -> None:
    done: list[int] = []
    for number in range(MOST_AWAITS):
        task = asyncio.ensure_future(cycle(ledger, done))
        for _ in range(number):
            await asyncio.sleep(0)
            if task.done():
                break
        task.cancel()
        await asyncio.wait((task,))
    assert await asyncio.to_thread(ledger.flush, 20)
    found = await asyncio.to_thread(ledger.find, "user:a")
    # no account: no reservation arrived before its cancellation
    figures = [(account.spent[2], account.held) for account in found] or [(0, (0, 0, 0))]
    assert figures == [(len(done), (0, 0, 0))]
