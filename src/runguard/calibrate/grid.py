"""The settings that are tried: for each loop rule its rungs as they are, tighter, looser, and without the rule."""

from dataclasses import dataclass
from typing import Final

from runguard.calibrate.changes import changed, is_allowed
from runguard.core.decision import Rungs
from runguard.policy.settings import Policy

# count what was done before; the others what led to nothing
OF_REPETITION: Final = ("repetition", "no_news", "same_call")
TRIED: Final = (*OF_REPETITION, "stall", "tool_failures", "empty")
_FACTORS: Final = (0.5, 0.75, 1.5, 2.0)
_LADDER: Final = ("warn", "nudge", "block", "stop")
_LEAST: Final = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One rule set otherwise than in the policy. ``rungs`` None: the rule is off, for comparison."""

    rule: str
    rungs: tuple[tuple[str, int], ...] | None

    @property
    def setting(self) -> dict[str, int] | bool:
        return False if self.rungs is None else dict(self.rungs)

    @property
    def change(self) -> dict[str, dict[str, dict[str, int] | bool]]:
        return {"rules": {self.rule: self.setting}}


def variants(policy: Policy) -> list[Variant]:
    """Of every rule that is on: off, and each other setting worth trying."""
    found: list[Variant] = []
    for rule in TRIED:
        now = policy.rungs(rule)
        if now is None or now == Rungs():
            continue
        tried = [scaled(now, factor) for factor in _FACTORS]
        if now.stop is None:
            tried += [
                {**rungs, "stop": 2 * max(rungs.values())} for rungs in (scaled(now, factor) for factor in (0.5, 1.0))
            ]
        as_it_is = scaled(now, 1.0)
        found.append(Variant(rule, None))
        others = dict.fromkeys(Variant(rule, tuple(rungs.items())) for rungs in tried if rungs != as_it_is)
        found += [variant for variant in others if is_allowed(variant.change)]
    return found


def scaled(rungs: Rungs, factor: float) -> dict[str, int]:
    """Every rung times ``factor``, still one above the other."""
    made: dict[str, int] = {}
    least = _LEAST
    for name in _LADDER:
        number = getattr(rungs, name)
        if number is not None:
            made[name] = least = max(round(number * factor), least)
            least += 1
    return made


def with_rule(policy: Policy, variant: Variant) -> Policy:
    """The policy with that one rule changed."""
    return changed(policy, variant.change)


def lowest_rungs(policy: Policy, tried: list[Variant]) -> dict[str, float]:
    """By rule, the lowest count at which any of its settings does something."""
    found: dict[str, float] = {}
    for variant in tried:
        now = policy.rungs(variant.rule)
        assert now is not None
        found[variant.rule] = min(
            found.get(variant.rule, now.lowest), *(number for _, number in variant.rungs or ()), now.lowest
        )
    return found
