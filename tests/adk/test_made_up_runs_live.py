"""Made-up loops and look-alikes of the detection benchmark, live on ADK through the plugin."""

import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.tools.base_tool import BaseTool
from google.genai import types

from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import observe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from made_up import HEALTHY, LOOPS
from shapes import Shape

ENDED = [
    "same call same answer",
    "answer with a clock",
    "arguments in other words",
    "ping pong of two calls",
    "circle of seven calls",
    "same failure new arguments",
    "every time another error",
    "same batch again",
    "edit that never applies",
    "stall after long work",
    "failing call between equal reads",
    "two long files in turn",
    "eight long files in a circle",
    "twenty long files in a circle",
    "long files in a circle with a new one now and then",
    "listing and file in turn with short looks between",
    "same long files read in batches",
    "long search and long page after real work",
    "shell with a path reports a missing command",
    "json error inside a string",
    "json error inside mcp content",
    "exit code of a command",
    "one unknown column in ever new queries",
    "empty arguments again and again",
    "new commands that fail in the same way",
    "one link clicked again and the page described anew",
    "same soft failure to five hundred pages",
    "two soft failures in turn",
    "soft failure and failure in turn",
    "soft failure inside mcp content that names its page",
]
NUDGED = [
    "rephrased search finds nothing",
    "two calls in turn with a counter in their arguments",
    "one long answer whatever is asked",
    "undeclared arguments around one question",
    "same long test run with other reads between",
    "plans rewritten without action",
    "one file written again with another line",
    "one query with another condition each time",
    "busy service with a fifth of good answers",
]
LEFT_ALONE = [
    "polling with progress",
    "list of waiting jobs that shrinks",
    "inbox into which mails come",
    "five unchanged polls then done",
    "three jobs polled in turn",
    "paging by cursor",
    "six scrolls with a bare ack",
    "batch with constant ok",
    "fan out of equal calls",
    "lookup sweep with many not found",
    "todo updates",
    "edit test edit",
    "flaky test until it passes",
    "second reading of the same files",
    "four long files read a second time",
    "edit test edit with a long report",
    "edit and two long reports that stay the same",
    "one long file reviewed between edits of another",
    "five unchanged polls of a long status",
    "long status in which one number moves",
    "long pages by cursor from an index that is looked up each time",
    "long listing between new files",
    "grep without matches over many patterns",
    "json records with a failed state",
    "missing records told as json",
    "failing tests by exit code between edits",
    "eight columns tried in long queries",
    "four rejected calls then smaller ones",
    "four equal failures of a shell then another command",
    "hundred jobs that are queued",
    "guesses that are wrong",
    "forty reports that are not ready yet",
    "rate limited batch in which some get through",
    "twelve pages of a busy site and then all again",
]


class Recorded(BaseTool):
    """Gives the answers of a made-up run, in their order."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, description=f"does {name}")
        self.answers: deque[Any] = deque()

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(name=self.name, description=self.description)

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        return self.answers.popleft()


def agent_of(shape: Shape) -> LlmAgent:
    """An agent whose model makes the calls of the made-up run, response by response, and then says "done"."""
    tools: dict[str, Recorded] = {}
    script: list[list[types.Part]] = []
    open_calls: dict[str, deque[str]] = defaultdict(deque)
    for step in shape.run()["steps"]:
        if step["kind"] == "model":
            script.append([])
        elif step["kind"] == "tool_call":
            script[-1].append(call(step["tool"], **step["args"]))
            open_calls[step["call_id"]].append(step["tool"])
        else:
            name = open_calls[step["call_id"]].popleft()
            tools.setdefault(name, Recorded(name)).answers.append(step["result"])

    def speak(number: int, _: LlmRequest) -> Any:
        return script[number - 1] if number <= len(script) else text("done")

    return LlmAgent(name="worker", model=ScriptedModel(speak), tools=list(tools.values()))


@pytest.mark.parametrize("name", ENDED)
async def test_a_loop_is_ended(name: str) -> None:
    shape = LOOPS[name]
    seen = await observe(agent_of(shape), tools=shape.tools)
    assert_stopped(seen.result)
    assert_calls_answered(seen.result.session)


@pytest.mark.parametrize("name", NUDGED)
async def test_a_loop_behind_noise_is_nudged(name: str) -> None:
    shape = LOOPS[name]
    seen = await observe(agent_of(shape), tools=shape.tools)
    assert seen.result.trips == []
    assert {action for action, _ in seen.rules} == {"nudge"}
    assert any("runguard_notice" in answer for answer in seen.answers)


@pytest.mark.parametrize("name", LEFT_ALONE)
async def test_healthy_work_is_neither_stopped_nor_refused_a_call(name: str) -> None:
    shape = HEALTHY[name]
    seen = await observe(agent_of(shape), tools=shape.tools)
    assert seen.result.trips == []
    assert {action for action, _ in seen.rules} <= {"nudge"}
    assert seen.result.texts == ["done"]
