"""One termination condition at work: what it has seen, and how it ends the wait for the next event.

A condition sees every event after it was yielded. Before every model call that it covers, it is asked again: what is
known without an event (time, tokens, cost, an external signal) ends the work before that call is paid. Calls in flight
are waited for; an external signal or a timeout ends them. Open function calls get an answer, so that the next turn
works.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.adk.events import Event
from google.genai import types

from runguard.adk.context import HERE
from runguard.adk.invocation_state import DELIVERY_S
from runguard.adk.stop_events import answer_to
from runguard.adk.stream import note_fault
from runguard.core.decision import METADATA_KEY, TERMINATED
from runguard.pricing.rates import Usage
from runguard.providers.usage import CallBill
from runguard.termination.conditions import KEY, TerminationCondition, termination_reason

_log: Final = logging.getLogger("runguard")
_SOONEST_S: Final = 0.02
_COUNTED_KEPT: Final = 1_024
_REPR_CHARS: Final = 500


@dataclass(slots=True, eq=False)
class PaidAnswer:
    """A model's answer whose event has not passed yet. An agent may keep it to itself, so that it never does."""

    task: asyncio.Task[Any] | None
    shown: Any  # its usage as the event will show it
    bill: CallBill
    model: str
    at: float


class Watched:
    """One condition at work, with what it has to know to end cleanly."""

    def __init__(self, condition: TerminationCondition) -> None:
        # set for the condition of a Runner's root agent, which must not be watched twice
        self.of_root: TerminationCondition | None = None
        self.condition = condition.for_run(time.monotonic())
        self.reason: str | None = None
        self.stream: Any = None  # the Runner whose events it sees
        self.in_flight = 0  # calls on their way to a model
        self._by = repr(self.condition)
        self._paid: list[PaidAnswer] = []
        # answers that were counted without their events: they may still come
        self._counted: deque[PaidAnswer] = deque(maxlen=_COUNTED_KEPT)
        self._open: dict[str, tuple[types.FunctionCall, Event]] = {}  # function calls without an answer
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._silence: Callable[[], None] | None = None  # ends the subscription to signals
        self._urgent = self._left = False
        self.is_thrown = False  # it has cancelled the wait for the next event

    async def see(self, events: list[Event]) -> None:
        """Pass events to the condition. Without events it is asked what it knows without them: time, usage, signals."""
        seen = [self._remember(event) for event in events]
        if self.reason is not None:
            self._ask_early()
        elif seen or self.condition.knows_early:
            if not self.condition.terminated:  # else another task is passing events to it
                try:
                    await self.condition(seen)
                except Exception:  # a user's condition: its failure does not end the run
                    _log.exception(
                        "runguard.termination_failed: %s raised; it counts as not fired", self._by[:_REPR_CHARS]
                    )
            self._heed()

    def end(self, reason: str, by: str) -> None:
        """Another condition ends what this one watches."""
        if self.reason is None:
            self.reason, self._by = reason, by
            self._arm()

    def end_run(self) -> bool:
        """End the run around it too.

        ADK's escalation does not end a sequence, and discards the paid work of parallel branches.
        """
        around = HERE.get().conditions
        if around:
            around[0].end(self.reason or "", self._by)
        return bool(around)

    @property
    def is_over(self) -> bool:
        """It has fired and no paid call is in flight, or it is urgent."""
        return self.reason is not None and (self._urgent or not (self.in_flight or self._paid))

    @property
    def is_left(self) -> bool:
        """The work has ended without it. Calls in the background do not belong to it."""
        return self._left and self.reason is None

    def leave(self) -> None:
        self._left = True

    def _heed(self) -> None:
        if self.reason is None and self.condition.terminated:
            self.reason = self.condition.reason or ""
            self._arm()
        if self.reason is not None:
            self._urgent = any(leaf.terminated and _is_urgent(leaf) for leaf in self.condition.leaves())

    def _ask_early(self) -> None:
        """Ask what needs no event, also after it has fired: a signal or a timeout ends the wait for paid answers."""
        for leaf in self.condition.leaves():
            if leaf.knows_early and not leaf.terminated and not leaf.needs_await:
                leaf.check([])
        self._heed()

    def last_events(
        self, author: str, invocation_id: str, branch: str | None, answers: list[Event] | None = None, *, escalate: bool
    ) -> list[Event]:
        """An answer to every open call, and the event that says why it ends."""
        reason = self.reason or ""
        from runguard.adk.termination_event_types import TerminationActions, TerminationEvent

        actions = TerminationActions(escalate=True if escalate else None, termination_reason=reason)
        metadata = {METADATA_KEY: {KEY: {"reason": reason, "condition": self._by[:_REPR_CHARS]}}}
        last = TerminationEvent(
            author=author, invocation_id=invocation_id, branch=branch, actions=actions, custom_metadata=metadata
        )
        return [*(self._answers(invocation_id) if answers is None else answers), last]

    def _answers(self, invocation_id: str) -> list[Event]:
        calls: dict[str, list[types.FunctionCall]] = {}
        askers: dict[str, Event] = {}
        for call, asker in self._open.values():
            calls.setdefault(asker.id, []).append(call)
            askers[asker.id] = asker
        return [answer_to(askers[one], calls[one], invocation_id, TERMINATED) for one in calls]

    # ---- paid calls -------------------------------------------------------------------------------------------------

    def asks(self, task: asyncio.Task[Any] | None) -> None:
        """A task asks a model again. Count answers whose events will not come: of this or an ended task, or overdue."""
        now = time.monotonic()
        for paid in [
            one
            for one in self._paid
            if one.task is None or one.task is task or one.task.done() or now - one.at > DELIVERY_S
        ]:
            self._paid.remove(paid)
            self._counted.append(paid)
            self._count(paid.bill.usage, paid.model)

    def answered(self, paid: PaidAnswer, stream: Any) -> None:
        if stream is self.stream:
            self._paid.append(paid)
        else:  # of a Runner inside of a tool, whose events it does not see
            self._count(paid.bill.usage, paid.model)

    def cut_off(self, usage: Usage | None, model: str) -> None:
        """A call ended without an answer; it may have reported something before."""
        self._count(usage, model)

    def _count(self, usage: Usage | None, model: str) -> None:
        if self.reason is None and usage is not None:
            self.condition.count(usage.input, usage.output, model=model, usage=usage)

    def _remember(self, event: Event) -> Event:
        """Returns the event for the condition, without usage that was counted before."""
        if event.partial:
            return event
        waiting = event.long_running_tool_ids or ()
        for call in event.get_function_calls():
            if call.id and call.id not in waiting:
                self._open[call.id] = call, event
        responses = event.get_function_responses()
        for response in responses:
            self._open.pop(response.id or "", None)
        usage = event.usage_metadata
        if responses or (usage is None and event.content is None):
            return event
        for paid in self._paid:
            if paid.shown == usage:
                self._paid.remove(paid)
                return (
                    event.model_copy(update={"usage_metadata": _report_of(paid.bill.usage)})
                    if paid.bill.estimated
                    else event
                )
        for paid in self._counted if usage is not None else ():
            if paid.shown == usage:
                self._counted.remove(paid)
                return event.model_copy(update={"usage_metadata": None})
        return event

    # ---- ending the wait --------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """From now on a signal or a timeout may end the wait for the next event."""
        self._task, self._loop, self.stream = asyncio.current_task(), asyncio.get_running_loop(), HERE.get().stream
        self.is_thrown = False
        self._silence = self.condition.on_set(self._look_soon)
        self._arm()

    def stop_listening(self) -> None:
        self._task = None
        silence, self._silence = self._silence, None
        try:
            self._disarm()
        finally:
            if silence is not None:
                silence()

    def end_wait(self) -> None:
        """From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._throw)

    def _throw(self) -> None:
        if self._task is not None and not self.is_thrown:
            self.is_thrown = True
            self._task.cancel()

    def _look_soon(self) -> None:
        """From any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """End the wait if it is over. A signal inside an And may not be enough. Events of paid answers get a moment."""
        if self._task is None:
            return
        try:
            self._ask_early()
            now = time.monotonic()
            if self.is_over or (
                self.reason is not None and not self.in_flight and all(now - one.at > DELIVERY_S for one in self._paid)
            ):
                self._throw()
            else:
                self._arm(_SOONEST_S)
        except Exception as error:
            note_fault(error, self.stream)
            if self._loop is not None:
                self._alarm = self._loop.call_later(DELIVERY_S, self._look)

    def _arm(self, soonest: float = 0.0) -> None:
        """Look again at the condition's next deadline, or when events of paid answers are overdue."""
        self._disarm()
        if self._task is None or self._loop is None:
            return
        now = time.monotonic()
        moments = [self.condition.wake_at(), now + DELIVERY_S if self.reason is not None else None]
        wake = min((moment for moment in moments if moment is not None), default=None)
        if wake is not None:
            self._alarm = self._loop.call_later(max(wake - now, soonest), self._look)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def _is_urgent(leaf: TerminationCondition) -> bool:
    """Whether it has a timeout or a signal, which ends calls in flight."""
    kind = type(leaf)
    return kind.wake_at is not TerminationCondition.wake_at or kind._subscribe is not TerminationCondition._subscribe


class Passive(TerminationCondition):
    """Never fires itself: for a run that the conditions of its agents may end."""

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return None


def _report_of(usage: Usage) -> types.GenerateContentResponseUsageMetadata:
    """An estimate as an event reports it."""
    return types.GenerateContentResponseUsageMetadata(
        prompt_token_count=usage.input, candidates_token_count=usage.output
    )


# called with the last event's invocation, and the reason that the event gives
Finish = Callable[[str, str | None], Awaitable[list[Event]]]


async def until(events: AsyncGenerator[Event, None], watched: Watched, finish: Finish) -> AsyncGenerator[Event, None]:
    """The events of a run or of an agent until the condition fires and nothing paid is on its way; then those that
    end it.

    A failure of RunGuard removes no event: the condition then counts as not fired.
    """
    invocation, reason, is_over = "", None, False
    try:
        while not is_over:
            event: Event | None = None
            here, task = HERE.get(), asyncio.current_task()
            token = HERE.set(here._replace(conditions=(*here.conditions, watched)))
            try:
                try:
                    watched.listen()
                    await watched.see([])  # a signal may have been set before
                    is_over = watched.is_over
                except Exception as error:
                    note_fault(error, HERE.get().stream)
                if not is_over:
                    event = await anext(events)
                    if watched.is_thrown and task is not None:  # other code has swallowed the cancellation
                        task.uncancel()
            except StopAsyncIteration:
                pass
            except asyncio.CancelledError:
                if not watched.is_thrown or task is None or task.uncancel() > 0:
                    raise
            finally:
                now = HERE.get()
                HERE.reset(token)
                HERE.set(now._replace(conditions=HERE.get().conditions))
                try:
                    watched.stop_listening()
                except Exception as error:
                    note_fault(error, HERE.get().stream)
            if event is None:
                break
            try:
                invocation = event.invocation_id
                reason = termination_reason(event)
                await watched.see([event])  # before other tasks make their next call
            except Exception as error:
                note_fault(error, HERE.get().stream)
            yield event
            try:
                is_over = watched.is_over
            except Exception as error:
                note_fault(error, HERE.get().stream)
    finally:
        try:
            watched.leave()
        except Exception as error:
            note_fault(error, HERE.get().stream)
        try:
            await events.aclose()
        except BaseExceptionGroup as group:  # how an older ParallelAgent says that it was closed
            if group.split(GeneratorExit)[1] is not None:
                raise
    endings: list[Event] = []
    try:
        endings = await finish(invocation, reason) if watched.reason is not None else []
    except Exception as error:
        note_fault(error, HERE.get().stream)
    for ending in endings:
        yield ending
