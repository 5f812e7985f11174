"""``GuardedLlm``: any model of ADK with a guard around it, so that an agent can be guarded by its ``model=`` alone.

It is no model itself. It says that its guard has a say; the model inside is then judged where all models are, at the border, and a
fallback that tries three models is three calls. Which run a call belongs to is known from the Runner; loops are seen in the tool
answers that each request carries. Where the plugin guards the same run, it sees the tools better, and only money and context are
looked at here.
"""

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types
from pydantic import PrivateAttr

from runguard.adk import runners
from runguard.adk.chain import LAYERS, STREAM, Invocation, Layer, Stream
from runguard.adk.stops import stop_response
from runguard.conductor import Guard
from runguard.controls import Controls
from runguard.decision import STOP_CODE, Action, Decision, Trip, trip
from runguard.errors import PolicyError, RunStoppedError
from runguard.events import ROOT_LANE, AgentEntered, Answer, RunInfo, ToolResults
from runguard.policy import Policy

_UNNAMED: Final = "(model)"
_AGENT_LABEL: Final = "adk_agent_name"


@dataclass(slots=True)
class _Strand:
    """What is known of one agent in one runner: its last request, and whether it has ended with words since."""

    seen: tuple[int, bytes] = (0, b"")
    ended: bool = False


@dataclass(slots=True)
class _Guarded:
    """One run as this model knows it."""

    invocation: Invocation
    strands: dict[str, _Strand] = field(default_factory=dict)


class GuardedLlm(Controls, BaseLlm):
    """``LlmAgent(model=GuardedLlm("gemini-2.5-flash", max_usd=1.50))``.

    ``model``: a model of ADK, or the name of one. The keywords are those of ``RunGuardPlugin``; a stop raises its typed error, unless
    ``on_stop="stop"`` asks for a final answer with ``error_code="RUNGUARD_STOP"``. Limits hold for each run of the Runner, however
    many agents share the model.
    """

    _inner: BaseLlm = PrivateAttr()
    _guard: Guard = PrivateAttr()
    _alone: _Guarded | None = PrivateAttr(default=None)

    def __init__(self, model: BaseLlm | str, **policy: Any) -> None:
        inner = LLMRegistry.new_llm(model) if isinstance(model, str) else model
        if not isinstance(inner, BaseLlm):
            raise PolicyError(f"GuardedLlm({model!r}): give a model of google-adk, or the name of one")
        if isinstance(inner, GuardedLlm):
            raise PolicyError(f"GuardedLlm: '{inner.model}' is guarded already")
        super().__init__(model=inner.model)
        self._inner = inner
        self._guard = Guard(Policy.build(**{"on_stop": "raise", **policy}))
        self._guard.check_store()
        runners.watch_guard(self._guard)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "GuardedLlm":
        return self  # copies of an agent share their model, and with it one account

    @property
    def guard(self) -> Guard:  # type: ignore[override]
        return self._guard

    @property
    def inner(self) -> BaseLlm:
        return self._inner

    @property
    def capabilities(self) -> Any:
        return self._inner.capabilities  # newer versions of ADK ask a model what it can do

    def connect(self, llm_request: LlmRequest) -> Any:
        """A live connection is the inner model's: nothing of it is guarded here. The plugin books what a live run tells."""
        return self._inner.connect(llm_request)

    async def generate_content_async(self, llm_request: LlmRequest, stream: bool = False) -> AsyncGenerator[LlmResponse, None]:
        if self._guard.policy.mode == "off":
            async with aclosing(self._inner.generate_content_async(llm_request, stream)) as answers:
                async for response in answers:
                    yield response
            return
        guarded, lane, agent, sees_tools = self._place(llm_request)
        strand = guarded.strands.setdefault(lane, _Strand())
        stop = self._learn(guarded.invocation, strand, lane, agent, llm_request) if sees_tools else None
        if stop is not None:
            yield self._stopped(stop)
            return
        layer = Layer(self._guard, guarded.invocation, lane, agent)
        token = LAYERS.set((*LAYERS.get(), layer))
        try:
            asked = self._inner.generate_content_async(llm_request, stream)
        finally:
            LAYERS.reset(token)
        async with aclosing(asked) as answers:
            while True:
                token = LAYERS.set((*LAYERS.get(), layer))  # for each piece: between two of them, others use this context
                try:
                    response = await anext(answers)
                except StopAsyncIteration:
                    return
                finally:
                    LAYERS.reset(token)
                if response.error_code == STOP_CODE and (stop := trip(response)) is not None and self._is_mine(stop):
                    yield self._stopped(stop)
                    return
                if not response.partial:
                    strand.ended = not _calls_of(response.content)
                yield response

    # ---- whose call it is -------------------------------------------------------------------------------------------

    def _place(self, request: LlmRequest) -> tuple[_Guarded, str, str, bool]:
        """The run, the strand of it and the agent that ask; and whether the tools' answers are ours to judge."""
        agent = (request.config.labels or {}).get(_AGENT_LABEL) or _UNNAMED
        stream = STREAM.get()
        if stream is None:
            if self._alone is None:
                self._alone = self._begin("", "", "")
            return self._alone, agent, agent, True
        *_, root = chain = _chain(stream)
        guarded = root.guarded.get(self._guard)
        if guarded is None:
            guarded = root.guarded[self._guard] = self._begin(root.app, root.user, root.session)
            run = guarded.invocation.run.info.run
            root.on_end.append(lambda: self._guard.end(run))
        lane = agent if stream is root else f"{stream.number}/{agent}"
        return guarded, lane, agent, all(one.plugin is None for one in chain)

    def _begin(self, app: str, user: str, session: str) -> _Guarded:
        guard = self._guard
        run = guard.start(RunInfo(secrets.token_hex(8), app, user, session, at=guard.clock()))
        return _Guarded(Invocation(run.info.run, run, None, session, ""))

    def _is_mine(self, stop: Trip) -> bool:
        return any(own.id == stop.id for own in self._guard.trips)

    def _stopped(self, stop: Trip) -> LlmResponse:
        if self._guard.policy.on_stop == "raise":
            raise RunStoppedError.of(stop)
        return stop_response(stop, self._guard.stop_text(stop))

    # ---- what the tools answered ------------------------------------------------------------------------------------

    def _learn(self, invocation: Invocation, strand: _Strand, lane: str, agent: str, request: LlmRequest) -> Trip | None:
        """The answers at the end of a request are what happened since the last one."""
        guard, run = self._guard, invocation.run
        if lane not in run.lanes:
            guard.open_lane(run, lane, ROOT_LANE, concurrent=False)
        if strand.ended:
            strand.ended = False
            stop = _enforced(guard.check(AgentEntered(run.info.run, lane, agent, guard.clock())))
            if stop is not None:
                return stop
        answers = _answers(guard, request.contents)
        mark = (len(request.contents), b"".join(answer.call for answer in answers))
        if not answers or mark == strand.seen:  # the same request again: a retry
            return None
        strand.seen = mark
        return _enforced(guard.after(ToolResults(run.info.run, lane, agent, guard.clock(), "", answers)))


def _enforced(decision: Decision) -> Trip | None:
    return decision.trip if decision.action is Action.STOP and decision.enforced else None


def _chain(stream: Stream) -> list[Stream]:
    chain = [stream]
    while chain[-1].outer is not None:
        chain.append(chain[-1].outer)
    return chain


def _calls_of(content: types.Content | None) -> list[types.FunctionCall]:
    return [part.function_call for part in (content.parts or []) if part.function_call is not None] if content is not None else []


def _answers(guard: Guard, contents: list[types.Content]) -> list[Answer]:
    """The answers after the model's last words, each with the call it answers: by id where there are ids, else in order."""
    told: list[types.FunctionResponse] = []
    calls: list[types.FunctionCall] = []
    for content in reversed(contents):
        if content.role == "model":
            calls = _calls_of(content)
            break
        told[:0] = [part.function_response for part in content.parts or [] if part.function_response is not None]
    answers = []
    for response in told:
        call = next((c for c in calls if c.name == response.name and (c.id == response.id or not c.id or not response.id)), None)
        if call is None:
            continue
        calls.remove(call)
        name, value = call.name or "", response.response
        answers.append(Answer(name, guard.fingerprint(name, call.args or {}), value, response.id or "", args=call.args))
    return answers
