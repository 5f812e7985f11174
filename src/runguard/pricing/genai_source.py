"""The price facts of the installed genai-prices package, as a price table."""

import json
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runguard.pricing.price_table import FORMAT, PriceTable, digest_of

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ConditionalPrice, ModelInfo, ModelPrice

MISSING: Final = "genai-prices is not installed: pip install 'runguard-agents[prices]'"
_TEXT_CLAUSES: Final = ("equals", "starts_with", "ends_with", "contains")
_converted: "tuple[DataSnapshot, PriceTable] | None" = None


def snapshot() -> "DataSnapshot":
    """The prices that genai-prices uses now; ImportError when it is not installed.

    A program that runs genai-prices' own updater gets a new one from time to time.
    """
    from genai_prices.data_snapshot import get_snapshot

    return get_snapshot()


def live_table() -> PriceTable:
    """The prices that genai-prices uses now, converted once per snapshot."""
    global _converted
    now = snapshot()
    if _converted is None or _converted[0] is not now:
        source = f"genai-prices {release()}" + (f", updated {now.timestamp:%Y-%m-%d}" if now.from_auto_update else "")
        _converted = now, PriceTable(table_text(now, installed_on()), source)
    return _converted[1]


def release() -> str:
    return str(import_module("genai_prices").__version__)


def installed_on() -> date:
    """The day on which the package was installed. It says nothing about its own date."""
    data = Path(str(import_module("genai_prices").__file__)).with_name("data.py")
    return datetime.fromtimestamp(data.stat().st_mtime, UTC).date()


def table_text(prices: "DataSnapshot", day: date) -> str:
    """A price table; the same prices and day give the same text."""
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
        "prices": [_dated(price) for price in prices] or [{"usd": {}}],
    }


def _clause(clause: Any) -> dict[str, Any]:
    """A clause as the table writes it: text in lower case, because names are compared in lower case."""
    for kind in ("or", "and"):
        if (parts := getattr(clause, f"{kind}_", None)) is not None:
            return {kind: [_clause(part) for part in parts]}
    if (pattern := getattr(clause, "regex", None)) is not None:
        return {"regex": pattern}
    for kind in _TEXT_CLAUSES:
        if (text := getattr(clause, kind, None)) is not None:
            return {kind: str(text).lower()}
    raise ValueError(f"genai-prices matches a model by {type(clause).__name__}, which runguard does not know")


def _dated(price: "ConditionalPrice | ModelPrice") -> dict[str, Any]:
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
    """Seconds since midnight, UTC; a time without a zone is UTC."""
    naive = timedelta(hours=moment.hour, minutes=moment.minute, seconds=moment.second, microseconds=moment.microsecond)
    seconds = ((naive - (moment.utcoffset() or timedelta())) % timedelta(days=1)).total_seconds()
    return int(seconds) if seconds == int(seconds) else seconds


def _facts(prices: "ModelPrice") -> Iterator[tuple[str, Any]]:
    """The prices that count here: those of tokens, and the fee per call."""
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
