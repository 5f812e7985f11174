"""One agent at work in a framework that shows its model calls, its tool calls and their answers.

An adapter creates an ``AgentRun`` when an agent starts, and then calls, in this order:

1. ``ask`` (``ask_now`` without an event loop) before each model call. It returns a ``Permission``, the ``Trip`` that
   stops the run, or ``Ended`` by a termination condition. A permission may carry a notice for the model and a lower
   output limit. Where ``last_after`` is set, the request must have no tools: its answer is the last one of the run.
2. Exactly one of ``Permission.settle`` (the model answered), ``Permission.fail`` (the call raised, or its stream was
   cut) and ``Permission.release`` (the call was not made).
3. ``tools.check`` (``tools.check_now``) before each tool call that the answer asks for. It returns the text that the
   model gets instead of an answer, or None to execute the tool. The tool runs inside ``with run.tools.inside(use)``, so
   that agents that it starts join this run.
4. ``tools.answered`` or ``tools.raised`` for each tool call. The rules see all answers to one model response together,
   at the next ``ask``.
5. ``end`` once, when the agent has finished or failed.

A fault of the guard raises nothing here: ``on_guard_error`` decides whether the call is made.
"""

import asyncio
import secrets
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from runguard.adapters.ending_conditions import EndingConditions
from runguard.adapters.layers import OUTERMOST, Layer, child_layer, current_place, end_layers, notice_kept
from runguard.adapters.model_calls import ModelRequest, Permission, Reply, cheaper_request, last_permission
from runguard.adapters.run_tools import BATCHES, RunTools
from runguard.adapters.without_loop import drive_layers, in_event_loop
from runguard.core.decision import ALLOW, Action, Decision, Trip
from runguard.core.events import ROOT_LANE, AgentEntered, HandOff, ModelCall, RunInfo, ToolResults
from runguard.engine.charges import OWNERS
from runguard.engine.guard import Guard
from runguard.termination.condition import TerminationCondition


class AgentRun:
    """One agent in one run. Its layers are the outer runs that it belongs to, and then its own."""

    def __init__(
        self,
        guard: Guard,
        layers: tuple[Layer, ...],
        agent: str,
        depth: int = 0,
        *,
        owns: bool = False,
        refused: Trip | None = None,
        ending: EndingConditions | None = None,
    ) -> None:
        """``refused``: the guard could not begin the run, and its settings say that then no call is made."""
        self.guard, self.layers, self.agent, self.depth = guard, layers, agent, depth
        self._owns = owns  # the run of the last layer began with this agent
        self._refused = refused
        self.ending = ending or EndingConditions()
        self.tools = RunTools(guard, layers, agent, depth, self.ending, refused is not None)
        self._lock, self._ended = self.tools.lock, False
        # Where a framework calls no hook after an error, the run ends with the last reference to it.
        weakref.finalize(self, end_layers, layers, owns).atexit = False

    @classmethod
    def start(
        cls, guard: Guard, agent: str, *, condition: TerminationCondition | None = None, **whom: Any
    ) -> "AgentRun":
        """Begin a run, or join the run in whose tool call this code is executed.

        ``whom``: the app, user and session that budgets are for. ``condition`` ends a run that begins here. A layer
        that cannot begin is left out, or refuses every call: ``on_guard_error`` decides.
        """
        layers: list[Layer] = []
        place, owns, refused = OUTERMOST, False, None
        try:
            place = current_place()
        except Exception as error:
            refused = guard.give_up("adapter", error, "", agent)
        for outer in place.layers:
            try:
                layers.append(child_layer(outer, place, agent))
            except Exception as error:
                refused = refused or outer.guard.give_up("adapter", error, outer.run.info.run, agent)
        if all(outer.guard is not guard for outer in place.layers):
            try:
                info = RunInfo(secrets.token_hex(8), at=guard.clock(), **whom)
                layers.append(Layer(guard, guard.start(info), ROOT_LANE))
                owns = True
            except Exception as error:
                refused = refused or guard.give_up("adapter", error, "", agent)
        ending = EndingConditions(place.conditions, condition if owns else None)
        return cls(guard, tuple(layers), agent, place.depth, owns=owns, refused=refused, ending=ending)

    @classmethod
    def join(cls, agent: str, handled: Collection[Guard]) -> "AgentRun | None":
        """A part of the runs around this code, without those of guards that are ``handled`` elsewhere; or None."""
        place = current_place()
        outer = [layer for layer in place.layers if layer.guard not in handled]
        if not outer:
            return None
        place = place._replace(call=f"{place.call}#{next(BATCHES)}")  # calls at the same time have their own lanes
        layers, ending = tuple(child_layer(one, place, agent) for one in outer), EndingConditions(place.conditions)
        return cls(outer[-1].guard, layers, agent, place.depth, ending=ending)

    @property
    def stopped(self) -> Trip | None:
        """The trip that has stopped this run, or a run around it."""
        if self._refused is not None:
            return self._refused
        for guard, run, lane in self.layers:
            trip = run.stopped or (run.lanes[lane].stop_in_force() if lane in run.lanes else None)
            if trip is not None and guard.policy.mode == "enforce":
                return trip
        return None

    def enter(self) -> Trip | None:
        """The agent begins to work. A trip: it is nested too deep or was started too often."""
        for layer in self.layers:
            decision = self._decide(layer, layer.guard.check, partial(AgentEntered, depth=self.depth))
            if (trip := self.stop_of(decision)) is not None:
                return trip
        return self._refused

    def hand_off(self, target: str) -> Trip | None:
        """The agent passes the conversation to another one, which goes on in the same lane."""
        trip = None
        for layer in self.layers:
            trip = trip or self.stop_of(self._decide(layer, layer.guard.check, partial(HandOff, target=target)))
        self.guard.faults.attempt("adapter", self.ending.handed_off, self.agent, target)
        self.agent = self.tools.agent = target
        return trip

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def ask(self, read: Callable[[], ModelRequest]) -> Reply:
        """Ask for one model call. Waits while calls in flight hold the rest of a budget.

        ``read`` describes the request. ``on_guard_error`` decides about a request that it cannot read.
        """
        return await self._ask(read, asyncio.current_task())

    def ask_now(self, read: Callable[[], ModelRequest]) -> Reply:
        """``ask`` for callers without an event loop."""
        make = partial(self._ask, read, None)
        return drive_layers(
            self.layers, self.ending, make, lambda lost: lost.release() if isinstance(lost, Permission) else None
        )

    async def _ask(self, read: Callable[[], ModelRequest], task: "asyncio.Task[Any] | None") -> Reply:
        permission = Permission(self, task)
        try:
            request = read()
        except Exception as error:
            trip = self.guard.give_up("adapter", error, self._name, self.agent)
            if trip is not None:
                return trip
            request = ModelRequest()
        permission.request = request
        try:
            notices = self._report_answers()
            if (trip := self.stopped) is not None:
                return await last_permission(self, request, trip, task) or trip
            if self.ending.all and (ended := await self.ending.ask()) is not None:
                return ended
            if self.guard.downgrades is not None:
                permission.request = request = cheaper_request(self, request, no_loop=task is None)
            for layer in self.layers:
                try:
                    event = self.model_call(layer, request, no_loop=task is None)
                    decision = await self._reserve(layer, event, permission)
                except Exception as error:
                    trip = layer.guard.give_up("adapter", error, layer.run.info.run, self.agent)
                    decision = ALLOW if trip is None else Decision(Action.STOP, None, trip)
                if (trip := self.stop_of(decision)) is not None:
                    permission.release()
                    return await last_permission(self, request, trip, task) or trip
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
                notices.append(notice_kept(layer))
        except BaseException:
            permission.release()
            raise
        permission.notice = next((notice for notice in notices if notice), "")
        return permission

    async def _reserve(self, layer: Layer, event: ModelCall, permission: Permission) -> Decision:
        guard = layer.guard
        with self._lock:
            decision = guard.check(event)
        if self.stop_of(decision) is not None:
            return decision
        token = OWNERS.set((*OWNERS.get(), *permission.charges))  # layers with one store hold its money once
        try:
            reserved = await guard.reserve(event, slot=not event.no_loop)
        finally:
            OWNERS.reset(token)
        permission.add(layer, event)
        return reserved if reserved.action > decision.action else decision

    def model_call(self, layer: Layer, request: ModelRequest, *, no_loop: bool) -> ModelCall:
        guard, run, lane = layer
        event = ModelCall(run.info.run, lane, self.agent, guard.clock(), request.model, request.input_tokens)
        event.audio_tokens, event.max_output_tokens = request.audio_tokens, request.max_output_tokens
        event.no_loop, event.no_wait = no_loop, no_loop and in_event_loop()
        event.projected_tokens, event.instead_of = request.likely_tokens or None, request.instead_of
        event.context_limit = guard.context_limit(request.model)
        return event

    def _report_answers(self) -> list[str]:
        """Show the rules the answers since the last model call. Returns notices for the model."""
        with self._lock:
            calls = self.tools.take_answered()
            if not calls:
                return []
            self.guard.faults.attempt("adapter", self.ending.executed, self.agent, calls)
            notices = []
            for layer in self.layers:
                answers = [answer for call in calls if (answer := call.answer_in(layer)) is not None]
                results = partial(ToolResults, batch=calls[0].batch, answers=answers)
                decision = self._decide(layer, layer.guard.after, results)
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
            return notices

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The agent has finished. Safe to call twice."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.guard.faults.attempt("adapter", self._report_answers)
        end_layers(self.layers, self._owns)

    def fault(self, error: Exception) -> None:
        """A fault of the adapter. Where the settings say so, it stops the run."""
        self.guard.fault("adapter", error, self._name, self.agent)

    @property
    def _name(self) -> str:
        return self.layers[-1].run.info.run if self.layers else ""

    def stop_of(self, decision: Decision) -> Trip | None:
        return decision.trip if decision.action is Action.STOP and decision.enforced else None

    def _decide(self, layer: Layer, question: Callable[[Any], Decision], make: Callable[..., Any]) -> Decision:
        """Ask about the event that ``make`` builds from a run, a lane, an agent and a time."""
        guard, run, lane = layer
        try:
            with self._lock:
                return question(make(run.info.run, lane, self.agent, at=guard.clock()))
        except Exception as error:
            trip = guard.give_up("adapter", error, run.info.run, self.agent)
            return ALLOW if trip is None else Decision(Action.STOP, None, trip)


def _release(lost: Reply) -> None:
    """A permission that came after its caller was interrupted."""
    if isinstance(lost, Permission):
        lost.release()
