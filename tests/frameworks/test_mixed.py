"""Agents of different frameworks in one tree: one run, one account, one trip."""

from typing import Any

import pytest
from agents import Runner
from google.adk.agents import LlmAgent
from langchain_core.messages import HumanMessage
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

from runguard.adk import RunGuardPlugin
from runguard.langchain import RunGuardMiddleware
from runguard.openai_agents import AgentGuard
from runguard.pydantic_ai import RunGuard
from runguard.testing import ScriptedModel, call, run, text
from runguard.testing.conformance import MODEL, AgentSpec, Reply
from tests.frameworks.langchain_harness import LangChainSession
from tests.frameworks.openai_harness import OpenAIAgentsSession


def _outer(guard: RunGuard, tool: Any, calls: int) -> PydanticAgent[Any, Any]:
    made = 0

    def script(messages: Any, info: Any) -> ModelResponse:
        nonlocal made
        made += 1
        return ModelResponse([ToolCallPart("ask", {"n": made}) if made <= calls else TextPart("done")])

    agent = PydanticAgent(FunctionModel(script, model_name=MODEL), capabilities=[guard], name="outer")
    agent.tool_plain(name="ask")(tool)
    return agent


@pytest.mark.parametrize("inner_has_settings", [False, True])
async def test_an_openai_agent_as_a_tool_of_a_pydantic_agent_is_one_run(inner_has_settings: bool) -> None:
    spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), "inner", {"look": lambda n: f"page {n}"})
    settings: Any = {"max_model_calls": 50} if inner_has_settings else {}
    outer, inner = RunGuard(max_model_calls=10), AgentGuard(**settings)
    session = OpenAIAgentsSession(spec, inner)

    async def ask(n: int) -> str:
        return str((await Runner.run(session._agent, "go", max_turns=100)).final_output)

    result = await _outer(outer, ask, 3).run("go")
    [trip] = outer.trips
    assert (trip.rule, trip.agent_path[-1]) == ("model_calls", "inner")
    assert session.model_calls == 9, "the outer agent made the first of ten calls"
    assert result.output == outer.guard.stop_text(trip)
    assert inner.trips == [], "the run around the inner agent has stopped it: one trip"
    assert outer.spend()["calls"] == 10
    assert inner.spend()["calls"] == 9
    assert not outer.guard.runs


async def test_a_stop_of_the_inner_settings_ends_the_inner_agent_alone() -> None:
    spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), "inner", {"look": lambda n: f"page {n}"})
    outer, inner = RunGuard(max_model_calls=100), RunGuardMiddleware(max_model_calls=3)
    session = LangChainSession(spec, inner)

    async def ask(n: int) -> str:
        result = await session._agent.ainvoke({"messages": [HumanMessage("go")]}, session._config)
        return str(result["messages"][-1].content)

    result = await _outer(outer, ask, 1).run("go")
    assert result.output == "done"
    assert outer.trips == []
    assert [trip.rule for trip in inner.trips] == ["model_calls"]
    assert outer.spend()["calls"] == 2 + 3, "the outer run pays for the calls of the inner one"


async def test_a_langchain_agent_in_a_tool_of_an_adk_agent_is_one_run() -> None:
    inner = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), "inner", {"look": lambda n: f"page {n}"})
    plugin, middleware = RunGuardPlugin(max_model_calls=10), RunGuardMiddleware()
    graph = LangChainSession(inner, middleware)

    async def ask(request: str) -> str:
        result = await graph._agent.ainvoke({"messages": [HumanMessage(request)]}, graph._config)
        return str(result["messages"][-1].content)

    model = ScriptedModel([call("ask", request="go"), text("done")])
    done = await run(LlmAgent(name="outer", model=model, tools=[ask]), plugins=[plugin])
    [trip] = plugin.trips
    assert (trip.rule, model.calls, graph.model_calls) == ("model_calls", 1, 9)
    assert [found.id for found in done.trips] == [trip.id]
    assert middleware.trips == []
    assert plugin.spend()["calls"] == 10


async def test_a_loop_of_one_of_two_langchain_agents_that_adk_has_called_at_once_ends_that_agent_alone() -> None:
    def parse(n: int) -> dict[str, str]:
        return {"status": "partial_parse_error"}

    looping = AgentSpec(lambda n, _: Reply(calls=[("parse", {"n": 1})]), "looping", {"parse": parse})
    working = AgentSpec(lambda n, _: Reply("good work"), "working")
    plugin, middleware = RunGuardPlugin(), RunGuardMiddleware()
    agents = {spec.name: LangChainSession(spec, middleware) for spec in (looping, working)}

    async def ask(agent: str) -> str:
        session = agents[agent]
        result = await session._agent.ainvoke({"messages": [HumanMessage("go")]}, session._config)
        return str(result["messages"][-1].content)

    model = ScriptedModel([[call("ask", agent="looping"), call("ask", agent="working")], text("done")])
    played = await run(LlmAgent(name="outer", model=model, tools=[ask]), plugins=[plugin])
    assert [trip.rule for trip in plugin.trips] == ["repetition"]
    assert (played.texts[-1], model.calls) == ("done", 2)
