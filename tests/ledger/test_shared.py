"""Accounts that several workers share through a durable store, on real ADK: processes, forks, threads, outages, clocks and the kill switch.

A standard call has 1,000 prompt and 250 output tokens and costs $0.02, which is also its worst case.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol
from unittest import mock
from urllib.parse import urlsplit

import pytest
from google.adk.agents import ParallelAgent
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import Budget, PolicyError, Threshold
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote, urls
from runguard.ledger.sqlite import SqliteStore
from runguard.ledger.store import Reply, Session, Store, StoreError, StoreOutage
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

from .shared_worker import PRICES, agent, step, steps

CALL = Decimal("0.02")
ALICE = "user:app/alice"
SOON = 3.0  # generous: what must happen within a deadline of 0.3 s, or within two beats of the heart
HERE = Path(__file__).parent


class Place(Protocol):
    kind: str
    url: str

    def store(self) -> Store: ...
    def connect(self, timeout: float = ...) -> Session: ...


# ---- workers --------------------------------------------------------------------------------------------------------


class Process:
    """A worker in a process of its own."""

    def __init__(self, door: str) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(40)
        self._line.connect(door)
        self._answers = self._line.makefile("rb")
        self.pid = int(self._answers.readline())

    def tell(self, what: str, **facts: Any) -> None:
        self._line.sendall(json.dumps({"do": what, **facts}).encode() + b"\n")

    def hear(self) -> Any:
        answer = json.loads(self._answers.readline())
        assert "raised" not in answer, answer["raised"]
        return answer["is"]

    def do(self, what: str, **facts: Any) -> Any:
        self.tell(what, **facts)
        return self.hear()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._answers.close()
        self._line.close()


@pytest.fixture(scope="session")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    door = str(tmp_path_factory.mktemp("door") / "s")
    process = subprocess.Popen([sys.executable, str(HERE / "shared_worker.py"), door], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield door
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def process(mother: str) -> Iterator[Callable[[], Process]]:
    made: list[Process] = []

    def make() -> Process:
        made.append(Process(mother))
        return made[-1]

    yield make
    for one in made:
        one.kill()


Make = Callable[..., RunGuardPlugin]


@pytest.fixture
def worker(place: Place) -> Iterator[Make]:
    """Makes guards on the test's store, each with a ledger of its own, as workers in different processes have."""
    made: list[RunGuardPlugin] = []

    def make(store: Store | None = None, *, url: str = "", usd: str = "", thresholds: Sequence[Threshold] = (), **policy: Any) -> RunGuardPlugin:
        address, timeout = url or place.url, policy.pop("store_timeout", 5.0)
        known = {address: remote.StoreLedger(store, timeout)} if store is not None else {}
        budgets = [Budget(usd=usd, per="user", window=policy.pop("window", None), thresholds=thresholds)] if usd else []
        with mock.patch.dict(remote._open, known, clear=True):
            plugin = RunGuardPlugin(**{"prices": PRICES, "tokens": _thousand, "store": address, "store_timeout": timeout, "budgets": budgets, **policy})
        made.append(plugin)
        return plugin

    if place.kind == "postgres":
        place.connect().close()  # the schema is made once, and not within the deadline of a call
    yield make
    for plugin in made:
        ledger(plugin).flush(2)
    if place.kind == "postgres":  # a ledger keeps its connections, and a server has few
        import psycopg

        with psycopg.connect(place.url.partition("?")[0], autocommit=True) as link:
            link.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'")


def _thousand(_: Any) -> int:
    return 1_000


def ledger(plugin: RunGuardPlugin) -> Any:
    return plugin.guard.accounts.ledger


def warm(plugin: RunGuardPlugin) -> None:
    """Every thread of a ledger has its connection: what follows measures calls and no greetings."""
    together = threading.Barrier(4)

    def meet(session: Session) -> None:
        session.now()
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(5)

    threads = [threading.Thread(target=lambda: contextlib.suppress(StoreOutage).__enter__() or _quietly(ledger(plugin), meet)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _quietly(of: Any, job: Callable[[Session], None]) -> None:
    with contextlib.suppress(StoreOutage):
        of.call(job)


async def play(plugin: RunGuardPlugin, model: Any = None, *, user: str = "alice", session: str = "s", seconds: float = 20, **options: Any) -> Recording:
    """One bounded turn."""
    root = agent(model or steps(1), tools=options.pop("tools", [step]))
    async with asyncio.timeout(seconds):
        return await run(root, plugins=[plugin], user_id=user, session_id=session, **options)


def balance(place: Place, scope: str = ALICE) -> tuple[Decimal, Decimal, int]:
    """Spent, held and calls of a scope, as somebody sees them who only knows the store."""
    session = place.connect()
    try:
        (found,) = session.read(scope)
    finally:
        session.close()
    return Decimal(found.spent[0]) / 10**9, Decimal(found.held[0]) / 10**9, found.spent[2]


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


# ---- V12: one cap over processes ------------------------------------------------------------------------------------


def test_v12_a_users_cap_holds_over_processes_to_the_cent_and_thresholds_fire_once(place: Place, process: Callable[[], Process], tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    one, two = process(), process()
    for each in (one, two):
        each.do("open", url=place.url, usd="0.10", percents=[0.5, 1.0], fired=str(fired))
    for session in ("s1", "s2"):
        one.do("run", session=session, latency=0.02, wait=False)
    two.do("run", session="s3", latency=0.02, wait=False)
    bob = two.do("run", user="bob", session="b")
    made = [one.do("join", session="s1"), one.do("join", session="s2"), two.do("join", session="s3")]
    assert sum(result["calls"] for result in made) == 5
    assert {result["last"] for result in made} == {"RUNGUARD_STOP"}
    assert (bob["calls"], bob["trips"], bob["texts"]) == (5, [], ["done"])
    fourth = one.do("run", session="s4")
    assert (fourth["calls"], fourth["trips"]) == (0, [["budget", "user", ALICE]])
    assert [one.do("flush", seconds=10), two.do("flush", seconds=10)] == [True, True]
    assert balance(place) == (Decimal("0.10"), 0, 5)
    assert balance(place, "user:app/bob") == (Decimal("0.10"), 0, 5)
    told = sorted(fired.read_text().splitlines())
    assert [line.rpartition(" ")[0] for line in told] == [f"{ALICE} 0.5", f"{ALICE} 1.0", "user:app/bob 0.5", "user:app/bob 1.0"]


def test_v12_a_worker_killed_in_a_call_leaves_exact_accounts_to_the_next_one(place: Place, process: Callable[[], Process], tmp_path: Path) -> None:
    """Two calls settled and one on its way when the process dies: its successor gets two more, and the lost one is charged."""
    fired = tmp_path / "fired"
    policy = {"url": place.url, "usd": "0.10", "percents": [0.2, 0.8], "fired": str(fired), "hold_seconds": 1.5, "max_wait_seconds": 0}
    first = process()
    first.do("open", **policy)
    first.do("run", latency=0.3, wait=False)
    assert eventually(lambda: first.do("made", session="s") == 3)
    assert eventually(lambda: balance(place) == (Decimal("0.04"), CALL, 2))
    first.kill()
    second = process()
    second.do("open", **policy)
    result = second.do("run", session="after the restart")
    assert (result["calls"], result["trips"]) == (2, [["budget", "user", ALICE]])
    assert eventually(lambda: balance(place) == (Decimal("0.10"), 0, 5)), "the provider may have billed the lost call: it counts"
    third = process()
    third.do("open", **policy)
    assert third.do("run", session="full")["calls"] == 0
    third.do("extend", scope=ALICE, usd="0.04")
    assert second.do("run", session="extended")["calls"] == 2, "extended by one process, spent by another"
    assert second.do("flush", seconds=10)
    assert balance(place) == (Decimal("0.14"), 0, 7)
    assert [line.split()[1] for line in fired.read_text().splitlines()] == ["0.2", "0.8"], "once, whoever fires and however often workers start"


def test_v12_every_window_begins_with_the_whole_cap_in_every_process(place: Place, process: Callable[[], Process]) -> None:
    one, two = process(), process()
    for each in (one, two):
        each.do("open", url=place.url, usd="0.10", window="4s")
    session = place.connect()
    while session.now() % 4 > 0.4:
        time.sleep(0.02)
    made = [one.do("run", session="a", calls=3)["calls"], two.do("run", session="b")["calls"], one.do("run", session="c")["calls"]]
    period = session.now() // 4
    assert made == [3, 2, 0]
    while session.now() // 4 == period:
        time.sleep(0.02)
    session.close()
    assert [two.do("run", session="d")["calls"], one.do("run", session="e")["calls"]] == [5, 0]


def test_an_extension_rearms_its_thresholds_for_every_worker(place: Place, worker: Make) -> None:
    fired: list[tuple[str, Decimal]] = []
    one = worker(usd="0.10", thresholds=[Threshold(0.8, lambda status: fired.append(("one", status.spent)))])
    two = worker(usd="0.10", thresholds=[Threshold(0.8, lambda status: fired.append(("two", status.spent)))])
    asyncio.run(play(one, steps(5)))
    assert one.flush(10)
    assert fired == [("one", Decimal("0.08"))]
    two.extend(ALICE, usd="0.10")
    asyncio.run(play(two, steps(5), session="more"))
    assert two.flush(10)
    assert fired == [("one", Decimal("0.08")), ("two", Decimal("0.16"))]


def test_branches_that_hold_more_than_they_spend_get_all_the_cap_pays_and_meet_no_fault(place: Place, worker: Make) -> None:
    """Replies overtake each other: a refusal may be looked at when the balances that refused are already history."""
    for number in range(2):
        plugin = worker(usd="0.50", tokens=lambda _: 3_000, max_fan_out=100)
        model = ScriptedModel([text("x")], latency_s=0.005)
        crowd = ParallelAgent(name="crowd", sub_agents=[agent(model, f"p{n}") for n in range(50)])
        asyncio.run(run(crowd, plugins=[plugin], user_id=f"user{number}"))
        assert plugin.flush(10)
        assert plugin.guard.guard_errors == 0
        assert [trip.rule for trip in plugin.trips] == ["budget"]
        assert model.calls == 24, "the 25th would hold $0.04, and $0.02 is left"
        assert balance(place, f"user:app/user{number}") == (Decimal("0.48"), 0, 24)


# ---- the kill switch ------------------------------------------------------------------------------------------------


def test_a_stop_from_another_process_ends_a_call_in_flight_and_holds_until_it_is_taken_back(place: Place, process: Callable[[], Process]) -> None:
    busy, desk = process(), process()
    busy.do("open", url=place.url, usd="1")
    desk.do("open", url=place.url, usd="1")
    busy.do("run", latency=5, wait=False)
    assert eventually(lambda: busy.do("made", session="s") == 1)
    begun = time.monotonic()
    desk.do("stop", scope=ALICE, actor="ops", reason="runaway")
    result = busy.do("join", session="s")
    assert time.monotonic() - begun < SOON
    assert (result["calls"], result["last"], result["error"], result["texts"]) == (1, "RUNGUARD_STOP", "''", [])
    assert result["trips"] == [["kill_switch", "user", ALICE]]
    for each in (busy, desk):
        again = each.do("run", session="new")
        assert (again["calls"], again["trips"]) == (0, [["kill_switch", "user", ALICE]])
        assert each.do("run", user="bob", session="bob")["calls"] == 5, "nobody else is stopped"
    desk.do("resume", scope=ALICE)
    assert desk.do("run", session="s")["calls"] == 5
    assert busy.do("run", session="s")["calls"] == 5, "in the session that was stopped, in the worker that only heard of the stop"
    assert busy.do("flush", seconds=10)
    spent, held, _ = balance(place)
    assert (spent >= 11 * CALL, held) == (True, 0), "the call that was ended may have been billed: an estimate stands for it"


def test_a_stop_of_everything_can_be_taken_back_by_any_worker(place: Place, worker: Make) -> None:
    """With all stopped nobody reserves any more, so nobody hears by the way that it is over."""
    one, two = worker(), worker()
    one.stop("all", actor="ops", reason="fire")
    model = steps(1)
    assert_stopped(asyncio.run(play(two, model)), "kill_switch")
    assert [(stop.scope, stop.actor, stop.reason) for stop in two.stops()] == [("all", "ops", "fire")]
    one.resume("all")
    result = asyncio.run(play(two, model))
    assert (model.calls, result.trips) == (1, [])


def test_whoever_looks_sees_the_stops_in_force(place: Place, worker: Make) -> None:
    worker().stop("app:shop", actor="ops", reason="maintenance")
    fresh = worker()
    assert [(stop.scope, stop.actor) for stop in fresh.stops()] == [("app:shop", "ops")]


def test_a_guard_that_joins_a_ledger_in_use_obeys_the_stops_in_force(place: Place) -> None:
    """Two guards with one URL share one ledger; the second is made after the ledger has heard of the stop."""
    policy = {"prices": PRICES, "tokens": _thousand, "store": place.url, "store_timeout": 5.0}
    with mock.patch.dict(remote._open):
        first = RunGuardPlugin(**policy)
        asyncio.run(play(first))
        first.stop("all", actor="ops", reason="fire")
        second, model = RunGuardPlugin(**policy), steps(1)
        assert ledger(second) is ledger(first)
    assert_stopped(asyncio.run(play(second, model)), "kill_switch")
    assert model.calls == 0


@pytest.fixture(params=["memory", "sqlite"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Guards of one process, where accounts are kept in memory or in a file."""
    url = "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/accounts.db"
    with mock.patch.dict(remote._open, clear=True):
        yield lambda **policy: RunGuardPlugin(**{"prices": PRICES, "tokens": _thousand, "store": url, "store_timeout": 5.0, **policy})


async def _in_flight(model: ScriptedModel, calls: int = 1) -> None:
    async with asyncio.timeout(10):
        while model._in_flight < calls:
            await asyncio.sleep(0.005)


async def test_a_stop_ends_a_call_in_flight_at_once_in_its_own_process(local: Make) -> None:
    plugin, model, sessions = local(max_usd="1"), ScriptedModel([text("late")], latency_s=30), InMemorySessionService()
    running = asyncio.create_task(play(plugin, model, session_service=sessions))
    await _in_flight(model)
    await asyncio.to_thread(plugin.stop, ALICE, actor="ops", reason="enough")
    result = await asyncio.wait_for(running, SOON)
    trip = assert_stopped(result, "kill_switch")
    assert "ops" in trip.message
    assert "enough" in trip.message
    assert (result.texts, running.cancelling()) == ([], 0)
    assert "enough" not in result.events[-1].error_message, "the reason is the operator's, not the user's"
    refused = steps(1)
    assert_stopped(await play(plugin, refused, session_service=sessions), "kill_switch")
    assert refused.calls == 0
    await asyncio.to_thread(plugin.resume, ALICE)
    again = await play(plugin, steps(3), session_service=sessions)
    assert (again.texts, again.trips) == (["done"], [])
    assert_calls_answered(again.session)
    assert plugin.spend()["reserved_usd"] == 0


async def test_a_stop_ends_every_branch_and_streams_too(local: Make) -> None:
    from google.adk.agents.run_config import RunConfig, StreamingMode

    plugin, model = local(max_usd="1"), ScriptedModel([text("late")], latency_s=30)
    crowd = ParallelAgent(name="crowd", sub_agents=[agent(model, f"p{n}") for n in range(6)])
    sse = RunConfig(streaming_mode=StreamingMode.SSE)
    running = asyncio.create_task(run(crowd, plugins=[plugin], user_id="alice", run_config=sse))
    await _in_flight(model, 6)
    await asyncio.to_thread(plugin.stop, "session:app/alice/s1", actor="ops", reason="enough")
    result = await asyncio.wait_for(running, SOON)
    assert sum(event.error_code == "RUNGUARD_STOP" for event in result.events) >= 6
    assert ([trip.rule for trip in plugin.trips], result.texts) == (["kill_switch"], [])
    assert plugin.spend()["reserved_usd"] == 0


@pytest.mark.parametrize("first", ["stop", "cancel"])
async def test_a_cancellation_beside_a_stop_stays_a_cancellation(local: Make, first: str) -> None:
    """Who cancels a task waits for its end as a cancelled one; a stop that came at the same moment must not eat that."""
    plugin, model = local(max_usd="1"), ScriptedModel([text("late")], latency_s=30)
    running = asyncio.create_task(play(plugin, model))
    await _in_flight(model)
    if first == "cancel":
        running.cancel()
    plugin.guard.throw_switch(ALICE, "ops", "enough")  # ends the call with the next turn of this very loop
    if first == "stop":
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, SOON)
    assert running.cancelled()
    assert plugin.snapshot()["runs"] == []
    assert plugin.spend()["reserved_usd"] == 0


async def test_a_timeout_around_a_run_that_is_stopped_sees_no_cancellation(local: Make) -> None:
    plugin, model = local(max_usd="1"), ScriptedModel([text("late")], latency_s=30)

    async def careful() -> Recording:
        async with asyncio.timeout(20):
            result = await run(agent(model), plugins=[plugin], user_id="alice")
        await asyncio.sleep(0)  # a cancellation left over would come out here
        return result

    running = asyncio.create_task(careful())
    await _in_flight(model)
    await asyncio.to_thread(plugin.stop, "all", actor="ops", reason="enough")
    assert_stopped(await asyncio.wait_for(running, SOON), "kill_switch")


async def test_a_call_that_waits_for_money_is_ended_by_a_stop(local: Make) -> None:
    plugin = local(budgets=[Budget(usd=CALL, per="user")], max_wait_seconds=30)
    model, waiting = ScriptedModel([text("late")], latency_s=30), steps(1)
    holds = asyncio.create_task(play(plugin, model, session="one"))
    await _in_flight(model)
    waits = asyncio.create_task(play(plugin, waiting, session="two"))
    await asyncio.sleep(0.2)
    assert not waits.done()
    await asyncio.to_thread(plugin.stop, "app:app", actor="ops", reason="enough")
    for running in (holds, waits):
        assert_stopped(await asyncio.wait_for(running, SOON), "kill_switch")
    assert waiting.calls == 0


@pytest.mark.parametrize(
    ("scope", "stopped"),
    [
        ("all", ["alice/s1", "alice/s2", "bob/s1"]),
        ("app:app", ["alice/s1", "alice/s2", "bob/s1"]),
        ("app:other", []),
        ("user:app/alice", ["alice/s1", "alice/s2"]),
        ("user:other/alice", []),
        ("session:app/alice/s1", ["alice/s1"]),
    ],
)
async def test_a_stop_covers_its_scope_and_nothing_else(local: Make, scope: str, stopped: list[str]) -> None:
    plugin = local()
    plugin.stop(scope, actor="ops", reason="test")
    refused = []
    for who in ("alice/s1", "alice/s2", "bob/s1"):
        user, _, session = who.partition("/")
        model = steps(1)
        result = await play(plugin, model, user=user, session=session)
        assert bool(result.trips) == (model.calls == 0)
        refused += [who] if result.trips else []
    assert refused == stopped


async def test_one_run_can_be_stopped_by_its_id(local: Make) -> None:
    plugin, model, other = local(), ScriptedModel([text("late")], latency_s=30), ScriptedModel([text("fine")], latency_s=0.5)
    running, beside = asyncio.create_task(play(plugin, model, session="one")), asyncio.create_task(play(plugin, other, session="two"))
    await _in_flight(model)
    await _in_flight(other)
    (run_id,) = [entry["run"] for entry in plugin.snapshot()["runs"] if entry["session"] == "one"]
    await asyncio.to_thread(plugin.stop, f"run:{run_id}", actor="ops", reason="this one")
    assert_stopped(await asyncio.wait_for(running, SOON), "kill_switch")
    assert (await beside).texts == ["fine"]


async def test_a_shadow_goes_on_under_a_stop_and_bills_what_it_makes(local: Make) -> None:
    plugin, model = local(mode="shadow", max_usd="1"), steps(2)
    plugin.stop("all", actor="ops", reason="drill")
    result = await play(plugin, model)
    assert (model.calls, result.texts) == (2, ["done"])
    assert [(trip.rule, trip.enforced) for trip in plugin.trips] == [("kill_switch", False)]
    assert (plugin.spend()["calls"], plugin.spend()["usd"]) == (2, 2 * CALL)


@pytest.mark.parametrize("scope", ["", "alice", "user:", "tool:app/x", None, 7])
def test_what_cannot_be_stopped_is_said(local: Make, scope: Any) -> None:
    with pytest.raises(PolicyError, match="cannot be stopped"):
        local().stop(scope, actor="ops", reason="x")
