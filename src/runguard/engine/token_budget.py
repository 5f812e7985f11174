"""A cumulative token budget: how much a conversation has used over all its turns, and what happens at which share.

``BudgetPolicy`` is the frozen description, ``BudgetMonitor`` the live count: applications and ``adk/budget_plugin`` use
them. Neither knows a framework: a response is anything with ``usage_metadata``, ``content`` and, when streamed,
``partial``.
"""

import inspect
import logging
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from runguard import background  # noqa: F401 - its filter keeps every log line on one line
from runguard.core.errors import Checked, InvalidValueError
from runguard.core.identity import LruDict
from runguard.core.money import Threshold, ThresholdAction
from runguard.providers.usage import CallUsage

# ---- What a monitor remembers: thresholds that have fired, and model calls that report their usage in chunks

_STREAMS_KEPT: Final = 10_000  # calls that are being streamed
_ENDED_KEPT: Final = 64  # calls that have ended: a second whole response may follow at once


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A threshold in one monitor.

    What has fired is kept here, so neither order nor sharing of thresholds can mix it up.
    """

    threshold: Threshold
    fired: bool = False
    stopping: bool = False
    nudging: bool = False

    def rearm(self) -> None:
        self.fired = self.stopping = self.nudging = False


@dataclass(slots=True, eq=False)
class CountedCall:
    """One model call. Its chunks report usage again and again: figures only grow, and they are not added up."""

    key: Callable[[], object | None] = lambda: None
    tokens: int | None = None
    usage: CallUsage = field(default_factory=CallUsage)
    estimated: bool = False
    fired: set[Checkpoint] = field(default_factory=set)  # recurring thresholds that have fired for it


class CountedCalls:
    """The calls under way, and those that ended lately. Not safe for threads: the monitor has a lock."""

    def __init__(self) -> None:
        self._streams = LruDict[int, CountedCall](_STREAMS_KEPT)
        self._ended = LruDict[int, CountedCall](_ENDED_KEPT)
        self._nameless: CountedCall | None = None

    def of(self, key: object | None, whole: bool) -> CountedCall:
        if key is None:
            call = self._nameless or CountedCall()
            self._nameless = None if whole else call
            return call
        number = id(key)
        found = self._ended.get(number) or self._streams.get(number)
        if found is None or found.key() is not key:  # the number of an object that is gone may be given again
            found = CountedCall(_weak(key))
            self._ended.pop(number, None)
            self._streams[number] = found
        if whole and number not in self._ended:
            self._streams.pop(number, None)
            self._ended[number] = found
        return found


def _weak(key: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(key)
    except TypeError:  # some objects cannot be referred to weakly; a few are held
        return lambda: key


# ---- The live count

_log: Final = logging.getLogger("runguard")
_NUDGE: Final = (
    "{share} of the token budget for this conversation is used. Start nothing new and call no further tools unless it "
    "is needed to finish: answer now with what you have, and say what is missing."
)


@dataclass(frozen=True, slots=True)
class CompressionTriggered:
    """Sent to a bus when a threshold fires: the tokens used, and the number of tokens at which it fires.

    ``kind`` is what the bus of adk-fluent knows its subscribers by.
    """

    token_count: int
    threshold: int
    kind: str = "compression_triggered"


class BudgetMonitor(metaclass=Checked):
    """Counts tokens over all turns and fires thresholds. Safe to use from many threads; callbacks run outside of
    its lock.

    A callback, or a bus, that fails is logged and counted in ``callback_errors``; it never breaks the run. A stop
    (``stop()``, or a threshold with ``action="stop"``) holds until ``resume()`` or ``reset()``; one that came from a
    threshold also ends when ``adjust()`` sets the count below that threshold. ``BudgetPlugin`` carries it out; the
    monitor alone only reports it.

    Use it to count what is already spent. To refuse calls before they are made, use ``Budget`` in ``budgets=``.
    """

    def __init__(self, max_tokens: int = 200_000) -> None:
        self._max = whole_number(max_tokens, "max_tokens", least=1)
        self._lock = threading.Lock()
        self._checkpoints: list[Checkpoint] = []
        self._emit: Callable[[Any], Any] | None = None
        self._tokens = 0
        self._recorded = 0  # what was ever recorded in this cycle: adjust() leaves it alone
        self._turns = 0
        self._stop_asked: str | None = None
        self._calls = CountedCalls()
        self._missed_usage = False
        self._last_prompt = 0  # tokens
        self._estimated = 0
        self.callback_errors = 0

    def __repr__(self) -> str:
        return f"BudgetMonitor({self._tokens} of {self._max} tokens, {self.utilization:.0%})"

    # ---- setting up -------------------------------------------------------------------------------------------------

    def on_threshold(
        self,
        percent: float,
        callback: Callable[[Any], Any] | None = None,
        *,
        recurring: bool = False,
        action: ThresholdAction = "warn",
    ) -> Self:
        return self.add_threshold(Threshold(percent, callback, recurring, action))

    def add_threshold(self, threshold: Threshold) -> Self:
        """Add a threshold. It counts from the next record on; thresholds are kept in ascending order."""
        if not isinstance(threshold, Threshold):
            raise TypeError(f"a Threshold is needed, not {threshold!r}")
        if threshold.model is not None:
            raise InvalidValueError("Threshold(model=…) belongs to a Budget: a BudgetMonitor only counts tokens")
        with self._lock:
            insort(self._checkpoints, Checkpoint(threshold), key=lambda checkpoint: checkpoint.threshold.percent)
        return self

    def with_bus(self, bus: Any) -> Self:
        """Send every threshold that fires to ``bus``: an object with ``emit(event)``, or a callable."""
        emit = getattr(bus, "emit", None)
        if not callable(emit):
            emit = bus
        if not callable(emit):
            raise TypeError(f"a bus has emit(event) or is callable; {bus!r} is neither")
        self._emit = emit
        return self

    # ---- counting ---------------------------------------------------------------------------------------------------

    def record_usage(self, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Add one call's usage and fire what it reaches."""
        tokens = whole_number(input_tokens, "input_tokens") + whole_number(output_tokens, "output_tokens")
        call = CountedCall()
        with self._lock:
            self._count_locked(call, tokens)
        self._fire(call, whole=True)

    def record_response(
        self, response: Any, call: object | None = None, *, prompt_tokens: Callable[[], int] | None = None
    ) -> None:
        """Count a model's response, whole or a chunk. ``call`` is any object that all responses of one model
        call share.

        Without it, chunks belong to the next whole response. A response that reports no usage is estimated from its
        text and its prompt: ``prompt_tokens`` is asked for the latter, and else the last prompt that was reported
        counts. Never raises: figures that are not counts of tokens are ignored and logged.
        """
        try:
            whole = getattr(response, "partial", None) is not True
            with self._lock:
                seen = self._calls.of(call, whole)
                known = len(seen.usage.problems)
                seen.usage.add(response)
                problems = seen.usage.problems[known:]
                is_reported = seen.usage.reported is not None
            for problem in problems:
                _log.warning("runguard.usage_ignored: %s", problem)
            silent = whole and not is_reported and getattr(response, "content", None) is not None
            if is_reported or silent:
                self._bill(seen, prompt_tokens, whole=whole)
            if seen.tokens is not None:
                self._fire(seen, whole=whole)
            if silent and not self._missed_usage:
                self._missed_usage = True
                _log.warning(
                    "runguard.no_usage: a model's response came without token usage; it is estimated from its text"
                )
        except Exception:
            _log.exception("runguard.budget_error: a response could not be counted")

    def _bill(self, call: CountedCall, prompt_tokens: Callable[[], int] | None, *, whole: bool) -> None:
        bill = call.usage.bill if whole else call.usage.bill_so_far
        usage, estimated = bill(self._last_prompt)
        if estimated and prompt_tokens is not None:
            usage, estimated = bill(prompt_tokens())
        with self._lock:
            self._last_prompt = call.usage.prompt or self._last_prompt
            self._estimated += estimated - call.estimated
            call.estimated = estimated
            self._count_locked(call, usage.input + usage.output)

    def after_model_hook(self) -> Callable[..., None]:
        """Return an after-model callback for one agent. It returns None, so that callbacks behind it run too."""

        def after_model(callback_context: Any = None, llm_response: Any = None) -> None:
            # ADK makes one actions object for each model call and hands it out with every chunk.
            self.record_response(llm_response, getattr(callback_context, "actions", None))

        return after_model

    def _count_locked(self, call: CountedCall, tokens: int) -> None:
        more = tokens - (call.tokens or 0)
        if call.tokens is None:
            self._turns += 1
        call.tokens = tokens
        self._tokens = max(self._tokens + more, 0)
        self._recorded = max(self._recorded + more, 0)

    def _fire(self, call: CountedCall, *, whole: bool) -> None:
        """Fire what is due, lowest first.

        Each is judged when its turn comes: a callback before it may have made room.
        """
        with self._lock:
            checkpoints = tuple(self._checkpoints)
        for checkpoint in checkpoints:
            threshold = checkpoint.threshold
            with self._lock:
                if self._utilization_locked() < threshold.percent:
                    continue
                if threshold.recurring:  # once for each call, at its end
                    if not whole or checkpoint in call.fired:
                        continue
                    call.fired.add(checkpoint)
                elif checkpoint.fired:
                    continue
                checkpoint.fired = True
                checkpoint.stopping |= threshold.action == "stop"
                checkpoint.nudging |= threshold.action == "nudge"
                event = CompressionTriggered(self._tokens, int(threshold.percent * self._max))
            if self._emit is not None:
                self._call_out("the bus", self._emit, event)
            if threshold.callback is not None:
                self._call_out(f"the callback at {threshold.percent:.0%}", threshold.callback, self)

    def _call_out(self, what: str, function: Callable[[Any], Any], argument: object) -> None:
        """Call the user's code. Whatever it raises, the run goes on."""
        try:
            result = function(argument)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError("it is async; give a plain function")
        except Exception as error:
            with self._lock:
                self.callback_errors += 1
            _log.error(
                "runguard.callback_error: %s of a token budget failed with %s",
                what,
                type(error).__name__,
                exc_info=error,
            )

    # ---- changing the count -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start a new cycle: nothing used, every threshold armed, no stop."""
        with self._lock:
            self._tokens = self._recorded = self._turns = self._estimated = 0
            self._stop_asked = None
            for checkpoint in self._checkpoints:
                checkpoint.rearm()

    def adjust(self, new_count: int) -> None:
        """Set the count, for example after compressing.

        Thresholds above it are re-armed; turns and their average stay.
        """
        whole_number(new_count, "new_count")
        with self._lock:
            self._tokens = new_count
            for checkpoint in self._checkpoints:
                if checkpoint.threshold.percent > self._utilization_locked():
                    checkpoint.rearm()

    # ---- stop and nudge ---------------------------------------------------------------------------------------------

    def stop(self, reason: str = "") -> None:
        """Ask for a stop before the next model call."""
        with self._lock:
            self._stop_asked = reason or "stopped by the application"

    def resume(self) -> None:
        """Lift a stop, also one that came from a threshold.

        Thresholds that have fired stay so: they do not stop again in this cycle unless recurring.
        """
        with self._lock:
            self._stop_asked = None
            for checkpoint in self._checkpoints:
                checkpoint.stopping = False

    @property
    def stopped(self) -> bool:
        with self._lock:
            return self._stop_locked() is not None

    @property
    def stop_reason(self) -> str:
        """Why it is stopped; empty when it is not."""
        with self._lock:
            return (self._stop_locked() or ("", 0))[0]

    @property
    def stop_limit(self) -> int:
        """The number of tokens at which it was stopped: the threshold's, or the whole budget."""
        with self._lock:
            return (self._stop_locked() or ("", self._max))[1]

    def _stop_locked(self) -> tuple[str, int] | None:
        if self._stop_asked is not None:
            return self._stop_asked, self._max
        percent = next((checkpoint.threshold.percent for checkpoint in self._checkpoints if checkpoint.stopping), None)
        return None if percent is None else (f"{percent:.0%} of {self._max} tokens reached", int(percent * self._max))

    def take_nudge(self) -> str:
        """Return the notice for the model once for each time a nudging threshold fires, else an empty text."""
        with self._lock:
            due = [checkpoint for checkpoint in self._checkpoints if checkpoint.nudging]
            for checkpoint in due:
                checkpoint.nudging = False
            return _NUDGE.format(share=f"{self._utilization_locked():.0%}") if due else ""

    # ---- looking in -------------------------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int:
        return self._max

    @property
    def current_tokens(self) -> int:
        return self._tokens

    @property
    def remaining(self) -> int:
        return max(self._max - self._tokens, 0)

    @property
    def utilization(self) -> float:
        """The share that is used, from 0 to 1; what was used beyond the budget shows in ``current_tokens``."""
        return self._utilization_locked()

    @property
    def turn_count(self) -> int:
        """Model calls recorded in this cycle."""
        return self._turns

    @property
    def estimated_turns(self) -> int:
        """Model calls in this cycle whose usage was not reported, or not all of it."""
        return max(self._estimated, 0)

    @property
    def avg_tokens_per_turn(self) -> float:
        with self._lock:
            return self._recorded / self._turns if self._turns else 0.0

    @property
    def estimated_turns_remaining(self) -> int:
        """How many average turns still fit; 0 before the first turn, whose size is not known."""
        average = self.avg_tokens_per_turn
        return int(self.remaining / average) if average else 0

    @property
    def thresholds(self) -> tuple[Threshold, ...]:
        with self._lock:
            return tuple(checkpoint.threshold for checkpoint in self._checkpoints)

    def thresholds_fired(self) -> int:
        """Return how many thresholds have fired in this cycle."""
        with self._lock:
            return sum(checkpoint.fired for checkpoint in self._checkpoints)

    def summary(self) -> dict[str, Any]:
        """Return a snapshot as plain data."""
        return {
            "max_tokens": self._max,
            "current_tokens": self._tokens,
            "utilization": round(self.utilization, 3),
            "turns": self._turns,
            "avg_per_turn": round(self.avg_tokens_per_turn, 1),
            "remaining": self.remaining,
            "est_turns_remaining": self.estimated_turns_remaining,
            "thresholds_fired": self.thresholds_fired(),
        }

    def _utilization_locked(self) -> float:
        return min(self._tokens / self._max, 1.0)


def whole_number(value: object, name: str, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValueError(f"{name} must be a whole number from {least} on, not {value!r}")
    return value


# ---- The description


@dataclass(frozen=True, slots=True)
class BudgetPolicy(metaclass=Checked):
    """A token budget as a value: hashable, comparable, safe to share. Each ``build_monitor()`` counts for itself.

    It describes a ``BudgetMonitor``. To refuse calls before they are made, in dollars, tokens or calls per user and
    window, use ``Budget``.
    """

    max_tokens: int = 200_000
    thresholds: tuple[Threshold, ...] = ()

    def __post_init__(self) -> None:
        whole_number(self.max_tokens, "max_tokens", least=1)
        object.__setattr__(self, "thresholds", tuple(self.thresholds))  # a list would make it unhashable
        for threshold in self.thresholds:
            if not isinstance(threshold, Threshold):
                raise InvalidValueError(f"thresholds must be Threshold objects, not {threshold!r}")
            if threshold.model is not None:
                raise InvalidValueError("Threshold(model=…) belongs to a Budget: a BudgetPolicy only counts tokens")

    def build_monitor(self) -> BudgetMonitor:
        """Return a fresh count under this policy."""
        monitor = BudgetMonitor(self.max_tokens)
        for threshold in self.thresholds:
            monitor.add_threshold(threshold)
        return monitor

    def with_threshold(
        self,
        percent: float,
        callback: Callable[[Any], Any] | None = None,
        *,
        recurring: bool = False,
        action: ThresholdAction = "warn",
    ) -> "BudgetPolicy":
        """Return a copy with one threshold more."""
        return replace(self, thresholds=(*self.thresholds, Threshold(percent, callback, recurring, action)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Callbacks become import paths; a lambda or closure has none and is a ValueError."""
        return {"max_tokens": self.max_tokens, "thresholds": [threshold.to_dict() for threshold in self.thresholds]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the policy of ``to_dict``. This imports modules that callbacks name: read only data that you trust."""
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"a budget policy must be a mapping, not {data!r}")
        if unknown := sorted(str(key) for key in data if key not in ("max_tokens", "thresholds")):
            raise InvalidValueError(f"unknown in a budget policy: {', '.join(unknown)}")
        listed = data.get("thresholds") or ()
        if not isinstance(listed, list | tuple):
            raise InvalidValueError(f"thresholds must be a list, not {listed!r}")
        thresholds = []
        for number, entry in enumerate(listed):
            try:
                thresholds.append(Threshold.from_dict(entry))
            except ValueError as error:
                raise InvalidValueError(f"thresholds[{number}]: {error}") from error
        return cls(data.get("max_tokens", 200_000), tuple(thresholds))
