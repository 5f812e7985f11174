"""What RunGuard replaces in ADK, for whom, and how it is put back; and the guarded stream of a run.

Four methods of ``Runner`` (``runner``) and one method of every model class (``model_calls``) are wrapped while a guard,
a budget, a guarded model or a termination condition exists: ``IN_USE`` has them. The wrappers pass everything through
for a Runner without a guard, and else return ``guarded_stream``. One method of remote agents is wrapped once such an
agent is called (``a2a``).
"""

import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.adk.agents import BaseAgent
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner

from runguard.adk.runs import HERE, Invocations, RunnerStream
from runguard.adk.stops import Halt, LiveTurn, Stop, announce, error_of, is_raised, stop_in, stored_stop
from runguard.core.decision import METADATA_KEY, STOP_CODE, Trip
from runguard.core.errors import RunStoppedError
from runguard.engine.guard import Guard
from runguard.termination.conditions import termination_reason

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin

_log: Final = logging.getLogger("runguard")


class SyncRun(NamedTuple):
    """A call of ``Runner.run``, for the thread in which ADK carries it out."""

    condition: Any  # the termination condition given with the call
    context: Context  # of the caller: older versions of ADK do not copy it to the thread


class InUse:
    """The guards, budgets and conditions of this process that need the wrappers."""

    def __init__(self) -> None:
        self.installed: RunGuardPlugin | None = None
        self.injected: weakref.WeakSet[Runner] = weakref.WeakSet()  # Runners that got the installed guard
        self.plugins: weakref.WeakSet[BasePlugin] = weakref.WeakSet()
        # guards that agent callbacks drive: no hook shows them the end of a run
        self.per_agent: weakref.WeakSet[Invocations] = weakref.WeakSet()
        self.of_models: weakref.WeakSet[Guard] = weakref.WeakSet()  # guards of guarded models
        self.has_agent_conditions = False  # an agent has a condition of its own: the wrappers stay
        self.has_run_conditions = False  # and the condition of an agent can end the whole run
        self.in_sync_run: dict[int, SyncRun] = {}  # by the id of the message that Runner.run passes to its thread

    def is_anything(self) -> bool:
        """Return whether anything but an installed guard needs the wrappers."""
        return self.has_agent_conditions or bool(len(self.plugins)) or bool(len(self.of_models))


IN_USE: Final = InUse()


# ---- Wrapped methods of ADK's classes


class WrappedMethods:
    """Methods of classes that are wrapped, and how they are put back."""

    def __init__(self) -> None:
        self._originals: dict[tuple[type, str], Any] = {}
        self._lock = threading.Lock()

    def wrap(self, kind: type, name: str, wrap: Callable[[Any], Any]) -> None:
        """Wrap a method of a class, once."""
        with self._lock:
            if (kind, name) not in self._originals:
                self._originals[kind, name] = original = getattr(kind, name)
                setattr(kind, name, wrap(original))

    def is_covered(self, kind: type) -> bool:
        """Return whether other code has patched a method of this class on top of a wrapper."""
        return any(owner is kind and not self._is_ours(kind, name) for owner, name in list(self._originals))

    def put_back(self) -> None:
        """Put the original methods back, except those that other code has replaced."""
        with self._lock:
            for (kind, name), original in self._originals.items():
                if self._is_ours(kind, name):
                    setattr(kind, name, original)
            self._originals.clear()

    def _is_ours(self, kind: type, name: str) -> bool:
        return getattr(kind.__dict__.get(name), "__wrapped__", None) is self._originals[kind, name]


WRAPPED: Final = WrappedMethods()
_METHOD: Final = "generate_content_async"
_ON_SUBCLASS: Final = "__pydantic_init_subclass__"
_GUARDED_MODULE: Final = "runguard.adk.guarded_llm"  # GuardedLlm only passes calls on: the model inside is wrapped


def wrap_adk() -> None:
    """Wrap the methods of Runner and of every class of models, for what ``IN_USE`` has from now on."""
    # Imported here: what they need imports this module.
    from runguard.adk.runner import WRAPPERS

    for name, wrap in WRAPPERS.items():
        if hasattr(Runner, name):
            WRAPPED.wrap(Runner, name, wrap)
    if _ON_SUBCLASS not in BaseLlm.__dict__:
        kinds: list[type] = [BaseLlm]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
            _wrap_models_of(kind)
        setattr(BaseLlm, _ON_SUBCLASS, classmethod(lambda kind, **_: _wrap_models_of(kind)))  # of later classes


def _wrap_models_of(kind: type) -> None:
    from runguard.adk.model_calls import wrap_model

    try:
        if kind is not BaseLlm and kind.__module__ != _GUARDED_MODULE and callable(kind.__dict__.get(_METHOD)):
            WRAPPED.wrap(kind, _METHOD, wrap_model)
    except Exception:
        _log.exception("runguard.guard_error: calls of the model class '%s' are not seen", kind.__name__)


def unwrap_adk_if_unused() -> None:
    """Put the original methods back, unless something still needs the wrappers.

    Where other code has patched on top of the wrappers, they stay and pass everything through.
    """
    if IN_USE.installed is None and not IN_USE.is_anything() and not WRAPPED.is_covered(Runner):
        WRAPPED.put_back()
        if _ON_SUBCLASS in BaseLlm.__dict__:
            delattr(BaseLlm, _ON_SUBCLASS)


# ---- The events of a run


async def guarded_stream(
    runner: Runner,
    registry: Invocations | None,
    events: AsyncGenerator[Event, None],
    user: str,
    session: str,
    raises: bool,
    fault: Exception | None = None,
    turn: LiveTurn | None = None,
) -> AsyncGenerator[Event, None]:
    """Yield the events of a run. End a stopped run, report its stop, and forget the run when it is over.

    A failure of RunGuard removes no event. ``fault``: a failure of RunGuard before the run started. ``turn``: of a live
    connection.
    """
    nested = HERE.get().tool is not None
    invocations: set[str] = set()
    stop: Stop | None = None
    outer = HERE.get().stream
    root = getattr(runner.agent, "name", "") or ""
    here = RunnerStream(registry, outer, runner.app_name, user, session, fault=fault, agent=root)
    key = (runner.app_name, user, session)
    inside = HERE.get()._replace(stream=here, session=key)
    outside = inside._replace(stream=outer)
    HERE.set(inside)
    is_reported = False  # a stop event has passed
    ended: list[Event] = []  # which the caller has seen as escalated
    # A live connection or a Workflow continues after a soft stop.
    goes_on = turn is not None or not isinstance(runner.agent, BaseAgent)
    try:
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    shown: Event | None = event
                    try:
                        held = event.__dict__
                        invocations.add(held["invocation_id"])
                        if turn is not None:
                            turn.follow(event)
                        is_reported = is_reported or held["error_code"] == STOP_CODE
                        if held["custom_metadata"]:  # a stop or a termination has some
                            stop = stop_in(event) or stop
                            shown = None if raises and is_raised(event) else _shown(event)
                            if shown is not None and shown is not event:
                                ended.append(event)
                    except Exception as error:
                        report_fault(error, registry, here)
                    if shown is not None:
                        # what the caller does between two events is not part of the run
                        if (now := HERE.get()) is not inside:
                            inside = now._replace(stream=here, session=key)
                            outside = inside._replace(stream=outer)
                        HERE.set(outside)
                        yield shown
                        if (now := HERE.get()) is not outside:
                            inside = now._replace(stream=here, session=key)
                            outside = inside._replace(stream=outer)
                        HERE.set(inside)
                    try:
                        if (
                            stop is not None
                            and goes_on
                            and not (turn is not None and turn.is_open)
                            and _can_end(stop[1], event.invocation_id)
                        ):
                            break
                    except Exception as error:
                        report_fault(error, registry, here)
        except Halt:
            pass  # the Halt has done its work: the run is over
        except BaseExceptionGroup as group:
            # closing nested ParallelAgents may put a GeneratorExit in the Halt's place
            _, rest = group.split((Halt, GeneratorExit))
            stopped = False
            with shield(registry):
                stopped = registry is not None and any(registry.stop_of(one) is not None for one in invocations)
            if rest is not None or not (stopped or here.halted is not None or group.subgroup(Halt) is not None):
                # an older ParallelAgent raises a guarded model's stop in a group
                stops, others = group.split(RunStoppedError)
                if stops is None or others is not None:
                    raise
                raise _first(stops) from None
        last: list[Event] = []
        if stop is None and registry is not None and not nested:
            with shield(registry):
                found = await _missing_stop(runner, registry, invocations or set(here.invocation_ids), user, session)
                is_reported = is_reported or bool(found)
                stop = next((one for one in map(stop_in, found) if one is not None), stop)
                last = [event for event in found if not (raises and is_raised(event))]
        if here.halted is not None and not is_reported:
            with shield(registry):
                found = await stored_stop(runner, *here.halted, user, session)
                last = [event for event in found if not (raises and is_raised(event))]
        for event in last:
            yield event
    finally:
        here.is_open = False
        HERE.set(HERE.get()._replace(stream=outer))
        for event in ended if not nested else ():  # a session in memory keeps these objects; no loop sees them any more
            event.actions.escalate = True
        with shield(registry):
            late = await _forget(here, registry, invocations)
            stop = stop or late
    failure: RunStoppedError | None = None
    with shield(registry):
        failure = error_of(stop) if stop is not None and raises else None
    if failure is not None:
        raise failure


def halt(invocation_id: str, trip: Trip, text: str) -> Halt:
    """Return what a plugin raises to end an invocation from outside.

    Tell the stream, which must know even where nested branches hide the Halt.
    """
    stream = HERE.get().stream
    if stream is not None:
        stream.halted = (invocation_id, trip, text)
    return Halt(trip)


async def _forget(here: RunnerStream, registry: Invocations | None, invocations: set[str]) -> Stop | None:
    """Forget everything of a run that is over, however it ended. Return a stop that was not reported yet, or None."""
    stop: Stop | None = None
    for guard, _, end in here.ends:
        guard.faults.attempt("end of run", end)
    for one in {*IN_USE.per_agent, *([registry] if registry is not None else [])}:
        for invocation_id in {*invocations, *here.invocation_ids}:
            trip = one.guard.faults.attempt("end of run", one.forget, invocation_id)
            if stop is None and trip is not None:
                stop = (trip.id, one)
        await one.written({*invocations, *here.invocation_ids})
    return stop


async def _missing_stop(
    runner: Runner, registry: Invocations, invocations: set[str], user: str, session: str
) -> list[Event]:
    """Return the stop events of a run whose stop event got lost: an agent swallowed it, or a Halt came first."""
    invocation_id = next((one for one in invocations if registry.stop_of(one) is not None), None)
    trip = registry.stop_of(invocation_id) if invocation_id is not None else None
    if invocation_id is None or trip is None:
        return []
    announce(trip, registry)
    return await stored_stop(runner, invocation_id, trip, registry.guard.stop_text(trip), user, session)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first exception inside nested groups."""
    one = group.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


def _shown(event: Event) -> Event:
    """Return the event as the caller sees it: the last event of an inner loop shows ``escalate``.

    Inside the run it must not, because it would end the loops around it.
    """
    if not event.custom_metadata or METADATA_KEY not in event.custom_metadata or event.actions.escalate:
        return event
    if termination_reason(event) is None:
        return event
    return event.model_copy(update={"actions": event.actions.model_copy(update={"escalate": True})})


def _can_end(registry: Invocations, invocation_id: str) -> bool:
    """Return whether the whole run is stopped and closing its stream now would lose no paid work."""
    invocation = registry.find(invocation_id)
    return registry.stop_of(invocation_id) is not None and (invocation is None or invocation.is_quiet())


# ---- Failures of RunGuard itself


def report_fault(error: Exception, registry: Invocations | None, here: RunnerStream | None = None) -> None:
    """Report a failure of RunGuard around a run. The run keeps all its events.

    Under ``on_guard_error="block"`` the run stops at its next call.
    """
    registries = [registry] if registry is not None else list(IN_USE.per_agent)
    guards = [one.guard for one in registries]
    if registry is None:
        guards += IN_USE.of_models
    if not guards:
        name = type(error).__name__
        _log.error("runguard.guard_error: the runner's wrapper failed with %s; the run goes on", name, exc_info=error)
    for guard in guards:
        guard.faults.note("runner", error)
    if here is None:
        return
    for guard, run, _ in here.ends:
        guard.faults.stop_after("runner", error, run)
    for one in registries:
        for invocation in map(one.find, here.invocation_ids):
            if invocation is not None:
                one.guard.faults.stop_after("runner", error, invocation.run.info.run)


@contextmanager
def shield(registry: Invocations | None, here: RunnerStream | None = None) -> Iterator[None]:
    """Report a failure of RunGuard in this block, and go on behind it."""
    try:
        yield
    except Exception as error:
        report_fault(error, registry, here)


def shield_here() -> AbstractContextManager[None]:
    """Do what ``shield`` does, for the Runner at work."""
    here = HERE.get().stream
    return shield(here.registry if here is not None else None, here)


def report_fault_in(here: RunnerStream | None, error: Exception) -> None:
    """Report a failure of RunGuard to the guard of a Runner at work."""
    report_fault(error, here.registry if here is not None else None, here)
