"""The Pydantic AI adapter plays every conformance scenario."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.instrumented import InstrumentationSettings, InstrumentedModel
from pydantic_ai.models.test import TestModel

from runguard.pydantic_ai import RunGuard
from runguard.testing import conformance
from tests.frameworks.pydantic_harness import PydanticAIHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    if (name, mode) == ("kill_switch", "stream") and not hasattr(AbstractCapability, "prepare_model_request"):
        pytest.skip("this version goes on reading a stream whose request was stopped, until its next piece")
    await conformance.check(PydanticAIHarness(), name, mode)


async def test_an_instrumented_model_has_one_span_per_call() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    model = InstrumentedModel(TestModel(), InstrumentationSettings(tracer_provider=provider))
    await Agent(model, capabilities=[RunGuard(max_model_calls=5)]).run("x")
    assert [span.name for span in kept.get_finished_spans()].count("chat test") == 1
