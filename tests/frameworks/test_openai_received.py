"""What a tool of OpenAI Agents receives is the call: a function gets its own arguments, any other tool gets all."""

import json
from typing import Any

import pytest
from agents import Agent, FunctionTool, RunConfig, Runner, function_tool

from runguard.openai_agents import guarded
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.openai_harness import ScriptedModel

made: list[dict[str, Any]] = []


def look(q: str) -> str:
    """Look it up."""
    made.append({"q": q})
    return "a moon"


async def invoke(_: Any, given: str) -> str:
    made.append(json.loads(given))
    return "a moon"


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}}
OTHER = FunctionTool("look", "Look it up.", SCHEMA, invoke, strict_json_schema=False)


@pytest.mark.parametrize(
    ("tool", "calls"),
    [
        (function_tool(look), 7),
        (function_tool(look, strict_mode=False), 7),
        (function_tool(look, name_override="search", strict_mode=False), 7),
        (OTHER, 40),
    ],
)
async def test_what_never_reaches_a_function_makes_no_other_call(tool: FunctionTool, calls: int) -> None:
    made.clear()

    def script(n: int, _: str) -> Reply:
        return Reply(calls=[(tool.name, {"q": "moon", "x": n})]) if n <= 40 else Reply("done")

    agent = Agent("worker", model=ScriptedModel(AgentSpec(script), [0]), tools=[tool])
    await Runner.run(guarded(agent), "look", max_turns=100, run_config=RunConfig(tracing_disabled=True))
    assert len(made) == calls
    assert len({json.dumps(one) for one in made}) == (1 if calls == 7 else 40)
