"""OpenTelemetry on every framework: decisions as counters and span events, how budgets stand, costs of spans."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runguard.core.money import Budget
from runguard.reporting import telemetry
from runguard.reporting import telemetry as span_cost
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply

PRICES: Any = {MODEL: {"input": 1, "output": 2}}
LIMITS: Any = {MODEL: {"max_output_tokens": 1_000}}
READER, SPANS = InMemoryMetricReader(), InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def providers() -> Iterator[None]:
    """A process has one of each. Guards that were made before report to them, too."""
    metrics.set_meter_provider(MeterProvider([READER]))
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(tracers)
    yield
    tracers.shutdown()


def points(name: str) -> list[tuple[dict[str, Any], float]]:
    data = READER.get_metrics_data()
    found = [
        metric
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
    ]
    return [(dict(p.attributes or {}), getattr(p, "value", 0)) for metric in found for p in metric.data.data_points]


async def test_a_stop_is_counted_and_is_an_event_of_the_span_around_it(harness: Harness) -> None:
    SPANS.clear()
    agent = f"worker_{harness.name.split()[0].lower()}"
    whom = {} if harness.name == "Google ADK" else {"app": agent}
    guard = harness.guard(max_model_calls=2, budgets=[Budget(usd=5, per="app")], prices=PRICES, models=LIMITS, **whom)
    spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), agent, {"look": lambda n: f"page {n}"})
    with trace.get_tracer("test").start_as_current_span("request"):
        await harness.session(spec, guard).turn("go")
    assert guard.guard.flush(30)
    counted = [facts for facts, _ in points(telemetry.DECISIONS) if facts.get(telemetry.AGENT) == agent]
    assert [(facts[telemetry.DECISION], facts[telemetry.RULE], facts[telemetry.ENFORCED]) for facts in counted] == [
        ("stop", "model_calls", True)
    ]
    events = [event for span in SPANS.get_finished_spans() for event in span.events if event.name == telemetry.EVENT]
    [event] = [one for one in events if (one.attributes or {}).get(telemetry.AGENT) == agent]
    assert (event.attributes or {})[telemetry.TRIP_ID] == guard.trips[0].id
    scope = whom.get("app", "conformance")
    used = [value for facts, value in points(telemetry.BUDGET_USED) if facts.get(telemetry.SCOPE_ID) == f"app:{scope}"]
    assert used == [pytest.approx(float(guard.spend()["usd"]))]
    assert used[0] > 0


async def test_costs_are_on_the_span_of_the_model_call(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the opt-in, if the framework or an instrumentation has made a span of the call the current one."""
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "gen_ai_latest_experimental")
    SPANS.clear()
    guard = harness.guard(max_usd=5, prices=PRICES, models=LIMITS)
    session = harness.session(AgentSpec(lambda n, _: Reply("done", input_tokens=1_000, output_tokens=100)), guard)
    with trace.get_tracer("test").start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}):
        await session.turn("go")
    costs = [
        (span.attributes or {})[span_cost.AMOUNT]
        for span in SPANS.get_finished_spans()
        if span_cost.AMOUNT in (span.attributes or {})
    ]
    assert costs == [0.0012]
