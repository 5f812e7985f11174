"""Live connections: when a stopped one may be closed, and how its stop is stored.

ADK does not end a live connection after a stop: it calls the hooks for every further user content, and sends audio
without a hook. So the stream closes the connection once the stop was reported and the model is between two answers.
"""

from google.adk.events import Event
from google.adk.models.llm_response import LlmResponse

from runguard.adk.invocation_state import Invocation
from runguard.core.decision import STOP_CODE


class LiveTurn:
    """Whether the model of a live connection is in the middle of an answer."""

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
    """The stop of a live run.

    ADK stores every answer to a user content that is not partial. Only the first stop should be stored.
    """
    if invocation is not None and invocation.live:
        stop.partial = True if invocation.stop_stored == trip_id else None
        invocation.stop_stored = trip_id
    return stop
