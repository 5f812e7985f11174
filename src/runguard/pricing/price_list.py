"""The public price list, genai-prices: which entry a model id means, and what that entry says. Imported when it is
first needed.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from runguard.pricing.model_ids import split_id
from runguard.pricing.model_limits import is_release_of
from runguard.pricing.rates import PER_MILLION, Band, Rates, Unpriced, nano_rate

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, Provider

_VERSION: Final = re.compile(r"-(?:\d{3}|\d{8}|\d{4}-\d{2}-\d{2})$")
_COMPACT_DATE: Final = re.compile(r"-(20\d{2})(\d{2})(\d{2})$")
_MAKERS: Final = frozenset({"anthropic", "google", "openai"})  # whose models go by their bare names


def preload() -> None:
    """Import genai-prices and its data now, off the path of a run. Any number of times, from any thread."""
    _snapshot()


def listed_rates(model: str, moment: datetime) -> Rates | Unpriced:
    """What the list says a model costs at a moment."""
    snapshot = _snapshot()
    if snapshot is None:
        return Unpriced(model, "genai-prices is not installed; give its price with prices=")
    source = _source(snapshot)
    found = entry_of(snapshot, model)
    if found is None:
        return Unpriced(model, f"{source} does not know it; give its price with prices=")
    info, of_named_provider = found
    return _rates_from(info.get_prices(moment), model, source, estimated=not of_named_provider)


def listed_window(model: str) -> int | None:
    """How many input tokens fit into a model, as the list says."""
    snapshot = _snapshot()
    found = entry_of(snapshot, model) if snapshot is not None else None
    return None if found is None else found[0].context_window


def price_changes(model: str) -> bool:
    """Whether the list has more than one price for a model, each for its time."""
    snapshot = _snapshot()
    found = entry_of(snapshot, model) if snapshot is not None and model.strip() else None
    return found is not None and isinstance(found[0].prices, list)


def listed_models() -> list[str]:
    """The ids of the makers whose models go by their bare names."""
    snapshot = _snapshot()
    return [
        model.id
        for maker in (snapshot.providers if snapshot is not None else ())
        if maker.id in _MAKERS
        for model in maker.models
    ]


def _snapshot() -> "DataSnapshot | None":
    """The price list; None when the package is not there.

    Python's import lock makes the first use safe between threads.
    """
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return None
    return get_snapshot()


def _source(snapshot: "DataSnapshot") -> str:
    from genai_prices import __version__

    return f"genai-prices {__version__}" + (
        f", updated {snapshot.timestamp:%Y-%m-%d}" if snapshot.from_auto_update else ""
    )


def entry_of(snapshot: "DataSnapshot", model: str) -> "tuple[ModelInfo, bool] | None":
    """The entry for a model, and whether it is one of the provider that the id names (or names none).

    Not by the package's own lookup: that keeps every name it is asked for, for ever, and takes a name that merely
    begins like a model for that model.
    """
    provider, name, named = split_id(model)
    seller = next((p for p in snapshot.providers if p.id == provider), None)
    if seller is not None:
        for spelling in dict.fromkeys((named, *_spellings(name))):
            for listing in (seller, *_fallbacks(seller, snapshot)):
                if (info := _find(listing, spelling, paths=True)) is not None:
                    return info, True
    for spelling in _spellings(name):
        for maker in snapshot.providers:
            known_by_name = maker.id in _MAKERS or (
                maker.model_match is not None and maker.model_match.is_match(spelling)
            )
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
    """Whether a clause of the price list means exactly this model.

    ``paths``: a region or vendor may stand before the name.
    """
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
        text = next(
            (
                str(getattr(clause, kind)).lower()
                for kind in ("starts_with", "ends_with", "contains")
                if hasattr(clause, kind)
            ),
            "",
        )
        start = name.rfind(text) if hasattr(clause, "ends_with") else name.find(text)
        end = start + len(text)
    if end <= start or (start and not (paths and name[start - 1] in "./")):
        return False
    return is_release_of(name[start:end], name[end:])


def _rates_from(prices: "ModelPrice", model: str, source: str, *, estimated: bool) -> Rates | Unpriced:
    values = {key: value for key, value in vars(prices).items() if value is not None}
    if "input_mtok" not in values:
        if not any(key.endswith("_mtok") for key in values) and model.strip().lower().endswith(":free"):
            return Rates([Band(-1, 0, 0, 0, 0, 0, 0, 0)], source)
        return Unpriced(model, f"{source} lists it without a price for tokens; give its price with prices=")
    starts = sorted({tier.start for value in values.values() for tier in getattr(value, "tiers", ())})
    bands, folded = [], False
    for start in (-1, *starts):
        at = {key: nano_rate(_at(value, start)) for key, value in values.items() if key.endswith("_mtok")}
        band, unlike = _band(start, at)
        bands.append(band)
        folded = folded or unlike
    requests = values.get("requests_kcount")
    fee = nano_rate(requests) * (PER_MILLION // 1000) if isinstance(requests, Decimal) else 0
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
