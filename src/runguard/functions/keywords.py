"""The keywords of ``guard``, ``guard_async`` and ``run`` -> a Policy.

Invalid keywords are rejected here, before the first call.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from inspect import Parameter, signature
from typing import Any, Final

from runguard.core.errors import PolicyError, nearest
from runguard.core.money import Budget, nanos
from runguard.policy.settings import RULES, Policy

_AMOUNTS: Final = {"max_usd": "usd", "max_tokens": "tokens", "max_calls": "calls"}
_WINDOWS: Final = {"per_minute": "1m", "per_hour": "1h", "per_day": "1d", "per_week": "1w", "per_month": "month"}
# Settings of the policy that have their own place here.
_PLACES: Final = {
    "cycle_repeats": "loop.repeats",
    "max_cycle_len": "loop.max_cycle_len",
    "max_context_tokens": "context.max_context_tokens",
    "context_headroom": "context.headroom",
    "max_tool_failures": "breaker.failures",
    "half_open_reset_seconds": "breaker.reset_seconds",
}
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NOT_HERE: Final = frozenset(
    {
        "rules",
        "max_tool_calls",
        "max_reentries",
        "max_delegation_depth",
        "remote_agents",
        "trust_remote_budget",
        "final_answer",
    }
)
_MOST_USD: Final = 10**8  # of one call, in dollars
LOOP_BY: Final = ("result", "call", "name")
_REPEATS, _LENGTH, _FAILURES, _RESET_S = 3, 4, 5, 60.0


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The settings of one wrapped callable."""

    policy: Policy
    loop: bool
    by: str  # what makes two steps of a loop equal: one of LOOP_BY
    context: bool
    breaker: bool
    tokens: Callable[..., Any] | None
    signature: Callable[[Any], Any] | None
    fixed_cost: int | None  # nano-USD of every call
    cost_of_tokens: Callable[[int, int], Any] | None
    cost_of_result: Callable[[Any], Any] | None
    in_usd: bool  # some budget counts dollars
    in_tokens: bool


def settings_of(
    *,
    budget: Mapping[str, Any] | Budget | Sequence[Budget] | None,
    loop: Mapping[str, Any] | bool | None,
    context: Mapping[str, Any] | None,
    breaker: Mapping[str, Any] | bool | None,
    tokens: Callable[..., Any] | None,
    signature: Callable[[Any], Any] | None,
    cost: Any,
    policy: Mapping[str, Any],
) -> GuardSettings:
    for name in policy:
        if name in _PLACES:
            section, _, setting = _PLACES[name].partition(".")
            raise PolicyError(f"{name}: use {section}={{{setting!r}: …}}")
        if name in _NOT_HERE:
            raise PolicyError(
                f"{name}: applies to agents and their tools, which a guarded function does not see; use loop=, "
                "context= or breaker="
            )
    keywords: dict[str, Any] = {**policy, "max_tool_calls": None, "max_delegation_depth": None}
    by: Any = LOOP_BY[0]
    watches_loops = loop is not None and loop is not False
    if watches_loops:
        values = _read("loop", {} if loop is True else loop, ("repeats", "max_cycle_len", "by"))
        by = values.get("by", by)
        if by not in LOOP_BY:
            raise PolicyError(f"loop.by = {by!r}: give one of {', '.join(repr(known) for known in LOOP_BY)}")
        keywords["cycle_repeats"] = values.get("repeats", _REPEATS)
        keywords["max_cycle_len"] = values.get("max_cycle_len", _LENGTH)
    if context is not None:
        values = _read("context", context, ("max_context_tokens", "headroom"))
        keywords["max_context_tokens"] = values.get("max_context_tokens")
        keywords["context_headroom"] = values.get("headroom")
    has_breaker = breaker is not None and breaker is not False
    if has_breaker:
        values = _read("breaker", {} if breaker is True else breaker, ("failures", "reset_seconds"))
        keywords["max_tool_failures"] = values.get("failures", _FAILURES)
        keywords["half_open_reset_seconds"] = values.get("reset_seconds", _RESET_S)
    if budget is not None:
        keywords["budgets"] = _budgets(budget)
    # The rules about tools need answers that a plain callable does not have. Only cycles of signatures can be seen.
    keywords["rules"] = {
        rule: False for rule in RULES if rule not in ("cycle", "context") or (rule == "context" and context is None)
    }
    for name, function in (("tokens", tokens), ("signature", signature)):
        if function is not None and not callable(function):
            raise PolicyError(f"{name} = {function!r}: give a function")
    try:
        built = Policy.build(**keywords)
    except PolicyError as error:  # name the settings as the user wrote them
        raise PolicyError(
            re.sub(r"\b(?:" + "|".join(_PLACES) + r")\b", lambda found: _PLACES[found[0]], str(error))
        ) from None
    usd, counted = _counted(built)
    return GuardSettings(
        built, watches_loops, by, context is not None, has_breaker, tokens, signature, *_costs(cost), usd, counted
    )


def _counted(policy: Policy) -> tuple[bool, bool]:
    """Whether dollars, and whether tokens are limited by anything."""
    budgets = policy.budgets
    return (
        policy.max_usd is not None or any(b.usd is not None for b in budgets),
        policy.max_tokens is not None or any(b.tokens is not None for b in budgets),
    )


def _budgets(given: object) -> list[Budget]:
    if isinstance(given, Budget):
        return [given]
    if not isinstance(given, Mapping):
        if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, Budget) for one in given):
            return list(given)
        raise PolicyError(f"budget = {given!r}: give {{'max_usd': 2.0}}, or a Budget, or a list of them")
    values = _read("budget", given, (*_AMOUNTS, *_WINDOWS))
    budgets = []
    flat = {_AMOUNTS[key]: value for key, value in values.items() if key in _AMOUNTS and value is not None}
    if flat:
        budgets.append(_budget("budget", flat, per="run"))
    for key, window in _WINDOWS.items():
        value = values.get(key)
        if value is None:
            continue
        amounts = _read(f"budget.{key}", value, _AMOUNTS) if isinstance(value, Mapping) else {"max_usd": value}
        limits = {_AMOUNTS[name]: amount for name, amount in amounts.items() if amount is not None}
        if not limits:
            raise PolicyError(f"budget.{key} = {value!r}: limits nothing; give {', '.join(_AMOUNTS)}")
        budgets.append(_budget(f"budget.{key}", limits, per="app", window=window))
    return budgets


def _budget(where: str, amounts: dict[str, Any], **more: Any) -> Budget:
    try:
        return Budget(**amounts, **more)
    except PolicyError as error:  # name the setting as the user wrote it
        unit, _, fault = str(error).partition(" = ")
        name = next((name for name, known in _AMOUNTS.items() if known == unit), None)
        raise PolicyError(f"{where}.{name} = {fault}" if name is not None else f"{where}: {error}") from None


def _costs(cost: Any) -> tuple[int | None, Callable[[int, int], Any] | None, Callable[[Any], Any] | None]:
    """A number for every call, a function of input and output tokens, or one of the result."""
    if cost is None:
        return None, None, None
    if not callable(cost):
        fixed = nano_of(cost)
        if fixed is None:
            raise PolicyError(
                f"cost = {cost!r}: give dollars per call, a function of the result, or one of input and output tokens"
            )
        return fixed, None, None
    try:
        needed = [
            p
            for p in signature(cost).parameters.values()
            if p.default is Parameter.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a built-in without a signature
        return None, None, cost
    if len(needed) == 2:
        return None, cost, None
    if len(needed) > 2:
        raise PolicyError(
            f"cost takes {len(needed)} arguments: give a number, a function of the result, or one of input and "
            "output tokens"
        )
    return None, None, cost


def _read(where: str, given: object, known: Iterable[str]) -> dict[str, Any]:
    """A mapping with known keys, in snake or camel case."""
    names = list(known)
    if not isinstance(given, Mapping):
        raise PolicyError(f"{where} = {given!r}: give a mapping with {', '.join(names)}")
    values = {}
    for key, value in given.items():
        name = _CAMEL.sub("_", key).lower() if isinstance(key, str) else key
        if name not in names:
            raise PolicyError(f"{where}.{key}: no such setting; {nearest(str(name), names)}")
        if name in values:
            raise PolicyError(f"{where}.{key}: given twice")
        values[name] = value
    return values


def nano_of(value: Any) -> int | None:
    """An amount in dollars as nano-USD, rounded up; None when it is not an amount."""
    if isinstance(value, float):  # 0.1 means a tenth, not the binary fraction nearest to it
        value = Decimal(float.__repr__(value))
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return None
    if (isinstance(value, Decimal) and not value.is_finite()) or not 0 <= value <= _MOST_USD:
        return None
    return nanos(value, up=True)
