"""One guarded callable: its guard, its state in each run, and its calls.

``opening`` admits a call and reserves the most it may cost. ``booking`` books what it really cost.
"""

import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import Any, Final

from runguard.core.breaker import Permit
from runguard.core.decision import Finding, Trip
from runguard.core.errors import RunStoppedError
from runguard.core.events import ROOT_LANE, ModelCall, RunInfo
from runguard.core.money import BudgetStatus, shown
from runguard.engine.charges import OWNERS, Charge, scopes_of
from runguard.engine.guard import Controls, Guard
from runguard.engine.runs import Run
from runguard.functions.call_queue import Admission, CallQueue, Ticket
from runguard.functions.costs import Costs
from runguard.functions.dropped import DROPPED
from runguard.functions.keywords import GuardSettings
from runguard.functions.no_progress import NoProgress
from runguard.functions.run_context import SURROUNDINGS, RunContext, RunState
from runguard.providers.messages import Request, newest_results, read_request, request_mark

_log: Final = logging.getLogger("runguard")
_NO_REQUEST: Final = Request()
_NAME_CHARS: Final = 120
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


class _Forks:
    """How often this process was forked off from another one since this module was imported."""

    count = 0

    def add(self) -> None:
        self.count += 1


_forks: Final = _Forks()
if hasattr(os, "register_at_fork"):  # asking for the number of the process would cost a system call for every call
    os.register_at_fork(after_in_child=_forks.add)


class Caller(Controls):
    """One wrapped callable, or the limits of one ``run``."""

    def __init__(self, name: str, settings: GuardSettings) -> None:
        self.name, self.settings = name[:_NAME_CHARS], settings
        self.guard = Guard(settings.policy, breaker_runs=1, advice=_ADVICE)
        self.guard.check_store()
        self.is_off = settings.policy.mode == "off"
        self.enforces = settings.policy.mode == "enforce"
        self.is_lazy = False  # an async generator does nothing before its first piece
        self.costs = Costs(self.name, settings, self.guard.accounts.pricing, self.guard.clock)
        self.queue = CallQueue(lambda: self.costs.width, settings.policy.hold_seconds)
        self.problems: set[str] = set()  # with answers, already logged
        self.context: RunContext | None = None  # for the limits of a run: that run, also in a run inside it
        # nothing has to be awaited to open a call: neither a breaker nor a store
        self.opens_at_once = not settings.breaker and not self.guard.shares_store
        self._reads_request = settings.in_usd or settings.in_tokens or settings.context
        self._logged_queueing = False
        self._lock = threading.Lock()
        self._own: RunState | None = None
        self._forks = _forks.count

    # ---- runs -------------------------------------------------------------------------------------------------------

    def state(self) -> RunState:
        """The current run: that of ``with runguard.run(...)``, or the one that began with this callable."""
        context = self.context or SURROUNDINGS.get().run
        while context is not None and context.ended:
            context = context.outer
        if context is None:
            own = self._own
            if own is None or self._forks != _forks.count:  # after a fork, the child's calls are a run of their own
                with self._lock:
                    own = self._own if self._forks == _forks.count else None
                    if own is None:
                        own = self._own = self._begin(RunContext())
                    self._forks = _forks.count
            return own
        known = context.states.get(self)
        if known is None:
            with self._lock:
                known = context.states.get(self) or self._begin(context)
                context.states[self] = known
        return known

    def _begin(self, context: RunContext) -> RunState:
        app, now = context.app or self.name, self.guard.clock()
        info = RunInfo(context.id, app, context.user, context.session, "", now, labels=context.labels)
        state, policy = RunState(self.guard.start(info)), self.settings.policy
        if self.settings.loop and self.settings.by == "result":
            assert policy.cycle_repeats is not None
            state.progress = NoProgress(policy.cycle_repeats, policy.max_cycle_len or 1)
        return state

    def reset(self) -> None:
        """Begin a new run, with new limits and an empty memory.

        Inside ``with runguard.run(...)``, for this callable in that block.
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
        return DROPPED.flush(seconds) and super().flush(seconds)

    # ---- a request --------------------------------------------------------------------------------------------------

    def request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """What the arguments say about the call, and about the tools that the last answer asked for."""
        if self.settings.loop and self.settings.by == "result":
            try:
                self._check_progress(args, kwargs)
            except Exception as error:
                self.fault(error)
        try:
            return read_request(args, kwargs) if self._reads_request and (args or kwargs) else _NO_REQUEST
        except Exception as error:
            self.fault(error)
            return _NO_REQUEST

    def _check_progress(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self.state()
        run, progress = state.run, state.progress
        if progress is None or run.stopped is not None:
            return
        results = newest_results(args, kwargs) if progress.waits_for_results else []
        mark = None if results else request_mark(args, kwargs)
        with state.lock:
            finding = progress.next_request(run.info.run, self.name, self.guard.clock(), results, mark)
            if finding is not None:
                self.stop_run(state, finding)

    def counted(self, request: Request, tokens: Any) -> Request:
        """The request with the user's own token count.

        A count of 0 for a prompt that has text is ignored, because it would reserve nothing.
        """
        if type(tokens) is int and (tokens > 0 or (tokens == 0 and not request.input_tokens)):
            return replace(request, input_tokens=tokens)
        what = f"raised {type(tokens).__name__}" if isinstance(tokens, Exception) else f"gave {shown(tokens)}"
        _log.warning("runguard.tokens_failed: tokens %s for '%s'; using an estimate of the prompt", what, self.name)
        return request

    # ---- the queue of calls whose cost is unknown -------------------------------------------------------------------

    def admission(self, request: Request, no_loop: bool) -> tuple[Admission, Ticket | None]:
        """Whether a call may start now, or has to wait because nothing limits what it may cost."""
        try:
            if not self.enforces or None not in self.costs.bound(request):
                return Admission.NOW, None
            # A call made inside a call of the same callable, or of any that others wait for: waiting might never end.
            owners = [charge for charge in OWNERS.get() if not charge.over]
            if any(charge.home is self.guard.accounts for charge in owners):
                return Admission.ALONGSIDE, None
            around = frozenset(id(charge) for charge in owners if id(charge) in WAITED_FOR)
            admission, ticket = self.queue.ask(around, no_loop)
            if admission is Admission.QUEUED and not self._logged_queueing:
                self._logged_queueing = True
                _log.info(
                    "runguard.unknown_cost: the cost of a call of '%s' is known only afterwards, so the first calls "
                    "run one at a time; set cost=, or a price and an output limit, to run them at once",
                    self.name,
                )
            return admission, ticket
        except Exception as error:
            self.fault(error)
            return Admission.NOW, None

    def give_back(self, ticket: Ticket | None) -> None:
        """The call has ended, or was not made: the next in the queue may start."""
        if ticket is None:
            return
        WAITED_FOR.pop(id(ticket.charge), None)
        self.queue.give_back(ticket)

    # ---- stops and faults -------------------------------------------------------------------------------------------

    def stop_run(self, state: RunState, finding: Finding) -> Trip | None:
        run = state.run
        if run.stopped is not None:
            return run.stopped
        return self.guard.stop(run, ModelCall(run.info.run, ROOT_LANE, self.name, self.guard.clock()), finding)

    def fault(self, error: Exception, run: Run | None = None) -> None:
        """Count an internal error before a call. Raises where the policy says that it stops the run."""
        trip = self.guard.give_up("functions", error, run.info.run if run is not None else "", self.name)
        if trip is not None:
            raise RunStoppedError.of(trip)


@dataclass(slots=True)
class GuardedCall:
    """One call from its reservation to its bill."""

    caller: Caller
    state: RunState
    charge: Charge | None
    request: Request
    ticket: Ticket | None = None  # its cost is not known beforehand: others wait for it
    alongside: bool = False  # its cost is not known beforehand, and it cannot wait for the others
    permit: Permit | None = None
    stacked: bool = False  # the callable is itself guarded: when that guard refuses, no call was made
    over: bool = False


# Calls with tickets, by the identity of their charge. A call inside one of them must not wait for another.
WAITED_FOR: Final[dict[int, Charge]] = {}


def open_ones(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """The charges around a call without those of finished calls: a task that began inside one may outlive it."""
    return tuple([charge for charge in charges if not charge.over]) if charges else charges
