"""opencode (anomalyco/opencode d545d8fb, 2026-08-19), its doom-loop guard: three equal calls in a row, answers aside; a
human is asked.

Key order counts. As shipped only the calls of one assistant message are looked at, and every model response is a
message of its own, so the guard sees no more than three equal calls made at once. The documentation promises three in a
row wherever they are made.
"""

from rivals.steps import Row, Said, Step, as_written, is_user

THREE = 3


class OpenCode:
    def __init__(self, *, across_messages: bool = False) -> None:
        self.across_messages = across_messages
        self._row = Row()

    def feed(self, step: Step) -> Said:
        if is_user(step) or (step["kind"] == "model" and not self.across_messages):
            self._row.forget()
        elif step["kind"] == "tool_call":
            count = self._row.add((step.get("tool"), as_written(step.get("args"))))
            if count >= THREE:
                return "ask", f"{count} equal calls of {step.get('tool')}"
        return None
