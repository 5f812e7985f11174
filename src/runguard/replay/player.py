"""Recorded steps -> the events that a live run makes -> the same ``Guard``, in shadow mode.

Open loop: the decisions of the guard change nothing of what follows in the recording. Each recorded run meets a guard
of its own, so budgets of a run and of its session are replayed. What runs share with others (budgets of users and
apps, breakers) is not.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.engine.guard import EventLanes, Guard, Question, Result, UnansweredCall
from runguard.engine.runs import LaneRules, Run
from runguard.pricing.rates import Unpriced, Usage
from runguard.providers.messages import FRAMEWORK_TOOLS, is_framework_tool
from runguard.replay import steps
from runguard.replay.journal_player import JournalPlayer
from runguard.replay.remote_replies import play_remote
from runguard.replay.replayed_money import ReplayedPrices, ReplayedSwitches, drive_now
from runguard.replay.results import RunResult, Waited
from runguard.replay.verdicts import Stops, Verdicts

if TYPE_CHECKING:
    from runguard.replay.engine import Judge

ADK_MODEL_CALLS: Final = 500  # RunConfig.max_llm_calls, which the guard holds for the whole tree
_PAUSED_KEPT: Final = 100


class Player:
    """Plays one recorded run to one judge, step by step."""

    def __init__(self, judge: "Judge", run: steps.RecordedRun, lane_rules: LaneRules | None = None) -> None:
        """``lane_rules``: other rules than those of the policy."""
        self.judge, self.clock, self.recorded = judge, judge.clock, run
        self.guard = Guard(
            judge.policy,
            pricing=judge.pricing,
            lane_rules=lane_rules or judge.lane_rules,
            outbox=judge.outbox,
            reports=False,
            switches_models=True,
            gives_last_answers=True,
        )
        self.guard.sink.on_decided("replay", lambda decided: self.verdicts.add(decided, self.clock.now))
        self.guard.accounts.waits.advance = self.tick
        policy = judge.policy
        self._budgets = policy.max_usd is not None or policy.max_tokens is not None or bool(policy.budgets)
        self._budgets = self._budgets or self.guard.last_answers is not None
        self.result = RunResult(run.id, run.app, run.user, run.session, run.source, run.success, run.capped)
        self.verdicts = Verdicts(self.result, to_the_end=judge.to_the_end)
        self.tool_prices = ReplayedPrices(self.guard, self.verdicts.paid_tool)
        cheaper = self.guard.downgrades
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
            self._begin(step.run)

    def _resumed(self, step: steps.Resumed) -> None:
        """The time since the last step was a pause of the run."""
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

    def _begin_unnamed(self, at: float | None) -> None:
        """The recording has a step before the first message."""
        self.tick(at)
        self._begin("")

    def _begin(self, name: str) -> None:
        recorded = self.recorded
        name = name or f"{recorded.id}#{self.result.runs + 1}"
        app, user, session = recorded.app, recorded.user, recorded.session
        self.begin(RunInfo(name, app, user, session, name, self.clock.now, ADK_MODEL_CALLS, recorded.labels))

    def begin(self, info: RunInfo) -> None:
        self._close()
        self.result.runs += 1
        self.run = info.run
        self.live = self.guard.start(info)
        self._begun = True
        self._lanes, self._active = EventLanes(self.guard, self.live), {}
        self.verdicts.begin(self.live)

    def _resume(self, name: str) -> bool:
        """A run that had paused goes on, after others."""
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
        """The run is over: what came after each of its verdicts is known now."""
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
        if not self._begun:
            self._begin_unnamed(step.at)
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
            play_remote(self, step, self.run, lane, is_over=is_over)
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
        if step.at is not None:
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
        """A call was paid. ``nano``: what it cost, where the recording says so."""
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
        if not self._begun:
            self._begin_unnamed(step.at)
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
            if step.at is not None:
                self.tick(step.at)
            # a recording holds no declarations: all arguments count, as they were given
            once = guard.tools.once_identity(step.tool, step.args)
            call = UnansweredCall(
                step.tool, step.args, guard.fingerprint(step.tool, step.args), lane, step.batch, step.agent, once
            )
            self._lanes.add(step.id, call)
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
        if step.at is not None:
            self.tick(step.at)
        facts = (step.tool, call.fingerprint, step.value, step.id, step.outcome, step.event)
        self._answers.append(Answer(*facts, args=call.args, once=call.once))
        if self.live is not None and len(self.live.lanes) > 1:
            self.guard.close_lane(self.live, f"{call.lane}/{step.tool}@{step.id}")

    def _flush(self) -> None:
        """The answers to one model response are one observation."""
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
        if not self._begun:
            self._begin_unnamed(step.at)
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
        """An agent begins to work: another one than before, or once more after it had finished."""
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
}
