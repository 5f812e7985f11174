"""Conditions on the usage of a run, and RunGuard's own rules as conditions.

Users create them. They load the engine, which those in ``termination/conditions`` do not.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Final

from runguard.core.decision import Action, Decision, Finding, against_limit
from runguard.core.errors import PolicyError, did_you_mean
from runguard.core.events import Answer, HandOff, ModelResult, RunInfo, ToolResults
from runguard.core.identity import words_name
from runguard.core.money import to_count, to_nano, to_usd, usd_text
from runguard.engine.guard import Guard
from runguard.policy.settings import RULES, Policy
from runguard.pricing.book import Price, Pricing
from runguard.pricing.rates import Unpriced, Usage
from runguard.providers.messages import is_framework_tool
from runguard.termination.conditions import (
    CallTaken,
    Event,
    EventLanes,
    ModelCallReader,
    TerminationCondition,
    UnansweredCall,
    answers_of,
    author_of,
    branch_of,
    calls_of,
    scope_of,
    seconds_of,
    text_of,
    transfer_of,
    visible_text,
    whole,
)

# ---- Conditions on the usage of a run: time, tokens, money.

_UNITS = ("total", "prompt", "completion")


class TimeoutTermination(TerminationCondition):
    """Fires after a number of seconds. The clock starts with the run, or with the first check."""

    knows_early = True

    def __init__(self, timeout_seconds: float) -> None:
        self._seconds = seconds_of(timeout_seconds, "timeout_seconds")
        self._started: float | None = None

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        if self._started is None:
            self._started = now
        return f"Timeout of {self._seconds:g} seconds reached" if now - self._started >= self._seconds else None

    def clear(self, now: float) -> None:
        self._started = now

    def wake_at(self) -> float | None:
        return None if self._started is None or self.terminated else self._started + self._seconds

    def settings(self) -> dict[str, Any]:
        return {"timeout_seconds": self._seconds}


class TokenUsageTermination(TerminationCondition):
    """Fires at a number of tokens of all model calls: in total, of prompts, or of completions.

    Tool prompts count as prompts, and thinking counts as completion.
    """

    knows_early = True

    def __init__(
        self,
        max_total: int | None = None,
        max_prompt: int | None = None,
        max_completion: int | None = None,
        *,
        max_total_tokens: int | None = None,  # the names of the proposal to ADK
        max_prompt_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        max_total_token: int | None = None,  # the names of AutoGen
        max_prompt_token: int | None = None,
        max_completion_token: int | None = None,
    ) -> None:
        names: dict[str, dict[str, int | None]] = {
            "total": {"max_total": max_total, "max_total_tokens": max_total_tokens, "max_total_token": max_total_token},
            "prompt": {
                "max_prompt": max_prompt,
                "max_prompt_tokens": max_prompt_tokens,
                "max_prompt_token": max_prompt_token,
            },
            "completion": {
                "max_completion": max_completion,
                "max_completion_tokens": max_completion_tokens,
                "max_completion_token": max_completion_token,
            },
        }
        self._limits: dict[str, int] = {}
        for unit, given in names.items():
            named = [(name, limit) for name, limit in given.items() if limit is not None]
            if len(named) > 1:
                raise PolicyError(f"{named[1][0]} = {named[1][1]!r}: the same as {named[0][0]}; give one of them")
            for name, limit in named:
                self._limits[unit] = to_count(limit, name)
        if not self._limits:
            raise PolicyError(
                "a TokenUsageTermination without a limit never fires; pass max_total=, max_prompt= or max_completion="
            )
        self.clear(0.0)

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        for taken in self._calls.read(events):
            self._count(taken.usage, taken.model)
            if taken.before is not None:
                self._prompt -= taken.before.input
                self._completion -= taken.before.output
        counts = {"total": self._prompt + self._completion, "prompt": self._prompt, "completion": self._completion}
        if not any(counts[unit] >= limit for unit, limit in self._limits.items()):
            return None
        return "Token usage limit reached, " + ", ".join(f"{unit} token count: {counts[unit]}" for unit in _UNITS)

    def _count(self, usage: Usage, model: str) -> None:
        self._prompt += usage.input
        self._completion += usage.output

    def clear(self, now: float) -> None:
        self._prompt = self._completion = 0
        self._calls = ModelCallReader()

    def settings(self) -> dict[str, Any]:
        return {f"max_{unit}": limit for unit, limit in self._limits.items()}


class CostTermination(TerminationCondition):
    """Fires at a number of dollars of all model calls, at the prices given here or at list prices.

    ``model`` is the model of calls whose events name none. A call without a price ends the run: unknown is never zero.
    """

    knows_early = True

    def __init__(
        self,
        max_usd: float | str | Decimal,
        prices: Mapping[str, Price | Mapping[str, Any] | Sequence[Price | Mapping[str, Any]]] | None = None,
        model: str | None = None,
    ) -> None:
        self._max = to_nano(max_usd, "max_usd")
        self._model = None if model is None else text_of(model, "model")
        self._prices = {} if prices is None else Policy.validated({"prices": prices}, "CostTermination").prices
        self._unpriced = ""
        self._pricing = Pricing(self._prices)  # prices are the same for every run, so copies share them
        self.clear(0.0)

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        for taken in self._calls.read(events):
            self._book(taken)
        if self._unpriced:
            return f"Cost cannot be known: {self._unpriced}"
        return (
            f"Cost limit of {usd_text(self._max)} reached, {usd_text(self._nano)} spent"
            if self._nano >= self._max
            else None
        )

    def _count(self, usage: Usage, model: str) -> None:
        self._book(CallTaken(usage, model, None))

    def _book(self, taken: CallTaken) -> None:
        model = taken.model or self._model
        if model is None:
            self._unpriced = self._unpriced or "a model call does not name its model; pass model="
            return
        rates = self._pricing.rates(model, taken.at if taken.at is not None else time.time())  # noqa: TID251 - prices change by date
        if isinstance(rates, Unpriced):
            self._unpriced = self._unpriced or str(rates)
            return
        self._nano += rates.cost(taken.usage) - (rates.cost(taken.before) if taken.before is not None else 0)

    def clear(self, now: float) -> None:
        self._nano = 0
        self._unpriced = ""
        self._calls = ModelCallReader()

    def settings(self) -> dict[str, Any]:
        data: dict[str, Any] = {"max_usd": f"{to_usd(self._max):f}"}
        if self._prices:
            data["prices"] = {
                model: [_plain(p) for p in given] if isinstance(given, list) else _plain(given)
                for model, given in self._prices.items()
            }
        if self._model is not None:
            data["model"] = self._model
        return data


def _plain(price: Price) -> dict[str, Any]:
    return price.model_dump(mode="json", exclude_defaults=True)


# ---- RunGuard's own rules as conditions.

# What events can show. The others look at prompts, at tools declared as polling, or at the context window.
_SEEN_IN_EVENTS: Final = ("repetition", "no_news", "same_call", "cycle", "stall", "tool_failures", "empty", "handoff")
_RUN: Final = "run"


class _Rules(TerminationCondition):
    """Fires where one of the rules of its policy would stop a run: a guard of its own sees the events."""

    _policy: Policy
    _guard: Guard | None = None
    _lanes: EventLanes

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        for event in whole(events):
            guard = self._guard
            if guard is None:
                guard = self._guard = Guard(self._policy, reports=False)  # whether a run ends is up to the condition
                self._lanes = EventLanes(guard, guard.start(RunInfo(_RUN)))
            for decision in self._decisions(guard, event, now):
                if decision.action is Action.STOP and decision.finding is not None:
                    return _reason(decision.finding)
        return None

    def clear(self, now: float) -> None:
        self._guard = None

    def _decisions(self, guard: Guard, event: Event, now: float) -> Iterator[Decision]:
        where, author = (branch_of(event), scope_of(event)), author_of(event)
        if calls := calls_of(event):
            lane, batch = self._lanes.of(*where), getattr(event, "id", None) or ""
            for call in calls:
                name, args = getattr(call, "name", None) or "", getattr(call, "args", None)
                self._lanes.calls[_key(call, event)] = UnansweredCall(name, args, b"", lane, batch, author)
        elif answers := answers_of(event):
            yield from self._judge_answers(guard, event, answers, now)
        elif text := visible_text(event):
            yield guard.after(ModelResult(_RUN, self._lanes.of(*where), author, now, text_id=words_name(text)))
        if target := transfer_of(event):
            yield guard.check(HandOff(_RUN, self._lanes.of(*where), author, target, now))

    def _judge_answers(self, guard: Guard, event: Event, responses: list[Any], now: float) -> Iterator[Decision]:
        """Judge the answers to one response of a model together."""
        answers: list[Answer] = []
        lane = batch = ""
        for response in responses:
            call = self._lanes.close(_key(response, event))
            if call is None or is_framework_tool(call.tool):
                continue
            lane, batch = call.lane, call.batch
            value, name = getattr(response, "response", None), getattr(response, "id", None) or ""
            answers.append(
                Answer(call.tool, guard.tools.fingerprint(call.tool, call.args), value, name, args=call.args)
            )
        if len(answers) == 1:
            answers[0].hands_over = bool(transfer_of(event))
        if answers:
            yield guard.after(ToolResults(_RUN, lane, author_of(event), now, batch, answers))


def _key(call: Any, event: Event) -> str:
    """Return the id that a call and its answer share; without one, the tool's name within the branch has to do."""
    return getattr(call, "id", None) or f"{branch_of(event)}/{getattr(call, 'name', None)}"


def _reason(found: Finding) -> str:
    about = f" of tool '{found.tool}'" if found.tool else ""
    detail = f" ({found.detail})" if found.detail else ""
    return f"Rule {found.rule}{about}: {against_limit(found.observed, found.unit, found.limit)}{detail}"


def _policy_of(rules: dict[str, dict[str, float]], source: str) -> Policy:
    """Only these rules, in shadow mode; not from a policy file, which configures the enforcing guard."""
    off = {rule: False for rule in RULES if rule not in rules}
    given = {rule: rungs for rule, rungs in rules.items() if rungs}
    quiet = {
        "mode": "shadow",
        "telemetry": False,
        "max_nudges": 0,
        "max_tool_calls": None,
        "max_delegation_depth": None,
    }
    return Policy.validated({**quiet, "rules": {**off, **given}}, source)


class RuleTermination(_Rules):
    """One of RunGuard's rules: ``RuleTermination("repetition", stop=4)``.

    Without rungs, those that the guard has by default.
    """

    saved_keys: ClassVar[tuple[str, ...]] = ("warn", "nudge", "block", "stop")

    def __init__(self, rule: str, **rungs: float) -> None:
        if rule not in _SEEN_IN_EVENTS:
            raise PolicyError(
                f"rule = {rule!r}: no rule that events can show; {did_you_mean(str(rule), _SEEN_IN_EVENTS)}"
            )
        for name, number in rungs.items():
            if isinstance(number, bool):
                raise PolicyError(f"{name} = {number!r}: give a number")
        self._rule, self._rungs = rule, rungs
        self._policy = _policy_of({rule: rungs}, "RuleTermination")
        in_force = self._policy.rungs(rule)
        if in_force is None or in_force.stop is None:
            raise PolicyError(
                f"stop: rule '{rule}' stops nothing by default; say at how many, such as "
                f"RuleTermination({rule!r}, stop=5)"
            )

    def settings(self) -> dict[str, Any]:
        return {"rule": self._rule, **self._rungs}


class NoProgressTermination(_Rules):
    """Any of RunGuard's loop rules at its measured default.

    These are repetition, circles, stalls, failures in a row and hand-off circles.
    """

    def __init__(self) -> None:
        self._policy = _policy_of({rule: {} for rule in _SEEN_IN_EVENTS}, "NoProgressTermination")
