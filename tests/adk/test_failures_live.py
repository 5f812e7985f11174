"""Failing tools and the breaker across runs."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.plugins import ReflectAndRetryToolPlugin

from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    calls,
    text,
)
from tests.kit.adk_runs import observe, play, told
from tests.kit.rule_agents import Tool, agent, ask_new, recover

# ---- failures -------------------------------------------------------------------------------------------------------


SAME_FAILURES = [
    pytest.param(lambda n: "Error: the file is locked", id="text"),
    pytest.param(lambda n: {"status": "partial_parse_error", "data": None}, id="status"),
    pytest.param(lambda n: {"error": f"timeout after {n} ms"}, id="error key"),
    pytest.param(lambda n: {"ok": False, "reason": "locked"}, id="flag"),
    pytest.param(lambda n: {"content": [{"type": "text", "text": "boom"}], "isError": True}, id="mcp"),
    pytest.param(lambda n: RuntimeError("the file is locked"), id="raised"),
]


@pytest.mark.parametrize("answers", SAME_FAILURES)
async def test_stall_is_nudged_then_refused_then_stopped_whatever_the_arguments(answers: Any) -> None:
    read, model = Tool("read", answers), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "stall"), ("block", "stall"), ("stop", "stall")]
    assert (read.runs, model.calls) == (4, 6)
    assert assert_stopped(seen.result, "stall").tool == "read"
    assert assert_calls_answered(seen.result.session) == 6


async def test_stall_is_seen_through_a_plugin_that_asks_to_try_again() -> None:
    read, model, plugin = (
        Tool("read", lambda n: RuntimeError("the file is locked")),
        ScriptedModel(ask_new("read")),
        RunGuardPlugin(),
    )
    result = await play(agent(model, read), plugins=[plugin, ReflectAndRetryToolPlugin(max_retries=20)])
    assert_stopped(result, "stall")
    assert (read.runs, model.calls) == (4, 6)


async def test_a_failure_that_names_its_own_thing_is_about_that_one_alone() -> None:
    """A sweep over codes: eight expired ones are eight answers.

    Another wording of one request that fails is still one failure.
    """
    redeem = Tool("redeem", lambda n: {"success": False, "error": f"coupon {200 + n} has expired"})
    seen = await observe(agent(lambda n, _: call("redeem", q=200 + n) if n <= 8 else text("none is valid"), redeem))
    assert [rule for _, rule in seen.rules] == ["tool_failures"]
    assert seen.result.texts == ["none is valid"]
    again, model = (
        Tool("redeem", lambda n: {"success": False, "error": "coupon 7 has expired"}),
        ScriptedModel(ask_new("redeem")),
    )
    assert_stopped((await observe(agent(model, again))).result, "stall")
    assert model.calls == 6


@pytest.mark.parametrize(
    "failure",
    [{"error": "order A-7 not found"}, RuntimeError("No brokers available"), LookupError("order A-7 not found")],
    ids=repr,
)
async def test_a_side_effect_that_was_told_as_an_error_may_be_tried_again(failure: Any) -> None:
    pay = Tool("pay", lambda n: failure if n == 1 else {"paid": n})
    seen = await observe(
        agent([call("pay", q=1), call("pay", q=1), text("done")], pay, on_tool_error_callback=recover),
        tools={"pay": ToolRule(once=True)},
    )
    assert (pay.runs, seen.decisions) == (2, [])


async def test_what_is_raised_about_a_thing_that_is_not_there_is_a_sweep() -> None:
    find = Tool("find", lambda n: LookupError(f"order {n} not found") if n < 20 else {"id": n})
    seen = await observe(agent(ask_new("find", 20), find, on_tool_error_callback=recover))
    assert seen.rules == [("nudge", "empty")]
    assert (find.runs, seen.result.texts) == (20, ["done"])


WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


async def test_max_tool_failures_allows_exactly_its_number() -> None:
    read, model = Tool("read", lambda n: {"error": f"{WORDS[n]} is broken"}), ScriptedModel(ask_new("read"))
    seen = await observe(agent(model, read), max_tool_failures=3)
    assert (read.runs, model.calls) == (3, 5)
    assert_stopped(seen.result, "tool_failures")


@pytest.mark.parametrize("answers", [[[]], [""], [{"results": []}], ["not found"], [{"status": "not_found"}]], ids=str)
async def test_empty_answers_to_new_questions_are_only_nudged(answers: Any) -> None:
    find = Tool("find", answers)
    seen = await observe(agent(ask_new("find", 20), find))
    assert seen.rules == [("nudge", "empty")]
    assert find.runs == 20
    assert seen.result.texts == ["done"]


# ---- the breaker across runs ----------------------------------------------------------------------------------------


class Service:
    """A tool that is down, or not."""

    def __init__(self) -> None:
        self.runs, self.down = 0, True

    def tool(self) -> Any:
        def fetch(q: int) -> dict[str, int]:
            self.runs += 1
            if self.down:
                raise ConnectionError(f"{WORDS[self.runs % 12]} refused")
            return {"q": q}

        return fetch


def _caller(service: Service, times: int) -> LlmAgent:
    return agent(ask_new("fetch", times), service.tool(), on_tool_error_callback=recover)


async def test_the_breaker_opens_on_exceptions_from_several_runs_and_then_sends_one_probe() -> None:
    clock, service = FakeClock(), Service()
    plugin = RunGuardPlugin(clock=clock, half_open_reset_seconds=30)

    def state() -> str | None:
        return plugin.snapshot()["breakers"].get("fetch")  # type: ignore[no-any-return]

    await play(_caller(service, 7), plugins=[plugin], session_id="s1")
    assert state() == "closed", "the failures of one run do not open it for everybody"
    await play(_caller(service, 1), plugins=[plugin], session_id="s2")
    assert (service.runs, state()) == (8, "open")

    refused = await play(_caller(service, 1), plugins=[plugin], session_id="s3")
    assert service.runs == 8
    assert "out of service" in str(told(refused.session.events))
    assert refused.texts == ["done"]

    clock.advance(30)
    assert state() == "half_open"
    await play(_caller(service, 1), plugins=[plugin], session_id="s4")
    assert (service.runs, state()) == (9, "open"), "the probe failed"

    clock.advance(30)
    service.down = False
    batch = agent([calls(call("fetch", q=1), call("fetch", q=2), call("fetch", q=3)), text("done")], service.tool())
    result = await play(batch, plugins=[plugin], session_id="s5")
    assert (service.runs, state()) == (10, "closed"), "one probe, whatever the concurrency"
    assert assert_calls_answered(result.session) == 3
    await play(_caller(service, 2), plugins=[plugin], session_id="s6")
    assert service.runs == 12
    assert plugin.trips == []


async def test_an_exception_that_nobody_recovers_opens_it_too() -> None:
    service, plugin = Service(), RunGuardPlugin()
    for number in range(5):
        result = await play(
            agent(ask_new("fetch", 1), service.tool()), plugins=[plugin], session_id=f"s{number}", catch=True
        )
        assert isinstance(result.error, ConnectionError)
    assert plugin.snapshot()["breakers"] == {"fetch": "open"}
    assert plugin.snapshot()["runs"] == []


async def test_a_call_that_ends_in_the_same_line_is_seen_between_other_work() -> None:
    check = Tool("check", lambda n: f"read part {chr(97 + n % 26) * n}\nCheckError: no name")
    edit = Tool("edit", lambda n: f"edited line {n}")
    seen = await observe(agent(lambda n, _: call("edit", q=n) if n % 2 else call("check"), check, edit))
    assert seen.rules == [("nudge", "stall"), ("stop", "stall")]
    assert check.runs == 50


async def test_a_tool_that_repeats_what_it_was_asked_is_noticed_between_other_work() -> None:
    def parse(hint: str) -> dict[str, str]:
        """Parse."""
        return {"status": "partial_parse_error", "hint": hint}

    refine = Tool("refine", lambda n: f"hint {n}")
    script = [step for n in range(30) for step in (call("refine", q=n), call("parse", hint=f"hint {n} of many"))]
    seen = await observe(agent([*script, text("done")], parse, refine))
    assert seen.rules == [("nudge", "stall")]
