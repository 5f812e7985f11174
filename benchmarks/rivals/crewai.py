"""crewAI (crewAIInc/crewAI f4731f50, 2026-08-21): looks at the previous call alone and does not run an equal one.

The model is told that it reused the same input, and the run goes on; 25 iterations end it (one more model call asks for
a final answer).
"""

from rivals.steps import Row, Said, Step, call_of


class CrewAI:
    def __init__(self, iterations: int | None = 25) -> None:
        self.iterations = iterations
        self._row = Row()
        self._turns = 0

    def feed(self, step: Step) -> Said:
        if step["kind"] == "model":
            self._turns += 1
            if self.iterations is not None and self._turns > self.iterations:
                return "stop", f"{self.iterations} iterations"
        elif step["kind"] == "tool_call" and self._row.add(call_of(step)) > 1:
            return "block", f"the same input for {step.get('tool')} again"
        return None
