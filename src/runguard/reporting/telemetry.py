"""OpenTelemetry: every decision that is not "allow" as a counter, a log event and a span event; how budgets stand; what
the guard and each model call cost. Also the thread on which callbacks of the user run.

``engine/guard`` makes ``Telemetry``, ``SpanCosts`` and ``Outbox``; ``engine/decide`` and ``engine/calls`` report to
them.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from runguard._version import __version__
from runguard.background import BackgroundQueue, finish
from runguard.core.decision import Action, Decision
from runguard.core.events import RunInfo
from runguard.core.money import BudgetStatus, to_usd

if TYPE_CHECKING:
    from opentelemetry._logs import Logger
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

_log: Final = logging.getLogger("runguard")

# ---- Names of metrics, events and attributes.
# Those of OpenTelemetry are written out: they are still in development there, and the package that lists them lags.

SCOPE_NAME: Final = "runguard"

DECISIONS: Final = "runguard.decisions"
BUDGET_LIMIT: Final = "runguard.budget.limit"
BUDGET_USED: Final = "runguard.budget.used"
BUDGET_RESERVED: Final = "runguard.budget.reserved"
GUARD_DURATION: Final = "runguard.guard.duration"

EVENT: Final = "runguard.decision"

DECISION: Final = "runguard.decision"
RULE: Final = "runguard.rule"
ENFORCED: Final = "runguard.enforced"
OBSERVED: Final = "runguard.observed"
LIMIT: Final = "runguard.limit"
UNIT: Final = "runguard.unit"
SCOPE_KIND: Final = "runguard.scope.kind"
SCOPE_ID: Final = "runguard.scope.id"  # on gauges, of kinds that are few
WINDOW: Final = "runguard.window"
TRIP_ID: Final = "runguard.trip.id"
RUN_ID: Final = "runguard.run.id"  # events only
AGENT: Final = "gen_ai.agent.name"
TOOL: Final = "gen_ai.tool.name"
MODEL: Final = "gen_ai.request.model"
CONVERSATION: Final = "gen_ai.conversation.id"  # events only

NO_WINDOW: Final = "none"
OTHERS: Final = "(others)"


# ---- Decisions, budgets and the guard's own time.

_BUCKETS: Final = (1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)  # seconds
_DURATIONS_KEPT: Final = 1_024  # between two collections: recording one costs an SDK as much as the guard's own work
SAMPLE: Final = 256  # calls that a guard times after each collection; without collections it costs nothing
_NAMES_KEPT: Final = 200  # a model can make up names of tools, and programs can make up agents
_NAME_LENGTH: Final = 128
_FLUSH_S: Final = 2.0
# written in a program; users, sessions, runs and labels come with its users
_FEW: Final = frozenset({"app", "agent", "model", "tool"})
_GAUGES: Final = (
    (BUDGET_LIMIT, "What budgets allow."),
    (BUDGET_USED, "What was spent of budgets."),
    (BUDGET_RESERVED, "What is held on budgets for calls in flight."),
)

Facts = dict[str, str | bool | float]
Level = tuple[float, float, float]  # of a budget, in the order of _GAUGES


class ReportingGuard(Protocol):
    """What telemetry uses of a guard."""

    accounts: Any

    def time_next(self, calls: int) -> None: ...


class Telemetry:
    """What all guards of a process report: one set of instruments.

    Only the API package is used, and only if it is installed. The program chooses the SDK and the exporters; without
    them nothing is reported. Tokens are not reported, because the framework does that. No argument, result, prompt or
    user id is reported. Metrics have only attributes with a bounded number of values: no session, run or label.

    Methods may be called from any thread. None that a guard calls raises. ``took(seconds)`` is the append of a bounded
    buffer and nothing else; a metric reader that collects takes out what is in it.
    """

    @classmethod
    def of(cls, guard: ReportingGuard) -> "Telemetry | None":
        """Return the guard's telemetry, or None where the OpenTelemetry API is not installed.

        It does not keep the guard alive.
        """
        try:
            found = _connected()
            if found is not None:
                with found._lock:
                    found._guards.add(guard)
            return found
        except Exception:  # an installation in pieces: no telemetry, and no harm
            _complain("OpenTelemetry cannot be used")
            return None

    def __init__(self, meter: "Meter", logger: "Logger | None") -> None:
        from opentelemetry import context, trace
        from opentelemetry.metrics import Observation

        self.durations: deque[float] = deque(maxlen=_DURATIONS_KEPT)
        self.took: Callable[[float], None] = self.durations.append
        # Not a guard's: a callback of the user that hangs must not keep decisions from being seen.
        self.outbox = Outbox()
        self.failures = 0
        self._guards: weakref.WeakSet[ReportingGuard] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._agents, self._tools, self._scopes = _Names(), _Names(), _Names()
        self._levels: dict[int, list[tuple[Facts, Level]]] = {}
        self._context, self._span, self._observation = context.get_current, trace.get_current_span, Observation
        self._emit, self._severities = _emitter(logger)
        self._counter = meter.create_counter(DECISIONS, "{decision}", "Decisions of the guard other than to allow.")
        self._histogram = meter.create_histogram(
            GUARD_DURATION,
            "s",
            f"The guard's own time per question it was asked; the latest {_DURATIONS_KEPT:,} between two collections.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        for position, (name, description) in enumerate(_GAUGES):
            meter.create_observable_gauge(name, [self._observer(position)], "", description)

    def drop(self, guard: ReportingGuard) -> None:
        """Forget a guard: another one reports its budgets from now on."""
        with self._lock:
            self._guards.discard(guard)

    def flush(self, seconds: float = _FLUSH_S) -> bool:
        """Hand over everything reported so far, within the time. Flushing exporters is left to the SDK."""
        try:
            self.record_durations()
            return self.outbox.flush(seconds)
        except Exception:
            self.fail()
            return False

    def fail(self) -> None:
        """Count a failure of OpenTelemetry. Only the first is logged, because it will go on raising."""
        self.failures += 1
        if self.failures == 1:
            _complain("reporting raised")

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decided(self, decision: Decision, info: RunInfo, agent: str, model: str | None) -> None:
        """Report a decision in the context of the caller: the current span gets the event. "allow" is not reported."""
        if decision.action is Action.ALLOW:
            return
        try:
            facts = _facts(decision, info, agent, model)
            try:
                span = self._span()
                if span.is_recording():
                    span.add_event(EVENT, facts)
            finally:
                # An exporter may export at once and take its time: not on the path of the call.
                self.outbox.send(self._report, (decision.action, facts, self._context(), time.time_ns()))
        except Exception:
            self.fail()

    def _report(self, report: tuple[Action, Facts, Any, int]) -> None:
        action, facts, context, at = report
        try:
            counted: Facts = {key: facts[key] for key in facts if key in (DECISION, RULE, ENFORCED)}
            for key, names in ((AGENT, self._agents), (TOOL, self._tools)):
                if key in facts:
                    counted[key] = names.bounded(str(facts[key]))
            self._counter.add(1, counted, context)
        except Exception:
            self.fail()
        try:
            if self._emit is not None:
                # Loud where the log is: a stop, or that money or context runs out.
                loud = action is Action.STOP or (action is Action.WARN and facts.get(RULE) in ("budget", "context"))
                text, number = self._severities[loud]
                self._emit(
                    timestamp=at,
                    observed_timestamp=at,
                    context=context,
                    severity_text=text,
                    severity_number=number,
                    attributes=facts,
                    event_name=EVENT,
                )
        except Exception:
            self.fail()

    # ---- the guard's own time ---------------------------------------------------------------------------------------

    def record_durations(self) -> None:
        """Record everything in the buffer now. What comes meanwhile is for the next time."""
        for _ in range(len(self.durations)):
            try:
                seconds = self.durations.popleft()
            except IndexError:  # another thread records too
                return
            self._histogram.record(seconds)
        with self._lock:
            guards = list(self._guards)
        for guard in guards:
            guard.time_next(SAMPLE)

    # ---- budgets ----------------------------------------------------------------------------------------------------

    def _observer(self, position: int) -> "Callable[[CallbackOptions], Sequence[Observation]]":
        def observe(_options: "CallbackOptions") -> "Sequence[Observation]":
            try:
                if position == 0:
                    # a reader collects: into the same collection, for it reads the histogram afterwards
                    self.record_durations()
                levels = self._levels.pop(position, None)
                if position == 0 or levels is None:
                    levels = self._read()
                    # one look serves all three
                    self._levels = {other: levels for other in range(len(_GAUGES)) if other > position}
                return [self._observation(level[position], facts) for facts, level in levels]
            except Exception:
                self.fail()
                return []

        return observe

    def _read(self) -> list[tuple[Facts, Level]]:
        """Return how all budgets stand, as known here; those of users, sessions, runs and labels summed per kind."""
        with self._lock:
            guards = list(self._guards)
        known: dict[tuple[int, str, str, str | None], BudgetStatus] = {}
        for guard in guards:
            try:
                ledger = id(guard.accounts.ledger)  # guards with the same store share one, and with it their accounts
                statuses = guard.accounts.budgets(as_known_here=True)
            except Exception:  # the others can still be read
                self.fail()
                continue
            for status in statuses:
                key = (ledger, status.scope, status.unit, status.window)
                other = known.get(key)
                # of two budgets on the same thing, the one that ends first
                if other is None or status.remaining < other.remaining:
                    known[key] = status
        sums: dict[tuple[str, str, str, str], Level] = {}
        for status in known.values():
            kind = status.scope.partition(":")[0]
            scope = self._scopes.bounded(status.scope) if _FEW.issuperset(kind.split("+")) else ""
            group = (kind, scope, status.unit, status.window or NO_WINDOW)
            limit, used, reserved = sums.get(group, (0.0, 0.0, 0.0))
            sums[group] = (limit + float(status.limit), used + float(status.spent), reserved + float(status.reserved))
        names = (SCOPE_KIND, SCOPE_ID, UNIT, WINDOW)
        return [
            ({name: given for name, given in zip(names, group, strict=True) if given}, level)
            for group, level in sums.items()
        ]


class _Names:
    """The first names that come; all others share one, so that a metric has a bounded number of series."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def bounded(self, name: str) -> str:
        name = name[:_NAME_LENGTH]
        if name in self._known:
            return name
        if len(self._known) >= _NAMES_KEPT:
            return OTHERS
        self._known.add(name)
        return name


_telemetry: Telemetry | None = None
_connecting: Final = threading.Lock()


def _connected() -> Telemetry | None:
    """Return the process's instruments, made when the first guard asks, or None without the API.

    A provider may be set before or after.
    """
    global _telemetry
    with _connecting:
        if _telemetry is None:
            try:
                from opentelemetry import metrics
            except ImportError:
                return None
            logger = None
            with contextlib.suppress(ImportError):  # logs are not declared stable: the package's name may yet change
                from opentelemetry._logs import get_logger

                logger = get_logger(SCOPE_NAME, __version__)
            _telemetry = Telemetry(metrics.get_meter(SCOPE_NAME, __version__), logger)
        return _telemetry


def _emitter(logger: "Logger | None") -> tuple[Callable[..., None] | None, tuple[tuple[str, Any], tuple[str, Any]]]:
    """Return how to emit an event, or None, and the severities of a quiet and of a loud one.

    Before 1.38 ``emit`` took a record that only an SDK could make. One made from the API broke the export of all
    records.
    """
    nothing = (("INFO", None), ("WARN", None))
    if logger is None or "event_name" not in inspect.signature(logger.emit).parameters:
        return None, nothing
    from opentelemetry._logs import SeverityNumber

    return logger.emit, (("INFO", SeverityNumber.INFO), ("WARN", SeverityNumber.WARN))


def _facts(decision: Decision, info: RunInfo, agent: str, model: str | None) -> Facts:
    """Return what an event says: names, numbers and ids; neither the user's id nor texts."""
    finding, trip = decision.finding, decision.trip
    facts: Facts = {DECISION: decision.action.word, ENFORCED: decision.enforced}
    found = finding or trip
    if found is not None:
        facts |= {RULE: found.rule, OBSERVED: float(found.observed), LIMIT: float(found.limit), UNIT: found.unit}
        money = finding.money if finding is not None else None
        facts[SCOPE_KIND] = trip.scope if trip is not None else money.kind if money is not None else found.scope
        facts[TOOL] = (found.tool or "")[:_NAME_LENGTH]
    if trip is not None:
        facts[TRIP_ID] = trip.id
        model = model or trip.model
    facts |= {AGENT: agent[:_NAME_LENGTH], MODEL: model or "", CONVERSATION: info.session, RUN_ID: info.run}
    return {key: value for key, value in facts.items() if value != ""}


def _complain(what: str) -> None:
    with contextlib.suppress(Exception):  # a log handler that raises
        _log.warning(
            "runguard.telemetry_failed: %s; runs are not affected, telemetry may be incomplete", what, exc_info=True
        )


# ---- Callbacks, on one thread of their own, never on the path of a call.


class Outbox(BackgroundQueue[tuple[Callable[..., Any], Any]]):
    """Callbacks with the value that each is called with.

    A callback that raises, hangs or takes a minute does not affect the run. What does not fit into the queue is dropped
    and counted.
    """

    capacity: ClassVar[int] = 1_000

    def __init__(self) -> None:
        super().__init__("runguard-outbox")
        self.dropped = 0
        self.failed = 0

    def send(self, callback: Callable[..., Any], value: Any) -> None:
        self.dropped += not self.put((callback, value))

    def handle(self, item: tuple[Callable[..., Any], Any]) -> None:
        callback, value = item
        try:
            result = callback(value)
            if inspect.isawaitable(result):
                asyncio.run(finish(result))
        except BaseException:  # logged for its owner; the run and the other callbacks are not affected
            self.failed += 1
            _log.exception(
                "runguard.callback_failed: %s raised; the run is not affected",
                getattr(callback, "__name__", "callback"),
            )


# ---- What a model call cost, as attributes of its span.

AMOUNT: Final = "gen_ai.usage.cost.amount"
CURRENCY: Final = "gen_ai.usage.cost.currency"
SOURCE: Final = "gen_ai.usage.cost.source"
ESTIMATED: Final = "runguard.cost.estimated"
_OPT_IN: Final = "OTEL_SEMCONV_STABILITY_OPT_IN"
_OPT_IN_VALUE: Final = "gen_ai_latest_experimental"
_OPERATION: Final = "gen_ai.operation.name"
_INFERENCE: Final = frozenset({"chat", "generate_content", "text_completion"})


class SpanCosts:
    """Puts settled costs on the current span, if that is the span of a model call.

    The attributes are a proposal for OpenTelemetry's conventions, so they need its opt-in:
    ``OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental``. Without it nothing is loaded and nothing is reported.
    """

    def __init__(self) -> None:
        from opentelemetry import trace

        self._span = trace.get_current_span

    @classmethod
    def opted_in(cls) -> "SpanCosts | None":
        """Return what puts costs on spans, or None without the opt-in or the OpenTelemetry API."""
        if _OPT_IN_VALUE not in {word.strip() for word in os.environ.get(_OPT_IN, "").split(",")}:
            return None
        try:
            return cls()
        except ImportError:
            return None

    def settled(self, nano: int, *, is_stated: bool, is_estimated: bool) -> None:
        """Report a cost. ``is_stated``: the provider stated it; otherwise it comes from tokens and a price list."""
        span = self._span()
        if not span.is_recording() or not _is_inference(span):
            return
        facts: dict[str, Any] = {
            AMOUNT: float(to_usd(nano)),
            CURRENCY: "USD",
            SOURCE: "provider" if is_stated else "local",
        }
        if is_estimated or ESTIMATED in _attributes(span):  # a later figure replaces an estimate
            facts[ESTIMATED] = is_estimated
        span.set_attributes(facts)


def _is_inference(span: Any) -> bool:
    """Return whether a span is of one model call. The sum of an agent's calls must not look like the cost of one."""
    return _attributes(span).get(_OPERATION) in _INFERENCE


def _attributes(span: Any) -> Any:
    """Return what a span has so far. The API does not promise that it can be read: empty then."""
    return getattr(span, "attributes", None) or {}
