"""The price of a tool call: reserved before the tool runs, settled when it has answered.

A fixed price is booked as it is, also when the tool raised: the call was made. A price that is a function is reserved
at its ``price_bound`` and settled at what the function returns for the arguments and the answer; a tool that raised
shows it the exception. A call that was not executed costs nothing.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from runguard.accounting.accounts import Accounts
from runguard.accounting.charges import Charge, Denied
from runguard.accounting.refusals import finding_of
from runguard.conductor.deciding import Deciding, stop_in_force
from runguard.conductor.runs import Lane, Run
from runguard.conductor.settling import Settling
from runguard.conductor.tool_bills import Bill, ToolBills
from runguard.core.decision import ALLOW, Action, Decision, Finding
from runguard.core.events import Answer, Outcome, ToolCall, ToolPayment
from runguard.core.money import NANO, UNLIMITED, fault_of_dollars
from runguard.policy.tool_rules import ToolRule
from runguard.policy.tools import Tools
from runguard.pricing.rates import Usage

_log: Final = logging.getLogger("runguard")
_BLOCK: Final = Action.BLOCK
_NOT_EXECUTED: Final = frozenset({Outcome.REFUSED, Outcome.UNKNOWN_TOOL})


class ToolPrices:
    """Reserves and settles the prices of one guard's tools."""

    def __init__(
        self,
        clock: Callable[[], float],
        accounts: Accounts,
        tools: Tools,
        deciding: Deciding,
        settling: Settling,
        give_up: Callable[[Run, ToolCall], None],
    ) -> None:
        self._clock, self._accounts, self._tools, self._deciding = clock, accounts, tools, deciding
        self._settling, self._give_up = settling, give_up
        self.is_used = False  # some tool call was paid
        # called with the lane of a paid call, its nano-USD and whether they are an estimate
        self.on_paid: Callable[[str, int, bool], None] | None = None

    async def reserve(
        self, run: Run, event: ToolCall, args: object, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        """Permission for a tool call that ``check`` has allowed. A tool without a price has it at once.

        With permission, the call is settled by ``settle`` or given back by ``release``.
        """
        rule = self._tools.rule(event.tool)
        if rule is None or rule.price is None:
            return ALLOW
        bound, fault = bound_of(rule, args)
        if bound is None:
            decision = self._without_bound(run, event, fault)
            if decision.enforced and decision.action >= _BLOCK:
                return decision
            bound = 0
        return await self.hold(run, event, rule.price, bound, no_loop=no_loop, no_wait=no_wait)

    async def hold(
        self, run: Run, event: ToolCall, price: Any, bound: int, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        lane = run.lane(event.lane)
        payment = ToolPayment(event.run, event.lane, event.agent, event.at, tool=event.tool, bound=(bound, 0))
        payment.no_loop, payment.no_wait = no_loop, no_wait
        denied: Denied | None = None
        charge = self._accounts.open_now(run.run_costs, payment)
        if charge is None:
            try:
                charge, denied = await self._accounts.open(
                    run.run_costs, payment, self._deciding.enforces, lambda: _stopped(run, lane) is not None
                )
            except BaseException:
                self._take_back(run, event)
                raise
        if charge is None:
            assert denied is not None
            if (trip := _stopped(run, lane)) is not None:
                self._take_back(run, event)
                return stop_in_force(trip)
            return self._refuse(run, event, finding_of(denied, payment, self._accounts.ledger.name), denied)
        bills = run.bills = run.bills or ToolBills()
        self.is_used = True
        charge.journal = run.journal
        bills.open[event.id] = Bill(charge, event.tool, price, bound)
        if run.journal is not None:
            base = {"k": "tool_hold", "t": event.at, "l": event.lane, "a": event.agent}
            run.journal.add(base | {"tool": event.tool, "id": event.id, "bound": bound})
        late = self._too_late(run, event)
        if late is not None:
            self.release(run, event.id)
            self._take_back(run, event)
            return self._deciding.decide(run, lane, event, late)
        if denied is not None:  # in shadow mode
            return self._refuse(run, event, finding_of(denied, payment, self._accounts.ledger.name), denied)
        return ALLOW

    def charge_of(self, run: Run, call_id: str) -> Charge | None:
        """What is held for a call."""
        bill = run.bills.open.get(call_id) if run.bills is not None else None
        return bill.charge if bill is not None else None

    def settle(self, run: Run, call_id: str, args: object, answer: object) -> None:
        """The tool was executed. ``answer``: what it returned, or the exception that it raised."""
        bill = run.bills.open.pop(call_id, None) if run.bills is not None else None
        if bill is None:
            return
        nano, estimated = bill.bound, False
        if callable(bill.price):
            value, fault = _dollars(bill.price, args, answer)
            if value is None:
                nano, estimated = bill.bound, True
                _log.warning(
                    "runguard.tool_price_failed: the price function of tool %r %s; its price_bound is booked",
                    bill.tool,
                    fault,
                )
            else:
                nano = value
        self.book(bill.charge, call_id, nano, estimated=estimated)

    def settle_unknown(self, run: Run, call_id: str) -> None:
        """The tool was executed and never answered."""
        bill = run.bills.open.get(call_id) if run.bills is not None else None
        if bill is not None:
            self.settle_at(run, call_id, bill.bound, estimated=callable(bill.price))

    def settle_at(self, run: Run, call_id: str, nano: int, *, estimated: bool) -> None:
        """The tool was executed, and what it cost is known."""
        bill = run.bills.open.pop(call_id, None) if run.bills is not None else None
        if bill is not None:
            self.book(bill.charge, call_id, nano, estimated=estimated)

    def book(self, charge: Charge, call_id: str, nano: int, *, estimated: bool) -> None:
        self._settling.settle(charge, Usage(), nano=nano, estimated=estimated)
        if self.on_paid is not None:
            self.on_paid(charge.lane, nano, estimated)
        journal = charge.journal
        if journal is not None:
            entry = {"k": "tool_paid", "t": self._clock(), "tool": charge.tool, "id": call_id, "nano": nano}
            journal.add(entry | ({"estimated": True} if estimated else {}))

    def release(self, run: Run, call_id: str) -> None:
        """The tool was not executed."""
        bill = run.bills.open.pop(call_id, None) if run.bills is not None else None
        if bill is None:
            return
        self._settling.release(bill.charge)
        if run.journal is not None:
            run.journal.add({"k": "tool_back", "t": self._clock(), "id": call_id})

    def book_unseen(self, run: Run, lane: str, agent: str, answer: Answer) -> None:
        """A tool with a price was executed before anything could be reserved for it: book its price."""
        rule = self._tools.rule(answer.tool)
        if rule is None or rule.price is None:
            return
        payment = ToolPayment(run.info.run, lane, agent, self._clock(), tool=answer.tool)
        charge = self._accounts.open_settled(run.run_costs, payment)
        charge.journal = run.journal
        bills = run.bills = run.bills or ToolBills()
        bills.open[answer.id] = Bill(charge, answer.tool, rule.price, bound_of(rule, answer.args)[0] or 0)
        self.settle(run, answer.id, answer.args, answer.value)

    def close(self, run: Run, answer: Answer) -> None:
        """An answer of a call that is still open has arrived: its price, or nothing where it was not executed."""
        if run.bills is None or answer.id not in run.bills.open:
            return
        if answer.outcome in _NOT_EXECUTED:
            self.release(run, answer.id)
        else:
            self.settle(run, answer.id, answer.args, answer.value)

    def end(self, run: Run) -> None:
        """The run is over, and no answer came: the calls were made, and what they cost is not known."""
        if run.bills is not None:
            for call_id in list(run.bills.open):
                self.settle_unknown(run, call_id)

    def _without_bound(self, run: Run, event: ToolCall, fault: str) -> Decision:
        """What a call may cost is not known. Where dollars are limited, it is refused."""
        payment = ToolPayment(event.run, event.lane, event.agent, event.at, tool=event.tool)
        lines = self._accounts.account_lines(run.run_costs, payment)
        if all(account.cap_usd >= UNLIMITED for account in lines.accounts):
            return ALLOW
        return self._refuse(run, event, _unknown_price(event, fault), None)

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def _refuse(self, run: Run, event: ToolCall, finding: Finding, denied: Denied | None) -> Decision:
        """No budget holds the price: refuse this call. Asking again in a later response stops, and so does whatever
        stops a model call: the kill switch, an outage, an unknown cap.
        """
        if denied is not None and denied.refusal is not None and not denied.fraction:
            bills = run.bills = run.bills or ToolBills()
            before = bills.refused.setdefault(event.tool, event.batch)
            is_first = not event.batch or before == event.batch
            finding = replace(finding, tool=event.tool, key=f"{event.tool}:{finding.key}")
            if is_first:
                finding = replace(finding, action=_BLOCK, scope="call")
        decision = self._deciding.decide(run, run.lane(event.lane), event, finding)
        if decision.enforced and decision.action >= _BLOCK:
            self._take_back(run, event)
        return decision

    def _take_back(self, run: Run, event: ToolCall) -> None:
        """``check`` has counted the call and claimed its side effect. It is not made."""
        run.spend.tool_calls -= 1
        self._give_up(run, event)

    def _too_late(self, run: Run, event: ToolCall) -> Finding | None:
        if run.deadline is None or not self._deciding.enforces:
            return None
        return run.deadline.observe(replace(event, at=max(event.at, self._clock())))


def _stopped(run: Run, lane: Lane) -> Any:
    return run.stopped or lane.stop_in_force()


def bound_of(rule: ToolRule, args: object) -> tuple[int | None, str]:
    """The most that a call may cost in nano-USD; None with the reason where that cannot be known."""
    bound = rule.price_bound if callable(rule.price) else rule.price
    return _dollars(bound, args) if callable(bound) else (_nano(bound), "")


def _dollars(function: Callable[..., Any], *given: object) -> tuple[int | None, str]:
    """What a function of the user returns, in nano-USD; None with what is wrong with it."""
    try:
        value = function(*given)
    except Exception as error:
        return None, f"raised {type(error).__name__}"
    fault = fault_of_dollars(value, 0)
    return (None, f"returned no price ({fault})") if fault else (_nano(value), "")


def _nano(dollars: object) -> int:
    """Rounded up: a price is never lower than it was given. By integers, which no decimal context rounds."""
    numerator, denominator = Decimal(str(dollars)).as_integer_ratio()
    return -(-numerator * NANO // denominator)


def _unknown_price(event: ToolCall, fault: str) -> Finding:
    detail = f"the price_bound function of tool '{event.tool}' {fault}"
    return Finding("unpriced", _BLOCK, 1, 0, "tools without a price", "call", event.tool, event.tool, detail)
