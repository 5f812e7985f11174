"""Numbers formatted for people."""

from runguard.core.money import to_usd
from runguard.replay.results import RunResult


def count(number: float) -> str:
    """1234567 -> 1.2M."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (10_000, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.1f}{letter}"
    return f"{number:g}"


def money(nano: int) -> str:
    usd = to_usd(nano)
    return f"${usd:,.2f}" if usd >= 1 or not usd else f"${usd:.4f}"


def cost(run: RunResult) -> str:
    """Format the cost of a run; "?" if none of its calls has a price."""
    if run.unpriced and not run.nano:
        return "?"
    return ("≥" if run.unpriced else "≈" if run.estimated else "") + money(run.nano)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"
