"""The cost that a provider, a gateway or the caller states in dollars."""

from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final

from runguard.providers.fields import fields, private

_NUMBERS: Final = frozenset({int, float})  # exact types: a bool is not an amount, and neither is a mock
_DEAREST: Final = 1_000_000  # USD for one call
_EXACT: Final = Context(prec=60)  # the host program may have changed its own


def dollars(value: Any, name: str, problems: list[str]) -> Decimal | None:
    """An amount of USD; None for anything else, and what is wrong with it goes to ``problems``."""
    if value is None:
        return None
    kind = type(value)
    usd: Decimal | None = None
    if kind is Decimal:
        usd = value
    elif kind is int:
        usd = Decimal(value) if abs(value) <= _DEAREST else Decimal("Infinity")
    elif kind is float or (kind is str and len(value) <= 64):
        try:
            usd = Decimal(str(value))  # 0.1 means 0.1, not the binary fraction nearest to it
        except InvalidOperation:
            usd = None
    if usd is not None and usd.is_finite() and 0 <= usd <= _DEAREST:
        return usd
    if usd is not None or kind in (str, bool):
        problems.append(f"{name}: not an amount of USD from 0 to a million")
    return None


def stated_cost(response: Any, usage: Any, problems: list[str]) -> Decimal | None:
    """What LiteLLM calculated for the call, or a gateway such as OpenRouter charged for it."""
    hidden = response.get("_hidden_params") if type(response) is dict else private(response, "_hidden_params")
    if hidden is not None and (cost := fields(hidden).get("response_cost")) is not None:
        return dollars(cost, "response_cost", problems)
    if usage is None:
        return None
    get = fields(usage).get
    cost = get("cost")
    if cost is None:
        return None
    if type(cost) not in _NUMBERS:
        cost = fields(cost).get("total_cost")  # Perplexity gives a table
    charged = dollars(cost, "usage.cost", problems)
    if charged is not None and get("is_byok") is True:  # with a key of one's own, the provider's bill comes on top
        beside = dollars(
            fields(get("cost_details")).get("upstream_inference_cost"), "upstream_inference_cost", problems
        )
        return None if beside is None else _EXACT.add(charged, beside)
    return charged
