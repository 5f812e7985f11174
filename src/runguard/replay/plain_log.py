"""A plain log: one JSON object per run with what it took in all, and no steps.

``{"usd", "tokens", "calls"}``, at least one of them; optionally ``id``, ``ok`` (or ``success``), ``model``, ``source``,
``app``, ``user``, ``session``.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from runguard.core.money import nanos, shown
from runguard.pricing.rates import Usage
from runguard.providers.usage import dollars
from runguard.replay.steps import Asked, Faults, RecordedRun, Step, Turn, word

TOTALS: Final = ("usd", "tokens", "calls")
_COLUMNS: Final = {"usd": "usd", "tokens": "tokens", "calls": "model_calls"}  # what ``RecordedRun.unknown`` calls them
_NEVER: Final = frozenset({"tool_calls", "seconds", "largest_answer"})
_MOST_CALLS: Final = 100_000
_MOST_TOKENS: Final = 10**15


def is_plain(run: dict[str, Any]) -> bool:
    return "steps" not in run and any(run.get(name) is not None for name in TOTALS)


def run_of(run: dict[str, Any], where: str, faults: Faults) -> RecordedRun | None:
    """Return the run of one line; None if a field is invalid, with the reason added to ``faults``."""
    name = word(run.get("id")) or word(run.get("session")) or where
    ok = run.get("ok", run.get("success"))
    try:
        if ok is not None and not isinstance(ok, bool):
            raise ValueError(f"ok = {shown(ok)}: expected true or false; leave it out where it is not known")
        nano, tokens, calls = (
            nano_of(run.get("usd")),
            _count(run, "tokens", _MOST_TOKENS),
            _count(run, "calls", _MOST_CALLS),
        )
    except ValueError as error:
        faults.add(where, str(error))
        return None
    unknown = _NEVER.union(_COLUMNS[total] for total in TOTALS if run.get(total) is None)
    return RecordedRun(
        name,
        _steps(word(run.get("model")), nano, tokens, 1 if calls is None else calls),
        app=word(run.get("app")),
        user=word(run.get("user")),
        session=word(run.get("session")) or name,
        source=word(run.get("source")),
        success=ok,
        unknown=unknown,
    )


def nano_of(value: object) -> int | None:
    """Dollars as nano-USD, rounded up; ValueError says what is wrong with them."""
    if value is None:
        return None
    usd: Decimal | None = dollars(value, "usd", [])
    if usd is None:
        raise ValueError(f"usd = {shown(value)}: expected dollars from 0 to 1,000,000")
    return nanos(usd, up=True)


def _count(run: dict[str, Any], name: str, most: int) -> int | None:
    value = run.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or value != int(value):
        raise ValueError(f"{name} = {shown(value)}: expected a whole number from 0 to {most:,}")
    return int(value)


def _steps(model: str, nano: int | None, tokens: int | None, calls: int) -> Iterator[Step]:
    """As many model calls as the run made, each with its share of the totals; the last one has the rest."""
    yield Turn(None)
    for n in range(calls):
        is_last = n == calls - 1
        usd = None if nano is None else nano // calls + (nano % calls if is_last else 0)
        prompt = 0 if tokens is None else tokens // calls + (tokens % calls if is_last else 0)
        yield Asked(None, "", "", model, Usage(prompt), batch=str(n), goes_on=not is_last, nano=usd, is_share=True)
