"""Conditions on the usage of a run: time, tokens, money."""

import time
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from runguard.core.errors import PolicyError
from runguard.core.money import to_count, to_nano, to_usd, usd_text
from runguard.policy.settings import Policy
from runguard.pricing.book import Price, Pricing
from runguard.pricing.rates import Unpriced, Usage
from runguard.termination.arguments import seconds_of, text_of
from runguard.termination.condition import Event, TerminationCondition
from runguard.termination.reading import CallTaken, ModelCallReader

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
    """Fires at a number of tokens of all model calls: in total, of prompts (tool prompts included), or of completions
    (thinking included).
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
