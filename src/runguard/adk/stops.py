"""Stops on ADK: how one is carried out, what it looks like, how it is stored, and which error it raises.

``plugin``, ``tool_hooks``, ``events`` and ``cost_breaker`` stop through ``Stopper``. The stream of a run in
``patching``, the wrappers in ``runner`` and ``model_calls`` use the functions.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext, LlmCallsLimitExceededError
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types

from runguard.adk.runs import HERE, Invocation, Invocations, Skips
from runguard.core.decision import LEFT_OUT, METADATA_KEY, NOT_EXECUTED, NOTICE_KEY, STOP_CODE, STOPPED, Trip
from runguard.core.errors import LimitExceededError, RunStoppedError
from runguard.core.identity import LruDict
from runguard.engine.decide import guard_error_trip
from runguard.engine.guard import Guard

_log: Final = logging.getLogger("runguard")
_SPINS: Final = 2  # how often one agent may be skipped after a stop before the run is ended from outside
_SPINS_IN_ALL: Final = 300  # how often anything may be skipped without one model call between
_IDLE_LOOKS: Final = 10  # half a second


class Stopper:
    """Ends the runs of one guard: at a model call, at an agent, and in loops that ADK cannot end.

    It remembers failures of the guard, and does not ask a broken guard again.
    """

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
            await self.skip(ic, getattr(agent, "name", ""), trip, invocation, lane)
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
            await self.skip(context._invocation_context, agent.name, trip, invocation, lane)
            if may_escalate(agent):
                context.actions.escalate = True
            return stop_content(self._guard.stop_text(trip))
        except Exception as error:
            self._stop_anyway(context, trip, error)
            return _thought(trip.rule)

    def _stop_anyway(self, context: CallbackContext, trip: Trip, error: Exception) -> None:
        """Stop although a failure of RunGuard prevents the normal stop. Raise ``Halt`` in a run that keeps asking."""
        ic = context._invocation_context
        self._guard.faults.note("stopping", error)
        failed = self._invocations.failed_stops
        failed[ic.invocation_id] = times = failed.get(ic.invocation_id, 0) + 1
        if times > _SPINS:
            raise Halt(trip)
        context.actions.escalate = not isinstance(getattr(ic.agent, "parent_agent", None), ParallelAgent)

    async def skip(
        self, ic: InvocationContext, agent: str, trip: Trip, invocation: Invocation | None, lane: str
    ) -> None:
        """Count a refused agent, model call or tool node of a Workflow, and end a run that keeps asking."""
        announce(trip, self._invocations)
        own = invocation.run.lanes.get(lane) if invocation is not None else None
        if own is not None:
            own.was_stopped = True  # if it was called as a tool, its caller must not take the stop for an answer
        skips = self._invocations.skips.setdefault(ic.invocation_id, {})
        made = invocation.run.spend.model_calls if invocation is not None else 0
        times = _one_more(skips, (agent, ic.branch), made)
        in_all = _one_more(skips, ("", None), made)  # a Workflow in a cycle gives its branches new names
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
        """Return whether the stop covers all of this invocation: its run, or the branch in which a tool called it."""
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
        """Return the answer of a hook that failed: None, or a stop where the policy says stop."""
        try:
            contexts = (
                one if isinstance(one, InvocationContext) else getattr(one, "_invocation_context", None)
                for one in given
            )
            ic = next(context for context in contexts if context is not None)
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

    def fault(self, hook: str, error: Exception, ic: InvocationContext, *, recovers: bool = False) -> Trip | None:
        """Record a failure of the guard itself.

        Return the trip to stop with where the policy says stop, or where a model call would get past a budget. None
        lets the run continue. ``recovers``: the caller reserves for the call in another way.
        """
        self._guard.faults.note(hook, error)
        has_run = self._invocations.find(ic.invocation_id) is not None
        is_paid = hook != "before_model" or (has_run and (recovers or is_asked_again(self._guard)))
        if self._guard.faults.goes_on_after(error) and (is_paid or not self._guard.must_hold(error)):
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
        guard.faults.attempt("stopping", self._invocations.gave_up.__setitem__, ic.invocation_id, trip)
        return trip


def is_asked_again(guard: Guard) -> bool:
    """Return whether ``model_calls`` asks this guard about a model call that its hook has not announced."""
    stream = HERE.get().stream
    return stream is not None and stream.registry is not None and stream.registry.guard is guard


def _one_more(skips: Skips, key: tuple[str, str | None], made: int) -> int:
    """Count a skip. A model call in between starts the count anew: a loop may continue beside its stopped branch."""
    times, before = skips.get(key, (0, made))
    skips[key] = times, _ = (times + 1 if made == before else 1, made)
    return times


def _thought(text: str) -> types.Content:
    """Return what ``stop_content`` returns. For places where that function may be what failed."""
    return types.Content(role="model", parts=[types.Part(text=text, thought=True)])


# ---- What a stop or a refusal looks like


class Halt(BaseException):
    """Ends a stopped run that keeps asking. Not an Exception: retries, tools and nodes must not swallow it."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip.message)
        self.trip = trip


def stop_content(text: str) -> types.Content:
    return types.Content(role="model", parts=[types.Part(text=text, thought=True)])


def stop_response(trip: Trip, text: str) -> LlmResponse:
    """Return the answer to a model call that a stop prevents. It is never the agent's answer.

    A ``thought`` part with ``error_code`` and ``error_message`` does not land in ``output_key``, does not break an
    ``output_schema`` and does not enter the next prompt. Plain text would do all three.
    """
    return LlmResponse(
        content=stop_content(text),
        error_code=STOP_CODE,
        error_message=text,
        custom_metadata={METADATA_KEY: trip.to_dict()},
    )


def refused_response(trip: Trip, text: str) -> LlmResponse:
    """Return the answer to a call without a hook. It has no content that code could take for a summary or advice."""
    return LlmResponse(error_code=STOP_CODE, error_message=text, custom_metadata={METADATA_KEY: trip.to_dict()})


def mark_stop(event: Event, trip: Trip, text: str) -> None:
    """Give the event of a skipped agent the fields of ``stop_response``: ADK's agent hook can return content only."""
    event.error_code = STOP_CODE
    event.error_message = text
    event.custom_metadata = {**(event.custom_metadata or {}), METADATA_KEY: trip.to_dict()}


def refusal(text: str) -> dict[str, Any]:
    """Return the answer to a tool call that was not executed."""
    return {"status": NOT_EXECUTED, "message": text}


def left_out(text: str) -> dict[str, Any]:
    """Return what replaces an answer that is too large. The call was made and had its effects."""
    return {"status": LEFT_OUT, "message": text}


def with_notice(response: dict[str, Any] | None, text: str) -> dict[str, Any]:
    """Return a tool's answer with a nudge added, as a copy."""
    return {**(response or {}), NOTICE_KEY: text}


def may_escalate(agent: BaseAgent) -> bool:
    """Return whether an agent may escalate, which ends the enclosing loops.

    A direct child of a ParallelAgent may not: it would cancel paid siblings.
    """
    return not isinstance(agent.parent_agent, ParallelAgent)


# ---- The stop in the session


async def stored_stop(
    runner: Runner, invocation_id: str, trip: Trip, text: str, user: str, session: str
) -> list[Event]:
    """Store the stop event, and before it an answer for every open call. Return these events.

    Models reject a history with a call that has no answer.
    """
    event = Event(
        author=getattr(runner.agent, "name", "") or "runguard", invocation_id=invocation_id, content=stop_content(text)
    )
    mark_stop(event, trip, text)
    answers: list[Event] = []
    stored = None
    try:
        stored = await read_session(runner, user, session)
        if stored is not None:
            answers = answers_to_open_calls(stored, invocation_id, STOPPED)
    except Exception:  # the caller gets the stop all the same
        stored = None
        _log.exception("runguard.stop_not_stored: the session cannot be read")
    await store(runner, stored, [*answers, event])
    return [*answers, event]


async def read_session(runner: Runner, user: str, session: str) -> Any:
    """Return the session as stored; None when the session service fails."""
    try:
        return await runner.session_service.get_session(app_name=runner.app_name, user_id=user, session_id=session)
    except Exception:
        _log.exception("runguard.stop_not_stored: the session service does not give the session")
        return None


async def store(runner: Runner, stored: Any, events: list[Event]) -> None:
    try:
        for event in events if stored is not None else ():
            await runner.session_service.append_event(session=stored, event=event)
    except Exception:  # the caller gets the events all the same
        _log.exception("runguard.stop_not_stored: the session service refused the stop event")


def answers_to_open_calls(session: Any, invocation_id: str, why: str) -> list[Event]:
    """Return answers to the calls of this invocation that have none and do not wait for input from outside."""
    events = [event for event in session.events if event.invocation_id == invocation_id]
    answered = {response.id for event in events for response in event.get_function_responses()}
    answers: list[Event] = []
    for event in events:
        waiting = event.long_running_tool_ids or ()
        calls = [c for c in event.get_function_calls() if c.id not in answered and c.id not in waiting]
        if calls:
            answers.append(answer_to(event, calls, invocation_id, why))
    return answers


def answer_to(asker: Event, calls: list[types.FunctionCall], invocation_id: str, why: str) -> Event:
    """Return one event that answers the calls of one response, as ADK does it."""
    parts = [
        types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response=refusal(why))) for c in calls
    ]
    content = types.Content(role="user", parts=parts)
    return Event(author=asker.author, invocation_id=invocation_id, branch=asker.branch, content=content)


# ---- Which guard a stop event comes from, and the error in its place

_OWNERS_KEPT: Final = 10_000
_owners: Final = LruDict[str, weakref.ref[Invocations]](_OWNERS_KEPT)  # by the id of the trip

Stop = tuple[str, Invocations]  # the id of a trip, and the registry of its guard


class AdkCallLimitError(LimitExceededError, LlmCallsLimitExceededError):
    """``RunConfig.max_llm_calls`` is used up. Code that catches ADK's error for it catches this one too."""


def announce(trip: Trip, invocations: Invocations) -> None:
    """Remember which guard decides what follows a stop event with this trip, which is about to appear in a stream."""
    _owners[trip.id] = weakref.ref(invocations)


def stop_in(event: Event) -> Stop | None:
    """Return the announced stop that an event carries, or None."""
    metadata = event.custom_metadata
    if not metadata or METADATA_KEY not in metadata or not isinstance(metadata[METADATA_KEY], dict):
        return None
    trip_id = metadata[METADATA_KEY].get("id")
    if not isinstance(trip_id, str):
        return None
    found = _owners.get(trip_id)
    owner = found() if found is not None else None
    return (trip_id, owner) if owner is not None else None


def is_raised(event: Event) -> bool:
    """Return whether an error will be raised in place of this stop event.

    Code that returns at the final event must not take it for an answer.
    """
    found = stop_in(event) if event.error_code == STOP_CODE else None
    return found is not None and found[1].guard.policy.on_stop == "raise"


def error_of(stop: Stop) -> RunStoppedError | None:
    """Return the error that ``on_stop="raise"`` raises after the clean stop, or None where nothing is raised."""
    trip_id, guard = stop[0], stop[1].guard
    if guard.policy.on_stop != "raise":
        return None
    trip = next((t for t in reversed(guard.trips) if t.id == trip_id), None)
    if trip is None or not trip.enforced:
        return None
    is_adk_limit = trip.rule == "model_calls" and guard.policy.max_model_calls is None
    return AdkCallLimitError(trip) if is_adk_limit else RunStoppedError.of(trip)


# ---- Waiting for paid work

_LOOK_S: Final = 0.05
_LOOKS: Final = 600  # half a minute


async def until_done(is_done: Callable[[], bool]) -> bool:
    """Wait, at most half a minute, until the paid calls beside a stopped one have their answers.

    Return whether there was anything to wait for.
    """
    for look in range(_LOOKS):
        if is_done():
            return look > 0
        await asyncio.sleep(_LOOK_S)
    return True


# ---- Live connections


class LiveTurn:
    """Whether the model of a live connection is in the middle of an answer.

    ADK does not end a live connection after a stop: it calls the hooks for every further user content, and sends audio
    without a hook. So the stream closes the connection once the stop was reported and the model is between two answers.
    """

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False

    def follow(self, event: Event) -> None:
        if event.error_code == STOP_CODE or event.author == "user":
            return  # ADK marks our stop as a complete turn, which is not the model's own turn
        if event.turn_complete or event.interrupted:
            self.is_open = False
        elif event.content is not None or event.output_transcription is not None:
            self.is_open = True


def stored_once(invocation: Invocation | None, trip_id: str, stop: LlmResponse) -> LlmResponse:
    """Return the stop, marked as partial in a live run that has stored this stop before.

    ADK stores every answer to a user content that is not partial. Only the first stop should be stored.
    """
    if invocation is not None and invocation.live:
        stop.partial = True if invocation.stop_stored == trip_id else None
        invocation.stop_stored = trip_id
    return stop
