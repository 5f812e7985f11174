"""The model's context window, token counters that the user supplies, and how the size of a request is known."""

import asyncio
import logging
from decimal import Decimal
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.apps import App
from google.adk.apps.app import EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
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
from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, text
from tests.kit.adk_runs import play
from tests.kit.endless_agents import endless, worker
from tests.kit.money import agent, guard

# ---- the context window ---------------------------------------------------------------------------------------------


def _growing(**options: Any) -> tuple[LlmAgent, ScriptedModel]:
    """Call n has 1,000·n prompt tokens."""
    model = ScriptedModel(lambda n, _: call("step", q=n), prompt_tokens=lambda n: 1_000 * n, output_tokens=10)
    return worker(model=model, **options), model


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        ({"max_context_tokens": 5_000}, 5_000),
        ({"models": {"scripted-1": {"context_window": 5_000}}}, 5_000),
        ({"models": {"scripted-*": {"context_window": 6_000}}, "context_headroom": 1_000}, 5_000),
        ({"max_context_tokens": 5_500, "context_headroom": 500}, 5_000),
        ({"max_context_tokens": 5_000, "models": {"scripted-1": {"context_window": 50_000}}}, 5_000),
    ],
    ids=str,
)
async def test_the_window_comes_from_the_policy_or_from_the_model(policy: dict[str, Any], limit: int) -> None:
    root, model = _growing()
    plugin = guard(tokens=lambda request: 1_000 * (model.calls + 1), **policy)
    result = await play(root, plugins=[plugin])
    assert model.calls == 5
    trip = assert_stopped(result, "context")
    assert (trip.observed, trip.limit) == (6_000, limit)
    assert assert_calls_answered(result.session) == 5


async def test_an_unknown_window_limits_nothing() -> None:
    root, model = _growing()
    result = await play(root, plugins=[guard(tokens=None, max_model_calls=12)])
    assert model.calls == 12
    assert_stopped(result, "model_calls")


async def test_without_a_counter_the_size_is_learned_from_what_models_tell() -> None:
    """The model says how large each prompt was; what was added since is small."""
    root, model = _growing()
    plugin = guard(tokens=None, max_context_tokens=5_000)
    result = await play(root, plugins=[plugin])
    assert model.calls in (5, 6), "the sixth is found out only after a fifth of 5,000 tokens has been told"
    assert_stopped(result, "context")
    assert_calls_answered(result.session)


async def test_a_session_that_is_too_full_ends_each_turn_without_a_call() -> None:
    model, service = ScriptedModel([text("x")]), InMemorySessionService()
    plugin = guard(tokens=lambda request: 10_000, max_context_tokens=5_000)
    for _ in range(2):
        result = await play(agent("a", model), plugins=[plugin], session_service=service)
        assert_stopped(result, "context")
    assert model.calls == 0


async def test_an_answer_that_would_overflow_the_window_does_not_enter_the_history() -> None:
    def dump(q: int) -> dict[str, str]:
        return {"rows": "row " * 750_000}

    model = ScriptedModel([call("dump", q=1), text("I will ask for less")])
    service, plugin = (
        InMemorySessionService(),
        guard(tokens=None, models={"scripted-1": {"context_window": 200_000}}, max_usd=1),
    )
    root = agent("a", model, tools=[dump])
    result = await play(root, plugins=[plugin], session_service=service)
    assert result.texts == ["I will ask for less"]
    (answer,) = [response.response for event in result.session.events for response in event.get_function_responses()]
    assert answer["status"] == "answer_left_out"
    assert "too large" in answer["message"]
    assert len(str(model.requests[-1].contents)) < 10_000
    assert plugin.trips == []
    again = await play(root, "and?", plugins=[plugin], session_service=service)
    assert again.texts == ["I will ask for less"]


async def test_a_large_answer_that_fits_is_left_alone() -> None:
    def dump(q: int) -> dict[str, str]:
        return {"rows": "row " * 90_000}

    model = ScriptedModel([call("dump", q=1), text("thanks")])
    plugin = guard(tokens=None, models={"scripted-1": {"context_window": 200_000}}, max_usd=10)
    result = await play(agent("a", model, tools=[dump]), plugins=[plugin])
    assert result.texts == ["thanks"]
    assert plugin.trips == []
    assert "row row" in str(model.requests[-1].contents)


async def test_several_answers_that_overflow_the_window_together_stop_the_next_request() -> None:
    def dump(q: int) -> dict[str, str]:
        return {"rows": f"{q} " + "row " * 70_000}

    model = ScriptedModel([[call("dump", q=n) for n in range(4)], text("never said")])
    plugin = guard(tokens=None, models={"scripted-1": {"context_window": 200_000}})
    result = await play(agent("a", model, tools=[dump]), plugins=[plugin])
    assert model.calls == 1
    assert_stopped(result, "context")
    assert assert_calls_answered(result.session) == 4


async def test_a_summary_makes_room_again() -> None:
    """The prompt of the third turn would not fit; the summary of the first two does."""
    summarizer = ScriptedModel([text("in short")])
    model = ScriptedModel([text("word " * 1_500)], prompt_tokens=lambda n: 500)
    compaction = EventsCompactionConfig(
        summarizer=LlmEventSummarizer(llm=summarizer), compaction_interval=2, overlap_size=0
    )
    plugin = guard(tokens=None, max_context_tokens=4_500)
    app = App(name="app", root_agent=agent("a", model), plugins=[plugin], events_compaction_config=compaction)
    runner = Runner(app=app, session_service=InMemorySessionService())
    for turn in range(1, 7):
        result = await play(runner.agent, f"turn {turn}", runner=runner)
        assert result.trips == []
    assert (model.calls, summarizer.calls) == (6, 3)


# ---- the user's own counter -----------------------------------------------------------------------------------------


async def test_a_counter_may_be_awaited() -> None:
    async def count(request: LlmRequest) -> int:
        await asyncio.sleep(0)
        return 1_000

    model, plugin = endless(), guard(tokens=count, max_usd="0.06")
    result = await play(worker(model=model), plugins=[plugin])
    assert model.calls == 3
    assert_stopped(result, "budget")


def _raises(request: LlmRequest) -> int:
    raise ConnectionError("the counting service is down")


@pytest.mark.parametrize(
    "counter",
    [
        _raises,
        lambda request: 0,
        lambda request: None,
        lambda request: -5,
        lambda request: "many",
        lambda request: 1.5,
        lambda request: True,
    ],
)
async def test_a_counter_that_fails_or_talks_nonsense_is_replaced_by_the_estimate(
    counter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on under its limits, and the failure is told once."""
    model, plugin = endless(), guard(tokens=counter, max_usd="0.06")
    with caplog.at_level(logging.WARNING, "runguard"):
        result = await play(worker(model=model), plugins=[plugin])
    assert 2 <= model.calls <= 3
    assert_stopped(result, "budget")
    assert plugin.spend()["usd"] <= Decimal("0.06")
    assert len([record for record in caplog.records if "counter_failed" in record.message]) == 1


# ---- The contents of a request are measured once, by their position, and again where they have changed --------------


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
