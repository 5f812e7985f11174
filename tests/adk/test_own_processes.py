"""What happens once in a process, or in one that forks: each test has a process of its own."""

import asyncio
import gc
import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_stopped, call, run
from tests.kit.fresh import FreshProcess

CANARY = "argument-canary"
Say = Callable[[Any], None]


# ---- servers that load the app first and fork their workers then ----------------------------------------------------


def guard_in_forks(say: Say) -> None:
    heard: list[Any] = []
    plugin = RunGuardPlugin(max_model_calls=2, on_trip=heard.append)

    def look(n: int) -> dict[str, int]:
        return {"n": n}

    def work() -> None:
        agent = LlmAgent(name="a", model=ScriptedModel(lambda n, _: call("look", n=n)), tools=[look])
        assert_stopped(asyncio.run(run(agent, "go", plugins=[plugin])), "model_calls")
        assert plugin.flush(20)
        assert len(heard) == 1, heard

    workers = []
    for _ in range(2):
        pid = os.fork()  # at once: nothing of the plugin may still be under way
        if pid == 0:
            work()
            os._exit(0)
        workers.append(pid)
    work()
    say([os.waitpid(pid, 0)[1] for pid in workers])


def test_a_plugin_made_before_a_fork_guards_in_every_worker() -> None:
    with FreshProcess(guard_in_forks) as process:
        assert process.told() == [0, 0]


# ---- taking the patch down ------------------------------------------------------------------------------------------


class Mine(ScriptedModel):
    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        async for response in super().generate_content_async(llm_request, stream):
            yield response


def install_and_uninstall(say: Say) -> None:
    def seen() -> list[Any]:
        methods = [kind.__dict__.get("generate_content_async") for kind in (BaseLlm, Gemini, ScriptedModel, Mine)]
        runs = [getattr(Runner, name) for name in ("run", "run_async", "run_live")]
        return [*methods, *runs, set(BaseLlm.__dict__)]

    before = seen()
    runguard.install(max_usd=1)
    is_watched = seen()[1:4] != before[1:4]
    runguard.uninstall()
    gc.collect()

    class Later(ScriptedModel):
        async def generate_content_async(
            self, llm_request: LlmRequest, stream: bool = False
        ) -> AsyncGenerator[LlmResponse, None]:
            yield LlmResponse()

    say((is_watched, seen() == before, hasattr(Later.generate_content_async, "__wrapped__")))


def test_uninstall_gives_the_classes_back() -> None:
    """In a process of its own: other tests' guards keep the classes watched."""
    with FreshProcess(install_and_uninstall) as process:
        assert process.told() == (True, True, False)


# ---- telemetry ------------------------------------------------------------------------------------------------------


def decide_in_spans(say: Say) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)  # once per process: hence a process of its own

    def same(q: str) -> dict[str, str]:
        return {"status": "partial_parse_error"}

    stuck = ScriptedModel(lambda n, request: call("same", q=f"{CANARY}{n}"))
    asyncio.run(run(LlmAgent(name="extractor", model=stuck, tools=[same]), plugins=[RunGuardPlugin()]))
    events = [event for span in spans.get_finished_spans() for event in span.events]
    say([dict(event.attributes or {}) for event in events if event.name == "runguard.decision"])


def test_a_decision_is_an_event_on_the_span_that_adk_has_open() -> None:
    with FreshProcess(decide_in_spans) as process:
        told = {event["runguard.decision"]: event for event in process.told()}
    assert set(told) == {"nudge", "block", "stop"}
    assert {event["runguard.rule"] for event in told.values()} == {"stall"}
    assert told["stop"]["gen_ai.tool.name"] == "same"
    assert told["stop"]["runguard.trip.id"]
    assert CANARY not in json.dumps(told)
