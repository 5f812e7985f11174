"""Stops, trips, shadow mode, nudges, sessions, start and end."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.decision import (
    Action,
    Finding,
    trip,
)
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall, Outcome, RunInfo, ToolCall
from runguard.engine import runs as lanes
from runguard.engine import tools as side_effects
from runguard.engine.guard import Guard, Question
from runguard.engine.runs import Lane, Run
from runguard.policy import Policy
from tests.kit.driver import Driver
from tests.kit.examples import each_row
from tests.kit.guards import (
    allow_stays_allow,  # noqa: F401 - an autouse fixture
    loop,
)
from tests.kit.optional import present

# ---- stops are sticky and have a scope ------------------------------------------------------------------------------


def test_after_a_stop_everything_in_the_run_is_refused_with_the_same_trip(drive: type[Driver]) -> None:
    d = drive()
    loop(d)
    (first,) = d.guard.trips
    events: list[Question] = [
        ModelCall("run", "", "a", d.now),
        ToolCall("run", "", "a", d.now, "other", b"x", "b", "id"),
        AgentEntered("run", "", "a", d.now),
    ]
    for event in events:
        decision = d.guard.check(event)
        assert (decision.action, decision.enforced) == (Action.STOP, True)
        assert decision.trip is first
    assert len(d.guard.trips) == 1


def test_two_threads_that_decide_to_stop_a_run_make_one_trip(drive: type[Driver]) -> None:
    d = drive(max_model_calls=1)
    event = ModelCall("run", "", "a", d.now)
    run = d.guard.runs["run"]
    finding = Finding("max_model_calls", Action.STOP, 2, 1, "model calls", "run")
    found = [d.guard.deciding.decide(run, run.lanes[ROOT_LANE], event, finding) for _ in range(2)]
    (first,) = d.guard.trips
    assert [decision.trip for decision in found] == [first, first]


def test_a_loop_in_a_parallel_branch_stops_that_branch_alone(drive: type[Driver]) -> None:
    d = drive()
    one, two = d.lane("one"), d.lane("two")
    assert loop(d, lane=one)[-1] == "stop"
    assert d.model(lane=one).action is Action.STOP
    assert d.model(lane=two).action is Action.ALLOW
    assert d.model().action is Action.ALLOW
    stopped = d.guard.trips[0]
    assert (stopped.scope, stopped.scope_id, stopped.branch) == ("branch", "one", "one")


def test_a_loop_in_a_nested_agent_stops_the_run_when_nothing_runs_beside_it(drive: type[Driver]) -> None:
    d = drive()
    child = d.lane("child", concurrent=False)
    loop(d, lane=child)
    assert d.model().action is Action.STOP
    assert (d.guard.trips[0].scope, d.guard.trips[0].scope_id, d.guard.trips[0].branch) == ("run", "run", None)


def test_a_loop_below_a_parallel_branch_stops_the_branch(drive: type[Driver]) -> None:
    d = drive()
    branch = d.lane("branch")
    below = d.lane("branch/below", parent=branch, concurrent=False)
    loop(d, lane=below)
    assert d.model(lane=below).action is Action.STOP
    assert d.model(lane=branch).action is Action.STOP
    assert d.model().action is Action.ALLOW


def test_a_limit_of_the_whole_run_stops_the_run_from_any_branch(drive: type[Driver]) -> None:
    d = drive(max_model_calls=2)
    one, two = d.lane("one"), d.lane("two")
    assert [d.model(lane=lane).action.word for lane in (one, two, one)] == ["allow", "allow", "stop"]
    assert d.model(lane=two).action is Action.STOP
    assert d.guard.trips[0].scope == "run"


def test_equal_failures_carry_on_in_the_next_call_of_the_same_agent(drive: type[Driver]) -> None:
    d = drive(max_identical_tool_results=3)
    seen = []
    for n in range(3):
        child = d.lane(f"worker@{n}", concurrent=False)
        seen.append(d.tool("parse", {"n": n}, says="Error: boom", lane=child).word)
        d.guard.close_lane(d.guard.runs["run"], child)
    assert seen == ["allow", "allow", "stop"]


def test_refused_calls_are_not_counted_as_made(drive: type[Driver]) -> None:
    d = drive(max_model_calls=3)
    loop(d)
    for _ in range(5):
        d.model()
    run = d.guard.snapshot()["runs"][0]
    assert (run["tool_calls"], run["model_calls"], run["stopped"]) == (7, 0, "repetition")


# ---- the trip -------------------------------------------------------------------------------------------------------


def test_a_trip_tells_who_what_where_and_how_much(drive: type[Driver]) -> None:
    d = drive(max_model_calls=1)
    d.start("r1", app="shop", user="ann", session="s1", invocation="i1")
    d.model(run="r1")
    d.bill(100, 20, run="r1")
    decision = d.model(run="r1", agent="writer")
    stopped = decision.trip
    assert stopped is not None
    assert (stopped.app, stopped.user_id, stopped.session_id, stopped.run_id, stopped.invocation_id) == (
        "shop",
        "ann",
        "s1",
        "r1",
        "i1",
    )
    assert (stopped.rule, stopped.action, stopped.unit, stopped.observed, stopped.limit) == (
        "model_calls",
        "stop",
        "model calls",
        2,
        1,
    )
    assert (stopped.model_calls, stopped.tokens, stopped.agent_path, stopped.at) == (1, 120, ("writer",), d.now)
    assert stopped.policy_digest == d.guard.policy.digest
    assert "max_model_calls" in stopped.resume
    assert str(stopped) == stopped.message
    assert all(part in stopped.message for part in ("stopped by model_calls", "2 model calls, limit 1", "writer"))


def test_a_trip_travels_in_an_event(drive: type[Driver]) -> None:
    d = drive()
    loop(d)
    (first,) = d.guard.trips
    for event in (
        {"custom_metadata": {"runguard": first.to_dict()}},
        {"customMetadata": {"runguard": first.to_dict()}},
    ):
        assert trip(event) == first


@each_row(
    "event",
    [
        {},
        {"custom_metadata": None},
        {"custom_metadata": {"runguard": 5}},
        {"custom_metadata": {"runguard": {"v": 99}}},
        object(),
    ],
)
def test_an_event_without_a_trip_carries_none(event: Any) -> None:
    assert trip(event) is None


def test_evidence_is_digests_and_never_what_was_said(drive: type[Driver]) -> None:
    d = drive()
    for _ in range(9):
        d.tool("login", {"password": "hunter2"}, says="token sesame")
    (first,) = d.guard.trips
    assert 1 <= len(first.evidence) <= 5
    assert "hunter2" not in str(first.to_dict())
    assert "sesame" not in str(first.to_dict())


def test_the_last_thousand_trips_are_kept(drive: type[Driver]) -> None:
    d = drive(max_model_calls=1)
    for n in range(1_100):
        d.start(f"r{n}")
        d.model(run=f"r{n}")
        d.model(run=f"r{n}")
        d.guard.end(f"r{n}")
    assert len(d.guard.trips) == 1_000
    assert (d.guard.trips[0].run_id, d.guard.trips[-1].run_id) == ("r100", "r1099")


# ---- shadow ---------------------------------------------------------------------------------------------------------


def test_shadow_records_the_stop_that_would_have_been_once_and_enforces_nothing(drive: type[Driver]) -> None:
    d = drive(mode="shadow", rules={"no_news": False, "same_call": False})
    steps = [d.tool() for _ in range(30)]
    assert all(step.ran for step in steps)
    assert d.rules_tripped == ["repetition"]
    (would,) = d.guard.trips
    assert not would.enforced
    assert would.message.startswith("would have stopped")
    assert d.model().action is Action.ALLOW


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        pytest.param("repetition", lambda d, n: d.tool(), id="repetition"),
        pytest.param("no_news", lambda d, n: d.tool(args={"n": n % 3}), id="no news"),
        pytest.param("same_call", lambda d, n: d.tool(says=f"line {n}"), id="same call"),
        pytest.param("stall", lambda d, n: d.tool(args={"n": n}, says="Error: boom"), id="stall"),
        pytest.param("handoff", lambda d, n: d.hand_off("a", "b"), id="hand-off"),
        pytest.param("tool_calls", lambda d, n: d.tool(args={"n": n}, says=f"fact {n}"), id="tool calls"),
        pytest.param("model_calls", lambda d, n: d.model(), id="model calls"),
    ],
)
def test_whatever_stops_in_enforce_is_recorded_once_in_shadow(
    drive: type[Driver], rule: str, step: Callable[..., Any]
) -> None:
    seen = {}
    for mode in ("enforce", "shadow"):
        d = drive(mode=mode, max_tool_calls=125, max_model_calls=125)
        for n in range(150):
            step(d, n)
        seen[mode] = d.rules_tripped
    assert seen["enforce"] == [rule]
    assert seen["shadow"].count(rule) == 1


def test_off_is_the_adapters_business_and_a_guard_in_shadow_never_stops_by_itself(drive: type[Driver]) -> None:
    d = drive(mode="shadow", max_model_calls=1, max_tool_calls=1, max_seconds=1)
    d.now += 100
    for n in range(10):
        d.model()
        d.tool(args={"n": n})
    assert d.guard.runs["run"].stopped is None
    assert sorted(set(d.rules_tripped)) == sorted(d.rules_tripped)


# ---- nudges ---------------------------------------------------------------------------------------------------------


def nudged(d: Any, tool: str) -> bool:
    return "nudge" in [d.tool(tool).word for _ in range(4)]


def test_a_run_is_nudged_twice_and_no_more(drive: type[Driver]) -> None:
    d = drive(rules={"no_news": False})
    assert [nudged(d, tool) for tool in ("a", "b", "c", "d")] == [True, True, False, False]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_number_of_nudges_can_be_set(drive: type[Driver], budget: int) -> None:
    d = drive(max_nudges=budget, rules={"no_news": False})
    assert [nudged(d, tool) for tool in "abcd"] == [True] * budget + [False] * (4 - budget)


def test_a_spent_budget_of_nudges_still_blocks_and_stops(drive: type[Driver]) -> None:
    d = drive(max_nudges=0)
    assert loop(d) == ["allow"] * 7 + ["block", "stop"]


def test_the_same_thing_is_said_once(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": {"nudge": 2, "stop": 50}, "no_news": False, "same_call": False}, max_nudges=10)
    assert loop(d, 20).count("nudge") == 1


def test_a_warning_does_not_swallow_the_nudge_that_follows(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": {"warn": 2, "nudge": 3, "block": 5, "stop": 6}})
    assert loop(d, 6) == ["allow", "warn", "nudge", "allow", "block", "stop"]


# ---- once per session -----------------------------------------------------------------------------------------------


def test_a_success_with_the_same_arguments_is_not_repeated_in_the_session(drive: type[Driver]) -> None:
    d = drive(tools={"send": {"once": True}})
    who = {"app": "a", "user": "u", "session": "s"}
    d.start("r1", **who)
    assert d.tool("send", {"to": "ann"}, says="sent", run="r1").ran
    d.guard.end("r1")
    d.start("r2", **who)
    refused = d.tool("send", {"to": "ann"}, run="r2")
    assert (refused.word, present(refused.before[0].finding).rule) == ("block", "once")
    assert d.tool("send", {"to": "bob"}, run="r2").ran


def test_once_is_per_session_and_user(drive: type[Driver]) -> None:
    d = drive(tools={"send": {"once": True}})
    for n, (user, session) in enumerate([("u", "s1"), ("u", "s2"), ("v", "s1")]):
        d.start(f"r{n}", app="a", user=user, session=session)
        assert d.tool("send", {"to": "ann"}, says="sent", run=f"r{n}").ran


@pytest.mark.parametrize(
    ("says", "outcome"), [("Error: down", None), ("down", Outcome.ERROR), ("late", Outcome.TIMEOUT)]
)
def test_what_failed_may_be_tried_again(drive: type[Driver], says: str, outcome: Any) -> None:
    d = drive(tools={"send": {"once": True}})
    d.tool("send", {"to": "ann"}, says=says, outcome=outcome)
    assert d.tool("send", {"to": "ann"}, says="sent").ran
    assert not d.tool("send", {"to": "ann"}).ran


def test_the_memory_of_sessions_is_bounded(drive: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_effects, "_SESSIONS_KEPT", 20)
    monkeypatch.setattr(side_effects, "_ONCE_PER_SESSION", 30)
    d = drive(tools={"send": {"once": True}})
    for n in range(100):
        d.start(f"r{n}", session=f"s{n}")
        for to in range(50):
            d.tool("send", {"to": to}, says=f"sent {to}", run=f"r{n}")
        d.guard.end(f"r{n}")
    assert len(d.guard.tool_gate.once._done) == 20
    assert all(len(done) == 30 for done in d.guard.tool_gate.once._done.values())


# ---- beginning and end ----------------------------------------------------------------------------------------------


def test_end_forgets_everything_of_a_run_but_its_trips(drive: type[Driver]) -> None:
    d = drive()
    loop(d)
    d.guard.end("run")
    assert d.guard.runs == {}
    assert len(d.guard.trips) == 1
    assert d.guard.snapshot()["runs"] == []


def test_a_run_id_that_is_used_again_begins_afresh(drive: type[Driver]) -> None:
    d = drive(max_model_calls=2)
    loop(d)
    d.guard.end("run")
    d.start("run")
    assert loop(d, 2) == ["allow", "allow"]
    assert [d.model().action.word for _ in range(3)] == ["allow", "allow", "stop"]


def test_many_runs_leave_nothing_behind(drive: type[Driver]) -> None:
    d = drive(tools={"t*": {"max_calls": 3}})
    for n in range(500):
        d.start(f"r{n}")
        d.tool(f"t{n % 3}", run=f"r{n}")
        d.guard.end(f"r{n}")
    assert set(d.guard.runs) == {"run"}
    assert len(d.guard.tools.known) <= 3


def test_many_lanes_of_one_run_are_bounded(drive: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_LANES_KEPT", 50)
    d = drive()
    for n in range(500):
        d.lane(f"branch {n}", concurrent=bool(n % 2))
    run = d.guard.runs["run"]
    assert len(run.lanes) <= 51
    assert ROOT_LANE in run.lanes
    assert len(run.retired) <= 256


# ---- The interface for adapters is what the guard's class shows: methods that can be read there, each with a docstring


def conductor(**policy: Any) -> Guard:
    return Guard(Policy.validated({"clock": lambda: 0.0, **policy}, "keywords"))


async def test_a_slot_is_held_until_it_is_given_back() -> None:
    guard = conductor()
    run, event = guard.start(RunInfo("run")), ModelCall("run", ROOT_LANE, "agent", 0.0)
    guard.check(event)
    assert not await guard.reserve(event)
    guard.release(event.charge)
    assert run.slots.busy() == 1
    guard.free_slot("run")
    assert run.slots.busy() == 0
    guard.free_slot("run")
    guard.free_slot("no such run")


# ---- A run that has ended is freed at once: nothing of it waits for the garbage collector


def test_an_ended_run_is_freed_without_the_garbage_collector() -> None:
    guard = Guard(Policy.validated({}, ""))
    gc.collect()
    gc.disable()
    try:
        kept = _held()
        run = guard.start(RunInfo("run", "app", "user", "session", "run", 0.0))
        guard.open_lane(run, "/helper@1", "", concurrent=False, delegate="helper")
        guard.open_lane(run, "/helper@1/helper@2", "/helper@1", concurrent=False, delegate="helper")
        assert _held() == kept + 4
        guard.end("run")
        del run
        assert _held() == kept
    finally:
        gc.enable()


def _held() -> int:
    return sum(type(one) in (Lane, Run) for one in gc.get_objects())
