"""The exception tree. All are ``RuntimeError``, so code written for a hand-made breaker keeps working.

RunGuardError
├── PolicyError              an invalid policy: path, value, nearest valid name
├── InstallError             a second, different ``install()``
└── RunStoppedError          a run was stopped; ``.trip`` tells everything (on ADK only with ``on_stop="raise"``)
    ├── LoopDetectedError        repetition, cycles, stalls, hand-off circles: ``.pattern``, ``.repeats``
    ├── LimitExceededError       calls, branches, size: ``.observed``, ``.limit``
    │   └── CostGrowthError          prompts or responses have grown too far
    ├── DeadlineExceededError    wall clock
    ├── BudgetExceededError      money, tokens or calls of a scope: ``.spent``, ``.reserved``, ``.limit``, ``.scope``
    │   └── UnpricedModelError       a dollar limit and a model without a known price
    ├── ContextOverflowError     the next prompt would not fit: ``.projected_tokens``, ``.limit``
    ├── CircuitOpenError         a tool or an input has failed too often and is left alone for a while: ``.retry_after``
    └── GuardFailedError         the guard itself could not decide, or its policy is broken
"""

import inspect
import json
from abc import ABCMeta
from collections.abc import Iterable, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from runguard.core.decision import Trip


class RunGuardError(RuntimeError):
    """Base of everything RunGuard raises."""


class PolicyError(RunGuardError):
    """The policy is wrong; the message names the path, the value and what would be right."""


class InvalidValueError(PolicyError, ValueError):
    """A ``PolicyError`` that is also a ``ValueError``: of ``Threshold``, ``BudgetPolicy`` and ``BudgetMonitor``."""


class InvalidTypeError(PolicyError, TypeError):
    """A ``PolicyError`` that is also a ``TypeError``: of ``BudgetPlugin``."""


class InstallError(RunGuardError):
    """``install()`` was called twice with different policies; the message names both places."""


class RunStoppedError(RunGuardError):
    """A run was stopped. ``str(error)`` is the operator's message."""

    def __init__(self, trip: Trip) -> None:
        super().__init__(trip.message)
        self.trip = trip

    def __reduce__(self) -> tuple[type[Self], tuple[Trip]]:
        return type(self), (self.trip,)

    @classmethod
    def of(cls, trip: Trip) -> Self:
        """Return an error of the class that fits the trip's rule."""
        return _BY_RULE.get(trip.rule, LimitExceededError)(trip)  # type: ignore[return-value]

    @property
    def observed(self) -> Decimal | float:
        return self.trip.observed

    @property
    def limit(self) -> Decimal | float:
        return self.trip.limit


class LoopDetectedError(RunStoppedError):
    """The run went in circles."""

    @property
    def pattern(self) -> tuple[str, ...]:
        """The calls or agents that repeat, in order."""
        pattern = next((item["pattern"] for item in self.trip.evidence if "pattern" in item), None)
        if pattern is not None:
            return tuple(json.loads(pattern))
        tools = tuple(item["tool"] for item in self.trip.evidence if item.get("tool"))
        return tools or self.trip.agent_path

    @property
    def repeats(self) -> int:
        return int(self.trip.observed)


class LimitExceededError(RunStoppedError):
    """A plain limit was reached."""


class CostGrowthError(LimitExceededError):
    """Prompts, or tokens recorded by hand, have grown beyond ``max_event_cost_ratio``."""


class DeadlineExceededError(RunStoppedError):
    """The run took too long."""


class BudgetExceededError(RunStoppedError):
    """A budget is spent, or what is left cannot pay for the next call."""

    @property
    def spent(self) -> Decimal:
        """Spent on the scope so far, in the budget's unit."""
        return self._figure("spent")

    @property
    def reserved(self) -> Decimal:
        """Held on the scope by calls on their way, in the budget's unit."""
        return self._figure("reserved")

    def _figure(self, name: str) -> Decimal:
        return Decimal(next((item[name] for item in self.trip.evidence if name in item), 0))

    @property
    def scope(self) -> str:
        """Whose budget it is; what ``plugin.extend`` takes."""
        return self.trip.scope_id


class UnpricedModelError(BudgetExceededError):
    """There is a dollar limit and no price for the model."""


class ContextOverflowError(RunStoppedError):
    """The next request would be larger than the context."""

    @property
    def projected_tokens(self) -> int:
        return int(self.trip.observed)


class CircuitOpenError(RunStoppedError):
    """A tool or an input has failed too often and is left alone until ``retry_after`` seconds from the refusal.

    The run itself is not stopped.
    """

    @property
    def retry_after(self) -> float:
        """Seconds from the refusal until the next attempt may be let through."""
        return float(next((item["retry_after"] for item in self.trip.evidence if "retry_after" in item), 0))


class GuardFailedError(RunStoppedError):
    """The guard failed and is configured to stop in that case."""


_BY_RULE: dict[str, type[RunStoppedError]] = {
    **dict.fromkeys(
        (
            "repetition",
            "no_news",
            "same_call",
            "cycle",
            "stall",
            "tool_failures",
            "empty",
            "handoff",
            "talk",
            "reentry",
            "polling",
        ),
        LoopDetectedError,
    ),
    "growth": CostGrowthError,
    "deadline": DeadlineExceededError,
    "budget": BudgetExceededError,
    "unpriced": UnpricedModelError,
    "context": ContextOverflowError,
    "breaker": CircuitOpenError,
    "resubmission": CircuitOpenError,
    "guard_error": GuardFailedError,
    "policy_error": GuardFailedError,
}

# ---- Mistakes in settings: the known name that is nearest to a wrong one, and one kind of error for all of them.


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6, shown: int | None = None) -> str:
    """Return the hint after an unknown name: the nearest known name, or the first ``shown`` names (None: all)."""
    known = list(known)
    longer = [one for one in known if one.startswith(name)]
    close = longer if len(longer) == 1 else get_close_matches(name, known, n=1, cutoff=cutoff)
    if close:
        return f"did you mean '{close[0]}'?"
    if shown == 0:
        return ""
    more = f" and {len(known) - shown} more" if shown is not None and len(known) > shown else ""
    return f"known: {', '.join(known[:shown]) or 'none'}{more}"


class Checked(type):
    """The metaclass of a class of settings: a wrong keyword raises ``PolicyError`` instead of ``TypeError``."""

    if not TYPE_CHECKING:  # type checkers read the signature of the class

        def __call__(cls, *args: Any, **keywords: Any) -> Any:
            try:
                return super().__call__(*args, **keywords)
            except TypeError:
                _explain(cls, args, keywords)
                raise

        @property
        def __signature__(cls) -> inspect.Signature:
            """The settings, for ``inspect`` and ``help``, instead of the arguments of ``__call__``."""
            signature = inspect.signature(cls.__new__ if cls.__init__ is object.__init__ else cls.__init__)
            return signature.replace(parameters=list(signature.parameters.values())[1:])


class CheckedABC(Checked, ABCMeta):
    """``Checked`` for abstract classes."""


def _explain(cls: type, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    known = inspect.signature(cls).parameters
    kinds = {parameter.kind for parameter in known.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return  # every name is possible
    names = [name for name, one in known.items() if one.kind is not inspect.Parameter.VAR_POSITIONAL]
    for name in keywords:
        if name not in names:
            raise PolicyError(f"{cls.__name__}.{name}: no such setting; {did_you_mean(name, names)}") from None
    positional = [name for name in names if known[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise PolicyError(too_many(cls, len(positional), names)) from None
    given = {*positional[: len(args)], *keywords}
    for name in names:
        if known[name].default is inspect.Parameter.empty and name not in given:
            raise PolicyError(f"{cls.__name__}.{name}: missing") from None


def too_many(cls: type, allowed: int, names: Sequence[str]) -> str:
    """Return the message for more settings without a name than the class takes."""
    example = f"{cls.__name__}({names[0]}=…)" if names else f"{cls.__name__}()"
    return f"{cls.__name__} takes {allowed or 'no'} settings without a name; write {example}"
