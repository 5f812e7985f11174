"""The bill: what every model call may cost, what it did cost, and on whose account.

``open`` reserves the worst case of a call on every budget that is about it; ``settle`` books what it took; ``release`` undoes a
call that never left. Who spent what is kept per agent, model and tool of each run, with or without a budget.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

from runguard.budget import NOTHING, UNITS, UNLIMITED, Amount, BudgetStatus, Scope, share_of, to_count, to_nano, to_usd, unit_reached
from runguard.charges import (
    LINES_KEPT,
    NO_LIMIT,
    OWNERS,
    Charge,
    Denied,
    Entry,
    Fired,
    Lines,
    Meter,
    Purse,
    Tally,
    add_tally,
    flat_limits,
    meters_of,
    parse_scope,
    scopes_of,
    split_by,
    status_of,
    statuses_of,
    totals,
    worst_of,
)
from runguard.errors import PolicyError
from runguard.events import ModelCall, RunInfo
from runguard.ledger import Account, Hold, Ledger, Refusal, Stale, StoreError, StoreOutage
from runguard.ledger.urls import open_ledger
from runguard.policy import Policy
from runguard.pricing import Pricing, Rates, Unpriced, Usage, normalise
from runguard.switch import Switch

_log: Final = logging.getLogger("runguard")
ASSUMED_OUTPUT: Final = 65_536  # of a model whose limit nobody knows
_TYPICAL_OUTPUT: Final = 1_024  # of a call that was cut off, before any of its kind was seen to end
_HISTORY_KEPT: Final = 10_000
_KEPT: Final = ("run", "session", "user", "app")
_MODELS_KEPT: Final = 1_024
_LOOKS_S: Final = 1.0  # a waiting call looks at least this often, should a wake-up get lost with its loop
_FACTS_S: Final = 1.0  # until what was settled has reached a store
_FOREVER: Final = float("inf")
_CLOCK_TRIES: Final = 5


class StepOut:
    """Awaited before anything is waited for, by a call that was asked for without an event loop: it goes on on one."""

    def __await__(self) -> Generator[None, None, None]:
        yield


OnFired = Callable[[Charge, Fired], None]


class Accounts:
    """One policy's budgets and prices over any number of runs."""

    def __init__(self, policy: Policy, clock: Callable[[], float], ledger: Ledger | None = None) -> None:
        self.policy, self.clock = policy, clock
        self.ledger: Ledger = ledger or open_ledger(policy.store, policy.store_timeout, policy.retention_days * 86_400)
        self.switch = Switch()
        self.outages: dict[str, int] = {"closed": 0, "open": 0}  # calls that met a store that was away, by what was done
        fallback = policy.on_unpriced if not isinstance(policy.on_unpriced, str) else None
        self.pricing = Pricing(policy.prices, policy.models, fallback)
        self.meters = meters_of(policy)
        self.on_extended: Callable[[list[BudgetStatus], list[str]], None] | None = None
        self.errors = 0  # amounts whose functions failed
        self.on_store: Callable[[str], None] | None = None  # told when the store goes away, and with "" when it is back
        self._is_away = False
        self._history: OrderedDict[str, Tally] = OrderedDict()
        self._typical: dict[str, int] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._purses: dict[str, Purse] = {}

    # ---- runs -------------------------------------------------------------------------------------------------------

    def begin(self, info: RunInfo) -> Purse:
        purse = Purse(info, flat_limits(info))
        self._purses[info.run] = purse
        return purse

    def end(self, purse: Purse) -> None:
        """The run is over: its figures join those of its session, user and app."""
        info = purse.info
        self._purses.pop(info.run, None)
        for own in purse.own:
            self.ledger.forget(own)
        with self._lock:
            purse.ended = True
            if not purse.tally:
                return
            for scope in ("", *scopes_of(info)):
                kept = self._history.setdefault(scope, {})
                self._history.move_to_end(scope)
                add_tally(kept, purse.tally)
            while len(self._history) > _HISTORY_KEPT:
                oldest = next(key for key in self._history if key)
                del self._history[oldest]

    # ---- before a call ----------------------------------------------------------------------------------------------

    def context_limit(self, model: str) -> int | None:
        """How many input tokens a request may have: the policy's word, or the model's window; None when nobody knows."""
        headroom = self.policy.context_headroom
        if self.policy.max_context_tokens is not None:
            return self.policy.max_context_tokens - headroom
        window = self.pricing.limits(model)[0]
        if window is None:
            self._tell_once(
                logging.INFO,
                f"window:{model}",
                "runguard.unknown_window: the context window of '%s' is not known; models={'%s': {'context_window': …}} tells it",
                model,
            )
            return None
        return max(window - headroom, 1)

    def max_output(self, model: str) -> int:
        limit = self.pricing.limits(model)[1]
        if limit is None:
            self._tell_once(
                logging.WARNING,
                f"output:{model}",
                "runguard.unknown_output_limit: '%s' is taken to answer with at most 65,536 tokens; models={'%s': {'max_output_tokens': …}} tells better",
                model,
            )
            return ASSUMED_OUTPUT
        return limit

    def _tell_once(self, level: int, mark: str, message: str, model: str) -> None:
        if mark not in self._told and len(self._told) < _MODELS_KEPT:
            self._told.add(mark)
            _log.log(level, message, model, model)

    def open_now(self, purse: Purse, event: ModelCall) -> Charge | None:
        """``open`` of the common case: a ledger in memory, nobody to wait for, no stop, and it fits. None: ask."""
        if self.switch.stops or self.ledger.is_shared:
            return None
        lines, within = self._own_lines(purse, event)
        rates = self.pricing.rates(event.model, event.at)
        if event.bound is None and lines.accounts:  # the most it may answer has to be found out, or its price is not known
            return None
        if lines.may_stop or (event.bound is not None and None in event.bound):
            return None
        output = event.max_output_tokens or 0
        charge = Charge(purse, event.agent, event.model, event.tool, rates, event.input_tokens, event.audio_tokens, output, event.at, event.lane, lines)
        charge.limited = event.max_output_tokens is not None
        charge.home, charge.within, charge.bound, charge.candidates = self, within, event.bound, event.candidates
        if lines.accounts:
            hold = self.ledger.hold_now(lines.accounts, worst_of(charge))
            if hold is None:
                return None
            charge.hold, charge.held = hold, hold.amount[0]
        with self._lock:
            purse.calls += 1
            purse.reserved += charge.held
        return charge

    async def open(self, purse: Purse, event: ModelCall, enforce: bool, stopped: Callable[[], bool]) -> tuple[Charge | None, Denied | None]:
        """Reserve the worst case of a call. When only other calls' holds stand in the way, wait for them, bounded.

        A charge, or why not; both where nothing is enforced: the call is made and billed, and what would have happened is told.
        """
        rates = self.pricing.rates(event.model, event.at)
        lines, within = self._own_lines(purse, event)
        output = event.max_output_tokens
        if output is None and event.bound is None and any(a.cap_usd < UNLIMITED or a.cap_tokens < UNLIMITED for a in lines.accounts):
            output = self.max_output(event.model)
        output = output or 0
        charge = Charge(purse, event.agent, event.model, event.tool, rates, event.input_tokens, event.audio_tokens, output, event.at, event.lane, lines)
        charge.limited, charge.candidates = event.max_output_tokens is not None, event.candidates
        charge.home, charge.within, charge.bound = self, within, event.bound
        if self.switch.stops and self.switch.of(scopes_of(purse.info)) is not None:
            await self.ledger.refresh()  # somebody may have taken it back
            if (stop := self.switch.of(scopes_of(purse.info))) is not None:
                return (None if enforce else self.uncounted(charge)), Denied(stop=stop)
        if within and enforce and (denied := self._stricter(purse, event)) is not None:
            return None, denied
        if not lines.accounts and not self.ledger.is_shared:
            purse.calls += 1
            return charge, None
        try:
            return await self._open(charge, event, enforce, stopped)
        except (StoreOutage, StoreError) as error:
            return self._without_store(charge, error, enforce)

    def _without_store(self, charge: Charge, error: Exception, enforce: bool) -> tuple[Charge | None, Denied | None]:
        """No account can be opened: no paid call without one, unless the policy goes on and books later."""
        self.outages[self.policy.on_outage] += 1
        self._store_is(str(error))
        if self.policy.on_outage == "closed":
            return (None if enforce else self.uncounted(charge)), Denied(outage=str(error))
        return self.uncounted(charge), None

    def _store_is(self, error: str) -> None:
        if self._is_away != bool(error):
            self._is_away = bool(error)
            if self.on_store is not None:
                self.on_store(error)

    def rates_of(self, charge: Charge, model: str) -> Rates | Unpriced:
        """The model that answered wins over the one that was asked, whose price stands for it where it has none."""
        if not model or model == charge.model:
            return charge.rates
        rates = self.pricing.rates(model, charge.at)
        return rates if isinstance(rates, Rates) else charge.rates

    def uncounted(self, charge: Charge) -> Charge:
        """A call that is made although nobody could hold anything for it: what it takes is booked all the same."""
        charge.hold = self.ledger.book(charge.lines.accounts) if charge.lines.accounts else None
        with self._lock:
            charge.purse.calls += 1
        return charge

    async def _open(self, charge: Charge, event: ModelCall, enforce: bool, stopped: Callable[[], bool]) -> tuple[Charge | None, Denied | None]:
        purse, lines, rates = charge.purse, charge.lines, charge.rates
        denied = None
        if isinstance(rates, Unpriced) and lines.in_usd and charge.bound is None and self.policy.on_unpriced == "refuse":
            denied = Denied(unpriced=rates)
        elif lines.may_stop and not self.ledger.is_shared:  # what a shared one says comes with the reservation
            denied = self._over_threshold(lines)
        if denied is not None and enforce:
            return None, denied
        result: Hold | Refusal | None = await self._reserve(charge, event)
        if isinstance(result, Refusal):
            denied = Denied(result)
            if enforce:
                result = await self._wait_or_lower(charge, event, denied, stopped)
                if result is None:
                    denied.meter = denied.meter or (self._meter_of(charge, denied) if denied.refusal is not None else None)
                    return None, denied
                denied = None
            else:
                denied.meter = self._meter_of(charge, denied)
                if not self._would_refuse(charge, event, result):
                    charge.doubt, denied = denied, None
                result = await self._reserve(charge, event, force=True)
        assert isinstance(result, Hold)
        if charge.lines.may_stop and (late := self._over_threshold(charge.lines)) is not None:  # by what the store has just told
            denied = late
            if enforce:
                self.ledger.release(result)
                return None, denied
        stop = self.switch.of(scopes_of(purse.info)) if self.switch.stops else None
        if stop is not None:  # told with the reservation
            denied = Denied(stop=stop)
            if enforce:
                self.ledger.release(result)
                return None, denied
        charge.hold, charge.held = result, result.amount[0]
        with self._lock:
            purse.calls += 1
            purse.reserved += charge.held
        return charge, denied

    async def _reserve(self, charge: Charge, event: ModelCall, *, force: bool = False) -> Hold | Refusal:
        """Ask the ledger; when a period is over by its clock, ask again with the accounts of the current one."""
        for _ in range(_CLOCK_TRIES):
            result = await self.ledger.reserve(charge.lines.accounts, worst_of(charge), force=force, ttl=self.policy.hold_seconds)
            if not isinstance(result, Stale):
                if self._is_away:
                    self._store_is("")
                return result
            charge.purse.lines.clear()
            charge.lines = self._own_lines(charge.purse, event, self.clock())[0]
        raise StoreOutage(f"{self.ledger.name}: its clock moves faster than it answers")

    def open_settled(self, purse: Purse, event: ModelCall) -> Charge:
        """The account of a call that nobody could be asked about before: nothing held, to be settled at once."""
        lines = self._lines(purse, event)
        charge = Charge(purse, event.agent, event.model, event.tool, self.pricing.rates(event.model, event.at), 0, 0, 0, event.at, event.lane, lines)
        return self.uncounted(charge)

    @staticmethod
    def _over_threshold(lines: Lines) -> Denied | None:
        """A budget that has reached a threshold which stops."""
        for account, meter, limits in zip(lines.accounts, lines.meters, lines.limits, strict=True):
            for thresholds, limit in zip(meter.thresholds, limits, strict=False) if meter.stops else ():
                for threshold in thresholds:
                    if threshold.action != "stop":
                        continue
                    unit = unit_reached(account.spent, share_of(limit, account.granted, threshold.percent))
                    if unit is not None:
                        return Denied(Refusal(account, unit, NOTHING, account.room, False, 0), meter, fraction=threshold.percent)
        return None

    @staticmethod
    def _meter_of(charge: Charge, denied: Denied) -> Meter:
        assert denied.refusal is not None
        lines = charge.lines
        return next(m for a, m in zip(lines.accounts, lines.meters, strict=True) if a is denied.refusal.account)

    async def _wait_or_lower(self, charge: Charge, event: ModelCall, denied: Denied, stopped: Callable[[], bool]) -> Hold | None:
        """Wait while that can help, then cap the answer to what the rest can pay, down to a useful minimum."""
        if event.no_loop:
            await StepOut()
        ledger, loop = self.ledger, asyncio.get_running_loop()
        patience = self.policy.max_wait_seconds
        if event.no_wait:  # those it would wait for cannot come back; what is on its way to a store can
            patience = min(patience, _FACTS_S if self.ledger.is_shared else 0.0)
        give_up = loop.time() + patience
        refusal = denied.refusal
        assert refusal is not None
        while not stopped():
            left = give_up - loop.time()
            if refusal.wait_helps and left > 0 and refusal.held[refusal.unit] > _held_around(refusal, ledger):
                await ledger.changed(refusal, min(left, _LOOKS_S))
                charge.bound = event.bound
                if stopped():
                    break
                charge.lines = self._own_lines(charge.purse, event, self.clock())[0]
                if (now_denied := self._over_threshold(charge.lines)) is not None:  # what was waited for reached a threshold that stops
                    denied.refusal, denied.meter, denied.unpriced, denied.fraction = (
                        now_denied.refusal,
                        now_denied.meter,
                        now_denied.unpriced,
                        now_denied.fraction,
                    )
                    return None
            elif charge.bound is not None:
                if not self._take_the_rest(charge, event, refusal):
                    break
            else:
                lowered = self._affordable(charge, refusal)
                if lowered is None:
                    denied.least = self.policy.min_output_tokens if self.policy.min_output_tokens < charge.max_output else 0
                    break
                charge.max_output, charge.lowered, charge.limited = lowered, True, True
            result = await self._reserve(charge, event)
            if isinstance(result, Hold):
                return result
            denied.refusal = refusal = result
        return None

    def _would_refuse(self, charge: Charge, event: ModelCall, refusal: Refusal) -> bool:
        """For a shadow, which cannot wait for other calls' holds nor ask for a shorter answer: what enforcing would come to."""
        if refusal.wait_helps:
            return False
        if charge.bound is not None:
            return not self._take_the_rest(replace(charge), event, refusal)
        return self._affordable(charge, refusal) is None

    @staticmethod
    def has_come_true(doubt: Denied) -> bool:
        """Whether more was spent in the end than the budget that had seemed too small allows."""
        refusal = doubt.refusal
        return refusal is not None and refusal.account.spent[refusal.unit] > refusal.account.caps[refusal.unit]

    @staticmethod
    def _take_the_rest(charge: Charge, event: ModelCall, refusal: Refusal) -> bool:
        """Nobody knows what the call may take, and it asked for the whole cap: what is left of it will do."""
        assert event.bound is not None
        usd, tokens = event.bound
        wanted, room = worst_of(charge), refusal.room
        if room[2] < 1 or (usd is None and wanted[0] > 0 and not room[0]) or (tokens is None and wanted[1] > 0 and not room[1]):
            return False
        charge.bound = (min(wanted[0], room[0]) if usd is None else usd), (min(wanted[1], room[1]) if tokens is None else tokens)
        return worst_of(charge) != wanted

    def _affordable(self, charge: Charge, refusal: Refusal) -> int | None:
        """The most output the rest can pay, or None when that is too little to be useful."""
        usd, tokens, calls = refusal.room
        output = charge.max_output
        if isinstance(charge.rates, Rates) and charge.lines.in_usd:
            output = min(output, charge.rates.affordable_output(usd, charge.input, charge.audio) // charge.candidates)
        output = min(output, (tokens - charge.input) // charge.candidates)
        least = min(self.policy.min_output_tokens, charge.max_output)
        if calls < 1 or output < least or output >= charge.max_output or output < 1:
            return None
        return output

    def _stricter(self, purse: Purse, event: ModelCall) -> Denied | None:
        """What a layer around holds is not held again, but it holds it under its own caps, or under none: ours may be lower."""
        held = {a.key: a for c in OWNERS.get() if not c.over and c.home is not self and c.home.ledger is self.ledger for a in c.lines.accounts}
        lines = self._lines(purse, event)
        for account, meter in zip(lines.accounts, lines.meters, strict=True):
            theirs = held.get(account.key)
            if theirs is None:
                continue
            due = (theirs.due_usd, theirs.due_tokens, theirs.due_calls)  # this call is in it
            unit = next((u for u in range(3) if due[u] > account.caps[u]), None)
            if unit is not None:
                return Denied(Refusal(account, unit, NOTHING, account.room, False, 0), meter)
        return None

    def _own_lines(self, purse: Purse, event: ModelCall, now: float | None = None) -> tuple[Lines, bool]:
        """The accounts that this layer has to hold: one layer owns a call, so what a layer around it holds is not held again."""
        lines, owners = self._lines(purse, event, now), OWNERS.get()
        if not owners:
            return lines, False
        around = [charge for charge in owners if not charge.over and charge.home is not self and charge.home.ledger is self.ledger]
        held = {account.key for charge in around for account in charge.lines.accounts}
        if not any(account.key in held for account in lines.accounts):
            return lines, bool(around)
        kept = [(a, m, limit) for a, m, limit in zip(lines.accounts, lines.meters, lines.limits, strict=True) if a.key not in held]
        accounts, meters, limits = zip(*kept, strict=True) if kept else ((), (), ())
        in_usd, may_stop = any(a.cap_usd < UNLIMITED for a in accounts), any(m.stops for m in meters)
        return Lines(tuple(accounts), tuple(meters), tuple(limits), in_usd, may_stop, lines.until), True

    def _lines(self, purse: Purse, event: ModelCall, now: float | None = None) -> Lines:
        key = (event.agent, event.model, event.tool)
        at = self.ledger.now(event.at if now is None else now)
        known = purse.lines.get(key)
        if known is not None and at < known.until:
            return known
        lines = self._find_lines(purse, event, at)
        if len(purse.lines) >= LINES_KEPT:
            purse.lines.clear()
        purse.lines[key] = lines
        return lines

    def _find_lines(self, purse: Purse, event: ModelCall, at: float) -> Lines:
        info = purse.info
        accounts: list[Account] = []
        meters: list[Meter] = []
        allowed: list[list[Amount]] = []
        until = _FOREVER
        for meter in self.meters:
            scope = Scope(
                meter.per.kind,
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
            found = self._account(meter, scope, at, purse.flat)
            if found is None:
                continue
            account, limits = found
            if account.ends is not None:
                until = min(until, account.ends)
            if any(kind == "run" for kind, _ in meter.per.parts):
                purse.own.add(account.scope)
            accounts.append(account)
            meters.append(meter)
            allowed.append(limits)
        in_usd, may_stop = any(a.cap_usd < UNLIMITED for a in accounts), any(m.stops for m in meters)
        return Lines(tuple(accounts), tuple(meters), tuple(allowed), in_usd, may_stop, until)

    def _account(self, meter: Meter, scope: Scope, at: float, flat: Amount | None = None) -> tuple[Account, list[Amount]] | None:
        key = meter.per.key(scope)
        if key is None:
            return None
        named = Scope(scope.kind, key, scope.app, scope.user, scope.session, scope.run, scope.agent, scope.model, scope.tool, scope.labels)
        try:
            limits = meter.limits(named, flat if meter.per.kind == "run" and meter.window is None else None)
        except Exception:
            # A cap that cannot be told is neither none nor zero; what follows is the policy's choice.
            self.errors += 1
            if self.policy.on_guard_error == "block":
                raise
            _log.exception("runguard.budget_function_failed: no amount for %s; on_guard_error=allow lets it go without this budget", key)
            return None
        usd, tokens, calls = (min(limit[unit] for limit in limits) for unit in range(3))
        if (usd, tokens, calls) == NO_LIMIT:
            return None
        name, begins, ends = self._key(meter, key, at)
        account = self.ledger.account(name, key, meter.window.text if meter.window else None, ends, (usd, tokens, calls), begins)
        account.alert = NOTHING if any(meter.thresholds) else NO_LIMIT  # found anew at the next settle
        return account, limits

    @staticmethod
    def _key(meter: Meter, key: str, at: float) -> tuple[str, float | None, float | None]:
        """An account's key, and when its period begins and ends."""
        if meter.window is None:
            return f"{key}{meter.suffix}#", None, None
        period, begins, ends = meter.window.bounds(at)
        return f"{key}{meter.suffix}#{period}", begins, ends

    # ---- after a call -----------------------------------------------------------------------------------------------

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        *,
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
        on_fired: "OnFired | None" = None,
        on_booked: Callable[[], None] | None = None,
    ) -> list[Fired]:
        """Book what a call took; told again, the later figure replaces the earlier.

        The model that answered wins over the one that was asked. ``nano``: what it cost, where somebody knows better than the price list.
        ``free``: the provider refused the call and billed nothing. Thresholds
        that fire go to ``on_fired``, once the ledger has booked it; without that, those known at once are returned. ``on_booked``: then.
        """
        rates = charge.rates
        if model and model != charge.model:
            answering = self.pricing.rates(model, charge.at)
            if isinstance(answering, Rates):
                rates = answering
            else:
                estimated = estimated or isinstance(rates, Rates)  # the price of the model that was asked stands for it
        entry = Entry(1, usage.input, usage.output, usage.cached, usage.thinking)
        if nano is not None:
            entry.nano, entry.estimated = nano, int(estimated)
        elif isinstance(rates, Rates):
            entry.nano = 0 if free else rates.cost(usage)
            entry.estimated = int(estimated or rates.estimated)
        else:
            entry.unpriced, entry.estimated = int(not free), int(estimated)
        amount: Amount = (entry.nano, usage.input + usage.output, 1)
        self._book(charge, entry, model or charge.model)
        if not estimated and not free and usage.output:
            self._learn_output(charge.model, usage.output)
        if charge.hold is None:
            return []
        fired: list[Fired] = []
        if self.ledger.is_shared:
            self.ledger.settle(charge.hold, amount, lambda: self._look(charge, fired, on_fired, on_booked))
            return fired
        self.ledger.settle(charge.hold, amount)
        if on_booked is not None:
            on_booked()
        for account in charge.lines.accounts:
            alert_usd, alert_tokens, alert_calls = account.alert
            if account.spent_usd >= alert_usd or account.spent_tokens >= alert_tokens or account.spent_calls >= alert_calls:
                self._look(charge, fired, on_fired)
                break
        return fired

    def _look(self, charge: Charge, fired: list[Fired], on_fired: "OnFired | None", on_booked: Callable[[], None] | None = None) -> None:
        """Whether what was booked reaches a threshold."""
        if on_booked is not None:
            on_booked()
        lines = charge.lines
        for account, meter, limits in zip(lines.accounts, lines.meters, lines.limits, strict=True):
            alert_usd, alert_tokens, alert_calls = account.alert
            if account.spent_usd >= alert_usd or account.spent_tokens >= alert_tokens or account.spent_calls >= alert_calls:
                for reached in self._fire(account, meter, limits):
                    fired.append(reached) if on_fired is None else on_fired(charge, reached)

    def _book(self, charge: Charge, entry: Entry, model: str) -> None:
        purse, before = charge.purse, charge.booked
        key = (charge.agent, model, charge.tool)
        with self._lock:
            if before is not None:
                old = purse.tally[charge.entry]
                old.add(before, -1)
                if not old.calls:
                    del purse.tally[charge.entry]
                purse.nano -= before.nano
                purse.unpriced -= before.unpriced
                purse.estimated -= before.estimated
            elif not charge.over:
                purse.reserved -= charge.held
            else:  # released, and left after all
                purse.calls += 1
            kept = purse.tally.get(key)
            if kept is None:
                if len(purse.tally) >= LINES_KEPT:  # names beyond that share one line: a run must not grow without bound
                    key = ("(others)", "(others)", "(others)")
                kept = purse.tally.setdefault(key, Entry())
            kept.count(entry)
            purse.nano += entry.nano
            if entry.unpriced or entry.estimated:
                purse.unpriced += entry.unpriced
                purse.estimated += entry.estimated
            if purse.ended:  # told after the end of its run, whose figures have moved on
                for scope in ("", *scopes_of(purse.info)):
                    kept_there = self._history.setdefault(scope, {})
                    if before is not None and charge.entry in kept_there:
                        kept_there[charge.entry].add(before, -1)
                    add_tally(kept_there, {key: entry})
            charge.booked, charge.entry, charge.over = entry, key, True

    def _fire(self, account: Account, meter: Meter, limits: list[Amount]) -> Iterable[Fired]:
        """The thresholds that are reached, each against its own budget; and when to look again."""
        following, granted = list(NO_LIMIT), account.granted
        for number, (thresholds, limit) in enumerate(zip(meter.thresholds, limits, strict=False)):
            for position, threshold in enumerate(thresholds):
                needed = share_of(limit, granted, threshold.percent)
                unit = unit_reached(account.spent, needed)
                if unit is None:
                    following = [min(now, need) for now, need in zip(following, needed, strict=True)]
                    continue
                if threshold.recurring:
                    following = [0, 0, 0]
                mark = f"{number}.{position}:{threshold.percent}:{threshold.action}"
                is_first = threshold.recurring or self.ledger.first(account, mark, threshold.percent, limit)
                if is_first is None:  # the store was away: look again with the next settlement
                    following = [0, 0, 0]
                elif is_first:
                    yield Fired(account, meter, threshold, status_of(account, unit, limit[unit] + account.granted[unit]))
        account.alert = (following[0], following[1], following[2])
        if account.granted != granted:  # extended meanwhile: what was re-armed must be found
            account.alert = NOTHING

    def release(self, charge: Charge) -> None:
        """The call never left: nothing was spent."""
        if charge.over:
            return
        charge.over = True
        with self._lock:
            charge.purse.reserved -= charge.held
            charge.purse.calls -= 1
        if charge.hold is not None:
            self.ledger.release(charge.hold)

    def guess(self, charge: Charge, streamed_tokens: int, streaming: bool) -> Usage:
        """What a call that left and never told its usage may have taken: its prompt, and what answers of that model are like."""
        output = streamed_tokens
        if not streaming:
            output = max(output, self._typical.get(charge.model, _TYPICAL_OUTPUT))
        if charge.max_output:
            output = min(output, charge.max_output * charge.candidates)
        return Usage(input=charge.input, output=output, audio=charge.audio)

    def _learn_output(self, model: str, output: int) -> None:
        typical = self._typical.get(model)
        if typical is None and len(self._typical) >= _MODELS_KEPT:
            return
        self._typical[model] = output if typical is None else (typical * 7 + output) // 8

    # ---- extending --------------------------------------------------------------------------------------------------

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
        accounts = [a for a in self._accounts_of(scope) if any(a.caps[u] < UNLIMITED for u in wanted)]
        if not accounts:
            units = " or ".join(UNITS[u] for u in wanted)
            counted = ", ".join(sorted({m.per.kind for m in self.meters})) or "nothing"
            raise PolicyError(
                f"extend({scope!r}): no budget limits {units} there; this policy's budgets count by {counted}. A trip's scope_id is a scope to extend"
            )
        for account in accounts:
            self.ledger.extend(account, more)
        moved = [(status, account.key) for account in accounts for status in statuses_of(account)]
        if self.on_extended is not None:
            self.on_extended([status for status, _ in moved], [key for _, key in moved])
        return [status for status, _ in moved]

    def _accounts_of(self, scope: str) -> list[Account]:
        found = self.ledger.find(scope)
        now = self.ledger.now(self.clock())  # as the store has just told it
        found = [a for a in found if a.ends is None or a.ends > now]
        kind, _, rest = scope.partition(":")
        parts = rest.split("/")
        if kind == "session" and len(parts) == 2 and not found:  # without the user, where only one can be meant
            same = [a for a in self.ledger.accounts() if a.scope.startswith(f"session:{parts[0]}/") and a.scope.endswith(f"/{parts[1]}")]
            if len({a.scope for a in same}) == 1:
                return [a for a in same if a.ends is None or a.ends > now]
        have = {a.key for a in found}
        for meter in self.meters:  # a scope that has spent nothing yet
            if meter.per.kind == kind and (named := self._scope_named(kind, parts)) is not None:
                key = meter.per.key(named)
                if key is None or self._key(meter, key, now)[0] in have:
                    continue  # the caps in force were told with more than the scope's name: not to be asked again
                purse = self._purses.get(named.run)
                made = self._account(meter, named, now, purse.flat if purse is not None else None)
                if made is not None:
                    if purse is not None:
                        purse.own.add(made[0].scope)
                    found.append(made[0])
        return found

    def _scope_named(self, kind: str, parts: list[str]) -> Scope | None:
        if kind != "run":
            return parse_scope(kind, parts)
        purse = self._purses.get(unquote(parts[0])) if len(parts) == 1 else None
        if purse is None:
            return None
        info = purse.info
        return Scope("run", "", info.app, info.user, info.session, info.run, labels=info.labels)

    # ---- looking in -------------------------------------------------------------------------------------------------

    def budgets(self, scope: str | None = None, *, as_known_here: bool = False) -> list[BudgetStatus]:
        """Every budget as it stands. ``as_known_here`` asks no store: what it last told."""
        asked = self.ledger.known if as_known_here else self.ledger.accounts
        accounts = asked() if scope is None or as_known_here else self.ledger.find(scope)
        now = self.ledger.now(self.clock())  # as the store has just told it
        return [status for a in accounts if a.ends is None or a.ends > now for status in statuses_of(a)]

    def spend_of(self, purse: Purse) -> dict[str, Any]:
        """One run's figures, JSON-ready but for its dollars."""
        with self._lock:
            tally = {key: replace(entry) for key, entry in purse.tally.items()}
        return {**totals(tally.values()), "by_agent": split_by(tally, 0), "by_model": split_by(tally, 1), "by_tool": split_by(tally, 2)}

    @staticmethod
    def record_of(charge: Charge) -> dict[str, Any]:
        """What one call took, for the records: numbers and names, no text of anybody. A later record with the same id replaces it."""
        entry, (agent, model, tool) = charge.booked or Entry(), charge.entry
        facts = {
            "id": charge.hold.id if charge.hold is not None else "",
            "agent": agent,
            "model": model,
            "tool": tool,
            "app": charge.purse.info.app,
            "user": charge.purse.info.user,
            "session": charge.purse.info.session,
            "input": entry.input,
            "output": entry.output,
            "cached": entry.cached,
        }
        unknown = {"estimated": True} if entry.estimated else {}
        return {**facts, **unknown, "usd": None if entry.unpriced else str(to_usd(entry.nano))}

    def spend(self, scope: str | None = None) -> dict[str, Any]:
        """What was spent, in all and per agent, model and tool. A scope as budgets name it, or None for everything."""
        if scope is not None and (not isinstance(scope, str) or scope.partition(":")[0] not in _KEPT):
            raise PolicyError(f"spend({scope!r}): give a scope such as 'user:app/alice'; figures are kept by {', '.join(_KEPT)}")
        total: Tally = {}
        reserved = 0
        with self._lock:
            add_tally(total, self._history.get(scope or "", {}))
            for purse in list(self._purses.values()):
                if scope is None or scope in scopes_of(purse.info):
                    add_tally(total, purse.tally)
                    reserved += purse.reserved
        return {
            **totals(total.values()),
            "reserved_usd": to_usd(reserved),
            "by_agent": split_by(total, 0),
            "by_model": split_by(total, 1),
            "by_tool": split_by(total, 2),
        }


def _held_around(refusal: Refusal, ledger: Ledger) -> int:
    """What the calls around this one hold on the account that refuses: they cannot come back before it."""
    unit, key = refusal.unit, refusal.account.key
    holds = [charge.hold for charge in OWNERS.get() if not charge.over and charge.hold is not None and charge.home is not None and charge.home.ledger is ledger]
    return sum(hold.amount[unit] for hold in holds if any(account.key == key for account in hold.accounts))
