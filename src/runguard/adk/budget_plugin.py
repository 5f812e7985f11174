"""``BudgetPlugin``: a token budget for each session, counted over every model call of a run and of the agents it calls
as tools.

The ``actions`` object identifies a model call: ADK makes one for each call and passes it to every hook and chunk of it.
The outermost run decides which session pays. A tool call runs in a task of its own, so a context variable that is set
before it reaches the runs inside it and nothing else.
"""

import asyncio
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from google.adk.agents import BaseAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.adk import patching
from runguard.adk.patching import halt
from runguard.adk.plugin import hook
from runguard.adk.runs import DELIVERY_S, project
from runguard.adk.stops import may_escalate, refusal, stop_response, until_done
from runguard.core.decision import PART_STOPPED, Trip, text_for_user
from runguard.core.errors import CheckedABC, InvalidTypeError
from runguard.core.identity import LruDict
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy

_log: Final = logging.getLogger("runguard")
_SESSIONS_KEPT: Final = 10_000
_RUNS_KEPT: Final = 10_000
_REFUSALS: Final = 3  # how often one agent is refused in a row before the run is ended from outside
# the same for all agents of a run: a graph that goes round may give its branches new names, and slows down as it does
_REFUSALS_IN_ALL: Final = 30
_STOP_TEXT: Final = text_for_user("budget")

_Key = tuple[str, str, str]  # app, user, session


@dataclass(slots=True, eq=False)
class _Run:
    """A run that pays: no tool call of another run has started it."""

    owner: object
    key: _Key
    monitor: BudgetMonitor
    invocation_id: str = ""
    is_open: bool = True
    trip: Trip | None = None
    # invocation, agent, branch -> times in a row
    refusals: dict[tuple[str, str, str | None], int] = field(default_factory=dict)
    # tasks that wait for a model, and what they asked
    asked: "dict[asyncio.Task[Any], Callable[[], LlmRequest | None]]" = field(default_factory=dict)


class _Place(NamedTuple):
    """Which run pays for the running code."""

    current: _Run
    caller: _Run | None = None  # the run whose tool call the code is inside of


# At most one place of each plugin: several budgets may watch the same run.
_PLACES: Final[ContextVar[tuple[_Place, ...]]] = ContextVar("runguard_budget_places", default=())


def _place_of(owner: object) -> _Place | None:
    return next((place for place in _PLACES.get() if place.current.owner is owner), None)


def _put(run: _Run, *, as_caller: bool = False) -> None:
    """``run`` pays from here on. ``as_caller``: also for the runs that the tool call at hand starts."""
    before = _place_of(run.owner)
    place = _Place(run, run if as_caller else before.caller if before is not None else None)
    if before != place:
        _PLACES.set((*(other for other in _PLACES.get() if other is not before), place))


class BudgetPlugin(BasePlugin, metaclass=CheckedABC):
    """Counts every model call of the App or Runner it is registered with, and carries out its thresholds' nudges
    and stops.

    A ``BudgetPolicy`` gives each session a budget of its own, kept in memory for the last 10,000 sessions. A
    ``BudgetMonitor`` is one budget for everything. A stop refuses model calls until the session's monitor is resumed,
    reset or adjusted below the threshold.
    """

    def __init__(self, policy_or_monitor: BudgetPolicy | BudgetMonitor, *, name: str = "adkf_budget_plugin") -> None:
        if not isinstance(policy_or_monitor, BudgetPolicy | BudgetMonitor):
            raise InvalidTypeError(f"policy_or_monitor = {policy_or_monitor!r}: give a BudgetPolicy or a BudgetMonitor")
        super().__init__(name=name)
        self._policy = policy_or_monitor if isinstance(policy_or_monitor, BudgetPolicy) else None
        self._own = (
            policy_or_monitor.build_monitor() if isinstance(policy_or_monitor, BudgetPolicy) else policy_or_monitor
        )
        self._last = self._own
        self._owner = object()  # identifies this plugin in the context variable without keeping it alive
        self._sessions = LruDict[_Key, BudgetMonitor](_SESSIONS_KEPT)
        # with runs that broke off: older versions of ADK call no hook for them
        self._runs = LruDict[str, _Run](_RUNS_KEPT)
        self._lock = threading.Lock()
        patching.watch(self)  # only the wrapped Runner can end a loop that ADK cannot end

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def monitor(self) -> BudgetMonitor:
        """The monitor of the session at hand. Outside of a session, the monitor used last."""
        place = _place_of(self._owner)
        return place.current.monitor if place is not None else self._last

    def monitor_for(self, *, app_name: str, user_id: str, session_id: str) -> BudgetMonitor:
        """The monitor of one session, for example to ``resume()`` it. Without a policy there is one for all."""
        return self._monitor_of((app_name, user_id, session_id))

    def _monitor_of(self, key: _Key) -> BudgetMonitor:
        if self._policy is None:
            return self._own
        with self._lock:
            monitor = self._sessions.get(key)
            if monitor is None:
                monitor = self._policy.build_monitor()
                if self._own.turn_count == 0:  # the first session uses the monitor that ``monitor`` has shown so far
                    monitor, self._own = self._own, monitor
                self._sessions[key] = monitor
            self._sessions.move_to_end(key)
            return monitor

    # ---- runs -------------------------------------------------------------------------------------------------------

    @hook
    async def before_run_callback(self, *, invocation_context: InvocationContext) -> types.Content | None:
        try:
            with self._lock:
                # ADK uses the id again for a run that is resumed after a pause
                self._runs.pop(invocation_context.invocation_id, None)
            self._run_of(invocation_context)
        except Exception as error:
            self._fault("before_run", error)
        return None

    @hook
    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        self._end(invocation_context.invocation_id)

    @hook
    async def on_run_error_callback(self, *, invocation_context: InvocationContext, error: Exception) -> None:
        self._end(invocation_context.invocation_id)

    def _end(self, invocation_id: str) -> None:
        with self._lock:
            run = self._runs.pop(invocation_id, None)
        if run is not None:
            run.is_open = False  # a task that a tool left running must not charge this run any more

    def _run_of(self, ic: InvocationContext) -> _Run:
        """The run that pays for what happens here."""
        place = _place_of(self._owner)
        run = place.caller if place is not None else None
        if run is None or not run.is_open:
            with self._lock:
                run = self._runs.get(ic.invocation_id)
            if run is None:
                key = (ic.app_name, ic.user_id, ic.session.id)
                run = _Run(self._owner, key, self._monitor_of(key), ic.invocation_id)
                with self._lock:
                    run = self._runs.setdefault(ic.invocation_id, run)
        _put(run)
        self._last = run.monitor
        return run

    def _without_context(self) -> _Run:
        """For a hook that a unit test calls without a context."""
        run = _Run(self._owner, ("", "", ""), self._own)
        _put(run)
        self._last = run.monitor
        return run

    @hook
    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        try:
            _put(self._run_of(tool_context._invocation_context), as_caller=True)
        except Exception as error:
            self._fault("before_tool", error)
        return None

    @hook
    async def after_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: Any
    ) -> dict[str, Any] | None:
        text = result.get("result") if isinstance(result, dict) else result
        return self._answer_if_stopped(tool, tool_context) if text in ("", _STOP_TEXT) else None

    @hook
    async def on_tool_error_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, error: BaseException
    ) -> dict[str, Any] | None:
        return self._answer_if_stopped(tool, tool_context) if isinstance(error, ValueError) else None

    def _answer_if_stopped(self, tool: BaseTool, tool_context: ToolContext) -> dict[str, Any] | None:
        """An agent called as a tool was stopped: its empty answer, or the schema error from it, must not count as an
        answer.
        """
        try:
            if isinstance(tool, AgentTool) and self._run_of(tool_context._invocation_context).monitor.stopped:
                return refusal(PART_STOPPED)
        except Exception as error:
            self._fault("after_tool", error)
        return None

    # ---- model calls ------------------------------------------------------------------------------------------------

    @hook
    async def before_model_callback(
        self, *, callback_context: CallbackContext | None, llm_request: LlmRequest
    ) -> LlmResponse | None:
        try:
            ic = callback_context._invocation_context if callback_context is not None else None
            run = self._run_of(ic) if ic is not None else self._without_context()
            if not run.monitor.stopped:
                self._admit(run, ic, llm_request)
                return None
            trip = run.trip = run.trip or self._trip(run, ic, llm_request)
            if ic is None or callback_context is None or not self._is_spinning(run, ic):
                if (
                    callback_context is not None
                    and ic is not None
                    and isinstance(ic.agent, BaseAgent)
                    and may_escalate(ic.agent)
                ):
                    callback_context.actions.escalate = True
                return stop_response(trip, _STOP_TEXT)
        except Exception as error:
            self._fault("before_model", error)
            return None
        # A graph cycle or a custom agent would ask for ever. Paid siblings come first.
        await self._until_answered(run)
        if run.invocation_id == ic.invocation_id:
            self._end(run.invocation_id)
        raise halt(ic.invocation_id, trip, _STOP_TEXT)

    def _admit(self, run: _Run, ic: InvocationContext | None, llm_request: LlmRequest) -> None:
        run.trip = None
        run.refusals.clear()
        if ic is not None and (task := asyncio.current_task()) is not None:
            run.asked[task] = weakref.ref(llm_request)
            if len(run.asked) > 64:  # a long run of many agents has a task for each
                run.asked = {one: request for one, request in run.asked.items() if not one.done()}
        if ic is None or ic.live_request_queue is None:  # a live connection does not read the request again
            nudge = run.monitor.take_nudge()
            if nudge:
                llm_request.contents.append(types.Content(role="user", parts=[types.Part(text=nudge)]))

    def _is_spinning(self, run: _Run, ic: InvocationContext) -> bool:
        who = (ic.invocation_id, getattr(ic.agent, "name", ""), ic.branch)
        run.refusals[who] = run.refusals.get(who, 0) + 1
        return run.refusals[who] > _REFUSALS or sum(run.refusals.values()) > _REFUSALS_IN_ALL

    async def _until_answered(self, run: _Run) -> None:
        mine = asyncio.current_task()
        if await until_done(lambda: all(task is mine or task.done() for task in run.asked)):
            await asyncio.sleep(DELIVERY_S)  # for the events of their answers

    @hook
    async def after_model_callback(
        self, *, callback_context: CallbackContext | None, llm_response: LlmResponse
    ) -> LlmResponse | None:
        try:
            if callback_context is None:
                self._without_context().monitor.record_response(llm_response)
                return None
            ic = callback_context._invocation_context
            run = self._run_of(ic)
            task = asyncio.current_task()
            asked = run.asked.get(task) if task is not None else None
            if ic.live_request_queue is None:  # live usage comes in events of its own
                run.monitor.record_response(
                    llm_response,
                    callback_context.actions,
                    prompt_tokens=None if asked is None else partial(_tokens_of, asked),
                )
            if not llm_response.partial and task is not None:
                run.asked.pop(task, None)
        except Exception as error:
            self._fault("after_model", error)
        return None

    @hook
    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        try:
            if (task := asyncio.current_task()) is not None:
                self._run_of(callback_context._invocation_context).asked.pop(task, None)
        except Exception as own:
            self._fault("on_model_error", own)
        return None

    @hook
    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> Event | None:
        try:
            if invocation_context.live_request_queue is not None and event.usage_metadata is not None:
                self._run_of(invocation_context).monitor.record_response(event, event.actions)
        except Exception as error:
            self._fault("on_event", error)
        return None

    # ---- reporting --------------------------------------------------------------------------------------------------

    def _trip(self, run: _Run, ic: InvocationContext | None, llm_request: LlmRequest) -> Trip:
        monitor, (app, user, session) = run.monitor, run.key
        agent = getattr(ic.agent, "name", "") if ic is not None else ""
        where = f" in {agent}" if agent else ""
        tokens, limit, turns = monitor.current_tokens, monitor.stop_limit, monitor.turn_count
        trip = Trip(
            id=secrets.token_hex(8),
            rule="budget",
            action="stop",
            scope="session",
            scope_id=session,
            unit="tokens",
            app=app,
            user_id=user,
            session_id=session,
            run_id=run.invocation_id,
            invocation_id=ic.invocation_id if ic is not None else "",
            message=(
                f"stopped by budget: {tokens} tokens, limit {limit} ({monitor.stop_reason}){where}; {turns} model "
                f"call{'s' if turns != 1 else ''} so far"
            ),
            resume=(
                "resume(), reset() or adjust() the session's monitor: plugin.monitor_for(app_name=..., "
                "user_id=..., session_id=...)"
            ),
            policy_digest=_digest(monitor),
            at=time.time(),  # noqa: TID251 - for display only; nothing is decided by it
            observed=tokens,
            limit=limit,
            agent_path=(agent,) if agent else (),
            branch=ic.branch if ic is not None else None,
            model=getattr(llm_request, "model", None),
            model_calls=turns,
            tokens=tokens,
        )
        _log.warning("runguard.budget: %s", trip.message)
        return trip

    def instead_of(self, hook: str, error: Exception, *given: Any) -> None:
        """A hook failed. ADK gets no answer, and the run goes on."""
        self._fault(hook, error)

    def _fault(self, hook: str, error: Exception) -> None:
        _log.error(
            "runguard.budget_error: %s failed with %s; the run goes on", hook, type(error).__name__, exc_info=error
        )


def _tokens_of(asked: "Callable[[], LlmRequest | None]") -> int:
    """The prompt of a model call that reported none, estimated."""
    request = asked()
    return 0 if request is None else project(request, None).upper


def _digest(monitor: BudgetMonitor) -> str:
    """Identifies the budget in trips. Equal limits give equal digests; functions do not count."""
    limits = [monitor.max_tokens, *((t.percent, t.recurring, t.action) for t in monitor.thresholds)]
    return blake2b(repr(limits).encode(), digest_size=6).hexdigest()
