"""Conditions that end a run: their base, the two that combine others, those on events and on signals.

Users create them. ``calls/run`` and ``adk/termination`` ask them while a run is at work. ``termination/usage`` has the
conditions that need the engine. All of them read events and check their arguments with the functions here.
"""

import copy
import inspect
import json
import logging
import math
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from reprlib import Repr
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from runguard import termination
from runguard.core.decision import METADATA_KEY
from runguard.core.errors import CheckedABC, PolicyError, RunGuardError, did_you_mean
from runguard.core.events import ROOT_LANE
from runguard.core.identity import LruDict
from runguard.core.money import to_count
from runguard.pricing.rates import Usage
from runguard.providers.usage import EventUsage

if TYPE_CHECKING:
    from runguard.engine.guard import Guard
    from runguard.engine.runs import Run

_log: Final = logging.getLogger("runguard")

# ---- The base of every condition, and the two that combine others.

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
    """Base of all conditions. One that has fired keeps its reason and is not checked again until it is reset.

    Your own condition implements ``judge``, ``clear`` if it counts something, and ``settings`` if it should be saved.
    ``clear`` must create new containers instead of emptying old ones: copies for other runs may use them.
    """

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
        return save(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Create a condition from ``to_dict`` data. It may import functions: load only data that you trust."""
        loaded = load(data)
        if not isinstance(loaded, cls):
            raise PolicyError(f"type = '{type(loaded).__name__}': is no {cls.__name__}")
        return loaded

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.settings().items())})"


class _Composite(TerminationCondition):
    """Combines several conditions into one.

    It checks each of them once per delta. A condition that occurs in several places counts once.
    """

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


# ---- Conditions on events: counts, texts, tool answers, hand-offs, state.

_ANY: Final = object()
_repr = Repr()
_repr.maxstring = _repr.maxother = 80
_short = _repr.repr


class _Counting(TerminationCondition):
    """Base of conditions that count events."""

    _count_seen = 0

    def clear(self, now: float) -> None:
        self._count_seen = 0


class MaxIterationsTermination(_Counting):
    """Fires after a number of events, without chunks of streams."""

    def __init__(self, max_iterations: int) -> None:
        self._max = to_count(max_iterations, "max_iterations")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        self._count_seen += sum(1 for _ in whole(events))
        if self._count_seen < self._max:
            return None
        return f"Maximum of {self._max} events reached, current count: {self._count_seen}"

    def settings(self) -> dict[str, Any]:
        return {"max_iterations": self._max}


class MaxMessageTermination(_Counting):
    """Fires after a number of events with text; with ``include_agent_event`` calls, answers and thoughts count too."""

    def __init__(self, max_messages: int, include_agent_event: bool = False) -> None:
        self._max = to_count(max_messages, "max_messages")
        self._all = flag_of(include_agent_event, "include_agent_event")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        self._count_seen += sum(1 for event in whole(events) if self._all or visible_text(event).strip())
        if self._count_seen < self._max:
            return None
        return f"Maximum number of messages {self._max} reached, current message count: {self._count_seen}"

    def settings(self) -> dict[str, Any]:
        return {"max_messages": self._max, **({"include_agent_event": True} if self._all else {})}


class _FromSources(TerminationCondition):
    """Base of conditions that read only events of some authors."""

    _sources: tuple[str, ...] | None

    def _heard(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in whole(events) if self._sources is None or author_of(event) in self._sources]

    def settings(self) -> dict[str, Any]:
        return {} if self._sources is None else {"sources": list(self._sources)}


class TextMentionTermination(_FromSources):
    """Fires when a text occurs in an event; the case must match.

    ``sources``: the author, or authors, whose texts count.
    """

    def __init__(self, text: str, sources: str | Sequence[str] | None = None) -> None:
        self._text = text_of(text, "text")
        self._sources = names_of(sources, "sources")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return (
            f"Text '{self._text}' mentioned"
            if any(self._text in visible_text(event) for event in self._heard(events))
            else None
        )

    def settings(self) -> dict[str, Any]:
        return {"text": self._text, **super().settings()}


class FinalAnswerTermination(_FromSources):
    """Fires when an agent has given its answer: a final response with text."""

    def __init__(self, sources: str | Sequence[str] | None = None) -> None:
        self._sources = names_of(sources, "sources")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        return next(
            (f"Final answer of {author_of(event) or 'an agent'}" for event in self._heard(events) if _is_answer(event)),
            None,
        )


def _is_answer(event: Event) -> bool:
    is_final = getattr(event, "is_final_response", None)
    return callable(is_final) and bool(is_final()) and bool(visible_text(event).strip())


class FunctionCallTermination(TerminationCondition):
    """Fires when a function has answered, not when it was requested."""

    def __init__(self, function_name: str) -> None:
        self._name = text_of(function_name, "function_name")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        answered = any(
            getattr(answer, "name", None) == self._name for event in whole(events) for answer in answers_of(event)
        )
        return f"Function '{self._name}' was executed" if answered else None

    def settings(self) -> dict[str, Any]:
        return {"function_name": self._name}


class HandoffTermination(TerminationCondition):
    """Fires when the work was handed to an agent of this name."""

    def __init__(self, target: str) -> None:
        self._target = text_of(target, "target")

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        found = next((event for event in whole(events) if transfer_of(event) == self._target), None)
        return None if found is None else f"Handoff to {self._target} from {author_of(found) or 'an agent'} detected"

    def settings(self) -> dict[str, Any]:
        return {"target": self._target}


class StateTermination(TerminationCondition):
    """Fires when an event sets a key of the session's state to a value; without a value, to anything true."""

    def __init__(self, key: str, value: Any = _ANY) -> None:
        self._key, self._value = text_of(key, "key"), value

    def judge(self, events: Sequence[Event], now: float) -> str | None:
        for event in whole(events):
            delta = state_delta_of(event)
            if self._key in delta and self._fits(delta[self._key]):
                return f"State '{self._key}' is {_short(delta[self._key])}"
        return None

    def _fits(self, actual: Any) -> bool:
        try:
            if self._value is _ANY:
                return bool(actual)
            return isinstance(actual, bool) == isinstance(self._value, bool) and bool(actual == self._value)
        except Exception:  # the truth value of an array is ambiguous: it is not the expected value
            return False

    def settings(self) -> dict[str, Any]:
        return {"key": self._key, **({} if self._value is _ANY else {"value": self._value})}

    def to_dict(self) -> dict[str, Any]:
        if self._value is not _ANY and not _survives_json(self._value):
            raise PolicyError(
                f"value = {_short(self._value)}: cannot be saved, because it does not survive a JSON round trip"
            )
        return super().to_dict()


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


# ---- Conditions that other code decides: an external signal, or a user's function.


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


# ---- How a condition ended a run, and how the reason is read from what a framework has stored.

KEY: Final = "termination"
# Where events of ADK, messages of LangChain and responses of Pydantic AI keep metadata; the second one is ADK's JSON.
_FIELDS: Final = ("custom_metadata", "customMetadata", "response_metadata", "metadata")


@dataclass(frozen=True, slots=True)
class Ended:
    """A condition has ended a run. This is not a trip: the run did what it was meant to do."""

    reason: str
    condition: str

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata of the event or message that ends the run."""
        return {KEY: {"reason": self.reason, "condition": self.condition}}


def termination_reason(event: Any) -> str | None:
    """Return why the work ended, from the event that ended it; None for any other event.

    Takes an ADK event, a message of LangChain, a response of Pydantic AI, or the JSON of one of them.
    """
    for name in _FIELDS:
        metadata = event.get(name) if isinstance(event, dict) else getattr(event, name, None)
        own = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
        ended = own.get(KEY) if isinstance(own, dict) else None
        if isinstance(ended, dict) and "reason" in ended:
            return str(ended["reason"])
    return None


def checked(condition: object) -> TerminationCondition:
    if not isinstance(condition, TerminationCondition):
        raise PolicyError(
            f"{condition!r} is not a termination condition; give one such as MaxIterationsTermination(10) | "
            "TimeoutTermination(60)"
        )
    return condition


# ---- Checks of constructor arguments: an invalid value is rejected at once, with the name of the argument.


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise PolicyError(f"{name} = {value!r}: must be a non-empty string")
    return value


def flag_of(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise PolicyError(f"{name} = {value!r}: give True or False")
    return value


def seconds_of(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name} = {value!r}: must be a number of seconds")
    if not math.isfinite(value) or not 0 < value <= 10**9:
        raise PolicyError(f"{name} = {value!r}: must be greater than 0 and at most a billion seconds")
    return value


def names_of(value: object, name: str) -> tuple[str, ...] | None:
    """Return the authors as a tuple; None means all."""
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        raise PolicyError(f"{name} = {value!r}: must be the name of an author or a list of names; omit it for all")
    ordered: Iterable[Any] = sorted(value, key=str) if isinstance(value, set | frozenset) else value
    return tuple(dict.fromkeys(text_of(one, f"{name}.{position}") for position, one in enumerate(ordered)))


# ---- Conditions as plain data: ``{"version": 1, "type": "TextMentionTermination", "text": "DONE"}``.

VERSION: Final = 1
_DEEPEST: Final = 100  # nesting of composites; real conditions are flatter
_HEAD: Final = ("version", "type")


def save(condition: TerminationCondition) -> dict[str, Any]:
    kind = type(condition)
    name = kind.__name__ if _built_in().get(kind.__name__) is kind else import_path(kind, "type")
    data: dict[str, Any] = {"version": VERSION, "type": name}
    if isinstance(condition, OrTerminationCondition | AndTerminationCondition):
        parts = [inner.to_dict() for inner in condition.conditions]
        data["conditions"] = [{key: value for key, value in part.items() if key != "version"} for part in parts]
    else:
        data.update(condition.settings())
    return data


def load(data: Mapping[str, Any]) -> TerminationCondition:
    if isinstance(data, Mapping) and "version" not in data:
        raise PolicyError(f"version: missing; this release writes {VERSION}")
    return _load(data, "", 0)


def _load(data: Any, path: str, depth: int) -> TerminationCondition:
    if not isinstance(data, Mapping):
        raise PolicyError(f"{path.rstrip('.') or 'condition'} = {data!r}: must be a mapping with a type")
    if depth > _DEEPEST:
        raise PolicyError(f"{path.rstrip('.')}: nested too deeply")
    if (version := data.get("version", VERSION)) != VERSION or isinstance(version, bool):
        raise PolicyError(f"{path}version = {version!r}: this release reads version {VERSION}")
    kind = _class_of(data.get("type"), path)
    given = {key: value for key, value in data.items() if key not in _HEAD}
    required, known = _keys_of(kind)
    for key in given:
        if key not in known:
            raise PolicyError(f"{path}{key}: no such setting of {kind.__name__}; {did_you_mean(str(key), known)}")
    for key in required:
        if key not in given:
            raise PolicyError(f"{path}{key}: missing")
    if issubclass(kind, OrTerminationCondition | AndTerminationCondition):
        return kind(*_load_all(given["conditions"], path, depth))
    make = getattr(kind, "from_settings", kind)
    try:
        return make(**given)
    except PolicyError as error:  # with its path
        raise PolicyError(f"{path}{error}") from None


def _load_all(conditions: Any, path: str, depth: int) -> Iterator[TerminationCondition]:
    if not isinstance(conditions, list | tuple) or not conditions:
        raise PolicyError(f"{path}conditions = {conditions!r}: must be a list of conditions")
    for position, inner in enumerate(conditions):
        yield _load(inner, f"{path}conditions.{position}.", depth + 1)


def _class_of(name: Any, path: str) -> type[TerminationCondition]:
    if name is None:
        raise PolicyError(f"{path}type: missing")
    known = _built_in()
    if isinstance(name, str) and ":" in name:
        kind = imported(name, f"{path}type")
        if isinstance(kind, type) and issubclass(kind, TerminationCondition) and not inspect.isabstract(kind):
            return kind
        raise PolicyError(f"{path}type = {name!r}: is not a termination condition")
    if not isinstance(name, str) or name not in known:
        raise PolicyError(f"{path}type = {name!r}: no such condition; {did_you_mean(str(name), known)}")
    return known[name]


def _built_in() -> dict[str, type[TerminationCondition]]:
    found = {name: getattr(termination, name) for name in termination.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if issubclass(kind, TerminationCondition) and not inspect.isabstract(kind)
    }


def _keys_of(kind: type[TerminationCondition]) -> tuple[list[str], list[str]]:
    """Return the required keys, and all allowed keys."""
    if issubclass(kind, OrTerminationCondition | AndTerminationCondition):
        return ["conditions"], ["conditions"]
    named = [
        p for p in inspect.signature(kind).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return [p.name for p in named if p.default is p.empty], [*(p.name for p in named), *getattr(kind, "saved_keys", ())]


def import_path(thing: Any, name: str) -> str:
    """Return ``module:qualname`` of an importable object."""
    module, qualname = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    path = f"{module}:{qualname}"
    if not isinstance(module, str) or not isinstance(qualname, str) or "<" in qualname or _found(path) is not thing:
        raise PolicyError(
            f"{name} = {thing!r}: cannot be saved, because it cannot be imported by name; define it at the top "
            "of a module"
        )
    return path


def imported(path: object, name: str) -> Any:
    module, colon, qualname = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not colon or not qualname:
        raise PolicyError(f"{name} = {path!r}: give 'module:name'")
    try:
        found = _found(str(path))
    except Exception as error:  # importing runs code, which may raise anything
        raise PolicyError(
            f"{name} = {path!r}: its module cannot be imported: {type(error).__name__}: {error}"
        ) from None
    if found is None:
        raise PolicyError(f"{name} = {path!r}: the module has no such name")
    return found


def _found(path: str) -> Any:
    module, _, qualname = path.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


# ---- The keyword ``termination_condition`` of ADK's LoopAgent.

KEYWORD: Final = "termination_condition"
_MODULE: Final = "google.adk.agents.loop_agent"
_INIT: Final = "__init__"


class NotInstalledError(PolicyError, ValueError):
    """The keyword was used without ``runguard.install()``.

    A ValueError, like ADK's own error for unknown keywords.
    """


class LoopKeyword:
    """The keyword that ``runguard.install()`` adds to LoopAgent. Without that, its error says what to do.

    LoopAgent forbids unknown keywords, and pydantic builds its error without asking the value. So the only place for a
    hint is LoopAgent's constructor. It is wrapped when the first condition is made and ADK is loaded. The wrapper
    changes nothing but calls with that keyword, which fail without it. Before the first condition is made, the error is
    pydantic's.

    ``accept`` receives the agent and its condition; None while no guard is installed.
    """

    def __init__(self) -> None:
        self.accept: Callable[[Any, Any], object] | None = None
        self._kind: Any = None
        self._original: Any = None

    def put_on(self) -> None:
        """Wrap LoopAgent's constructor, if ADK is loaded and does not have this keyword."""
        if self._kind is not None:
            return
        kind = getattr(sys.modules.get(_MODULE), "LoopAgent", None)
        if kind is None or KEYWORD in kind.model_fields:
            return
        original, keyword = getattr(kind, _INIT), self

        @wraps(original)
        def begin(self: Any, *args: Any, **kwargs: Any) -> None:
            if KEYWORD not in kwargs or KEYWORD in type(self).model_fields:  # a subclass may have a field of this name
                original(self, *args, **kwargs)
                return
            condition = kwargs.pop(KEYWORD)
            if condition is not None and keyword.accept is None:
                raise NotInstalledError(
                    f"LoopAgent({KEYWORD}=…): google-adk has no such keyword; call runguard.install() before "
                    "building the agent, "
                    "or leave the keyword out and wrap the agent: runguard.adk.terminate(loop_agent, condition)"
                )
            original(self, *args, **kwargs)
            if condition is not None and keyword.accept is not None:
                keyword.accept(self, condition)

        self._kind, self._original = kind, original
        setattr(kind, _INIT, begin)

    def take_off(self) -> None:
        """Unwrap the constructor, unless other code has wrapped it since.

        The next condition adds the hint again.
        """
        self.accept = None
        if self._kind is not None and getattr(getattr(self._kind, _INIT), "__wrapped__", None) is self._original:
            setattr(self._kind, _INIT, self._original)
            self._kind = self._original = None


LOOP_KEYWORD: Final = LoopKeyword()

# ---- Read events of ADK by their shape: their fields, the model calls that they report, and the lanes that they
#      show.
#
# Conditions, ``replay`` and ``adk`` use this. It imports no framework: an event is any object with the fields of an ADK
# event. One of another version or of a test may lack any of them.

# ---- Fields


def whole(events: Sequence[Any]) -> Iterator[Any]:
    """Yield events that are not chunks of a stream; the closing event repeats the text of the chunks."""
    return (event for event in events if not getattr(event, "partial", None))


def author_of(event: Any) -> str:
    return getattr(event, "author", None) or ""


def branch_of(event: Any) -> str:
    return getattr(event, "branch", None) or ""


def scope_of(event: Any) -> str:
    """Return the id of the call that delegated the task to which the event belongs."""
    return getattr(event, "isolation_scope", None) or ""


def parts_of(event: Any) -> Sequence[Any]:
    return getattr(getattr(event, "content", None), "parts", None) or ()


def visible_text(event: Any) -> str:
    """Return the visible text of an event without thoughts, with its parts joined."""
    texts = (getattr(part, "text", None) for part in parts_of(event) if not getattr(part, "thought", None))
    return "".join(text for text in texts if isinstance(text, str))


def calls_of(event: Any) -> list[Any]:
    return [call for part in parts_of(event) if (call := getattr(part, "function_call", None)) is not None]


def answers_of(event: Any) -> list[Any]:
    """Return the function responses, without requests for a confirmation or a sign-in."""
    actions = getattr(event, "actions", None)
    waiting = {
        *(getattr(actions, "requested_tool_confirmations", None) or ()),
        *(getattr(actions, "requested_auth_configs", None) or ()),
    }
    answers = [answer for part in parts_of(event) if (answer := getattr(part, "function_response", None)) is not None]
    return [answer for answer in answers if getattr(answer, "id", None) not in waiting] if waiting else answers


def transfer_of(event: Any) -> str:
    return getattr(getattr(event, "actions", None), "transfer_to_agent", None) or ""


def state_delta_of(event: Any) -> dict[str, Any]:
    return getattr(getattr(event, "actions", None), "state_delta", None) or {}


# ---- Model calls

_MODELS_KEPT: Final = 1_024


@dataclass(frozen=True, slots=True)
class CallTaken:
    """The usage of one model call. ``before``: the amount already counted for the same call, which this replaces."""

    usage: Usage
    model: str
    at: float | None  # unix seconds
    before: Usage | None = None


class ModelCallReader:
    """Yield usage and model once per model call."""

    __slots__ = ("_models", "_usage")

    def __init__(self) -> None:
        self._usage = EventUsage()
        self._models: dict[tuple[str, str], str] = {}  # by the ids of the chunks of a stream

    def read(self, events: Sequence[Any]) -> list[CallTaken]:
        return [taken for event in events if (taken := self._read(event)) is not None]

    def _read(self, event: Any) -> CallTaken | None:
        key, model = (author_of(event), branch_of(event)), getattr(event, "model_version", None) or ""
        if getattr(event, "partial", None):
            if model and (len(self._models) < _MODELS_KEPT or key in self._models):
                self._models[key] = model
        else:
            model = model or self._models.get(key, "")
        taken = self._usage.read(event)
        if taken is None:
            return None
        return CallTaken(taken.usage, model, getattr(event, "timestamp", None), taken.before)


# ---- Lanes

_KEPT: Final = 4_096  # open calls, branches and tasks of one run


@dataclass(slots=True)
class UnansweredCall:
    """A call that has no answer yet."""

    tool: str
    args: object
    fingerprint: bytes
    lane: str
    batch: str
    agent: str
    once: bytes = b""  # identity of its side effect


class EventLanes:
    """The lanes of one run, as far as events show them: by branch, isolation scope and the calls that are open.

    ``replay`` and ``termination`` read events. ``runguard.adk.runs`` names the same lanes from hooks, which see more.
    """

    def __init__(self, guard: "Guard", run: "Run") -> None:
        self._guard, self._run = guard, run
        self.calls = LruDict[str, UnansweredCall](_KEPT)
        self.delegations: set[str] = set()  # calls by which a task was delegated
        self._known = LruDict[tuple[str, str], str](_KEPT)
        # the id of the delegating call -> its lane, that of the caller, the agent
        self._tasks = LruDict[str, tuple[str, str, str]](_KEPT)

    def close(self, call_id: str) -> UnansweredCall | None:
        """Forget a call that was answered, and close the lane of the agents that worked on it."""
        call = self.calls.pop(call_id, None)
        if call is not None and len(self._run.lanes) > 1:
            self._guard.close_lane(self._run, f"{call.lane}/{call.tool}@{call_id}")
        return call

    def of(self, branch: str, scope: str = "") -> str:
        """Return the lane of an event, and open it where it is new."""
        if not branch and not scope:
            return ROOT_LANE
        key = self._known.get((branch, scope))
        if key is None or key not in self._run.lanes:
            key = self._known[branch, scope] = self._open(branch, scope)
        return key

    def _open(self, branch: str, scope: str) -> str:
        if scope in self.calls:
            self.delegations.add(scope)
        called = self._called_in(branch)
        lane = self._lane_of_call(called) if called else ""
        task = self._task(branch, scope) if scope else None
        if task is not None and (not called or task[0].startswith(f"{lane}/")):
            self._open_lane(*task, concurrent=False)
            parallel = parallel_part(branch)
            return branch_lane(self._guard, self._run, parallel, task[0], self.calls) if parallel else task[0]
        if called:
            call = self.calls[called]
            beside = sum(other.batch == call.batch for other in self.calls.values())
            self._open_lane(lane, call.lane, call.tool, concurrent=beside > 1)
            return lane
        return branch_lane(self._guard, self._run, branch, ROOT_LANE, self.calls) if branch else ROOT_LANE

    def _called_in(self, branch: str) -> str:
        """Return the innermost open call of an agent as a tool that this branch is inside of.

        Older ADK numbers such branches.
        """
        found = lane = ""
        for part in branch.split("."):
            name, _, opened_by = part.partition("@")
            if opened_by.isdigit():
                opened_by = next(
                    (i for i, call in self.calls.items() if call.tool == name and (not found or call.lane == lane)), ""
                )
            if opened_by in self.calls and opened_by not in self.delegations:
                found, lane = opened_by, self._lane_of_call(opened_by)
        return found

    def _lane_of_call(self, call_id: str) -> str:
        call = self.calls[call_id]
        return f"{call.lane}/{call.tool}@{call_id}"

    def _task(self, branch: str, scope: str) -> tuple[str, str, str] | None:
        task = self._tasks.get(scope)
        if task is None:
            call = self.calls.get(scope)
            if call is not None:
                task = (self._lane_of_call(scope), call.lane, call.tool)
            elif f"@{scope}" in branch:  # delegated in an earlier turn
                agent = branch.partition(f"@{scope}")[0].rpartition(".")[2]
                task = (f"/{agent}@{scope}", ROOT_LANE, agent)
            else:
                return None
            self._tasks[scope] = task
        return task

    def _open_lane(self, key: str, parent: str, delegate: str, *, concurrent: bool) -> None:
        if key not in self._run.lanes:
            above = self._run.lanes.get(parent)
            path = above.path if above is not None else ()
            self._guard.open_lane(self._run, key, parent, concurrent=concurrent, path=path, delegate=delegate)


def branch_lane(guard: "Guard", run: "Run", branch: str, base: str, calls: Collection[str]) -> str:
    """Return the lane of a branch below lane ``base``, and open it where it is new.

    ADK joins the names of branches by dots. ``calls``: the ids of open calls; a branch that one of them has opened runs
    beside no other.
    """
    key = f"{base}/{branch}"
    if key in run.lanes:
        return key
    above, parent = branch, base
    while "." in above and parent == base:
        above = above.rpartition(".")[0]
        if f"{base}/{above}" in run.lanes:
            parent = f"{base}/{above}"
    lane = run.lanes.get(parent)
    is_called = "@" in branch and branch.rpartition("@")[2] in calls
    guard.open_lane(run, key, parent, concurrent=not is_called, path=lane.path if lane is not None else ())
    return key


def parallel_part(branch: str) -> str:
    """Return what parallel agents have added at the end of a branch: names without a number or the id of a call."""
    parts = branch.split(".")
    named = len(parts)
    while named and "@" not in parts[named - 1]:
        named -= 1
    return ".".join(parts[named:])
