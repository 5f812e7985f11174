"""The rules of a policy: their default rungs, and which rungs each of them can have."""

from collections.abc import Mapping
from typing import Final

from runguard.core.decision import Rungs
from runguard.core.errors import nearest

FREE_RETRIES: Final = 3  # of a call that failed: with them a retry holds as long as a poll
LONG_ANSWERS: Final = Rungs(nudge=5, stop=10)  # default limits of no_news for answers longer than a status
REWORDED: Final = Rungs(nudge=3, stop=6)  # default limits of no_news for one long answer in other words
# default limits of no_news for an agent that is set to work again and again; a state may be checked nine times
ORDERS: Final = Rungs(nudge=4, stop=10)
# default limits of no_news for an agent without tools that is called again and again; words alone are weak evidence
TOLD_AGAIN: Final = Rungs(nudge=6, stop=20)
# limits of stall for answers that look like success and ask to try again; a whole batch may meet a busy service
TRY_AGAIN: Final = Rungs(nudge=5, stop=20)
RULES: Final[dict[str, tuple[Rungs, frozenset[str]]]] = {
    # rule: default rungs, and the rungs it can have at all. The figures are measured: see benchmarks/detection.py. A
    # call, five unchanged repeats and the one that may find the change are made (a poll, a flaky test, a retry); the
    # eighth is refused.
    "repetition": (Rungs(nudge=4, block=8, stop=9), frozenset({"warn", "nudge", "block", "stop"})),
    "no_news": (Rungs(nudge=7, stop=14), frozenset({"warn", "nudge", "stop"})),
    "same_call": (Rungs(nudge=20, stop=120), frozenset({"warn", "nudge", "stop"})),
    "cycle": (Rungs(), frozenset({"warn", "nudge", "stop"})),
    "stall": (Rungs(nudge=3, block=5, stop=6), frozenset({"warn", "nudge", "block", "stop"})),
    "tool_failures": (Rungs(nudge=6, block=10, stop=11), frozenset({"warn", "nudge", "block", "stop"})),
    "empty": (Rungs(nudge=6), frozenset({"warn", "nudge", "stop"})),
    "handoff": (Rungs(nudge=4, stop=6), frozenset({"warn", "nudge", "stop"})),
    "talk": (Rungs(nudge=16, stop=40), frozenset({"warn", "nudge", "stop"})),
    "growth": (Rungs(warn=3), frozenset({"warn", "stop"})),
    "context": (Rungs(warn=0.8), frozenset({"warn"})),
    "polling": (Rungs(nudge=600, stop=1800), frozenset({"warn", "nudge", "stop"})),
}
_LADDER: Final = ("warn", "nudge", "block", "stop")
_MEASURES: Final = frozenset({"growth", "polling", "context"})  # ratios, seconds and fractions, not counts
_LEAST: Final = {"repetition": 2, "same_call": 2, "cycle": 2, "handoff": 2, "growth": 1.01, "context": 0}


def check_rule(rule: str, rungs: Mapping[str, float] | bool) -> None:
    if rule not in RULES:
        raise ValueError(f"rules.{rule}: no such rule; {nearest(rule, RULES)}")
    if rungs is True:
        raise ValueError(
            f"rules.{rule} = true says nothing; leave it out for the defaults, or give rungs such as {{'stop': 5}}"
        )
    if rungs is False:
        return
    allowed = RULES[rule][1]
    previous: tuple[str, float] | None = None
    for name, number in rungs.items():
        if name not in _LADDER:
            raise ValueError(f"rules.{rule}.{name}: no such rung; {nearest(name, _LADDER)}")
        if name not in allowed:
            raise ValueError(
                f"rules.{rule}.{name}: this rule has no such rung; it can "
                f"{', '.join(r for r in _LADDER if r in allowed)}"
            )
        if rule not in _MEASURES and number != int(number):
            raise ValueError(f"rules.{rule}.{name} = {number}: this rule counts whole things; give an integer")
        if number < _LEAST.get(rule, 1):
            raise ValueError(f"rules.{rule}.{name} = {number:g}: must be at least {_LEAST.get(rule, 1):g}")
    for name in _LADDER:
        if name not in rungs:
            continue
        if previous is not None and rungs[name] <= previous[1]:
            raise ValueError(
                f"rules.{rule}.{previous[0]} = {previous[1]:g} can never fire: {name} = {rungs[name]:g} comes "
                "first or together"
            )
        previous = (name, rungs[name])


def merge_rungs(default: Rungs, explicit: Mapping[str, float]) -> Rungs:
    """Explicit rungs are obeyed exactly; a default stays only where it can still fire beside them."""
    merged: dict[str, float | None] = dict.fromkeys(_LADDER)
    for position, name in enumerate(_LADDER):
        if name in explicit:
            merged[name] = explicit[name]
            continue
        number = getattr(default, name)
        if number is None:
            continue
        weaker = [explicit[n] for n in _LADDER[:position] if n in explicit]
        stronger = [explicit[n] for n in _LADDER[position + 1 :] if n in explicit]
        if all(number > n for n in weaker) and all(number < n for n in stronger):
            merged[name] = number
    if "block" in explicit and "stop" not in explicit:
        merged["stop"] = explicit["block"] + 1  # after one block the next identical attempt stops
    return Rungs(**merged)
