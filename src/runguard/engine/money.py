"""The money of a call from reservation to price, and what the budgets say to it.

``Accounts`` is the whole of it: ``engine/calls``, ``engine/tools``, ``engine/final_answer`` and ``engine/downgrade``
ask it. It reserves with ``Reserver`` and knows the limits of models by ``Expectations``.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, RunInfo
from runguard.core.money import NOTHING, UNITS, UNLIMITED, Amount, BudgetStatus, to_count, to_nano
from runguard.engine.budgets import (
    FOREVER,
    AccountFinder,
    AccountLines,
    BurnWatch,
    Fired,
    UnknownCap,
    newly_reached,
    statuses_of,
)
from runguard.engine.charges import (
    OWNERS,
    Charge,
    Denied,
    cover,
    layers_around,
    not_held_by,
    owners_of,
    stricter_than,
    uncover,
    worst_of,
)
from runguard.engine.reserving import (
    CLOCK_TRIES,
    Reserver,
    UnknownCapError,
    group_of,
    refused_as_unpriced,
    take_the_rest,
)
from runguard.engine.spending import Earlier, Entry, RunCosts, Spending, flat_limits, record_of, scopes_of
from runguard.engine.waiting import Waits
from runguard.ledger.ledger import Hold, Ledger, Record, Refusal, Stale, StoreError, StoreOutage, Switch, refusal_of
from runguard.ledger.memory import open_ledger
from runguard.policy.settings import Policy
from runguard.pricing.book import DatedRates, Pricing
from runguard.pricing.rates import Rates, Unpriced, Usage

# ---- What to expect of a model: its context window, its longest answer, its typical answer

_log: Final = logging.getLogger("runguard")
ASSUMED_OUTPUT: Final = 65_536  # of a model whose limit is unknown
_TYPICAL_OUTPUT: Final = 1_024  # of a call that was cut off, before any of its kind was seen to end
_MODELS_KEPT: Final = 1_024


class Expectations:
    """Limits from the policy and the price book, and what was learned from the answers so far."""

    def __init__(self, policy: Policy, pricing: Pricing) -> None:
        self._policy, self._pricing = policy, pricing
        self._typical: dict[str, int] = {}
        self._logged: set[str] = set()

    def context_limit(self, model: str, *, quiet: bool = False) -> int | None:
        """Return how many input tokens a request may have: the policy's limit, or the model's window; None if unknown.

        ``quiet``: do not log that it is unknown.
        """
        headroom = self._policy.context_headroom
        if self._policy.max_context_tokens is not None:
            return self._policy.max_context_tokens - headroom
        window = self._pricing.limits(model)[0]
        if window is not None:
            return max(window - headroom, 1)
        if not quiet:
            self._log_once(
                logging.INFO,
                f"window:{model}",
                "runguard.unknown_window: the context window of '%s' is unknown; "
                "set models={'%s': {'context_window': …}}",
                model,
            )
        return None

    def output_limit(self, model: str) -> int:
        """Return how many tokens a call to a model may be answered with at most."""
        limit = self._pricing.limits(model)[1]
        if limit is not None:
            return limit
        self._log_once(
            logging.WARNING,
            f"output:{model}",
            "runguard.unknown_output_limit: the output limit of '%s' is unknown, assuming 65,536 tokens; "
            "set models={'%s': {'max_output_tokens': …}}",
            model,
        )
        return ASSUMED_OUTPUT

    def guess(self, charge: Charge, streamed_tokens: int, streaming: bool) -> Usage:
        """Estimate the usage of a call that was sent and never reported it: its prompt, and a typical answer."""
        output = streamed_tokens
        if not streaming:
            output = max(output, self.typical(charge.model))
        if charge.max_output:
            output = min(output, charge.max_output * charge.candidates)
        return Usage(input=charge.input, output=output, audio=charge.audio)

    def typical(self, model: str, limit: int | None = None) -> int:
        """Return the mean size of recent answers of a model, at most ``limit``."""
        output = self._typical.get(model, _TYPICAL_OUTPUT)
        return output if limit is None else min(output, limit)

    def learn(self, model: str, output: int) -> None:
        """Remember the size of a model's answers: the mean of recent ones."""
        typical = self._typical.get(model)
        if typical is None and len(self._typical) >= _MODELS_KEPT:
            return
        self._typical[model] = output if typical is None else (typical * 7 + output) // 8

    def _log_once(self, level: int, mark: str, message: str, model: str) -> None:
        if mark not in self._logged and len(self._logged) < _MODELS_KEPT:
            self._logged.add(mark)
            _log.log(level, message, model, model)


# ---- All accounts of one policy


class Accounts:
    """One policy's budgets and prices over any number of runs.

    ``open`` reserves the worst case of a call on every budget that is about it; ``settle`` books what it took;
    ``release`` undoes a call that was never sent. What each run spent is kept per agent, model and tool, with or
    without a budget.
    """

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
        self.policy, self.clock, self.hold_seconds = policy, clock, policy.hold_seconds
        if before is not None and _store_of(policy) == _store_of(before.policy):
            ledger = before.ledger
        pricing = pricing or Pricing(policy.prices, policy.models, policy.unknown_price, policy.prices_source)
        retention = policy.retention_days * 86_400
        self.ledger: Ledger = ledger or open_ledger(policy.store, policy.store_timeout, retention)
        self.pricing = pricing
        self.expectations: Expectations = Expectations(policy, pricing)
        self.spending: Spending = before.spending if before is not None else Spending()
        same_store = before if before is not None and before.ledger is self.ledger else None
        self.burn_watch: BurnWatch = BurnWatch(
            self.ledger, clock, same_store.burn_watch if same_store is not None else None
        )
        self.switch: Switch = same_store.switch if same_store is not None else Switch()
        # calls that met a store that was away, by what was done
        self.outages: dict[str, int] = {"closed": 0, "open": 0}
        self.on_extended: Callable[[list[BudgetStatus], list[str]], None] | None = None
        # called with the charge that made a threshold fire, or a budget be spent too fast
        self.on_fired: Callable[[Charge, Fired], None] = lambda charge, reached: None
        # called when the store goes away or is replaced, and with None when it is back
        self.on_store: Callable[[Exception | None], None] | None = None
        self.finder = AccountFinder(policy, self.ledger, clock)
        self.cap_functions = self.finder.caps
        self.waits = Waits(policy, self.ledger, clock)
        # charges that stay open for as long as their run, by their identity: no call waits for them
        self.standing: dict[int, Charge] = {}
        self._reserver = Reserver(self)

    def adopt_shared_budgets(self, heir: "Accounts") -> None:
        """Replace the budgets that runs share by those of a new policy. Runs keep the limits they began with."""
        self.finder.adopt_shared(heir.finder)
        for run_costs in list(self.spending.costs_by_run.values()):
            run_costs.lines.clear()

    # ---- runs -------------------------------------------------------------------------------------------------------

    def end(self, run_costs: RunCosts) -> None:
        try:
            self.spending.end(run_costs)
        finally:
            for own in run_costs.own:
                self.ledger.forget(own)

    # ---- before a call ----------------------------------------------------------------------------------------------

    def open_now(self, run_costs: RunCosts, event: ModelCall) -> Charge | None:
        """``open`` of the common case: a ledger in memory, no call to wait for, no stop, and it fits. None: ask."""
        ledger, bound = self.ledger, event.bound
        if self.switch.stops or ledger.is_shared:
            return None
        owners = OWNERS.get() if event.around is None else event.around
        if owners and layers_around(self, owners):
            return None
        lines = run_costs.lines.get((event.agent, event.model, event.tool))
        if lines is None or lines.until != FOREVER:
            lines = self.finder.of_call(run_costs, event)
        if lines.unknown is not None or lines.may_stop or (lines.names and not ledger.line.is_free(lines.names)):
            return None
        if bound is not None and None in bound:
            return None
        charge = Charge(run_costs, event, lines, self)
        if lines.accounts:
            if bound is None and lines.in_usd and not isinstance(charge.rates, Rates):
                return None
            ttl = self.hold_seconds if not event.stands else math.inf  # in memory it goes with the process
            hold = charge.hold = ledger.hold_now(lines.accounts, worst_of(charge), ttl)
            if hold is None:
                return None
            charge.held = hold.amount[0]
        run_costs.open.add(charge)
        return charge

    def price(self, lines: AccountLines, model: str, at: float) -> DatedRates:
        """Find out what a model costs, for all calls that go on these accounts until its price changes."""
        lines.output_limit, lines.price = None, self.pricing.dated_rates(model, at)
        return lines.price

    async def open(
        self, run_costs: RunCosts, event: ModelCall, enforce: bool, stopped: Callable[[], bool]
    ) -> tuple[Charge | None, Denied | None]:
        """Reserve the worst case of a call. When only the holds of other calls leave no room, wait for them, bounded.

        Return a charge, or the reason of a refusal; both in shadow mode, where the call is made and billed and the
        refusal is only reported. Inside of another guarded call, what that one holds may cover this one.
        """
        owners, charge = owners_of(event), None
        around = cover(self, owners) if owners else ()
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
        lines = self.finder.of_call(run_costs, event)
        if around:
            lines = not_held_by(around, lines)
        charge = Charge(run_costs, event, lines, self)
        charge.around = around
        if self.switch.stops and self.switch.of(scopes_of(run_costs.info)) is not None:
            await self.ledger.refresh()  # it may have been lifted
            if (stop := self.switch.of(scopes_of(run_costs.info))) is not None:
                return (None if enforce else self.uncounted(charge)), Denied(stop=stop)
        if lines.unknown is not None:
            return self._without_cap(charge, lines.unknown, enforce)
        if (
            around
            and enforce
            and (denied := stricter_than(around, self.finder.of_call(run_costs, event), event)) is not None
        ):
            return None, denied
        if not lines.accounts and not self.ledger.is_shared:
            run_costs.open.add(charge)  # nothing is held, so there are no turns to take
            return charge, None
        try:
            reserved = await self._reserver.reserve(charge, event, enforce, stopped)
        except UnknownCapError as error:
            return self._without_cap(charge, error.unknown, enforce)
        except (StoreOutage, StoreError) as error:
            return self._without_store(charge, error, enforce)
        if reserved[0] is not None:
            run_costs.open.add(charge)
        return reserved

    async def open_plain(self, run_costs: RunCosts, event: ModelCall) -> tuple[Charge | None, Denied | None]:
        """Reserve a call on the ledger alone: no waiting for other calls, no shorter answer, no guards around it.

        It is for calls that a fault of the guard has left without a reservation, and shares as little code with
        ``open`` as it can.
        """
        lines = self.finder.of_call(run_costs, event)
        charge = Charge(run_costs, event, lines, self)
        if (stop := self.switch.of(scopes_of(run_costs.info)) if self.switch.stops else None) is not None:
            return None, Denied(stop=stop)
        if lines.unknown is not None:
            return None, Denied(unknown=lines.unknown)
        if lines.accounts:
            if (unpriced := refused_as_unpriced(charge, self.policy)) is not None:
                return None, Denied(unpriced=unpriced)
            try:
                held = await self._plain_hold(charge, event)
            except (StoreOutage, StoreError) as error:
                return self._without_store(charge, error, True)
            if isinstance(held, Refusal):
                denied = Denied(held)
                denied.group = group_of(charge, denied)
                return None, denied
            charge.hold, charge.held = held, held.amount[0]
        run_costs.open.add(charge)
        return charge, None

    async def _plain_hold(self, charge: Charge, event: ModelCall) -> Hold | Refusal:
        for _ in range(CLOCK_TRIES):
            held = await self.ledger.reserve(charge.lines.accounts, worst_of(charge), ttl=self.hold_seconds)
            if isinstance(held, Refusal) and charge.bound is not None and take_the_rest(charge, event, held):
                continue
            if not isinstance(held, Stale):
                return held
            charge.run_costs.lines.clear()  # a period is over: find the accounts of the current one
            charge.lines = self.finder.of_call(charge.run_costs, event, anew=True)
        raise LookupError("the accounts of the call change faster than they can be asked")

    def has_budgets(self, info: RunInfo | None = None) -> bool:
        """Return whether calls are reserved on a ledger: a budget of the policy, or of this run."""
        if any(group.budgets for group in self.finder.groups):
            return True
        return info is not None and (flat_limits(info) is not None or info.ceiling != (None, None))

    def _without_store(self, charge: Charge, error: Exception, enforce: bool) -> tuple[Charge | None, Denied | None]:
        """Refuse a call for which no account can be opened, unless the policy goes on and books later."""
        self.outages[self.policy.on_outage] += 1
        self._reserver.store_is(error)
        if self.policy.on_outage == "closed":
            return (None if enforce else self.uncounted(charge)), Denied(outage=str(error))
        return self.uncounted(charge), None

    def _without_cap(self, charge: Charge, unknown: UnknownCap, enforce: bool) -> tuple[Charge | None, Denied | None]:
        """Refuse a call whose cap is unknown. ``on_guard_error`` and ``on_outage`` do not apply."""
        return (None if enforce else self.uncounted(charge)), Denied(unknown=unknown)

    def uncounted(self, charge: Charge) -> Charge:
        """Open a charge for a call without a reservation; its usage is still booked."""
        charge.hold = self.ledger.book(charge.lines.accounts) if charge.lines.accounts else None
        charge.run_costs.open.add(charge)
        return charge

    def open_settled(self, run_costs: RunCosts, event: ModelCall) -> Charge:
        """Open a charge for a call that could not be checked before: no reservation, settled at once."""
        lines = self.finder.of_call(run_costs, event)
        nothing: dict[str, Any] = {"input_tokens": 0, "audio_tokens": 0, "max_output_tokens": 0, "bound": None}
        charge = Charge(run_costs, replace(event, candidates=1, instead_of="", **nothing), lines, self)
        charge.home, charge.limited = None, False
        return self.uncounted(charge)

    # ---- after a call -----------------------------------------------------------------------------------------------

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
        *,
        on_booked: Callable[[], None] | None = None,
    ) -> None:
        """Book the usage of a call; a later report replaces the earlier one.

        The model that answered wins over the one that was asked. ``nano``: what it cost, where that is known without
        the price list. ``free``: the provider refused the call and billed nothing. ``on_booked``: is called once the
        ledger has booked it, before any threshold fires.

        A fault of ours on the way is raised when nothing is held any more.
        """
        before = None if charge.booked is None else (charge.booked, charge.entry)
        entry: Entry | None = None
        fault: Exception | None = None
        try:
            entry = self._entry(charge, usage, model, nano, estimated, free)
            self.spending.book(charge, entry, model or charge.model)
        except Exception as error:
            fault = error
            self.spending.give_up(charge)
        hold, ledger = charge.hold, self.ledger
        if hold is not None:
            amount = (
                (entry.nano, entry.input + entry.output, entry.calls) if entry is not None else _share(charge, usage)
            )
            try:
                if ledger.is_shared:
                    ledger.settle(
                        hold,
                        amount,
                        partial(self._look, charge, on_booked),
                        self._record(charge, before),
                        may_wait=on_booked is None and not charge.lines.may_burn and not charge.is_tool,
                    )
                else:
                    ledger.settle(hold, amount)
                    is_due = on_booked is not None or charge.lines.may_burn
                    for account in charge.lines.accounts:  # has one spent as much as its next threshold?
                        usd, tokens, calls = account.alert
                        if account.spent_usd >= usd or account.spent_tokens >= tokens or account.spent_calls >= calls:
                            is_due = True
                    if is_due:
                        self._look(charge, on_booked)
            except Exception as error:
                fault = fault or error
                self._close_hold(hold, amount)
        if fault is not None:
            raise fault
        if not estimated and not free and usage.output:
            self.expectations.learn(charge.model, usage.output)

    def _entry(self, charge: Charge, usage: Usage, model: str, nano: int | None, estimated: bool, free: bool) -> Entry:
        """Return what a call took, in tokens and at its price."""
        if charge.is_tool:
            return Entry(nano=nano or 0, estimated=int(estimated), tool_calls=1, tool_nano=nano or 0)
        rates = charge.rates
        if model and model != charge.model:
            answering = self.pricing.rates(model, charge.at)
            if isinstance(answering, Rates):
                rates = answering
            else:
                estimated = estimated or isinstance(rates, Rates)  # use the price of the requested model
        unpriced = search_nano = 0
        if nano is None:
            if isinstance(rates, Rates):
                nano = 0 if free else rates.cost(usage)
                estimated = estimated or rates.estimated
                if usage.searches and not free:
                    search_nano = rates.search.cost(usage.searches)
            else:
                nano, unpriced = 0, int(not free)
        return Entry(
            1,
            usage.input,
            usage.output,
            usage.cached,
            usage.thinking,
            nano,
            unpriced,
            int(estimated),
            searches=usage.searches,
            search_nano=search_nano,
        )

    def _record(self, charge: Charge, before: Earlier | None) -> Record | None:
        """Return the record of a settlement. A call that a layer around this one owns is recorded there."""
        if charge.booked is None or charge.around:
            return None
        return "call", charge.run_costs.info.run, json.dumps(record_of(charge, before))

    def _close_hold(self, hold: Hold, amount: Amount, record: Record | None = None) -> None:
        """Settle once more after a fault. A hold that the ledger cannot settle stays, and is charged when it expires:
        the call was sent, so its money is never given back.
        """
        if hold.is_open:
            self.ledger.settle(hold, amount, None, record)

    def close(self, charge: Charge, usage: Usage | None = None) -> None:
        """Book an estimate after a fault, which is what was held, or its share where the usage is known."""
        hold = charge.hold
        amount = NOTHING if hold is None else hold.amount if usage is None else _share(charge, usage)
        taken, before = usage or Usage(input=charge.input), (charge.booked, charge.entry) if charge.booked else None
        try:
            if not charge.over:
                entry = Entry(1, taken.input, taken.output, nano=amount[0], estimated=1)
                if charge.is_tool:
                    entry = Entry(nano=amount[0], estimated=1, tool_calls=1, tool_nano=amount[0])
                self.spending.book(charge, entry, charge.model)
        finally:
            self.spending.give_up(charge)
            if hold is not None:
                self._close_hold(hold, amount, self._record(charge, before) if self.ledger.is_shared else None)

    def _look(self, charge: Charge, on_booked: Callable[[], None] | None) -> None:
        """Report the thresholds that were reached, and the budgets that are spent too fast."""
        if on_booked is not None:
            on_booked()
        burning = self.burn_watch.look(charge.lines) if charge.lines.may_burn else ()
        for reached in chain(newly_reached(charge.lines, self.ledger), burning):
            self.on_fired(charge, reached)

    def rates_of(self, charge: Charge, model: str) -> Rates | Unpriced:
        """Return the rates of the model that answered, or those of the requested one where it has no price."""
        if not model or model == charge.model:
            return charge.rates
        rates = self.pricing.rates(model, charge.at)
        return rates if isinstance(rates, Rates) else charge.rates

    def release(self, charge: Charge) -> None:
        """Give back what is held for a call that was never sent."""
        if charge.over:
            return
        try:
            if charge.hold is not None:
                self._free(charge.hold)
        finally:
            try:
                self.spending.released(charge)
                uncover(charge.around, charge.home)
            finally:
                self.spending.give_up(charge)

    def _free(self, hold: Hold) -> None:
        try:
            self.ledger.release(hold)
        except Exception:
            self.ledger.settle(hold, NOTHING)
            raise

    @staticmethod
    def has_come_true(possible_refusal: Denied, kept: Amount = NOTHING) -> bool:
        """Return whether more was spent in the end than the budget that had seemed too small allows.

        ``kept``: what ordinary calls may not spend.
        """
        refusal = possible_refusal.refusal
        if refusal is None:
            return False
        account, unit = refusal.account, refusal.unit
        return account.spent[unit] + kept[unit] > account.caps[unit]

    @staticmethod
    def beyond(charge: Charge, taken: Amount) -> Denied | None:
        """Return why the budgets cannot pay for ``taken``, which a call at work has used so far. None: they can."""
        hold, accounts = charge.hold, charge.lines.accounts
        if hold is None:
            return None
        counted = hold.amount if hold.is_open else hold.booked
        more = (max(taken[0] - counted[0], 0), max(taken[1] - counted[1], 0), max(taken[2] - counted[2], 0))
        if not any(account.refusing_units(more) for account in accounts):
            return None
        refusal = refusal_of(accounts, more, 0)
        was, reserved = hold.booked, hold.amount if hold.is_open else NOTHING
        refusal.wanted = (taken[0] - was[0], taken[1] - was[1], taken[2] - was[2])
        held = refusal.held
        refusal.held = (held[0] - reserved[0], held[1] - reserved[1], held[2] - reserved[2])
        denied = Denied(refusal)
        denied.group = group_of(charge, denied)
        return denied

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
            for a in self.finder.of_scope(scope, self.spending.costs_by_run)
            if any(a.caps[u] < UNLIMITED for u in wanted)
        ]
        if not accounts:
            units = " or ".join(UNITS[u] for u in wanted)
            counted = ", ".join(sorted({group.per.kind for group in self.finder.groups})) or "nothing"
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
        """Return every budget with its figures. ``as_known_here``: as last reported, without asking the store."""
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

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """Return what was spent in a scope as budgets name it; None: in all. Also per agent, model and tool."""
        return self.spending.of_scope(scope)


def _share(charge: Charge, usage: Usage) -> Amount:
    """Estimate the cost from the share of reserved tokens that was used, for calls without a price."""
    tokens, most = usage.input + usage.output, charge.input + charge.max_output * charge.candidates
    return (charge.held * min(tokens, most) // most if most else charge.held), tokens, 0 if charge.is_tool else 1


def _store_of(policy: Policy) -> tuple[Any, ...]:
    return (policy.store, policy.store_timeout, policy.retention_days) if policy.store else ()
