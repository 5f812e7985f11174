"""``BudgetPlugin``: a token budget for each session, counted over every model call of a run and of the agents it calls
as tools.

The stream of the outermost Runner at work (``RunnerStream``) holds the run that pays. The ``actions`` object identifies
a model call: ADK makes one for each call and passes it to every hook and chunk of it.
"""

import asyncio
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Final

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

from runguard.adk.patching import IN_USE, halt, wrap_adk
from runguard.adk.plugin import hook
from runguard.adk.runs import DELIVERY_S, HERE, SessionKey, project
from runguard.adk.stops import may_escalate, refusal, stop_response, until_done
from runguard.core.decision import PART_STOPPED, Trip, text_for_user
from runguard.core.errors import CheckedABC, InvalidTypeError
from runguard.core.identity import LruDict
from runguard.engine.token_budget import BudgetMonitor, BudgetPolicy

_log: Final = logging.getLogger("runguard")
_SESSIONS_KEPT: Final = 10_000
_ASKED_KEPT: Final = 64
_REFUSALS: Final = 3  # how often one agent is refused in a row before the run is ended from outside
# the same for all agents of a run: a graph that goes round may give its branches new names, and slows down as it does
_REFUSALS_IN_ALL: Final = 30
_STOP_TEXT: Final = text_for_user("budget")


@dataclass(slots=True, eq=False)
class _Run:
    """A run that pays for all model calls inside it."""

    key: SessionKey
    monitor: BudgetMonitor
    invocation_id: str = ""
    trip: Trip | None = None
    # invocation, agent, branch -> times in a row
    refusals: dict[tuple[str, str, str | None], int] = field(default_factory=dict)
    # tasks that wait for a model, and what they asked
    asked: "dict[asyncio.Task[Any], Callable[[], LlmRequest | None]]" = field(default_factory=dict)


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
        self._sessions = LruDict[SessionKey, BudgetMonitor](_SESSIONS_KEPT)
        self._lock = threading.Lock()
        IN_USE.plugins.add(self)
        wrap_adk()  # only the wrapped Runner can end a loop that ADK cannot end

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def monitor(self) -> BudgetMonitor:
        """The monitor of the session at hand. Outside of a session, the monitor used last."""
        run = self._run_at_hand()
        return self._last if run is None else run.monitor

    def monitor_for(self, *, app_name: str, user_id: str, session_id: str) -> BudgetMonitor:
        """Return the monitor of one session, for example to ``resume()`` it. Without a policy there is one for all."""
        return self._monitor_of((app_name, user_id, session_id))

    def _monitor_of(self, key: SessionKey) -> BudgetMonitor:
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
        self._run_of(invocation_context)
        return None

    def _run_of(self, ic: InvocationContext | None) -> _Run:
        """Return the run that pays for what happens here. A unit test may call a hook without a context."""
        run = self._run_at_hand() if ic is not None else None
        if run is None:
            key = (ic.app_name, ic.user_id, ic.session.id) if ic is not None else ("", "", "")
            run = _Run(key, self._own if ic is None else self._monitor_of(key), ic.invocation_id if ic else "")
            if ic is not None and (stream := HERE.get().stream) is not None:
                stream.guarded[self] = run
        self._last = run.monitor
        return run

    def _run_at_hand(self) -> _Run | None:
        """Return the outermost run around this code that this plugin counts. One that is over pays no more."""
        stream, found = HERE.get().stream, None
        while stream is not None and stream.is_open:
            found = stream.guarded.get(self, found)
            stream = stream.outer
        return found

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
        """Refuse the call of an agent that was stopped: its empty answer, or the schema error from it, is no answer."""
        is_stopped = isinstance(tool, AgentTool) and self._run_of(tool_context._invocation_context).monitor.stopped
        return refusal(PART_STOPPED) if is_stopped else None

    # ---- model calls ------------------------------------------------------------------------------------------------

    @hook
    async def before_model_callback(
        self, *, callback_context: CallbackContext | None, llm_request: LlmRequest
    ) -> LlmResponse | None:
        ic = callback_context._invocation_context if callback_context is not None else None
        run = self._run_of(ic)
        if not run.monitor.stopped:
            self._admit(run, ic, llm_request)
            return None
        trip = run.trip = run.trip or self._trip(run, ic, llm_request)
        if ic is not None and _is_spinning(run, ic):
            # A graph cycle or a custom agent would ask for ever. Paid siblings come first.
            mine = asyncio.current_task()
            if await until_done(lambda: all(task is mine or task.done() for task in run.asked)):
                await asyncio.sleep(DELIVERY_S)  # for the events of their answers
            raise halt(ic.invocation_id, trip, _STOP_TEXT)
        if callback_context is not None and ic is not None and isinstance(ic.agent, BaseAgent):
            callback_context.actions.escalate = may_escalate(ic.agent) or callback_context.actions.escalate
        return stop_response(trip, _STOP_TEXT)

    def _admit(self, run: _Run, ic: InvocationContext | None, llm_request: LlmRequest) -> None:
        run.trip = None
        run.refusals.clear()
        if ic is not None and (task := asyncio.current_task()) is not None:
            run.asked[task] = weakref.ref(llm_request)
            if len(run.asked) > _ASKED_KEPT:  # a long run of many agents has a task for each
                run.asked = {one: request for one, request in run.asked.items() if not one.done()}
        if ic is None or ic.live_request_queue is None:  # a live connection does not read the request again
            nudge = run.monitor.take_nudge()
            if nudge:
                llm_request.contents.append(types.Content(role="user", parts=[types.Part(text=nudge)]))

    @hook
    async def after_model_callback(
        self, *, callback_context: CallbackContext | None, llm_response: LlmResponse
    ) -> LlmResponse | None:
        if callback_context is None:
            self._run_of(None).monitor.record_response(llm_response)
            return None
        ic, task = callback_context._invocation_context, asyncio.current_task()
        run = self._run_of(ic)
        asked = run.asked.get(task) if task is not None else None
        if ic.live_request_queue is None:  # live usage comes in events of its own
            prompt_tokens = None if asked is None else partial(_tokens_of, asked)
            run.monitor.record_response(llm_response, callback_context.actions, prompt_tokens=prompt_tokens)
        if not llm_response.partial and task is not None:
            run.asked.pop(task, None)
        return None

    @hook
    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        if (task := asyncio.current_task()) is not None:
            self._run_of(callback_context._invocation_context).asked.pop(task, None)
        return None

    @hook
    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> Event | None:
        if invocation_context.live_request_queue is not None and event.usage_metadata is not None:
            self._run_of(invocation_context).monitor.record_response(event, event.actions)
        return None

    # ---- reporting --------------------------------------------------------------------------------------------------

    def _trip(self, run: _Run, ic: InvocationContext | None, llm_request: LlmRequest) -> Trip:
        monitor, (app, user, session) = run.monitor, run.key
        agent = getattr(ic.agent, "name", "") if ic is not None else ""
        where = f", in {agent}" if agent else ""
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
        """Log the failure of a hook. ADK gets no answer, and the run goes on."""
        _log.error(
            "runguard.budget_error: %s failed with %s; the run goes on", hook, type(error).__name__, exc_info=error
        )


def _is_spinning(run: _Run, ic: InvocationContext) -> bool:
    """Count a refusal. Return whether the run keeps asking, so that it must be ended from outside."""
    who = (ic.invocation_id, getattr(ic.agent, "name", ""), ic.branch)
    run.refusals[who] = run.refusals.get(who, 0) + 1
    return run.refusals[who] > _REFUSALS or sum(run.refusals.values()) > _REFUSALS_IN_ALL


def _tokens_of(asked: "Callable[[], LlmRequest | None]") -> int:
    """Estimate the prompt of a model call that reported none."""
    request = asked()
    return 0 if request is None else project(request, None).upper


def _digest(monitor: BudgetMonitor) -> str:
    """Return what identifies the budget in trips. Equal limits give equal digests; functions do not count."""
    limits = [monitor.max_tokens, *((t.percent, t.recurring, t.action) for t in monitor.thresholds)]
    return blake2b(repr(limits).encode(), digest_size=6).hexdigest()
