"""What a user gives about models: prices in USD per million tokens, and limits."""

from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from runguard.core.money import fault_of_dollars, nanos, shown
from runguard.pricing.rates import Band, Rates, SearchPrice
from runguard.validation import SettingsModel

_LEAST_USD: Final = Decimal("1e-12")


def _usd(value: Any) -> Decimal:
    """Exact: 0.1 means 0.1, not the binary fraction nearest to it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError(f"{value!r} is not a price; give USD per million tokens, such as 0.3")
    try:
        usd = value if isinstance(value, Decimal) else Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError(f"{value!r} is not a number; give USD per million tokens, such as 0.3") from None
    if not usd.is_finite():
        raise ValueError(f"{value!r} is not a price; give a finite number of USD per million tokens")
    if usd < 0:
        raise ValueError(f"{value} is negative; a price in USD per million tokens is 0 or more")
    if 0 < usd < _LEAST_USD:
        raise ValueError(f"{value} USD per million tokens is not valid; use 0 for a free model")
    if usd >= 1_000_000:
        raise ValueError(f"{value} USD per million tokens is not valid; prices are per million tokens, not per token")
    return usd


def _usd_of_a_search(value: Any) -> Decimal:
    if fault := fault_of_dollars(value, 0):
        raise ValueError(f"{shown(value)}: {fault}")
    return Decimal(str(value))


USD = Annotated[Decimal, BeforeValidator(_usd)]
SearchUSD = Annotated[Decimal, BeforeValidator(_usd_of_a_search)]


class _TokenPrices(SettingsModel):
    """USD per million tokens. An omitted rate falls back to the most expensive rate that may apply."""

    input: USD = Field(description="Input tokens.")
    output: USD = Field(description="Output tokens, thinking included.")
    cached: USD | None = Field(default=None, description="Input tokens read from a cache. None: as input.")
    cache_write: USD | None = Field(default=None, description="Input tokens written to a cache. None: as input.")
    audio: USD | None = Field(default=None, description="Audio input tokens. None: as input.")
    cached_audio: USD | None = Field(
        default=None,
        description="Audio input tokens read from a cache. None: as audio if that is given, else as cached.",
    )
    audio_output: USD | None = Field(default=None, description="Audio output tokens. None: as output.")


class Tier(_TokenPrices):
    """Prices for the whole of a call whose input is longer than ``above`` tokens."""

    above: int = Field(ge=1, le=10**12, description="The tier applies to calls with more input tokens than this.")


class Price(_TokenPrices):
    """The price of a model in USD per million tokens, as given in ``prices=``."""

    tiers: tuple[Tier, ...] = Field(default=(), strict=False, description="Other prices for calls with long inputs.")
    since: date | None = Field(
        default=None,
        strict=False,
        description="First day (UTC) of this price; of several prices the latest that has begun applies.",
    )

    @field_validator("since", mode="before")
    @classmethod
    def _is_a_day(cls, value: Any) -> Any:
        if isinstance(value, (bool, int, float, datetime)):
            raise ValueError(f"{value!r} is not a day; give a date such as 2026-11-01")
        return value

    @model_validator(mode="after")
    def _tiers_differ(self) -> Self:
        starts = [tier.above for tier in self.tiers]
        if len(set(starts)) != len(starts):
            raise ValueError("two tiers begin at the same number of input tokens; keep one of them")
        return self


class ModelLimits(SettingsModel):
    """What a model can take and give, as given in ``models=``."""

    context_window: int | None = Field(
        default=None, ge=1, le=10**12, description="Input tokens that fit. None: what is known about the model."
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, le=10**12, description="Output tokens of one call. None: what is known about the model."
    )
    search_price: SearchUSD | None = Field(
        default=None, description="USD of one web search on the model's side. None: searches are counted, not billed."
    )
    search_billing: Literal["search", "call"] = Field(
        default="search", description="'call': all searches of a call cost search_price together."
    )
    max_searches: int = Field(
        default=1, ge=0, le=1_000, description="Searches of one call whose price is reserved before the call."
    )

    @property
    def search(self) -> SearchPrice | None:
        """The price of searches, if there is one."""
        if self.search_price is None:
            return None
        return SearchPrice(nanos(self.search_price, up=True), self.max_searches, self.search_billing == "call")


def rates_of(price: Price, source: str, *, estimated: bool = False) -> Rates:
    """A user's price as rates; ``source`` says where it was given."""
    return Rates([_band(-1, price), *(_band(tier.above, tier) for tier in price.tiers)], source, estimated=estimated)


def _band(above: int, price: _TokenPrices) -> Band:
    plain, out = nanos(price.input, up=True), nanos(price.output, up=True)
    cached = plain if price.cached is None else nanos(price.cached, up=True)
    audio = plain if price.audio is None else nanos(price.audio, up=True)
    # a discount on cached text says nothing about audio once audio has its own price
    cached_audio = cached if price.audio is None else max(audio, cached)
    return Band(
        above=above,
        input=plain,
        output=out,
        cached=cached,
        cache_write=plain if price.cache_write is None else nanos(price.cache_write, up=True),
        audio=audio,
        cached_audio=cached_audio if price.cached_audio is None else nanos(price.cached_audio, up=True),
        audio_output=out if price.audio_output is None else nanos(price.audio_output, up=True),
    )
