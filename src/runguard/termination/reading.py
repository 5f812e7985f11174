"""What events say. Asked by name and never trusted: an event of another version or of a test may lack any field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runguard.pricing import Usage
from runguard.reading.usage import usage_of

_CLOSED_KEPT: Final = 1_024


def whole(events: Sequence[Any]) -> Iterator[Any]:
    """The events that are no chunk of a stream: what a chunk says comes again in the event that closes it."""
    return (event for event in events if not getattr(event, "partial", None))


def author_of(event: Any) -> str:
    return getattr(event, "author", None) or ""


def branch_of(event: Any) -> str:
    return getattr(event, "branch", None) or ""


def parts_of(event: Any) -> Sequence[Any]:
    return getattr(getattr(event, "content", None), "parts", None) or ()


def visible_text(event: Any) -> str:
    """What a reader sees of an event: its text without thoughts, the parts joined as they would be read."""
    texts = (getattr(part, "text", None) for part in parts_of(event) if not getattr(part, "thought", None))
    return "".join(text for text in texts if isinstance(text, str))


def calls_of(event: Any) -> list[Any]:
    return [call for part in parts_of(event) if (call := getattr(part, "function_call", None)) is not None]


def answers_of(event: Any) -> list[Any]:
    """The function responses, but for those that only say that somebody is asked for leave or for a sign-in."""
    actions = getattr(event, "actions", None)
    waiting = {*(getattr(actions, "requested_tool_confirmations", None) or ()), *(getattr(actions, "requested_auth_configs", None) or ())}
    answers = [answer for part in parts_of(event) if (answer := getattr(part, "function_response", None)) is not None]
    return [answer for answer in answers if getattr(answer, "id", None) not in waiting] if waiting else answers


def transfer_of(event: Any) -> str:
    return getattr(getattr(event, "actions", None), "transfer_to_agent", None) or ""


def state_delta_of(event: Any) -> dict[str, Any]:
    return getattr(getattr(event, "actions", None), "state_delta", None) or {}


# ---- model calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """What one model call took. ``before``: what was told for the same call already, which this replaces."""

    usage: Usage
    model: str
    at: float | None  # unix seconds
    before: Usage | None = None


class ModelCalls:
    """Usage, once for each model call.

    A stream may tell its usage in every chunk, in the last one, or in the event that closes it, and the last figure is the right one.
    Streams are told apart by author and branch, because parallel branches come interleaved.
    """

    __slots__ = ("_closed", "_open")

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[Usage | None, str]] = {}
        self._closed: dict[tuple[str, str], Taken] = {}

    def read(self, events: Sequence[Any]) -> list[Taken]:
        return [taken for event in events if (taken := self._read(event)) is not None]

    def _read(self, event: Any) -> Taken | None:
        key = author_of(event), branch_of(event)
        metadata = getattr(event, "usage_metadata", None)
        usage = None if metadata is None else usage_of(metadata, [])
        model = getattr(event, "model_version", None) or ""
        just = self._closed.pop(key, None)
        if getattr(event, "partial", None):
            earlier, named = self._open.get(key, (None, ""))
            self._open[key] = usage or earlier, model or named
            return None
        at = getattr(event, "timestamp", None)
        if key in self._open:
            earlier, named = self._open.pop(key)
            return self._close(key, usage or earlier, model or named, at)
        if usage is None:
            return None
        if just is not None and just.usage.input == usage.input and just.usage.output <= usage.output:
            # ADK's older streaming closes a stream twice when a call follows text: same prompt, no chunk between
            return self._close(key, usage, model or just.model, at, just.usage)
        return Taken(usage, model, at)

    def _close(self, key: tuple[str, str], usage: Usage | None, model: str, at: float | None, before: Usage | None = None) -> Taken | None:
        if usage is None:
            return None
        taken = self._closed[key] = Taken(usage, model, at, before)
        if len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        return taken
