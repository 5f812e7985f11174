"""Recorded steps -> the events that a live run makes -> the same ``Guard``, in shadow mode.

``output``, ``calibrate`` and ``gate`` call it. Open loop: the decisions of the guard change nothing of what follows in
the recording. Each recorded run meets a guard of its own, so budgets of a run and of its session are replayed. What
runs share with others (budgets of users and apps, breakers) is not.
"""

import gc
import logging
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final

from runguard.core.decision import Action, Finding
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
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.engine.calls import surplus
from runguard.engine.charges import finding_of
from runguard.engine.guard import Guard, Question, Result
from runguard.engine.runs import LaneRules, Run
from runguard.policy.settings import Policy, reserved_for
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Unpriced, Usage
from runguard.providers.a2a import UNREPORTED, total_of
from runguard.providers.messages import FRAMEWORK_TOOLS, is_framework_tool
from runguard.replay import steps
from runguard.replay.results import ReplayedPrices, ReplayedSwitches, RunResult, Stops, Verdicts, Waited, drive_now
from runguard.replay.sources import Piece, Source
from runguard.replay.steps import Faults, RecordedRun, UnreadableError
from runguard.reporting.alerts import AlertSettings
from runguard.reporting.journal import Entry, read_event, read_usage
from runguard.termination.conditions import EventLanes, UnansweredCall

# ---- every run of the sources under every policy, in one process or in several

_AHEAD: Final = 3  # pieces per process that wait or are done on
_COLLECT_EVERY: Final = (5_000, 10, 10)  # rarer ones meet memory that has left the caches
_FEW: Final = 2  # for this number of pieces a process does not pay
Task = Callable[[RecordedRun], Any]
_task: list[Task] = []


@dataclass(slots=True)
class PieceResult:
    """The results of one piece of a source, one per run."""

    results: list[Any]
    faults: Faults
    size: int


@dataclass(slots=True)
class Batch(PieceResult):
    """The results of one piece of a source: for each run, one result per policy."""

    results: list[list[RunResult]]


def each_run(
    sources: Iterable[Source], task: Callable[..., Task], given: tuple[Any, ...], workers: int, model: str
) -> Iterator[PieceResult]:
    """Create ``task(*given)`` once per process and call it with every recorded run; yield the results in order."""
    pieces: Iterator[Piece] = (piece for source in sources for piece in source.pieces())
    first = list(islice(pieces, _FEW + 1))
    pieces = chain(first, pieces)
    if workers == 1 or len(first) <= _FEW:
        call = task(*given)
        for piece in pieces:
            yield _work(piece, call, model)
        return
    # Spawn instead of fork: the thread of a progress bar may hold locks that a fork would copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare, initargs=(task, given)) as pool:
        waiting: deque[Future[PieceResult]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_in_process, piece, model))
                if len(waiting) >= workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cycles less often: a parsed run consists of many short-lived objects."""
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _work(piece: Piece, call: Task, model: str) -> PieceResult:
    done = PieceResult([], Faults(), piece.size)
    with quiet(), _rare_collections():
        try:
            for run in piece.runs(done.faults, model):
                try:
                    done.results.append(call(run))
                except UnreadableError as error:
                    done.faults.add(run.id, str(error))
                except Exception as error:  # one unforeseen record must not end the replay of the others
                    done.faults.add(run.id, f"cannot be replayed: {type(error).__name__}: {error}")
        except Exception as error:  # a damaged file, a connection that broke
            done.faults.add("a part of the source", f"cannot be read to its end: {type(error).__name__}: {error}")
    return done


def _prepare(task: Callable[..., Task], given: tuple[Any, ...]) -> None:
    _task[:] = [task(*given)]
    gc.freeze()


def _in_process(piece: Piece, model: str) -> PieceResult:
    return _work(piece, _task[0], model)


def replay(
    sources: Iterable[Source], policies: list[Policy], *, workers: int = 1, model: str = "", to_the_end: bool = False
) -> Iterator[Batch]:
    """Yield results in order, for any number of processes. ``model``: the model of recordings that do not name one.

    ``to_the_end``: continue after a stop, as a live guard in shadow mode does.
    """
    policies = [harmless(policy) for policy in policies]
    for done in each_run(sources, Playing, (policies, to_the_end), workers_for(policies, workers), model):
        yield Batch(done.results, done.faults, done.size)


def replay_run(run: RecordedRun, policy: Policy) -> RunResult:
    """Replay one run in this process."""
    with quiet():
        return Judge(policy).play(run)


def workers_for(policies: list[Policy], workers: int) -> int:
    """Return the number of processes: 1 if a policy has functions that another process cannot import."""
    if workers == 1:
        return 1
    try:
        given = pickle.dumps(policies)
        pickle.loads(given)
    except Exception:  # a lambda or an object with a lock; each raises its own exception
        return 1
    return 1 if b"__main__" in given else workers  # another process cannot import what a prompt or a notebook defines


class Playing:
    """Plays each recorded run under several policies. ``totals``: also runs of which only the totals are known."""

    def __init__(self, policies: list[Policy], to_the_end: bool, totals: bool = False) -> None:
        self._judges, self._takes_totals = [Judge(policy, to_the_end=to_the_end) for policy in policies], totals

    def __call__(self, run: RecordedRun) -> list[RunResult]:
        if run.unknown and not self._takes_totals:
            raise UnreadableError("a run without steps cannot be replayed; 'runguard calibrate' reads it")
        return play(run, self._judges)


# ---- one policy as a judge: it decides in shadow mode, with the recorded time as its clock

# Settings that a replay replaces, or that may work only in this process. The mode stays: reading a journal needs it.
_HARMLESS: Final[dict[str, Any]] = {
    "store": "memory",
    "alerts": AlertSettings(),
    "telemetry": False,
    "on_trip": None,
    "on_decision": None,
    "clock": None,
}


def harmless(policy: Policy) -> Policy:
    """Return the policy without store, alerts, telemetry, callbacks and clock."""
    budgets = tuple(
        replace(budget, thresholds=tuple(replace(each, callback=None) for each in budget.thresholds))
        for budget in policy.budgets
    )
    return policy.model_copy(update={**_HARMLESS, "budgets": budgets})


class Clock:
    """The time of the recording."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the guard from logging recorded runs as if they happened now."""
    log = logging.getLogger("runguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class Judge:
    """A policy made harmless: it decides in shadow mode, keeps its accounts in memory and reports nothing."""

    def __init__(self, policy: Policy, *, to_the_end: bool = False) -> None:
        """``to_the_end``: judge also what a stopped run would not have reached, as a live guard in shadow mode does."""
        self.original, self.to_the_end = policy, to_the_end
        self.clock = Clock()
        self.policy = harmless(policy).model_copy(update={"mode": "shadow", "clock": self.clock})
        # one for all runs
        self.pricing = Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
        self.lane_rules = LaneRules(self.policy)
        self.watches_context = self.policy.rungs("context") is not None
        self._limits: dict[str, int | None] = {}

    def context_limit(self, guard: Guard, model: str, answered: int) -> int | None:
        """``answered``: a prompt that the model took.

        Where it is larger than the window in the lists, the lists are wrong.
        """
        if model not in self._limits:
            if len(self._limits) > 1_000:
                self._limits.clear()
            self._limits[model] = guard.context_limit(model)
        limit, policy = self._limits[model], self.policy
        if (
            limit is not None
            and answered > limit + policy.context_headroom
            and policy.max_context_tokens is None
            and model not in policy.models
        ):
            limit = self._limits[model] = None
        return limit

    def play(self, run: RecordedRun) -> RunResult:
        return play(run, [self])[0]


def play(run: RecordedRun, judges: list[Judge]) -> list[RunResult]:
    """One walk through a recorded run, past every judge."""
    players = [Player(judge, run) for judge in judges]
    for step in run.steps:
        for player in players:
            player.feed(step)
    return [player.finish() for player in players]


# ---- one recorded run, played to one judge

ADK_MODEL_CALLS: Final = 500  # RunConfig.max_llm_calls, which the guard holds for the whole tree
_PAUSED_KEPT: Final = 100


class Player:
    """Plays one recorded run to one judge, step by step."""

    def __init__(self, judge: Judge, run: RecordedRun, lane_rules: LaneRules | None = None) -> None:
        """``lane_rules``: other rules than those of the policy."""
        self.judge, self.clock, self.recorded = judge, judge.clock, run
        self.guard = Guard(
            judge.policy,
            pricing=judge.pricing,
            lane_rules=lane_rules or judge.lane_rules,
            reports=False,
            switches_models=True,
            gives_last_answers=True,
        )
        self.guard.sink.on_decided("replay", lambda decided: self.verdicts.add(decided, self.clock.now))
        self.guard.accounts.waits.advance = self.tick
        policy = judge.policy
        has_caps = policy.max_usd is not None or policy.max_tokens is not None or bool(policy.budgets)
        self._budgets = has_caps or self.guard.last_call is not None
        self.result = RunResult(run.id, run.app, run.user, run.session, run.source, run.success, run.capped)
        self.verdicts = Verdicts(self.result, to_the_end=judge.to_the_end)
        self.tool_prices = ReplayedPrices(self.guard, self.verdicts.paid_tool)
        cheaper = self.guard.model_choice
        self._switches = ReplayedSwitches(cheaper, judge.pricing, self.result) if cheaper is not None else None
        self.clock.now = 0.0
        self._journal: JournalPlayer | None = None
        self.run = ""
        self.live: Run = None  # type: ignore[assignment]  # the guard's run, once one has begun
        self._begun = False
        self._lanes: EventLanes = None  # type: ignore[assignment]  # as above
        self._active: dict[str, str] = {}  # lane -> the agent at work in it
        self._agents: set[str] = set()  # tools that are agents: work of theirs was seen in a branch
        self._waiting: list[steps.Called] = []  # calls of the last response, until it is known that tools answer them
        self._answers: list[Answer] = []
        self._answered_as = ("", "", "", "")  # lane, batch, agent, event of self._answers
        # runs with open calls, after which other runs have begun
        self._paused: dict[str, tuple[Run, EventLanes, dict[str, str], Stops]] = {}

    # ---- steps ------------------------------------------------------------------------------------------------------

    def feed(self, step: steps.Step) -> None:
        self.result.steps += 1
        _TAKES[type(step)](self, step)

    def finish(self) -> RunResult:
        self._catch_up()
        self._close()
        self.result.waited = Waited(self.guard.waits.calls, self.guard.waits.waited_s)
        return self.result

    def _catch_up(self) -> None:
        """Judge the calls and answers that waited for the next step."""
        if self._waiting:
            self._settle_calls()
        if self._answers:
            self._flush()

    def _turn(self, step: steps.Turn) -> None:
        self._catch_up()
        self.tick(step.at)
        if not (step.resumes and self._resume(step.run)):
            self._begin(step.run, step.text)

    def _stopped(self, step: steps.Stopped) -> None:
        """Note that the recorded run was stopped. Whether this policy would stop it is judged from its calls."""
        self.result.steps -= 1
        self.result.was_stopped = True

    def _resumed(self, step: steps.Resumed) -> None:
        """Take the time since the last step as a pause of the run."""
        self.result.steps -= 1
        self._catch_up()
        if self._begun:
            self.live.paused_at = self.clock.now
            self.tick(step.at)
            self.live.go_on(self.clock.now)

    def _wrote(self, step: steps.Wrote) -> None:
        if self._journal is None:
            self._journal, self.run = JournalPlayer(self), self.recorded.id
        self._journal.feed(step.entry)

    def _begin_anyway(self, at: float | None) -> None:
        """Begin a run for a step that comes before the first message."""
        if not self._begun:
            self.tick(at)
            self._begin("")

    def _begin(self, name: str, message: str = "") -> None:
        recorded = self.recorded
        name = name or f"{recorded.id}#{self.result.runs + 1}"
        app, user, session = recorded.app, recorded.user, recorded.session
        info = RunInfo(name, app, user, session, name, self.clock.now, ADK_MODEL_CALLS, recorded.labels)
        info.message = message
        self.begin(info)

    def begin(self, info: RunInfo) -> None:
        self._close()
        self.result.runs += 1
        self.run = info.run
        self.live = self.guard.start(info)
        self._begun = True
        self._lanes, self._active = EventLanes(self.guard, self.live), {}
        self.verdicts.begin(self.live)

    def _resume(self, name: str) -> bool:
        """Continue a run that had paused, after others; return whether it is known."""
        known = self._paused.pop(name, None)
        if known is None:
            return False
        self._close()
        self.live, self._lanes, self._active, stops = known
        run = self.guard.pauses.resume(self.live.info)
        if run is not self.live:
            return False
        self.run, self._begun = name, True
        self.verdicts.begin(self.live, stops)
        return True

    def _close(self) -> None:
        """End the run. What came after each of its verdicts is known now."""
        if not self._begun:
            return
        stops = self.verdicts.end()
        if self._lanes.calls and len(self._paused) < _PAUSED_KEPT:
            self._paused[self.run] = (self.live, self._lanes, self._active, stops)
            self.guard.pauses.keep(self.run, waits=True)
        else:
            self.guard.end(self.run)
        self._begun = False

    def _asked(self, step: steps.Asked) -> None:
        if self._waiting and step.branch:
            path, _, opened_by = step.branch.rpartition("@")
            # older ADK numbers the branches of agents called as tools
            name = path.rpartition(".")[2] if opened_by.isdigit() else ""
            self._agents.update(call.tool for call in self._waiting if call.id == opened_by or call.tool == name)
        self._catch_up()
        self._begin_anyway(step.at)
        is_over = self.verdicts.stops.is_over
        if is_over and step.reports is None:
            self.tick(step.at)
            if not step.refused:
                event = ModelCall(self.run, ROOT_LANE, step.agent, self.clock.now, step.model)
                estimated = step.usage is None or step.estimated
                self.book(event, step.usage or Usage(), step.model, estimated=estimated, nano=step.nano)
            return
        lane = self._lanes.of(step.branch, step.scope)
        if step.reports is not None:
            self._asked_remote(step, step.reports, lane, is_over=is_over)
            return
        began = self.clock.now  # it was asked when the last thing before it had happened
        if not step.after_answer and self._active.get(lane) != step.agent:
            self._enter(lane, step.agent)
        guard, judge = self.guard, self.judge
        usage = step.usage or Usage()
        event = ModelCall(
            self.run, lane, step.agent, began, step.model, usage.input, usage.audio, judge.policy.min_output_tokens
        )
        event.after_answer = step.after_answer
        if step.nano is not None or step.is_share:  # what it took is known without a price, or not known at all
            event.bound = (step.nano or 0, usage.input + usage.output)
        knows_prompt = step.usage is not None and not step.estimated and not step.is_share
        if judge.watches_context and knows_prompt:
            event.projected_tokens = usage.input
            event.context_limit = judge.context_limit(guard, step.model, 0 if step.refused else usage.input)
        self.check(event)
        if self._budgets:
            self.reserve(event)
        self.tick(step.at)
        if step.refused:
            if event.charge is not None:
                guard.release(event.charge)
            return
        self.book(event, usage, step.model, estimated=step.usage is None or step.estimated, nano=step.nano)
        if not step.after_answer:
            prompt, output = (usage.input, usage.output) if knows_prompt else (None, None)
            result = ModelResult(self.run, lane, step.agent, self.clock.now, prompt, output, text_id=step.text_id)
            result.is_cut, result.text = step.is_cut, step.text
            self.after(result)
            if not step.goes_on:
                self._active.pop(lane, None)

    def _asked_remote(self, step: steps.Asked, reports: tuple[Usage, ...], lane: str, *, is_over: bool) -> None:
        """Check, reserve and book the call of a remote agent. ``is_over``: only book it, the run was stopped before."""
        rule = self.judge.policy.remote_agent(step.agent)
        model = rule.model if reports else UNREPORTED
        event = ModelCall(self.run, lane, step.agent, self.clock.now, model, bound=reserved_for(rule))
        if not is_over:
            self.check(AgentEntered(self.run, lane, step.agent, self.clock.now))
            self.check(event)
            self.reserve(event)
        self.tick(step.at)
        rates = self.judge.pricing.rates(event.model, event.at)
        costs = [rates.cost(usage) for usage in reports] if isinstance(rates, Rates) else []
        is_estimate = isinstance(rates, Rates) and rates.estimated
        stop = None if is_over else self._stop_at_work(event, reports[: step.went_on], costs)
        nano = sum(costs) if isinstance(rates, Rates) else None
        self.book(event, total_of(reports), event.model, estimated=is_estimate, nano=nano)
        if stop is not None:
            self.guard.found(event, stop)

    def _stop_at_work(self, event: ModelCall, reports: tuple[Usage, ...], costs: list[int]) -> Finding | None:
        """Return what would have ended a remote agent at work: the time, or reports that a budget cannot pay for."""
        event.at = self.clock.now
        late = self.live.deadline.observe(event) if self.live.deadline is not None else None
        if late is not None or event.charge is None:
            return late
        accounts, tokens, nano = self.guard.accounts, 0, 0
        for number, usage in enumerate(reports):
            tokens, nano = tokens + usage.input + usage.output, nano + (costs[number] if costs else 0)
            if (denied := accounts.beyond(event.charge, (nano, tokens, 1))) is not None:
                return finding_of(denied, event, self.guard.store_name)
        return None

    def reserve(self, event: ModelCall) -> None:
        if self._budgets and not self.guard.reserve_now(event):
            drive_now(self.guard.reserve(event, slot=False))

    def book(
        self,
        event: ModelCall,
        usage: Usage,
        model: str,
        *,
        estimated: bool,
        nano: int | None = None,
        free: bool = False,
    ) -> None:
        """Book a paid call. ``nano``: its cost, where the recording has it."""
        cost = self._cost(event, usage, model, estimated=estimated, nano=nano, free=free)
        if event.cheaper and self._switches is not None:
            self._switches.paid(event, usage, cost)
        self.verdicts.paid(event.lane, usage, cost, estimated=estimated)

    def _cost(
        self, event: ModelCall, usage: Usage, model: str, *, estimated: bool, nano: int | None, free: bool
    ) -> int:
        """nano-USD of one model call. The result counts calls without a price."""
        if event.charge is not None:
            run_costs = self.live.run_costs
            before, unpriced = run_costs.nano, run_costs.unpriced
            self.guard.settle(event.charge, usage, model, nano=nano, estimated=estimated, free=free)
            self.result.unpriced += run_costs.unpriced - unpriced
            return int(run_costs.nano - before)
        if nano is not None or free:
            return nano or 0
        rates = self.judge.pricing.rates(model, event.at)  # no budget looks at it: the price alone
        if isinstance(rates, Unpriced):
            self.result.unpriced += 1
            return 0
        return rates.cost(usage)

    def _called(self, step: steps.Called) -> None:
        if self._answers:
            self._flush()
        self._begin_anyway(step.at)
        self._waiting.append(step)

    def _delegated(self, step: steps.Delegated) -> None:
        self.result.steps -= 1
        if self._begun:
            self._lanes.delegations.add(step.id)

    def _changed(self, step: steps.Changed) -> None:
        self.result.steps -= 1
        if self._answers:
            self._flush()
        self.tick(step.at)
        if self._begun and not self.verdicts.stops.is_over:
            lane = self._lanes.of(step.branch, step.scope)
            self.after(StateChanged(self.run, lane, step.agent, self.clock.now, step.value))

    def _settle_calls(self) -> None:
        """Judge the calls of the last response when something follows: only then it is known which of them delegate a
        task and are not calls of tools.
        """
        waiting, self._waiting = self._waiting, []
        guard, stops = self.guard, self.verdicts.stops
        for step in waiting:
            if stops.is_over:
                if step.tool not in FRAMEWORK_TOOLS and step.id not in self._lanes.delegations:
                    self.verdicts.called(ROOT_LANE)
                    self.tool_prices.unjudged(step.tool, ROOT_LANE, step.args)
                continue
            lane = self._lanes.of(step.branch, step.scope)
            self.tick(step.at)
            # a recording holds no declarations: all arguments count, as they were given
            once = guard.tools.once_identity(step.tool, step.args)
            call = UnansweredCall(
                step.tool, step.args, guard.tools.fingerprint(step.tool, step.args), lane, step.batch, step.agent, once
            )
            self._lanes.calls[step.id] = call
            if step.id in self._lanes.delegations:
                self._agents.add(step.tool)
                continue
            if step.tool in FRAMEWORK_TOOLS:
                continue
            self.verdicts.called(lane)
            if step.agent and self._active.get(lane) != step.agent:
                self._enter(lane, step.agent)  # its model calls may not be recorded
            below = int(step.tool in self._agents)
            if below:
                beside = sum(other.batch == step.batch and other.tool == step.tool for other in waiting)
                self.check(AgentEntered(self.run, lane, step.agent, self.clock.now, 0, beside))
            facts = (step.tool, call.fingerprint, step.batch, step.id, below, call.once)
            event = ToolCall(self.run, lane, step.agent, self.clock.now, *facts)
            self.check(event)
            self.tool_prices.called(self.live, event, step.args)

    def _answered(self, step: steps.Answered) -> None:
        if self._waiting:
            self._settle_calls()
        call = self._lanes.calls.pop(step.id, None) if self._begun else None
        if call is None:
            return  # the record holds no call for it, or it was made in another run
        if step.ends:
            self._active.pop(call.lane, None)
        if step.pending or is_framework_tool(step.tool):
            return
        known_as = (call.lane, call.batch, step.agent or call.agent, step.event)
        if known_as != self._answered_as:
            if self._answers:
                self._flush()
            self._answered_as = known_as
        self.tick(step.at)
        facts = (step.tool, call.fingerprint, step.value, step.id, step.outcome, step.event)
        self._answers.append(Answer(*facts, args=call.args, once=call.once))
        if self.live is not None and len(self.live.lanes) > 1:
            self.guard.close_lane(self.live, f"{call.lane}/{step.tool}@{step.id}")

    def _flush(self) -> None:
        """Show the answers to one model response as one observation."""
        answers, self._answers = self._answers, []
        if self.verdicts.stops.is_over:
            for answer in answers:
                self.guard.tool_prices.close(self.live, answer)
            return
        lane, batch, agent, _ = self._answered_as
        self.after(ToolResults(self.run, lane, agent, self.clock.now, batch, answers))

    def _passed(self, step: steps.Passed) -> None:
        self._settle_calls()
        if self._answers:
            is_router = len(self._answers) == 1 and self._answered_as[0] == self._lanes.of(step.branch, step.scope)
            self._answers[0].hands_over = is_router  # the answer of the tool that set the action
            self._flush()
        self.tick(step.at)
        self._begin_anyway(step.at)
        if self.verdicts.stops.is_over:
            return
        lane = self._lanes.of(step.branch, step.scope)
        self.check(HandOff(self.run, lane, step.agent, step.target, self.clock.now))
        self._active.pop(lane, None)

    def tick(self, at: float | None) -> None:
        if at is not None and at > self.clock.now:
            self.clock.now = at

    def check(self, event: Question) -> None:
        if self._switches is not None and isinstance(event, ModelCall):
            self._switches.asked(self.live, event)
        self.guard.check(event)

    def after(self, event: Result) -> None:
        self.guard.after(event)

    # ---- agents -----------------------------------------------------------------------------------------------------

    def _enter(self, lane: str, agent: str) -> None:
        """Show that an agent begins to work: another one than before, or the same one again."""
        self._active[lane] = agent
        self.check(AgentEntered(self.run, lane, agent, self.clock.now))


_TAKES: Final[dict[type, Callable[[Player, Any], None]]] = {
    steps.Turn: Player._turn,
    steps.Asked: Player._asked,
    steps.Called: Player._called,
    steps.Answered: Player._answered,
    steps.Passed: Player._passed,
    steps.Delegated: Player._delegated,
    steps.Wrote: Player._wrote,
    steps.Resumed: Player._resumed,
    steps.Changed: Player._changed,
    steps.Stopped: Player._stopped,
}


# ---- the journal of a run: the guard sees the very events that it saw live, lane for lane


class JournalPlayer:
    """One journal on its way to one player."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._asked: dict[int, ModelCall] = {}
        self._paid: set[int] = set()
        self._takes: dict[str, Callable[[Entry], None]] = {
            "start": self._start,
            "lane": self._lane,
            "lane_end": lambda entry: player.guard.close_lane(player.live, entry["l"]),
            "unspent": self._unspent,
            "back": self._back,
            "paid": self._pay,
            "surplus": self._surplus,
            "pause": self._pause,
            "resume": lambda entry: player.live.go_on(entry["t"]),
            # the measurements of earlier runs of the session
            "growth": lambda entry: player.live.growth.learn(entry["of"], player.judge.policy.cost_baseline_events),
            "decision": self._decided,
            "tool_hold": self._tool_hold,
            "tool_paid": lambda entry: player.tool_prices.paid(player.live, entry),
            "tool_back": lambda entry: player.tool_prices.not_made(player.live, entry),
        }

    def feed(self, entry: Entry) -> None:
        self._player.tick(entry.get("t"))
        take = self._takes.get(entry["k"])
        if take is not None:
            take(entry)
            return
        event = read_event(self._player.run, entry)
        if event is not None:
            self._replay(event)

    def _decided(self, entry: Entry) -> None:
        if entry.get("do") == Action.STOP.word and entry.get("enforced"):
            self._player.result.was_stopped = True

    def _start(self, entry: Entry) -> None:
        get = entry.get
        self._asked.clear()  # a run that continues starts a new journal
        self._paid.clear()
        info = RunInfo(
            self._player.run,
            str(get("app") or ""),
            str(get("user") or ""),
            str(get("session") or ""),
            self._player.run,
            entry["t"],
        )
        info.model_call_limit, info.max_usd, info.max_tokens, info.labels = (
            get("model_call_limit"),
            get("max_usd"),
            get("max_tokens"),
            get("labels"),
        )
        info.is_automatic = bool(get("automatic"))
        usd, tokens = get("ceiling") or (None, None)
        info.ceiling = usd, tokens
        self._player.begin(info)

    def _replay(self, event: Event) -> None:
        player = self._player
        if type(event) is ModelCall:
            self._asked[event.number] = event
            if player.judge.original.mode == "enforce":
                # An enforcing guard lowers the limit of the answer before it refuses; in shadow mode it checks the
                # original request.
                least = player.judge.policy.min_output_tokens
                event.max_output_tokens = min(event.max_output_tokens or least, least)
        elif type(event) is ToolCall:
            player.verdicts.called(event.lane)
            if player.verdicts.stops.is_over:
                player.tool_prices.noted(player.live, event, is_over=True)
        if player.verdicts.stops.is_over:
            return
        if isinstance(event, ToolResults):
            player.after(self._by_this_policy(event))
        elif isinstance(event, ModelResult | StateChanged):
            player.after(event)
        else:
            player.check(event)
            if isinstance(event, ModelCall):
                player.reserve(event)
            elif isinstance(event, ToolCall):
                player.tool_prices.noted(player.live, event, is_over=False)

    def _by_this_policy(self, event: ToolResults) -> ToolResults:
        """Apply the tool rules of this policy; they may differ from the recorded ones."""
        answers: list[Answer] = []
        for answer in event.answers:
            rule = self._player.guard.tools.rule(answer.tool)
            if rule is not None and rule.exempt:
                continue
            if rule is not None and (rule.polling or rule.paging):
                answer.counted = False
            answers.append(answer)
        event.answers = answers
        event.failures = any(answer.failure for answer in answers)
        event.calls = frozenset(answer.call for answer in answers if answer.counted)
        event.pairs = frozenset(
            (answer.call, answer.answer)
            for answer in answers
            if answer.counted and answer.outcome is not Outcome.REFUSED
        )
        return event

    def _pause(self, entry: Entry) -> None:
        self._player.live.paused_at = entry["t"]

    # ---- entries that are not events ---------------------------------------------------------------------------------

    def _lane(self, entry: Entry) -> None:
        live = self._player.live
        if entry["l"] not in live.lanes:
            self._player.guard.open_lane(
                live,
                entry["l"],
                str(entry.get("of") or ROOT_LANE),
                concurrent=bool(entry.get("concurrent")),
                path=tuple(entry.get("path") or ()),
                delegate=str(entry.get("agent") or ""),
            )

    def _unspent(self, entry: Entry) -> None:
        player, event = self._player, self._asked.pop(entry.get("n", 0), None)
        if player.verdicts.stops.is_over:
            return
        player.guard.unspent(player.run)
        charge = event.charge if event is not None else None
        if event is None or charge is None:
            return
        player.guard.release(charge)
        if not entry.get("denied"):
            return
        # It waited and was denied. Check whether it fits now: a store may have served others first.
        again = replace(event, charge=None)
        player.reserve(again)
        if again.charge is not None:
            possible_refusal = again.charge.possible_refusal
            player.guard.release(again.charge)
            if possible_refusal is not None:
                player.guard.found(event, finding_of(possible_refusal, event, ""))

    def _back(self, entry: Entry) -> None:
        event = self._asked.pop(entry["n"], None)
        if event is not None and event.charge is not None:
            self._player.guard.release(event.charge)

    def _tool_hold(self, entry: Entry) -> None:
        if not self._player.verdicts.stops.is_over:
            self._player.tool_prices.held(self._player.live, entry)

    def _pay(self, entry: Entry) -> None:
        number: Any = entry.get("n")
        event, usage = self._asked.get(number), read_usage(entry)
        if event is None:  # the journal mentions this call only when it was paid
            event = self._asked[number] = ModelCall(
                self._player.run, ROOT_LANE, "", self._player.clock.now, str(entry.get("model") or "")
            )
        model, estimated = str(entry.get("model") or event.model), bool(entry.get("estimated"))
        if number not in self._paid:
            self._paid.add(number)
            self._player.book(
                event, usage, model, estimated=estimated, nano=entry.get("nano"), free=bool(entry.get("free"))
            )
        elif event.charge is not None:  # reported again: the later figure replaces the earlier one
            self._player.guard.settle(
                event.charge, usage, model, nano=entry.get("nano"), estimated=estimated, free=bool(entry.get("free"))
            )

    def _surplus(self, entry: Entry) -> None:
        player, policy = self._player, self._player.judge.policy
        if player.verdicts.stops.is_over or policy.queues or entry["at_once"] <= policy.in_flight:
            return
        event = ModelCall(player.run, str(entry.get("l") or ""), str(entry.get("a") or ""), player.clock.now)
        player.guard.found(event, surplus(event, entry["at_once"], policy.in_flight))
