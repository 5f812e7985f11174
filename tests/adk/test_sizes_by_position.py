"""The contents of a request are measured once, by their position, and again where they have changed."""

from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import testing
from runguard.adk import RunGuardPlugin
from runguard.adk import plugin as model_hooks
from runguard.adk.runs import PromptProjection, project
from runguard.core import identity as answer_book

STEPS = 6


def search(page: int) -> dict[str, Any]:
    """Search."""
    return {"page": page, "rows": [{"id": page * 1_000 + n, "name": f"row {n} of page {page}"} for n in range(200)]}


def script(number: int, request: LlmRequest) -> Any:
    return testing.call("search", page=number) if number <= STEPS else testing.text("done")


class Shorten(BasePlugin):
    """Replaces the rows of the last answers but one, as a plugin that saves context does. It changes them in place."""

    def __init__(self, at_call: int) -> None:
        super().__init__(name="shorten")
        self.at_call, self.calls = at_call, 0

    async def before_model_callback(self, *, callback_context: CallbackContext, llm_request: LlmRequest) -> None:
        self.calls += 1
        if self.calls != self.at_call:
            return
        for content in llm_request.contents[:-1]:
            for part in content.parts or []:
                if part.function_response is not None and part.function_response.response is not None:
                    part.function_response.response["rows"] = "left out"


async def projections(monkeypatch: pytest.MonkeyPatch, *before: BasePlugin) -> list[tuple[int, int]]:
    """The size of each request as the guard projected it, and as a measurement of the whole request gives it."""
    seen: list[tuple[int, int]] = []

    def observed(request: LlmRequest, known: Any) -> PromptProjection:
        made = project(request, known)
        seen.append((made.size, project(request, None).size))
        return made

    monkeypatch.setattr(model_hooks, "project", observed)
    agent = LlmAgent(name="worker", model=testing.ScriptedModel(script), tools=[search])
    app = App(name="app", root_agent=agent, plugins=[*before, RunGuardPlugin()])
    recording = await testing.run(agent, runner=Runner(app=app, session_service=InMemorySessionService()))
    assert recording.texts == ["done"]
    return seen


async def test_the_size_by_position_is_that_of_the_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await projections(monkeypatch)
    assert len(seen) == STEPS + 1
    assert all(projected == whole for projected, whole in seen)


@pytest.mark.parametrize("at_call", [3, STEPS + 1])
async def test_contents_that_were_changed_in_place_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, at_call: int
) -> None:
    seen = await projections(monkeypatch, Shorten(at_call))
    projected, whole = seen[at_call - 1]
    assert projected == whole


async def test_each_answer_is_measured_whole_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    copied = answer_book._parts_of

    def counting(value: Any) -> Any:
        if type(value) is dict and "rows" in value:
            measured.append(value["page"])
        return copied(value)

    monkeypatch.setattr(answer_book, "_parts_of", counting)
    agent = LlmAgent(name="worker", model=testing.ScriptedModel(script), tools=[search])
    app = App(name="app", root_agent=agent, plugins=[RunGuardPlugin()])
    await testing.run(agent, runner=Runner(app=app, session_service=InMemorySessionService()))
    assert measured == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(types.Content(role="model", parts=[types.Part(text="four")]), id="role"),
        pytest.param(types.Content(role="user", parts=[types.Part(text="four words")]), id="length"),
        pytest.param(types.Content(role="user", parts=[types.Part(text="f"), types.Part(text="r")]), id="parts"),
    ],
)
def test_a_change_of_the_last_known_content_is_noticed(changed: types.Content) -> None:
    first = types.Content(role="user", parts=[types.Part(text="a" * 9_000)])
    last = types.Content(role="user", parts=[types.Part(text="four")])
    more = types.Content(role="user", parts=[types.Part(text="more")])
    known = project(LlmRequest(contents=[first, last]), None)
    known.tokens = 1_000_000  # far from any estimate
    assert project(LlmRequest(contents=[first, last, more]), known).likely > 1_000_000
    again = project(LlmRequest(contents=[first, changed, more]), known)
    whole = project(LlmRequest(contents=[first, changed, more]), None)
    assert again.size == whole.size
    assert again.likely == whole.size * 1_000_000 // known.size
