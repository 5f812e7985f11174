"""Termination conditions on frameworks other than ADK: what they see of a run, and how they end it.

``calls/run`` creates ``EndingConditions`` for each agent. An adapter checks its setting with ``fitting``.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from runguard.core.decision import Trip
from runguard.core.errors import PolicyError, RunGuardError, RunStoppedError
from runguard.engine.guard import Guard
from runguard.pricing.rates import Usage
from runguard.termination.conditions import (
    Ended,
    HandoffTermination,
    StateTermination,
    TerminatedError,
    TerminationCondition,
    checked,
)
from runguard.termination.usage import RuleTermination

if TYPE_CHECKING:
    from runguard.calls.tool_calls import OpenCall, ToolUse

_log: Final = logging.getLogger("runguard")
_REPR_CHARS: Final = 500
_SOONEST_S: Final = 0.02


def error_of(end: Trip | Ended) -> RunGuardError:
    """Return the error to raise where no text can end a run, such as with structured output."""
    return RunStoppedError.of(end) if isinstance(end, Trip) else TerminatedError(end.reason)


def last_words(guard: Guard, end: Trip | Ended, *, takes_text: bool) -> str:
    """Return the text that ends a run.

    Raise the typed error where no text can end it, such as with structured output, and for ``on_stop="raise"``.
    """
    if not takes_text or (isinstance(end, Trip) and guard.policy.on_stop == "raise"):
        raise error_of(end)
    return guard.stop_text(end) if isinstance(end, Trip) else end.reason


def fitting(condition: object, framework: str, *, has_hand_offs: bool) -> TerminationCondition | None:
    """Return the condition, checked; None for None.

    Raise ``PolicyError`` for a condition that looks for what the framework never shows: it would never fire.
    """
    if condition is None:
        return None
    found = checked(condition)
    for leaf in found.leaves():
        is_hand_off = isinstance(leaf, HandoffTermination)
        is_hand_off = is_hand_off or (isinstance(leaf, RuleTermination) and leaf.settings()["rule"] == "handoff")
        if isinstance(leaf, StateTermination):
            raise PolicyError(
                f"termination_condition = {leaf!r}: only ADK has a session state; use a function of yours"
            )
        if is_hand_off and not has_hand_offs:
            raise PolicyError(f"termination_condition = {leaf!r}: {framework} has no hand-offs, so it would never fire")
    return found


# ---- Events, with the fields of ADK's that conditions read.


class _FunctionCall(NamedTuple):
    id: str
    name: str
    args: Any


class _FunctionResponse(NamedTuple):
    id: str
    name: str
    response: Any


class _Part(NamedTuple):
    text: str | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None


class _Content(NamedTuple):
    parts: Sequence[_Part] = ()


class _Actions(NamedTuple):
    transfer_to_agent: str | None = None


@dataclass(slots=True)
class RunEvent:
    """What an agent said, called, got or handed over."""

    author: str
    content: _Content
    actions: _Actions = field(default_factory=_Actions)
    id: str = ""
    model_version: str = ""

    def is_final_response(self) -> bool:
        return bool(self.content.parts) and all(part.text is not None for part in self.content.parts)


# ---- Conditions at work.


class ActiveCondition:
    """One condition at work in one run."""

    def __init__(self, condition: TerminationCondition) -> None:
        self.condition = condition.for_run(time.monotonic())
        self.name = repr(condition)[:_REPR_CHARS]

    def ask_early(self) -> None:
        """Ask what needs no event: time, usage and signals."""
        for leaf in self.condition.leaves():
            if leaf.knows_early and not leaf.terminated and not leaf.needs_await:
                leaf.check([])

    def log_failure(self) -> None:
        """Log that the condition has raised. It may be one of the user: its failure does not end the run."""
        _log.exception("runguard.termination_failed: %s raised; it counts as not fired", self.name)


class RunCondition(ActiveCondition):
    """A condition in a run of an adapter. Safe to use from the tasks and threads of that run."""

    def __init__(self, condition: TerminationCondition) -> None:
        super().__init__(condition)
        self._events: list[RunEvent] = []
        self._lock = threading.Lock()

    def see(self, event: RunEvent) -> None:
        with self._lock:
            self._events.append(event)

    def count(self, usage: Usage, model: str) -> None:
        with self._lock:
            self.condition.count(usage.input, usage.output, model=model, usage=usage)

    @property
    def needs_await(self) -> bool:
        return self.condition.needs_await

    @property
    def ended(self) -> Ended | None:
        return Ended(self.condition.reason or "", self.name) if self.condition.terminated else None

    async def ask(self) -> Ended | None:
        """Show the condition what has happened since the last time. Return the end if it has fired."""
        with self._lock:
            events, self._events = self._events, []
        if not self.condition.terminated and (events or self.condition.knows_early):
            try:
                if self.condition.needs_await:
                    await self.condition(events)
                else:
                    with self._lock:
                        self.condition.check(events)
            except TerminatedError:  # another task has fired it at the same time
                pass
            except Exception:
                self.log_failure()
        return self.ended

    def look(self) -> Ended | None:
        """Check what needs no event: time, usage and signals. Return the end if the condition has fired."""
        with self._lock:
            self.ask_early()
        return self.ended

    def listen(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call ``end`` when time or a signal ends the run. Return a function that stops listening."""
        loop, timer, is_listening = asyncio.get_running_loop(), None, True

        def look() -> None:
            nonlocal timer
            if not is_listening:
                return
            if self.look() is not None:
                end()
            elif (wake := self.condition.wake_at()) is not None:
                timer = loop.call_later(max(wake - time.monotonic(), _SOONEST_S), look)

        unsubscribe = self.condition.on_set(lambda: loop.call_soon_threadsafe(look))
        look()

        def stop() -> None:
            nonlocal is_listening
            is_listening = False
            unsubscribe()
            if timer is not None:
                timer.cancel()

        return stop


class EndingConditions:
    """The conditions around one agent: those of the runs around its own, and the one of its own run.

    A condition belongs to the run of the agent that it was given to. It sees what that agent says, calls and hands
    over. Agents that its tools start are runs of their own inside of it: their tokens, cost and time count, their texts
    do not. It is asked before every model call. Time and signals also end an asynchronous call in flight.
    """

    def __init__(self, around: Sequence[RunCondition] = (), own: TerminationCondition | None = None) -> None:
        self._own = None if own is None else RunCondition(own)
        self.all: tuple[RunCondition, ...] = (*around, *(() if self._own is None else (self._own,)))

    @property
    def ended(self) -> Ended | None:
        return next((ended for one in self.all if (ended := one.ended) is not None), None)

    @property
    def needs_await(self) -> bool:
        return any(one.needs_await for one in self.all)

    async def ask(self) -> Ended | None:
        for one in self.all:
            if (ended := await one.ask()) is not None:
                return ended
        return None

    def listen(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call ``end`` when time or a signal ends a run around the agent. Return a function that stops listening."""
        stops = [one.listen(end) for one in self.all]

        def stop() -> None:
            for one in stops:
                one()

        return stop

    def answered(self, agent: str, usage: Usage, model: str, calls: "Sequence[ToolUse]", text: str) -> None:
        """Count the usage of an answer for all conditions, and show its text and tool calls to the agent's own one."""
        for one in self.all:
            one.count(usage, model)
        if self._own is not None:
            parts = [_Part(text)] if text else []
            parts += [_Part(function_call=_FunctionCall(use.id, use.tool, use.args)) for use in calls]
            self._own.see(RunEvent(agent, _Content(parts), model_version=model))

    def executed(self, agent: str, calls: "Iterable[OpenCall]") -> None:
        """Show the answers of tools to the agent's own condition."""
        if self._own is not None:
            answers = [_FunctionResponse(call.use.id, call.use.tool, call.value) for call in calls]
            self._own.see(RunEvent(agent, _Content([_Part(function_response=answer) for answer in answers])))

    def handed_off(self, agent: str, target: str) -> None:
        if self._own is not None:
            self._own.see(RunEvent(agent, _Content(), _Actions(target)))
