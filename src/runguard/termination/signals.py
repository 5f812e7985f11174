"""Conditions that other code decides: an external signal, or a user's function."""

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self

from runguard.core.errors import PolicyError, RunGuardError
from runguard.termination.arguments import import_path, imported
from runguard.termination.condition import Event, TerminationCondition, Unsubscribe

_log: Final = logging.getLogger("runguard")


class _Signal:
    """Counts how often the signal was set, and its listeners. Shared by all copies of one condition."""

    def __init__(self) -> None:
        self.given = 0
        self._lock = threading.Lock()
        self._listeners: dict[object, Callable[[], object]] = {}

    def __deepcopy__(self, _: object) -> Self:
        return self

    def give(self) -> None:
        with self._lock:
            self.given += 1
            listeners = list(self._listeners.values())
        for listener in listeners:  # outside the lock: a listener may unsubscribe or set the signal
            try:
                listener()
            except Exception:  # a failing listener must not block the others
                _log.exception("runguard.on_set_failed: a callback of ExternalTermination raised")

    def subscribe(self, listener: Callable[[], object]) -> Unsubscribe:
        key = object()
        with self._lock:
            self._listeners[key] = listener

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.pop(key, None)

        return unsubscribe


class ExternalTermination(TerminationCondition):
    """Fires when ``set()`` is called, from any thread: it ends every current run, and none that begins later."""

    knows_early = True

    def __init__(self) -> None:
        self._signal = _Signal()
        self._given_before = 0

    def set(self) -> None:
        self._signal.give()

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return "External termination requested" if self._signal.given > self._given_before else None

    def clear(self, now: float) -> None:
        self._given_before = self._signal.given

    def _subscribe(self, callback: Callable[[], object]) -> Unsubscribe:
        return self._signal.subscribe(callback)


class FunctionalTermination(TerminationCondition):
    """Fires when a function of the new events, sync or async, returns exactly True. It is called when there are events.

    An exception is logged once and counts as "not met"; a fault in the function does not end a run.
    """

    def __init__(self, func: Callable[[Sequence[Event]], bool | Awaitable[bool]]) -> None:
        if not callable(func) or isinstance(func, type):
            raise PolicyError(f"func = {func!r}: must be a function of the events")
        self._func = func
        self.needs_await = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(
            getattr(func, "__call__", None)  # noqa: B004 - is it async?
        )
        self._complained = False

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        answer = self._answer(events)
        if inspect.isawaitable(answer):
            if inspect.iscoroutine(answer):
                answer.close()  # it will never be awaited
            self.needs_await = True
            raise RunGuardError(
                f"{self!r} returns an awaitable: write `await condition(events)` instead of `condition.check(events)`"
            )
        return self._read(answer)

    async def judge_async(self, events: Sequence[Event], now: float) -> str | None:
        answer = self._answer(events)
        if inspect.isawaitable(answer):
            try:
                answer = await answer
            except Exception:
                self._complain()
                return None
        return self._read(answer)

    def _answer(self, events: Sequence[Event]) -> Any:
        if not events:
            return None
        try:
            return self._func(events)
        except Exception:
            self._complain()
            return None

    def _read(self, answer: object) -> str | None:
        return "Functional termination condition met" if answer is True else None

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            _log.exception("runguard.termination_failed: %r raised; it counts as not met. Logged once", self)

    def clear(self, now: float) -> None:
        self._complained = False

    def settings(self) -> dict[str, Any]:
        return {"func": import_path(self._func, "func")}

    @classmethod
    def from_settings(cls, func: object) -> Self:
        return cls(imported(func, "func"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._func, '__qualname__', None) or repr(self._func)})"
