"""The guard: takes events, asks the detectors, decides. The only place where anything is decided.

``check`` before something happens and ``after`` it are synchronous and touch nothing but memory. ``reserve`` is awaited
between them: it holds a place among the calls in flight and the call's worst case on every budget; ``settle`` books
what the call took. ``end`` forgets everything of a run but its trips and its figures.
"""

import asyncio
import json
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final

from runguard.accounting.accounts import Accounts
from runguard.accounting.charges import Charge, Denied, Fired, scopes_of
from runguard.accounting.refusals import finding_of, finding_of_stop
from runguard.accounting.spending import record_of
from runguard.conductor.answers import Answers
from runguard.conductor.carried import KEY as CARRIED
from runguard.conductor.deciding import Deciding, stop_in_force
from runguard.conductor.faults import Faults
from runguard.conductor.paused import Pauses
from runguard.conductor.reporting import Reporting
from runguard.conductor.runs import Lane, Run, is_lasting, lane_detectors, lane_rungs_of, retired_name
from runguard.conductor.session_growth import SessionGrowths
from runguard.conductor.shared import Breakers, Once
from runguard.conductor.sink import Sink
from runguard.conductor.succession import alarms_of, take_over
from runguard.conductor.summaries import RefusedSummaries
from runguard.conductor.trips import guard_error_trip
from runguard.core.breaker import Permit
from runguard.core.decision import (
    ALLOW,
    Action,
    Decision,
    Finding,
    Money,
    Rungs,
    Trip,
    text_for_user,
)
from runguard.core.detectors.failures import Stall
from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Answer,
    Event,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    ToolCall,
    ToolResults,
)
from runguard.core.exceptions import PolicyError
from runguard.core.money import to_usd
from runguard.ledger.kill_switch import Stop, check_actor, check_reason, check_scope, read_stops, with_stops
from runguard.ledger.store import Session, StoreError, StoreOutage
from runguard.outlets.callbacks import Outbox
from runguard.outlets.journal import KIND, Journal
from runguard.outlets.telemetry import SAMPLE, Telemetry
from runguard.policy.settings import Policy
from runguard.policy.tools import Tools
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Usage

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_WARN, _NUDGE, _BLOCK, _STOP = Action.WARN, Action.NUDGE, Action.BLOCK, Action.STOP
_OK, _EMPTY, _FAILED, _REFUSED = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.REFUSED
_TRIPS_KEPT: Final = 1_000
_LANES_KEPT: Final = 4_096
_TOOLS_KEPT: Final = 4_096
_BREAKER_FAILURES: Final = 5
_NOTED_KEPT: Final = 256


Question = AgentEntered | HandOff | ModelCall | ToolCall
Result = ModelResult | ToolResults


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
        lane_rungs: Mapping[str, Rungs] | None = None,
        reports: bool = True,
    ) -> None:
        """``breaker_runs``: how many runs must have seen failures before a breaker opens for all. One user's bad
        arguments are not an outage.

        ``advice``: how to go on after a stop, by rule, where the settings have other names than those of a policy.
        ``heir_of``: a guard whose policy this one replaces; see ``runguard.conductor.succession``. ``pricing`` and
        ``lane_rungs``: other prices and rungs than those of the policy. ``reports=False``: log, store and send no
        decision; only those who subscribe to ``sink`` receive it.
        """
        self.policy = policy
        self.clock = policy.clock or time.time  # noqa: TID251 - the one place that names the clock
        self.runs: dict[str, Run] = {}
        self.pauses = Pauses(self)
        self.trips: deque[Trip] = deque(maxlen=_TRIPS_KEPT) if heir_of is None else heir_of.trips
        self.outbox = Outbox()
        self.faults = Faults(policy.on_guard_error)
        self.sink = Sink(self.faults)
        self.deciding = Deciding(policy, advice or {}, self.sink, self.faults, self.trips)
        before = heir_of.accounts if heir_of is not None else None
        self.accounts: Accounts = Accounts(policy, self.clock, before=before, pricing=pricing)
        self.accounts.switch.listen(self._enforce_stops)
        self.breakers = Breakers(
            self.accounts.ledger,
            policy.max_tool_failures or _BREAKER_FAILURES,
            policy.half_open_reset_seconds,
            breaker_runs,
        )
        self.once = Once(self.accounts.ledger, policy.hold_seconds)
        self.growth = SessionGrowths(policy, self.accounts.ledger)
        self._enforces = self.deciding.enforces
        self.tools = tools = Tools(policy)
        self.declare, self.tool_rule, self.fingerprint = tools.declare, tools.rule, tools.fingerprint
        self._answers = Answers(policy, tools, self._report_answer, self.settle_once)
        self._alerts = 0
        self._switching = threading.Lock()
        self._lane_rungs = lane_rungs_of(policy) if lane_rungs is None else lane_rungs
        self._calls_to_time = 0
        self.telemetry = Telemetry.of(self) if policy.telemetry and policy.mode != "off" else None
        self.alarms = alarms_of(self, heir_of)
        if self.alarms is not None:
            self.accounts.on_store, self.accounts.on_extended, self.breakers.on_change = (
                self.alarms.store,
                self.alarms.extended,
                self.alarms.breaker,
            )
            self.accounts.on_cap(self.alarms.cap)
        self.summaries = RefusedSummaries(self.alarms)
        # guards whose policies this one replaced, while they have runs
        self.elders: tuple[weakref.ref[Guard], ...] = ()
        if heir_of is not None:
            take_over(self, heir_of)
        if reports:
            ledger = self.accounts.ledger
            Reporting(policy, ledger, self.outbox, self.alarms, self.telemetry, self.summaries).connect(self.sink)
        self.time_next(SAMPLE)
        self.accounts.ledger.watch(self._on_control, self._signs_of_life)  # last: the store may report changes at once

    def check_store(self) -> None:
        """A store that cannot be worked with is a mistake to be told at construction, not in the middle of a run."""
        if self.policy.mode == "off":
            return
        try:
            self.accounts.ledger.check()
        except StoreError as error:
            raise PolicyError(f"the store cannot be used: {error}") from None

    # ---- runs and lanes ---------------------------------------------------------------------------------------------

    def start(self, info: RunInfo) -> Run:
        """A root run begins; one that has its name begins afresh."""
        if (before := self.runs.get(info.run)) is not None:
            self.accounts.end(before.purse)
            if before.journal is not None:
                before.journal.flush()
        run = Run(info, self.policy, self.tool_rule, self.accounts.begin(info), self.growth.of(info))
        run.lanes[ROOT_LANE] = self._new_lane(run, ROOT_LANE, None, concurrent=False, path=())
        if self.accounts.ledger.is_shared and self.policy.journal:
            tell = self.accounts.ledger.tell  # not the guard: a run may be kept after another guard has taken over
            run.journal = Journal(info, lambda text: tell(lambda session: session.append(KIND, info.run, text)))
            if run.growth.sizes:
                run.journal.add({"k": "growth", "t": info.at, "of": run.growth.dump(self.policy.cost_baseline_events)})
        self.runs[info.run] = run
        return run

    def end(self, run_id: str) -> None:
        """Forget a run. Permits it still holds go back: their calls were abandoned. A fault in one step does not
        prevent the others.
        """
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        attempt = self.faults.attempt
        attempt("end of run", self.accounts.end, run.purse)
        if run.journal is not None:
            attempt("end of run", run.journal.flush)
        attempt("end of run", self.record_end, run)
        attempt("end of run", self.growth.record, run.info, run.growth)
        for tool, permit in run.permits.values():
            attempt("end of run", self.breakers.release, tool, permit)
        for call in run.pending_once:
            attempt("end of run", self.once.settle, run.info, call, False)

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """A strand begins: a parallel branch, or the agent ``delegate`` that a model has called.

        Failures of the last one of this name carry on.
        """
        above = run.lanes.get(parent) or run.lanes[ROOT_LANE]
        lane = self._new_lane(run, key, above, concurrent=concurrent, path=path, delegate=delegate)
        if (earlier := run.cut_off.get(retired_name(key))) is not None:
            lane.stop(earlier)
        inherited = run.retired.get(retired_name(key))
        if inherited is not None:
            lane.use([*inherited, *(d for d in lane.detectors if type(d) not in {type(i) for i in inherited})])
        if delegate:
            lane.follow_agent()
        if len(run.lanes) >= _LANES_KEPT:  # a run that opens so many strands has ended most of them without a word
            oldest = next(k for k in run.lanes if k != ROOT_LANE)
            self.close_lane(run, oldest)
        run.lanes[key] = lane
        if run.journal is not None:
            called = {"agent": delegate} if delegate else {}
            run.journal.add({"k": "lane", "l": key, "of": above.key, "concurrent": concurrent, "path": path, **called})
        return lane

    def close_lane(self, run: Run, key: str) -> None:
        """A strand ended: its memory goes, its failure streaks stay for the next strand of the same name."""
        lane = run.lanes.pop(key, None)
        if lane is None:
            return
        if run.journal is not None:
            run.journal.add({"k": "lane_end", "l": key})
        name = retired_name(key)
        if lane.stopped is None:
            run.cut_off[name] = None  # one of this name ended well: no later one is refused for a sibling's sake
        elif name not in run.cut_off:
            run.cut_off[name] = lane.stopped
        if len(run.cut_off) > _NOTED_KEPT:
            run.cut_off.popitem(last=False)
        if lane.concurrent:
            return
        run.retired[name] = [d for d in lane.detectors if isinstance(d, Stall)]
        if len(run.retired) > _NOTED_KEPT:
            run.retired.popitem(last=False)

    def _new_lane(
        self, run: Run, key: str, parent: Lane | None, *, concurrent: bool, path: tuple[str, ...], delegate: str = ""
    ) -> Lane:
        known = run.growth.sizes if is_lasting(key) else None
        own = lane_detectors(self.policy, self._lane_rungs, self.tools.is_polling, known, key)
        made = [*run.detectors, *own]  # those of the whole run first, shared by all its lanes
        return Lane(key, parent, made, concurrent=concurrent, path=path, delegate=delegate)

    # ---- before -----------------------------------------------------------------------------------------------------

    def check(self, event: Question) -> Decision:
        """May this happen? Sticky: within a stopped scope the answer stays no."""
        return self._timed(self._check, event) if self._calls_to_time > 0 else self._check(event)

    def _check(self, event: Question) -> Decision:
        run = self.runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        if run.stopped is not None or lane.stopped is not None or lane.parent is not None:
            stopped = run.stopped or lane.stop_in_force()
            if stopped is not None:
                if type(event) is ToolCall:
                    self._give_up_once(run, event)
                return stop_in_force(stopped)
        kind = type(event)
        decision = ALLOW
        if kind is ToolCall:
            decision = self._check_tool(run, lane, event)  # type: ignore[arg-type]
            if decision.action >= _BLOCK and decision.enforced:
                self._give_up_once(run, event)  # type: ignore[arg-type]
                return decision
        if run.journal is not None:
            run.journal.saw(event)
        found = self.deciding.ask(lane, event)
        if found is None:
            if kind is ModelCall:
                run.spend.model_calls += 1
            elif kind is ToolCall:
                run.spend.tool_calls += 1
            return decision
        decision = self.deciding.decide(run, lane, event, found)
        if kind is ModelCall and not (decision.action is _STOP and decision.enforced):
            run.spend.model_calls += 1
        elif kind is ToolCall:
            if decision.action >= _BLOCK and decision.enforced:
                self._give_up_once(run, event)  # type: ignore[arg-type]
            else:
                run.spend.tool_calls += 1
        return decision

    def _check_tool(self, run: Run, lane: Lane, event: ToolCall) -> Decision:
        effect = self.tools.effect_of(event)
        if effect:
            taken = run.pending_once.get(effect, event.id) != event.id or effect in run.claimed_elsewhere
            if taken or self.once.is_done(run.info, effect):
                return self.deciding.decide(
                    run, lane, event, Finding("once", _BLOCK, 2, 1, "executions", "call", event.tool, effect.hex())
                )
            if effect in run.unchecked_once:
                return self.deciding.decide(
                    run, lane, event, Finding("once_unsure", _BLOCK, 1, 0, "outages", "call", event.tool, effect.hex())
                )
            run.pending_once[effect] = event.id
        breaker = self.breakers.get(event.tool)
        if breaker is None or event.id in run.permits:  # none, or its probe was claimed for this call
            return ALLOW
        now = self.accounts.ledger.now(event.at)
        permit = breaker.admit(now)
        if permit is not None:
            run.permits[event.id] = (event.tool, permit)
            return ALLOW
        finding = Finding(
            "breaker",
            _BLOCK,
            breaker.threshold,
            breaker.threshold,
            "failures across runs",
            "call",
            event.tool,
            event.tool,
        )
        decision = self.deciding.decide(run, lane, event, finding)
        if decision:
            decision.retry_after = breaker.retry_after(now)
        return decision

    def reserve_now(self, event: ModelCall) -> bool:
        """Permission for a model call outside of the places in flight,
        when it can be given at once; else ``reserve``.
        """
        run = self.runs[event.run]
        event.charge = charge = self.accounts.open_now(run.purse, event)
        if charge is not None:
            charge.number, charge.journal = event.number, run.journal
        return charge is not None

    async def reserve(self, event: ModelCall, *, slot: bool = True) -> Decision:
        """Wait for leave to make a model call, or be refused. Awaited right before the call; ``event.charge``
        is its account then.

        ``slot=False``: the call is made inside of another one's place among the calls in flight, or beside the agents.
        """
        run = self.runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        task = asyncio.current_task() if slot else None
        decision = ALLOW
        run.waiting += 1
        try:
            if task is not None and not run.slots.take(task):
                decision = await self._wait_for_slot(run, lane, event, task)
                if decision.action is _STOP and decision.enforced:
                    return decision
            charge, denied = await self.accounts.open(
                run.purse, event, self._enforces, lambda: self._stop_meanwhile(run, lane) is not None
            )
        except BaseException:  # cancelled while it waited, or the ledger failed: the place is free again
            if task is not None:
                run.slots.give_back(task)
            self.unspent(event.run, event)
            raise
        finally:
            run.waiting -= 1
        event.charge = charge
        try:
            return self._answer(run, lane, event, task, charge, denied, decision)
        except BaseException:  # a fault of ours: what was reserved is free again
            event.charge = None
            if charge is not None and not charge.over:
                self.release(charge)
                self.unspent(event.run, event)
            if task is not None:
                run.slots.give_back(task)
            raise

    def _answer(
        self,
        run: Run,
        lane: Lane,
        event: ModelCall,
        task: "asyncio.Task[Any] | None",
        charge: Charge | None,
        denied: Denied | None,
        decision: Decision,
    ) -> Decision:
        """What follows from the answer of the accounts."""
        if charge is not None:
            charge.number, charge.journal = event.number, run.journal
        late = self._too_late(run, event) if charge is not None and self._enforces else None
        if charge is not None and late is not None:
            event.charge = None
            self.accounts.release(charge)
            if task is not None:
                run.slots.give_back(task)
            self.unspent(event.run, event)
            return self.deciding.decide(run, lane, event, late)
        if denied is None:
            if charge is not None and charge.lowered:
                decision = self._tell_lowered(run, lane, event, charge) or decision
            return decision
        stopped = self._stop_meanwhile(run, lane)
        if charge is None:
            if task is not None:
                run.slots.give_back(task)
            self.unspent(event.run, event, denied=stopped is None)
            if stopped is not None:
                return stop_in_force(stopped)
        return self.deciding.decide(run, lane, event, finding_of(denied, event, self.accounts.ledger.name))

    def _too_late(self, run: Run, event: ModelCall) -> Finding | None:
        """The run's time was over while the call waited for money."""
        if run.deadline is None:
            return None
        event.at = max(event.at, self.clock())
        return run.deadline.observe(event)

    @staticmethod
    def _stop_meanwhile(run: Run, lane: Lane) -> Trip | None:
        """A stop that came while a call waited. Not the limit on calls: this one was counted and is within it."""
        stopped = run.stopped or lane.stop_in_force()
        return None if stopped is not None and stopped.rule == "model_calls" else stopped

    async def _wait_for_slot(self, run: Run, lane: Lane, event: ModelCall, task: "asyncio.Task[Any]") -> Decision:
        if self.policy.queues:
            if not self._enforces:
                return ALLOW
            await run.slots.wait(task)
            event.at = self.clock()
            stopped = self._stop_meanwhile(run, lane)
            late = None if stopped is not None or run.deadline is None else run.deadline.observe(event)
            if stopped is None and late is None:
                return ALLOW
            run.slots.give_back(task)  # the world changed while it waited
            self.unspent(event.run, event)
            return self.deciding.decide(run, lane, event, late) if late is not None else stop_in_force(stopped)
        if run.journal is not None:
            run.journal.add(
                {"k": "surplus", "t": event.at, "l": event.lane, "a": event.agent, "at_once": len(run.slots) + 1}
            )
        decision = self.deciding.decide(run, lane, event, surplus(event, len(run.slots) + 1, run.slots.limit))
        if decision.enforced:
            self.unspent(event.run, event)
        return decision

    def unspent(self, run_id: str, event: ModelCall | None = None, *, denied: bool = False) -> None:
        """A model call that was let through was not made after all: refused, or answered by somebody's cache.
        ``denied``: by a budget.
        """
        run = self.runs.get(run_id)
        if run is None:
            return
        run.spend.model_calls -= 1
        if run.journal is not None:
            run.journal.add({"k": "unspent", "n": event.number if event is not None else 0, "denied": denied})
        if run.model_calls is not None:
            run.model_calls.forget()

    # ---- money ------------------------------------------------------------------------------------------------------

    def _tell_lowered(self, run: Run, lane: Lane, event: ModelCall, charge: Charge) -> Decision:
        """The answer had to be capped to what the rest can pay: said once per agent, seen in the request."""
        finding = Finding(
            "budget",
            _WARN,
            charge.max_output,
            charge.max_output,
            "output tokens left",
            "lane",
            "",
            f"lowered:{event.agent}",
            f"agent {event.agent}",
        )
        return self.deciding.decide(run, lane, event, finding)

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
        """Book what a call took. A later figure for the same call replaces the earlier one. Fires the
        thresholds that it reaches.

        Money first: a fault in anything else leaves no reservation behind and does not reach the caller.
        """
        before = charge.booked
        run = self.runs.get(charge.purse.info.run)
        if run is not None and run.purse is not charge.purse:
            run = None  # reported after the end of its run: booked all the same
        if run is not None:
            run.spend.prompt_tokens += usage.input - (before.input if before is not None else 0)
            run.spend.output_tokens += usage.output - (before.output if before is not None else 0)
        try:
            booked = (lambda: self._look_back(run, charge)) if charge.doubt is not None and run is not None else None
            self.accounts.settle(
                charge,
                usage,
                model,
                nano=nano,
                estimated=estimated,
                free=free,
                on_fired=self._threshold,
                on_booked=booked,
            )
        except Exception as error:
            self.close(charge, error, usage)
        try:
            if self.accounts.ledger.is_shared and charge.booked is not None and not charge.within:
                self._record_call(run, charge, usage, model, nano=nano, estimated=estimated, free=free)
        except Exception as error:
            self.fault("settle", error, charge.purse.info.run)

    def _record_call(
        self,
        run: Run | None,
        charge: Charge,
        usage: Usage,
        model: str,
        *,
        nano: int | None,
        estimated: bool,
        free: bool,
    ) -> None:
        record = record_of(charge)
        text = json.dumps(record)
        self.accounts.ledger.tell(lambda session: session.append("call", charge.purse.info.run, text))
        journal = run.journal if run is not None else charge.journal
        if journal is not None:
            charge.number = charge.number or journal.number()  # not reserved before: it gets its number now
            journal.paid(
                charge.number,
                self.clock(),
                usage,
                model=model,
                nano=nano,
                usd=record["usd"],
                estimated=estimated,
                free=free,
            )
            if run is None:
                journal.flush()

    def _look_back(self, run: Run, charge: Charge) -> None:
        """In the shadow: what had seemed too dear was booked, maybe after the run's end. Was it?"""
        doubt = charge.doubt
        if doubt is None or not self.accounts.has_come_true(doubt):
            return
        charge.doubt = None
        event = ModelCall(run.info.run, charge.lane, charge.agent, self.clock(), charge.model)
        self.deciding.decide(
            run,
            run.lanes.get(charge.lane) or run.lanes[ROOT_LANE],
            event,
            finding_of(doubt, event, self.accounts.ledger.name),
        )

    def _run_of(self, charge: Charge) -> Run | None:
        run = self.runs.get(charge.purse.info.run) or self.pauses.find(charge.purse.info.run)
        return run if run is not None and run.purse is charge.purse else None

    def close(self, charge: Charge, error: Exception, usage: Usage | None = None) -> None:
        """Close the account of a call after a fault of ours.

        An estimate is booked: later calls must not wait for what it holds.
        """
        self.fault("settle", error, charge.purse.info.run)
        self.faults.attempt("settle", self.accounts.close, charge, usage)

    def release(self, charge: Charge) -> None:
        """A call that was given leave never left."""
        try:
            self.accounts.release(charge)
        except Exception as error:
            self.fault("release", error, charge.purse.info.run)
        try:
            run = self._run_of(charge)
            if run is not None and run.journal is not None:
                run.journal.add({"k": "back", "n": charge.number})
        except Exception as error:
            self.fault("release", error, charge.purse.info.run)

    def abandon(
        self, charge: Charge, streamed_tokens: int = 0, *, streaming: bool = False, refused: bool = False
    ) -> None:
        """A call ended without reporting its usage: booked as an estimate and flagged.

        ``refused``: the provider refused it or could not be reached, so it cost nothing; it still counts as a call.
        """
        if charge.over:
            return
        if refused and not streamed_tokens:
            self.settle(charge, Usage(), free=True)
            return
        try:
            usage = self.accounts.guess(charge, streamed_tokens, streaming)
        except Exception as error:
            self.close(charge, error)
            return
        self.settle(charge, usage, estimated=True)

    def _threshold(self, charge: Charge, reached: Fired) -> None:
        """A share of a budget is spent: tell whoever asked, and the run that spent it."""
        account, threshold, status = reached.account, reached.threshold, reached.status
        if threshold.callback is not None:
            self.outbox.send(threshold.callback, status)
        if self.alarms is not None:
            self.alarms.threshold(reached)
        run = self._run_of(charge)
        if run is None:
            return
        self._alerts += 1
        action = _NUDGE if threshold.action == "nudge" else _WARN
        again = self._alerts if threshold.recurring else ""
        key = f"{account.key}:{account.granted}:{threshold.percent}:{threshold.action}:{again}"
        detail = (
            f"{threshold.percent:.0%} of the budget of {account.scope} is spent: {status.spent} of {status.limit} "
            f"{status.unit}"
        )
        money = Money(
            reached.meter.per.kind,
            account.scope,
            to_usd(account.spent_usd),
            to_usd(account.due_usd - account.spent_usd),
            account.ends,
        )
        finding = Finding(
            "budget", action, status.spent, status.limit, status.unit, "run", "", key, detail, money=money
        )
        lane = run.lanes.get(charge.lane) or run.lanes[ROOT_LANE]
        event = ModelResult(run.info.run, lane.key, charge.agent, self.clock())
        decision = self.deciding.decide(run, lane, event, finding)
        if decision.action is _NUDGE and decision.enforced:
            lane.notice = decision.for_model

    # ---- the kill switch --------------------------------------------------------------------------------------------

    def throw_switch(self, scope: str, actor: str, reason: str | None) -> None:
        """Stop a scope: calls in flight are ended, every later one and every new run is refused, by all who share the
        store.
        """
        stop = Stop(check_scope(scope), check_actor(actor), check_reason(reason), self.clock())
        self.change_stops(lambda stops: {**stops, scope: stop})
        if self.alarms is not None:
            self.alarms.switched(scope, stop)

    def release_switch(self, scope: str) -> None:
        check_scope(scope)
        self.change_stops(lambda stops: {name: stop for name, stop in stops.items() if name != scope})
        if self.alarms is not None:
            self.alarms.switched(scope, None)

    def change_stops(self, change: Callable[[dict[str, Stop]], dict[str, Stop]]) -> None:
        ledger = self.accounts.ledger
        with self._switching:  # the document and what is known of it change as one
            text = ledger.change_control(lambda text: with_stops(text, change(read_stops(text))))
            if not ledger.is_shared:  # a shared one has told us, in order
                self.accounts.switch.load(text)

    def _on_control(self, text: str) -> None:
        """The control document of the store has changed: stops and breakers."""
        self.accounts.switch.load(text)
        self.breakers.load(json.loads(text or "{}"))

    def _enforce_stops(self) -> None:
        """Called when the list of stops has changed, from any thread."""
        stopped: list[Run] = []
        for run in list(self.runs.values()):
            stop = self.accounts.switch.of(scopes_of(run.info)) if run.stopped is None else None
            if stop is not None:
                self.deciding.decide(
                    run,
                    run.lanes[ROOT_LANE],
                    ModelCall(run.info.run, ROOT_LANE, "", self.clock()),
                    finding_of_stop(stop),
                )
                stopped.append(run)
        for run in stopped if self._enforces else ():  # all are marked: what one gives back is not taken by another
            for end in list(run.in_flight):
                end()

    def record_end(self, run: Run, carried: dict[str, Any] | None = None) -> "Future[None] | None":
        """Write the run's figures to the store, and that it is not running any more. ``carried``: what another
        worker needs to resume it.

        Returns when that is written; None where nothing is.
        """
        ledger = self.accounts.ledger
        if not ledger.is_shared or run.unsure:  # unsure: the record of what it used before is the better one
            return None
        snapshot = run.snapshot(self.clock())
        facts = {**snapshot, "in_flight": 0, "spend": self.accounts.spending.of_run(run.purse)}
        figures = json.dumps(facts, default=str)
        record = figures if carried is None else json.dumps({**facts, CARRIED: carried}, default=str)
        written: Future[None] = Future()
        name = run.info.run  # the fact must not keep the run

        def tell(session: Session) -> None:
            try:
                session.append("run", name, record)
                session.beat(name, ledger.worker, figures, ended=True)
            except StoreOutage:
                raise  # the ledger tries again
            except BaseException:
                written.set_result(None)
                raise
            written.set_result(None)

        ledger.tell(tell)
        return written

    def _signs_of_life(self) -> Iterator[tuple[str, str]]:
        now, here = self.clock(), os.getpid()
        # after a fork, the parent's runs are the parent's
        for run in [run for run in list(self.runs.values()) if run.pid == here]:
            yield run.info.run, json.dumps(run.snapshot(now), default=str)

    # ---- after ------------------------------------------------------------------------------------------------------

    def after(self, event: Result) -> Decision:
        """Learn from what happened; a nudge, a refused answer or a stop may follow from it."""
        return self._timed(self._after, event) if self._calls_to_time > 0 else self._after(event)

    def _after(self, event: Result) -> Decision:
        run = self.runs.get(event.run)
        if run is None:
            return ALLOW  # told after the end of its run
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        if type(event) is ToolResults:
            if event.is_understood:
                self._answers.settle_effects(run, event)
            else:
                self._answers.understand(run, lane, event)
        if run.stopped is not None or (
            (lane.stopped is not None or lane.parent is not None) and lane.stop_in_force() is not None
        ):
            found = None  # already ending: nothing more to decide
        else:
            found = self.deciding.ask(lane, event)
            if run.journal is not None:
                run.journal.saw(event)
        decision = ALLOW if found is None else self.deciding.decide(run, lane, event, found)
        if type(event) is ToolResults:
            for a in event.answers:
                a.value = None  # answers are not ours to keep
        return decision

    def _report_answer(self, run: Run, a: Answer, now: float) -> None:
        """Whatever the tool answered in words shows that it works; exceptions were reported as they came, refusals
        prove nothing.
        """
        held = run.permits.pop(a.id, None)
        if held is None:
            return
        if a.outcome is _REFUSED:
            self.breakers.release(a.tool, held[1])
        else:
            self.breakers.report(a.tool, held[1], True, now, run.info.run)

    def report_failure(self, run: Run, tool: str, call_id: str) -> None:
        """A tool raised or timed out: the only thing that opens its breaker across runs."""
        held = run.permits.pop(call_id, None)
        permit = held[1] if held is not None else Permit(0)  # begun before the breaker existed
        self.breakers.report(tool, permit, False, self.clock(), run.info.run)

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def refuse(self, run: Run, event: Event, finding: Finding) -> Trip:
        """Refuse one call for a reason that an adapter found, and go on: told like every decision, described like a
        stop.
        """
        lane = run.lanes[ROOT_LANE]
        self.deciding.decide(run, lane, event, finding)
        return self.deciding.describe(run, lane, event, finding)

    def found(self, event: Event, finding: Finding) -> Decision:
        """Decide on a finding of the adapter's own, in the lane of the event."""
        run = self.runs[event.run]
        return self.deciding.decide(run, run.lanes.get(event.lane) or run.lanes[ROOT_LANE], event, finding)

    def stop(self, run: Run, event: Event, finding: Finding) -> Trip | None:
        """Stop a run for a reason that an adapter found."""
        return self.deciding.decide(run, run.lanes[ROOT_LANE], event, finding).trip

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """A fault of the guard itself: counted and logged. It stops the run where the policy says so; returns why, or
        None to go on.
        """
        self.faults.note(where, error)
        return self.stop_after(where, error, run_id, agent)

    def stop_after(self, where: str, error: Exception, run_id: str, agent: str = "") -> Trip | None:
        """What a fault that is already counted means for the run."""
        if self.goes_on_after(error):
            return None
        try:
            return self.fail(run_id, "guard_error", f"{where}: {type(error).__name__}", agent)
        except Exception as second:
            self.faults.note("stopping", second)
            return None

    def goes_on_after(self, error: Exception) -> bool:
        """Whether a call is made that could not be judged.

        A fault of the store follows ``on_outage``, any other ``on_guard_error``.
        """
        if not self._enforces:
            return True
        if isinstance(error, StoreError | StoreOutage):
            return self.policy.on_outage == "open"
        return self.policy.on_guard_error == "allow"

    def give_up(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """``fault`` for a call that is about to be made: it has a reason to be refused even where its run could not
        begin.
        """
        trip = self.fault(where, error, run_id, agent)
        if trip is None and not self.goes_on_after(error):
            trip = guard_error_trip(f"{where}: {type(error).__name__}", run_id, self.policy, self.clock())
            self.trips.append(trip)
        return trip

    @property
    def guard_errors(self) -> int:
        """Faults of the guard itself so far."""
        return self.faults.count

    def fail(self, run_id: str, rule: str, message: str, agent: str = "") -> Trip | None:
        """Stop a run for the guard's own sake: a broken policy, or a failure under ``on_guard_error="block"``."""
        run = self.runs.get(run_id)
        if run is None or run.stopped is not None:
            return run.stopped if run else None
        event = ModelCall(run_id, ROOT_LANE, agent, self.clock())
        finding = Finding(rule, _STOP, 1, 0, "errors", "run", detail=message)
        return self.deciding.decide(run, run.lanes[ROOT_LANE], event, finding).trip

    # ---- once per session -------------------------------------------------------------------------------------------

    async def prepare_tool(self, run: Run, tool: str, effect: bytes, call_id: str) -> None:
        """Ask the store before a tool call is judged: for the probe of its breaker, and for the claim of its side
        effect (``effect``, if it has one).
        """
        if not self.accounts.ledger.is_shared:
            return
        permit = await self.breakers.claim_probe(tool, self.clock())
        if permit is not None:
            run.permits[call_id] = (tool, permit)
        if not effect:
            return
        run.claimed_elsewhere.discard(effect)  # the other worker may have failed
        run.unchecked_once.discard(effect)
        if effect in run.pending_once or self.once.is_done(run.info, effect):
            return
        # before the wait: an equal call beside this one is refused, and the end of the run gives the claim back
        run.pending_once[effect] = call_id
        try:
            mine = await self.once.claim(run.info, effect)
        except BaseException:  # cancelled while it asked: give back whatever was claimed
            self.settle_once(run, effect, False)
            raise
        if mine is None and self.policy.on_outage == "open":
            mine = True
        if not mine:
            run.pending_once.pop(effect, None)
            (run.unchecked_once if mine is None else run.claimed_elsewhere).add(effect)

    def settle_once(self, run: Run, effect: bytes, done: bool) -> None:
        """A call of a ``once`` tool has ended: done, or free to be tried again."""
        run.pending_once.pop(effect, None)
        self.once.settle(run.info, effect, done)

    def _give_up_once(self, run: Run, event: ToolCall) -> None:
        """A call that was refused was not done: it may be tried again."""
        effect = self.tools.effect_of(event)
        if effect and run.pending_once.get(effect) == event.id:
            self.settle_once(run, effect, False)

    # ---- looking in -------------------------------------------------------------------------------------------------

    def stop_text(self, trip: Trip) -> str:
        return self.policy.stop_text or text_for_user(trip.rule)

    def snapshot(self) -> dict[str, Any]:
        """What runs now, with counts and growth; plain data."""
        now = self.clock()
        return {
            "mode": self.policy.mode,
            "policy": self.policy.digest,
            "runs": [run.snapshot(now) for guard in self._with_elders() for run in list(guard.runs.values())],
            "paused": self.pauses.waiting,
            "budgets": self.accounts.budgets(as_known_here=True),
            "outages": dict(self.accounts.outages),
            "store": self.accounts.ledger.health(),
            "breakers": {
                tool: breaker.state(self.accounts.ledger.now(now)).value
                for tool, breaker in list(self.breakers.items())
            },
            "trips": len(self.trips),
            "guard_errors": self.guard_errors + self.accounts.errors,
            "callbacks_dropped": self.outbox.dropped,
            "callbacks_failed": self.outbox.failed,
            "alerts": self.alarms.counts if self.alarms is not None else {},
        }

    def _with_elders(self) -> "list[Guard]":
        return [*(guard for elder in self.elders if (guard := elder()) is not None), self]

    def flush(self, seconds: float) -> bool:
        """Wait, bounded, until what was handed over has left: facts, callbacks, alerts, telemetry."""
        end = time.monotonic() + seconds
        jobs = [self.accounts.ledger.flush, self.outbox.flush]
        jobs += [self.alarms.flush] if self.alarms is not None else []
        jobs += [self.telemetry.flush] if self.telemetry is not None else []
        return all([job(max(end - time.monotonic(), 0.0)) for job in jobs])  # noqa: C419 - each of them is asked

    def time_next(self, calls: int) -> None:
        """Report to telemetry how long the next calls of ``check`` and ``after`` take, and time none after them."""
        self._calls_to_time = calls if self.telemetry is not None else 0

    def _timed(self, answer: Callable[[Any], Decision], event: Any) -> Decision:
        self._calls_to_time -= 1
        begin = time.perf_counter()
        try:
            return answer(event)
        finally:
            if self.telemetry is not None:
                self.telemetry.took(time.perf_counter() - begin)


def surplus(event: ModelCall, at_once: int, limit: int) -> Finding:
    return Finding(
        "fan_out", _STOP, at_once, limit, "model calls at once", "lane", "", "in flight", f"agent {event.agent}"
    )
