"""Events for the tests of detectors."""

from collections.abc import Iterable
from typing import Any

from runguard.core.events import (
    FAILURES,
    Answer,
    Outcome,
    ToolResults,
)

ALONE = {
    "same_call": False,
    "no_news": False,
    "repetition": False,
    "stall": False,
    "tool_failures": False,
    "empty": False,
    "handoff": False,
    "growth": False,
}


def only(rule: str, **rungs: float) -> dict[str, Any]:
    """Policy keywords under which one rule works and all others are off."""
    return {"rules": {**{name: off for name, off in ALONE.items() if name != rule}, rule: rungs}, "max_nudges": 100}


def results(
    *answers: Answer, batch: str = "", at: float = 0.0, news: bool = False, progress: bool = False
) -> ToolResults:
    """What the guard shows a detector: answers with their names, and the sets it made of them."""
    event = ToolResults("run", "", "agent", at, batch, list(answers), news, progress)
    event.calls = frozenset(a.call for a in answers)
    event.pairs = frozenset((a.call, a.answer) for a in answers if a.outcome is not Outcome.REFUSED)
    event.failures = any(a.outcome in FAILURES for a in answers)
    return event


def answer(
    call: str = "c", says: str = "a", *, tool: str = "t", outcome: Outcome = Outcome.OK, failure: str = ""
) -> Answer:
    return Answer(tool, call.encode(), says, outcome=outcome, answer=hash(says), failure=failure)


def failing(failure: str = "boom", *, tool: str = "t", outcome: Outcome = Outcome.FAILED) -> Answer:
    return answer(tool=tool, outcome=outcome, failure=failure)


def page(n: int) -> str:
    """An answer of many words, each time others."""
    return " ".join(f"item{n}x{k}" for k in range(30))


def word(finding: Any) -> str:
    return "-" if finding is None else finding.action.word


def words(steps: Iterable[Any]) -> list[str]:
    return [step.word for step in steps]
