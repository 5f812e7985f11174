"""``runguard.install()``, and the wrappers on ADK's ``Runner``, which ``patching`` puts on and takes off.

The wrappers put an installed guard first in the plugin order, and end from outside a stopped run that ADK would let
spin (a Workflow, or a loop that ignores escalation). They raise the typed error of ``on_stop="raise"`` in place of the
stop event, which stays in the session. They record which run is at work, so that calls without a hook find their
account.
"""

import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import copy_context
from copy import copy
from decimal import Decimal
from functools import wraps
from typing import Any, Final, Unpack
from weakref import WeakSet

from google.adk.events import Event
from google.adk.runners import Runner

from runguard.adk.patching import IN_USE, SyncRun, guarded_stream, report_fault, shield, unwrap_adk_if_unused
from runguard.adk.plugin import RunGuardPlugin
from runguard.adk.runs import HERE, Invocations, adopt
from runguard.adk.stops import LiveTurn, Stop, error_of, is_raised, stop_in
from runguard.adk.termination import add_keywords, remove_keywords, until_terminated
from runguard.core.errors import InstallError, PolicyError, RunStoppedError
from runguard.policy.keywords import PolicySettings
from runguard.policy.settings import Policy
from runguard.termination.conditions import checked

_log: Final = logging.getLogger("runguard")
_place = ("", 0)  # file and line of the install() in force


def install(**policy: Unpack[PolicySettings]) -> RunGuardPlugin:
    """Guard every ADK Runner of this process, whenever it was built.

    A second call returns the same plugin. A different policy from the same file, such as an edited ``agent.py``
    that is loaded again, replaces the policy: spend, trips and stops are kept, and runs in flight finish under the
    policy they began with. A different one from another file raises. An App that registers a ``RunGuardPlugin`` of its
    own keeps that one: only its policy applies there, and a warning names what differs. Keywords are those of
    ``RunGuardPlugin``.
    """
    global _place
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    installed = IN_USE.installed
    if installed is None:
        plugin = RunGuardPlugin(**policy)
    elif _same(installed.guard.policy, Policy.build(**policy)):
        return installed
    # a cell of a notebook has no file
    elif not place[0].startswith("<") and os.path.realpath(place[0]) == os.path.realpath(_place[0]):
        plugin = installed
        plugin.replace_policy(**policy)
        _log.warning(
            "runguard.policy_replaced: install() at %s replaces the policy of %s; spend, trips and stops are "
            "kept, runs in flight finish under the old policy",
            *(_shown(place), _shown(_place)),
        )
    else:
        raise InstallError(
            f"runguard is already installed with another policy at {_shown(_place)}; this call at "
            f"{_shown(place)} differs. install() guards every agent of a "
            "process: use one policy for all, or give each app a guard of its own with App(..., "
            "plugins=[RunGuardPlugin(...)]). uninstall() would leave the "
            "first unguarded."
        )
    _place = place
    _set_installed(plugin)
    return plugin


def uninstall() -> None:
    """Take the installed guard out of every Runner. Do nothing without one."""
    _set_installed(None)


def _set_installed(plugin: RunGuardPlugin | None) -> None:
    """Make ``plugin`` the guard of every Runner. None takes the installed guard out of the Runners that got it."""
    before, IN_USE.installed = IN_USE.installed, plugin
    if plugin is not None:
        add_keywords()
        return
    remove_keywords()
    if before is not None:
        for runner in list(IN_USE.injected):
            if before in runner.plugin_manager.plugins:
                runner.plugin_manager.plugins.remove(before)
        IN_USE.injected.clear()
        IN_USE.plugins.discard(before)
        unwrap_adk_if_unused()


def _shown(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _same(a: Policy, b: Policy) -> bool:
    """Return whether all settings are equal. Functions are equal if they have the same code from the same place."""
    return all(_origin(getattr(a, name)) == _origin(getattr(b, name)) for name in Policy.model_fields)


def _origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _origin(entry) for key, entry in value.items()}
    code = getattr(value, "__code__", None)
    return (code.co_filename, code.co_firstlineno, code.co_code) if code is not None else value


# ---- The guard of a Runner

_overruling: Final[WeakSet[RunGuardPlugin]] = WeakSet()  # apps' own plugins that were compared with install()
_blind_spots: Final[set[tuple[str, str, str]]] = set()  # in the log already


def guards_in(runner: Runner) -> list[RunGuardPlugin]:
    return [plugin for plugin in runner.plugin_manager.plugins if isinstance(plugin, RunGuardPlugin)]


def overruled_settings(own: RunGuardPlugin) -> str:
    """Say which policy applies to an app that has a plugin of its own beside ``install()``; nothing if both agree."""
    installed = IN_USE.installed
    if installed is None or _same(own.guard.policy, installed.guard.policy):
        return ""
    ours, theirs = own.guard.policy, installed.guard.policy
    names = [name for name in Policy.model_fields if _origin(getattr(ours, name)) != _origin(getattr(theirs, name))]
    is_number = {name: isinstance(getattr(theirs, name), int | float | Decimal | None) for name in names}
    shown = [  # numbers only: a text may hold a password
        f"{name}={getattr(ours, name)} applies, not {getattr(theirs, name)}" if is_number[name] else f"{name} differs"
        for name in names
    ]
    return (
        f"this app has a RunGuardPlugin of its own, so the policy of install() at {_shown(_place)} does not apply to "
        f"it: {'; '.join(shown)}. Give the plugin these settings, or leave the plugin out"
    )


def _guard_of(runner: Runner) -> Invocations | None:
    """Return the registry of a Runner's guard, or None. Put an installed guard first in the Runner's plugins.

    A guard of the App's own has precedence over an installed one.
    """
    plugins = runner.plugin_manager.plugins
    own = next(iter(guards_in(runner)), None)
    if own is None and IN_USE.installed is not None:
        own = IN_USE.installed
        plugins.insert(0, own)
        IN_USE.injected.add(runner)
    if own is None:
        return None
    if IN_USE.installed is not None and own not in _overruling and own is not IN_USE.installed:
        _overruling.add(own)
        if differing := overruled_settings(own):
            _log.warning("runguard.two_policies: %s", differing)
    if plugins[0] is not own:
        if own.from_file_only or own is IN_USE.installed:
            plugins.remove(own)
            plugins.insert(0, own)
        elif not own.warned_order:
            own.warned_order = True
            _log.warning(
                "runguard.order: RunGuardPlugin is not first in the plugins; a plugin before it that answers a "
                "call hides that call from it"
            )
    return own.generation_here().invocations


def _guard_in_spite_of(error: Exception, runner: Runner) -> Invocations | None:
    """Return the guard of a Runner after ``_guard_of`` failed: the one in its plugins, or the installed one."""
    plugins = runner.plugin_manager.plugins
    plugin = next((one for one in plugins if isinstance(one, RunGuardPlugin)), None)
    if plugin is None and IN_USE.installed is not None:
        plugin = IN_USE.installed
        plugins.insert(0, plugin)
        IN_USE.injected.add(runner)
    registry = plugin.invocations if plugin is not None else None
    report_fault(error, registry)
    return registry


def _warn_of_blind_spot(runner: Runner) -> None:
    """Warn once of a Runner without a guard inside a guarded run: its calls are billed, its loops are not seen."""
    tool, stream = HERE.get().tool, HERE.get().stream
    if tool is not None:
        key = ("tool", tool.name)
    elif stream is not None and stream.registry is not None:
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


# ---- The wrapped methods


def _wrap_run_async(original: Any) -> Any:
    @wraps(original)
    def run_async(self: Runner, *args: Any, **kwargs: Any) -> AsyncGenerator[Event, None]:
        message = id(kwargs.get("new_message"))
        sync = IN_USE.in_sync_run.get(message)
        condition = kwargs.pop("termination_condition", None) or (sync.condition if sync is not None else None)
        fault: Exception | None = None
        try:
            if sync is not None and kwargs.get("new_message") is not None:
                adopt(sync.context)
            registry = _guard_of(self)
            if registry is None and condition is None and not IN_USE.is_anything():
                return original(self, *args, **kwargs)  # type: ignore[no-any-return]
            if registry is None:
                _warn_of_blind_spot(self)
        except Exception as error:
            registry, fault = _guard_in_spite_of(error, self), error
        user, session = str(kwargs.get("user_id", "")), str(kwargs.get("session_id", ""))
        plain = events = original(self, *args, **kwargs)
        try:
            events = until_terminated(self, plain, condition, user, session)
        except PolicyError:
            raise
        except Exception as error:
            fault = error
            report_fault(error, registry)
        raises = HERE.get().tool is None and sync is None
        return guarded_stream(self, registry, events, user, session, raises, fault)

    return run_async


def _wrap_run(original: Any) -> Any:
    @wraps(original)
    def run(self: Runner, *args: Any, **kwargs: Any) -> Generator[Event, None, None]:
        # Some versions of ADK lose exceptions of the thread that Runner.run starts: this raises the error, the stream
        # in that thread does not.
        stop: Stop | None = None
        condition = kwargs.pop("termination_condition", None)
        if condition is not None:
            checked(condition)  # here: an exception in the thread may be lost
        if kwargs.get("new_message") is not None:
            kwargs["new_message"] = copy(kwargs["new_message"])  # its id distinguishes runs with the same message
        message = id(kwargs.get("new_message"))
        IN_USE.in_sync_run[message] = SyncRun(condition, copy_context())
        is_nested = HERE.get().tool is not None  # the Runner around the tool raises the error
        session = (self.app_name, str(kwargs.get("user_id", "")), str(kwargs.get("session_id", "")))
        HERE.set(HERE.get()._replace(session=session))
        try:
            for event in original(self, *args, **kwargs):
                is_hidden = False
                try:
                    stop = stop_in(event) or stop
                    is_hidden = not is_nested and is_raised(event)
                except Exception as error:
                    plugin = next(iter(guards_in(self)), None)
                    report_fault(error, plugin.invocations if plugin is not None else None)
                if not is_hidden:
                    yield event
                    HERE.set(HERE.get()._replace(session=session))
        finally:
            IN_USE.in_sync_run.pop(message, None)
        failure: RunStoppedError | None = None
        with shield(stop[1] if stop is not None else None):
            failure = error_of(stop) if stop is not None and not is_nested else None
        if failure is not None:
            raise failure

    return run


def _wrap_run_live(original: Any) -> Any:
    @wraps(original)
    def run_live(self: Runner, *args: Any, **kwargs: Any) -> AsyncGenerator[Event, None]:
        fault: Exception | None = None
        try:
            registry = _guard_of(self)
        except Exception as error:
            registry, fault = _guard_in_spite_of(error, self), error
        events: AsyncGenerator[Event, None] = original(self, *args, **kwargs)
        if registry is None and not IN_USE.is_anything():
            return events
        user, session = str(kwargs.get("user_id", "")), kwargs.get("session")
        session_id = str(kwargs.get("session_id") or getattr(session, "id", ""))
        return guarded_stream(self, registry, events, user, session_id, HERE.get().tool is None, fault, LiveTurn())

    return run_live


def _wrap_new_context(original: Any) -> Any:
    """Wrap ``Runner._new_invocation_context``, so that the stream remembers which invocation it runs.

    A guarded model gets a request and no context.
    """

    @wraps(original)
    def new_context(self: Runner, *args: Any, **kwargs: Any) -> Any:
        context = original(self, *args, **kwargs)
        stream = HERE.get().stream
        if stream is not None and stream.context is None:
            stream.context = context
        return context

    return new_context


WRAPPERS: Final[dict[str, Callable[[Any], Any]]] = {
    "run_async": _wrap_run_async,
    "run": _wrap_run,
    "run_live": _wrap_run_live,
    # private, and the same in every supported version; without it a guarded model counts each stream as a run
    "_new_invocation_context": _wrap_new_context,
}
