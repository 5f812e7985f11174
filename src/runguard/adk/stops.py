"""Carrying out a stop: at a model call, at an agent, after a fault of the guard itself, and for loops that ADK cannot
end.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk import runners
from runguard.adk.invocations import Invocation
from runguard.adk.live import stored_once
from runguard.adk.stop_events import Halt, mark_stop, may_escalate, refusal, stop_content, stop_response
from runguard.conductor.guard import Guard
from runguard.conductor.trips import guard_error_trip
from runguard.core.decision import STOP_CODE, STOPPED, Trip

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin

_log: Final = logging.getLogger("runguard")
_SPINS: Final = 2  # how often one agent may be skipped after a stop before the run is ended from outside
_SPINS_IN_ALL: Final = 300  # how often anything may be skipped without one model call between
_IDLE_LOOKS: Final = 10  # half a second
_FAULTED_KEPT: Final = 1_000


# agent and branch -> times skipped since the last model call, and which call that was
_Skips = dict[tuple[str, str | None], tuple[int, int]]


def _one_more(skips: _Skips, key: tuple[str, str | None], made: int) -> int:
    """Others that work in between start the count anew: a loop goes on beside its stopped branch."""
    times, before = skips.get(key, (0, made))
    skips[key] = times, _ = (times + 1 if made == before else 1, made)
    return times


class Stopper:
    """How runs of one plugin end. Knows faults of the guard, so that it never has to ask a broken guard again."""

    def __init__(self, plugin: "RunGuardPlugin", guard: Guard) -> None:
        self._plugin, self._guard = plugin, guard
        self.faulted: OrderedDict[str, Trip] = OrderedDict()  # invocation -> why the guard gave up on it
        self.skips: dict[str, _Skips] = {}  # by invocation
        self._failed: dict[str, int] = {}  # by invocation: stops that could not be carried out as they should be

    def forget(self, invocation_id: str) -> None:
        self.faulted.pop(invocation_id, None)
        self.skips.pop(invocation_id, None)
        self._failed.pop(invocation_id, None)

    async def at_model(
        self, context: CallbackContext, trip: Trip, invocation: Invocation | None, lane: str
    ) -> LlmResponse:
        """Answer a model call with the stop."""
        ic = context._invocation_context
        agent = ic.agent
        try:
            await self._skip(ic, getattr(agent, "name", ""), trip, invocation, lane)
            if isinstance(agent, BaseAgent) and may_escalate(agent):
                context.actions.escalate = True
            return stored_once(invocation, trip.id, stop_response(trip, self._guard.stop_text(trip)))
        except Exception as error:
            self._stop_anyway(context, trip, error)
            return LlmResponse(content=_thought(trip.rule), error_code=STOP_CODE, error_message=trip.rule)

    async def at_agent(
        self, context: CallbackContext, agent: BaseAgent, trip: Trip, invocation: Invocation | None, lane: str
    ) -> types.Content:
        """Skip an agent. ADK takes content only: ``mark`` gives the event the rest."""
        try:
            await self._skip(context._invocation_context, agent.name, trip, invocation, lane)
            if may_escalate(agent):
                context.actions.escalate = True
            return stop_content(self._guard.stop_text(trip))
        except Exception as error:
            self._stop_anyway(context, trip, error)
            return _thought(trip.rule)

    def _stop_anyway(self, context: CallbackContext, trip: Trip, error: Exception) -> None:
        """A stop was decided and a fault of ours is in its way: it stays a stop, and a run that asks again and again is
        ended.
        """
        ic = context._invocation_context
        self._guard.faults.note("stopping", error)
        self._failed[ic.invocation_id] = times = self._failed.get(ic.invocation_id, 0) + 1
        if times > _SPINS:
            raise Halt(trip)
        context.actions.escalate = not isinstance(getattr(ic.agent, "parent_agent", None), ParallelAgent)

    async def at_tool_node(
        self, ic: InvocationContext, tool: str, trip: Trip, invocation: Invocation, lane: str
    ) -> None:
        """A node that is a tool was refused: a graph that goes round through such nodes is ended from outside."""
        await self._skip(ic, tool, trip, invocation, lane)

    async def _skip(
        self, ic: InvocationContext, agent: str, trip: Trip, invocation: Invocation | None, lane: str
    ) -> None:
        runners.announce(trip, self._plugin)
        strand = invocation.run.lanes.get(lane) if invocation is not None else None
        if strand is not None:
            strand.cut = True  # if it was called as a tool, its caller must not take the stop for an answer
        skips = self.skips.setdefault(ic.invocation_id, {})
        made = invocation.run.spend.model_calls if invocation is not None else 0
        times = _one_more(skips, (agent, ic.branch), made)
        in_all = _one_more(skips, ("", None), made)  # a Workflow that goes round gives its branches new names
        if times <= _SPINS and in_all <= _SPINS_IN_ALL:
            return
        if invocation is not None and not self._is_whole(ic, invocation):
            await self._until_idle(invocation, lane)
            if invocation.run.stopped is None:
                invocation.run.stop(trip)  # nothing but stopped branches ask any more: the stop is the run's
                skips.clear()
            return
        # A loop that ADK cannot end (a graph cycle, a custom agent) would ask for ever. Paid siblings first: at most
        # half a minute.
        for _ in range(600):
            if invocation is None or invocation.is_quiet():
                break
            await asyncio.sleep(0.05)
        raise Halt(trip)

    def _is_whole(self, ic: InvocationContext, invocation: Invocation) -> bool:
        """The stop covers all of this invocation: the run, or the branch in which it was called as a tool."""
        if ic.invocation_id in self.faulted or invocation.run.stopped is not None:
            return True
        strand = invocation.run.lanes.get(invocation.lane)
        return strand is not None and strand.stop_in_force() is not None

    async def _until_idle(self, invocation: Invocation, lane: str) -> None:
        """Hold a branch that spins after its stop until no other one of the run has moved for a while."""
        run, still = invocation.run, 0
        seen = (run.spend.model_calls, run.spend.tool_calls)
        while still < _IDLE_LOOKS and run.stopped is None:
            await asyncio.sleep(0.05)
            now = (run.spend.model_calls, run.spend.tool_calls)
            still = still + 1 if now == seen and self._plugin.is_idle(run, lane) else 0
            seen = now

    def mark(self, event: Event, trip: Trip | None) -> None:
        """Give the event of a skipped agent the code and the trip that a stop carries."""
        content = event.content
        if (
            trip is None
            or content is None
            or event.error_code is not None
            or not content.parts
            or not content.parts[0].thought
        ):
            return
        text = self._guard.stop_text(trip)
        if content.parts[0].text == text:
            mark_stop(event, trip, text)

    # ---- faults of the guard itself ---------------------------------------------------------------------------------

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """What ADK gets from a hook that failed as a whole: nothing, or a stop where the policy says so."""
        try:
            ic = next(context for context in map(_context_in, given) if context is not None)
            trip = self.fault(hook, error, ic)
            if trip is None or not hook.startswith("before_") or hook == "before_run":
                return None
            runners.announce(trip, self._plugin)
            if hook == "before_tool":
                return refusal(STOPPED)
            text = self._guard.stop_text(trip)
            return stop_response(trip, text) if hook == "before_model" else stop_content(text)
        except Exception as second:
            self._guard.faults.note(hook, second)
            return None

    def fault(self, hook: str, error: Exception, ic: InvocationContext) -> Trip | None:
        """Record a failure of the guard itself.

        The trip to stop with, when the policy says so; None lets the run go on.
        """
        self._guard.faults.note(hook, error)
        if self._guard.goes_on_after(error):
            return None
        return self.faulted.get(ic.invocation_id) or self._give_up(f"{hook}: {type(error).__name__}", ic)

    def _give_up(self, reason: str, ic: InvocationContext) -> Trip:
        guard = self._guard
        invocation = self._plugin.find_invocation(ic.invocation_id)
        agent = getattr(ic.agent, "name", "")
        trip: Trip | None = None
        try:
            if invocation is not None:
                trip = guard.fail(invocation.run.info.run, "guard_error", reason, agent)
        except Exception:
            _log.exception("runguard.guard_error: the guard cannot even stop the run; it is stopped without it")
        if trip is None:  # made of what the context says: the guard could not begin
            facts: dict[str, Any] = {
                "app": ic.app_name,
                "user_id": ic.user_id,
                "session_id": ic.session.id,
                "agent_path": (agent,),
            }
            trip = guard_error_trip(
                reason, ic.invocation_id, guard.policy, guard.clock(), invocation_id=ic.invocation_id, **facts
            )
            guard.trips.append(trip)
        self.faulted[ic.invocation_id] = trip
        if len(self.faulted) > _FAULTED_KEPT:
            self.faulted.popitem(last=False)
        return trip


def _context_in(given: Any) -> InvocationContext | None:
    """The invocation that a hook was called for."""
    return given if isinstance(given, InvocationContext) else getattr(given, "_invocation_context", None)


def _thought(text: str) -> types.Content:
    return types.Content(role="model", parts=[types.Part(text=text, thought=True)])
