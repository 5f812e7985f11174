"""Orders of events that tests by themselves hardly ever meet, made to happen."""

import asyncio
import json
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
