"""The guard: takes events, asks the rules, answers with decisions. Its parts live in the other files of this package.

``check`` before something happens and ``after`` it are synchronous and touch nothing but memory. ``reserve`` is awaited
between them: it takes a slot among the calls in flight and reserves the worst case of the call on every budget;
``settle`` books what the call took. ``end`` forgets everything of a run but its trips and its figures.
``runguard.conductor.adapter`` says who calls what, and in which order.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from runguard.accounting.accounts import Accounts
from runguard.conductor.adapter import Question, Result
from runguard.conductor.answers import Answers
from runguard.conductor.breakers import Breakers
from runguard.conductor.cached_prompts import CacheWatch
from runguard.conductor.deciding import Deciding, stop_in_force
from runguard.conductor.dispatch import NO_OBSERVERS
from runguard.conductor.downgrades import Downgrades
from runguard.conductor.faults import GuardFaults
from runguard.conductor.lane_rules import LaneRules
from runguard.conductor.lanes import LaneKeeper
from runguard.conductor.last_answer import INSTRUCTION, LastAnswers
from runguard.conductor.looking_in import snapshot_of
from runguard.conductor.operator_stops import OperatorStops
from runguard.conductor.own_faults import OwnFaults
from runguard.conductor.paused import Pauses
from runguard.conductor.provider_waits import ProviderWaits
from runguard.conductor.reporting import Reporting, connect_alarms
from runguard.conductor.reserving import Reserving
from runguard.conductor.run_records import RunRecords
from runguard.conductor.run_waits import RunWaits
from runguard.conductor.runs import Run
from runguard.conductor.session_growth import SessionGrowths
from runguard.conductor.settling import Settling
from runguard.conductor.side_effects import Once
from runguard.conductor.sink import Sink
from runguard.conductor.succession import alarms_of, take_over
from runguard.conductor.summaries import RefusedSummaries
from runguard.conductor.tool_calls import ToolGate
from runguard.conductor.tool_prices import ToolPrices
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip, text_for_user
from runguard.core.errors import PolicyError
from runguard.core.events import ROOT_LANE, Event, ModelCall, ModelResult, RunInfo, ToolCall, ToolResults
from runguard.ledger.ledger import StoreError
from runguard.outlets.callbacks import Outbox
from runguard.outlets.journal import KIND, Journal
from runguard.outlets.span_cost import SpanCosts
from runguard.outlets.telemetry import SAMPLE, Telemetry
from runguard.policy.model_switches import switching
from runguard.policy.settings import Policy
from runguard.policy.tools import Tools
from runguard.pricing.book import Pricing

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_NUDGE, _BLOCK, _STOP = Action.NUDGE, Action.BLOCK, Action.STOP
_TRIPS_KEPT: Final = 1_000
_BREAKER_FAILURES: Final = 5


class Guard:
    """One policy at work over any number of concurrent runs."""

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
        ``heir_of``: a guard whose policy this one replaces; see ``runguard.conductor.succession``. ``pricing`` and
        ``lane_rules``: other prices and rules than those of the policy. ``outbox``: the queue of callbacks, where
        several guards share one. ``reports=False``: log, store and send no decision; only those who subscribe to
        ``sink`` receive it. ``gives_last_answers``: the adapter can make the call that ``final_answer`` asks for.
        ``switches_models``: it asks ``downgrades`` which model to call; without it a
        policy with ``Threshold(model=…)`` is rejected.
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
        reserving = Reserving(
            policy, clock, self.runs, accounts, deciding, settling.release, self.last_answers, provider
        )
        gate = ToolGate(clock, ledger, self.tools, self.breakers, self.once, deciding, on_outage=policy.on_outage)
        self.lanes, self.settling, self.reserving, self.tool_gate = lanes, settling, reserving, gate
        self.tool_prices = prices = ToolPrices(clock, accounts, self.tools, deciding, settling, gate.give_up)
        self._answers = Answers(policy, self.tools, gate.report_answer, gate.settle_once, prices.close)
        stops_before = before.operator_stops if before is not None else None
        self.operator_stops: OperatorStops = OperatorStops(
            clock, self.runs, accounts, self.breakers, deciding, self.alarms, stops_before
        )

        # The interface of ``runguard.conductor.adapter``: each method is that of the part that does the work.
        self.open_lane, self.close_lane = lanes.open_lane, lanes.close_lane
        self.reserve, self.reserve_now, self.free_slot = reserving.reserve, reserving.reserve_now, reserving.free_slot
        self.unspent, self.context_limit = reserving.unspent, accounts.expectations.context_limit
        self.settle, self.release, self.abandon = settling.settle, settling.release, settling.abandon
        self.close = settling.close
        self.declare, self.tool_rule, self.fingerprint = self.tools.declare, self.tools.rule, self.tools.fingerprint
        self.prepare_tool, self.settle_once = gate.prepare_tool, gate.settle_once
        self.report_failure = gate.report_failure
        self.reserve_tool, self.settle_tool, self.release_tool = prices.reserve, prices.settle, prices.release
        self.fault, self.stop_after, self.give_up = own_faults.fault, own_faults.stop_after, own_faults.give_up
        self.goes_on_after, self.fail = own_faults.goes_on_after, own_faults.fail
        # and of the operator's controls
        self.throw_switch, self.release_switch = self.operator_stops.throw, self.operator_stops.release

        if before is not None:
            take_over(self, before)
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
        self.lanes.open_root(run)
        if self.last_answers is not None and run.model_calls is not None and run.model_calls.limit > 1:
            run.model_calls.kept = 1
        if self.accounts.ledger.is_shared and self.policy.journal:
            send = self.accounts.ledger.tell  # not the guard: a run may be kept after another guard has taken over
            run.journal = Journal(info, lambda text: send(lambda session: session.append(KIND, info.run, text)))
            if run.growth.sizes:
                run.journal.add({"k": "growth", "t": info.at, "of": run.growth.dump(self.policy.cost_baseline_events)})
        self.runs[info.run] = run
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
        attempt("end of run", self.accounts.end, run.run_costs)
        if run.journal is not None:
            attempt("end of run", run.journal.flush)
        attempt("end of run", self.records.write_end, run)
        attempt("end of run", self.growth.record, run.info, run.growth)
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
        except StoreError as error:
            raise PolicyError(f"the store cannot be used: {error}") from None

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
        return self.policy.stop_text or text_for_user(trip.rule)

    def snapshot(self) -> dict[str, Any]:
        """What runs now, with counts and growth. Plain data."""
        return snapshot_of(self)

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until everything handed over has left: facts, callbacks, alerts, telemetry."""
        end = time.monotonic() + seconds
        jobs = [self.accounts.ledger.flush, self.outbox.flush]
        jobs += [self.alarms.flush] if self.alarms is not None else []
        jobs += [self.telemetry.flush] if self.telemetry is not None else []
        return all([job(max(end - time.monotonic(), 0.0)) for job in jobs])  # noqa: C419 - each of them is asked
