"""The guard: takes events, asks the rules, answers with decisions.

``Guard`` says what adapters may ask of it and in which order: ``adk``, ``calls`` and ``replay`` do. Its parts live in
the other files of this package and share a ``GuardContext``. ``Controls`` is what an operator can see and do.
"""

import getpass
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, Unpack

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
from runguard.engine.calls import PaidCalls
from runguard.engine.charges import finding_of_stop
from runguard.engine.context import GuardContext, GuardOptions
from runguard.engine.decide import connect_outlets, stop_in_force
from runguard.engine.downgrade import Downgrades
from runguard.engine.final_answer import LastAnswers
from runguard.engine.forecast import Outlook
from runguard.engine.prompt_cache import CacheWatch
from runguard.engine.rate_limits import ProviderWaits
from runguard.engine.resubmissions import Resubmissions
from runguard.engine.resume import Pauses
from runguard.engine.runs import NO_OBSERVERS, Lane, LaneKeeper, LaneRules, Run, SessionGrowths
from runguard.engine.spending import scopes_of
from runguard.engine.tools import Answers, ToolGate, ToolPrices
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
from runguard.policy.settings import Policy
from runguard.pricing.book import prices_per_token
from runguard.reporting.journal import KIND, Journal
from runguard.reporting.telemetry import SAMPLE, Telemetry

Question = AgentEntered | HandOff | ModelCall | ToolCall
Result = ModelResult | StateChanged | ToolResults

# Optional features, each a file of its own. Without its line here, and its import, a feature is gone.
FEATURES: Final[tuple[Callable[[PaidCalls], object], ...]] = (
    Resubmissions,
    ProviderWaits,
    LastAnswers,
    Downgrades,
    CacheWatch,
    Outlook,
)

# ---- The guard

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_NUDGE, _BLOCK, _STOP = Action.NUDGE, Action.BLOCK, Action.STOP


class Guard(PaidCalls):
    """One policy at work over any number of concurrent runs.

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

    ``check`` before something happens and ``after`` it are synchronous and touch nothing but memory. ``reserve`` is
    awaited between them. Every event carries its time: ``at=guard.clock()``. ``guard.sink`` reports every decision.

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

    ``guard.tools`` knows what is declared about tools and names calls: ``ToolCall.call`` is its ``fingerprint``.

    **Faults.** An exception of the guard must not reach the run. Wrap each hook, pass the exception to ``fault``, and
    go on as if the guard had answered "allow", unless ``fault`` returns a trip.
    """

    def __init__(self, policy: Policy, *, heir_of: "Guard | None" = None, **options: Unpack[GuardOptions]) -> None:
        """Build the parts. ``heir_of``: a guard whose policy this one replaces; see ``runguard.engine.resume``."""
        before = heir_of
        super().__init__(policy, options, before)
        # guards whose policies this one replaced, while they have runs
        self.elders: tuple[weakref.ref[Guard], ...] = ()
        if before is not None:
            known = (elder for elder in before.elders if (guard := elder()) is not None and guard.runs)
            self.elders = (*known, weakref.ref(before))
        self.telemetry = Telemetry.of(self) if policy.telemetry and policy.mode != "off" else None
        self._calls_to_time = 0
        self.time_next(SAMPLE // 8)
        if options.get("reports", True):
            connect_outlets(self, self.telemetry)
        self.growth = SessionGrowths(policy, self.accounts.ledger)
        self.keep(self.growth)
        self.sink.on("run paused", "pause", lambda run, waits: self.growth.record(run.info, run.growth))
        self.sink.on("run ended", "end of run", lambda run: self.growth.record(run.info, run.growth))
        self.lanes = LaneKeeper(self, options.get("lane_rules") or LaneRules(policy))
        self.pauses = Pauses(self)
        self.tool_gate = ToolGate(self)
        self.tool_prices = ToolPrices(self, self.tool_gate)
        self._answers = Answers(self, self.tool_gate, self.tool_prices)
        self.operator_stops: OperatorStops = OperatorStops(self, before.operator_stops if before is not None else None)
        for feature in FEATURES:
            feature(self)
        self.share(before)
        # last: the store may report changes at once
        self.accounts.ledger.watch(self.operator_stops.on_control, self.pauses.signs_of_life)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def start(self, info: RunInfo) -> Run:
        """Begin a root run. A run of the same name is reset."""
        if (before := self.runs.get(info.run)) is not None:
            self.accounts.end(before.run_costs)
            if before.journal is not None:
                before.journal.flush()
        run = Run(info, self.policy, self.tools, self.accounts.spending.begin(info), self.growth.of(info))
        try:
            self.lanes.open_root(run)
        except Exception as error:  # where a fault stops nothing, the run goes on without rules: its budgets hold
            if not self.faults.goes_on_after(error):
                raise
            self.faults.note("the rules of a run", error)
            run.lanes[ROOT_LANE] = Lane(ROOT_LANE, None, [], concurrent=False)
        if self.accounts.ledger.is_shared and self.policy.journal:
            send = self.accounts.ledger.tell  # not the guard: a run may be kept after another guard has taken over
            run.journal = Journal(info, lambda text: send(lambda session: session.append(KIND, info.run, text)))
            if run.growth.sizes:
                run.journal.add({"k": "growth", "t": info.at, "of": run.growth.dump(self.policy.cost_baseline_events)})
        self.runs[info.run] = run
        self.sink.tell("run started", run)
        return run

    def end(self, run_id: str) -> None:
        """Forget a run. What it still holds is given back: those calls were abandoned. A fault in one step does not
        prevent the others.
        """
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self.sink.tell("run ended", run)
        self.faults.attempt("end of run", self.accounts.end, run.run_costs)
        if run.journal is not None:
            self.faults.attempt("end of run", run.journal.flush)
        self.faults.attempt("end of run", self.pauses.write_end, run)

    # ---- before and after -------------------------------------------------------------------------------------------

    def check(self, event: Question) -> Decision:
        """Say whether this may happen. After a stop the answer stays no."""
        begin = time.perf_counter() if self._calls_to_time > 0 else 0.0
        run = self.runs[event.run]
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        is_model_call, tool_call = type(event) is ModelCall, event if type(event) is ToolCall else None
        stopped = run.stopped or (lane.stopped if lane.parent is None else lane.stop_in_force())
        if stopped is not None:
            if tool_call is not None:
                self.tool_gate.give_up(run, tool_call)
            return stop_in_force(stopped)
        decision, refusal = ALLOW, _STOP
        if tool_call is not None:
            decision, refusal = self.tool_gate.check(run, lane, tool_call), _BLOCK
        if decision is ALLOW or not (decision.enforced and decision.action >= refusal):
            if run.journal is not None:
                run.journal.saw(event)
            found: Finding | None = None
            every, wakes = lane.by_event.get(type(event), NO_OBSERVERS)
            is_plain = is_model_call or (tool_call is not None and not tool_call.depth)
            for observe in compress(every, wakes) if is_plain else every:
                one = observe(event)
                if one is not None:
                    found = self.deciding.stronger(run, lane, found, one, event)
            if found is not None:
                decision = self.deciding.decide(run, lane, event, found)
                if is_model_call and decision.action is _NUDGE and decision.enforced:
                    lane.notice = decision.for_model
        if decision is not ALLOW and decision.enforced and decision.action >= refusal:
            if tool_call is not None:
                self.tool_gate.give_up(run, tool_call)
        elif is_model_call:
            run.spend.model_calls += 1
        elif tool_call is not None:
            run.spend.tool_calls += 1
        if begin and self.telemetry is not None:
            self._calls_to_time -= 1
            self.telemetry.took(time.perf_counter() - begin)
        return decision

    def after(self, event: Result) -> Decision:
        """Learn from what happened. A nudge, a refused answer or a stop may follow."""
        begin = time.perf_counter() if self._calls_to_time > 0 else 0.0
        run = self.runs.get(event.run)
        if run is None:
            return ALLOW  # reported after the end of its run
        lane = run.lanes.get(event.lane) or run.lanes[ROOT_LANE]
        if type(event) is ToolResults:
            if event.is_understood:
                self._answers.settle_effects(run, event)
            else:
                self._answers.understand(run, lane, event)
            if (event.failures or run.last_failure is not None) and self.sink.at["tools failed"]:
                self.sink.tell("tools failed", run, event)
        found: Finding | None = None
        # a run that is already ending: nothing more to decide
        if run.stopped is None and (lane.stopped if lane.parent is None else lane.stop_in_force()) is None:
            if type(event) is ToolResults:
                is_plain = event.is_plain
            else:
                is_plain = type(event) is ModelResult and not (event.text_id or event.new_subject or event.is_cut)
            every, wakes = lane.by_event.get(type(event), NO_OBSERVERS)
            for observe in compress(every, wakes) if is_plain else every:
                one = observe(event)
                if one is not None:
                    found = self.deciding.stronger(run, lane, found, one, event)
            if run.journal is not None:
                run.journal.saw(event)
        decision = ALLOW if found is None else self.deciding.decide(run, lane, event, found)
        if type(event) is ToolResults:
            for answer in event.answers:
                answer.value = None  # do not keep what tools answered
        if begin and self.telemetry is not None:
            self._calls_to_time -= 1
            self.telemetry.took(time.perf_counter() - begin)
        return decision

    def time_next(self, calls: int) -> None:
        """Report to telemetry how long the next calls of ``check`` and ``after`` take, and time none after them."""
        self._calls_to_time = calls if self.telemetry is not None else 0

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """Begin a lane below ``parent``. ``concurrent``: it runs beside its siblings, so a stop ends it alone.

        ``path``: the agents above it. ``delegate``: the agent that a model has called here.
        """
        return self.lanes.open_lane(run, key, parent, concurrent=concurrent, path=path, delegate=delegate)

    def close_lane(self, run: Run, key: str) -> None:
        """End a lane."""
        self.lanes.close_lane(run, key)

    # ---- tool calls -------------------------------------------------------------------------------------------------

    async def prepare_tool(self, run: Run, tool: str, effect: bytes, call_id: str) -> None:
        """Ask a shared store what other workers did, before ``check`` judges a tool call."""
        await self.tool_gate.prepare_tool(run, tool, effect, call_id)

    async def reserve_tool(
        self, run: Run, event: ToolCall, args: object, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        """Reserve the price of a tool call that ``check`` has allowed. A refusal means: do not execute it."""
        return await self.tool_prices.reserve(run, event, args, no_loop=no_loop, no_wait=no_wait)

    def settle_tool(self, run: Run, call_id: str, args: object, answer: object) -> None:
        """Book the price of a tool that was executed. ``answer``: its result, or the exception that it raised.

        Without this, ``after`` books it when the answer arrives.
        """
        self.tool_prices.settle(run, call_id, args, answer)

    def release_tool(self, run: Run, call_id: str) -> None:
        """Give back the price of a tool that was not executed."""
        self.tool_prices.release(run, call_id)

    def report_failure(self, run: Run, tool: str, call_id: str) -> None:
        """Report a tool that raised or timed out. Its answer goes to ``after`` all the same."""
        self.tool_gate.report_failure(run, tool, call_id)

    # ---- faults of the guard itself ---------------------------------------------------------------------------------

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Count and log an exception of the guard itself. Return a trip where the policy stops the run for it."""
        return self.faults.fault(where, error, run_id, agent)

    def give_up(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Do what ``fault`` does, for a call that is about to be made. Return a reason to refuse the call even where
        the run could not begin.
        """
        return self.faults.give_up(where, error, run_id, agent)

    def fail(self, run_id: str, rule: str, message: str, agent: str = "") -> Trip | None:
        """Stop a run for the guard's own sake: a broken policy, or a fault under ``on_guard_error="block"``."""
        return self.faults.fail(run_id, rule, message, agent)

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
        for warning in prices_per_token(self.policy.prices, self.policy.prices_source):  # limits would allow far more
            _log.warning("runguard.low_price: %s", warning)

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
        """Return what the end user reads after a stop."""
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
            "runs": [each.facts_of(run, now) for each in guards for run in list(each.runs.values())],
            "paused": self.pauses.waiting,
            "budgets": self.accounts.budgets(as_known_here=True),
            "outages": dict(self.accounts.outages),
            "store": ledger.health(),
            "breakers": {tool: breaker.state(ledger.now(now)).value for tool, breaker in self.breakers.items()},
            **self.sink.facts("guard facts"),
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


def this_user() -> str:
    """Return the name of the user of this system."""
    try:
        return off_loop(getpass.getuser)
    except (KeyError, OSError, ImportError):  # a container's user may have no name
        return "unknown"


# ---- What an operator can see and do, the same on a plugin, a guarded model and a guarded function


class Controls:
    """Operator controls; mixin for classes with a ``guard`` attribute."""

    if TYPE_CHECKING:  # no annotation at run time: a pydantic class that this is mixed into would take it for a field
        guard: Guard

    @property
    def trips(self) -> list[Trip]:
        """The last 1,000 trips, oldest first; in shadow mode those that would have been."""
        return list(self.guard.trips)

    def snapshot(self) -> dict[str, Any]:
        """Return what runs now: calls, tokens, prompt growth, breakers. Plain data."""
        return self.guard.snapshot()

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """Return what was spent, in all and per agent, model and tool.

        ``scope``: "run:…", "session:app/user/id", "user:app/user" or "app:…". None: everything.
        """
        return self.guard.accounts.spend(scope)

    def budgets(self, scope: str | None = None) -> list[BudgetStatus]:
        """Return every budget as it stands: spent, reserved and limit apart."""
        return self.guard.accounts.budgets(scope)

    def extend(self, scope: str, *, usd: Any = None, tokens: Any = None, calls: Any = None) -> list[BudgetStatus]:
        """Move the caps of a scope: ``extend("user:docs/alice", usd=5)``.

        What was spent stays spent; the next run goes on.
        """
        return self.guard.accounts.extend(scope, usd, tokens, calls)

    def stop(self, scope: str, *, actor: str | None = None, reason: str | None = None) -> None:
        """Stop a run, session, user, app or "all": ``stop("user:docs/alice", actor="ops", reason="...")``.

        ``actor``: who stops the scope; None: the user of this system. Model calls in flight are ended, new ones and new
        runs are refused until ``resume``; with a shared store, by every worker.
        """
        self.guard.operator_stops.throw(scope, this_user() if actor is None else actor, reason)

    def resume(self, scope: str) -> None:
        """Take a stop back."""
        self.guard.operator_stops.release(scope)

    def stops(self) -> list[Stop]:
        """Return the stops in force."""
        return self.guard.operator_stops.in_force()

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, bounded, until everything handed over has left (facts, callbacks, alerts): for tests and shutdown.

        False when something is left, or when a settlement could never be booked; ``snapshot()["store"]`` says how many.
        """
        return self.guard.flush(seconds)


# ---- The kill switch: an operator stops a scope, and every worker of the store enforces it


class OperatorStops:
    """Changes the stops in the control document of the store, and applies them to the runs of one guard."""

    def __init__(self, context: GuardContext, before: "OperatorStops | None" = None) -> None:
        """``before``: those of a guard that this one replaces. Both change the document one after the other."""
        self._clock, self._runs, self._accounts = context.clock, context.runs, context.accounts
        self._breakers, self._deciding, self._alarms = context.breakers, context.deciding, context.alarms
        self._changing: threading.Lock = threading.Lock() if before is None else before._changing
        context.accounts.switch.on_change.add(self._enforce)

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
        """Return the stops of the store as it is now."""
        self._accounts.ledger.refresh_now()
        return list(self._accounts.switch.stops.values())

    def on_control(self, text: str) -> None:
        """Read the stops and breakers of the store's control document, which has changed."""
        self._accounts.switch.load(text)
        self._breakers.load(json.loads(text or "{}"))

    def _enforce(self) -> None:
        """Apply the changed list of stops. Called from any thread."""
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
