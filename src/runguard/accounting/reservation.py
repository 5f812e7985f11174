"""Holding the worst case of a call on its budgets: ask the ledger, wait for other calls, ask for less."""

import asyncio
from collections.abc import Callable, Generator
from copy import copy
from typing import Final

from runguard.accounting.budget_groups import BudgetGroup, scopes_of
from runguard.accounting.charges import Charge, Denied, UnknownCap, worst_of
from runguard.accounting.lookup import AccountFinder
from runguard.accounting.nested_guards import held_for_long, not_held_by
from runguard.accounting.thresholds import over_threshold
from runguard.accounting.waiting_calls import Opening, RoomWaits, Visit
from runguard.core.events import ModelCall
from runguard.ledger.ledger import Hold, Ledger, Refusal, Stale, StoreOutage, StoreReplacedError, Switch
from runguard.policy.settings import Policy
from runguard.pricing.rates import Rates, Unpriced

_LOOKS_S: Final = 1.0  # a waiting call looks at least this often, should a wake-up get lost with its loop
_FACTS_S: Final = 1.0  # until what was settled has reached a store
_CLOCK_TRIES: Final = 5


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
    """Reserves on one ledger, under one policy."""

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        finder: AccountFinder,
        switch: Switch,
        on_store: Callable[[Exception | None], None],
        waits: RoomWaits,
    ) -> None:
        self._policy, self._ledger, self._finder, self._switch = policy, ledger, finder, switch
        self._on_store = on_store  # called when the store goes away or is replaced, and with None when it is back
        self._waits = waits
        self._is_away = self._is_replaced = False
        # charges that stay open for as long as their run, by their identity: no call waits for them
        self.standing: dict[int, Charge] = {}

    async def reserve(
        self, charge: Charge, event: ModelCall, enforce: bool, stopped: Callable[[], bool]
    ) -> tuple[Charge | None, Denied | None]:
        """The charge with its hold, or why not; both where nothing is enforced. Raises UnknownCapError."""
        lines, rates = charge.lines, charge.rates
        denied = None
        if (
            isinstance(rates, Unpriced)
            and lines.in_usd
            and charge.bound is None
            and self._policy.on_unpriced == "refuse"
        ):
            denied = Denied(unpriced=rates)
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
                        denied.group = denied.group or _meter_of(charge, denied)
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
        """In shadow mode the call is made. Return its hold, and the refusal where an enforcing guard would refuse."""
        left = self._waits.patience
        while charge.lines.names and (opening := self._waits.opening(charge.lines, refusal, left)) is not None:
            if not opening.fits:
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
        denied.group = _meter_of(charge, denied)
        if not would_refuse(charge, event, refusal, self._policy.min_output_tokens):
            charge.possible_refusal = denied
            return await self._ask(charge, event, force=True), None
        return await self._ask(charge, event, force=True), denied

    def _denied_meanwhile(self, charge: Charge) -> Denied | None:
        """What the store reported with the reservation: a threshold that stops was reached, or the kill switch was
        thrown.
        """
        late = over_threshold(charge.lines) if charge.lines.may_stop else None
        stop = self._switch.of(scopes_of(charge.run_costs.info)) if self._switch.stops else None
        return late if stop is None else Denied(stop=stop)

    async def _ask(self, charge: Charge, event: ModelCall, *, force: bool = False) -> Hold | Refusal:
        """Ask the ledger; when a period is over by its clock, ask again with the accounts of the current one."""
        for _ in range(_CLOCK_TRIES):
            result = await self._ledger.reserve(
                charge.lines.accounts, worst_of(charge), force=force, ttl=self._policy.hold_seconds
            )
            if not isinstance(result, Stale):
                if self._is_away:
                    self._is_back(result)
                return result
            charge.run_costs.lines.clear()
            self._find_again(charge, event)
        raise StoreOutage(f"{self._ledger.name}: its clock moves faster than it answers")

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
            opening = visit.opens(refusal) if visit is not None else None
            is_open = charge.bound is not None and None in charge.bound  # it takes what is left
            if visit is not None and opening is None:
                visit.step_aside(refusal)
            if visit is not None and opening is not None and opening.fits and not is_open:
                if await self._for_room(visit, refusal, opening, charge, event, denied):
                    return None
            elif (
                refusal.wait_helps
                and left > 0
                and refusal.held[refusal.unit] > held_for_long(refusal, ledger, list(self.standing.values()))
            ):
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
                lowered = affordable_output(charge, refusal, self._policy.min_output_tokens)
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
        """After a wait: find the accounts of now. Return whether one of them has reached a threshold that stops."""
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
            self._on_store(error)


def _meter_of(charge: Charge, denied: Denied) -> BudgetGroup:
    assert denied.refusal is not None
    lines = charge.lines
    return next(m for a, m in zip(lines.accounts, lines.groups, strict=True) if a is denied.refusal.account)


# ---- a call that does not fit ---------------------------------------------------------------------------------------


def affordable_output(charge: Charge, refusal: Refusal, useful: int) -> int | None:
    """The most output the rest can pay, or None when that is less than is ``useful``."""
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
    """What the call may take is not known, and it asked for the whole cap: what is left will do, if it is as much as
    the call needs at least.
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
    """For a shadow, which cannot wait for other calls' holds nor ask for a shorter answer: what enforcing would come
    to.
    """
    if refusal.wait_helps:
        return False
    if charge.bound is not None:
        return not take_the_rest(copy(charge), event, refusal)
    return affordable_output(charge, refusal, useful) is None
