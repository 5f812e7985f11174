"""From a finding to a decision, and from there to everybody who has to know.

The guard and its parts ask ``Deciding``, which publishes every decision on the ``Sink``. ``connect_outlets`` tells the
outlets: journal, log, callbacks, alerts, telemetry, store. ``GuardFaults`` says what a fault of the guard itself means
for a run. ``Breakers`` are those of tools, over all runs: ``engine/tools`` asks them. The parts of a guard share a
``GuardContext``.
"""

import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from runguard.core.breaker import Breaker, BreakerState, Permit
from runguard.core.decision import (
    ALLOW,
    WITHHOLDING,
    Action,
    Decision,
    Finding,
    Trip,
    against_limit,
    printable,
    text_for_model,
    text_for_operator,
)
from runguard.core.events import ROOT_LANE, Event, ModelCall, ModelResult, RunInfo
from runguard.core.identity import LruDict
from runguard.core.money import BudgetStatus, nanos, to_usd, usd_text
from runguard.engine.budgets import Burn, Fired
from runguard.engine.runs import Lane, Run
from runguard.ledger.ledger import (
    Ledger,
    Stop,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    StoreSession,
    change_document,
)
from runguard.ledger.memory import in_memory
from runguard.policy.settings import Policy
from runguard.reporting.alerts import Alert, AlertKind, AlertSettings, Fact
from runguard.reporting.delivery import SHOWN, Alerts, RepeatedStops
from runguard.reporting.telemetry import Telemetry

if TYPE_CHECKING:
    from runguard.engine.context import GuardContext

# ---- Faults of RunGuard itself: kept away from the run that it guards, or a reason to stop it, as the policy says

_log: Final = logging.getLogger("runguard")
_LOGGED: Final = 10


class GuardFaults:
    """Counts and logs the faults of one guard, and says what they mean for a run. The first ones are logged as errors,
    later ones at DEBUG.
    """

    __slots__ = ("_context", "count")

    def __init__(self, context: "GuardContext") -> None:
        self._context, self.count = context, 0

    def note(self, where: str, error: BaseException) -> None:
        """Count and log a fault."""
        self.count += 1
        level = logging.ERROR if self.count <= _LOGGED else logging.DEBUG
        with suppress(Exception):  # a handler of the log that raises
            _log.log(
                level,
                "runguard.guard_error: %s failed with %s; on_guard_error=%s",
                where,
                type(error).__name__,
                self._context.policy.on_guard_error,
                exc_info=error,
            )

    def attempt(self, where: str, do: Callable[..., Any], *args: Any) -> Any:
        """Take one step of several that do not depend on each other. A fault is noted, and the result is None then."""
        try:
            return do(*args)
        except Exception as error:
            self.note(where, error)
            return None

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Count and log a fault. Stop the run where the policy says so and return why; None: go on."""
        self.note(where, error)
        return self.stop_after(where, error, run_id, agent)

    def stop_after(self, where: str, error: Exception, run_id: str, agent: str = "") -> Trip | None:
        """Do what ``fault`` does after a fault that is already counted."""
        if self.goes_on_after(error):
            return None
        try:
            return self.fail(run_id, "guard_error", f"{where}: {type(error).__name__}", agent)
        except Exception as second:
            self.note("stopping", second)
            return None

    def goes_on_after(self, error: Exception) -> bool:
        """Return whether a call is made that could not be judged.

        A fault of the store follows ``on_outage``, any other ``on_guard_error``.
        """
        if not self._context.enforces:
            return True
        if isinstance(error, StoreError | StoreOutage):
            return self._context.policy.on_outage == "open"
        return self._context.policy.on_guard_error == "allow"

    def give_up(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Do what ``fault`` does, for a call that is about to be made. Return a reason to refuse the call even where
        the run could not begin.
        """
        self.note(where, error)
        return None if self.goes_on_after(error) else self.refuse(where, error, run_id, agent)

    def refuse(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip:
        """Stop a run after a fault, whatever ``on_guard_error`` says. Return the trip, also where no run is known."""
        reason = f"{where}: {type(error).__name__}"
        trip: Trip | None = self.attempt("stopping", self.fail, run_id, "guard_error", reason, agent)
        if trip is None:
            # a clock that fails does not prevent the refusal
            at = self.attempt("the clock", self._context.clock) or 0.0
            trip = guard_error_trip(reason, run_id, self._context.policy, at)
            self._context.trips.append(trip)
        return trip

    def fail(self, run_id: str, rule: str, message: str, agent: str = "") -> Trip | None:
        """Stop a run for the guard's own sake: a broken policy, or a fault under ``on_guard_error="block"``."""
        run = self._context.runs.get(run_id)
        if run is None or run.stopped is not None:
            return run.stopped if run else None
        event = ModelCall(run_id, ROOT_LANE, agent, self._context.clock())
        finding = Finding(rule, Action.STOP, 1, 0, "errors", "run", detail=message)
        return self._context.deciding.decide(run, run.lanes[ROOT_LANE], event, finding).trip


# ---- The one way out for what a guard finds and decides


@dataclass(slots=True)
class Decided:
    """A decision other than "allow", with the event that led to it and where that happened."""

    decision: Decision
    finding: Finding
    run: Run
    lane: Lane
    event: Event


# What subscribers may be called at, with these arguments. Those of facts return what to show under each name.
Moment = Literal[
    "found",  # (finding, event): of a detector
    "decided",  # (decided)
    "tripped",  # (trip, finding)
    "run started",  # (run)
    "run paused",  # (run, waits): it waits for an answer, or has ended and could be run again
    "run dropped",  # (run): a paused run that cannot go on any more
    "run ended",  # (run)
    "tools failed",  # (run, event): tools have failed, or answered after a failure
    "cached",  # (run, charge, usage, model): a call was settled, in a run that reads from a prompt cache
    "settled",  # (run, charge)
    "failed",  # (charge, error): a model call raised
    "run facts",  # (run) -> facts: for the snapshot of a run and its record in the store
    "run outlook",  # (run, now) -> facts: for the snapshot of a run at work
    "guard facts",  # () -> facts: for the snapshot of the guard
]
OnFound = Callable[[Finding, Event], None]
OnDecided = Callable[[Decided], None]
OnTrip = Callable[[Trip, Finding], None]


class Sink:
    """Passes findings, decisions and trips on to subscribers. Each subscriber gives its name for the log::

        guard.sink.on_decided("my adapter", lambda decided: show(decided.decision))
        guard.sink.on_trip("my adapter", lambda trip, finding: print(trip))

    Subscribers run in the order in which they subscribed, on the path of the call, so they must be quick: whatever
    takes time hands its work to a thread of its own. A subscriber that raises is counted as a fault of the guard. It
    changes neither the decision nor what the other subscribers receive.
    """

    __slots__ = ("_faults", "at")

    def __init__(self, faults: GuardFaults) -> None:
        self._faults = faults
        self.at: Final[dict[Moment, list[tuple[str, Callable[..., Any]]]]] = {moment: [] for moment in get_args(Moment)}

    def on(self, moment: Moment, name: str, subscriber: Callable[..., Any]) -> None:
        """Call ``subscriber`` at every such moment."""
        self.at[moment].append((name, subscriber))

    def on_found(self, name: str, subscriber: OnFound) -> None:
        """Call ``subscriber`` with every finding of a detector, also with those that decide nothing."""
        self.on("found", name, subscriber)

    def on_decided(self, name: str, subscriber: OnDecided) -> None:
        """Call ``subscriber`` with every decision other than "allow", once, where it is made.

        A refusal because of a stop in force is not a new decision.
        """
        self.on("decided", name, subscriber)

    def on_trip(self, name: str, subscriber: OnTrip) -> None:
        """Call ``subscriber`` with every new trip and the finding that it describes, before the decision itself."""
        self.on("tripped", name, subscriber)

    def tell(self, moment: Moment, *about: Any) -> list[Any]:
        """Call the subscribers of a moment. Return what they return, without those that raise."""
        returned = []
        for name, subscriber in self.at[moment]:
            try:
                returned.append(subscriber(*about))
            except Exception as error:
                self._faults.note(name, error)
        return returned

    def facts(self, moment: Moment, *about: Any) -> dict[str, Any]:
        """Return the facts that all subscribers give."""
        return dict(item for facts in self.tell(moment, *about) for item in facts.items())


# ---- From a finding to a decision

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_WARN, _NUDGE, _BLOCK, _STOP = Action.WARN, Action.NUDGE, Action.BLOCK, Action.STOP
_REPORTED_KEPT: Final = 256
_STOPPED_TEXT: Final = text_for_model(Finding("stopped", _STOP, 0, 0, ""))


def _mark(lane: Lane, finding: Finding, key: str, action: Action) -> tuple[str, str, str, Action]:
    """Return by what a finding is known that was reported."""
    return finding.rule, "" if finding.scope == "run" else lane.first_key, key, action


class Deciding:
    """Decides by one policy and publishes every decision on the sink. The only place where anything is decided.

    It knows what follows in this mode, whether a finding was reported before, and which scope a stop ends.
    """

    __slots__ = ("_advice", "_faults", "_policy", "_sink", "_trips", "enforces")

    def __init__(self, context: "GuardContext") -> None:
        self._policy, self._sink, self._faults = context.policy, context.sink, context.faults
        self._trips, self._advice = context.trips, context.options.get("advice") or {}
        self.enforces = context.enforces

    def stronger(self, run: Run, lane: Lane, before: Finding | None, found: Finding, event: Event) -> Finding:
        """Publish what one more detector of a lane found. Return the stronger finding, of two equal ones the first.

        A nudge that was given before does not hide one about something else.
        """
        if self._sink.at["found"]:
            self._sink.tell("found", found, event)
        if before is None or found.action > before.action:
            return found
        was_given = (
            found.action is _NUDGE
            and before.action is _NUDGE
            and before.key != found.key
            and _mark(lane, before, before.key, _NUDGE) in run.noted
            and not self._withholds(lane, before)
        )
        return found if was_given else before

    def decide(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Decision:
        """Return what follows from a finding. A stop takes effect here."""
        action = finding.action
        if action is _STOP and type(event) is ModelCall and event.after_answer:
            action = _BLOCK  # the run has given its answer: only this call is refused
        withheld = action is _NUDGE and self._withholds(lane, finding)
        if self._is_old_news(run, lane, finding, action, withheld=withheld):
            return ALLOW
        if action is _NUDGE:
            run.nudges += 1
        text = text_for_model(finding, lane.others(finding.tool), withheld=withheld) if action >= _NUDGE else ""
        decision = Decision(action, finding, None, text, self.enforces)
        if withheld:
            decision.withheld = finding.tool
            if self.enforces:
                lane.withheld = (*lane.withheld, finding.tool)
        if action is _STOP:
            decision.trip = self._trip(run, lane, event, finding)
        # The decision holds, whether or not it can be reported.
        decided = Decided(decision, finding, run, lane, event)
        self._faults.attempt("reporting a decision", self._sink.tell, "decided", decided)
        return decision

    def _withholds(self, lane: Lane, finding: Finding) -> bool:
        """Return whether the tool is left out of the next requests.

        A rule's own count decides, not one beside it, such as that of failures between other work. Where the adapter
        does not say that the tool is offered, or nothing else is, it stays.
        """
        if finding.unit not in WITHHOLDING or finding.tool in lane.withheld or finding.tool not in lane.offered:
            return False
        if not lane.others(finding.tool):
            return False
        rungs = self._policy.rungs(finding.rule)
        return rungs is not None and rungs.withhold is not None and finding.observed >= rungs.withhold

    def _is_old_news(self, run: Run, lane: Lane, finding: Finding, action: Action, *, withheld: bool) -> bool:
        """Return whether a finding was reported before, or nothing may follow from it. Remember it otherwise.

        Warnings and nudges are given once, and once more where the tool is ``withheld``. Refusals and stops that are
        enforced repeat; in shadow mode each is reported once.
        """
        repeats = action > _NUDGE and self.enforces
        if repeats:
            return False
        key = f"{finding.key}, withheld" if withheld else finding.key
        mark = _mark(lane, finding, key, action)
        if mark in run.noted:
            return True
        if action is _WARN and finding.rule == "growth":
            # once per session, whichever of its runs and agents it is about
            if run.growth.warned:
                return True
            run.growth.warned = True
        if action is _NUDGE and not withheld and run.nudges >= self._policy.max_nudges:
            return True
        run.noted[mark] = None
        if len(run.noted) > _REPORTED_KEPT:
            run.noted.popitem(last=False)
        return False

    def _trip(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Trip:
        owner = (lane.owner(finding) if finding.scope == "lane" else None) or run
        if self.enforces and owner.stopped is not None:
            return owner.stopped  # another thread of the run has decided meanwhile
        for earlier in run.trips if finding.rule == "fan_out" else ():
            if earlier.rule == finding.rule and earlier.unit == finding.unit:
                # A surplus is one event however many branches it refuses.
                if owner is not run and self.enforces:
                    owner.stop(earlier)
                return earlier
        trip = self.describe(run, lane, event, finding)
        if self.enforces:
            if owner.stopped is not None:  # another thread was faster while this one described its trip
                return owner.stopped
            owner.stop(trip)
            for visit in list(run.visits):
                visit.wake()  # a stopped call does not wait
        self._faults.attempt("recording a trip", self._record, run, trip, finding)
        return trip

    def _record(self, run: Run, trip: Trip, finding: Finding) -> None:
        run.trips.append(trip)
        self._trips.append(trip)
        self._sink.tell("tripped", trip, finding)

    def describe(self, run: Run, lane: Lane, event: Event, finding: Finding) -> Trip:
        """Return a finding as a trip. Stop nothing and record nothing."""
        return trip_of(finding, run, lane, event, self._policy, self._advice)


def stop_in_force(trip: Trip | None) -> Decision:
    """Return the answer within a scope that was stopped before."""
    return Decision(_STOP, None, trip, _STOPPED_TEXT, enforced=True)


# ---- A finding as a trip: the record that outlives its run

# How to go on after a stop, for the operator: by rule, and else by the setting to change.
_RESUME: Final = {
    "resubmission": (
        "find out why the runs on this input ended so before it is submitted again; one hour after them, or with "
        "another input, a run begins as always. To allow more, raise max_resubmissions"
    ),
    "policy_error": "correct the policy file and start the process again",
    "context": (
        "the next turn begins with the same history: start a new session, compact its events, or raise "
        "max_context_tokens"
    ),
    "growth": (
        "the next turn begins with the same history: start a new session, compact its events, or raise "
        "max_event_cost_ratio"
    ),
    "guard_error": (
        "this is a fault of RunGuard: the log has it under runguard.guard_error. on_guard_error='allow' lets runs go "
        "on without rules, as far as their budgets can be reserved"
    ),
}
_SETTINGS: Final = {
    "model_calls": "max_model_calls",
    "tool_calls": "max_tool_calls",
    "tool_limit": "tools.<name>.max_calls",
    "fan_out": "max_fan_out or max_concurrent_agents",
    "deadline": "max_seconds",
    "depth": "max_delegation_depth",
    "result_size": "max_tool_result_chars",
    "reentry": "max_reentries",
    "resubmission": "max_resubmissions",
    "context": "max_context_tokens",
}


def trip_of(finding: Finding, run: Run, lane: Lane, event: Event, policy: Policy, advice: Mapping[str, str]) -> Trip:
    """Describe a finding; stop nothing.

    ``advice``: how to go on after a stop, by rule, where the settings have other names.
    """
    enforced = policy.mode == "enforce"
    owner = lane.owner(finding) if finding.scope == "lane" else None
    info, spend = run.info, run.spend
    path = (*lane.path, event.agent) if event.agent else lane.path
    if finding.rule == "handoff":
        path = (*lane.path, *finding.detail.split("→"))
    elif finding.rule == "reentry":  # its chain begins above the lane
        path = tuple(finding.detail.split("→"))
    scope, scope_id = ("branch", owner.key) if owner is not None else ("run", info.run)
    run_costs, money, made = run.run_costs, finding.money, spend.model_calls - run.waiting
    if money is not None:
        scope, scope_id = money.kind, money.scope
    setting = _SETTINGS.get(finding.rule, f"rules.{finding.rule}.stop")
    return Trip(
        id=secrets.token_hex(8),
        rule=finding.rule,
        action=finding.action.word,
        scope=scope,
        scope_id=scope_id,
        unit=finding.unit,
        app=info.app,
        user_id=info.user,
        session_id=info.session,
        run_id=info.run,
        invocation_id=info.invocation,
        message=text_for_operator(
            finding,
            path=path,
            model_calls=made,
            tool_calls=spend.tool_calls,
            tokens=spend.tokens,
            spent=run.spent_text,
            enforced=enforced,
        ),
        resume=(money.resume if money is not None else "")
        or advice.get(finding.rule)
        or _RESUME.get(finding.rule)
        or f"the next user message starts with fresh counters; to allow more, raise {setting}",
        policy_digest=policy.digest,
        at=event.at,
        observed=finding.observed,
        limit=finding.limit,
        agent_path=path,
        branch=owner.key if owner is not None else None,
        tool=finding.tool or None,
        model=_model_of(event),
        evidence=finding.evidence,
        model_calls=made,
        tool_calls=spend.tool_calls,
        tokens=spend.tokens,
        spent_usd=money.spent_usd if money is not None and money.spent_usd is not None else run_costs.spent_usd,
        reserved_usd=money.reserved_usd
        if money is not None and money.reserved_usd is not None
        else to_usd(run_costs.reserved),
        enforced=enforced,
        estimated=bool(run_costs.estimated or run_costs.unpriced),
        resets_at=money.ends if money is not None and finding.rule == "budget" else None,
    )


def _model_of(event: Event) -> str | None:
    return event.model or None if isinstance(event, ModelCall | ModelResult) else None


def guard_error_trip(reason: str, run_id: str, policy: Policy, at: float, **facts: Any) -> Trip:
    """Return a stop for the guard's own sake where it knows of no run: it could not begin."""
    return Trip(
        id=secrets.token_hex(8),
        rule="guard_error",
        action="stop",
        scope="run",
        scope_id=run_id,
        unit="errors",
        run_id=run_id,
        message=f"stopped by guard_error: {reason}",
        resume=_RESUME["guard_error"],
        policy_digest=policy.digest,
        at=at,
        observed=1,
        limit=0,
        **{"app": "", "user_id": "", "session_id": "", "invocation_id": "", "agent_path": (), **facts},
    )


# ---- Breakers of tools, across runs

_TOOLS_KEPT: Final = 4_096


class Breakers:
    """One breaker per tool, made when the tool first raises or times out. With a shared store, all workers share them.

    The copy here answers at once. Changes go to the store in order with everything else, and what other workers changed
    comes back with the next reservation. Only the one probe of an open breaker is awaited.
    """

    def __init__(self, ledger: Ledger, threshold: int, reset_after_s: float, min_runs: int) -> None:
        self._ledger, self._threshold, self._reset_after_s, self._min_runs = ledger, threshold, reset_after_s, min_runs
        self._tools = LruDict[str, Breaker](_TOOLS_KEPT)
        self.get: Callable[[str], Breaker | None] = self._tools.get
        self._lock = threading.Lock()
        self.on_change: Callable[[str, bool], None] | None = None  # called when one opens or closes here

    def share(self, other: "Breakers") -> None:
        """Work on the same breakers as another guard. Those that exist keep their thresholds."""
        self._tools, self._lock, self.get = other._tools, other._lock, other.get

    def items(self) -> Iterable[tuple[str, Breaker]]:
        return list(self._tools.items())

    def _made(self, tool: str) -> Breaker:
        with self._lock:
            breaker = self._tools.get(tool)
            if breaker is None:
                breaker = self._tools[tool] = self._new()
            return breaker

    def _new(self) -> Breaker:
        return Breaker(threshold=self._threshold, min_runs=self._min_runs, reset_after_s=self._reset_after_s)

    def load(self, document: dict[str, Any]) -> None:
        """Take over the breakers of the store's control document: every one that a worker has changed."""
        for tool, state in (document.get("breakers") or {}).items():
            self._made(tool).load(state)

    async def claim_probe(self, tool: str, at: float) -> Permit | None:
        """Return the one probe across all workers, or None when it is not due or another worker has it."""
        breaker = self._tools.get(tool)
        if (
            breaker is None
            or not self._ledger.is_shared
            or breaker.state(self._ledger.now(at)) is not BreakerState.HALF_OPEN
        ):
            return None
        permit: list[Permit | None] = [None]
        state: dict[str, Any] = {}

        def claim(session: StoreSession) -> None:
            def change(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                permit[0] = theirs.admit(session.now())
                state.update(theirs.dump())
                if permit[0] is not None:  # else nothing has changed
                    document["breakers"][tool] = theirs.dump()

            change_document(session, self._ledger.name, change)

        try:
            await self._ledger.ask(claim)
        except (StoreOutage, StoreError):
            return None  # the local breaker decides
        breaker.load(state)  # what the store decided: no second probe from the copy here
        return permit[0]

    def report(self, tool: str, permit: Permit, ok: bool, at: float, run: str) -> None:
        breaker = self._tools.get(tool) if ok else self._made(tool)
        if breaker is None:
            return
        pristine, now = breaker.is_pristine, self._ledger.now(at)
        before = breaker.state(now)
        breaker.report(permit, ok, now, run)
        if (
            self.on_change is not None
            and (after := breaker.state(now)) is not before
            and BreakerState.HALF_OPEN is not after
        ):
            self.on_change(tool, after is not BreakerState.CLOSED)
        if self._ledger.is_shared and not (ok and pristine):
            self._share(
                tool, lambda theirs, now: theirs.report(permit if permit.probe else theirs.permit(), ok, now, run)
            )

    def release(self, tool: str, permit: Permit) -> None:
        breaker = self._tools.get(tool)
        if breaker is None:
            return
        breaker.release(permit)
        if self._ledger.is_shared and permit.probe:
            self._share(tool, lambda theirs, _: theirs.release(permit))

    def _share(self, tool: str, change: Callable[[Breaker, float], None]) -> None:
        def send(session: StoreSession) -> None:
            def both(document: dict[str, Any]) -> None:
                theirs = self._theirs(document, tool)
                change(theirs, session.now())
                document["breakers"][tool] = theirs.dump()

            change_document(session, self._ledger.name, both)

        self._ledger.tell(send)

    def _theirs(self, document: dict[str, Any], tool: str) -> Breaker:
        breaker = self._new()
        breaker.load(document.setdefault("breakers", {}).get(tool) or {})
        return breaker


# ---- What a person should know of a guard's work, as alerts

_HOUR: Final = 3_600.0
_DAY: Final = 86_400.0
_LONGEST: Final = 30 * _DAY
# What is told of a stop whose numbers say nothing
_UNCOUNTED: Final = {
    "unpriced": "the price of a call is not known",
    "guard_error": "a call could not be checked",
    "policy_error": "the policy cannot be read",
}


class Alarms:
    """The alerts of one guard: stops, thresholds, growth, a store that is away, breakers, the kill switch.

    Each is sent once per rule, scope and period, over all workers that share a store. Further runs that the same rule
    stops in the same place are counted and listed in later alerts. An alert is also sent when the cause is over, so
    that an incident closes by itself. Alerts hold names and numbers only, never arguments or answers of tools.
    """

    def __init__(self, settings: AlertSettings, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._alerts, self._ledger, self._clock = Alerts(settings), ledger, clock
        self._repeated = RepeatedStops(self._alerts)
        self._away: list[AlertKind] = []  # what was sent about a store that is not back yet

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        return self._alerts.counts

    def flush(self, seconds: float) -> bool:
        return self._ledger.flush(seconds) and self._repeated.flush(seconds)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def tripped(self, trip: Trip, finding: Finding) -> None:
        """Alert on a stop. Of a budget: once for its period.

        Of anything else: once an hour for the same rule in the same place, and then the others together.
        """
        if trip.rule == "kill_switch":
            return  # alerted where it was thrown
        verb = "stopped" if trip.enforced else "would have stopped"
        where = "→".join(trip.agent_path) or trip.app or trip.run_id
        who = f"{where} of user {trip.user_id}" if trip.user_id else where
        who = f"{who} on {trip.model}" if trip.model else who
        money = finding.money
        counted = f"{_amount(trip.unit, trip.observed)}, limit {_figure(trip.unit, trip.limit)}"
        text = f"RunGuard {verb} {who}: {trip.rule}, {_UNCOUNTED.get(trip.rule, counted)}"
        key, period = f"{trip.rule} {trip.app} {where} {trip.tool or ''} {int(trip.at // _HOUR)}", _HOUR
        repeated: Callable[[Alert], None] | None = self._repeated.add
        if money is not None and trip.rule == "budget":
            spent = next((_figure(trip.unit, item["spent"]) for item in trip.evidence if "spent" in item), "?")
            text = (
                f"RunGuard {verb} {who}: {spent} of {_amount(trip.unit, trip.limit)} of {money.scope} are spent, "
                "too little is left for the next call"
            )
            key, period = f"budget {money.key}", _LONGEST if money.ends is None else max(money.ends - trip.at, _HOUR)
            repeated = None
        if not in_memory(self._ledger.name):  # else no other process can show it
            text += f". Details: {SHOWN}{trip.id}"
        facts: dict[str, Fact] = {
            "rule": trip.rule,
            "scope": trip.scope_id,
            "observed": str(trip.observed),
            "limit": str(trip.limit),
            "unit": trip.unit,
            "app": trip.app,
            "user": trip.user_id or None,
            "agent": where,
            "tool": trip.tool,
            "model": trip.model,
            "run": trip.run_id,
            "session": trip.session_id,
            "model_calls": trip.model_calls,
            "spent_usd": str(trip.spent_usd) if trip.spent_usd is not None else None,
            "enforced": trip.enforced,
            "trip": trip.id,
            "resume": trip.resume,
        }
        alert = Alert("trip", key, "critical" if trip.enforced else "info", text, facts, trip.at)
        self._send_once(alert, period, repeated)

    def compaction(self, info: RunInfo, finding: Finding, *, enforced: bool) -> None:
        """Alert that the summary of a session's history was refused.

        Once a day for the same rule in the same app: a tight limit refuses many sessions.
        """
        now = self._clock()
        verb = "refused" if enforced else "would have refused"
        text = (
            f"RunGuard {verb} to compact the history of a session of {info.app}: {finding.rule}; its later calls "
            "are more expensive"
        )
        facts: dict[str, Fact] = {
            "rule": finding.rule,
            "scope": finding.money.scope if finding.money is not None else f"run:{info.run}",
            "observed": str(finding.observed),
            "limit": str(finding.limit),
            "unit": finding.unit,
            "app": info.app,
            "session": info.session,
            "enforced": enforced,
        }
        key = f"compaction {info.app} {finding.rule} {finding.unit} {int(now // _DAY)}"
        self._send_once(Alert("compaction", key, "warning" if enforced else "info", text, facts, now), _DAY)

    def threshold(self, reached: Fired) -> None:
        """Alert that a share of a budget is spent. The ledger says so once per period, to one worker."""
        status, percent = reached.status, reached.threshold.percent
        text = (
            f"{percent:.0%} of the budget of {status.scope} is spent: {_figure(status.unit, status.spent)} of "
            f"{_amount(status.unit, status.limit)}"
        )
        self._alerts.send(
            Alert(
                "threshold",
                f"threshold {reached.account.key} {reached.account.granted} {percent} {reached.threshold.action}",
                "warning",
                text,
                {"percent": percent, **_facts_of(status)},
                self._clock(),
            )
        )

    def burning(self, reached: Fired, burn: Burn) -> None:
        """Alert that a budget is spent too fast to last. The ledger says so once per period, to one worker."""
        status, now = reached.status, self._clock()
        facts: dict[str, Fact] = {
            **_facts_of(status),
            "fast": round(burn.fast, 2),
            "slow": round(burn.slow, 2),
            "used_up_at": round(burn.used_up_at),
            "ends": status.ends,
            "estimated": True,
        }
        key = f"burn {reached.account.key} {reached.account.granted}"
        self._alerts.send(Alert("burn_rate", key, "warning", burn_words(status.scope, status, burn, now), facts, now))

    def decided(self, decided: Decided) -> None:
        """Alert that the prompts of a session have grown. Sent once per session."""
        finding, info, agent, at = decided.finding, decided.run.info, decided.event.agent, decided.event.at
        if finding.rule != "growth" or decided.decision.action is not _WARN:
            return
        session = "/".join(filter(None, (info.app, info.user, info.session)))
        text = (
            f"the prompts of {agent or info.app} in {session or info.run} are {finding.observed} times as large as "
            "its first ones"
        )
        facts: dict[str, Fact] = {
            "rule": finding.rule,
            "observed": str(finding.observed),
            "limit": str(finding.limit),
            "unit": finding.unit,
            "app": info.app,
            "user": info.user,
            "session": info.session,
            "agent": agent,
            "run": info.run,
        }
        self._send_once(
            Alert("growth", f"growth {session if info.session else info.run}", "warning", text, facts, at), _LONGEST
        )

    def extended(self, statuses: list[BudgetStatus], keys: list[str]) -> None:
        """End the alerts about budgets that were extended; they may be sent again."""
        for status, account in zip(statuses, keys, strict=True):
            text = f"the budget of {status.scope} is now {_amount(status.unit, status.limit)}"
            self._resolve(
                Alert("trip", f"budget {account}", "info", text, _facts_of(status), self._clock(), resolved=True)
            )

    def store(self, error: Exception | None) -> None:
        """Alert that the store is away, was replaced, or is back (no error).

        No store can say which worker sends this: every one does.
        """
        name = self._ledger.name
        if error is None:
            for sent in self._away:
                self._alerts.send(
                    Alert(
                        sent,
                        f"{sent} {name}",
                        "critical",
                        f"the store {name} answers again",
                        {"store": name},
                        self._clock(),
                        resolved=True,
                    )
                )
            self._away.clear()
            return
        kind: AlertKind = "outage"
        text, facts = f"the store {name} is away: {error}", {"store": name}
        if isinstance(error, StoreReplacedError):
            kind, text, facts["command"] = "store_replaced", f"the store was replaced: {error}", error.command
        self._away.append(kind)
        self._alerts.send(Alert(kind, f"{kind} {name}", "critical", text, facts, self._clock()))

    def dropped(self, count: int, nano: int) -> None:
        """Settlements could not be booked. No store answers that could say who sends this: every worker does."""
        name, usd = self._ledger.name, usd_text(nano)
        text = (
            f"the store {name} does not know of {count} calls that cost {usd}: one worker dropped their settlements, "
            "because the store refused them or was away for too long"
        )
        facts: dict[str, Fact] = {"store": name, "dropped": count, "usd": str(to_usd(nano))}
        self._alerts.send(Alert("outage", f"dropped {name} {count}", "critical", text, facts, self._clock()))

    def cap(self, scope: str, unit: str, wrong: str) -> None:
        """Alert that a cap function gives no cap for a scope, or gives one again (nothing is wrong)."""
        text = f"no cap in {unit} for {scope}: {wrong}" if wrong else f"the cap in {unit} of {scope} is known again"
        alert = Alert(
            "outage",
            f"cap {unit} {scope}",
            "critical",
            text,
            {"scope": scope, "unit": unit},
            self._clock(),
            resolved=not wrong,
        )
        self._send_once(alert, _HOUR) if wrong else self._resolve(alert)

    def breaker(self, tool: str, is_open: bool) -> None:
        text = f"the breaker of '{tool}' {'is open: it failed too often' if is_open else 'is closed again'}"
        alert = Alert(
            "breaker", f"breaker {tool}", "warning", text, {"tool": tool}, self._clock(), resolved=not is_open
        )
        self._send_once(alert, _DAY) if is_open else self._resolve(alert)

    def switched(self, scope: str, stop: Stop | None) -> None:
        """Alert that the kill switch was thrown, or taken back."""
        text = f"{stop.actor} stopped {scope}{stop.because}" if stop is not None else f"{scope} may run again"
        facts: dict[str, Fact] = (
            {"scope": scope, "actor": stop.actor, "reason": stop.reason} if stop is not None else {"scope": scope}
        )
        self._alerts.send(
            Alert("kill_switch", f"kill_switch {scope}", "warning", text, facts, self._clock(), resolved=stop is None)
        )

    # ---- once over all workers --------------------------------------------------------------------------------------

    def _send_once(self, alert: Alert, period: float, repeated: Callable[[Alert], None] | None = None) -> None:
        """Send the alert if no worker has. ``repeated`` gets it otherwise."""

        def send(mine: bool) -> None:
            if not (mine and self._alerts.send(alert)) and repeated is not None:
                repeated(alert)

        if not self._ledger.is_shared:
            send(True)
            return

        def claim(session: StoreSession) -> None:
            try:
                mine = session.claim(f"alert {alert.key}", period) == "yes"
            except StoreOutage:
                raise  # the ledger tries again
            except Exception:
                mine = True  # the store cannot say which worker sends it: an alert sent twice is better than none
            send(mine)

        self._ledger.tell(claim)

    def _resolve(self, alert: Alert) -> None:
        def free(session: StoreSession) -> None:
            session.finish(f"alert {alert.key}", False)
            self._alerts.send(alert)  # in order: what it ends may still be on its way

        if self._ledger.is_shared:
            self._ledger.tell(free)
        else:
            self._alerts.send(alert)


def burn_words(scope: str, status: BudgetStatus, burn: Burn, now: float) -> str:
    hours = max(burn.used_up_at - now, 0.0) / _HOUR
    left = f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.0f} minutes"
    return (
        f"the budget of {scope} will be used up in about {left}, before its window ends: "
        f"{_figure(status.unit, status.spent)} of {_amount(status.unit, status.limit)} are spent, "
        f"{burn.fast:.1f} times as fast as the rest allows"
    )


def _figure(unit: str, value: object) -> str:
    """``$0.15``, ``1200``."""
    return usd_text(nanos(Decimal(str(value)))) if unit == "usd" else str(value)


def _amount(unit: str, value: object) -> str:
    """``$0.15``, ``1200 tokens``."""
    return _figure(unit, value) if unit == "usd" else f"{value} {unit}"


def _facts_of(status: BudgetStatus) -> dict[str, Fact]:
    return {
        "scope": status.scope,
        "spent": str(status.spent),
        "reserved": str(status.reserved),
        "limit": str(status.limit),
        "unit": status.unit,
        "window": status.window,
    }


# ---- Refused summaries: the guard refused the model call by which a framework compacts a history

_SESSIONS_KEPT: Final = 10_000


class RefusedSummaries:
    """Which sessions were reported. Safe to use from many threads.

    The run has given its answer, so nothing is stopped. But the history stays as long as it is, and every later call
    pays for it. Frameworks try again after each run, so a refusal is reported once per session.
    """

    def __init__(self, alarms: Alarms | None) -> None:
        self._alarms = alarms
        # by a hash of the session: names of any length take the same space
        self._reported = LruDict[int, None](_SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "RefusedSummaries") -> None:
        """Know what another guard has reported."""
        self._reported, self._lock = other._reported, other._lock

    def decided(self, decided: Decided) -> None:
        """Report a refused summary, unless its session was reported before."""
        info, finding, decision, event = decided.run.info, decided.finding, decided.decision, decided.event
        if finding.action is not _STOP or not isinstance(event, ModelCall) or not event.after_answer:
            return
        if not self._is_first(info):
            return
        verb = "was not" if decision.enforced else "would not have been"
        limit = finding.detail
        if finding.money is None:
            limit = against_limit(finding.observed, finding.unit, finding.limit)
        _log.warning(
            "runguard.compaction_refused: the history of session %s/%s/%s %s compacted: %s, %s. Runs go on "
            "with the full history, which makes their calls more expensive. Raise the limit, or compact with a "
            "cheaper model; further refusals for this session are not reported",
            *(info.app, info.user, info.session, verb, finding.rule, limit),
        )
        if self._alarms is not None:
            self._alarms.compaction(info, finding, enforced=decision.enforced)

    def _is_first(self, info: RunInfo) -> bool:
        key = hash((info.app, info.user, info.session))
        with self._lock:
            if key in self._reported:
                return False
            self._reported[key] = None
            return True


# ---- Which outlets receive the decisions and trips of a guard

_LOUD_RULES: Final = ("budget", "context", "growth", "resubmission")


def connect_outlets(context: "GuardContext", telemetry: Telemetry | None) -> None:
    """Let the outlets of a guard hear of its trips and decisions, in this order."""
    policy, ledger, send, sink = context.policy, context.accounts.ledger, context.outbox.send, context.sink
    alarms, on_trip, on_decision = context.alarms, policy.on_trip, policy.on_decision
    summaries = RefusedSummaries(alarms)
    context.keep(summaries)
    if ledger.is_shared:
        sink.on_trip("storing a trip", lambda trip, _: _store_trip(ledger, trip))
    sink.on_trip("logging a trip", _log_trip)
    if on_trip is not None:
        sink.on_trip("on_trip", lambda trip, _: send(on_trip, trip))
    if alarms is not None:
        sink.on_trip("alerting", alarms.tripped)
    sink.on_decided("writing the journal", _write_journal)
    sink.on_decided("logging a decision", _log_decision)
    if on_decision is not None:
        sink.on_decided("on_decision", lambda decided: send(on_decision, decided.decision))
    sink.on_decided("reporting a refused summary", summaries.decided)
    if alarms is not None:
        sink.on_decided("alerting", alarms.decided)
    if telemetry is not None:
        tell = telemetry.decided
        sink.on_decided("telemetry", lambda it: tell(it.decision, it.run.info, it.event.agent, _model_of(it.event)))


def _store_trip(ledger: Ledger, trip: Trip) -> None:
    text = json.dumps(trip.to_dict())
    ledger.tell(lambda session: session.append("trip", trip.id, text))


def _write_journal(decided: Decided) -> None:
    journal, event = decided.run.journal, decided.event
    if journal is not None:
        journal.decided(decided.decision, decided.lane.key, event.agent, event.at)


def _log_trip(trip: Trip, finding: Finding) -> None:
    _log.warning("runguard.trip: %s", trip.message, extra={"runguard_trip": trip.id, "runguard_rule": trip.rule})


def _log_decision(decided: Decided) -> None:
    """Log findings about money and context as warnings, all others at INFO. Trips have a line of their own."""
    finding, action = decided.finding, decided.decision.action
    if action is Action.STOP:
        return
    if finding.rule == "prompt_cache":
        _log.warning("runguard.prompt_cache: %s", printable(finding.detail))
        return
    if finding.rule == "downgrade":
        _log.warning("runguard.model_switch: %s", printable(finding.detail))
        return
    level = logging.WARNING if action is Action.WARN and finding.rule in _LOUD_RULES else logging.INFO
    if finding.money is not None:
        _log.log(level, "runguard.%s: %s", action.word, finding.detail)
        return
    about = printable(finding.tool or finding.detail)
    _log.log(level, "runguard.%s: %s, %s %s of %s", action.word, finding.rule, finding.observed, finding.unit, about)
