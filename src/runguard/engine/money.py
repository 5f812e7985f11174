"""A call from its reservation to its price, and what the budgets say to it.

``open`` reserves the worst case of a call on every budget that is about it; ``settle`` books what it took; ``release``
undoes a call that was never sent. What each run spent is kept per agent, model and tool, with or without a budget.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from runguard.accounting.budget_groups import scopes_of
from runguard.accounting.burn_rate import BurnWatch
from runguard.accounting.charges import (
    OWNERS,
    AccountLines,
    Charge,
    Denied,
    RunCosts,
    UnknownCap,
    statuses_of,
    worst_of,
)
from runguard.accounting.expectations import Expectations
from runguard.accounting.forecast import forecasts_of
from runguard.accounting.lookup import AccountFinder
from runguard.accounting.nested_guards import cover, layers_around, not_held_by, stricter_than, uncover
from runguard.accounting.reservation import Reserver, UnknownCapError
from runguard.accounting.settlement import Settlement
from runguard.accounting.spending import Spending
from runguard.accounting.waiting_calls import RoomWaits
from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, RunInfo
from runguard.core.money import NOTHING, UNITS, UNLIMITED, Amount, BudgetStatus, to_count, to_nano
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, Switch
from runguard.ledger.memory import open_ledger
from runguard.policy.settings import Policy
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates


class Accounts(Settlement):
    """One policy's budgets and prices over any number of runs."""

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float],
        ledger: Ledger | None = None,
        before: "Accounts | None" = None,
        pricing: Pricing | None = None,
    ) -> None:
        """``before``: accounts under an earlier policy.

        Their figures are kept, and with the same store their ledger and stops. ``pricing``: other prices than those
        of the policy.
        """
        self.policy, self.clock = policy, clock
        if before is not None and _store_of(policy) == _store_of(before.policy):
            ledger = before.ledger
        pricing = pricing or Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
        super().__init__(
            ledger or open_ledger(policy.store, policy.store_timeout, policy.retention_days * 86_400),
            pricing,
            before.spending if before is not None else Spending(),
            Expectations(policy, pricing),
        )
        same_store = before if before is not None and before.ledger is self.ledger else None
        self.burn_watch = BurnWatch(self.ledger, clock, same_store.burn_watch if same_store is not None else None)
        self.switch: Switch = same_store.switch if same_store is not None else Switch()
        # calls that met a store that was away, by what was done
        self.outages: dict[str, int] = {"closed": 0, "open": 0}
        self.on_extended: Callable[[list[BudgetStatus], list[str]], None] | None = None
        # called when the store goes away or is replaced, and with None when it is back
        self.on_store: Callable[[Exception | None], None] | None = None
        self._finder = AccountFinder(policy, self.ledger, clock)
        self.cap_functions = self._finder.caps
        self.waits = RoomWaits(policy, self.ledger, clock)
        self._reserver = Reserver(policy, self.ledger, self._finder, self.switch, self._tell_store, self.waits)
        self.standing = self._reserver.standing

    def adopt_shared_budgets(self, heir: "Accounts") -> None:
        """Another policy is in force: its budgets replace those that several runs share. A run keeps the limits it
        began with.
        """
        self._finder.adopt_shared(heir._finder)
        for run_costs in list(self.spending.costs_by_run.values()):
            run_costs.lines.clear()

    # ---- runs -------------------------------------------------------------------------------------------------------

    def begin(self, info: RunInfo) -> RunCosts:
        return self.spending.begin(info)

    def end(self, run_costs: RunCosts) -> None:
        try:
            self.spending.end(run_costs)
        finally:
            for own in run_costs.own:
                self.ledger.forget(own)

    def account_lines(self, run_costs: RunCosts, event: ModelCall) -> AccountLines:
        """The accounts that a call would go on, with their budgets and limits."""
        return self._finder.of_call(run_costs, event)

    # ---- before a call ----------------------------------------------------------------------------------------------

    def open_now(self, run_costs: RunCosts, event: ModelCall) -> Charge | None:
        """``open`` of the common case: a ledger in memory, no call to wait for, no stop, and it fits. None: ask."""
        ledger, bound = self.ledger, event.bound
        if self.switch.stops or ledger.is_shared or (OWNERS.get() and layers_around(self)):
            return None
        lines = self._finder.of_call(run_costs, event)
        if lines.unknown is not None or lines.may_stop or (lines.names and not ledger.line.is_free(lines.names)):
            return None
        rates, output = self.pricing.rates(event.model, event.at), event.max_output_tokens or 0
        if bound is not None:
            if None in bound:
                return None
        elif lines.accounts:
            if lines.in_usd and not isinstance(rates, Rates):
                return None
            output = self._output_of(event, lines)
        charge = Charge(run_costs, event, lines, rates, output, self)
        if lines.accounts:
            hold = charge.hold = ledger.hold_now(lines.accounts, worst_of(charge), self.policy.hold_seconds)
            if hold is None:
                return None
            charge.held = hold.amount[0]
        run_costs.open.add(charge)
        return charge

    def open(
        self, run_costs: RunCosts, event: ModelCall, enforce: bool, stopped: Callable[[], bool]
    ) -> Coroutine[Any, Any, tuple[Charge | None, Denied | None]]:
        """Reserve the worst case of a call. When only the holds of other calls leave no room, wait for them, bounded.

        Return a charge, or the reason of a refusal; both in shadow mode, where the call is made and billed and the
        refusal is only reported.
        """
        if OWNERS.get():
            return self._open_inside(run_costs, event, enforce, stopped)
        return self._open(run_costs, event, enforce, stopped, ())

    async def _open_inside(
        self, run_costs: RunCosts, event: ModelCall, enforce: bool, stopped: Callable[[], bool]
    ) -> tuple[Charge | None, Denied | None]:
        """``open`` inside of another guarded call, whose hold may cover this one."""
        around, charge = cover(self), None
        try:
            charge, denied = await self._open(run_costs, event, enforce, stopped, around)
        finally:
            if around and charge is None:
                uncover(around, self)
        return charge, denied

    async def _open(
        self,
        run_costs: RunCosts,
        event: ModelCall,
        enforce: bool,
        stopped: Callable[[], bool],
        around: tuple[Charge, ...],
    ) -> tuple[Charge | None, Denied | None]:
        """``around``: what guards around this one hold for the call."""
        lines = self._finder.of_call(run_costs, event)
        if around:
            lines = not_held_by(around, lines)
        output = self._output_of(event, lines) if lines.accounts else event.max_output_tokens or 0
        charge = Charge(run_costs, event, lines, self.pricing.rates(event.model, event.at), output, self, around)
        if self.switch.stops and self.switch.of(scopes_of(run_costs.info)) is not None:
            await self.ledger.refresh()  # it may have been lifted
            if (stop := self.switch.of(scopes_of(run_costs.info))) is not None:
                return (None if enforce else self.uncounted(charge)), Denied(stop=stop)
        if lines.unknown is not None:
            return self._without_cap(charge, lines.unknown, enforce)
        if (
            around
            and enforce
            and (denied := stricter_than(around, self._finder.of_call(run_costs, event), event)) is not None
        ):
            return None, denied
        if not lines.accounts and not self.ledger.is_shared:
            run_costs.open.add(charge)  # nothing is held, so there are no turns to take
            return charge, None
        try:
            reserved: tuple[Charge | None, Denied | None] = charge, None
            if (
                self.ledger.is_shared
                or self.switch.stops
                or lines.may_stop
                or (lines.names and not self.ledger.line.is_free(lines.names))
                or not self._hold_now(charge)
            ):
                reserved = await self._reserver.reserve(charge, event, enforce, stopped)
        except UnknownCapError as error:
            return self._without_cap(charge, error.unknown, enforce)
        except (StoreOutage, StoreError) as error:
            return self._without_store(charge, error, enforce)
        if reserved[0] is not None:
            run_costs.open.add(charge)
        return reserved

    def _hold_now(self, charge: Charge) -> bool:
        """Hold the worst case of a call in memory, where it fits and its price is known."""
        lines = charge.lines
        if charge.bound is None and lines.in_usd and not isinstance(charge.rates, Rates):
            return False
        hold = self.ledger.hold_now(lines.accounts, worst_of(charge), self.policy.hold_seconds)
        if hold is None:
            return False
        charge.hold, charge.held = hold, hold.amount[0]
        return True

    def _output_of(self, event: ModelCall, lines: AccountLines) -> int:
        """The most tokens that a call may answer with, where a budget has to know."""
        if event.max_output_tokens is None and event.bound is None:
            for account in lines.accounts:
                if account.cap_usd < UNLIMITED or account.cap_tokens < UNLIMITED:
                    return self.expectations.max_output(event.model)
        return event.max_output_tokens or 0

    def _without_store(self, charge: Charge, error: Exception, enforce: bool) -> tuple[Charge | None, Denied | None]:
        """No account can be opened: no paid call without one, unless the policy goes on and books later."""
        self.outages[self.policy.on_outage] += 1
        self._reserver.store_is(error)
        if self.policy.on_outage == "closed":
            return (None if enforce else self.uncounted(charge)), Denied(outage=str(error))
        return self.uncounted(charge), None

    def _without_cap(self, charge: Charge, unknown: UnknownCap, enforce: bool) -> tuple[Charge | None, Denied | None]:
        """The cap is unknown: refuse paid calls. ``on_guard_error`` and ``on_outage`` do not apply."""
        return (None if enforce else self.uncounted(charge)), Denied(unknown=unknown)

    def _tell_store(self, error: Exception | None) -> None:
        if self.on_store is not None:
            self.on_store(error)

    def uncounted(self, charge: Charge) -> Charge:
        """Open a charge for a call without a reservation; its usage is still booked."""
        charge.hold = self.ledger.book(charge.lines.accounts) if charge.lines.accounts else None
        charge.run_costs.open.add(charge)
        return charge

    def open_settled(self, run_costs: RunCosts, event: ModelCall) -> Charge:
        """Open a charge for a call that could not be checked before: no reservation, settled at once."""
        lines = self._finder.of_call(run_costs, event)
        charge = Charge(run_costs, event, lines, self.pricing.rates(event.model, event.at), 0, None)
        charge.input, charge.audio, charge.limited, charge.candidates = 0, 0, False, 1
        charge.bound, charge.instead_of = None, ""
        return self.uncounted(charge)

    # ---- after a call -----------------------------------------------------------------------------------------------

    @staticmethod
    def has_come_true(possible_refusal: Denied, kept: Amount = NOTHING) -> bool:
        """Whether more was spent in the end than the budget that had seemed too small allows. ``kept``: not to be spent
        by ordinary calls.
        """
        refusal = possible_refusal.refusal
        if refusal is None:
            return False
        account, unit = refusal.account, refusal.unit
        return account.spent[unit] + kept[unit] > account.caps[unit]

    # ---- extending and looking in -----------------------------------------------------------------------------------

    def extend(self, scope: str, usd: Any = None, tokens: Any = None, calls: Any = None) -> list[BudgetStatus]:
        """Move the caps of a scope in its current period. What was spent stays spent."""
        more: Amount = (
            to_nano(usd) if usd is not None else 0,
            to_count(tokens, "tokens") if tokens is not None else 0,
            to_count(calls, "calls") if calls is not None else 0,
        )
        if not isinstance(scope, str):
            raise PolicyError(f"extend({scope!r}): give a scope such as 'user:app/alice'; a trip's scope_id is one")
        if more == NOTHING:
            raise PolicyError(f"extend({scope!r}): by how much? Give usd=, tokens= or calls=")
        wanted = [unit for unit in range(3) if more[unit]]
        accounts = [
            a
            for a in self._finder.of_scope(scope, self.spending.costs_by_run)
            if any(a.caps[u] < UNLIMITED for u in wanted)
        ]
        if not accounts:
            units = " or ".join(UNITS[u] for u in wanted)
            counted = ", ".join(sorted({m.per.kind for m in self._finder.groups})) or "nothing"
            raise PolicyError(
                f"extend({scope!r}): no budget limits {units} there; this policy's budgets count by {counted}. "
                "A trip's scope_id is a scope to extend"
            )
        for account in accounts:
            self.ledger.extend(account, more)
        moved = [(status, account.key) for account in accounts for status in statuses_of(account)]
        if self.on_extended is not None:
            self.on_extended([status for status, _ in moved], [key for _, key in moved])
        return [status for status, _ in moved]

    def budgets(self, scope: str | None = None, *, as_known_here: bool = False) -> list[BudgetStatus]:
        """Every budget with its figures. ``as_known_here``: as last reported, without asking the store."""
        asked = self.ledger.known if as_known_here else self.ledger.accounts
        accounts = asked() if scope is None or as_known_here else self.ledger.find(scope)
        now = self.ledger.period_time(self.clock())  # as the store has just reported it
        over = (
            {own for run_costs in list(self.spending.costs_by_run.values()) if run_costs.over for own in run_costs.own}
            if scope is None
            else ()
        )
        return [
            status
            for a in accounts
            if (a.ends is None or a.ends > now) and a.scope not in over
            for status in statuses_of(a)
        ]

    def forecasts(self) -> list[dict[str, Any]]:
        """When budgets with a window will be used up, as far as this process knows their spending. Estimates."""
        now = self.ledger.period_time(self.clock())
        return [facts for account in self.ledger.known() for facts in forecasts_of(account, now)]

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """What was spent, in all and per agent, model and tool. A scope as budgets name it, or None for everything."""
        return self.spending.of_scope(scope)


def _store_of(policy: Policy) -> tuple[Any, ...]:
    return (policy.store, policy.store_timeout, policy.retention_days) if policy.store else ()
