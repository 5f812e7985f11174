"""What every condition is, and the two that are made of others.

Asking a composite asks each condition in it once for a delta, also one that stands in several places: what it counts is
counted once.
A condition that has fired is latched: it keeps its reason and is not asked again until it is reset.
"""

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from runguard.core.exceptions import PolicyError, RunGuardError
from runguard.core.mistakes import CheckedABC
from runguard.pricing.rates import Usage
from runguard.termination.loop_keyword import LOOP_KEYWORD

Event = Any  # an ADK event, or whatever has its fields
Unsubscribe = Callable[[], None]


class TerminatedError(RunGuardError):
    """A condition that has fired was asked again. ``reset()`` it, or give every run its own copy with ``for_run()``."""


@dataclass(frozen=True, slots=True)
class TerminationResult:
    """Whether it is time to end, and why. Falsy while it is not."""

    terminated: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.terminated


NOT_YET: Final = TerminationResult(False)
_Asked = dict[int, TerminationResult]  # what each condition has said about one delta


class TerminationCondition(metaclass=CheckedABC):
    """Base of all conditions. A condition of your own says ``judge``, and where it counts something ``clear``;
    ``settings`` if it is to be saved. ``clear`` makes new containers instead of emptying old ones: copies for other
    runs may hold them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        LOOP_KEYWORD.put_on()  # from now on, the keyword that takes conditions can be used by mistake
        return super().__new__(cls)

    knows_early: bool = False  # whether it may fire without a new event: time, signals, tokens that were counted
    needs_await: bool = False  # whether only ``await condition(events)`` can ask it
    _reason: str | None = None

    # ---- what a condition is made of --------------------------------------------------------------------------------

    @abstractmethod
    def judge(self, events: Sequence[Event], now: float) -> str | None:
        """The reason to end, or None. ``events`` are new since the last call and may be none."""

    async def judge_async(self, events: Sequence[Event], now: float) -> str | None:
        return self.judge(events, now)

    def clear(self, now: float) -> None:
        """Forget what was counted; a clock starts at ``now``."""

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as plain data, defaults left out."""
        return {}

    # ---- asking -----------------------------------------------------------------------------------------------------

    @property
    def terminated(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why it fired; None while it has not."""
        return self._reason

    def check(self, events: Sequence[Event] = (), *, now: float | None = None) -> TerminationResult:
        """Tell what happened since the last call, and ask.

        Without events: what can be known now. ``now`` is monotonic seconds.
        """
        self._refuse_finished()
        if self.needs_await:
            raise RunGuardError(
                f"{self!r} asks an async function: write `await condition(events)` instead of `condition.check(events)`"
            )
        return self._ask(_listed(events), _moment(now), {})

    async def __call__(self, events: Sequence[Event] = (), *, now: float | None = None) -> TerminationResult | None:
        """``check`` in AutoGen's way: awaited, None while it has not fired.

        Awaits conditions that are async functions.
        """
        self._refuse_finished()
        return await self._ask_async(_listed(events), _moment(now), {}) or None

    def reset(self, now: float | None = None) -> None:
        """As new; clocks start at ``now``."""
        self._reason = None
        self.clear(_moment(now))

    def for_run(self, now: float | None = None) -> Self:
        """A copy for one run, with empty counters and clocks that start at ``now``.

        Copies share nothing but an external signal.
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
            known = asked[id(self)] = self._latched() or self._conclude(self.judge(events, now))
        return known

    async def _ask_async(self, events: Sequence[Event], now: float, asked: _Asked) -> TerminationResult:
        known = asked.get(id(self))
        if known is None:
            known = asked[id(self)] = self._latched() or self._conclude(await self.judge_async(events, now))
        return known

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
            known = made[id(self)] = copy.copy(self)
            known._reason = None
            known.clear(now)
        return known

    # ---- for integrations -------------------------------------------------------------------------------------------

    def leaves(self) -> "list[TerminationCondition]":
        """The conditions that are not made of others, each once."""
        return [self]

    def wake_at(self) -> float | None:
        """The next moment at which time alone may make it fire; None: no clock runs."""
        return None

    def count(self, prompt: int, completion: int, *, model: str = "", usage: Usage | None = None) -> None:
        """Tell of a model call that no event shows.

        ``usage`` has the details that prices need, where they are known.
        """
        for leaf in self.leaves():
            leaf._count(usage or Usage(max(prompt, 0), max(completion, 0)), model)

    def _count(self, usage: Usage, model: str) -> None:
        pass

    def on_set(self, callback: Callable[[], object]) -> Unsubscribe:
        """Be called when an ``ExternalTermination`` in it is set, on the thread that sets it.

        Ask once after subscribing: it may be set already.
        """
        undo = [leaf._subscribe(callback) for leaf in self.leaves()]

        def unsubscribe() -> None:
            for one in undo:
                one()

        return unsubscribe

    def _subscribe(self, callback: Callable[[], object]) -> Unsubscribe:
        return _nothing

    # ---- composing, saving ------------------------------------------------------------------------------------------

    def __or__(self, other: "TerminationCondition") -> "OrTerminationCondition":
        return OrTerminationCondition(self, other) if isinstance(other, TerminationCondition) else NotImplemented

    def __and__(self, other: "TerminationCondition") -> "AndTerminationCondition":
        return AndTerminationCondition(self, other) if isinstance(other, TerminationCondition) else NotImplemented

    def to_dict(self) -> dict[str, Any]:
        """Its type and settings as plain data for JSON, nothing that it has counted."""
        from runguard.termination.saved import save

        return save(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What ``to_dict`` gave. It may name functions and classes to import: load only what you trust."""
        from runguard.termination.saved import load

        loaded = load(data)
        if not isinstance(loaded, cls):
            raise PolicyError(f"type = '{type(loaded).__name__}': is no {cls.__name__}")
        return loaded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


class _Composite(TerminationCondition):
    """Several conditions as one. Has fired when they say so, whoever asked them."""

    _sign: ClassVar[str]

    def __init__(self, *conditions: TerminationCondition) -> None:
        if not conditions:
            raise PolicyError(f"{type(self).__name__}() of nothing: give at least one condition")
        for position, condition in enumerate(conditions):
            if not isinstance(condition, TerminationCondition):
                raise PolicyError(f"conditions.{position} = {condition!r}: is no termination condition")
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
        """Only what it has concluded itself: a condition that stands in several places may have fired in another, and
        the rest is to be told too.
        """
        return TerminationResult(True, self._reason) if self._reason is not None else NOT_YET

    @abstractmethod
    def _has_enough(self) -> bool: ...

    @property
    def terminated(self) -> bool:
        return self._reason is not None or self._has_enough()

    def _joined(self) -> str | None:
        """The reasons of those that have fired, once they are enough."""
        if not self._has_enough():
            return None
        return ", ".join(condition.reason or "" for condition in self._conditions if condition.terminated)

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return self._judge(events, now, {})

    def _judge(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        for condition in self._conditions:
            condition._ask(events, now, asked)
        return self._joined()

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

    async def _judge_async(self, events: Sequence[Event], now: float, asked: _Asked) -> str | None:
        for condition in self._conditions:  # one after another, so that what they do has an order
            await condition._ask_async(events, now, asked)
        return self._joined()

    def reset(self, now: float | None = None) -> None:
        moment = _moment(now)
        super().reset(moment)
        for condition in self._conditions:
            condition.reset(moment)

    def _copy(self, now: float, made: dict[int, TerminationCondition]) -> TerminationCondition:
        known = made.get(id(self))
        if known is None:
            twin = copy.copy(self)
            twin._reason = None
            twin._conditions = tuple(condition._copy(now, made) for condition in self._conditions)
            known = made[id(self)] = twin
        return known

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
    """Fires as soon as one does. All are told of every delta; the reason is those of all that fired with it."""

    _sign = "|"

    def _has_enough(self) -> bool:
        return any(condition.terminated for condition in self._conditions)


class AndTerminationCondition(_Composite):
    """Fires when all have, each in its own time: one that has fired waits for the others."""

    _sign = "&"

    def _has_enough(self) -> bool:
        return all(condition.terminated for condition in self._conditions)


def _moment(now: float | None) -> float:
    return time.monotonic() if now is None else now


def _listed(events: Iterable[Event]) -> Sequence[Event]:
    if isinstance(events, list | tuple):
        return events
    if hasattr(events, "author"):  # an event is iterable, over its fields
        raise TypeError("give a list of events, not an event")
    return tuple(events)


def _nothing() -> None:
    pass
