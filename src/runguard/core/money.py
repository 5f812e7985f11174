"""Budgets: a limit in USD, tokens or calls on a scope, with an optional window."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal, Self

from runguard.core.exceptions import PolicyError
from runguard.core.mistakes import Checked, nearest
from runguard.core.money import UNITS, UNLIMITED, Amount, cap_from_function, shown, to_count, to_nano
from runguard.core.periods import Window
from runguard.core.scope import Per, Scope
from runguard.core.threshold import Threshold

DEFAULT_THRESHOLDS: Final = (Threshold(0.5), Threshold(0.8), Threshold(0.95))
_LONGEST_WAIT_S: Final = 3_600.0  # as long as ``max_wait_seconds`` may be
UsdAmount = int | float | str | Decimal | Callable[[Scope], Any] | None
CountAmount = int | Callable[[Scope], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(metaclass=Checked):
    """A limit on a scope. Every amount given holds. Each may be a function of the ``Scope``, which returns an
    amount, 0, or None for no limit.

    ``per``: run, session, user, app, agent, model, tool or ``label:<name>``; ``"agent:research*"`` chooses by name,
    ``"run+agent"`` counts each agent of each run. ``window``: ``"1m"``, ``"1h"``, ``"1d"``, ``"1w"``, ``"month"``;
    none: for as long as the ledger lives. ``on_exhausted``: ``"refuse"``, or ``"wait"`` for a rate limit: calls wait
    in line until a window has room, at most ``max_wait_seconds``; without ``thresholds=`` it warns of nothing.
    ``burn_alert``: warn once per period when it is spent so fast that it will not last until the window ends.

    Use it in ``budgets=``: it holds before each call. To only count tokens over all turns and react at thresholds,
    use ``BudgetMonitor``.
    """

    usd: UsdAmount = None
    tokens: CountAmount = None
    calls: CountAmount = None
    per: str = "run"
    window: str | None = None
    tz: str | None = None
    thresholds: Sequence[Threshold] = DEFAULT_THRESHOLDS
    on_exhausted: Literal["refuse", "wait"] = "refuse"
    burn_alert: bool = False

    def __post_init__(self) -> None:
        if self.usd is None and self.tokens is None and self.calls is None:
            raise PolicyError("a Budget without an amount limits nothing; give usd=, tokens= or calls=")
        if self.usd is not None and not callable(self.usd):
            to_nano(self.usd)
        for name in ("tokens", "calls"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                to_count(value, name)
        per = Per.parse(self.per)
        if self.window is not None:
            Window.parse(self.window, self.tz)
            if per.parts == (("run", "*"),) and (self.window == "month" or self.window[-1] in "dw"):
                raise PolicyError(
                    f"per='run' with window={self.window!r}: a run ends before its window does; leave the "
                    "window out, or count per session, user or app"
                )
        elif self.tz is not None:
            raise PolicyError(f"tz = {self.tz!r} without a window does nothing; add window='1d', '1w' or 'month'")
        self._check_waiting()
        if not isinstance(self.thresholds, list | tuple):
            raise PolicyError(
                f"thresholds = {self.thresholds!r}: give a list such as [0.5, 0.8]; an empty one for none"
            )
        if not isinstance(self.burn_alert, bool):
            raise PolicyError(f"burn_alert = {shown(self.burn_alert)}: give True or False")
        if self.burn_alert and self.window is None:
            raise PolicyError("burn_alert = True without a window: nothing to last until; add window='1d' or 'month'")
        thresholds = tuple(_threshold(entry) for entry in self.thresholds)
        for position, threshold in enumerate(thresholds):
            if threshold in thresholds[:position]:
                raise PolicyError(f"thresholds: {threshold.percent:g} twice with the same action; keep one")
        if self.thresholds is DEFAULT_THRESHOLDS and self.on_exhausted == "wait":
            thresholds = ()  # a rate limit is meant to be reached: nothing to warn of
        object.__setattr__(self, "thresholds", thresholds)

    def _check_waiting(self) -> None:
        if self.on_exhausted not in ("refuse", "wait"):
            raise PolicyError(f"on_exhausted = {self.on_exhausted!r}: give 'refuse' or 'wait'")
        if self.on_exhausted == "wait" and (self.window is None or Window.parse(self.window).length > _LONGEST_WAIT_S):
            raise PolicyError(
                f"on_exhausted='wait' with window={self.window!r}: calls wait until the next window begins; give "
                "window='1m', '1h' or another one of at most an hour"
            )

    @classmethod
    def of(cls, entry: object) -> Self:
        """A budget as it stands in a policy file."""
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, Mapping):
            raise PolicyError(
                f"budgets takes Budget(...) or a table such as {{usd = 5, per = 'user', window = '1d'}}, not a "
                f"{type(entry).__name__}"
            )
        for name in entry:
            if name not in cls.__dataclass_fields__:
                raise PolicyError(
                    f"{name}: no such setting of a budget; {nearest(str(name), cls.__dataclass_fields__)}"
                )
        return cls(**entry)

    def limits(self, scope: Scope) -> Amount:
        """The amounts in force for a scope; functions are called now. PolicyError when one returns something that is
        not an amount.
        """
        usd, tokens, calls = (self._limit(unit, scope) for unit in range(3))
        return usd, tokens, calls

    def _limit(self, unit: int, scope: Scope) -> int:
        function = self.function(unit)
        if function is None:
            return self.fixed(unit)
        given = function(scope)
        try:
            return cap_from_function(given, unit)
        except PolicyError as error:
            raise PolicyError(f"the function for {UNITS[unit]} gave {shown(given)} for {scope.key}: {error}") from None

    def function(self, unit: int) -> Callable[[Scope], Any] | None:
        """The function that gives the amount of a unit, if there is one."""
        value = getattr(self, UNITS[unit])
        return value if callable(value) else None

    def fixed(self, unit: int) -> int:
        """The amount of a unit where it is a plain number; no limit where it is not."""
        value = getattr(self, UNITS[unit])
        if value is None or callable(value):
            return UNLIMITED
        return to_nano(value) if unit == 0 else to_count(value, UNITS[unit])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for digests and comparison; a callable shows as the fact that there is one."""
        shown: dict[str, Any] = {"per": self.per}
        for name in UNITS:
            value = getattr(self, name)
            if value is not None:
                shown[name] = "callable" if callable(value) else str(value)
        if self.window is not None:
            shown["window"], shown["tz"] = self.window, self.tz or "UTC"
        if self.thresholds != (DEFAULT_THRESHOLDS if self.on_exhausted == "refuse" else ()):
            shown["thresholds"] = [_plain(threshold) for threshold in self.thresholds]
        if self.on_exhausted != "refuse":
            shown["on_exhausted"] = self.on_exhausted
        if self.burn_alert:
            shown["burn_alert"] = True
        return shown


def _plain(threshold: Threshold) -> list[Any]:
    plain = [threshold.percent, threshold.action, threshold.recurring]
    return plain if threshold.model is None else [*plain, threshold.model, list(threshold.agents)]


def _threshold(entry: object) -> Threshold:
    if isinstance(entry, Threshold):
        return entry
    try:
        if isinstance(entry, Mapping):
            return Threshold(**entry)
        if isinstance(entry, int | float):
            return Threshold(entry)
    except (PolicyError, TypeError, ValueError) as error:
        raise PolicyError(f"thresholds: {error}") from None
    raise PolicyError(
        "thresholds takes Threshold(0.8), a fraction such as 0.8, or a table such as "
        f"{{percent = 0.8, action = 'nudge'}}, "
        f"not {entry!r}"
    )


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """One budget on one scope, as it stands: what a threshold's callback gets and ``plugin.budgets()`` lists."""

    scope: str
    unit: str
    spent: Decimal | int
    reserved: Decimal | int
    limit: Decimal | int
    overrun: Decimal | int
    window: str | None
    ends: float | None
    closed: bool

    @property
    def remaining(self) -> Decimal | int:
        rest = self.limit - self.spent - self.reserved
        return rest if rest > 0 else self.limit - self.limit

    @property
    def utilization(self) -> float:
        """How much of the limit is spent; above 1 after an overrun.

        Of a limit of 0: 0 while nothing is spent, then 1.
        """
        return float(self.spent / self.limit) if self.limit else float(self.spent > 0)
