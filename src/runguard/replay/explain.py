"""Explain why a run stopped or not: the highest count of each rule, where, and what was missing."""

from dataclasses import dataclass, replace
from typing import Any, Final

from runguard.core.decision import Rungs
from runguard.core.events import AgentEntered, ToolCall
from runguard.engine.guard import Question
from runguard.engine.runs import LaneRules, lane_rungs_of
from runguard.policy.settings import RULES
from runguard.replay.engine import Judge
from runguard.replay.player import ADK_MODEL_CALLS, Player
from runguard.replay.results import RunResult
from runguard.replay.steps import RecordedRun, Wrote

_IN_JOURNALS: Final = {
    "depth": "only the journal of a RunGuard store records how agents are nested",
    "fan_out": "only the journal of a RunGuard store records how many branches begin at once",
}
_NOT_RECORDED: Final = {
    "breaker": "breakers work across runs, but each recorded run is replayed alone",
    "kill_switch": "operators' stops are not replayed",
}


@dataclass(slots=True)
class Peak:
    """The highest count of a rule in a run."""

    observed: float
    unit: str
    step: int
    turn: int
    tool: str
    agent: str


@dataclass(slots=True)
class Near:
    """One rule with its rungs and its highest count."""

    rule: str
    rungs: dict[str, float]
    peak: Peak | None
    why: str


@dataclass(slots=True)
class Explanation:
    result: RunResult
    rules: list[Near]
    not_recorded: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        rules = [
            {
                "rule": near.rule,
                "rungs": near.rungs,
                "peak": None if near.peak is None else {name: getattr(near.peak, name) for name in Peak.__slots__},
                "why": near.why,
            }
            for near in self.rules
        ]
        return {"run": self.result.to_dict(), "rules": rules, "not_recorded": self.not_recorded}


class _Watcher(Player):
    """Plays a run and keeps the highest count of every rule, also of those that reach no rung."""

    def __init__(self, judge: Judge, run: RecordedRun) -> None:
        every = {name: _from_the_first(rungs) for name, rungs in lane_rungs_of(judge.policy).items()}
        super().__init__(judge, run, LaneRules(judge.policy, every))
        self.peaks: dict[str, Peak] = {}
        self.guard.sink.on_found(
            "replay",
            lambda found, event: self._saw(found.rule, float(found.observed), found.unit, found.tool, event.agent),
        )

    def check(self, event: Question) -> None:
        if isinstance(event, AgentEntered | ToolCall):
            self._saw("depth", event.depth, "nested delegations", "", event.agent)
        if isinstance(event, AgentEntered):
            self._saw("fan_out", event.branches, "branches of one node", "", event.agent)
        super().check(event)

    def _saw(self, rule: str, observed: float, unit: str, tool: str, agent: str) -> None:
        peak, result = self.peaks.get(rule), self.result
        if observed and (peak is None or observed > peak.observed):
            self.peaks[rule] = Peak(float(observed), unit, result.steps, result.model_calls, tool, agent)


def _from_the_first(rungs: Rungs) -> Rungs:
    """Rungs that report every count from the first on."""
    lowest = rungs.lowest
    return replace(rungs, warn=min(1.0, lowest) if lowest > 0 else lowest)


def explain(run: RecordedRun, judge: Judge) -> Explanation:
    """Walk a run twice at once: as it is judged, and with every count reported."""
    plain, watching = Player(judge, run), _Watcher(Judge(judge.original, to_the_end=True), run)
    is_journal = False
    for step in run.steps:
        is_journal = is_journal or type(step) is Wrote
        plain.feed(step)
        watching.feed(step)
    result = plain.finish()
    watching.finish()
    peaks = watching.peaks
    found = [_near(rule, judge, peaks.get(rule)) for rule in RULES]
    if is_journal:
        found += [
            _branching("depth", "block", judge.policy.max_delegation_depth, peaks),
            _branching("fan_out", "stop", judge.policy.fan_out, peaks),
        ]
    return Explanation(
        result, [*found, *_limits(judge, result)], _NOT_RECORDED if is_journal else {**_IN_JOURNALS, **_NOT_RECORDED}
    )


def _near(rule: str, judge: Judge, peak: Peak | None) -> Near:
    rungs = judge.policy.rungs(rule)
    if rungs is None or rungs == Rungs():
        return Near(rule, {}, None, "off in this policy")
    set_rungs = {
        name: number for name in ("warn", "nudge", "block", "stop") if (number := getattr(rungs, name)) is not None
    }
    if rule == "context":
        return Near(
            rule,
            set_rungs,
            peak,
            "the prompt came near the window"
            if peak is not None
            else "no prompt came near the model's window, or the window is unknown",
        )
    if peak is None:
        return Near(rule, set_rungs, None, "no event to count")
    reached = [name for name, number in set_rungs.items() if peak.observed >= number]
    stop = rungs.stop
    if stop is None:
        why = "has no stop in this policy"
    elif peak.observed >= stop:
        why = "reached its stop"
    else:
        why = f"{peak.observed:g} of {stop:g} needed to stop"
    if reached and reached[-1] != "stop":
        why += f"; reached its {reached[-1]}"
    return Near(rule, set_rungs, peak, why)


def _branching(rule: str, rung: str, limit: int | None, peaks: dict[str, Peak]) -> Near:
    """Describe a limit that allows exactly its number."""
    if limit is None:
        return Near(rule, {}, peaks.get(rule), "no limit in this policy")
    seen = peaks[rule].observed if rule in peaks else 0
    return Near(
        rule,
        {rung: float(limit)},
        peaks.get(rule),
        f"{seen:g}; {limit} are allowed" if seen <= limit else f"reached its {rung}",
    )


def _limits(judge: Judge, result: RunResult) -> list[Near]:
    policy = judge.policy
    turns = f"{result.runs} user turn{'s' * (result.runs != 1)}"
    spent: dict[str, tuple[Any, float | None, str]] = {
        "max_model_calls": (policy.max_model_calls or ADK_MODEL_CALLS, result.model_calls, "model calls"),
        "max_tool_calls": (policy.max_tool_calls, result.tool_calls, "tool calls"),
        "max_tokens": (policy.max_tokens, result.tokens, "tokens"),
        "max_usd": (policy.max_usd, None if result.usd is None else float(result.usd), "USD"),
    }
    found = []
    for name, (limit, seen, unit) in spent.items():
        peak = None if seen is None else Peak(float(seen), unit, result.steps, result.model_calls, "", "")
        spent_text = f"{seen:g} {unit}" if seen is not None else "unknown"
        why = (
            "no limit in this policy"
            if limit is None
            else f"{spent_text} in {turns}; the limit is {float(limit):g} for each"
        )
        if unit == "USD" and result.unpriced:
            why += f"; {result.unpriced} of {result.model_calls} model calls have no price"
        found.append(Near(name, {} if limit is None else {"stop": float(limit)}, peak, why))
    return found
