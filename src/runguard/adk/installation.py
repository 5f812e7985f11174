"""``runguard.install()``: one line that guards every Runner of the process, whenever it was built."""

import logging
import os
import sys
from typing import Any, Final, Unpack

from runguard.adk import patching
from runguard.adk.generations import Generations
from runguard.adk.patching import IN_USE
from runguard.adk.plugin import RunGuardPlugin
from runguard.adk.runner_wrappers import guards_in, is_installed
from runguard.adk.termination import LOOP_TERMINATION
from runguard.core.errors import InstallError
from runguard.engine.guard import Guard
from runguard.engine.resume import retire
from runguard.policy.settings import Policy, PolicySettings

_log: Final = logging.getLogger("runguard")
_place = ("", 0)  # file and line of the install() in force


def install(**policy: Unpack[PolicySettings]) -> RunGuardPlugin:
    """Guard every ADK Runner of this process.

    An equal second call returns the same plugin. A different one from the same file, such as an edited ``agent.py``
    that is loaded again, replaces the policy: spend, trips and stops are kept, and runs in flight finish under the
    policy they began with. A different one from another file raises. An App that registers a ``RunGuardPlugin`` of its
    own keeps that one. Keywords are those of ``RunGuardPlugin``.
    """
    global _place
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    installed = IN_USE.installed
    if installed is None:
        plugin = RunGuardPlugin(**policy)
    elif _same(installed.guard.policy, Policy.build(**policy)):
        return installed
    elif _is_same_file(place[0], _place[0]):
        plugin = _replace(installed, policy)
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
    """Take the installed guard out of every Runner. Does nothing without one."""
    _set_installed(None)


def _set_installed(plugin: RunGuardPlugin | None) -> None:
    """Make ``plugin`` the guard of every Runner. None takes the installed guard out of the Runners that got it."""
    before = IN_USE.installed
    injected = (
        [(runner, each) for runner in list(IN_USE.injected) for each in guards_in(runner) if is_installed(each)]
        if plugin is None
        else []
    )
    IN_USE.installed = plugin
    LOOP_TERMINATION.put_on() if plugin is not None else LOOP_TERMINATION.take_off()
    if plugin is None and before is not None:
        for runner, each in injected:
            runner.plugin_manager.plugins.remove(each)
        IN_USE.injected.clear()
        IN_USE.plugins.discard(before)
        patching.unpatch_if_unused()


class _Successor(RunGuardPlugin):
    """A plugin whose guard takes over from another one."""

    def __init__(self, before: Guard, policy: PolicySettings) -> None:
        self._before: Guard | None = before
        super().__init__(**policy)
        self._before = None  # only its runs keep it alive

    def _new_guard(self, policy: Policy) -> Guard:
        return Guard(policy, heir_of=self._before, gives_last_answers=True, switches_models=True)


def _replace(installed: RunGuardPlugin, policy: PolicySettings) -> RunGuardPlugin:
    """A plugin with the new policy, for runs that start from now on.

    An invalid policy raises and changes nothing.
    """
    plugin = _Successor(installed.guard, policy)
    retire(installed.guard, plugin.guard)
    generations = installed.generations = installed.generations or Generations(installed)
    generations.add(plugin)
    patching.unwatch(installed)
    return plugin


def _is_same_file(one: str, other: str) -> bool:
    """False for code without a file, such as a cell of a notebook."""
    return not one.startswith("<") and os.path.realpath(one) == os.path.realpath(other)


def _shown(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _same(a: Policy, b: Policy) -> bool:
    """Equal settings, and functions that come from the same place:
    a lambda that is defined again is the same lambda.
    """
    return all(_origin(getattr(a, name)) == _origin(getattr(b, name)) for name in Policy.model_fields)


def _origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _origin(entry) for key, entry in value.items()}
    code = getattr(value, "__code__", None)
    return (code.co_filename, code.co_firstlineno, code.co_code) if code is not None else value
