"""Cline (cline/cline 21cb8d25, 2026-08-22): counts equal calls in a row, answers aside; tells the model at 3 and stops
at 5.

Key order and the field ``task_progress`` do not count. Six turns in a row in which every tool failed stop the run too
(three in the CLI).
An open change (#12543) begins to count anew when a successful answer differs from the one before, up to 20 equal calls.
"""

from rivals.steps import Row, Said, Step, answer_of, in_order, is_user

TELL, STOP = 3, 5
ANYWAY = 4 * STOP


class Cline:
    def __init__(self, failed_turns: int = 6, *, reads_answers: bool = False) -> None:
        self.failed_turns, self.reads_answers = failed_turns, reads_answers
        self._since_news, self._equal = Row(), Row()
        self._last_answer: str | None = None
        self._worked = self._failed = False  # in the turn under way
        self._lost_turns = 0

    def feed(self, step: Step) -> Said:
        kind = step["kind"]
        if kind == "tool_call":
            return self._call(step)
        if kind == "tool_result":
            self._worked = True
            if self.reads_answers:
                self._answer(answer_of(step))
        elif kind == "error":
            self._failed = True
        elif kind == "model" or is_user(step):
            return self._turn_ended()
        return None

    def _call(self, step: Step) -> Said:
        args = step.get("args")
        if isinstance(args, dict):
            args = {name: value for name, value in args.items() if name != "task_progress"}
        call = step.get("tool"), in_order(args)
        count, equal = self._since_news.add(call), self._equal.add(call)
        if equal == 1:
            self._last_answer = None
        if count >= STOP or (self.reads_answers and equal >= ANYWAY):
            return "stop", f"{equal} equal calls of {step.get('tool')}"
        return ("nudge", f"{count} equal calls of {step.get('tool')}") if count == TELL else None

    def _answer(self, answer: str) -> None:
        if self._last_answer not in (None, answer):
            self._since_news.forget()
        self._last_answer = answer

    def _turn_ended(self) -> Said:
        worked, failed = self._worked, self._failed
        self._worked = self._failed = False
        if worked:
            self._lost_turns = 0
        elif failed:
            self._lost_turns += 1
            if self._lost_turns >= self.failed_turns:
                return "stop", f"{self._lost_turns} turns in which every tool failed"
        return None
