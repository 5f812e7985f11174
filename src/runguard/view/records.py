"""Read records of a store; count records that cannot be read."""

import json
import math
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from runguard.core.money import nanos
from runguard.view.rows import Ahead, RunForecast

_NOTES_SHOWN: Final = 5  # agents


class Unreadable:
    """The number of unreadable records of each kind in the last read."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def table(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def entries(text: str) -> list[dict[str, Any]] | None:
    """Parse a JSON list and return its objects; None if the text is not a list."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else None


def word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def count(value: Any) -> int:
    return whole(value) or 0


def whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e15 else None


def number(value: Any) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def dollars(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and abs(amount) < 10**12 else None


@dataclass(frozen=True, slots=True)
class Call:
    """One model call, or one tool call with a price, with its usage and cost."""

    at: float  # when it was recorded, by the store's clock
    run: str
    id: str
    app: str | None  # None: not in the record
    user: str | None
    agent: str
    model: str
    tool: str
    tokens_in: int
    tokens_out: int
    nano: int | None  # None: no price
    estimated: bool
    is_tool: bool = False  # the price of a tool call


def read_call(at: float, run: str, text: str) -> Call | None:
    found = table(text)
    if found is None:
        return None
    usd = dollars(found.get("usd"))
    return Call(
        at,
        run,
        word(found.get("id")),
        found["app"] if isinstance(found.get("app"), str) else None,
        found["user"] if isinstance(found.get("user"), str) else None,
        word(found.get("agent")),
        word(found.get("model")),
        word(found.get("tool")),
        count(found.get("input")),
        count(found.get("output")),
        nanos(usd) if usd is not None else None,
        bool(found.get("estimated")),
        found.get("kind") == "tool",
    )


def latest(calls: list[Call]) -> list[Call]:
    """Return each call once: a later record with the same id replaces the earlier one."""
    calls_by_id: dict[tuple[str, str] | int, Call] = {}
    for position, call in enumerate(calls):
        key: tuple[str, str] | int = (call.run, call.id) if call.id else position
        before = calls_by_id.get(key)
        calls_by_id[key] = call if before is None else replace(call, at=before.at)
    return list(calls_by_id.values())


def read_forecast(value: Any) -> RunForecast | None:
    """The forecast of a run, as its worker reported it; None if there is none."""
    if not isinstance(value, dict):
        return None
    return RunForecast(count(value.get("calls")), *(_ahead(value.get(name)) for name in ("cap", "window", "tier")))


def _ahead(value: Any) -> Ahead | None:
    if not isinstance(value, dict) or (left := whole(value.get("calls_left"))) is None:
        return None
    unit = word(value.get("unit"))
    limit = dollars(value.get("limit")) if unit == "usd" else whole(value.get("limit"))
    return Ahead(left, dollars(value.get("usd")), limit, unit, word(value.get("agent")))


def notes_of(facts: dict[str, Any]) -> tuple[str, ...]:
    """What a running run reports beside its figures: agents on a cheaper model, and a prompt cache that is lost."""
    switched = facts.get("switched")
    notes = [
        f"{agent} on {word(one.get('to'))} instead of {word(one.get('from'))}: {word(one.get('because'))}"
        for agent, one in list(switched.items() if isinstance(switched, dict) else ())[:_NOTES_SHOWN]
        if isinstance(one, dict)
    ]
    lost = word(facts.get("prompt_cache"))
    return (*notes, *([f"prompt cache: {lost}"] if lost else ()))
