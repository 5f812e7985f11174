"""The event by which a termination condition ends the work. Imported when one fires: pydantic builds these classes."""

from google.adk.events import Event, EventActions


class TerminationActions(EventActions):
    """ADK's actions with the reason; stored as ADK's own."""

    termination_reason: str | None = None


class TerminationEvent(Event):
    """Says why the work ended.

    It has no content and is not a response: code that reads ``event.content.parts[0]`` must not take it for one.
    """

    def is_final_response(self) -> bool:
        return False
