"""OpenClaw (commit 00655306): looks at the last 30 calls with their answers before each call; off as shipped.

Counts, first match wins: calls in a row of one tool that does not exist (10: refused); calls equal to this one with its
latest answer, others between allowed (30: stopped); two calls in turn (20 with unchanged answers: refused, 10: told);
again the equal calls with equal answers (20: refused); equal calls whatever they answered (10: told). Its special case
for known polling tools has no counterpart in these runs.
"""

import re
from dataclasses import dataclass

from rivals.steps import ANSWERS, Said, Step, answer_of, call_of, is_user

WINDOW, TELL, REFUSE, STOP, MISSING = 30, 10, 20, 30, 10
_NO_SUCH_TOOL = re.compile(
    r"unknown tool[:\s]+[\"']?([\w.-]+)|tool\s+[\"']?([\w.-]+)[\"']?\s+(?:not found|is not available)", re.IGNORECASE
)


@dataclass(slots=True)
class _Call:
    key: tuple[str, str]
    id: object
    answer: str | None = None
    missing: str = ""  # the tool that does not exist


class OpenClaw:
    def __init__(self, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._calls: list[_Call] = []

    def feed(self, step: Step) -> Said:
        if not self.enabled:
            return None
        said = None
        if is_user(step):
            self._calls = []
        elif step["kind"] == "tool_call":
            call = _Call(call_of(step), step.get("call_id"))
            said = self._judge(call.key)
            self._calls = [*self._calls, call][-WINDOW:]
        elif step["kind"] in ANSWERS:
            self._answer(step)
        return said

    def _answer(self, step: Step) -> None:
        who = str(step.get("tool")), step.get("call_id")
        call = next((c for c in reversed(self._calls) if c.answer is None and (c.key[0], c.id) == who), None)
        if call is None:
            return
        text = answer_of(step)
        call.answer = f"{step['kind']} {text}"
        named = _NO_SUCH_TOOL.search(text) if step["kind"] == "error" else None
        call.missing = (named[1] or named[2]).lower() if named else ""

    def _judge(self, key: tuple[str, str]) -> Said:
        missing, unchanged, in_turn = self._missing(key[0]), self._unchanged(key), self._in_turn(key)
        equal = sum(call.key == key for call in self._calls)
        if missing >= MISSING:
            return "block", f"{missing} calls of a tool that does not exist"
        if unchanged >= STOP:
            return "stop", f"{unchanged} equal calls with equal answers"
        if len(in_turn) >= REFUSE - 1 and all(len(answers) == 1 for answers in _answers(in_turn)):
            return "block", f"{len(in_turn) + 1} calls in turn"
        if len(in_turn) >= TELL - 1:
            return "nudge", f"{len(in_turn) + 1} calls in turn"
        if unchanged >= REFUSE:
            return "block", f"{unchanged} equal calls with equal answers"
        return ("nudge", f"{equal} equal calls") if equal >= TELL else None

    def _missing(self, tool: str) -> int:
        count = 0
        for call in reversed(self._calls):
            if call.key[0] != tool or not call.missing or call.missing != self._calls[-1].missing:
                break
            count += 1
        return count

    def _unchanged(self, key: tuple[str, str]) -> int:
        answers = [call.answer for call in reversed(self._calls) if call.key == key and call.answer is not None]
        return next((n for n, answer in enumerate(answers) if answer != answers[0]), len(answers))

    def _in_turn(self, key: tuple[str, str]) -> list[_Call]:
        """The past calls that this one would go on alternating with, the latest first; none if it would not."""
        if not self._calls or self._calls[-1].key == key:
            return []
        past = self._calls[::-1]
        sides = past[0].key, next((call.key for call in past if call.key != past[0].key), None)
        if sides[1] != key:
            return []
        end = next((n for n, call in enumerate(past) if call.key != sides[n % 2]), len(past))
        return past[:end] if end >= 2 else []


def _answers(calls: list[_Call]) -> list[set[object]]:
    """What each side has answered; an open answer is unlike all others."""
    return [{object() if call.answer is None else call.answer for call in side} for side in (calls[::2], calls[1::2])]
