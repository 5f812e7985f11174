"""What people and dashboards are told of a real run: alerts to a real receiver, metrics and span events through a real
SDK.
"""

import json
import logging
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from google.adk.agents import LlmAgent
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from runguard import Budget
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.alerts import verify_signature
from runguard.errors import RunStoppedError
from runguard.reporting import telemetry
from runguard.reporting.telemetry import Telemetry
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.adk_runs import play
from tests.kit.money import agent, guard
from tests.kit.tools import step

MONEY: dict[str, Any] = {
    "prices": {"scripted-1": {"input": 10, "output": 40}},
    "models": {"scripted-1": {"max_output_tokens": 250}},
    "tokens": lambda request: 1_000,
}
SECRET = "0123456789abcdef"
CANARY = "argument-canary"


def same(q: str) -> dict[str, str]:
    return {"status": "partial_parse_error", "data": "result-canary"}


def stuck() -> ScriptedModel:
    return ScriptedModel(lambda n, request: call("same", q=f"{CANARY}{n}"))


def extractor(model: Any) -> LlmAgent:
    return LlmAgent(name="extractor", model=model, tools=[same])


# ---- alerts ---------------------------------------------------------------------------------------------------------


class Receiving(ThreadingHTTPServer):
    """A server that keeps the headers and the body of every message."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[tuple[dict[str, str], bytes]] = []


@pytest.fixture
def receiver() -> Iterator[Receiving]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.heard.append((dict(self.headers), body))  # type: ignore[attr-defined]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = Receiving(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_stops_on_adk_reach_a_webhook_signed_without_contents_and_summed_up(receiver: Receiving) -> None:
    url = f"http://127.0.0.1:{receiver.server_address[1]}/hook"
    plugin = RunGuardPlugin(alerts={"webhook": {"url": url, "secret": SECRET}})
    for session in ("s1", "s2", "s3"):
        await run(extractor(stuck()), plugins=[plugin], session_id=session)
    assert plugin.flush(10)
    for headers, body in receiver.heard:
        assert verify_signature(SECRET, headers["X-RunGuard-Timestamp"], body, headers["X-RunGuard-Signature"])
        told = json.loads(body)
        assert told["facts"]["rule"] == "stall"
        assert told["facts"]["tool"] == "same"
        assert CANARY.encode() not in body
        assert b"result-canary" not in body
    assert [json.loads(body)["facts"].get("runs") for _, body in receiver.heard] == [None, 2]
    assert plugin.snapshot()["alerts"]["webhook"]["sent"] == 2


async def test_thresholds_and_the_cap_of_a_user_are_told_once_over_his_sessions() -> None:
    heard: list[Any] = []
    plugin = RunGuardPlugin(budgets=[Budget(usd="0.10", per="user", window="1d")], alerts=heard.append, **MONEY)
    for session in ("s1", "s2", "s3"):
        await run(
            extractor(ScriptedModel(lambda n, request: call("same", q=str(n)))), plugins=[plugin], session_id=session
        )
    assert plugin.flush(10)
    assert [alert.facts["percent"] for alert in heard if alert.kind == "threshold"] == [0.5, 0.8, 0.95]
    assert [alert.facts["scope"] for alert in heard if alert.kind == "trip" and alert.facts["rule"] == "budget"] == [
        "user:app/u1"
    ]


async def test_a_healthy_run_alerts_nobody() -> None:
    heard: list[Any] = []
    plugin = RunGuardPlugin(max_usd=5, alerts=heard.append, **MONEY)
    await run(extractor(ScriptedModel([call("same", q="1"), text("done")])), plugins=[plugin])
    assert plugin.flush(10)
    assert heard == []


# ---- telemetry ------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    monkeypatch.setattr(telemetry, "_telemetry", Telemetry(meters.get_meter("runguard"), None))
    yield reader
    meters.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    scopes = (
        [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data is not None else []
    )
    return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}


@pytest.mark.parametrize("kind", ["plugin", "model"])
async def test_a_run_on_adk_is_counted(reader: InMemoryMetricReader, kind: str) -> None:
    keywords: dict[str, Any] = {"budgets": [Budget(usd=5, per="user")], **MONEY}
    guard = RunGuardPlugin(on_stop="raise", **keywords) if kind == "plugin" else GuardedLlm(stuck(), **keywords)
    if isinstance(guard, GuardedLlm):
        root, plugins = extractor(guard), []
    else:
        root, plugins = extractor(stuck()), [guard]
    with pytest.raises(RunStoppedError):
        await run(root, plugins=plugins)
    assert guard.flush(10)
    told = points(reader)
    decided = {
        (p.attributes["runguard.decision"], p.attributes["runguard.rule"]): p.value for p in told["runguard.decisions"]
    }
    assert decided["stop", "stall"] == 1
    used = [p for p in told["runguard.budget.used"] if p.attributes["runguard.scope.kind"] == "user"]
    assert [round(p.value, 2) for p in used] == [float(guard.spend()["usd"])]
    assert sum(p.count for p in told["runguard.guard.duration"]) > 0
    metrics = repr([dict(p.attributes) for of_one in told.values() for p in of_one])
    assert "u1" not in metrics
    assert CANARY not in metrics


async def test_a_healthy_run_counts_no_decision(reader: InMemoryMetricReader) -> None:
    plugin = RunGuardPlugin(max_usd=5, **MONEY)
    await run(extractor(ScriptedModel([call("same", q="1"), text("done")])), plugins=[plugin])
    assert plugin.flush(10)
    assert "runguard.decisions" not in points(reader)


# ---- Hostile names of users, sessions and tools on real ADK: no record of the log contains a control character ------


HOSTILE = "eve\n2026-01-01 CRITICAL root: all is well\r\x1b[2J\x85\u2028\u202e"


async def test_no_log_record_of_a_run_with_hostile_names_contains_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "runguard")

    def fails(trip: Any) -> None:
        raise ValueError(HOSTILE)

    policy: dict[str, Any] = {
        "budgets": [Budget(usd="0.20", per="user"), Budget(tokens=20_000, per="session")],
        "on_trip": fails,
    }
    for script in ([call(HOSTILE, q=1)], [call("step", q=1)], [*(call("step", q=n) for n in range(30)), text("done")]):
        plugin = guard(**policy)
        # An unknown tool is an exception on older versions of ADK.
        await play(
            agent("a", ScriptedModel(script), tools=[step]),
            plugins=[plugin],
            user_id=HOSTILE,
            session_id=HOSTILE,
            catch=True,
        )
        assert plugin.flush(5)
    messages = [record.getMessage() for record in caplog.records if record.name == "runguard"]
    assert any("eve\\n2026" in message for message in messages), "the threshold warning names the user"
    for message in messages:
        assert [sign for sign in message if unicodedata.category(sign) in ("Cc", "Zl", "Zp") or sign == "\u202e"] == []
