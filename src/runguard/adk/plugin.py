"""``RunGuardPlugin``: ADK's hooks in, events out, decisions carried out. It translates and decides nothing.

Register it first in ``App(plugins=[RunGuardPlugin(...)])``: a plugin before it that answers a call hides that call from
it.
Results are judged on the function-response event, which precedes the next model call and shows what callbacks made of
them.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Final, Unpack

from google.adk.agents import BaseAgent, ParallelAgent
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

from runguard.adk import runners
from runguard.adk.classifiers import app_verdict
from runguard.adk.declared_arguments import declared_by
from runguard.adk.estimate import count_tokens, project
from runguard.adk.event_reader import FRAMEWORK_TOOLS, TRANSFER, EventReader
from runguard.adk.generations import Generations
from runguard.adk.hooks import hook
from runguard.adk.invocations import (
    FLIGHTS,
    FRAME,
    STREAM,
    Call,
    Frame,
    Invocation,
    ModelInFlight,
    enclosing_frame,
    stop_in_force,
)
from runguard.adk.lanes import depth_of, enter, lane_of, open_child
from runguard.adk.model_calls import cap_output
from runguard.adk.prompt_hash import prompt_hash
from runguard.adk.resuming import history_of, run_of
from runguard.adk.run_options import run_options
from runguard.adk.stop_events import refusal
from runguard.adk.stops import Stopper
from runguard.adk.tool_deadlines import limit_time, timed_out
from runguard.conductor.controls import Controls
from runguard.conductor.guard import Guard
from runguard.conductor.runs import Lane, Run
from runguard.core.absence import says_missing
from runguard.core.decision import METADATA_KEY, PART_STOPPED, STOPPED, Action, Trip
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall, ModelResult, Outcome, RunInfo, ToolCall
from runguard.core.exceptions import PolicyError, RunStoppedError
from runguard.core.fingerprint import words_name
from runguard.core.outcomes import was_done
from runguard.policy.settings import Policy
from runguard.policy.typed_settings import PolicySettings
from runguard.pricing.price_list import preload

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_NUDGE, _BLOCK, _STOP = Action.NUDGE, Action.BLOCK, Action.STOP
_ERROR, _TIMEOUT, _UNKNOWN_TOOL, _REFUSED = Outcome.ERROR, Outcome.TIMEOUT, Outcome.UNKNOWN_TOOL, Outcome.REFUSED
NAME: Final = "runguard"
_INVOCATIONS_KEPT: Final = 10_000
_WRITE_S: Final = 1.0


class RunGuardPlugin(Controls, BasePlugin):
    """Guards every run of the App or Runner it is registered with.

    Keywords are the policy; see ``runguard.policy.settings``.
    """

    generations: "Generations | None" = None  # of an installed guard whose policy was replaced

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunGuardPlugin":
        """A copied App has the same guard: a second one would double its budgets."""
        return self

    def __init__(self, *, name: str = NAME, **policy: Unpack[PolicySettings]) -> None:
        BasePlugin.__init__(self, name=name)
        self.policy_error: str | None = None
        self.from_file_only = name != NAME and not policy  # how ``adk web --extra_plugins`` builds it
        try:
            built = Policy.build(**policy)
        except PolicyError as error:
            if not self.from_file_only:
                raise
            # ADK only logs a constructor's exception and would go on unguarded: stop every run instead.
            self.policy_error = str(error)
            built = Policy.validated({}, "")
        self.guard = self._new_guard(built)
        self._check_store()
        self.stopper = Stopper(self, self.guard)
        self.reader = EventReader(self, self.guard, self.stopper)
        self._off = built.mode == "off" and self.policy_error is None
        self._invocations: dict[str, Invocation] = {}
        self._writing: dict[str, Future[None]] = {}  # records of paused runs on their way to the store, by invocation
        self._known_tools: set[str] = set()
        self.warned_order = False
        self._watches_context = built.rungs("context") is not None
        runners.watch(self)
        if not self._off:
            self._load_prices()
        _log.info("runguard.start: %s", self.describe())

    def _new_guard(self, policy: Policy) -> Guard:
        return Guard(policy)

    @property
    def _in_charge(self) -> Guard:
        """The guard under the policy in force."""
        return self.guard if self.generations is None else self.generations.newest.guard

    def has_runs(self) -> bool:
        return bool(self._invocations)

    @staticmethod
    def _load_prices() -> None:
        """A fifth of a second that no run should wait for.

        Not in a thread: a process that forks meanwhile could never import again.
        """
        try:
            preload()
        except Exception:
            _log.warning(
                "runguard.prices_failed: the price list could not be loaded; models without prices= of your "
                "own have none",
                exc_info=True,
            )

    def _check_store(self) -> None:
        if self.policy_error is not None:
            return
        try:
            self.guard.check_store()
        except PolicyError as error:
            if not self.from_file_only:
                raise
            self.policy_error = str(error)

    def describe(self) -> str:
        """Mode, limits, store and ADK version in one line."""
        from google.adk.version import __version__ as adk_version

        policy = self.guard.policy
        limits = {name: value for name in _SHOWN_LIMITS if (value := getattr(policy, name)) is not None}
        shown = ", ".join(f"{name}={value}" for name, value in limits.items())
        if policy.budgets:
            shown += f", budgets={len(policy.budgets)}"
        return (
            f"mode={policy.mode}, on_stop={policy.on_stop}, {shown}, store={self.guard.accounts.ledger.name}, "
            f"policy={policy.digest}, google-adk {adk_version}"
        )

    def instead_of(self, hook: str, error: Exception, *given: Any) -> Any:
        """What ADK gets from a hook that failed."""
        return self.stopper.instead_of(hook, error, *given)

    # ---- runs -------------------------------------------------------------------------------------------------------

    @hook
    async def before_run_callback(self, *, invocation_context: InvocationContext) -> types.Content | None:
        if self._off:
            return None
        try:
            await self._enter(invocation_context, announced=True)
        except Exception as error:
            self.stopper.fault("before_run", error, invocation_context)
        return None

    async def _enter(self, ic: InvocationContext, *, announced: bool = False) -> Invocation:
        """A stream of an invocation begins: a new run, or one that goes on. ``announced``: by ADK, rather than found
        out by a later hook.
        """
        guard, frame = self.guard, enclosing_frame(self.guard)
        if frame is not None:
            lane = open_child(guard, frame)
            facts = (ic.invocation_id, frame.invocation.run, ic.plugin_manager, ic.session.id, _root_of(ic))
            return self._register(ic, Invocation(*facts, lane=lane, depth=frame.depth + 1, nested=True))
        history = history_of(ic)
        info, wrong = self._info(ic, history.name)
        run = await run_of(guard, info, history)
        known = self._invocations.get(ic.invocation_id)
        if known is not None and known.run is run:  # resumed twice at once: both streams are the same run
            known.entered += announced
            return self._register(ic, known)
        invocation = Invocation(ic.invocation_id, run, ic.plugin_manager, ic.session.id, _root_of(ic))
        invocation.go_on()
        invocation.resumable = ic.is_resumable
        invocation.ask(history.questions)
        invocation.questions -= history.answered
        for error in (wrong, self.policy_error):
            if error:
                guard.fail(run.info.run, "policy_error", error, invocation.root_agent)
        self._register(ic, invocation)
        if history.arrived and invocation.calls:
            self.reader.hear_answers(invocation, history.arrived)
        return invocation

    def _info(self, ic: InvocationContext, name: str) -> tuple[RunInfo, str]:
        """Whose run it is and with which limits; and what is wrong with the options it was given."""
        config = ic.run_config
        limit = config.max_llm_calls if config else None
        labels, max_usd, max_tokens, wrong = run_options(
            config.custom_metadata.get(METADATA_KEY) if config and config.custom_metadata else None
        )
        info = RunInfo(
            run=name,
            app=ic.app_name,
            user=ic.user_id,
            session=ic.session.id,
            invocation=ic.invocation_id,
            at=self.guard.clock(),
            model_call_limit=limit if limit and limit > 0 else None,
            labels=labels,
            max_usd=max_usd,
            max_tokens=max_tokens,
        )
        return info, wrong

    def _register(self, ic: InvocationContext, invocation: Invocation) -> Invocation:
        invocation.live = ic.live_request_queue is not None
        self._invocations[ic.invocation_id] = invocation
        if (stream := STREAM.get()) is not None:
            stream.invocations.append(ic.invocation_id)
            invocation.streamed = True
        if len(self._invocations) > _INVOCATIONS_KEPT:
            self.forget(next(iter(self._invocations)))
        if stream is not None and stream.fault is not None and not invocation.nested:
            fault, stream.fault = stream.fault, None
            self.guard.stop_after("runner", fault, invocation.run.info.run)
        return invocation

    @hook
    async def after_run_callback(self, *, invocation_context: InvocationContext) -> None:
        invocation = self._invocations.get(invocation_context.invocation_id)
        if invocation is not None:
            invocation.finished = True
        # else the runner's wrapper sees its end: a compaction may still follow
        if invocation is not None and not invocation.streamed:
            self.forget(invocation_context.invocation_id)
            await self.written([invocation_context.invocation_id])

    def forget(self, invocation_id: str) -> Trip | None:
        """A stream of an invocation is over, however it ended.

        The first to notice calls this. Returns the last trip, if there was one.
        """
        invocation = self._invocations.get(invocation_id)
        if invocation is not None and invocation.entered > 1:
            invocation.entered -= 1
            return invocation.run.trips[-1] if invocation.run.trips else None
        self._invocations.pop(invocation_id, None)
        gave_up = self.stopper.faulted.get(invocation_id)
        attempt = self.guard.faults.attempt  # a fault in one step does not prevent the others
        attempt("end of run", self.stopper.forget, invocation_id)
        if invocation is None:
            return gave_up
        for task, flight in invocation.flights.items():
            attempt("end of run", self.close_flight, flight)
            if task is not None:
                attempt("end of run", invocation.run.slots.give_back, task)
        if not invocation.nested:
            attempt("end of run", self._end_run, invocation)
        return invocation.run.trips[-1] if invocation.run.trips else gave_up

    def _end_run(self, invocation: Invocation) -> None:
        """The run is over, or paused: one that can be resumed is kept with its counts."""
        run = invocation.run
        may_resume = invocation.asked or invocation.resumable or run.stopped is not None
        if not may_resume or invocation.live or run.unsure:
            self.guard.end(run.info.run)
            return
        try:
            invocation.rest()
            written = self.guard.pauses.keep(run.info.run, waits=bool(invocation.questions) and run.stopped is None)
            if written is not None:
                writing, name = self._writing, invocation.id
                writing[name] = written
                written.add_done_callback(lambda _: writing.pop(name, None))
        except Exception as error:
            self.guard.faults.note("pause", error)
            self.guard.end(run.info.run)

    async def written(self, invocation_ids: Iterable[str]) -> None:
        """Wait, bounded, until the store has the records of paused runs: another worker may resume them as soon
        as their streams have ended.

        It does not wait while the store is away: every refused run would end a second later.
        """
        futures = [
            asyncio.wrap_future(future) for one in invocation_ids if (future := self._writing.get(one)) is not None
        ]
        if futures and not self.guard.accounts.ledger.is_away:
            await asyncio.wait(futures, timeout=_WRITE_S)

    def close_flight(self, flight: ModelInFlight) -> None:
        """Whatever is still held for a call that is over: given back if it never left, an estimate if it did."""
        charge = flight.charge
        if charge is None or charge.over:
            return
        if flight.left:
            self.guard.abandon(charge)
        else:
            self.guard.release(charge)

    async def invocation_of(self, ic: InvocationContext) -> Invocation:
        found = self._invocations.get(ic.invocation_id)
        if found is None or (found.nested and self.guard.runs.get(found.run.info.run) is not found.run):
            return await self._enter(ic)  # new, or the run it was nested in has ended: from here on a run of its own
        return found

    def stop_of(self, invocation_id: str) -> Trip | None:
        """Why the whole run of an invocation is stopped, or None."""
        invocation = self._invocations.get(invocation_id)
        return self.stopper.faulted.get(invocation_id) or (invocation.run.stopped if invocation is not None else None)

    def find_invocation(self, invocation_id: str) -> Invocation | None:
        return self._invocations.get(invocation_id)

    def is_idle(self, run: Run, beside: str) -> bool:
        """Nothing of a run moves, the calls aside that lane ``beside`` stands in."""
        return all(
            invocation.is_idle(beside) for invocation in list(self._invocations.values()) if invocation.run is run
        )

    # ---- agents -----------------------------------------------------------------------------------------------------

    @hook
    async def before_agent_callback(
        self, *, agent: BaseAgent, callback_context: CallbackContext
    ) -> types.Content | None:
        if self._off:
            return None
        ic = callback_context._invocation_context
        trip, lane = self._gave_up(ic), ROOT_LANE
        if trip is None:
            try:
                invocation = await self.invocation_of(ic)
                lane = lane_of(self.guard, invocation, ic.branch, ic.isolation_scope)
                depth = enter(self.guard, invocation, agent, lane, ic.branch, ic.isolation_scope)
                branches = len(agent.sub_agents) if isinstance(agent, ParallelAgent) else 0
                is_task = getattr(agent, "mode", None) == "task"
                event = AgentEntered(
                    invocation.run.info.run, lane, agent.name, self.guard.clock(), depth, branches, is_task
                )
                decision = self.guard.check(event)
                if not decision.enforced or decision.action < _BLOCK:
                    return None
                if decision.action is _BLOCK:  # too deep: this agent is refused, its caller goes on
                    return types.Content(role="model", parts=[types.Part(text=decision.for_model)])
                trip = decision.trip
            except Exception as error:
                trip = self.stopper.fault("before_agent", error, ic)
        if trip is None:
            return None
        return await self.stopper.at_agent(callback_context, agent, trip, self.find_invocation(ic.invocation_id), lane)

    def _gave_up(self, ic: InvocationContext) -> Trip | None:
        """The guard failed in this invocation and was told to stop then: it is not asked again."""
        return self.stopper.faulted.get(ic.invocation_id) if self.stopper.faulted else None

    # ---- model calls ------------------------------------------------------------------------------------------------

    @hook
    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> LlmResponse | None:
        if self._off:
            return None
        ic = callback_context._invocation_context
        trip, lane = self._gave_up(ic), ROOT_LANE
        event: ModelCall | None = None
        if trip is None:
            try:
                guard = self.guard
                invocation = await self.invocation_of(ic)
                run, branch, agent, task = invocation.run, ic.branch, ic.agent, asyncio.current_task()
                lane = lane_of(guard, invocation, branch, ic.isolation_scope)
                self._settle_unanswered(invocation, task)
                event = ModelCall(
                    run.info.run, lane, agent.name if agent is not None else "", guard.clock(), llm_request.model or ""
                )
                flight = ModelInFlight(event.agent, branch, lane)
                await self._measure(invocation, event, flight, llm_request)
                strand = run.lanes[lane]
                if (
                    strand.fresh
                    and strand.parent is not None
                    and branch is not None
                    and "@" in branch
                    and branch.rpartition("@")[2] not in invocation.calls
                ):
                    await self._count_siblings(strand, strand.parent, event)
                decision = guard.check(event)
                if decision.action is not _STOP or not decision.enforced:
                    decision = await guard.reserve(event) or decision
                if decision.action is not _STOP or not decision.enforced:
                    self._let_go(invocation, event, flight, llm_request, task)
                    if strand.notice:
                        llm_request.contents.append(types.Content(role="user", parts=[types.Part(text=strand.notice)]))
                        strand.notice = ""
                    return None
                trip = decision.trip
            except Exception as error:
                trip = self.stopper.fault("before_model", error, ic)
                self._take_back(event)
        if trip is None:
            return None
        return await self.stopper.at_model(callback_context, trip, self.find_invocation(ic.invocation_id), lane)

    async def _measure(
        self, invocation: Invocation, event: ModelCall, flight: ModelInFlight, request: LlmRequest
    ) -> None:
        """What the call may take: the size of its prompt, and how much it may answer."""
        sizes = flight.projection = project(request, invocation.prompts.get((event.lane, event.agent)))
        event.input_tokens, event.audio_tokens, event.projected_tokens, event.request_bytes = (
            sizes.upper,
            sizes.audio,
            sizes.likely,
            sizes.size,
        )
        counter = self.guard.policy.tokens
        if counter is not None and (counted := await count_tokens(counter, request)) is not None:
            event.input_tokens = event.projected_tokens = counted
        event.max_output_tokens, event.candidates = (
            request.config.max_output_tokens,
            request.config.candidate_count or 1,
        )
        event.asked = prompt_hash(request)
        if invocation.live:
            # told by events as it goes: nothing to reserve but the leave to go on
            event.input_tokens = event.max_output_tokens = 1
        if self._watches_context:
            event.context_limit = self.guard.accounts.context_limit(event.model)
        frame = FRAME.get()
        event.tool = frame.tool if frame is not None and frame.guard is self.guard else ""

    def _let_go(
        self,
        invocation: Invocation,
        event: ModelCall,
        flight: ModelInFlight,
        request: LlmRequest,
        task: "asyncio.Task[Any] | None",
    ) -> None:
        """The call may be made: from here on the model's border, or whoever answers instead, tells how it ended."""
        charge = flight.charge = event.charge
        flight.request = weakref.ref(request)
        if charge is not None and charge.lowered:
            cap_output(request, charge.max_output)
        if charge is not None and invocation.live:
            self.guard.release(charge)
        for over in invocation.begin_flight(task, flight):
            self.close_flight(over)
        FLIGHTS.set(
            (
                *(entry for entry in FLIGHTS.get() if entry[0] is not self.guard and not entry[2].left),
                (self.guard, invocation, flight),
            )
        )

    def _take_back(self, event: ModelCall | None) -> None:
        """The guard failed after it had reserved: nothing is held for the call. If it is made, the model's border asks
        for it anew.
        """
        if event is None:
            return
        charge, event.charge = event.charge, None
        if charge is not None and not charge.over:
            self.guard.release(charge)
            self.guard.faults.attempt("before_model", self.guard.unspent, event.run, event)
        run, task = self.guard.runs.get(event.run), asyncio.current_task()
        if run is not None and task is not None:
            run.slots.give_back(task)

    async def _count_siblings(self, strand: Lane, above: Lane, event: ModelCall) -> None:
        """A Workflow's branch begins. Its siblings begin in the same turn of the event loop: let them, then
        judge all of them as one.

        Only so can too many be refused before the first is paid: no hook of ADK tells how many branches a node starts.
        """
        strand.fresh = False
        if not strand.concurrent:
            return
        above.starting += 1
        try:
            await asyncio.sleep(0)
            # a stop shows at the next check
            self.guard.check(AgentEntered(event.run, above.key, event.agent, event.at, 0, above.starting))
        finally:
            above.starting -= 1

    def _settle_unanswered(self, invocation: Invocation, task: "asyncio.Task[Any] | None") -> None:
        """The last call of this task got no answer from a model: somebody's callback or cache answered instead."""
        flight = invocation.flights.get(task)
        if flight is None:
            return
        if not flight.answered and not flight.left:
            flight.answered = flight.delivered = True
            self.guard.unspent(invocation.run.info.run)
        self.close_flight(flight)  # whatever it still holds: a task makes one call after the other

    @hook
    async def after_model_callback(
        self, *, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> LlmResponse | None:
        if self._off:
            return None
        ic = callback_context._invocation_context
        try:
            invocation = self._invocations.get(ic.invocation_id)
            if invocation is None:
                return None
            task = asyncio.current_task()
            flight = invocation.flights.get(task)
            if flight is None:
                return None
            if not flight.left:
                flight.usage.add(llm_response)
            flight.answered = True
            if FLIGHTS.get():
                # it has passed the border or has none: a context that outlives the run must not keep the run
                FLIGHTS.set(())
            if llm_response.partial:
                flight.streamed = True
            else:
                flight.said = _final_words(llm_response, flight.streamed)
                flight.is_cut = llm_response.finish_reason is types.FinishReason.MAX_TOKENS
                flight.done_at, flight.delivered = time.monotonic(), False
                self._judge_result(invocation, flight)
                if task is not None:
                    invocation.run.slots.give_back(task)
        except Exception as error:
            self.stopper.fault("after_model", error, ic)
        return None

    def _judge_result(self, invocation: Invocation, flight: ModelInFlight) -> None:
        """An answer has arrived: once for the detectors, however many responses it came in."""
        charge, usage = flight.charge, flight.usage.reported
        # a model that is no class of ADK's: its border is unseen
        if charge is not None and not flight.left and not charge.over:
            bill = flight.usage.bill(charge.input, charge.audio)
            self.guard.settle(charge, bill.usage, estimated=bill.estimated)
        if flight.judged:
            return
        flight.judged = True
        prompt, output = flight.usage.prompt, usage.output if usage is not None else None
        self.guard.after(
            ModelResult(
                invocation.run.info.run,
                flight.lane,
                flight.agent,
                self.guard.clock(),
                prompt,
                output,
                said=flight.said,
                is_cut=flight.is_cut,
            )
        )

    @hook
    async def on_model_error_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest, error: Exception
    ) -> LlmResponse | None:
        if self._off:
            return None
        invocation = self._invocations.get(callback_context.invocation_id)
        task = asyncio.current_task()
        if invocation is not None and (flight := invocation.flights.get(task)) is not None:
            flight.answered = flight.delivered = True
            if task is not None:
                invocation.run.slots.give_back(task)
        return None

    # ---- tools ------------------------------------------------------------------------------------------------------

    @hook
    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        if self._off:
            return None
        ic = tool_context._invocation_context
        guard = self.guard
        if self._gave_up(ic) is not None:
            return refusal(STOPPED)
        try:
            invocation = await self.invocation_of(ic)
            name = tool.name
            agent = ic.agent
            agent_name = agent.name if agent is not None else ""
            lane = lane_of(guard, invocation, ic.branch, ic.isolation_scope)
            call_id = tool_context.function_call_id or ""
            call = invocation.calls.get(call_id)
            if call is None:
                call = Call(name, tool_args, lane, invocation.batches.get(lane, ""), agent=agent_name)
                invocation.remember(call_id, call)
            call.lane, call.running, call.task = lane, True, asyncio.current_task()
            if tool.is_long_running:
                invocation.ask([call_id])
            if name not in self._known_tools:
                self._learn_tool(tool)
            depth = depth_of(agent, invocation, lane) if isinstance(agent, BaseAgent) else invocation.depth
            FRAME.set(
                Frame(
                    guard,
                    invocation,
                    call_id,
                    name,
                    lane,
                    depth,
                    (*invocation.run.lanes[lane].path, agent_name),
                    FRAME.get(),
                    STREAM.get(),
                )
            )
            if name in FRAMEWORK_TOOLS:
                return self._check_transfer(tool_args, ic, invocation, lane, agent_name) if name == TRANSFER else None
            call.fingerprint = guard.fingerprint(name, tool_args)
            below = 0
            if isinstance(tool, AgentTool):
                below = depth + 1
                beside = sum(
                    1 for other in invocation.calls.values() if other.batch == call.batch and other.tool == name
                )
                # a stop shows at the next check
                guard.check(AgentEntered(invocation.run.info.run, lane, agent_name, guard.clock(), 0, beside))
            rule = guard.tool_rule(name)
            if rule is not None and rule.once:
                call.once = guard.tools.once_identity(name, tool_args, declared_by(tool))
            await guard.prepare_tool(invocation.run, name, call.once, call_id)
            event = ToolCall(
                invocation.run.info.run,
                lane,
                agent_name,
                guard.clock(),
                name,
                call.fingerprint,
                call.batch,
                call_id,
                below,
                call.once,
            )
            decision = guard.check(event)
            if decision.action >= _BLOCK and decision.enforced:
                call.refused = True
                if decision.trip is not None:
                    runners.announce(decision.trip, self)
                    # a Workflow's tool node has no model that would hear the refusal
                    if not isinstance(agent, BaseAgent):
                        call.running = False
                        await self.stopper.at_tool_node(ic, name, decision.trip, invocation, lane)
                return refusal(decision.for_model)
            if guard.policy.max_seconds is not None or (rule is not None and rule.max_seconds is not None):
                limit_time(tool)
                call.deadline = (
                    guard.clock() + rule.max_seconds if rule is not None and rule.max_seconds is not None else 0.0
                )
            return None
        except Exception as error:
            return refusal(STOPPED) if self.stopper.fault("before_tool", error, ic) is not None else None

    @hook
    async def after_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, result: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self._off:
            return None
        ic = tool_context._invocation_context
        try:
            self.judge_time()
            verdict = app_verdict(tool, tool_args, tool_context, result)
            if verdict is not None and (known := self._invocations.get(ic.invocation_id)) is not None:
                answered = known.calls.get(tool_context.function_call_id or "")
                if answered is not None and not answered.refused:
                    answered.verdict = verdict
            if tool.is_long_running or not isinstance(ic.agent, BaseAgent):
                # A long-running tool's answer comes later or never, a Workflow's tool node gives no function response:
                # nobody waits for it.
                invocation = self._invocations.get(ic.invocation_id)
                call = invocation.calls.get(tool_context.function_call_id or "") if invocation is not None else None
                if invocation is not None and call is not None:
                    call.running = False
                    if (
                        call.once
                        and not call.refused
                        and call.outcome is None
                        and (not result or not isinstance(ic.agent, BaseAgent))
                    ):
                        # No answer will be judged. What a long-running tool began counts as done: it must not begin
                        # again.
                        self.guard.settle_once(
                            invocation.run, call.once, isinstance(ic.agent, BaseAgent) or was_done(result)
                        )
        except Exception as error:
            self.stopper.fault("after_tool", error, ic)
        return None

    def judge_time(self) -> None:
        """A call has returned: a sync tool that took too long is found out here."""
        frame = FRAME.get()
        call = frame.invocation.calls.get(frame.call_id) if frame is not None and frame.guard is self.guard else None
        if frame is not None and call is not None and call.deadline and self.guard.clock() > call.deadline:
            timed_out(frame)

    def _learn_tool(self, tool: BaseTool) -> None:
        """A rule that stands beside the tool's code, told once."""
        if len(self._known_tools) < 4_096:
            self._known_tools.add(tool.name)
        rule = getattr(getattr(tool, "func", None), "__runguard_tool__", None) or getattr(
            tool, "__runguard_tool__", None
        )
        if rule is not None:
            self.guard.declare(tool.name, rule)

    def _check_transfer(
        self, args: dict[str, Any], ic: InvocationContext, invocation: Invocation, lane: str, agent: str
    ) -> dict[str, Any] | None:
        """A hand-off ever deeper is refused where the model can still hear it; hand-off circles are judged on the
        event.
        """
        root = getattr(ic.agent, "root_agent", None)
        target = root.find_agent(args.get("agent_name")) if root is not None else None
        if target is None:
            return None
        event = AgentEntered(
            invocation.run.info.run, lane, agent, self.guard.clock(), depth_of(target, invocation, lane)
        )
        decision = self.guard.check(event)
        return refusal(decision.for_model) if decision.action >= _BLOCK and decision.enforced else None

    @hook
    async def on_tool_error_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext, error: BaseException
    ) -> dict[str, Any] | None:
        if self._off:
            return None
        ic = tool_context._invocation_context
        try:
            invocation = self._invocations.get(ic.invocation_id)
            call = invocation.calls.get(tool_context.function_call_id or "") if invocation is not None else None
            if invocation is None or call is None:
                return None
            if isinstance(error, asyncio.CancelledError):
                call.running = False
                return None
            unknown = type(tool) is BaseTool
            call.outcome = _UNKNOWN_TOOL if unknown else _TIMEOUT if isinstance(error, TimeoutError) else _ERROR
            call.error = words_of(error)
            # one thing that is not there is no outage of the tool
            if call.outcome is not _UNKNOWN_TOOL and not says_missing(call.error):
                self.guard.report_failure(invocation.run, call.tool, tool_context.function_call_id or "")
            if call.once and not isinstance(ic.agent, BaseAgent):  # a Workflow's tool node: no answer will be judged
                self.guard.settle_once(invocation.run, call.once, False)
            if (isinstance(tool, AgentTool) or isinstance(error, RunStoppedError)) and stop_in_force(
                invocation, call.lane
            ) is not None:
                # It asked for a model again and again, or the nested run was stopped and its empty answer did not fit a
                # schema: the call is answered.
                return refusal(PART_STOPPED)
        except Exception as fault:
            self.stopper.fault("on_tool_error", fault, ic)
        return None

    # ---- events -----------------------------------------------------------------------------------------------------

    @hook
    async def on_event_callback(self, *, invocation_context: InvocationContext, event: Event) -> Event | None:
        if self._off or event.partial:
            return None
        if self.stopper.faulted and (trip := self._gave_up(invocation_context)) is not None:
            self.stopper.mark(event, trip)
            return None
        try:
            invocation = self._invocations.get(invocation_context.invocation_id)
            if invocation is not None:
                self.reader.on_event(invocation, event, invocation_context)
        except Exception as error:
            self.stopper.fault("on_event", error, invocation_context)
        return None


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


def _root_of(ic: InvocationContext) -> str:
    return getattr(ic.agent, "name", "") or ""


def _final_words(response: LlmResponse, streamed: bool) -> int:
    """A name for what the agent said at the end of an activation; 0 when it goes on by calling tools, showed something
    or spoke in pieces before.
    """
    parts = (response.content.parts if response.content is not None else None) or []
    if any(part.text is None for part in parts):
        return 0
    words = "".join(part.text for part in parts if part.text and not part.thought) or str(response.error_code or "")
    return words_name(words) if words or not streamed else 0


def words_of(error: BaseException) -> str:
    """An exception's own words without running its ``__str__``."""
    words = " ".join(arg for arg in error.args if type(arg) is str)
    return f"{type(error).__name__}: {words}"
