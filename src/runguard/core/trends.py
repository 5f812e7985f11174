"""Trends: how many calls still fit, and when a budget is used up. Arithmetic only; all figures are estimates.

``engine/forecast`` shows them for runs and budgets at work, ``view`` for budgets in a store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import Final, NamedTuple

LEAST_CALLS: Final = 12  # below that there is no forecast
CALLS_KEPT: Final = 32  # of a run; a forecast looks at no more


class Trend(NamedTuple):
    """A line through a series of amounts: the next one, and how much each following one is larger. Both are divided by
    ``scale``.
    """

    level: int
    growth: int
    scale: int


def trend_of(amounts: Sequence[int], *, is_flat: bool = False) -> Trend | None:
    """Return the line through the means of the earlier and of the later half; None for too few amounts.

    A falling series continues at the mean of its later half. ``is_flat``: continue at the mean of all amounts.
    """
    count = len(amounts)
    if count < LEAST_CALLS:
        return None
    if is_flat:
        return Trend(sum(amounts), 0, count)
    half = count // 2
    earlier, later = sum(amounts[:half]), sum(amounts[-half:])
    if later <= earlier:
        return Trend(later, 0, half)
    distance = count - half  # between the centres of the halves
    growth = 2 * (later - earlier)
    return Trend((earlier + later) * distance + (later - earlier) * (count + 1), growth, 2 * half * distance)


def calls_within(trend: Trend, room: int) -> int | None:
    """Return how many more calls fit into ``room``; None when they take nothing."""
    level, growth, scale = trend
    room = max(room, 0) * scale
    if not growth:
        return room // level if level else None
    # the largest n with n * level + growth * n * (n - 1) / 2 <= room
    linear = 2 * level - growth
    return max((isqrt(linear * linear + 8 * growth * room) - linear) // (2 * growth), 0)


def sum_of(trend: Trend, calls: int) -> int:
    """Return what the next calls take together, rounded up."""
    level, growth, scale = trend
    return -(-(2 * calls * level + growth * calls * (calls - 1)) // (2 * scale))


def was_cut(prompts: Sequence[int]) -> bool:
    """Return whether the history was cut: a prompt is at most half as large as the one before."""
    return any(2 * after <= before for before, after in pairwise(prompts))


def calls_until_size(prompts: Sequence[int], size: int) -> int | None:
    """Return how many more prompts are at most ``size`` tokens large.

    None for too few prompts, and where they do not grow. A history that was cut before it was so large will be cut
    again: also None.
    """
    if len(prompts) < LEAST_CALLS:
        return None
    steps = [after - before for before, after in pairwise(prompts) if 2 * after > before]
    growth = sum(steps)
    if growth <= 0 or (len(steps) < len(prompts) - 1 and size > max(prompts)):
        return None
    return max(size - prompts[-1], 0) * len(steps) // growth


@dataclass(frozen=True, slots=True)
class BudgetForecast:
    """What becomes of a budget if spending continues as it has since its period began. An estimate."""

    calls: int  # that it is based on
    used_up_at: float | None  # epoch seconds; None: the budget lasts until its period ends
    share_at_end: float  # of the cap, when the period ends


def budget_forecast(spent: int, cap: int, calls: int, begins: float, now: float, ends: float) -> BudgetForecast | None:
    """Return the forecast of a budget in one unit; None for too few calls, and where nothing was spent or limited."""
    passed = now - begins
    if calls < LEAST_CALLS or spent <= 0 or cap <= 0 or passed <= 0 or now >= ends:
        return None
    used_up_at = now + max(cap - spent, 0) * passed / spent
    share = spent * (ends - begins) / (passed * cap)
    return BudgetForecast(calls, used_up_at if used_up_at < ends else None, round(share, 4))
