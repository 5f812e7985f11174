"""Finds the run of an invocation, and resumes one that has paused.

ADK resumes an invocation under its id: when a function response answers an open question, or when the caller names the
id. Neither adds a message of the user. A further message of the user starts a new run, also where ADK uses the id of a
paused task for it.
"""

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final

from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.genai import types

from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.engine.charges import Denied, finding_of
from runguard.engine.guard import Guard
from runguard.engine.resume import review_stops, run_name
from runguard.engine.runs import Run
from runguard.ledger.ledger import StoreError, StoreOutage

_log: Final = logging.getLogger("runguard")
_USER: Final = "user"


@dataclass(slots=True)
class SessionHistory:
    """What the session has of an invocation's current run."""

    name: str  # of the run
    before: str = ""  # the run that the user's last message has replaced
    begun: bool = False  # agents have worked in it
    questions: set[str] = field(default_factory=set)  # long-running calls, confirmations and sign-ins
    answered: set[str] = field(default_factory=set)  # by the user
    arrived: list[types.FunctionResponse] = field(default_factory=list)  # answers that no agent has worked with yet


def history_of(ic: InvocationContext) -> SessionHistory:
    """Read the events of this invocation in the session, which hold the new message already."""
    invocation_id, messages = ic.invocation_id, 0
    found = SessionHistory(invocation_id)
    for event in ic.session.events:
        if event.invocation_id != invocation_id:
            continue
        if event.author != _USER:
            found.begun = True
            found.arrived.clear()
            found.questions.update(event.long_running_tool_ids or ())
        elif _is_message(event):
            messages += 1
            found = SessionHistory(run_name(invocation_id, messages), found.name if messages > 1 else "")
        else:
            found.arrived += event.get_function_responses()
            found.answered.update(response.id or "" for response in event.get_function_responses())
    return found


def _is_message(event: Event) -> bool:
    """Whether it is a message of the user. Results of tasks and summaries of compactions have the author "user" too."""
    parts: list[Any] = (event.content.parts if event.content is not None else None) or []
    return (
        bool(parts) and not any(part.function_response is not None for part in parts) and not event.actions.compaction
    )


async def run_of(guard: Guard, info: RunInfo, history: SessionHistory) -> Run:
    """The run to go on with, or a new one."""
    if history.before:
        guard.pauses.discard(replace(info, run=history.before))
    if guard.pauses.belongs_to_others(info):
        info.run = f"{info.run}@{info.session}"
    run = guard.runs.get(info.run)
    if run is None:
        await guard.growth.recall(info)
        record = None
        try:
            if guard.shares_store and (history.begun or guard.pauses.find(info.run) is not None):
                record = await guard.pauses.latest(info)
            run = guard.runs.get(info.run) or guard.pauses.resume(info, record)  # the first: resumed twice at once
        except (StoreOutage, StoreError) as error:
            return _unsure(guard, info, error)
    if run is None:
        return guard.start(info)
    await review_stops(guard, run)
    return run


def _unsure(guard: Guard, info: RunInfo, error: Exception) -> Run:
    """The store cannot say what the run has used so far. As in an outage, the run stops or starts from zero."""
    run = guard.start(info)
    run.unsure = True
    guard.accounts.outages[guard.policy.on_outage] += 1
    if guard.policy.on_outage == "closed":
        event = ModelCall(info.run, ROOT_LANE, "", guard.clock())
        guard.stop(run, event, finding_of(Denied(outage=str(error)), event, guard.store_name))
    else:
        _log.warning(
            "runguard.resumed_unsure: the usage of a resumed run is unavailable; with on_outage=open it "
            "starts from zero: %s",
            error,
        )
    return run
