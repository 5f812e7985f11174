"""Roo Code (RooCodeInc/Roo-Code cb836567, 2026-04-14): counts equal calls in a row, answers aside, and mistakes; a
human is asked.

The fourth equal call is refused and asked about, then the row is forgotten. A mistake is a tool use that the harness
rejects, or a response without a call right after another one; a tool that answers clears them. Three mistakes are asked
about before the next response.
"""

from rivals.steps import Row, Said, Step, call_of, is_user

LIMIT = 3


class Roo:
    def __init__(self, *, mistakes: bool = True) -> None:
        self.counts_mistakes = mistakes
        self._row = Row()
        self._mistakes = self._silent = 0
        self._calls: int | None = None  # of the response under way; None: there is none

    def feed(self, step: Step) -> Said:
        kind = step["kind"]
        if kind == "model" or is_user(step):
            self._response_ended()
            self._calls = 0 if kind == "model" else None
            if kind == "model" and self.counts_mistakes and self._mistakes >= LIMIT:
                self._mistakes = 0
                return "ask", f"{LIMIT} mistakes in a row"
        elif kind == "tool_call":
            self._calls = (self._calls or 0) + 1
            if self._row.add(call_of(step)) > LIMIT:
                self._row.forget()
                return "ask", f"{LIMIT + 1} equal calls of {step.get('tool')}"
        elif kind == "error":
            self._mistakes += 1
        elif kind == "tool_result":
            self._mistakes = 0
        return None

    def _response_ended(self) -> None:
        if self._calls is None:
            return
        self._silent = 0 if self._calls else self._silent + 1
        self._mistakes += self._silent > 1
