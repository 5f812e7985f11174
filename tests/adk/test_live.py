"""Live sessions: the guard observes and counts, and does no harm."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from google.adk.agents import LiveRequestQueue, LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps import App
from google.adk.models.base_llm_connection import BaseLlmConnection
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard import BudgetExceededError
from runguard.adk import RunGuardPlugin
from runguard.adk.runs import project
from runguard.core.decision import STOP_CODE
from runguard.testing import ScriptedModel, text
from tests.kit.optional import present
from tests.kit.topologies import ADK


class Talk(BaseLlmConnection):
    """Answers every content it is sent with a sentence, then tells its usage, as live models do: in an event of its
    own.
    """

    def __init__(self, reports: tuple[dict[str, int], ...]) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.reports = reports

    async def send_history(self, history: list[types.Content]) -> None:
        return None

    async def send_content(self, content: types.Content) -> None:
        await self.heard.put("content")

    async def send_realtime(self, blob: Any) -> None:
        return None

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self.heard.get()
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))
        for report in self.reports:
            yield LlmResponse(usage_metadata=types.GenerateContentResponseUsageMetadata(**report))
        yield LlmResponse(turn_complete=True)

    async def close(self) -> None:
        return None


class LiveModel(ScriptedModel):
    reports: tuple[dict[str, int], ...] = ({"prompt_token_count": 700, "total_token_count": 1_000},)

    @asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncGenerator[Talk, None]:
        yield Talk(self.reports)


ZEROS = {"prompt_token_count": 0, "candidates_token_count": 0, "total_token_count": 0}


async def talk(plugin: RunGuardPlugin, *reports: dict[str, int]) -> tuple[list[str], dict[str, Any]]:
    """One turn of a live session: what was said, and the run as the guard sees it at its end."""
    agent = LlmAgent(name="talker", model=LiveModel([text("unused")], **({"reports": reports} if reports else {})))  # type: ignore[call-arg]
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u", session_id="s")
    runner = Runner(app=App(name="app", root_agent=agent, plugins=[plugin]), session_service=service)
    queue = LiveRequestQueue()
    said, counted = [], []
    queue.send_content(types.Content(role="user", parts=[types.Part(text="hi")]))
    async with asyncio.timeout(20):
        config = RunConfig(streaming_mode=StreamingMode.BIDI, response_modalities=["TEXT"])
        async for event in runner.run_live(
            user_id="u", session_id=session.id, live_request_queue=queue, run_config=config
        ):
            said += [part.text for part in (event.content.parts if event.content else []) or [] if part.text]
            if event.turn_complete:
                counted += plugin.snapshot()["runs"]
                queue.close()
                break
    (run,) = counted
    return said, run


async def test_zeros_of_a_live_model_are_estimated_from_what_it_said() -> None:
    plugin = RunGuardPlugin(prices={"scripted-1": {"input": 10, "output": 40}})
    _, run = await talk(plugin, ZEROS)
    assert (run["model_calls"], run["prompt_tokens"], run["output_tokens"]) == (1, 0, 2)  # "hello"
    assert plugin.spend()["estimated_calls"] == 1


async def test_zeros_behind_a_report_of_a_live_model_count_nothing_again() -> None:
    _, run = await talk(RunGuardPlugin(), {"prompt_token_count": 700, "total_token_count": 1_000}, ZEROS)
    assert (run["prompt_tokens"], run["output_tokens"]) == (700, 300)


async def test_a_live_session_is_counted_and_left_alone() -> None:
    plugin = RunGuardPlugin()
    said, run = await talk(plugin)
    assert said == ["hello"]
    assert (run["prompt_tokens"], run["output_tokens"]) == (700, 300)
    assert run["model_calls"] == 1
    assert plugin.trips == []
    assert plugin.snapshot()["guard_errors"] == 0


# ---- stops ----------------------------------------------------------------------------------------------------------

asks_about_contents = pytest.mark.skipif(
    find_spec("google.adk.live") is None, reason="this ADK asks no plugin about the contents of a live connection"
)


class Slow(Talk):
    """Says "hello" at once, and the rest of each answer when it is let go on."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__(({"prompt_token_count": 700, "total_token_count": 1_000},))
        self.go_on = go_on

    async def receive(self) -> AsyncGenerator[LlmResponse, None]:
        await self.heard.get()
        yield LlmResponse(usage_metadata=types.GenerateContentResponseUsageMetadata(**self.reports[0]))
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hello")]))
        await self.go_on.wait()
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="world")]))
        yield LlmResponse(turn_complete=True)


class SlowModel(ScriptedModel):
    _go_on: asyncio.Event

    @asynccontextmanager
    async def connect(self, llm_request: Any) -> AsyncGenerator[Talk, None]:
        yield Slow(self._go_on)


class Call:
    """A live connection: what the caller sees of it, and what is stored."""

    def __init__(self, model: ScriptedModel, **policy: Any) -> None:
        self.plugin = RunGuardPlugin(prices={"scripted-1": {"input": 10, "output": 40}}, **policy)
        self.service = InMemorySessionService()
        app = App(name="app", root_agent=LlmAgent(name="talker", model=model), plugins=[self.plugin])
        self.runner = Runner(app=app, session_service=self.service)
        self.queue = LiveRequestQueue()
        self.events: list[Any] = []
        self.max_llm_calls = 500

    def say(self, times: int = 1) -> None:
        for _ in range(times):
            self.queue.send_content(types.Content(role="user", parts=[types.Part(text="hi")]))

    async def listen(self) -> AsyncGenerator[Any, None]:
        """Events until the connection is closed."""
        await self.service.create_session(app_name="app", user_id="u", session_id="s")
        config = RunConfig(
            streaming_mode=StreamingMode.BIDI, response_modalities=["TEXT"], max_llm_calls=self.max_llm_calls
        )
        async with asyncio.timeout(20):
            async for event in self.runner.run_live(
                user_id="u", session_id="s", live_request_queue=self.queue, run_config=config
            ):
                self.events.append(event)
                yield event

    async def talk_on(self) -> None:
        """Say something more after every answer."""
        async for event in self.listen():
            if event.turn_complete:
                self.say()

    async def stored_stops(self) -> list[str]:
        session = await self.service.get_session(app_name="app", user_id="u", session_id="s")
        assert session is not None
        return [
            present(event.custom_metadata)["runguard"]["id"]
            for event in session.events
            if event.error_code == STOP_CODE
        ]


@asks_about_contents
@pytest.mark.parametrize("limit", [{"max_tokens": 1_500}, {"max_usd": "0.02"}], ids=str)
async def test_a_live_stop_is_stored_once_and_closes_the_connection(limit: dict[str, Any]) -> None:
    call = Call(LiveModel([text("unused")]), **limit)  # type: ignore[call-arg]
    call.say()
    async for event in call.listen():
        if event.turn_complete:
            call.say(3)  # more than one content waits when the budget is spent
    (trip,) = call.plugin.trips
    assert trip.rule == "budget"
    assert await call.stored_stops() == [trip.id]
    stops = [event for event in call.events if event.error_code]
    assert [stop.error_code for stop in stops if not stop.partial] == [STOP_CODE]
    if ADK >= (2, 11):  # before, ADK asks about waiting contents while the model speaks: each is answered by the stop
        assert len(stops) == 1
    assert call.plugin.snapshot()["runs"] == []


@asks_about_contents
async def test_a_live_session_stops_at_its_limit_of_model_calls() -> None:
    call = Call(LiveModel([text("unused")]), max_model_calls=2)  # type: ignore[call-arg]
    call.say()
    await call.talk_on()
    (trip,) = call.plugin.trips
    assert (trip.rule, trip.observed, trip.limit) == ("model_calls", 3, 2)
    assert sum(event.turn_complete is True and not event.error_code for event in call.events) == 2
    assert await call.stored_stops() == [trip.id]


@asks_about_contents
async def test_the_limit_of_adk_does_not_count_live_calls() -> None:
    call = Call(LiveModel([text("unused")]), max_tokens=3_500)  # type: ignore[call-arg]
    call.max_llm_calls = 1
    call.say()
    await call.talk_on()
    assert [trip.rule for trip in call.plugin.trips] == ["budget"]


@asks_about_contents
async def test_a_live_stop_raises_where_the_policy_says_so() -> None:
    call = Call(LiveModel([text("unused")]), max_tokens=1_500, on_stop="raise")  # type: ignore[call-arg]
    call.say()
    with pytest.raises(BudgetExceededError):
        await call.talk_on()
    assert await call.stored_stops() == [trip.id for trip in call.plugin.trips]
    assert [event.error_code for event in call.events if event.error_code] == []


@asks_about_contents
async def test_a_live_stop_lets_the_model_finish_its_answer() -> None:
    model = SlowModel([text("unused")])  # type: ignore[call-arg]
    model._go_on = asyncio.Event()
    call = Call(model, max_tokens=500)
    call.say()
    stops = 0
    async for event in call.listen():
        stops += event.error_code == STOP_CODE
        if (event.content and event.content.parts[0].text == "hello") or stops == 1:
            call.say()  # while the model speaks
        if stops == 2:
            model._go_on.set()
    assert [
        part.text for event in call.events if event.content for part in event.content.parts if not part.thought
    ] == ["hello", "world"]
    assert await call.stored_stops() == [trip.id for trip in call.plugin.trips]
    assert len(call.plugin.trips) == 1


# ---- Fields have more tokens than text of the same length, and an answer that is one text is text


def _tokens(response: dict[str, object]) -> int:
    part = types.Part(function_response=types.FunctionResponse(name="look", response=response))
    return project(LlmRequest(contents=[types.Content(role="user", parts=[part])]), None).upper


def test_an_answer_with_fields_is_estimated_higher_than_its_length_in_text() -> None:
    rows = [{"sku": number, "stock": 7, "city": "Bonn"} for number in range(200)]
    assert _tokens({"rows": rows}) > 1.1 * _tokens({"result": str(rows)})


def test_an_answer_that_is_one_long_text_is_text() -> None:
    text = "nothing has changed since " * 200
    assert len(text) / 3 < _tokens({"result": text, "status": "ok"}) < len(text) / 3 * 1.05
