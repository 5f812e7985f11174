"""Rules per tool, tools as workflow nodes, and install()."""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.events import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.adk.tools import FunctionTool, ToolContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow

import runguard
from runguard import ToolRule
from runguard.adk import RunGuardPlugin
from runguard.testing import (
    FakeClock,
    ScriptedModel,
    assert_stopped,
    call,
    text,
)
from tests.kit.adk_runs import observe, play, told
from tests.kit.rule_agents import Tool, agent, ask_new

# ---- what is said about a tool --------------------------------------------------------------------------------------


def _slow_job(clock: FakeClock, answers: Callable[[int], Any]) -> Tool:
    def answer(n: int) -> Any:
        clock.advance(200)
        return answers(n)

    return Tool("check_job", answer)


async def test_polling_is_judged_by_time_without_change() -> None:
    clock = FakeClock()
    job, model = _slow_job(clock, lambda n: {"status": "RUNNING"}), ScriptedModel([call("check_job", q=1)])
    seen = await observe(agent(model, job), tools={"check_*": ToolRule(polling=True)}, clock=clock)
    assert seen.rules == [("nudge", "polling"), ("stop", "polling")]
    assert (job.runs, model.calls) == (10, 10)
    assert assert_stopped(seen.result, "polling").observed == 1_800


async def test_polling_that_changes_now_and_then_is_left_alone() -> None:
    clock = FakeClock()
    job = _slow_job(clock, lambda n: {"status": "RUNNING", "step": n // 3})
    seen = await observe(
        agent([call("check_job", q=1)] * 30 + [text("done")], job),
        tools={"check_job": ToolRule(polling=True)},
        clock=clock,
    )
    assert seen.decisions == []


async def test_after_a_write_reading_again_is_no_repetition() -> None:
    def tools() -> list[Tool]:
        return [Tool("read", [{"value": 1}]), Tool("write", [{"ok": True}])]

    script = [step for _ in range(12) for step in (call("read"), call("write"))] + [text("done")]
    assert (await observe(agent(script, *tools()), tools={"write": ToolRule(writes=True)})).decisions == []
    assert assert_stopped((await observe(agent(script, *tools()))).result).rule == "no_news"


async def test_once_is_once_per_session_and_arguments() -> None:
    send, service = Tool("send_mail", [{"sent": True}]), InMemorySessionService()
    plugin = RunGuardPlugin(tools={"send_*": ToolRule(writes=True, once=True)})
    root = agent(
        [
            call("send_mail", q=1),
            call("send_mail", q=1),
            call("send_mail", q=2),
            text("done"),
            call("send_mail", q=1),
            text("done again"),
        ],
        send,
    )
    first = await play(root, plugins=[plugin], session_service=service)
    assert (send.runs, first.texts) == (2, ["done"])
    second = await play(root, "again", plugins=[plugin], session_service=service)
    assert (send.runs, second.texts) == (2, ["done again"])
    other = await play(
        agent([call("send_mail", q=1), text("done")], send), plugins=[plugin], session_service=service, session_id="s2"
    )
    assert (send.runs, other.texts, plugin.trips) == (3, ["done"], [])


async def test_exempt_leaves_a_tool_to_the_limits_alone() -> None:
    think = Tool("think", ["hm"])
    script = [call("think")] * 15 + [text("done")]
    assert (await observe(agent(script, think), tools={"think": ToolRule(exempt=True)})).decisions == []
    limited = await observe(
        agent(script, Tool("think", ["hm"])), tools={"think": ToolRule(exempt=True)}, max_tool_calls=10
    )
    assert_stopped(limited.result, "tool_calls")


async def test_a_rule_may_stand_beside_the_tool() -> None:
    sent: list[int] = []

    @runguard.tool(once=True)
    def send_mail(to: int) -> dict[str, bool]:
        sent.append(to)
        return {"sent": True}

    seen = await observe(agent([call("send_mail", to=1)] * 2 + [call("send_mail", to=2), text("done")], send_mail))
    assert sent == [1, 2]
    assert seen.rules == [("block", "once")]


async def test_the_policys_word_wins_over_the_one_beside_the_tool() -> None:
    @runguard.tool(exempt=True)
    def think() -> str:
        return "hm"

    assert (await observe(agent([call("think")] * 12 + [text("done")], think))).decisions == []
    seen = await observe(agent([call("think")], think), tools={"think": ToolRule(max_calls=2)})
    assert seen.plugin.trips


async def test_identity_and_volatile_arguments() -> None:
    look = Tool("look", ["same"])
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(volatile=("q",))})
    assert_stopped(seen.result, "repetition")
    assert look.runs == 7


async def test_failed_says_what_a_failure_is() -> None:
    look = Tool("look", lambda n: {"verdict": "nope", "n": 7})
    seen = await observe(agent(ask_new("look"), look), tools={"look": ToolRule(failed={"verdict": ["nope"]})})
    assert_stopped(seen.result, "stall")
    assert (await observe(agent(ask_new("look", 9), Tool("look", [{"verdict": "nope"}])))).decisions == []


# ---- tools as nodes of a workflow -----------------------------------------------------------------------------------


def _tool_circle(tool: Tool, rounds: int) -> Workflow:
    """A Workflow that runs a tool without any agent, round and round."""
    done = 0

    def start(node_input: Any) -> dict[str, int]:
        return {"q": 0}

    def again(node_input: Any) -> Event:
        nonlocal done
        done += 1
        return Event(route="again" if done < rounds else "good", output={"q": done})

    def publish(node_input: Any) -> str:
        return "published"

    fetch = FunctionTool(tool)
    return Workflow(
        name="wf", edges=[("START", start), (start, fetch), (fetch, again), (again, {"again": fetch, "good": publish})]
    )


async def test_a_circle_of_tool_nodes_ends_at_its_limit() -> None:
    class Asked(BasePlugin):
        times = 0

        async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
            Asked.times += 1

    await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 1), plugins=[Asked(name="asked")])
    if not Asked.times:
        pytest.skip("this ADK tells no plugin about tool nodes")
    fetch = Tool("fetch", lambda n: {"n": n})
    seen = await observe(_tool_circle(fetch, 10_000), max_tool_calls=5)
    assert fetch.runs == 5
    assert assert_stopped(seen.result, "tool_calls").tool == "fetch"
    assert len(seen.result.events) < 40


async def test_tool_nodes_are_the_same_with_and_without_the_guard() -> None:
    seen = await observe(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    without = await play(_tool_circle(Tool("fetch", lambda n: {"n": n}), 4))
    assert seen.decisions == []
    assert told(seen.result.events) == told(without.events)


# ---- install --------------------------------------------------------------------------------------------------------


async def test_an_apps_own_plugin_wins_over_install() -> None:
    installed, own = runguard.install(max_model_calls=2), RunGuardPlugin(max_model_calls=4)
    model = ScriptedModel(ask_new("step", 9))
    result = await play(agent(model, Tool("step", lambda n: {"n": n})), plugins=[own])
    assert model.calls == 4
    assert assert_stopped(result).limit == 4
    assert (len(own.trips), installed.trips) == (1, [])


@pytest.mark.parametrize("include_plugins", [True, False])
async def test_install_reaches_every_agent_tool(include_plugins: bool) -> None:
    plugin = runguard.install(max_model_calls=5)
    outer, inner = ScriptedModel([call("inner", request="go")]), ScriptedModel(ask_new("step"))
    called = AgentTool(agent(inner, Tool("step", lambda n: {"n": n}), name="inner"), include_plugins=include_plugins)
    result = await play(agent(outer, called, name="outer"))
    assert (outer.calls, inner.calls) == (1, 4)
    assert_stopped(result, "model_calls")
    assert len(plugin.trips) == 1


async def test_a_tools_context_still_works_under_the_guard() -> None:
    def note(q: int, tool_context: ToolContext) -> dict[str, int]:
        tool_context.state[f"note_{q}"] = q
        return {"noted": q}

    seen = await observe(agent(ask_new("note", 3), note))
    assert {"note_1": 1, "note_2": 2, "note_3": 3}.items() <= seen.result.session.state.items()
