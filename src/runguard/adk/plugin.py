"""``RunGuardPlugin``: ADK calls its hooks. It translates hooks to events for the guard, and decides nothing.

Users register it, ``install()`` in ``runner`` puts it into every Runner, and ``cost_breaker`` drives it by callbacks.
Here are also ``hook``, which ``cost_breaker`` and ``budget_plugin`` use, and what happens around a model call.
``tool_hooks``, ``events``, ``stops`` and ``a2a`` do the rest.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, Final, TypeVar, Unpack

from google.adk.agents import BaseAgent, ParallelAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.adk import patching
from runguard.adk.a2a import RemoteCalls, is_remote, wrap_remote_agents
from runguard.adk.events import EventReader, RunStarter
from runguard.adk.model_calls import recover
from runguard.adk.requests import (
    ask_for_last_answer,
    cap_output,
    choose_model,
    is_answer,
    leave_tools_out,
    read_parts,
)
from runguard.adk.runs import (
    ANNOUNCED,
    FLIGHTS_KEPT,
    HERE,
    Invocation,
    Invocations,
    ModelInFlight,
    enclosing_tool,
    enter,
    is_beside,
    is_bounded,
    lane_of,
    project,
)
from runguard.adk.stops import Stopper, is_asked_again
from runguard.adk.termination import REASON, keep_reason
from runguard.adk.tool_hooks import ToolHooks
from runguard.calls.model_calls import count_tokens
from runguard.calls.surroundings import carry
from runguard.calls.tool_calls import Layer, Place, register
from runguard.core.decision import METADATA_KEY, STOP_CODE, Action, Trip
from runguard.core.errors import PolicyError
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall, ModelResult
from runguard.core.identity import words_name
from runguard.engine.guard import Controls, Guard
from runguard.engine.resume import retire
from runguard.engine.runs import Lane
from runguard.policy.keywords import PolicySettings
from runguard.policy.settings import Policy
from runguard.pricing.book import preload

_log: Final = logging.getLogger("runguard")
_BLOCK, _STOP = Action.BLOCK, Action.STOP  # bound once: a lookup on the enum costs as much as the rest of a line

# ---- The outermost line of a hook

_Hook = TypeVar("_Hook", bound=Callable[..., Coroutine[Any, Any, Any]])


def hook(function: _Hook) -> _Hook:
    """Wrap a hook. The object's ``instead_of`` gives the answer when the hook fails.

    ADK ends a run when a hook of a plugin raises. So only ``Halt`` leaves a hook, which ends the run on purpose and is
    not an ``Exception``.
    """
    name = function.__name__.removesuffix("_callback")

    @wraps(function)
    async def outermost(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await function(self, *args, **kwargs)
        except Exception as error:
            return self.instead_of(name, error, *args, *kwargs.values())

    return outermost  # type: ignore[return-value]


# ---- The plugin

NAME: Final = "runguard"
_SHOWN_LIMITS: Final = (
    "max_usd",
    "max_tokens",
    "max_context_tokens",
    "max_model_calls",
    "max_tool_calls",
    "max_seconds",
    "max_delegation_depth",
    "max_concurrent_agents",
    "max_identical_tool_results",
)


class Generation:
    """One policy of a plugin at work: its guard, its runs, and what carries out its decisions."""

    def __init__(self, guard: Guard, policy_error: str | None = None) -> None:
        self.guard = guard
        self.invocations = Invocations(guard)
        self.stopper = Stopper(guard, self.invocations)
        self.reader = EventReader(guard, self.invocations, self.stopper)
        self.starter = RunStarter(guard, self.invocations, self.reader, policy_error)
        parts = guard, self.invocations, self.starter, self.stopper
        self.model_hooks, self.tool_hooks = ModelHooks(*parts), ToolHooks(*parts)
        self.remote_calls = RemoteCalls(guard, self.invocations)
        self.is_off = guard.policy.mode == "off" and policy_error is None


class RunGuardPlugin(Controls, BasePlugin):
    """Guards every run of the App or Runner it is registered with.

    Register it first in ``App(plugins=[RunGuardPlugin(...)])``: a plugin before it that answers a call hides that call
    from it. Keywords are the policy; see ``runguard.policy.settings``.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunGuardPlugin":
        """Return this plugin: a second guard in a copied App would double its budgets."""
        return self

    def __init__(self, *, name: str = NAME, **policy: Unpack[PolicySettings]) -> None:
        BasePlugin.__init__(self, name=name)
        carry(HERE)
        self.policy_error: str | None = None
        self.from_file_only = name != NAME and not policy  # how ``adk web --extra_plugins`` builds it
        self.warned_order = False
        try:
            guard = Guard(Policy.build(**policy), gives_last_answers=True, switches_models=True)
            guard.check_store()
        except PolicyError as error:
            if not self.from_file_only:
                raise
            # ADK only logs a constructor's exception and would go on unguarded: stop every run instead.
            self.policy_error = str(error)
            guard = Guard(Policy.validated({}, ""), gives_last_answers=True, switches_models=True)
        # The newest policy first, then those that still have runs: these finish under the policy that they began with.
        # Replaced as a whole, so that other threads see all of it.
        self.generations: tuple[Generation, ...] = (Generation(guard, self.policy_error),)
        self.only: Generation | None = None  # where there is no other: found at once
        patching.IN_USE.plugins.add(self)
        patching.wrap_adk()
        self._start()

    def replace_policy(self, **policy: Unpack[PolicySettings]) -> None:
        """Begin new runs under another policy, whose guard knows what the old one knows.

        An invalid policy raises and changes nothing.
        """
        before = self.guard
        guard = Guard(Policy.build(**policy), heir_of=before, gives_last_answers=True, switches_models=True)
        guard.check_store()
        newest = Generation(guard)
        retire(before, guard)
        self.generations = (newest, *(older for older in self.generations if older.invocations.known))
        self._start()

    def _start(self) -> None:
        """Load the price list now, so that no run waits for it, and say what the policy is.

        Not in a thread: a process that forks meanwhile could never import again.
        """
        self.only = self.generations[0] if len(self.generations) == 1 else None
        try:
            if not self.generations[0].is_off:
                preload(self.guard.policy.prices_source)
        except Exception:
            _log.warning(
                "runguard.prices_failed: the price list could not be loaded; models without prices= of your "
                "own have none",
                exc_info=True,
            )
        _log.info("runguard.start: %s", self.describe())

    @property
    def guard(self) -> Guard:  # type: ignore[override]
        """The guard under the policy in force."""
        return self.generations[0].guard

    @property
    def invocations(self) -> Invocations:
        return self.generations[0].invocations

    def generation_of(self, invocation_id: str) -> Generation:
        """Return the policy of an invocation, else that of the Runner or tool call around it, else the newest."""
        stream = HERE.get().stream
        around = stream.registry if stream is not None else None
        for one in self.generations:
            if one.invocations.find(invocation_id) is not None:
                return one
        return next((one for one in self.generations if one.invocations is around), None) or self.generation_here()

    def generation_here(self) -> Generation:
        """Return the policy for a run that starts here: that of the tool call around it, else the newest."""
        generations = self.generations
        return next((one for one in generations if enclosing_tool(one.guard) is not None), generations[0])

    def describe(self) -> str:
        """Mode, limits, store and ADK version in one line."""
        from google.adk.version import __version__ as adk_version

        policy = self.guard.policy
        limits = {name: value for name in _SHOWN_LIMITS if (value := getattr(policy, name)) is not None}
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        if policy.budgets:
            shown += f", budgets={len(policy.budgets)}"
        return (
            f"mode={policy.mode}, on_stop={policy.on_stop}, {shown}, store={self.guard.store_name}, "
            f"policy={policy.digest}, google-adk {adk_version}"
        )

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """Return what ADK gets from a hook that failed."""
        own = self.generations[0]
        if self.only is None:
            with suppress(Exception):
                own = self.generation_of(next(one.invocation_id for one in given if hasattr(one, "invocation_id")))
        return own.stopper.instead_of(hook, error, *given)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    @hook
    async def before_run_callback(self, *, invocation_context: InvocationContext) -> types.Content | None:
        own = self.generation_of(invocation_context.invocation_id)
        if own.is_off:
            return None
        try:
            wrap_remote_agents()
            await own.starter.start(invocation_context, announced=True)
        except Exception as error:
            own.stopper.fault("before_run", error, invocation_context)
        return None

    @hook
    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        name = invocation_context.invocation_id
        invocations = self.generation_of(name).invocations
        invocation = invocations.find(name)
        if invocation is None:
            return
        invocation.finished = True
        # where the Runner is wrapped, the wrapper sees the end: a compaction may still follow
        if not invocation.streamed:
            invocations.forget(name)
            await invocations.written([name])

    @hook
    async def before_agent_callback(
        self, *, agent: BaseAgent, callback_context: CallbackContext
    ) -> types.Content | None:
        own = self.generation_of(callback_context.invocation_id)
        if own.is_off:
            return None
        ic = callback_context._invocation_context
        trip, lane = own.stopper.gave_up(ic.invocation_id), ROOT_LANE
        if trip is None:
            try:
                guard, invocation = own.guard, await own.starter.invocation_of(ic)
                lane = lane_of(guard, invocation, ic.branch, ic.isolation_scope)
                depth = enter(guard, invocation, agent, lane, ic.branch, ic.isolation_scope)
                branches = len(agent.sub_agents) if isinstance(agent, ParallelAgent) else 0
                is_task = getattr(agent, "mode", None) == "task"
                run = invocation.run.info.run
                entered = AgentEntered(run, lane, agent.name, guard.clock(), depth, branches, is_task)
                entered.is_bounded = is_bounded(agent)
                decision = guard.check(entered)
                if not decision.enforced or decision.action < _BLOCK:
                    if not is_remote(agent):
                        return None
                    trip = await own.remote_calls.before(agent, invocation, lane, ic)
                elif decision.action is _BLOCK:  # too deep: this agent is refused, its caller goes on
                    return types.Content(role="model", parts=[types.Part(text=decision.for_model)])
                else:
                    trip = decision.trip
            except Exception as error:
                trip = own.stopper.fault("before_agent", error, ic)
                if trip is None and is_remote(agent):  # nothing else reserves for its call
                    trip = own.guard.give_up_call("remote agent", error, "", agent.name)
        if trip is None:
            return None
        return await own.stopper.at_agent(callback_context, agent, trip, own.invocations.find(ic.invocation_id), lane)

    @hook
    async def after_agent_callback(self, *, agent: BaseAgent, callback_context: CallbackContext) -> None:
        if is_remote(agent):
            own = self.generation_of(callback_context.invocation_id)
            own.remote_calls.after(agent, callback_context._invocation_context)

    # The five hooks of every step do what ``hook`` does themselves: each layer of calls counts there.

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        try:
            own = self.only or self.generation_of(callback_context.invocation_id)
            return None if own.is_off else await own.model_hooks.before(callback_context, llm_request)
        except Exception as error:
            answer: LlmResponse | None = self.instead_of("before_model", error, callback_context)
            return answer

    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> LlmResponse | None:
        try:
            own = self.only or self.generation_of(callback_context.invocation_id)
            stop = None if own.is_off else own.model_hooks.after(callback_context, llm_response)
            return None if stop is None else await own.stopper.at_model(callback_context, *stop)
        except Exception as error:
            self.instead_of("after_model", error, callback_context)
            return None

    @hook
    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        own = self.generation_of(callback_context.invocation_id)
        stop = None if own.is_off else own.model_hooks.failed(callback_context.invocation_id)
        return None if stop is None else await own.stopper.at_model(callback_context, *stop)

    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        try:
            own = self.only or self.generation_of(tool_context.invocation_id)
            return None if own.is_off else await own.tool_hooks.before(tool, tool_args, tool_context)
        except Exception as error:
            refused: dict[str, Any] | None = self.instead_of("before_tool", error, tool_context)
            return refused

    async def after_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: dict[str, Any]
    ) -> dict[str, Any] | None:
        try:
            own = self.only or self.generation_of(tool_context.invocation_id)
            if not own.is_off:
                own.tool_hooks.after(tool, tool_args, tool_context, result)
        except Exception as error:
            self.instead_of("after_tool", error, tool_context)
        return None

    @hook
    async def on_tool_error_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, error: BaseException
    ) -> dict[str, Any] | None:
        own = self.generation_of(tool_context.invocation_id)
        return None if own.is_off else own.tool_hooks.failed(tool, tool_context, error)

    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> Event | None:
        try:
            held, name = event.__dict__, invocation_context.invocation_id
            if held["actions"].__dict__.get(REASON) is not None:
                keep_reason(event)
            own = self.only or self.generation_of(name)
            if own.is_off or held["partial"]:
                return None
            trip = own.stopper.gave_up(name)
            if trip is not None:
                own.stopper.mark(event, trip)
                return None
            invocation = own.invocations.find(name)
            if invocation is not None:
                own.reader.on_event(invocation, event, invocation_context)
                if held["custom_metadata"] or held["error_message"]:
                    own.remote_calls.on_event(invocation, event)
        except Exception as error:
            self.instead_of("on_event", error, invocation_context)
        return None


# ---- Before and after a model call

_LIMITS_KEPT: Final = 64
_MAX_TOKENS: Final = types.FinishReason.MAX_TOKENS


class ModelHooks:
    """Model calls of one plugin: checks each, reserves its worst case, and judges its result."""

    def __init__(self, guard: Guard, invocations: Invocations, starter: RunStarter, stopper: Stopper) -> None:
        self._guard, self._invocations, self._starter, self._stopper = guard, invocations, starter, stopper
        self._watches_context = guard.policy.rungs("context") is not None
        self._counter = guard.policy.tokens
        guard.read_parts = read_parts

    async def before(self, callback_context: CallbackContext, llm_request: LlmRequest) -> LlmResponse | None:
        ic = callback_context._invocation_context
        of, asked = ic.__dict__, llm_request.__dict__
        trip, lane = self._stopper.gave_up(of["invocation_id"]), ROOT_LANE
        event: ModelCall | None = None
        if trip is None:
            try:
                guard = self._guard
                invocation = self._invocations.find(of["invocation_id"])
                if invocation is None or invocation.nested:
                    invocation = await self._starter.invocation_of(ic)
                run, branch, agent, task = invocation.run, of["branch"], of["agent"], asyncio.current_task()
                lane = lane_of(guard, invocation, branch, of["isolation_scope"])
                last = invocation.flights.get(task)
                if last is not None and (not last.answered or (last.charge is not None and not last.charge.over)):
                    self._settle_unanswered(invocation, last)
                name = agent.name if agent is not None else ""
                event = ModelCall(run.info.run, lane, name, guard.clock(), asked["model"] or "")
                flight = ModelInFlight(guard, invocation, lane, name, branch)
                state = run.lanes[lane]
                state.offered = asked["tools_dict"]
                if state.withheld and not invocation.live:
                    leave_tools_out(llm_request, state.withheld)
                self._measure(invocation, event, flight, llm_request)
                if self._counter is not None:
                    await self._count(invocation, event, llm_request)
                if guard.model_choice is not None and not invocation.live:
                    is_other = choose_model(guard.model_choice, invocation, event, agent, llm_request)
                    if is_other and self._watches_context:
                        event.context_limit = self._context_limit(invocation, event.model)
                if (
                    state.is_new
                    and state.parent is not None
                    and branch is not None
                    and "@" in branch
                    and branch.rpartition("@")[2] not in invocation.calls
                ):
                    await self._count_siblings(state, state.parent, event)
                decision = guard.check(event)
                is_stopped = decision.action is _STOP and decision.enforced
                # at once where the accounts of a call of this run were found: a cap function is not asked twice
                if not is_stopped and not (run.run_costs.lines and guard.reserve_now(event, task)):
                    decision = await guard.reserve(event, task=task) or decision
                if decision.action is not _STOP or not decision.enforced:
                    flight.charge = event.charge
                    self._admit(flight, llm_request, task)
                    if state.notice:
                        llm_request.contents.append(types.Content(role="user", parts=[types.Part(text=state.notice)]))
                        state.notice = ""
                    return None
                trip = decision.trip
                answers = guard.last_call
                if (
                    answers is not None
                    and answers.may_answer(run, state, event, trip)
                    and not invocation.live
                    and await ask_for_last_answer(guard, run, event, agent, llm_request)
                ):
                    flight.charge, flight.last_after, flight.projection = event.charge, trip, None
                    self._admit(flight, llm_request, task)
                    return None
            except Exception as error:
                trip = self._stopper.fault("before_model", error, ic, recovers=True)
                self._take_back(event)
                if trip is None and not is_asked_again(self._guard):
                    trip = await self._recover(ic, llm_request, lane, error)
        if trip is None:
            return None
        return await self._stopper.at_model(callback_context, trip, self._invocations.find(ic.invocation_id), lane)

    async def _recover(self, ic: InvocationContext, request: LlmRequest, lane: str, error: Exception) -> Trip | None:
        """Reserve a call on the ledger alone, after a fault. Return why it must not be made, or None."""
        guard, invocation = self._guard, self._invocations.find(ic.invocation_id)
        run, agent = invocation.run.info.run if invocation is not None else "", getattr(ic.agent, "name", "")
        flight = ModelInFlight(guard, invocation, lane, agent, ic.branch)
        trip = await recover("before_model", flight, run, request, error)
        if trip is not None or flight.charge is None:
            return trip
        try:
            self._admit(flight, request, asyncio.current_task())
        except Exception as second:
            guard.release(flight.charge)
            return guard.faults.refuse("before_model", second, run, agent)
        return None

    def _measure(self, invocation: Invocation, event: ModelCall, flight: ModelInFlight, request: LlmRequest) -> None:
        """Write into the event what the call may take: the size of its prompt, and the largest answer."""
        sizes = flight.projection = project(request, invocation.prompts.get((event.lane, event.agent)))
        event.input_tokens, event.audio_tokens = sizes.upper, sizes.audio
        event.projected_tokens, event.request_bytes = sizes.likely, sizes.size
        config = request.config.__dict__
        event.max_output_tokens, event.candidates = config["max_output_tokens"], config["candidate_count"] or 1
        event.asked = prompt_hash(config["system_instruction"], request.contents)
        if invocation.live:
            # The usage of a live call comes in events. It only needs permission here, so it reserves almost nothing.
            event.input_tokens = event.max_output_tokens = 1
        if self._watches_context:
            try:
                event.context_limit = invocation.context_limits[event.model]
            except KeyError:
                event.context_limit = self._context_limit(invocation, event.model)
        tool = HERE.get().tool
        event.tool = tool.name if tool is not None and tool.guard is self._guard else ""

    async def _count(self, invocation: Invocation, event: ModelCall, request: LlmRequest) -> None:
        """Ask the user's own counter. What it returns replaces the estimate, but a live call reserves nothing."""
        counted = await count_tokens(self._counter, request) if self._counter is not None else None
        if counted is not None:
            event.projected_tokens = counted
            if not invocation.live:
                event.input_tokens = counted

    def _context_limit(self, invocation: Invocation, model: str) -> int | None:
        """Return the context window of a model, looked up once per run; None where it is unknown."""
        limits = invocation.context_limits
        if len(limits) >= _LIMITS_KEPT:
            limits.clear()
        limit = limits[model] = self._guard.context_limit(model)
        return limit

    def _admit(self, flight: ModelInFlight, request: LlmRequest, task: "asyncio.Task[Any] | None") -> None:
        """Record a call that may be made. ``model_calls``, or the event of another answer, reports how it ends."""
        guard, invocation, charge = self._guard, flight.invocation, flight.charge
        assert invocation is not None
        if charge is not None:
            charge.request = weakref.ref(request)
            if charge.lowered:
                cap_output(request, charge.max_output)
            if invocation.live:
                guard.release(charge)
        flights = invocation.flights
        flights[task] = flight
        if len(flights) > FLIGHTS_KEPT:
            for over in invocation.drop_flights():
                self._invocations.close_flight(over)
        announced = ANNOUNCED.get()
        others = [other for other in announced if other.guard is not guard and not other.left] if announced else ()
        ANNOUNCED.set((*others, flight))

    def _take_back(self, event: ModelCall | None) -> None:
        """Release what was reserved for a call, because the guard failed afterwards.

        If the call is made all the same, ``model_calls`` reserves for it anew.
        """
        if event is None:
            return
        charge, event.charge = event.charge, None
        if charge is not None and not charge.over:
            self._guard.release(charge)
            self._guard.faults.attempt("before_model", self._guard.unspent, event.run, event)
        run, task = self._guard.runs.get(event.run), asyncio.current_task()
        if run is not None and task is not None:
            run.slots.give_back(task)

    async def _count_siblings(self, state: Lane, above: Lane, event: ModelCall) -> None:
        """Judge a Workflow's branch together with its siblings, which begin in the same turn of the event loop.

        No hook of ADK says how many branches a node starts. Without this, the first ones would be paid before there
        are too many.
        """
        state.is_new = False
        if not state.concurrent:
            return
        above.starting += 1
        try:
            await asyncio.sleep(0)
            # Its decision is not needed: the next check finds the stop.
            self._guard.check(AgentEntered(event.run, above.key, event.agent, event.at, 0, above.starting))
        finally:
            above.starting -= 1

    def _settle_unanswered(self, invocation: Invocation, flight: ModelInFlight) -> None:
        """Close the last call of this task. If no model answered it, a callback or a cache did."""
        if not flight.answered and not flight.left:
            flight.answered = flight.delivered = True
            self._guard.unspent(invocation.run.info.run)
        self._invocations.close_flight(flight)

    def after(
        self, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> tuple[Trip, Invocation, str] | None:
        """Return the stop, its invocation and lane where a last call gave no answer, or the kill switch ended the call.

        The loops around it must end, too.
        """
        ic, said = callback_context._invocation_context, llm_response.__dict__
        try:
            invocation = self._invocations.find(ic.invocation_id)
            if invocation is None:
                return None
            task = asyncio.current_task()
            flight = invocation.flights.get(task)
            if flight is None:
                return None
            if not flight.left:
                flight.usage.add(llm_response)
            flight.answered = True
            if ANNOUNCED.get():
                # The call has reached its model, or never will. A context that outlives the run must not keep the run.
                ANNOUNCED.set(())
            if said["partial"]:
                flight.streamed = True
            else:
                is_first, flight.done_at, flight.delivered = not flight.done_at, time.monotonic(), False
                charge = flight.charge
                # a model that is not one of ADK's classes: ``model_calls`` does not see it
                if charge is not None and not flight.left and not charge.over:
                    bill = flight.usage.bill(charge.input, charge.audio)
                    self._guard.settle(charge, bill.usage, estimated=bill.estimated)
                if is_first:  # the detectors see an answer once, however many responses it came in
                    usage = flight.usage
                    output = usage.reported.output if usage.reported is not None else None
                    name, now = invocation.run.info.run, self._guard.clock()
                    result = ModelResult(name, flight.lane, flight.agent, now, usage.prompt, output)
                    result.is_cut = said["finish_reason"] is _MAX_TOKENS
                    text = _final_text(said["content"], said["error_code"], flight.streamed)
                    if text is not None:
                        result.text_id, result.text = words_name(text), text
                    self._guard.after(result)
                if task is not None:
                    invocation.run.slots.give_back(task)
                if said["error_code"] == STOP_CODE and (cut := self._invocations.stop_of(ic.invocation_id)):
                    told = (said["custom_metadata"] or {}).get(METADATA_KEY)
                    if isinstance(told, dict) and told.get("id") == cut.id:
                        return cut, invocation, flight.lane
                if flight.last_after is not None and not is_answer(llm_response, ic.agent):
                    return flight.last_after, invocation, flight.lane
        except Exception as error:
            self._stopper.fault("after_model", error, ic)
        return None

    def failed(self, invocation_id: str) -> tuple[Trip, Invocation, str] | None:
        """Record that the model raised. Return the stop, its invocation and lane if this was the last call."""
        invocation = self._invocations.find(invocation_id)
        task = asyncio.current_task()
        if invocation is not None and (flight := invocation.flights.get(task)) is not None:
            flight.answered = flight.delivered = True
            if task is not None:
                invocation.run.slots.give_back(task)
            if flight.last_after is not None:
                return flight.last_after, invocation, flight.lane
        return None


def _final_text(content: types.Content | None, error: str | None, streamed: bool) -> str | None:
    """Return the text of an answer that ends an agent's work. None: it calls tools, sends media, or came in chunks."""
    text = ""
    for part in (content.parts if content is not None else None) or ():
        if part.text is None:
            return None
        if not part.thought:
            text += part.text
    text = text or str(error or "")
    return text if text or not streamed else None


# ---- What a model is asked

_LATEST: Final = 4  # contents: a question is the end of a history
_READ: Final = 16_384  # of each text


def prompt_hash(instruction: object, contents: list[types.Content]) -> int:
    """Return a hash of what a model is asked, so that equal answers to new questions do not count as repetition.

    It is valid within this process, and 0 where the instruction is not a text. Tool calls and their answers do not
    count: other rules judge them.
    """
    if instruction is not None and type(instruction) is not str:
        return 0
    asked: list[Any] = [instruction and (len(instruction), instruction[:_READ])]
    for content in contents[-_LATEST:]:
        for part in content.parts or ():
            held = part.__dict__
            if held["text"]:
                asked.append(held["text"][:_READ])
            elif held["inline_data"] is not None and held["inline_data"].data:
                asked.append((len(held["inline_data"].data), held["inline_data"].data[:_READ]))
            elif held["file_data"] is not None:
                asked.append(held["file_data"].file_uri)
    return hash(tuple(asked)) or 1


# ---- Agents of other frameworks inside a tool of an ADK agent: they join its run


def _tools_around() -> Place | None:
    """Return the place inside the ADK tool calls around this code, the outermost guard first; None without any."""
    tool = innermost = HERE.get().tool
    if innermost is None:
        return None
    layers: list[Layer] = []
    while tool is not None:
        if all(layer.guard is not tool.guard for layer in layers):
            layers.insert(0, Layer(tool.guard, tool.invocation.run, tool.lane))
        tool = tool.outer
    name = f"{innermost.name}@{innermost.call_id}"
    return Place(tuple(layers), name, innermost.depth + 1, is_beside=is_beside(innermost))


register(_tools_around)
