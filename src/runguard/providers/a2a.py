"""Reads what the reply of a remote A2A agent reports: the usage of its model calls, and a stop by a guard over there.

ADK keeps a task of the remote agent in ``event.custom_metadata["a2a:response"]`` and updates it with every message. A
new integration puts the figures of one model call beside its artifact or its message: there they are exact. The older
one merges them into the metadata of the task, where they stay until other figures replace them. So several events
carry the figures of one call, and ``_is_new`` says which of them report another call.

A remote agent may call remote agents itself. Its own task then carries theirs in ``adk_custom_metadata``.
``adk/a2a`` reads live events with it, ``replay/adk`` recorded ones.
"""

import ast
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from runguard.core.decision import METADATA_KEY, STOP_CODE
from runguard.core.identity import LruDict
from runguard.pricing.rates import Usage
from runguard.providers.usage import read_usage

RESPONSE_KEY: Final = "a2a:response"
ERROR_KEY: Final = "a2a:error"
UNREPORTED: Final = "unreported"  # the model's name in figures where a reply does not report its usage
_FIELDS: Final = tuple(one.name for one in fields(Usage))
_TASKS_KEPT: Final = 10_000
_IDS_KEPT: Final = 1_000  # reports of one task
_HOPS: Final = 8  # remote agents behind remote agents
# Characters of metadata that are parsed, in about a millisecond each: the far side must not block the event loop.
_JSON: Final = 100_000
_LITERAL: Final = 16_000  # only old versions of ADK send the text of Python objects
_BESIDE_STRINGS: Final = 5_000  # of a literal: each value takes much longer than a character of a string
# An unfinished string is taken to the end of the text, because searching its end from every quotation mark takes long.
_STRINGS: Final = re.compile(r"""'(?:[^'\\]|\\.?)*+'?|"(?:[^"\\]|\\.?)*+"?""", re.DOTALL)
_VALUES: Final = re.compile(r"(?:[\s\d{}\[\](),:.e-]|None|True|False)*")
_OVER: Final = ("completed", "failed", "canceled", "cancelled", "rejected")
_ENUM: Final = re.compile(r"<[\w.]+: ('[^']*'|\d+)>")  # the text of a member of an enum
_PAUSED: Final = ("required",)  # input or a sign-in is required: the reply has ended, the task has not


@dataclass(slots=True)
class RemoteReply:
    """What one event says that no earlier event has said."""

    reports: list[Usage] = field(default_factory=list)  # one for each model call
    trip: Mapping[str, Any] | None = None  # of a guard that stopped the remote run
    is_over: bool = False  # the reply has ended


@dataclass(slots=True)
class _Task:
    """What is known of one remote task."""

    seen: LruDict[str, None] = field(default_factory=lambda: LruDict(_IDS_KEPT))  # ids of messages and artifacts
    last: Usage | None = None
    author: str = ""
    answered: bool = False  # a tool has answered since the last report


class ReplyReader:
    """Reads the events of any number of replies, each once. Safe to use from many threads."""

    def __init__(self) -> None:
        self._tasks = LruDict[str, _Task](_TASKS_KEPT)
        self._lock = threading.Lock()

    def read(self, response: Any) -> RemoteReply:
        """Return what an event reports and no earlier event has reported.

        ``response``: the task or the message in the event's metadata, as a mapping. Anything else reports nothing.
        """
        reply = RemoteReply()
        if isinstance(response, Mapping):
            with self._lock:
                self._read(response, reply, 0)
            status = response.get("status")
            state = str(status.get("state")).lower() if isinstance(status, Mapping) else ""
            reply.is_over = not isinstance(status, Mapping) or state.endswith((*_OVER, *_PAUSED))
            metadata = _mapping(response.get("metadata"))
            if reply.trip is None and state.endswith("failed") and metadata.get("adk_error_code") == STOP_CODE:
                reply.trip = {}  # a guard stopped the run, but its reason is not in the reply
        return reply

    def _read(self, response: Mapping[str, Any], reply: RemoteReply, hops: int) -> None:
        task = self._task(str(response.get("id") or response.get("messageId") or response.get("message_id") or ""))
        status = response.get("status")
        message = status.get("message") if isinstance(status, Mapping) else response
        message = message if isinstance(message, Mapping) else {}
        merged = _mapping(response.get("metadata"))
        is_relay = self._look_inside(merged, reply, hops)
        for part in (*_mappings(response.get("artifacts")), message):
            metadata = _mapping(part.get("metadata"))
            if part is response or not metadata:
                continue
            self._look_inside(metadata, reply, hops)
            if (usage := _usage_of(metadata)) is not None and _is_first(task, str(metadata.get("adk_event_id"))):
                reply.reports.append(usage)
        usage = _usage_of(merged)
        if usage is None:
            return
        name, author = str(merged.get("adk_event_id")), str(merged.get("adk_author"))
        if not _is_first(task, name):
            return
        if _only_answers(message):
            task.answered = True
            return
        if self._is_new(task, usage, author, is_relay or bool(merged.get("adk_error_code"))):
            reply.reports.append(usage)
            task.last, task.author, task.answered = usage, author, False

    @staticmethod
    def _is_new(task: _Task, usage: Usage, author: str, is_other: bool) -> bool:
        """Return whether figures in the metadata of the task are those of another model call.

        Equal figures are, where the same agent speaks again after a tool has answered, or another one speaks.
        ``is_other``: the message does not come from a model of this task, so equal figures were left there.
        """
        if usage != task.last:
            return True
        return not is_other and (task.answered or author != task.author)

    def _look_inside(self, metadata: Mapping[str, Any], reply: RemoteReply, hops: int) -> bool:
        """Read a trip, and the task of an agent that the remote agent called. Return whether there is such a task.

        ``hops``: how many remote agents lie between this one and the caller.
        """
        custom = _parsed(metadata.get("adk_custom_metadata"))
        trip = custom.get(METADATA_KEY)
        if isinstance(trip, Mapping) and trip.get("rule") and trip.get("enforced") and not trip.get("branch"):
            reply.trip = trip
        inner = custom.get(RESPONSE_KEY)
        if not isinstance(inner, Mapping) or hops >= _HOPS:
            return False
        self._read(inner, reply, hops + 1)
        return True

    def _task(self, name: str) -> _Task:
        task = self._tasks.pop(name, None) or _Task()
        self._tasks[name] = task
        return task


def total_of(reports: Iterable[Usage]) -> Usage:
    """Return the sum of several usages."""
    calls = list(reports)
    return Usage(*(sum(getattr(one, name) for one in calls) for name in _FIELDS))


def _is_first(task: _Task, name: str) -> bool:
    """Return whether a message or an artifact is seen for the first time, and remember it."""
    if name in task.seen:
        return False
    task.seen[name] = None
    return True


def _usage_of(metadata: Mapping[str, Any]) -> Usage | None:
    """Return the usage in the metadata, if any.

    Figures come as whole numbers, or as floats where the wire has no integers.
    """
    report = _parsed(metadata.get("adk_usage_metadata"))
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in report.items()}
    counts = read_usage(whole, []) if whole else None
    return counts.usage() if counts is not None else None


def _only_answers(message: Mapping[str, Any]) -> bool:
    """Return whether a message holds answers of tools and nothing that a model says."""
    kinds = [_mapping(part.get("metadata")).get("adk_type") for part in _mappings(message.get("parts"))]
    return bool(kinds) and all(kind == "function_response" for kind in kinds)


def _parsed(value: Any) -> Mapping[str, Any]:
    """Return metadata that ADK sent as data, as JSON, or (older versions) as the text of a Python object."""
    if not isinstance(value, str):
        return _mapping(value)
    if not value.startswith("{"):
        return {}
    for parse, most in ((json.loads, _JSON), (_literal, _LITERAL)):
        try:
            if len(value) <= most:
                return _mapping(parse(value))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return {}


def _literal(text: str) -> Any:
    """Parse the text of a Python object; ValueError when it is more than a small literal.

    Other expressions take long before ``ast`` refuses them.
    """
    text = _ENUM.sub(r"\1", text)
    beside = _STRINGS.sub("0", text)
    if len(beside) > _BESIDE_STRINGS or _VALUES.fullmatch(beside) is None:
        raise ValueError("not the text of a small object")
    return ast.literal_eval(text)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (one for one in (value if isinstance(value, list | tuple) else ()) if isinstance(one, Mapping))
