"""Tokens -> money. All money is whole nano-USD inside, rounded up once per call; ``Decimal`` only at the edge, ``float`` never.

Prices come from the user (``prices=``), else from genai-prices, which is imported when the first price is needed. An unknown price
is never zero: it is ``Unpriced`` with a reason, or the rate the user gave for unknown models.

Not in these sums, because no token count tells them: fees per search or per hour of audio, storage of caches, batch and priority
tariffs, a cache kept for an hour instead of five minutes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, NamedTuple, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from runguard.errors import PolicyError
from runguard.model_limits import is_release_of, limits_of

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, Provider

NANO: Final = 1_000_000_000
UNLIMITED: Final = 2**63 - 1  # affordable_output() when output costs nothing
_MTOK: Final = 1_000_000
_CACHE_SIZE: Final = 1024
_LONGEST_ID: Final = 512  # a longer name is no model, and must not be kept in a cache
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999; a clock beyond it is broken, not a reason to fail
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LEAST_USD: Final = Decimal("1e-12")
_T = TypeVar("_T")


@dataclass(slots=True)
class Usage:
    """The tokens of one model call."""

    input: int = 0  # every input token: cached, audio, tool-use prompt tokens included
    output: int = 0  # every output token, thinking included
    cached: int = 0  # of input: read from a cache
    cache_write: int = 0  # of input: written to a cache
    audio: int = 0  # of input
    cached_audio: int = 0  # of cached, and of audio
    audio_output: int = 0  # of output
    thinking: int = 0  # of output; billed as output


# ---- what a user gives ----------------------------------------------------------------------------------------------


def _usd(value: Any) -> Decimal:
    """Exact: 0.1 means 0.1, not the binary fraction nearest to it."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise ValueError(f"{value!r} is no price; give USD per million tokens, such as 0.3")
    try:
        usd = value if isinstance(value, Decimal) else Decimal(str(value).strip())
    except InvalidOperation:
        raise ValueError(f"{value!r} is no number; give USD per million tokens, such as 0.3") from None
    if not usd.is_finite():
        raise ValueError(f"{value!r} is no price; give a finite number of USD per million tokens")
    if usd < 0:
        raise ValueError(f"{value} is negative; a price in USD per million tokens is 0 or more")
    if 0 < usd < _LEAST_USD:
        raise ValueError(f"{value} USD per million tokens cannot be meant; give 0 for a model that is free")
    if usd >= 1_000_000:
        raise ValueError(f"{value} USD per million tokens cannot be meant; prices are per million tokens, not per token")
    return usd


USD = Annotated[Decimal, BeforeValidator(_usd)]
_FORBID: Final = ConfigDict(frozen=True, extra="forbid", strict=True)


class _TokenPrices(BaseModel):
    """USD per million tokens. What is left out falls back to the dearest rate it can have meant."""

    model_config = _FORBID

    input: USD = Field(description="Input tokens.")
    output: USD = Field(description="Output tokens, thinking included.")
    cached: USD | None = Field(None, description="Input tokens read from a cache. None: as input.")
    cache_write: USD | None = Field(None, description="Input tokens written to a cache. None: as input.")
    audio: USD | None = Field(None, description="Audio input tokens. None: as input.")
    cached_audio: USD | None = Field(None, description="Audio input tokens read from a cache. None: as audio if that is given, else as cached.")
    audio_output: USD | None = Field(None, description="Audio output tokens. None: as output.")


class Tier(_TokenPrices):
    """Prices for the whole of a call whose input is longer than ``above`` tokens."""

    above: int = Field(ge=1, le=10**12, description="The tier applies to calls with more input tokens than this.")


class Price(_TokenPrices):
    """The price of a model in USD per million tokens, as given in ``prices=``."""

    tiers: tuple[Tier, ...] = Field((), strict=False, description="Other prices for calls with long inputs.")
    since: date | None = Field(None, strict=False, description="First day (UTC) of this price; of several prices the latest that has begun applies.")

    @field_validator("since", mode="before")
    @classmethod
    def _is_a_day(cls, value: Any) -> Any:
        if isinstance(value, (bool, int, float, datetime)):
            raise ValueError(f"{value!r} is no day; give a date such as 2026-11-01")
        return value

    @model_validator(mode="after")
    def _tiers_differ(self) -> Self:
        starts = [tier.above for tier in self.tiers]
        if len(set(starts)) != len(starts):
            raise ValueError("two tiers begin at the same number of input tokens; keep one of them")
        return self


class ModelLimits(BaseModel):
    """What a model can take and give, as given in ``models=``."""

    model_config = _FORBID

    context_window: int | None = Field(None, ge=1, le=10**12, description="Input tokens that fit. None: what is known about the model.")
    max_output_tokens: int | None = Field(None, ge=1, le=10**12, description="Output tokens of one call. None: what is known about the model.")


# ---- resolved rates -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unpriced:
    """There is no price for a model, and why."""

    model: str
    reason: str

    def __str__(self) -> str:
        return f"model '{self.model}' has no price: {self.reason}"


class _Band(NamedTuple):
    """Rates in nano-USD per million tokens, for calls with more than ``above`` input tokens."""

    above: int
    input: int
    output: int
    cached: int
    cache_write: int
    audio: int
    cached_audio: int
    audio_output: int


def _band(above: int, price: _TokenPrices) -> _Band:
    plain, out = _rate(price.input), _rate(price.output)
    cached = plain if price.cached is None else _rate(price.cached)
    audio = plain if price.audio is None else _rate(price.audio)
    # a discount on cached text says nothing about audio once audio has its own price
    cached_audio = cached if price.audio is None else max(audio, cached)
    return _Band(
        above=above,
        input=plain,
        output=out,
        cached=cached,
        cache_write=plain if price.cache_write is None else _rate(price.cache_write),
        audio=audio,
        cached_audio=cached_audio if price.cached_audio is None else _rate(price.cached_audio),
        audio_output=out if price.audio_output is None else _rate(price.audio_output),
    )


def _rate(usd: Decimal) -> int:
    """Nano-USD, rounded up. By integers, because Decimal arithmetic obeys a context that the host program may have changed."""
    numerator, denominator = usd.as_integer_ratio()
    return -(-numerator * NANO // denominator)


class Rates:
    """What a model's tokens cost. ``estimated``: not the list price of exactly these tokens, but never below it on purpose."""

    __slots__ = ("_base", "_fee", "_first", "_long", "_worst", "estimated", "source")

    def __init__(self, bands: Sequence[_Band], source: str, *, estimated: bool = False, fee: int = 0) -> None:
        ascending = sorted(bands)
        self.source = source
        self.estimated = estimated
        self._fee = fee  # per call, in nano-USD times a million, as the sums of tokens are
        self._base = ascending[0]
        self._long = tuple(reversed(ascending[1:]))
        self._first = ascending[1].above if self._long else UNLIMITED
        # (above, text, audio, output), longest first. "At most" so many tokens may also mean fewer, so a cheaper long tier must not
        # lower the bound: each level is at least as dear as the one before.
        worst: list[tuple[int, int, int, int]] = []
        text = audio = out = 0
        for band in ascending:
            text = max(text, band.input, band.cached, band.cache_write)
            audio = max(audio, text, band.audio, band.cached_audio)
            out = max(out, band.output, band.audio_output)
            worst.append((band.above, text, audio, out))
        self._worst = tuple(reversed(worst))

    def __repr__(self) -> str:
        usd = Decimal(self._base.input) / NANO, Decimal(self._base.output) / NANO
        return f"Rates({usd[0]:f}/{usd[1]:f} USD per million tokens in/out, {self.source}{', estimated' if self.estimated else ''})"

    def cost(self, usage: Usage) -> int:
        """Nano-USD, rounded up. Counts that contradict each other are cut to fit, the dear ones kept."""
        tokens, cached, write, audio, cached_audio = usage.input, usage.cached, usage.cache_write, usage.audio, usage.cached_audio
        output, audio_output = usage.output, usage.audio_output
        plain = tokens - cached - write - audio + cached_audio
        if plain < 0 or cached_audio < 0 or cached < cached_audio or audio < cached_audio or write < 0 or audio_output < 0 or output < audio_output:
            return self.cost(_consistent(usage))
        band = self._base
        if tokens > self._first:
            for band in self._long:
                if tokens > band[0]:
                    break
        _, r_input, r_output, r_cached, r_write, r_audio, r_cached_audio, r_audio_output = band
        total = plain * r_input + (output - audio_output) * r_output + self._fee
        if cached:
            total += (cached - cached_audio) * r_cached
        if write:
            total += write * r_write
        if audio:
            total += (audio - cached_audio) * r_audio + cached_audio * r_cached_audio
        if audio_output:
            total += audio_output * r_audio_output
        return -(-total // _MTOK)

    def worst(self, input: int, output: int, audio: int = 0) -> int:  # noqa: A002
        """Nano-USD that a call with at most these tokens can cost; ``audio`` is the part of ``input`` that may be audio."""
        total, rate = self._worst_input(input, audio)
        return -(-(total + max(output, 0) * rate) // _MTOK)

    def affordable_output(self, nano: int, input: int, audio: int = 0) -> int:  # noqa: A002
        """The most output tokens with which the worst case still costs no more than ``nano``; -1 when the input alone costs more."""
        total, rate = self._worst_input(input, audio)
        left = nano * _MTOK - total
        if left < 0:
            return -1
        return left // rate if rate else UNLIMITED

    def _worst_input(self, tokens: int, audio: int) -> tuple[int, int]:
        tokens = max(tokens, 0)
        audio = min(max(audio, 0), tokens)
        text_rate = audio_rate = output_rate = 0
        for above, text_rate, audio_rate, output_rate in self._worst:  # noqa: B007
            if tokens > above:
                break
        return (tokens - audio) * text_rate + audio * audio_rate + self._fee, output_rate


def _consistent(usage: Usage) -> Usage:
    """The same totals with parts that fit into them; when they cannot all be true, the discounted ones give way."""
    tokens, output = max(usage.input, 0), max(usage.output, 0)
    overlap = max(min(usage.cached_audio, usage.cached, usage.audio), 0)
    left = tokens
    write = min(max(usage.cache_write, 0), left)
    left -= write
    audio = min(max(usage.audio - overlap, 0), left)
    left -= audio
    overlap = min(overlap, left)
    left -= overlap
    cached = min(max(usage.cached - overlap, 0), left)
    return Usage(
        input=tokens,
        output=output,
        cached=cached + overlap,
        cache_write=write,
        audio=audio + overlap,
        cached_audio=overlap,
        audio_output=min(max(usage.audio_output, 0), output),
    )


def _rates_of(price: Price, source: str, *, estimated: bool = False) -> Rates:
    return Rates([_band(-1, price), *(_band(tier.above, tier) for tier in price.tiers)], source, estimated=estimated)


# ---- model ids ------------------------------------------------------------------------------------------------------

_RESOURCE: Final = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?publishers/[^/]+/models/(?=.)")
_TUNED: Final = re.compile(r"(?:^|/)(?:endpoints|tunedmodels)/|^projects/[^/]+/locations/[^/]+/models/")
_PINNED: Final = re.compile(r"@(\d+)$")
_BEDROCK: Final = re.compile(r"(?:[a-z]{2,6}(?:-gov)?\.)?(?:anthropic|amazon|meta|mistral|cohere|ai21|deepseek|openai|qwen)\.(?=[a-z])")
_BEDROCK_RELEASE: Final = re.compile(r"(?:-v\d+)?(?::\d+)?$")
_VERSION: Final = re.compile(r"-(?:\d{3}|\d{8}|\d{4}-\d{2}-\d{2})$")
_COMPACT_DATE: Final = re.compile(r"-(20\d{2})(\d{2})(\d{2})$")
_PREFIXES: Final = {
    # first part of a model id as LiteLLM writes it: the provider as genai-prices names it
    "anthropic": "anthropic",
    "azure": "azure",
    "azure_ai": "azure",
    "bedrock": "aws",
    "bedrock_converse": "aws",
    "cerebras": "cerebras",
    "cohere": "cohere",
    "cohere_chat": "cohere",
    "databricks": "databricks",
    "deepseek": "deepseek",
    "fireworks_ai": "fireworks",
    "gemini": "google",
    "github_copilot": "github-copilot",
    "google": "google",
    "groq": "groq",
    "mistral": "mistral",
    "models": "google",
    "moonshot": "moonshotai",
    "novita": "novita",
    "openai": "openai",
    "openrouter": "openrouter",
    "perplexity": "perplexity",
    "together_ai": "together",
    "vertex_ai": "google",
    "vertex_ai_beta": "google",
    "voyage": "voyageai",
    "xai": "x-ai",
}
_MAKERS: Final = frozenset({"anthropic", "google", "openai"})  # whose models go by their bare names


def normalise(model: str) -> str:
    """The model id as price lists know it: no resource path, no provider, lower case, ``@20250929`` as ``-20250929``."""
    return _split(model)[1]


def _split(model: str) -> tuple[str | None, str, str]:
    """Provider if the id names one, the id alone, and the id as that provider writes it."""
    name = model.strip().lower()
    provider: str | None = None
    named = ""
    if (path := _RESOURCE.match(name)) is not None:  # publishers are sold by Vertex, whoever made the model
        provider, name = "google", name[path.end() :]
        named = name
    while (slash := name.find("/")) > 0 and (prefix := _PREFIXES.get(name[:slash])) is not None and slash + 1 < len(name):
        name = name[slash + 1 :]
        if provider is None:
            provider, named = prefix, name
    if provider == "aws":  # bedrock/us-east-1/…, bedrock/converse/…, an inference profile's ARN
        name = named = name.rpartition("/")[2]
    elif name.startswith("ft:") and provider is None:
        provider = "openai"
    named = named or name
    name = name.removesuffix("@default").removesuffix("@latest")
    name = _PINNED.sub(r"-\1", name)
    if provider in (None, "aws") and (vendor := _BEDROCK.match(name)) is not None:
        provider = "aws"
        name = _BEDROCK_RELEASE.sub("", name[vendor.end() :])
    return provider, name, named


# ---- genai-prices ---------------------------------------------------------------------------------------------------


def preload() -> None:
    """Import genai-prices and its data now, off the path of a run. Any number of times, from any thread."""
    _snapshot()


def _snapshot() -> "DataSnapshot | None":
    """The price list; None when the package is not there. Python's import lock makes the first use safe between threads."""
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return None
    return get_snapshot()


def _source(snapshot: "DataSnapshot") -> str:
    from genai_prices import __version__

    return f"genai-prices {__version__}" + (f", updated {snapshot.timestamp:%Y-%m-%d}" if snapshot.from_auto_update else "")


def _listed(snapshot: "DataSnapshot", model: str) -> "tuple[ModelInfo, bool] | None":
    """The entry for a model, and whether it is one of the provider that the id names (or names none).

    Not by the package's own lookup: that keeps every name it is asked for, for ever, and takes a name that merely begins like a
    model for that model.
    """
    provider, name, named = _split(model)
    seller = next((p for p in snapshot.providers if p.id == provider), None)
    if seller is not None:
        for spelling in dict.fromkeys((named, *_spellings(name))):
            for listing in (seller, *_fallbacks(seller, snapshot)):
                if (info := _find(listing, spelling, paths=True)) is not None:
                    return info, True
    for spelling in _spellings(name):
        for maker in snapshot.providers:
            known_by_name = maker.id in _MAKERS or (maker.model_match is not None and maker.model_match.is_match(spelling))
            if known_by_name and (info := _find(maker, spelling)) is not None:
                return info, provider in (None, maker.id)
    return None


def _fallbacks(seller: "Provider", snapshot: "DataSnapshot") -> "Iterator[Provider]":
    for other in seller.fallback_model_providers or ():
        yield from (p for p in snapshot.providers if p.id == other)


def _spellings(name: str) -> tuple[str, ...]:
    """A name as given, with a compact date written out, and without the release it is pinned to."""
    return tuple(dict.fromkeys((name, _COMPACT_DATE.sub(r"-\1-\2-\3", name), _VERSION.sub("", name))))


def _find(provider: "Provider", name: str, *, paths: bool = False) -> "ModelInfo | None":
    return next((info for info in provider.models if _names_it(info.match, name, paths)), None)


def _names_it(clause: Any, name: str, paths: bool) -> bool:
    """Whether a clause of the price list means exactly this model. ``paths``: a region or vendor may stand before the name."""
    if (either := getattr(clause, "or_", None)) is not None:
        return any(_names_it(part, name, paths) for part in either)
    if (every := getattr(clause, "and_", None)) is not None:
        # conditions beside the name, such as "no TTS", only narrow it down
        return all(part.is_match(name) for part in every) and any(_names_it(part, name, paths) for part in every)
    if not clause.is_match(name):
        return False
    if hasattr(clause, "equals"):
        return True
    if (pattern := getattr(clause, "regex", None)) is not None:
        found = re.search(pattern, name)
        start, end = found.span() if found is not None else (0, 0)
    else:
        text = next((str(getattr(clause, kind)).lower() for kind in ("starts_with", "ends_with", "contains") if hasattr(clause, kind)), "")
        start = name.rfind(text) if hasattr(clause, "ends_with") else name.find(text)
        end = start + len(text)
    if end <= start or (start and not (paths and name[start - 1] in "./")):
        return False
    return is_release_of(name[start:end], name[end:])


def _rates_from(prices: "ModelPrice", model: str, source: str, *, estimated: bool) -> Rates | Unpriced:
    values = {key: value for key, value in vars(prices).items() if value is not None}
    if "input_mtok" not in values:
        if not any(key.endswith("_mtok") for key in values) and model.strip().lower().endswith(":free"):
            return Rates([_Band(-1, 0, 0, 0, 0, 0, 0, 0)], source)
        return Unpriced(model, f"{source} lists it without a price for tokens; give its price with prices=")
    starts = sorted({tier.start for value in values.values() for tier in getattr(value, "tiers", ())})
    bands, folded = [], False
    for start in (-1, *starts):
        at = {key: _rate(_at(value, start)) for key, value in values.items() if key.endswith("_mtok")}
        band, unlike = _list_band(start, at)
        bands.append(band)
        folded = folded or unlike
    requests = values.get("requests_kcount")
    fee = _rate(requests) * (_MTOK // 1000) if isinstance(requests, Decimal) else 0
    return Rates(bands, source, estimated=estimated or folded, fee=fee)


def _at(value: Any, start: int) -> Decimal:
    """A plain price, or the tier in force just above ``start`` input tokens."""
    if isinstance(value, Decimal):
        return value
    price: Decimal = value.base
    for tier in value.tiers:
        if tier.start <= start:
            price = tier.price
    return price


def _list_band(above: int, rates: Mapping[str, int]) -> tuple[_Band, bool]:
    """One band, and whether it had to fold kinds of tokens into one: pictures and video are not counted apart, so where they cost
    more than text all tokens of that direction cost as much. Separate (cheaper) prices for reasoning are ignored for the same reason."""
    plain = rates["input_mtok"]
    cached = rates.get("cache_read_mtok", plain)
    out = rates.get("output_mtok", plain)  # none: an embedding or ranking model, which has no output
    write = rates.get("cache_write_mtok", plain)
    audio = rates.get("input_audio_mtok", plain)
    cached_audio = rates.get("cache_audio_read_mtok", cached if "input_audio_mtok" not in rates else max(audio, cached))
    seen_in = max(rates.get("input_image_mtok", 0), rates.get("input_video_mtok", 0))
    seen_cached = max(rates.get("cache_image_read_mtok", 0), rates.get("cache_video_read_mtok", 0))
    seen_out = max(rates.get("output_image_mtok", 0), rates.get("output_video_mtok", 0), rates.get("output_reasoning_mtok", 0))
    folded = seen_in > plain or seen_cached > cached or seen_out > out or "output_reasoning_mtok" in rates
    if seen_in and not seen_cached and "cache_read_mtok" not in rates:
        seen_cached = seen_in
    out = max(out, seen_out)
    band = _Band(
        above=above,
        input=max(plain, seen_in),
        output=out,
        cached=max(cached, seen_cached),
        cache_write=max(write, seen_in),
        audio=audio,
        cached_audio=cached_audio,
        audio_output=rates.get("output_audio_mtok", out),
    )
    return band, folded


# ---- the price book -------------------------------------------------------------------------------------------------


class _Book(Generic[_T]):
    """What a user gave per model: by the id as it is, by the normalised id, by glob."""

    __slots__ = ("_exact", "_globs", "_normal")

    def __init__(self, given: Mapping[str, _T]) -> None:
        self._exact = dict(given)
        # of two spellings of one model, the plain one speaks for all others
        self._normal = {normalise(model): value for model, value in sorted(given.items(), key=lambda item: item[0] == normalise(item[0]))}
        self._globs = [(pattern, value) for pattern, value in given.items() if any(sign in pattern for sign in "*?[")]

    def matches(self, model: str) -> Iterator[_T]:
        """Everything that fits, best first."""
        if model in self._exact:
            yield self._exact[model]
        normal = normalise(model)
        if normal in self._normal:
            yield self._normal[normal]
        yield from (value for pattern, value in self._globs if fnmatchcase(model, pattern) or fnmatchcase(normal, pattern))


def _dated(model: str, given: Price | Sequence[Price]) -> tuple[tuple[date, Rates], ...]:
    """Rates with their first day, the newest first."""
    several = [given] if isinstance(given, Price) else list(given)
    if not several:
        raise PolicyError(f"prices.{model}: an empty list of prices; give at least one, or leave the model out")
    first_days = [price.since or date.min for price in several]
    if len(set(first_days)) != len(first_days):
        raise PolicyError(f"prices.{model}: two prices begin on the same day; give each but one a since=, all different")
    return tuple(sorted(((day, _rates_of(price, "prices")) for day, price in zip(first_days, several, strict=True)), key=lambda pair: pair[0], reverse=True))


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
        self._fallback = None if fallback is None else _rates_of(fallback, "on_unpriced", estimated=True)
        self._by_id: dict[str, tuple[float, Rates | Unpriced]] = {}
        self._known_limits: dict[str, tuple[int | None, int | None]] = {}

    def rates(self, model: str, at: float) -> Rates | Unpriced:
        """What the model costs at a moment (unix seconds). Prices change by date and, with some providers, by hour: an answer holds
        for the minute it was given for."""
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
        if _TUNED.search(model.lower()) is not None:
            return Unpriced(model, "it is a tuned model or endpoint, whose id does not tell the base model; give its price with prices=")
        snapshot = _snapshot()
        if snapshot is None:
            return Unpriced(model, "genai-prices is not installed; give its price with prices=")
        source = _source(snapshot)
        listed = _listed(snapshot, model)
        if listed is None:
            return Unpriced(model, f"{source} does not know it; give its price with prices=")
        info, of_named_provider = listed
        return _rates_from(info.get_prices(moment), model, source, estimated=not of_named_provider)

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
        if window is None and _TUNED.search(model.lower()) is None and (snapshot := _snapshot()) is not None:
            listed = _listed(snapshot, model)
            window = None if listed is None else listed[0].context_window
        return window, output
