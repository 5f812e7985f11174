"""Stops, trips, shadow mode, nudges, sessions, breakers, calls in flight, callbacks, texts and errors."""

import asyncio
import gc
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runguard.core import errors
from runguard.core.decision import (
    Action,
    Decision,
    Finding,
    Trip,
    text_for_model,
    text_for_operator,
    text_for_user,
    trip,
)
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall, Outcome, RunInfo, ToolCall
from runguard.engine import runs as lanes
from runguard.engine import tools as side_effects
from runguard.engine.guard import Guard, Question
from runguard.engine.runs import Lane, Run
from runguard.policy import Policy, ToolRule
from runguard.policy.settings import RULES
from tests.kit.driver import Driver
from tests.kit.examples import each_row
from tests.kit.guards import (
    LADDER,
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
    assert len(d.guard.tools._found) <= 3


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
    """How many lanes and runs there are among the young objects: without collections, all that are made stay young."""
    return sum(type(one) in (Lane, Run) for one in gc.get_objects(generation=0))


# ---- the breaker across runs ----------------------------------------------------------------------------------------


def raise_in(d: Driver, *runs: str, tool: str = "flaky") -> None:
    for n, run in enumerate(runs):
        d.start(run)
        d.tool(tool, {"run": run, "n": n}, says="ConnectionError: refused", outcome=Outcome.ERROR, run=run)


def test_exceptions_from_several_runs_open_the_breaker_for_all(drive: type[Driver]) -> None:
    d = drive()
    raise_in(d, *(f"r{n}" for n in range(5)))
    step = d.tool("flaky")
    assert (step.word, present(step.before[0].finding).rule, step.ran) == ("block", "breaker", False)
    assert step.before[0].retry_after == 60
    assert d.guard.snapshot()["breakers"] == {"flaky": "open"}
    assert d.tool("other").ran


def test_while_a_probe_is_out_the_others_are_refused(drive: type[Driver]) -> None:
    d = drive(max_tool_failures=2, half_open_reset_seconds=10)
    raise_in(d, "r1", "r2")
    d.now += 10
    probing = ToolCall("run", "", "a", d.now, "flaky", b"x", "batch", "id")
    assert d.guard.check(probing).action is Action.ALLOW
    d.start("r3")
    assert not d.tool("flaky", run="r3").ran


def test_a_probe_of_a_run_that_ended_goes_to_the_next(drive: type[Driver]) -> None:
    d = drive(max_tool_failures=2, half_open_reset_seconds=10)
    raise_in(d, "r1", "r2")
    d.now += 10
    d.guard.check(ToolCall("run", "", "a", d.now, "flaky", b"x", "batch", "id"))
    d.guard.end("run")
    d.start("r3")
    assert d.tool("flaky", run="r3", says="back").ran


def test_a_probe_that_another_rule_refused_proves_nothing(drive: type[Driver]) -> None:
    d = drive(max_tool_failures=2, half_open_reset_seconds=10, tools={"flaky": {"max_calls": 1}})
    raise_in(d, "r1", "r2")
    d.now += 10
    assert not d.tool("flaky", run="r2").ran  # its one call of this run is spent: the tool was not reached
    assert present(d.guard.breakers.get("flaky")).state(d.now).value == "half_open"
    assert d.tool("flaky", run="run", says="back").ran  # and the probe is free for the next


def test_the_breaker_of_an_exempt_tool_can_close_again(drive: type[Driver]) -> None:
    d = drive(max_tool_failures=2, half_open_reset_seconds=10, tools={"flaky": {"exempt": True}})
    raise_in(d, "r1", "r2")
    d.now += 10
    for _ in range(3):
        assert d.tool("flaky", says="back").ran


def test_in_shadow_an_open_breaker_refuses_nothing(drive: type[Driver]) -> None:
    d = drive(mode="shadow", max_tool_failures=2)
    raise_in(d, "r1", "r2")
    assert all(d.tool("flaky", {"n": n}).ran for n in range(3))


# ---- model calls in flight ------------------------------------------------------------------------------------------


async def reserve(d: Driver, hold: asyncio.Event, lane: str = ROOT_LANE) -> str:
    event = ModelCall("run", lane, "agent", d.now)
    assert d.guard.check(event).action is Action.ALLOW
    decision = await d.guard.reserve(event)
    if decision.action is Action.ALLOW:
        await hold.wait()
        d.guard.runs["run"].slots.give_back(present(asyncio.current_task()))
    return decision.action.word


async def in_flight(d: Driver, number: int) -> tuple[int, list[str]]:
    """So many model calls at once: how many were in flight, and what became of each."""
    hold = asyncio.Event()
    lanes = [d.lane(f"branch {n}") for n in range(number)]
    tasks = [asyncio.create_task(reserve(d, hold, lane)) for lane in lanes]
    for _ in range(10):
        await asyncio.sleep(0)
    flying = d.guard.snapshot()["runs"][0]["in_flight"]
    hold.set()
    return flying, await asyncio.wait_for(asyncio.gather(*tasks), 30)


async def test_twenty_model_calls_fly_at_once_and_the_surplus_waits(drive: type[Driver]) -> None:
    d = drive()
    flying, ends = await in_flight(d, 60)
    assert flying == 20
    assert ends == ["allow"] * 60
    assert d.rules_tripped == []


async def test_a_number_set_by_the_user_refuses_the_surplus_as_one_trip(drive: type[Driver]) -> None:
    d = drive(max_concurrent_agents=5)
    flying, ends = await in_flight(d, 30)
    assert flying == 5
    assert (ends.count("allow"), ends.count("stop")) == (5, 25)
    assert d.rules_tripped == ["fan_out"]
    assert d.guard.snapshot()["runs"][0]["model_calls"] == 5


async def test_a_refused_model_call_is_given_back_to_the_limit(drive: type[Driver]) -> None:
    d = drive(max_concurrent_agents=5, max_model_calls=6)
    await in_flight(d, 5)
    await in_flight_once_more(d)
    assert d.guard.snapshot()["runs"][0]["model_calls"] == 6


async def in_flight_once_more(d: Driver) -> None:
    hold = asyncio.Event()
    hold.set()
    assert await reserve(d, hold) == "allow"


# ---- tool rules -----------------------------------------------------------------------------------------------------


def test_a_rule_beside_the_tool_holds_and_the_policys_own_wins(drive: type[Driver]) -> None:
    d = drive(tools={"b": {"paging": True}})
    d.guard.tools.declare("a", ToolRule(exempt=True))
    d.guard.tools.declare("b", ToolRule(exempt=True))
    assert present(d.guard.tools.rule("a")).exempt
    assert d.guard.tools.rule("b") == ToolRule(paging=True)
    assert set(loop(d, 3)) <= {"allow", "nudge"}
    assert {d.tool("a").word for _ in range(10)} == {"allow"}


def test_a_declared_failure_is_a_failure(drive: type[Driver]) -> None:
    d = drive(
        tools={
            "book": {"failed": {"code": ["FULL", "CLOSED"]}},
            "pay": ToolRule(failed=lambda answer: answer["paid"] < 1),
        },
        max_identical_tool_results=3,
    )
    assert [d.tool("book", {"n": n}, says={"code": "FULL"}).word for n in range(3)] == ["allow", "allow", "stop"]
    d.start("r2")
    assert [d.tool("pay", {"n": n}, says={"paid": 0}, run="r2").word for n in range(3)] == ["allow", "allow", "stop"]


def test_a_failing_function_of_the_user_harms_nothing(drive: type[Driver]) -> None:
    def broken(_: Any) -> Any:
        raise RuntimeError("mine")

    d = drive(tools={"pay": ToolRule(failed=broken)}, tool_result_normalizer={"pay": broken})
    assert [d.tool("pay").word for _ in LADDER] == LADDER


def test_volatile_fields_of_an_answer_never_count(drive: type[Driver]) -> None:
    d = drive(tools={"ask": {"volatile": ["noise"]}})
    assert [d.tool("ask", says={"fact": "same", "noise": n}).word for n in range(9)][-1] == "stop"


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_run_on_another_thread(drive: type[Driver]) -> None:
    seen: list[tuple[str, Any]] = []
    d = drive(
        on_trip=lambda trip: seen.append((threading.current_thread().name, trip)),
        on_decision=lambda decision: seen.append((threading.current_thread().name, decision)),
    )
    loop(d)
    assert d.guard.outbox.flush()
    assert threading.current_thread().name not in {name for name, _ in seen}
    assert [value for _, value in seen if isinstance(value, Trip)] == list(d.guard.trips)
    assert [value.action.word for _, value in seen if isinstance(value, Decision)] == ["nudge", "block", "stop"]


def test_a_callback_may_be_async(drive: type[Driver]) -> None:
    seen: list[Trip] = []

    async def on_trip(trip: Trip) -> None:
        await asyncio.sleep(0)
        seen.append(trip)

    d = drive(on_trip=on_trip)
    loop(d)
    assert d.guard.outbox.flush()
    assert seen == list(d.guard.trips)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyError(), asyncio.CancelledError(), SystemExit(1)], ids=repr)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_harms_nothing_and_the_next_one_is_called(drive: type[Driver], error: Any) -> None:
    trips: list[Trip] = []

    def on_decision(_: Decision) -> None:
        raise error

    d = drive(on_decision=on_decision, on_trip=trips.append)
    assert loop(d) == LADDER
    assert d.guard.outbox.flush()
    assert trips == list(d.guard.trips)
    assert d.guard.snapshot()["callbacks_failed"] == 3


def test_a_callback_that_hangs_holds_up_nothing_and_what_does_not_fit_is_dropped_and_counted(
    drive: type[Driver],
) -> None:
    release = threading.Event()
    d = drive(on_trip=lambda _: release.wait(30), max_model_calls=1)
    try:
        began = time.monotonic()
        for n in range(1_100):
            d.start(f"r{n}")
            d.model(run=f"r{n}")
            assert d.model(run=f"r{n}").action is Action.STOP
        assert time.monotonic() - began < 40
        assert not d.guard.outbox.flush(0.01)
        assert 0 < d.guard.snapshot()["callbacks_dropped"] <= 100
    finally:
        release.set()


def test_a_sticky_stop_is_told_once(drive: type[Driver]) -> None:
    said: list[Decision] = []
    d = drive(max_model_calls=1, on_decision=said.append)
    for _ in range(10):
        d.model()
    assert d.guard.outbox.flush()
    assert len(said) == 1


# ---- texts ----------------------------------------------------------------------------------------------------------


@each_row("rule", [*RULES, "once", "breaker", "depth", "tool_limit", "fan_out", "result_size"])
@each_row("action", [Action.NUDGE, Action.BLOCK, Action.STOP])
def test_the_model_is_told_what_not_to_do_and_is_not_invited_to_vary_its_arguments(rule: Any, action: Any) -> None:
    said = text_for_model(Finding(rule, action, 5, 4, "calls", tool="look")).lower()
    assert said
    assert "{" not in said
    assert not any(
        words in said
        for words in ("different argument", "other argument", "try again", "runguard", "circuit breaker", "policy")
    )


@each_row("rule", [*RULES, "model_calls", "tool_calls", "deadline", "fan_out", "depth", "policy_error", "guard_error"])
def test_the_end_user_reads_a_plain_sentence(rule: Any) -> None:
    said = text_for_user(rule)
    assert said.endswith(".")
    assert not any(word in said.lower() for word in ("$", "usd", "token", "runguard", rule if "_" in rule else "\0"))


def test_the_operator_reads_rule_value_limit_and_path() -> None:
    finding = Finding("stall", Action.STOP, 6, 6, "equal failures", tool="parse")
    said = text_for_operator(
        finding, path=("root", "child"), model_calls=7, tool_calls=6, tokens=800, spent=", $0.02", enforced=True
    )
    parts = (
        "stopped by stall",
        "'parse'",
        "6 equal failures, limit 6",
        "root",
        "child",
        "7 model calls, 6 tool calls, 800 tokens, $0.02",
    )
    assert all(part in said for part in parts)
    assert sorted(parts, key=said.index) == list(parts)


def test_a_text_of_the_users_own_replaces_the_built_in_one(drive: type[Driver]) -> None:
    d = drive(stop_text="Please call us.")
    loop(d)
    assert d.guard.stop_text(d.guard.trips[0]) == "Please call us."


# ---- errors ---------------------------------------------------------------------------------------------------------


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BaseException)]


@each_row("kind", ERRORS)
def test_all_errors_are_runtime_errors_of_one_tree(kind: Any) -> None:
    assert issubclass(kind, errors.RunGuardError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(drive: type[Driver], kind: Any) -> None:
    d = drive()
    loop(d)
    (first,) = d.guard.trips
    stopped = issubclass(kind, errors.RunStoppedError)
    error = kind(first) if stopped else kind("what is wrong")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    if stopped:
        assert again.trip == first


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("repetition", errors.LoopDetectedError),
        ("no_news", errors.LoopDetectedError),
        ("stall", errors.LoopDetectedError),
        ("handoff", errors.LoopDetectedError),
        ("deadline", errors.DeadlineExceededError),
        ("model_calls", errors.LimitExceededError),
        ("fan_out", errors.LimitExceededError),
        ("growth", errors.CostGrowthError),
        ("policy_error", errors.GuardFailedError),
        ("guard_error", errors.GuardFailedError),
    ],
)
def test_the_error_fits_the_rule(drive: type[Driver], rule: str, kind: Any) -> None:
    trip = drive().guard.fail("run", rule, "because")
    assert trip is not None
    error = errors.RunStoppedError.of(trip)
    assert type(error) is kind
    assert str(error) == trip.message
    assert (error.observed, error.limit) == (trip.observed, trip.limit)


def test_a_loop_error_shows_the_pattern(drive: type[Driver]) -> None:
    d = drive(rules={"repetition": False})
    for n in range(20):
        d.tool(f"tool {n % 2}")
    error = errors.RunStoppedError.of(d.guard.trips[0])
    assert isinstance(error, errors.LoopDetectedError)
    assert error.repeats == 14
    assert set(error.pattern) <= {"tool 0", "tool 1"}


# ---- the guard's own faults -----------------------------------------------------------------------------------------


def test_a_run_can_be_stopped_for_the_guards_own_sake(drive: type[Driver]) -> None:
    d = drive()
    first = d.guard.fail("run", "policy_error", "max_model_cals: no such setting")
    assert first is not None
    assert "max_model_cals" in first.message
    assert d.model().trip is first
    assert d.guard.fail("run", "guard_error", "again") is first
    assert d.guard.fail("unknown", "guard_error", "x") is None


def test_a_call_that_never_left_is_unspent(drive: type[Driver]) -> None:
    d = drive(max_model_calls=2)
    for _ in range(10):
        assert d.model().action is Action.ALLOW
        d.guard.unspent("run")
    assert [d.model().action.word for _ in range(3)] == ["allow", "allow", "stop"]
    d.guard.unspent("unknown")
