"""``ADKCostBreaker``: the breaker attached agent by agent, for code that wires callbacks by hand.

It is the same guard as the plugin, fed by agent callbacks instead of plugin hooks. Your own callbacks stay: the breaker
runs first before a call and last after it. Runs of different sessions never affect each other. A trip ends its run
cleanly and then raises a ``RuntimeError`` to the code that iterates over the run.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import Any, Final, Literal

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.adk import patching
from runguard.adk.events import waiting_in
from runguard.adk.plugin import Generation, RunGuardPlugin, hook
from runguard.adk.runs import HERE, Invocation, SessionKey, lane_of
from runguard.adk.stops import announce
from runguard.adk.tool_hooks import error_text
from runguard.core.breaker import BreakerState
from runguard.core.decision import Action, Finding, Trip
from runguard.core.errors import InvalidValueError, RunStoppedError
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.identity import LruDict
from runguard.core.rules.limits import Growth
from runguard.engine.calls import surplus
from runguard.engine.guard import Guard
from runguard.engine.runs import Run, blames_input, input_name
from runguard.providers.messages import TRANSFER

__all__ = ["ADKCostBreaker"]

_log: Final = logging.getLogger("runguard")
_COUNTS_KEPT: Final = 1_000
_SESSIONS_KEPT: Final = 1_024
_RUNS_KEPT: Final = 10_000
REFUSED: Final = "breaker"  # the rule of a refusal
_NO_SESSION: Final[SessionKey] = ("", "", "")


@dataclass(slots=True)
class RecordedTokens:
    """The tokens that were recorded for one session: the first counts and the latest ones, bounded."""

    counts: list[int] = field(default_factory=list)
    is_reported: bool = False  # their growth

    def add(self, count: int, baseline: int) -> None:
        self.counts.append(count)
        most = max(_COUNTS_KEPT, 4 * baseline)
        if len(self.counts) > most:  # keep the first ones and the latest half
            del self.counts[baseline : most // 2]

    def ratio(self, baseline: int) -> float | None:
        """How many times the first counts the latest ones are; None before there are enough."""
        first = sum(self.counts[:baseline])
        return sum(self.counts[-baseline:]) / first if len(self.counts) >= 2 * baseline and first else None


@dataclass(init=False, repr=False)
class ADKCostBreaker:
    """Attach with ``install_on_agent``; share one instance over the agents of a pipeline.

    ``state`` and ``trip_reason`` describe the current run and, between runs, the last one. A trip opens the breaker.
    After ``half_open_reset_seconds``, or as soon as another run starts, it is half open. A run that ends without a trip
    closes it. An open breaker refuses the input that tripped it, submitted again by the same user; every other run
    starts with fresh counters. A short message in the middle of a conversation, such as "continue", is never the same
    input. ``reset()``, or setting ``state`` to CLOSED, admits it again at once, after the cause is fixed.

    It trips where an agent is entered again inside its own chain of delegations. ``max_reentries=None`` allows that, as
    the plugin does.

    It is a dataclass. Limits that are assigned later hold for runs that start from then on. A copy has the same limits
    and fresh counters. ``settings`` holds all other keywords, which are those of ``RunGuardPlugin``.

    Attach with ``install_on_agent`` where you can: it sets eight callbacks. Of an agent that has only the four around
    tools and agents, the callback that sees a trip ends the run at once, with calls that run beside it. Such an agent
    counts for ``max_concurrent_agents`` as long as it works.

    For alerts without stops, use ``mode="shadow"`` with ``on_trip=``; ``growth_ratio`` is the figure to log.
    """

    max_identical_tool_results: int = 3
    max_delegation_depth: int = 5
    max_event_cost_ratio: float = 3.0
    cost_baseline_events: int = 5
    max_concurrent_agents: int = 20
    half_open_reset_seconds: float = 60
    max_reentries: int | None = field(default=1, kw_only=True)
    name: str = field(default="runguard_breaker", kw_only=True)
    on_stop: Literal["stop", "raise"] = field(default="raise", kw_only=True)
    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __init__(
        self,
        max_identical_tool_results: int = 3,
        max_delegation_depth: int = 5,
        max_event_cost_ratio: float = 3.0,
        cost_baseline_events: int = 5,
        max_concurrent_agents: int = 20,
        half_open_reset_seconds: float = 60,
        *,
        max_reentries: int | None = 1,
        name: str = "runguard_breaker",
        on_stop: Literal["stop", "raise"] = "raise",
        settings: Mapping[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        self.max_identical_tool_results, self.max_delegation_depth = max_identical_tool_results, max_delegation_depth
        self.max_event_cost_ratio, self.cost_baseline_events = max_event_cost_ratio, cost_baseline_events
        self.max_concurrent_agents, self.half_open_reset_seconds = max_concurrent_agents, half_open_reset_seconds
        self.max_reentries, self.name, self.on_stop = max_reentries, name, on_stop
        self.settings = {**(settings or {}), **policy}
        plugin = RunGuardPlugin(**self._policy())
        plugin.name = name
        patching.IN_USE.per_agent.add(plugin.invocations)
        self._responses = count(1)
        self._forgiven = ""  # the last trip that reset() took back
        self._tokens = LruDict[SessionKey, RecordedTokens](_SESSIONS_KEPT)
        self._lock = threading.Lock()
        self._inputs = LruDict[str, str](_RUNS_KEPT)  # by run; "" where it cannot be known again
        self._latest: Run | None = None  # the run that started last
        self._plugin = plugin  # last: from now on an assigned limit is a change of the policy

    def _policy(self, **changed: Any) -> Any:
        """Return the settings of the plugin, with ``changed`` ones in place of those of this breaker."""
        given = {one.name: getattr(self, one.name) for one in fields(self)} | changed
        others = given.pop("settings")
        del given["name"]
        return {**given, "half_open_reset_seconds": float(given["half_open_reset_seconds"]), **others}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__ and "_plugin" in self.__dict__ and value != getattr(self, name):
            if name != "name":
                self._plugin.replace_policy(**self._policy(**{name: value}))
                patching.IN_USE.per_agent.add(self._plugin.invocations)
            else:
                self._plugin.name = value
        elif "_plugin" in self.__dict__ and not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"{name} = {value!r}: no such field; other settings are set with settings={{...}}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        # without ``settings``, which may hold secrets
        shown = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.name != "settings"]
        return f"ADKCostBreaker({', '.join(shown)}, state={self.state!r}, trip_reason={self.trip_reason!r})"

    def __copy__(self) -> "ADKCostBreaker":
        """Return a breaker with the same limits and fresh counters."""
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ADKCostBreaker":
        """Return one copy for all copied agents: they share it as the originals share this one."""
        made = memo[id(self)] = replace(self)
        return made

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def trips(self) -> list[Any]:
        return self._plugin.trips

    @property
    def state(self) -> BreakerState:
        run, trip = self._current_run(), self._last_trip()
        if trip is None:
            return BreakerState.CLOSED
        if run is not None:
            return BreakerState.OPEN if trip in run.trips else BreakerState.HALF_OPEN
        age = self._plugin.guard.clock() - trip.at
        return BreakerState.OPEN if age < self.half_open_reset_seconds else BreakerState.HALF_OPEN

    @state.setter
    def state(self, state: BreakerState) -> None:
        if state is not BreakerState.CLOSED:
            raise InvalidValueError(
                f"state = {state!r}: only BreakerState.CLOSED can be set, which resets the breaker; to refuse runs, "
                "lower a limit"
            )
        self.reset()

    @property
    def trip_reason(self) -> str | None:
        trip = self._last_trip()
        return str(trip) if trip is not None else None

    @trip_reason.setter
    def trip_reason(self, reason: None) -> None:
        if reason is not None:
            raise InvalidValueError(f"trip_reason = {reason!r}: only None can be set, which resets the breaker")
        self.reset()

    @property
    def growth_ratio(self) -> float | None:
        """How many times the tokens of the first ``cost_baseline_events`` responses the latest ones took; None
        before there are enough.

        Of the responses recorded with ``record_event_tokens`` for the session at hand; without any, of the current
        run's prompts, the agent that grew most.
        """
        tokens = self._tokens_at_hand()
        if tokens is not None:
            return tokens.ratio(self.cost_baseline_events)
        run = self._current_run()
        rules = (
            [rule for lane in run.lanes.values() for rule in lane.detectors if isinstance(rule, Growth)]
            if run is not None
            else []
        )
        return max((ratio for rule in rules for ratio in rule.ratios().values()), default=None)

    @property
    def _event_token_counts(self) -> list[int]:
        """What was recorded for the session at hand."""
        tokens = self._tokens_at_hand()
        return tokens.counts if tokens is not None else []

    def _last_trip(self) -> Trip | None:
        """Return the trip in force: the latest one, unless ``reset()`` or a clean run came after it."""
        trip = next((trip for trip in reversed(self._plugin.trips) if trip.rule != REFUSED), None)
        if trip is None or trip.id == self._forgiven:
            return None
        latest = self._latest
        is_clean = latest is not None and not latest.trips and latest.info.at > trip.at
        return None if is_clean and self._current_run() is None else trip

    def _current_run(self) -> Run | None:
        """Return the run at hand, or the one that started last."""
        return self._run_at_hand() or next(self._runs(), None)

    def _guards(self) -> list[Guard]:
        """Return the guard of the limits in force, and those of replaced limits while runs go on under them."""
        return [one.guard for one in self._plugin.generations]

    def _runs(self) -> Iterator[Run]:
        """Return the runs in flight, the latest first."""
        return (run for guard in self._guards() for run in reversed(list(guard.runs.values())))

    def _run_of_tool(self) -> Run | None:
        """Return the run whose tool this code is a part of."""
        frame, guards = HERE.get().tool, self._guards()
        while frame is not None:
            run = frame.invocation.run
            if frame.guard in guards and run.info.run in frame.guard.runs:
                return run
            frame = frame.outer
        return None

    def _run_at_hand(self) -> Run | None:
        """Return the run whose tool this code is a part of, or whose events it reads."""
        session = HERE.get().session
        return self._run_of_tool() or next((run for run in self._runs() if _key(run.info) == session), None)

    def _session_at_hand(self) -> SessionKey | None:
        run = self._run_of_tool()
        return _key(run.info) if run is not None else HERE.get().session

    def _tokens_at_hand(self) -> RecordedTokens | None:
        """Return what was recorded for the session at hand; without a session, what was recorded last."""
        session = self._session_at_hand()
        with self._lock:
            return self._tokens.get(session) if session is not None else next(reversed(self._tokens.values()), None)

    def reset(self) -> None:
        """Forget the last trip and the refused inputs, and of the session at hand the recorded token counts and how
        its prompts have grown; of all sessions where there is none at hand.

        For use between sessions. Other runs need no reset: each starts with fresh counters.
        """
        trips = [trip for trip in self._plugin.trips if trip.rule != REFUSED]
        self._forgiven = trips[-1].id if trips else ""
        session = self._session_at_hand()
        with self._lock:
            if session is None:
                self._tokens.clear()
            else:
                self._tokens.pop(session, None)
        if session is not None:
            self._plugin.guard.growth.forget(_info("", session))
        elif self._latest is not None:
            self._plugin.guard.growth.forget(self._latest.info)

    # ---- attaching --------------------------------------------------------------------------------------------------

    def install_on_agent(self, agent: BaseAgent) -> BaseAgent:
        """Attach to one agent, beside the callbacks it has. Attaching twice is the same as once. Returns the agent."""
        if any(getattr(callback, "__self__", None) is self for callback in agent.canonical_before_agent_callbacks):
            return agent
        agent.before_agent_callback = [self.before_agent_callback, *agent.canonical_before_agent_callbacks]
        agent.after_agent_callback = [*agent.canonical_after_agent_callbacks, self.after_agent_callback]
        if isinstance(agent, LlmAgent):
            agent.before_model_callback = [self.before_model_callback, *agent.canonical_before_model_callbacks]
            agent.after_model_callback = [self.after_model_callback, *agent.canonical_after_model_callbacks]
            agent.on_model_error_callback = [self.on_model_error_callback, *agent.canonical_on_model_error_callbacks]
            agent.before_tool_callback = [self.before_tool_callback, *agent.canonical_before_tool_callbacks]
            agent.on_tool_error_callback = [self.on_tool_error_callback, *agent.canonical_on_tool_error_callbacks]
            # A list of callbacks ends at the first that answers: run yours inside ours, to see what they made of the
            # result.
            agent.after_tool_callback = self._last(list(agent.canonical_after_tool_callbacks))
        return agent

    def _last(self, theirs: list[Callable[..., Any]]) -> Callable[..., Any]:
        async def after_tool(
            tool: BaseTool, args: dict[str, Any], tool_context: ToolContext, tool_response: Any
        ) -> Any:
            changed = None
            for callback in theirs:
                changed = await _call(
                    callback, tool=tool, args=args, tool_context=tool_context, tool_response=tool_response
                )
                if changed is not None:
                    break
            final = tool_response if changed is None else changed
            seen = await self.after_tool_callback(tool, args, tool_context, final)
            return changed if seen is None else seen

        return after_tool

    # ---- the callbacks ----------------------------------------------------------------------------------------------

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """Return what ADK gets from a callback that failed."""
        return self._plugin.instead_of(hook, error, *given)

    async def _place(self, ic: InvocationContext) -> tuple[Generation, Invocation, str]:
        """Return the limits under which the run of a callback began, its invocation and the lane."""
        own = self._plugin.generation_of(ic.invocation_id)
        invocation = await own.starter.invocation_of(ic)
        return own, invocation, lane_of(own.guard, invocation, ic.branch, ic.isolation_scope)

    def _is_wired(self, agent: BaseAgent) -> bool:
        """Return whether our model callback sees the agent's model calls, if it makes any."""
        return not isinstance(agent, LlmAgent) or any(
            getattr(one, "__self__", None) is self for one in agent.canonical_before_model_callbacks
        )

    def _end_if_unwired(self, own: Generation, invocation: Invocation, ic: InvocationContext, lane: str) -> None:
        """End a stopped run here, where the agent has no model callback of ours that would end it."""
        trip, agent = invocation.stop_in(lane), ic.agent
        if trip is None or own.guard.policy.mode != "enforce" or not isinstance(agent, LlmAgent):
            return
        # a function around our callback cannot be seen, but it has announced the agent's model call
        if not self._is_wired(agent) and all(flight.agent != agent.name for flight in invocation.flights.values()):
            announce(trip, own.invocations)
            raise patching.halt(ic.invocation_id, trip, own.guard.stop_text(trip))

    @hook
    async def before_agent_callback(self, callback_context: CallbackContext) -> types.Content | None:
        ic = callback_context._invocation_context
        agent = ic.agent
        if not isinstance(agent, BaseAgent):
            return None
        own, invocation, lane = await self._place(ic)
        run = invocation.run
        if run.info.run not in self._inputs:
            self._begin(own.guard, run)
        if isinstance(agent, LlmAgent) and run.stopped is not None:
            self._end_if_unwired(own, invocation, ic, invocation.lane)
            return None  # its model hook ends it with an event that can carry the trip; content alone cannot
        if not self._is_wired(agent):
            self._take_place(own, invocation, ic, lane)
        skipped = await self._plugin.before_agent_callback(agent=agent, callback_context=callback_context)
        if skipped is not None:
            self._end_if_unwired(own, invocation, ic, lane)
        return skipped

    def _begin(self, guard: Guard, run: Run) -> None:
        """Refuse a run that begins with an input that tripped the breaker a moment ago: it would trip it again."""
        name = self._inputs[run.info.run] = input_name(run.info) if run.info.input else ""
        self._latest, now = run, guard.clock()
        tripped = self._trip_on(name) if name and run.stopped is None else None
        wait = tripped.at + self.half_open_reset_seconds - now if tripped is not None else 0.0
        if tripped is None or wait <= 0:
            return
        detail = f"the same input was stopped by {tripped.rule}; it is refused for {wait:.0f} s more, or until reset()"
        refused = Finding(
            REFUSED,
            Action.STOP,
            round(now - tripped.at, 3),
            self.half_open_reset_seconds,
            "seconds since the trip",
            "run",
            detail=detail,
            evidence=({"retry_after": f"{wait:.3f}"},),
        )
        guard.stop(run, ModelCall(run.info.run, ROOT_LANE, "", now), refused)

    def _trip_on(self, name: str) -> Trip | None:
        """Return the latest trip of a run on this input since ``reset()``, or None."""
        for trip in reversed(self._plugin.trips):
            if trip.id == self._forgiven:
                return None
            if blames_input(trip) and self._inputs.get(trip.run_id) == name:
                return trip
        return None

    def _take_place(self, own: Generation, invocation: Invocation, ic: InvocationContext, lane: str) -> None:
        """Count an agent whose model calls are not seen as one call in flight, until it leaves or its task ends."""
        guard, task, slots = own.guard, asyncio.current_task(), invocation.run.slots
        if task is None or guard.policy.queues or slots.take(task):
            return
        event = ModelCall(invocation.run.info.run, lane, getattr(ic.agent, "name", ""), guard.clock())
        guard.found(event, surplus(event, len(slots.holders) + 1, guard.policy.in_flight))
        self._end_if_unwired(own, invocation, ic, lane)

    @hook
    async def after_agent_callback(self, callback_context: CallbackContext) -> types.Content | None:
        """Free the place of an agent whose model calls are not seen. ADK does not report each agent that leaves."""
        ic = callback_context._invocation_context
        if isinstance(ic.agent, LlmAgent) and not self._is_wired(ic.agent):
            own, invocation, _ = await self._place(ic)
            own.guard.free_slot(invocation.run.info.run)
        return None

    @hook
    async def before_model_callback(
        self, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        return await self._plugin.before_model_callback(callback_context=callback_context, llm_request=llm_request)

    @hook
    async def after_model_callback(
        self, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> LlmResponse | None:
        await self._plugin.after_model_callback(callback_context=callback_context, llm_response=llm_response)
        if not llm_response.partial:
            _, invocation, lane = await self._place(callback_context._invocation_context)
            invocation.batches[lane] = str(next(self._responses))
        return None

    @hook
    async def on_model_error_callback(
        self, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        return await self._plugin.on_model_error_callback(
            callback_context=callback_context, llm_request=llm_request, error=error
        )

    @hook
    async def before_tool_callback(
        self, tool: BaseTool, args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        refused = await self._plugin.before_tool_callback(tool=tool, tool_args=args, tool_context=tool_context)
        if refused is not None:
            await self._end_at_tool(tool_context)
        return refused

    @hook
    async def on_tool_error_callback(
        self, tool: BaseTool, args: dict[str, Any], tool_context: ToolContext, error: Exception
    ) -> dict[str, Any] | None:
        answer = await self._plugin.on_tool_error_callback(
            tool=tool, tool_args=args, tool_context=tool_context, error=error
        )
        # ADK answers a tool that does not exist by itself, past every after-hook
        if answer is None and type(tool) is BaseTool:
            await self.after_tool_callback(tool, args, tool_context, {"error": error_text(error)})
        return answer

    @hook
    async def after_tool_callback(
        self, tool: BaseTool, args: dict[str, Any], tool_context: ToolContext, tool_response: Any
    ) -> dict[str, Any] | None:
        """Judge what the model will see of this call; a nudge comes back as a changed answer."""
        ic = tool_context._invocation_context
        own = self._plugin.generation_of(ic.invocation_id)
        try:
            own.tool_hooks.judge_time()
            if tool.is_long_running and not tool_response:
                return None  # the answer comes later, from outside
            changed = self._judge(own, await own.starter.invocation_of(ic), tool, tool_context, tool_response)
        except Exception as error:
            own.stopper.fault("after_tool", error, ic)
            return None
        await self._end_at_tool(tool_context)
        return changed

    async def _end_at_tool(self, tool_context: ToolContext) -> None:
        ic = tool_context._invocation_context
        own, invocation, lane = await self._place(ic)
        self._end_if_unwired(own, invocation, ic, lane)

    def _judge(
        self, own: Generation, invocation: Invocation, tool: BaseTool, tool_context: ToolContext, tool_response: Any
    ) -> dict[str, Any] | None:
        call_id, actions = tool_context.function_call_id or "", tool_context.actions
        author, target = getattr(tool_context._invocation_context.agent, "name", ""), actions.transfer_to_agent
        call = invocation.calls.get(call_id)
        if call is not None and target:  # any tool that sets the action hands over, not only ADK's own
            own.reader.judge_transfer(invocation, call.lane, author, target)
        if tool.name == TRANSFER:
            invocation.calls.pop(call_id, None)
            return None
        response = tool_response if isinstance(tool_response, dict) else {"result": tool_response}
        answer = types.FunctionResponse(id=tool_context.function_call_id, name=tool.name, response=response)
        before = answer.response
        own.reader.judge_answers(
            invocation, [answer], author=author, waiting=waiting_in(actions), hands_over=bool(target)
        )
        return answer.response if answer.response is not before else None

    # ---- by hand ----------------------------------------------------------------------------------------------------

    def record_event_tokens(self, token_count: int, *, session: SessionKey | None = None) -> None:
        """Record the tokens of one model response. Raises ``CostGrowthError`` once the latest of a session took
        ``max_event_cost_ratio`` times its first.

        The session is the one whose events this code reads. Code that gets the events from elsewhere names it:
        ``session=(app_name, user_id, session_id)``. Where it is not known while runs are in flight, the growth is only
        logged.

        Works on an attached breaker too: the session's run is stopped as well. In shadow mode it reports the growth
        once and raises nothing.
        """
        before = HERE.get()
        if session is not None:
            HERE.set(before._replace(tool=None, session=session))
        try:
            key = self._session_at_hand() or _NO_SESSION
            with self._lock:
                tokens = self._tokens[key] = self._tokens.get(key) or RecordedTokens()
                tokens.add(token_count, self.cost_baseline_events)
            ratio = tokens.ratio(self.cost_baseline_events)
            if ratio is None or ratio < self.max_event_cost_ratio:
                return
            self._trip(
                f"the last {self.cost_baseline_events} responses took {ratio:.1f} times the tokens of the "
                f"first, limit {self.max_event_cost_ratio:g}"
            )
        finally:
            HERE.set(before)

    def _trip(self, reason: str) -> None:
        session, tokens, ratio = self._session_at_hand(), self._tokens_at_hand(), self.growth_ratio or 0.0
        guard, run = self._plugin.guard, self._run_at_hand()
        is_known = run is not None or next(self._runs(), None) is None
        if tokens is None or (tokens.is_reported and (guard.policy.mode != "enforce" or not is_known)):
            return
        tokens.is_reported = True
        if not is_known:
            _log.warning(
                "runguard.growth_of_no_session: %s. record_event_tokens() was not called where the events of a run are "
                "read, so no run is stopped; name the session with session=(app_name, user_id, session_id)",
                reason,
            )
            return
        finding = Finding(
            "growth",
            Action.STOP,
            round(ratio, 2),
            self.max_event_cost_ratio,
            "times the first tokens",
            "run",
            detail=reason,
        )
        now = guard.clock()
        if run is not None:
            guard = next(one for one in self._guards() if run.info.run in one.runs)
            trip = run.stopped or guard.stop(run, ModelCall(run.info.run, "", "", now), finding)
        else:  # recorded outside any run: a run of its own carries the trip
            info = _info(f"recorded-{next(self._responses)}", session or _NO_SESSION, now)
            trip = guard.stop(guard.start(info), ModelCall(info.run, "", "", now), finding)
            guard.end(info.run)
        if trip is not None and trip.enforced:
            raise RunStoppedError.of(trip)


def _key(info: RunInfo) -> SessionKey:
    return info.app, info.user, info.session


def _info(run: str, session: SessionKey, at: float = 0.0) -> RunInfo:
    return RunInfo(run, *session, at=at)


async def _call(callback: Callable[..., Any], **arguments: Any) -> Any:
    """Call the way ADK does: by keyword, or by position where the names differ."""
    try:
        inspect.signature(callback).bind(**arguments)
    except TypeError:
        result = callback(*arguments.values())
    else:
        result = callback(**arguments)  # outside the try: a TypeError of the callback's own must not call it twice
    return await result if inspect.isawaitable(result) else result
