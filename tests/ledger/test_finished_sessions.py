"""Finished sessions leave nothing that grows:
not in memory, and not in the file of a store whose retention drops them.
"""

import asyncio
import gc
import sqlite3
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runguard import Budget
from runguard.core.events import ROOT_LANE, Answer, ModelCall, ModelResult, RunInfo, ToolCall, ToolResults
from runguard.engine import runs as session_growth
from runguard.engine import spending
from runguard.engine.guard import Guard
from runguard.ledger import memory, remote
from runguard.policy import Policy
from runguard.pricing.rates import Usage

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
    monkeypatch.setattr(memory, "_ACCOUNTS_KEPT", FEW)
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
