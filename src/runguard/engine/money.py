"""The money of a call from reservation to price, and what the budgets say to it.

``Accounts`` is the whole of it: ``engine/calls``, ``engine/tools``, ``engine/final_answer`` and ``engine/downgrade``
ask it. It reserves with ``Reserver`` and knows the limits of models by ``Expectations``.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Generator, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

from runguard.core.errors import PolicyError
from runguard.core.events import ModelCall, RunInfo
from runguard.core.money import (
    NOTHING,
    UNITS,
    UNLIMITED,
    Amount,
    BudgetStatus,
    share_of,
    to_count,
    to_nano,
    unit_reached,
)
from runguard.engine.budgets import (
    FOREVER,
    NO_LIMIT,
    AccountFinder,
    AccountLines,
    BudgetGroup,
    BurnWatch,
    Fired,
    UnknownCap,
    newly_reached,
    reached_thresholds,
    status_of,
    statuses_of,
)
from runguard.engine.charges import (
    OWNERS,
    Charge,
    Denied,
    cover,
    held_for_long,
    layers_around,
    not_held_by,
    owners_of,
    stricter_than,
    uncover,
    worst_of,
)
from runguard.engine.spending import Earlier, Entry, RunCosts, Spending, flat_limits, record_of, scopes_of
from runguard.engine.waiting import Opening, Visit, Waits
from runguard.ledger.ledger import (
    Account,
    Hold,
    Ledger,
    Record,
    Refusal,
    Stale,
    StoreError,
    StoreOutage,
    StoreReplacedError,
    Switch,
    refusal_of,
)
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
        self.policy, self.clock = policy, clock
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
        self.on_fired: Callable[[Charge, Fired], None] = _tell_nobody
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
            ttl = self.policy.hold_seconds if not event.stands else math.inf  # in memory it goes with the process
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
                denied.group = _group_of(charge, denied)
                return None, denied
            charge.hold, charge.held = held, held.amount[0]
        run_costs.open.add(charge)
        return charge, None

    async def _plain_hold(self, charge: Charge, event: ModelCall) -> Hold | Refusal:
        for _ in range(_CLOCK_TRIES):
            held = await self.ledger.reserve(charge.lines.accounts, worst_of(charge), ttl=self.policy.hold_seconds)
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
        denied.group = _group_of(charge, denied)
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


def _tell_nobody(charge: Charge, reached: Fired) -> None:
    """Report nothing: nobody has asked for it."""


def _store_of(policy: Policy) -> tuple[Any, ...]:
    return (policy.store, policy.store_timeout, policy.retention_days) if policy.store else ()


# ---- Holding the worst case of a call on its budgets: ask the ledger, wait for other calls, ask for less

_LOOKS_S: Final = 1.0  # a waiting call looks at least this often, should a wake-up get lost with its loop
_FACTS_S: Final = 1.0  # until what was settled has reached a store
_CLOCK_TRIES: Final = 5
STANDING_S: Final = 86_400.0  # a hold that stands for a whole run; a living run renews it in half of that time


class UnknownCapError(Exception):
    """A cap became unknown while a call waited for its turn. Nothing is held."""

    def __init__(self, unknown: UnknownCap) -> None:
        super().__init__(unknown.reason)
        self.unknown = unknown


class StepOut:
    """Awaited before anything is waited for, by a call that was asked for without an event loop: it goes on on one."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Reserver:
    """Reserves on the ledger of one guard's accounts."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts, self._policy, self._ledger = accounts, accounts.policy, accounts.ledger
        self._finder, self._switch, self._waits = accounts.finder, accounts.switch, accounts.waits
        self._is_away = self._is_replaced = False

    async def reserve(
        self, charge: Charge, event: ModelCall, enforce: bool, stopped: Callable[[], bool]
    ) -> tuple[Charge | None, Denied | None]:
        """Return the charge with its hold, or why not; both where nothing is enforced. Raise UnknownCapError."""
        lines, denied = charge.lines, None
        if (unpriced := refused_as_unpriced(charge, self._policy)) is not None:
            denied = Denied(unpriced=unpriced)
        elif lines.may_stop and not self._ledger.is_shared:  # what a shared one says comes with the reservation
            denied = over_threshold(lines)
        if denied is not None and enforce:
            return None, denied
        # a call that blocks an event loop must not wait
        visit = Visit(self._waits, charge, stopped) if lines.names and enforce and not event.no_wait else None
        try:
            if visit is not None and not visit.place.may_ask:
                if event.no_loop:
                    await StepOut()
                await visit.in_turn()
                self._find_again(charge, event)
            result: Hold | Refusal | None = await self._ask(charge, event)
            if isinstance(result, Refusal):
                denied = Denied(result)
                if enforce:
                    result = await self._wait_or_lower(charge, event, denied, stopped, visit)
                    if result is None:
                        if visit is not None:
                            visit.leave()
                        denied.group = denied.group or _group_of(charge, denied)
                        return None, denied
                    denied = None
                else:
                    result, denied = await self._look_on(charge, event, denied, result)
        except BaseException:
            if visit is not None:
                visit.leave()
            raise
        assert isinstance(result, Hold)
        try:
            if visit is not None:
                visit.leave()
            late = self._denied_meanwhile(charge)
        except BaseException:
            self._ledger.release(result)
            raise
        if late is not None and enforce:
            self._ledger.release(result)
            return None, late
        charge.hold, charge.held = result, result.amount[0]
        return charge, late or denied

    async def _look_on(
        self, charge: Charge, event: ModelCall, denied: Denied, refusal: Refusal
    ) -> tuple[Hold | Refusal, Denied | None]:
        """Return the hold of a call that shadow mode lets through, and why an enforcing guard would refuse it."""
        left = self._waits.patience
        while charge.lines.names:
            opening = self._waits.opening(charge.lines, refusal, left, others_settle=refusal.wait_helps)
            if opening is None or not opening.fits:
                break
            self._waits.skip(charge, opening)
            left -= opening.seconds
            if self._waits.advance is not None:
                self._find_again(charge, event)
                result = await self._ask(charge, event)
                if isinstance(result, Hold):
                    return result, None
                denied.refusal = refusal = result
                continue
            return await self._ask(charge, event, force=True), None
        denied.group = _group_of(charge, denied)
        if not would_refuse(charge, event, refusal, self._policy.min_output_tokens):
            charge.possible_refusal = denied
            return await self._ask(charge, event, force=True), None
        return await self._ask(charge, event, force=True), denied

    def _denied_meanwhile(self, charge: Charge) -> Denied | None:
        """Return what the store reported with the reservation: a threshold that stops was reached, or the kill switch
        was thrown.
        """
        late = over_threshold(charge.lines) if charge.lines.may_stop else None
        stop = self._switch.of(scopes_of(charge.run_costs.info)) if self._switch.stops else None
        return late if stop is None else Denied(stop=stop)

    async def _ask(self, charge: Charge, event: ModelCall, *, force: bool = False) -> Hold | Refusal:
        """Ask the ledger; when a period is over by its clock, ask again with the accounts of the current one."""
        for _ in range(_CLOCK_TRIES):
            result = await self._ledger.reserve(
                charge.lines.accounts, worst_of(charge), force=force, ttl=self._ttl(charge)
            )
            if not isinstance(result, Stale):
                if self._is_away:
                    self._is_back(result)
                return result
            charge.run_costs.lines.clear()
            self._find_again(charge, event)
        raise StoreOutage(f"{self._ledger.name}: its clock moves faster than it answers")

    def _ttl(self, charge: Charge) -> float:
        """Return after how long a hold is charged that was neither settled nor released: its worker has crashed."""
        if not charge.stands:
            return self._policy.hold_seconds
        return STANDING_S if self._ledger.is_shared else math.inf

    async def _wait_or_lower(
        self, charge: Charge, event: ModelCall, denied: Denied, stopped: Callable[[], bool], visit: Visit | None
    ) -> Hold | None:
        """Wait while that can help, then cap the answer to what the rest can pay, down to a useful minimum.

        On a budget that waits, a call that fits into a window waits for it; others take what is left, and wait when
        that is too little.
        """
        if event.no_loop:
            await StepOut()
        ledger, loop = self._ledger, asyncio.get_running_loop()
        patience = self._policy.max_wait_seconds
        if event.no_wait:  # those it would wait for cannot come back; what is on its way to a store can
            patience = min(patience, _FACTS_S if ledger.is_shared else 0.0)
        give_up = loop.time() + (patience if visit is None else visit.left())
        refusal = denied.refusal
        assert refusal is not None
        asked = charge.max_output, charge.lowered, charge.limited
        while not stopped():
            left = give_up - loop.time()
            # what the calls around this one hold does not come back while it waits
            kept = held_for_long(refusal, ledger, owners_of(event), list(self._accounts.standing.values()))
            others_settle = refusal.wait_helps and refusal.held[refusal.unit] > kept
            opening = visit.opens(refusal, others_settle=others_settle) if visit is not None else None
            is_open = charge.bound is not None and None in charge.bound  # it takes what is left
            if visit is not None and opening is None:
                visit.step_aside(refusal)
            if visit is not None and opening is not None and opening.fits and not is_open:
                if await self._for_room(visit, refusal, opening, charge, event, denied):
                    return None
            elif others_settle and left > 0:
                await ledger.changed(refusal, min(left, _LOOKS_S))
                if stopped():
                    break
                if self._is_over_meanwhile(charge, event, denied):
                    return None
            elif charge.bound is not None:
                if not take_the_rest(charge, event, refusal):
                    if visit is None or opening is None:
                        break
                    if await self._for_room(visit, refusal, opening, charge, event, denied):
                        return None
            else:
                lowered = (
                    None if event.fixed_output else affordable_output(charge, refusal, self._policy.min_output_tokens)
                )
                if lowered is None and visit is not None and opening is not None:
                    if await self._for_room(visit, refusal, opening, charge, event, denied):
                        return None
                    charge.max_output, charge.lowered, charge.limited = asked
                elif lowered is None:
                    denied.least = (
                        self._policy.min_output_tokens if self._policy.min_output_tokens < charge.max_output else 0
                    )
                    break
                else:
                    charge.max_output, charge.lowered, charge.limited = lowered, True, True
            if stopped():
                break
            result = await self._ask(charge, event)
            if isinstance(result, Hold):
                return result
            denied.refusal = refusal = result
        return None

    async def _for_room(
        self, visit: Visit, refusal: Refusal, opening: Opening, charge: Charge, event: ModelCall, denied: Denied
    ) -> bool:
        """Wait in line. Return whether a threshold that stops was reached meanwhile."""
        await visit.for_room(refusal, opening)
        return self._is_over_meanwhile(charge, event, denied)

    def _is_over_meanwhile(self, charge: Charge, event: ModelCall, denied: Denied) -> bool:
        """Find the accounts of now, after a wait. Return whether one of them has reached a threshold that stops."""
        charge.bound = event.bound
        self._find_again(charge, event)
        over = over_threshold(charge.lines)
        if over is None:
            return False
        denied.refusal, denied.group, denied.fraction = over.refusal, over.group, over.fraction
        return True

    def _find_again(self, charge: Charge, event: ModelCall) -> None:
        charge.lines = not_held_by(charge.around, self._finder.of_call(charge.run_costs, event, anew=True))
        if charge.lines.unknown is not None:
            raise UnknownCapError(charge.lines.unknown)

    def _is_back(self, result: Hold | Refusal) -> None:
        try:
            self.store_is(None)
        except BaseException:
            if isinstance(result, Hold):
                self._ledger.release(result)
            raise

    def store_is(self, error: Exception | None) -> None:
        """Away, by this error; or back, when there is none.

        A store that is away may turn out to be another one: that is reported, too.
        """
        replaced = isinstance(error, StoreReplacedError) or (error is not None and self._is_replaced)
        if (self._is_away, self._is_replaced) != (error is not None, replaced):
            self._is_away, self._is_replaced = error is not None, replaced
            if self._accounts.on_store is not None:
                self._accounts.on_store(error)


def _group_of(charge: Charge, denied: Denied) -> BudgetGroup:
    """Return the budgets of the account that refused."""
    assert denied.refusal is not None
    lines = charge.lines
    return next(group for a, group in zip(lines.accounts, lines.groups, strict=True) if a is denied.refusal.account)


def refused_as_unpriced(charge: Charge, policy: Policy) -> Unpriced | None:
    """Return why the price is unknown, where a budget in dollars refuses the call for it."""
    rates = charge.rates
    if not isinstance(rates, Unpriced) or charge.bound is not None or not charge.lines.in_usd:
        return None
    return rates if policy.on_unpriced == "refuse" else None


# ---- A call that does not fit


def affordable_output(charge: Charge, refusal: Refusal, useful: int) -> int | None:
    """Return the most output the rest can pay, or None when that is less than is ``useful``."""
    usd, tokens, calls = refusal.room
    output = charge.max_output
    if isinstance(charge.rates, Rates) and charge.lines.in_usd:
        output = min(output, charge.rates.affordable_output(usd, charge.input, charge.audio) // charge.candidates)
    output = min(output, (tokens - charge.input) // charge.candidates)
    least = min(useful, charge.max_output)
    if calls < 1 or output < least or output >= charge.max_output or output < 1:
        return None
    return output


def take_the_rest(charge: Charge, event: ModelCall, refusal: Refusal) -> bool:
    """Let a call whose cost is not known, and which asked for the whole cap, take what is left. Return whether that is
    as much as the call needs at least.
    """
    assert event.bound is not None
    usd, tokens = event.bound
    wanted, room = worst_of(charge), refusal.room
    least_usd, least_tokens = max(event.least[0], 1), max(event.least[1], 1)
    if (
        room[2] < 1
        or (usd is None and wanted[0] > 0 and room[0] < least_usd)
        or (tokens is None and wanted[1] > 0 and room[1] < least_tokens)
    ):
        return False
    charge.bound = (
        (min(wanted[0], room[0]) if usd is None else usd),
        (min(wanted[1], room[1]) if tokens is None else tokens),
    )
    return worst_of(charge) != wanted


def would_refuse(charge: Charge, event: ModelCall, refusal: Refusal, useful: int) -> bool:
    """Return whether an enforcing guard would refuse. A shadow cannot wait for other calls' holds nor ask for a shorter
    answer.
    """
    if refusal.wait_helps:
        return False
    if charge.bound is not None:
        return not take_the_rest(copy(charge), event, refusal)
    return event.fixed_output or affordable_output(charge, refusal, useful) is None


# ---- Which thresholds of a call's budgets are reached: those that stop it, and those that fire after it


def over_threshold(lines: AccountLines) -> Denied | None:
    """Return why a call is denied where a budget has reached a threshold that stops."""
    for one in reached_thresholds(lines):
        if one.threshold.action == "stop":
            refusal = Refusal(one.account, UNITS.index(one.status.unit), NOTHING, one.account.room)
            return Denied(refusal, one.group, fraction=one.threshold.percent)
    return None


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
