"""After a call: its price is booked, its hold is settled or released, and thresholds fire."""

import json
from collections.abc import Callable
from functools import partial
from itertools import chain

from runguard.accounting.burn_rate import BurnWatch
from runguard.accounting.charges import AccountLines, Charge, Fired
from runguard.accounting.expectations import Expectations
from runguard.accounting.figures import Entry
from runguard.accounting.spending import Earlier, Spending, record_of
from runguard.accounting.thresholds import newly_reached
from runguard.core.money import NOTHING, Amount
from runguard.ledger.ledger import Hold, Ledger, Record
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Unpriced, Usage

OnFired = Callable[[Charge, Fired], None]


class Settlement:
    """Settles on one ledger, with one price book."""

    burn_watch: BurnWatch

    def __init__(self, ledger: Ledger, pricing: Pricing, spending: Spending, expectations: Expectations) -> None:
        self.ledger, self.pricing, self.spending, self.expectations = ledger, pricing, spending, expectations

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
        *,
        on_fired: OnFired | None = None,
        on_booked: Callable[[], None] | None = None,
    ) -> list[Fired]:
        """Book the usage of a call; a later report replaces the earlier one.

        The model that answered wins over the one that was asked. ``nano``: what it cost, where that is
        known without the price list.
        ``free``: the provider refused the call and billed nothing. Thresholds that fire go to ``on_fired``,
        once the ledger has booked it; without that, those known at once are returned. ``on_booked``: then.

        A fault of ours on the way is raised when nothing is held any more.
        """
        booked, lines = charge.booked, charge.lines
        before = (booked, charge.entry) if booked is not None else None
        entry: Entry | None = None
        fault: Exception | None = None
        fired: list[Fired] = []
        try:
            entry = self._entry(charge, usage, model, nano, estimated, free)
            self.spending.book(charge, entry, model or charge.model)
        except Exception as error:
            fault = error
            self.spending.give_up(charge)
        hold = charge.hold
        if hold is not None:
            amount = (
                (entry.nano, entry.input + entry.output, entry.calls) if entry is not None else _share(charge, usage)
            )
            try:
                if self.ledger.is_shared:
                    self.ledger.settle(
                        hold,
                        amount,
                        partial(self._look, charge, fired, on_fired, on_booked),
                        self._record(charge, before),
                        may_wait=on_booked is None and not lines.may_burn and not charge.is_tool,
                    )
                else:
                    self.ledger.settle(hold, amount)
                    if on_booked is not None:
                        on_booked()
                    if lines.may_burn or _reaches_alert(lines):
                        self._look(charge, fired, on_fired)
            except Exception as error:
                fault = fault or error
                self._close_hold(hold, amount)
        if fault is not None:
            raise fault
        if not estimated and not free and usage.output:
            self.expectations.learn(charge.model, usage.output)
        return fired

    def _entry(self, charge: Charge, usage: Usage, model: str, nano: int | None, estimated: bool, free: bool) -> Entry:
        """What a call took, in tokens and at its price."""
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
        """The record of a settlement. A call that a layer around this one owns is recorded there."""
        if charge.booked is None or charge.around:
            return None
        return "call", charge.run_costs.info.run, json.dumps(record_of(charge, before))

    def _close_hold(self, hold: Hold, amount: Amount, record: Record | None = None) -> None:
        """After a fault: settle once more, or give it back when the ledger cannot settle.

        A hold that stays would keep every later call waiting.
        """
        if hold.is_open:
            try:
                self.ledger.settle(hold, amount, None, record)
            except Exception:
                self.ledger.release(hold)

    def close(self, charge: Charge, usage: Usage | None = None) -> None:
        """After a fault: book an estimate, which is what was held, or its share where the usage is known."""
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

    def _look(
        self, charge: Charge, fired: list[Fired], on_fired: OnFired | None, on_booked: Callable[[], None] | None = None
    ) -> None:
        """Whether what was booked reaches a threshold, or a budget is spent too fast."""
        if on_booked is not None:
            on_booked()
        burning = self.burn_watch.look(charge.lines) if charge.lines.may_burn else ()
        for reached in chain(newly_reached(charge.lines, self.ledger), burning):
            fired.append(reached) if on_fired is None else on_fired(charge, reached)

    def rates_of(self, charge: Charge, model: str) -> Rates | Unpriced:
        """Return the model that answered; if it has no price, use the price of the requested one."""
        if not model or model == charge.model:
            return charge.rates
        rates = self.pricing.rates(model, charge.at)
        return rates if isinstance(rates, Rates) else charge.rates

    def release(self, charge: Charge) -> None:
        """The call was never sent: nothing was spent."""
        if charge.over:
            return
        try:
            if charge.hold is not None:
                self._free(charge.hold)
        finally:
            try:
                self.spending.released(charge)
            finally:
                self.spending.give_up(charge)

    def _free(self, hold: Hold) -> None:
        try:
            self.ledger.release(hold)
        except Exception:
            self.ledger.settle(hold, NOTHING)
            raise


def _reaches_alert(lines: AccountLines) -> bool:
    """Whether some account has spent as much as its next threshold."""
    for account in lines.accounts:
        usd, tokens, calls = account.alert
        if account.spent_usd >= usd or account.spent_tokens >= tokens or account.spent_calls >= calls:
            return True
    return False


def _share(charge: Charge, usage: Usage) -> Amount:
    """What a call took of what was held for it, by its tokens alone: for want of a price."""
    tokens, most = usage.input + usage.output, charge.input + charge.max_output * charge.candidates
    return (charge.held * min(tokens, most) // most if most else charge.held), tokens, 0 if charge.is_tool else 1
