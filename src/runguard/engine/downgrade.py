"""A switch to a cheaper model, when a budget reaches a ``Threshold(model=…)``.

Setting: the ``model`` of a budget's thresholds. Adapters ask ``model_choice`` of the guard which model to call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NamedTuple

from runguard.core.decision import Action, Finding, Money
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall
from runguard.core.money import to_usd, usd_text
from runguard.engine.budgets import Fired, reached_thresholds
from runguard.engine.charges import Charge
from runguard.engine.context import GuardContext
from runguard.engine.runs import Run
from runguard.policy.settings import switching
from runguard.pricing.rates import Rates, Usage, normalise

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


class Downgrades:
    """Chooses the models of one guard's calls, where a threshold names a model.

    An adapter calls ``choose`` before it checks and reserves a model call, so that everything after it is about the
    model that will answer. The switch is made at a safe point only: the new model's window fits the prompt, the call
    costs less with it, the lost prompt cache included, and the adapter sees no obstacle, such as an open tool call. It
    is taken back when the budget is no longer beyond the threshold: its next window began, or it was extended.
    """

    def __init__(self, context: GuardContext) -> None:
        self._accounts, self._deciding = context.accounts, context.deciding
        if not switching(context.policy.budgets):
            return
        if not context.options.get("switches_models"):
            raise PolicyError(
                "Threshold(model=…): the model cannot be switched here; it works in RunGuardPlugin, install() and "
                "RunGuardMiddleware. Remove model=, or guard the agent with one of them"
            )
        context.model_choice = self
        context.sink.on("cached", "settle", self._settled)
        context.sink.on("run facts", "snapshot", lambda run: _facts(_of(run).switched))

    def has_chosen(self, run: Run, lane: str, agent: str) -> bool:
        """Return whether an agent of a lane has another model than its own."""
        return (lane, agent) in _of(run).switched

    def _settled(self, run: Run, charge: Charge, usage: Usage, model: str) -> None:
        """Remember what the model of an agent has in its cache."""
        prompts = _of(run).prompts
        if len(prompts) >= _AGENTS_KEPT:
            prompts.clear()
        prompts[charge.lane, charge.agent] = CachedPrompt(charge.model, usage.input, usage.cached, usage.cache_write)

    def choose(self, run: Run, event: ModelCall, has_open_call: Callable[[], bool], obstacle: Obstacle) -> str:
        """Return the model that the call should go to, "" for its own. Enforcing, the event then names that model.

        ``has_open_call``: a tool call in the conversation is not answered yet, so the switch or the way back waits.

        Every switch, every way back and every refused switch is reported once.
        """
        switched, key = _of(run).switched, (event.lane, event.agent)
        before = switched.get(key)
        if before is not None and before.asked != event.model:
            before = None  # the agent has another model of its own now
        chosen = self._cheaper(run, event, before, has_open_call, obstacle)
        if chosen is None and before is not None and has_open_call() and not self._does_not_fit(event, before.model):
            chosen = before
        if not self._deciding.enforces:
            return "" if chosen is None else chosen.model
        if chosen is None:
            if switched.pop(key, None) is not None and before is not None:
                self._say(run, event, before.model, f"back:{before.model}", f"is back on {event.model}", None)
            return ""
        if before is None or before.model != chosen.model:
            if len(switched) >= _AGENTS_KEPT:
                switched.clear()
            switched[key] = chosen
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
        reached = reached_thresholds(self._accounts.finder.of_call(run.run_costs, event))
        for one in sorted(reached, key=lambda one: one.threshold.percent, reverse=True):
            model = one.threshold.model
            if model is None or not one.threshold.is_for(event.agent):
                continue
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
                return SwitchedModel(event.model, model, _because(one))
            self._say(run, event, model, "not", f"stays on {event.model}: {why_not}", one)
        return None

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
        last = _of(run).prompts.get((event.lane, event.agent))
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

    def _say(self, run: Run, event: ModelCall, model: str, kind: str, text: str, reached: Fired | None) -> None:
        about, money = f"agent {event.agent} {text}", None
        spent: Decimal | int = 0
        limit: Decimal | int = 0
        unit = "model switches"
        key = f"{kind}:{event.agent}:{event.model}:{model}"
        if reached is not None:
            account, status = reached.account, reached.status
            held = to_usd(account.due_usd - account.spent_usd)
            money = Money(reached.group.per.kind, account.scope, to_usd(account.spent_usd), held, account.ends)
            about = f"{_because(reached)}: {about}"
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


@dataclass(slots=True)
class _RunModels:
    """What is known of the models of one run, by lane and agent."""

    switched: dict[tuple[str, str], SwitchedModel] = field(default_factory=dict)  # those that are not the agent's own
    prompts: dict[tuple[str, str], CachedPrompt] = field(default_factory=dict)  # once a call has read from a cache


def _of(run: Run) -> _RunModels:
    models: _RunModels = run.notes.setdefault(SWITCH_RULE, _RunModels())
    return models


def _facts(switched: dict[tuple[str, str], SwitchedModel]) -> dict[str, Any]:
    facts = {
        agent: {"from": one.asked, "to": one.model, "because": one.because}
        for (_, agent), one in list(switched.items())
    }
    return {"switched": facts} if facts else {}


def _because(reached: Fired) -> str:
    return f"{reached.threshold.percent:.0%} of the budget of {reached.account.scope} is spent"


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
