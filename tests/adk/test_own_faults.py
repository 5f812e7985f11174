"""The guard's own faults, slow or failing callbacks, shadow mode: nothing of it may change what a healthy run does."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent

import runguard
from runguard.adk import RunGuardPlugin, model_calls
from runguard.core.events import AgentEntered, HandOff, ModelCall, ToolCall
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play, prompts, told
from tests.kit.topologies import (
    TOPOLOGIES,
    Team,
    loop,
    parallel,
    single,
    spread,
    task,
    task_again,
    transfer_to_child,
    workflow_cycle,
)

Topology = Callable[[Team], Any]
everywhere = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.__name__)
somewhere = pytest.mark.parametrize(
    "topology", [single, transfer_to_child, loop, parallel, workflow_cycle], ids=lambda topology: topology.__name__
)


class FaultError(Exception):
    """What a bug in the guard would raise."""


def break_guard(
    plugin: RunGuardPlugin, monkeypatch: pytest.MonkeyPatch, method: str, *, on: tuple[type, ...] = (), after: int = 0
) -> list[int]:
    """Let a method of the guard raise: for these events, from the nth on."""
    owner: Any = plugin.guard.tools if method == "fingerprint" else plugin.guard
    original, met = getattr(owner, method), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if not on or isinstance(args[0], on):
            met.append(1)
            if len(met) > after:
                raise FaultError("a bug")
        return original(*args, **kwargs)

    async def broken_async(*args: Any, **kwargs: Any) -> Any:
        return broken(*args, **kwargs) if len(met) >= after else await broken(*args, **kwargs)

    monkeypatch.setattr(owner, method, broken_async if asyncio.iscoroutinefunction(original) else broken)
    return met


# ---- faults inside the guard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "method"), spread("check", "after", "reserve", "fingerprint", "start"))
async def test_allow_leaves_the_run_as_it_was_and_counts_the_fault(
    topology: Topology, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, team, plugin = Team(endless=False), Team(endless=False), RunGuardPlugin(on_guard_error="allow")
    met = break_guard(plugin, monkeypatch, method)
    without, result = await play(topology(bare)), await play(topology(team), plugins=[plugin])
    assert told(result.events) == told(without.events)
    assert prompts(team.requests) == prompts(bare.requests)
    assert plugin.trips == []
    assert bool(plugin.snapshot()["guard_errors"]) == bool(met)
    assert plugin.snapshot()["runs"] == []


@pytest.mark.timeout(15)  # a loop that nobody ends leaves no room for asyncio's own timeout
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("topology", "event"), spread(AgentEntered, ModelCall, ToolCall))
async def test_block_stops_the_run_with_guard_error(
    topology: Topology, event: type, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(on_guard_error="block", max_model_calls=12)
    met = break_guard(plugin, monkeypatch, "check", on=(event,), after=after)
    result = await play(topology(team), plugins=[plugin])
    if len(met) <= after:
        assert_stopped(result, "model_calls")  # this topology has too few of these events
        return
    trip = assert_stopped(result, "guard_error")
    assert [t.rule for t in plugin.trips] == ["guard_error"]
    assert "FaultError" in trip.message
    assert all(runguard.trip(e) == trip for e in result.events if e.error_code == "RUNGUARD_STOP")
    assert team.calls <= (after + 1) * 3
    if event is ModelCall:
        assert team.calls == after
    if topology not in (task, task_again):  # a stopped task keeps its delegation open
        assert_calls_answered(result.session)
    assert plugin.snapshot()["runs"] == []


async def test_block_in_raise_mode_raises_that_the_guard_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = RunGuardPlugin(on_guard_error="block", on_stop="raise")
    break_guard(plugin, monkeypatch, "check", on=(ModelCall,), after=1)
    result = await play(single(Team(endless=True)), plugins=[plugin], catch=True)
    assert type(result.error) is runguard.GuardFailedError
    assert_calls_answered(result.session)


@pytest.mark.parametrize(
    ("topology", "method", "on"), [(single, "after", ()), (transfer_to_child, "check", (HandOff,))]
)
async def test_block_also_means_faults_while_learning_and_at_hand_offs(
    topology: Topology, method: str, on: tuple[type, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    team, plugin = Team(endless=True), RunGuardPlugin(on_guard_error="block", max_model_calls=12)
    break_guard(plugin, monkeypatch, method, on=on)
    result = await play(topology(team), plugins=[plugin])
    assert_stopped(result, "guard_error")
    assert team.calls == 1
    assert_calls_answered(result.session)


async def test_a_fault_while_stopping_does_not_let_the_run_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when the stop cannot be recorded, block means that no further call is paid."""
    team, plugin = Team(endless=True), RunGuardPlugin(on_guard_error="block", max_model_calls=12)
    break_guard(plugin, monkeypatch, "check", on=(ModelCall,), after=1)
    break_guard(plugin, monkeypatch, "fail")
    result = await play(single(team), plugins=[plugin])
    assert team.calls == 1
    assert any(event.error_code == "RUNGUARD_STOP" for event in result.events)


# ---- callbacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["on_trip", "on_decision"])
async def test_a_callback_that_raises_changes_nothing(wanted: str) -> None:
    def broken(_: Any) -> None:
        raise FaultError("not the run's business")

    callbacks: dict[str, Any] = {wanted: broken}
    team, plugin = Team(endless=True), RunGuardPlugin(max_model_calls=4, **callbacks)
    result = await play(single(team), plugins=[plugin])
    assert plugin.flush()
    assert_stopped(result, "model_calls")
    assert team.calls == 4
    assert (plugin.snapshot()["callbacks_failed"], plugin.snapshot()["guard_errors"]) == (1, 0)


@pytest.mark.parametrize("slow", ["sync", "async"])
async def test_a_callback_that_sleeps_holds_up_nobody(slow: str) -> None:
    heard: list[runguard.Trip] = []
    wake = threading.Event()

    def on_trip(trip: runguard.Trip) -> None:
        wake.wait(60)
        heard.append(trip)

    async def on_trip_async(trip: runguard.Trip) -> None:
        await asyncio.to_thread(wake.wait, 60)
        heard.append(trip)

    team, plugin = (
        Team(endless=True),
        RunGuardPlugin(max_model_calls=4, on_trip=on_trip if slow == "sync" else on_trip_async),
    )
    trip = assert_stopped(await play(single(team), plugins=[plugin]))
    assert heard == []
    wake.set()
    assert await asyncio.to_thread(plugin.flush, 20)
    assert heard == [trip]


# ---- shadow ---------------------------------------------------------------------------------------------------------


@everywhere
async def test_shadow_records_what_would_have_happened_and_changes_nothing(topology: Topology) -> None:
    bare, team = Team(endless=False), Team(endless=False)
    heard: list[Any] = []
    plugin = RunGuardPlugin(mode="shadow", max_model_calls=1, on_trip=heard.append)
    without, result = await play(topology(bare)), await play(topology(team), plugins=[plugin])
    assert told(result.events) == told(without.events)
    assert told(result.session.events) == told(without.session.events)
    assert prompts(team.requests) == prompts(bare.requests)
    assert team.calls == bare.calls
    (trip,) = plugin.trips
    assert (trip.rule, trip.limit, trip.observed, trip.enforced) == ("model_calls", 1, 2, False)
    assert "would have" in trip.message
    assert plugin.flush()
    assert heard == [trip]
    assert plugin.snapshot()["runs"] == []


async def test_shadow_neither_queues_nor_refuses_a_crowd() -> None:
    policies: list[dict[str, Any]] = [{}, {"max_concurrent_agents": 5}, {"max_fan_out": 5}]
    for policy in policies:
        model = ScriptedModel([text("x")], latency_s=0.05)
        root = ParallelAgent(name="par", sub_agents=[LlmAgent(name=f"p{n}", model=model) for n in range(40)])
        result = await play(root, plugins=[RunGuardPlugin(mode="shadow", **policy)])
        assert (model.calls, model.max_in_flight, len(result.texts)) == (40, 40, 40)


@somewhere
async def test_off_does_nothing_at_all(topology: Topology) -> None:
    bare, team = Team(endless=False), Team(endless=False)
    plugin = RunGuardPlugin(mode="off", max_model_calls=1)
    without, result = await play(topology(bare)), await play(topology(team), plugins=[plugin])
    assert told(result.events) == told(without.events)
    assert (plugin.trips, plugin.snapshot()["runs"]) == ([], [])


# ---- the environment's word -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "trips", "calls"), [("off", 0, 3), ("shadow", 1, 3), ("enforce", 1, 1)])
@pytest.mark.parametrize("keyword", ["off", "shadow", "enforce"])
async def test_the_environments_mode_wins_over_the_keyword(
    mode: str, trips: int, calls: int, keyword: Literal["off", "shadow", "enforce"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", mode)
    team, plugin = Team(endless=False), RunGuardPlugin(mode=keyword, max_model_calls=1)
    await play(single(team), plugins=[plugin])
    assert (len(plugin.trips), team.calls, plugin.snapshot()["mode"]) == (trips, calls, mode)


def test_a_mode_that_does_not_exist_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", "shadw")
    with pytest.raises(runguard.PolicyError, match="shadw"):
        RunGuardPlugin()


@everywhere
async def test_a_plugin_built_by_name_with_a_broken_policy_stops_every_run(
    topology: Topology, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ADK's command line builds plugins by name and only logs what their constructor raises:
    it would go on unguarded.
    """
    policy = tmp_path / "runguard.toml"
    policy.write_text("max_model_cals = 3\n")
    monkeypatch.setenv("RUNGUARD_POLICY", str(policy))
    with pytest.raises(runguard.PolicyError, match="max_model_calls"):
        RunGuardPlugin()
    team, plugin = Team(endless=True), RunGuardPlugin(name="runguard.adk.RunGuardPlugin")
    result = await play(topology(team), plugins=[plugin])
    assert team.calls == 0
    assert "max_model_cals" in assert_stopped(result, "policy_error").message
    assert len(plugin.trips) == 1


@pytest.mark.timeout(15)
async def test_a_stopped_loop_with_a_broken_guard_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst of both: the guard fails in every hook and the loop has no end of its own."""
    model = ScriptedModel([text("again")])
    plugin = RunGuardPlugin(on_guard_error="block")
    break_guard(plugin, monkeypatch, "check")
    result = await play(LoopAgent(name="loop", sub_agents=[LlmAgent(name="member", model=model)]), plugins=[plugin])
    assert model.calls == 0
    assert len(result.events) < 20


# ---- reservations ---------------------------------------------------------------------------------------------------

PRICED: dict[str, Any] = {
    "prices": {"scripted-1": {"input": 10, "output": 40}},
    "models": {"scripted-1": {"max_output_tokens": 2_000}},
}
ONE_AT_A_TIME = "0.15"  # a call takes $0.02, $0.09 are held for it


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (lambda plugin: plugin.guard.accounts.expectations, "learn"),
        (lambda plugin: plugin.guard.accounts.ledger, "hold_now"),
        (lambda plugin: plugin.guard.accounts.spending, "book"),
        (lambda plugin: plugin.guard.accounts.ledger, "settle"),
        (lambda plugin: plugin.guard, "settle"),
        (lambda plugin: plugin.guard, "_too_late"),
        (lambda plugin: plugin.generations[0].model_hooks, "_admit"),
    ],
    ids=["learn", "hold", "book", "ledger", "settle", "too late", "let go"],
)
async def test_one_fault_leaves_no_reservation_that_later_calls_wait_for(
    owner: Callable[[Any], Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team(endless=False)
    plugin = RunGuardPlugin(max_usd=ONE_AT_A_TIME, max_wait_seconds=60, max_seconds=600, **PRICED)
    broken = owner(plugin)
    original, met = getattr(broken, method), []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        met.append(1)
        if len(met) == 1:
            raise FaultError("a bug")
        return original(*args, **kwargs)

    monkeypatch.setattr(broken, method, fails_once)
    result = await play(single(team), plugins=[plugin], seconds=20)
    assert result.texts == ["solo is done"]
    assert met
    assert plugin.spend()["reserved_usd"] == 0
    # what cannot be booked among the figures is booked on the budget
    assert plugin.spend()["calls"] == 3 - (method == "book")
    assert plugin.snapshot()["guard_errors"] == 1


async def test_a_fault_at_the_border_books_an_estimate_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from runguard.adk.runs import ModelInFlight

    held: list[Any] = []

    def look(n: int) -> dict[str, Any]:
        held.append(plugin.spend()["reserved_usd"])
        return {"n": n}

    def broken(*_: Any) -> None:
        raise FaultError("a bug")

    model = ScriptedModel([call("look", n=1), text("done")])
    plugin = RunGuardPlugin(max_usd=ONE_AT_A_TIME, **PRICED)
    monkeypatch.setattr(ModelInFlight, "saw", broken)
    result = await play(LlmAgent(name="solo", model=model, tools=[look]), plugins=[plugin])
    assert (result.texts, held) == (["done"], [0])
    assert (plugin.spend()["calls"], plugin.spend()["estimated_calls"]) == (2, 2)
    assert plugin.snapshot()["guard_errors"] == 2


async def test_in_shadow_mode_a_fault_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    team, plugin = Team(endless=False), RunGuardPlugin(mode="shadow", on_guard_error="block")
    break_guard(plugin, monkeypatch, "check")
    result = await play(single(team), plugins=[plugin])
    assert result.texts == ["solo is done"]
    assert plugin.snapshot()["guard_errors"] > 0


# ---- A fault of the wrapper around a model, before the call begins: the call is made all the same


async def test_a_fault_before_the_call_begins_does_not_reach_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = RunGuardPlugin()
    agent = LlmAgent(name="writer", model=ScriptedModel(lambda n, request: text("done")))
    monkeypatch.setattr(model_calls, "SURROUNDINGS", None)
    recording = await play(agent, plugins=[plugin])
    assert recording.texts == ["done"]
    assert plugin.guard.guard_errors == 1
