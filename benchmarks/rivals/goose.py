"""goose (block/goose e94f3047, 2026-04-03), its repetition inspector: counts equal calls in a row, never their answers,
and refuses.

As shipped it does nothing: the agent builds it without a limit, and ``--max-tool-repetitions`` has not been passed on
since 2025-09-10.
With a limit, every further call of the row is refused and the run goes on.
"""

from rivals.steps import Row, Said, Step, call_of


class Goose:
    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._row = Row()

    def feed(self, step: Step) -> Said:
        if step["kind"] != "tool_call" or self.limit is None:
            return None
        count = self._row.add(call_of(step))
        return ("block", f"{count} equal calls of {step.get('tool')}") if count > self.limit else None
