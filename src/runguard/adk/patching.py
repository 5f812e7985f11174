"""The events of a run, with what a guard has to do around them: end a stopped run, report its stop, forget the run."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from google.adk.agents import BaseAgent
from google.adk.events import Event
from google.adk.runners import Runner

from runguard.adk.context import HERE, RunnerStream, here_of
from runguard.adk.invocations import Invocations
from runguard.adk.live import LiveTurn
from runguard.adk.patching import IN_USE
from runguard.adk.stop_events import Halt, stored_stop
from runguard.adk.stop_owners import Stop, announce, error_of, is_raised, stop_in
from runguard.core.decision import METADATA_KEY, STOP_CODE, Trip
from runguard.core.errors import RunStoppedError
from runguard.termination.conditions import termination_reason

_log: Final = logging.getLogger("runguard")


def halt(invocation_id: str, trip: Trip, text: str) -> Halt:
    """What a plugin raises to end an invocation from outside.

    The stream knows of it even where nested branches hide the Halt.
    """
    stream = HERE.get().stream
    if stream is not None:
        stream.halted = (invocation_id, trip, text)
    return Halt(trip)


# ---- failures of RunGuard itself ------------------------------------------------------------------------------------


def report_fault(error: Exception, registry: Invocations | None, here: RunnerStream | None = None) -> None:
    """Report a failure of RunGuard around a run. The run keeps all its events.

    Under ``on_guard_error="block"`` the run stops at its next call.
    """
    registries = [registry] if registry is not None else list(IN_USE.per_agent)
    guards = [one.guard for one in registries]
    if registry is None:
        guards += IN_USE.of_models
    if not guards:
        name = type(error).__name__
        _log.error("runguard.guard_error: the runner's wrapper failed with %s; the run goes on", name, exc_info=error)
    for guard in guards:
        guard.faults.note("runner", error)
    if here is None:
        return
    for guard, run, _ in here.ends:
        guard.stop_after("runner", error, run)
    for one in registries:
        for invocation in map(one.find, here.invocation_ids):
            if invocation is not None:
                one.guard.stop_after("runner", error, invocation.run.info.run)


def note_fault(error: Exception, here: RunnerStream | None) -> None:
    """Report a failure of RunGuard in a condition at work. The run goes on without the condition."""
    report_fault(error, here.registry if here is not None else None, here)


# ---- the events -----------------------------------------------------------------------------------------------------


async def guarded_stream(
    runner: Runner,
    registry: Invocations | None,
    events: AsyncGenerator[Event, None],
    user: str,
    session: str,
    raises: bool,
    fault: Exception | None = None,
    turn: LiveTurn | None = None,
) -> AsyncGenerator[Event, None]:
    """The events of a run. A failure of RunGuard removes none of them.

    ``fault``: a failure of RunGuard before the run started. ``turn``: of a live connection.
    """
    nested = HERE.get().tool is not None
    invocations: set[str] = set()
    stop: Stop | None = None
    outer = HERE.get().stream
    root = getattr(runner.agent, "name", "") or ""
    here = RunnerStream(registry, outer, runner.app_name, user, session, fault=fault, agent=root)
    HERE.set(HERE.get()._replace(stream=here))
    is_reported = False  # a stop event has passed
    # a live connection or a Workflow goes on after a soft stop
    goes_on = turn is not None or not isinstance(runner.agent, BaseAgent)
    try:
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    shown: Event | None = event
                    try:
                        invocations.add(event.invocation_id)
                        if turn is not None:
                            turn.follow(event)
                        is_reported = is_reported or event.error_code == STOP_CODE
                        if event.custom_metadata:  # a stop or a termination has some
                            stop = stop_in(event) or stop
                            shown = None if raises and is_raised(event) else _shown(event)
                    except Exception as error:
                        report_fault(error, registry, here)
                    if shown is not None:
                        # what the caller does between two events is not part of the run
                        now = HERE.get()
                        HERE.set(here_of((now.tool, outer, now.layers, now.conditions, now.model_call)))
                        yield shown
                        now = HERE.get()
                        HERE.set(here_of((now.tool, here, now.layers, now.conditions, now.model_call)))
                    try:
                        if (
                            stop is not None
                            and goes_on
                            and not (turn is not None and turn.is_open)
                            and _can_end(stop[1], event.invocation_id)
                        ):
                            break
                    except Exception as error:
                        report_fault(error, registry, here)
        except Halt:
            pass  # it has done its work: the run is over
        except BaseExceptionGroup as group:
            # closing nested ParallelAgents may put a GeneratorExit in the Halt's place
            _, rest = group.split((Halt, GeneratorExit))
            stopped = False
            try:
                stopped = registry is not None and any(registry.stop_of(one) is not None for one in invocations)
            except Exception as error:
                report_fault(error, registry)
            if rest is not None or not (stopped or here.halted is not None or group.subgroup(Halt) is not None):
                raise
        if stop is None and registry is not None and not nested:
            missing: list[Event] = []
            try:
                found = await _missing_stop(runner, registry, invocations or set(here.invocation_ids), user, session)
                is_reported = is_reported or bool(found)
                stop = next((one for one in map(stop_in, found) if one is not None), stop)
                missing = [event for event in found if not (raises and is_raised(event))]
            except Exception as error:
                report_fault(error, registry)
            for event in missing:
                yield event
        if here.halted is not None and not is_reported:
            last: list[Event] = []
            try:
                found = await stored_stop(runner, *here.halted, user, session)
                last = [event for event in found if not (raises and is_raised(event))]
            except Exception as error:
                report_fault(error, registry)
            for event in last:
                yield event
    finally:
        HERE.set(HERE.get()._replace(stream=outer))
        try:
            late = await _forget(here, registry, invocations)
            stop = stop or late
        except Exception as error:
            report_fault(error, registry)
    failure: RunStoppedError | None = None
    try:
        failure = error_of(stop) if stop is not None and raises else None
    except Exception as error:
        report_fault(error, registry)
    if failure is not None:
        raise failure


async def _forget(here: RunnerStream, registry: Invocations | None, invocations: set[str]) -> Stop | None:
    """Forget everything of a run that is over, however it ended.

    Returns a stop that was not reported yet, if there was one.
    """
    stop: Stop | None = None
    for guard, _, end in here.ends:
        guard.faults.attempt("end of run", end)
    for one in {*IN_USE.per_agent, *([registry] if registry is not None else [])}:
        for invocation_id in {*invocations, *here.invocation_ids}:
            trip = one.guard.faults.attempt("end of run", one.forget, invocation_id)
            if stop is None and trip is not None:
                stop = (trip.id, one)
        await one.written({*invocations, *here.invocation_ids})
    return stop


async def _missing_stop(
    runner: Runner, registry: Invocations, invocations: set[str], user: str, session: str
) -> list[Event]:
    """The stop of a run whose stop event got lost: an agent swallowed it, or a Halt came first."""
    invocation_id = next((one for one in invocations if registry.stop_of(one) is not None), None)
    trip = registry.stop_of(invocation_id) if invocation_id is not None else None
    if invocation_id is None or trip is None:
        return []
    announce(trip, registry)
    return await stored_stop(runner, invocation_id, trip, registry.guard.stop_text(trip), user, session)


def _shown(event: Event) -> Event:
    """The event as the caller sees it: the last event of an inner loop shows ``escalate``. Inside the run it must not,
    because it would end the loops around it.
    """
    if not event.custom_metadata or METADATA_KEY not in event.custom_metadata or event.actions.escalate:
        return event
    if termination_reason(event) is None:
        return event
    return event.model_copy(update={"actions": event.actions.model_copy(update={"escalate": True})})


def _can_end(registry: Invocations, invocation_id: str) -> bool:
    """The whole run is stopped and no paid call is in flight: closing the stream now loses no paid work."""
    invocation = registry.find(invocation_id)
    return registry.stop_of(invocation_id) is not None and (invocation is None or invocation.is_quiet())
