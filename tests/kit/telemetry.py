"""A meter and a tracer that keep what they receive."""

from typing import Any

from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runguard.core.decision import Action, Decision, Finding
from runguard.core.events import RunInfo
from runguard.reporting.telemetry import Telemetry

INFO = RunInfo("run-canary", app="shop", user="user-canary", session="session-canary", labels={"team": "label-canary"})


class Sdk:
    """A whole SDK in memory. Its providers are not the global ones, which a process can set only once."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.records = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
        self.loggers = LoggerProvider()
        self.loggers.add_log_record_processor(SimpleLogRecordProcessor(self.records))
        self.tracer = self.tracers.get_tracer("test")
        self.wires = Telemetry(self.meters.get_meter("runguard"), self.loggers.get_logger("runguard"))

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Attributes and data points of one metric, as a reader collects them now."""
        self.wires.outbox.flush()
        data = self.reader.get_metrics_data()
        metrics = (
            [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data is not None else []
        )
        return [
            (dict(point.attributes or {}), point)
            for metric in metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def gauges(self, kind: str, unit: str = "usd") -> dict[str, dict[str, float]]:
        """Per gauge the values of one kind of scope, by the scope's id."""
        found: dict[str, dict[str, float]] = {}
        for name in ("limit", "used", "reserved"):
            for facts, point in self.points(f"runguard.budget.{name}"):
                if facts["runguard.scope.kind"] == kind and facts["runguard.unit"] == unit:
                    found.setdefault(name, {})[facts.get("runguard.scope.id", "")] = point.value
        return found

    def events(self) -> list[dict[str, Any]]:
        self.wires.outbox.flush()
        return [dict(record.log_record.attributes or {}) for record in self.records.get_finished_logs()]


def report(told: Telemetry | None, *decisions: Decision, agent: str = "writer", model: str | None = None) -> None:
    """As the conductor does: each decision once, where it was made."""
    assert told is not None
    for decision in decisions:
        told.decided(decision, INFO, agent, model)


def loop(d: Any, told: Telemetry | None, tool: str = "parse", times: int = 10) -> list[Decision]:
    """A run that goes in circles until it is stopped, every decision reported."""
    d.start(INFO.run, app=INFO.app, user=INFO.user, session=INFO.session, labels=INFO.labels)
    made = []
    for _ in range(times):
        step = d.tool(tool, {"fragment": "argument-canary"}, "result-canary", run=INFO.run, agent="writer")
        for decision in (*step.before, step.after):
            if decision.finding is not None:  # the first time; later ones repeat a stop in force
                made.append(decision)
                if getattr(d.guard, "telemetry", None) is None:  # else it has reported by itself
                    report(told, decision)
    return made


def stop_of(rule: str = "stall", tool: str = "parse") -> Decision:
    return Decision(Action.STOP, Finding(rule, Action.STOP, 6, 6, "equal failures", tool=tool))
