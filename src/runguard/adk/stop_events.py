"""What a stop or a refusal looks like on ADK, how it is stored, and where it may escalate.

The stop is never an agent's answer: a ``thought`` part with ``error_code`` and ``error_message`` does not land in
``output_key``, does not break an ``output_schema`` and does not enter the next prompt. Plain text would do all three.
"""

import logging
from typing import Any, Final

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.genai import types

from runguard.core.decision import LEFT_OUT, METADATA_KEY, NOT_EXECUTED, NOTICE_KEY, STOP_CODE, STOPPED, Trip

_log: Final = logging.getLogger("runguard")


class Halt(BaseException):
    """Ends a stopped run that keeps asking. Not an Exception: retries, tools and nodes must not swallow it."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip.message)
        self.trip = trip


def stop_content(text: str) -> types.Content:
    return types.Content(role="model", parts=[types.Part(text=text, thought=True)])


def stop_response(trip: Trip, text: str) -> LlmResponse:
    return LlmResponse(
        content=stop_content(text),
        error_code=STOP_CODE,
        error_message=text,
        custom_metadata={METADATA_KEY: trip.to_dict()},
    )


def refused_response(trip: Trip, text: str) -> LlmResponse:
    """The answer to a call without a hook. It has no content: code must not take it for a summary or an advice."""
    return LlmResponse(error_code=STOP_CODE, error_message=text, custom_metadata={METADATA_KEY: trip.to_dict()})


def mark_stop(event: Event, trip: Trip, text: str) -> None:
    """Give the event of a skipped agent the fields of ``stop_response``: ADK's agent hook can return content only."""
    event.error_code = STOP_CODE
    event.error_message = text
    event.custom_metadata = {**(event.custom_metadata or {}), METADATA_KEY: trip.to_dict()}


def refusal(text: str) -> dict[str, Any]:
    """The answer to a call that was not executed."""
    return {"status": NOT_EXECUTED, "message": text}


def left_out(text: str) -> dict[str, Any]:
    """In place of an answer that is too large. The call was made and had its effects."""
    return {"status": LEFT_OUT, "message": text}


def with_notice(response: dict[str, Any] | None, text: str) -> dict[str, Any]:
    """A tool's answer with a nudge added. The tool's own object is not changed."""
    return {**(response or {}), NOTICE_KEY: text}


def may_escalate(agent: BaseAgent) -> bool:
    """Escalating ends the enclosing loops.

    Not from a direct child of a ParallelAgent: it would cancel paid siblings.
    """
    return not isinstance(agent.parent_agent, ParallelAgent)


# ---- in the session -------------------------------------------------------------------------------------------------


async def stored_stop(
    runner: Runner, invocation_id: str, trip: Trip, text: str, user: str, session: str
) -> list[Event]:
    """Store the stop event, and before it an answer for every open call: models reject a history with a call that has
    no answer.
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
    """The session as stored; None when the session service fails."""
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
    """An answer for every call of this invocation that has none and does not wait for input from outside."""
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
    """One event for the calls of one response, as ADK does it."""
    parts = [
        types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response=refusal(why))) for c in calls
    ]
    content = types.Content(role="user", parts=parts)
    return Event(author=asker.author, invocation_id=invocation_id, branch=asker.branch, content=content)
