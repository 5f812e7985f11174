"""Agents that talk and do nothing: final texts in a row without a tool call, a change of state or a user's message."""

from collections import OrderedDict
from typing import ClassVar, Final, TypeVar

from runguard.core.decision import Action, Finding, Rungs
from runguard.core.detectors.orders import Vocabulary
from runguard.core.events import AgentEntered, ModelCall, ModelResult, Outcome, StateChanged, ToolResults

_KEPT: Final = 64
_Kept = TypeVar("_Kept")


class Talk:
    """Counts final texts of agents that have spoken before, in one lane. The first text of each agent is free: a chain
    of many agents is not a talk. To a ``patient`` detector a text about something else is a step.

    An agent inside of a loop that has its own limit of rounds is not counted: that limit is what the developer wants. A
    stop is for the next model call, so a talk that has ended is not stopped.
    """

    sees: ClassVar[tuple[type, ...]] = (AgentEntered, ModelCall, ModelResult, StateChanged, ToolResults)
    rests: ClassVar[tuple[type, ...]] = (ModelCall, ModelResult, ToolResults)
    __slots__ = ("_changes", "_count", "_is_bounded", "_patient", "_spoken", "_vocabulary", "record", "rungs")

    def __init__(self, rungs: Rungs, *, patient: bool = False) -> None:
        self.rungs, self._patient = rungs, patient
        self._count = 0
        self._is_bounded = False  # the agent at work is in a loop with a limit
        self.record = self._spoken = OrderedDict[str, None]()  # agents that have spoken since something was done
        self._changes: OrderedDict[int, None] = OrderedDict()  # values that were stored: an old one is not a step
        self._vocabulary = Vocabulary()

    def observe(self, event: AgentEntered | ModelCall | ModelResult | StateChanged | ToolResults) -> Finding | None:
        if type(event) is ModelResult:
            if event.text_id and not self._is_bounded:
                self._hear(event)
        elif type(event) is ModelCall:
            return self._before_the_next(event) if self._count else None
        elif type(event) is AgentEntered:
            if not event.branches:
                self._is_bounded = event.is_bounded
        elif type(event) is StateChanged:
            if event.value not in self._changes:
                _keep(self._changes, event.value)
                self._start_anew()
        elif isinstance(event, ToolResults) and self._spoken and _is_step(event):
            self._start_anew()
        return None

    def _hear(self, event: ModelResult) -> None:
        if event.agent not in self._spoken:
            _keep(self._spoken, event.agent)
            return
        self._count += 1
        if self._patient:
            if event.text:
                event.new_subject = self._vocabulary.learn(event.text) or event.new_subject
            if event.new_subject:
                self._count = 0

    def _start_anew(self) -> None:
        self._count = 0
        self._spoken.clear()

    def _before_the_next(self, event: ModelCall) -> Finding | None:
        reached = self.rungs.at(self._count)
        if reached is None or event.after_answer or self._is_bounded:
            return None
        action, limit = reached
        key = event.agent if action is Action.STOP else "talk"
        about = f"agent {event.agent}"
        return Finding("talk", action, self._count, limit, "texts in a row without a step", key=key, detail=about)


def _is_step(event: ToolResults) -> bool:
    return any(a.outcome is not Outcome.REFUSED and not a.is_note for a in event.answers)


def _keep(kept: OrderedDict[_Kept, None], one: _Kept) -> None:
    """Remember it; the oldest is forgotten when there are too many."""
    kept[one] = None
    if len(kept) > _KEPT:
        kept.popitem(last=False)
