"""``runguard.trip`` reads why a run was stopped from the result and from the last message of every framework."""

import copy
from typing import Any

import pytest
from agents import Agent as OpenAIAgent
from agents import Runner
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse, TextPart
from pydantic_ai.models.function import FunctionModel

import runguard
from runguard.openai_agents import guarded
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.openai_harness import played
from tests.frameworks.test_openai_tools import Steps, say
from tests.kit.examples import each_row


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_openai_agents(way: str) -> None:
    agent = guarded(OpenAIAgent(name="worker", model=Steps([say("done")])), max_model_calls=1)
    with runguard.run():
        first = await Runner.run(agent, "go")
        second = await played(agent, "go", way)
    if way == "run":
        assert runguard.trip(copy.deepcopy(second)) == agent.runguard.trips[0]
    assert runguard.trip(first) is None
    assert [runguard.trip(second)] == agent.runguard.trips


async def test_pydantic_ai() -> None:
    model = FunctionModel(lambda *_: ModelResponse([TextPart("done")]))
    guard = RunGuard(max_model_calls=1)
    agent = PydanticAgent(model, capabilities=[guard], metadata=guard.bill)
    with runguard.run():
        first, second = await agent.run("go"), await agent.run("go")
    assert runguard.trip(first) is None
    assert [runguard.trip(second)] == guard.trips
    messages = ModelMessagesTypeAdapter.validate_json(second.all_messages_json())
    assert [runguard.trip(messages[-1])] == guard.trips


async def test_strands() -> None:
    strands = pytest.importorskip("strands", reason="strands-agents is not among the oldest supported frameworks")
    from runguard.strands import RunGuard as Plugin
    from tests.frameworks.strands_harness import ScriptedModel

    guard, model = Plugin(max_model_calls=1), ScriptedModel(AgentSpec(lambda *_: Reply("done")), [0])
    agent = strands.Agent(model=model, plugins=[guard], callback_handler=None)
    with runguard.run():
        first, second = await agent.invoke_async("go"), await agent.invoke_async("go")
    assert runguard.trip(first) is None
    assert [runguard.trip(second)] == [runguard.trip(agent.messages[-1])] == guard.trips


async def test_agent_framework() -> None:
    framework = pytest.importorskip("agent_framework", reason="it is not among the oldest supported frameworks")
    from runguard.agent_framework import RunGuard as Middleware
    from tests.frameworks.agent_framework_harness import ScriptedClient

    guard, client = Middleware(max_model_calls=1), ScriptedClient(AgentSpec(lambda *_: Reply("done")), [0])
    agent = framework.Agent(client, middleware=[guard])
    with runguard.run():
        first, second = await agent.run("go"), await agent.run("go")
    assert runguard.trip(first) is None
    assert [runguard.trip(second)] == [runguard.trip(second.messages[-1])] == guard.trips


class Broken:
    """A result that has no last message."""

    @property
    def response(self) -> Any:
        raise ValueError("no response")


@each_row("holder", [Broken(), {"messages": []}, {"message": {"message": {}}}, None, 5, "text"])
def test_what_carries_no_trip_has_none(holder: Any) -> None:
    assert runguard.trip(holder) is None
