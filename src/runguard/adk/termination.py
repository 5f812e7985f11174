"""Termination conditions at work on ADK: for a run of a Runner, or for one loop inside of it.

A condition is told of every event after it was passed on, and asked before every model call that it covers: what is
known then (time, tokens, cost, an external signal) ends the work before that call is paid. Calls that are on their way
to a model are waited for; an external signal, or time that is up, ends them. Whatever function call is still open is
answered, so that the next turn works.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.workflow import Workflow
from google.genai import types

from runguard.adk import runners
from runguard.adk.estimate import project
from runguard.adk.invocations import STREAM, TERMINATIONS
from runguard.core.decision import METADATA_KEY, TERMINATED
from runguard.core.exceptions import PolicyError
from runguard.pricing.rates import Usage
from runguard.providers.call_usage import Bill, CallUsage
from runguard.termination.condition import TerminationCondition
from runguard.termination.loop_keyword import KEYWORD, LOOP_KEYWORD

_log: Final = logging.getLogger("runguard")
_OWN: Final = "__runguard_termination__"
_KEY: Final = "termination"
_RUN: Final = "_run_async_impl"
_CONDITION: Final = "__runguard_condition__"
_DELIVERY_S: Final = 0.25  # from a model's answer to its event
_SOONEST_S: Final = 0.02
_COUNTED_KEPT: Final = 1_024
_REPR_CHARS: Final = 500
SCOPES: Final = ("loop", "run")


class TerminationActions(EventActions):
    """ADK's actions with the reason; stored as ADK's own."""

    termination_reason: str | None = None


class TerminationEvent(Event):
    """Says why the work ended.

    It is not a response: without content, a reader of ``event.content.parts[0]`` must not take it for one.
    """

    def is_final_response(self) -> bool:
        return False


class TerminationPlugin(BasePlugin):
    """Ends the runs of its App or Runner when a condition fires:

    ``App(..., plugins=[TerminationPlugin(TextMentionTermination("DONE"))])``.
    """

    def __init__(self, condition: TerminationCondition, *, name: str = "runguard_termination") -> None:
        super().__init__(name=name)
        self.condition = checked(condition)
        runners.watch(self)  # its wrapper is what sees every event and can end any topology


def terminate(agent: Any, condition: TerminationCondition, *, scope: str = "loop") -> Any:
    """Let a condition end this agent, and nothing around it; returns the agent. For a LoopAgent, any other agent,
    or a Runner's Workflow.

    ``scope="run"`` ends the whole run with it, whatever is around the agent.
    """
    checked(condition)
    if scope not in SCOPES:
        raise PolicyError(f"scope = {scope!r}: 'loop' ends the agent alone, 'run' the whole run")
    if not isinstance(agent, BaseAgent | Workflow):
        raise PolicyError(f"terminate({agent!r}, …): give an agent or a Workflow of google-adk")
    if isinstance(agent, LlmAgent | Workflow):  # at the root, what they hand over to is not inside of them
        agent.__dict__[_OWN] = condition, scope
    if isinstance(agent, BaseAgent):
        agent.__dict__[_RUN] = _ending(type(agent)._run_async_impl, condition, scope)
    runners.keep_patched(ends_runs=scope == "run")
    return agent


def condition_of(root: Any) -> tuple[TerminationCondition | None, str]:
    """The condition that was put on a Runner's root, if it has to be kept for the whole run, and its scope."""
    found: tuple[TerminationCondition | None, str] = getattr(root, "__dict__", {}).get(_OWN, (None, "loop"))
    return found


def termination_reason(event: Any) -> str | None:
    """Why the work ended, of the event that ended it; None of any other. Takes an ADK event, or its JSON."""
    told = (
        event.get("custom_metadata") or event.get("customMetadata")
        if isinstance(event, dict)
        else getattr(event, "custom_metadata", None)
    )
    about = told.get(METADATA_KEY) if isinstance(told, dict) else None
    ended = about.get(_KEY) if isinstance(about, dict) else None
    return str(ended["reason"]) if isinstance(ended, dict) and "reason" in ended else None


def checked(condition: object) -> TerminationCondition:
    if not isinstance(condition, TerminationCondition):
        raise PolicyError(
            f"{condition!r} is no termination condition; make one such as MaxIterationsTermination(10) | "
            "TimeoutTermination(60)"
        )
    return condition


# ---- one condition in one run or loop -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Paid:
    """A model's answer whose event has not passed yet. An agent may keep it to itself, so that it never does."""

    task: asyncio.Task[Any] | None
    shown: Any  # its usage as the event will show it
    bill: Bill
    model: str
    at: float


class Watched:
    """One condition at work, with what it has to know to end cleanly."""

    def __init__(self, condition: TerminationCondition) -> None:
        self.of_root: TerminationCondition | None = None  # what was put on the runner's root: not to be watched twice
        self.condition = condition.for_run(time.monotonic())
        self.reason: str | None = None
        self.stream: Any = None  # the runner whose events are told
        self.in_flight = 0  # calls on their way to a model
        self._by = repr(self.condition)
        self._paid: list[_Paid] = []
        # answers that were counted without their events: they may still come
        self._counted: deque[_Paid] = deque(maxlen=_COUNTED_KEPT)
        self._open: dict[str, tuple[types.FunctionCall, Event]] = {}  # function calls without an answer
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._silence: Callable[[], None] | None = None  # ends the subscription to signals
        self._urgent = self._left = False
        self.is_thrown = False  # it has cancelled the wait for the next event

    async def tell(self, events: list[Event]) -> None:
        """What happened; nothing: what can be known without."""
        told = [self._remember(event) for event in events]
        if self.reason is not None:
            self._ask_early()
        elif told or self.condition.knows_early:
            if not self.condition.terminated:  # else another task is just being told
                try:
                    await self.condition(told)
                except Exception:  # a condition of the user's own: it ends nothing, neither as meant nor by its fault
                    _log.exception("runguard.termination_failed: %s raised, which counts as no", self._by[:_REPR_CHARS])
            self._heed()

    def end(self, reason: str, by: str) -> None:
        """Another condition ends what this one watches."""
        if self.reason is None:
            self.reason, self._by = reason, by
            self._arm()

    def end_run(self) -> bool:
        """End the run around it too.

        ADK's escalation would end no sequence, and throw away what parallel branches have paid for.
        """
        around = TERMINATIONS.get()
        if around:
            around[0].end(self.reason or "", self._by)
        return bool(around)

    @property
    def is_over(self) -> bool:
        """It has fired, and nothing that was paid would be thrown away; or there is no more time to wait for it."""
        return self.reason is not None and (self._urgent or not (self.in_flight or self._paid))

    @property
    def is_left(self) -> bool:
        """The work has ended by itself: what goes on in the background is not its own."""
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
        """What needs no event. Also of a condition that has fired: a signal, or the clock, ends the wait for paid
        answers.
        """
        for leaf in self.condition.leaves():
            if leaf.knows_early and not leaf.terminated and not leaf.needs_await:
                leaf.check([])
        self._heed()

    def last_events(
        self, author: str, invocation_id: str, branch: str | None, answers: list[Event] | None = None, *, escalate: bool
    ) -> list[Event]:
        """An answer to every open call, and the event that says why it ends."""
        reason = self.reason or ""
        actions = TerminationActions(escalate=True if escalate else None, termination_reason=reason)
        metadata = {METADATA_KEY: {_KEY: {"reason": reason, "condition": self._by[:_REPR_CHARS]}}}
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
        return [runners.answer_to(askers[one], calls[one], invocation_id, TERMINATED) for one in calls]

    # ---- what was paid ----------------------------------------------------------------------------------------------

    def asks(self, task: asyncio.Task[Any] | None) -> None:
        """A task asks a model again, or has ended: the event of its last answer has passed or never will. Nor will one
        that is long overdue.
        """
        now = time.monotonic()
        for paid in [
            one
            for one in self._paid
            if one.task is None or one.task is task or one.task.done() or now - one.at > _DELIVERY_S
        ]:
            self._paid.remove(paid)
            self._counted.append(paid)
            self._count(paid.bill.usage, paid.model)

    def answered(self, paid: _Paid, stream: Any) -> None:
        if stream is self.stream:
            self._paid.append(paid)
        else:  # of a runner inside of a tool, whose events are not told
            self._count(paid.bill.usage, paid.model)

    def cut_off(self, usage: Usage | None, model: str) -> None:
        """A call ended without an answer; it may have reported something before."""
        self._count(usage, model)

    def _count(self, usage: Usage | None, model: str) -> None:
        if self.reason is None and usage is not None:
            self.condition.count(usage.input, usage.output, model=model, usage=usage)

    def _remember(self, event: Event) -> Event:
        """Returns the event as the condition is to see it: what was counted before is not told again."""
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

    # ---- ending what waits ------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """From now on a signal, or the clock, may end the wait for the next event."""
        self._task, self._loop, self.stream = asyncio.current_task(), asyncio.get_running_loop(), STREAM.get()
        self.is_thrown = False
        self._silence = self.condition.on_set(self._look_soon)
        self._arm()

    def listen_no_more(self) -> None:
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
        """Whether the wait is to end: a signal in an And may not be enough yet, and events of paid answers get a moment
        to pass.
        """
        if self._task is None:
            return
        try:
            self._ask_early()
            now = time.monotonic()
            if self.is_over or (
                self.reason is not None and not self.in_flight and all(now - one.at > _DELIVERY_S for one in self._paid)
            ):
                self._throw()
            else:
                self._arm(_SOONEST_S)
        except Exception as error:
            runners.note_fault(error, self.stream)
            if self._loop is not None:
                self._alarm = self._loop.call_later(_DELIVERY_S, self._look)

    def _arm(self, soonest: float = 0.0) -> None:
        """Look again when the clock may have a say, or when events of paid answers are overdue."""
        self._disarm()
        if self._task is None or self._loop is None:
            return
        now = time.monotonic()
        moments = [self.condition.wake_at(), now + _DELIVERY_S if self.reason is not None else None]
        wake = min((moment for moment in moments if moment is not None), default=None)
        if wake is not None:
            self._alarm = self._loop.call_later(max(wake - now, soonest), self._look)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def _is_urgent(leaf: TerminationCondition) -> bool:
    """It has a clock or a signal: what it ends is not waited for."""
    kind = type(leaf)
    return kind.wake_at is not TerminationCondition.wake_at or kind._subscribe is not TerminationCondition._subscribe


class Passive(TerminationCondition):
    """Never fires by itself: for a run that conditions of its agents may end."""

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return None


# given the last event's invocation, and the reason that it told
Finish = Callable[[str, str | None], Awaitable[list[Event]]]


async def until(events: AsyncGenerator[Event, None], watched: Watched, finish: Finish) -> AsyncGenerator[Event, None]:
    """The events of a run or of an agent until the condition fires and nothing paid is on its way; then those that
    end it.

    A fault of ours takes no event away: the condition then counts as not fired.
    """
    invocation, told, is_over = "", None, False
    try:
        while not is_over:
            event: Event | None = None
            task, token = asyncio.current_task(), TERMINATIONS.set((*TERMINATIONS.get(), watched))
            try:
                try:
                    watched.listen()
                    await watched.tell([])  # it may have been set before anybody listened
                    is_over = watched.is_over
                except Exception as error:
                    runners.note_fault(error, STREAM.get())
                if not is_over:
                    event = await anext(events)
                    if watched.is_thrown and task is not None:  # somebody has swallowed it
                        task.uncancel()
            except StopAsyncIteration:
                pass
            except asyncio.CancelledError:
                if not watched.is_thrown or task is None or task.uncancel() > 0:
                    raise
            finally:
                TERMINATIONS.reset(token)
                try:
                    watched.listen_no_more()
                except Exception as error:
                    runners.note_fault(error, STREAM.get())
            if event is None:
                break
            try:
                invocation = event.invocation_id
                told = termination_reason(event)
                await watched.tell([event])  # before others can make their next call
            except Exception as error:
                runners.note_fault(error, STREAM.get())
            yield event
            try:
                is_over = watched.is_over
            except Exception as error:
                runners.note_fault(error, STREAM.get())
    finally:
        try:
            watched.leave()
        except Exception as error:
            runners.note_fault(error, STREAM.get())
        try:
            await events.aclose()
        except BaseExceptionGroup as group:  # how an older ParallelAgent says that it was closed
            if group.split(GeneratorExit)[1] is not None:
                raise
    endings: list[Event] = []
    try:
        endings = await finish(invocation, told) if watched.reason is not None else []
    except Exception as error:
        runners.note_fault(error, STREAM.get())
    for ending in endings:
        yield ending


def _ending(original: Any, condition: TerminationCondition, scope: str) -> Any:
    """What an agent does, until its condition fires.

    The context says which agent it is: a clone has this function too.
    """

    @wraps(original)
    def run_until(ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        events: AsyncGenerator[Event, None] = original(ctx.agent, ctx)
        if any(one.of_root is condition and one.stream is STREAM.get() for one in TERMINATIONS.get()):
            return events  # the runner sees to it
        try:
            watched, name = Watched(condition), getattr(ctx.agent, "name", "")
        except Exception as error:
            runners.note_fault(error, STREAM.get())
            return events

        async def finish(*_: Any) -> list[Event]:
            ends_run = False
            try:
                ends_run = scope == "run" and watched.end_run()
            except Exception as error:
                runners.note_fault(error, STREAM.get())
            return watched.last_events(name, ctx.invocation_id, ctx.branch, escalate=scope == "run" and not ends_run)

        return until(events, watched, finish)

    setattr(run_until, _CONDITION, condition)
    return run_until


# ---- at the model's border ------------------------------------------------------------------------------------------


async def asked_first(
    call: AsyncGenerator[LlmResponse, None],
    watched: tuple[Watched, ...],
    request: LlmRequest,
    call_off: Callable[[], None],
) -> AsyncGenerator[LlmResponse, None]:
    """A model call that is made unless some condition around it has fired.

    Without content, the answer becomes nobody's.
    """
    task, stream, is_ended = asyncio.current_task(), STREAM.get(), False
    around: list[Watched] = []
    for one in watched:
        try:
            if not one.is_left:
                around.append(one)
                one.asks(task)
                await one.tell([])
                is_ended = is_ended or one.reason is not None
        except Exception as error:
            runners.note_fault(error, stream)
    if is_ended:
        try:
            call_off()
        except Exception as error:
            runners.note_fault(error, stream)
        await call.aclose()
        await asyncio.sleep(0)  # whoever asks in a loop must not keep the event loop to itself
        try:
            for one in around:
                if one.is_over:  # nothing else will come: a loop that never yields would ask for ever
                    one.end_wait()
        except Exception as error:
            runners.note_fault(error, stream)
        yield LlmResponse(custom_metadata={METADATA_KEY: {_KEY: {"refused": True}}})
        return
    usage: CallUsage | None = None
    model, is_answered = "", False
    for one in around:
        one.in_flight += 1
    try:
        async with aclosing(call) as answers:
            async for response in answers:
                try:
                    usage = usage or CallUsage()
                    usage.add(response)
                    model = response.model_version or model
                    if not response.partial and not is_answered:
                        is_answered = True
                        for one in around:
                            one.in_flight -= 1
                        bill = _billed(usage, request)
                        for one in around:
                            one.answered(_Paid(task, response.usage_metadata, bill, model, time.monotonic()), stream)
                except Exception as error:
                    runners.note_fault(error, stream)
                yield response
    finally:
        if not is_answered:
            for one in around:
                one.in_flight -= 1
            try:
                taken = usage.bill(0).usage if usage is not None and usage.reported is not None else None
                for one in around:
                    one.cut_off(taken, model)
            except Exception as error:
                runners.note_fault(error, stream)


def _billed(usage: CallUsage, request: LlmRequest) -> Bill:
    """What a call took. The request is measured only where its size was not reported."""
    bill = usage.bill(0)
    if not bill.estimated:
        return bill
    size = project(request, None)
    return usage.bill(size.upper, size.audio)


def _report_of(usage: Usage) -> types.GenerateContentResponseUsageMetadata:
    """An estimate, as the condition is to see it in the event."""
    return types.GenerateContentResponseUsageMetadata(
        prompt_token_count=usage.input, candidates_token_count=usage.output
    )


# ---- under install(): as if ADK had it ------------------------------------------------------------------------------


def _get_condition(loop: LoopAgent) -> TerminationCondition | None:
    return getattr(loop.__dict__.get(_RUN), _CONDITION, None)


def _set_condition(loop: LoopAgent, condition: TerminationCondition | None) -> None:
    if condition is not None:
        terminate(loop, condition)
    elif _get_condition(loop) is not None:
        del loop.__dict__[_RUN]


_PROPERTY: Final = property(
    _get_condition, _set_condition, doc="The condition that ends this loop, or None. Added by runguard.install()."
)


class LoopTermination:
    """``LoopAgent.termination_condition`` as a keyword and an attribute, for as long as a guard is installed."""

    def put_on(self) -> None:
        if KEYWORD in LoopAgent.model_fields:
            return  # this ADK has it
        LOOP_KEYWORD.put_on()
        LOOP_KEYWORD.accept = terminate
        setattr(LoopAgent, KEYWORD, _PROPERTY)

    def take_off(self) -> None:
        LOOP_KEYWORD.take_off()
        if LoopAgent.__dict__.get(KEYWORD) is _PROPERTY:
            delattr(LoopAgent, KEYWORD)


LOOP_TERMINATION: Final = LoopTermination()
