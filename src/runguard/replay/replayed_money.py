"""Prices of tools in a recording, and what its model calls would have cost on a cheaper model."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from runguard.core.decision import Decision
from runguard.core.events import ModelCall, ToolCall
from runguard.engine.downgrade import Downgrades
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.engine.tools import bound_of
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.replay.results import RunResult
from runguard.reporting.journal import Entry


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


class ReplayedSwitches:
    """The switches of one recorded run. The recording goes on with its own models, so the saving is an estimate."""

    def __init__(self, downgrades: Downgrades, pricing: Pricing, result: RunResult) -> None:
        self._downgrades, self._pricing, self._result = downgrades, pricing, result
        self._chosen: dict[tuple[str, str], str] = {}  # by lane and agent: the model of its last call

    def asked(self, run: Run, event: ModelCall) -> None:
        """A recorded model call. Recordings hold answered calls, so every point is a safe one."""
        chosen = self._downgrades.choose(run, event, lambda: False, lambda model: "")
        before = self._chosen.get((event.lane, event.agent), "")
        self._chosen[event.lane, event.agent] = chosen
        event.cheaper = chosen, chosen != before

    def paid(self, event: ModelCall, usage: Usage, nano: int) -> None:
        """The first call on another model finds no cache there; later ones read as much from it as in the recording."""
        model, is_first = event.cheaper or ("", False)
        rates = self._pricing.rates(model, event.at) if model else None
        if not isinstance(rates, Rates):
            return
        if is_first:
            usage = replace(usage, cached=0, cached_audio=0, cache_write=usage.cache_write + usage.cached)
        self._result.switched.model_calls += 1
        self._result.switched.tokens += usage.input + usage.output
        self._result.switched.nano += nano - rates.cost(usage)
