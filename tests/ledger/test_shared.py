"""Accounts that several workers share through a durable store, on real ADK: processes, forks, threads, outages, clocks
and the kill switch.

A standard call has 1,000 prompt and 250 output tokens and costs $0.02, which is also its worst case.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, Self
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
from runguard.ledger import remote
from runguard.ledger.store import Session, Store, StoreOutage
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

from .processes import Process
from .proxy import Proxy
from .shared_worker import PRICES, agent, step, steps

CALL = Decimal("0.02")
ALICE = "user:app/alice"
SOON = 3.0  # generous: what must happen within a deadline, or within two beats of the heart
DEADLINE = 0.5  # of the store, where it goes away
HERE = Path(__file__).parent


class Place(Protocol):
    kind: str
    url: str

    def store(self) -> Store: ...
    def connect(self, timeout: float = ...) -> Session: ...


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _awake() -> None:
    """The first run of a process imports half of ADK: seconds that no test should measure."""
    asyncio.run(run(agent(steps(2), tools=[step]), plugins=[RunGuardPlugin(prices=PRICES)]))


@pytest.fixture(autouse=True)
def _own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)


Make = Callable[..., RunGuardPlugin]


@pytest.fixture
def worker(place: Place) -> Iterator[Make]:
    """Makes guards on the test's store, each with a ledger of its own, as workers in different processes have."""
    made: list[RunGuardPlugin] = []

    def make(
        store: Store | None = None, *, url: str = "", usd: str = "", thresholds: Sequence[Threshold] = (), **policy: Any
    ) -> RunGuardPlugin:
        address, timeout = url or place.url, policy.pop("store_timeout", 5.0)
        known = {address: remote.StoreLedger(store, timeout)} if store is not None else {}
        budgets = [Budget(usd=usd, per="user", window=policy.pop("window", None), thresholds=thresholds)] if usd else []
        with mock.patch.dict(remote._open, known, clear=True):
            plugin = RunGuardPlugin(
                **{
                    "prices": PRICES,
                    "tokens": _thousand,
                    "store": address,
                    "store_timeout": timeout,
                    "budgets": budgets,
                    **policy,
                }
            )
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
            link.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
                "backend_type = 'client backend'"
            )


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

    threads = [threading.Thread(target=_quietly, args=(ledger(plugin), meet)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _quietly(of: Any, job: Callable[[Session], None]) -> None:
    with contextlib.suppress(StoreOutage):
        of.call(job)


async def play(
    plugin: RunGuardPlugin,
    model: Any = None,
    *,
    user: str = "alice",
    session: str = "s",
    seconds: float = 20,
    **options: Any,
) -> Recording:
    """One bounded turn."""
    root = agent(model or steps(1), tools=options.pop("tools", [step]))
    async with asyncio.timeout(seconds):
        return await run(root, plugins=[plugin], user_id=user, session_id=session, **options)


def balance(place: Place, scope: str = ALICE) -> tuple[Decimal, Decimal, int]:
    """Spent, held and calls of a scope, as somebody sees them who only knows the store."""
    session = place.connect()
    try:
        found = next(iter(session.read(scope)), None)
    finally:
        session.close()
    if found is None:
        return Decimal(0), Decimal(0), 0
    return Decimal(found.spent[0]) / 10**9, Decimal(found.held[0]) / 10**9, found.spent[2]


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


# ---- V12: one cap over processes ------------------------------------------------------------------------------------


def test_v12_a_users_cap_holds_over_processes_to_the_cent_and_thresholds_fire_once(
    place: Place, process: Callable[[], Process], tmp_path: Path
) -> None:
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
    assert [line.rpartition(" ")[0] for line in told] == [
        f"{ALICE} 0.5",
        f"{ALICE} 1.0",
        "user:app/bob 0.5",
        "user:app/bob 1.0",
    ]


def test_v12_a_worker_killed_in_a_call_leaves_exact_accounts_to_the_next_one(
    place: Place, process: Callable[[], Process], tmp_path: Path
) -> None:
    """Two calls settled and one on its way when the process dies: its successor gets two more, and the lost one is
    charged.
    """
    fired = tmp_path / "fired"
    policy = {
        "url": place.url,
        "usd": "0.10",
        "percents": [0.2, 0.8],
        "fired": str(fired),
        "hold_seconds": 1.5,
        "max_wait_seconds": 0,
    }
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
    assert eventually(lambda: balance(place) == (Decimal("0.10"), 0, 5)), (
        "the provider may have billed the lost call: it counts"
    )
    third = process()
    third.do("open", **policy)
    assert third.do("run", session="full")["calls"] == 0
    assert [line.split()[1] for line in fired.read_text().splitlines()] == ["0.2", "0.8"], (
        "once, whoever fires and however often workers start"
    )
    third.do("extend", scope=ALICE, usd="0.04")
    assert second.do("run", session="extended")["calls"] == 2, "extended by one process, spent by another"
    assert second.do("flush", seconds=10)
    assert balance(place) == (Decimal("0.14"), 0, 7)
    assert [line.split()[1:] for line in fired.read_text().splitlines()][2:] == [["0.8", "0.12"]], (
        "the extension has armed one again"
    )


def test_v12_every_window_begins_with_the_whole_cap_in_every_process(
    place: Place, process: Callable[[], Process]
) -> None:
    """Two seconds stand for a day."""
    one, two, session = process(), process(), place.connect()
    for each in (one, two):
        each.do("open", url=place.url, usd="0.10", window="2s")
    for attempt in range(10):  # a slow machine may not do all of it within one window
        user = f"user{attempt}"
        assert eventually(lambda: session.now() % 2 < 0.2)
        period = session.now() // 2
        made = [
            one.do("run", user=user, calls=3)["calls"],
            two.do("run", user=user)["calls"],
            one.do("run", user=user)["calls"],
        ]
        if session.now() // 2 == period:
            break
    assert made == [3, 2, 0]
    assert eventually(lambda: session.now() // 2 > period)
    assert two.do("run", user=user)["calls"] == 5
    session.close()


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


def test_branches_that_hold_more_than_they_spend_get_all_the_cap_pays_and_meet_no_fault(
    place: Place, worker: Make
) -> None:
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


def test_a_stop_from_another_process_ends_a_call_in_flight_and_holds_until_it_is_taken_back(
    place: Place, process: Callable[[], Process]
) -> None:
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
    assert busy.do("run", session="s")["calls"] == 5, (
        "in the session that was stopped, in the worker that only heard of the stop"
    )
    assert busy.do("flush", seconds=10)
    spent, held, _ = balance(place)
    assert (spent >= 11 * CALL, held) == (True, 0), (
        "the call that was ended may have been billed: an estimate stands for it"
    )


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
        yield lambda **policy: RunGuardPlugin(
            **{"prices": PRICES, "tokens": _thousand, "store": url, "store_timeout": 5.0, **policy}
        )


async def _in_flight(model: ScriptedModel, calls: int = 1) -> None:
    async with asyncio.timeout(10):
        while model._in_flight < calls:  # noqa: ASYNC110 - a model does not tell
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
    """Who cancels a task waits for its end as a cancelled one; a stop
    that came at the same moment must not eat that.
    """
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
    plugin, model, other = (
        local(),
        ScriptedModel([text("late")], latency_s=30),
        ScriptedModel([text("fine")], latency_s=0.5),
    )
    running, beside = (
        asyncio.create_task(play(plugin, model, session="one")),
        asyncio.create_task(play(plugin, other, session="two")),
    )
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


# ---- outages --------------------------------------------------------------------------------------------------------


class Trouble:
    """A store that can be taken away and given back."""

    def __init__(self, place: Place, way: str) -> None:
        self._way, self.url = way, place.url
        self._lock: sqlite3.Connection | None = None
        if way != "locked":
            self._wire, self.url = Proxy.before(place.url)
        self.path = urlsplit(place.url).path[1:]

    def begin(self) -> None:
        if self._way == "locked":
            self._lock = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._lock.execute("BEGIN IMMEDIATE")
        elif self._way == "stalls":
            self._wire.stall()
        else:
            self._wire.cut()

    def end(self) -> None:
        if self._lock is not None:
            self._lock.close()
        else:
            self._wire.mend()


@pytest.fixture
def trouble(place: Place, request: pytest.FixtureRequest) -> Trouble:
    return Trouble(place, request.param)


_WAYS = [
    ("sqlite", "locked"),
    ("redis", "refuses"),
    ("redis", "stalls"),
    ("postgres", "refuses"),
    ("postgres", "stalls"),
]
every_way = pytest.mark.parametrize(("place", "trouble"), _WAYS, indirect=True, ids=["-".join(way) for way in _WAYS])


class Ticks:
    """Whether an event loop goes on while others wait: the longest time it was away, beyond what a thread of this busy
    machine was.
    """

    def __init__(self) -> None:
        self._in_loop = self._in_thread = 0.0
        self._over = threading.Event()

    @property
    def longest(self) -> float:
        return self._in_loop - self._in_thread

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        self._thread = threading.Thread(target=self._tick_beside)
        self._thread.start()
        return self

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self._in_loop, last = max(self._in_loop, now - last), now

    def _tick_beside(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self._in_thread, last = max(self._in_thread, now - last), now

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._over.set()
        self._thread.join()


def _outage_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("runguard.store_outage")]


def _no_secret(text: str) -> bool:
    return not any(secret in text for secret in ("s3cret", "Pa55", "hunter2"))


@every_way
async def test_a_store_that_goes_away_makes_no_paid_call_and_comes_back(
    place: Place, trouble: Trouble, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """on_outage="closed", the default:

    in the middle of a run, at the beginning of the next, and over with the outage.
    """
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    warm(plugin)
    model = steps(5)

    async def last_step(q: int) -> dict[str, int]:
        if q == 2:
            await asyncio.to_thread(trouble.begin)
        return {"done": q}

    last_step.__name__ = "step"
    async with Ticks() as ticks:
        begun = time.monotonic()
        result = await play(plugin, model, tools=[last_step])
        assert time.monotonic() - begun < SOON
        trip = assert_stopped(result, "guard_error")
        assert (model.calls, trip.scope) == (2, "run")
        assert_calls_answered(result.session)
        refused, begun = steps(1), time.monotonic()
        assert_stopped(await play(plugin, refused, session="new"), "guard_error")
        assert time.monotonic() - begun < SOON
        assert refused.calls == 0
    assert ticks.longest < 0.8 * DEADLINE, "nobody waits for a store on the event loop"
    assert plugin.guard.accounts.outages == {"closed": 2, "open": 0}
    trouble.end()
    assert await asyncio.to_thread(eventually, lambda: asyncio.run(_works(plugin)))
    assert plugin.flush(10)
    again = steps(3)
    assert (await play(plugin, again, session="again", user="bob")).texts == ["done"]
    assert plugin.flush(10)
    spent, held, calls = balance(place)
    assert (held, spent) == (0, calls * CALL), "what was made is booked, what was not is not held"
    assert calls >= 3
    assert balance(place, "user:app/bob") == (3 * CALL, 0, 3)
    assert len(_outage_lines(caplog)) == 1
    assert _no_secret(caplog.text)
    assert _no_secret(json.dumps(trip.to_dict()))


async def _works(plugin: RunGuardPlugin) -> bool:
    model = steps(1)
    await play(plugin, model, session="does it work")
    return model.calls == 1


@every_way
async def test_a_store_that_goes_away_is_told_later_what_was_spent_meanwhile(
    place: Place, trouble: Trouble, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """on_outage="open": the run goes on, and every call of it is on the account in the end."""
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE, on_outage="open")
    warm(plugin)
    model = steps(5)

    async def last_step(q: int) -> dict[str, int]:
        if q == 2:
            await asyncio.to_thread(trouble.begin)
        return {"done": q}

    last_step.__name__ = "step"
    async with Ticks() as ticks:
        begun = time.monotonic()
        result = await play(plugin, model, tools=[last_step])
        assert time.monotonic() - begun < SOON
        assert (model.calls, result.texts, result.trips) == (5, ["done"], [])
        assert (await play(plugin, steps(2), session="new")).texts == ["done"]
    assert ticks.longest < 0.8 * DEADLINE
    assert plugin.guard.accounts.outages == {"closed": 0, "open": 5}
    assert not plugin.flush(0.1), "there is something left to tell"
    trouble.end()
    assert plugin.flush(15)
    assert eventually(lambda: balance(place) == (7 * CALL, 0, 7)), balance(place)
    assert ledger(plugin).lost == 0
    assert len(_outage_lines(caplog)) == 1
    assert _no_secret(caplog.text)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@pytest.mark.parametrize("on_outage", ["closed", "open"])
async def test_a_real_server_that_stalls_keeps_nothing_reserved(place: Place, on_outage: str) -> None:
    """It reads and carries out what its clients sent before they gave up, as soon as it can again."""
    from .valkey_server import valkey_process

    with valkey_process() as server, mock.patch.dict(remote._open, clear=True):
        policy = {
            "prices": PRICES,
            "tokens": _thousand,
            "store": server.url,
            "store_timeout": DEADLINE,
            "on_outage": on_outage,
        }
        plugin = RunGuardPlugin(budgets=[Budget(usd=1, per="user")], **policy)
        warm(plugin)
        await play(plugin)
        assert plugin.flush(5)
        with server.stalled():
            await asyncio.sleep(0.1)
            model = steps(1)
            await play(plugin, model)
            assert model.calls == (1 if on_outage == "open" else 0)
        assert plugin.flush(10)
        await asyncio.sleep(0.5)
        assert plugin.flush(10)
        (status,) = plugin.budgets(ALICE)
        assert (status.spent, status.reserved) == ((1 + model.calls) * CALL, 0)


@pytest.mark.parametrize("place", ["redis"], indirect=True)
async def test_a_server_that_crashes_and_comes_back_with_its_data_is_told_the_rest(place: Place) -> None:
    from .valkey_server import valkey_process

    with (
        valkey_process("--appendonly", "yes", "--appendfsync", "always") as server,
        mock.patch.dict(remote._open, clear=True),
    ):
        policy = {
            "prices": PRICES,
            "tokens": _thousand,
            "store": server.url,
            "store_timeout": DEADLINE,
            "on_outage": "open",
        }
        plugin = RunGuardPlugin(budgets=[Budget(usd=1, per="user")], **policy)
        warm(plugin)
        await play(plugin, steps(3))
        assert plugin.flush(5)
        server.stop()
        await play(plugin, steps(2))
        server.start()
        assert plugin.flush(10)
        assert await asyncio.to_thread(
            eventually, lambda: [(s.spent, s.reserved) for s in plugin.budgets(ALICE)] == [(5 * CALL, 0)]
        )


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
async def test_a_long_outage_is_logged_once_although_a_run_goes_on_beating(
    place: Place, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(place, "refuses")
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    warm(plugin)
    model = ScriptedModel([text("done")], latency_s=2.3)
    running = asyncio.create_task(play(plugin, model))
    await _in_flight(model)
    trouble.begin()
    assert (await running).texts == ["done"], "a call that was let through is answered whatever the store does"
    assert len(_outage_lines(caplog)) == 1
    trouble.end()
    assert plugin.flush(10)
    assert balance(place) == (CALL, 0, 1)


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
async def test_whoever_looks_in_while_the_store_is_away_gets_an_answer(worker: Make, place: Place) -> None:
    """A snapshot is for monitors: it says what this process knows, now."""
    trouble = Trouble(place, "refuses")
    plugin = worker(url=trouble.url, usd="1", store_timeout=DEADLINE)
    await play(plugin, steps(2))
    assert plugin.flush(5)
    trouble.begin()
    begun = time.monotonic()
    snapshot = plugin.snapshot()
    assert time.monotonic() - begun < SOON
    assert (snapshot["runs"], snapshot["guard_errors"]) == ([], 0)
    begun = time.monotonic()
    with pytest.raises(StoreOutage) as raised:  # a stop that nobody heard must not look like one
        plugin.stop("all", actor="ops", reason="fire")
    assert time.monotonic() - begun < SOON
    assert _no_secret(str(raised.value))
    trouble.end()


# ---- stores that answer oddly: what the ledger makes of it is the same for every store ------------------------------

on_a_file = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


class Odd:
    """A store whose sessions do something before they answer."""

    def __init__(self, store: Store, **before: Callable[[int], None]) -> None:
        self._store, self.name, self.durable = store, store.name, store.durable
        self._before, self.asked = before, dict.fromkeys(before, 0)

    def connect(self, timeout: float) -> Session:
        return _OddSession(self, self._store.connect(timeout))  # type: ignore[return-value]

    def meet(self, name: str) -> None:
        if name in self._before:
            self.asked[name] += 1
            self._before[name](self.asked[name])


class _OddSession:
    def __init__(self, odd: Odd, session: Session) -> None:
        self._odd, self._session = odd, session

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._session, name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            self._odd.meet(name)
            return method(*args, **kwargs)

        return asked


@on_a_file
async def test_a_reservation_that_is_granted_after_the_deadline_is_given_back(place: Place, worker: Make) -> None:
    plugin = worker(
        Odd(place.store(), reserve=lambda number: time.sleep(0.8) if number == 2 else None), usd="1", store_timeout=0.4
    )
    warm(plugin)
    await play(plugin)
    begun, model = time.monotonic(), steps(1)
    assert_stopped(await play(plugin, model, session="late"), "guard_error")
    assert time.monotonic() - begun < 0.8 + SOON
    assert model.calls == 0
    await asyncio.sleep(0.9)  # now it has answered
    assert plugin.flush(10)
    assert balance(place) == (CALL, 0, 1)


@on_a_file
async def test_a_reservation_whose_caller_was_cancelled_is_given_back(place: Place, worker: Make) -> None:
    plugin = worker(Odd(place.store(), reserve=lambda _: time.sleep(0.4)), usd="1")
    warm(plugin)
    model = steps(1)
    running = asyncio.create_task(play(plugin, model))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.5)
    assert plugin.flush(10)
    assert model.calls == 0
    assert balance(place) == (0, 0, 0)


@on_a_file
async def test_a_threshold_that_could_not_be_asked_about_fires_with_the_next_call(place: Place, worker: Make) -> None:
    """The store was away between the settlement that reached it and the question who tells."""

    def away(number: int) -> None:
        if number == 1:
            raise StoreOutage("away for a moment")

    fired: list[Decimal] = []
    odd = Odd(place.store(), first=away)
    plugin = worker(
        odd, usd="0.20", thresholds=[Threshold(0.3, lambda status: fired.append(status.spent))], on_outage="open"
    )
    await play(plugin, steps(5))
    assert plugin.flush(10)
    assert odd.asked["first"] >= 2
    assert fired == [Decimal("0.08")]


@on_a_file
async def test_a_fault_in_what_the_heart_tells_does_not_end_the_bookkeeping(place: Place, worker: Make) -> None:
    """The writer asks the guards for their runs, whose state changes under its eyes; whatever that raises, it must go
    on booking.
    """
    asked: list[str] = []

    def clock() -> float:
        if model.calls == 1 and threading.current_thread().name.startswith("runguard-store"):
            asked.append("by the writer")
            raise RuntimeError("a clock that belongs to another thread")
        return time.time()  # noqa: TID251

    plugin, model = worker(usd="1", clock=clock), ScriptedModel([call("step", q=1), text("done")], latency_s=1.2)
    result = await play(plugin, model)
    assert result.texts == ["done"]
    assert asked, "the heart has beaten"
    await play(plugin, steps(2), session="later")
    assert plugin.flush(10)
    assert balance(place) == (4 * CALL, 0, 4)


@on_a_file
async def test_a_side_effect_that_failed_can_be_tried_again_at_once_however_slow_the_records_are(
    place: Place, worker: Make
) -> None:
    done: list[int] = []

    def pay(amount: int) -> dict[str, int]:
        """Pays."""
        done.append(amount)
        if len(done) == 1:
            raise ConnectionError("the line broke")
        return {"paid": amount}

    plugin = worker(Odd(place.store(), append=lambda _: time.sleep(0.3)), tools={"pay": {"once": True}})
    model = ScriptedModel([call("pay", amount=5), call("pay", amount=5), call("pay", amount=5), text("done")])
    root = agent(
        model, tools=[pay], on_tool_error_callback=lambda tool, args, tool_context, error: {"error": str(error)}
    )
    await run(root, plugins=[plugin])
    assert done == [5, 5], "failed, then done; the third is refused"


# ---- processes that fork, loops and threads -------------------------------------------------------------------------


def test_a_fork_in_the_middle_leaves_two_workers_whose_calls_all_count(
    place: Place, process: Callable[[], Process]
) -> None:
    """Ids that collide would replace each other's amounts: the sum tells."""
    parent = process()
    parent.do("open", url=place.url, usd="10")
    parent.do("run", session="long", calls=2, latency=1.2, wait=False)
    assert eventually(lambda: parent.do("made", session="long") == 1)
    both = parent.do("fork", calls=7)
    assert (both["parent"]["calls"], both["parent"]["texts"]) == (7, ["done"])
    assert both["child"].get("texts") == ["done"], both["child"]
    assert (both["child"]["calls"], both["child"]["flushed"]) == (7, True)
    assert both["child"]["worker"].endswith(f":{both['child']['pid']}"), "a child is a worker of its own"
    parent.do("join", session="long")
    assert parent.do("flush", seconds=10)
    assert balance(place) == (16 * CALL, 0, 16)
    session = place.connect()
    assert session.running(60) == [], "the child does not keep its parent's runs alive"
    session.close()


async def test_guards_with_one_url_share_one_ledger_and_its_cap(place: Place) -> None:
    policy = {
        "prices": PRICES,
        "tokens": _thousand,
        "store": place.url,
        "store_timeout": 5.0,
        "budgets": [Budget(usd="0.10", per="user")],
    }
    with mock.patch.dict(remote._open, clear=True):
        one, two = RunGuardPlugin(**policy), RunGuardPlugin(**policy)
        assert ledger(one) is ledger(two)
    first, second = steps(4), steps(4)
    await asyncio.gather(play(one, first, session="a"), play(two, second, session="b"))
    assert first.calls + second.calls == 5
    assert one.flush(10)
    assert [(s.spent, s.reserved) for s in two.budgets(ALICE)] == [(Decimal("0.10"), 0)]


def test_loops_in_two_threads_and_the_synchronous_runner_share_one_guard(place: Place, worker: Make) -> None:
    plugin = worker(usd="0.20")
    models = [steps(5, 0.01) for _ in range(4)]
    service = InMemorySessionService()
    runner = Runner(
        app=App(name="app", root_agent=agent(models[0], tools=[step]), plugins=[plugin]), session_service=service
    )
    asyncio.run(service.create_session(app_name="app", user_id="alice", session_id="sync"))
    events: list[Any] = []

    def sync() -> None:
        message = types.Content(role="user", parts=[types.Part(text="go")])
        events.extend(runner.run(user_id="alice", session_id="sync", new_message=message))

    threads = [threading.Thread(target=sync)]
    threads += [
        threading.Thread(target=lambda n=n: asyncio.run(play(plugin, models[n], session=f"loop {n}")))
        for n in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(model.calls for model in models) == 10
    assert events, "the synchronous runner told its events"
    assert plugin.guard.guard_errors == 0
    assert plugin.flush(10)
    assert balance(place) == (Decimal("0.20"), 0, 10)


# ---- breakers and side effects --------------------------------------------------------------------------------------


async def _break(plugin: RunGuardPlugin, times: int) -> None:
    """Let a tool fail in so many runs."""

    def flaky(q: int) -> dict[str, int]:
        """Down."""
        raise ConnectionError("down")

    for number in range(times):
        model = ScriptedModel([call("flaky", q=number), text("done")])
        await run(agent(model, tools=[flaky]), plugins=[plugin], session_id=f"break{number}", catch=True)
    assert plugin.flush(10)


class _Together(ScriptedModel):
    """Two models that answer at the same moment."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if not self.calls:
            await self.prompt_tokens.barrier.wait()
        async for response in super().generate_content_async(llm_request, stream):
            yield response


class _Meeting:
    def __init__(self, parties: int) -> None:
        self.barrier = asyncio.Barrier(parties)

    def __call__(self, _: int) -> int:
        return 1_000


async def test_one_probe_goes_through_a_broken_tool_whichever_worker_makes_it(place: Place, worker: Make) -> None:
    policy = {"max_tool_failures": 2, "half_open_reset_seconds": 0.7}
    one, two = worker(**policy), worker(**policy)
    await _break(one, 2)
    made: list[str] = []

    def tool_of(name: str) -> Callable[[int], Any]:
        async def flaky(q: int) -> dict[str, int]:
            """Works again."""
            made.append(name)
            await asyncio.sleep(0.2)
            return {"ok": q}

        return flaky

    blocked = await run(
        agent(ScriptedModel([call("flaky", q=9), text("done")]), tools=[tool_of("early")]),
        plugins=[two],
        session_id="early",
    )
    assert made == [], "what one worker found out, the other knows"
    assert_calls_answered(blocked.session)
    await asyncio.sleep(0.8)
    meeting = _Meeting(2)

    async def probe(plugin: RunGuardPlugin, name: str, q: int) -> None:
        model = _Together([call("flaky", q=q), text("done")], prompt_tokens=meeting)
        await run(agent(model, tools=[tool_of(name)]), plugins=[plugin], session_id=name)

    await asyncio.gather(probe(one, "one", 10), probe(two, "two", 11))
    assert len(made) == 1, f"one probe, not {made}"
    assert one.flush(10)
    assert two.flush(10)
    made.clear()
    await asyncio.gather(
        *(
            run(agent(steps_of("flaky"), tools=[tool_of(str(n))]), plugins=[p], session_id=f"after{n}")
            for n, p in enumerate((one, two))
        )
    )
    assert sorted(made) == ["0", "1"], "its success closed the breaker for both"


def steps_of(tool: str) -> ScriptedModel:
    return ScriptedModel([call(tool, q=20), text("done")])


async def test_a_failed_probe_keeps_the_tool_closed_for_every_worker(place: Place, worker: Make) -> None:
    policy = {"max_tool_failures": 2, "half_open_reset_seconds": 0.7}
    one, two = worker(**policy), worker(**policy)
    await _break(one, 2)
    await asyncio.sleep(0.8)
    await _break(two, 1)
    made: list[int] = []

    def flaky(q: int) -> dict[str, int]:
        """Works."""
        made.append(q)
        return {"ok": q}

    for plugin in (one, two):
        await run(agent(steps_of("flaky"), tools=[flaky]), plugins=[plugin], session_id="after")
    assert made == []


async def test_a_side_effect_happens_once_over_workers(place: Place, worker: Make) -> None:
    rule = {"tools": {"pay": {"once": True}}}
    one, two = worker(**rule), worker(**rule)
    paid: list[tuple[str, int]] = []

    def pay_in(name: str) -> Callable[[int], Any]:
        async def pay(amount: int) -> dict[str, int]:
            """Pays."""
            paid.append((name, amount))
            await asyncio.sleep(0.3)
            return {"paid": amount}

        return pay

    async def turn(
        plugin: RunGuardPlugin, name: str, amount: int, session: str, meeting: _Meeting | None = None
    ) -> list[Any]:
        script = [call("pay", amount=amount), text("done")]
        model = _Together(script, prompt_tokens=meeting) if meeting is not None else ScriptedModel(script)
        result = await run(agent(model, tools=[pay_in(name)]), plugins=[plugin], session_id=session)
        return [response.response for event in result.session.events for response in event.get_function_responses()]

    await turn(one, "one", 5, "s")
    assert one.flush(10)
    (answer,) = await turn(two, "two", 5, "s")
    assert (paid, answer["status"]) == ([("one", 5)], "not_executed")
    await turn(two, "two", 5, "another session")
    await turn(two, "two", 6, "s")
    assert paid[1:] == [("two", 5), ("two", 6)]
    paid.clear()
    answers = await asyncio.gather(turn(one, "one", 7, "s", meeting := _Meeting(2)), turn(two, "two", 7, "s", meeting))
    assert len(paid) == 1, "while one is at it, the other waits for nothing and does nothing"
    assert sorted(answer.get("status", "done") for (answer,) in answers) == ["done", "not_executed"]


async def test_a_side_effect_whose_worker_died_is_free_again_after_a_while(place: Place, worker: Make) -> None:
    """A claim that nobody finishes lasts as long as a hold."""
    one, two = (worker(tools={"pay": {"once": True}}, hold_seconds=1.0) for _ in range(2))
    paid: list[int] = []

    async def pay(amount: int) -> dict[str, int]:
        """Pays."""
        paid.append(amount)
        return {"paid": amount}

    info = replace(await _info(one), session="s1")
    assert await one.guard.once.claim(info, one.guard.tools.once_identity("pay", {"amount": 5}))
    script = [call("pay", amount=5), text("done")]
    await run(agent(ScriptedModel(script), tools=[pay]), plugins=[two])
    assert paid == [], "pending"
    await asyncio.sleep(1.1)
    await run(agent(ScriptedModel(script), tools=[pay]), plugins=[two])
    assert paid == [5]


async def _info(plugin: RunGuardPlugin) -> Any:
    model = ScriptedModel([text("done")], latency_s=0.05)
    running = asyncio.create_task(run(agent(model), plugins=[plugin]))
    await _in_flight(model)
    (one,) = plugin.guard.runs.values()
    await running
    return one.info


# ---- records and signs of life --------------------------------------------------------------------------------------


async def test_another_process_reads_who_spent_what_and_why_runs_were_stopped(place: Place, worker: Make) -> None:
    plugin = worker(usd="0.06")
    helper = agent(ScriptedModel([text("helped")]), "helper", description="helps")
    model = ScriptedModel(lambda n, _: call("transfer_to_agent", agent_name="helper") if n == 1 else text("x"))
    root = agent(model, "boss", sub_agents=[helper])
    await run(root, plugins=[plugin], user_id="alice")
    await play(plugin, steps(5), session="too much")
    assert plugin.flush(10)
    session = place.connect()
    runs, calls, trips = (
        [(ref, json.loads(body)) for _, ref, body in session.tail(kind, 100)] for kind in ("run", "call", "trip")
    )
    session.close()
    assert [(r["session"], r["user"], r["stopped"], r["model_calls"]) for _, r in runs] == [
        ("s1", "alice", None, 2),
        ("too much", "alice", "budget", 1),
    ]
    assert {name: figures["usd"] for name, figures in runs[0][1]["spend"]["by_agent"].items()} == {
        "boss": "0.02",
        "helper": "0.02",
    }
    assert [(ref, c["agent"], c["model"], c["usd"], c["input"], c["output"]) for ref, c in calls] == [
        (runs[0][0], "boss", "scripted-1", "0.02", 1_000, 250),
        (runs[0][0], "helper", "scripted-1", "0.02", 1_000, 250),
        (runs[1][0], "worker", "scripted-1", "0.02", 1_000, 250),
    ]
    assert [(ref == t["id"], t["rule"], t["run_id"], t["scope_id"]) for ref, t in trips] == [
        (True, "budget", runs[1][0], ALICE)
    ]
    told = json.dumps([runs, calls, trips])
    assert "helped" not in told, "records have numbers and names, and nobody's words"


async def test_a_live_run_is_seen_by_others_and_forgotten_at_its_end(place: Place, worker: Make) -> None:
    plugin = worker(usd="1")
    model = ScriptedModel([text("done")], latency_s=1.3)
    running = asyncio.create_task(play(plugin, model))
    session = await asyncio.to_thread(place.connect)
    assert await asyncio.to_thread(eventually, lambda: len(session.running(5)) == 1, 1.2)
    ((run_id, who, at, body),) = session.running(5)
    seen = json.loads(body)
    assert (run_id, who, seen["user"], seen["in_flight"]) == (seen["run"], ledger(plugin).worker, "alice", 1)
    assert abs(session.now() - at) < 5
    await running
    assert plugin.flush(10)
    assert session.running(60) == []
    session.close()


# ---- holds of those who do not come back ----------------------------------------------------------------------------


async def test_a_hold_that_outlives_its_time_is_charged_and_a_late_answer_corrects_it(
    place: Place, worker: Make
) -> None:
    plugin = worker(usd="1", tokens=lambda _: 2_000, hold_seconds=0.5)  # holds $0.03 for what costs $0.02
    model = ScriptedModel([text("late")], latency_s=1.2)
    running = asyncio.create_task(play(plugin, model))
    await _in_flight(model)
    assert balance(place) == (0, Decimal("0.03"), 0)
    await asyncio.sleep(0.7)
    assert balance(place) == (Decimal("0.03"), 0, 1)
    assert (await running).texts == ["late"]
    assert plugin.flush(10)
    assert balance(place) == (CALL, 0, 1)


# ---- clocks ---------------------------------------------------------------------------------------------------------


class _Clock:
    """The time module of a machine whose clock is wrong."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time(self) -> float:
        return time.time() + self._seconds  # noqa: TID251

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.mark.parametrize("minutes", [10, -10])
async def test_a_worker_whose_clock_is_wrong_counts_in_the_stores_periods(
    place: Place, worker: Make, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """In its spend, in what it shows and in what it extends.

    Ten minutes lead into another of these windows at any time.
    """
    wrong_clock, window = _Clock(60.0 * minutes), "5m"
    session = place.connect()
    if session.now() % 300 > 285:  # not over the end of a window
        await asyncio.sleep(16)
    session.close()
    right = worker(usd="0.10", window=window)
    await play(right, steps(2), user="carol")
    assert right.flush(10)
    monkeypatch.setattr(remote, "time", wrong_clock)
    wrong = worker(usd="0.10", window=window, clock=wrong_clock.time)
    assert [(s.spent, s.limit) for s in wrong.budgets("user:app/carol")] == [(2 * CALL, Decimal("0.10"))], (
        "seen before its first call"
    )
    model = steps(5)
    assert_stopped(await play(wrong, model, user="carol", session="wrong"), "budget")
    assert model.calls == 3
    assert wrong.flush(10)
    assert [(s.spent, s.limit) for s in wrong.budgets("user:app/carol")] == [(Decimal("0.10"), Decimal("0.10"))]
    (extended,) = wrong.extend("user:app/carol", usd="0.04")
    assert (extended.spent, extended.limit) == (Decimal("0.10"), Decimal("0.14"))
    monkeypatch.undo()
    model = steps(5)
    await play(right, model, user="carol", session="right")
    assert model.calls == 2, "the extension is in the period that is now"


# ---- errors that must be understood ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://root:hunter2@db/x", "no such store"),
        ("hunter2", "no such store"),
        ("sqlite://root:hunter2@db/x.db", "sqlite:///"),
        ("sqlite:", "sqlite:///"),
        ("redis://:hunter2@host:port/0", "cannot be read"),
        ("redis://u:hunter2@host/0?pool=1", "pool"),
        ("rediss://u:hunter2@host/zero", "number"),
        ("postgresql://u:hunter2@host:port/db", "not understood"),
        ("postgresql://u:hun@ter2@host/db?schema=pg_x", "schema"),
        ("", "store"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_at_once_without_its_password(url: str, words: str) -> None:
    with pytest.raises(PolicyError) as raised:
        RunGuardPlugin(store=url)
    said = str(raised.value)
    assert words in said
    assert "ter2" not in said or url == "hunter2"
    assert raised.value.__cause__ is None or "ter2" not in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("redis://:hunter2@h/0", "redis", "redis"), ("postgresql://u:hunter2@h/d", "psycopg", "postgres")],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PolicyError) as raised:
        RunGuardPlugin(store=url)
    assert f"runguard-agents[{extra}]" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("url", "package"), [("redis://h/0", "redis"), ("postgresql://h/d", "psycopg")])
def test_a_driver_is_imported_before_the_first_call_and_not_within_its_deadline(url: str, package: str) -> None:
    code = (
        f"import sys; from runguard.ledger.urls import open_ledger; open_ledger({url!r}, 1.0); assert {package!r} "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def _newer(place: Place) -> None:
    """What a later version would have left."""
    if place.kind == "sqlite":
        with contextlib.closing(sqlite3.connect(urlsplit(place.url).path[1:])) as db:
            db.execute("PRAGMA user_version=99")
    elif place.kind == "redis":
        import redis

        address, _, namespace = place.url.partition("?namespace=")
        with redis.Redis.from_url(address) as client:
            client.set(f"{{{namespace}}}:schema", "99")
    else:
        import psycopg

        address, _, schema = place.url.partition("?schema=")
        with psycopg.connect(address, autocommit=True) as link:
            link.execute(f'UPDATE "{schema}".runguard_schema SET version = 99')


async def test_a_store_of_a_newer_version_is_left_alone_and_says_so(
    place: Place, worker: Make, caplog: pytest.LogCaptureFixture
) -> None:
    place.connect().close()
    _newer(place)
    begun = time.monotonic()
    with pytest.raises(PolicyError, match="newer RunGuard") as told:  # before anything runs
        worker(usd="1")
    assert time.monotonic() - begun < SOON
    assert _no_secret(caplog.text + str(told.value))


@on_a_file
async def test_a_worker_that_starts_while_another_writes_the_new_file_waits_for_it(place: Place, worker: Make) -> None:
    """SQLite itself does not wait when the journal of a new file is set up."""
    other = sqlite3.connect(urlsplit(place.url).path[1:], isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    released = threading.Timer(0.3, other.close)
    released.start()
    model = steps(1)
    result = await play(worker(usd="1"), model)
    released.join()
    assert (model.calls, result.trips) == (1, [])


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@127.0.0.1:1/0", "postgresql://u:hunter2@127.0.0.1:1/db", "redis://:hunter2@192.0.2.1:6379/0"],
)
async def test_a_server_that_is_not_there_is_told_at_the_first_call_and_hangs_nobody(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "runguard")
    begun = time.monotonic()
    with mock.patch.dict(remote._open, clear=True):
        plugin = RunGuardPlugin(prices=PRICES, tokens=_thousand, store=url, store_timeout=DEADLINE, max_usd="1")
    assert time.monotonic() - begun < SOON
    async with Ticks() as ticks:
        begun, model = time.monotonic(), steps(1)
        trip = assert_stopped(await play(plugin, model), "guard_error")
        assert time.monotonic() - begun < SOON
    assert ticks.longest < 0.8 * DEADLINE
    assert model.calls == 0
    assert "on_outage" in trip.resume, "what helps is said"
    assert len(_outage_lines(caplog)) == 1
    for said in (
        caplog.text,
        json.dumps(trip.to_dict()),
        plugin.describe(),
        repr(plugin.guard.policy.digest),
        json.dumps(plugin.snapshot(), default=str),
    ):
        assert _no_secret(said)
