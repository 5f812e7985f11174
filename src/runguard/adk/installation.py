"""``runguard.install()``: one line that guards every Runner of the process, built before or after it."""

import sys
from typing import Any, Unpack

from runguard.adk import runners
from runguard.adk.plugin import RunGuardPlugin
from runguard.errors import InstallError
from runguard.policy import Policy
from runguard.typed_settings import PolicySettings

_place = ""


def install(**policy: Unpack[PolicySettings]) -> RunGuardPlugin:
    """Guard every ADK Runner of this process. An equal second call returns the same plugin, a different one raises.

    An App that registers a ``RunGuardPlugin`` of its own keeps that one. Keywords are those of ``RunGuardPlugin``.
    """
    global _place
    caller = sys._getframe(1)
    here = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    installed = runners.installed()
    if installed is not None:
        if _same(installed.guard.policy, Policy.build(**policy)):
            return installed
        raise InstallError(
            f"runguard is already installed with another policy at {_place}; this call at {here} differs. install() guards every agent of a process: use one "
            "policy for all, or give each app a guard of its own with App(..., plugins=[RunGuardPlugin(...)]). uninstall() would leave the first unguarded."
        )
    plugin = RunGuardPlugin(**policy)
    _place = here
    runners.set_installed(plugin)
    return plugin


def uninstall() -> None:
    """Take the installed guard out of every Runner; without one, nothing happens."""
    runners.set_installed(None)


def _same(a: Policy, b: Policy) -> bool:
    """Equal settings, and functions that come from the same place: a lambda that is defined again is the same lambda."""
    return all(_origin(getattr(a, name)) == _origin(getattr(b, name)) for name in Policy.model_fields)


def _origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _origin(entry) for key, entry in value.items()}
    code = getattr(value, "__code__", None)
    return (code.co_filename, code.co_firstlineno, code.co_code) if code is not None else value
