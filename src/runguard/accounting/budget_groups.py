"""Budgets that share one account, and the scopes that they count by."""

from typing import Final
from urllib.parse import unquote

from runguard.core.events import RunInfo
from runguard.core.money import UNLIMITED, Amount, Budget, Per, Scope, Window, scope_part
from runguard.policy.settings import Policy
from runguard.pricing.rates import normalise

NO_LIMIT: Final[Amount] = (UNLIMITED, UNLIMITED, UNLIMITED)


class BudgetGroup:
    """All budgets that count by the same thing over the same window: they share one account per scope."""

    def __init__(self, per: Per, window: Window | None, budgets: list[Budget]) -> None:
        self.per, self.window, self.budgets = per, window, budgets
        self.thresholds = [sorted(budget.thresholds, key=lambda t: t.percent) for budget in budgets]
        self.stops = any(t.action == "stop" for of_one in self.thresholds for t in of_one)
        # A unit waits only where every budget that limits it waits: one that refuses must hold.
        self.waits = tuple(_waits(budgets, unit) for unit in range(3))
        self.may_wait = any(self.waits)
        self.switches = any(t.model is not None for of_one in self.thresholds for t in of_one)
        self.burns = any(budget.burn_alert for budget in budgets)
        # "agent" and "agent:research*" count apart
        patterns = [scope_part(name) for kind, name in per.parts if kind != "label" and name != "*"]
        self.suffix = f"/{'+'.join(patterns)}" if patterns else ""
        self.suffix += "" if window is None else f"@{window.text}" + ("" if window.tz == "UTC" else f"/{window.tz}")

        amounts = [
            (position, unit, budget.function(unit)) for position, budget in enumerate(budgets) for unit in range(3)
        ]
        self.functions = [(position, unit, function) for position, unit, function in amounts if function is not None]
        self.fixed: list[Amount] = [(budget.fixed(0), budget.fixed(1), budget.fixed(2)) for budget in budgets] or [
            NO_LIMIT
        ]


def _waits(budgets: list[Budget], unit: int) -> bool:
    ways = {b.on_exhausted for b in budgets if b.function(unit) is not None or b.fixed(unit) < UNLIMITED}
    return ways == {"wait"}


def budget_groups_of(policy: Policy) -> list[BudgetGroup]:
    budgets = list(policy.budgets)
    if policy.max_usd is not None or policy.max_tokens is not None:
        budgets.insert(0, Budget(usd=policy.max_usd, tokens=policy.max_tokens, per="run"))
    elif not any(Per.parse(b.per).kind == "run" and b.window is None for b in budgets):
        # One that limits nothing, so that a single run can be given a limit through its RunConfig.
        return [BudgetGroup(Per.parse("run"), None, []), *_grouped(budgets)]
    return _grouped(budgets)


def _grouped(budgets: list[Budget]) -> list[BudgetGroup]:
    groups: dict[tuple[Per, Window | None], list[Budget]] = {}
    for budget in budgets:
        window = Window.parse(budget.window, budget.tz) if budget.window is not None else None
        per = Per.parse(budget.per)
        # Models are known by their plain names: "model:models/gemini-*" means what "model:gemini-*" means.
        plain = Per(
            tuple((kind, normalise(name) if kind == "model" and name != "*" else name) for kind, name in per.parts)
        )
        groups.setdefault((plain, window), []).append(budget)
    return [BudgetGroup(per, window, group) for (per, window), group in groups.items()]


def flat_limits(info: RunInfo) -> Amount | None:
    if info.max_usd is None and info.max_tokens is None:
        return None
    return (
        UNLIMITED if info.max_usd is None else info.max_usd,
        UNLIMITED if info.max_tokens is None else info.max_tokens,
        UNLIMITED,
    )


Ceiling = tuple[int | None, int | None]  # nano-USD and tokens


def lower_ceiling(one: Ceiling, other: Ceiling) -> Ceiling:
    """The lower of two amounts that a caller can pay for; None: not limited."""
    usd, tokens = (min((n for n in pair if n is not None), default=None) for pair in zip(one, other, strict=True))
    return usd, tokens


def scopes_of(info: RunInfo) -> tuple[str, str, str, str]:
    app, user = scope_part(info.app), scope_part(info.user)
    return (
        f"run:{scope_part(info.run)}",
        f"session:{app}/{user}/{scope_part(info.session)}",
        f"user:{app}/{user}",
        f"app:{app}",
    )


def parse_scope(kind: str, parts: list[str]) -> Scope | None:
    """A scope from its key, for the kinds whose key says everything."""
    names = [unquote(part) for part in parts]
    if kind == "app" and len(names) == 1:
        return Scope(kind, "", app=names[0])
    if kind == "model" and len(names) == 1:
        return Scope(kind, "", model=names[0])
    if kind in ("user", "agent", "tool") and len(names) == 2:
        user, agent, tool = (names[1] if kind == wanted else "" for wanted in ("user", "agent", "tool"))
        return Scope(kind, "", app=names[0], user=user, agent=agent, tool=tool)
    if kind == "session" and len(names) == 3:
        return Scope(kind, "", app=names[0], user=names[1], session=names[2])
    if kind == "label" and len(names) == 1 and "=" in names[0]:
        name, _, value = names[0].partition("=")
        return Scope(kind, "", labels={name: value})
    return None
