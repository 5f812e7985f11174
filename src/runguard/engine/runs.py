"""The state of running runs and of their lanes, and the rules of each lane.

``engine/guard`` makes a ``Run`` when a run starts and drops it when the run ends. The other files of ``engine``, the
adapters and ``replay`` read and change it. ``LaneKeeper`` opens and closes lanes with the detectors of ``LaneRules``.
"""

import json
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakSet

from runguard.core.breaker import Permit
from runguard.core.decision import HANDOFF_ROUNDS, Action, Finding, RunCounts, Rungs, Trip
from runguard.core.events import ROOT_LANE, RunInfo
from runguard.core.identity import AnswerBook, LruDict, digest
from runguard.core.money import Amount, to_usd, usd_text
from runguard.core.rules.agents import (
    Depth,
    HandOffCycle,
    HandOffRounds,
    ReEntry,
    RepeatedDelegation,
    RepeatedReports,
    TextOnly,
)
from runguard.core.rules.failures import (
    EmptyAnswers,
    EqualAnswers,
    LastingFailures,
    RetryRequests,
    Stall,
    ToolFailures,
    TruncatedCalls,
)
from runguard.core.rules.limits import (
    AGENTS_KEPT,
    CallsPerTool,
    Context,
    Deadline,
    FanOut,
    Growth,
    ModelCalls,
    PromptSizes,
    ResultSize,
    Sizes,
    ToolCalls,
)
from runguard.core.rules.repetition import (
    Cycle,
    NearEqualCalls,
    NoNewAnswers,
    OnlyNotes,
    Polling,
    Repetition,
    Reworded,
    SameAnswers,
    SameCall,
    SameLongAnswer,
)
from runguard.core.rules.rule import Rule
from runguard.engine.charges import OUTAGES, Charge
from runguard.engine.spending import RunCosts
from runguard.engine.waiting import Turns, Waiter, is_finished, waiting_for
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, StoreSession
from runguard.ledger.memory import in_memory
from runguard.policy.settings import (
    CALL_FAILS_ON,
    FREE_RETRIES,
    IDLE,
    LONG_ANSWERS,
    ORDERS,
    REWORDED,
    RULES,
    TOLD_AGAIN,
    TOOL_FAILS_ON,
    TRY_AGAIN,
    WANDERING,
    Policy,
)
from runguard.policy.tools import Tools
from runguard.providers.messages import FRAMEWORK_TOOLS
from runguard.reporting.journal import Journal

if TYPE_CHECKING:
    from runguard.engine.context import GuardContext

# ---- The state of one root run, and of each of its lanes


class Stoppable:
    """A run or a lane that a trip can stop. The only place that writes ``stopped``.

    ``stopped`` is the trip in force, or None. A stop stays until ``lift``.
    """

    __slots__ = ("stopped",)

    def __init__(self) -> None:
        self.stopped: Trip | None = None

    def stop(self, trip: Trip) -> None:
        """Refuse everything from here on."""
        self.stopped = trip

    def lift(self) -> None:
        """Take the stop back, whatever its cause."""
        self.stopped = None

    def is_stopped_by(self, trip: Trip) -> bool:
        return self.stopped is not None and self.stopped.id == trip.id


class Lane(Stoppable):
    """A part of a run in which things happen one after another, with its own detectors and memory."""

    __slots__ = (
        "book",
        "by_event",
        "concurrent",
        "context",
        "cycle_of",
        "delegate",
        "detectors",
        "first_key",
        "is_new",
        "key",
        "notice",
        "offered",
        "parent",
        "path",
        "starting",
        "was_stopped",
        "withheld",
    )

    def __init__(
        self,
        key: str,
        parent: "Lane | None",
        detectors: list[Rule],
        *,
        concurrent: bool,
    ) -> None:
        super().__init__()
        self.key, self.parent, self.concurrent = key, parent, concurrent
        self.path: tuple[str, ...] = ()  # the agents above it
        self.delegate = ""  # the agent that a model has called here, as a tool or for a task; "" for other lanes
        self.first_key = key  # of the lane in which its loop counters began
        # the lane in which its hand-offs began to be counted; None: this one, which must not hold itself
        self.cycle_of: Lane | None = None
        self.use(detectors)
        self.book = AnswerBook()
        self.context: Context | None = None
        for detector in reversed(detectors):  # it is among the last
            if type(detector) is Context:
                self.context = detector
                break
        self.was_stopped = False  # ended by a stop rather than by itself
        self.is_new = True  # no model call yet
        self.starting = 0  # branches below that have begun and not yet been judged: those that start at once
        self.notice = ""  # a nudge that found no tool result to ride on, for the next request
        # for the adapter: tools that its next requests in this lane must leave out, and those that the last one offered
        self.withheld: tuple[str, ...] = ()
        self.offered: Iterable[str] = ()

    def follow_agent(self) -> None:
        """Go on with the loop counters of an earlier call of the same agent that is still open above: the agent
        is called inside of itself.

        Where branches run beside each other in between, only the hand-offs are counted together: calls of one
        branch do not repeat those of another.
        """
        above, shared = self.parent, _LOOP_RULES if not self.concurrent else _HANDOFF_RULES
        while above is not None and above.delegate != self.delegate:
            if above.concurrent:
                shared = _HANDOFF_RULES
            above = above.parent
        if above is None or not self.delegate:
            return
        kept = {type(detector): detector for detector in above.detectors if isinstance(detector, shared)}
        self.use([kept.get(type(detector), detector) for detector in self.detectors])
        self.cycle_of = above.cycle_of or above
        if shared is _LOOP_RULES:
            self.book, self.first_key = above.book, above.first_key

    def others(self, tool: str) -> list[str]:
        """Return the tools that an agent could use instead of this one."""
        out = (tool, *self.withheld)
        return [name for name in self.offered if name and name not in out and name not in FRAMEWORK_TOOLS]

    def follow_chain(self) -> None:
        """Go on with the chain of delegations in which this lane begins."""
        if self.parent is None:
            return
        own, caller = (
            next((detector for detector in lane.detectors if isinstance(detector, ReEntry)), None)
            for lane in (self, self.parent)
        )
        if own is not None and caller is not None:
            own.go_on_from(caller, is_call=bool(self.delegate))

    def use(self, detectors: list[Rule]) -> None:
        self.detectors = detectors
        self.by_event = dispatch(detectors)

    def owner(self, finding: Finding) -> "Lane | None":
        """Return the nearest lane that runs beside others: a stop ends it. Without such a lane a stop ends the run."""
        is_handoff = finding.rule == "handoff" or finding.unit == HANDOFF_ROUNDS
        lane: Lane | None = self.cycle_of or self if is_handoff else self
        while lane is not None and not lane.concurrent:
            lane = lane.parent
        return lane

    def stop_in_force(self) -> Trip | None:
        lane: Lane | None = self
        while lane is not None:
            if lane.stopped is not None:
                return lane.stopped
            lane = lane.parent
        return None


_HANDOFF_RULES: Final[tuple[type, ...]] = (HandOffCycle, HandOffRounds)
_LOOP_RULES: Final[tuple[type, ...]] = (
    *_HANDOFF_RULES,
    RetryRequests,
    TruncatedCalls,
    Cycle,
    EmptyAnswers,
    LastingFailures,
    EqualAnswers,
    NoNewAnswers,
    Polling,
    Repetition,
    SameLongAnswer,
    SameAnswers,
    SameCall,
    Stall,
    ToolFailures,
)


class LastFailure(NamedTuple):
    """The failure in which the tools of a run ended so far. ``is_outage``: the next attempt may well work."""

    name: str
    is_outage: bool


class SetAside(Protocol):
    """What is held for a call that a run has not asked for yet."""

    is_taken: bool  # the call was made, or is being made; in shadow mode: would have been made
    nano: int  # in shadow mode: what it would have cost at most, in nano-USD
    tokens: int

    @property
    def held(self) -> Amount:
        """The amounts that ordinary calls may not spend."""


class Run(Stoppable):
    """Everything known about one running root run."""

    __slots__ = (
        "bills",
        "books",
        "claimed_elsewhere",
        "cut_off",
        "deadline",
        "detectors",
        "growth",
        "in_flight",
        "info",
        "is_forked",
        "journal",
        "lanes",
        "last_failure",
        "memo",
        "model_calls",
        "noted",
        "notes",
        "nudges",
        "owners",
        "paused_at",
        "pauses",
        "pending_once",
        "permits",
        "pid",
        "reads_cache",
        "refused_at_border",
        "refusing",
        "retired",
        "run_costs",
        "set_aside",
        "slots",
        "spend",
        "started",
        "tools_refused",
        "trips",
        "unchecked_once",
        "unsure",
        "visits",
        "waiting",
        "written",
    )

    def __init__(
        self, info: RunInfo, policy: Policy, tools: Tools, run_costs: RunCosts, growth: "SessionGrowth"
    ) -> None:
        super().__init__()
        self.info, self.run_costs, self.growth, self.pid = info, run_costs, growth, os.getpid()
        self.journal: Journal | None = None  # kept where a store is
        self.started = info.at
        self.paused_at = info.at
        self.pauses = 0  # so many times
        self.written: Future[None] | None = None  # the record of its last pause
        self.memo: Any = None  # what the adapter needs to go on after a pause
        self.owners: WeakSet[object] = WeakSet()  # who works on it, where the last one to finish ends it
        self.is_forked = False  # it was resumed twice at once, so that its turn may go on although one has ended
        self.unsure = False  # it was resumed, and what it had used before could not be read
        self.spend = RunCounts()
        self.in_flight: set[Callable[[], None]] = set()  # how to end each call that is at a model now
        self.refusing = False  # a refusal at the border is on its way: others beside it are the same round
        self.refused_at_border = (0, 0)  # times since the last model call that was made, and which one that was
        self.waiting = 0  # of the model calls counted, those that wait for a place or for money
        self.visits: dict[Waiter, None] = {}  # its calls that wait for room in a budget, or for a provider
        self.bills: dict[str, Bill] = {}  # of tools that have a price and have not answered yet, by the id of the call
        self.tools_refused: dict[str, str] = {}  # tool -> the response in which a budget refused its price first
        self.last_failure: LastFailure | None = None  # while nothing has gone on since
        self.notes: dict[str, Any] = {}  # what features know about it, by their names
        self.set_aside: SetAside | None = None  # what a feature holds for a later call
        self.reads_cache = False  # a model has read from a prompt cache for it
        self.lanes: dict[str, Lane] = {}
        self.retired: OrderedDict[str, list[Rule]] = OrderedDict()  # failure streaks of ended child lanes, by name
        self.books: OrderedDict[str, AnswerBook] = OrderedDict()  # answers of ended child lanes, by name
        self.slots = Turns(policy.in_flight, is_finished)  # of tasks, one for each model call in flight
        self.trips: deque[Trip] = deque(maxlen=100)
        self.noted: OrderedDict[tuple[str, str, str, Action], None] = OrderedDict()
        self.nudges = 0
        self.permits: dict[str, tuple[str, Permit]] = {}
        limit = policy.max_model_calls or info.model_call_limit
        self.model_calls = ModelCalls(limit) if limit else None
        # lanes that were stopped, by name: called again they stay stopped
        self.cut_off: OrderedDict[str, Trip | None] = OrderedDict()
        self.claimed_elsewhere: set[bytes] = set()  # side effects that another worker has done or is doing
        # side effects that could not be claimed, because the store did not answer
        self.unchecked_once: set[bytes] = set()
        # side effects on their way, and by which call: an equal call of the same response must not run too
        self.pending_once: dict[bytes, str] = {}
        self.deadline = Deadline(policy.max_seconds, info.at) if policy.max_seconds else None
        whole: list[Rule | None] = [
            self.model_calls,
            ToolCalls(policy.max_tool_calls) if policy.max_tool_calls else None,
            CallsPerTool(tools.max_calls, tools.limited),
            Depth(policy.max_delegation_depth) if policy.max_delegation_depth else None,
            FanOut(policy.fan_out) if policy.fan_out else None,
            self.deadline,
        ]
        self.detectors = [d for d in whole if d is not None]

    def lane(self, key: str) -> Lane:
        """Return the lane of this name, or the root lane when it is not open."""
        return self.lanes.get(key) or self.lanes[ROOT_LANE]

    def go_on(self, at: float) -> None:
        """Resume the run. The time since its pause does not count."""
        idle = max(at - self.paused_at, 0.0)
        self.started += idle
        every = [*self.detectors, *(detector for lane in self.lanes.values() for detector in lane.detectors)]
        # lanes share those of the run
        for detector in {id(one): one for one in every if isinstance(one, Deadline | Polling)}.values():
            detector.skip(idle)

    def stops_in_force(self) -> list[Trip]:
        """Return the stops of the run and of its lanes, each once."""
        found = [self.stopped, *(lane.stopped for lane in self.lanes.values()), *self.cut_off.values()]
        return list({trip.id: trip for trip in found if trip is not None}.values())

    def lift_stop(self, trip: Trip) -> None:
        """Take one stop back: of the run, or of the lanes that it ended."""
        if self.is_stopped_by(trip):
            self.lift()
        for lane in self.lanes.values():
            if lane.is_stopped_by(trip):
                lane.lift()
                lane.was_stopped = False
        for name in [name for name, stop in self.cut_off.items() if stop is not None and stop.id == trip.id]:
            self.cut_off[name] = None

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return counts, money and growth as plain data."""
        growth: dict[str, float] = {}
        for lane in list(self.lanes.values()):
            for detector in lane.detectors:
                if isinstance(detector, Growth):
                    for agent, ratio in detector.ratios().items():
                        growth[f"{lane.key}/{agent}" if lane.key else agent] = ratio
        return {
            "run": self.info.run,
            "app": self.info.app,
            "user": self.info.user,
            "session": self.info.session,
            "seconds": round(now - self.started, 3),
            "model_calls": self.spend.model_calls,
            "tool_calls": self.spend.tool_calls,
            "prompt_tokens": self.spend.prompt_tokens,
            "output_tokens": self.spend.output_tokens,
            "spent_usd": self.run_costs.spent_usd,
            "reserved_usd": to_usd(self.run_costs.reserved),
            "unpriced_calls": self.run_costs.unpriced,
            "estimated_calls": self.run_costs.estimated,
            "tools_usd": {tool: to_usd(nano) for tool, nano in self.run_costs.tool_costs().items()},
            "in_flight": self.slots.busy(),
            "waiting": waiting_for(self.visits),
            "growth": growth,
            "nudges": self.nudges,
            "stopped": self.stopped.rule if self.stopped else None,
        }

    @property
    def spent_text(self) -> str:
        """Dollars so far, for the operator; nothing where nothing is known."""
        run_costs = self.run_costs
        if run_costs.spent_usd is None:
            return ""
        unpriced = f" and {run_costs.unpriced} calls without a price" if run_costs.unpriced else ""
        return f", {'about ' if run_costs.estimated else ''}{usd_text(run_costs.nano)}{unpriced}"


def retired_name(key: str) -> str:
    """Return a lane's name without the ids of the calls that opened it: the agent's next call has the same name."""
    return "/".join(part.split("@", 1)[0] for part in key.split("/"))


# Stops that say nothing about the input: it was refused itself, or somebody or something else was the cause.
_OTHER_CAUSES: Final = frozenset(
    {"resubmission", "breaker", "kill_switch", "guard_error", "policy_error", "unpriced", "remote_stop"}
)


def blames_input(trip: Trip) -> bool:
    """Return whether a stop says something about the input of its run: nobody and nothing else was the cause."""
    is_shared_budget = trip.rule == "budget" and trip.scope != "run"
    return not (trip.rule in _OTHER_CAUSES or trip.unit == OUTAGES or is_shared_budget)


def input_name(info: RunInfo) -> str:
    """Return the name of one input of a user and app: one user's documents refuse nobody else's."""
    return digest(json.dumps([info.app, info.user, info.input.hex()])).hex()


# ---- The tool calls of a run that have a price


@dataclass(slots=True)
class Bill:
    """A tool call that is being paid: what is held for it, and the price of the rule it began under."""

    charge: Charge
    tool: str
    price: Any
    bound: int  # nano-USD


# ---- The detectors of one lane, as a policy sets them


def lane_rungs_of(policy: Policy) -> dict[str, Rungs]:
    """Return the rungs of the rules that look at one lane, without rules that have none."""
    names = (
        "repetition",
        "no_news",
        "same_call",
        "cycle",
        "stall",
        "tool_failures",
        "empty",
        "handoff",
        "talk",
        "growth",
        "polling",
        "context",
    )
    return {name: rungs for name in names if (rungs := policy.rungs(name)) is not None and rungs != Rungs()}


class LaneRules:
    """Which detectors a lane has under one policy. Nothing about the policy is asked again when a lane begins.

    ``rungs``: other rungs than those of the policy.
    """

    def __init__(self, policy: Policy, rungs: Mapping[str, Rungs] | None = None) -> None:
        rungs = lane_rungs_of(policy) if rungs is None else rungs
        # limits that the user sets hold for answers of any length
        self.watches_orders = policy.rungs("no_news") == RULES["no_news"][0]
        self.counts_reentries = policy.max_reentries is not None
        self._at_top = _makers(policy, rungs, is_nested=False)
        self._nested = _makers(policy, rungs, is_nested=True)
        self._growth, self._events = rungs.get("growth"), policy.cost_baseline_events
        self._polling = rungs.get("polling")
        self._last: list[Callable[[], Rule]] = []
        if "context" in rungs:
            self._last.append(partial(Context, rungs["context"].warn))
        if policy.max_tool_result_chars:
            self._last.append(partial(ResultSize, policy.max_tool_result_chars))

    def detectors(self, is_polling: Callable[[str], bool], known: Sizes | None = None, place: str = "") -> list[Rule]:
        """Return one detector of each rule in force.

        ``known``: the prompt sizes of the session. ``place``: the name of the lane in them.
        """
        made = [make() for make in (self._nested if "@" in place else self._at_top)]
        if self._growth is not None:
            made.append(Growth(self._growth, self._events, known, place))
        if self._polling is not None:
            made.append(Polling(self._polling, is_polling))
        for make in self._last:
            made.append(make())  # noqa: PERF401 - a lane begins often, and most have one of them
        return made


def _makers(policy: Policy, rungs: Mapping[str, Rungs], *, is_nested: bool) -> list[Callable[[], Rule]]:
    """Return what makes the detectors that need to know nothing of their lane but whether a call opened it."""
    made: list[Callable[[], Rule]] = []
    if "repetition" in rungs:
        made.append(partial(Repetition, rungs["repetition"]))
    if "stall" in rungs:
        if rungs["stall"].nudge is not None:
            made.append(TruncatedCalls)
        made.append(partial(Stall, rungs["stall"], 0 if policy.is_explicit("stall") else FREE_RETRIES))
        made.append(partial(RetryRequests, _try_again_rungs(rungs["stall"])))
        if replace(rungs["stall"], withhold=None) == RULES["stall"][0]:
            made.append(partial(LastingFailures, CALL_FAILS_ON, TOOL_FAILS_ON))
    if policy.max_identical_tool_results is not None:
        limit = policy.max_identical_tool_results
        counts = "stall" in rungs and rungs["stall"].stop == limit  # rules={"stall": ...} has its own limit of failures
        made.append(partial(EqualAnswers, limit, counts_failures=counts))
    if "tool_failures" in rungs:
        made.append(partial(ToolFailures, rungs["tool_failures"]))
    if "no_news" in rungs:
        made.append(partial(NoNewAnswers, rungs["no_news"], patient=not policy.is_explicit("no_news")))
        if rungs["no_news"] == RULES["no_news"][0]:  # limits that the user sets hold for answers of any length
            made += [partial(SameLongAnswer, LONG_ANSWERS), partial(Reworded, REWORDED)]
            made += [SameAnswers, OnlyNotes, NearEqualCalls]
    if "same_call" in rungs:
        made.append(
            partial(
                SameCall,
                rungs["same_call"],
                look_from=None if in_memory(policy.store) else 2,
                wandering=WANDERING if rungs["same_call"] == RULES["same_call"][0] else None,
            )
        )
    if "empty" in rungs:
        made.append(partial(EmptyAnswers, rungs["empty"]))
    if "cycle" in rungs:
        made.append(partial(Cycle, rungs["cycle"], policy.max_cycle_len or 4))
        made.append(partial(HandOffRounds, rungs["cycle"], policy.max_cycle_len or 4))
    if "handoff" in rungs:
        # a delegate that hands its work back is called inside of itself: that goes deeper each time
        patient = not is_nested and not policy.is_explicit("handoff")
        patient = patient and rungs.get("no_news") == RULES["no_news"][0]
        made.append(partial(HandOffCycle, rungs["handoff"], patient=patient))
    if "talk" in rungs:
        after_work = IDLE if rungs["talk"] == RULES["talk"][0] else None
        made.append(partial(TextOnly, rungs["talk"], patient=not policy.is_explicit("talk"), after_work=after_work))
    if policy.max_reentries is not None:
        made.append(partial(ReEntry, policy.max_reentries))
    return made


def _try_again_rungs(stall: Rungs) -> Rungs:
    """Higher limits of ``stall`` also raise the limits of answers that ask to try again."""
    nudge = max(TRY_AGAIN.nudge or 0, stall.nudge or 0)
    return Rungs(nudge=nudge, stop=None if stall.stop is None else max(TRY_AGAIN.stop or 0, stall.stop))


# ---- The lanes of a run, opened and closed: parallel branches, and agents that a model has called

_LANES_KEPT: Final = 4_096  # open at once in one run
_NAMES_KEPT: Final = 256  # of closed lanes
_BOOKS_KEPT: Final = 16  # of closed lanes


class LaneKeeper:
    """Keeps the lanes of every run of one guard."""

    def __init__(self, context: "GuardContext", rules: LaneRules) -> None:
        self.rules, self._tools, self._last_runs = rules, context.tools, LastRuns()
        context.sink.on("run paused", "pause", lambda run, waits: self._last_runs.note(run))
        context.sink.on("run ended", "end of run", self._last_runs.note)

    def open_root(self, run: Run) -> Lane:
        """Open the lane in which a run begins."""
        if self.rules.watches_orders:  # agents that are set to work again and again
            run.detectors += [RepeatedDelegation(ORDERS), RepeatedReports(TOLD_AGAIN)]
        run.lanes[ROOT_LANE] = root = self._new(run, ROOT_LANE, None, concurrent=False, path=())
        self._last_runs.go_on(run)
        return root

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """Begin a lane: a parallel branch, or the agent ``delegate`` that a model has called.

        ``concurrent``: it runs beside its siblings, so a stop ends it alone. The failures of the last lane of this
        name carry on, and so does its stop. Its answers keep their names, but all of them are news again.
        """
        above = run.lane(parent)
        lane = self._new(run, key, above, concurrent=concurrent, path=path, delegate=delegate)
        name = retired_name(key)
        if (earlier := run.cut_off.get(name)) is not None:
            lane.stop(earlier)
        if (inherited := run.retired.get(name)) is not None:
            lane.use([*inherited, *(d for d in lane.detectors if type(d) not in {type(i) for i in inherited})])
        if not concurrent and (book := run.books.pop(name, None)) is not None:
            book.forget_pairs()
            lane.book = book
        if delegate:
            lane.follow_agent()
        if self.rules.counts_reentries:
            lane.follow_chain()
        if len(run.lanes) >= _LANES_KEPT:  # a run that opens so many has ended most of them without closing them
            self.close_lane(run, next(k for k in run.lanes if k != ROOT_LANE))
        run.lanes[key] = lane
        if run.journal is not None:
            called = {"agent": delegate} if delegate else {}
            run.journal.add({"k": "lane", "l": key, "of": above.key, "concurrent": concurrent, "path": path, **called})
        return lane

    def close_lane(self, run: Run, key: str) -> None:
        """End a lane. Its memory goes; its failure streaks stay for the next lane of the same name."""
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
        if len(run.cut_off) > _NAMES_KEPT:
            run.cut_off.popitem(last=False)
        if lane.concurrent:
            return
        run.books[name] = lane.book
        if len(run.books) > _BOOKS_KEPT:
            run.books.popitem(last=False)
        run.retired[name] = [d for d in lane.detectors if isinstance(d, Stall | EqualAnswers)]
        if len(run.retired) > _NAMES_KEPT:
            run.retired.popitem(last=False)

    def _new(
        self, run: Run, key: str, parent: Lane | None, *, concurrent: bool, path: tuple[str, ...], delegate: str = ""
    ) -> Lane:
        # lanes of calls and of nested runners are named by numbers: the session's next run will not have them again
        is_lasting = "@" not in key and not key.partition("/")[0].isdigit()
        known = run.growth.sizes if is_lasting else None
        own = self.rules.detectors(self._tools.is_polling, known, key)
        made = run.detectors + own  # those of the whole run first, shared by all its lanes
        lane = Lane(key, parent, made, concurrent=concurrent)
        lane.path, lane.delegate = path, delegate
        return lane


# ---- Which detectors of a lane are called for an event

Observe = Callable[[Any], Finding | None]


class Observers(NamedTuple):
    """The detectors that see one kind of event, in their order."""

    every: Sequence[Observe] = ()
    # For each of them, what a plain event finds true or empty: the record of one that rests while it is empty.
    wakes: Sequence[object] = ()


NO_OBSERVERS: Final = Observers()


def dispatch(detectors: Sequence[Rule]) -> dict[type, Observers]:
    """Return, by kind of event, the detectors that see it."""
    found: dict[type, tuple[list[Observe], list[object]]] = {}
    for detector in detectors:
        for event in detector.sees:
            every, wakes = found.setdefault(event, ([], []))
            every.append(detector.observe)
            wakes.append(detector.record if event in detector.rests else True)
    return {event: Observers(tuple(every), tuple(wakes)) for event, (every, wakes) in found.items()}


# ---- Runs that a program starts one after another: a loop goes on where the last run has left it

_SESSIONS_CARRIED: Final = 64  # each with the answers of its last run
_MESSAGE_READ: Final = 2_048
_WORDS: Final = re.compile(r"[^\W\d_]+")
_NEAR: Final = 0.8  # share of the words of both messages
_TOO_LONG_TO_REPEAT: Final = 12  # words that nobody types twice
_GO_ON: Final = re.compile(r"\b(?:continue|proceed|go on|keep going|carry on|next step)\b", re.IGNORECASE)
_POLITE: Final = frozenset({"please"})
_BRIEF: Final = 80  # characters
_CARRIED: Final[tuple[type, ...]] = (*_LOOP_RULES, NearEqualCalls, OnlyNotes, Reworded, TextOnly)


class _LastRun(NamedTuple):
    """What the next run of a session may go on with."""

    words: frozenset[str]  # of the message that began it
    detectors: dict[type, Rule]
    book: AnswerBook | None
    noted: OrderedDict[tuple[str, str, str, Action], None]
    nudges: int


class LastRuns:
    """The last run of each session that was used lately. A message of a person starts every count anew; one that a
    program wrote does not. Safe to use from many threads.

    A message is a program's when the app says so, or when it nearly repeats the one before and either tells the agent
    to go on or is longer than what a person types twice. Of other runs only the words of their message are kept.
    """

    def __init__(self) -> None:
        self._last = LruDict[tuple[str, str, str], _LastRun](_SESSIONS_CARRIED)
        self._lock = threading.Lock()

    def note(self, run: Run) -> None:
        """Remember an ended run. Its counts are kept only where the next message may be a program's."""
        info = run.info
        if not info.session or ROOT_LANE not in run.lanes:
            return
        words, lane = _words_of(info.message), run.lanes[ROOT_LANE]
        last = _LastRun(words, {}, None, run.noted, run.nudges)
        if info.is_automatic or _GO_ON.search(info.message[:_MESSAGE_READ]) is not None:
            kept = {type(one): one for one in lane.detectors if isinstance(one, _CARRIED)}
            last = last._replace(detectors=kept, book=lane.book)
        with self._lock:
            self._last[info.app, info.user, info.session] = last
            self._last.move_to_end((info.app, info.user, info.session))

    def go_on(self, run: Run) -> None:
        """Give a new run the counts of the last one, if no person has started it."""
        info = run.info
        with self._lock:
            last = self._last.pop((info.app, info.user, info.session), None) if info.session else None
        if last is None:
            return
        info.is_automatic = info.is_automatic or _is_sent_again(info.message, last.words)
        if info.is_automatic and last.book is not None:
            lane = run.lanes[ROOT_LANE]
            lane.use([last.detectors.get(type(one), one) for one in lane.detectors])
            lane.book, run.noted, run.nudges = last.book, last.noted, last.nudges


def _words_of(message: str) -> frozenset[str]:
    """Return the words of a message. In a brief one "go on", "keep going" and "please proceed" are the same."""
    said = message[:_MESSAGE_READ].lower()
    if len(said) <= _BRIEF:
        said = _GO_ON.sub("continue", said)
    return frozenset(_WORDS.findall(said)) - _POLITE


def _is_sent_again(message: str, before: frozenset[str]) -> bool:
    words = _words_of(message)
    if not words or len(words & before) < _NEAR * len(words | before):
        return False
    return len(words) >= _TOO_LONG_TO_REPEAT or _GO_ON.search(message[:_MESSAGE_READ]) is not None


# ---- How large the prompts of each session are, kept from one run to the next

_RECORDS: Final = "growth"  # their kind in the store
SESSIONS_KEPT: Final = 1_024
_VERSION: Final = 1
_NUMBERS_KEPT: Final = 4_096  # in one record


class SessionGrowth:
    """The prompts of one session, by agent."""

    __slots__ = ("recorded", "sizes", "warned")

    def __init__(self) -> None:
        self.sizes: Sizes = LruDict(AGENTS_KEPT)
        self.warned = False  # the growth warning was given
        self.recorded = ""  # what the store has

    def dump(self, events: int) -> dict[str, Any]:
        """Return plain data. The agents that were used last are kept."""
        agents = [[place, agent, *sizes.dump()] for (place, agent), sizes in list(self.sizes.items())]
        return {
            "v": _VERSION,
            "events": events,
            "warned": self.warned,
            "agents": agents[-max(_NUMBERS_KEPT // events, 1) :],
        }

    def learn(self, record: Any, events: int) -> None:
        """Take over what a record knows better than we do.

        One that cannot be read, or counts otherwise, says nothing.
        """
        try:
            if record["v"] != _VERSION or record["events"] != events:
                return
            known = {
                (str(place), str(agent)): PromptSizes.load(events, *sizes) for place, agent, *sizes in record["agents"]
            }
            self.warned = self.warned or record["warned"] is True
        except (KeyError, TypeError, ValueError):
            return
        for key, sizes in known.items():
            mine = self.sizes.get(key)
            if mine is None or mine.seen < sizes.seen:
                self.sizes[key] = sizes


class SessionGrowths:
    """The sessions of one guard that were used last. Safe to use from many threads.

    A user's new message does not make the history smaller, so a run goes on with the prompt sizes of its session. With
    a shared store, every run adds a record of its session when it ends, and reads the last record when it begins, so
    that another worker goes on from there. Where the store does not answer, a run goes on with what this process knows.
    """

    def __init__(self, policy: Policy, ledger: Ledger) -> None:
        rungs = policy.rungs("growth") or Rungs()
        self._ledger, self._events, self._stops = ledger, policy.cost_baseline_events, rungs.stop is not None
        self._is_shared = ledger.is_shared and rungs != Rungs() and policy.mode != "off"
        self._sessions = LruDict[tuple[str, str, str], SessionGrowth](SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "SessionGrowths") -> None:
        """Know what another guard knows, unless it counts over another number of prompts."""
        if self._events == other._events:
            self._sessions, self._lock = other._sessions, other._lock

    def of(self, info: RunInfo) -> SessionGrowth:
        """Return the session of a run. A run without a session is a session of its own."""
        if not info.session:
            return SessionGrowth()
        key = (info.app, info.user, info.session)
        with self._lock:
            found = self._sessions.get(key)
            if found is None:
                found = self._sessions[key] = SessionGrowth()
            else:
                self._sessions.move_to_end(key)
        return found

    async def recall(self, info: RunInfo) -> None:
        """Read what other workers know of the session of a run that is about to begin. Wait for the store only where
        growth can stop the run.
        """
        if not self._is_shared or not info.session:
            return
        session, name, events = self.of(info), _session_name(info), self._events

        def read(store: StoreSession) -> None:
            for _, text in store.about(_RECORDS, name, last=1):
                session.recorded = text
                session.learn(_parsed(text), events)

        if not self._stops:
            self._ledger.tell(read)
            return
        try:
            await self._ledger.ask(read, again=True)
        except (StoreOutage, StoreError):
            return  # the accounts report an outage

    def record(self, info: RunInfo, session: SessionGrowth) -> None:
        """Hand what is known of the session of an ended run to the store."""
        if not self._is_shared or not info.session or not (session.sizes or session.recorded):
            return
        text, name = json.dumps(session.dump(self._events)), _session_name(info)
        if text != session.recorded:
            session.recorded = text
            self._ledger.tell(lambda store: store.append(_RECORDS, name, text))

    def forget(self, info: RunInfo) -> None:
        """Start anew with this session."""
        session = self.of(info)
        session.sizes.clear()
        session.warned = False
        self.record(info, session)


def _session_name(info: RunInfo) -> str:
    return json.dumps([info.app, info.user, info.session])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
