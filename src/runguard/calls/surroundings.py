"""What surrounds a guarded call: the block of ``runguard.run()``, the guard around, and the thread that it runs on.

``calls/functions`` opens blocks, and all adapters join them. ``drive`` runs a coroutine for callers without an event
loop, and ``carry`` takes the surroundings along into threads.
"""

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from functools import wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from runguard.background import start_thread
from runguard.core.decision import Trip
from runguard.engine.charges import OWNERS, Charge
from runguard.engine.guard import Guard
from runguard.engine.runs import Run

if TYPE_CHECKING:
    from runguard.calls.function_calls import Caller, RunState

# ---- Blocks of ``runguard.run()``.


class RunContext:
    """``with runguard.run(...)``: the owner of the run, and what the callers know about it until it ends."""

    def __init__(
        self,
        app: str = "",
        user: str = "",
        session: str = "",
        labels: Mapping[str, str] | None = None,
        caller: "Caller | None" = None,
        *,
        automatic: bool = False,
    ) -> None:
        self.id, self.automatic = secrets.token_hex(8), automatic
        self.app, self.user, self.session, self.labels, self.caller = app, user, session, labels, caller
        self.outer: RunContext | None = None
        self.states: dict[Caller, RunState] = {}
        self.agents: dict[Guard, AgentsState] = {}
        self.kept: dict[str, Kept] = {}  # by adapter: what it keeps from call to call in this block
        self.lock = threading.RLock()
        self.ended = False
        # every run that began here and is no part of another one here, for the bill
        self._billed: list[tuple[Guard, Run]] = []

    def bill(self, guard: Guard, run: Run) -> None:
        """Add a run to the bill of this block, unless an open call is around, whose run is on the bill already."""
        is_inside = any(not (charge.over or charge.is_tool) for charge in OWNERS.get())
        if not is_inside and all(known is not run for _, known in self._billed):
            self._billed.append((guard, run))

    def end(self) -> None:
        with self.lock:
            self.ended = True
        for kept in list(self.kept.values()):
            kept.end()
        self.kept.clear()
        for caller, state in list(self.states.items()):
            caller.guard.faults.attempt("end of run", caller.guard.end, state.run.info.run)
        self.states.clear()
        for guard, agents in list(self.agents.items()):
            guard.faults.attempt("end of run", agents.end, guard)
        self.agents.clear()

    @property
    def _runs(self) -> "list[tuple[Guard, Run]]":
        """The runs whose figures add up. Limits of the block itself count every call in it."""
        own = self.caller.guard if self.caller is not None else None
        return [one for one in self._billed if one[0] is own] or self._billed

    @property
    def usd(self) -> Decimal | None:
        """What the calls in the block have cost so far, in dollars; None where no price is known."""
        costs = [run.run_costs.spent_usd for _, run in self._runs]
        known = [usd for usd in costs if usd is not None]
        return sum(known, Decimal()) if known or not costs else None

    @property
    def tokens(self) -> int:
        """The tokens of these calls, input and output."""
        return self._used[0]

    @property
    def calls(self) -> int:
        """The model calls that were sent."""
        return self._used[1]

    @property
    def _used(self) -> tuple[int, int]:
        used = [guard.accounts.spending.used_by(run.run_costs) for guard, run in self._runs]
        return sum(tokens for tokens, _ in used), sum(calls for _, calls in used)

    @property
    def trips(self) -> list[Trip]:
        """What RunGuard stopped here, oldest first."""
        found = {trip.id: trip for _, run in self._billed for trip in run.trips}
        return sorted(found.values(), key=lambda trip: trip.at)


class Kept(Protocol):
    """What an adapter keeps for a block of ``runguard.run()``."""

    def end(self) -> None:
        """End what is kept, because the block ends."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class AgentsState:
    """The run of all agents of one guard in one block, and under which keys it will be kept when the block ends."""

    run: Run
    lanes: Iterator[int] = field(default_factory=lambda: count(1))
    keys: tuple[str, ...] = ()
    waits: bool = False

    def end(self, guard: Guard) -> None:
        leave(guard, self.run, self, self.keys, waits=self.waits)


def leave(guard: Guard, run: Run, owner: object, keys: Sequence[str], *, waits: bool) -> None:
    """Leave a run. The last one who works on it ends it, or keeps it under ``keys`` and the keys of the others.

    Two work on it where one turn is resumed twice at once. Either may go on after the other has ended.
    """
    run.owners.discard(owner)
    if guard.runs.get(run.info.run) is not run:
        return
    if run.owners:
        guard.pauses.name(run, keys)
        run.is_forked = True
    elif keys or run.is_forked:
        guard.pauses.keep(run.info.run, waits=waits and bool(keys), keys=keys)
    else:
        guard.end(run.info.run)


class Surroundings(NamedTuple):
    """What surrounds a guarded call."""

    run: RunContext | None = None
    # The guard directly inside the one that calls now. It is removed when it is called: the runs around both have
    # already admitted that call, but not a second attempt of a retry between the two.
    inner: "list[Caller] | None" = None
    place: object = None  # the tool call of a guarded agent around it: a ``runguard.calls.model_calls.Place``


_NONE: Final = Surroundings()
SURROUNDINGS: Final[ContextVar[Surroundings]] = ContextVar("runguard_surroundings", default=_NONE)


def live_blocks() -> list[RunContext]:
    """Return the blocks of ``runguard.run()`` around this code that have not ended, the innermost first."""
    found, block = [], SURROUNDINGS.get().run
    while block is not None:
        if not block.ended:
            found.append(block)
        block = block.outer
    return found


def limits_of(blocks: "Sequence[RunContext]") -> "list[Caller]":
    """Return those whose limits such blocks put on everything inside, the outermost first."""
    return [block.caller for block in reversed(blocks) if block.caller is not None and not block.caller.is_off]


def open_ones(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return the charges around a call without those of finished calls, which a task that began inside may outlive."""
    return tuple([charge for charge in charges if not charge.over]) if charges else charges


# ---- Coroutines for callers without an event loop.

_T = TypeVar("_T")
_IDLE_HELPERS: Final = 8


class _Helper:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = start_thread("runguard-waiting", self._work)

    def _work(self) -> None:
        self.loop.run_forever()  # a SystemExit in a job ends it, so it is run again
        self.loop.close()

    def retire(self) -> None:
        """End the thread once it has nothing to do."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)


class _Helpers:
    """Runs coroutines for callers that have to wait and have no event loop to do it on.

    A helper works for one caller at a time. So user code in a coroutine, such as a termination condition or a cap
    function, keeps no other caller waiting, and may itself make guarded calls.
    """

    def __init__(self) -> None:
        self._idle: deque[_Helper] = deque()

    def finish(self, make: Callable[[], Coroutine[Any, Any, _T]], lost: Callable[[_T], None]) -> _T:
        helper = self._take()
        future = asyncio.run_coroutine_threadsafe(make(), helper.loop)
        try:
            result = future.result()
        except BaseException:
            is_done = future.done()
            if not future.cancel() and not future.cancelled() and future.exception() is None:
                lost(future.result())  # the result came at the moment of the interruption
            self._give_back(helper, is_done=is_done)
            raise
        self._give_back(helper, is_done=True)
        return result

    def _take(self) -> _Helper:
        while True:
            try:
                helper = self._idle.pop()
            except IndexError:
                return _Helper()
            if helper.thread.is_alive():  # a fork takes no threads along
                return helper

    def _give_back(self, helper: _Helper, *, is_done: bool) -> None:
        if is_done and len(self._idle) < _IDLE_HELPERS:
            self._idle.append(helper)
        else:
            helper.retire()


HELPERS: Final = _Helpers()


def drive(make: Callable[[], Coroutine[Any, Any, _T]], is_shared: bool, lost: Callable[[_T], None]) -> _T:
    """Run a coroutine for a caller without an event loop: here while it need not wait, else on a helper's loop.

    ``make`` makes the coroutine when it can be run at once, because one that is never run would be warned about.
    ``is_shared``: it certainly waits. ``lost`` gets a result that came when its caller had been interrupted.
    """
    if is_shared:
        return HELPERS.finish(make, lost)
    job = make()
    try:
        job.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    return HELPERS.finish(lambda: job, lost)


# ---- Code that a guarded call starts in other threads belongs to the same run.
#
# ``asyncio.to_thread`` takes context variables along. Threads and thread pools do not, so ``calls/run`` and ``adk``
# call
# ``carry`` before the first agent starts. It carries only what RunGuard itself keeps there, and only for one job: a
# pool's worker that kept it would take the run into later jobs of others. ``multiprocessing.pool.ThreadPool`` stays
# uncovered.

_Values = tuple[object, ...]
_lock: Final = threading.Lock()
_carried: "tuple[tuple[ContextVar[Any], ...], _Values]" = ((), ())  # variables, and their values where no run is around


def carry(*variables: ContextVar[Any]) -> None:
    """Let threads and thread pools take the run around along, from now on. Safe to call again.

    ``variables``: where a framework keeps its own record of it.
    """
    global _carried
    if _carried[0] and not variables:
        return
    with _lock:
        known = _carried[0] or (SURROUNDINGS, OWNERS)
        every = (*known, *(one for one in variables if one not in known))
        _carried = every, tuple(Context().run(one.get) for one in every)
        if not getattr(ThreadPoolExecutor.submit, "__runguard__", False):
            _carry_into_threads(threading.Thread)
            if "start" in vars(threading.Timer):  # OpenTelemetry gives timers a method of their own
                _carry_into_threads(threading.Timer)
            _carry_into_pools()


def _here() -> _Values | None:
    """Return the values of the carried variables, or None where no run is around, which is the common case."""
    variables, defaults = _carried
    values = tuple([variable.get() for variable in variables])
    return None if values == defaults else values


def _inside(carried: _Values, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tokens = [(variable, variable.set(value)) for variable, value in zip(_carried[0], carried, strict=False)]
    try:
        return work(*args, **kwargs)
    finally:
        for variable, token in tokens:
            variable.reset(token)


def _carry_into_pools() -> None:
    submit: Any = ThreadPoolExecutor.submit

    @wraps(submit)
    def submit_inside(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # a job of ``asyncio.to_thread``, or of LangChain, brings the context along in which it was made
        carried = _here() if not isinstance(getattr(getattr(fn, "func", fn), "__self__", None), Context) else None
        if carried is None:
            return submit(self, fn, *args, **kwargs)
        return submit(self, _inside, carried, fn, *args, **kwargs)

    made: Any = submit_inside
    made.__runguard__ = True
    ThreadPoolExecutor.submit = made  # type: ignore[method-assign]


def _carry_into_threads(kind: type[threading.Thread]) -> None:
    start = kind.start
    worker = getattr(pools, "_worker", None)  # a worker of a pool outlives the call that began it

    @wraps(start)
    def start_inside(self: threading.Thread) -> None:
        carried = _here() if getattr(self, "_target", None) is not worker else None
        if carried is not None:
            run = self.run

            def run_inside() -> None:
                try:
                    _inside(carried, run)
                finally:
                    vars(self).pop("run", None)  # a thread does not keep the run alive

            self.run = run_inside  # type: ignore[method-assign]
        start(self)

    kind.start = start_inside  # type: ignore[method-assign]
