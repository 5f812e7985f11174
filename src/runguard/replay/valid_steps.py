"""Sanitize recorded steps for the guard: ids are strings, times are finite, counts are possible."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from runguard.pricing.rates import Usage
from runguard.replay.steps import (
    Answered,
    Asked,
    Called,
    Delegated,
    Faults,
    Passed,
    RecordedRun,
    Step,
    Turn,
    Wrote,
    word,
)

_MOST: Final = 10**30  # tokens of one model call; sums and costs below this can still be printed
_COUNTS: Final = tuple(field.name for field in fields(Usage))
_WORDS: Final[dict[type, tuple[str, ...]]] = {
    Turn: ("run",),
    Asked: ("agent", "branch", "model", "batch"),
    Called: ("agent", "branch", "batch", "id", "tool"),
    Answered: ("agent", "id", "tool", "event"),
    Passed: ("agent", "branch", "target"),
    Delegated: ("id",),
}


def checked(run: RecordedRun, faults: Faults) -> RecordedRun:
    """Return the run with values that every rule and every table can handle."""
    run.id, run.app, run.user, run.session, run.source = (
        word(run.id),
        word(run.app),
        word(run.user),
        word(run.session),
        word(run.source),
    )
    run.steps = _steps(run.steps, run.id, faults)
    return run


def _steps(steps: Iterator[Step], name: str, faults: Faults) -> Iterator[Step]:
    for step in steps:
        if type(step) is not Wrote:  # the reader of a journal has checked its entries
            for field in _WORDS.get(type(step), ()):
                if getattr(step, field).__class__ is not str:
                    setattr(step, field, word(getattr(step, field)))
        if (
            type(step) is Asked
            and step.usage is not None
            and not all(0 <= getattr(step.usage, count) < _MOST for count in _COUNTS)
        ):
            faults.add(name, "a model call reports an impossible number of tokens: ignoring them")
            step.usage = None
        yield step
