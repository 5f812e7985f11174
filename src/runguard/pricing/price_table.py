"""The price table: one text file with the price facts of genai-prices.

The first line is a JSON object with the format, the release and date of genai-prices, and the providers. Then follows
one line per model, provider after provider. A provider's lines are parsed when one of its models is first looked up,
so loading the table takes about a millisecond.

A table is in the package. ``runguard prices --update`` writes another one; the newer of the two is used.
"""

import json
import logging
import os
from datetime import date
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

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
        """Which price is in force at a moment: the last one that applies, else the first."""
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
    """A price list. ``source`` names it in messages and reports."""

    __slots__ = ("date", "providers", "release", "source")

    def __init__(self, text: str, source: str = "") -> None:
        """ValueError when the text is not a complete table."""
        head, _, body = text.partition("\n")
        header = json.loads(head)
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError("not a price table that this release of runguard reads")
        if digest_of(body) != header["digest"]:
            raise ValueError("its lines do not match its digest: it is incomplete or was edited")
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
        """By the release of genai-prices. The dates do not count: an old release may be installed today."""
        return _number(self.release) > _number(other.release)


def digest_of(body: str) -> str:
    return blake2b(body.encode(), digest_size=8).hexdigest()


def _number(release: str) -> tuple[int, ...]:
    return tuple(int("".join(sign for sign in part if sign.isdigit()) or 0) for part in release.split("."))


def updated_path() -> Path:
    """Where ``runguard prices --update`` writes its table: ``RUNGUARD_PRICES``, else the user's data folder."""
    if named := os.environ.get("RUNGUARD_PRICES"):
        return Path(named)
    folder = os.environ.get("XDG_DATA_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(folder) if folder else Path.home() / ".local" / "share") / "runguard" / "prices.jsonl"


def updated_table() -> PriceTable | None:
    """The table that ``runguard prices --update`` wrote; ValueError when it cannot be used."""
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
    """The newer one of the packaged and the updated table. A process keeps the table that it first loaded."""
    packaged = packaged_table()
    try:
        updated = updated_table()
    except ValueError as error:
        _log.warning(
            "runguard.prices_failed: %s; using the %s. `runguard prices --update` writes a new one",
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
        tuple(map(_dated, line["prices"])),
    )


def _dated(price: dict[str, Any]) -> DatedPrice:
    since, daily = price.get("since"), price.get("daily")
    return DatedPrice(
        float("-inf") if since is None else float((date.fromisoformat(since).toordinal() - _EPOCH) * DAY_S),
        None if daily is None else (daily[0], daily[1]),
        price["usd"],
    )
