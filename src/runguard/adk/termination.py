"""Termination conditions on ADK: for a run of a Runner, or for one agent inside of it.

Users register ``TerminationPlugin`` or call ``terminate``. The wrappers in ``runner`` call ``until_terminated`` around
a run and ``add_keywords`` under ``install()``. ``model_calls`` calls ``asked_first`` before a model call.
"""

import asyncio
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
from google.adk.runners import Runner
from google.genai import types

from runguard.adk.patching import IN_USE, WrappedMethods, report_fault_in, shield_here, wrap_adk
from runguard.adk.runs import DELIVERY_S, HERE, project, within
from runguard.adk.stops import answer_to, answers_to_open_calls, read_session, store
from runguard.calls.ending import ActiveCondition
from runguard.calls.model_calls import Interruption
from runguard.core.decision import METADATA_KEY, TERMINATED
from runguard.core.errors import PolicyError
from runguard.pricing.rates import Usage
from runguard.providers.usage import CallBill, CallUsage
from runguard.termination.conditions import (
    KEY,
    KEYWORD,
    LOOP_KEYWORD,
    TerminationCondition,
    checked,
    termination_reason,
)

_OWN: Final = "__runguard_termination__"
_RUN: Final = "_run_async_impl"
_CONDITION: Final = "__runguard_condition__"
SCOPES: Final = ("loop", "run")


class TerminationPlugin(BasePlugin):
    """Ends the runs of its App or Runner when a condition fires:

    ``App(..., plugins=[TerminationPlugin(TextMentionTermination("DONE"))])``.
    """

    def __init__(self, condition: TerminationCondition, *, name: str = "runguard_termination") -> None:
        super().__init__(name=name)
        self.condition = checked(condition)
        IN_USE.plugins.add(self)
        wrap_adk()  # the wrapped Runner sees every event and can end any topology


def terminate(agent: Any, condition: TerminationCondition, *, scope: str = "loop") -> Any:
    """Let a condition end this agent, and nothing around it. Returns the agent: a LoopAgent, any other agent, or a
    Runner's Workflow.

    ``scope="run"`` ends the whole run with it.
    """
    from google.adk.workflow import Workflow  # loads ADK's web server, which most programs do not need

    checked(condition)
    if scope not in SCOPES:
        raise PolicyError(f"scope = {scope!r}: 'loop' ends the agent alone, 'run' the whole run")
    if not isinstance(agent, BaseAgent | Workflow):
        raise PolicyError(f"terminate({agent!r}, …): give an agent or a Workflow of google-adk")
    if isinstance(agent, LlmAgent | Workflow):  # at the root, agents that they hand over to are not inside of them
        agent.__dict__[_OWN] = condition, scope
    if isinstance(agent, BaseAgent):
        agent.__dict__[_RUN] = _run_until(type(agent)._run_async_impl, condition, scope)
    IN_USE.has_agent_conditions = True
    IN_USE.has_run_conditions = IN_USE.has_run_conditions or scope == "run"
    wrap_adk()
    return agent


def _run_until(original: Any, condition: TerminationCondition, scope: str) -> Any:
    """Return the agent's run method, which ends when the condition fires.

    The agent comes from the context: a clone shares this function.
    """

    @wraps(original)
    def run_until(ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        events: AsyncGenerator[Event, None] = original(ctx.agent, ctx)
        if any(one.of_root is condition and one.stream is HERE.get().stream for one in HERE.get().conditions):
            return events  # the wrapped Runner applies it
        try:
            watched, name = Watched(condition), getattr(ctx.agent, "name", "")
        except Exception as error:
            report_fault_in(HERE.get().stream, error)
            return events

        async def finish(*_: Any) -> list[Event]:
            ends_run = False
            with shield_here():
                ends_run = scope == "run" and watched.end_run()
            return watched.last_events(name, ctx.invocation_id, ctx.branch, escalate=scope == "run" and not ends_run)

        return until(events, watched, finish)

    setattr(run_until, _CONDITION, condition)
    return run_until


# ---- One condition at work

_SOONEST_S: Final = 0.02
_COUNTED_KEPT: Final = 1_024


@dataclass(slots=True, eq=False)
class PaidAnswer:
    """A model's answer whose event has not passed yet. An agent may keep it to itself, so that it never does."""

    task: asyncio.Task[Any] | None
    shown: Any  # its usage as the event will show it
    bill: CallBill
    model: str
    at: float


class Watched(ActiveCondition):
    """A condition on ADK, with what it has to know to end cleanly.

    The condition sees every event after it was yielded. Before every model call that it covers, it is asked again: what
    is known without an event (time, tokens, cost, an external signal) ends the work before that call is paid. Calls in
    flight are waited for; an external signal or a timeout ends them. Open function calls get an answer, so that the
    next turn works.
    """

    def __init__(self, condition: TerminationCondition) -> None:
        super().__init__(condition)
        # set for the condition of a Runner's root agent, which must not be watched twice
        self.of_root: TerminationCondition | None = None
        self.reason: str | None = None
        self.stream: Any = None  # the Runner whose events it sees
        self.in_flight = 0  # calls on their way to a model
        self._paid: list[PaidAnswer] = []
        # answers that were counted without their events: they may still come
        self._counted: deque[PaidAnswer] = deque(maxlen=_COUNTED_KEPT)
        self._open: dict[str, tuple[types.FunctionCall, Event]] = {}  # function calls without an answer
        self.wait: Interruption | None = None  # of the task that waits for the next event
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._silence: Callable[[], None] | None = None  # ends the subscription to signals
        self._urgent = self._left = False

    async def see(self, events: list[Event]) -> None:
        """Pass events to the condition. Without events, ask what it knows without them: time, usage, signals."""
        seen = [self._remember(event) for event in events]
        if self.reason is not None:
            self._ask_early()
        elif seen or self.condition.knows_early:
            if not self.condition.terminated:  # else another task is passing events to it
                try:
                    await self.condition(seen)
                except Exception:
                    self.log_failure()
            self._heed()

    def end(self, reason: str, by: str) -> None:
        """End the work because another condition has fired."""
        if self.reason is None:
            self.reason, self.name = reason, by
            self._arm()

    def end_run(self) -> bool:
        """End the run around it too.

        ADK's escalation does not end a sequence, and discards the paid work of parallel branches.
        """
        around = HERE.get().conditions
        if around:
            around[0].end(self.reason or "", self.name)
        return bool(around)

    @property
    def is_over(self) -> bool:
        """Whether it has fired and no paid call is in flight, or it is urgent."""
        return self.reason is not None and (self._urgent or not (self.in_flight or self._paid))

    @property
    def is_left(self) -> bool:
        """Whether the work has ended without it. Calls in the background do not belong to it."""
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
        self.ask_early()
        self._heed()

    def last_events(
        self, author: str, invocation_id: str, branch: str | None, answers: list[Event] | None = None, *, escalate: bool
    ) -> list[Event]:
        """Return an answer to every open call, and the event that says why the work ends."""
        reason = self.reason or ""
        actions = TerminationActions(escalate=True if escalate else None, termination_reason=reason)
        metadata = {METADATA_KEY: {KEY: {"reason": reason, "condition": self.name}}}
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
        """Count answers whose events will not come, because ``task`` asks again: its own, overdue, of ended tasks."""
        now = time.monotonic()
        for paid in [
            one
            for one in self._paid
            if one.task is None or one.task is task or one.task.done() or now - one.at > DELIVERY_S
        ]:
            self._paid.remove(paid)
            self._counted.append(paid)
            self.count(paid.bill.usage, paid.model)

    def answered(self, paid: PaidAnswer, stream: Any) -> None:
        if stream is self.stream:
            self._paid.append(paid)
        else:  # of a Runner inside of a tool, whose events it does not see
            self.count(paid.bill.usage, paid.model)

    def count(self, usage: Usage | None, model: str) -> None:
        """Count what a call has reported. Nothing after the condition has fired."""
        if self.reason is None and usage is not None:
            self.condition.count(usage.input, usage.output, model=model, usage=usage)

    def _remember(self, event: Event) -> Event:
        """Return the event for the condition, without usage that was counted before."""
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
        """Let a signal or a timeout end the wait for the next event, from now on."""
        self._loop, self.stream = asyncio.get_running_loop(), HERE.get().stream
        self.wait = Interruption(asyncio.current_task())
        self._silence = self.condition.on_set(self._look_soon)
        self._arm()

    def stop_listening(self) -> None:
        if self.wait is not None:
            self.wait.task = None
        silence, self._silence = self._silence, None
        try:
            self._disarm()
        finally:
            if silence is not None:
                silence()

    def _look_soon(self) -> None:
        """Look at the next turn of the event loop. Safe to call from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """End the wait if it is over. A signal inside an And may not be enough. Events of paid answers get a moment."""
        if self.wait is None or self.wait.task is None:
            return
        try:
            self._ask_early()
            now = time.monotonic()
            if self.is_over or (
                self.reason is not None and not self.in_flight and all(now - one.at > DELIVERY_S for one in self._paid)
            ):
                self.wait()
            else:
                self._arm(_SOONEST_S)
        except Exception as error:
            report_fault_in(self.stream, error)
            if self._loop is not None:
                self._alarm = self._loop.call_later(DELIVERY_S, self._look)

    def _arm(self, soonest: float = 0.0) -> None:
        """Look again at the condition's next deadline, or when events of paid answers are overdue."""
        self._disarm()
        if self.wait is None or self.wait.task is None or self._loop is None:
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
    """Return whether a condition has a timeout or a signal, which ends calls in flight."""
    kind = type(leaf)
    return kind.wake_at is not TerminationCondition.wake_at or kind._subscribe is not TerminationCondition._subscribe


class Passive(TerminationCondition):
    """Never fires itself: for a run that the conditions of its agents may end."""

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return None


def _report_of(usage: Usage) -> types.GenerateContentResponseUsageMetadata:
    """Return an estimate as an event reports it."""
    return types.GenerateContentResponseUsageMetadata(
        prompt_token_count=usage.input, candidates_token_count=usage.output
    )


# called with the last event's invocation, and the reason that the event gives
Finish = Callable[[str, str | None], Awaitable[list[Event]]]


async def until(events: AsyncGenerator[Event, None], watched: Watched, finish: Finish) -> AsyncGenerator[Event, None]:
    """Yield the events of a run or of an agent until the condition fires and nothing paid is on its way.

    Then yield those that end it. A failure of RunGuard removes no event: the condition then counts as not fired.
    """
    invocation, reason, is_over = "", None, False
    try:
        while not is_over:
            event: Event | None = None
            with within(conditions=(*HERE.get().conditions, watched)):
                try:
                    with shield_here():
                        watched.listen()
                        await watched.see([])  # a signal may have been set before
                        is_over = watched.is_over
                    if not is_over:
                        event = await anext(events)
                        if watched.wait is not None:  # other code may have swallowed the cancellation
                            watched.wait.undone()
                except StopAsyncIteration:
                    pass
                except asyncio.CancelledError:
                    if watched.wait is None or not watched.wait.undone():
                        raise
                finally:
                    with shield_here():
                        watched.stop_listening()
            if event is None:
                break
            with shield_here():
                invocation = event.invocation_id
                reason = termination_reason(event)
                await watched.see([event])  # before other tasks make their next call
            yield event
            with shield_here():
                is_over = watched.is_over
    finally:
        with shield_here():
            watched.leave()
        try:
            await events.aclose()
        except BaseExceptionGroup as group:  # how an older ParallelAgent says that it was closed
            if group.split(GeneratorExit)[1] is not None:
                raise
    endings: list[Event] = []
    with shield_here():
        endings = await finish(invocation, reason) if watched.reason is not None else []
    for ending in endings:
        yield ending


# ---- The conditions of a run


def until_terminated(
    runner: Runner, events: AsyncGenerator[Event, None], given: Any, user: str, session: str
) -> AsyncGenerator[Event, None]:
    """Yield events until a condition fires: of the root agent, of the call (``given``), or of the plugins."""
    own: TerminationCondition | None
    own, scope = getattr(runner.agent, "__dict__", {}).get(_OWN, (None, "loop"))
    found = [own, given]
    if HERE.get().stream is None:  # a run inside of another is part of that one
        found += [p.condition for p in runner.plugin_manager.plugins if isinstance(p, TerminationPlugin)]
        found.append(Passive() if IN_USE.has_run_conditions else None)  # around all others
    for condition in found:
        if condition is not None:
            watched = Watched(checked(condition))
            watched.of_root = own if condition is own else None
            ends_run = condition is own and scope == "run"
            events = until(events, watched, _finish(runner, watched, user, session, ends_run))
    return events


def _finish(runner: Runner, watched: Watched, user: str, session: str, ends_run: bool) -> Finish:
    async def finish(invocation_id: str, last_reason: str | None) -> list[Event]:
        if ends_run:
            with shield_here():
                watched.end_run()
        stored, answers = None, None
        with shield_here():
            stored = await read_session(runner, user, session)
        if not invocation_id and stored is not None and stored.events:
            # it ended before its first event: use that of the user's message
            invocation_id = stored.events[-1].invocation_id
        if stored is not None:
            with shield_here():
                answers = answers_to_open_calls(stored, invocation_id, TERMINATED)
        author = getattr(runner.agent, "name", "") or "runguard"
        events = watched.last_events(author, invocation_id, None, answers, escalate=True)
        if last_reason == watched.reason and len(events) == 1:
            return []  # the agent that ended the run has reported it
        with shield_here():
            await store(runner, stored, events)
        return events

    return finish


# ---- Model calls under conditions


async def asked_first(
    call: AsyncGenerator[LlmResponse, None],
    watched: tuple[Watched, ...],
    request: LlmRequest,
    call_off: Callable[[], None],
) -> AsyncGenerator[LlmResponse, None]:
    """Make a model call unless a condition around it has fired. Then the answer has no content."""
    task, stream, is_ended = asyncio.current_task(), HERE.get().stream, False
    around: list[Watched] = []
    for one in watched:
        with shield_here():
            if not one.is_left:
                around.append(one)
                one.asks(task)
                await one.see([])
                is_ended = is_ended or one.reason is not None
    if is_ended:
        with shield_here():
            call_off()
        await call.aclose()
        await asyncio.sleep(0)  # code that asks in a loop must not block the event loop
        with shield_here():
            for one in around:
                if one.is_over and one.wait is not None:  # a loop that never yields would ask for ever
                    one.wait()
        yield LlmResponse(custom_metadata={METADATA_KEY: {KEY: {"refused": True}}})
        return
    usage: CallUsage | None = None
    model, is_answered = "", False
    for one in around:
        one.in_flight += 1
    try:
        async with aclosing(call) as answers:
            async for response in answers:
                with shield_here():
                    usage = usage or CallUsage()
                    usage.add(response)
                    model = response.model_version or model
                    if not response.partial and not is_answered:
                        is_answered = True
                        for one in around:
                            one.in_flight -= 1
                        bill = _billed(usage, request)
                        for one in around:
                            one.answered(
                                PaidAnswer(task, response.usage_metadata, bill, model, time.monotonic()), stream
                            )
                yield response
    finally:
        if not is_answered:
            for one in around:
                one.in_flight -= 1
            with shield_here():
                taken = usage.bill(0).usage if usage is not None and usage.reported is not None else None
                for one in around:
                    one.count(taken, model)


def _billed(usage: CallUsage, request: LlmRequest) -> CallBill:
    """Return the usage of a call. Measure the request only where its size was not reported."""
    bill = usage.bill(0)
    if not bill.estimated:
        return bill
    size = project(request, None)
    return usage.bill(size.upper, size.audio)


# ---- The event by which a condition ends the work


class TerminationActions(EventActions):
    """ADK's actions with the reason; stored as ADK's own."""

    termination_reason: str | None = None


class TerminationEvent(Event):
    """Says why the work ended.

    It has no content and is not a response: code that reads ``event.content.parts[0]`` must not take it for one.
    """

    def is_final_response(self) -> bool:
        return False


# ---- Under install(): ``actions.termination_reason`` of every event

REASON: Final = "termination_reason"
_POST_INIT: Final = "model_post_init"


def _get_reason(actions: EventActions) -> str | None:
    reason: str | None = actions.__dict__.get(REASON)
    return reason


def _set_reason(actions: EventActions, reason: str | None) -> None:
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"{REASON} = {reason!r}: give a text or None")
    actions.__dict__[REASON] = reason


_REASON_PROPERTY: Final = property(_get_reason, _set_reason, doc="Why the work ended. Added by runguard.install().")


def _wrap_actions(original: Any) -> Any:
    @wraps(original)
    def begin(self: EventActions, /, **data: Any) -> None:
        if REASON not in data or REASON in type(self).model_fields:
            original(self, **data)
            return
        reason = data.pop(REASON)
        original(self, **data)
        _set_reason(self, reason)

    return begin


def keep_reason(event: Event) -> None:
    """Keep a reason of the actions in the metadata too: ADK without RunGuard could not read a field of its own."""
    reason = _get_reason(event.actions)
    if reason is None or termination_reason(event) == reason:
        return
    metadata = event.custom_metadata or {}
    own = metadata.get(METADATA_KEY)
    ended = {KEY: {"reason": reason, "condition": ""}}
    event.custom_metadata = {**metadata, METADATA_KEY: {**own, **ended} if isinstance(own, dict) else ended}


def _wrap_event(original: Any) -> Any:
    @wraps(original)
    def post_init(self: Event, context: Any, /) -> None:
        original(self, context)
        if _get_reason(self.actions) is not None:
            keep_reason(self)
        elif self.custom_metadata and (reason := termination_reason(self)) is not None:  # loaded from a session
            _set_reason(self.actions, reason)
            self.actions.escalate = True

    return post_init


# ---- Under install(): a keyword of ADK's LoopAgent


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


_REASONS: Final = WrappedMethods()


def add_keywords() -> None:
    """Add ``EventActions.termination_reason`` and ``LoopAgent.termination_condition``, while a guard is installed.

    An ADK that has one of them keeps its own.
    """
    if REASON not in EventActions.model_fields and REASON not in EventActions.__dict__:
        setattr(EventActions, REASON, _REASON_PROPERTY)
        _REASONS.wrap(EventActions, "__init__", _wrap_actions)
        _REASONS.wrap(Event, _POST_INIT, _wrap_event)
    if KEYWORD not in LoopAgent.model_fields:
        LOOP_KEYWORD.put_on()
        LOOP_KEYWORD.accept = terminate
        setattr(LoopAgent, KEYWORD, _PROPERTY)


def remove_keywords() -> None:
    """Undo what ``add_keywords`` does."""
    LOOP_KEYWORD.take_off()
    _REASONS.put_back()
    for kind, name, added in ((EventActions, REASON, _REASON_PROPERTY), (LoopAgent, KEYWORD, _PROPERTY)):
        if kind.__dict__.get(name) is added:
            delattr(kind, name)
