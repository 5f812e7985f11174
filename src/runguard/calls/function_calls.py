"""One call of a guarded function, from its permission to its bill, at every layer that limits it.

``calls/functions`` makes a ``GuardedCall`` for each call. It has a layer for each run with limits around the call, and
one for the function itself. ``Caller`` is one guarded function: its settings, its state in each run, and what its calls
cost.
"""

import asyncio
import inspect
import logging
import os
import threading
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from decimal import Decimal
from typing import Any, Final
from weakref import WeakSet

from runguard.background import FINALIZED
from runguard.calls.function_settings import Costs, GuardSettings, NoProgress, Ticket, turns_of, watch_loops
from runguard.calls.model_calls import write_off
from runguard.calls.run import input_of
from runguard.calls.surroundings import HELPERS, SURROUNDINGS, RunContext, limits_of, live_blocks, open_ones
from runguard.core.breaker import Permit
from runguard.core.decision import ALLOW, Action, Decision, Finding, Trip
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.money import BudgetStatus, shown
from runguard.core.outcomes import provider_status
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Controls, Guard
from runguard.engine.reserving import StepOut
from runguard.engine.resume import is_over
from runguard.engine.runs import Run
from runguard.engine.spending import scopes_of
from runguard.ledger.ledger import Hold, StoreError, StoreOutage
from runguard.pricing.rates import Rates, Usage
from runguard.providers.errors import was_unbilled
from runguard.providers.messages import Reading, Request, newest_results, read, read_request, request_mark
from runguard.providers.usage import GrowingPrompts, tokens_in

_log: Final = logging.getLogger("runguard")

# ---- One guarded function.

_NAME_CHARS: Final = 120
_LINES_LOGGED: Final = 33
_START_AGAIN: Final = "reset() or a new run starts again from zero"
_ADVICE: Final = {
    "cycle": f"{_START_AGAIN}; to allow more, raise loop={{'repeats': …}}, set loop={{'by': 'call'}} to compare "
    "arguments alone, or give None as the signature of calls that may repeat",
    "unpriced": f"return {{'usd': …}}, give cost= or prices=, or set on_unpriced='tokens'; {_START_AGAIN}",
    "breaker": "wait until retry_after has passed: then one call is tried",
    "context": f"send less, then {_START_AGAIN}; to allow more, raise context={{'max_context_tokens': …}}",
    "deadline": f"{_START_AGAIN}; to allow more, raise max_seconds",
    "model_calls": f"{_START_AGAIN}; to allow more, raise max_model_calls",
}


@dataclass(slots=True, eq=False)
class RunState:
    """What one guarded function knows about one run."""

    run: Run
    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float | None = None  # when the period of the budget that stopped the run ends
    progress: NoProgress | None = None  # None: loops are not compared by results
    prompts: GrowingPrompts = field(default_factory=GrowingPrompts)


class Caller(Controls):
    """One guarded function, or the limits of one ``run``: its guard, its state in each run, and its calls."""

    def __init__(self, name: str, settings: GuardSettings) -> None:
        self.name, self.settings = name[:_NAME_CHARS], settings
        self.guard = Guard(settings.policy, breaker_runs=1, advice=_ADVICE)
        self.guard.check_store()
        self.is_off = settings.policy.mode == "off"
        self.enforces = settings.policy.mode == "enforce"
        self.is_lazy = False  # an async generator does nothing before its first piece
        self.costs = Costs(self.name, settings, self.guard.accounts.pricing, self.guard.clock)
        self.turns = turns_of(settings.policy.hold_seconds)  # of calls whose cost is known only afterwards
        self.context: RunContext | None = None  # for the limits of a run: that run, also in a run inside it
        # nothing has to be awaited to open a call: neither a breaker nor a store
        self.opens_at_once = not settings.breaker and not self.guard.shares_store
        self.reads_request = settings.in_usd or settings.in_tokens or settings.context
        self._logged: set[tuple[str, ...]] = set()  # lines that are logged once
        self._lock = threading.Lock()
        self._own: RunState | None = None
        _CALLERS.add(self)

    def begin_anew(self) -> None:
        """Let the calls of a process that was forked off be a run of their own."""
        self._own, self._lock = None, threading.Lock()

    # ---- runs -------------------------------------------------------------------------------------------------------

    def state(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> RunState:
        """Return the current run: that of ``with runguard.run(...)``, or the one that began with this function.

        The arguments of its first call are its input.
        """
        context = self.context or SURROUNDINGS.get().run
        while context is not None and context.ended:
            context = context.outer
        if context is None:
            own = self._own
            if own is None:
                with self._lock:
                    own = self._own = self._own or self._begin(RunContext(), args, kwargs)
            return own
        known = context.states.get(self)
        if known is None:
            with self._lock:
                known = context.states.get(self) or self._begin(context, args, kwargs)
                context.states[self] = known
            context.bill(self.guard, known.run)
        return known

    def _begin(self, context: RunContext, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> RunState:
        app, now = context.app or self.name, self.guard.clock()
        asked = input_of(self.guard, self.name, [*args, kwargs], goes_on=False) if args or kwargs else b""
        info = RunInfo(context.id, app, context.user, context.session, "", now, labels=context.labels, input=asked)
        state, policy = RunState(self.guard.start(info)), self.settings.policy
        if self.settings.loop and self.settings.by == "result":
            assert policy.cycle_repeats is not None
            state.progress = NoProgress(policy.cycle_repeats, policy.max_cycle_len or 1)
        return state

    def reset(self) -> None:
        """Begin a new run, with new limits and an empty memory.

        Inside ``with runguard.run(...)``, for this function in that block.
        """
        context = self.context or SURROUNDINGS.get().run
        with self._lock:
            if context is not None and not context.ended:
                old = context.states.pop(self, None)
            else:
                old, self._own = self._own, None
        if old is not None:
            self.guard.end(old.run.info.run)

    def extend(
        self, scope: str | None = None, *, usd: Any = None, tokens: Any = None, calls: Any = None
    ) -> list[BudgetStatus]:
        """Raise or lower the caps of a scope, or of the current run. Runs that these caps stopped may go on."""
        moved = self.guard.accounts.extend(scope or scopes_of(self.state().run.info)[0], usd, tokens, calls)
        scopes = {status.scope for status in moved}
        for run in list(self.guard.runs.values()):
            trip = run.stopped
            if trip is not None and trip.rule == "budget" and trip.scope_id in scopes:
                run.lift()
        return moved

    def flush(self, seconds: float = 2.0) -> bool:
        """Wait, at most this long, until everything handed over has left and dropped streams are booked."""
        return FINALIZED.flush(seconds) and super().flush(seconds)

    # ---- a request --------------------------------------------------------------------------------------------------

    def check_progress(
        self, state: RunState, progress: NoProgress, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Look at the results, in a request, of the tools that the last answer has asked for."""
        run = state.run
        results = newest_results(args, kwargs) if progress.waits_for_results else []
        mark = None if results else request_mark(args, kwargs)
        with state.lock:
            finding = progress.next_request(run.info.run, self.name, self.guard.clock(), results, mark)
            if finding is not None:
                self.stop_run(state, finding)

    async def counted(self, request: Request, args: tuple[Any, ...], kwargs: dict[str, Any], no_loop: bool) -> Request:
        """Return the request with the user's own token count.

        A count of 0 for a prompt that has text is ignored, because it would reserve nothing.
        """
        assert self.settings.tokens is not None
        try:
            tokens = self.settings.tokens(*args, **kwargs)
            if not no_loop and inspect.isawaitable(tokens):
                tokens = await tokens
            if type(tokens) is int and (tokens > 0 or (tokens == 0 and not request.input_tokens)):
                return replace(request, input_tokens=tokens)
            what = f"gave {shown(tokens)}"
        except Exception as error:
            what = f"raised {type(error).__name__}"
        _log.warning("runguard.tokens_failed: tokens %s for '%s'; using an estimate of the prompt", what, self.name)
        return request

    # ---- the queue of calls whose cost is unknown -------------------------------------------------------------------

    def take_place(self, call: "LayerCall", no_loop: bool, owners: tuple[Charge, ...]) -> None:
        """Give a call its place among the calls whose cost is known only afterwards.

        ``owners``: the charges around it.
        """
        if not self.enforces or None not in self.costs.bound(call.request):
            return
        # A call made inside a call of the same function, or of any that others wait for: waiting might never end.
        if any(charge.home is self.guard.accounts for charge in owners):
            call.alongside = True
            return
        call.ticket = ticket = Ticket(frozenset(id(charge) for charge in owners if id(charge) in _WAITED_FOR))
        self.turns.limit = self.costs.width
        if self.turns.take(ticket, join=True):
            return
        running = list(self.turns.holders)
        if ticket not in running and ticket.cannot_wait_for(running, no_loop):
            self.turns.give_back(ticket)
            call.ticket, call.alongside = None, True
        else:
            self._log_once(
                "runguard.unknown_cost: the cost of a call of '%s' is known only afterwards, so the first calls "
                "run one at a time; set cost=, or a price and an output limit, to run them at once",
                self.name,
            )

    def give_back(self, ticket: Ticket | None) -> None:
        """Let the next call in the queue start: this one has ended, or was not made."""
        if ticket is not None:
            _WAITED_FOR.pop(id(ticket.charge), None)
            self.turns.limit = self.costs.width
            self.turns.give_back(ticket)

    # ---- stops and faults -------------------------------------------------------------------------------------------

    def stop_run(self, state: RunState, finding: Finding) -> Trip | None:
        """Stop a run for a reason that was found here."""
        run = state.run
        if run.stopped is not None:
            return run.stopped
        return self.guard.stop(run, ModelCall(run.info.run, ROOT_LANE, self.name, self.guard.clock()), finding)

    def give_up_call(self, error: Exception) -> None:
        """Count an internal error that leaves a call without a run. Raise where the call would get past a budget."""
        trip = self.guard.give_up_call("functions", error, "", self.name)
        if trip is not None:
            raise RunStoppedError.of(trip)

    def log_problems(self, problems: tuple[str, ...]) -> None:
        """Log why an answer was booked as an estimate, each reason once."""
        for problem in problems:
            self._log_once("runguard.unreadable: the answer of '%s': %s", self.name, problem)

    def _log_once(self, message: str, *names: str) -> None:
        if (message, *names) not in self._logged and len(self._logged) < _LINES_LOGGED:
            self._logged.add((message, *names))
            _log.info(message, *names)


# Calls with tickets, by the identity of their charge. A call inside one of them must not wait for another.
_WAITED_FOR: Final[dict[int, Charge]] = {}


_CALLERS: Final[WeakSet[Caller]] = WeakSet()


def _begin_anew() -> None:
    """Begin new runs in a process that was forked off."""
    for caller in list(_CALLERS):
        caller.begin_anew()


if hasattr(os, "register_at_fork"):  # asking for the number of the process would cost a system call for every call
    os.register_at_fork(after_in_child=_begin_anew)


@dataclass(slots=True)
class LayerCall:
    """A call at one layer: the run with limits around it, or the function itself."""

    caller: Caller
    state: RunState
    request: Request
    charge: Charge | None = None
    ticket: Ticket | None = None  # its cost is not known beforehand: others wait for it
    alongside: bool = False  # its cost is not known beforehand, and it cannot wait for the others
    permit: Permit | None = None


class GuardedCall:
    """One call of a guarded function, at every layer that limits it: the runs with limits around it, then the function.

    ``ask`` or ``ask_now`` gets permission from every layer, the outermost first. Exactly one of ``settle``, ``fail``,
    ``release`` and ``drop`` then ends the call; after that the others do nothing.
    """

    __slots__ = ("_caller", "_is_inner", "_is_stacked", "is_over", "layers", "owners")

    def __init__(self, caller: Caller, inner: list[Caller] | None, *, is_stacked: bool) -> None:
        """``inner``: the guard that the guard around calls directly. ``is_stacked``: the function is itself guarded.

        When that guard refuses, no call was made.
        """
        self._caller, self._is_stacked, self.is_over = caller, is_stacked, False
        self._is_inner = False  # the guard around makes this call, and has asked the runs around both
        if inner is not None:
            with suppress(ValueError):  # another attempt of a retry between the two is one more call
                inner.remove(caller)
                self._is_inner = True
        self.layers: list[LayerCall] = []  # that were asked
        self.owners: tuple[Charge, ...] = ()  # the charges around the call, and its own

    @property
    def is_open(self) -> bool:
        """Whether the call was asked for and has not ended."""
        return bool(self.layers) and not self.is_over

    @property
    def charges(self) -> list[Charge]:
        """What the layers hold for the call."""
        return [layer.charge for layer in self.layers if layer.charge is not None]

    # ---- before the call --------------------------------------------------------------------------------------------

    async def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, no_loop: bool = False) -> None:
        """Get permission from every layer, or raise the error that says why not.

        ``no_loop``: a caller without an event loop drives this. After a fault each layer is asked on its ledger alone.
        """
        owners = OWNERS.get()
        self.layers, self.is_over, self.owners = [], False, open_ones(owners) if owners else owners
        try:
            for caller in self._callers() if SURROUNDINGS.get().run is not None else (self._caller,):
                state = caller.state(args, kwargs)
                if state.progress is not None and state.run.stopped is None:
                    caller.check_progress(state, state.progress, args, kwargs)
                says_more = caller.reads_request and (args or kwargs)
                request = read_request(args, kwargs, state.prompts.measure) if says_more else Request()
                layer = LayerCall(caller, state, request)
                self.layers.append(layer)  # before it holds anything, so that an error takes back all of them
                if caller.settings.tokens is not None:
                    layer.request = await caller.counted(layer.request, args, kwargs, no_loop)
                if not _open_at_once(layer, self.owners):
                    await _open_in_turn(layer, self.owners, no_loop)
                if layer.charge is not None:
                    self.owners = (*self.owners, layer.charge)
        except BaseException as fault:
            self.release()
            if not isinstance(fault, Exception) or isinstance(fault, RunStoppedError | PolicyError):
                raise
            await self._recover(fault, args, kwargs, no_loop=no_loop)

    def ask_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do what ``ask`` does, for callers without an event loop."""
        job = self.ask(args, kwargs, no_loop=True)
        try:
            job.send(None)
        except StopIteration:  # nothing had to wait, so the first step was the whole coroutine
            return
        try:
            HELPERS.finish(lambda: job, lambda _: self.release())
        except (RunStoppedError, PolicyError):
            raise
        except Exception as fault:  # of the helper itself
            self._go_without(fault)

    def _callers(self) -> list[Caller]:
        """Return the runs with limits around the call, the outermost first, and then the function itself."""
        return [*([] if self._is_inner else limits_of(live_blocks())), self._caller]

    async def _recover(self, fault: Exception, args: tuple[Any, ...], kwargs: dict[str, Any], *, no_loop: bool) -> None:
        """Open the call at each layer after a fault: on its ledger alone. Raise where one of them refuses."""
        known = {layer.caller: layer.request for layer in self.layers}
        self.layers, self.is_over, self.owners = [], False, open_ones(self.owners)
        try:
            if no_loop:
                await StepOut()
            for caller in self._callers():
                try:
                    attempt = caller.guard.faults.attempt
                    request = known.get(caller) or attempt("functions", read_request, args, kwargs) or Request()
                    layer = LayerCall(caller, caller.state(), request)
                except Exception as second:
                    caller.give_up_call(second)
                else:
                    self.layers.append(layer)
                    await _recover(layer, fault)
        except BaseException as second:
            self.release()
            if not isinstance(second, Exception) or isinstance(second, RunStoppedError | PolicyError):
                raise
            self._go_without(second)

    def _go_without(self, fault: Exception) -> None:
        """Make the call without a hold after a second fault, where the policy allows that."""
        self.layers, self.is_over = [], False
        self._caller.give_up_call(fault)

    # ---- after the call ---------------------------------------------------------------------------------------------

    def settle(self, result: Any, reading: Reading | None = None, received: int | None = None) -> None:
        """Book a call that returned, in each of its layers, and look for loops.

        ``received``: the bytes of a stream that was left, or that ended, before it reported all of them. The call is
        then booked as an estimate.
        """
        if self.is_over:
            return
        self.is_over = True
        for layer in self.layers:
            caller, settings = layer.caller, layer.caller.settings
            try:
                answer = read(result, said=settings.loop) if reading is None else reading
                if reading is None and layer.request.rounds > 1:
                    answer = _without_known_rounds(layer.request, answer)
                if layer.charge is not None:
                    _book(layer, layer.charge, answer, result, received)
                if answer.problems:
                    caller.log_problems(answer.problems)
                if settings.breaker:
                    _report(layer, True)
                if settings.loop:
                    watch_loops(layer, answer, result)
            except BaseException as fault:
                self._drop(layer, fault)
            finally:
                if layer.ticket is not None:
                    caller.give_back(layer.ticket)

    def fail(
        self,
        error: BaseException | None,
        size: int = 0,
        *,
        streaming: bool = False,
        reading: Reading | None = None,
        last: Any = None,
    ) -> None:
        """Book a call that raised, was cancelled or ended early: what it may have cost, flagged as an estimate.

        ``size``: the bytes that came. ``last``: the last piece.
        """
        if self._is_stacked and isinstance(error, RunStoppedError) and not size:
            self.release()
        if self.is_over:
            return
        self.is_over = True
        status = provider_status(error) if isinstance(error, Exception) else None
        spared = status in _BAD_REQUEST or not isinstance(error, Exception) or isinstance(error, RunStoppedError)
        for layer in self.layers:
            try:
                _report(layer, None if spared else False)
                if layer.charge is not None:
                    layer.caller.guard.sink.tell("failed", layer.charge, error)
                    _book_failure(layer, layer.charge, error, size, streaming, reading, last)
            except BaseException as fault:
                self._drop(layer, fault)
            finally:
                layer.caller.give_back(layer.ticket)

    def _drop(self, layer: LayerCall, fault: BaseException) -> None:
        """Drop the call at one layer after an internal error, which must not cost the caller the result.

        Where user code ends the program or the task, drop the call at every layer.
        """
        if not isinstance(fault, Exception):
            self.drop(fault)
            raise fault
        _drop_layer(layer, fault)

    def release(self) -> None:
        """Release the reservations of a call that was allowed and then not made."""
        if self.is_over:
            return
        self.is_over = True
        for layer in self.layers:
            caller, guard = layer.caller, layer.caller.guard
            attempt = guard.faults.attempt  # an error in one step does not prevent the others
            if layer.charge is not None:
                guard.release(layer.charge)
                attempt("functions", guard.unspent, layer.state.run.info.run)
            if layer.permit is not None:
                attempt("functions", guard.breakers.release, caller.name, layer.permit)
            attempt("functions", caller.give_back, layer.ticket)

    def drop(self, error: BaseException) -> None:
        """Book what is reserved for the call as an estimate, after an internal error. No other call waits for it then.

        A function of the user may also end the program or the task, with ``SystemExit`` for example. That is no error.
        """
        self.is_over = True
        for layer in self.layers:
            _drop_layer(layer, error)

    def fault(self, error: Exception) -> None:
        """Count an internal error in a call that continues."""
        for layer in self.layers:
            layer.caller.guard.fault("stream", error, layer.state.run.info.run)


# ---- Before a call: permission from one layer.


def _open_at_once(call: LayerCall, owners: tuple[Charge, ...]) -> bool:
    """Open a call where nothing has to be awaited, which is the common case. Return False where that is not possible.

    ``owners``: the charges around it. After False nothing has happened.
    """
    caller, run = call.caller, call.state.run
    if not caller.opens_at_once or run.stopped is not None:
        return False
    guard, is_counted = caller.guard, False
    event: ModelCall | None = None
    try:
        known = caller.costs.bound(call.request)
        # the most that its model can cost may fit: then no call has to wait
        bound = caller.costs.of_model(call.request) if None in known else known
        if bound is None:
            return False
        event = _event(call, guard.clock(), owners)
        event.bound = bound
        with call.state.lock:
            decision = guard.check(event)
        if decision is not ALLOW:
            _obey(call.state, decision)
        is_counted = True
        if guard.reserve_now(event):
            call.charge = event.charge
            return True
    except RunStoppedError:
        raise
    except Exception:
        if event is not None and event.charge is not None:
            guard.release(event.charge)
        if run.info.run in guard.runs:  # otherwise it has ended meanwhile, and the call belongs to the next one
            if is_counted:
                guard.unspent(run.info.run)
            raise
    if is_counted:
        guard.unspent(run.info.run)
    return False


def _event(call: LayerCall, at: float, owners: tuple[Charge, ...]) -> ModelCall:
    """Describe a call to the guard. ``owners``: the charges around it."""
    caller, request, run = call.caller, call.request, call.state.run.info.run
    prompt, audio, most = request.input_tokens, request.audio_tokens, request.max_output_tokens
    event = ModelCall(run, ROOT_LANE, caller.name, at, request.model, prompt or 0, audio, most)
    event.around = owners  # not a context variable, because a call that waits continues in another thread
    if caller.settings.context:
        event.projected_tokens = prompt
        event.context_limit = caller.guard.context_limit(request.model)
    return event


async def _open_in_turn(call: LayerCall, owners: tuple[Charge, ...], no_loop: bool) -> None:
    """Open a call once it may run beside calls of unknown cost, or raise the error that says why not."""
    caller = call.caller
    no_wait = no_loop and asyncio._get_running_loop() is not None  # it blocks that loop, and the calls on it
    caller.take_place(call, no_loop, owners)
    if call.ticket is not None:
        if call.ticket not in caller.turns.holders:
            if no_loop and not no_wait:
                await StepOut()
            if no_wait or not await caller.turns.wait(call.ticket, caller.settings.policy.hold_seconds):
                caller.give_back(call.ticket)  # the ledger knows what the others have reserved
                call.ticket, call.alongside = None, no_wait
        if call.ticket is not None:
            call.ticket.is_alone = caller.turns.limit == 1
    if no_loop and caller.guard.shares_store:
        await StepOut()
    while True:
        try:
            await _open(call, owners, no_loop, no_wait)
            break
        except (RunStoppedError, PolicyError):
            raise
        except Exception:
            if call.state.run.info.run in caller.guard.runs:
                raise
            call.state = caller.state()  # its run has ended meanwhile, so the call belongs to the next one
    if call.ticket is not None and call.charge is not None:
        call.ticket.charge = _WAITED_FOR[id(call.charge)] = call.charge
        call.ticket.known = caller.guard.faults.attempt("functions", caller.costs.least, call.request) or (0, 0)


async def _recover(call: LayerCall, error: Exception) -> None:
    """Reserve a call on its ledger alone, after a fault of the guard."""
    caller = call.caller

    def describe(at: float) -> ModelCall:
        event = _event(call, at, ())
        # a cost that cannot be worked out is unknown: the call takes what is left
        event.bound = caller.guard.faults.attempt("functions", caller.costs.expected, call.request) or (None, None)
        usd, tokens = caller.costs.highest
        event.least = usd or 0, tokens or 0
        return event

    decision, event = await caller.guard.recover("functions", error, call.state.run.info.run, caller.name, describe)
    if decision.action is Action.STOP and decision.enforced and decision.trip is not None:
        raise RunStoppedError.of(decision.trip)
    if event is not None:
        call.charge = event.charge


async def _open(call: LayerCall, owners: tuple[Charge, ...], no_loop: bool, no_wait: bool) -> None:
    """Ask the breaker, the rules and the budgets of one layer.

    ``no_wait``: the caller blocks an event loop, and with it the calls that it would wait for.
    """
    caller, state, request = call.caller, call.state, call.request
    guard, run, costs = caller.guard, state.run, caller.costs
    if run.stopped is not None:
        await _lift(caller, state)
        if run.stopped is not None:
            raise RunStoppedError.of(run.stopped)
    if caller.settings.breaker:
        call.permit = await _admit(caller, state)
    event = _event(call, guard.clock(), owners)
    event.no_loop, event.no_wait, event.least = no_loop, no_wait, costs.least(request)
    is_alone = call.ticket is not None and call.ticket.is_alone
    event.bound = event.least if call.alongside else costs.bound(request) if is_alone else costs.expected(request)
    try:
        with state.lock:
            decision = guard.check(event)
        _obey(state, decision)
        if call.alongside:
            await _make_room(caller)
        decision = await guard.reserve(event, slot=False)
        _obey(state, decision)
    except BaseException:
        if event.charge is not None and not event.charge.over:  # an internal error
            guard.release(event.charge)
            guard.faults.attempt("functions", guard.unspent, event.run, event)
        if call.permit is not None:
            permit, call.permit = call.permit, None
            guard.faults.attempt("functions", guard.breakers.release, caller.name, permit)
        raise
    call.charge = event.charge


async def _make_room(caller: Caller) -> None:
    """Let the call that runs alone, and holds the whole remainder, keep only what it must hold at least."""
    ticket = next((one for one in list(caller.turns.holders) if one.is_alone), None)
    ledger = caller.guard.accounts.ledger
    charge = ticket.charge if ticket is not None else None
    if ticket is None or charge is None or charge.hold is None:
        return
    ttl = caller.settings.policy.hold_seconds
    try:
        hold = await ledger.reserve(charge.lines.accounts, (*ticket.known, 1), force=True, ttl=ttl)
    except (StoreOutage, StoreError):
        return  # the reservation that follows meets the same store, and on_outage decides
    if not isinstance(hold, Hold):
        return
    held, charge.hold = charge.hold, hold
    ledger.release(held)
    if charge.over:  # it has ended meanwhile
        ledger.release(hold)
    else:
        charge.held = ticket.known[0]


def _obey(state: RunState, decision: Decision) -> None:
    """Raise the error that a decision demands, and remember when its reason will be gone."""
    if decision.action < Action.BLOCK or not decision.enforced or decision.trip is None:
        return
    if decision.finding is not None:  # otherwise an earlier stop, for which ``until`` is already set
        money = decision.finding.money
        state.until = money.ends if money is not None and decision.trip.rule == "budget" else None
        if decision.trip.rule == "budget" and _only_held(decision.finding):
            state.until = 0.0  # other calls will settle: the next call may try again
    raise RunStoppedError.of(decision.trip)


def _only_held(finding: Finding) -> bool:
    """Return whether only the reservations of other calls were in the way. Then the budget is not used up."""
    evidence = finding.evidence[0] if finding.evidence else {}
    if "reserved" not in evidence:
        return False
    spent, reserved, wanted, limit = (Decimal(evidence[name]) for name in ("spent", "reserved", "wanted", "limit"))
    return reserved > 0 and spent < limit and (spent + wanted <= limit or wanted >= limit)


async def _lift(caller: Caller, state: RunState) -> None:
    """Lift the stop of a run if its reason is gone.

    That is so if a new period began, the kill switch was released, another process has raised the cap, or after a fault
    or an outage, because the call asks again.
    """
    run, guard = state.run, caller.guard
    trip, ledger = run.stopped, guard.accounts.ledger
    if trip is None:
        return
    if trip.rule == "kill_switch":
        await ledger.refresh()
    is_new_period = trip.rule == "budget" and state.until is not None
    is_new_period = is_new_period and ledger.period_time(guard.clock()) >= (state.until or 0.0)
    asks = trip.rule == "kill_switch" or ledger.is_shared
    if is_new_period or trip.rule == "guard_error" or (asks and await is_over(guard, run, trip)):
        run.lift()


async def _admit(caller: Caller, state: RunState) -> Permit | None:
    """Ask the breaker."""
    guard, name = caller.guard, caller.name
    permit = await guard.breakers.claim_probe(name, guard.clock())
    breaker = guard.breakers.get(name)
    if permit is not None or breaker is None:
        return permit
    now = guard.accounts.ledger.now(guard.clock())
    permit = breaker.admit(now)
    if permit is not None:
        return permit
    wait, limit = breaker.retry_after(now), breaker.threshold
    evidence = ({"retry_after": f"{wait:.3f}"},)
    finding = Finding("breaker", Action.BLOCK, limit, limit, "failures in a row", "call", name, name, "", evidence)
    event = ModelCall(state.run.info.run, ROOT_LANE, name, now)
    with state.lock:
        trip = guard.refuse(state.run, event, finding)
    if not caller.enforces:
        return None
    raise RunStoppedError.of(trip)


# ---- After a call: book it at one layer, whatever happened to it, and tell the breaker how it ended.

# A bad request says nothing about the health of the provider.
_BAD_REQUEST: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})


def _drop_layer(call: LayerCall, error: BaseException) -> None:
    caller, guard, charge = call.caller, call.caller.guard, call.charge
    if charge is None or charge.over:
        if isinstance(error, Exception):
            guard.fault("functions", error, call.state.run.info.run, caller.name)
    elif _is_priced(call):
        write_off(guard, charge, "functions", error)
    elif isinstance(error, Exception):
        guard.close(charge, error)
    else:
        guard.faults.attempt("functions", guard.accounts.close, charge)
    guard.faults.attempt("functions", caller.give_back, call.ticket)


def _is_priced(call: LayerCall) -> bool:
    """Return whether the price of the model gives the cost, and not a function or a figure of the user."""
    settings, charge = call.caller.settings, call.charge
    is_own = settings.cost_of_result is not None or settings.fixed_cost is not None
    return charge is not None and isinstance(charge.rates, Rates) and not is_own


def _report(call: LayerCall, ok: bool | None) -> None:
    """Tell the breaker how the call ended. ``ok`` None: that says nothing for or against the function."""
    caller, guard = call.caller, call.caller.guard
    if ok is None and call.permit is not None:
        guard.breakers.release(caller.name, call.permit)
    elif ok is not None and caller.settings.breaker:
        permit = call.permit or Permit(0)
        guard.breakers.report(caller.name, permit, ok, guard.clock(), call.state.run.info.run)


# ---- What a call cost.


def _without_known_rounds(request: Request, answer: Reading) -> Reading:
    """Return the answer with the requests that the client made for this call alone, as far as is known."""
    if request.hides_rounds:
        return replace(answer, earlier=(Usage(),) * (request.rounds - 1))
    # rounds that were in the prompt
    return replace(answer, earlier=answer.earlier[: -request.answered]) if request.answered else answer


def _book(call: LayerCall, charge: Charge, answer: Reading, result: Any, received: int | None) -> None:
    caller, request, usage = call.caller, call.request, answer.usage
    settings, costs = caller.settings, caller.costs
    expectations = caller.guard.accounts.expectations
    model, guessed = answer.model or request.model, False
    if usage is not None:
        if received:
            usage = replace(usage, output=max(usage.output, tokens_in(received)))
        elif answer.size and not usage.output:
            usage, guessed = replace(usage, output=tokens_in(answer.size)), True
        if not usage.input:
            usage, lacked = _with_input(usage, answer, request)
            guessed = guessed or lacked
    elif request.input_tokens is not None or answer.size:
        output = tokens_in(answer.size) if answer.size else 0
        if not output and settings.cost_of_result is None and settings.fixed_cost is None:
            # an answer that cannot be read is not a short one
            output = expectations.typical(charge.model, request.max_output_tokens)
        usage, guessed = Usage(request.input_tokens or 0, output, audio=request.audio_tokens), True
    nano = costs.of(answer, usage, result)
    has_rates = nano is None and isinstance(caller.guard.accounts.rates_of(charge, model), Rates)
    if usage is None and has_rates and answer.problems:  # the usage that it states cannot be right
        usage, guessed = Usage(output=expectations.typical(charge.model, request.max_output_tokens)), True
    is_priced = nano is not None or (usage is not None and has_rates)
    is_estimated = guessed and (nano is None or settings.in_tokens)
    unknown: tuple[str, ...] = ()
    if usage is None or not is_priced:
        highest_usd, highest_tokens = costs.highest
        if usage is None and settings.in_tokens:
            if highest_tokens:
                usage, is_estimated = Usage(input=highest_tokens), True
            else:
                unknown = ("tokens",)
        if not is_priced and settings.in_usd:
            if highest_usd:
                nano, is_estimated = highest_usd, True
            elif settings.policy.on_unpriced == "refuse":
                unknown = (*unknown, "usd")
    if answer.earlier:
        _settle_requests(call, charge, answer, usage or Usage(), nano, is_estimated or received is not None)
    else:
        estimated = is_estimated or received is not None
        caller.guard.settle(charge, usage or Usage(), model, nano=nano, estimated=estimated)
    for unit in unknown:
        _stop_unknown(call, unit, model)
    if costs.learns and not is_estimated and (booked := charge.booked) is not None:
        costs.learn(booked.nano if is_priced else None, booked.input + booked.output)


def _book_failure(
    call: LayerCall,
    charge: Charge,
    error: BaseException | None,
    size: int,
    streaming: bool,
    reading: Reading | None,
    last: Any,
) -> None:
    caller, settings, guard, request = call.caller, call.caller.settings, call.caller.guard, call.request
    received = tokens_in(size)
    # The client made several requests, and the last one reported nothing.
    lacks_last = reading is not None and bool(reading.earlier) and reading.usage is None
    if reading is not None and lacks_last:
        reading = replace(reading, usage=Usage(input=max(usage.input for usage in reading.earlier)))
    if reading is not None and reading.usage is not None:  # what was reported before it broke is the least it cost
        more = received > reading.usage.output  # a stream may report its prompt first and its output only at the end
        usage = replace(reading.usage, output=received) if more else reading.usage
        usage, guessed = _with_input(usage, reading, request)
        nano = caller.costs.of(reading, usage, last)
        is_estimated = more or guessed or lacks_last
        if reading.earlier:
            _settle_requests(call, charge, reading, usage, nano, is_estimated)
        else:
            guard.settle(charge, usage, reading.model or request.model, nano=nano, estimated=is_estimated)
    elif not size and request.rounds == 1 and was_unbilled(error):
        # with several rounds, requests before the refused one may have been answered
        guard.settle(charge, Usage(), free=True)
    elif _is_priced(call):
        guard.abandon(charge, received, streaming=streaming)
    else:
        nano = settings.fixed_cost if settings.fixed_cost is not None else caller.costs.highest[0]
        # Pieces came, so the provider has billed something.
        if not nano and streaming and size and settings.in_usd and settings.policy.on_unpriced == "refuse":
            _stop_unknown(call, "usd")
        guard.settle(charge, Usage(request.input_tokens or 0, received), nano=nano or None, estimated=True)


def _settle_requests(
    call: LayerCall, charge: Charge, answer: Reading, usage: Usage, nano: int | None, is_estimated: bool
) -> None:
    """Book the usage of a call that made several requests: their sum at once, and then their number."""
    caller, guard, model = call.caller, call.caller.guard, answer.model or call.request.model
    requests = [usage, *(_completed(one, usage, call.request.max_output_tokens) for one in answer.earlier)]
    whole = Usage(*(sum(getattr(one, part.name) for one in requests) for part in dataclass_fields(Usage)))
    if nano is not None and caller.settings.cost_of_tokens is not None:
        nano = caller.costs.ask(caller.settings.cost_of_tokens, whole.input, whole.output)
    elif nano is None and isinstance(rates := guard.accounts.rates_of(charge, model), Rates):
        nano, is_estimated = sum(rates.cost(one) for one in requests), is_estimated or rates.estimated
    is_estimated = is_estimated or any(not one.input for one in answer.earlier)
    guard.settle(charge, whole, model, nano=nano, estimated=is_estimated)
    for _ in answer.earlier:
        counted = copy(charge)
        counted.hold, counted.held, counted.booked, counted.over, counted.number = None, 0, None, False, 0
        guard.settle(guard.accounts.uncounted(counted), Usage(), model, nano=0)


def _stop_unknown(call: LayerCall, unit: str, model: str = "") -> None:
    """Stop the run: there is a limit, and nothing says what the call cost. Unknown is not zero."""
    caller = call.caller
    if not caller.enforces:
        return
    advice, about = "return its usage, for example {'tokens': …}", ""
    if unit == "usd":
        price = f", or prices={{{model!r}: {{'input': …, 'output': …}}}} (USD per million tokens)" if model else ""
        advice = f"return {{'usd': …}}, give cost={price or ', or call a model whose price is known'}"
        about = f" and '{model}' has no known price" if model else ""
    text = f"'{caller.name}' reported no {unit}{about}: {advice}"
    finding = Finding("unpriced", Action.STOP, 1, 0, f"call without {unit}", "run", "", caller.name, text)
    caller.stop_run(call.state, finding)


def _with_input(usage: Usage, answer: Reading, request: Request) -> tuple[Usage, bool]:
    """Estimate the input of a usage that reports output alone. Return the usage, and whether it was estimated."""
    if not answer.lacks_input or request.input_tokens == 0:  # 0: the user's own counter says so
        return usage, False
    return replace(usage, input=request.input_tokens or 0, audio=request.audio_tokens), True


def _completed(one: Usage, last: Usage, most: int | None) -> Usage:
    """Return the usage of a request before the last one.

    Where its input was not reported, take that of the last request, whose prompt was the longest, all of it uncached.
    """
    if one.input:
        return one
    output = max(one.output + last.thinking, last.output)
    if most is not None:
        output = min(output, max(most, last.output))
    return Usage(input=last.input, output=output, audio=last.audio)
