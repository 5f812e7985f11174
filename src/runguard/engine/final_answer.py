"""A last answer: one model call without tools whose price is held from the start, made when the run is stopped.

Settings: ``final_answer``, ``min_output_tokens``. Its price is held beside ordinary calls. ``adk/plugin`` and
``calls/model_calls`` ask ``last_call`` of the guard for it, and make the call.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from runguard.core.decision import Action, Finding, Trip
from runguard.core.events import ROOT_LANE, ModelCall
from runguard.core.money import NOTHING, Amount, usd_text
from runguard.engine.calls import PaidCalls
from runguard.engine.charges import Charge, Denied, worst_of
from runguard.engine.decide import Decided
from runguard.engine.reserving import STANDING_S
from runguard.engine.runs import Lane, Run
from runguard.pricing.rates import Rates

_log: Final = logging.getLogger("runguard")
INSTRUCTION: Final = (
    "This is your last message in this turn, and no tools are available any more. Give your best final answer with "
    "what you already have, and say briefly what is missing."
)
# After these nothing may be sent, or a request would not fit or not be priced.
_NO_ANSWER_AFTER: Final = frozenset(
    {"kill_switch", "deadline", "guard_error", "policy_error", "unpriced", "context", "fan_out", "depth"}
)
_LEAST_OUTPUT: Final = 64  # tokens; a shorter answer says nothing
_MARGIN: Final = 1_024  # tokens of the prompt: the instruction, and tool answers


@dataclass(slots=True)
class Closing:
    """The last call of one run: what is held for it."""

    charge: Charge | None = None  # None: nothing limits it, or the hold did not fit
    is_without: bool = False  # the hold did not fit when the run began
    is_taken: bool = False  # the call was made, or is being made; in shadow mode: would have been made
    asked: ModelCall | None = None  # the last ordinary call
    nano: int = 0  # in shadow mode: what it would have cost at most, in nano-USD
    tokens: int = 0

    @property
    def held(self) -> Amount:
        """What is held for it."""
        held = self.charge
        return held.hold.amount if held is not None and held.hold is not None and not held.over else NOTHING


class LastAnswers:
    """Holds and grants the last call of each run of one guard, where ``final_answer`` is set.

    The hold is opened with the first model call of a run, sized for a prompt twice as large as that call's, and
    replaced by a larger one when the prompts have grown past it. An ordinary call that leaves no room for the hold is
    refused: the run stops, and the held call lets the agent answer with what it has.

    In shadow mode the price is held as well, so that stops are decided where an enforcing guard decides them. The call
    is not made: ``would_answer`` reports it.
    """

    busy: Final = True  # every call passes it

    def __init__(self, context: PaidCalls) -> None:
        policy = context.policy
        self.instruction = policy.final_answer if isinstance(policy.final_answer, str) else INSTRUCTION
        self._output = policy.min_output_tokens  # the longest last answer, in tokens
        self._clock, self._reports = context.clock, context.options.get("reports", True)
        self._calls, self._accounts, self._deciding = context, context.accounts, context.deciding
        if not policy.final_answer or not context.options.get("gives_last_answers") or policy.mode == "off":
            return
        context.last_call = self
        context.gates.append(self)
        context.sink.on("run started", "a last answer", _keep_a_call)
        context.sink.on("run paused", "pause", lambda run, waits: self.drop(run))
        context.sink.on("run ended", "end of run", self.drop)
        if policy.mode == "shadow":
            context.sink.on_decided("a last answer", self.would_answer)

    async def enter(self, run: Run, event: ModelCall, stopped: Callable[[], bool]) -> Denied | None:
        """Hold the price of the last call beside an ordinary call. Return why the ordinary one has to be refused."""
        closing = _closing_of(run)
        if closing is None:
            closing = run.set_aside = Closing(asked=event)
            return await self._begin(run, closing, event, stopped)
        held, closing.asked = closing.charge, event
        # agents inside of tools do not give the last answer
        if held is None or held.over or closing.is_taken or event.tool:
            return None
        is_enough = _covers(held, self._need(run, event, event.input_tokens + _MARGIN))
        if is_enough and not _is_old(held):
            return None
        larger, denied = await self._open(run, event, stopped, no_wait=is_enough)
        if larger is None or closing.charge is not held:  # it was taken or dropped meanwhile
            if larger is not None:
                self._release(larger)
            return None if is_enough else denied  # the old hold stands on for a while
        closing.charge, before = larger, closing.charge
        if before is not None:
            self._release(before)
        return None

    def leave(self, event: ModelCall, charge: Charge | None) -> None:
        """Keep the hold, whether or not the ordinary call is made."""

    def _release(self, charge: Charge) -> None:
        self._accounts.standing.pop(id(charge), None)
        self._calls.release(charge)

    async def _begin(self, run: Run, closing: Closing, event: ModelCall, stopped: Callable[[], bool]) -> Denied | None:
        if not self._accounts.finder.of_call(run.run_costs, event).accounts:
            return None  # nothing limits it
        charge, denied = await self._open(run, event, stopped)
        if charge is not None:
            closing.charge = charge
        elif denied is not None and denied.refusal is not None and not stopped():
            closing.is_without = True
            self._say(run, event, "the budget has no room for the price of a last answer")
        return None  # the ordinary call decides for itself

    async def _open(
        self, run: Run, event: ModelCall, stopped: Callable[[], bool], *, no_wait: bool = False
    ) -> tuple[Charge | None, Denied | None]:
        wanted = self._request(event, 2 * event.input_tokens + _MARGIN)
        wanted.stands, wanted.no_wait = True, no_wait
        charge, denied = self._accounts.open_now(run.run_costs, wanted), None
        if charge is None:
            charge, denied = await self._accounts.open(run.run_costs, wanted, self._deciding.enforces, stopped)
        if charge is not None and not self._deciding.enforces:
            denied = denied or charge.possible_refusal
            if denied is not None:  # shadow mode holds it whether or not it fits
                self._release(charge)
                charge = None
        if charge is not None:
            self._accounts.standing[id(charge)] = charge
        return charge, denied

    def _request(self, event: ModelCall, tokens: int) -> ModelCall:
        request = ModelCall(event.run, ROOT_LANE, event.agent, self._clock(), event.model, tokens)
        request.max_output_tokens, request.audio_tokens = self._output, event.audio_tokens
        return request

    def _need(self, run: Run, event: ModelCall, tokens: int) -> tuple[int, int]:
        rates = self._accounts.pricing.rates(event.model, event.at)
        cost = rates.worst(tokens, self._output, event.audio_tokens) if isinstance(rates, Rates) else 0
        return cost, tokens + self._output

    def _say(self, run: Run, event: ModelCall, why: str) -> None:
        """Report once that the run goes on without a last answer."""
        found = Finding("budget", Action.WARN, 0, 1, "last answers", "run", "", "last answer", why)
        self._deciding.decide(run, run.lanes[ROOT_LANE], event, found)
        if self._reports:
            _log.warning("runguard.no_last_answer: run %s starts without a last answer: %s", run.info.run, why)

    # ---- the call itself --------------------------------------------------------------------------------------------

    def may_answer(self, run: Run, lane: Lane, event: ModelCall, trip: Trip | None) -> bool:
        """Return whether this stop of the run ends with an answer of the agent that is about to call its model."""
        closing = _closing_of(run)
        if not self._deciding.enforces or trip is None or run.stopped is not trip:
            return False
        if closing is None or closing.is_taken or closing.is_without:
            return False
        if trip.rule in _NO_ANSWER_AFTER or event.tool or _is_called(lane):
            return False
        return run.deadline is None or run.deadline.observe(replace(event, at=self._clock())) is None

    async def take(self, run: Run, event: ModelCall) -> Charge | None:
        """Return the charge of the last call, once per run; None where it cannot be paid. ``event``: the request as it
        is sent, without tools and with the instruction.
        """
        closing = _closing_of(run)
        if closing is None or closing.is_taken:
            return None
        closing.is_taken = True
        held, closing.charge = closing.charge, None
        event.charge = None
        if held is not None and not held.over:
            self._accounts.standing.pop(id(held), None)
            lines = self._accounts.finder.of_call(run.run_costs, event).accounts
            if lines == held.lines.accounts and held.model == event.model and self._fit(held, event):
                return self._begun(run, event, held)
            self._release(held)
        request = replace(event, max_output_tokens=min(self._output, event.max_output_tokens or self._output))
        charge = self._accounts.open_now(run.run_costs, request)
        if charge is None:
            request.no_wait = True
            charge, _ = await self._accounts.open(run.run_costs, request, True, lambda: False)
        return None if charge is None else self._begun(run, event, charge)

    def _fit(self, held: Charge, event: ModelCall) -> bool:
        """Make the held charge that of the request: its answer is as long as the hold pays for."""
        usd, tokens, _ = held.hold.amount if held.hold is not None else worst_of(held)
        output = min(self._output, event.max_output_tokens or self._output)
        output = min(output, (tokens - event.input_tokens) // event.candidates)
        if isinstance(held.rates, Rates):
            afford = held.rates.affordable_output(usd, event.input_tokens, event.audio_tokens)
            output = min(output, afford // event.candidates)
        if output < min(_LEAST_OUTPUT, self._output):
            return False
        held.input, held.audio, held.max_output = event.input_tokens, event.audio_tokens, output
        held.agent, held.lane, held.candidates = event.agent, event.lane, event.candidates
        return True

    def _begun(self, run: Run, event: ModelCall, charge: Charge) -> Charge:
        run.spend.model_calls += 1
        if run.model_calls is not None:
            run.model_calls.count += 1
        if run.journal is not None:
            run.journal.saw(event)
        charge.number, charge.journal = event.number, run.journal
        charge.lowered = charge.limited = True
        event.charge = charge
        return charge

    def would_answer(self, decided: Decided) -> None:
        """Report once per run, in shadow mode, that a stop would have ended with a last answer, and what it would have
        cost at most.
        """
        run, finding, trip = decided.run, decided.finding, decided.decision.trip
        closing, lane = _closing_of(run), decided.lane
        if trip is None or closing is None or closing.is_taken or closing.is_without or closing.asked is None:
            return
        if trip.rule in _NO_ANSWER_AFTER or (finding.scope == "lane" and lane.owner(finding) is not None):
            return
        if run.deadline is not None and run.deadline.observe(replace(closing.asked, at=self._clock())) is not None:
            return
        closing.is_taken = True
        closing.nano, closing.tokens = self._need(run, closing.asked, closing.asked.input_tokens + _MARGIN)
        held, closing.charge = closing.charge, None
        if held is not None:
            self._release(held)
        if self._reports:
            _log.warning(
                "runguard.last_answer_in_shadow: run %s would have ended with a last answer of %s, for at most %s",
                *(run.info.run, closing.asked.agent or "its agent", usd_text(closing.nano)),
            )

    def drop(self, run: Run) -> None:
        """Give back what is held for a run that has ended or paused."""
        closing = _closing_of(run)
        if closing is None:
            return
        held, closing.charge = closing.charge, None
        if held is not None:
            self._release(held)
        if not closing.is_taken:
            run.set_aside = None  # if it is resumed, it is held anew


def _closing_of(run: Run) -> Closing | None:
    return run.set_aside if isinstance(run.set_aside, Closing) else None


def _keep_a_call(run: Run) -> None:
    """Keep one of the run's model calls for its last answer."""
    if run.model_calls is not None and run.model_calls.limit > 1:
        run.model_calls.kept = 1


def _covers(held: Charge, need: tuple[int, int]) -> bool:
    amount = held.hold.amount if held.hold is not None else worst_of(held)
    return amount[0] >= need[0] and amount[1] >= need[1]


def _is_old(held: Charge) -> bool:
    """Return whether a hold has lived for half of its time, and must be renewed."""
    return held.hold is not None and held.hold.expires - time.monotonic() < STANDING_S / 2


def _is_called(lane: Lane | None) -> bool:
    """Return whether a model has called the agent of this lane: its caller gives the answer."""
    while lane is not None:
        if lane.delegate:
            return True
        lane = lane.parent
    return False
