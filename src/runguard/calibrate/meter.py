"""Measure the usage of the runs of a recording with the replay engine. A run lasts from one user message to the next.

The largest run of a recording counts. Runs of one conversation resemble each other, so only recordings are independent,
and a limit that allows the largest run allows the recording.
"""

from math import isnan, nan
from typing import Any, Final, NamedTuple

from runguard.calibrate.policy_values import changed
from runguard.core.events import Answer, ModelCall, ModelResult, Outcome, RunInfo, ToolCall, ToolResults
from runguard.core.identity import size_of
from runguard.engine.guard import Question, Result
from runguard.policy.settings import RULES, Policy
from runguard.pricing.rates import Usage
from runguard.replay.engine import Judge
from runguard.replay.player import Player
from runguard.replay.results import RunResult
from runguard.replay.steps import Turn

# A guard without limits: the usage of a run must not depend on where a policy would have stopped it.
UNLIMITED: Final[dict[str, Any]] = {
    "max_model_calls": 10**9,
    "max_tool_calls": None,
    "max_seconds": None,
    "max_usd": None,
    "max_tokens": None,
    "max_tool_result_chars": None,
    "max_tool_failures": None,
    "budgets": (),
    "rules": dict.fromkeys(RULES, False),
}
_ENOUGH: Final = 1_000_000_000


class Usages(NamedTuple):
    """The highest of each figure among the runs of a recording.

    NaN if the recording does not contain it: no price, no times, no answers.
    """

    usd: float = nan
    tokens: float = nan
    model_calls: float = nan
    tool_calls: float = nan
    seconds: float = nan
    largest_answer: float = nan


def unlimited(policy: Policy) -> Judge:
    """Return a judge without limits, with the prices and tools of ``policy``."""
    return Judge(changed(policy, UNLIMITED), to_the_end=True)


def _size(answer: Answer, is_understood: bool) -> float:
    """Return the size of an answer, or NaN. A journal has only live measurements; other recordings may omit answers."""
    if answer.chars:
        return float(answer.chars)
    is_recorded = not is_understood and answer.value is not None and answer.value != {"result": None}
    return float(size_of(answer.value, _ENOUGH)) if is_recorded else nan


class MeasuringPlayer(Player):
    """Plays a recording and notes what its runs usages, what was done before, and what led to nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.repeated = 0  # repeated calls and final texts
        self.fruitless = 0  # answers that were failures, refusals or empty
        self.largest = nan  # answer of the run, in characters
        self._done: set[bytes | int] = set()
        self.usages = Usages()
        self.unpriced: dict[str, int] = {}  # model -> calls
        self.begins_untimed = False  # the recording has times, but not for the beginning of a run
        self._before = (0, 0, 0, 0)
        self._since: float | None = None  # when the run began
        self._is_timed = False

    def finish(self) -> RunResult:
        result = super().finish()
        if self.unpriced:
            self.usages = self.usages._replace(usd=nan)
        return result

    def feed(self, step: Any) -> None:
        super().feed(step)
        if type(step) is not Turn and getattr(step, "at", None) is not None:
            self._is_timed = True
            self.begins_untimed = self.begins_untimed or self._since is None

    def check(self, event: Question) -> None:
        if isinstance(event, ToolCall):
            self._note(event.call)
        super().check(event)

    def after(self, event: Result) -> None:
        if isinstance(event, ModelResult):
            if event.text_id:
                self._note(event.text_id)
            super().after(event)
            return
        if not isinstance(event, ToolResults):
            super().after(event)
            return
        answers = event.answers
        for answer in answers:
            size = _size(answer, event.is_understood)
            if not isnan(size):
                self.largest = size if isnan(self.largest) else max(self.largest, size)
        super().after(event)
        self.fruitless += sum(answer.outcome is not Outcome.OK for answer in answers)

    def _note(self, name: bytes | int) -> None:
        self.repeated += name in self._done
        self._done.add(name)

    def begin(self, info: RunInfo) -> None:
        super().begin(info)
        self._before = self._counts()
        self._since, self._is_timed = self.clock.now or None, False
        self.largest = nan

    def book(self, event: ModelCall, usage: Usage, model: str, **options: Any) -> None:
        before = self.result.unpriced
        super().book(event, usage, model, **options)
        if self.result.unpriced > before and "usd" not in self.recorded.unknown:
            self.unpriced[model] = self.unpriced.get(model, 0) + 1

    def _close(self) -> None:
        if self._begun:
            model_calls, tool_calls, tokens, nano = (
                now - before for now, before in zip(self._counts(), self._before, strict=True)
            )
            if model_calls or tool_calls:  # an unanswered message is not a run
                # without pauses
                seconds = self.clock.now - self.live.started if self._is_timed and self._since is not None else nan
                usages = Usages(nano / 1e9, float(tokens), model_calls, tool_calls, seconds, self.largest)
                if unknown := self.recorded.unknown:
                    usages = Usages(
                        *(nan if name in unknown else value for name, value in zip(Usages._fields, usages, strict=True))
                    )
                self.usages = Usages(
                    *(new if isnan(old) or new > old else old for old, new in zip(self.usages, usages, strict=True))
                )
        super()._close()

    def _counts(self) -> tuple[int, int, int, int]:
        result = self.result
        return result.model_calls, result.tool_calls, result.tokens, result.nano
