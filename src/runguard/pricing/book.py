"""Rates and limits per model id: what a user gave comes first, then the lists."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import Final, Generic, TypeVar

from runguard.core.errors import PolicyError
from runguard.pricing.given import ModelLimits, Price, rates_of
from runguard.pricing.model_ids import is_tuned, normalise
from runguard.pricing.model_limits import limits_of
from runguard.pricing.price_list import ListedPrice, PricesSource, price_list
from runguard.pricing.price_table import DAY_S, PriceTable
from runguard.pricing.rates import Rates, SearchPrice, Unpriced

_CACHE_SIZE: Final = 1024
_LONGEST_ID: Final = 512  # no model has a longer name; such names must not fill the cache
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999; a clock beyond it is broken, not a reason to fail
_EPOCH: Final = date(1970, 1, 1).toordinal()
_NEVER_ASKED: Final = Unpriced("", "a price of the user is always in force")
_T = TypeVar("_T")


class _Book(Generic[_T]):
    """What a user gave per model: by the id as it is, by the normalised id, by glob."""

    __slots__ = ("_exact", "_globs", "_normal")

    def __init__(self, given: Mapping[str, _T]) -> None:
        self._exact = dict(given)
        # of two spellings of one model, the plain one counts for all others
        self._normal = {
            normalise(model): value
            for model, value in sorted(given.items(), key=lambda item: item[0] == normalise(item[0]))
        }
        self._globs = [(pattern, value) for pattern, value in given.items() if any(sign in pattern for sign in "*?[")]

    def matches(self, model: str) -> Iterator[_T]:
        """Everything that fits, best first."""
        if model in self._exact:
            yield self._exact[model]
        normal = normalise(model)
        if normal in self._normal:
            yield self._normal[normal]
        yield from (
            value for pattern, value in self._globs if fnmatchcase(model, pattern) or fnmatchcase(normal, pattern)
        )


_Dated = tuple[tuple[float, Rates], ...]


def _dated(model: str, given: Price | Sequence[Price]) -> _Dated:
    """Rates with the unix time at which they begin, the newest first."""
    several = [given] if isinstance(given, Price) else list(given)
    if not several:
        raise PolicyError(f"prices.{model}: an empty list of prices; give at least one, or leave the model out")
    first_days = [price.since for price in several]
    if len(set(first_days)) != len(first_days):
        raise PolicyError(
            f"prices.{model}: two prices begin on the same day; give each but one a since=, all different"
        )
    begins = [-math.inf if day is None else (day.toordinal() - _EPOCH) * DAY_S for day in first_days]
    rates = [rates_of(price, "prices") for price in several]
    return tuple(sorted(zip(begins, rates, strict=True), key=lambda pair: pair[0], reverse=True))


class _Schedule:
    """What one model costs at any time: by the user's prices that have begun, else by the list."""

    __slots__ = ("_daily", "_given", "_listed", "_moments")

    def __init__(self, given: Sequence[_Dated], listed: ListedPrice | Unpriced) -> None:
        self._given = given
        self._listed = listed
        moments, daily = listed.moments if isinstance(listed, ListedPrice) else (set(), set())
        # unix seconds at which a price begins
        self._moments = sorted(moments.union(begins for dated in given for begins, _ in dated))
        self._daily = sorted(daily)  # seconds of the UTC day at which the price changes every day

    def rates(self, at: float) -> Rates | Unpriced:
        for dated in self._given:
            for begins, rates in dated:
                if begins <= at:
                    return rates
        return self._listed if isinstance(self._listed, Unpriced) else self._listed.rates(at)

    def span(self, at: float) -> tuple[float, float]:
        """From when and until when the price of this moment holds."""
        after = bisect_right(self._moments, at)
        since = self._moments[after - 1] if after else -math.inf
        until = self._moments[after] if after < len(self._moments) else math.inf
        if self._daily:
            midnight = at // DAY_S * DAY_S
            later = bisect_right(self._daily, at - midnight)
            since = max(since, midnight + self._daily[later - 1] - (0 if later else DAY_S))
            until = min(until, midnight + (self._daily[later] if later < len(self._daily) else self._daily[0] + DAY_S))
        return since, until


def _possible(at: float) -> float:
    """A moment within the calendar, also when the clock is broken."""
    return min(max(at, 0.0), _LAST_SECOND) if at == at else 0.0


def _keep(cache: dict[str, _T], model: str, value: _T) -> None:
    """Bounded, oldest out first: made-up model names must not fill the memory."""
    if len(model) > _LONGEST_ID:
        return
    while len(cache) >= _CACHE_SIZE and model not in cache:
        try:
            cache.pop(next(iter(cache)), None)
        except (StopIteration, RuntimeError):  # another thread has changed it meanwhile
            break
    cache[model] = value


class Pricing:
    """Rates and limits per model id: the user's first, then the lists. Safe to use from many threads."""

    __slots__ = ("_by_id", "_fallback", "_known_limits", "_models", "_prices", "_source", "_table")

    def __init__(
        self,
        prices: Mapping[str, Price | Sequence[Price]] = {},
        models: Mapping[str, ModelLimits] = {},
        fallback: Price | None = None,
        source: PricesSource = "table",
    ) -> None:
        self._prices = _Book({model: _dated(model, given) for model, given in prices.items()})
        self._models = _Book(dict(models))
        self._fallback = None if fallback is None else rates_of(fallback, "on_unpriced", estimated=True)
        self._source: PricesSource = source
        self._table: PriceTable | None = None
        # model: from when, until when, its rates between, and its rates at other times
        self._by_id: dict[str, tuple[float, float, Rates | Unpriced, _Schedule]] = {}
        self._known_limits: dict[str, tuple[int | None, int | None]] = {}

    def rates(self, model: str, at: float) -> Rates | Unpriced:
        """What the model costs at a moment (unix seconds). Found once and kept until the price changes, which some
        providers do by date and some by the hour.
        """
        if self._source != "table":
            self._follow_updates()
        known = self._by_id.get(model)
        if known is not None and known[0] <= at < known[1]:
            return known[2]
        schedule = self._schedule(model) if known is None else known[3]
        moment = _possible(at)
        found = schedule.rates(moment)
        if isinstance(found, Unpriced) and self._fallback is not None:
            found = self._fallback
        if isinstance(found, Rates) and (search := self._search_price(model)) is not None:
            found = found.with_searches(search)
        _keep(self._by_id, model, (*schedule.span(moment), found, schedule))
        return found

    def _search_price(self, model: str) -> SearchPrice | None:
        return next((given.search for given in self._models.matches(model) if given.search is not None), None)

    def limits(self, model: str) -> tuple[int | None, int | None]:
        """Context window and most output tokens; None: not known."""
        known = self._known_limits.get(model)
        if known is None:
            known = self._resolve_limits(model)
            _keep(self._known_limits, model, known)
        return known

    def _follow_updates(self) -> None:
        """Forget everything when genai-prices has updated its prices."""
        table = price_list(self._source)
        if table is not self._table:
            self._table = table
            self._by_id, self._known_limits = {}, {}

    def _schedule(self, model: str) -> _Schedule:
        if not model.strip() or len(model) > _LONGEST_ID:
            return _Schedule((), Unpriced(model[:80], "that is not a model id"))
        given = tuple(self._prices.matches(model))
        if given and given[0][-1][0] == -math.inf:
            return _Schedule(given, _NEVER_ASKED)
        if is_tuned(model):
            reason = (
                "it is a tuned model or endpoint, whose id does not tell the base model; give its price with prices="
            )
            return _Schedule(given, Unpriced(model, reason))
        return _Schedule(given, ListedPrice(model, price_list(self._source)))

    def _resolve_limits(self, model: str) -> tuple[int | None, int | None]:
        if not model.strip() or len(model) > _LONGEST_ID:
            return None, None
        given = next(self._models.matches(model), ModelLimits())
        window, output = given.context_window, given.max_output_tokens
        if window is not None and output is not None:
            return window, output
        table = limits_of(normalise(model))
        window = table[0] if window is None else window
        output = table[1] if output is None else output
        if window is None and not is_tuned(model):
            window = ListedPrice(model, price_list(self._source)).window
        return window, output
