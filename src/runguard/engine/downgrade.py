"""Cheaper models and prompt caches: what a switch of models saves, and what a lost prompt cache costs.

``adk/plugin``, ``calls/model_calls`` and ``replay`` ask ``Downgrades`` which model to call. ``engine/calls`` tells
``CacheWatch`` about settled calls.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple

from runguard.core.decision import Action, Finding, Money
from runguard.core.events import ModelCall, ModelResult
from runguard.core.money import BudgetStatus, Threshold, share_of, to_usd, unit_reached, usd_text
from runguard.engine.charges import BudgetGroup, Charge, status_of
from runguard.engine.decide import GuardContext
from runguard.engine.runs import Run
from runguard.ledger.ledger import Account
from runguard.pricing.rates import Rates, Usage, normalise

# ---- A switch to a cheaper model, when a budget reaches a ``Threshold(model=…)``

SWITCH_RULE: Final = "downgrade"
_AGENTS_KEPT: Final = 1_024  # of one run
_OTHER_COUNT: Final = 8  # another model may count an eighth more tokens in the same prompt

# Why the adapter cannot send the requests of an agent to a model; "" where it can.
Obstacle = Callable[[str], str]


@dataclass(slots=True)
class SwitchedModel:
    """The model that an agent of one lane has instead of its own."""

    asked: str
    model: str
    because: str


@dataclass(slots=True)
class _Reached:
    threshold: Threshold
    account: Account
    group: BudgetGroup
    status: BudgetStatus

    @property
    def because(self) -> str:
        return f"{self.threshold.percent:.0%} of the budget of {self.account.scope} is spent"


class Downgrades:
    """Chooses the models of one guard's calls. Only made where a threshold names a model.

    An adapter calls ``choose`` before it checks and reserves a model call, so that everything after it is about the
    model that will answer. The switch is made at a safe point only: the new model's window fits the prompt, the call
    costs less with it, the lost prompt cache included, and the adapter sees no obstacle, such as an open tool call. It
    is taken back when the budget is no longer beyond the threshold: its next window began, or it was extended.
    """

    def __init__(self, context: GuardContext) -> None:
        self._accounts, self._deciding = context.accounts, context.deciding

    def choose(self, run: Run, event: ModelCall, has_open_call: Callable[[], bool], obstacle: Obstacle) -> str:
        """The model that the call should go to, "" for its own. Enforcing, the event then names that model.

        ``has_open_call``: a tool call in the conversation is not answered yet, so the switch or the way back waits.

        Every switch, every way back and every refused switch is reported once.
        """
        if run.switched is None:
            run.switched = {}
        key = event.lane, event.agent
        before: SwitchedModel | None = run.switched.get(key)
        if before is not None and before.asked != event.model:
            before = None  # the agent has another model of its own now
        chosen = self._cheaper(run, event, before, has_open_call, obstacle)
        if chosen is None and before is not None and has_open_call() and not self._does_not_fit(event, before.model):
            chosen = before
        if not self._deciding.enforces:
            return "" if chosen is None else chosen.model
        if chosen is None:
            if run.switched.pop(key, None) is not None and before is not None:
                self._say(run, event, before.model, f"back:{before.model}", f"is back on {event.model}", None)
            return ""
        if before is None or before.model != chosen.model:
            if len(run.switched) >= _AGENTS_KEPT:
                run.switched.clear()
            run.switched[key] = chosen
            event.input_tokens += event.input_tokens // _OTHER_COUNT
        event.instead_of, event.model = event.model, chosen.model
        return chosen.model

    def _cheaper(
        self,
        run: Run,
        event: ModelCall,
        before: SwitchedModel | None,
        has_open_call: Callable[[], bool],
        obstacle: Obstacle,
    ) -> SwitchedModel | None:
        reached = sorted(self._reached(run, event), key=lambda one: one.threshold.percent, reverse=True)
        for one in reached:
            model = one.threshold.model or ""
            if normalise(model) == normalise(event.model):
                return None
            why_not = self._does_not_fit(event, model)
            is_new = before is None or before.model != model
            if not why_not and is_new:
                if has_open_call():
                    return before
                why_not = obstacle(model) or self._costs_more(run, event, model)
            if not why_not:
                if is_new:
                    verb = "is switched" if self._deciding.enforces else "would be switched"
                    text = f"{verb} from {event.model} to {model}"
                    self._say(run, event, model, f"to:{one.account.key}:{one.account.granted}", text, one)
                return SwitchedModel(event.model, model, one.because)
            self._say(run, event, model, "not", f"stays on {event.model}: {why_not}", one)
        return None

    def _reached(self, run: Run, event: ModelCall) -> Iterator[_Reached]:
        lines = self._accounts.account_lines(run.run_costs, event)
        for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
            for thresholds, limit in zip(group.thresholds, limits, strict=False) if group.switches else ():
                for threshold in thresholds:
                    if threshold.model is None or not threshold.is_for(event.agent):
                        continue
                    spent = account.spent
                    unit = unit_reached(spent, share_of(limit, account.granted, threshold.percent))
                    if unit is not None:
                        status = status_of(account, unit, limit[unit] + account.granted[unit], spent[unit])
                        yield _Reached(threshold, account, group, status)

    def _does_not_fit(self, event: ModelCall, model: str) -> str:
        window = self._accounts.expectations.context_limit(model)
        prompt = max(event.input_tokens, event.projected_tokens or 0)
        if window is None or prompt > window:
            return f"about {prompt:,} tokens do not fit into the window of {model}"
        limit = self._accounts.pricing.limits(model)[1]
        if limit is not None and event.max_output_tokens is not None and event.max_output_tokens > limit:
            return f"the request allows {event.max_output_tokens:,} output tokens, and {model} gives at most {limit:,}"
        return ""

    def _costs_more(self, run: Run, event: ModelCall, model: str) -> str:
        rates = self._accounts.pricing.rates
        present, other = rates(event.model, event.at), rates(model, event.at)
        if not isinstance(present, Rates) or not isinstance(other, Rates):
            return f"the price of {event.model if not isinstance(present, Rates) else model} is not known"
        last = run.caches.last(event.lane, event.agent) if run.caches is not None else None
        if last is not None and normalise(last.model) != normalise(event.model):
            last = None  # its cache belongs to another model
        prompt = event.projected_tokens or event.input_tokens
        output = self._accounts.expectations.typical(event.model, event.max_output_tokens)
        costs = switch_costs(present, other, prompt, output, last)
        if costs.saves:
            return ""
        cached = f", {costs.cached:,} of them cached" if costs.cached else ""
        return (
            f"the next call, about {prompt:,} prompt tokens{cached}, costs {usd_text(costs.stay)} there and "
            f"{usd_text(costs.switch)} on {model}"
        )

    def _say(self, run: Run, event: ModelCall, model: str, kind: str, text: str, reached: _Reached | None) -> None:
        about, money = f"agent {event.agent} {text}", None
        spent: Decimal | int = 0
        limit: Decimal | int = 0
        unit = "model switches"
        key = f"{kind}:{event.agent}:{event.model}:{model}"
        if reached is not None:
            account, status = reached.account, reached.status
            held = to_usd(account.due_usd - account.spent_usd)
            money = Money(reached.group.per.kind, account.scope, to_usd(account.spent_usd), held, account.ends)
            about = f"{reached.because}: {about}"
            spent, limit, unit = status.spent, status.limit, status.unit
        finding = Finding(SWITCH_RULE, Action.WARN, spent, limit, unit, "run", "", key, about, money=money)
        self._deciding.decide(run, run.lane(event.lane), event, finding)


# ---- What the next call of an agent would cost on its own model and on a cheaper one, in whole nano-USD


@dataclass(slots=True)
class CachedPrompt:
    """The last prompt of one agent in one lane, as its model reported it."""

    model: str
    input: int
    cached: int  # of input: read from a cache
    cache_write: int  # of input: written to a cache


class SwitchCosts(NamedTuple):
    """The expected cost of one call in nano-USD: with the present model, and after a switch."""

    stay: int
    switch: int
    cached: int  # tokens of the prompt that the present model would read from its cache

    @property
    def saves(self) -> bool:
        return self.switch < self.stay


def switch_costs(
    present: Rates, other: Rates, prompt: int, output: int, last: CachedPrompt | None = None
) -> SwitchCosts:
    """Return what the next call costs on either model.

    A switch loses the prompt cache of the model that is left: what was read from it is paid in full on the other model,
    at its price for writing a cache where it has one. ``prompt`` and ``output``: expected tokens. ``last``: what the
    present model had in its cache, None: nothing.
    """
    cached = write = 0
    if last is not None and last.input > 0:
        cached = min(prompt * last.cached // last.input, prompt)
        write = min(prompt * last.cache_write // last.input, prompt - cached)
    stay = present.cost(Usage(input=prompt, output=output, cached=cached, cache_write=write))
    switch = other.cost(Usage(input=prompt, output=output, cache_write=cached + write))
    return SwitchCosts(stay, switch, cached)


# ---- The prompt caches of models, watched per agent and lane of a run

CACHE_RULE: Final = "prompt_cache"
LEAST_TOKENS: Final = 2_000  # cached before and not any more
_IN_A_ROW: Final = 2
_PAUSE_S: Final = 300.0  # providers keep an unused cache for about five minutes


class PromptParts(NamedTuple):
    """Digests of one request, valid within this process."""

    tools: int
    instruction: int
    history: int  # of all its contents
    contents: int  # how many
    beginning: int  # of as many contents as the request before had


# Reads the parts of a request; ``contents``: how many contents the request before had. None: they cannot be known.
ReadParts = Callable[[Any, int], PromptParts | None]


@dataclass(slots=True)
class WatchedPrompt:
    """The last prompt of one agent in one lane, and the collapse that may have begun."""

    last: CachedPrompt
    at: float
    charge: Charge  # its call: a later report about it is not a new prompt
    parts: PromptParts | None
    cached: int  # tokens that were read from the cache before the collapse
    misses: int = 0  # calls in a row
    nano: int | None = 0  # what they cost more; None: the price is not known
    lost: int = 0  # tokens
    changed: list[set[str]] = field(default_factory=list)  # parts, per miss


class PromptCaches:
    """What is known of the prompt caches of one run."""

    __slots__ = ("by_agent", "warning")

    def __init__(self) -> None:
        self.by_agent: dict[tuple[str, str], WatchedPrompt] = {}  # by lane and agent
        self.warning = ""

    def last(self, lane: str, agent: str) -> CachedPrompt | None:
        watched = self.by_agent.get((lane, agent))
        return watched.last if watched is not None else None


class CacheWatch:
    """Learns from the settled calls of one guard.

    Providers cache the beginning of a prompt: where tools, instruction or history change near it, everything behind the
    change is paid in full again. When most of what was cached before is no longer read from the cache in two calls in a
    row, the guard warns once per run, names what changed and says what it cost. It never stops anything.

    These are not collapses: the first call of an agent, a call after a pause of more than five minutes (caches expire),
    a call to another model, and a history that became shorter (compaction). They begin a new comparison.
    """

    def __init__(self, context: GuardContext) -> None:
        self._accounts, self._deciding, self._clock = context.accounts, context.deciding, context.clock
        self._warns = context.options.get("reports", True)
        self.read_parts: ReadParts | None = None  # set by an adapter that keeps the request on the charge

    def settled(self, run: Run, charge: Charge, usage: Usage, model: str) -> None:
        """A model reported the usage of a call. Only called once some call of the run has read from a cache."""
        if charge.is_tool or not usage.input:
            return
        caches: PromptCaches = run.caches or PromptCaches()
        run.caches = caches
        key = charge.lane, charge.agent
        before = caches.by_agent.get(key)
        last = CachedPrompt(charge.model, usage.input, usage.cached, usage.cache_write)
        if before is not None and before.charge is charge:
            before.last = last
            return
        if before is None and len(caches.by_agent) >= _AGENTS_KEPT:
            caches.by_agent.clear()
        parts = None
        if self._warns and not caches.warning and self.read_parts is not None and charge.request is not None:
            parts = self.read_parts(charge.request(), before.parts.contents if before and before.parts else 0)
        now = WatchedPrompt(last, self._clock(), charge, parts, usage.cached)
        caches.by_agent[key] = now
        if before is not None and self._warns and not caches.warning and self._is_miss(before, now):
            self._missed(run, caches, before, now, usage, model)

    def _is_miss(self, before: WatchedPrompt, now: WatchedPrompt) -> bool:
        if now.last.model != before.last.model or now.at - before.at > _PAUSE_S:
            return False
        if self.read_parts is not None and now.charge.request is None:
            return False  # a call outside of the conversation, such as a summary
        if now.parts is not None and before.parts is not None:
            is_other = now.parts.beginning != before.parts.history
            is_shorter = now.parts.contents < before.parts.contents or now.last.input < before.last.input
        else:
            is_other, is_shorter = True, now.last.input < before.last.input
        if is_other and is_shorter:
            return False  # compacted, or another conversation
        lost = before.cached - now.last.cached
        return lost >= LEAST_TOKENS and now.last.cached * 2 < before.cached

    def _missed(
        self, run: Run, caches: PromptCaches, before: WatchedPrompt, now: WatchedPrompt, usage: Usage, model: str
    ) -> None:
        expected = min(before.cached, usage.input)
        now.cached, now.misses = before.cached, before.misses + 1
        now.lost = before.lost + expected - usage.cached
        now.changed = [*before.changed, changed_parts(before.parts, now.parts)]
        rates = self._accounts.rates_of(now.charge, model)
        more = None
        if isinstance(rates, Rates):
            cheap = Usage(usage.input, usage.output, expected, audio=usage.audio, audio_output=usage.audio_output)
            more = max(rates.cost(usage) - rates.cost(cheap), 0)
        now.nano = None if before.nano is None or more is None else before.nano + more
        if now.misses >= _IN_A_ROW:
            self._warn(run, caches, now)

    def _warn(self, run: Run, caches: PromptCaches, now: WatchedPrompt) -> None:
        charge, every = now.charge, set.intersection(*now.changed) or set.union(*now.changed)
        cost = "at an unknown price" if now.nano is None else f"which cost {usd_text(now.nano)} more"
        if every:
            cause = f"changed: {', '.join(sorted(every))}"
        elif now.parts is not None:
            cause = "tools, instruction and history are the same, so the provider may have dropped its cache"
        else:
            cause = "which part of the prompt changed is not known"
        caches.warning = (
            f"agent {charge.agent}: {now.lost:,} prompt tokens of its last {now.misses} calls to {charge.model} were "
            f"no longer read from the prompt cache, {cost}; {cause}"
        )
        usd = None if now.nano is None else str(to_usd(now.nano))
        evidence = ({"usd": usd or "unknown", "changed": ", ".join(sorted(every))},)
        finding = Finding(
            CACHE_RULE,
            Action.WARN,
            now.lost,
            LEAST_TOKENS,
            "cached tokens lost",
            "run",
            "",
            CACHE_RULE,
            caches.warning,
            evidence,
        )
        event = ModelResult(run.info.run, charge.lane, charge.agent, now.at, model=charge.model)
        self._deciding.decide(run, run.lane(charge.lane), event, finding)


def changed_parts(before: PromptParts | None, now: PromptParts | None) -> set[str]:
    """The parts of a prompt that differ from those of the prompt before. New contents at its end change nothing."""
    if before is None or now is None:
        return set()
    pairs = {
        "tools": (before.tools, now.tools),
        "instruction": (before.instruction, now.instruction),
        "history": (before.history, now.beginning),
    }
    return {name for name, (old, new) in pairs.items() if old != new}
