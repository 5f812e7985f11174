"""What a framework adapter asks of a guard. ADK, guarded functions and replay use this, and nothing else to decide.

An adapter translates: it builds events (``runguard.core.events``) from what its framework is about to do, asks the
guard, and carries out the answer. It decides nothing itself. The order of the calls::

    run = guard.start(RunInfo(...))                one root run: one user turn and everything nested in it

        decision = guard.check(AgentEntered(...))  before an agent works, and before it starts parallel branches
        decision = guard.check(HandOff(...))       before one agent passes the work to another

        decision = guard.check(ModelCall(...))     before a model call
        decision = await guard.reserve(call)       right before it is sent; then ``call.charge`` is set
            ...send the request...
        guard.settle(call.charge, usage)           or release, or abandon: exactly one of them, see below
        guard.free_slot(run.info.run)              the call is over: the next one in the queue may go
        decision = guard.after(ModelResult(...))   what the model answered

        await guard.prepare_tool(...)              before a tool call, where ``check`` must know what other workers did
        decision = guard.check(ToolCall(...))      before each tool call of a model response
        decision = await guard.reserve_tool(...)   then, for the price of the tool; at once where it has none
            ...run the tools...
        guard.settle_tool(...)                     for each tool that was executed; release_tool for one that was not
        guard.report_failure(...)                  for each tool that raised or timed out
        decision = guard.after(ToolResults(...))   all answers to one model response together

        guard.open_lane(...), guard.close_lane(...)  around a parallel branch, and around an agent called as a tool

    guard.end(run.info.run)                        always, also after an exception

**A decision** says what to do: nothing (``ALLOW`` is falsy), or its ``action``. ``WARN``: go on, the guard has reported
it. ``NUDGE``: go on, and give ``for_model`` to the model with the answer of the tool or with the next request.
``BLOCK``: do not make this one call and answer it with ``for_model``. ``STOP``: end what ``trip`` names, its ``branch``
or the whole run, so that the session stays usable: every open call gets an answer, and paid work of other branches is
kept. Carry a decision out only if ``enforced`` is true. In shadow mode it is not.

**Who closes a charge.** The code that sends the request, in a ``finally``, so that nothing stays reserved:

- ``settle``: the call reported its usage, completely or in part. Settle again when a later figure arrives.
- ``release``: the request was never sent. Call ``unspent`` too, because ``check`` has counted the call.
- ``abandon``: the request was sent, and no usage came back: an error, a cancellation, an abandoned stream.
  ``refused=True`` where the provider refused it or could not be reached, so that it cost nothing.

**Lanes.** Events of one lane happen one after another. Without lanes the calls of parallel branches would look like one
loop. The root lane is ``ROOT_LANE``; a lane that is not open counts as the root lane.

**Faults.** An exception of the guard must not reach the run. Wrap each hook, pass the exception to ``fault``, and go on
as if the guard had answered "allow", unless ``fault`` returns a trip.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from runguard.accounting.charges import Charge
from runguard.conductor.runs import Lane, Run
from runguard.conductor.sink import Sink
from runguard.core.decision import Decision, Finding, Trip
from runguard.core.events import (
    AgentEntered,
    Event,
    HandOff,
    ModelCall,
    ModelResult,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.policy.settings import Policy
from runguard.policy.tool_rules import ToolRule
from runguard.pricing.rates import Usage

Question = AgentEntered | HandOff | ModelCall | ToolCall
Result = ModelResult | StateChanged | ToolResults


class Conductor(Protocol):
    """The interface of ``Guard`` for adapters. The docstring of this module says in which order to call it."""

    @property
    def policy(self) -> Policy:
        """The settings."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds. Every event carries its time: ``at=guard.clock()``."""

    @property
    def runs(self) -> Mapping[str, Run]:
        """The runs that have started and not ended, by name."""

    @property
    def sink(self) -> Sink:
        """Subscribe here to receive every decision and trip."""

    # ---- runs and lanes ---------------------------------------------------------------------------------------------

    def start(self, info: RunInfo) -> Run:
        """Begin a root run. A run of the same name is reset."""

    def end(self, run_id: str, /) -> None:
        """Forget a run. What it still holds is given back."""

    def open_lane(
        self, run: Run, key: str, parent: str, *, concurrent: bool, path: tuple[str, ...] = (), delegate: str = ""
    ) -> Lane:
        """Begin a lane below ``parent``. ``concurrent``: it runs beside its siblings, so a stop ends it alone.

        ``path``: the agents above it. ``delegate``: the agent that a model has called here.
        """

    def close_lane(self, run: Run, key: str) -> None:
        """End a lane."""

    # ---- before and after -------------------------------------------------------------------------------------------

    def check(self, event: Question) -> Decision:
        """May this happen? Never waits. After a stop the answer stays no."""

    def after(self, event: Result) -> Decision:
        """Learn from what happened. A nudge, a refused answer or a stop may follow."""

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def reserve(
        self, event: ModelCall, *, slot: bool = True, task: "asyncio.Task[Any] | None" = None
    ) -> Decision:
        """Wait for permission to send a model call. With permission, ``event.charge`` is set: close it."""

    def context_limit(self, model: str, *, quiet: bool = False) -> int | None:
        """How many input tokens a request to a model may have, for ``ModelCall.context_limit``; None: not known, which
        is logged unless ``quiet``.
        """

    def reserve_now(self, event: ModelCall) -> bool:
        """Permission without waiting, for callers without an event loop. False: use ``reserve``."""

    def settle(
        self,
        charge: Charge,
        usage: Usage,
        model: str = "",
        *,
        nano: int | None = None,
        estimated: bool = False,
        free: bool = False,
    ) -> None:
        """Book what a call took."""

    def free_slot(self, run_id: str, task: "asyncio.Task[Any] | None" = None) -> None:
        """Give back the slot that ``reserve`` took for the current task, or for ``task``."""

    def release(self, charge: Charge) -> None:
        """Give back the reservation of a call that was never sent."""

    def abandon(
        self,
        charge: Charge,
        streamed_tokens: int = 0,
        *,
        streaming: bool = False,
        refused: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Book an estimate for a call that was sent and did not report its usage.

        ``error``: what it raised. It may say that the provider asks to wait.
        """

    def unspent(self, run_id: str, event: ModelCall | None = None, *, denied: bool = False) -> None:
        """Do not count a model call that ``check`` has allowed and that was never sent."""

    # ---- tool calls -------------------------------------------------------------------------------------------------

    def fingerprint(self, tool: str, args: object) -> bytes:
        """The identity of a call, for ``ToolCall.call`` and ``Answer.call``."""

    def tool_rule(self, tool: str) -> ToolRule | None:
        """What is declared about a tool."""

    async def prepare_tool(self, run: Run, tool: str, effect: bytes, call_id: str) -> None:
        """Ask a shared store what other workers did, before ``check`` judges a tool call."""

    async def reserve_tool(
        self, run: Run, event: ToolCall, args: object, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        """Reserve the price of a tool call that ``check`` has allowed. A refusal means: do not execute it."""

    def settle_tool(self, run: Run, call_id: str, args: object, answer: object) -> None:
        """The tool was executed: book its price. ``answer``: its result, or the exception that it raised.

        Without this, ``after`` books it when the answer arrives.
        """

    def release_tool(self, run: Run, call_id: str) -> None:
        """The tool was not executed: its price is not booked."""

    def report_failure(self, run: Run, tool: str, call_id: str) -> None:
        """A tool raised or timed out. Its answer goes to ``after`` all the same."""

    # ---- findings of the adapter, and faults ------------------------------------------------------------------------

    def found(self, event: Event, finding: Finding) -> Decision:
        """Decide on something that the adapter itself has noticed."""

    def stop_text(self, trip: Trip) -> str:
        """What the end user reads after a stop."""

    def fault(self, where: str, error: Exception, run_id: str = "", agent: str = "") -> Trip | None:
        """Report an exception of the guard itself. Returns a trip where the policy stops the run for it."""
