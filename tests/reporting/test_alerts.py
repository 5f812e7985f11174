"""What arrives, once and again."""

import asyncio
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from runguard import background
from runguard.alerts import Alert, Alerts, AlertSettings, verify_signature
from runguard.reporting import delivery as sending
from runguard.reporting.alerts import Parcel
from runguard.reporting.telemetry import Outbox
from tests.kit.alert_servers import (
    CANARY,
    PATIENT,
    SIGNING,
    Server,
    alert,
    alerts,
    hang,
    sent,
    short_pauses_and_no_leftovers,  # noqa: F401 - an autouse fixture
)
from tests.kit.waiting import until


def reset(_: Server, handler: BaseHTTPRequestHandler) -> None:
    """End the connection with a reset instead of an answer."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def hang_in_the_body(status: int) -> Callable[[Server, BaseHTTPRequestHandler], None]:
    def answer(server: Server, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        handler.wfile.write(b"begin")
        server.release.wait(PATIENT)

    return answer


def drip(server: Server, handler: BaseHTTPRequestHandler) -> None:
    """One byte of the status line at a time, for ever."""
    for _ in range(2_000):
        handler.wfile.write(b"H")
        if server.release.wait(0.02):
            return


def flood(server: Server, handler: BaseHTTPRequestHandler) -> None:
    """Go on, go on, go on: interim answers without end."""
    while not server.release.is_set():
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


# ---- what arrives ---------------------------------------------------------------------------------------------------


def test_a_webhook_gets_a_versioned_signed_json(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(webhook={"url": server.url("/a?b=c"), "secret": SIGNING, "headers": {"Authorization": "Bearer mine"}})
    told.send(alert(facts={"tool": "parse", "calls": 6, "usd": 1.5, "enforced": True, "model": None}))
    assert sent(told) == {"sent": 1}
    [(path, headers, body, _)] = server.requests
    assert path == "/a?b=c"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Bearer mine"
    assert headers["host"] == f"127.0.0.1:{server.port}"
    message = json.loads(body)
    assert message == {
        "v": 1,
        "id": headers["idempotency-key"],
        "kind": "trip",
        "key": "stall user:docs/alice 2026-08-23",
        "severity": "critical",
        "text": "stopped by stall",
        "facts": {"tool": "parse", "calls": 6, "usd": 1.5, "enforced": True, "model": None},
        "at": 1e9,
        "resolved": False,
    }
    assert verify_signature(SIGNING, headers["x-runguard-timestamp"], body, headers["x-runguard-signature"])


def test_without_a_secret_nothing_pretends_to_be_signed(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert "x-runguard-signature" not in server.requests[0][1]


def test_slack_gets_text_and_blocks_that_call_nobody(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(slack_webhook=server.url("/services/T/B/X"))
    told.send(
        alert(
            text="tool '<!channel>' & <@U123> @here @Channel a@b.example",
            facts={"agent": "<http://evil.example|click> @everyone", "enforced": False},
        )
    )
    assert sent(told, "slack") == {"sent": 1}
    path, _, body, _ = server.requests[0]
    message = json.loads(body)
    assert path == "/services/T/B/X"
    assert (
        message["text"]
        == "RunGuard: critical: tool '&lt;!channel&gt;' &amp; &lt;@U123&gt; @\u200bhere @\u200bChannel a@b.example"
    )
    assert [block["type"] for block in message["blocks"]] == ["section", "context"]
    assert (
        message["blocks"][1]["elements"][0]["text"]
        == "agent: &lt;http://evil.example|click&gt; @\u200beveryone\nenforced: false"
    )
    assert "<" not in body.decode()


def test_a_slack_text_fits_and_ends_in_no_half_entity(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(slack_webhook=server.url())
    told.send(alert(text="&" * 5_000, facts={f"name{n}": "<" * 500 for n in range(40)}))
    assert sent(told, "slack") == {"sent": 1}
    [message] = server.bodies()
    texts = [message["text"], message["blocks"][0]["text"]["text"], message["blocks"][1]["elements"][0]["text"]]
    assert all(2_800 < len(text) <= 3_000 for text in texts)
    assert texts[0].endswith("&amp;…")
    assert texts[2].endswith("&lt;…")


def test_pagerduty_gets_a_trigger_and_its_resolve_under_one_key(serve: Callable[..., Server]) -> None:
    server = serve(202)
    told = alerts(pagerduty_key=CANARY, pagerduty_url=server.url("/v2/enqueue"))
    key = "budget user:docs/alice " * 50
    told.send(alert(key, kind="threshold", severity="warning", facts={"app": "docs", "tool": "parse", "share": 0.8}))
    told.send(alert(key, kind="threshold", severity="warning", resolved=True))
    assert sent(told, "pagerduty") == {"sent": 2}
    trigger, resolve = server.bodies()
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert len(trigger["dedup_key"]) <= 255
    assert trigger["routing_key"] == resolve["routing_key"] == CANARY
    payload = trigger["payload"]
    assert (payload["severity"], payload["source"], payload["component"], payload["class"]) == (
        "warning",
        "docs",
        "parse",
        "threshold",
    )
    assert payload["timestamp"] == "2001-09-09T01:46:40.000+00:00"
    assert payload["summary"] == "stopped by stall"
    assert payload["custom_details"]["share"] == 0.8


def test_different_keys_are_different_incidents(serve: Callable[..., Server]) -> None:
    server = serve(202)
    told = alerts(pagerduty_key=CANARY, pagerduty_url=server.url())
    told.send(alert("a" * 500 + "1", facts={}))
    told.send(alert("a" * 500 + "2", facts={}))
    assert sent(told, "pagerduty") == {"sent": 2}
    first, second = server.bodies()
    assert first["dedup_key"] != second["dedup_key"]
    assert first["payload"]["source"]  # required by PagerDuty, with no fact to take it from
    assert first["payload"]["component"] == "runguard"


@pytest.mark.parametrize(
    ("setting", "severity", "level"),
    [
        (True, "info", "INFO"),
        (True, "critical", "CRITICAL"),
        ("warning", "critical", "WARNING"),
        ("ERROR", "info", "ERROR"),
    ],
)
def test_the_log_says_it_in_one_line(
    caplog: pytest.LogCaptureFixture, setting: bool | str, severity: str, level: str
) -> None:
    told = alerts(log=setting)
    with caplog.at_level(logging.DEBUG, "runguard"):
        told.send(alert(severity=severity, text="first\nsecond\x1b[31m"))
        assert sent(told, "log") == {"sent": 1}
    [record] = caplog.records
    assert record.getMessage() == "runguard.alert: first second [31m"
    assert record.levelname == level
    assert record.__dict__["runguard_alert"]["facts"] == {"tool": "parse", "calls": 6}


def test_functions_are_called_off_the_path_sync_and_async() -> None:
    heard: list[tuple[str, Alert, str]] = []

    def plain(told: Alert) -> None:
        heard.append(("plain", told, threading.current_thread().name))

    async def later(told: Alert) -> None:
        await asyncio.sleep(0)
        heard.append(("later", told, threading.current_thread().name))

    told = Alerts(AlertSettings.parse([plain, {"call": later}]))
    told.send(alert(text=f"Bearer {CANARY}"))
    assert told.flush(PATIENT)
    assert sorted(name for name, _, _ in heard) == ["later", "plain"]
    assert {thread for _, _, thread in heard} == {"runguard-alerts-call", "runguard-alerts-call-2"}
    assert all(one.text == "Bearer ***" for _, one, _ in heard)
    assert told.counts == {name: {"sent": 1, "failed": 0, "dropped": 0, "suppressed": 0} for name in ("call", "call-2")}


def test_a_bare_function_is_enough() -> None:
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))
    told.send(alert())
    assert told.flush(PATIENT)
    assert [one.kind for one in heard] == ["trip"]


def test_a_function_that_fails_is_counted_and_told_without_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Alert) -> None:
        raise ValueError(f"cannot reach https://hooks.example/{CANARY} with password={CANARY}")

    def leave(_: Alert) -> None:
        sys.exit(3)

    told = Alerts(AlertSettings.parse([fail, leave]))
    told.send(alert())
    assert told.flush(PATIENT)
    assert told.counts["call"]["failed"] == told.counts["call-2"]["failed"] == 1
    assert "runguard.alert_failed: call: ValueError: cannot reach https://hooks.example/***" in caplog.text
    assert "test_alerts.py:" in caplog.text
    assert CANARY not in caplog.text


def test_an_async_function_that_never_ends_is_ended() -> None:
    told = alerts(call=lambda _: asyncio.sleep(PATIENT * 2), deadline_seconds=0.1)
    told.send(alert())
    assert sent(told, "call") == {"failed": 1}


def test_a_function_may_flush_without_waiting_for_itself() -> None:
    done: list[bool] = []
    told: Alerts = Alerts(AlertSettings.parse(lambda _: done.append(told.flush(PATIENT))))
    told.send(alert())
    assert told.flush(PATIENT)
    assert done == [True]


# ---- once, and again ------------------------------------------------------------------------------------------------


def test_the_same_thing_is_told_once_until_it_is_over(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(webhook=server.url())
    for _ in range(3):
        told.send(alert())
    for _ in range(2):
        told.send(alert(resolved=True))
    told.send(alert())
    told.send(alert("another"))
    assert sent(told) == {"sent": 4, "suppressed": 3}
    assert [(body["key"][:7], body["resolved"]) for body in server.bodies()] == [
        ("stall u", False),
        ("stall u", True),
        ("stall u", False),
        ("another", False),
    ]


def test_what_did_not_arrive_was_not_told(serve: Callable[..., Server]) -> None:
    server = serve(400, 200)
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"failed": 1}
    told.send(alert())
    assert sent(told) == {"failed": 1, "sent": 1}


def test_only_the_most_recent_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_KEYS", 3)
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))
    for key in ("a", "b", "c", "a", "d", "a", "b"):  # "d" pushes "b" out, which is the oldest: "a" was asked for again
        told.send(alert(key))
    assert told.flush(PATIENT)
    assert [one.key for one in heard] == ["a", "b", "c", "d", "b"]


@pytest.mark.parametrize(
    "failure", [500, 503, 599, 429, (429, {"Retry-After": "0"}), (503, {"Retry-After": "soon"}), reset]
)
def test_what_may_pass_is_tried_again_under_the_same_name(
    serve: Callable[..., Server], failure: Callable[..., Any] | int | tuple[int, dict[str, Any]]
) -> None:
    server = serve(failure, failure, 200)
    told = alerts(webhook={"url": server.url(), "secret": SIGNING})
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert len(server.requests) == 3
    assert len({headers["idempotency-key"] for _, headers, _, _ in server.requests}) == 1
    assert len({body for _, _, body, _ in server.requests}) == 1
    assert all(
        verify_signature(SIGNING, h["x-runguard-timestamp"], b, h["x-runguard-signature"])
        for _, h, b, _ in server.requests
    )


def test_a_server_that_is_away_is_tried_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = taken.getsockname()[1]
        told = alerts(webhook=f"http://127.0.0.1:{port}/", deadline_seconds=PATIENT)
        told.send(alert())
        time.sleep(0.1)
        assert told.counts["webhook"] == {"sent": 0, "failed": 0, "dropped": 0, "suppressed": 0}
        taken.listen()
        with taken.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert sent(told) == {"sent": 1}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 410, 422])
def test_what_the_server_refuses_is_not_tried_again(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server = serve(status)
    server.body = f"no such hook: /hook/{CANARY} password={CANARY}\nsecond line {'x' * 5000}".encode()
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1
    assert f"runguard.alert_failed: webhook at http://127.0.0.1:{server.port}/***: {status} " in caplog.text
    assert "it said: no such hook: *** password=*** second line" in caplog.text
    assert CANARY not in caplog.text
    assert len(caplog.text) < 600


def test_the_deadline_ends_all_attempts(serve: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    server = serve(500)
    told = alerts(webhook=server.url(), deadline_seconds=1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) >= 2
    assert "runguard.alert_failed: webhook" in caplog.text  # the last attempt may have been cut short


def test_retry_after_is_waited_for(serve: Callable[..., Server]) -> None:
    server = serve((429, {"Retry-After": "1"}), 200)
    told = alerts(slack_webhook=server.url())
    told.send(alert())
    assert sent(told, "slack") == {"sent": 1}
    first, second = (at for _, _, _, at in server.requests)
    assert second - first >= 0.95


def in_an_hour() -> str:
    return format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)  # noqa: TID251


@pytest.mark.parametrize("later", [lambda: "3600", in_an_hour], ids=["seconds", "date"])
def test_retry_after_beyond_the_deadline_is_given_up_at_once(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, later: Callable[..., Any]
) -> None:
    server = serve((429, {"Retry-After": later()}))
    told = alerts(webhook=server.url(), deadline_seconds=PATIENT * 10)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1
    assert "429 Too Many Requests, to be tried in 3" in caplog.text


@pytest.mark.parametrize("answer", [hang, drip, flood])
def test_one_time_limit_holds_for_an_attempt(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    server = serve(answer)
    told = alerts(webhook=server.url(), timeout_seconds=0.2, deadline_seconds=0.2)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert "no answer within 0.2 s" in caplog.text


def test_a_yes_is_a_yes_whatever_becomes_of_the_body(serve: Callable[..., Server]) -> None:
    server = serve(hang_in_the_body(200))
    told = alerts(webhook=server.url(), timeout_seconds=PATIENT, deadline_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert not server.release.is_set()


def test_a_no_is_a_no_whatever_becomes_of_the_body(serve: Callable[..., Server]) -> None:
    server = serve(hang_in_the_body(400))
    told = alerts(webhook=server.url(), timeout_seconds=1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_nobody_goes_there(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, status: int
) -> None:
    elsewhere = serve()
    server = serve((status, {"Location": elsewhere.url("/internal")}))
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1
    assert elsewhere.requests == []
    assert "redirects are not followed" in caplog.text
    assert "/internal" not in caplog.text


def test_proxies_of_the_environment_are_not_used(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, server = serve(), serve()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url(""))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert (len(server.requests), len(proxy.requests)) == (1, 0)


# ---- Callbacks leave in order on a thread of their own; whatever they do, whoever sends goes on


def test_callbacks_run_in_order_on_another_thread() -> None:
    out, heard = Outbox(), []
    for number in range(50):
        out.send(lambda value: heard.append((value, threading.current_thread().name)), number)
    assert out.flush(5)
    assert [value for value, _ in heard] == list(range(50))
    assert {name for _, name in heard} == {"runguard-outbox"}


def test_one_that_raises_or_is_awaited_keeps_nobody_from_the_rest() -> None:
    out, heard = Outbox(), []

    async def later(value: int) -> None:
        heard.append(value)

    def broken(value: int) -> None:
        raise SystemExit("no")

    for callback in (broken, later, heard.append):
        out.send(callback, 1)
    assert out.flush(5)
    assert (heard, out.failed) == ([1, 1], 1)


def test_what_does_not_fit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "capacity", 3)
    out, go = Outbox(), threading.Event()
    heard: list[Any] = []
    out.send(lambda _: go.wait(5), None)
    until(lambda: not out._waiting)
    for number in range(5):
        out.send(heard.append, number)
    go.set()
    assert out.flush(5)
    assert (heard, out.dropped) == ([0, 1, 2], 2)


def test_a_thread_without_work_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.01)
    out = Outbox()
    heard: list[Any] = []
    out.send(heard.append, 1)
    until(lambda: out._thread is None)
    out.send(heard.append, 2)
    assert out.flush(5)
    assert heard == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_sends_its_own_and_not_its_parents() -> None:
    out, go = Outbox(), threading.Event()
    out.send(lambda _: go.wait(10), None)
    reader, writer = os.pipe()
    out.send(lambda value: os.write(writer, value), b"parent ")
    with out._changed:  # the worst moment
        child = os.fork()
        if child == 0:
            out.send(lambda value: os.write(writer, value), b"child ")
            os._exit(0 if out.flush(5) else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    assert out.flush(5)
    os.close(writer)
    assert status == 0
    assert os.read(reader, 100) == b"child parent "
    os.close(reader)


# ---- The queue of alerts, threads and forks


def test_send_returns_while_the_receiver_hangs_and_a_slow_one_does_not_delay_a_fast_one(
    serve: Callable[..., Server],
) -> None:
    slow, fast = serve(hang), serve()
    patient = {"timeout_seconds": PATIENT, "deadline_seconds": PATIENT}
    told = Alerts(AlertSettings.parse([{"webhook": slow.url(), **patient}, {"webhook": fast.url()}]))
    for number in range(5):
        told.send(alert(f"key {number}"))
    until(lambda: told.counts["webhook-2"]["sent"] == 5)
    assert told.counts["webhook"]["sent"] == told.counts["webhook"]["failed"] == 0
    assert told.flush(0.05) is False
    slow.answers = [200]
    slow.release.set()
    assert sent(told) == {"sent": 5}


def test_a_full_queue_drops_counts_and_tells_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending._ReceiverQueue, "capacity", 3)
    go, heard, busy = threading.Event(), [], threading.Event()

    def slow(told: Alert) -> None:
        busy.set()
        go.wait(PATIENT)
        heard.append(told.key)

    told = Alerts(AlertSettings.parse(slow))
    told.send(alert("first"))
    assert busy.wait(PATIENT)
    for number in range(8):
        told.send(alert(f"key {number}"))
    assert told.counts["call"] == {"sent": 0, "failed": 0, "dropped": 5, "suppressed": 0}
    assert caplog.text.count("runguard.alert_dropped") == 3  # at 1, 2 and 4
    go.set()
    assert told.flush(PATIENT)
    told.send(alert("key 7"))
    told.send(alert("key 0"))
    assert told.flush(PATIENT)
    assert heard == ["first", "key 0", "key 1", "key 2", "key 7"]


def test_what_waited_beyond_its_deadline_is_still_tried_once(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    told = alerts(webhook=server.url(), deadline_seconds=0.5)
    monkeypatch.setattr(sending, "parcel_of", lambda *given: Parcel(alert(), "topic", "event", time.monotonic() - 100))
    told.send(alert())
    assert sent(told) == {"sent": 1}


def test_a_thread_starts_with_the_first_alert_and_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.05)
    heard: list[threading.Thread] = []
    told = Alerts(AlertSettings.parse(lambda _: heard.append(threading.current_thread())))
    assert told._queues[0]._thread is None
    told.send(alert("one"))
    assert told.flush(PATIENT)
    assert heard[0].daemon
    until(lambda: not heard[0].is_alive())
    told.send(alert("two"))
    assert told.flush(PATIENT)
    assert len(heard) == 2
    assert heard[1] is not heard[0]


def test_many_threads_send_and_nothing_is_lost() -> None:
    heard: list[str] = []
    told = Alerts(AlertSettings.parse(lambda one: heard.append(one.key)))

    def send(n: int) -> None:
        for i in range(20):
            told.send(alert(f"{n} {i % 10}"))

    senders = [threading.Thread(target=send, args=(n,)) for n in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert told.flush(PATIENT)
    assert sorted(heard) == sorted(f"{n} {i}" for n in range(8) for i in range(10))
    assert told.counts["call"] == {"sent": 80, "failed": 0, "dropped": 0, "suppressed": 80}


def test_no_thread_to_be_had_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        told.send(alert("one"))
        assert told.flush(0.01) is False
    told.send(alert("two"))
    assert told.flush(PATIENT)
    assert [one.key for one in heard] == ["one", "two"]
    assert "runguard.alert_failed" not in caplog.text


@pytest.mark.parametrize("wrong", [None, "text", 7])
def test_send_never_raises(caplog: pytest.LogCaptureFixture, wrong: Any) -> None:
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))
    told.send(wrong)
    assert "runguard.alert_failed" in caplog.text
    told.send(alert())
    assert told.flush(PATIENT)
    assert len(heard) == 1


_FORK = """
import os, signal, threading
from runguard.alerts import Alert, Alerts, AlertSettings

heard, gate = [], threading.Event()
def listen(one):
    gate.wait(10)
    heard.append(one.key)

def alert(key):
    return Alert("trip", key, "info", "text")

alerts = Alerts(AlertSettings.parse(listen))
alerts.send(alert("in flight"))
alerts.send(alert("waiting"))

held, forked = threading.Event(), threading.Event()
def hold():
    with alerts._queues[0]._changed:
        held.set()
        forked.wait(10)

threading.Thread(target=hold).start()
held.wait(10)
child = os.fork()  # at the worst moment: another thread holds the lock
if child == 0:
    signal.alarm(20)  # a child that waits for a lock for ever is a failure, not a leftover
    gate.set()
    alerts.send(alert("waiting"))  # the parent tells it
    alerts.send(alert("of the child"))
    counts = {"sent": 1, "failed": 0, "dropped": 0, "suppressed": 1}
    ok = alerts.flush(10) and heard == ["of the child"] and alerts.counts["call"] == counts
    os._exit(0 if ok else 1)
forked.set()
gate.set()
_, status = os.waitpid(child, 0)
assert alerts.flush(10)
print(os.waitstatus_to_exitcode(status), heard)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sends_its_own_alerts_and_only_these() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.strip() == "0 ['in flight', 'waiting']", done.stderr


def test_a_process_that_ends_sends_what_is_waiting(serve: Callable[..., Server]) -> None:
    server = serve()
    script = f"""
from runguard.alerts import Alert, Alerts, AlertSettings
Alerts(AlertSettings.parse({{"webhook": {server.url()!r}}})).send(Alert("trip", "key", "info", "the last word"))
"""
    subprocess.run([sys.executable, "-c", script], timeout=50, check=True)
    assert [body["text"] for body in server.bodies()] == ["the last word"]
