"""The base of every condition, and the two that combine others.

A composite checks each of its conditions once per delta, also a condition that occurs in several places, so that it
counts once.
A condition that has fired is latched: it keeps its reason and is not checked again until it is reset.
"""

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from runguard.core.errors import CheckedABC, PolicyError, RunGuardError
from runguard.pricing.rates import Usage
from runguard.termination.loop_keyword import LOOP_KEYWORD

Event = Any  # an ADK event, or an object with its fields
Unsubscribe = Callable[[], None]


class TerminatedError(RunGuardError):
    """A condition that has fired was checked again: call ``reset()``, or use ``for_run()`` to give every run a copy.

    Also raised where a condition ends a run that cannot end with a text, because its output is structured.
    """


@dataclass(frozen=True, slots=True)
class TerminationResult:
    """The result of a check: whether to end, and why. Falsy while the condition has not fired."""

    terminated: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.terminated


NOT_YET: Final = TerminationResult(False)
_Asked = dict[int, TerminationResult]  # the result of each condition for one delta


class TerminationCondition(metaclass=CheckedABC):
    """Base of all conditions. Your own condition implements ``judge``, ``clear`` if it counts something, and
    ``settings`` if it should be saved. ``clear`` must create new containers instead of emptying old ones: copies for
    other runs may use them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        LOOP_KEYWORD.put_on()  # from now on, the keyword for conditions may be used without install()
        return super().__new__(cls)

    knows_early: bool = False  # whether it may fire without a new event: time, signals, tokens that were counted
    needs_await: bool = False  # whether only ``await condition(events)`` can check it
    _reason: str | None = None

    # ---- to be implemented ------------------------------------------------------------------------------------------

    @abstractmethod
    def judge(self, events: Sequence[Event], now: float) -> str | None:
        """Return the reason to end, or None. ``events`` are new since the last call and may be empty."""

    async def judge_async(self, events: Sequence[Event], now: float) -> str | None:
        return self.judge(events, now)

    def clear(self, now: float) -> None:
        """Reset the counts; a clock starts at ``now``."""

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain data, without defaults."""
        return {}

    # ---- checking ---------------------------------------------------------------------------------------------------

    @property
    def terminated(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """The reason why it fired; None while it has not."""
        return self._reason

    def check(self, events: Sequence[Event] = (), *, now: float | None = None) -> TerminationResult:
        """Process the events since the last call and return the result.

        Without events, check time, signals and counted tokens. ``now`` is monotonic seconds.
        """
        self._refuse_finished()
        if self.needs_await:
            raise RunGuardError(
                f"{self!r} asks an async function: write `await condition(events)` instead of `condition.check(events)`"
            )
        return self._ask(_listed(events), _moment(now), {})

    async def __call__(self, events: Sequence[Event] = (), *, now: float | None = None) -> TerminationResult | None:
        """``check`` as in AutoGen: awaited, None while it has not fired.

        Awaits conditions that are async functions.
        """
        self._refuse_finished()
        return await self._ask_async(_listed(events), _moment(now), {}) or None

    def reset(self, now: float | None = None) -> None:
        """Reset the condition; clocks start at ``now``."""
        self._reason = None
        self.clear(_moment(now))

    def for_run(self, now: float | None = None) -> Self:
        """Return a copy for one run, with empty counters and clocks that start at ``now``.

        Copies share only an external signal.
        """
        return self._copy(_moment(now), {})  # type: ignore[return-value]

    def _refuse_finished(self) -> None:
        if self.terminated:
            raise TerminatedError(
                f"{self!r} has already fired ({self.reason}); reset() it, or use for_run() to give every run "
                "its own copy"
            )

    def _ask(self, events: Sequence[Event], now: float, asked: _Asked) -> TerminationResult:
        known = asked.get(id(self))
        if known is None:
            known = asked[id(self)] = self._latched() or self._conclude(self._judge(events, now, asked))
        return known

    async def _ask_async(self, events: Sequence[Event], now: float, asked: _Asked) -> TerminationResult:
        known = asked.get(id(self))
        if known is None:
            known = asked[id(self)] = self._latched() or self._conclude(await self._judge_async(events, now, asked))
        return known

    def _judge(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        return self.judge(events, now)

    async def _judge_async(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        return await self.judge_async(events, now)

    def _latched(self) -> TerminationResult:
        return TerminationResult(True, self.reason or "") if self.terminated else NOT_YET

    def _conclude(self, reason: str | None) -> TerminationResult:
        if reason is None:
            return NOT_YET
        self._reason = reason
        return TerminationResult(True, reason)

    def _copy(self, now: float, made: "dict[int, TerminationCondition]") -> "TerminationCondition":
        known = made.get(id(self))
        if known is None:
            known = copy.copy(self)
            known._reason = None
            known._start_copy(now, made)
            made[id(self)] = known
        return known

    def _start_copy(self, now: float, made: "dict[int, TerminationCondition]") -> None:
        self.clear(now)

    # ---- for integrations -------------------------------------------------------------------------------------------

    def leaves(self) -> "list[TerminationCondition]":
        """Yield the conditions that do not combine others, each once."""
        return [self]

    def wake_at(self) -> float | None:
        """Return the next time at which it may fire without an event; None if it has no clock."""
        return None

    def count(self, prompt: int, completion: int, *, model: str = "", usage: Usage | None = None) -> None:
        """Count a model call that no event shows.

        ``usage`` has the details that prices need, if known.
        """
        for leaf in self.leaves():
            leaf._count(usage or Usage(max(prompt, 0), max(completion, 0)), model)

    def _count(self, usage: Usage, model: str) -> None:
        pass

    def on_set(self, callback: Callable[[], object]) -> Unsubscribe:
        """Call the listener when an ``ExternalTermination`` in it is set, on the thread that sets it.

        Check once after subscribing: it may already be set.
        """
        undo = [leaf._subscribe(callback) for leaf in self.leaves()]

        def unsubscribe() -> None:
            for one in undo:
                one()

        return unsubscribe

    def _subscribe(self, callback: Callable[[], object]) -> Unsubscribe:
        return lambda: None

    # ---- composing, saving ------------------------------------------------------------------------------------------

    def __or__(self, other: "TerminationCondition") -> "OrTerminationCondition":
        return OrTerminationCondition(self, other) if isinstance(other, TerminationCondition) else NotImplemented

    def __and__(self, other: "TerminationCondition") -> "AndTerminationCondition":
        return AndTerminationCondition(self, other) if isinstance(other, TerminationCondition) else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Return its type and settings as plain data for JSON, without counts."""
        from runguard.termination.saved import save

        return save(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a condition from ``to_dict`` data. It may import functions: load only data that you trust."""
        from runguard.termination.saved import load

        loaded = load(data)
        if not isinstance(loaded, cls):
            raise PolicyError(f"type = '{type(loaded).__name__}': is no {cls.__name__}")
        return loaded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


class _Composite(TerminationCondition):
    """Combines several conditions into one."""

    _sign: ClassVar[str]

    def __init__(self, *conditions: TerminationCondition) -> None:
        if not conditions:
            raise PolicyError(f"{type(self).__name__}(): pass at least one condition")
        for position, condition in enumerate(conditions):
            if not isinstance(condition, TerminationCondition):
                raise PolicyError(f"conditions.{position} = {condition!r}: is not a termination condition")
        # a|b|c is one Or of three; the same instance twice is one condition
        flat = [inner for c in conditions for inner in (c.conditions if isinstance(c, type(self)) else (c,))]
        self._conditions = tuple({id(condition): condition for condition in flat}.values())

    @property
    def conditions(self) -> tuple[TerminationCondition, ...]:
        return self._conditions

    @property
    def knows_early(self) -> bool:  # type: ignore[override]
        return any(condition.knows_early for condition in self._conditions)

    @property
    def needs_await(self) -> bool:  # type: ignore[override]
        return any(condition.needs_await for condition in self._conditions)

    @property
    def reason(self) -> str | None:
        return self._reason if self._reason is not None else self._joined()

    def _latched(self) -> TerminationResult:
        """Return only its own result: a condition that occurs in several places may have fired in another composite."""
        return TerminationResult(True, self._reason) if self._reason is not None else NOT_YET

    @abstractmethod
    def _has_enough(self) -> bool: ...

    @property
    def terminated(self) -> bool:
        return self._reason is not None or self._has_enough()

    def _joined(self) -> str | None:
        """Return the joined reasons if enough conditions have fired."""
        if not self._has_enough():
            return None
        return ", ".join(condition.reason or "" for condition in self._conditions if condition.terminated)

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return self._judge(events, now, {})

    def _judge(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        for condition in self._conditions:
            condition._ask(events, now, asked)
        return self._joined()

    async def _judge_async(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        for condition in self._conditions:  # one after another, so that their order is fixed
            await condition._ask_async(events, now, asked)
        return self._joined()

    def reset(self, now: float | None = None) -> None:
        moment = _moment(now)
        super().reset(moment)
        for condition in self._conditions:
            condition.reset(moment)

    def _start_copy(self, now: float, made: dict[int, TerminationCondition]) -> None:
        self._conditions = tuple(condition._copy(now, made) for condition in self._conditions)

    def leaves(self) -> list[TerminationCondition]:
        return list({id(leaf): leaf for condition in self._conditions for leaf in condition.leaves()}.values())

    def wake_at(self) -> float | None:
        moments = [condition.wake_at() for condition in self._conditions if not condition.terminated]
        return min((moment for moment in moments if moment is not None), default=None)

    def __repr__(self) -> str:
        if len(self._conditions) == 1:
            return f"{type(self).__name__}({self._conditions[0]!r})"
        return f" {self._sign} ".join(f"({c!r})" if isinstance(c, _Composite) else repr(c) for c in self._conditions)


class OrTerminationCondition(_Composite):
    """Fires as soon as one does. All receive every delta; the reason names all that fired together."""

    _sign = "|"

    def _has_enough(self) -> bool:
        return any(condition.terminated for condition in self._conditions)


class AndTerminationCondition(_Composite):
    """Fires when all have fired, not necessarily together: one that has fired waits for the others."""

    _sign = "&"

    def _has_enough(self) -> bool:
        return all(condition.terminated for condition in self._conditions)


def _moment(now: float | None) -> float:
    return time.monotonic() if now is None else now


def _listed(events: Iterable[Event]) -> Sequence[Event]:
    if isinstance(events, list | tuple):
        return events
    if hasattr(events, "author"):  # an event is iterable (over its fields)
        raise TypeError("pass a list of events, not an event")
    return tuple(events)
