"""The store's accounts under seeded crashes, delays, duplicates, partitions and expiry; and defects that must be found.

``make simulate`` plays a million steps; here are a few thousand.
"""

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runguard import Budget, Threshold
from runguard.core.decision import Action
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo, ToolCall
from runguard.engine.guard import Guard
from runguard.ledger import remote
from runguard.ledger.sqlite import SqliteStore
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.simulation import simulate

STEPS = 4_000

# A planted defect each: what it breaks, the text of the store's code, and what it becomes.
DEFECTS = {
    "a repeated reservation is made again": ("if known is not None:", "if False:"),
    "a repeated reservation is made again, one account": (
        "NOT EXISTS (SELECT 1 FROM holds WHERE id = :hold) AND",
        "",
    ),
    "a repeated reservation of an ended call is granted": ('ok=known[0] == "open"', "ok=True"),
    "holds do not count": (
        "not fits(b, want)",
        "not fits(Balance(b.key, b.scope, b.window, b.ends, b.caps, b.spent, NOTHING, b.granted), want)",
    ),
    "holds do not count, one account": ("spent_usd + held_usd + :want0", "spent_usd + :want0"),
    "one more than the cap fits": ("not fits(b, want)", "not fits(b, (want[0] - 1, want[1], want[2]))"),
    "one more than the cap fits, one account": ("<= :cap0 + granted_usd", "<= :cap0 + granted_usd + 1"),
    "only the first account is asked": ("for b in balances):", "for b in balances[:1]):"),
    "a closed account is open": ("b.closed or not fits(b, want)", "not fits(b, want)"),
    "a closed account is open, one account": ("closed = 0 AND", ""),
    "only the first account holds": (
        'for key in keys:\n                self._db.execute(\n                    "UPDATE accounts SET held_usd',
        'for key in keys[:1]:\n                self._db.execute(\n                    "UPDATE accounts SET held_usd',
    ),
    "an expired hold is released": (
        "self._book(key, amount, NOTHING, amount, amount, now)",
        "self._book(key, amount, NOTHING, NOTHING, amount, now)",
    ),
    "a hold never expires": ("AND expires <= ? LIMIT ?", "AND expires + 9e9 <= ? LIMIT ?"),
    "a late bill is added to the charge": ('state in ("settled", "expired")', 'state in ("settled",)'),
    "a repeated bill is added": ('state in ("settled", "expired")', 'state in ("expired",)'),
    "a bill leaves the hold": ('held = amount if state == "open"', 'held = NOTHING if state == "open"'),
    "a bill leaves the hold open, in the table": ("keys, state = 'settled', updated", "keys, state = 'open', updated"),
    "a bill without a reservation is lost": (
        'state in ("unknown", "released")',
        'state in ("released",)',
    ),
    "a bill after a release is lost": (
        'state in ("unknown", "released")',
        'state in ("unknown",)',
    ),
    "a release overtakes its reservation in vain": (
        "\"INSERT OR IGNORE INTO holds VALUES (?, '[]', 'released', ?, ?, 0, 0, 0)\"",
        '"SELECT ?, ?, ?"',
    ),
    "a release takes an expired charge back": (
        "state = 'open' AND expires > ?",
        "state IN ('open', 'expired') AND ? > 0",
    ),
    "a release of an overdue hold is granted": ("AND expires > ?", "AND ? > 0"),
    "a past period is charged": ("now >= line.ends", "now >= line.ends + 1000"),
    "a period is charged before it begins": ("now < line.begins", "now < line.begins - 1000"),
    "an extension replaces the one before": ("granted_usd = granted_usd + ?", "granted_usd = ?"),
    "an extension opens no account": ("int(closed and balance.closed)", "int(balance.closed)"),
    "an extension opens every account": ("int(closed and balance.closed)", "0"),
    "an overrun closes nothing": ("overrun_calls = ?, closed = 1 WHERE", "overrun_calls = ? WHERE"),
}


@pytest.mark.parametrize("seed", range(3))
def test_the_store_keeps_its_rules(seed: int) -> None:
    happened = simulate(STEPS, seed)
    kinds = {"ok", "refused", "stale", "crash", "partition", "duplicate", "lost answer", "too late", "expired"}
    assert kinds <= set(happened), "the simulation does not reach what it is for"


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(1_000, 7) == simulate(1_000, 7) != simulate(1_000, 8)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str) -> None:
    with pytest.raises((AssertionError, sqlite3.IntegrityError)) as found:  # a wrong answer, or the database refuses
        simulate(10 * STEPS, 0, [DEFECTS[defect]])
    assert "simulation of seed 0" in found.value.__notes__[0], "found while it ran"


# ---- Orders of events that tests by themselves hardly ever meet, made to happen


def a_guard(url: str = "memory", **policy: Any) -> Guard:
    """A worker of its own: another ledger on the same store."""
    with mock.patch.dict(remote._open, clear=True):
        return Guard(Policy.validated({"store": url, "prices": {"m": {"input": 1, "output": 1}}, **policy}, ""))


async def paid(guard: Guard, run: str = "run") -> bool:
    """Whether one more call gets leave; it is paid at once."""
    if run not in guard.runs:
        guard.start(RunInfo(run, "app", "u", "s"))
    event = ModelCall(run, ROOT_LANE, "agent", guard.clock(), "m", 10, 0, 10)
    decision = guard.check(event)
    if decision.action is not Action.STOP:
        decision = await guard.reserve(event, slot=False)
    if decision.action is Action.STOP:
        return False
    guard.settle(event.charge, Usage(10, 10))
    await asyncio.to_thread(guard.accounts.ledger.flush, 5)
    return True


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/guard.db?synchronous=normal"


async def test_an_older_control_document_never_takes_the_place_of_a_newer_one(url: str) -> None:
    """One thread has read the old one and is slow; another has read the stop meanwhile."""
    worker, elsewhere = a_guard(url), a_guard(url)
    assert await paid(worker)
    ledger = worker.accounts.ledger
    assert isinstance(ledger, remote.StoreLedger)
    elsewhere.accounts.ledger.change_control(lambda text: json.dumps({**json.loads(text or "{}"), "breakers": {}}))
    slow, load = threading.Event(), worker.accounts.switch.load

    def slowly(text: str) -> None:
        if not slow.is_set():
            slow.set()
            threading.Event().wait(0.3)
        load(text)

    with mock.patch.object(worker.accounts.switch, "load", slowly):
        reading = [threading.Thread(target=ledger.refresh_now)]
        reading[0].start()
        slow.wait(5)
        elsewhere.operator_stops.throw("all", "ops", "now")
        reading.append(threading.Thread(target=ledger.refresh_now))
        reading[1].start()
        for thread in reading:
            thread.join()
    assert not await paid(worker, "another")


def test_stops_thrown_at_the_same_moment_all_hold() -> None:
    guard = a_guard()
    for number in range(30):
        throws = [
            threading.Thread(target=guard.operator_stops.throw, args=(f"user:app/{number}-{n}", "ops", "x"))
            for n in range(4)
        ]
        for throw in throws:
            throw.start()
        for throw in throws:
            throw.join()
    assert len(guard.accounts.switch.stops) == 120


async def test_a_threshold_that_stops_holds_in_a_worker_that_has_spent_nothing(url: str) -> None:
    policy = {"budgets": [Budget(calls=10, per="app", thresholds=[Threshold(0.3, action="stop")])]}
    for number in range(3):
        assert await paid(a_guard(url, **policy), f"r{number}")
    late = a_guard(url, **policy)
    assert not await paid(late, "late")
    a_guard(url, **policy).accounts.extend("app:app", calls=90)
    assert await paid(late, "later")  # the extension of another worker is seen too
    assert late.accounts.budgets("app:app")[0].reserved == 0


@pytest.mark.parametrize("shared", [False, True])
async def test_a_side_effect_that_was_refused_was_not_done(url: str, shared: bool) -> None:
    guard = a_guard(url if shared else "memory", tools={"pay": {"once": True, "max_calls": 1}})
    run = guard.start(RunInfo("run", "app", "u", "s"))

    async def ask(call: bytes, call_id: str) -> str:
        await guard.prepare_tool(run, "pay", call, call_id)
        decision = guard.check(ToolCall("run", ROOT_LANE, "agent", guard.clock(), "pay", call, "batch", call_id))
        return decision.finding.rule if decision.finding is not None else "allowed"

    assert await ask(b"one", "1") == "allowed"
    assert await ask(b"two", "2") == "tool_limit"  # refused by another rule
    assert await ask(b"two", "3") == "tool_limit", "not 'done already'"
    guard.end("run")
    if shared:
        await asyncio.to_thread(guard.accounts.ledger.flush, 5)
        assert await a_guard(url).tool_gate.once.claim(run.info, b"two"), "and another worker may do it"


async def test_a_long_line_at_a_healthy_store_is_no_outage(url: str) -> None:
    """Many calls at once have to wait for each other; nobody is away."""
    store = SqliteStore(url)
    ledger = remote.StoreLedger(store, timeout=0.3)
    account = ledger.account("k#", "app:x", None, None, (10**15, 10**15, 10**15))
    connect = store.connect

    def unhurried(timeout: float) -> Any:
        session = connect(timeout)
        reserve = session.reserve

        def slowly(*args: Any, **options: Any) -> Any:
            threading.Event().wait(0.02)
            return reserve(*args, **options)

        session.reserve = slowly  # type: ignore[method-assign]
        return session

    with mock.patch.object(store, "connect", unhurried):
        held = await asyncio.gather(*(ledger.reserve([account], (1, 1, 1)) for _ in range(120)), return_exceptions=True)
    assert [error for error in held if isinstance(error, BaseException)] == []
    assert ledger.link.outages == 0
