"""What a stop or a refusal looks like on ADK, and where it may escalate.

The stop is never an agent's answer: a ``thought`` part with ``error_code`` and ``error_message`` does not land in
``output_key``, does not break an ``output_schema`` and does not enter the next prompt. Plain text would do all three.
"""

from typing import Any

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.core.decision import LEFT_OUT, METADATA_KEY, NOT_EXECUTED, NOTICE_KEY, STOP_CODE, Trip


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
    """The answer to a call that no agent announced: without content, so that nobody takes it for a summary or an
    advice.
    """
    return LlmResponse(error_code=STOP_CODE, error_message=text, custom_metadata={METADATA_KEY: trip.to_dict()})


def mark_stop(event: Event, trip: Trip, text: str) -> None:
    """Make the event of a skipped agent say what ``stop_response`` says: ADK's agent hook can return content only."""
    event.error_code = STOP_CODE
    event.error_message = text
    event.custom_metadata = {**(event.custom_metadata or {}), METADATA_KEY: trip.to_dict()}


def refusal(text: str) -> dict[str, Any]:
    """The answer to a call that was not executed."""
    return {"status": NOT_EXECUTED, "message": text}


def left_out(text: str) -> dict[str, Any]:
    """In place of an answer that is too large: the call was made, and what it did is done."""
    return {"status": LEFT_OUT, "message": text}


def with_notice(response: dict[str, Any] | None, text: str) -> dict[str, Any]:
    """A tool's answer with a nudge riding on it; the tool's own object is left alone."""
    return {**(response or {}), NOTICE_KEY: text}


def may_escalate(agent: BaseAgent) -> bool:
    """Escalating ends the enclosing loops.

    Not from a direct child of a ParallelAgent: it would cancel paid siblings.
    """
    return not isinstance(agent.parent_agent, ParallelAgent)
