"""The state of one running root run, and of each of its lanes. The guard drops it when the run ends."""

import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from runguard.accounting.charges import RunCosts
from runguard.accounting.waiting_calls import Waiter, waiting_for
from runguard.conductor.dispatch import dispatch
from runguard.conductor.session_growth import SessionGrowth
from runguard.conductor.slots import Slots
from runguard.conductor.stopping import Stoppable
from runguard.conductor.tool_bills import ToolBills
from runguard.core.breaker import Permit
from runguard.core.decision import HANDOFF_ROUNDS, Action, Finding, RunCounts, Trip
from runguard.core.events import ROOT_LANE, RunInfo
from runguard.core.identity import AnswerBook
from runguard.core.money import to_usd, usd_text
from runguard.core.rules.agents import Depth, HandOffCycle, HandOffRounds, Orders, ToldAgain
from runguard.core.rules.failures import AskedAgain, CutOff, EmptyAnswers, Stall, ToolFailures
from runguard.core.rules.limits import CallsPerTool, Context, Deadline, FanOut, Growth, ModelCalls, ToolCalls
from runguard.core.rules.repetition import (
    Cycle,
    Detector,
    NoNews,
    Polling,
    Repetition,
    Rereading,
    SameAnswers,
    SameCall,
    SamePair,
)
from runguard.outlets.journal import Journal
from runguard.policy.rule_defaults import ORDERS, TOLD_AGAIN
from runguard.policy.settings import Policy
from runguard.policy.tools import Tools


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
        "parent",
        "path",
        "starting",
        "was_stopped",
    )

    def __init__(
        self,
        key: str,
        parent: "Lane | None",
        detectors: list[Detector],
        *,
        concurrent: bool,
        path: tuple[str, ...] = (),
        delegate: str = "",
    ) -> None:
        """``delegate``: the agent that a model has called here, as a tool or for a task; "" for other lanes."""
        super().__init__()
        self.key, self.parent, self.concurrent, self.path, self.delegate = key, parent, concurrent, path, delegate
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

    def use(self, detectors: list[Detector]) -> None:
        self.detectors = detectors
        self.by_event = dispatch(detectors)

    def owner(self, finding: Finding) -> "Lane | None":
        """The nearest lane that runs beside others: a stop ends it. Without such a lane a stop ends the run."""
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
    AskedAgain,
    CutOff,
    Cycle,
    EmptyAnswers,
    NoNews,
    Polling,
    Repetition,
    Rereading,
    SameAnswers,
    SamePair,
    SameCall,
    Stall,
    ToolFailures,
)


class Run(Stoppable):
    """Everything known about one running root run."""

    __slots__ = (
        "bills",
        "books",
        "caches",
        "claimed_elsewhere",
        "closing",
        "cut_off",
        "deadline",
        "detectors",
        "growth",
        "in_flight",
        "info",
        "journal",
        "lanes",
        "memo",
        "model_calls",
        "noted",
        "nudges",
        "paused_at",
        "pauses",
        "pending_once",
        "permits",
        "pid",
        "refused_at_border",
        "refusing",
        "retired",
        "run_costs",
        "skipped_waits_s",
        "slots",
        "spend",
        "started",
        "switched",
        "trips",
        "unchecked_once",
        "unsure",
        "visits",
        "waiting",
        "written",
    )

    def __init__(
        self,
        info: RunInfo,
        policy: Policy,
        tools: Tools,
        run_costs: RunCosts,
        growth: SessionGrowth,
        *,
        watches_orders: bool,
    ) -> None:
        """``watches_orders``: also look for agents that are set to work again and again."""
        super().__init__()
        self.info, self.run_costs, self.growth, self.pid = info, run_costs, growth, os.getpid()
        self.journal: Journal | None = None  # kept where a store is
        self.started = info.at
        self.paused_at = info.at
        self.pauses = 0  # so many times
        self.written: Future[None] | None = None  # the record of its last pause
        self.memo: Any = None  # what the adapter needs to go on after a pause
        self.unsure = False  # it was resumed, and what it had used before could not be read
        self.spend = RunCounts()
        self.in_flight: set[Callable[[], None]] = set()  # how to end each call that is at a model now
        self.refusing = False  # a refusal at the border is on its way: others beside it are the same round
        self.refused_at_border = (0, 0)  # times since the last model call that was made, and which one that was
        self.waiting = 0  # of the model calls counted, those that wait for a place or for money
        self.visits: dict[Waiter, None] = {}  # its calls that wait for room in a budget, or for a provider
        self.skipped_waits_s = 0.0  # in shadow mode: how long its calls would have waited
        self.bills: ToolBills | None = None  # of tools that have a price
        self.closing: Any = None  # the ``Closing`` of a run that gives a last answer
        self.switched: Any = None  # the ``SwitchedModel`` of each lane and agent that has another model than its own
        self.caches: Any = None  # its ``PromptCaches``, once a model has reported cached tokens
        self.lanes: dict[str, Lane] = {}
        self.retired: OrderedDict[str, list[Detector]] = OrderedDict()  # failure streaks of ended child lanes, by name
        self.books: OrderedDict[str, AnswerBook] = OrderedDict()  # answers of ended child lanes, by name
        self.slots = Slots(policy.in_flight)
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
        # and by which call; side effects on their way: an equal call of the same response must not run too
        self.pending_once: dict[bytes, str] = {}
        self.deadline = Deadline(policy.max_seconds, info.at) if policy.max_seconds else None
        whole: list[Detector | None] = [
            self.model_calls,
            ToolCalls(policy.max_tool_calls) if policy.max_tool_calls else None,
            CallsPerTool(tools.max_calls, tools.limited),
            Depth(policy.max_delegation_depth) if policy.max_delegation_depth else None,
            FanOut(policy.fan_out) if policy.fan_out else None,
            self.deadline,
            *((Orders(ORDERS), ToldAgain(TOLD_AGAIN)) if watches_orders else ()),
        ]
        self.detectors = [d for d in whole if d is not None]

    def lane(self, key: str) -> Lane:
        """The lane of this name, or the root lane when it is not open."""
        return self.lanes.get(key) or self.lanes[ROOT_LANE]

    def go_on(self, at: float) -> None:
        """The run is resumed. The time since its pause does not count."""
        idle = max(at - self.paused_at, 0.0)
        self.started += idle
        every = [*self.detectors, *(detector for lane in self.lanes.values() for detector in lane.detectors)]
        # lanes share those of the run
        for detector in {id(one): one for one in every if isinstance(one, Deadline | Polling)}.values():
            detector.skip(idle)

    def stops_in_force(self) -> list[Trip]:
        """The stops of the run and of its lanes, each once."""
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
        """Counts, money and growth as plain data."""
        growth: dict[str, float] = {}
        for lane in list(self.lanes.values()):
            for detector in lane.detectors:
                if isinstance(detector, Growth):
                    for agent, ratio in detector.ratios().items():
                        growth[f"{lane.key}/{agent}" if lane.key else agent] = ratio
        switched = {
            agent: {"from": one.asked, "to": one.model, "because": one.because}
            for (_, agent), one in list((self.switched or {}).items())
        }
        return {
            **({"switched": switched} if switched else {}),
            **({"prompt_cache": self.caches.warning} if self.caches is not None and self.caches.warning else {}),
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
    """A lane's name without the ids of the calls that opened it: the next call of the same agent has the same name."""
    return "/".join(part.split("@", 1)[0] for part in key.split("/"))


def is_lasting(key: str) -> bool:
    """Whether the next run of the session will have this lane again.

    Lanes of calls and of nested runners are named by numbers.
    """
    return "@" not in key and not key.partition("/")[0].isdigit()


def parallel_part(branch: str) -> str:
    """What parallel agents have added at the end of a branch's name: names without a number or the id of a call."""
    parts = branch.split(".")
    named = len(parts)
    while named and "@" not in parts[named - 1]:
        named -= 1
    return ".".join(parts[named:])
