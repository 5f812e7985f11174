"""The guard: takes events, asks the rules, answers with decisions.

``Conductor`` is what adapters may ask of it and says in which order: ``adk``, ``calls``, ``langchain``,
``openai_agents``, ``pydantic_ai`` and ``replay`` do. ``Guard`` is the guard itself, and its parts live in the other
files of this package. ``Controls`` is what an operator can see and do.
"""

import asyncio
import getpass
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from runguard.background import off_loop
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip, text_for_user
from runguard.core.errors import PolicyError
from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Event,
    HandOff,
    ModelCall,
    ModelResult,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.core.identity import LruDict
from runguard.core.money import BudgetStatus, Per
from runguard.engine.budget_notice import BudgetNotices
from runguard.engine.calls import ProviderWaits, Reserving, RunWaits, Settling
from runguard.engine.charges import Charge, finding_of_stop, scopes_of
from runguard.engine.decide import (
    Alarms,
    Breakers,
    Deciding,
    GuardFaults,
    OwnFaults,
    RefusedSummaries,
    Reporting,
    Sink,
    connect_alarms,
    stop_in_force,
)
from runguard.engine.downgrade import CacheWatch, Downgrades
from runguard.engine.final_answer import INSTRUCTION, LastAnswers
from runguard.engine.money import Accounts
from runguard.engine.resubmissions import Resubmissions
from runguard.engine.resume import Pauses, RunRecords, alarms_of, run_facts, take_over
from runguard.engine.runs import NO_OBSERVERS, Lane, LaneKeeper, LaneRules, LastRuns, Run, SessionGrowths
from runguard.engine.tools import Answers, Once, ToolGate, ToolPrices
from runguard.ledger.ledger import (
    Stop,
    StoreDeniedError,
    StoreError,
    check_actor,
    check_reason,
    check_scope,
    read_stops,
    with_stops,
)
from runguard.ledger.memory import MemoryLedger
from runguard.policy.settings import Policy, ToolRule, switching
from runguard.policy.tools import Tools
from runguard.pricing.book import Pricing, prices_per_token
from runguard.pricing.rates import Usage
from runguard.reporting.journal import KIND, Journal
from runguard.reporting.telemetry import SAMPLE, Outbox, SpanCosts, Telemetry

# ---- The interface for adapters

Question = AgentEntered | HandOff | ModelCall | ToolCall
Result = ModelResult | StateChanged | ToolResults


class Conductor(Protocol):
    """The interface of ``Guard`` for adapters. They use this, and nothing else to decide.

    An adapter translates: it builds events (``runguard.core.events``) from what its framework is about to do, asks the
    guard, and carries out the answer. It decides nothing itself. The order of the calls::

        run = guard.start(RunInfo(...))                one root run: one user turn and everything nested in it

            decision = guard.check(AgentEntered(...))  before an agent works, and before it starts parallel branches
            decision = guard.check(HandOff(...))       before one agent passes the work to another

            decision = guard.check(ModelCall(...))     before a model call
            decision = await guard.reserve(call)       right before it is sent; then ``call.charge`` is set
                ...send the request...
            guard.settle(call.charge, usage)           or release, or abandon: exactly one of them, see below
            guard.free_slot(run.info.run)              the call is over: the next one in the queue may go
            decision = guard.after(ModelResult(...))   what the model answered

            await guard.prepare_tool(...)              before a tool call that depends on what other workers did
            decision = guard.check(ToolCall(...))      before each tool call of a model response
            decision = await guard.reserve_tool(...)   then, for the price of the tool; at once where it has none
                ...run the tools...
            guard.settle_tool(...)                     for each tool that was executed, else release_tool
            guard.report_failure(...)                  for each tool that raised or timed out
            decision = guard.after(ToolResults(...))   all answers to one model response together

            guard.open_lane(...), guard.close_lane(...)  around a parallel branch, and an agent called as a tool

        guard.end(run.info.run)                        always, also after an exception

    **A decision** says what to do: nothing (``ALLOW`` is falsy), or its ``action``. ``WARN``: go on, the guard has
    reported it. ``NUDGE``: go on, and give ``for_model`` to the model with the answer of the tool or with the next
    request. ``BLOCK``: do not make this one call and answer it with ``for_model``. ``STOP``: end what ``trip`` names,
    its ``branch`` or the whole run, so that the session stays usable: every open call gets an answer, and paid work of
    other branches is kept. Carry a decision out only if ``enforced`` is true. In shadow mode it is not.

    **Who closes a charge.** The code that sends the request, in a ``finally``, so that nothing stays reserved:

    - ``settle``: the call reported its usage, completely or in part. Settle again when a later figure arrives.
    - ``release``: the request was never sent. Call ``unspent`` too, because ``check`` has counted the call.
    - ``abandon``: the request was sent, and no usage came back: an error, a cancellation, an abandoned stream.
      ``refused=True`` where the provider refused it or could not be reached, so that it cost nothing.

    **Lanes.** Events of one lane happen one after another. Without lanes the calls of parallel branches would look
    like one loop. The root lane is ``ROOT_LANE``; a lane that is not open counts as the root lane.

    **Faults.** An exception of the guard must not reach the run. Wrap each hook, pass the exception to ``fault``, and
    go on as if the guard had answered "allow", unless ``fault`` returns a trip.
    """

    @property
    def policy(self) -> Policy:
        """The settings."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds. Every event carries its time: ``at=guard.clock()``."""

    @property
    def runs(self) -> Mapping[str, Run]:
        """The runs that have started and not ended, by name."""

    @property
    def sink(self) -> Sink:
        """Subscribe here to receive every decision and trip."""

    # ---- runs and lanes ---------------------------------------------------------------------------------------------

    def start(self, info: RunInfo) -> Run:
        """Begin a root run. A run of the same name is reset."""

    def end(self, run_id: str, /) -> None:
        """Forget a run. What it still holds is given back."""

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """Begin a lane below ``parent``. ``concurrent``: it runs beside its siblings, so a stop ends it alone.

        ``path``: the agents above it. ``delegate``: the agent that a model has called here.
        """

    def close_lane(self, run: Run, key: str) -> None:
        """End a lane."""

    # ---- before and after -------------------------------------------------------------------------------------------

    def check(self, event: Question) -> Decision:
        """May this happen? Never waits. After a stop the answer stays no."""

    def after(self, event: Result) -> Decision:
        """Learn from what happened. A nudge, a refused answer or a stop may follow."""

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def reserve(
        self, event: ModelCall, *, slot: bool = True, task: "asyncio.Task[Any] | None" = None
    ) -> Decision:
        """Wait for permission to send a model call. With permission, ``event.charge`` is set: close it."""

    def context_limit(self, model: str, *, quiet: bool = False) -> int | None:
        """How many input tokens a request to a model may have, for ``ModelCall.context_limit``; None: not known, which
        is logged unless ``quiet``.
        """

    def reserve_now(self, event: ModelCall) -> bool:
        """Permission without waiting, for callers without an event loop. False: use ``reserve``."""

    async def recover(
        self, where: str, error: Exception, run_id: str, agent: str, describe: Callable[[float], ModelCall]
    ) -> tuple[Decision, ModelCall | None]:
        """Answer after an exception before the permission: the call is reserved on the ledger alone, or must not be
        made. An event comes back where the call has a charge: close it.
        """

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        *,
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
    ) -> None:
        """Book what a call took."""

    def free_slot(self, run_id: str, task: "asyncio.Task[Any] | None" = None) -> None:
        """Give back the slot that ``reserve`` took for the current task, or for ``task``."""

    def release(self, charge: Charge) -> None:
        """Give back the reservation of a call that was never sent."""

    def abandon(
        self,
        charge: Charge,
        streamed_tokens: int = 0,
        *,
        streaming: bool = False,
        refused: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Book an estimate for a call that was sent and did not report its usage.

        ``error``: what it raised. It may say that the provider asks to wait.
        """

    def unspent(self, run_id: str, event: ModelCall | None = None, *, denied: bool = False) -> None:
        """Do not count a model call that ``check`` has allowed and that was never sent."""

    # ---- tool calls -------------------------------------------------------------------------------------------------

    def fingerprint(self, tool: str, args: object, received: frozenset[str] | None = None) -> bytes:
        """The identity of a call, for ``ToolCall.call`` and ``Answer.call``. ``received``: the names of the arguments
        that the tool takes, where the framework drops all others; None where that is not known.
        """

    def tool_rule(self, tool: str) -> ToolRule | None:
        """What is declared about a tool."""

    async def prepare_tool(self, run: Run, tool: str, effect: bytes, call_id: str) -> None:
        """Ask a shared store what other workers did, before ``check`` judges a tool call."""

    async def reserve_tool(
        self, run: Run, event: ToolCall, args: object, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        """Reserve the price of a tool call that ``check`` has allowed. A refusal means: do not execute it."""

    def settle_tool(self, run: Run, call_id: str, args: object, answer: object) -> None:
        """The tool was executed: book its price. ``answer``: its result, or the exception that it raised.

        Without this, ``after`` books it when the answer arrives.
        """

    def release_tool(self, run: Run, call_id: str) -> None:
        """The tool was not executed: its price is not booked."""

    def unspent_tool(self, run: Run, event: ToolCall) -> None:
        """Do not count a tool call that ``check`` has allowed and that waits for an approval."""

    def report_failure(self, run: Run, tool: str, call_id: str) -> None:
        """A tool raised or timed out. Its answer goes to ``after`` all the same."""

    # ---- findings of the adapter, and faults ------------------------------------------------------------------------

    def found(self, event: Event, finding: Finding) -> Decision:
        """Decide on something that the adapter itself has noticed."""

    def stop_text(self, trip: Trip) -> str:
        """What the end user reads after a stop."""

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Report an exception of the guard itself. Returns a trip where the policy stops the run for it."""


# ---- The guard

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_NUDGE, _BLOCK, _STOP = Action.NUDGE, Action.BLOCK, Action.STOP
_TRIPS_KEPT: Final = 1_000
_BREAKER_FAILURES: Final = 5


class Guard:
    """One policy at work over any number of concurrent runs.

    ``check`` before something happens and ``after`` it are synchronous and touch nothing but memory. ``reserve`` is
    awaited between them: it takes a slot among the calls in flight and reserves the worst case of the call on every
    budget. ``settle`` books what the call took. ``end`` forgets everything of a run but its trips and its figures.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        breaker_runs: int = 2,
        advice: Mapping[str, str] | None = None,
        heir_of: "Guard | None" = None,
        pricing: Pricing | None = None,
        lane_rules: LaneRules | None = None,
        outbox: Outbox | None = None,
        reports: bool = True,
        gives_last_answers: bool = False,
        switches_models: bool = False,
    ) -> None:
        """``breaker_runs``: how many runs must have seen failures before a breaker opens for all. One user's bad
        arguments are not an outage.

        ``advice``: how to go on after a stop, by rule, where the settings have other names than those of a policy.
        ``heir_of``: a guard whose policy this one replaces; see ``runguard.engine.resume``. ``pricing`` and
        ``lane_rules``: other prices and rules than those of the policy. ``outbox``: the queue of callbacks, where
        several guards share one. ``reports=False``: log, store and send no decision; only those who subscribe to
        ``sink`` receive it. ``gives_last_answers``: the adapter can make the call that ``final_answer`` asks for.
        ``switches_models``: it asks ``downgrades`` which model to call; without it a policy with
        ``Threshold(model=…)`` is rejected.
        """
        before = heir_of
        self.policy = policy
        self.clock = clock = policy.clock or time.time  # noqa: TID251 - the one place that names the clock
        self.runs: dict[str, Run] = {}
        self.trips: deque[Trip] = deque(maxlen=_TRIPS_KEPT) if before is None else before.trips
        # guards whose policies this one replaced, while they have runs
        self.elders: tuple[weakref.ref[Guard], ...] = ()

        # what decides
        self.faults = GuardFaults(policy.on_guard_error)
        self.sink = Sink(self.faults)
        self.deciding = Deciding(policy, advice or {}, self.sink, self.faults, self.trips)
        self.own_faults = OwnFaults(policy, clock, self.runs, self.trips, self.deciding, self.faults)

        # what it knows
        known = before.accounts if before is not None else None
        self.accounts: Accounts = Accounts(policy, clock, before=known, pricing=pricing)
        self.waits = self.accounts.waits.listener = RunWaits(clock, self.runs, self.deciding, self.faults)
        ledger = self.accounts.ledger
        failures, reset = policy.max_tool_failures or _BREAKER_FAILURES, policy.half_open_reset_seconds
        self.breakers = Breakers(ledger, failures, reset, breaker_runs)
        self.once = Once(ledger, policy.hold_seconds)
        self.growth = SessionGrowths(policy, ledger)
        self.last_runs = LastRuns()
        self.tools = Tools(policy)
        self.pauses = Pauses(self)
        self.records = RunRecords(clock, self.runs, self.accounts)

        # where decisions go
        self.outbox: Outbox = outbox or (Outbox() if before is None else before.outbox)
        self.telemetry = Telemetry.of(self) if policy.telemetry and policy.mode != "off" else None
        self.alarms = alarms_of(self, before)
        self.summaries = RefusedSummaries(self.alarms)
        if self.alarms is not None:
            connect_alarms(self.alarms, self.accounts, self.breakers)
        if reports:
            Reporting(policy, ledger, self.outbox, self.alarms, self.telemetry, self.summaries).connect(self.sink)

        # the work on one call
        accounts, deciding, own_faults = self.accounts, self.deciding, self.own_faults
        lanes = LaneKeeper(lane_rules or LaneRules(policy), self.tools)
        spans = SpanCosts.opted_in() if self.telemetry is not None else None
        self.cache_watch = watch = CacheWatch(accounts, deciding, clock, warns=reports)
        self.provider_waits = provider = ProviderWaits(policy, self.waits)
        settling = Settling(
            clock,
            accounts,
            self.runs,
            self.pauses.find,
            deciding,
            own_faults,
            self.outbox,
            self.alarms,
            watch,
            spans,
            provider,
            BudgetNotices(policy.notice_shares) if policy.notice_shares and deciding.enforces else None,
        )
        self.downgrades: Downgrades | None = None
        if switching(policy.budgets):
            if not switches_models:
                raise PolicyError(
                    "Threshold(model=…): the model cannot be switched here; it works in RunGuardPlugin, install() and "
                    "RunGuardMiddleware. Remove model=, or guard the agent with one of them"
                )
            self.downgrades = Downgrades(accounts, deciding)
        self.last_answers: LastAnswers | None = None
        if policy.final_answer and gives_last_answers and policy.mode != "off":
            asked = policy.final_answer if isinstance(policy.final_answer, str) else INSTRUCTION
            output = policy.min_output_tokens
            self.last_answers = last = LastAnswers(
                asked, output, clock, accounts, deciding, settling.release, reports=reports
            )
            if policy.mode == "shadow":
                self.sink.on_decided("a last answer", last.would_answer)
        self.resubmissions = Resubmissions(policy, ledger, clock, deciding, self.faults)
        reserving = Reserving(
            policy,
            clock,
            self.runs,
            accounts,
            deciding,
            own_faults,
            settling.release,
            self.last_answers,
            provider,
            self.resubmissions,
        )
        gate = ToolGate(clock, ledger, self.tools, self.breakers, self.once, deciding, on_outage=policy.on_outage)
        self.lanes, self.settling, self.reserving, self.tool_gate = lanes, settling, reserving, gate
        self.tool_prices = prices = ToolPrices(clock, accounts, self.tools, deciding, settling, gate.give_up)
        self._answers = Answers(policy, self.tools, gate.report_answer, gate.settle_once, prices.close)
        stops_before = before.operator_stops if before is not None else None
        self.operator_stops: OperatorStops = OperatorStops(
            clock, self.runs, accounts, self.breakers, deciding, self.alarms, stops_before
        )

        # The interface of ``Conductor``: each method is that of the part that does the work.
        self.open_lane, self.close_lane = lanes.open_lane, lanes.close_lane
        self.reserve, self.reserve_now, self.free_slot = reserving.reserve, reserving.reserve_now, reserving.free_slot
        self.recover, self.give_up_call, self.must_hold = reserving.recover, reserving.give_up_call, reserving.must_hold
        self.unspent = reserving.unspent
        self.context_limit = accounts.expectations.context_limit
        self.settle, self.release, self.abandon = settling.settle, settling.release, settling.abandon
        self.close = settling.close
        self.declare, self.tool_rule, self.fingerprint = self.tools.declare, self.tools.rule, self.tools.fingerprint
        self.prepare_tool, self.settle_once = gate.prepare_tool, gate.settle_once
        self.report_failure, self.unspent_tool = gate.report_failure, gate.unspent
        self.reserve_tool, self.settle_tool, self.release_tool = prices.reserve, prices.settle, prices.release
        self.fault, self.stop_after, self.give_up = own_faults.fault, own_faults.stop_after, own_faults.give_up
        self.goes_on_after, self.fail = own_faults.goes_on_after, own_faults.fail
        # and of the operator's controls
        self.throw_switch, self.release_switch = self.operator_stops.throw, self.operator_stops.release

        if before is not None:
            take_over(self, before)
        if isinstance(ledger, MemoryLedger) and ledger.is_common:
            for part in (self.pauses, self.once, self.breakers):
                common = ledger.commons.setdefault(type(part), part)
                if common is not part:
                    part.share(common)
        self._calls_to_time = 0
        self.time_next(SAMPLE // 8)
        # last: the store may report changes at once
        ledger.watch(self.operator_stops.on_control, self.records.signs_of_life)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def start(self, info: RunInfo) -> Run:
        """Begin a root run. A run of the same name is reset."""
        if (before := self.runs.get(info.run)) is not None:
            self.accounts.end(before.run_costs)
            if before.journal is not None:
                before.journal.flush()
        watches_orders = self.lanes.rules.watches_orders
        costs, growth = self.accounts.begin(info), self.growth.of(info)
        run = Run(info, self.policy, self.tools, costs, growth, watches_orders=watches_orders)
        try:
            self.lanes.open_root(run)
            self.last_runs.go_on(run)
        except Exception as error:  # where a fault stops nothing, the run goes on without rules: its budgets hold
            if not self.goes_on_after(error):
                raise
            self.faults.note("the rules of a run", error)
            run.lanes[ROOT_LANE] = Lane(ROOT_LANE, None, [], concurrent=False)
        if self.last_answers is not None and run.model_calls is not None and run.model_calls.limit > 1:
            run.model_calls.kept = 1
        if self.accounts.ledger.is_shared and self.policy.journal:
            send = self.accounts.ledger.tell  # not the guard: a run may be kept after another guard has taken over
            run.journal = Journal(info, lambda text: send(lambda session: session.append(KIND, info.run, text)))
            if run.growth.sizes:
                run.journal.add({"k": "growth", "t": info.at, "of": run.growth.dump(self.policy.cost_baseline_events)})
        self.runs[info.run] = run
        if info.input:
            self.faults.attempt("resubmissions", self.resubmissions.begin, run)
        return run

    def end(self, run_id: str) -> None:
        """Forget a run. What it still holds is given back: those calls were abandoned. A fault in one step does not
        prevent the others.
        """
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        attempt = self.faults.attempt
        if run.bills is not None:
            attempt("end of run", self.tool_prices.end, run)
        if self.last_answers is not None:
            attempt("end of run", self.last_answers.drop, run)
        if run.info.input:
            attempt("end of run", self.resubmissions.end, run)
        attempt("end of run", self.accounts.end, run.run_costs)
        if run.journal is not None:
            attempt("end of run", run.journal.flush)
        attempt("end of run", self.records.write_end, run)
        attempt("end of run", self.growth.record, run.info, run.growth)
        attempt("end of run", self.last_runs.note, run)
        for tool, permit in run.permits.values():
            attempt("end of run", self.breakers.release, tool, permit)
        for call in run.pending_once:
            attempt("end of run", self.once.settle, run.info, call, False)

    # ---- before and after -------------------------------------------------------------------------------------------

    def check(self, event: Question) -> Decision:
        """May this happen? After a stop the answer stays no."""
        if self._calls_to_time > 0:
            return self._timed(Guard.check, event)
        run = self.runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        is_tool_call = type(event) is ToolCall
        if run.stopped is not None or lane.stopped is not None or lane.parent is not None:
            stopped = run.stopped or lane.stop_in_force()
            if stopped is not None:
                if type(event) is ToolCall:
                    self.tool_gate.give_up(run, event)
                return stop_in_force(stopped)
        decision = ALLOW
        if type(event) is ToolCall:
            decision = self.tool_gate.check(run, lane, event)
            if decision.action >= _BLOCK and decision.enforced:
                self.tool_gate.give_up(run, event)
                return decision
        if run.journal is not None:
            run.journal.saw(event)
        found: Finding | None = None
        every, awake, records = lane.by_event.get(type(event), NO_OBSERVERS)
        is_plain = not event.depth if type(event) is ToolCall else type(event) is ModelCall
        for observe in awake if is_plain and not any(records) else every:
            one = observe(event)
            if one is not None:
                found = self.deciding.stronger(found, one, event)
        if found is not None:
            decision = self.deciding.decide(run, lane, event, found)
            if decision.action is _NUDGE and decision.enforced and type(event) is ModelCall:
                lane.notice = decision.for_model
            refused = decision.enforced and decision.action >= (_BLOCK if is_tool_call else _STOP)
            if refused:
                if type(event) is ToolCall:
                    self.tool_gate.give_up(run, event)
                return decision
        if type(event) is ModelCall:
            run.spend.model_calls += 1
        elif is_tool_call:
            run.spend.tool_calls += 1
        return decision

    def after(self, event: Result) -> Decision:
        """Learn from what happened. A nudge, a refused answer or a stop may follow."""
        if self._calls_to_time > 0:
            return self._timed(Guard.after, event)
        run = self.runs.get(event.run)
        if run is None:
            return ALLOW  # reported after the end of its run
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        if type(event) is ToolResults:
            if event.is_understood:
                self._answers.settle_effects(run, event)
            else:
                self._answers.understand(run, lane, event)
            if run.info.input and (event.failures or run.last_failure is not None):
                self.resubmissions.saw(run, event)
        found: Finding | None = None
        # a run that is already ending: nothing more to decide
        if run.stopped is None and ((lane.stopped is None and lane.parent is None) or lane.stop_in_force() is None):
            every, awake, records = lane.by_event.get(type(event), NO_OBSERVERS)
            is_plain = (
                event.is_plain
                if type(event) is ToolResults
                else type(event) is ModelResult and not (event.text_id or event.new_subject or event.is_cut)
            )
            for observe in awake if is_plain and not any(records) else every:
                one = observe(event)
                if one is not None:
                    found = self.deciding.stronger(found, one, event)
            if run.journal is not None:
                run.journal.saw(event)
        decision = ALLOW if found is None else self.deciding.decide(run, lane, event, found)
        if type(event) is ToolResults:
            for answer in event.answers:
                answer.value = None  # do not keep what tools answered
        return decision

    def time_next(self, calls: int) -> None:
        """Report to telemetry how long the next calls of ``check`` and ``after`` take, and time none after them."""
        self._calls_to_time = calls if self.telemetry is not None else 0

    def _timed(self, answer: Callable[[Any, Any], Decision], event: Any) -> Decision:
        left, self._calls_to_time = self._calls_to_time - 1, 0  # so that the call does not time itself
        begin = time.perf_counter()
        try:
            return answer(self, event)
        finally:
            self._calls_to_time = left
            if self.telemetry is not None:
                self.telemetry.took(time.perf_counter() - begin)

    # ---- what an adapter found --------------------------------------------------------------------------------------

    def found(self, event: Event, finding: Finding) -> Decision:
        """Decide on something that the adapter itself has noticed, in the lane of the event."""
        run = self.runs[event.run]
        return self.deciding.decide(run, run.lane(event.lane), event, finding)

    def stop(self, run: Run, event: Event, finding: Finding) -> Trip | None:
        """Stop a run for a reason that an adapter found."""
        return self.deciding.decide(run, run.lanes[ROOT_LANE], event, finding).trip

    def refuse(self, run: Run, event: Event, finding: Finding) -> Trip:
        """Refuse one call for a reason that an adapter found, and go on. Reported like every decision, described like a
        stop.
        """
        lane = run.lanes[ROOT_LANE]
        self.deciding.decide(run, lane, event, finding)
        return self.deciding.describe(run, lane, event, finding)

    # ---- looking in -------------------------------------------------------------------------------------------------

    def check_store(self) -> None:
        """Raise ``PolicyError`` when the store cannot be used: at construction, not in the middle of a run."""
        if self.policy.mode == "off":
            return
        try:
            self.accounts.ledger.check()
        except (StoreError, StoreDeniedError) as error:
            raise PolicyError(f"the store cannot be used: {error}") from None
        warn_of_many(self.policy)
        warn_of_low_prices(self.policy)

    @property
    def store_name(self) -> str:
        """The store as shown to people, without secrets."""
        return self.accounts.ledger.name

    @property
    def shares_store(self) -> bool:
        """Whether accounts are in a store that other workers may use too, not in the memory of this process."""
        return self.accounts.ledger.is_shared

    @property
    def guard_errors(self) -> int:
        """Faults of the guard itself so far."""
        return self.faults.count

    def stop_text(self, trip: Trip) -> str:
        """What the end user reads after a stop."""
        given: Any = self.policy.stop_text
        if callable(given):
            given = self.faults.attempt("stop_text", given, trip)
        elif isinstance(given, Mapping):
            given = given.get(trip.rule) or given.get("default")
        if isinstance(given, str) and given:
            return given
        if trip.resets_at is None:
            return text_for_user(trip.rule)
        opens = f"{datetime.fromtimestamp(trip.resets_at, UTC):%Y-%m-%d %H:%M}"
        return f"I stopped because the allowance for this period is used up. It starts again at {opens} UTC."

    def snapshot(self) -> dict[str, Any]:
        """Return what runs now as plain data: runs with their counts and growth, budgets, breakers and counters.

        Runs of guards whose policies this one has replaced are included.
        """
        now, ledger = self.clock(), self.accounts.ledger
        guards = [*(before for elder in self.elders if (before := elder()) is not None), self]
        return {
            "mode": self.policy.mode,
            "policy": self.policy.digest,
            "runs": [run_facts(run, each.accounts, now) for each in guards for run in list(each.runs.values())],
            "paused": self.pauses.waiting,
            "budgets": self.accounts.budgets(as_known_here=True),
            "forecasts": self.accounts.forecasts(),
            "outages": dict(self.accounts.outages),
            "store": ledger.health(),
            "breakers": {tool: breaker.state(ledger.now(now)).value for tool, breaker in self.breakers.items()},
            "provider_waits": self.provider_waits.seconds_left(),
            "trips": len(self.trips),
            "guard_errors": self.guard_errors + self.accounts.cap_functions.errors,
            "callbacks_dropped": self.outbox.dropped,
            "callbacks_failed": self.outbox.failed,
            "alerts": self.alarms.counts if self.alarms is not None else {},
        }

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until everything handed over has left: facts, callbacks, alerts, telemetry."""
        end = time.monotonic() + seconds
        jobs = [self.accounts.ledger.flush, self.outbox.flush]
        jobs += [self.alarms.flush] if self.alarms is not None else []
        jobs += [self.telemetry.flush] if self.telemetry is not None else []
        return all([job(max(end - time.monotonic(), 0.0)) for job in jobs])  # noqa: C419 - each of them is asked


_MANY: Final = 20
_built: Final = LruDict[str, int](1_000)  # guards with budgets beyond a run and a memory of their own, by their policy


def warn_of_many(policy: Policy) -> None:
    """Warn once when many guards of one policy are built: each would count the budgets of users or days anew."""
    if policy.store != "memory" or all(Per.parse(b.per).kind == "run" and b.window is None for b in policy.budgets):
        return
    number = _built[policy.digest] = _built.get(policy.digest, 0) + 1
    if number == _MANY:
        _log.warning(
            "runguard.many_guards: %d guards with the same budgets were built in this process, and each counts them "
            "from zero; build one guard for the whole process, or let them share store='memory://NAME'",
            number,
        )


def warn_of_low_prices(policy: Policy) -> None:
    """Warn of prices that were given per token. Limits in dollars would allow a million times as much."""
    for warning in prices_per_token(policy.prices, policy.prices_source):
        _log.warning("runguard.low_price: %s", warning)


def this_user() -> str:
    """Return the name of the user of this system."""
    try:
        return off_loop(getpass.getuser)
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return "unknown"


# ---- What an operator can see and do, the same on a plugin, a guarded model and a guarded function


class Controls:
    """Mixed into whatever has a ``guard``."""

    if TYPE_CHECKING:  # no annotation at run time: a pydantic class that this is mixed into would take it for a field
        guard: Guard

    @property
    def _in_charge(self) -> Guard:
        """The guard that answers here: this one, or the one that has replaced it."""
        return self.guard

    @property
    def trips(self) -> list[Trip]:
        """The last 1,000 trips, oldest first; in shadow mode those that would have been."""
        return list(self._in_charge.trips)

    def snapshot(self) -> dict[str, Any]:
        """What runs now: calls, tokens, prompt growth, breakers. Plain data."""
        return self._in_charge.snapshot()

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """Return what was spent, in all and per agent, model and tool.

        ``scope``: "run:…", "session:app/user/id", "user:app/user" or "app:…". None: everything.
        """
        return self._in_charge.accounts.spend(scope)

    def budgets(self, scope: str | None = None) -> list[BudgetStatus]:
        """Every budget as it stands: spent, reserved and limit apart."""
        return self._in_charge.accounts.budgets(scope)

    def extend(self, scope: str, *, usd: Any = None, tokens: Any = None, calls: Any = None) -> list[BudgetStatus]:
        """Move the caps of a scope: ``extend("user:docs/alice", usd=5)``.

        What was spent stays spent; the next run goes on.
        """
        return self._in_charge.accounts.extend(scope, usd, tokens, calls)

    def stop(self, scope: str, *, actor: str | None = None, reason: str | None = None) -> None:
        """The kill switch: ``stop("user:docs/alice", actor="ops", reason="...")``; a run, session, user, app or "all".

        ``actor``: who stops the scope; None: the user of this system. Model calls in flight are ended, new ones and new
        runs are refused until ``resume``; with a shared store, by every worker.
        """
        self._in_charge.throw_switch(scope, this_user() if actor is None else actor, reason)

    def resume(self, scope: str) -> None:
        """Take a stop back."""
        self._in_charge.release_switch(scope)

    def stops(self) -> list[Stop]:
        """The stops in force."""
        return self._in_charge.operator_stops.in_force()

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, bounded, until everything handed over has left (facts, callbacks, alerts): for tests and shutdown.

        False when something is left, or when a settlement could never be booked; ``snapshot()["store"]`` says how many.
        """
        return self._in_charge.flush(seconds)


# ---- The kill switch: an operator stops a scope, and every worker of the store enforces it


class OperatorStops:
    """Changes the stops in the control document of the store, and applies them to the runs of one guard."""

    def __init__(
        self,
        clock: Callable[[], float],
        runs: dict[str, Run],
        accounts: Accounts,
        breakers: Breakers,
        deciding: Deciding,
        alarms: Alarms | None,
        before: "OperatorStops | None" = None,
    ) -> None:
        """``before``: those of a guard that this one replaces. Both change the document one after the other."""
        self._clock, self._runs, self._accounts, self._breakers = clock, runs, accounts, breakers
        self._deciding, self._alarms = deciding, alarms
        self._changing: threading.Lock = threading.Lock() if before is None else before._changing
        accounts.switch.listen(self._enforce)

    def throw(self, scope: str, actor: str, reason: str | None) -> None:
        """Stop a scope: end its calls in flight and refuse later calls and runs, on every worker of the store."""
        stop = Stop(check_scope(scope), check_actor(actor), check_reason(reason), self._clock())
        self.change(lambda stops: {**stops, scope: stop})
        if self._alarms is not None:
            self._alarms.switched(scope, stop)

    def release(self, scope: str) -> None:
        """Let a scope run again."""
        check_scope(scope)
        self.change(lambda stops: {name: stop for name, stop in stops.items() if name != scope})
        if self._alarms is not None:
            self._alarms.switched(scope, None)

    def change(self, change: Callable[[dict[str, Stop]], dict[str, Stop]]) -> None:
        ledger = self._accounts.ledger
        with self._changing:  # the document and the copy here change as one
            text = ledger.change_control(lambda text: with_stops(text, change(read_stops(text))))
            if not ledger.is_shared:  # a shared one calls ``on_control``, in order
                self._accounts.switch.load(text)

    def in_force(self) -> list[Stop]:
        """The stops of the store as it is now."""
        self._accounts.ledger.refresh_now()
        return list(self._accounts.switch.stops.values())

    def on_control(self, text: str) -> None:
        """The control document of the store has changed: read its stops and breakers."""
        self._accounts.switch.load(text)
        self._breakers.load(json.loads(text or "{}"))

    def _enforce(self) -> None:
        """The list of stops has changed. Called from any thread."""
        stopped: list[Run] = []
        for run in list(self._runs.values()):
            stop = self._accounts.switch.of(scopes_of(run.info)) if run.stopped is None else None
            if stop is not None:
                event = ModelCall(run.info.run, ROOT_LANE, "", self._clock())
                self._deciding.decide(run, run.lanes[ROOT_LANE], event, finding_of_stop(stop))
                stopped.append(run)
        if not self._deciding.enforces:
            return
        for run in stopped:  # all are marked by now: no run takes what another one gives back
            for end in list(run.in_flight):
                end()
