"""The one wrapper on ADK's Runner, and ``install()``.

The wrapper does four things and is inert for a Runner without a guard: it puts an installed guard first in the plugin
order, it ends from outside a stopped run that ADK would let spin (a Workflow, or a loop that ignores escalation), with
``on_stop="raise"`` it raises the typed error in place of the stop event, which stays in the session, and it tells the
model's border which run is at work, so that calls which no hook announces find their account.
"""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from google.adk.agents import BaseAgent
from google.adk.events import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.genai import types

from runguard.adk.call_limit import error_of
from runguard.adk.invocations import FRAME, STREAM, Stream
from runguard.adk.live import Turn
from runguard.adk.model_calls import Border
from runguard.adk.stop_events import Halt, mark_stop, refusal, stop_content
from runguard.conductor.guard import Guard
from runguard.core.decision import METADATA_KEY, STOP_CODE, STOPPED, TERMINATED, Trip
from runguard.core.exceptions import PolicyError, RunStoppedError

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin

_log: Final = logging.getLogger("runguard")
_ANNOUNCED_KEPT: Final = 10_000
# private, and the same in every supported version; without it a guarded model counts each stream as a run
_NEW_CONTEXT: Final = "_new_invocation_context"


class _Watch:
    """What the wrapper knows: the installed guard, the guards in use, and whose trip is whose."""

    def __init__(self) -> None:
        self.installed: RunGuardPlugin | None = None
        self.plugins: weakref.WeakSet[BasePlugin] = weakref.WeakSet()  # guards, and budgets that may have to end a run
        # driven by agent callbacks, see no end of a run
        self.per_agent: weakref.WeakSet[RunGuardPlugin] = weakref.WeakSet()
        self.injected: weakref.WeakSet[Runner] = weakref.WeakSet()
        self.announced: OrderedDict[str, weakref.ref[RunGuardPlugin]] = OrderedDict()
        self.originals: dict[str, Any] = {}
        # messages that Runner.run is carrying into its thread, and the condition given with them
        self.in_sync_run: dict[int, Any] = {}
        self.kept = False  # an agent has a condition of its own: the wrapper stays
        self.ends_runs = False  # and some agent's condition ends the whole run
        self.of_models: weakref.WeakSet[Guard] = weakref.WeakSet()  # the guards of guarded models
        self.border = Border()
        self.lock = threading.Lock()


_watch: Final = _Watch()


def watch(plugin: BasePlugin) -> None:
    """A guard or a budget exists: see that Runners are wrapped."""
    _watch.plugins.add(plugin)
    _patch()


def watch_guard(guard: Guard) -> None:
    """A guarded model exists: it must know which run it is called in."""
    _watch.of_models.add(guard)
    _patch()


def keep_patched(*, ends_runs: bool) -> None:
    """An agent has a condition of its own, which may end it alone or the whole run."""
    _watch.kept = True
    _watch.ends_runs = _watch.ends_runs or ends_runs
    _patch()


def watch_agents(plugin: "RunGuardPlugin") -> None:
    """A guard that is driven by agent callbacks: its runs end with the stream."""
    _watch.per_agent.add(plugin)


def announce(trip: Trip, plugin: "RunGuardPlugin") -> None:
    """A stop event with this trip is about to appear in some stream; the plugin knows what should follow."""
    _watch.announced[trip.id] = weakref.ref(plugin)
    if len(_watch.announced) > _ANNOUNCED_KEPT:
        _watch.announced.popitem(last=False)


def halt(invocation_id: str, trip: Trip, text: str) -> Halt:
    """What a plugin raises to end an invocation from outside.

    The stream knows of it even where nested branches hide the Halt.
    """
    stream = STREAM.get()
    if stream is not None:
        stream.halted = (invocation_id, trip, text)
    return Halt(trip)


def _announced_in(event: Event) -> "tuple[str, RunGuardPlugin] | None":
    metadata = event.custom_metadata
    if not metadata or METADATA_KEY not in metadata or not isinstance(metadata[METADATA_KEY], dict):
        return None
    trip_id = metadata[METADATA_KEY].get("id")
    if not isinstance(trip_id, str):
        return None
    found = _watch.announced.get(trip_id)
    plugin = found() if found is not None else None
    return (trip_id, plugin) if plugin is not None else None


# ---- patching -------------------------------------------------------------------------------------------------------


def _patch() -> None:
    with _watch.lock:
        if _watch.originals:
            return
        _watch.border.put_up()
        for name, wrapper in (
            ("run_async", _wrap_run_async),
            ("run", _wrap_run),
            ("run_live", _wrap_run_live),
            (_NEW_CONTEXT, _wrap_new_context),
        ):
            original = getattr(Runner, name, None)
            if original is not None:
                _watch.originals[name] = original
                setattr(Runner, name, wrapper(original))


def unpatch_if_unused() -> None:
    """Give Runner its methods back, unless a guard still needs them or others have patched on top:
    then pass through.
    """
    with _watch.lock:
        if _watch.installed is not None or _watch.kept or len(_watch.plugins) or len(_watch.of_models):
            return
        if any(
            getattr(getattr(Runner, name), "__wrapped__", None) is not original
            for name, original in _watch.originals.items()
        ):
            return
        for name, original in _watch.originals.items():
            setattr(Runner, name, original)
        _watch.originals.clear()
        _watch.border.take_down()


def _guard_of(runner: Runner) -> "RunGuardPlugin | None":
    """The guard of a Runner, put in place first if it is the installed one; an App's own guard wins."""
    from runguard.adk.plugin import RunGuardPlugin

    plugins = runner.plugin_manager.plugins
    own = next((p for p in plugins if isinstance(p, RunGuardPlugin)), None)
    if own is None and _watch.installed is not None:
        plugins.insert(0, _watch.installed)
        _watch.injected.add(runner)
        own = _watch.installed
    if own is not None and plugins[0] is not own:
        if own.from_file_only or _is_installed(own):
            plugins.remove(own)
            plugins.insert(0, own)
        elif not own.warned_order:
            own.warned_order = True
            _log.warning(
                "runguard.order: RunGuardPlugin is not first in the plugins; a plugin before it that answers a "
                "call hides that call from it"
            )
    if own is not None and own.generations is not None:
        own.generations.put_in(plugins, own)
        return own.generations.here()
    return own


def _is_installed(plugin: "RunGuardPlugin") -> bool:
    """The installed guard, or one whose policy it has replaced."""
    installed = _watch.installed
    return installed is not None and (
        plugin is installed or (plugin.generations is not None and plugin.generations is installed.generations)
    )


def _wrap_run_async(original: Any) -> Any:
    @wraps(original)
    def run_async(self: Runner, *args: Any, **kwargs: Any) -> AsyncGenerator[Event, None]:
        message = id(kwargs.get("new_message"))
        condition = kwargs.pop("termination_condition", None) or _watch.in_sync_run.get(message)
        fault: Exception | None = None
        try:
            plugin = _guard_of(self)
            if (
                plugin is None
                and condition is None
                and not _watch.kept
                and not len(_watch.plugins)
                and not len(_watch.of_models)
            ):
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            if plugin is None:
                _name_blind_spot(self)
        except Exception as error:
            plugin, fault = _guard_in_spite_of(error, self), error
        user, session = str(kwargs.get("user_id", "")), str(kwargs.get("session_id", ""))
        plain = events = original(self, *args, **kwargs)
        try:
            events = _until_terminated(self, plain, condition, user, session)
        except PolicyError:
            raise
        except Exception as error:
            fault = error
            _fault(error, plugin)
        raises = FRAME.get() is None and message not in _watch.in_sync_run
        return _stream(self, plugin, events, user, session, raises, fault)

    return run_async


def _wrap_new_context(original: Any) -> Any:
    """A guarded model is handed a request and no context: the stream remembers which invocation it runs."""

    @wraps(original)
    def new_context(self: Runner, *args: Any, **kwargs: Any) -> Any:
        context = original(self, *args, **kwargs)
        stream = STREAM.get()
        if stream is not None and stream.context is None:
            stream.context = context
        return context

    return new_context


def _until_terminated(
    runner: Runner, events: AsyncGenerator[Event, None], given: Any, user: str, session: str
) -> AsyncGenerator[Event, None]:
    """The events of a run until one of its conditions fires: the one given with the call, those of its plugins, that of
    its Workflow.
    """
    from runguard.adk import termination

    outermost = STREAM.get() is None  # a run inside of another is part of that one
    own, scope = termination.condition_of(runner.agent)
    found = [own, given]
    if outermost:
        found += [p.condition for p in runner.plugin_manager.plugins if isinstance(p, termination.TerminationPlugin)]
        found.append(termination.Passive() if _watch.ends_runs else None)  # around all others
    for condition in found:
        if condition is not None:
            watched = termination.Watched(termination.checked(condition))
            watched.of_root = own if condition is own else None
            ends_run = condition is own and scope == "run"
            events = termination.until(events, watched, _finish(runner, watched, user, session, ends_run))
    return events


def _finish(runner: Runner, watched: Any, user: str, session: str, ends_run: bool) -> Any:
    async def finish(invocation_id: str, told: str | None) -> list[Event]:
        try:
            if ends_run:
                watched.end_run()
        except Exception as error:
            note_fault(error, STREAM.get())
        stored = None
        try:
            stored = await runner.session_service.get_session(
                app_name=runner.app_name, user_id=user, session_id=session
            )
        except Exception:
            _log.exception("runguard.stop_not_stored: the session service does not give the session")
        if not invocation_id and stored is not None and stored.events:
            # it ended before its first event: that of the user's message
            invocation_id = stored.events[-1].invocation_id
        answers: list[Event] | None = None
        try:
            answers = _open_calls(stored, invocation_id, TERMINATED) if stored is not None else None
        except Exception as error:
            note_fault(error, STREAM.get())
        events: list[Event] = watched.last_events(
            getattr(runner.agent, "name", "") or "runguard", invocation_id, None, answers, escalate=True
        )
        if told == watched.reason and len(events) == 1:
            return []  # the agent that ended the run has said so
        try:
            await _store(runner, stored, events)
        except Exception as error:
            note_fault(error, STREAM.get())
        return events

    return finish


# ---- faults of our own ----------------------------------------------------------------------------------------------


def _fault(error: Exception, plugin: "RunGuardPlugin | None", here: Stream | None = None) -> None:
    """A fault of ours around a run changes nothing of its events.

    Under ``on_guard_error="block"`` the run is stopped at its next call.
    """
    plugins = [plugin] if plugin is not None else list(_watch.per_agent)
    guards = (
        [each.guard for each in plugins]
        if plugin is not None
        else [*(each.guard for each in plugins), *_watch.of_models]
    )
    if not guards:
        _log.error(
            "runguard.guard_error: the runner's wrapper failed with %s; the run goes on",
            type(error).__name__,
            exc_info=error,
        )
    for guard in guards:
        guard.faults.note("runner", error)
    if here is None:
        return
    for guard, run, _ in here.ends:
        guard.stop_after("runner", error, run)
    for each in plugins:
        for invocation in map(each.find_invocation, here.invocations):
            if invocation is not None:
                each.guard.stop_after("runner", error, invocation.run.info.run)


def note_fault(error: Exception, here: Stream | None) -> None:
    """A fault of ours in a condition at work: the run goes on without it."""
    _fault(error, here.plugin if here is not None else None, here)


def _guard_in_spite_of(error: Exception, runner: Runner) -> "RunGuardPlugin | None":
    """The guard of a Runner after a fault on the way to it: the one that is in its plugins, or the installed one."""
    plugin = _guard_in(runner)
    if plugin is None and _watch.installed is not None:
        plugin = _watch.installed
        runner.plugin_manager.plugins.insert(0, plugin)
        _watch.injected.add(runner)
    _fault(error, plugin)
    return plugin


def _guard_in(runner: Runner) -> "RunGuardPlugin | None":
    return next(iter(_guards_in(runner)), None)


def _guards_in(runner: Runner) -> "list[RunGuardPlugin]":
    from runguard.adk.plugin import RunGuardPlugin

    return [p for p in runner.plugin_manager.plugins if isinstance(p, RunGuardPlugin)]


# ---- the events of a run --------------------------------------------------------------------------------------------


async def _stream(
    runner: Runner,
    plugin: "RunGuardPlugin | None",
    events: AsyncGenerator[Event, None],
    user: str,
    session: str,
    raises: bool,
    fault: Exception | None = None,
    turn: Turn | None = None,
) -> AsyncGenerator[Event, None]:
    """The events of a run, with what a guard has to do around them. A fault of ours takes none of them away.

    ``fault``: a fault of ours before the run began. ``turn``: of a live connection.
    """
    nested = FRAME.get() is not None
    invocations: set[str] = set()
    stop: tuple[str, RunGuardPlugin] | None = None
    outer = STREAM.get()
    here = Stream(
        plugin, outer, runner.app_name, user, session, fault=fault, agent=getattr(runner.agent, "name", "") or ""
    )
    STREAM.set(here)
    heard = False  # a stop event has passed
    # a live connection or a Workflow goes on after a soft stop
    goes_on = turn is not None or not isinstance(runner.agent, BaseAgent)
    try:
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    shown: Event | None = event
                    try:
                        invocations.add(event.invocation_id)
                        if turn is not None:
                            turn.follow(event)
                        heard = heard or event.error_code == STOP_CODE
                        stop = _announced_in(event) or stop
                        shown = None if raises and _is_raised(event) else _shown(event)
                    except Exception as error:
                        _fault(error, plugin, here)
                    if shown is not None:
                        STREAM.set(outer)  # what the caller does between two events is not the run's
                        yield shown
                        STREAM.set(here)
                    try:
                        if (
                            stop is not None
                            and goes_on
                            and not (turn is not None and turn.is_open)
                            and _can_end(stop[1], event.invocation_id)
                        ):
                            break
                    except Exception as error:
                        _fault(error, plugin, here)
        except Halt:
            pass  # it has done its work: the run is over
        except BaseExceptionGroup as group:
            # closing nested ParallelAgents may put a GeneratorExit in the Halt's place
            _, rest = group.split((Halt, GeneratorExit))
            stopped = False
            try:
                stopped = plugin is not None and any(plugin.stop_of(one) is not None for one in invocations)
            except Exception as error:
                _fault(error, plugin)
            if rest is not None or not (stopped or here.halted is not None or group.subgroup(Halt) is not None):
                raise
        if stop is None and plugin is not None and not nested:
            unheard: list[Event] = []
            try:
                told = await _unheard_stop(runner, plugin, invocations or set(here.invocations), user, session)
                heard = heard or bool(told)
                stop = next((found for found in map(_announced_in, told) if found is not None), stop)
                unheard = [event for event in told if not (raises and _is_raised(event))]
            except Exception as error:
                _fault(error, plugin)
            for event in unheard:
                yield event
        if here.halted is not None and not heard:
            last: list[Event] = []
            try:
                last = [
                    event
                    for event in await _stop_events(runner, *here.halted, user, session)
                    if not (raises and _is_raised(event))
                ]
            except Exception as error:
                _fault(error, plugin)
            for event in last:
                yield event
    finally:
        STREAM.set(outer)
        try:
            unheard_of = await _ended(here, plugin, invocations)
            stop = stop or unheard_of
        except Exception as error:
            _fault(error, plugin)
    failure: RunStoppedError | None = None
    try:
        failure = _error_of(*stop) if stop is not None and raises else None
    except Exception as error:
        _fault(error, plugin)
    if failure is not None:
        raise failure


async def _ended(
    here: Stream, plugin: "RunGuardPlugin | None", invocations: set[str]
) -> "tuple[str, RunGuardPlugin] | None":
    """Forget everything of a run that is over, however it ended.

    Returns a stop that was not reported yet, if there was one.
    """
    stop: tuple[str, RunGuardPlugin] | None = None
    for guard, _, end in here.ends:
        guard.faults.attempt("end of run", end)
    for each in {*_watch.per_agent, *([plugin] if plugin is not None else [])}:
        for invocation_id in {*invocations, *here.invocations}:
            tripped = each.guard.faults.attempt("end of run", each.forget, invocation_id)
            if stop is None and tripped is not None:
                stop = (tripped.id, each)
        await each.written({*invocations, *here.invocations})
    return stop


async def _unheard_stop(
    runner: Runner, plugin: "RunGuardPlugin", invocations: set[str], user: str, session: str
) -> list[Event]:
    """The run was stopped but its stop event got lost, swallowed by an agent or cut off by Halt: a run never ends
    without a word.
    """
    invocation_id = next((one for one in invocations if plugin.stop_of(one) is not None), None)
    trip = plugin.stop_of(invocation_id) if invocation_id is not None else None
    if invocation_id is None or trip is None:
        return []
    announce(trip, plugin)
    return await _stop_events(runner, invocation_id, trip, plugin.guard.stop_text(trip), user, session)


async def _stop_events(
    runner: Runner, invocation_id: str, trip: Trip, text: str, user: str, session: str
) -> list[Event]:
    """The stop, and before it an answer for every call that is still open: models reject a history with a call that has
    none.
    """
    event = Event(
        author=getattr(runner.agent, "name", "") or "runguard", invocation_id=invocation_id, content=stop_content(text)
    )
    mark_stop(event, trip, text)
    answers: list[Event] = []
    try:
        stored = await runner.session_service.get_session(app_name=runner.app_name, user_id=user, session_id=session)
        if stored is not None:
            answers = _open_calls(stored, invocation_id, STOPPED)
    except Exception:  # the caller is told all the same
        stored = None
        _log.exception("runguard.stop_not_stored: the session service does not give the session")
    await _store(runner, stored, [*answers, event])
    return [*answers, event]


async def _store(runner: Runner, stored: Any, events: list[Event]) -> None:
    try:
        for each in events if stored is not None else ():
            await runner.session_service.append_event(session=stored, event=each)
    except Exception:  # the caller is told all the same
        _log.exception("runguard.stop_not_stored: the session service refused the stop event")


def _shown(event: Event) -> Event:
    """The event by which an inner loop ended says so to the caller; inside, where it would end the loops around it, it
    does not.
    """
    if not event.custom_metadata or METADATA_KEY not in event.custom_metadata or event.actions.escalate:
        return event
    from runguard.adk.termination import termination_reason

    if termination_reason(event) is None:
        return event
    return event.model_copy(update={"actions": event.actions.model_copy(update={"escalate": True})})


def _open_calls(session: Any, invocation_id: str, why: str) -> list[Event]:
    """An answer for every call of this invocation that has none and that nobody outside will answer."""
    events = [event for event in session.events if event.invocation_id == invocation_id]
    answered = {response.id for event in events for response in event.get_function_responses()}
    answers: list[Event] = []
    for event in events:
        open_calls = [
            c
            for c in event.get_function_calls()
            if c.id not in answered and c.id not in (event.long_running_tool_ids or ())
        ]
        if open_calls:
            answers.append(answer_to(event, open_calls, invocation_id, why))
    return answers


def answer_to(asker: Event, calls: list[types.FunctionCall], invocation_id: str, why: str) -> Event:
    """One event for the calls of one response, as ADK does it."""
    parts = [
        types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response=refusal(why))) for c in calls
    ]
    return Event(
        author=asker.author,
        invocation_id=invocation_id,
        branch=asker.branch,
        content=types.Content(role="user", parts=parts),
    )


def _can_end(plugin: "RunGuardPlugin", invocation_id: str) -> bool:
    """The whole run is stopped and nothing paid is in flight: closing the stream now throws nothing away."""
    invocation = plugin.find_invocation(invocation_id)
    return plugin.stop_of(invocation_id) is not None and (invocation is None or invocation.is_quiet())


def _is_raised(event: Event) -> bool:
    """Whether an error will be raised in place of this stop event: code that returns at the final event must not take
    it for an answer.
    """
    found = _announced_in(event) if event.error_code == STOP_CODE else None
    return found is not None and found[1].guard.policy.on_stop == "raise"


def _error_of(trip_id: str, plugin: "RunGuardPlugin") -> RunStoppedError | None:
    """What ``on_stop="raise"`` raises after the clean stop."""
    if plugin.guard.policy.on_stop != "raise":
        return None
    trip = next((t for t in reversed(plugin.guard.trips) if t.id == trip_id), None)
    return error_of(trip, plugin.guard.policy) if trip is not None and trip.enforced else None


def _wrap_run(original: Any) -> Any:
    @wraps(original)
    def run(self: Runner, *args: Any, **kwargs: Any) -> Generator[Event, None, None]:
        # Some versions of ADK lose what is raised in the thread that Runner.run starts: the stream stays silent, this
        # raises.
        from runguard.adk.termination import checked

        stop: tuple[str, RunGuardPlugin] | None = None
        condition = kwargs.pop("termination_condition", None)
        if condition is not None:
            checked(condition)  # here: what is raised in the thread may be lost
        if kwargs.get("new_message") is not None:
            kwargs["new_message"] = copy(kwargs["new_message"])  # tells this run from others with the same message
        message = id(kwargs.get("new_message"))
        _watch.in_sync_run[message] = condition
        try:
            for event in original(self, *args, **kwargs):
                is_raised = False
                try:
                    stop = _announced_in(event) or stop
                    is_raised = _is_raised(event)
                except Exception as error:
                    _fault(error, _guard_in(self))
                if not is_raised:
                    yield event
        finally:
            _watch.in_sync_run.pop(message, None)
        failure: RunStoppedError | None = None
        try:
            failure = _error_of(*stop) if stop is not None else None
        except Exception as error:
            _fault(error, stop[1] if stop is not None else None)
        if failure is not None:
            raise failure

    return run


def _wrap_run_live(original: Any) -> Any:
    @wraps(original)
    def run_live(self: Runner, *args: Any, **kwargs: Any) -> AsyncGenerator[Event, None]:
        fault: Exception | None = None
        try:
            plugin = _guard_of(self)
        except Exception as error:
            plugin, fault = _guard_in_spite_of(error, self), error
        events: AsyncGenerator[Event, None] = original(self, *args, **kwargs)
        if plugin is None:
            return events
        session = kwargs.get("session")
        session_id = kwargs.get("session_id") or getattr(session, "id", "")
        return _stream(
            self, plugin, events, str(kwargs.get("user_id", "")), str(session_id), FRAME.get() is None, fault, Turn()
        )

    return run_live


def _name_blind_spot(runner: Runner) -> None:
    """A Runner without a guard inside a guarded run: its model calls are billed and limited, its loops are not seen."""
    frame, stream = FRAME.get(), STREAM.get()
    if frame is not None:
        key = ("tool", frame.tool)
    elif stream is not None and stream.plugin is not None:
        key = ("agent", stream.agent)
    else:
        return
    name = getattr(runner.agent, "name", "?")
    if (*key, name) not in _blind_spots:
        _blind_spots.add((*key, name))
        _log.warning(
            "runguard.blind_spot: agent '%s' runs without the plugin inside %s '%s' "
            "(AgentTool(include_plugins=False)?); its model calls are billed and "
            "limited, its loops are not seen; runguard.install() guards it too",
            name,
            *key,
        )


_blind_spots: Final[set[tuple[str, str, str]]] = set()


# ---- install --------------------------------------------------------------------------------------------------------


def unwatch(plugin: BasePlugin) -> None:
    """Another plugin is in charge: only its runs in flight need this one."""
    _watch.plugins.discard(plugin)


def installed() -> "RunGuardPlugin | None":
    return _watch.installed


def set_installed(plugin: "RunGuardPlugin | None") -> None:
    """Make ``plugin`` the guard of every Runner, or of none: then Runners lose the guard that was put into them."""
    before = _watch.installed
    ours = (
        [(runner, each) for runner in list(_watch.injected) for each in _guards_in(runner) if _is_installed(each)]
        if plugin is None
        else []
    )
    _watch.installed = plugin
    from runguard.adk.termination import LOOP_TERMINATION

    LOOP_TERMINATION.put_on() if plugin is not None else LOOP_TERMINATION.take_off()
    if plugin is None and before is not None:
        for runner, each in ours:
            runner.plugin_manager.plugins.remove(each)
        _watch.injected.clear()
        _watch.plugins.discard(before)
        unpatch_if_unused()
