"""Rates and limits per model id: what a user gave comes first, then the lists."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final, Generic, TypeVar

from runguard.core.exceptions import PolicyError
from runguard.pricing.given import ModelLimits, Price, rates_of
from runguard.pricing.model_ids import is_tuned, normalise
from runguard.pricing.model_limits import limits_of
from runguard.pricing.price_list import listed_rates, listed_window
from runguard.pricing.rates import Rates, Unpriced

_CACHE_SIZE: Final = 1024
_LONGEST_ID: Final = 512  # a longer name is no model, and must not be kept in a cache
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999; a clock beyond it is broken, not a reason to fail
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_T = TypeVar("_T")


class _Book(Generic[_T]):
    """What a user gave per model: by the id as it is, by the normalised id, by glob."""

    __slots__ = ("_exact", "_globs", "_normal")

    def __init__(self, given: Mapping[str, _T]) -> None:
        self._exact = dict(given)
        # of two spellings of one model, the plain one speaks for all others
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


def _dated(model: str, given: Price | Sequence[Price]) -> tuple[tuple[date, Rates], ...]:
    """Rates with their first day, the newest first."""
    several = [given] if isinstance(given, Price) else list(given)
    if not several:
        raise PolicyError(f"prices.{model}: an empty list of prices; give at least one, or leave the model out")
    first_days = [price.since or date.min for price in several]
    if len(set(first_days)) != len(first_days):
        raise PolicyError(
            f"prices.{model}: two prices begin on the same day; give each but one a since=, all different"
        )
    return tuple(
        sorted(
            ((day, rates_of(price, "prices")) for day, price in zip(first_days, several, strict=True)),
            key=lambda pair: pair[0],
            reverse=True,
        )
    )


def _in_force(dated: tuple[tuple[date, Rates], ...], today: date) -> Rates | None:
    return next((rates for first_day, rates in dated if first_day <= today), None)


def _moment(at: float) -> datetime:
    return _EPOCH + timedelta(seconds=min(max(at, 0), _LAST_SECOND) if at == at else 0)


def _keep(cache: dict[str, _T], model: str, value: _T) -> None:
    """Bounded, oldest out first: made-up model names must not fill the memory."""
    if len(model) > _LONGEST_ID:
        return
    while len(cache) >= _CACHE_SIZE and model not in cache:
        try:
            cache.pop(next(iter(cache)), None)
        except (StopIteration, RuntimeError):  # another thread is at it as well
            break
    cache[model] = value


class Pricing:
    """Rates and limits per model id: the user's first, then the lists. Safe to use from many threads."""

    __slots__ = ("_by_id", "_fallback", "_known_limits", "_models", "_prices")

    def __init__(
        self,
        prices: Mapping[str, Price | Sequence[Price]] = {},
        models: Mapping[str, ModelLimits] = {},
        fallback: Price | None = None,
    ) -> None:
        self._prices = _Book({model: _dated(model, given) for model, given in prices.items()})
        self._models = _Book(dict(models))
        self._fallback = None if fallback is None else rates_of(fallback, "on_unpriced", estimated=True)
        self._by_id: dict[str, tuple[float, Rates | Unpriced]] = {}
        self._known_limits: dict[str, tuple[int | None, int | None]] = {}

    def rates(self, model: str, at: float) -> Rates | Unpriced:
        """What the model costs at a moment (unix seconds). Prices change by date and, with some providers, by
        hour: an answer holds for the minute it was given for."""
        minute = at // 60
        known = self._by_id.get(model)
        if known is not None and known[0] == minute:
            return known[1]
        found = self._resolve(model, at)
        if isinstance(found, Unpriced) and self._fallback is not None:
            found = self._fallback
        _keep(self._by_id, model, (minute, found))
        return found

    def limits(self, model: str) -> tuple[int | None, int | None]:
        """Context window and most output tokens; None: not known."""
        known = self._known_limits.get(model)
        if known is None:
            known = self._resolve_limits(model)
            _keep(self._known_limits, model, known)
        return known

    def _resolve(self, model: str, at: float) -> Rates | Unpriced:
        if not model.strip() or len(model) > _LONGEST_ID:
            return Unpriced(model[:80], "that is no model id")
        moment = _moment(at)
        today = moment.date()
        for dated in self._prices.matches(model):
            if (price := _in_force(dated, today)) is not None:
                return price
        if is_tuned(model):
            return Unpriced(
                model,
                "it is a tuned model or endpoint, whose id does not tell the base model; give its price with prices=",
            )
        return listed_rates(model, moment)

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
            window = listed_window(model)
        return window, output
