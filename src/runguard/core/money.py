"""Amounts: dollars, tokens and calls, their arithmetic and their texts.

Money is integer nano-USD inside and ``Decimal`` at the edge. Three counts go together everywhere, in the order of
``UNITS``: an ``Amount`` is a plain tuple, because it is made for every model call.
"""

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Final

from runguard.core.exceptions import PolicyError

UNITS: Final = ("usd", "tokens", "calls")
Amount = tuple[int, int, int]  # nano-USD, tokens, calls
NOTHING: Final[Amount] = (0, 0, 0)
UNLIMITED: Final = 1 << 62
NANO: Final = 1_000_000_000
MOST_USD: Final = 1_000_000_000  # more than that is a slip of the keyboard, and stays exact in every store
MOST_COUNT: Final = 10**15
_LEAST_USD: Final = Decimal("1e-9")
_SHOWN_CHARS: Final = 80


def to_nano(value: object, name: str = "usd", *, least: int = 1) -> int:
    """Dollars -> nano-USD. A fraction of a nano is dropped, so that a cap is never wider than it was written.

    ``least``: the smallest result that is accepted. A fixed cap of 0 is rejected; a function may give one.
    """
    if fault := fault_of_dollars(value, least):
        raise PolicyError(f"{name} = {shown(value)}: {fault}")
    dollars = Decimal(str(value))
    if dollars < _LEAST_USD:
        return 0
    return nanos(dollars)


def nanos(usd: Decimal | int, *, up: bool = False) -> int:
    """Dollars as whole nano-USD. A fraction is dropped, or with ``up`` counted as one more."""
    # by integers: Decimal arithmetic obeys a context that the host program may have changed
    numerator, denominator = usd.as_integer_ratio()
    return -(-numerator * NANO // denominator) if up else numerator * NANO // denominator


def fault_of_dollars(value: object, least: int = 1) -> str:
    """What is wrong with an amount of dollars, on one line; nothing where it is fine."""
    too_much = f"the largest accepted value is {MOST_USD:,} dollars; leave it out for no limit"
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return "give dollars as a number or a decimal string such as '2.50'"
    if isinstance(value, int) and abs(value) > MOST_COUNT:
        return too_much if value > 0 else "must be greater than 0"
    try:
        dollars = Decimal(str(value))
    except InvalidOperation:
        return "not a number of dollars"
    if not dollars.is_finite():
        return "must be finite; leave it out for no limit"
    if dollars < 0 or (dollars == 0 and least > 0):
        return "must be greater than 0"
    if dollars > MOST_USD:
        return too_much
    return "less than a billionth of a dollar" if dollars < _LEAST_USD and least > 0 else ""


def shown(value: object) -> str:
    """A value in an error message: short, on one line, and without running code of a foreign object."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to write out more than 4,300 digits
        return f"{'-' if value < 0 else ''}(a number of {value.bit_length() * 3 // 10} digits)"
    if value is None or type(value) in (bool, int, float, str, Decimal):
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return f"a {type(value).__name__}"


def to_usd(nano: int) -> Decimal:
    """nano-USD -> dollars, exact, without trailing zeros."""
    whole, rest = divmod(abs(nano), NANO)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return Decimal(text if nano >= 0 else f"-{text}")  # from text, which no context rounds


def usd_text(nano: int) -> str:
    """``$0.10``: two decimals, or as many as the amount needs."""
    text = f"{to_usd(nano):f}"
    whole, _, cents = text.partition(".")
    return f"${whole}.{cents.ljust(2, '0')}"


def amount_text(unit: int, number: int) -> str:
    return (
        usd_text(number) if unit == 0 else f"{number:,} {UNITS[unit] if number != 1 else UNITS[unit].removesuffix('s')}"
    )


def edge(unit: int, number: int) -> Decimal | int:
    """A count as users see it: dollars as ``Decimal``, tokens and calls as they are."""
    return to_usd(number) if unit == 0 else number


def to_count(value: object, name: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        else:
            raise PolicyError(f"{name} = {shown(value)}: give a whole number")
    if value < least:
        raise PolicyError(f"{name} = {shown(value)}: must be {'greater than' if least else 'at least'} 0")
    if value > MOST_COUNT:
        raise PolicyError(
            f"{name} = {shown(value)}: the largest accepted value is {MOST_COUNT:,}; leave it out for no limit"
        )
    return int(value)


def cap_from_function(value: object, unit: int) -> int:
    """A cap that a function gave.

    0 is a cap; None means no limit. PolicyError for anything else that is not an amount.
    """
    if value is None:
        return UNLIMITED
    return to_nano(value, least=0) if unit == 0 else to_count(value, UNITS[unit], least=0)


def share_of(limit: Amount, granted: Amount, percent: float) -> Amount:
    """What must be spent to reach a share of a limit, by integers: 7 of 100 is 7 %, whatever floats say. Unlimited
    stays unlimited.

    At least 1: no share of a limit of 0 is reached while nothing is spent.
    """
    share = Fraction(str(percent))
    usd, tokens, calls = (
        UNLIMITED if cap >= UNLIMITED else max(math.ceil((cap + more) * share), 1)
        for cap, more in zip(limit, granted, strict=True)
    )
    return usd, tokens, calls


def unit_reached(spent: Amount, needed: Amount) -> int | None:
    """The first unit in which what is needed is spent."""
    return next((unit for unit in range(3) if needed[unit] < UNLIMITED and spent[unit] >= needed[unit]), None)
