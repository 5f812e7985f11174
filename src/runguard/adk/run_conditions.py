"""The termination conditions of a run: the one given with the call, those of its plugins, that of its root agent."""

from collections.abc import AsyncGenerator
from typing import Any

from google.adk.events import Event
from google.adk.runners import Runner

from runguard.adk.context import HERE
from runguard.adk.patching import IN_USE
from runguard.adk.stop_events import answers_to_open_calls, read_session, store
from runguard.adk.stream import note_fault
from runguard.adk.termination import TerminationPlugin, condition_of
from runguard.adk.termination_watch import Finish, Passive, Watched, until
from runguard.core.decision import TERMINATED
from runguard.termination.conditions import checked


def until_terminated(
    runner: Runner, events: AsyncGenerator[Event, None], given: Any, user: str, session: str
) -> AsyncGenerator[Event, None]:
    """The events of a run until one of its conditions fires."""
    own, scope = condition_of(runner.agent)
    found = [own, given]
    if HERE.get().stream is None:  # a run inside of another is part of that one
        found += [p.condition for p in runner.plugin_manager.plugins if isinstance(p, TerminationPlugin)]
        found.append(Passive() if IN_USE.has_run_conditions else None)  # around all others
    for condition in found:
        if condition is not None:
            watched = Watched(checked(condition))
            watched.of_root = own if condition is own else None
            ends_run = condition is own and scope == "run"
            events = until(events, watched, _finish(runner, watched, user, session, ends_run))
    return events


def _finish(runner: Runner, watched: Watched, user: str, session: str, ends_run: bool) -> Finish:
    async def finish(invocation_id: str, last_reason: str | None) -> list[Event]:
        try:
            if ends_run:
                watched.end_run()
        except Exception as error:
            note_fault(error, HERE.get().stream)
        stored = None
        try:
            stored = await read_session(runner, user, session)
        except Exception as error:
            note_fault(error, HERE.get().stream)
        if not invocation_id and stored is not None and stored.events:
            # it ended before its first event: use that of the user's message
            invocation_id = stored.events[-1].invocation_id
        answers: list[Event] | None = None
        try:
            answers = answers_to_open_calls(stored, invocation_id, TERMINATED) if stored is not None else None
        except Exception as error:
            note_fault(error, HERE.get().stream)
        author = getattr(runner.agent, "name", "") or "runguard"
        events = watched.last_events(author, invocation_id, None, answers, escalate=True)
        if last_reason == watched.reason and len(events) == 1:
            return []  # the agent that ended the run has reported it
        try:
            await store(runner, stored, events)
        except Exception as error:
            note_fault(error, HERE.get().stream)
        return events

    return finish
