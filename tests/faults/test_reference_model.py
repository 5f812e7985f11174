"""Random operations on every ledger, compared with accounts that are kept by hand (``AgainstPaper``). The short form is
in ``tests/ledger/test_ledgers.py``.

Here there are many more operations, and on a store several ledgers take turns, as workers in different processes do.
"""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runguard.ledger.ledger import Account, Hold, Ledger
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.remote import StoreLedger
from runguard.ledger.sqlite import SqliteStore
from tests.kit.ledgers import agree_with_paper
from tests.kit.waiting import PATIENCE_S

EXAMPLES = {"memory": 500, "sqlite": 40, "redis": 80, "postgres": 40}
WORKERS = 3


class InTurn:
    """Several ledgers that look like one: each question goes to the next of them."""

    def __init__(self, ledgers: list[Ledger]) -> None:
        self._all, self._turns = ledgers, itertools.cycle(ledgers)

    def __getattr__(self, name: str) -> Any:
        return getattr(next(self._turns), name)

    def account(self, *facts: Any) -> Account:
        """All workers have the same policy: a changed cap reaches each of them."""
        return [ledger.account(*facts) for ledger in self._all][-1]

    def flush(self, seconds: float) -> bool:
        return all(ledger.flush(seconds) for ledger in self._all)


def stores(place: Any) -> Iterator[Ledger]:
    place.connect().close()  # the schema is made once
    for _ in range(WORKERS):
        yield StoreLedger(place.store(), PATIENCE_S)


@pytest.mark.timeout(1_800)
def test_many_random_operations_in_memory_agree_with_the_reference(is_long: bool) -> None:
    agree_with_paper(MemoryLedger(), EXAMPLES["memory"] if is_long else 10, 50)


@pytest.mark.timeout(1_800)
def test_many_random_operations_of_several_workers_agree_with_the_reference(place: Any, is_long: bool) -> None:
    workers: Any = InTurn(list(stores(place)))
    agree_with_paper(workers, EXAMPLES[place.kind] if is_long else 2, 50)


# ---- A reserve and settle cycle that is cancelled at its n-th await, for every n: nothing stays held, and the
# books say what was spent


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
