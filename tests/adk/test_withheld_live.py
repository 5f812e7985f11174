"""The rung ``withhold``: after it, the tool is left out of the requests of the run; and what notices say instead."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard import PolicyError
from runguard.adk.requests import leave_tools_out
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import observe
from tests.kit.driver import Driver


def parse(fragment: str) -> dict[str, Any]:
    return {"status": "partial_parse_error"}


def read(path: str) -> dict[str, Any]:
    return {"text": f"content of {path}"}


def names_in(request: LlmRequest) -> list[str]:
    return [one.name or "" for tool in request.config.tools or () for one in tool.function_declarations or ()]  # type: ignore[union-attr]


def agent(seen: list[list[str]], calls: int, *tools: Any) -> LlmAgent:
    def speak(number: int, request: LlmRequest) -> Any:
        seen.append(names_in(request))
        if "parse" in seen[-1] and number <= calls:
            return call("parse", fragment=f"part {number}")
        return text("done")

    return LlmAgent(name="worker", model=ScriptedModel(speak), tools=list(tools))


async def test_a_tool_that_keeps_failing_is_left_out_of_the_next_requests() -> None:
    offered: list[list[str]] = []
    seen = await observe(agent(offered, 9, parse, read), rules={"stall": {"withhold": 4}})
    assert offered == [["parse", "read"]] * 4 + [["read"]]
    assert seen.result.trips == []
    assert seen.result.texts == ["done"]
    assert [decision.withheld for decision in seen.decisions] == ["", "parse"]
    assert seen.answers[3]["runguard_notice"].endswith("This tool is not offered any more in this turn.")


async def test_by_default_nothing_is_withheld() -> None:
    offered: list[list[str]] = []
    await observe(agent(offered, 9, parse, read))
    assert {tuple(names) for names in offered} == {("parse", "read")}


async def test_in_shadow_mode_it_is_only_recorded() -> None:
    offered: list[list[str]] = []
    seen = await observe(agent(offered, 5, parse, read), rules={"stall": {"withhold": 4}}, mode="shadow")
    assert {tuple(names) for names in offered} == {("parse", "read")}
    assert [decision.withheld for decision in seen.decisions][1] == "parse"


async def test_the_only_tool_stays() -> None:
    offered: list[list[str]] = []
    await observe(agent(offered, 4, parse), rules={"stall": {"withhold": 4}})
    assert offered == [["parse"]] * 5


async def test_the_next_turn_offers_it_again() -> None:
    offered: list[list[str]] = []
    seen = await observe(agent(offered, 9, parse, read), rules={"stall": {"withhold": 4}})
    offered.clear()
    await observe(agent(offered, 1, parse, read), plugin=seen.plugin)
    assert offered[0] == ["parse", "read"]


async def test_the_notice_gives_the_figure_and_names_another_tool_and_not_the_failing_call() -> None:
    seen = await observe(agent([], 3, parse, read))
    notice = seen.answers[2]["runguard_notice"]
    assert notice.startswith("3 attempts have failed in the same way")
    assert "Use 'read', finish with what is known, or ask the user" in notice
    assert "parse" not in notice


def request_with(*names: str, allowed: list[str] | None = None) -> LlmRequest:
    tool = types.Tool(function_declarations=[types.FunctionDeclaration(name=name) for name in names])
    config = types.GenerateContentConfig(tools=[tool])
    if allowed is not None:
        calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=allowed)
        config.tool_config = types.ToolConfig(function_calling_config=calling)
    return LlmRequest(config=config)


def test_a_declaration_is_taken_out_of_a_copy() -> None:
    request = request_with("parse", "read")
    before = request.config
    leave_tools_out(request, ("parse",))
    assert names_in(request) == ["read"]
    assert [one.name for one in before.tools[0].function_declarations] == ["parse", "read"]  # type: ignore[index,union-attr]


def test_a_tool_that_may_be_called_alone_stays() -> None:
    request = request_with("parse", "read", allowed=["parse"])
    leave_tools_out(request, ("parse",))
    assert names_in(request) == ["parse", "read"]


def test_it_leaves_the_list_of_allowed_functions_as_well() -> None:
    request = request_with("parse", "read", allowed=["parse", "read"])
    leave_tools_out(request, ("parse",))
    config = request.config.tool_config
    assert config is not None
    assert config.function_calling_config is not None
    assert config.function_calling_config.allowed_function_names == ["read"]


def test_a_tool_beside_a_built_in_one_leaves_that_alone() -> None:
    request = request_with("read")
    search = types.Tool(
        google_search=types.GoogleSearch(), function_declarations=[types.FunctionDeclaration(name="parse")]
    )
    request.config.tools = [*(request.config.tools or ()), search]
    leave_tools_out(request, ("parse",))
    kept = (request.config.tools or [])[1]
    assert isinstance(kept, types.Tool)
    assert kept.google_search is not None
    assert not kept.function_declarations


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"stall": {"withhold": 3, "nudge": 3}}, "can never fire"),
        ({"repetition": {"withhold": 3}}, "has no such rung"),
    ],
)
def test_a_rung_that_cannot_be_is_rejected(rules: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        Guard(Policy.validated({"rules": rules}, "keywords"))


@pytest.mark.parametrize("rule", ["stall", "tool_failures", "empty"])
def test_each_rule_about_a_tool_that_does_not_work_can_withhold_it(rule: str) -> None:
    alone = {name: False for name in ("stall", "tool_failures", "empty", "no_news") if name != rule}
    d = Driver(rules={**alone, rule: {"withhold": 2}}, max_nudges=0)
    says: Any = {"results": []} if rule == "empty" else "Error: boom"
    d.guard.runs["run"].lane("").offered = ("find", "read")
    steps = [d.tool("find", {"n": n}, says=says) for n in range(3)]
    assert [step.after.withheld for step in steps] == ["", "find", ""]
    assert d.guard.runs["run"].lane("").withheld == ("find",)


@pytest.mark.parametrize("offered", [(), ("find",)])
def test_a_tool_that_stays_is_not_said_to_be_gone(offered: tuple[str, ...]) -> None:
    d = Driver(rules={"stall": {"withhold": 4}}, max_nudges=100)
    d.guard.runs["run"].lane("").offered = offered
    steps = [d.tool("find", {"n": n}, says="Error: boom") for n in range(4)]
    assert [step.after.withheld for step in steps] == [""] * 4
    assert not any("not offered" in step.after.for_model for step in steps)


def test_failures_between_other_work_withhold_nothing() -> None:
    d = Driver(rules={"stall": {"withhold": 4}})
    for n in range(12):
        d.tool("edit", {"n": n}, says=f"edited {n}")
        d.tool("test", says="Error: 1 failed")
    assert d.guard.runs["run"].lane("").withheld == ()


def test_the_allowances_of_the_defaults_stay_beside_the_rung() -> None:
    d = Driver(rules={"stall": {"withhold": 4}}, max_nudges=100)
    words = []
    for n in range(10):
        d.tool("edit", {"n": n}, says=f"edited {n}")
        words.append(d.tool("test", says="Error: 1 failed").word)
    assert words.index("nudge") == 7
