"""Prices of tools in a recording: what the policy says they cost, or what the recording says was booked."""

from collections.abc import Callable, Coroutine
from typing import Any

from runguard.conductor.guard import Guard
from runguard.conductor.runs import Run
from runguard.conductor.tool_prices import bound_of
from runguard.core.decision import Decision
from runguard.core.events import ToolCall
from runguard.outlets.journal import Entry


class ReplayedPrices:
    """The priced tool calls of one player.

    A journal holds no arguments and no answers: where this policy has no fixed price, what was booked then counts.
    """

    def __init__(self, guard: Guard, on_paid: Callable[[str, int, bool], None]) -> None:
        """``on_paid`` is called with the lane, the nano-USD and whether they are an estimate."""
        self._guard, self._on_paid = guard, on_paid
        self._called: dict[str, ToolCall] = {}  # of a journal, until it is known what they cost
        guard.tool_prices.on_paid = on_paid

    def called(self, run: Run, event: ToolCall, args: object) -> None:
        """A call of a recorded session. The guard books its price when it sees the answer."""
        if self._guard.tools.has_prices:
            drive_now(self._guard.reserve_tool(run, event, args))

    def unjudged(self, tool: str, lane: str, args: object) -> None:
        """A call after the stop: the guard does not see it, and it is part of the bill."""
        rule = self._guard.tool_rule(tool) if self._guard.tools.has_prices else None
        if rule is not None and rule.price is not None:
            self._on_paid(lane, bound_of(rule, args)[0] or 0, callable(rule.price))

    # ---- a journal --------------------------------------------------------------------------------------------------

    def noted(self, run: Run, event: ToolCall, *, is_over: bool) -> None:
        if not self._has_fixed_price(event.tool):
            self._called[event.id] = event
        elif is_over:
            self.unjudged(event.tool, event.lane, None)
        else:
            self.called(run, event, None)

    def held(self, run: Run, entry: Entry) -> None:
        event, bound = self._called.get(str(entry.get("id"))), entry["bound"]
        if event is not None:
            drive_now(self._guard.tool_prices.hold(run, event, bound, bound))

    def paid(self, run: Run, entry: Entry) -> None:
        call_id, nano, estimated = str(entry.get("id")), entry["nano"], bool(entry.get("estimated"))
        event = self._called.pop(call_id, None)
        if run.bills is not None and call_id in run.bills.open:
            if event is None:
                self._guard.settle_tool(run, call_id, None, None)
            else:
                self._guard.tool_prices.settle_at(run, call_id, nano, estimated=estimated)
        elif not self._has_fixed_price(str(entry.get("tool") or "")):
            self._on_paid(event.lane if event is not None else "", nano, estimated)

    def not_made(self, run: Run, entry: Entry) -> None:
        self._called.pop(str(entry.get("id")), None)
        self._guard.release_tool(run, str(entry.get("id")))

    def _has_fixed_price(self, tool: str) -> bool:
        rule = self._guard.tool_rule(tool)
        return rule is not None and rule.price is not None and not callable(rule.price)


def drive_now(waiting: Coroutine[Any, Any, Decision]) -> Decision:
    """Run a coroutine that has nothing to wait for: accounts in memory, shadow mode."""
    try:
        waiting.send(None)
    except StopIteration as done:
        decision: Decision = done.value
        return decision
    waiting.close()
    raise RuntimeError("a reservation in memory had to wait")
