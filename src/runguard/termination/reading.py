"""Read fields of events by name; an event of another version or of a test may lack any field."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runguard.pricing.rates import Usage
from runguard.providers.usage import EventUsage

_MODELS_KEPT: Final = 1_024


def whole(events: Sequence[Any]) -> Iterator[Any]:
    """Yield events that are not chunks of a stream; the closing event repeats the text of the chunks."""
    return (event for event in events if not getattr(event, "partial", None))


def author_of(event: Any) -> str:
    return getattr(event, "author", None) or ""


def branch_of(event: Any) -> str:
    return getattr(event, "branch", None) or ""


def scope_of(event: Any) -> str:
    """Return the id of the call that delegated the task to which the event belongs."""
    return getattr(event, "isolation_scope", None) or ""


def parts_of(event: Any) -> Sequence[Any]:
    return getattr(getattr(event, "content", None), "parts", None) or ()


def visible_text(event: Any) -> str:
    """Return the visible text of an event without thoughts, with its parts joined."""
    texts = (getattr(part, "text", None) for part in parts_of(event) if not getattr(part, "thought", None))
    return "".join(text for text in texts if isinstance(text, str))


def calls_of(event: Any) -> list[Any]:
    return [call for part in parts_of(event) if (call := getattr(part, "function_call", None)) is not None]


def answers_of(event: Any) -> list[Any]:
    """Return the function responses, without requests for a confirmation or a sign-in."""
    actions = getattr(event, "actions", None)
    waiting = {
        *(getattr(actions, "requested_tool_confirmations", None) or ()),
        *(getattr(actions, "requested_auth_configs", None) or ()),
    }
    answers = [answer for part in parts_of(event) if (answer := getattr(part, "function_response", None)) is not None]
    return [answer for answer in answers if getattr(answer, "id", None) not in waiting] if waiting else answers


def transfer_of(event: Any) -> str:
    return getattr(getattr(event, "actions", None), "transfer_to_agent", None) or ""


def state_delta_of(event: Any) -> dict[str, Any]:
    return getattr(getattr(event, "actions", None), "state_delta", None) or {}


# ---- model calls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallTaken:
    """The usage of one model call. ``before``: the amount already counted for the same call, which this replaces."""

    usage: Usage
    model: str
    at: float | None  # unix seconds
    before: Usage | None = None


class ModelCallReader:
    """Yield usage and model once per model call."""

    __slots__ = ("_models", "_usage")

    def __init__(self) -> None:
        self._usage = EventUsage()
        self._models: dict[tuple[str, str], str] = {}  # by the ids of the chunks of a stream

    def read(self, events: Sequence[Any]) -> list[CallTaken]:
        return [taken for event in events if (taken := self._read(event)) is not None]

    def _read(self, event: Any) -> CallTaken | None:
        key, model = (author_of(event), branch_of(event)), getattr(event, "model_version", None) or ""
        if getattr(event, "partial", None):
            if model and (len(self._models) < _MODELS_KEPT or key in self._models):
                self._models[key] = model
        else:
            model = model or self._models.get(key, "")
        taken = self._usage.read(event)
        if taken is None:
            return None
        return CallTaken(taken.usage, model, getattr(event, "timestamp", None), taken.before)
