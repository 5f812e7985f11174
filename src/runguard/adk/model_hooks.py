"""What the plugin does before and after a model call: check it, reserve its worst case, and judge its result."""

import asyncio
import time
import weakref
from typing import Any, Final

from google.adk.agents.callback_context import CallbackContext
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.call_accounts import cap_output
from runguard.adk.closing_call import ask_for_last_answer, is_answer
from runguard.adk.context import ANNOUNCED, HERE
from runguard.adk.estimate import count_tokens, project
from runguard.adk.invocation_state import FLIGHTS_KEPT, Invocation, ModelInFlight
from runguard.adk.invocations import Invocations
from runguard.adk.lanes import lane_of
from runguard.adk.model_choice import choose_model
from runguard.adk.prompt_hash import prompt_hash
from runguard.adk.prompt_parts import read_parts
from runguard.adk.run_start import RunStarter
from runguard.adk.stops import Stopper
from runguard.core.decision import ALLOW, Action, Trip
from runguard.core.events import ROOT_LANE, AgentEntered, ModelCall, ModelResult
from runguard.core.identity import words_name
from runguard.engine.downgrade import Downgrades
from runguard.engine.guard import Guard
from runguard.engine.runs import Lane

_LIMITS_KEPT: Final = 64
_STOP: Final = Action.STOP  # bound once: a lookup on the enum costs as much as the rest of a line


class ModelHooks:
    """Model calls of one plugin."""

    def __init__(self, guard: Guard, invocations: Invocations, starter: RunStarter, stopper: Stopper) -> None:
        self._guard, self._invocations, self._starter, self._stopper = guard, invocations, starter, stopper
        self._watches_context = guard.policy.rungs("context") is not None
        self._counter = guard.policy.tokens
        guard.cache_watch.read_parts = read_parts

    async def before(self, callback_context: CallbackContext, llm_request: LlmRequest) -> LlmResponse | None:
        ic = callback_context._invocation_context
        trip, lane = self._stopper.gave_up(ic.invocation_id), ROOT_LANE
        event: ModelCall | None = None
        if trip is None:
            try:
                guard = self._guard
                invocation = self._invocations.find(ic.invocation_id)
                if invocation is None or invocation.nested:
                    invocation = await self._starter.invocation_of(ic)
                run, branch, agent, task = invocation.run, ic.branch, ic.agent, asyncio.current_task()
                lane = lane_of(guard, invocation, branch, ic.isolation_scope)
                last = invocation.flights.get(task)
                if last is not None and (not last.answered or (last.charge is not None and not last.charge.over)):
                    self._settle_unanswered(invocation, last)
                event = ModelCall(
                    run.info.run, lane, agent.name if agent is not None else "", guard.clock(), llm_request.model or ""
                )
                flight = ModelInFlight(event.agent, branch, lane)
                self._measure(invocation, event, flight, llm_request)
                if self._counter is not None:
                    await self._count(invocation, event, llm_request)
                if guard.downgrades is not None and not invocation.live:
                    self._choose_model(guard.downgrades, invocation, event, agent, llm_request)
                state = run.lanes[lane]
                if (
                    state.is_new
                    and state.parent is not None
                    and branch is not None
                    and "@" in branch
                    and branch.rpartition("@")[2] not in invocation.calls
                ):
                    await self._count_siblings(state, state.parent, event)
                decision = guard.check(event)
                if decision.action is not _STOP or not decision.enforced:
                    reserved = await guard.reserve(event, task=task)
                    if reserved is not ALLOW and reserved:
                        decision = reserved
                if decision.action is not _STOP or not decision.enforced:
                    self._admit(invocation, event, flight, llm_request, task)
                    if state.notice:
                        llm_request.contents.append(types.Content(role="user", parts=[types.Part(text=state.notice)]))
                        state.notice = ""
                    return None
                trip = decision.trip
                answers = guard.last_answers
                if (
                    answers is not None
                    and answers.may_answer(run, state, event, trip)
                    and not invocation.live
                    and await ask_for_last_answer(guard, run, event, agent, llm_request)
                ):
                    flight.last_after, flight.projection = trip, None
                    self._admit(invocation, event, flight, llm_request, task)
                    return None
            except Exception as error:
                trip = self._stopper.fault("before_model", error, ic)
                self._take_back(event)
        if trip is None:
            return None
        return await self._stopper.at_model(callback_context, trip, self._invocations.find(ic.invocation_id), lane)

    def _measure(self, invocation: Invocation, event: ModelCall, flight: ModelInFlight, request: LlmRequest) -> None:
        """What the call may take: the size of its prompt, and the largest answer."""
        sizes = flight.projection = project(request, invocation.prompts.get((event.lane, event.agent)))
        event.input_tokens, event.audio_tokens = sizes.upper, sizes.audio
        event.projected_tokens, event.request_bytes = sizes.likely, sizes.size
        event.max_output_tokens = request.config.max_output_tokens
        event.candidates = request.config.candidate_count or 1
        event.asked = prompt_hash(request)
        if invocation.live:
            # its usage comes in events: this call reserves almost nothing, it only needs permission
            event.input_tokens = event.max_output_tokens = 1
        if self._watches_context:
            try:
                event.context_limit = invocation.context_limits[event.model]
            except KeyError:
                event.context_limit = self._context_limit(invocation, event.model)
        tool = HERE.get().tool
        event.tool = tool.name if tool is not None and tool.guard is self._guard else ""

    def _choose_model(
        self, downgrades: Downgrades, invocation: Invocation, event: ModelCall, agent: Any, request: LlmRequest
    ) -> None:
        """Send the request to a cheaper model where a threshold says so."""
        if choose_model(downgrades, invocation, event, agent, request) and self._watches_context:
            event.context_limit = self._context_limit(invocation, event.model)

    async def _count(self, invocation: Invocation, event: ModelCall, request: LlmRequest) -> None:
        """Ask the user's own counter. What it returns replaces the estimate, but a live call reserves nothing."""
        counted = await count_tokens(self._counter, request) if self._counter is not None else None
        if counted is not None:
            event.projected_tokens = counted
            if not invocation.live:
                event.input_tokens = counted

    def _context_limit(self, invocation: Invocation, model: str) -> int | None:
        """The window of a model, looked up once per run."""
        limits = invocation.context_limits
        if len(limits) >= _LIMITS_KEPT:
            limits.clear()
        limit = limits[model] = self._guard.context_limit(model)
        return limit

    def _admit(
        self,
        invocation: Invocation,
        event: ModelCall,
        flight: ModelInFlight,
        request: LlmRequest,
        task: "asyncio.Task[Any] | None",
    ) -> None:
        """The call may be made. From here on ``model_calls`` reports how it ended, or the event of another answer."""
        guard = self._guard
        charge = flight.charge = event.charge
        flight.request = weakref.ref(request)
        if charge is not None:
            charge.request = flight.request
            if charge.lowered:
                cap_output(request, charge.max_output)
        if charge is not None and invocation.live:
            guard.release(charge)
        invocation.flights[task] = flight
        if len(invocation.flights) > FLIGHTS_KEPT:
            for over in invocation.drop_flights():
                self._invocations.close_flight(over)
        announced = ANNOUNCED.get()
        others = [entry for entry in announced if entry[0] is not guard and not entry[2].left] if announced else ()
        ANNOUNCED.set((*others, (guard, invocation, flight)))

    def _take_back(self, event: ModelCall | None) -> None:
        """The guard failed after it had reserved: release the charge. If the call is made, ``model_calls`` reserves
        for it anew.
        """
        if event is None:
            return
        charge, event.charge = event.charge, None
        if charge is not None and not charge.over:
            self._guard.release(charge)
            self._guard.faults.attempt("before_model", self._guard.unspent, event.run, event)
        run, task = self._guard.runs.get(event.run), asyncio.current_task()
        if run is not None and task is not None:
            run.slots.give_back(task)

    async def _count_siblings(self, state: Lane, above: Lane, event: ModelCall) -> None:
        """A Workflow's branch begins. Its siblings begin in the same turn of the event loop: wait for that turn, then
        judge them together.

        No hook of ADK says how many branches a node starts. Without this, the first ones would be paid before there
        are too many.
        """
        state.is_new = False
        if not state.concurrent:
            return
        above.starting += 1
        try:
            await asyncio.sleep(0)
            # a stop shows at the next check
            self._guard.check(AgentEntered(event.run, above.key, event.agent, event.at, 0, above.starting))
        finally:
            above.starting -= 1

    def _settle_unanswered(self, invocation: Invocation, flight: ModelInFlight) -> None:
        """Close the last call of this task. Without an answer from a model, a callback or a cache answered it."""
        if not flight.answered and not flight.left:
            flight.answered = flight.delivered = True
            self._guard.unspent(invocation.run.info.run)
        self._invocations.close_flight(flight)

    def after(
        self, callback_context: CallbackContext, llm_response: LlmResponse
    ) -> tuple[Trip, Invocation, str] | None:
        """Returns the stop, its invocation and lane where a last answer is none."""
        ic = callback_context._invocation_context
        try:
            invocation = self._invocations.find(ic.invocation_id)
            if invocation is None:
                return None
            task = asyncio.current_task()
            flight = invocation.flights.get(task)
            if flight is None:
                return None
            if not flight.left:
                flight.usage.add(llm_response)
            flight.answered = True
            if ANNOUNCED.get():
                # the call reached its model or never will: a context that outlives the run must not keep the run
                ANNOUNCED.set(())
            if llm_response.partial:
                flight.streamed = True
            else:
                flight.text = _final_text(llm_response, flight.streamed)
                flight.is_cut = llm_response.finish_reason is types.FinishReason.MAX_TOKENS
                flight.done_at, flight.delivered = time.monotonic(), False
                charge = flight.charge
                # a model that is not one of ADK's classes: ``model_calls`` does not see it
                if charge is not None and not flight.left and not charge.over:
                    bill = flight.usage.bill(charge.input, charge.audio)
                    self._guard.settle(charge, bill.usage, estimated=bill.estimated)
                if not flight.judged:  # the detectors see an answer once, however many responses it came in
                    flight.judged, usage, said = True, flight.usage, flight.text
                    output = usage.reported.output if usage.reported is not None else None
                    name, now = invocation.run.info.run, self._guard.clock()
                    result = ModelResult(
                        name, flight.lane, flight.agent, now, usage.prompt, output, is_cut=flight.is_cut
                    )
                    if said is not None:
                        result.text_id, result.text = words_name(said), said
                        flight.text = None
                    self._guard.after(result)
                if task is not None:
                    invocation.run.slots.give_back(task)
                if flight.last_after is not None and not is_answer(llm_response, ic.agent):
                    return flight.last_after, invocation, flight.lane
        except Exception as error:
            self._stopper.fault("after_model", error, ic)
        return None

    def failed(self, invocation_id: str) -> tuple[Trip, Invocation, str] | None:
        """The model raised an error. Returns the stop, its invocation and lane where that was the last answer."""
        invocation = self._invocations.find(invocation_id)
        task = asyncio.current_task()
        if invocation is not None and (flight := invocation.flights.get(task)) is not None:
            flight.answered = flight.delivered = True
            if task is not None:
                invocation.run.slots.give_back(task)
            if flight.last_after is not None:
                return flight.last_after, invocation, flight.lane
        return None


def _final_text(response: LlmResponse, streamed: bool) -> str | None:
    """The text that ends an agent's work. None when it calls tools, sends media or has sent chunks before."""
    text = ""
    for part in (response.content.parts if response.content is not None else None) or ():
        if part.text is None:
            return None
        if not part.thought:
            text += part.text
    text = text or str(response.error_code or "")
    return text if text or not streamed else None
