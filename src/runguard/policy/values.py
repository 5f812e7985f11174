"""The types of single settings: counts, durations, dollars, budgets and the receivers of alerts."""

from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, WithJsonSchema

from runguard.alerts.alert_settings import SCHEMA as ALERTS_SCHEMA
from runguard.alerts.alert_settings import AlertSettings
from runguard.core.errors import PolicyError
from runguard.core.money import KINDS, Budget, fault_of_dollars

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0.001, le=10**9, allow_inf_nan=False)]
Ratio = Annotated[float, Field(gt=1, le=10**6, allow_inf_nan=False)]
RungNumber = Annotated[float, Field(gt=0, le=10**9, allow_inf_nan=False)]


def _dollars(value: object) -> object:
    if fault := fault_of_dollars(value):
        raise ValueError(fault)
    return Decimal(str(value))


def _budget(entry: object) -> Budget:
    try:
        return Budget.of(entry)
    except PolicyError as error:
        raise ValueError(str(error)) from None


_AMOUNT: Final = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string"}]}
_BUDGET_SCHEMA: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "usd": _AMOUNT,
        "tokens": {"type": "integer", "minimum": 1},
        "calls": {"type": "integer", "minimum": 1},
        "per": {
            "type": "string",
            "default": "run",
            "description": f"{', '.join(KINDS)}; 'agent:research*' by name, 'run+agent' for both at once.",
        },
        "window": {
            "type": "string",
            "description": "'1m', '1h', '1d', '1w' or 'month'; none: for as long as the ledger lives.",
        },
        "tz": {"type": "string", "description": "Time zone by whose calendar days, weeks and months begin."},
        "on_exhausted": {
            "enum": ["refuse", "wait"],
            "default": "refuse",
            "description": "A call that does not fit: refuse it, or let it wait for room, at most max_wait_seconds.",
        },
        "burn_alert": {"type": "boolean", "default": False},
        "thresholds": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"type": "object"}]}},
    },
}


def _receivers(given: object) -> AlertSettings:
    try:
        return AlertSettings.parse(given)
    except PolicyError as error:
        raise ValueError(str(error)) from None


Receivers = Annotated[
    InstanceOf[AlertSettings],
    BeforeValidator(_receivers),
    PlainSerializer(AlertSettings.to_dict),
    WithJsonSchema(ALERTS_SCHEMA),
]


def _tool_price(value: object) -> object:
    """Dollars, 0 included, or a function."""
    if callable(value):
        return value
    if fault := fault_of_dollars(value, 0):
        raise ValueError(f"{fault}, or give a function")
    return Decimal(str(value))


def _price_text(price: object) -> str:
    return "function" if callable(price) else str(price)


ToolPrice = Annotated[
    Any,
    BeforeValidator(_tool_price),
    PlainSerializer(_price_text),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}),
]
Usd = Annotated[Decimal, BeforeValidator(_dollars), WithJsonSchema(_AMOUNT)]
OneBudget = Annotated[
    InstanceOf[Budget], BeforeValidator(_budget), PlainSerializer(Budget.to_dict), WithJsonSchema(_BUDGET_SCHEMA)
]
