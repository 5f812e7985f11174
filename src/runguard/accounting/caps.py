"""The caps in force for a scope: fixed amounts, and amounts that functions give.

A function that raises, or returns something that is not an amount, does not remove its cap: its last value for that
scope counts for ten more minutes, and then the cap is unknown. None is a value: no limit.
"""

import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from runguard.accounting.budget_groups import BudgetGroup
from runguard.accounting.charges import UnknownCap
from runguard.core.errors import PolicyError
from runguard.core.identity import Newest
from runguard.core.money import MOST_COUNT, MOST_USD, UNITS, UNLIMITED, Amount, Scope, cap_from_function, shown

_log: Final = logging.getLogger("runguard")
KEPT_S: Final = 600.0  # how long the last value of a function counts after it was given
_SCOPES_KEPT: Final = 10_000
_REPORTS: Final = 10  # failures that are reported within ...
_REPORTS_S: Final = 60.0  # ... so many seconds: a plan service that is down fails for every user
_Key = tuple[BudgetGroup, int, int, str]  # group, position of the budget, unit, scope


@dataclass(slots=True)
class Caps:
    """What a group's budgets allow a scope."""

    limits: list[Amount]  # of each budget
    unknown: UnknownCap | None = None
    is_current: bool = True  # every function gave a value just now; else they are asked again with the next call


class CapFunctions:
    """Asks the functions of one policy's budgets, and remembers what they gave. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._given = Newest[_Key, tuple[int, float]](_SCOPES_KEPT)  # the last cap, and when it was given
        self._failing = Newest[_Key, tuple[str, bool]](_SCOPES_KEPT)  # the cause, and whether it was reported
        self._reports: list[float] = []
        self._unreported = 0
        self.errors = 0
        # scope, unit, and what is wrong; "" when it works again
        self.on_change: Callable[[str, str, str], None] | None = None

    def of(self, group: BudgetGroup, scope: Scope, flat: Amount | None) -> Caps:
        """``flat``: the run's own limits. They replace those of the policy in the units that they give."""
        if not group.functions and flat is None:
            return Caps(group.fixed)
        limits = [list(limit) for limit in group.fixed]
        found = Caps([])
        for position, unit, function in group.functions:
            if flat is None or unit > 1 or flat[unit] >= UNLIMITED:
                limits[position][unit] = self._ask((group, position, unit, scope.key), function, scope, found)
        for limit in limits:
            for unit, own in enumerate(flat[:2] if flat is not None else ()):
                limit[unit] = own if own < UNLIMITED else limit[unit]
        found.limits = [(usd, tokens, calls) for usd, tokens, calls in limits]
        return found

    def _ask(self, key: _Key, function: Callable[[Scope], Any], scope: Scope, found: Caps) -> int:
        """The cap that a function gives, or its last one. Where neither is known, ``found`` says so."""
        unit = UNITS[key[2]]
        now = self._clock()
        try:
            cap = _call(function, scope, key[2])
        except Exception as error:
            cause = type(error).__name__
            reason = f"the function for {unit} {error if isinstance(error, _NotACapError) else f'raised {cause}'}"
            with self._lock:
                last, given_at = self._given.get(key, (UNLIMITED, float("-inf")))
            is_known = abs(now - given_at) <= KEPT_S
            found.is_current = False
            if not is_known:
                found.unknown = found.unknown or UnknownCap(
                    key[0], scope.key, f"{reason}; it gave no cap in the last {KEPT_S / 60:.0f} minutes"
                )
            self._failed(key, cause, reason, is_known, now, error)
            return last
        self._works(key, cap, now)
        return cap

    def _works(self, key: _Key, cap: int, now: float) -> None:
        with self._lock:
            _keep(self._given, key, (cap, now))
            _, was_reported = self._failing.pop(key, ("", False))
        if was_reported:
            _log.warning(
                "runguard.budget_function_back: the function for %s gives a cap for %s again", UNITS[key[2]], key[3]
            )
            self._tell(key, "")

    def _failed(self, key: _Key, cause: str, reason: str, is_known: bool, now: float, error: Exception) -> None:
        """Report a failure once per scope and cause, and only so many a minute."""
        with self._lock:
            self.errors += 1
            before, was_reported = self._failing.get(key, ("", False))
            if before == cause and was_reported:
                return
            self._reports = [at for at in self._reports if 0 <= now - at < _REPORTS_S]
            is_reported = len(self._reports) < _REPORTS
            _keep(self._failing, key, (cause, is_reported or was_reported))
            if not is_reported:
                self._unreported += before != cause
                return
            self._reports.append(now)
            more, self._unreported = self._unreported, 0
        follows = (
            f"its last value counts for up to {KEPT_S / 60:.0f} minutes, then calls are denied"
            if is_known
            else "calls are denied until it gives one"
        )
        others = f" ({more} more scopes were not reported)" if more else ""
        _log.error(
            "runguard.budget_function_failed: no cap for %s: %s; %s%s",
            key[3],
            reason,
            follows,
            others,
            # the traceback helps where the function raised; a wrong value is in the message
            exc_info=None if isinstance(error, _NotACapError) else error,
        )
        self._tell(key, f"{reason}; {follows}")

    def _tell(self, key: _Key, wrong: str) -> None:
        if self.on_change is not None:
            self.on_change(key[3], UNITS[key[2]], wrong)


class _NotACapError(Exception):
    """A function returned something that is not an amount."""


def _call(function: Callable[[Scope], Any], scope: Scope, unit: int) -> int:
    given = function(scope)
    if inspect.isawaitable(given):
        if inspect.iscoroutine(given):
            given.close()
        raise _NotACapError("is async; it must return the amount at once")
    try:
        return cap_from_function(given, unit)
    except PolicyError:
        most = MOST_USD if unit == 0 else MOST_COUNT
        raise _NotACapError(f"returned {shown(given)}, not an amount from 0 to {most:,} or None for no limit") from None


def _keep(memory: Newest[_Key, Any], key: _Key, value: Any) -> None:
    memory.pop(key, None)  # the newest entry now
    memory[key] = value
