"""Conditions on events: counts, texts, tool answers, hand-offs, state."""

import json
from collections.abc import Sequence
from reprlib import Repr
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.money import to_count
from runguard.termination.arguments import flag_of, names_of, text_of
from runguard.termination.condition import Event, TerminationCondition
from runguard.termination.reading import answers_of, author_of, state_delta_of, transfer_of, visible_text, whole

_ANY: Final = object()
_repr = Repr()
_repr.maxstring = _repr.maxother = 80
_short = _repr.repr


class _Counting(TerminationCondition):
    """Base of conditions that count events."""

    _count_seen = 0

    def clear(self, now: float) -> None:
        self._count_seen = 0


class MaxIterationsTermination(_Counting):
    """Fires after a number of events, without chunks of streams."""

    def __init__(self, max_iterations: int) -> None:
        self._max = to_count(max_iterations, "max_iterations")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        self._count_seen += sum(1 for _ in whole(events))
        if self._count_seen < self._max:
            return None
        return f"Maximum of {self._max} events reached, current count: {self._count_seen}"

    def settings(self) -> dict[str, Any]:
        return {"max_iterations": self._max}


class MaxMessageTermination(_Counting):
    """Fires after a number of events with text; with ``include_agent_event`` calls, answers and thoughts count too."""

    def __init__(self, max_messages: int, include_agent_event: bool = False) -> None:
        self._max = to_count(max_messages, "max_messages")
        self._all = flag_of(include_agent_event, "include_agent_event")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        self._count_seen += sum(1 for event in whole(events) if self._all or visible_text(event).strip())
        if self._count_seen < self._max:
            return None
        return f"Maximum number of messages {self._max} reached, current message count: {self._count_seen}"

    def settings(self) -> dict[str, Any]:
        return {"max_messages": self._max, **({"include_agent_event": True} if self._all else {})}


class _FromSources(TerminationCondition):
    """Base of conditions that read only events of some authors."""

    _sources: tuple[str, ...] | None

    def _heard(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in whole(events) if self._sources is None or author_of(event) in self._sources]

    def settings(self) -> dict[str, Any]:
        return {} if self._sources is None else {"sources": list(self._sources)}


class TextMentionTermination(_FromSources):
    """Fires when a text occurs in an event; the case must match.

    ``sources``: the author, or authors, whose texts count.
    """

    def __init__(self, text: str, sources: str | Sequence[str] | None = None) -> None:
        self._text = text_of(text, "text")
        self._sources = names_of(sources, "sources")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return (
            f"Text '{self._text}' mentioned"
            if any(self._text in visible_text(event) for event in self._heard(events))
            else None
        )

    def settings(self) -> dict[str, Any]:
        return {"text": self._text, **super().settings()}


class FinalAnswerTermination(_FromSources):
    """Fires when an agent has given its answer: a final response with text."""

    def __init__(self, sources: str | Sequence[str] | None = None) -> None:
        self._sources = names_of(sources, "sources")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return next(
            (f"Final answer of {author_of(event) or 'an agent'}" for event in self._heard(events) if _is_answer(event)),
            None,
        )


def _is_answer(event: Event) -> bool:
    is_final = getattr(event, "is_final_response", None)
    return callable(is_final) and bool(is_final()) and bool(visible_text(event).strip())


class FunctionCallTermination(TerminationCondition):
    """Fires when a function has answered, not when it was requested."""

    def __init__(self, function_name: str) -> None:
        self._name = text_of(function_name, "function_name")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        answered = any(
            getattr(answer, "name", None) == self._name for event in whole(events) for answer in answers_of(event)
        )
        return f"Function '{self._name}' was executed" if answered else None

    def settings(self) -> dict[str, Any]:
        return {"function_name": self._name}


class HandoffTermination(TerminationCondition):
    """Fires when the work was handed to an agent of this name."""

    def __init__(self, target: str) -> None:
        self._target = text_of(target, "target")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        found = next((event for event in whole(events) if transfer_of(event) == self._target), None)
        return None if found is None else f"Handoff to {self._target} from {author_of(found) or 'an agent'} detected"

    def settings(self) -> dict[str, Any]:
        return {"target": self._target}


class StateTermination(TerminationCondition):
    """Fires when an event sets a key of the session's state to a value; without a value, to anything true."""

    def __init__(self, key: str, value: Any = _ANY) -> None:
        self._key, self._value = text_of(key, "key"), value

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        for event in whole(events):
            delta = state_delta_of(event)
            if self._key in delta and self._fits(delta[self._key]):
                return f"State '{self._key}' is {_short(delta[self._key])}"
        return None

    def _fits(self, actual: Any) -> bool:
        try:
            if self._value is _ANY:
                return bool(actual)
            return isinstance(actual, bool) == isinstance(self._value, bool) and bool(actual == self._value)
        except Exception:  # the truth value of an array is ambiguous: it is not the expected value
            return False

    def settings(self) -> dict[str, Any]:
        return {"key": self._key, **({} if self._value is _ANY else {"value": self._value})}

    def to_dict(self) -> dict[str, Any]:
        if self._value is not _ANY and not _survives_json(self._value):
            raise PolicyError(
                f"value = {_short(self._value)}: cannot be saved, because it does not survive a JSON round trip"
            )
        return super().to_dict()


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
