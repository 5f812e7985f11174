"""Calls that arrive without their arguments, live: ADK rejects them, and RunGuard tells the model why."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import ToolRule
from runguard.core.decision import NOTICE_KEY
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import observe

WRITTEN: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_written() -> None:
    WRITTEN.clear()


def write_file(path: str, body: str) -> str:
    """Writes a file."""
    WRITTEN.append(path)
    return f"wrote {path}"


def cut(part: types.Part) -> LlmResponse:
    return LlmResponse(
        content=types.Content(role="model", parts=[part]), finish_reason=types.FinishReason.MAX_TOKENS, partial=False
    )


def worker(script: list[Any]) -> LlmAgent:
    return LlmAgent(name="worker", model=ScriptedModel(script), tools=[write_file])


@pytest.mark.parametrize("broken", [call("write_file"), cut(call("write_file")), cut(call("write_file", path="a.md"))])
async def test_the_second_rejected_call_is_nudged_and_smaller_calls_go_on(broken: Any) -> None:
    parts = [call("write_file", path=f"{n}.md", body="short") for n in range(5)]
    seen = await observe(worker([broken, broken, *parts, text("done")]))
    assert seen.rules == [("nudge", "stall")]
    notices = [answer.get(NOTICE_KEY) for answer in seen.answers]
    assert [bool(notice) for notice in notices] == [False, True, *[False] * 5]
    assert "Send less per call" in str(notices[1])
    assert seen.result.texts == ["done"]
    assert [f"{n}.md" for n in range(5)] == WRITTEN


async def test_equal_rejected_calls_are_still_stopped() -> None:
    seen = await observe(worker([call("write_file")]))
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session)
    assert WRITTEN == []


async def test_a_rejected_call_was_not_tried_for_once() -> None:
    """The effect is named by the path alone, so the rejected call and the complete one are the same effect."""
    rules = {"write_file": ToolRule(once=True, identity=("path",))}
    rejected, complete = call("write_file", path="a.md"), call("write_file", path="a.md", body="short")
    seen = await observe(worker([rejected, rejected, complete, complete, text("done")]), tools=rules)
    assert WRITTEN == ["a.md"]
    assert ("block", "once") in seen.rules  # the second complete call, and no other
    assert [rule for _, rule in seen.rules].count("once") == 1
    assert seen.answers[2] == {"result": "wrote a.md"}
