"""What a rival reads of a step, and what it may say to it.

A step has a ``kind``: ``model`` (a response begins), ``tool_call``, ``tool_result``, ``error`` (the harness itself
refused or failed the call) or ``message``. A rival answers each step with None or ``(action, why)``: ``nudge`` tells
the model, ``block`` refuses the call, ``ask`` hands the run to a human, ``stop`` ends it.
"""

import json
from collections.abc import Hashable
from typing import Any, Protocol

Step = dict[str, Any]
Said = tuple[str, str] | None
ANSWERS = ("tool_result", "error")
_NO_AGENTS = ("user", "system", "developer", "environment", "tool")


class Detector(Protocol):
    def feed(self, step: Step) -> Said: ...


class Row:
    """How often the same thing has come in a row."""

    def __init__(self) -> None:
        self.count = 0
        self._last: Hashable = None

    def add(self, thing: Hashable) -> int:
        self.count = self.count + 1 if self.count and thing == self._last else 1
        self._last = thing
        return self.count

    def forget(self) -> None:
        self.count = 0


def as_written(value: Any) -> str:
    """JSON that keeps the order of keys, as JavaScript writes it: another order is another value."""
    return json.dumps(value, ensure_ascii=False, default=str)


def in_order(value: Any) -> str:
    """JSON with sorted keys: their order does not matter."""
    return json.dumps(value, ensure_ascii=False, default=str, sort_keys=True)


def call_of(step: Step) -> tuple[str, str]:
    return str(step.get("tool")), in_order(step.get("args"))


def answer_of(step: Step) -> str:
    value = step.get("result", step.get("text"))
    return value if isinstance(value, str) else in_order(value)


def text_of(step: Step) -> str:
    return step.get("text") or ""


def is_user(step: Step) -> bool:
    return step["kind"] == "message" and step.get("agent") == "user"


def is_agents_message(step: Step) -> bool:
    return step["kind"] == "message" and step.get("agent") not in _NO_AGENTS
