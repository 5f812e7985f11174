"""The tool calls of one agent: checked before they run, paid for, and shown to the rules batch by batch.

``AgentRun.tools`` is one. ``agent_run`` says in which order an adapter calls its methods.
"""

import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from runguard.adapters.ending_conditions import EndingConditions
from runguard.adapters.layers import InsideTool, Layer, Place, paid_around
from runguard.adapters.tool_calls import NOT_EXECUTED, OpenCall, ToolUse, left_out
from runguard.adapters.without_loop import drive_layers, in_event_loop
from runguard.core.decision import ALLOW, Action, Decision, Trip
from runguard.core.events import Outcome, ToolCall
from runguard.engine.guard import Guard

BATCHES: Final = itertools.count(1)


class RunTools:
    """The tool calls of one ``AgentRun``. ``refused``: no tool of the run may be executed."""

    def __init__(
        self, guard: Guard, layers: tuple[Layer, ...], agent: str, depth: int, ending: EndingConditions, refused: bool
    ) -> None:
        self._guard, self._layers, self.agent, self._depth = guard, layers, agent, depth
        self._ending, self._refused = ending, refused
        self.lock = threading.RLock()
        self._open: dict[str, OpenCall] = {}
        self._batch = ""

    def asked_for(self, calls: Sequence[ToolUse]) -> None:
        """The tool calls of the newest model response: one batch, however many there are."""
        with self.lock:
            self._batch = str(next(BATCHES))
            self._open = {use.id: OpenCall(use, self._batch) for use in calls}

    def take_answered(self) -> list[OpenCall]:
        """The calls that have ended since the last model call. They are reported once; the others are forgotten."""
        calls, self._open = [call for call in self._open.values() if call.is_over], {}
        return calls

    # ---- before a call ----------------------------------------------------------------------------------------------

    async def check(self, use: ToolUse) -> str | None:
        """May this tool be executed? None, or what the model gets instead of an answer."""
        return await self._check(use, no_loop=False)

    def check_now(self, use: ToolUse) -> str | None:
        """``check`` for callers without an event loop."""
        make = partial(self._check, use, no_loop=True)
        return drive_layers(self._layers, self._ending, make, lambda _: self._not_executed(self._call(use)))

    async def _check(self, use: ToolUse, *, no_loop: bool) -> str | None:
        call = self._call(use)
        if self._refused:
            call.refuse()
            return NOT_EXECUTED
        passed: list[tuple[Layer, ToolCall]] = []  # layers that have allowed the call
        for layer in self._layers:
            guard, run, lane = layer
            try:
                once = guard.tools.once_identity(use.tool, use.args)
                if once or guard.breakers.get(use.tool) is not None:
                    await guard.prepare_tool(run, use.tool, once, call.key)
                fingerprint = guard.fingerprint(use.tool, use.args)
                call.seen.append((layer, fingerprint, once))
                at = (run.info.run, lane, self.agent, guard.clock())
                event = ToolCall(*at, use.tool, fingerprint, call.batch, call.key, once=once)
                with self.lock:
                    decision = guard.check(event)
                passed.append((layer, event))
                if guard.tools.has_prices and (decision.action < Action.BLOCK or not decision.enforced):
                    no_wait = no_loop and in_event_loop()
                    decision = await guard.reserve_tool(run, event, use.args, no_loop=no_loop, no_wait=no_wait)
            except Exception as error:
                trip: Trip | None = guard.give_up("adapter", error, run.info.run, self.agent)
                decision = ALLOW if trip is None else Decision(Action.STOP, None, trip, NOT_EXECUTED)
            except BaseException:
                self._not_executed(call)
                raise
            if decision.action >= Action.BLOCK and decision.enforced:
                self._not_executed(call)
                for (outer, of_run, _), allowed in passed:
                    outer.faults.attempt("adapter", outer.tool_gate.give_up, of_run, allowed)
                return decision.for_model or NOT_EXECUTED
        return None

    def _not_executed(self, call: OpenCall) -> None:
        """A call was refused or given up: no layer pays for it."""
        call.refuse()
        for guard, run, _ in self._layers:
            if run.bills is not None:
                guard.faults.attempt("adapter", guard.release_tool, run, call.key)

    def inside(self, use: ToolUse) -> AbstractContextManager[None]:
        """The tool runs in this block. An agent that it starts joins this run."""
        block = InsideTool(Place(self._layers, f"{use.tool}@{use.id}", self._depth + 1, self._ending.all))
        for _, run, _ in self._layers:
            if run.bills is not None:
                return paid_around(block, self._layers, self._call(use).key)
        return block

    # ---- after a call -----------------------------------------------------------------------------------------------

    def answered(self, use: ToolUse, value: object) -> str | None:
        """The tool returned ``value``: data, or text that may be JSON.

        Returns what the model must see instead of an answer that is too large.
        """
        self._guard.faults.attempt("adapter", self._answered, use, value)
        note: str | None = self._guard.faults.attempt("adapter", left_out, self._layers, use, value)
        return note

    def _answered(self, use: ToolUse, value: object) -> None:
        call = self._call(use)
        call.answer(value)
        self._pay(call, call.value)

    def _pay(self, call: OpenCall, answer: object) -> None:
        for guard, run, _ in self._layers:
            if run.bills is not None:
                guard.faults.attempt("adapter", guard.settle_tool, run, call.key, call.use.args, answer)

    def saw(self, use: ToolUse, value: object) -> None:
        """The answer to a call that was never checked: the adapter sees tools only in the next request."""
        self._guard.faults.attempt("adapter", self._saw, use, value)

    def _saw(self, use: ToolUse, value: object) -> None:
        call = self._call(use)
        for layer in self._layers:
            call.seen.append((layer, layer.guard.fingerprint(use.tool, use.args), b""))
        call.answer(value)
        for layer in self._layers:
            guard, run, lane = layer
            if guard.tools.has_prices and (answer := call.answer_in(layer)) is not None:
                guard.faults.attempt("adapter", guard.tool_prices.book_unseen, run, lane, self.agent, answer)

    def raised(self, use: ToolUse, error: BaseException) -> None:
        """The tool raised. A failure opens its breaker for all runs; a cancelled call proves nothing."""
        self._guard.faults.attempt("adapter", self._raised, use, error)

    def _raised(self, use: ToolUse, error: BaseException) -> None:
        call = self._call(use)
        if not isinstance(error, Exception):
            call.refuse()
            for guard, run, _ in self._layers:  # it was executed, and its answer is not known
                if run.bills is not None:
                    guard.faults.attempt("adapter", guard.tool_prices.settle_unknown, run, call.key)
            return
        self._pay(call, error)
        call.answer(f"{type(error).__name__}: {error}"[:2_000], Outcome.ERROR)
        for guard, run, _ in self._layers:
            guard.faults.attempt("adapter", guard.report_failure, run, use.tool, call.key)

    def _call(self, use: ToolUse) -> OpenCall:
        with self.lock:
            call = self._open.get(use.id)
            if call is None:
                call = self._open[use.id] = OpenCall(use, self._batch or str(next(BATCHES)))
            return call
