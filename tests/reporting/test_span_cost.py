"""The settled cost of a model call on its span, with the opt-in only."""

from typing import Any

import pytest

from runguard.adk import RunGuardPlugin
from runguard.reporting.telemetry import SpanCosts
from tests.kit.telemetry import Sdk

VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"


@pytest.fixture
def opted_in(monkeypatch: pytest.MonkeyPatch) -> SpanCosts:
    monkeypatch.setenv(VARIABLE, "http, gen_ai_latest_experimental")
    costs = SpanCosts.opted_in()
    assert costs is not None
    return costs


def facts_of(sdk: Sdk) -> dict[str, Any]:
    (span,) = sdk.spans.get_finished_spans()
    return {name: value for name, value in (span.attributes or {}).items() if "cost" in name}


@pytest.mark.parametrize("value", [None, "", "http", "gen_ai_latest"])
def test_without_the_opt_in_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert SpanCosts.opted_in() is None


def test_a_policy_without_telemetry_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "gen_ai_latest_experimental")
    assert RunGuardPlugin(telemetry=False).guard._spans is None
    assert RunGuardPlugin().guard._spans is not None


@pytest.mark.parametrize(("is_stated", "source"), [(True, "provider"), (False, "local")])
def test_the_span_of_a_model_call_gets_the_cost(opted_in: SpanCosts, is_stated: bool, source: str) -> None:
    sdk = Sdk()
    with sdk.tracer.start_as_current_span("call", attributes={"gen_ai.operation.name": "chat"}):
        opted_in.settled(1_234_567, is_stated=is_stated, is_estimated=False)
    assert facts_of(sdk) == {
        "gen_ai.usage.cost.amount": 0.001234567,
        "gen_ai.usage.cost.currency": "USD",
        "gen_ai.usage.cost.source": source,
    }


def test_an_estimate_is_flagged_and_a_later_figure_replaces_it(opted_in: SpanCosts) -> None:
    sdk = Sdk()
    with sdk.tracer.start_as_current_span("call", attributes={"gen_ai.operation.name": "generate_content"}):
        opted_in.settled(5, is_stated=False, is_estimated=True)
        assert facts_of_current()["runguard.cost.estimated"] is True
        opted_in.settled(2_000_000_000, is_stated=False, is_estimated=False)
    assert facts_of(sdk)["gen_ai.usage.cost.amount"] == 2.0
    assert facts_of(sdk)["runguard.cost.estimated"] is False


def facts_of_current() -> dict[str, Any]:
    from opentelemetry import trace

    return dict(trace.get_current_span().attributes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("operation", ["invoke_agent", "execute_tool", None])
def test_no_other_span_gets_it(opted_in: SpanCosts, operation: str | None) -> None:
    sdk = Sdk()
    with sdk.tracer.start_as_current_span(
        "other", attributes={"gen_ai.operation.name": operation} if operation else {}
    ):
        opted_in.settled(5, is_stated=False, is_estimated=False)
    assert facts_of(sdk) == {}


def test_without_a_span_nothing_happens(opted_in: SpanCosts) -> None:
    opted_in.settled(5, is_stated=False, is_estimated=False)
