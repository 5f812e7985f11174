"""Which accounts a call goes on, and which ones a scope names: a policy's budgets, looked up in a ledger."""

from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote

from runguard.accounting.budget_groups import NO_LIMIT, BudgetGroup, budget_groups_of, parse_scope
from runguard.accounting.caps import CapFunctions, Caps
from runguard.accounting.charges import AccountLines, RunCosts, UnknownCap
from runguard.accounting.figures import LINES_KEPT
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall
from runguard.core.money import NOTHING, Amount, Scope
from runguard.ledger.ledger import Account, Ledger
from runguard.policy.settings import Policy
from runguard.pricing.rates import normalise

_FOREVER: Final = float("inf")
_NO_CEILING: Final = (None, None)


class AccountFinder:
    """One policy's budgets on one ledger."""

    def __init__(self, policy: Policy, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger, self._clock = ledger, clock
        self.groups = budget_groups_of(policy)
        self.caps = CapFunctions(clock)

    def adopt_shared(self, heir: "AccountFinder") -> None:
        """Use the budgets of another policy for every scope but the run."""
        self.groups = [
            *(m for m in self.groups if m.per.kind == "run"),
            *(m for m in heir.groups if m.per.kind != "run"),
        ]

    def of_call(self, run_costs: RunCosts, event: ModelCall, anew: bool = False) -> AccountLines:
        """All accounts that a call goes on, kept until the first of their periods is over.

        ``anew``: those of now, not of the call's time.
        """
        key = (event.agent, event.model, event.tool)
        known = run_costs.lines.get(key)
        if known is not None and known.until == _FOREVER:  # no budget has a window
            return known
        at = self._ledger.period_time(self._clock() if anew else event.at)
        if known is not None and at < known.until:
            return known
        lines, is_current = self._find_lines(run_costs, event, at)
        if len(run_costs.lines) >= LINES_KEPT:
            run_costs.lines.clear()
        if is_current:
            run_costs.lines[key] = lines
        else:
            run_costs.lines.pop(key, None)
        return lines

    def of_scope(self, scope: str, costs_by_run: Mapping[str, RunCosts]) -> list[Account]:
        """The accounts of a scope in their current periods, made where it has spent nothing yet.

        ``costs_by_run``: of the runs under way.
        """
        found = self._ledger.find(scope)
        now = self._ledger.period_time(self._clock())  # as the store has just reported it
        found = [a for a in found if a.ends is None or a.ends > now]
        kind, _, rest = scope.partition(":")
        parts = rest.split("/")
        if kind == "session" and len(parts) == 2 and not found:  # without the user, if only one matches
            scopes = {
                a.scope
                for a in self._ledger.accounts()
                if a.scope.startswith(f"session:{parts[0]}/") and a.scope.endswith(f"/{parts[1]}")
            }
            if len(scopes) == 1:
                return [a for a in self._ledger.find(scopes.pop()) if a.ends is None or a.ends > now]
        have = {a.key for a in found}
        for group in self.groups:  # a scope that has spent nothing yet
            if group.per.kind == kind and (named := _scope_named(kind, parts, costs_by_run)) is not None:
                key = group.per.key(named)
                if key is None or _key(group, key, now)[0] in have:
                    continue  # its caps were found with more than the scope's name: keep them
                run_costs = costs_by_run.get(named.run)
                made = self._account(group, named, now, run_costs)
                account, caps = made if made is not None else (None, None)
                if caps is not None and caps.unknown is not None:
                    raise PolicyError(
                        f"the cap of {scope} is not known: {caps.unknown.reason}; correct the function, then try again"
                    )
                if account is None:
                    continue
                if run_costs is not None:
                    run_costs.own.add(account.scope)
                found.append(account)
        return found

    def _find_lines(self, run_costs: RunCosts, event: ModelCall, at: float) -> tuple[AccountLines, bool]:
        """The accounts, and whether every cap function gave a value just now."""
        info = run_costs.info
        accounts: list[Account] = []
        groups: list[BudgetGroup] = []
        allowed: list[list[Amount]] = []
        until = _FOREVER
        unknown: UnknownCap | None = None
        is_current = True
        names: frozenset[str] = frozenset()
        for group in self.groups:
            scope = Scope(
                group.per.kind,
                "",
                info.app,
                info.user,
                info.session,
                info.run,
                event.agent,
                normalise(event.model) if event.model else "",
                event.tool,
                info.labels,
            )
            found = self._account(group, scope, at, run_costs)
            if found is None:
                continue
            account, caps = found
            unknown, is_current = unknown or caps.unknown, is_current and caps.is_current
            if account is None:
                continue
            if account.ends is not None:
                until = min(until, account.ends)
            if any(kind == "run" for kind, _ in group.per.parts):
                run_costs.own.add(account.scope)
            if group.may_wait:
                names |= {account.meter}
            accounts.append(account)
            groups.append(group)
            allowed.append(caps.limits)
        return AccountLines(tuple(accounts), tuple(groups), tuple(allowed), until, unknown, names), is_current

    def _account(
        self, group: BudgetGroup, scope: Scope, at: float, run_costs: RunCosts | None
    ) -> tuple[Account | None, Caps] | None:
        """The account of a scope, none where nothing is limited, and its caps.

        None: the group is not about this scope.
        """
        key = group.per.key(scope)
        if key is None:
            return None
        named = Scope(
            scope.kind,
            key,
            scope.app,
            scope.user,
            scope.session,
            scope.run,
            scope.agent,
            scope.model,
            scope.tool,
            scope.labels,
        )
        own = run_costs if group.per.kind == "run" and group.window is None else None
        caps = self.caps.of(group, named, own.flat if own is not None else None)
        if own is not None and own.info.ceiling != _NO_CEILING:
            caps.limits = [_lowered(limit, own.info.ceiling) for limit in caps.limits]
        usd, tokens, calls = (min(limit[unit] for limit in caps.limits) for unit in range(3))
        if (usd, tokens, calls) == NO_LIMIT and caps.unknown is None:
            return None, caps
        name, begins, ends = _key(group, key, at)
        account = self._in_memory(name, key) if caps.unknown is not None else None
        if account is None:
            account = self._ledger.account(
                name, key, group.window.text if group.window else None, ends, (usd, tokens, calls), begins
            )
            account.alert = NOTHING if any(group.thresholds) else NO_LIMIT  # found anew at the next settle
        return account, caps

    def _in_memory(self, name: str, key: str) -> Account | None:
        """An account whose cap is not known now keeps the one it has: runs that know it still go by it."""
        return (
            None
            if self._ledger.is_shared
            else next((account for account in self._ledger.find(key) if account.key == name), None)
        )


def _lowered(limit: Amount, ceiling: tuple[int | None, int | None]) -> Amount:
    """A limit of a run, lowered to what its caller can pay for."""
    usd, tokens = ceiling
    return (
        limit[0] if usd is None else min(limit[0], usd),
        limit[1] if tokens is None else min(limit[1], tokens),
        limit[2],
    )


def _key(group: BudgetGroup, key: str, at: float) -> tuple[str, float | None, float | None]:
    """An account's key, and when its period begins and ends."""
    if group.window is None:
        return f"{key}{group.suffix}#", None, None
    period, begins, ends = group.window.bounds(at)
    return f"{key}{group.suffix}#{period}", begins, ends


def _scope_named(kind: str, parts: list[str], costs_by_run: Mapping[str, RunCosts]) -> Scope | None:
    if kind != "run":
        return parse_scope(kind, parts)
    run_costs = costs_by_run.get(unquote(parts[0])) if len(parts) == 1 else None
    if run_costs is None:
        return None
    info = run_costs.info
    return Scope("run", "", info.app, info.user, info.session, info.run, labels=info.labels)
