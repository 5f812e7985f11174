"""A tool that keeps failing is left out of the next requests, and notices name the other tools, on every adapter."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("strands", reason="strands-agents is not among the oldest supported frameworks")

from pydantic_ai.models.function import FunctionModel

from runguard.testing.conformance import AgentSpec, Harness, Reply
from tests.frameworks import agent_framework_harness, langchain_harness, openai_harness, strands_harness
from tests.frameworks.agent_framework_harness import AgentFrameworkHarness
from tests.frameworks.langchain_harness import LangChainHarness
from tests.frameworks.openai_harness import OpenAIAgentsHarness
from tests.frameworks.pydantic_harness import PydanticAIHarness
from tests.frameworks.strands_harness import StrandsHarness

# where a framework hands the tools of a request to the model: a class, its method, and how to read the names
_SEEN: dict[type[Harness], tuple[Any, str, Callable[..., list[str]]]] = {
    LangChainHarness: (langchain_harness.ScriptedChat, "bind_tools", lambda tools, **_: [one.name for one in tools]),
    PydanticAIHarness: (
        FunctionModel,
        "request",
        lambda messages, settings, parameters: [one.name for one in parameters.function_tools],
    ),
    OpenAIAgentsHarness: (
        openai_harness.ScriptedModel,
        "get_response",
        lambda instructions, items, settings, tools, *_, **__: [one.name for one in tools],
    ),
    StrandsHarness: (
        strands_harness.ScriptedModel,
        "stream",
        lambda messages, specs, *_, **__: [one["name"] for one in specs],
    ),
    AgentFrameworkHarness: (
        agent_framework_harness.ScriptedClient,
        "_inner_get_response",
        lambda options, **_: [one.name for one in options.get("tools") or ()],
    ),
}


@pytest.fixture(params=_SEEN, ids=lambda harness: harness.name)
def harness(request: pytest.FixtureRequest) -> Harness:
    found: Harness = request.param()
    return found


async def play(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, *names: str, turns: int = 1, **settings: Any
) -> tuple[list[list[str]], list[str]]:
    """Let a model call ``parse`` for as long as it is offered, at most eight times in a turn.

    Return the tools of each request, and what the model has read last in each.
    """
    place, method, read = _SEEN[type(harness)]
    own, offered, newest = getattr(place, method), list[list[str]](), list[str]()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        offered.append(sorted(read(*args, **kwargs)))
        return own(self, *args, **kwargs)

    def script(n: int, last: str) -> Reply:
        newest.append(last)
        is_left = "parse" in offered[-1] and len(newest) % 9
        return Reply(calls=[("parse", {"part": f"part {n}"})]) if is_left else Reply("done")

    def parse(part: str) -> str:
        return '{"status": "partial_parse_error"}'

    def look(path: str) -> str:
        return "a page"

    monkeypatch.setattr(place, method, noted)
    tools = {name: {"parse": parse, "look": look}[name] for name in names}
    session = harness.session(AgentSpec(script, "worker", tools), harness.guard(**settings))
    for _ in range(turns):
        result = await session.turn("go")
        assert result.error is None
        newest.clear() if turns > 1 else None
    return offered, newest


async def test_a_tool_that_keeps_failing_is_left_out(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    offered, newest = await play(harness, monkeypatch, "parse", "look", rules={"stall": {"withhold": 4}})
    assert offered == [["look", "parse"]] * 4 + [["look"]]
    assert newest[-1].endswith("This tool is not offered any more in this turn.")


async def test_a_notice_names_the_other_tool(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    offered, newest = await play(harness, monkeypatch, "parse", "look")
    assert {tuple(names) for names in offered} == {("look", "parse")}
    assert newest[3].startswith("3 attempts have failed in the same way")
    assert "Use 'look', finish with what is known" in newest[3]
