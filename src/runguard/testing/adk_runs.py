"""Test your own policy: a scripted model for real ADK, a clock you move by hand, and assertions about stops.

    model = ScriptedModel(lambda n, request: call("get_user", uid=1) if n < 5 else text("done"))
    agent = LlmAgent(name="a", model=model, tools=[get_user])

Users write tests with it. ``cli/doctor`` and ``cli/stories`` play their runs with it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import runguard.adk  # noqa: F401 - first: it says what to install where google-adk is missing

# isort: split
from google.adk.apps import App
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.genai import types
from pydantic import PrivateAttr

from runguard.core.decision import STOP_CODE, Trip, trip
from runguard.core.errors import RunStoppedError


@dataclass(slots=True)
class FakeClock:
    """Time that moves only when told to: ``RunGuardPlugin(clock=FakeClock())``."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def text(words: str) -> types.Part:
    """Return a step that says something."""
    return types.Part(text=words)


def call(tool: str, /, **args: Any) -> types.Part:
    """Return a step that calls a tool."""
    return types.Part(function_call=types.FunctionCall(name=tool, args=args))


def calls(*parts: types.Part) -> list[types.Part]:
    """Return a step that calls several tools in one response."""
    return list(parts)


def transfer(agent: str) -> types.Part:
    """Return a step that hands over to another agent."""
    return call("transfer_to_agent", agent_name=agent)


Step = types.Part | Sequence[types.Part] | LlmResponse | BaseException
Script = Iterable[Step] | Callable[..., Step]


class ScriptedModel(BaseLlm):
    """A model that follows a script and reports fixed usage; no network, no key.

    The script is a list of steps (the last one repeats) or a function of ``(n, request)`` with n from 1. A step is
    a part, a list of parts, a whole ``LlmResponse`` or an exception to raise. ``calls`` counts the calls that really
    reached the model.
    """

    model: str = "scripted-1"
    latency_s: float = 0.0
    prompt_tokens: Any = 1_000  # a number, or a function of the call number
    output_tokens: int = 250
    chunks: int = 1  # pieces of a streamed answer; usage is reported cumulatively on each
    usage_on: str = "all"  # "all", "last", "final" or "none": where streamed usage is reported

    _script: Any = PrivateAttr()
    _calls: int = PrivateAttr(default=0)
    _in_flight: int = PrivateAttr(default=0)
    _max_in_flight: int = PrivateAttr(default=0)
    _requests: list[LlmRequest] = PrivateAttr(default_factory=list)

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(**{"model": "scripted-1", **options})
        self._script = script if callable(script) else list(script)

    @property
    def calls(self) -> int:
        """Calls that really reached the model."""
        return self._calls

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def requests(self) -> list[LlmRequest]:
        """The last 100 requests, newest last."""
        return self._requests

    def _step(self, number: int, request: LlmRequest) -> Step:
        if callable(self._script):
            return self._script(number, request)  # type: ignore[no-any-return]
        return self._script[min(number, len(self._script)) - 1]  # type: ignore[no-any-return]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self._calls += 1
        number = self._calls
        self._requests = [*self._requests[-99:], llm_request]
        self._in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._in_flight)
        try:
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            else:
                await asyncio.sleep(0)
            step = self._step(number, llm_request)
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, LlmResponse):
                responses = [step]
            else:
                parts = [step] if isinstance(step, types.Part) else list(step)
                responses = list(self._responses(parts, number, stream))
        finally:
            self._in_flight -= 1  # answered: the reader of the chunks may take its time
        for response in responses:
            yield response

    def _responses(self, parts: list[types.Part], number: int, stream: bool) -> Iterable[LlmResponse]:
        prompt = self.prompt_tokens(number) if callable(self.prompt_tokens) else self.prompt_tokens
        usage = types.GenerateContentResponseUsageMetadata(
            prompt_token_count=prompt,
            candidates_token_count=self.output_tokens,
            total_token_count=prompt + self.output_tokens,
        )
        if stream and self.chunks > 1:
            for index in range(self.chunks - 1):
                told = self.usage_on == "all" or (self.usage_on == "last" and index == self.chunks - 2)
                piece = types.Content(role="model", parts=[types.Part(text=f"…{index}")])
                yield LlmResponse(content=piece, partial=True, usage_metadata=usage if told else None)
        told = self.usage_on in ("all", "final") or not stream or self.chunks == 1
        if self.usage_on == "none":
            told = False
        # Parts are copied: ADK fills in the ids of function calls, and a script's step may be used again.
        content = types.Content(role="model", parts=[part.model_copy(deep=True) for part in parts])
        yield LlmResponse(content=content, usage_metadata=usage if told else None, partial=False)


@dataclass(slots=True)
class Recording:
    """What a run left behind."""

    events: list[Event]
    session: Any
    error: BaseException | None = None

    @property
    def texts(self) -> list[str]:
        """What agents said, thoughts aside."""
        return [
            p.text
            for e in self.events
            if e.content and e.author != "user"
            for p in e.content.parts or []
            if p.text and not p.thought
        ]

    @property
    def trips(self) -> list[Trip]:
        found = [trip(event) for event in self.events]
        if isinstance(self.error, RunStoppedError):  # raised in place of its event
            found.append(self.error.trip)
        return list({t.id: t for t in found if t is not None}.values())


async def run(
    agent: Any,
    message: str = "go",
    *,
    plugins: Sequence[BasePlugin] = (),
    session_service: BaseSessionService | None = None,
    session_id: str = "s1",
    user_id: str = "u1",
    runner: Runner | None = None,
    app_name: str = "app",
    catch: bool = False,
    **run_options: Any,
) -> Recording:
    """One user turn of ``agent`` on a real Runner.

    ``catch`` keeps an exception in the recording instead of raising it.
    """
    service = session_service or InMemorySessionService()
    if runner is None:
        app = App(name=app_name, root_agent=agent, plugins=list(plugins))
        runner = Runner(app=app, session_service=service)
    else:
        service = runner.session_service
    name = runner.app_name
    if await service.get_session(app_name=name, user_id=user_id, session_id=session_id) is None:
        await service.create_session(app_name=name, user_id=user_id, session_id=session_id)
    events: list[Event] = []
    error: BaseException | None = None
    content = types.Content(role="user", parts=[types.Part(text=message)])
    try:
        async for event in runner.run_async(user_id=user_id, session_id=session_id, new_message=content, **run_options):
            events.append(event)  # noqa: PERF401 - what came before an exception is kept
    except Exception as raised:
        if not catch:
            raise
        error = raised
    session = await service.get_session(app_name=name, user_id=user_id, session_id=session_id)
    return Recording(events, session, error)


def assert_stopped(events: Iterable[Event] | Recording, rule: str | None = None) -> Trip:
    """Assert that RunGuard stopped the run (by ``rule``, if given); return the trip.

    With ``on_stop="raise"`` the stop event is in the session only: give the whole recording.
    """
    if isinstance(events, Recording):
        events = [*events.events, *(events.session.events if isinstance(events.error, RunStoppedError) else ())]
    events = list(events)
    found = [t for e in events if e.error_code == STOP_CODE and (t := trip(e)) is not None]
    assert found, "no stop event: the run was not stopped by RunGuard"
    if rule is not None:
        rules = sorted({t.rule for t in found})
        assert rule in rules, f"stopped by {', '.join(rules)}, not by {rule}"
        return next(t for t in found if t.rule == rule)
    return found[-1]


def assert_calls_answered(session: Any, *, open_calls: int = 0) -> int:
    """Assert that every function call in the session has its answer; return how many were answered.

    ``open_calls``: how many ADK keeps open.
    """
    asked: dict[str, str] = {}
    answered: set[str] = set()
    for event in session.events:
        for function_call in event.get_function_calls():
            asked[function_call.id or ""] = function_call.name or ""
        for response in event.get_function_responses():
            answered.add(response.id or "")
    missing = {call_id: name for call_id, name in asked.items() if call_id not in answered}
    assert len(missing) == open_calls, f"unanswered function calls: {missing}"
    return len(answered)
