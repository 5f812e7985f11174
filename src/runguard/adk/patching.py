"""What RunGuard replaces in ADK, for whom, and how it is put back.

Four methods of ``Runner`` (``runner_wrappers``) and one method of every model class (``model_calls``) are wrapped while
a guard, a budget, a guarded model or a termination condition exists. The wrappers pass everything through for a Runner
without a guard.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from google.adk.models.base_llm import BaseLlm
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner

from runguard.engine.guard import Guard

if TYPE_CHECKING:
    from runguard.adk.invocations import Invocations
    from runguard.adk.plugin import RunGuardPlugin

_log: Final = logging.getLogger("runguard")
_METHOD: Final = "generate_content_async"
_ON_SUBCLASS: Final = "__pydantic_init_subclass__"
_GUARDED_MODULE: Final = "runguard.adk.guarded_llm"  # GuardedLlm only passes calls on: the model inside is wrapped


class ModelClasses:
    """Wraps every class of models, and those that are defined later."""

    def __init__(self) -> None:
        self._originals: dict[type, Any] = {}
        self._wrap: Callable[[Any], Any] = lambda original: original

    def patch(self, wrap: Callable[[Any], Any]) -> None:
        self._wrap = wrap
        kinds: list[type] = [BaseLlm]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
            if kind is not BaseLlm:
                self._patch_class(kind)
        if _ON_SUBCLASS not in BaseLlm.__dict__:
            setattr(BaseLlm, _ON_SUBCLASS, classmethod(lambda kind, **_: self._patch_new(kind)))

    def _patch_new(self, kind: type) -> None:
        try:
            self._patch_class(kind)
        except Exception:
            _log.exception("runguard.guard_error: calls of the model class '%s' are not seen", kind.__name__)

    def _patch_class(self, kind: type) -> None:
        if kind in self._originals or kind.__module__ == _GUARDED_MODULE:
            return
        original = kind.__dict__.get(_METHOD)
        self._originals[kind] = original
        if callable(original):
            setattr(kind, _METHOD, self._wrap(original))

    def unpatch(self) -> None:
        for kind, original in self._originals.items():
            if original is not None and getattr(kind.__dict__.get(_METHOD), "__wrapped__", None) is original:
                setattr(kind, _METHOD, original)
        self._originals.clear()
        if _ON_SUBCLASS in BaseLlm.__dict__:
            delattr(BaseLlm, _ON_SUBCLASS)


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
        """Whether anything but an installed guard needs the wrappers."""
        return self.has_agent_conditions or bool(len(self.plugins)) or bool(len(self.of_models))


IN_USE: Final = InUse()
_models: Final = ModelClasses()
_originals: Final[dict[str, Any]] = {}  # methods of Runner
_lock: Final = threading.Lock()


def watch(plugin: BasePlugin) -> None:
    """A guard, a budget or a condition exists that needs wrapped Runners."""
    IN_USE.plugins.add(plugin)
    _patch()


def unwatch(plugin: BasePlugin) -> None:
    """Another plugin has taken over. Only runs in flight still need this one."""
    IN_USE.plugins.discard(plugin)


def watch_guard(guard: Guard) -> None:
    """A guarded model exists, which must know the run that calls it."""
    IN_USE.of_models.add(guard)
    _patch()


def watch_agents(invocations: "Invocations") -> None:
    """Agent callbacks drive this guard: its runs end with the stream."""
    IN_USE.per_agent.add(invocations)


def watch_conditions(*, end_runs: bool) -> None:
    """An agent has a condition of its own, which ends the agent alone or the whole run."""
    IN_USE.has_agent_conditions = True
    IN_USE.has_run_conditions = IN_USE.has_run_conditions or end_runs
    _patch()


def _patch() -> None:
    # Imported here: what they need imports this module.
    from runguard.adk.model_calls import wrap_model
    from runguard.adk.runner_wrappers import WRAPPERS

    with _lock:
        if _originals:
            return
        _models.patch(wrap_model)
        for name, wrap in WRAPPERS.items():
            original = getattr(Runner, name, None)
            if original is not None:
                _originals[name] = original
                setattr(Runner, name, wrap(original))


def unpatch_if_unused() -> None:
    """Put the original methods back, unless something still needs the wrappers or other code has patched on top of
    them: then they stay and pass everything through.
    """
    with _lock:
        if IN_USE.installed is not None or IN_USE.is_anything():
            return
        if any(
            getattr(getattr(Runner, name), "__wrapped__", None) is not original for name, original in _originals.items()
        ):
            return
        for name, original in _originals.items():
            setattr(Runner, name, original)
        _originals.clear()
        _models.unpatch()
