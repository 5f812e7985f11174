"""Which tools a request still offers, once a tool was withheld."""

from typing import Any

import pytest

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.engine.guard import Guard
from runguard.gateway.formats import ChatCompletions, Gemini, Messages, Responses, WireFormat
from runguard.policy.settings import Policy


async def permission(*withheld: str) -> Permission:
    guard = Guard(Policy.build())
    reply = await AgentRun.start(guard, "agent").ask(lambda: ModelRequest.of("m", "hello"))
    assert isinstance(reply, Permission)
    next(iter(guard.runs.values())).lane("").withheld = withheld
    return reply


TOOLS = ["parse", "look", "find"]


@pytest.mark.parametrize(
    ("withheld", "choice", "left"),
    [
        ((), None, TOOLS),
        (("parse",), None, ["look", "find"]),
        (("parse",), "auto", ["look", "find"]),
        (("parse", "look"), "required", ["find"]),
        (("parse",), "parse", TOOLS),
        (("parse",), {"type": "function", "function": {"name": "parse"}}, TOOLS),
        (("parse",), {"tool": {"name": "look"}}, ["look", "find"]),
        (("parse",), ["parse", "look"], TOOLS),
        (tuple(TOOLS), None, TOOLS),
    ],
)
async def test_what_is_left(withheld: tuple[str, ...], choice: Any, left: list[str]) -> None:
    assert (await permission(*withheld)).left(TOOLS, str, choice) == left


def chat(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SEARCH: dict[str, Any] = {"google_search": {}}
FORMATS: list[tuple[WireFormat, Any, Any]] = [
    (ChatCompletions(), [chat("parse"), chat("look")], [chat("look")]),
    (
        Responses(),
        [{"type": "web_search"}, {"type": "function", "name": "parse"}, {"type": "function", "name": "look"}],
        [{"type": "web_search"}, {"type": "function", "name": "look"}],
    ),
    (Messages(), [{"name": "parse"}, {"name": "look"}], [{"name": "look"}]),
    (
        Gemini(),
        [{"functionDeclarations": [{"name": "parse"}, {"name": "look"}]}, SEARCH],
        [{"functionDeclarations": [{"name": "look"}]}, SEARCH],
    ),
    (
        Gemini(),
        [{"functionDeclarations": [{"name": "parse"}]}, {"functionDeclarations": [{"name": "look"}]}],
        [{"functionDeclarations": [{"name": "look"}]}],
    ),
    (ChatCompletions(), [chat("parse")], [chat("parse")]),
    (ChatCompletions(), "no list", "no list"),
]


@pytest.mark.parametrize(("wire", "tools", "left"), FORMATS, ids=lambda one: type(one).__name__)
async def test_each_wire_format_leaves_a_tool_out(wire: WireFormat, tools: Any, left: Any) -> None:
    body = {"tools": tools}
    changed = (await permission("parse")).changed(wire.changed, body)
    assert changed["tools"] == left
    assert body == {"tools": tools}


@pytest.mark.parametrize(("wire", "tools", "left"), FORMATS[:5], ids=lambda one: type(one).__name__)
async def test_each_wire_format_says_what_is_offered(wire: WireFormat, tools: Any, left: Any) -> None:
    names = wire.request({"tools": tools}, "").tools
    assert [name for name in names if name] == ["parse", "look"]
