"""Totals of all runs under one policy, in constant memory."""

from collections import Counter
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final

from runguard.core.money import to_usd
from runguard.replay.results import After, RunResult, Waited, after_dict, switched_dict

TURNS: Final = 200  # model calls of a run that the plots show
BINS: Final = 20
_LISTED: Final = 1_000
_LINES: Final = 12


@dataclass(slots=True)
class Group:
    """Runs with the same label."""

    runs: int = 0
    nudged: int = 0
    blocked: int = 0
    stopped: int = 0
    model_calls: int = 0
    tokens: int = 0
    nano: int = 0
    saved: After = field(default_factory=After)
    switched: After = field(default_factory=After)
    waited: Waited = field(default_factory=Waited)

    def add(self, run: RunResult) -> None:
        self.runs += 1
        self.nudged += run.first("nudge") is not None
        self.blocked += run.first("block") is not None
        self.stopped += run.first("stop") is not None
        self.model_calls += run.model_calls
        self.tokens += run.tokens
        self.nano += run.nano
        self.saved.add(run.saved)
        self.switched.add(run.switched)
        self.waited.add(run.waited)

    def to_dict(self) -> dict[str, Any]:
        low, high = wilson(self.stopped, self.runs)
        counts = {
            "runs": self.runs,
            "nudged": self.nudged,
            "blocked": self.blocked,
            "stopped": self.stopped,
            "stopped_interval": [round(low, 4), round(high, 4)],
        }
        switched = {"switched": switched_dict(self.switched)} if self.switched.model_calls else {}
        return counts | {
            **switched,
            **self.waited.to_dict(),
            "model_calls": self.model_calls,
            "tokens": self.tokens,
            "usd": f"{to_usd(self.nano):f}",
            "after_stop": after_dict(self.saved),
        }


@dataclass(slots=True)
class RuleTotals:
    """One rule: how often it acted first, and what the recordings spent after its stops."""

    nudge: int = 0
    block: int = 0
    stop: int = 0
    false_stops: int = 0
    saved: After = field(default_factory=After)


class Totals:
    """Sums over runs, and the data for the plots."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.all = Group()
        self.by_label = {"success": Group(), "failure": Group(), "unlabelled": Group()}
        self.steps = self.tool_calls = self.prompt_tokens = self.output_tokens = self.unpriced = self.estimated = (
            self.runs
        ) = 0
        self.rules: dict[str, RuleTotals] = {}
        self.false_stops: list[str] = []
        self.false_stop_count = 0
        self.stop_turns: Counter[int] = Counter()  # bins of twenty-five model calls
        self.stop_shares = [0] * BINS  # where in its run a stop falls
        self.prompt_sums, self.cost_sums, self.turn_counts = [0] * TURNS, [0] * TURNS, [0] * TURNS
        self.lines: list[
            tuple[int, str, list[tuple[int, int]], int | None]
        ] = []  # the most expensive runs, one line each

    def add(self, run: RunResult) -> None:
        self.all.add(run)
        self.by_label[{True: "success", False: "failure", None: "unlabelled"}[run.success]].add(run)
        self.steps += run.steps
        self.runs += run.runs
        self.tool_calls += run.tool_calls
        self.prompt_tokens += run.prompt_tokens
        self.output_tokens += run.output_tokens
        self.unpriced += run.unpriced
        self.estimated += run.estimated
        self._count_rules(run)
        stop = run.first("stop")
        if stop is not None:
            self.stop_turns[stop.turn // 25] += 1
            self.stop_shares[min(int(stop.turn / max(run.model_calls, 1) * BINS), BINS - 1)] += 1
        if run.is_false_stop:
            self.false_stop_count += 1
            if len(self.false_stops) < _LISTED:
                self.false_stops.append(run.id)
        self._plot(run, stop.turn if stop is not None else None)

    def _count_rules(self, run: RunResult) -> None:
        for action in ("nudge", "block", "stop"):
            verdict = run.first(action)
            if verdict is None:
                continue
            rule = self.rules.setdefault(verdict.rule, RuleTotals())
            setattr(rule, action, getattr(rule, action) + 1)
            if action == "stop":
                rule.false_stops += run.success is True
                rule.saved.add(run.saved)

    def _plot(self, run: RunResult, stop: int | None) -> None:
        for turn, (prompt, nano) in enumerate(run.curve[:TURNS]):
            self.turn_counts[turn] += 1
            self.prompt_sums[turn] += prompt
            self.cost_sums[turn] += nano
        weight = run.nano or run.tokens
        if len(self.lines) < _LINES or weight > self.lines[-1][0]:
            self.lines.append((weight, run.id, run.curve, stop))
            self.lines.sort(key=lambda line: -line[0])
            del self.lines[_LINES:]

    @property
    def groups(self) -> dict[str, Group]:
        """All runs, and those of each label where there are several."""
        labelled = {name: group for name, group in self.by_label.items() if group.runs and group.runs != self.all.runs}
        return {"all": self.all, **labelled}

    def to_dict(self) -> dict[str, Any]:
        names = ("steps", "tool_calls", "prompt_tokens", "output_tokens")
        rules = {
            name: {
                "nudge": rule.nudge,
                "block": rule.block,
                "stop": rule.stop,
                "false_stops": rule.false_stops,
                "after_stop": after_dict(rule.saved),
            }
            for name, rule in sorted(self.rules.items())
        }
        return {
            **self.all.to_dict(),
            **{name: getattr(self, name) for name in names},
            "user_turns": self.runs,
            "unpriced_calls": self.unpriced,
            "estimated_calls": self.estimated,
            "by_label": {name: group.to_dict() for name, group in self.by_label.items()},
            "by_rule": rules,
            "false_stops": {"count": self.false_stop_count, "ids": self.false_stops},
        }


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share."""
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle, half = share + spread / 2, z * sqrt(share * (1 - share) / total + spread / total / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
