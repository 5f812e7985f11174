"""Steps of a guarded function that bring nothing new: the same tools, whatever their arguments, with results that say
nothing new.

A model asks for tools, the caller runs them, and the next request holds their results. Nothing new is the same failure,
the same empty or unfinished result, or the same request once more. Equal results that report success are a batch and
count as progress.
"""

from itertools import count
from typing import Any, Final

from runguard.core.decision import Finding, Rungs
from runguard.core.events import FAILURES, Answer, Outcome, ToolResults
from runguard.core.identity import answer_text, digest, mask
from runguard.core.outcomes import classify, failure_class, is_unfinished, named_items
from runguard.core.rules.repetition import Cycle
from runguard.providers.messages import ToolResult

Asked = tuple[str, object]  # a tool that the model asked for, and its arguments
_ASKED_AGAIN: Final = "the same request"


class NoProgress:
    """Counts rounds of such steps in one run. One step is one answer of the model with all its calls."""

    __slots__ = ("_asked", "_cycle", "_mark", "_numbers")

    def __init__(self, repeats: int, max_cycle_len: int) -> None:
        self._cycle = Cycle(Rungs(stop=repeats), max_cycle_len)
        self._asked: tuple[Asked, ...] = ()  # by the last answer; empty once its results were seen
        self._mark: int | None = None  # of the request before
        self._numbers = count()

    @property
    def waits_for_results(self) -> bool:
        """Whether the last answer asked for tools, so that the results in the next request count."""
        return bool(self._asked)

    def answered(self, calls: tuple[Asked, ...]) -> None:
        """The model answered and asks for these tools.

        An answer that asks for none ends a turn: the next one starts a new count.
        """
        self._asked = calls
        if not calls:
            self._cycle.clear()

    def next_request(
        self, run: str, agent: str, at: float, results: list[ToolResult], mark: int | None
    ) -> Finding | None:
        """The caller is about to send the next request, with these results of the tools that were asked for."""
        asked, self._asked = self._asked, ()
        is_again = mark is not None and mark == self._mark
        self._mark = mark
        if not asked:
            return None
        if results:
            return self.observe(run, agent, at, _matched(asked, results))
        return self._count(
            run, agent, at, [Answer(name, _id(name)) for name, _ in asked], _ASKED_AGAIN if is_again else ""
        )

    def observe(self, run: str, agent: str, at: float, results: "list[tuple[ToolResult, object]]") -> Finding | None:
        """One step: its results, each with the arguments of its call."""
        stale = [_nothing_new(result, args) for result, args in results]
        answers = [Answer(result.tool, _id(result.tool), result.value) for result, _ in results]
        return self._count(run, agent, at, answers, "\1".join(sorted(stale)) if all(stale) else "")

    def _count(self, run: str, agent: str, at: float, answers: list[Answer], what: str) -> Finding | None:
        """``what`` identifies a step that brings nothing new; empty: it brings news, so it equals no other step."""
        step = int.from_bytes(digest(what)[:7]) if what else -1 - next(self._numbers)
        pairs = frozenset((answer.call, step) for answer in answers)
        return self._cycle.observe(ToolResults(run, "", agent, at, "", answers, pairs=pairs))


def _id(tool: str) -> bytes:
    return digest(tool)


def _matched(asked: tuple[Asked, ...], results: list[ToolResult]) -> "list[tuple[ToolResult, object]]":
    """Each result with the name and the arguments of its call: by name, or else by position."""
    left = list(asked)
    found: list[tuple[ToolResult, object]] = []
    for result in results:
        at = next((n for n, (name, _) in enumerate(left) if not result.tool or name == result.tool), None)
        name, args = left.pop(at) if at is not None else (result.tool, None)
        found.append((result if result.tool else result._replace(tool=name or asked[-1][0]), args))
    return found


def _nothing_new(result: ToolResult, args: Any) -> str:
    """What a result that brings nothing new is known by; empty for one that brings news."""
    value = result.value
    outcome, failure = classify(value)
    if result.is_error and outcome is Outcome.OK:
        outcome, failure = Outcome.FAILED, failure_class(answer_text(value))
    if outcome in FAILURES:
        return f"{result.tool}\0{failure}\0{named_items(args, value)}"
    if outcome is Outcome.EMPTY or failure or is_unfinished(value):
        return f"{result.tool}\0{mask(answer_text(value))}"
    return ""
