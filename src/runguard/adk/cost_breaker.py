"""``ADKCostBreaker``: the breaker attached agent by agent, for code that wires callbacks by hand.

It is the same guard as the plugin, fed by agent callbacks instead of plugin hooks. Your own callbacks stay: the breaker
runs first before a call and last after it. Runs of different sessions never affect each other. A trip ends its run
cleanly and then raises a ``RuntimeError`` to the code that iterates over the run.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
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
from runguard.adk.plugin import RunGuardPlugin, hook
from runguard.adk.runs import HERE, Invocation, lane_of
from runguard.adk.tool_hooks import error_text
from runguard.core.breaker import BreakerState
from runguard.core.decision import Action, Finding, Trip
from runguard.core.errors import RunStoppedError
from runguard.core.events import ModelCall, RunInfo
from runguard.core.identity import Newest
from runguard.core.rules.limits import Growth
from runguard.engine.runs import Run
from runguard.providers.messages import TRANSFER

__all__ = ["ADKCostBreaker"]

_COUNTS_KEPT: Final = 10_000


class ADKCostBreaker:
    """Attach with ``install_on_agent``; share one instance over the agents of a pipeline.

    ``state`` and ``trip_reason`` describe the current run and, between runs, the last one. A trip opens the breaker.
    After ``half_open_reset_seconds``, or as soon as another run starts, it is half open. A run that ends without a trip
    closes it. An open breaker refuses the input that tripped it, submitted again by the same user in a new session;
    every other run starts with fresh counters. ``reset()`` admits it again at once, after the cause is fixed.

    It trips where an agent is entered again inside its own chain of delegations. ``max_reentries=None`` allows that, as
    the plugin does.

    Attach with ``install_on_agent`` only: it sets eight callbacks. The four around tools and agents alone do not
    stop the model.

    For alerts without stops, use ``mode="shadow"`` with ``on_trip=``; ``growth_ratio`` is the figure to log.
    """

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
        **policy: Any,
    ) -> None:
        self.max_identical_tool_results = max_identical_tool_results
        self.max_delegation_depth = max_delegation_depth
        self.max_event_cost_ratio = max_event_cost_ratio
        self.cost_baseline_events = cost_baseline_events
        self.max_concurrent_agents = max_concurrent_agents
        self.half_open_reset_seconds = half_open_reset_seconds
        self._plugin = RunGuardPlugin(
            max_identical_tool_results=max_identical_tool_results,
            max_delegation_depth=max_delegation_depth,
            max_event_cost_ratio=max_event_cost_ratio,
            cost_baseline_events=cost_baseline_events,
            max_concurrent_agents=max_concurrent_agents,
            max_reentries=max_reentries,
            half_open_reset_seconds=float(half_open_reset_seconds),
            on_stop=on_stop,
            **policy,
        )
        self._plugin.name = name
        patching.watch_agents(self._plugin.invocations)
        self._responses = count(1)
        self._forgiven = ""  # the last trip that reset() took back
        self._event_token_counts: list[int] = []  # the first ones and the latest ones, bounded
        self._is_reported = False  # growth of recorded tokens was reported since the last reset
        self._resubmissions = Resubmissions()
        self._last_started = 0.0  # when the latest run started
        self._last_trips: Sequence[Trip] = ()  # and its trips
        self._last_info: RunInfo | None = None  # and whose it was

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

    @property
    def trip_reason(self) -> str | None:
        trip = self._last_trip()
        return str(trip) if trip is not None else None

    @property
    def growth_ratio(self) -> float | None:
        """How many times the tokens of the first ``cost_baseline_events`` responses the latest ones took; None
        before there are enough.

        Of the responses recorded with ``record_event_tokens``; without any, of the current run's prompts, the
        agent that grew most.
        """
        counts, wanted = self._event_token_counts, self.cost_baseline_events
        if counts:
            first = sum(counts[:wanted])
            return sum(counts[-wanted:]) / first if len(counts) >= 2 * wanted and first else None
        run = self._current_run()
        rules = (
            [rule for lane in run.lanes.values() for rule in lane.detectors if isinstance(rule, Growth)]
            if run is not None
            else []
        )
        return max((ratio for rule in rules for ratio in rule.ratios().values()), default=None)

    def _last_trip(self) -> Trip | None:
        """The trip in force: the latest one, unless ``reset()`` or a clean run came after it."""
        trip = next((trip for trip in reversed(self._plugin.trips) if trip.rule != REFUSED), None)
        if trip is None or trip.id == self._forgiven:
            return None
        ended_clean = self._current_run() is None and not self._last_trips and self._last_started > trip.at
        return None if ended_clean else trip

    def _current_run(self) -> Run | None:
        frame = HERE.get().tool
        if frame is not None and frame.guard is self._plugin.guard:
            return frame.invocation.run
        return next(reversed(list(self._plugin.guard.runs.values())), None)

    def reset(self) -> None:
        """Forget the last trip, the refused inputs, the recorded token counts, and how the prompts of the last
        session have grown.

        For use between sessions. Other runs need no reset: each starts with fresh counters.
        """
        trips = [trip for trip in self._plugin.trips if trip.rule != REFUSED]
        self._forgiven = trips[-1].id if trips else ""
        self._resubmissions.clear()
        self._event_token_counts.clear()
        self._is_reported = False
        if self._last_info is not None:
            self._plugin.guard.growth.forget(self._last_info)

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
        """What ADK gets from a callback that failed."""
        return self._plugin.instead_of(hook, error, *given)

    @hook
    async def before_agent_callback(self, callback_context: CallbackContext) -> types.Content | None:
        agent = callback_context._invocation_context.agent
        if not isinstance(agent, BaseAgent):
            return None
        invocation, guard = (
            await self._plugin.starter.invocation_of(callback_context._invocation_context),
            self._plugin.guard,
        )
        run = invocation.run
        if run.trips is not self._last_trips and run.stopped is None:
            now = guard.clock()
            refused = self._resubmissions.refusal(
                invocation, callback_context._invocation_context, guard.trips, now, self.half_open_reset_seconds
            )
            if refused is not None:
                guard.stop(run, ModelCall(run.info.run, agent.name, "", now), refused)
        self._last_started, self._last_trips, self._last_info = run.info.at, run.trips, run.info
        if isinstance(agent, LlmAgent) and run.stopped is not None:
            return None  # its model hook ends it with an event that can carry the trip; content alone cannot
        return await self._plugin.before_agent_callback(agent=agent, callback_context=callback_context)

    @hook
    async def after_agent_callback(self, callback_context: CallbackContext) -> types.Content | None:
        return None  # nothing counts enters and leaves: ADK does not report every leave

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
            ic = callback_context._invocation_context
            invocation = await self._plugin.starter.invocation_of(ic)
            invocation.batches[lane_of(self._plugin.guard, invocation, ic.branch, ic.isolation_scope)] = str(
                next(self._responses)
            )
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
        return await self._plugin.before_tool_callback(tool=tool, tool_args=args, tool_context=tool_context)

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
        try:
            self._plugin.tool_hooks.judge_time()
            if tool.is_long_running and not tool_response:
                return None  # the answer comes later, from outside
            return self._judge(await self._plugin.starter.invocation_of(ic), tool, tool_context, tool_response)
        except Exception as error:
            self._plugin.stopper.fault("after_tool", error, ic)
            return None

    def _judge(
        self, invocation: Invocation, tool: BaseTool, tool_context: ToolContext, tool_response: Any
    ) -> dict[str, Any] | None:
        ic = tool_context._invocation_context
        author = getattr(ic.agent, "name", "")
        call = invocation.calls.get(tool_context.function_call_id or "")
        target = tool_context.actions.transfer_to_agent
        if call is not None and target:  # any tool that sets the action hands over, not only ADK's own
            self._plugin.reader.judge_transfer(invocation, call.lane, author, target)
        if tool.name == TRANSFER:
            invocation.calls.pop(tool_context.function_call_id or "", None)
            return None
        response = tool_response if isinstance(tool_response, dict) else {"result": tool_response}
        answer = types.FunctionResponse(id=tool_context.function_call_id, name=tool.name, response=response)
        before = answer.response
        waiting = {
            *(tool_context.actions.requested_tool_confirmations or ()),
            *(tool_context.actions.requested_auth_configs or ()),
        }
        self._plugin.reader.judge_answers(invocation, [answer], author=author, waiting=waiting, hands_over=bool(target))
        return answer.response if answer.response is not before else None

    # ---- by hand ----------------------------------------------------------------------------------------------------

    def record_event_tokens(self, token_count: int) -> None:
        """Record the tokens of one model response. Raises ``CostGrowthError`` once the latest took
        ``max_event_cost_ratio`` times the first.

        Works on an attached breaker too: the current run is stopped as well. In shadow mode it reports the
        growth once and raises nothing.
        """
        counts = self._event_token_counts
        counts.append(token_count)
        if len(counts) > _COUNTS_KEPT:  # keep the first ones and the latest half
            del counts[self.cost_baseline_events : _COUNTS_KEPT // 2]
        ratio = self.growth_ratio
        if ratio is not None and ratio >= self.max_event_cost_ratio:
            self._trip(
                f"the last {self.cost_baseline_events} responses took {ratio:.1f} times the tokens of the "
                f"first, limit {self.max_event_cost_ratio:g}"
            )

    def _trip(self, reason: str) -> None:
        guard, ratio = self._plugin.guard, self.growth_ratio or 0.0
        if self._is_reported and guard.policy.mode != "enforce":
            return
        self._is_reported = True
        finding = Finding(
            "growth",
            Action.STOP,
            round(ratio, 2),
            self.max_event_cost_ratio,
            "times the first tokens",
            "run",
            detail=reason,
        )
        now, run = guard.clock(), self._current_run()
        if run is not None:
            trip = run.stopped or guard.stop(run, ModelCall(run.info.run, "", "", now), finding)
        else:  # recorded outside any run: a run of its own carries the trip
            info = RunInfo(f"recorded-{next(self._responses)}", at=now)
            trip = guard.stop(guard.start(info), ModelCall(info.run, "", "", now), finding)
            guard.end(info.run)
        if trip is not None and trip.enforced:
            raise RunStoppedError.of(trip)


async def _call(callback: Callable[..., Any], **arguments: Any) -> Any:
    """Call the way ADK does: by keyword, or by position where the names differ."""
    try:
        inspect.signature(callback).bind(**arguments)
    except TypeError:
        result = callback(*arguments.values())
    else:
        result = callback(**arguments)  # outside the try: a TypeError of the callback's own must not call it twice
    return await result if inspect.isawaitable(result) else result


# ---- The same input again

REFUSED: Final = "breaker"  # the rule of a refusal
_INPUTS_KEPT: Final = 1_000


class Resubmissions:
    """Refuses an input that tripped a breaker a moment ago: the same document in a new session would trip it again.

    An input is the first message of a session: app, user, root agent and content. A later message is never the same
    input, because the history before it differs.
    """

    def __init__(self) -> None:
        self._runs = Newest[str, str](_INPUTS_KEPT)  # digest of the input -> id of its latest run

    def refusal(
        self, invocation: Invocation, ic: InvocationContext, trips: Sequence[Trip], now: float, seconds: float
    ) -> Finding | None:
        """Why this run must not start, or None. A refused run is not remembered, so the time counts from the trip."""
        digest = _digest(invocation, ic)
        if not digest:
            return None
        previous = self._runs.get(digest)
        tripped = next((trip for trip in reversed(trips) if trip.run_id == previous), None) if previous else None
        wait = tripped.at + seconds - now if tripped is not None else 0.0
        if tripped is None or wait <= 0:
            self._runs[digest] = invocation.run.info.run
            self._runs.move_to_end(digest)
            return None
        detail = f"the same input was stopped by {tripped.rule}; it is refused for {wait:.0f} s more, or until reset()"
        evidence = ({"retry_after": f"{wait:.3f}"},)
        return Finding(
            REFUSED,
            Action.STOP,
            round(now - tripped.at, 3),
            seconds,
            "seconds since the trip",
            "run",
            detail=detail,
            evidence=evidence,
        )

    def clear(self) -> None:
        self._runs.clear()


def _digest(invocation: Invocation, ic: InvocationContext) -> str:
    if ic.user_content is None or sum(event.author == "user" for event in ic.session.events) > 1:
        return ""
    parts = (ic.app_name, ic.user_id, invocation.root_agent, ic.user_content.model_dump_json(exclude_none=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
