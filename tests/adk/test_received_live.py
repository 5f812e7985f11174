"""The call that counts is what the tool receives: a ``FunctionTool`` never sees arguments that its function does not
declare.
"""

from collections.abc import Callable
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from runguard.testing import ScriptedModel, assert_stopped, call, text
from tests.kit.adk_runs import observe

SPELLINGS = ["refund policy", "Refund Policy", "REFUND POLICY", "refund\u200b policy", "\uff52efund policy"]


def agent_with(tool: Any, calls: int, args: Callable[[int], dict[str, Any]]) -> LlmAgent:
    model = ScriptedModel(lambda n, _: call("search", **args(n)) if n <= calls else text("done"))
    return LlmAgent(name="worker", model=model, tools=[tool])


def search(q: str) -> dict[str, Any]:
    """Looks it up."""
    return {"found": "a moon"} if q else {}


class Search(BaseTool):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__(name="search", description="looks it up")

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name, description=self.description)

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        return {"page": args["x"], "found": f"moon {args['x']}"}


async def test_a_loop_with_a_counter_that_the_tool_never_sees_is_ended() -> None:
    seen = await observe(agent_with(search, 160, lambda n: {"q": "moon", "x": n}))
    assert_stopped(seen.result)
    assert [rule for action, rule in seen.rules if action == "stop"] == ["repetition"]
    assert len(seen.answers) < 12


async def test_a_tool_that_takes_whatever_it_is_given_is_another_call_each_time() -> None:
    seen = await observe(agent_with(Search(), 40, lambda n: {"q": "moon", "x": n}))
    assert seen.result.trips == []
    assert seen.result.texts == ["done"]


async def test_two_tools_of_one_name_are_each_read_by_their_own_arguments() -> None:
    def other(q: str, x: int) -> dict[str, Any]:
        return {"x": x, "q": q}

    other.__name__ = "search"
    first, second = (
        agent_with(search, 3, lambda n: {"q": "a", "x": n}),
        agent_with(other, 30, lambda n: {"q": "b", "x": n}),
    )
    first.name, second.name = "first", "second"
    seen = await observe(first)
    assert seen.result.trips == []
    seen = await observe(second, plugin=seen.plugin)
    assert seen.result.trips == []


@pytest.mark.parametrize("stops", [False, True])
async def test_a_question_in_letters_that_read_alike_is_nudged_at_four(stops: bool) -> None:
    calls = 24 if stops else 6
    seen = await observe(agent_with(search, calls, lambda n: {"q": SPELLINGS[n % 5] + "\u200b" * (n // 5)}))
    assert ("nudge", "no_news") in seen.rules
    assert sum("runguard_notice" in answer for answer in seen.answers[:4]) == 1
    assert bool(seen.result.trips) is stops
