"""What a call may cost, what it did cost, and the dearest one seen: of a function whose calls tell their cost only
afterwards.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from runguard.functions.keywords import Settings, nano_of
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.answers import Reading
from runguard.providers.prompts import Request

_log: Final = logging.getLogger("runguard")
_MOST_ROUNDS: Final = 100  # requests of one call whose bound is worth reckoning
ENOUGH_SEEN: Final = 64  # calls after which the dearest seen is taken for the most that one costs
_LONGEST: Final = 10**9  # tokens, beyond every prompt and answer
_FAR_DEARER: Final = 2  # times the dearest seen: what was learned before is worth nothing then


class Costs:
    """The costs of one callable's calls, as its keywords, the price list and its calls tell them."""

    def __init__(self, name: str, settings: Settings, pricing: Pricing, clock: Callable[[], float]) -> None:
        self._name, self._settings, self._pricing, self._clock = name, settings, pricing, clock
        # nano-USD, tokens
        self._unknown: tuple[int | None, int | None] = (
            None if settings.in_usd else 0,
            None if settings.in_tokens else 0,
        )
        # the dearest seen; and the same once enough were seen to rely on it
        self.dearest = self._relied_on = self._unknown
        self._seen = 0  # calls with a known cost, since one was far more expensive than all before
        self._lock = threading.Lock()

    @property
    def width(self) -> int:
        """How many calls of unknown cost may be out at once: half as many as have shown what one costs."""
        return max(self._seen // 2, 1)

    def bound(self, request: Request) -> tuple[int | None, int | None]:
        """The most that a call can take, nano-USD and tokens; None where that is not known, or not yet."""
        return self._bound(request, self._relied_on)

    def expected(self, request: Request) -> tuple[int | None, int | None]:
        """The most that a call can take, or else the dearest seen; None before the first one."""
        return self._bound(request, self.dearest)

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

    def _bound(self, request: Request, otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        """``otherwise``: for the units of which nothing is known beforehand."""
        settings, (usd, tokens) = self._settings, otherwise
        known, most = request.input_tokens, request.max_output_tokens
        if request.rounds > 1:
            return self._of_rounds(request, otherwise)
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

    def _of_rounds(self, request: Request, otherwise: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
        """The most that a call can take for which the client may make several requests.

        Each prompt holds the answers before it, and what functions returned. How long that is, is not known: it
        is assumed to be as long as an answer may be. A call that took more is remembered, as always.
        """
        settings, (usd, tokens), (dearest, longest) = self._settings, otherwise, self.dearest
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
            bound = self.asked(settings.cost_of_tokens, sum(prompts), most * rounds)
        elif isinstance(rates := self._pricing.rates(request.model, self._clock()) if request.model else None, Rates):
            bound = sum(rates.worst(prompt, most, request.audio_tokens) for prompt in prompts)
        return (usd if bound is None else max(dearest or 0, bound)), tokens

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
            _log.warning(
                "runguard.cost_failed: cost gave %.80r for '%s', which is no amount of dollars", value, self._name
            )
        return nano

    def learn(self, nano: int | None, tokens: int) -> None:
        """A call came back with its cost. ``nano`` None: not in dollars."""
        told = (nano if self._settings.in_usd else 0), (tokens if self._settings.in_tokens else 0)
        if (
            self._relied_on is self.dearest
            and _at_most(told[0], self.dearest[0])
            and _at_most(told[1], self.dearest[1])
        ):
            return  # nothing dearer
        with self._lock:
            if any(
                one is not None and before is not None and one > before * _FAR_DEARER
                for one, before in zip(told, self.dearest, strict=True)
            ):
                self._seen = 0
            usd, most = (
                before if one is None else max(before or 0, one) for one, before in zip(told, self.dearest, strict=True)
            )
            self.dearest = usd, most
            if usd is not None and most is not None:
                self._seen += 1
            # Calls that cost nothing teach nothing about those that do.
            is_enough = (
                self._seen >= ENOUGH_SEEN
                and (usd or not self._settings.in_usd)
                and (most or not self._settings.in_tokens)
            )
            self._relied_on = self.dearest if is_enough else self._unknown


def _at_most(told: int | None, dearest: int | None) -> bool:
    return told is not None and dearest is not None and told <= dearest
