"""The breaker across runs, model calls in flight, rules per tool."""

import asyncio
from typing import Any

from runguard.core.decision import (
    Action,
)
from runguard.core.events import ROOT_LANE, ModelCall, Outcome, ToolCall
from runguard.policy import ToolRule
from tests.kit.driver import Driver
from tests.kit.guards import (
    LADDER,
    allow_stays_allow,  # noqa: F401 - an autouse fixture
    loop,
)
from tests.kit.optional import present

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
