"""The accounts of one model call: one per guard, closed however the call ends."""

import asyncio
from typing import Any

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse

from runguard.adk.invocation_state import Invocation, ModelInFlight
from runguard.core.decision import Trip
from runguard.core.errors import RunStoppedError
from runguard.core.events import ModelResult
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.engine.runs import Run
from runguard.providers.errors import was_unbilled
from runguard.providers.usage import CallBill, CallUsage

# Why a call is not made: a stop; or the text to answer with where only this call is refused; or None beside a run that
# has given its answer.
Stop = tuple[Trip | str | None, Guard]


class CallAccount:
    """One guard's account of one model call."""

    __slots__ = (
        "_flight",
        "_invocation",
        "_model",
        "_settled",
        "_usage",
        "charge",
        "delegated",
        "guard",
        "holder",
        "is_layer",
    )

    def __init__(
        self,
        guard: Guard,
        charge: Charge,
        invocation: Invocation | None = None,
        flight: ModelInFlight | None = None,
        *,
        is_layer: bool = False,
        usage: CallUsage | None = None,
    ) -> None:
        """``is_layer``: of a guarded model. No hook sees its answer, so the detectors see it here. ``usage``: where to
        collect what the model reports.
        """
        self.guard, self.charge, self.is_layer = guard, charge, is_layer
        self._invocation, self._flight = invocation, flight
        self._usage = usage or CallUsage()
        self._settled: tuple[CallBill, str] | None = None
        self._model = ""
        self.holder: asyncio.Task[Any] | None = None  # the task that holds a slot for the call
        self.delegated = False  # other models do the work: they are billed instead

    @property
    def run(self) -> Run | None:
        return self.guard.runs.get(self.charge.run_costs.info.run)

    @property
    def place(self) -> tuple[Invocation | None, ModelInFlight | None]:
        return self._invocation, self._flight

    def saw(self, response: LlmResponse) -> None:
        """Read a chunk or the whole answer.

        Settles the charge when the answer is complete, and again when a later report changes the usage.
        """
        if self.charge.is_probe:  # the provider takes calls again: do not wait for the end of the stream
            self.guard.provider_waits.ended(self.charge, is_success=True)
        is_new = self._usage.add(response)
        self._model = response.model_version or self._model
        if is_new and self._flight is not None and self._invocation is not None:
            self._flight.usage = self._usage
            self._invocation.learn_prompt(self._flight, self._usage.prompt or 0)
        if response.partial and not self.charge.over:
            return
        self._settle(self._usage.bill(self.charge.input, self.charge.audio))

    def _settle(self, bill: CallBill) -> None:
        if self._settled != (bill, self._model):
            self.guard.settle(self.charge, bill.usage, self._model, estimated=bill.estimated)
            self._settled = bill, self._model

    def called_off(self) -> None:
        """The call is not made after all."""
        self._give_back()
        if not self.charge.over:
            self.guard.release(self.charge)
            self.guard.unspent(self.charge.run_costs.info.run)

    def _give_back(self) -> None:
        run, holder, self.holder = self.run, self.holder, None
        if run is not None and holder is not None:
            run.slots.give_back(holder)

    def ended(self, error: BaseException | None, streaming: bool) -> None:
        if self.holder is not None:
            self._give_back()
        if self.is_layer and error is None and not self.delegated:
            charge, usage = self.charge, self._usage
            output = usage.reported.output if usage.reported is not None else None
            self.guard.after(
                ModelResult(
                    charge.run_costs.info.run, charge.lane, charge.agent, self.guard.clock(), usage.prompt, output
                )
            )
        if self.delegated or self.charge.over:
            return
        if self._usage.reported is not None:
            self._settle(self._usage.bill(self.charge.input, self.charge.audio))
            return
        received = self._usage.text_tokens
        if isinstance(error, RunStoppedError) and not received:  # a guard further in refused it: it never left
            self.called_off()
            return
        self.guard.abandon(self.charge, received, streaming=streaming, refused=was_unbilled(error), error=error)


class PassingCall:
    """A call on its way to its model: its accounts, and how the kill switch ends it. The switch cancels the task, and
    the cancellation becomes a stop.
    """

    __slots__ = ("_loop", "_runs", "_thrown", "accounts", "is_due", "llm", "owners", "task")

    def __init__(self, llm: BaseLlm, accounts: list[CallAccount]) -> None:
        self.llm, self.accounts = llm, accounts
        around = OWNERS.get()
        self.owners = tuple([charge for charge in around if not charge.over]) if around else ()
        self._thrown, self._loop = False, asyncio.get_running_loop()
        self.task: asyncio.Task[Any] | None = None  # that waits for the model now
        self.is_due = False  # the switch was thrown, perhaps while no task waited
        self._runs: list[Run] = []
        for account in accounts:
            self.owners += (account.charge,)
            if (run := account.guard.runs.get(account.charge.run_costs.info.run)) is not None:
                self._runs.append(run)
                run.in_flight.add(self._throw)
                self.is_due = self.is_due or run.stopped is not None

    def end_if_due(self) -> None:
        """End the call where its run is still stopped by the switch."""
        self.is_due = any(run.stopped is not None and run.stopped.rule == "kill_switch" for run in self._runs)
        if self.is_due:
            self._throw()

    def over(self) -> None:
        for run in self._runs:
            run.in_flight.discard(self._throw)

    def _throw(self) -> None:
        self.is_due = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None and not self._thrown:
            self._thrown = True
            self.task.cancel()

    def by_switch(self) -> tuple[Trip, Guard] | None:
        """The stop that ended the call. None when other code cancelled it."""
        task = asyncio.current_task()
        if not self._thrown or task is None or task.uncancel() > 0:
            return None
        return next(
            (
                (account.run.stopped, account.guard)
                for account in self.accounts
                if account.run is not None and account.run.stopped is not None
            ),
            None,
        )


def give_up(account: CallAccount, fault: Exception) -> None:
    """Book an estimate at once where the usage cannot be booked, so that no other call waits for the reservation."""
    guard, charge = account.guard, account.charge
    guard.fault("border", fault, charge.run_costs.info.run)
    if account.delegated:
        return
    try:
        guard.abandon(charge)
    except Exception as second:
        guard.close(charge, second)


def call_off(accounts: list[CallAccount]) -> None:
    """The call is not made after all: another guard refused it, or its caller was cancelled."""
    for account in accounts:
        try:
            account.called_off()
        except Exception as fault:
            give_up(account, fault)


def keep_cap(request: LlmRequest, charge: Charge) -> None:
    """A callback after ours may have asked for more output than ``charge`` holds."""
    asked = request.config.max_output_tokens
    if charge.max_output > 0 and (charge.limited if asked is None else asked > charge.max_output):
        cap_output(request, charge.max_output)


def cap_output(request: LlmRequest, tokens: int) -> None:
    """Cap the output in a copy of the configuration, which may be shared with every later call."""
    request.config = request.config.model_copy(update={"max_output_tokens": tokens})
