"""Crush (charmbracelet/crush 37f36e93, 2026-08-21): counts whole responses, calls and answers together, and stops.

When one of them makes up more than 5 of the last 10, the run ends, so never before the tenth. Order within the ten does
not matter; nothing is normalised, and a message of the user begins anew.
"""

from collections import deque

from rivals.steps import ANSWERS, Said, Step, answer_of, as_written, is_user

WINDOW, MOST = 10, 5
Response = tuple[tuple[str, str, str], ...]


class Crush:
    def __init__(self) -> None:
        self._recent: deque[Response] = deque(maxlen=WINDOW)
        self._calls: list[tuple[str, str]] = []
        self._answers: list[str] = []

    def feed(self, step: Step) -> Said:
        kind, said = step["kind"], None
        if kind in ANSWERS:
            self._answers.append(answer_of(step))
        elif kind == "model" or is_user(step):
            said = self._response_ended()
            if kind != "model":
                self._recent.clear()
        elif kind == "tool_call":
            if self._answers and len(self._answers) >= len(self._calls):  # the trace holds no model step between
                said = self._response_ended()
            self._calls.append((str(step.get("tool")), as_written(step.get("args"))))
        return said

    def _response_ended(self) -> Said:
        if not self._calls:
            return None
        answers = self._answers + [""] * len(self._calls)
        response = tuple((tool, args, answer) for (tool, args), answer in zip(self._calls, answers, strict=False))
        self._calls, self._answers = [], []
        self._recent.append(response)
        count = self._recent.count(response)
        return (
            ("stop", f"{count} of the last {WINDOW} responses are equal")
            if len(self._recent) == WINDOW and count > MOST
            else None
        )
