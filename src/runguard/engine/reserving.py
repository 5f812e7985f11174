"""How the worst case of a call is held on its budgets: ask the ledger, wait for other calls, ask for less.

``engine/money`` reserves with ``Reserver`` what does not fit at once.
"""

import asyncio
import math
from collections.abc import Callable, Generator
from copy import copy
from typing import TYPE_CHECKING, Final

from runguard.core.events import ModelCall
from runguard.core.money import NOTHING, UNITS
from runguard.engine.budgets import AccountLines, BudgetGroup, UnknownCap, reached_thresholds
from runguard.engine.charges import Charge, Denied, held_for_long, not_held_by, owners_of, worst_of
from runguard.engine.spending import scopes_of
from runguard.engine.waiting import Opening, Visit
from runguard.ledger.ledger import Hold, Refusal, Stale, StoreOutage, StoreReplacedError
from runguard.policy.settings import Policy
from runguard.pricing.rates import Rates, Unpriced

if TYPE_CHECKING:
    from runguard.engine.money import Accounts


# ---- Holding the worst case of a call on its budgets: ask the ledger, wait for other calls, ask for less

_LOOKS_S: Final = 1.0  # a waiting call looks at least this often, should a wake-up get lost with its loop
_FACTS_S: Final = 1.0  # until what was settled has reached a store
CLOCK_TRIES: Final = 5
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

    def __init__(self, accounts: "Accounts") -> None:
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
                        denied.group = denied.group or group_of(charge, denied)
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
        denied.group = group_of(charge, denied)
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
        for _ in range(CLOCK_TRIES):
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


def group_of(charge: Charge, denied: Denied) -> BudgetGroup:
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


# ---- A threshold that stops


def over_threshold(lines: AccountLines) -> Denied | None:
    """Return why a call is denied where a budget has reached a threshold that stops."""
    for one in reached_thresholds(lines):
        if one.threshold.action == "stop":
            refusal = Refusal(one.account, UNITS.index(one.status.unit), NOTHING, one.account.room)
            return Denied(refusal, one.group, fraction=one.threshold.percent)
    return None
