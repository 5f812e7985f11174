"""stella (macanderson/stella 57df8931, 2026-08-22): looks at calls with their answers since the last message of the
user.

A loop is, first match wins: the same call and answer 3 times in a row; a circle of 2 to 4 of them, 3 rounds; the same
one 3 times anywhere unless some call has answered differently when made again; 6 equal answers of one tool to calls
that are not all equal. The first loop is told to the model, a second one too if it is another; the same loop again, or
a third, stops the run.
"""

from rivals.steps import ANSWERS, Said, Step, answer_of, call_of, is_user

THREE, ROUNDS, STAGNANT, LONGEST, TOLD = 3, 3, 6, 4, 2
Answered = tuple[str, str, str]  # tool, arguments, answer
Loop = tuple[str, frozenset[tuple[str, str]]]  # its kind, and the calls that make it


class Stella:
    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._answered: list[Answered] = []
        self._open: list[tuple[object, tuple[str, str]]] = []
        self._answers: dict[tuple[str, str], str] = {}
        self._some_answer_changed = False
        self._told: frozenset[tuple[str, str]] | None = None
        self._times_told = 0

    def feed(self, step: Step) -> Said:
        kind = step["kind"]
        if is_user(step):
            self._begin()
        elif kind == "model":
            self._open.clear()  # calls that were never answered match nothing
        elif kind == "tool_call":
            self._open.append((step.get("call_id"), call_of(step)))
        elif kind in ANSWERS and self._open:
            self._answer(step)
            if not self._open:
                return self._act(self._loop())
        return None

    def _answer(self, step: Step) -> None:
        ids = [call_id for call_id, _ in self._open]
        mine = step.get("call_id")
        _, call = self._open.pop(ids.index(mine) if mine in ids else 0)
        answer = step["kind"] + answer_of(step)
        self._answered.append((*call, answer))
        self._some_answer_changed |= self._answers.setdefault(call, answer) != answer

    def _loop(self) -> Loop | None:
        past, last = self._answered, self._answered[-1]
        if past[-THREE:] == [last] * THREE:
            return "the same call and answer", frozenset([last[:2]])
        for length in range(2, LONGEST + 1):
            if len(past) >= length * ROUNDS and past[-length * ROUNDS :] == past[-length:] * ROUNDS:
                return f"a circle of {length}", frozenset(call[:2] for call in past[-length:])
        if not self._some_answer_changed and past.count(last) >= THREE:
            return "the same call and answer, others between", frozenset([last[:2]])
        tail = past[-STAGNANT:]
        if (
            len(tail) == STAGNANT
            and len({(tool, answer) for tool, _, answer in tail}) == 1
            and len({args for _, args, _ in tail}) > 1
        ):
            return "one answer to different calls", frozenset([(last[0], "*")])
        return None

    def _act(self, loop: Loop | None) -> Said:
        if loop is None:
            return None
        why, calls = loop
        if self._told is not None and (calls == self._told or self._times_told >= TOLD):
            return "stop", why
        self._told = calls
        self._times_told += 1
        return "nudge", why
