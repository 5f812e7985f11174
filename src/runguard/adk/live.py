"""Live connections: when a stopped one may be closed, and what is stored of its stop.

A live connection goes on after a stop: ADK asks about every further user content, and audio is sent without asking. So
the runner's wrapper closes the connection once the stop was reported and the model is not in the middle of an answer.
"""

from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse

from runguard.adk.invocations import Invocation
from runguard.core.decision import STOP_CODE


class Turn:
    """Whether the model of a live connection is in the middle of an answer."""

    __slots__ = ("is_open",)

    def __init__(self) -> None:
        self.is_open = False

    def follow(self, event: Event) -> None:
        if event.error_code == STOP_CODE or event.author == "user":
            return  # ADK marks our stop as a complete turn; it says nothing about the model's own turn
        if event.turn_complete or event.interrupted:
            self.is_open = False
        elif event.content is not None or event.output_transcription is not None:
            self.is_open = True


def stored_once(invocation: Invocation | None, trip_id: str, stop: LlmResponse) -> LlmResponse:
    """The stop of a live run.

    ADK stores every answer to a user content that is not partial: only the first one is to be stored.
    """
    if invocation is not None and invocation.live:
        stop.partial = True if invocation.stop_stored == trip_id else None
        invocation.stop_stored = trip_id
    return stop
