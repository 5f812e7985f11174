"""Termination conditions at work on ADK: for a run of a Runner, or for one loop inside of it.

A condition is told of every event after it was passed on, and asked before every model call that it covers: what is known then
(time, tokens, cost, an external signal) ends the work before that call is paid. Calls that are on their way to a model are waited
for; an external signal, or time that is up, ends them. Whatever function call is still open is answered, so that the next turn works.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any, Final

from google.adk.agents import BaseAgent, LoopAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event, EventActions
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.workflow import Workflow
from google.genai import types

from runguard.adk import runners
from runguard.adk.chain import TERMINATIONS
from runguard.adk.stops import refusal
from runguard.decision import METADATA_KEY, TERMINATED
from runguard.errors import PolicyError
from runguard.pricing import Usage
from runguard.termination import TerminationCondition

_OWN: Final = "__runguard_termination__"
_KEY: Final = "termination"
_INIT: Final = "__init__"
_DELIVERY_S: Final = 0.25  # from a model's answer to its event
SCOPES: Final = ("loop", "run")


class TerminationActions(EventActions):
    """ADK's actions with the reason; stored as ADK's own."""

    termination_reason: str | None = None


class TerminationPlugin(BasePlugin):
    """Ends the runs of its App or Runner when a condition fires: ``App(..., plugins=[TerminationPlugin(TextMentionTermination("DONE"))])``."""

    def __init__(self, condition: TerminationCondition, *, name: str = "runguard_termination") -> None:
        super().__init__(name=name)
        self.condition = checked(condition)
        runners.watch(self)  # its wrapper is what sees every event and can end any topology


def terminate(agent: Any, condition: TerminationCondition, *, scope: str = "loop") -> Any:
    """Let a condition end this agent, and nothing around it; returns the agent. For a LoopAgent, any other agent, or a Runner's Workflow.

    ``scope="run"`` escalates: loops around the agent end with it.
    """
    checked(condition)
    if scope not in SCOPES:
        raise PolicyError(f"scope = {scope!r}: 'loop' ends the agent alone, 'run' escalates to what is around it")
    if isinstance(agent, Workflow):
        agent.__dict__[_OWN] = condition
    elif isinstance(agent, BaseAgent):
        agent.__dict__["_run_async_impl"] = _ending(type(agent)._run_async_impl, condition, scope)
    else:
        raise PolicyError(f"terminate({agent!r}, …): give an agent or a Workflow of google-adk")
    runners.keep_patched()
    return agent


def condition_of(root: Any) -> TerminationCondition | None:
    """The condition that was put on a Workflow."""
    found = getattr(root, "__dict__", {}).get(_OWN)
    return found if isinstance(found, TerminationCondition) else None


def termination_reason(event: Any) -> str | None:
    """Why the work ended, of the event that ended it; None of any other. Takes an ADK event, or its JSON."""
    told = event.get("custom_metadata") or event.get("customMetadata") if isinstance(event, dict) else getattr(event, "custom_metadata", None)
    about = told.get(METADATA_KEY) if isinstance(told, dict) else None
    ended = about.get(_KEY) if isinstance(about, dict) else None
    return str(ended["reason"]) if isinstance(ended, dict) and "reason" in ended else None


def checked(condition: object) -> TerminationCondition:
    if not isinstance(condition, TerminationCondition):
        raise PolicyError(f"{condition!r} is no termination condition; make one such as MaxIterationsTermination(10) | TimeoutTermination(60)")
    return condition


# ---- one condition in one run or loop -------------------------------------------------------------------------------


class Watched:
    """One condition at work, with what it has to know to end cleanly."""

    def __init__(self, condition: TerminationCondition) -> None:
        self.condition = condition.for_run(time.monotonic())
        self.reason: str | None = None
        self.in_flight = 0  # calls on their way to a model
        self.undelivered = 0  # answers that were paid and whose events have not passed yet
        self._open: dict[str, tuple[types.FunctionCall, str, str | None]] = {}  # function calls without an answer
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thrown = False

    async def tell(self, events: list[Event]) -> None:
        """What happened; nothing: what can be known without."""
        for event in events:
            self._remember(event)
        if self.reason is None and (events or self.condition.knows_early):
            fired = await self.condition(events)
            if fired is not None:
                self.reason = fired.reason

    def count(self, usage: Usage, model: str) -> None:
        """A model call that no event of the stream shows."""
        if self.reason is None:
            self.condition.count(usage.input, usage.output, model=model, usage=usage)

    @property
    def is_over(self) -> bool:
        """It has fired, and nothing that was paid would be thrown away."""
        return self.reason is not None and not self.in_flight and not self.undelivered

    def _remember(self, event: Event) -> None:
        waiting = event.long_running_tool_ids or ()
        if self.undelivered and not event.partial and not event.get_function_responses():
            self.undelivered -= 1
        for call in event.get_function_calls():
            if call.id and call.id not in waiting and not event.partial:
                self._open[call.id] = (call, event.author, event.branch)
        for response in event.get_function_responses():
            self._open.pop(response.id or "", None)

    def last_events(self, author: str, invocation_id: str, branch: str | None, escalate: bool) -> list[Event]:
        """An answer to every open call, and the event that says why it ends."""
        reason = self.reason or ""
        events: list[Event] = []
        for call, caller, place in self._open.values():
            part = types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response=refusal(TERMINATED)))
            events.append(Event(author=caller, invocation_id=invocation_id, branch=place, content=types.Content(role="user", parts=[part])))
        actions = TerminationActions(escalate=True if escalate else None, termination_reason=reason)
        metadata = {METADATA_KEY: {_KEY: {"reason": reason, "condition": repr(self.condition)[:500]}}}
        return [*events, Event(author=author, invocation_id=invocation_id, branch=branch, actions=actions, custom_metadata=metadata)]

    # ---- ending what waits ------------------------------------------------------------------------------------------

    async def pull(self, events: AsyncIterator[Event]) -> Event | None:
        """The next event, or None when there is none, or when a signal or the clock has ended the wait for it."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        token = TERMINATIONS.set((*TERMINATIONS.get(), self))
        silence = self.condition.on_set(self._throw)
        wake = self.condition.wake_at() if self.reason is None else time.monotonic() + _DELIVERY_S
        alarm = self._loop.call_later(max(wake - time.monotonic(), 0.0), self._cancel) if wake is not None else None
        try:
            await self.tell([])  # it may have been set before anybody listened
            return None if self.is_over else await anext(events)
        except StopAsyncIteration:
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._thrown or task is None or task.uncancel() > 0:
                raise
            await self.tell([])
            if self.reason is None:  # another part of it has to fire first
                raise
            return None
        finally:
            self._task = None
            silence()
            if alarm is not None:
                alarm.cancel()
            TERMINATIONS.reset(token)

    def _throw(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """Only if it ends the work: a signal in an And may not be enough yet."""
        if self._task is None or self._thrown or self.condition.needs_await:
            return
        if self.reason is None and not self.condition.terminated:
            fired = self.condition.check([])
            self.reason = fired.reason if fired else None
        if self.reason is not None:
            self.end_wait()

    def end_wait(self) -> None:
        if self._task is not None and not self._thrown:
            self._thrown = True
            self._task.cancel()


async def until(events: AsyncGenerator[Event, None], watched: Watched, finish: Callable[[str], Awaitable[list[Event]]]) -> AsyncGenerator[Event, None]:
    """The events of a run or of an agent until the condition fires and nothing paid is on its way; then those that end it."""
    last_invocation = ""
    try:
        while (event := await watched.pull(events)) is not None:
            last_invocation = event.invocation_id
            yield event
            await watched.tell([event])
            if watched.is_over:
                break
    finally:
        await _close(events)
    if watched.reason is not None:
        for ending in await finish(last_invocation):
            yield ending


async def _close(events: AsyncGenerator[Event, None]) -> None:
    try:
        await events.aclose()
    except BaseExceptionGroup as group:  # how an older ParallelAgent says that it was closed
        _, rest = group.split(GeneratorExit)
        if rest is not None:
            raise


def _ending(original: Any, condition: TerminationCondition, scope: str) -> Any:
    """What an agent does, until its condition fires. The context says which agent it is: a clone has this function too."""

    @wraps(original)
    def run_until(ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        watched, agent = Watched(condition), ctx.agent
        name = getattr(agent, "name", "")

        async def finish(_: str) -> list[Event]:
            return watched.last_events(name, ctx.invocation_id, ctx.branch, escalate=scope == "run")

        return until(original(agent, ctx), watched, finish)

    return run_until


# ---- at the model's border ------------------------------------------------------------------------------------------


async def asked_first(
    call: AsyncGenerator[LlmResponse, None], watched: tuple[Watched, ...], *, hidden: bool, usage_of: Callable[[Any], Usage]
) -> AsyncGenerator[LlmResponse, None]:
    """A model call that is made unless some condition around it has fired. Without content, the answer becomes nobody's.

    ``hidden``: no event of the stream shows it; what it takes is told here.
    """
    for one in watched:
        await one.tell([])
    if any(one.reason is not None for one in watched):
        await call.aclose()
        await asyncio.sleep(0)  # whoever asks in a loop must not keep the event loop to itself
        for one in watched:
            if one.is_over:  # nothing else will come: a loop that never yields would ask for ever
                one.end_wait()
        yield LlmResponse(custom_metadata={METADATA_KEY: {_KEY: {"refused": True}}})
        return
    usage, model, answered = None, "", False
    for one in watched:
        one.in_flight += 1
    try:
        async with aclosing(call) as answers:
            async for response in answers:
                usage, model = response.usage_metadata or usage, response.model_version or model
                if not response.partial and not answered:
                    answered = True
                    for one in watched:
                        one.in_flight -= 1
                        one.undelivered += not hidden
                yield response
    finally:
        for one in watched:
            one.in_flight -= not answered
            if usage is not None and hidden:
                one.count(usage_of(usage), model)


# ---- under install(): as if ADK had it ------------------------------------------------------------------------------


class LoopKeyword:
    """``LoopAgent(..., termination_condition=c)``, for as long as a guard is installed."""

    def __init__(self) -> None:
        self._original: Any = None

    def put_on(self) -> None:
        if self._original is not None:
            return
        original = self._original = getattr(LoopAgent, _INIT)

        @wraps(original)
        def begin(self: LoopAgent, *args: Any, **kwargs: Any) -> None:
            condition = kwargs.pop("termination_condition", None)
            if condition is not None:
                checked(condition)
            original(self, *args, **kwargs)
            if condition is not None:
                terminate(self, condition)

        setattr(LoopAgent, _INIT, begin)

    def take_off(self) -> None:
        if self._original is not None and getattr(getattr(LoopAgent, _INIT), "__wrapped__", None) is self._original:
            setattr(LoopAgent, _INIT, self._original)
            self._original = None


LOOP_KEYWORD: Final = LoopKeyword()
