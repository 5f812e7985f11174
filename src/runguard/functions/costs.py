"""What a call of a guarded function may cost, what it did cost, and the highest cost so far."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from runguard.functions.keywords import GuardSettings, nano_of
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.messages import Reading, Request

_log: Final = logging.getLogger("runguard")
_MOST_ROUNDS: Final = 100  # requests of one call for which a bound is computed
ENOUGH_SEEN: Final = 64  # calls after which the highest cost so far counts as the most that one costs
_LONGEST: Final = 10**9  # tokens, beyond every prompt and answer
_FAR_HIGHER: Final = 2  # times the highest cost so far: then the count of known costs starts again


class Costs:
    """The costs of one callable, from its keywords, the price list and its own calls."""

    def __init__(self, name: str, settings: GuardSettings, pricing: Pricing, clock: Callable[[], float]) -> None:
        self._name, self._settings, self._pricing, self._clock = name, settings, pricing, clock
        # nano-USD, tokens
        self._unknown: tuple[int | None, int | None] = (
            None if settings.in_usd else 0,
            None if settings.in_tokens else 0,
        )
        # the highest cost so far; and the same once there were enough calls to rely on it
        self.highest = self._relied_on = self._unknown
        # whether what calls cost says anything new: not where the user has fixed it
        self.learns = settings.in_tokens or (settings.in_usd and settings.fixed_cost is None)
        self._seen = 0  # calls with a known cost, since one was far more expensive than all before
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """How many calls of unknown cost may run at once: half as many as have reported their cost."""
        return max(self._seen // 2, 1)

    def bound(
        self, request: Request, otherwise: tuple[int | None, int | None] | None = None
    ) -> tuple[int | None, int | None]:
        """The most that a call can take, nano-USD and tokens; None: unknown.

        ``otherwise``: the figures for units without a bound, by default the highest cost of many calls.
        """
        settings, known, most = self._settings, request.input_tokens, request.max_output_tokens
        usd, tokens = otherwise or self._relied_on
        if request.rounds > 1:
            return self._of_rounds(request, (usd, tokens))
        if settings.in_tokens and known is not None and most is not None:
            tokens = known + most
        if not settings.in_usd:
            return usd, tokens
        if settings.fixed_cost is not None:
            return settings.fixed_cost, tokens
        if known is not None and most is not None:
            if settings.cost_of_tokens is not None:
                nano = self.ask(settings.cost_of_tokens, known, most)
                return (usd if nano is None else nano), tokens
            rates = self._pricing.rates(request.model, self._clock()) if request.model else None
            if isinstance(rates, Rates) and settings.cost_of_result is None:
                return rates.worst(known, most, request.audio_tokens), tokens
        return usd, tokens

    def expected(self, request: Request) -> tuple[int | None, int | None]:
        """The most that a call can take, or else the highest cost so far; None before the first call."""
        return self.bound(request, self.highest)

    def of_model(self, request: Request) -> tuple[int, int] | None:
        """The most that any call of the request's model can take: its longest answer to this prompt, or to the longest
        that it accepts.
        """
        settings = self._settings
        if (
            not request.model
            or request.rounds > 1
            or settings.fixed_cost is not None
            or settings.cost_of_tokens is not None
            or settings.cost_of_result is not None
        ):
            return None
        rates = self._pricing.rates(request.model, self._clock())
        if settings.in_usd and not isinstance(rates, Rates):
            return None
        if isinstance(rates, Rates) and not settings.in_tokens and not rates.worst(_LONGEST, _LONGEST, _LONGEST):
            return 0, 0  # it is free, however long
        window, most = self._pricing.limits(request.model)
        prompt = window if request.input_tokens is None else request.input_tokens
        most = most if request.max_output_tokens is None else request.max_output_tokens
        if prompt is None or most is None:
            return None
        audio = prompt if request.input_tokens is None else request.audio_tokens
        return (rates.worst(prompt, most, audio) if isinstance(rates, Rates) else 0), prompt + most

    def _of_rounds(self, request: Request, otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        """The most that a call can take when the client may make several requests for it.

        Each prompt holds the answers before it and what functions returned. The length of a function's result is
        unknown: it is assumed to be as long as the longest answer.
        """
        settings, (usd, tokens), (highest, longest) = self._settings, otherwise, self.highest
        known, most, rounds = request.input_tokens, request.max_output_tokens, request.rounds
        if settings.fixed_cost is not None:
            usd = settings.fixed_cost if settings.in_usd else usd
        if known is None or most is None or rounds > _MOST_ROUNDS:
            return usd, tokens
        prompts = [known + 2 * most * before for before in range(rounds)]
        if settings.in_tokens:
            tokens = max(longest or 0, sum(prompts) + most * rounds)
        if not settings.in_usd or settings.fixed_cost is not None or settings.cost_of_result is not None:
            return usd, tokens
        bound: int | None = None
        if settings.cost_of_tokens is not None:
            bound = self.ask(settings.cost_of_tokens, sum(prompts), most * rounds)
        elif isinstance(rates := self._pricing.rates(request.model, self._clock()) if request.model else None, Rates):
            bound = sum(rates.worst(prompt, most, request.audio_tokens) for prompt in prompts)
        return (usd if bound is None else max(highest or 0, bound)), tokens

    def of(self, reading: Reading, usage: Usage | None, result: Any) -> int | None:
        settings = self._settings
        if settings.fixed_cost is not None:
            return settings.fixed_cost
        if settings.cost_of_result is not None:
            return self.ask(settings.cost_of_result, result)
        if settings.cost_of_tokens is not None and usage is not None:
            return self.ask(settings.cost_of_tokens, usage.input, usage.output)
        return None if reading.usd is None else nano_of(reading.usd)

    def ask(self, cost: Callable[..., Any], *facts: Any) -> int | None:
        try:
            nano = nano_of(value := cost(*facts))
        except Exception:
            _log.warning("runguard.cost_failed: cost raised for '%s'", self._name, exc_info=True)
            return None
        if nano is None:
            _log.warning(
                "runguard.cost_failed: cost gave %.80r for '%s', which is not an amount in dollars", value, self._name
            )
        return nano

    def learn(self, nano: int | None, tokens: int) -> None:
        """A call returned with its cost. ``nano`` None: unknown in dollars."""
        cost = (nano if self._settings.in_usd else 0), (tokens if self._settings.in_tokens else 0)
        dearest, longest = self.highest
        if (
            self._relied_on is self.highest
            and cost[0] is not None
            and dearest is not None
            and longest is not None
            and cost[0] <= dearest
            and cost[1] <= longest
        ):
            return  # not higher
        with self._lock:
            if any(
                one is not None and before is not None and one > before * _FAR_HIGHER
                for one, before in zip(cost, self.highest, strict=True)
            ):
                self._seen = 0
            usd, most = (
                before if one is None else max(before or 0, one) for one, before in zip(cost, self.highest, strict=True)
            )
            self.highest = usd, most
            if usd is not None and most is not None:
                self._seen += 1
            # Calls that cost nothing say nothing about those that do.
            is_enough = (
                self._seen >= ENOUGH_SEEN
                and (usd or not self._settings.in_usd)
                and (most or not self._settings.in_tokens)
            )
            self._relied_on = self.highest if is_enough else self._unknown
