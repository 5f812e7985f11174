"""The kill switch reaches every worker."""

import asyncio
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from google.adk.agents import ParallelAgent
from google.adk.sessions import InMemorySessionService

from runguard import Budget, PolicyError
from runguard.adk import RunGuardPlugin
from runguard.ledger import remote
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, assert_stopped, run, text
from tests.kit.money import PRICES
from tests.kit.optional import present
from tests.kit.processes import Process
from tests.kit.shared_stores import (
    ALICE,
    CALL,
    SOON,
    Make,
    _in_flight,
    balance,
    ledger,
    play,
    thousand,
)
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.waiting import eventually


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
    assert (spent >= 11 * CALL, held) == (True, Decimal(0)), (
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
    policy: dict[str, Any] = {"prices": PRICES, "tokens": thousand, "store": place.url, "store_timeout": 5.0}
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
            **{"prices": PRICES, "tokens": thousand, "store": url, "store_timeout": 5.0, **policy}
        )


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
    assert "enough" not in present(result.events[-1].error_message), "the reason is the operator's, not the user's"
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
    plugin.guard.operator_stops.throw(ALICE, "ops", "enough")  # ends the call with the next turn of this very loop
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
