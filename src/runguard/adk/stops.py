"""Carries out a stop: at a model call, at an agent, after a failure of the guard itself, and in loops that ADK cannot
end.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.invocation_state import Invocation
from runguard.adk.invocations import Invocations, Skips
from runguard.adk.live import stored_once
from runguard.adk.paid_work import until_done
from runguard.adk.stop_events import Halt, mark_stop, may_escalate, refusal, stop_content, stop_response
from runguard.adk.stop_owners import announce
from runguard.core.decision import STOP_CODE, STOPPED, Trip
from runguard.engine.decide import guard_error_trip
from runguard.engine.guard import Guard

_log: Final = logging.getLogger("runguard")
_SPINS: Final = 2  # how often one agent may be skipped after a stop before the run is ended from outside
_SPINS_IN_ALL: Final = 300  # how often anything may be skipped without one model call between
_IDLE_LOOKS: Final = 10  # half a second


def _one_more(skips: Skips, key: tuple[str, str | None], made: int) -> int:
    """Count a skip. A model call in between starts the count anew: a loop may continue beside its stopped branch."""
    times, before = skips.get(key, (0, made))
    skips[key] = times, _ = (times + 1 if made == before else 1, made)
    return times


class Stopper:
    """Ends the runs of one guard. It remembers failures of the guard, and does not ask a broken guard again."""

    def __init__(self, guard: Guard, invocations: Invocations) -> None:
        self._guard, self._invocations = guard, invocations
        # the stop of an invocation in which the guard itself failed, where its policy says stop
        self.gave_up: Callable[[str], Trip | None] = invocations.gave_up.get

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
        """Skip an agent. ADK's hook can return content only; ``mark`` adds the rest to the event."""
        try:
            await self._skip(context._invocation_context, agent.name, trip, invocation, lane)
            if may_escalate(agent):
                context.actions.escalate = True
            return stop_content(self._guard.stop_text(trip))
        except Exception as error:
            self._stop_anyway(context, trip, error)
            return _thought(trip.rule)

    def _stop_anyway(self, context: CallbackContext, trip: Trip, error: Exception) -> None:
        """A failure of RunGuard prevents the normal stop: stop all the same, and end a run that keeps asking."""
        ic = context._invocation_context
        self._guard.faults.note("stopping", error)
        failed = self._invocations.failed_stops
        failed[ic.invocation_id] = times = failed.get(ic.invocation_id, 0) + 1
        if times > _SPINS:
            raise Halt(trip)
        context.actions.escalate = not isinstance(getattr(ic.agent, "parent_agent", None), ParallelAgent)

    async def at_tool_node(
        self, ic: InvocationContext, tool: str, trip: Trip, invocation: Invocation, lane: str
    ) -> None:
        """A tool node of a Workflow was refused. End a graph that keeps running through such nodes."""
        await self._skip(ic, tool, trip, invocation, lane)

    async def _skip(
        self, ic: InvocationContext, agent: str, trip: Trip, invocation: Invocation | None, lane: str
    ) -> None:
        announce(trip, self._invocations)
        own = invocation.run.lanes.get(lane) if invocation is not None else None
        if own is not None:
            own.was_stopped = True  # if it was called as a tool, its caller must not take the stop for an answer
        skips = self._invocations.skips.setdefault(ic.invocation_id, {})
        made = invocation.run.spend.model_calls if invocation is not None else 0
        times = _one_more(skips, (agent, ic.branch), made)
        in_all = _one_more(skips, ("", None), made)  # a Workflow that goes round gives its branches new names
        if times <= _SPINS and in_all <= _SPINS_IN_ALL:
            return
        if invocation is not None and not self._is_whole(ic, invocation):
            await self._until_idle(invocation, lane)
            if invocation.run.stopped is None:
                invocation.run.stop(trip)  # only stopped branches are left: stop the run
                skips.clear()
            return
        # A loop that ADK cannot end (a graph cycle, a custom agent) would ask for ever. Paid siblings come first.
        if invocation is not None:
            await until_done(invocation.is_quiet)
        raise Halt(trip)

    def _is_whole(self, ic: InvocationContext, invocation: Invocation) -> bool:
        """The stop covers all of this invocation: the run, or the branch in which it was called as a tool."""
        if ic.invocation_id in self._invocations.gave_up or invocation.run.stopped is not None:
            return True
        own = invocation.run.lanes.get(invocation.lane)
        return own is not None and own.stop_in_force() is not None

    async def _until_idle(self, invocation: Invocation, lane: str) -> None:
        """Hold a branch that keeps asking after its stop until no other branch of the run has moved for a while."""
        run, still = invocation.run, 0
        seen = (run.spend.model_calls, run.spend.tool_calls)
        while still < _IDLE_LOOKS and run.stopped is None:
            await asyncio.sleep(0.05)
            now = (run.spend.model_calls, run.spend.tool_calls)
            still = still + 1 if now == seen and self._invocations.is_idle(run, lane) else 0
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

    # ---- failures of the guard itself --------------------------------------------------------------------------------

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """The answer of a hook that failed: None, or a stop where the policy says stop."""
        try:
            ic = next(context for context in map(_context_in, given) if context is not None)
            trip = self.fault(hook, error, ic)
            if trip is None or not hook.startswith("before_") or hook == "before_run":
                return None
            announce(trip, self._invocations)
            if hook == "before_tool":
                return refusal(STOPPED)
            text = self._guard.stop_text(trip)
            return stop_response(trip, text) if hook == "before_model" else stop_content(text)
        except Exception as second:
            self._guard.faults.note(hook, second)
            return None

    def fault(self, hook: str, error: Exception, ic: InvocationContext) -> Trip | None:
        """Record a failure of the guard itself.

        Returns the trip to stop with where the policy says stop. None lets the run go on.
        """
        self._guard.faults.note(hook, error)
        if self._guard.goes_on_after(error):
            return None
        return self._invocations.gave_up.get(ic.invocation_id) or self._give_up(f"{hook}: {type(error).__name__}", ic)

    def _give_up(self, reason: str, ic: InvocationContext) -> Trip:
        guard = self._guard
        invocation = self._invocations.find(ic.invocation_id)
        agent = getattr(ic.agent, "name", "")
        trip: Trip | None = None
        try:
            if invocation is not None:
                trip = guard.fail(invocation.run.info.run, "guard_error", reason, agent)
        except Exception:
            _log.exception("runguard.guard_error: the guard failed to stop the run; the adapter stops it")
        if trip is None:  # the guard could not start the run: use what ADK's context says
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
        self._invocations.give_up(ic.invocation_id, trip)
        return trip


def _context_in(given: Any) -> InvocationContext | None:
    """The invocation that a hook was called for."""
    return given if isinstance(given, InvocationContext) else getattr(given, "_invocation_context", None)


def _thought(text: str) -> types.Content:
    return types.Content(role="model", parts=[types.Part(text=text, thought=True)])
