"""One agent at work in a framework that shows its model calls and tool calls, and for whom it works.

The adapters for LangChain, OpenAI Agents and Pydantic AI create an ``AgentRun`` when an agent starts, and so does
``adk/model_calls`` for model calls past ADK's hooks. An adapter then calls, in this order:

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
import logging
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Final, NamedTuple

from runguard.background import FINALIZED
from runguard.calls.ending import EndingConditions, error_of, fitting, last_words
from runguard.calls.model_calls import (
    ModelRequest,
    Permission,
    Reply,
    cheaper_request,
    count_tokens,
    dearest,
    last_permission,
)
from runguard.calls.surroundings import (
    HELPERS,
    AgentsState,
    RunContext,
    carry,
    drive,
    leave,
    limits_of,
    live_blocks,
)
from runguard.calls.tool_calls import (
    OUTERMOST,
    Layer,
    Place,
    RunTools,
    ToolUse,
    batches,
    child_layer,
    current_place,
    drive_layers,
    in_event_loop,
    notice_kept,
)
from runguard.core.decision import ALLOW, Action, Decision, Trip
from runguard.core.errors import PolicyError
from runguard.core.events import ROOT_LANE, AgentEntered, HandOff, ModelCall, Outcome, RunInfo, ToolResults
from runguard.core.identity import input_fingerprint
from runguard.core.money import Per, shown
from runguard.engine.charges import OWNERS, Charge, admits
from runguard.engine.guard import Guard
from runguard.engine.resume import begin_unsure, reopen
from runguard.engine.runs import Run
from runguard.ledger.ledger import StoreError, StoreOutage
from runguard.policy.keywords import PolicySettings
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from runguard.providers.usage import GrowingPrompts, size_of
from runguard.termination.conditions import Ended, TerminationCondition

__all__ = ["AgentRun", "Spent", "Whom", "asked_of", "check_whom", "error_of", "fitting", "guard_of", "last_words"]


class AgentRun:
    """One agent in one run. Its layers are the outer runs that it belongs to, and then its own."""

    def __init__(
        self,
        layers: tuple[Layer, ...],
        agent: str,
        depth: int = 0,
        *,
        guard: Guard,
        opened: tuple[Layer, ...] = (),
        home: "Home | None" = None,
        refused: Trip | None = None,
        ending: EndingConditions | None = None,
        is_second: bool = False,
    ) -> None:
        """Set up an agent in these layers; ``start``, ``join`` and ``beside`` do so for adapters.

        ``opened``: the layers whose lanes end with this agent. ``home``: who ends the run of the last layer.
        ``refused``: the guard could not begin the run, and its settings say that then no call is made. ``is_second``:
        another one asks the guard already, and this one only for what that does not see, such as a retry between them.
        """
        self.guard, self.layers, self.agent, self.depth = guard, layers, agent, depth
        self._is_second = is_second
        self._opened, self._home, self._refused = opened, home, refused
        self.ending = ending or EndingConditions()
        self.tools = RunTools(guard, layers, agent, depth, self.ending, refused is not None)
        self.tools.is_second = is_second
        self._lock, self._ended = self.tools.lock, False
        self._refusal = ""  # what an agent that is nested too deep answers in place of its model
        self.prompts = GrowingPrompts()  # the messages of the last request, so that the next one measures what is new
        self._sizes: dict[str, tuple[ModelRequest, int]] = {}  # by agent: the last request, and its reported size
        # Where a framework calls no hook after an error, the run ends soon after the last reference to it is gone.
        guard.faults.attempt("adapter", FINALIZED.ready)
        guard.faults.attempt("adapter", carry)
        self._finalizer = weakref.finalize(self, FINALIZED.put, partial(end_layers, opened, home))
        self._finalizer.atexit = False
        self.tools.leave_ended = weakref.WeakMethod(self.leave_ended)

    @classmethod
    def start(
        cls,
        guard: Guard,
        agent: str,
        *,
        condition: TerminationCondition | None = None,
        keys: Sequence[str] = (),
        around: "AgentRun | None" = None,
        run: Run | None = None,
        within: RunContext | None = None,
        ending: EndingConditions | None = None,
        others: Sequence["AgentRun"] = (),
        **whom: Any,
    ) -> "AgentRun":
        """Begin a run, or join the run around this code: of a tool call, or of a block of ``runguard.run()``.

        ``whom``: what ``Whom.of`` and ``asked_of`` give. ``condition`` ends a run that
        begins here. ``keys``: a run that was paused under one of them cannot be resumed any more. ``around``:
        an agent of another guard that hands over to this one. ``within``: a block of the adapter's own, where
        no ``runguard.run()`` is around. ``ending``: the conditions of another agent of the same turn. ``others``: what
        other guards have begun for the same agent: what they ask is not asked again. ``run``: the run to continue,
        which ``resume`` gives.

        A run that cannot begin refuses every call where it has a budget; else ``on_guard_error`` decides. A budget per
        user or session that is not named raises ``PolicyError``.
        """
        place, home, opened = OUTERMOST, None, list[Layer]()
        asked = {layer.guard: (one, layer) for one in others for layer in one.layers if not one.has_ended}
        if guard in asked:
            first, layer = asked[guard]
            return cls((layer,), agent, first.depth, guard=guard, refused=first._refused, is_second=True)
        try:
            place = current_place().without(asked, [one for other in others for one in other.ending.all])
            layers, opened, refused = _lanes_in(place, agent)
        except Exception as error:
            layers, refused = list(place.layers), guard.give_up("adapter", error, "", agent)
        known = {layer.guard for layer in layers}
        layers += [layer for layer in (around.layers if around is not None else ()) if layer.guard not in known]
        layers.sort(key=lambda layer: layer.guard is guard)  # its own comes last
        known |= {*asked, *(layer.guard for layer in layers)}
        if guard not in known:
            for give_up in (guard.give_up, guard.give_up_call):  # without a run, nobody is asked about money: try again
                try:
                    check_named(guard, **whom)
                    blocks = _blocks(within)
                    limits = _limits_of(blocks, known)
                    home = home or Home.of(guard, blocks[0] if blocks else None, keys, run, whom)
                    layers += [*limits, home.layer(agent)]
                    if home.block is not None:
                        opened.append(layers[-1])
                    break
                except PolicyError:
                    raise
                except Exception as error:
                    refused = refused or give_up("adapter", error, "", agent)
                if refused is not None:
                    break
        conditions = tuple(dict.fromkeys((*place.conditions, *(around.ending.all if around is not None else ()))))
        if ending is None or home is None:
            ending = EndingConditions(conditions, condition if home is not None else None)
            if run is not None and home is not None and home.begins and isinstance(run.memo, EndingConditions):
                ending = run.memo
        depth = around.depth if around is not None else place.depth
        return cls(
            tuple(layers), agent, depth, guard=guard, opened=tuple(opened), home=home, refused=refused, ending=ending
        )

    @classmethod
    async def resume(
        cls,
        guard: Guard,
        agent: str,
        keys: Sequence[str],
        *,
        otherwise: Sequence[str] = (),
        condition: TerminationCondition | None = None,
        around: "AgentRun | None" = None,
        within: RunContext | None = None,
        others: Sequence["AgentRun"] = (),
        **whom: Any,
    ) -> "AgentRun":
        """Continue the run that ``pause`` has kept under one of these keys for the same user, or else begin one.

        ``otherwise``: keys that are less certain. The run may have paused on another worker of the store.
        """
        run = None
        try:
            known = {layer.guard for layer in (*current_place().layers, *(around.layers if around is not None else ()))}
            if keys and guard not in known.union(*(block.agents for block in _blocks(within)[:1])):
                run = await _paused_run(guard, (keys, otherwise), RunInfo("", at=guard.clock(), **whom))
        except Exception as error:
            guard.faults.note("resume", error)  # the run begins anew
        more: dict[str, Any] = {"around": around, "run": run, "within": within, "others": others, **whom}
        return cls.start(guard, agent, condition=condition, **more)

    @classmethod
    def resume_now(cls, guard: Guard, agent: str, keys: Sequence[str], **more: Any) -> "AgentRun":
        """Do what ``resume`` does, for callers without an event loop."""
        make = partial(cls.resume, guard, agent, keys, **more)
        return drive(make, guard.shares_store, lambda lost: lost.end())

    @classmethod
    def join(cls, agent: str, handled: Collection[Guard]) -> "AgentRun | None":
        """Return an agent that is part of the runs around this code, or None where there are none.

        ``handled``: guards whose runs are left out, because the adapter takes care of them elsewhere.
        """
        place = current_place()
        outer = tuple([layer for layer in place.layers if layer.guard not in handled])
        if not outer:
            return None
        # calls at the same time have their own lanes
        place = place._replace(layers=outer, call=f"{place.call}#{next(batches)}")
        layers, opened, refused = _lanes_in(place, agent)
        ending, guard = EndingConditions(place.conditions), outer[-1].guard
        return cls(tuple(layers), agent, place.depth, guard=guard, opened=tuple(opened), refused=refused, ending=ending)

    def beside(self, agent: str, name: str) -> "AgentRun":
        """Return another agent in the same run, with a lane of its own. End it before the run ends."""
        layers = tuple(layer._replace(lane=f"{layer.lane}/{name}") for layer in self.layers)
        for (guard, run, lane), (_, _, parent) in zip(layers, self.layers, strict=True):
            guard.open_lane(run, lane, parent, concurrent=True)
        ending = EndingConditions(self.ending.all)
        return AgentRun(
            layers, agent, self.depth, guard=self.guard, opened=layers, refused=self._refused, ending=ending
        )

    @property
    def id(self) -> str:
        """The name of the run, as trips, ``spend("run:…")`` and the store have it."""
        return self.layers[-1].run.info.run if self.layers else ""

    @property
    def spent(self) -> "Spent":
        """What the run has used so far, with everything nested in it."""
        if not self.layers:
            return Spent("", None, 0, 0)
        guard, run, _ = self.layers[-1]
        return Spent(run.info.run, run.run_costs.spent_usd, *guard.accounts.spending.used_by(run.run_costs))

    @property
    def stopped(self) -> Trip | None:
        """The trip that has stopped this run, or a run around it."""
        trip: Trip | None = self._refused or self.guard.faults.attempt("adapter", self.find_stop)
        return trip

    def find_stop(self) -> Trip | None:
        """Return what has stopped one of the runs. ``stopped`` asks it, and survives a fault in it."""
        for guard, run, lane in self.layers:
            trip = run.stopped or (run.lanes[lane].stop_in_force() if lane in run.lanes else None)
            if trip is not None and guard.policy.mode == "enforce":
                return trip
        return None

    def enter(self) -> Trip | None:
        """Report that the agent begins to work. Return the trip if it was started too often.

        One that is nested too deep ends at its first model call, and its caller goes on.
        """
        make = partial(AgentEntered, depth=self.depth)
        trip: Trip | None = None if self._is_second else self.guard.faults.attempt("adapter", self._tell, make)
        return trip or self._refused

    def hand_off(self, target: str) -> Trip | None:
        """Report that the agent passes the conversation to ``target``, which continues in the same lane.

        Return the trip if that stops the run. Calls from now on belong to ``target``.
        """
        trip: Trip | None = self.guard.faults.attempt("adapter", self._tell, partial(HandOff, target=target))
        self.guard.faults.attempt("adapter", self.ending.handed_off, self.agent, target)
        self.agent = self.tools.agent = target
        return trip

    def leave_ended(self) -> None:
        """Go on without the runs around that have ended: work in the background may outlive the agent that began it.

        Where no run of its own guard is left, one begins for the same user. After a stop, nothing goes on.
        """
        for guard, run, _ in self.layers:
            if guard.runs.get(run.info.run) is not run:
                break
        else:
            return
        if self._ended or self.stopped is not None:
            return
        alive = [layer for layer in self.layers if layer.is_alive]
        before = next((layer.run.info for layer in self.layers if layer.guard is self.guard), None)
        if before is not None and all(layer.guard is not self.guard for layer in alive):
            whom = {"app": before.app, "user": before.user, "session": before.session, "labels": before.labels}
            self._home = Home.of(self.guard, None, (), None, whom)
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, FINALIZED.put, partial(end_layers, self._opened, self._home))
            self._finalizer.atexit = False
            alive.append(self._home.layer(self.agent))
        self.layers = self.tools.layers = tuple(alive)

    def _tell(self, make: Callable[..., Any]) -> Trip | None:
        """Tell every layer of an event. Return the trip if that stops the run."""
        trip = None
        self.leave_ended()
        for layer in self.layers:
            try:
                decision = self._decide(layer, layer.guard.check, make)
                trip = trip or self.stop_of(decision)
                if decision.action is Action.BLOCK and decision.enforced:
                    self._refusal = self._refusal or decision.for_model
            except Exception as error:
                trip = trip or self.guard.give_up("adapter", error, self.id, self.agent)
        return trip

    # ---- model calls ------------------------------------------------------------------------------------------------

    async def ask(self, read: Callable[[], ModelRequest]) -> Reply:
        """Ask for one model call. Wait while calls in flight hold the rest of a budget.

        ``read`` describes the request. A request that it cannot read is refused where it would get past a budget.
        """
        task = asyncio.current_task()
        try:
            return await self._ask(read, task)
        except Exception as error:
            return await self._ask_plain(read, error, task)

    def ask_now(self, read: Callable[[], ModelRequest]) -> Reply:
        """Do what ``ask`` does, for callers without an event loop."""

        def give_back(lost: Reply) -> None:
            if isinstance(lost, Permission):
                lost.release()

        try:
            return drive_layers(self.layers, self.ending, partial(self._ask, read, None), give_back)
        except Exception as error:
            return HELPERS.finish(partial(self._ask_plain, read, error, None), give_back)

    async def _ask(self, read: Callable[[], ModelRequest], task: "asyncio.Task[Any] | None") -> Reply:
        permission, owners = Permission(self, task), OWNERS.get()
        try:
            try:
                request = read()
            except Exception as error:
                self.guard.faults.note("adapter", error)
                request = read()
            if (counter := self.guard.policy.tokens) is not None and request.counts is not None:
                counted = await count_tokens(counter, request.counts)
                if counted is not None:
                    request = replace(request, input_tokens=counted, likely_tokens=counted)
            permission.measured = request
            request = self.guard.faults.attempt("adapter", self._learned, request) or request
        except Exception as error:
            for guard, run, _ in self.layers:
                if (trip := guard.give_up_call("adapter", error, run.info.run, self.agent)) is not None:
                    return trip
            request = ModelRequest()
        permission.request = request
        for _, run, lane in self.layers:
            if lane in run.lanes:
                run.lanes[lane].offered = request.tools
        try:
            notices: list[str] = self.guard.faults.attempt("adapter", self._report_answers) or []
            if (trip := self.stopped) is not None:
                return await self._last(request, trip, task)
            if self._refusal:
                return Ended(self._refusal, "max_delegation_depth")
            if self.ending.all and (ended := await self.ending.ask()) is not None:
                return ended
            if self.guard.model_choice is not None:
                permission.request = request = cheaper_request(self, request, no_loop=task is None)
            self.leave_ended()
            for layer in self.layers:
                try:
                    decision = await self._reserve(layer, request, permission, owners)
                except Exception as error:
                    decision = await self._recover(layer, request, permission, error)
                if (trip := self.stop_of(decision)) is not None:
                    permission.release()
                    return await self._last(request, trip, task)
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
                notices.append(layer.guard.faults.attempt("adapter", notice_kept, layer) or "")
        except BaseException:
            permission.release()
            raise
        permission.notice = "\n".join(dict.fromkeys(filter(None, notices)))
        return permission

    async def _ask_plain(
        self, read: Callable[[], ModelRequest], fault: Exception, task: "asyncio.Task[Any] | None"
    ) -> Reply:
        """Ask for a call on the ledgers alone, after a fault. Where a budget cannot be asked, the call is not made."""
        permission, trip = Permission(self, task), self._refused
        try:
            permission.measured = permission.request = read()
            for layer in self.layers:
                decision = await self._recover(layer, permission.request, permission, fault)
                if (trip := self.stop_of(decision)) is not None:
                    break
        except Exception as second:
            trip = self.guard.give_up_call("adapter", second, self.id, self.agent)
        if trip is None:
            return permission
        permission.release()
        return trip

    def _learned(self, request: ModelRequest) -> ModelRequest:
        """Return the request with its sizes raised by as much as the last one of the agent was underestimated."""
        last, reported = self._sizes.get(self.agent, (request, 0))
        known_now = max(request.hidden - last.hidden, 0)  # what the adapter has learned by itself since then
        reported -= known_now
        missing = reported - last.input_tokens
        if missing <= 0 or not last.input_tokens:
            return request
        if request.input_tokens < last.input_tokens:  # the history was shortened
            missing = -(-missing * request.input_tokens // last.input_tokens)
        likely = max(request.likely_tokens, reported + request.likely_tokens - last.likely_tokens)
        return replace(request, input_tokens=request.input_tokens + missing, likely_tokens=likely)

    def reported(self, request: ModelRequest, usage: Usage | None) -> None:
        """Remember how long a prompt really was, for the estimate of the next one."""
        if usage is not None and usage.input > 0:
            self._sizes[self.agent] = replace(request, counts=None), usage.input  # the request itself may be large

    async def _last(self, request: ModelRequest, trip: Trip, task: "asyncio.Task[Any] | None") -> Permission | Trip:
        """Return the permission for the last answer of a run that ``trip`` has stopped, or the trip without one."""
        try:
            return await last_permission(self, request, trip, task) or trip
        except Exception as error:
            self.guard.faults.note("adapter", error)
            return trip

    async def _reserve(
        self, layer: Layer, request: ModelRequest, permission: Permission, owners: tuple[Charge, ...]
    ) -> Decision:
        """Ask the guard of one layer. ``owners``: the charges around the call, so that one store holds it once."""
        if self._is_second and admits(layer.run.run_costs, layer.lane, owners):
            return ALLOW
        guard, event = layer.guard, self.model_call(layer, request, no_loop=permission.task is None)
        # An argument and not a context variable, because a call that waits continues in another thread.
        event.around = (*owners, *permission.charges) if permission.charged else owners
        with self._lock:
            decision = guard.check(event)
        if self.stop_of(decision) is not None:
            return decision
        reserved = await guard.reserve(event, slot=not event.no_loop)
        permission.charged.append((layer, event))
        return reserved if reserved.action > decision.action else decision

    async def _recover(self, layer: Layer, request: ModelRequest, permission: Permission, error: Exception) -> Decision:
        """Ask the ledger of one layer alone, after a fault of its guard."""
        guard, run, lane = layer

        def describe(at: float) -> ModelCall:
            sized = (dearest(guard, request), request.input_tokens, request.audio_tokens, request.max_output_tokens)
            return ModelCall(run.info.run, lane, self.agent, at, *sized, candidates=request.candidates)

        decision, event = await guard.recover("adapter", error, run.info.run, self.agent, describe)
        if event is not None:
            permission.charged.append((layer, event))
        return decision

    def model_call(self, layer: Layer, request: ModelRequest, *, no_loop: bool) -> ModelCall:
        guard, run, lane = layer
        model = dearest(guard, request)
        event = ModelCall(run.info.run, lane, self.agent, guard.clock(), model, request.input_tokens)
        event.audio_tokens, event.max_output_tokens = request.audio_tokens, request.max_output_tokens
        event.fixed_output, event.candidates = request.fixed_output, request.candidates
        event.no_loop, event.no_wait = no_loop, no_loop and in_event_loop()
        event.projected_tokens, event.instead_of = request.likely_tokens or None, request.instead_of
        event.context_limit = guard.context_limit(model)
        if run.info.is_automatic and run.info.message:  # a program asks the same again: the same answer is no news
            event.asked = hash((run.info.input, run.info.message)) or 1
        return event

    def _report_answers(self) -> list[str]:
        """Show the rules the answers since the last model call. Return notices for the model."""
        with self._lock:
            calls = self.tools.take_answered()
            if not calls:
                return []
            self.guard.faults.attempt("adapter", self.ending.executed, self.agent, calls)
            notices = []
            for layer in self.layers:
                answers = [answer for call in calls if (answer := call.answer_in(layer)) is not None]
                if not answers and self._is_second:
                    continue
                results = partial(ToolResults, batch=calls[0].batch, answers=answers)
                decision = self._decide(layer, layer.guard.after, results)
                if decision.action is Action.NUDGE and decision.enforced:
                    notices.append(decision.for_model)
            return notices

    def replay(self, answers: Sequence[tuple[ToolUse, object, Outcome | None]]) -> None:
        """Count a model call that another worker has made and billed, and show the rules what its tools answered.

        It counts for the limits on calls, but is not booked again.
        """
        self.guard.faults.attempt("adapter", self._report_answers)
        for layer in self.layers:
            self._decide(layer, layer.guard.check, ModelCall)
        self.tools.asked_for([use for use, _, _ in answers])
        for use, value, outcome in answers:
            self.tools.saw(use, value, outcome)
        self.guard.faults.attempt("adapter", self._report_answers)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the work of the agent, and its run if nobody else shares that. Safe to call twice."""
        self.guard.faults.attempt("adapter", self._leave)

    def pause(self, keys: Sequence[str], *, waits: bool = True) -> None:
        """Pause the run until an answer comes from outside, such as a human's approval.

        It is kept with everything that it has used and seen: ``resume`` continues it by any of these keys. A key is one
        that only this user can give, or that nobody else's pause has. ``waits=False``: the run may also be over.
        """

        def keep() -> None:
            if self._home is not None:
                self._home.keys, self._home.waits = tuple(keys), waits
                self._home.run.memo = self.ending

        self.guard.faults.attempt("adapter", self._leave, keep)

    def _leave(self, keep: Callable[[], None] | None = None) -> None:
        """Report the answers that no model call has reported, and leave the run. Do nothing the second time."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._finalizer.detach()
            self.guard.faults.attempt("adapter", self._report_answers)
        if keep is not None:
            keep()
        self.guard.faults.attempt("adapter", end_layers, self._opened, self._home)

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def is_unfinished(self) -> bool:
        """Whether the newest answer has called tools, so that the agent is not done."""
        return self.tools.has_calls

    def fault(self, error: Exception) -> None:
        """Record a fault of the adapter. Where the settings say so, it stops the run."""
        self.guard.fault("adapter", error, self.id, self.agent)

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


# ---- The run that an agent has begun or continues.


class Spent(NamedTuple):
    """What a run has used so far."""

    run: str  # its name
    usd: Decimal | None  # None: no price is known
    tokens: int
    calls: int  # of models

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with dollars as a text of decimals."""
        usd = None if self.usd is None else f"{self.usd:f}"
        return {"run": self.run, "usd": usd, "tokens": self.tokens, "model_calls": self.calls}


class Home:
    """The run of an agent, and who ends it: the agents that share it, or the block of ``runguard.run()`` around."""

    __slots__ = ("__weakref__", "begins", "block", "guard", "keys", "run", "waits")

    def __init__(self, guard: Guard, run: Run, block: RunContext | None, *, begins: bool) -> None:
        """``begins``: the run begins or continues with this agent. Else an earlier agent of the block has begun it."""
        self.guard, self.run, self.block, self.begins = guard, run, block, begins
        self.keys: tuple[str, ...] = ()  # keep the run under these, instead of ending it
        self.waits = False

    @classmethod
    def of(cls, guard: Guard, block: RunContext | None, keys: Sequence[str], run: Run | None, whom: Any) -> "Home":
        """Return the home of an agent, in ``block`` while that is open, and else in a run of its own.

        ``run``: the run to continue. None: a new run begins, and paused runs under ``keys`` cannot be resumed any more.
        """
        if block is not None:
            with block.lock:
                if not block.ended:
                    return cls._in(block, guard, keys, run, whom)
        made = cls(guard, run or _begin(guard, secrets.token_hex(8), keys, whom), None, begins=True)
        made.run.owners.add(made)
        return made

    @classmethod
    def _in(cls, block: RunContext, guard: Guard, keys: Sequence[str], run: Run | None, whom: Any) -> "Home":
        state = block.agents.get(guard)
        begins = state is None or guard.runs.get(state.run.info.run) is not state.run
        if state is None or begins:
            # one store may hold the runs of several guards, so a second one has a name of its own
            is_free = not block.agents and block.id not in guard.runs
            run = run or _begin(guard, block.id if is_free else secrets.token_hex(8), keys, whom)
            state = block.agents[guard] = AgentsState(run)
            run.owners.add(state)
        state.keys = ()  # the run is at work again: its end is no pause
        block.bill(guard, state.run)
        return cls(guard, state.run, block, begins=begins)

    def layer(self, agent: str) -> Layer:
        """Return the layer of an agent in the run. Each agent of a block but the first has a lane of its own."""
        number = next(self.block.agents[self.guard].lanes) if self.block is not None else 1
        if number == 1:
            return Layer(self.guard, self.run, ROOT_LANE)
        key = f"{ROOT_LANE}/{agent}#{number}"
        self.guard.open_lane(self.run, key, ROOT_LANE, concurrent=True)
        return Layer(self.guard, self.run, key)

    def end(self) -> None:
        """Leave the run. The last agent that shares it ends or keeps it; in a block, the end of the block does so."""
        guard, run = self.guard, self.run
        if self.block is not None:
            state = self.block.agents.get(guard)
            if state is not None and state.run is run:
                state.keys, state.waits = self.keys, self.waits
            return
        leave(guard, run, self, () if run.unsure else self.keys, waits=self.waits)


async def _paused_run(guard: Guard, choices: Sequence[Sequence[str]], info: RunInfo) -> Run | None:
    """Return the run that is paused under one of these keys, or None. After an outage, ``on_outage`` decides."""
    try:
        for keys in choices:
            info.run = info.run or await guard.pauses.named(keys, info)
        return await reopen(guard, info, may_be_elsewhere=True) if info.run else None
    except (StoreOutage, StoreError) as error:
        info.run = secrets.token_hex(8)
        return begin_unsure(guard, info, error)


def _begin(guard: Guard, name: str, keys: Sequence[str], whom: Any) -> Run:
    info = RunInfo(name, at=guard.clock(), **whom)
    guard.pauses.forget(keys, info)
    return guard.start(info)


def _blocks(within: RunContext | None) -> list[RunContext]:
    """Return the blocks around this code, the innermost first; the adapter's own where there is no other."""
    return live_blocks() or ([within] if within is not None else [])


def _limits_of(blocks: Sequence[RunContext], known: Collection[Guard]) -> list[Layer]:
    """Return the layers of the limits that blocks of ``runguard.run()`` put on everything inside, outermost first."""
    return [Layer(one.guard, one.state().run, ROOT_LANE) for one in limits_of(blocks) if one.guard not in known]


def _lanes_in(place: Place, agent: str) -> tuple[list[Layer], list[Layer], Trip | None]:
    """Return the layers of an agent that starts in this place, those with a lane of its own, and a stop after a fault.

    A layer whose lane cannot be opened counts all the same: in the lane of the tool call.
    """
    layers, opened = [], []
    refused: Trip | None = None
    for outer in place.layers:
        try:
            layers.append(child_layer(outer, place, agent))
            opened.append(layers[-1])
        except Exception as error:
            refused = refused or outer.guard.give_up("adapter", error, outer.run.info.run, agent)
            layers.append(outer)
    return layers, opened, refused


def end_layers(opened: tuple[Layer, ...], home: Home | None) -> None:
    """Close the lanes that an agent has opened, and leave the run that it began."""
    for guard, run, lane in opened:
        if lane != ROOT_LANE:
            guard.faults.attempt("adapter", guard.close_lane, run, lane)
    if home is not None:
        home.guard.faults.attempt("adapter", home.end)


def guard_of(policy: PolicySettings, *, gives_last_answers: bool = False, switches_models: bool = False) -> Guard:
    """Return the guard of an adapter, which says what it can carry out."""
    guard = Guard(Policy.build(**policy), gives_last_answers=gives_last_answers, switches_models=switches_models)
    guard.check_store()
    return guard


# ---- For whom a run is, and what it was asked: the app, user and session that its budgets count by, and its input.
#
# ``calls/run`` asks when a run begins. The adapters keep a ``Whom`` with what their users have set.

_log: Final = logging.getLogger("runguard")
Named = str | Callable[[Any], str | None]
_EXAMPLES: Final = {"app": "shop", "user": "ann", "session": "chat-7"}


def check_whom(**whom: object) -> None:
    """Reject an app, user or session that is no text: budgets could not be kept for it."""
    for name, value in whom.items():
        if not isinstance(value, str):
            raise PolicyError(f"{name} = {shown(value)}: give a text, such as {name}='{_EXAMPLES[name]}'")


@dataclass(frozen=True, slots=True)
class Whom:
    """What an adapter was told: texts, or functions of what its framework knows of a run."""

    app: str = ""
    user: Named = ""
    session: Named = ""

    def __post_init__(self) -> None:
        check_whom(app=self.app)
        for name, value in (("user", self.user), ("session", self.session)):
            if not callable(value):
                check_whom(**{name: value})

    def of(self, guard: Guard, given: object, **otherwise: str) -> dict[str, Any]:
        """Return the app, user, session and labels of a run that begins now.

        ``with runguard.run(user=…)`` around it wins over what the adapter was told. ``given``: what the framework
        knows of the run, for the functions. ``otherwise``: what it names by itself, such as a thread as the session.
        A function that fails raises ``PolicyError``: nobody would pay. In shadow mode it is logged. An agent that joins
        the run around it is not asked about: whoever began that run pays.
        """
        place = guard.faults.attempt("adapter", current_place) or OUTERMOST
        if any(layer.guard is guard for layer in place.layers):
            return {"app": self.app}
        found: dict[str, Any] = {"app": self.app, "user": "", "session": ""}
        blocks = list(live_blocks())
        for name in found:
            stated = next((text for block in blocks if (text := getattr(block, name))), "")
            found[name] = stated or self._told(guard, name, given) or otherwise.get(name, "")
        labels: dict[str, str] = {}
        for block in reversed(blocks):
            labels |= block.labels or {}
        found["labels"] = labels or None
        if any(block.automatic for block in blocks):
            found["is_automatic"] = True
        return found

    def _told(self, guard: Guard, name: str, given: object) -> str:
        value = getattr(self, name)
        if not callable(value):
            return str(value)
        try:
            named = value(given)
            if named is None or isinstance(named, str):
                return named or ""
            problem = f"gave {shown(named)}, not a text"
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        if guard.policy.mode == "enforce":
            raise PolicyError(f"{name}= {problem}, so nobody is known to pay for this run; let it return a text")
        _log.warning("runguard.unnamed: %s= %s", name, problem)
        return ""


_LONG_ENOUGH: Final = 40  # characters of a message that says by itself what is asked


def asked_of(guard: Guard, agent: str, asked: object, *, goes_on: bool) -> dict[str, Any]:
    """Return what a user asks of an agent, for the ``RunInfo``: its ``input``, and its words as the ``message``.

    By its words a message is known that a program has written. ``goes_on``: as for ``input_of``.
    """
    words = guard.faults.attempt("adapter", _words_in, asked) or ""
    return {"input": input_of(guard, agent, asked, goes_on=goes_on), "message": words[:_WORDS_KEPT]}


def _words_in(asked: object, depth: int = 4) -> str:
    """Return the texts in a message, or in its parts."""
    if isinstance(asked, str):
        return asked
    if depth and isinstance(asked, Mapping):
        return _words_in(asked.get("text") or asked.get("content"), depth - 1)
    if depth and isinstance(asked, list | tuple):
        return " ".join(filter(None, [_words_in(part, depth - 1) for part in asked[:_PARTS_READ]]))
    return ""


_PARTS_READ: Final = 64
_WORDS_KEPT: Final = 2_048  # characters, for as long as the run lives


def input_of(guard: Guard, agent: str, asked: object, *, goes_on: bool) -> bytes:
    """Return the identity of what a user asks of an agent, by which the rule ``resubmission`` knows it again.

    ``goes_on``: a conversation. A short message in the middle of one, such as "continue", has no identity: its meaning
    depends on what was said before.
    """
    found: Any = guard.faults.attempt("adapter", _input_of, agent, asked, goes_on)
    return found or b""


def _input_of(agent: str, asked: object, goes_on: bool) -> bytes:
    return b"" if goes_on and size_of(asked) < _LONG_ENOUGH else input_fingerprint(agent, asked)


_unnamed: Final[weakref.WeakSet[Guard]] = weakref.WeakSet()  # guards in shadow mode that have warned


def check_named(guard: Guard, *, user: str = "", session: str = "", **_: Any) -> None:
    """Reject a budget per user or session where none is named: all users would share one account."""
    if (user and session) or guard.policy.mode == "off":
        return
    kinds: Mapping[str, str] = {"user": user, "session": session}
    for budget in guard.policy.budgets:
        kind = next((kind for kind, _ in Per.parse(budget.per).parts if not kinds.get(kind, kind)), "")
        if not kind:
            continue
        text = f"a Budget with per = '{budget.per}' needs a {kind}: without one, all share an account; {_HOW[kind]}"
        if guard.policy.mode == "enforce":
            raise PolicyError(text)
        if guard not in _unnamed:
            _unnamed.add(guard)
            _log.warning("runguard.unnamed: %s", text)
        return


_HOW: Final = {
    "user": "make the call inside 'with runguard.run(user=…)', give user= to the guard, or count per='app'",
    "session": "make the call inside 'with runguard.run(session=…)', give session= to the guard "
    "(LangChain: a thread_id in the config), or count per='app'",
}
