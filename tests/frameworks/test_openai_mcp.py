"""Tools of MCP servers are guarded like function tools; ``run_sync`` and ``run_streamed`` stop like ``run``."""

from typing import Any

import pytest
from agents import Agent, Runner
from agents.mcp import MCPServer
from mcp.types import CallToolResult, TextContent, Tool

from runguard.openai_agents import guarded
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.openai_harness import ScriptedModel, played


class Desk(MCPServer):
    """A server in this process whose only tool always fails in its words."""

    def __init__(self) -> None:
        super().__init__()
        self.executed = 0

    @property
    def name(self) -> str:
        return "desk"

    async def connect(self) -> None: ...

    async def cleanup(self) -> None: ...

    async def list_tools(self, run_context: Any = None, agent: Any = None) -> list[Tool]:
        schema = {"type": "object", "properties": {"doc": {"type": "string"}}}
        tool: Any = Tool(name="parse", description="Parse.", **{_SCHEMA: schema})
        return [tool]

    async def call_tool(self, tool_name: str, arguments: Any, meta: Any = None, **_: Any) -> CallToolResult:
        self.executed += 1
        return CallToolResult(content=[TextContent(type="text", text='{"status": "partial_parse_error"}')])

    async def list_prompts(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def get_prompt(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


_SCHEMA = "inputSchema" if "inputSchema" in Tool.model_fields else "input_schema"


@pytest.mark.parametrize("way", ["run", "run_streamed"])
async def test_a_loop_over_a_tool_of_an_mcp_server_is_stopped(way: str) -> None:
    desk, counter = Desk(), [0]
    script = AgentSpec(lambda n, _: Reply(calls=[("parse", {"doc": "x"})]) if n < 40 else Reply("gave up"))
    agent = guarded(Agent(name="worker", model=ScriptedModel(script, counter), mcp_servers=[desk]))
    said = (await played(agent, "go", way, max_turns=100)).final_output
    [trip] = agent.runguard.trips
    assert trip.tool == "parse"
    assert counter[0] <= 10
    assert desk.executed < counter[0], "a repeated call was refused before it reached the server"
    assert said == agent.runguard.guard.stop_text(trip)


def test_run_sync_stops_like_run() -> None:
    counter = [0]
    model = ScriptedModel(AgentSpec(lambda n, _: Reply(calls=[("parse", {"doc": "x"})])), counter)
    agent = guarded(Agent(name="worker", model=model, mcp_servers=[Desk()]), max_model_calls=3)
    said = Runner.run_sync(agent, "go", max_turns=100).final_output
    assert (counter[0], [trip.rule for trip in agent.runguard.trips]) == (3, ["model_calls"])
    assert said == agent.runguard.guard.stop_text(agent.runguard.trips[0])
