"""What the budgets of a policy allow: the accounts that a call goes on, their caps and thresholds, and their pace.

``engine/money`` finds the accounts of a call with ``AccountFinder``, fires the thresholds that a settled call has
reached, and asks ``BurnWatch`` for budgets that are spent too fast.
"""

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall
from runguard.core.identity import LruDict
from runguard.core.money import (
    LEAST_CALLS,
    MOST_COUNT,
    MOST_USD,
    NOTHING,
    UNITS,
    UNLIMITED,
    Amount,
    Budget,
    BudgetStatus,
    Per,
    Scope,
    Threshold,
    Window,
    begin_of,
    cap_from_function,
    edge,
    scope_part,
    share_of,
    shown,
    unit_reached,
)
from runguard.engine.spending import LINES_KEPT, Ceiling, RunCosts
from runguard.ledger.ledger import Account, Ledger
from runguard.policy.settings import Policy
from runguard.pricing.book import DatedRates
from runguard.pricing.rates import Unpriced, normalise

# ---- Budgets that share one account, and the scopes that they count by

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


def parse_scope(kind: str, parts: list[str]) -> Scope | None:
    """Return a scope from its key, for the kinds whose key says everything."""
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


# ---- The accounts of a call

FOREVER: Final = float("inf")
_NOT_PRICED: Final[DatedRates] = (FOREVER, FOREVER, Unpriced("", "nobody has asked"))


@dataclass(frozen=True, slots=True)
class UnknownCap:
    """An unknown cap: the function that should return it failed, and its last value is too old."""

    group: BudgetGroup
    scope: str
    reason: str


@dataclass(slots=True)
class AccountLines:
    """The accounts that a call of one agent, model and tool goes on, and what its model costs."""

    accounts: tuple[Account, ...]
    groups: tuple[BudgetGroup, ...]
    limits: tuple[list[Amount], ...]  # of each account, what each of its budgets allows
    until: float
    # a cap that is not known: calls are denied, and what is spent all the same is booked
    unknown: UnknownCap | None = None
    names: frozenset[str] = frozenset()  # of the accounts that calls wait for
    price: DatedRates = _NOT_PRICED  # of the model, once a call has asked
    output_limit: int | None = None  # of the model, likewise
    in_usd: bool = field(init=False)
    needs_output: bool = field(init=False)  # some budget counts what a call may be answered with
    may_stop: bool = field(init=False)  # some budget has a threshold that stops
    may_burn: bool = field(init=False)  # some budget warns when it is spent too fast

    def __post_init__(self) -> None:
        self.in_usd = any(a.cap_usd < UNLIMITED for a in self.accounts)
        self.needs_output = self.in_usd or any(a.cap_tokens < UNLIMITED for a in self.accounts)
        self.may_stop, self.may_burn = (
            any(group.stops for group in self.groups),
            any(group.burns for group in self.groups),
        )


def status_of(account: Account, unit: int, limit: int, spent: int) -> BudgetStatus:
    held, over = edge(unit, account.held[unit]), edge(unit, account.overrun[unit])
    return BudgetStatus(
        account.scope,
        UNITS[unit],
        edge(unit, spent),
        held,
        edge(unit, limit),
        over,
        account.window,
        account.ends,
        account.closed,
    )


def statuses_of(account: Account) -> list[BudgetStatus]:
    return [
        status_of(account, unit, cap, account.spent[unit]) for unit, cap in enumerate(account.caps) if cap < UNLIMITED
    ]


# ---- The caps in force for a scope: fixed amounts, and amounts that functions give

_log: Final = logging.getLogger("runguard")
KEPT_S: Final = 600.0  # how long the last value of a function counts after it was given
_SCOPES_KEPT: Final = 10_000
_REPORTS: Final = 10  # failures that are reported within ...
_REPORTS_S: Final = 60.0  # ... so many seconds: a plan service that is down fails for every user
_CapKey = tuple[BudgetGroup, int, int, str]  # group, position of the budget, unit, scope


@dataclass(slots=True)
class Caps:
    """What a group's budgets allow a scope."""

    limits: list[Amount]  # of each budget
    unknown: UnknownCap | None = None
    is_current: bool = True  # every function gave a value just now; else they are asked again with the next call


class CapFunctions:
    """Asks the functions of one policy's budgets, and remembers what they gave. Safe to use from many threads.

    A function that raises, or returns something that is not an amount, does not remove its cap: its last value for that
    scope counts for ten more minutes, and then the cap is unknown. None is a value: no limit.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._given = LruDict[_CapKey, tuple[int, float]](_SCOPES_KEPT)  # the last cap, and when it was given
        self._failing = LruDict[_CapKey, tuple[str, bool]](_SCOPES_KEPT)  # the cause, and whether it was reported
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

    def _ask(self, key: _CapKey, function: Callable[[Scope], Any], scope: Scope, found: Caps) -> int:
        """Return the cap that a function gives, or its last one. Where neither is known, ``found`` says so."""
        unit = UNITS[key[2]]
        now = self._clock()
        try:
            cap = _cap_from(function, scope, key[2])
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

    def _works(self, key: _CapKey, cap: int, now: float) -> None:
        with self._lock:
            self._given[key] = (cap, now)
            _, was_reported = self._failing.pop(key, ("", False))
        if was_reported:
            _log.warning(
                "runguard.budget_function_back: the function for %s gives a cap for %s again", UNITS[key[2]], key[3]
            )
            self._tell(key, "")

    def _failed(self, key: _CapKey, cause: str, reason: str, is_known: bool, now: float, error: Exception) -> None:
        """Report a failure once per scope and cause, and only so many a minute."""
        with self._lock:
            self.errors += 1
            before, was_reported = self._failing.get(key, ("", False))
            if before == cause and was_reported:
                return
            self._reports = [at for at in self._reports if 0 <= now - at < _REPORTS_S]
            is_reported = len(self._reports) < _REPORTS
            self._failing[key] = (cause, is_reported or was_reported)
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

    def _tell(self, key: _CapKey, wrong: str) -> None:
        if self.on_change is not None:
            self.on_change(key[3], UNITS[key[2]], wrong)


class _NotACapError(Exception):
    """A function returned something that is not an amount."""


def _cap_from(function: Callable[[Scope], Any], scope: Scope, unit: int) -> int:
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


# ---- Which accounts a call goes on, and which ones a scope names: a policy's budgets, looked up in a ledger

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
            *(group for group in self.groups if group.per.kind == "run"),
            *(group for group in heir.groups if group.per.kind != "run"),
        ]

    def of_call(self, run_costs: RunCosts, event: ModelCall, anew: bool = False) -> AccountLines:
        """Return all accounts that a call goes on, kept until the first of their periods is over.

        ``anew``: those of now, not of the call's time.
        """
        key = (event.agent, event.model, event.tool)
        known = run_costs.lines.get(key)
        if known is not None and known.until == FOREVER:  # no budget has a window
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
        """Return the accounts of a scope in their current periods, made where it has spent nothing yet.

        ``costs_by_run``: of the runs under way.
        """
        found = self._ledger.find(scope)
        now = self._ledger.period_time(self._clock())  # as the store has just reported it
        # of several periods that are not over, the latest: the clock was set back
        found = list({a.meter: a for a in found if a.ends is None or a.ends > now}.values())
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
        have = {a.meter for a in found}
        for group in self.groups:  # a scope that has spent nothing yet
            if group.per.kind == kind and (named := _scope_named(kind, parts, costs_by_run)) is not None:
                key = group.per.key(named)
                if key is None or f"{key}{group.suffix}" in have:
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
        """Return the accounts, and whether every cap function gave a value just now."""
        info = run_costs.info
        accounts: list[Account] = []
        groups: list[BudgetGroup] = []
        allowed: list[list[Amount]] = []
        until = FOREVER
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
        """Return the account of a scope, none where nothing is limited, and its caps.

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
        name, begins, ends = _account_key(group, key, at)
        account = None
        if caps.unknown is not None and not self._ledger.is_shared:  # it keeps the cap by which other runs still go
            account = next((known for known in self._ledger.find(key) if known.key == name), None)
        if account is None:
            account = self._ledger.account(
                name, key, group.window.text if group.window else None, ends, (usd, tokens, calls), begins
            )
            account.alert = NOTHING if any(group.thresholds) else NO_LIMIT  # found anew at the next settle
        return account, caps


def _lowered(limit: Amount, ceiling: Ceiling) -> Amount:
    """Return a limit of a run, lowered to what its caller can pay for."""
    usd, tokens = ceiling
    return (
        limit[0] if usd is None else min(limit[0], usd),
        limit[1] if tokens is None else min(limit[1], tokens),
        limit[2],
    )


def _account_key(group: BudgetGroup, key: str, at: float) -> tuple[str, float | None, float | None]:
    """Return an account's key, and when its period begins and ends."""
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


# ---- Thresholds that are reached: those that stop a call or switch its model, and those that fire after it


class Burn(NamedTuple):
    """A budget that is spent too fast: how many times as fast as what is left allows. An estimate."""

    fast: float  # over the fast window
    slow: float
    used_up_at: float


@dataclass(slots=True)
class Fired:
    """A threshold that was reached, or a budget that is spent too fast, and the figures of the budget."""

    account: Account
    group: BudgetGroup
    threshold: Threshold
    status: BudgetStatus
    burn: Burn | None = None


def reached_thresholds(lines: AccountLines) -> Iterator[Fired]:
    """Yield the thresholds that the budgets of a call are beyond, whether or not they have fired."""
    for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
        spent = account.spent
        for thresholds, limit in zip(group.thresholds, limits, strict=False):
            for threshold in thresholds:
                unit = unit_reached(spent, share_of(limit, account.granted, threshold.percent))
                if unit is not None:
                    status = status_of(account, unit, limit[unit] + account.granted[unit], spent[unit])
                    yield Fired(account, group, threshold, status)


def newly_reached(lines: AccountLines, ledger: Ledger) -> Iterator[Fired]:
    """Yield the thresholds that fire now."""
    for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
        usd, tokens, calls = account.alert
        if account.spent_usd >= usd or account.spent_tokens >= tokens or account.spent_calls >= calls:
            yield from _fire(ledger, account, group, limits)


def _fire(ledger: Ledger, account: Account, group: BudgetGroup, limits: list[Amount]) -> Iterator[Fired]:
    """Yield the thresholds that are reached, each against its own budget; note when to look again."""
    following, granted = list(NO_LIMIT), account.granted
    # read once: while the store is asked below, the late reply of an earlier call may set the account back
    spent = account.spent
    for number, (thresholds, limit) in enumerate(zip(group.thresholds, limits, strict=False)):
        for position, threshold in enumerate(thresholds):
            needed = share_of(limit, granted, threshold.percent)
            unit = unit_reached(spent, needed)
            if unit is None:
                following = [min(now, need) for now, need in zip(following, needed, strict=True)]
                continue
            if threshold.recurring:
                following = [0, 0, 0]
            mark = f"{number}.{position}:{threshold.percent}:{threshold.action}"
            is_first = threshold.recurring or ledger.first(account, mark, threshold.percent, limit)
            if is_first is None:  # the store was away: look again with the next settlement
                following = [0, 0, 0]
            elif is_first:
                yield Fired(
                    account,
                    group,
                    threshold,
                    status_of(account, unit, limit[unit] + account.granted[unit], spent[unit]),
                )
    account.alert = (following[0], following[1], following[2])
    if account.granted != granted:  # extended meanwhile: what was re-armed must be found
        account.alert = NOTHING


# ---- Budgets that are spent too fast

FAST: Final = 24  # the fast window is a 24th of the period: an hour of a day
SLOW: Final = 4  # the slow one a quarter: six hours of a day
FACTOR: Final = 1.5  # calls come in bursts: a budget that just lasts must not be reported
_SLOTS: Final = 8  # of a fast window
_SLOTS_KEPT: Final = FAST // SLOW * _SLOTS + 2  # a slow window, the slot in which it begins, and the one before
_ACCOUNTS_KEPT: Final = 1_024
_ALL: Final = Threshold(1.0)
Slots = Sequence[tuple[int, Amount]]  # the number of a slot of time, and what was spent at its end


def burn_of(slots: Slots, spent: Amount, cap: int, unit: int, begins: float, now: float, ends: float) -> Burn | None:
    """Return how many times as fast as allowed a budget is spent; None where it is not spent too fast.

    Too fast is ``FACTOR`` times as fast as what is left of the period allows, over both a fast and a slow window: a
    short burst, and spending that has calmed down, are not reported.
    """
    room, left = cap - spent[unit], ends - now
    if room <= 0 or left <= 0:
        return None
    length = (ends - begins) / FAST / _SLOTS
    rates = []
    for part in (FAST, SLOW):
        first = int((now - (ends - begins) / part) // length)  # the slot in which the window begins
        before = next((known[unit] for slot, known in reversed(slots) if slot < first), None)
        if first * length <= begins:
            amount, seconds = spent[unit], (ends - begins) / part
        else:  # without an earlier slot: what was spent before this process looked first does not count
            amount, seconds = spent[unit] - (slots[0][1][unit] if before is None else before), now - first * length
        if amount * left < FACTOR * room * seconds:
            return None
        rates.append(amount / seconds)
    return Burn(rates[0] * left / room, rates[1] * left / room, now + room / rates[0])


class BurnWatch:
    """What accounts have spent over time, as far as this process saw it. Safe to use from many threads.

    Looked at after each call on a budget with ``burn_alert=True``, and on no other. What an account has spent is noted
    once per slot of time, so the memory per account is constant.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float], before: "BurnWatch | None" = None) -> None:
        """``before``: goes on with the slots of another watch."""
        self._ledger, self._clock = ledger, clock
        self._lock: threading.Lock = threading.Lock() if before is None else before._lock
        # the slots of an account, by its key; and for which extension it was reported
        self._slots: LruDict[str, deque[tuple[int, Amount]]] = (
            LruDict(_ACCOUNTS_KEPT) if before is None else before._slots
        )
        self._reported: LruDict[str, Amount] = LruDict(_ACCOUNTS_KEPT) if before is None else before._reported

    def look(self, lines: AccountLines) -> Iterator[Fired]:
        """Yield the budgets that burn too fast now, each once per period over all workers."""
        now = self._ledger.period_time(self._clock())
        for account, group, limits in zip(lines.accounts, lines.groups, lines.limits, strict=True):
            if not group.burns or account.window is None or account.ends is None:
                continue
            begins = begin_of(account.window, account.ends)
            slots, spent = self._note(account, begins, now), account.spent
            if spent[2] < LEAST_CALLS or self._reported.get(account.key) == account.granted:
                continue
            watched = (limit for budget, limit in zip(group.budgets, limits, strict=False) if budget.burn_alert)
            for unit, cap, limit in _limited(watched, account.granted):
                burn = burn_of(slots, spent, cap, unit, begins, now, account.ends)
                if burn is None:
                    continue
                is_first = self._ledger.first(account, f"burn:{UNITS[unit]}", 1.0, limit)
                if is_first is not None:  # None: the store was away; look again with the next settlement
                    self._report(account)
                if is_first:
                    yield Fired(account, group, _ALL, status_of(account, unit, cap, spent[unit]), burn)
                break

    def _note(self, account: Account, begins: float, now: float) -> list[tuple[int, Amount]]:
        """Note what an account has spent by now; return all its slots."""
        length = ((account.ends or now) - begins) / FAST / _SLOTS
        slot = int(now // length)
        with self._lock:
            slots = self._slots.get(account.key)
            if slots is None:
                # what others may have spent before: not known when
                slots = self._slots[account.key] = deque([(slot - 1, account.spent)], maxlen=_SLOTS_KEPT)
            if slots[-1][0] >= slot:
                slots[-1] = (slots[-1][0], account.spent)
            else:
                slots.append((slot, account.spent))
            return list(slots)

    def _report(self, account: Account) -> None:
        with self._lock:
            self._reported[account.key] = account.granted


def _limited(limits: Iterable[Amount], granted: Amount) -> Iterator[tuple[int, int, Amount]]:
    """Yield each unit that is limited, its cap with extensions, and the amounts of its budget."""
    for limit in limits:
        for unit, amount in enumerate(limit):
            if amount < UNLIMITED:
                yield unit, amount + granted[unit], limit
