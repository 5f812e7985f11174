"""A guarded app that Prometheus can scrape: runs with a loop, a healthy run and a budget, then waits to be ended.

``python -m tests.monitoring.guarded_app PORT``
"""

import asyncio
import sys
from typing import Any

from google.adk.agents import LlmAgent
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, run, text


def parse(page: int) -> dict[str, str]:
    """Parse a page."""
    return {"status": "partial_parse_error"}


def agent(script: Any) -> LlmAgent:
    model = ScriptedModel(script, prompt_tokens=1_000, output_tokens=100)
    return LlmAgent(name="extractor", model=model, tools=[parse])


async def main() -> None:
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    plugin = RunGuardPlugin(
        budgets=[Budget(usd="0.35", per="app", window="1d")],
        prices={"scripted-1": {"input": 10, "output": 100}},  # two cents a call
        tokens=lambda request: 1_000,
        models={"scripted-1": {"max_output_tokens": 100}},
    )
    for n in range(2):
        await run(agent([text("done")]), plugins=[plugin], session_id=f"healthy-{n}")
    for n in range(2):
        await run(agent([call("parse", page=1)]), plugins=[plugin], session_id=f"loop-{n}")
    plugin.flush()
    start_http_server(int(sys.argv[1]), addr="127.0.0.1")
    print("ready", flush=True)
    sys.stdin.read()  # until the test closes it


if __name__ == "__main__":
    asyncio.run(main())
