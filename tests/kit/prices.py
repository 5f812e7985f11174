"""Prices and usage for the tests of pricing."""

from datetime import UTC, datetime
from decimal import Decimal

from runguard.core.money import NANO
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Unpriced, Usage

AT = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()


MTOK = 1_000_000


def usd(nano: int) -> Decimal:
    return Decimal(nano) / NANO


def rates(model: str, book: Pricing | None = None, at: float = AT) -> Rates:
    found = (book or Pricing()).rates(model, at)
    assert isinstance(found, Rates), str(found)
    return found


def unpriced(model: str, book: Pricing | None = None) -> Unpriced:
    found = (book or Pricing()).rates(model, AT)
    assert isinstance(found, Unpriced), f"{model} was priced: {found}"
    return found


def per_mtok(model: str, book: Pricing | None = None) -> tuple[Decimal, Decimal]:
    """USD for a million tokens in and out, in calls too small for any tier."""
    found = rates(model, book)
    return usd(found.cost(Usage(input=1000)) * 1000), usd(found.cost(Usage(output=1000)) * 1000)
