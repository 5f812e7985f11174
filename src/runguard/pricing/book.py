"""The price book: rates and limits per model id, from the user first, then from the newest price table or genai-prices.

``policy/settings``, ``engine/guard``, ``replay/player`` and ``termination/usage`` ask ``Pricing``. ``cli/screens``
shows and updates the price table.
"""

import json
import logging
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from runguard.background import off_loop
from runguard.core.errors import PolicyError
from runguard.core.money import dollars_of, nanos, shown
from runguard.pricing.rates import PER_MILLION, Band, Rates, SearchPrice, Unpriced, is_tuned, normalise, split_id
from runguard.validation import SettingsModel

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ConditionalPrice, ModelInfo, ModelPrice

# ---- What a user gives about models: prices in USD per million tokens, and limits.

_LEAST_USD: Final = Decimal("1e-12")


def _given_usd(value: Any) -> Decimal:
    """Return an exact amount: 0.1 means 0.1, not the binary fraction nearest to it."""
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
    try:
        return dollars_of(value, least=0)
    except ValueError as fault:
        raise ValueError(f"{shown(value)}: {fault}") from None


USD = Annotated[Decimal, BeforeValidator(_given_usd)]
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


_FACTS: Final = {
    # a price of the user, and what it is called in the price list
    "input": "input_mtok",
    "output": "output_mtok",
    "cached": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "audio": "input_audio_mtok",
    "cached_audio": "cache_audio_read_mtok",
    "audio_output": "output_audio_mtok",
}


def rates_of(price: Price, source: str, *, estimated: bool = False) -> Rates:
    """Return a user's price as rates. ``source`` says where the price was given."""
    bands = []
    for above, given in ((-1, price), *((tier.above, tier) for tier in price.tiers)):
        stated = {fact: usd for name, fact in _FACTS.items() if (usd := getattr(given, name)) is not None}
        bands.append(_band(above, {fact: nanos(usd, up=True) for fact, usd in stated.items()})[0])
    return Rates(bands, source, estimated=estimated)


# ---- The price table: one text file with the price facts of genai-prices.

FORMAT: Final = 1
PACKAGED: Final = Path(__file__).with_name("price_table.jsonl")
DAY_S: Final = 86_400
_EPOCH: Final = date(1970, 1, 1).toordinal()
_log: Final = logging.getLogger("runguard")

Clause = dict[str, Any]  # one of or, and (of clauses), equals, starts_with, ends_with, contains, regex (of text)


class DatedPrice(NamedTuple):
    """Price facts, and when they apply."""

    begins: float  # unix seconds
    daily: tuple[int, int] | None  # from and to, in seconds of the UTC day; the end may be before the start
    facts: dict[str, Any]  # USD as text, by genai-prices' name; a list when it has tiers: base, then (above, price)

    def applies(self, at: float) -> bool:
        if at < self.begins:
            return False
        if self.daily is None:
            return True
        start, end = self.daily
        second = at % DAY_S
        return start <= second < end if start <= end else second >= start or second < end


class PricedModel(NamedTuple):
    """One model of one provider."""

    id: str
    match: Clause
    window: int | None
    prices: tuple[DatedPrice, ...]

    def in_force(self, at: float) -> int:
        """Return the index of the price that is in force at a moment: the last one that applies, else the first."""
        return next((number for number in reversed(range(len(self.prices))) if self.prices[number].applies(at)), 0)


class Provider:
    """One provider; its models are parsed on first use."""

    __slots__ = ("_entries", "_lines", "fallbacks", "id", "match")

    def __init__(self, header: dict[str, Any], lines: list[str]) -> None:
        self.id: str = header["id"]
        self.match: Clause | None = header.get("match")  # names that mean a model of this provider
        self.fallbacks: tuple[str, ...] = tuple(header.get("fallbacks", ()))  # providers whose models it sells, too
        self._lines = lines
        self._entries: tuple[PricedModel, ...] | None = None

    @property
    def entries(self) -> tuple[PricedModel, ...]:
        if self._entries is None:
            self._entries = tuple(map(_entry, json.loads(f"[{','.join(self._lines)}]")))
        return self._entries


class PriceTable:
    """A price list. ``source`` names it in messages and reports.

    The first line of its file is a JSON object with the format, the release and date of genai-prices, and the
    providers. Then follows one line per model, provider after provider. A provider's lines are parsed when one of its
    models is first looked up, so loading the table takes about a millisecond.
    """

    __slots__ = ("date", "digest", "providers", "release", "source")

    def __init__(self, text: str, source: str = "") -> None:
        """Read a table. ValueError when the text is not a complete one."""
        head, _, body = text.partition("\n")
        header = json.loads(head)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError("not a price table that this release of runguard reads")
        if digest_of(body) != header["digest"]:
            raise ValueError("its lines do not match its digest: it is incomplete or was edited")
        self.digest: str = header["digest"]
        self.release: str = header["genai_prices"]
        self.date = date.fromisoformat(header["date"])
        self.source = source or f"genai-prices {self.release}, table of {self.date}"
        lines, providers, first = body.split("\n"), [], 0
        for described in header["providers"]:
            providers.append(Provider(described, lines[first : first + described["models"]]))
            first += described["models"]
        self.providers = tuple(providers)

    def provider(self, provider_id: str | None) -> Provider | None:
        return next((provider for provider in self.providers if provider.id == provider_id), None)

    def is_newer_than(self, other: "PriceTable") -> bool:
        """Return whether this table is newer, by its release of genai-prices and then by its date.

        The release counts first, because an old release may be installed today.
        """
        if _number(self.release) == _number(other.release):
            return self.date > other.date and self.digest != other.digest
        return _number(self.release) > _number(other.release)


def digest_of(body: str) -> str:
    return blake2b(body.encode(), digest_size=8).hexdigest()


def _number(release: str) -> tuple[int, ...]:
    return tuple(int("".join(sign for sign in part if sign.isdigit()) or 0) for part in release.split("."))


def updated_path() -> Path:
    """Return the path of the table that ``runguard prices --update`` writes.

    It is ``RUNGUARD_PRICES``, else a file in the user's data folder.
    """
    if named := os.environ.get("RUNGUARD_PRICES"):
        return Path(named)
    folder = os.environ.get("XDG_DATA_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(folder) if folder else Path.home() / ".local" / "share") / "runguard" / "prices.jsonl"


def updated_table() -> PriceTable | None:
    """Return the table that ``runguard prices --update`` wrote; None when there is none.

    ValueError when the table cannot be used.
    """
    try:
        path = updated_path()
        return PriceTable(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, RuntimeError):  # RuntimeError: this user has no home
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the price table {path} cannot be used: {error}") from None


@cache
def packaged_table() -> PriceTable:
    return PriceTable(PACKAGED.read_text(encoding="utf-8"))


@cache
def current_table() -> PriceTable:
    """Return the newest price table that this process can use.

    There are three: the packaged table, the one that ``runguard prices --update`` wrote, and the prices of the
    installed genai-prices. A process keeps the table that it first loaded.
    """
    return off_loop(_newest_table)


def _newest_table() -> PriceTable:
    newest = newest_file()
    try:
        if _number(release()) > _number(newest.release):
            return live_table()  # only here, because importing genai-prices takes a quarter of a second
    except ModuleNotFoundError:  # genai-prices is optional
        pass
    except Exception as error:  # another package's data, which may have any shape
        _log.warning(
            "runguard.prices_failed: the prices of the installed genai-prices cannot be read: %r; using %s. "
            "Install a newer RunGuard",
            error,
            newest.source,
        )
    return newest


def newest_file() -> PriceTable:
    """Return the newer one of the packaged table and the one that ``runguard prices --update`` wrote."""
    packaged = packaged_table()
    try:
        updated = updated_table()
    except ValueError as error:
        _log.warning(
            "runguard.prices_failed: %s; using %s. `runguard prices --update` writes a new one",
            error,
            packaged.source,
        )
        return packaged
    return updated if updated is not None and updated.is_newer_than(packaged) else packaged


def _entry(line: dict[str, Any]) -> PricedModel:
    return PricedModel(
        line["id"],
        line.get("match") or {"equals": line["id"].lower()},
        line.get("window"),
        tuple(map(_dated_price, line["prices"])),
    )


def _dated_price(price: dict[str, Any]) -> DatedPrice:
    since, daily = price.get("since"), price.get("daily")
    return DatedPrice(
        float("-inf") if since is None else float((date.fromisoformat(since).toordinal() - _EPOCH) * DAY_S),
        None if daily is None else (daily[0], daily[1]),
        price["usd"],
    )


# ---- The price facts of the installed genai-prices package, as a price table.

MISSING: Final = "genai-prices is not installed: pip install genai-prices"
_TEXT_CLAUSES: Final = ("equals", "starts_with", "ends_with", "contains")
_converted: "tuple[DataSnapshot, PriceTable] | None" = None


def snapshot() -> "DataSnapshot":
    """Return the prices that genai-prices uses now; ImportError when it is not installed.

    A program that runs genai-prices' own updater gets a new one from time to time.
    """
    from genai_prices.data_snapshot import get_snapshot

    return get_snapshot()


def live_table() -> PriceTable:
    """Return the prices that genai-prices uses now as a table, converted once per snapshot."""
    if _converted is None or _converted[0] is not snapshot():
        return off_loop(_convert)
    return _converted[1]


def _convert() -> PriceTable:
    global _converted
    now = snapshot()
    day, when = (now.timestamp.date(), "updated") if now.from_auto_update else (installed_on(), "installed")
    table = PriceTable(table_text(now, day), f"genai-prices {release()}, {when} {day}")
    _converted = now, table
    return table


def release() -> str:
    """Return the release of the installed genai-prices without importing it; ImportError when it is not installed."""
    return version("genai-prices")


def installed_on() -> date:
    """Return the day on which the package was installed. Its prices are as old or older."""
    data = Path(str(import_module("genai_prices").__file__)).with_name("data.py")
    return datetime.fromtimestamp(data.stat().st_mtime, UTC).date()


def table_text(prices: "DataSnapshot", day: date) -> str:
    """Return the text of a price table. The same prices and day give the same text."""
    lines = [_line(_model(info)) for provider in prices.providers for info in provider.models]
    body = "\n".join(lines) + "\n"
    header = {
        "format": FORMAT,
        "genai_prices": release(),
        "date": day.isoformat(),
        "digest": digest_of(body),
        "providers": [
            {
                "id": provider.id,
                "models": len(provider.models),
                **({"match": _clause(provider.model_match)} if provider.model_match is not None else {}),
                **({"fallbacks": provider.fallback_model_providers} if provider.fallback_model_providers else {}),
            }
            for provider in prices.providers
        ],
    }
    return f"{_line(header)}\n{body}"


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _model(info: "ModelInfo") -> dict[str, Any]:
    match = _clause(info.match)
    prices = info.prices if isinstance(info.prices, list) else [info.prices]
    return {
        "id": info.id,
        **({} if match == {"equals": info.id.lower()} else {"match": match}),
        **({} if info.context_window is None else {"window": info.context_window}),
        "prices": [_dated_entry(price) for price in prices] or [{"usd": {}}],
    }


def _clause(clause: Any) -> dict[str, Any]:
    """Return a clause as the table writes it, with text in lower case because names are compared in lower case.

    ValueError for a kind of clause that RunGuard does not know.
    """
    for kind in ("or", "and"):
        if (parts := getattr(clause, f"{kind}_", None)) is not None:
            return {kind: [_clause(part) for part in parts]}
    if (pattern := getattr(clause, "regex", None)) is not None:
        return {"regex": pattern}
    for kind in _TEXT_CLAUSES:
        if (text := getattr(clause, kind, None)) is not None:
            return {kind: str(text).lower()}
    raise ValueError(f"genai-prices matches a model by {type(clause).__name__}, which runguard does not know")


def _dated_entry(price: "ConditionalPrice | ModelPrice") -> dict[str, Any]:
    conditional: Any = price if hasattr(price, "prices") else None
    facts: ModelPrice = price if conditional is None else conditional.prices  # type: ignore[assignment]
    constraint = getattr(conditional, "constraint", None)
    return {**_constraint(constraint), "usd": dict(_facts(facts))}


def _constraint(constraint: Any) -> dict[str, Any]:
    if constraint is None:
        return {}
    if (since := getattr(constraint, "start_date", None)) is not None:
        return {"since": since.isoformat()}
    if hasattr(constraint, "start_time"):
        return {"daily": [_utc_second(constraint.start_time), _utc_second(constraint.end_time)]}
    raise ValueError(f"genai-prices limits a price by {type(constraint).__name__}, which runguard does not know")


def _utc_second(moment: time) -> float:
    """Return the seconds since midnight UTC. A time without a zone is UTC."""
    naive = timedelta(hours=moment.hour, minutes=moment.minute, seconds=moment.second, microseconds=moment.microsecond)
    seconds = ((naive - (moment.utcoffset() or timedelta())) % timedelta(days=1)).total_seconds()
    return int(seconds) if seconds == int(seconds) else seconds


def _facts(prices: "ModelPrice") -> Iterator[tuple[str, Any]]:
    """Yield the prices that count here: those of tokens, and the fee per call."""
    for name, value in vars(prices).items():
        if value is None or not (name.endswith("_mtok") or name == "requests_kcount"):
            continue
        if isinstance(value, Decimal):
            yield name, _usd(value)
        else:
            yield name, [_usd(value.base), *([tier.start, _usd(tier.price)] for tier in value.tiers)]


def _usd(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# ---- Which entry of a price table a model id means.

MAKERS: Final = frozenset({"anthropic", "google", "openai"})  # whose models go by their bare names
_VERSION: Final = re.compile(r"-(?:\d{3}|\d{8}|\d{4}-\d{2}-\d{2})$")
_COMPACT_DATE: Final = re.compile(r"-(20\d{2})(\d{2})(\d{2})$")
# What may follow a model's name without making it another model: dates, pinned versions, release stages. Everything
# else ("-lite", "-image", "-tts", "-8b", "-pro") names a different model, with other limits and other prices.
_RELEASE: Final = re.compile(
    r"(?:[-@:](?:\d{2,8}|v\d+(?:\.\d+)?|latest|default|stable|preview|exp|experimental|beta|thinking|customtools|high|medium|low)|:\d+)*"
)
_MINOR: Final = re.compile(r"-\d{1,2}(?!\d)")
_END_NUMBER: Final = re.compile(r"\d+$")
_FIRST_NUMBER: Final = re.compile(r"\d+")


@lru_cache(maxsize=256)  # a search looks at every entry, and every guard of a process asks for the same models
def entry_of(table: PriceTable, model: str) -> tuple[PricedModel, bool] | None:
    """Return the entry for a model; None when the table does not know it.

    The second value is True when the id names the entry's provider, or no provider. The search is stricter than that of
    genai-prices, which takes a name that merely begins like a model for that model.
    """
    provider, name, named = split_id(model)
    seller = table.provider(provider)
    if seller is not None:
        for spelling in dict.fromkeys((named, *_spellings(name))):
            for listing in (seller, *_fallbacks(seller, table)):
                if (entry := _find(listing, spelling, paths=True)) is not None:
                    return entry, True
    for spelling in _spellings(name):
        for maker in table.providers:
            known_by_name = maker.id in MAKERS or (maker.match is not None and _fits(maker.match, spelling))
            if known_by_name and (entry := _find(maker, spelling)) is not None:
                return entry, provider in (None, maker.id)
    return None


def _fallbacks(seller: Provider, table: PriceTable) -> Iterator[Provider]:
    for other in seller.fallbacks:
        if (provider := table.provider(other)) is not None:
            yield provider


def _spellings(name: str) -> tuple[str, ...]:
    """Return a name as given, with a compact date written out, and without the release it is pinned to."""
    return tuple(dict.fromkeys((name, _COMPACT_DATE.sub(r"-\1-\2-\3", name), _VERSION.sub("", name))))


def _find(provider: Provider, name: str, *, paths: bool = False) -> PricedModel | None:
    return next((entry for entry in provider.entries if _names_it(entry.match, name, paths)), None)


def _fits(clause: Clause, name: str) -> bool:
    """Return whether genai-prices' own rule accepts the name, which is in lower case as the table's texts are."""
    ((kind, value),) = clause.items()
    if kind == "equals":
        return bool(name == value)
    if kind == "or":
        return any(_fits(part, name) for part in value)
    if kind == "and":
        return all(_fits(part, name) for part in value)
    if kind == "starts_with":
        return name.startswith(value)
    if kind == "ends_with":
        return name.endswith(value)
    if kind == "contains":
        return value in name
    return re.search(value, name) is not None


def _names_it(clause: Clause, name: str, paths: bool) -> bool:
    """Return whether a clause means exactly this model. ``paths``: a region or vendor may come before the name."""
    ((kind, value),) = clause.items()
    if kind == "equals":
        return bool(name == value)
    if kind == "or":
        return any(_names_it(part, name, paths) for part in value)
    if kind == "and":
        # conditions beside the name, such as "no TTS", only narrow it down
        return all(_fits(part, name) for part in value) and any(_names_it(part, name, paths) for part in value)
    if not _fits(clause, name):
        return False
    if kind == "regex":
        found = re.search(value, name)
        start, end = found.span() if found is not None else (0, 0)
    else:
        start = name.rfind(value) if kind == "ends_with" else name.find(value)
        end = start + len(value)
    if end <= start or (start and not (paths and name[start - 1] in "./")):
        return False
    return is_release_of(name[start:end], name[end:])


def is_release_of(name: str, rest: str) -> bool:
    """Return whether ``name + rest`` is a release of the model ``name``, and not a model whose name begins alike."""
    if not rest:
        return True
    if name.startswith("ft:") or name.endswith(".ft-"):
        return True  # the owner chose the rest of the name, which does not change the price
    if "live" in name:
        rest = rest.replace("-native-audio", "")
    before, after = _END_NUMBER.search(name), _FIRST_NUMBER.match(rest)
    if before and after:  # cut within a number: "4-1" + "0" is version 4.10, "flash-0" + "01" is the pinned release 001
        if len(before[0] + after[0]) not in (3, 8):
            return False
        rest = rest[after.end() :]
    elif before and _MINOR.match(rest):  # "opus-4" + "-10" is version 4.10; a day or month follows a year or a word
        return False
    elif name[-1] in "-@:":
        rest = name[-1] + rest
    return _RELEASE.fullmatch(rest) is not None


# ---- What the price list says about a model: the table of this package, or the installed genai-prices.

PricesSource = Literal["table", "genai-prices"]


def preload(source: PricesSource = "table") -> None:
    """Load the price list now, so that no run waits for it. Safe to call several times and from any thread."""
    price_list(source)


def price_list(source: PricesSource) -> PriceTable | None:
    """Return the price list; None when the source is genai-prices and that is not installed."""
    if source == "table":
        return current_table()
    try:
        return live_table()
    except ImportError:
        return None


def missing_source(source: PricesSource) -> str | None:
    """Return the reason why a price list cannot be used; None when it can."""
    return MISSING if source == "genai-prices" and _is_missing("genai_prices") else None


def listed_models(source: PricesSource = "table") -> list[str]:
    """Return the ids of the listed models of Anthropic, Google and OpenAI, which go by their bare names."""
    table = price_list(source)
    return [
        entry.id
        for maker in (table.providers if table is not None else ())
        if maker.id in MAKERS
        for entry in maker.entries
    ]


def _is_missing(package: str) -> bool:
    try:
        return off_loop(lambda: find_spec(package)) is None
    except (ImportError, ValueError):  # it was blocked
        return True


def _rates_from(facts: Mapping[str, Any], model: str, source: str, *, estimated: bool) -> Rates | Unpriced:
    tokens = {name: price for name, price in facts.items() if name.endswith("_mtok")}
    if "input_mtok" not in tokens:
        if not tokens and model.strip().lower().endswith(":free"):
            return Rates([Band(-1, 0, 0, 0, 0, 0, 0, 0)], source)
        return Unpriced(model, f"{source} lists it without a price for tokens")
    starts = sorted({tier[0] for price in tokens.values() if isinstance(price, list) for tier in price[1:]})
    bands, folded = [], False
    for start in (-1, *starts):
        band, unlike = _band(start, {name: nanos(_at(price, start), up=True) for name, price in tokens.items()})
        bands.append(band)
        folded = folded or unlike
    per_1000_calls = facts.get("requests_kcount")
    fee = nanos(Decimal(per_1000_calls), up=True) * (PER_MILLION // 1000) if isinstance(per_1000_calls, str) else 0
    return Rates(bands, source, estimated=estimated or folded, fee=fee)


def _at(price: Any, start: int) -> Decimal:
    """Return a plain price, or the tier in force just above ``start`` input tokens."""
    if isinstance(price, str):
        return Decimal(price)
    base, *tiers = price
    for above, other in tiers:
        if above <= start:
            base = other
    return Decimal(base)


def _band(above: int, rates: Mapping[str, int]) -> tuple[Band, bool]:
    """Return one band, and whether it had to fold kinds of tokens into one.

    Pictures and video are not counted apart. Where they cost more than text, all tokens of that direction cost as much.
    Separate (cheaper) prices for reasoning are ignored for the same reason.
    """
    plain = rates["input_mtok"]
    cached = rates.get("cache_read_mtok", plain)
    out = rates.get("output_mtok", plain)  # none: an embedding or ranking model, which has no output
    write = rates.get("cache_write_mtok", plain)
    audio = rates.get("input_audio_mtok", plain)
    cached_audio = rates.get("cache_audio_read_mtok", cached if "input_audio_mtok" not in rates else max(audio, cached))
    seen_in = max(rates.get("input_image_mtok", 0), rates.get("input_video_mtok", 0))
    seen_cached = max(rates.get("cache_image_read_mtok", 0), rates.get("cache_video_read_mtok", 0))
    seen_out = max(
        rates.get("output_image_mtok", 0), rates.get("output_video_mtok", 0), rates.get("output_reasoning_mtok", 0)
    )
    folded = seen_in > plain or seen_cached > cached or seen_out > out or "output_reasoning_mtok" in rates
    if seen_in and not seen_cached and "cache_read_mtok" not in rates:
        seen_cached = seen_in
    out = max(out, seen_out)
    band = Band(
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


# ---- Rates and limits per model id: what a user gave comes first, then the lists.

_CACHE_SIZE: Final = 1024
_LONGEST_ID: Final = 512  # no model has a longer name; such names must not fill the cache
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999; a clock beyond it is broken, not a reason to fail
_T = TypeVar("_T")
DatedRates = tuple[float, float, Rates | Unpriced]  # from when until when they hold (unix seconds), and the rates


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
        """Return the rates of a model at a moment (unix seconds)."""
        return self.dated_rates(model, at)[2]

    def dated_rates(self, model: str, at: float) -> DatedRates:
        """Return from when until when (unix seconds) the rates of a model hold, and the rates.

        They are found once and kept until the price changes, which some providers do by date and some by the hour.
        Where the price list may be updated at any time, they hold for no longer than this call.
        """
        if self._source != "table":
            self._follow_updates()
            return at, at, self._find_rates(model, at)[2]
        return self._find_rates(model, at)

    def _find_rates(self, model: str, at: float) -> DatedRates:
        known = self._by_id.get(model)
        if known is not None and known[0] <= at < known[1]:
            return known[:3]
        schedule = self._schedule(model) if known is None else known[3]
        moment = _possible(at)
        found = schedule.rates(moment)
        if isinstance(found, Unpriced) and self._fallback is not None:
            found = self._fallback
        if isinstance(found, Rates) and (search := self._search_price(model)) is not None:
            found = found.with_searches(search)
        since, until = schedule.span(moment)
        _keep(self._by_id, model, (since, until, found, schedule))
        return since, until, found

    def _search_price(self, model: str) -> SearchPrice | None:
        return next((given.search for given in self._models.matches(model) if given.search is not None), None)

    def limits(self, model: str) -> tuple[int | None, int | None]:
        """Return the context window and the most output tokens of a model; None where a limit is not known."""
        known = self._known_limits.get(model)
        if known is None:
            known = self._resolve_limits(model)
            _keep(self._known_limits, model, known)
        return known

    def _follow_updates(self) -> None:
        """Forget all rates and limits when genai-prices has updated its prices."""
        table = price_list(self._source)
        if table is not self._table:
            self._table = table
            self._by_id, self._known_limits = {}, {}

    def _schedule(self, model: str) -> "_Schedule":
        if not model.strip() or len(model) > _LONGEST_ID:
            reason = "that is not a model id" if model.strip() else "the call names no model"
            return _Schedule(model[:80], (), None, reason)
        given = tuple(self._prices.matches(model))
        if given and given[0][-1][0] == -math.inf:
            return _Schedule(model, given, None, "")  # a price of the user is always in force
        if is_tuned(model):
            return _Schedule(
                model, given, None, "it is a tuned model or endpoint, whose id does not tell the base model"
            )
        table = price_list(self._source)
        return _Schedule(model, given, table, MISSING if table is None else f"{table.source} does not know it")

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
        listed = price_list(self._source) if window is None and not is_tuned(model) else None
        if listed is not None and (found := entry_of(listed, model)) is not None:
            window = found[0].window
        return window, output


class _Book(Generic[_T]):
    """Values that a user gave per model: looked up by the id as it is, by the normalised id, by glob."""

    __slots__ = ("_exact", "_globs", "_normal")

    def __init__(self, given: Mapping[str, _T]) -> None:
        self._exact = dict(given)
        # of two spellings of one model, the plain one is last and so applies to all others
        self._normal = {
            normalise(model): value
            for model, value in sorted(given.items(), key=lambda item: item[0] == normalise(item[0]))
        }
        self._globs = [(pattern, value) for pattern, value in given.items() if any(sign in pattern for sign in "*?[")]

    def matches(self, model: str) -> Iterator[_T]:
        """Yield all values that fit the model, the best match first."""
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
    """Return rates with the unix time at which they begin, the newest first.

    PolicyError when there is no price, or two begin on the same day.
    """
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
    """The prices of one model over time: the user's prices that have begun, else those of the list."""

    __slots__ = ("_daily", "_given", "_listed", "_model", "_moments", "_otherwise", "_source")

    def __init__(self, model: str, given: Sequence[_Dated], listed: PriceTable | None, otherwise: str) -> None:
        """``otherwise``: why the model has no price where neither ``given`` nor ``listed`` has one."""
        self._model, self._given, self._otherwise = model, given, otherwise
        self._listed = entry_of(listed, model) if listed is not None else None
        self._source = listed.source if listed is not None else ""
        prices = self._listed[0].prices if self._listed is not None else ()
        # unix seconds at which a price begins
        self._moments = sorted({price.begins for price in prices} | {begins for dated in given for begins, _ in dated})
        # seconds of the UTC day at which the price changes every day
        self._daily = sorted({second for price in prices for second in price.daily or ()})

    def rates(self, at: float) -> Rates | Unpriced:
        for dated in self._given:
            for begins, rates in dated:
                if begins <= at:
                    return rates
        if self._listed is None:
            return Unpriced(self._model, self._otherwise)
        entry, is_sellers = self._listed
        facts = entry.prices[entry.in_force(at)].facts
        return _rates_from(facts, self._model, self._source, estimated=not is_sellers)

    def span(self, at: float) -> tuple[float, float]:
        """Return from when until when (unix seconds) the price of this moment holds."""
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
    """Return a moment within the calendar, because a broken clock is no reason to fail."""
    return min(max(at, 0.0), _LAST_SECOND) if at == at else 0.0


def _keep(cache: dict[str, _T], model: str, value: _T) -> None:
    """Remember a value, and drop the oldest ones beyond the bound: made-up model names must not fill the memory."""
    if len(model) > _LONGEST_ID:
        return
    while len(cache) >= _CACHE_SIZE and model not in cache:
        try:
            cache.pop(next(iter(cache)), None)
        except (StopIteration, RuntimeError):  # another thread has changed it meanwhile
            break
    cache[model] = value


# ---- A price given per token instead of per million tokens.

_PER_TOKEN: Final = Decimal("0.001")  # USD per million tokens; no list has a price as low
_FAMILY: Final = re.compile(r"[a-z]+")  # gemini-2.5-flash: gemini


def prices_per_token(prices: Mapping[str, Price | Sequence[Price]], source: PricesSource) -> list[str]:
    """Return a warning for each given price that is a thousand times below every known model of its family.

    A model of an unknown family is compared with all known models. Zero means free and is no mistake.
    """
    warnings = []
    for model, given in prices.items():
        several = [given] if isinstance(given, Price) else given
        for kind in ("input", "output"):
            low = min((usd for price in several if 0 < (usd := getattr(price, kind)) < _PER_TOKEN), default=None)
            known = None if low is None else _lowest_usd(model, kind, source)
            if low is not None and known is not None and low * 1000 <= known[0]:
                warnings.append(
                    f"prices.{model}: {kind} = {low:f} is less than a thousandth of the lowest price of {known[1]} "
                    f"({known[0]:f}). Prices are in USD per million tokens, not per token; "
                    f"did you mean {(low * PER_MILLION).normalize():f}?"
                )
    return warnings


def _lowest_usd(model: str, kind: str, source: PricesSource) -> tuple[Decimal, str] | None:
    """Return the lowest price above zero in a model's family, and the words for the models that were compared.

    A model of an unknown family is compared with all models. None: the price list has no price of this kind.
    """
    table = price_list(source)
    by_family: dict[str, Decimal] = {}
    for provider in table.providers if table is not None else ():
        for entry in provider.entries:
            listed = [_at(price.facts[f"{kind}_mtok"], -1) for price in entry.prices if f"{kind}_mtok" in price.facts]
            if paid := [usd for usd in listed if usd > 0]:
                family = _family(entry.id)
                by_family[family] = min(*paid, by_family.get(family, paid[0]))
    if not by_family:
        return None
    family = _family(model)
    if family in by_family:
        return by_family[family], f"every known {family} model"
    return min(by_family.values()), "every known model"


def _family(model: str) -> str:
    found = _FAMILY.match(normalise(model))
    return found[0] if found is not None else ""


# ---- Output limits and context windows of models: a dated table of our own where the price data has none.

AS_OF: Final = "2026-11"
# name: (context window, most output tokens), as of AS_OF, from the providers' public model pages; GPT-5.4 and later
# from pages of resellers. For OpenAI and Anthropic the window holds input and output together. A limit that is too
# small would refuse good calls, so where a provider names two figures (a beta header, a second platform) the larger one
# is in the table. What is not known for certain is left out.
LIMITS: Final[dict[str, tuple[int | None, int | None]]] = {
    # Google: the model pages of the Gemini API
    "gemini-2.0-flash": (1_048_576, 8_192),
    "gemini-2.0-flash-lite": (1_048_576, 8_192),
    "gemini-2.5-flash": (1_048_576, 65_536),
    "gemini-2.5-flash-lite": (1_048_576, 65_536),
    "gemini-2.5-pro": (1_048_576, 65_536),
    "gemini-3-flash-preview": (1_048_576, 65_536),
    "gemini-3-pro-preview": (1_048_576, 65_536),
    "gemini-3.1-pro-preview": (1_048_576, 65_536),
    "gemini-3.1-flash-lite": (1_048_576, 65_536),
    "gemini-3.5-flash": (1_048_576, 65_536),
    "gemini-3.5-flash-lite": (1_048_576, 65_536),
    "gemini-3.7-flash": (1_048_576, 65_536),
    "gemini-3.8-flash": (1_048_576, 65_536),
    "gemini-flash-latest": (1_048_576, 65_536),
    # DeepSeek: the pricing page; older lists still have the 64,000 of the first version
    "deepseek-chat": (131_072, 8_192),
    "deepseek-reasoner": (131_072, 65_536),
    # Anthropic: the models overview. Sonnet 4 and 4.5 have 200,000 tokens, a million with a beta header
    "claude-3-5-haiku": (200_000, 8_192),
    "claude-3-5-sonnet": (200_000, 8_192),
    "claude-3-7-sonnet": (200_000, 128_000),
    "claude-sonnet-4": (1_000_000, 64_000),
    "claude-sonnet-4-0": (1_000_000, 64_000),
    "claude-opus-4": (200_000, 32_000),
    "claude-opus-4-0": (200_000, 32_000),
    "claude-opus-4-1": (200_000, 32_000),
    "claude-sonnet-4-5": (1_000_000, 64_000),
    "claude-haiku-4-5": (200_000, 64_000),
    "claude-opus-4-5": (200_000, 64_000),
    "claude-sonnet-4-6": (1_000_000, 128_000),
    "claude-opus-4-6": (1_000_000, 128_000),
    "claude-opus-4-7": (1_000_000, 128_000),
    "claude-opus-4-8": (1_000_000, 128_000),
    "claude-sonnet-5": (1_000_000, 128_000),
    "claude-opus-5": (1_000_000, 128_000),
    "claude-haiku-5-5": (1_000_000, 128_000),
    "claude-sonnet-5-5": (1_000_000, 128_000),
    "claude-opus-5-5": (1_000_000, 128_000),
    "claude-fable-5-1": (1_000_000, 128_000),
    # OpenAI: the model pages
    "gpt-4o": (128_000, 16_384),
    "gpt-4o-2024-05-13": (128_000, 4_096),
    "gpt-4o-mini": (128_000, 16_384),
    "gpt-4.1": (1_047_576, 32_768),
    "gpt-4.1-mini": (1_047_576, 32_768),
    "gpt-4.1-nano": (1_047_576, 32_768),
    "gpt-5": (400_000, 128_000),
    "gpt-5-codex": (400_000, 128_000),
    "gpt-5-mini": (400_000, 128_000),
    "gpt-5-nano": (400_000, 128_000),
    "gpt-5-pro": (400_000, 272_000),
    "gpt-5.1": (400_000, 128_000),
    "gpt-5.1-codex": (400_000, 128_000),
    "gpt-5.2": (400_000, 128_000),
    "gpt-5.4": (1_050_000, 128_000),
    "gpt-5.5": (1_050_000, 128_000),
    "gpt-5.5-pro": (1_050_000, 128_000),
    "o1": (200_000, 100_000),
    "o1-pro": (200_000, 100_000),
    "o3": (200_000, 100_000),
    "o3-pro": (200_000, 100_000),
    "o3-mini": (200_000, 100_000),
    "o4-mini": (200_000, 100_000),
}
_LONGEST_FIRST: Final = tuple(sorted(LIMITS, key=len, reverse=True))


def limits_of(model: str) -> tuple[int | None, int | None]:
    """Return the context window and the most output tokens of a model, by its normalised id.

    None where the table has no answer.
    """
    if model.startswith("claude-"):
        model = model.replace(".", "-")  # resellers write claude-sonnet-4.5
    for name in _LONGEST_FIRST:
        if model.startswith(name) and is_release_of(name, model[len(name) :]):
            return LIMITS[name]
    return None, None
