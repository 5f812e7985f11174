"""Special answers, parallel calls, what is judged, and nudges."""

import asyncio
from typing import Any

import pytest
from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent
from google.adk.apps import App
from google.adk.events import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.adk.tools import FunctionTool, LongRunningFunctionTool
from google.adk.workflow import Workflow
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import (
    ScriptedModel,
    assert_calls_answered,
    assert_stopped,
    call,
    calls,
    text,
)
from tests.kit.adk_runs import observe, play, told
from tests.kit.contents import parts
from tests.kit.optional import present
from tests.kit.rule_agents import Tool, agent, ask_new

# ---- special answers ------------------------------------------------------------------------------------------------


async def _adk_answers_unknown_tools() -> bool:
    """Newer versions of ADK tell the model that a tool does not exist, older ones end the run."""
    return (await play(agent([call("no_such_tool"), text("done")]), catch=True)).error is None


async def test_tools_that_do_not_exist() -> None:
    model, answered = ScriptedModel(lambda n, _: call(f"imagined_{n % 2}", q=n)), await _adk_answers_unknown_tools()
    plugin = RunGuardPlugin()
    result = await play(agent(model, Tool("real", ["x"])), plugins=[plugin], catch=True)
    if answered:
        assert_stopped(result)
        assert model.calls <= 18
        assert_calls_answered(result.session)
    else:
        assert isinstance(result.error, ValueError)
        assert model.calls == 1
    assert plugin.snapshot()["runs"] == []


async def test_the_same_imagined_tool_is_stopped_soon() -> None:
    if not await _adk_answers_unknown_tools():
        pytest.skip("this ADK ends the run itself")
    model = ScriptedModel(lambda n, _: call("imagined", q=n))
    seen = await observe(agent(model, Tool("real", ["x"])))
    assert_stopped(seen.result)
    assert model.calls == 6


async def test_a_pending_confirmation_is_neither_failure_nor_repeat() -> None:
    paid: list[int] = []

    def pay(q: int) -> dict[str, int]:
        paid.append(q)
        return {"paid": q}

    def build() -> LoopAgent:
        asks = agent([call("pay", q=1)], FunctionTool(pay, require_confirmation=True))
        return LoopAgent(name="loop", max_iterations=6, sub_agents=[asks])

    seen = await observe(build(), max_identical_tool_results=2)
    without = await play(build())
    assert seen.decisions == []
    assert paid == []
    assert told(seen.result.events) == told(without.events)


async def test_a_confirmed_call_runs_as_it_does_without_the_guard() -> None:
    async def pay_and_confirm(*plugins: BasePlugin) -> list[Any]:
        pay, service = Tool("pay", [{"paid": 1}]), InMemorySessionService()
        await service.create_session(app_name="app", user_id="u1", session_id="s1")
        root = agent([call("pay", q=1), text("paid")], FunctionTool(pay, require_confirmation=True))
        runner = Runner(app=App(name="app", root_agent=root, plugins=list(plugins)), session_service=service)
        events: list[Event] = []
        part = types.Part(text="go")
        for _ in range(2):
            message = types.Content(role="user", parts=[part])
            async with asyncio.timeout(10):
                events += [
                    event async for event in runner.run_async(user_id="u1", session_id="s1", new_message=message)
                ]
            request = next(
                c for event in events for c in event.get_function_calls() if c.name == "adk_request_confirmation"
            )
            part = types.Part(
                function_response=types.FunctionResponse(id=request.id, name=request.name, response={"confirmed": True})
            )
        assert pay.runs == 1
        return told(events)

    assert await pay_and_confirm(RunGuardPlugin(max_identical_tool_results=2)) == await pay_and_confirm()


@pytest.mark.parametrize("answer", [None, {"status": "pending", "ticket": 7}], ids=["silent", "pending"])
async def test_long_running_tools_are_left_alone(answer: Any) -> None:
    def build() -> LlmAgent:
        def submit(q: int) -> Any:
            """Submits a job."""
            return answer

        return agent([call("submit", q=1), text("submitted")], LongRunningFunctionTool(submit))

    seen = await observe(build())
    without = await play(build())
    assert seen.decisions == []
    assert told(seen.result.events) == told(without.events)
    assert_calls_answered(seen.result.session, open_calls=int(answer is None))


# ---- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "answers"),
    [
        ([call("look", q=1)] * 8, ["same"]),
        ([call("look", q=n) for n in range(8)], [{"error": "locked"}]),
        ([call("look", q=n) for n in range(8)], [[]]),
    ],
    ids=["equal calls", "equal failures", "nothing found"],
)
async def test_calls_of_one_response_count_once(batch: Any, answers: Any) -> None:
    look = Tool("look", answers)
    seen = await observe(agent([calls(*batch), calls(*batch), text("done")], look))
    assert seen.decisions == []
    assert look.runs == 16
    assert seen.result.texts == ["done"]


def _same_work(name: str) -> LlmAgent:
    return agent(
        [call("look", q=1), call("look", q=1), text(f"{name} is done")], Tool("look", [{"error": "locked"}]), name=name
    )


async def test_parallel_branches_never_mix() -> None:
    root = ParallelAgent(name="par", sub_agents=[_same_work(f"p{i}") for i in range(10)])
    seen = await observe(root, max_identical_tool_results=3, max_tool_failures=3)
    assert seen.decisions == []
    assert len(seen.result.texts) == 10


async def test_parallel_workers_of_a_workflow_never_mix() -> None:
    look = Tool("look", [{"error": "locked"}])
    model = ScriptedModel(
        lambda n, request: (
            text("done")
            if any(p.function_response for c in request.contents for p in c.parts or [])
            else call("look", q=1)
        )
    )
    worker = agent(model, look, parallel_worker=True)

    def split(node_input: Any) -> list[str]:
        return [f"room {n}" for n in range(10)]

    seen = await observe(Workflow(name="wf", edges=[("START", split), (split, worker)]), max_identical_tool_results=3)
    assert seen.decisions == []
    assert look.runs == 10


# ---- what is judged -------------------------------------------------------------------------------------------------


async def test_what_the_users_after_tool_callback_makes_of_a_result_is_judged() -> None:
    def hide(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"status": "error", "message": "quota"}

    read = Tool("read", lambda n: {"n": n})
    seen = await observe(agent(ask_new("read"), read, after_tool_callback=hide))
    assert_stopped(seen.result, "stall")
    assert read.runs == 4

    def heal(tool: Any, args: Any, tool_context: Any, tool_response: Any) -> dict[str, Any]:
        return {"from_cache": args["q"]}

    seen = await observe(agent(ask_new("read", 12), Tool("read", ["Error: locked"]), after_tool_callback=heal))
    assert seen.decisions == []


async def test_a_normalizer_says_what_counts() -> None:
    fetch = Tool("fetch", lambda n: {"body": "same", "etag": n * 7919})
    script = ScriptedModel([call("fetch", q=1)])
    seen = await observe(agent(script, fetch), tool_result_normalizer={"fetch": lambda answer: answer["body"]})
    assert_stopped(seen.result, "repetition")
    assert fetch.runs == 7
    fetch = Tool("fetch", lambda n: {"body": "same", "etag": n * 7919})
    seen = await observe(agent([call("fetch", q=1)] * 9 + [text("done")], fetch))
    assert seen.decisions == []


async def test_a_normalizer_that_raises_harms_nobody() -> None:
    fetch = Tool("fetch", lambda n: {"n": n})
    seen = await observe(
        agent(ask_new("fetch", 5), fetch), tool_result_normalizer={"fetch": lambda answer: answer["missing"]}
    )
    assert seen.decisions == []
    assert seen.result.texts == ["done"]


# ---- nudges ---------------------------------------------------------------------------------------------------------


async def test_a_nudge_rides_on_the_answer_that_the_model_sees() -> None:
    look, model = Tool("look", [{"name": "Ann"}]), ScriptedModel([call("look", q=1)] * 4 + [text("Ann")])
    seen = await observe(agent(model, look))
    assert seen.rules == [("nudge", "repetition")]
    answers = [
        present(part.function_response.response)
        for content in model.requests[-1].contents
        for part in parts(content)
        if part.function_response
    ]
    assert [set(answer) for answer in answers] == [{"name"}, {"name"}, {"name"}, {"name", "runguard_notice"}]
    assert answers[-1]["runguard_notice"] == seen.decisions[0].for_model
    assert answers[-1]["name"] == "Ann"
    assert seen.result.texts == ["Ann"]


async def test_at_most_two_nudges_in_a_run() -> None:
    tools = [Tool(name, ["same"]) for name in "abcd"]
    script = [call(name) for name in "abcd" for _ in range(4)] + [text("done")]
    seen = await observe(agent(script, *tools))
    assert [rule for rule in seen.rules if rule[0] == "nudge"] == [("nudge", "repetition")] * 2
    assert sum("runguard_notice" in answer for answer in seen.answers) == 2
    assert seen.result.texts == ["done"]


async def test_the_tools_own_object_is_left_alone_by_a_nudge() -> None:
    kept = {"name": "Ann"}
    seen = await observe(agent([call("look", q=1)] * 4 + [text("done")], Tool("look", [kept])))
    assert seen.rules == [("nudge", "repetition")]
    assert kept == {"name": "Ann"}
