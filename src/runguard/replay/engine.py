"""Recorded steps -> the events that a live run makes -> the same ``Guard``, in shadow mode, with the recorded time as
its clock.

Open loop: what the guard would have said changes nothing of what follows in the recording. Each recorded run meets a
guard of its own, so budgets of a run and of its session are replayed; what runs share with others (users' and apps'
budgets, breakers) is not.
"""

import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from runguard.alerts.settings import AlertSettings
from runguard.conductor.adapter import Conductor, Question, Result
from runguard.conductor.event_lanes import Call, EventLanes
from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.conductor.sink import Decided
from runguard.core.decision import Action, Decision, Rungs
from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    RunInfo,
    ToolCall,
    ToolResults,
)
from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Unpriced, Usage
from runguard.replay.noted import Noted
from runguard.replay.results import CURVE_KEPT, VERDICTS_KEPT, After, RunResult, Verdict
from runguard.replay.steps import (
    FRAMEWORK_TOOLS,
    Answered,
    Asked,
    Called,
    Delegated,
    Passed,
    RecordedRun,
    Resumed,
    Step,
    Turn,
    Wrote,
)

ADK_MODEL_CALLS: Final = 500  # RunConfig.max_llm_calls, which the guard holds for the whole tree
_STOP, _WARN = Action.STOP, Action.WARN
_PAUSED_KEPT: Final = 100
_SIGN_IN: Final = "adk_request_"


class Clock:
    """The time of the recording."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def quiet() -> Iterator[None]:
    """The guard's own log would tell of recorded runs as if they happened now."""
    log = logging.getLogger("runguard")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class Judge:
    """A policy made harmless: it decides in the shadow, keeps its accounts in memory and tells nobody."""

    def __init__(self, policy: Policy, *, to_the_end: bool = False) -> None:
        """``to_the_end``: judge also what a stopped run would not have come to, as a live guard in the shadow does."""
        self.told, self.to_the_end = policy, to_the_end
        self.clock = Clock()
        quietly = {
            "mode": "shadow",
            "store": "memory",
            "telemetry": False,
            "alerts": AlertSettings(),
            "on_trip": None,
            "on_decision": None,
        }
        self.policy = policy.model_copy(update={**quietly, "clock": self.clock})
        # one for all runs
        self.pricing = Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
        self.watches_context = self.policy.rungs("context") is not None
        self._limits: dict[str, int | None] = {}

    def context_limit(self, guard: Conductor, model: str, answered: int) -> int | None:
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
    if len(players) == 1:
        feed = players[0].feed
        for step in run.steps:
            feed(step)
    else:
        for step in run.steps:
            for player in players:
                player.feed(step)
    return [player.finish() for player in players]


class Player:
    """Plays one recorded run to one judge, step by step."""

    def __init__(self, judge: Judge, run: RecordedRun, lane_rungs: Mapping[str, Rungs] | None = None) -> None:
        """``lane_rungs``: other rungs than those of the policy."""
        self.judge, self.clock, self.recorded = judge, judge.clock, run
        self._over = False  # the run was stopped, and nothing more of it is judged
        self.guard = Guard(judge.policy, pricing=judge.pricing, lane_rungs=lane_rungs, reports=False)
        self.guard.sink.on_decided("replay", self._decided)
        policy = judge.policy
        self._budgets = policy.max_usd is not None or policy.max_tokens is not None or bool(policy.budgets)
        self.result = RunResult(run.id, run.app, run.user, run.session, run.source, run.success, run.capped)
        self.clock.now = 0.0
        self._takes = {
            Turn: self._turn,
            Asked: self._asked,
            Called: self._called,
            Answered: self._answered,
            Passed: self._passed,
            Delegated: self._delegated,
        }
        self._takes |= {Wrote: self._wrote, Resumed: self._resumed}
        self._noted: Noted | None = None
        self._run = ""
        self._live: Run = None  # type: ignore[assignment]  # the guard's run, once one has begun
        self._begun = False
        self._lanes: EventLanes = None  # type: ignore[assignment]  # as above
        self._active: dict[str, str] = {}  # lane -> the agent at work in it
        self._agents: set[str] = set()  # tools that are agents: work of theirs was seen in a branch
        self._waiting: list[Called] = []  # calls of the last response, until it is known that tools answer them
        self._answers: list[Answer] = []
        self._answered_as = ("", "", "", "")  # lane, batch, agent, event of self._answers
        self._stopped = False
        self._stopped_lanes: set[str] = set()
        # verdicts of this run, and what had been spent by then
        self._open: list[tuple[Verdict, int, int, int, int]] = []
        # what is known of runs with open calls, after which other runs have begun
        self._paused: dict[str, tuple[Any, ...]] = {}

    # ---- steps ------------------------------------------------------------------------------------------------------

    def feed(self, step: Step) -> None:
        self.result.steps += 1
        self._takes[type(step)](step)  # type: ignore[operator]

    def finish(self) -> RunResult:
        if self._waiting:
            self._settle_calls()
        if self._answers:
            self._flush()
        self._close()
        return self.result

    def _turn(self, step: Turn) -> None:
        if self._waiting:
            self._settle_calls()
        if self._answers:
            self._flush()
        self.tick(step.at)
        if not (step.resumes and self._resume(step.run)):
            self._begin(step.run)

    def _resumed(self, step: Resumed) -> None:
        """The time since the last step was a pause of the run."""
        self.result.steps -= 1
        if self._waiting:
            self._settle_calls()
        if self._answers:
            self._flush()
        if self._begun:
            self._live.paused_at = self.clock.now
            self.tick(step.at)
            self._live.go_on(self.clock.now)

    def _wrote(self, step: Wrote) -> None:
        if self._noted is None:
            self._noted, self._run = Noted(self), self.recorded.id
        self._noted.feed(step.entry)

    def _begin(self, name: str) -> None:
        recorded = self.recorded
        name = name or f"{recorded.id}#{self.result.runs + 1}"
        self.begin(
            RunInfo(
                name,
                recorded.app,
                recorded.user,
                recorded.session,
                name,
                self.clock.now,
                ADK_MODEL_CALLS,
                recorded.labels,
            )
        )

    def begin(self, info: RunInfo) -> None:
        self._close()
        self.result.runs += 1
        self._run = info.run
        self._live = self.guard.start(info)
        self._begun = True
        self._lanes, self._active, self._stopped_lanes = EventLanes(self.guard, self._live), {}, set()
        self._stopped = self._over = False

    def _resume(self, name: str) -> bool:
        """A run that had paused goes on, after others."""
        known = self._paused.pop(name, None)
        if known is None:
            return False
        self._close()
        self._live, *facts = known
        run = self.guard.pauses.resume(self._live.info)
        if run is not self._live:
            return False
        self._run, self._begun = name, True
        self._lanes, self._active, self._stopped_lanes, self._stopped, self._over = facts
        return True

    def _close(self) -> None:
        """The run is over: what came after each of its verdicts is known now."""
        if not self._begun:
            return
        result = self.result
        for verdict, calls, tools, tokens, nano in self._open:
            if verdict.action != "stop":
                verdict.after = After(
                    result.model_calls - calls, result.tool_calls - tools, result.tokens - tokens, result.nano - nano
                )
        self._open.clear()
        if self._lanes.calls and len(self._paused) < _PAUSED_KEPT:
            facts = (self._lanes, self._active, self._stopped_lanes, self._stopped, self._over)
            self._paused[self._run] = (self._live, *facts)
            self.guard.pauses.keep(self._run, waits=True)
        else:
            self.guard.end(self._run)
        self._begun = False

    def _asked(self, step: Asked) -> None:
        if self._waiting and step.branch:
            path, _, opened_by = step.branch.rpartition("@")
            # older ADK numbers the branches of agents called as tools
            name = path.rpartition(".")[2] if opened_by.isdigit() else ""
            self._agents.update(call.tool for call in self._waiting if call.id == opened_by or call.tool == name)
        if self._waiting:
            self._settle_calls()
        if self._answers:
            self._flush()
        if not self._begun:
            self.tick(step.at)
            self._begin("")
        if self._over:
            self.tick(step.at)
            if not step.refused:
                event = ModelCall(self._run, ROOT_LANE, step.agent, self.clock.now, step.model)
                self.book(
                    event,
                    step.usage or Usage(),
                    step.model,
                    estimated=step.usage is None or step.estimated,
                    nano=step.nano,
                )
            return
        lane = self._lanes.of(step.branch, step.scope)
        began = self.clock.now  # it was asked when the last thing before it had happened
        if not step.aside:
            self._enter(lane, step.agent)
        guard, judge = self.guard, self.judge
        usage = step.usage or Usage()
        event = ModelCall(
            self._run, lane, step.agent, began, step.model, usage.input, usage.audio, judge.policy.min_output_tokens
        )
        event.aside = step.aside
        if step.nano is not None or step.is_share:  # what it took is known without a price, or not known at all
            event.bound = (step.nano or 0, usage.input + usage.output)
        knows_prompt = step.usage is not None and not step.estimated and not step.is_share
        if judge.watches_context and knows_prompt:
            event.projected_tokens = usage.input
            event.context_limit = judge.context_limit(guard, step.model, 0 if step.refused else usage.input)
        self.check(event)
        self.reserve(event)
        self.tick(step.at)
        if step.refused:
            if event.charge is not None:
                guard.release(event.charge)
            return
        self.book(event, usage, step.model, estimated=step.usage is None or step.estimated, nano=step.nano)
        if not step.aside:
            prompt, output = (usage.input, usage.output) if knows_prompt else (None, None)
            self.after(
                ModelResult(
                    self._run, lane, step.agent, self.clock.now, prompt, output, said=step.said, is_cut=step.is_cut
                )
            )
            if not step.goes_on:
                self._active.pop(lane, None)

    def reserve(self, event: ModelCall) -> None:
        if self._budgets and not self.guard.reserve_now(event):
            _drive(self.guard.reserve(event, slot=False))

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
        """A call was paid. ``nano``: what it cost, where whoever recorded it knew."""
        result = self.result
        nano = self._cost(event, usage, model, estimated=estimated, nano=nano, free=free)
        result.model_calls += 1
        result.prompt_tokens += usage.input
        result.output_tokens += usage.output
        result.nano += nano
        result.estimated += estimated
        if len(result.curve) < CURVE_KEPT:
            result.curve.append((usage.input, nano))
        for after in self._afters(event.lane) if self._stopped or self._stopped_lanes else ():
            after.model_calls += 1
            after.tokens += usage.input + usage.output
            after.nano += nano

    def _cost(
        self, event: ModelCall, usage: Usage, model: str, *, estimated: bool, nano: int | None, free: bool
    ) -> int:
        if event.charge is not None:
            purse = self._live.purse
            before, unpriced = purse.nano, purse.unpriced
            self.guard.settle(event.charge, usage, model, nano=nano, estimated=estimated, free=free)
            self.result.unpriced += purse.unpriced - unpriced
            return int(purse.nano - before)
        if nano is not None or free:
            return nano or 0
        rates = self.judge.pricing.rates(model, event.at)  # no budget looks at it: the price alone
        if isinstance(rates, Unpriced):
            self.result.unpriced += 1
            return 0
        return rates.cost(usage)

    def _called(self, step: Called) -> None:
        if self._answers:
            self._flush()
        if not self._begun:
            self.tick(step.at)
            self._begin("")
        self._waiting.append(step)

    def _delegated(self, step: Delegated) -> None:
        self.result.steps -= 1
        if self._begun:
            self._lanes.delegations.add(step.id)

    def _settle_calls(self) -> None:
        """The calls of the last response are judged when something follows:
        a task's delegation is no call of a tool.
        """
        waiting, self._waiting = self._waiting, []
        guard = self.guard
        for step in waiting:
            if self._over:
                if step.tool not in FRAMEWORK_TOOLS and step.id not in self._lanes.delegations:
                    self.count_tool_call(ROOT_LANE)
                continue
            lane = self._lanes.of(step.branch, step.scope)
            self.tick(step.at)
            # a recording holds no declarations: all arguments count, as they were given
            once = guard.tools.once_identity(step.tool, step.args)
            call = Call(
                step.tool, step.args, guard.fingerprint(step.tool, step.args), lane, step.batch, step.agent, once
            )
            self._lanes.add(step.id, call)
            if step.id in self._lanes.delegations:
                self._agents.add(step.tool)
                continue
            if step.tool in FRAMEWORK_TOOLS:
                continue
            self.count_tool_call(lane)
            below = int(step.tool in self._agents)
            if below:
                beside = sum(other.batch == step.batch and other.tool == step.tool for other in waiting)
                self.check(AgentEntered(self._run, lane, step.agent, self.clock.now, 0, beside))
            self.check(
                ToolCall(
                    self._run,
                    lane,
                    step.agent,
                    self.clock.now,
                    step.tool,
                    call.fingerprint,
                    step.batch,
                    step.id,
                    below,
                    call.once,
                )
            )

    def _answered(self, step: Answered) -> None:
        if self._waiting:
            self._settle_calls()
        call = self._lanes.calls.pop(step.id, None) if self._begun else None
        if call is None:
            return  # the record holds no call for it, or it was made in another run
        if step.ends:
            self._active.pop(call.lane, None)
        if step.pending or step.tool in FRAMEWORK_TOOLS or step.tool.startswith(_SIGN_IN):
            return
        known_as = (call.lane, call.batch, step.agent or call.agent, step.event)
        if known_as != self._answered_as:
            if self._answers:
                self._flush()
            self._answered_as = known_as
        self.tick(step.at)
        self._answers.append(
            Answer(
                step.tool,
                call.fingerprint,
                step.value,
                step.id,
                step.outcome,
                step.event,
                args=call.args,
                once=call.once,
            )
        )
        if self._live is not None and len(self._live.lanes) > 1:
            self.guard.close_lane(self._live, f"{call.lane}/{step.tool}@{step.id}")

    def _flush(self) -> None:
        """The answers to one model response are one observation."""
        answers, self._answers = self._answers, []
        if self._over:
            return
        lane, batch, agent, _ = self._answered_as
        self.after(ToolResults(self._run, lane, agent, self.clock.now, batch, answers))

    def _passed(self, step: Passed) -> None:
        if self._waiting:
            self._settle_calls()
        if self._answers:
            is_router = len(self._answers) == 1 and self._answered_as[0] == self._lanes.of(step.branch, step.scope)
            self._answers[0].hands_over = is_router  # the answer of the tool that set the action
            self._flush()
        self.tick(step.at)
        if not self._begun:
            self._begin("")
        if self._over:
            return
        lane = self._lanes.of(step.branch, step.scope)
        self.check(HandOff(self._run, lane, step.agent, step.target, self.clock.now))
        self._active.pop(lane, None)

    def tick(self, at: float | None) -> None:
        if at is not None and at > self.clock.now:
            self.clock.now = at

    def count_tool_call(self, lane: str) -> None:
        self.result.tool_calls += 1
        for after in self._afters(lane) if self._stopped or self._stopped_lanes else ():
            after.tool_calls += 1

    def check(self, event: Question) -> None:
        self.guard.check(event)

    def after(self, event: Result) -> None:
        self.guard.after(event)

    # ---- what a journal needs to know -------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        return self._run

    @property
    def live(self) -> Run:
        return self._live

    @property
    def is_over(self) -> bool:
        return self._over

    # ---- agents -----------------------------------------------------------------------------------------------------

    def _enter(self, lane: str, agent: str) -> None:
        """An agent begins to work: another one than before, or once more after it had finished."""
        if self._active.get(lane) == agent:
            return
        self._active[lane] = agent
        self.check(AgentEntered(self._run, lane, agent, self.clock.now))

    # ---- verdicts ---------------------------------------------------------------------------------------------------

    def _decided(self, decided: Decided) -> None:
        decision, finding, event = decided.decision, decided.finding, decided.event
        result, lane = self.result, event.lane
        stops = decision.action is _STOP
        verdict = Verdict(
            decision.action.word,
            finding.rule,
            result.steps,
            result.model_calls,
            self._run,
            lane,
            event.agent,
            finding.tool,
            float(finding.observed),
            float(finding.limit),
            finding.unit,
            finding.detail,
            self.clock.now,
            finding.evidence,
            self._is_stopped(lane),
        )
        if len(result.verdicts) < VERDICTS_KEPT or (stops and not verdict.moot):
            result.verdicts.append(verdict)
            self._open.append((verdict, result.model_calls, result.tool_calls, result.tokens, result.nano))
        else:
            result.more += 1
        if stops and not verdict.moot:
            known = self._live.lanes.get(lane)
            owner = known.owner(finding) if finding.scope == "lane" and known is not None else None
            if owner is None:
                self._stopped, self._over = True, not self.judge.to_the_end
            else:
                self._stopped_lanes.add(owner.key)

    def _is_stopped(self, lane: str) -> bool:
        if self._stopped:
            return True
        return bool(self._stopped_lanes) and any(key in self._stopped_lanes for key in self._chain(lane))

    def _chain(self, lane: str) -> Iterator[str]:
        at = self._live.lanes.get(lane)
        while at is not None:
            yield at.key
            at = at.parent

    def _afters(self, lane: str) -> Iterator[After]:
        """Whose account a paid step is on that a stop would have spared."""
        if not self._is_stopped(lane):
            return
        yield self.result.saved
        covering = None if self._stopped else set(self._chain(lane))
        for verdict, *_ in self._open:
            if verdict.action != "stop" or verdict.moot:
                continue
            if covering is None or verdict.lane in covering or self._chain_meets(verdict.lane, covering):
                yield verdict.after
                return

    def _chain_meets(self, lane: str, covering: set[str]) -> bool:
        return any(key in covering and key in self._stopped_lanes for key in self._chain(lane))


def _drive(waiting: Coroutine[Any, Any, Decision]) -> Decision:
    """A coroutine that has nobody to wait for: in memory and in the shadow."""
    try:
        waiting.send(None)
    except StopIteration as done:
        decision: Decision = done.value
        return decision
    waiting.close()
    raise RuntimeError("a reservation in memory had to wait")
