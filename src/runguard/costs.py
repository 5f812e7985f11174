"""What a call may cost, what it did cost, and the dearest one seen: of a function whose cost nobody else knows."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from runguard.keywords import Settings, nano_of
from runguard.pricing import Pricing, Rates, Usage
from runguard.reading import Reading, Request

_log: Final = logging.getLogger("runguard")
_MOST_ROUNDS: Final = 100  # requests of one call whose bound is worth reckoning


class Costs:
    """The costs of one callable's calls, as its keywords, the price list and its calls tell them."""

    def __init__(self, name: str, settings: Settings, pricing: Pricing, clock: Callable[[], float]) -> None:
        self._name, self._settings, self._pricing, self._clock = name, settings, pricing, clock
        self.dearest: tuple[int | None, int | None] = (None if settings.in_usd else 0, None if settings.in_tokens else 0)  # nano-USD, tokens
        self._lock = threading.Lock()

    def bound(self, request: Request) -> tuple[int | None, int | None]:
        """The most that a call can take, nano-USD and tokens; None where nobody knows yet."""
        settings, (usd, tokens) = self._settings, self.dearest
        known, most = request.input_tokens, request.max_output_tokens
        if request.rounds > 1:
            return self._of_rounds(request)
        if settings.in_tokens and known is not None and most is not None:
            tokens = known + most
        if not settings.in_usd:
            return usd, tokens
        if settings.fixed_cost is not None:
            return settings.fixed_cost, tokens
        if known is not None and most is not None:
            if settings.cost_of_tokens is not None:
                told = self.asked(settings.cost_of_tokens, known, most)
                return (usd if told is None else told), tokens
            rates = self._pricing.rates(request.model, self._clock()) if request.model else None
            if isinstance(rates, Rates) and settings.cost_of_result is None:
                return rates.worst(known, most, request.audio_tokens), tokens
        return usd, tokens

    def _of_rounds(self, request: Request) -> tuple[int | None, int | None]:
        """The most that a call can take which the client may make several requests of.

        Each prompt holds the answers before it, and what functions returned. Nobody knows how long that is: as long as an answer may be
        is assumed, and a call that took more is remembered, as always.
        """
        settings, (usd, tokens) = self._settings, self.dearest
        known, most, rounds = request.input_tokens, request.max_output_tokens, request.rounds
        if settings.fixed_cost is not None:
            usd = settings.fixed_cost if settings.in_usd else usd
        if known is None or most is None or rounds > _MOST_ROUNDS:
            return usd, tokens
        prompts = [known + 2 * most * before for before in range(rounds)]
        if settings.in_tokens:
            tokens = max(tokens or 0, sum(prompts) + most * rounds)
        if not settings.in_usd or settings.fixed_cost is not None or settings.cost_of_result is not None:
            return usd, tokens
        bound: int | None = None
        if settings.cost_of_tokens is not None:
            bound = self.asked(settings.cost_of_tokens, sum(prompts), most * rounds)
        elif isinstance(rates := self._pricing.rates(request.model, self._clock()) if request.model else None, Rates):
            bound = sum(rates.worst(prompt, most, request.audio_tokens) for prompt in prompts)
        return (usd if bound is None else max(usd or 0, bound)), tokens

    def of(self, told: Reading, usage: Usage | None, result: Any) -> int | None:
        settings = self._settings
        if settings.fixed_cost is not None:
            return settings.fixed_cost
        if settings.cost_of_result is not None:
            return self.asked(settings.cost_of_result, result)
        if settings.cost_of_tokens is not None and usage is not None:
            return self.asked(settings.cost_of_tokens, usage.input, usage.output)
        return None if told.usd is None else nano_of(told.usd)

    def asked(self, cost: Callable[..., Any], *facts: Any) -> int | None:
        try:
            nano = nano_of(value := cost(*facts))
        except Exception:
            _log.warning("runguard.cost_failed: cost raised for '%s'", self._name, exc_info=True)
            return None
        if nano is None:
            _log.warning("runguard.cost_failed: cost gave %.80r for '%s', which is no amount of dollars", value, self._name)
        return nano

    def learn(self, nano: int | None, tokens: int) -> None:
        usd, most = self.dearest
        if (nano is None or (usd is not None and nano <= usd)) and (not tokens or (most is not None and tokens <= most)):
            return  # nothing dearer: no need to take turns
        with self._lock:
            usd, most = self.dearest
            if nano and self._settings.in_usd:
                usd = max(usd or 0, nano)
            if tokens and self._settings.in_tokens:
                most = max(most or 0, tokens)
            self.dearest = usd, most
