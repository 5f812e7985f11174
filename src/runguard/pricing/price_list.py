"""What the price list says about a model: the table of this package, or the installed genai-prices."""

from collections.abc import Mapping
from decimal import Decimal
from importlib.util import find_spec
from typing import Any, Literal

from runguard.core.money import nanos
from runguard.pricing.genai_source import MISSING, live_table
from runguard.pricing.matching import MAKERS, entry_of
from runguard.pricing.price_table import PricedModel, PriceTable, current_table
from runguard.pricing.rates import PER_MILLION, Band, Rates, Unpriced

PricesSource = Literal["table", "genai-prices"]


def preload(source: PricesSource = "table") -> None:
    """Load the price list now, so that no run waits for it. Any number of times, from any thread."""
    price_list(source)


def price_list(source: PricesSource) -> PriceTable | None:
    """The price list; None when it is genai-prices and that is not installed."""
    if source == "table":
        return current_table()
    try:
        return live_table()
    except ImportError:
        return None


def missing_source(source: PricesSource) -> str | None:
    """Why a price list cannot be used; None when it can."""
    return MISSING if source == "genai-prices" and _is_missing("genai_prices") else None


def listed_models(source: PricesSource = "table") -> list[str]:
    """The ids of the makers whose models go by their bare names."""
    table = price_list(source)
    return [
        entry.id
        for maker in (table.providers if table is not None else ())
        if maker.id in MAKERS
        for entry in maker.entries
    ]


class ListedPrice:
    """What the price list says about one model at any time. Each of its prices is worked out once."""

    __slots__ = ("_entry", "_estimated", "_model", "_rates", "_source")

    def __init__(self, model: str, table: PriceTable | None) -> None:
        found = entry_of(table, model) if table is not None else None
        self._model = model
        self._source = table.source if table is not None else ""
        self._entry: PricedModel | None = found[0] if found is not None else None
        self._estimated = found is not None and not found[1]
        self._rates: dict[int, Rates | Unpriced] = {}

    @property
    def window(self) -> int | None:
        """How many input tokens fit into the model."""
        return None if self._entry is None else self._entry.window

    @property
    def moments(self) -> tuple[set[float], set[float]]:
        """When a new price begins, in unix seconds; and when the price changes every day, in seconds of the UTC day."""
        prices = () if self._entry is None else self._entry.prices
        return {price.begins for price in prices}, {second for price in prices for second in price.daily or ()}

    def rates(self, at: float) -> Rates | Unpriced:
        if self._entry is None:
            reason = f"{self._source} does not know it" if self._source else MISSING
            return Unpriced(self._model, f"{reason}; give its price with prices=")
        number = self._entry.in_force(at)
        known = self._rates.get(number)
        if known is None:
            facts = self._entry.prices[number].facts
            known = self._rates[number] = _rates_from(facts, self._model, self._source, estimated=self._estimated)
        return known


def _is_missing(package: str) -> bool:
    try:
        return find_spec(package) is None
    except (ImportError, ValueError):  # it was blocked
        return True


def _rates_from(facts: Mapping[str, Any], model: str, source: str, *, estimated: bool) -> Rates | Unpriced:
    tokens = {name: price for name, price in facts.items() if name.endswith("_mtok")}
    if "input_mtok" not in tokens:
        if not tokens and model.strip().lower().endswith(":free"):
            return Rates([Band(-1, 0, 0, 0, 0, 0, 0, 0)], source)
        return Unpriced(model, f"{source} lists it without a price for tokens; give its price with prices=")
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
    """A plain price, or the tier in force just above ``start`` input tokens."""
    if isinstance(price, str):
        return Decimal(price)
    base, *tiers = price
    for above, other in tiers:
        if above <= start:
            base = other
    return Decimal(base)


def _band(above: int, rates: Mapping[str, int]) -> tuple[Band, bool]:
    """One band, and whether it had to fold kinds of tokens into one: pictures and video are not counted apart, so where
    they cost more than text all tokens of that direction cost as much. Separate (cheaper) prices for reasoning are
    ignored for the same reason."""
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
