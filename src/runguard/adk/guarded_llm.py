"""``GuardedLlm``: any model of ADK with a guard around it, so that an agent can be guarded by its ``model=`` alone.

It passes calls on to the model inside and adds its guard to the layers around the call (``HERE``). ``model_calls``
then asks the guard for each call that reaches a model, so a fallback that tries three models is three calls. The Runner
says which run a call belongs to. Loops show in the tool answers that each request carries. Where the plugin guards the
same run, it sees the tools better, and this guard checks only money and context.
"""

import itertools
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Unpack

from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.models.registry import LLMRegistry
from google.genai import types
from pydantic import PrivateAttr

from runguard.adk.events import history_of, input_of, run_of
from runguard.adk.patching import IN_USE, wrap_adk
from runguard.adk.runs import HERE, Invocation, ModelLayer, RunnerStream, within
from runguard.adk.stops import stop_response
from runguard.core.decision import STOP_CODE, Action, Decision, Trip, trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.events import ROOT_LANE, AgentEntered, Answer, HandOff, RunInfo, ToolResults
from runguard.engine.guard import Controls, Guard
from runguard.engine.runs import Run
from runguard.policy.keywords import PolicySettings
from runguard.policy.settings import Policy
from runguard.providers.messages import TRANSFER

_UNNAMED: Final = "(model)"
_AGENT_LABEL: Final = "adk_agent_name"


@dataclass(slots=True)
class _AgentState:
    """What is known of one agent in one Runner: its last request, and whether it has given a final text since."""

    seen: tuple[int, bytes] = (0, b"")
    ended: bool = False
    sees_tools: bool = True  # False: the plugin guards the same run, and judges tools and hand-offs


@dataclass(slots=True)
class _GuardedRun:
    """One run as this model knows it."""

    invocation: Invocation
    agents: dict[str, _AgentState] = field(default_factory=dict)


class GuardedLlm(Controls, BaseLlm):
    """``LlmAgent(model=GuardedLlm("gemini-2.5-flash", max_usd=1.50))``.

    ``model``: a model of ADK, or the name of one. The keywords are those of ``RunGuardPlugin``. A stop raises its typed
    error; with ``on_stop="stop"`` it is a final answer with ``error_code="RUNGUARD_STOP"``. Limits apply to each run of
    the Runner, however many agents share the model.
    """

    _inner: BaseLlm = PrivateAttr()
    _guard: Guard = PrivateAttr()
    _alone: _GuardedRun | None = PrivateAttr(default=None)
    # the same in every process of the same program
    _number: int = PrivateAttr(default_factory=itertools.count(1).__next__)

    def __init__(self, model: BaseLlm | str, **policy: Unpack[PolicySettings]) -> None:
        inner = LLMRegistry.new_llm(model) if isinstance(model, str) else model
        if not isinstance(inner, BaseLlm):
            raise PolicyError(f"GuardedLlm({model!r}): give a model of google-adk, or the name of one")
        if isinstance(inner, GuardedLlm):
            raise PolicyError(f"GuardedLlm: '{inner.model}' is guarded already")
        super().__init__(model=inner.model)
        self._inner = inner
        self._guard = Guard(Policy.build(**{"on_stop": "raise", **policy}))
        self._guard.check_store()
        IN_USE.of_models.add(self._guard)
        wrap_adk()  # it must know the run that calls it

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
        """Connect to the inner model without a guard. The plugin books the usage of live runs."""
        return self._inner.connect(llm_request)

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if self._guard.policy.mode == "off":
            async with aclosing(self._inner.generate_content_async(llm_request, stream)) as answers:
                async for response in answers:
                    yield response
            return
        run, mine, state = "", tuple[ModelLayer, ...](), _AgentState()
        stop: Trip | None = None
        for is_last in (False, True):
            try:
                guarded, lane, agent, sees_tools = await self._place(llm_request)
                run, mine = guarded.invocation.run.info.run, (ModelLayer(self._guard, guarded.invocation, lane, agent),)
                state = guarded.agents.setdefault(lane, state)
                state.sees_tools = sees_tools
                stop = self._learn(guarded.invocation, state, lane, agent, llm_request) if sees_tools else None
            except Exception as fault:
                # without its layer nobody reserves for the call: try once more, then refuse it under a budget
                give_up = self._guard.give_up_call if is_last and not mine else self._guard.give_up
                stop = give_up("guarded model", fault, run)
            if mine or stop is not None:
                break
        if stop is None:
            with within(layers=(*HERE.get().layers, *mine)):
                asked = self._inner.generate_content_async(llm_request, stream)
            async with aclosing(asked) as answers:
                while True:
                    try:
                        # for each chunk: between two of them, other code uses this context
                        with within(layers=(*HERE.get().layers, *mine)):
                            response = await anext(answers)
                    except StopAsyncIteration:
                        return
                    try:
                        stop = self._read(response, state, mine)
                    except Exception as fault:
                        self._guard.fault("guarded model", fault, run)
                    if stop is not None:
                        break
                    yield response
        try:
            last = self._stopped(stop)
        except RunStoppedError:
            raise
        except Exception as fault:
            self._guard.faults.note("stopping", fault)
            last = LlmResponse(error_code=STOP_CODE, error_message=stop.rule)
        yield last

    def _read(self, response: LlmResponse, state: _AgentState, mine: tuple[ModelLayer, ...]) -> Trip | None:
        """Note whether an answer ends the agent's work. Return our own stop, decided further in or because of it."""
        if response.error_code == STOP_CODE and (stop := trip(response)) is not None and self._is_mine(stop):
            return stop
        if response.partial:
            return None
        calls = _calls_of(response.content)
        state.ended = not calls
        target = next((str((call.args or {}).get("agent_name") or "") for call in calls if call.name == TRANSFER), "")
        if not target or not state.sees_tools or not mine:
            return None
        run, agent = mine[0].invocation.run, mine[0].agent
        return _enforced(
            self._guard.check(HandOff(run.info.run, self._handoff_lane(run), agent, target, self._guard.clock()))
        )

    def _handoff_lane(self, run: Run) -> str:
        """Return the lane of the Runner, in which hand-offs are counted: each of its agents has a lane of its own."""
        chain = _runners()
        if len(chain) < 2:
            return ROOT_LANE
        lane = str(chain[0].number)
        if lane not in run.lanes:
            self._guard.open_lane(run, lane, ROOT_LANE, concurrent=False)
        return lane

    # ---- the run of a call ------------------------------------------------------------------------------------------

    async def _place(self, request: LlmRequest) -> tuple[_GuardedRun, str, str, bool]:
        """Return the run, the lane and the agent of a call, and whether this guard judges the tools' answers."""
        agent = (request.config.labels or {}).get(_AGENT_LABEL) or _UNNAMED
        chain = _runners()
        if not chain:
            if self._alone is None:
                self._alone = _guarded(self._guard.start(self._info(secrets.token_hex(8))))
            return self._alone, agent, agent, True
        stream, root = chain[0], chain[-1]
        guarded = root.guarded.get(self._guard) or await self._begin(root)
        lane = agent if stream is root else f"{stream.number}/{agent}"
        return guarded, lane, agent, all(one.registry is None for one in chain)

    async def _begin(self, root: RunnerStream) -> _GuardedRun:
        """Start a run at its first call, or resume a paused one."""
        guard, context = self._guard, root.context
        if context is None:
            info = self._info(secrets.token_hex(8), root)
            await guard.growth.recall(info)
            run = guard.start(info)
        else:
            history = history_of(context)
            run = await run_of(guard, self._info(f"{history.name}~{self._number}", root), history)
        guarded = _guarded(run)
        if root.guarded.setdefault(guard, guarded) is guarded:
            root.ends.append((guard, run.info.run, lambda: _end(guard, run, context)))
            if root.fault is not None:
                guard.faults.stop_after("runner", root.fault, run.info.run)
        return root.guarded[guard]  # type: ignore[no-any-return]

    def _info(self, name: str, root: RunnerStream | None = None) -> RunInfo:
        app, user, session = (root.app, root.user, root.session) if root is not None else ("", "", "")
        asked = input_of(root.context) if root is not None and root.context is not None else b""
        return RunInfo(name, app, user, session, at=self._guard.clock(), input=asked)

    def _is_mine(self, stop: Trip) -> bool:
        return any(own.id == stop.id for own in self._guard.trips)

    def _stopped(self, stop: Trip) -> LlmResponse:
        if self._guard.policy.on_stop == "raise":
            raise RunStoppedError.of(stop)
        return stop_response(stop, self._guard.stop_text(stop))

    # ---- answers of tools ------------------------------------------------------------------------------------------

    def _learn(
        self, invocation: Invocation, state: _AgentState, lane: str, agent: str, request: LlmRequest
    ) -> Trip | None:
        """Judge the answers at the end of a request, which came since the last request."""
        guard, run = self._guard, invocation.run
        if lane not in run.lanes:
            guard.open_lane(run, lane, ROOT_LANE, concurrent=False)
        if state.ended:
            state.ended = False
            stop = _enforced(guard.check(AgentEntered(run.info.run, lane, agent, guard.clock())))
            if stop is not None:
                return stop
        answers = _answers(guard, request.contents)
        mark = (len(request.contents), b"".join(answer.call for answer in answers))
        if not answers or mark == state.seen:  # the same request again is a retry
            return None
        state.seen = mark
        event = ToolResults(run.info.run, lane, agent, guard.clock(), "", answers)
        decision = guard.after(event)
        for detector in run.lanes[self._handoff_lane(run)].detectors:
            if HandOff in detector.sees and ToolResults in detector.sees:
                detector.observe(event)  # progress between two hand-offs
        return _enforced(decision)


def _guarded(run: Run) -> _GuardedRun:
    return _GuardedRun(Invocation(run.info.run, run, None, run.info.session, ""))


def _end(guard: Guard, run: Run, context: InvocationContext | None) -> None:
    """End a run whose stream is over, or keep it if it can be resumed."""
    history = history_of(context) if context is not None else None
    asked = history is not None and bool(history.questions)
    if run.unsure or not (asked or run.stopped is not None or (context is not None and context.is_resumable)):
        guard.end(run.info.run)
        return
    waits = history is not None and bool(history.questions - history.answered) and run.stopped is None
    guard.pauses.keep(run.info.run, waits=waits)


def _enforced(decision: Decision) -> Trip | None:
    return decision.trip if decision.action is Action.STOP and decision.enforced else None


def _runners() -> list[RunnerStream]:
    """Return the Runners at work around this code, the innermost first. Those that have ended pay for nothing more."""
    chain, stream = list[RunnerStream](), HERE.get().stream
    while stream is not None and stream.is_open:
        chain.append(stream)
        stream = stream.outer
    return chain


def _calls_of(content: types.Content | None) -> list[types.FunctionCall]:
    return (
        [part.function_call for part in (content.parts or []) if part.function_call is not None]
        if content is not None
        else []
    )


def _answers(guard: Guard, contents: list[types.Content]) -> list[Answer]:
    """Return the answers after the model's last content, each with its call, found by id or else by order."""
    responses: list[types.FunctionResponse] = []
    calls: list[types.FunctionCall] = []
    for content in reversed(contents):
        if content.role == "model":
            calls = _calls_of(content)
            break
        responses[:0] = [part.function_response for part in content.parts or [] if part.function_response is not None]
    answers = []
    for response in responses:
        call = next(
            (c for c in calls if c.name == response.name and (c.id == response.id or not c.id or not response.id)), None
        )
        if call is None:
            continue
        calls.remove(call)
        if call.name == TRANSFER:
            continue  # a hand-off, counted when the model asked for it
        name, value = call.name or "", response.response
        answers.append(
            Answer(name, guard.tools.fingerprint(name, call.args or {}), value, response.id or "", args=call.args)
        )
    return answers
