"""Alerts against real servers on loopback: what arrives, what is tried again, what never leaves, and where it never
goes.
"""

import asyncio
import copy
import io
import json
import logging
import os
import pickle
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.alerts import (
    Alert,
    Alerts,
    AlertSettings,
    addresses,
    mask,
    messages,
    sending,
    transport,
    verify_signature,
)
from runguard.alerts.addresses import Endpoint, refusal
from runguard.alerts.secret import Secret
from runguard.errors import PolicyError

CANARY = "canary0secret0value0"
SIGNING = f"signing-{CANARY}"
PATIENT = 20.0  # seconds a test waits for what happens at once: a busy machine is no failure


def alert(key: str = "stall user:docs/alice 2026-08-23", **over: Any) -> Alert:
    return Alert(
        **{
            "kind": "trip",
            "key": key,
            "severity": "critical",
            "text": "stopped by stall",
            "facts": {"tool": "parse", "calls": 6},
            "at": 1e9,
            **over,
        }
    )


class Server:
    """An HTTP server on loopback that answers as it is told, in order, the last answer for ever, and keeps what it was
    sent.
    """

    def __init__(self, *answers: Any, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes, float]] = []
        self.answers = list(answers) or [200]
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()}, body, time.monotonic())
                )
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if callable(answer):
                    answer(outer, self)
                    return
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                said = outer.body
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        self.body = b"ok"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.005,), daemon=True).start()

    def url(self, path: str = f"/hook/{CANARY}", scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body, _ in self.requests]

    def close(self) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Any, **how: Any) -> Server:
        servers.append(Server(*answers, **how))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def _short_pauses_and_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sending, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(sending, "_LONGEST_PAUSE_S", 0.1)
    yield
    assert all(line.wait(0) for line in list(sending._lines)), (
        "an alert of this test would be tried again during the next one"
    )


def alerts(**settings: Any) -> Alerts:
    return Alerts(AlertSettings.parse(settings))


def sent(told: Alerts, name: str = "webhook") -> dict[str, int]:
    """The counts that are not zero, once everything is done."""
    assert told.flush(PATIENT)
    return {what: number for what, number in told.counts[name].items() if number}


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def hang(server: Server, _: BaseHTTPRequestHandler) -> None:
    """Take the request and say nothing."""
    server.release.wait(PATIENT)


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


def test_a_webhook_gets_a_versioned_signed_json(serve):
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


def test_without_a_secret_nothing_pretends_to_be_signed(serve):
    server = serve()
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert "x-runguard-signature" not in server.requests[0][1]


def test_slack_gets_text_and_blocks_that_call_nobody(serve):
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


def test_a_slack_text_fits_and_ends_in_no_half_entity(serve):
    server = serve()
    told = alerts(slack_webhook=server.url())
    told.send(alert(text="&" * 5_000, facts={f"name{n}": "<" * 500 for n in range(40)}))
    assert sent(told, "slack") == {"sent": 1}
    [message] = server.bodies()
    texts = [message["text"], message["blocks"][0]["text"]["text"], message["blocks"][1]["elements"][0]["text"]]
    assert all(2_800 < len(text) <= 3_000 for text in texts)
    assert texts[0].endswith("&amp;…")
    assert texts[2].endswith("&lt;…")


def test_pagerduty_gets_a_trigger_and_its_resolve_under_one_key(serve):
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


def test_different_keys_are_different_incidents(serve):
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
def test_the_log_says_it_in_one_line(caplog, setting, severity, level):
    told = alerts(log=setting)
    with caplog.at_level(logging.DEBUG, "runguard"):
        told.send(alert(severity=severity, text="first\nsecond\x1b[31m"))
        assert sent(told, "log") == {"sent": 1}
    [record] = caplog.records
    assert record.getMessage() == "runguard.alert: first second [31m"
    assert record.levelname == level
    assert record.runguard_alert["facts"] == {"tool": "parse", "calls": 6}


def test_functions_are_called_off_the_path_sync_and_async():
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


def test_a_bare_function_is_enough():
    heard: list[Alert] = []
    told = Alerts(AlertSettings.parse(heard.append))
    told.send(alert())
    assert told.flush(PATIENT)
    assert [one.kind for one in heard] == ["trip"]


def test_a_function_that_fails_is_counted_and_told_without_its_secrets(caplog):
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


def test_an_async_function_that_never_ends_is_ended():
    told = alerts(call=lambda _: asyncio.sleep(PATIENT * 2), deadline_seconds=0.1)
    told.send(alert())
    assert sent(told, "call") == {"failed": 1}


def test_a_function_may_flush_without_waiting_for_itself():
    done = []
    told = Alerts(AlertSettings.parse(lambda _: done.append(told.flush(PATIENT))))
    told.send(alert())
    assert told.flush(PATIENT)
    assert done == [True]


# ---- once, and again --------------------------------------------------------------------------------------------


def test_the_same_thing_is_told_once_until_it_is_over(serve):
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


def test_what_did_not_arrive_was_not_told(serve):
    server = serve(400, 200)
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"failed": 1}
    told.send(alert())
    assert sent(told) == {"failed": 1, "sent": 1}


def test_only_the_most_recent_keys_are_remembered(monkeypatch):
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
def test_what_may_pass_is_tried_again_under_the_same_name(serve, failure):
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


def test_a_server_that_is_away_is_tried_again():
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
def test_what_the_server_refuses_is_not_tried_again(serve, caplog, status):
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


def test_the_deadline_ends_all_attempts(serve, caplog):
    server = serve(500)
    told = alerts(webhook=server.url(), deadline_seconds=1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) >= 2
    assert "runguard.alert_failed: webhook" in caplog.text  # the last attempt may have been cut short


def test_retry_after_is_waited_for(serve):
    server = serve((429, {"Retry-After": "1"}), 200)
    told = alerts(slack_webhook=server.url())
    told.send(alert())
    assert sent(told, "slack") == {"sent": 1}
    first, second = (at for _, _, _, at in server.requests)
    assert second - first >= 0.95


@pytest.mark.parametrize(
    "later",
    ["3600", format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)],  # noqa: TID251
    ids=["seconds", "date"],
)
def test_retry_after_beyond_the_deadline_is_given_up_at_once(serve, caplog, later):
    server = serve((429, {"Retry-After": later}))
    told = alerts(webhook=server.url(), deadline_seconds=PATIENT * 10)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1
    assert "429 Too Many Requests, to be tried in 3" in caplog.text


@pytest.mark.parametrize("answer", [hang, drip])
def test_one_time_limit_holds_for_an_attempt(serve, caplog, answer):
    server = serve(answer)
    told = alerts(webhook=server.url(), timeout_seconds=0.2, deadline_seconds=0.2)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert "no answer within 0.2 s" in caplog.text


def test_an_answer_without_end_is_left(serve):
    server = serve(flood)
    endpoint = AlertSettings.parse({"webhook": server.url()}).receivers[0].endpoint
    with pytest.raises(transport.UndeliveredError, match="the connection failed"):
        transport.post(endpoint, {}, b"{}", PATIENT)


def test_a_yes_is_a_yes_whatever_becomes_of_the_body(serve):
    server = serve(hang_in_the_body(200))
    told = alerts(webhook=server.url(), timeout_seconds=PATIENT, deadline_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert not server.release.is_set()


def test_a_no_is_a_no_whatever_becomes_of_the_body(serve):
    server = serve(hang_in_the_body(400))
    told = alerts(webhook=server.url(), timeout_seconds=1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_and_nobody_goes_there(serve, caplog, status):
    elsewhere = serve()
    server = serve((status, {"Location": elsewhere.url("/internal")}))
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(server.requests) == 1
    assert elsewhere.requests == []
    assert "redirects are not followed" in caplog.text
    assert "/internal" not in caplog.text


def test_proxies_of_the_environment_are_not_used(serve, monkeypatch):
    proxy, server = serve(), serve()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url(""))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    told = alerts(webhook=server.url())
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert (len(server.requests), len(proxy.requests)) == (1, 0)


# ---- queue, threads, fork -----------------------------------------------------------------------------------------


def test_send_returns_while_the_receiver_hangs_and_a_slow_one_does_not_delay_a_fast_one(serve):
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


def test_a_full_queue_drops_counts_and_tells_again_later(caplog, monkeypatch):
    monkeypatch.setattr(sending, "_CAPACITY", 3)
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


def test_what_waited_beyond_its_deadline_is_still_tried_once(serve, monkeypatch):
    server = serve()
    told = alerts(webhook=server.url(), deadline_seconds=0.5)
    monkeypatch.setattr(
        sending, "parcel_of", lambda *given: sending.Parcel(alert(), "topic", "event", time.monotonic() - 100)
    )
    told.send(alert())
    assert sent(told) == {"sent": 1}


def test_a_thread_starts_with_the_first_alert_and_ends_when_idle(monkeypatch):
    monkeypatch.setattr(sending, "_IDLE_S", 0.05)
    heard: list[threading.Thread] = []
    told = Alerts(AlertSettings.parse(lambda _: heard.append(threading.current_thread())))
    assert told._lines[0]._thread is None
    told.send(alert("one"))
    assert told.flush(PATIENT)
    assert heard[0].daemon
    until(lambda: not heard[0].is_alive())
    told.send(alert("two"))
    assert told.flush(PATIENT)
    assert len(heard) == 2
    assert heard[1] is not heard[0]


def test_many_threads_send_and_nothing_is_lost():
    heard: list[str] = []
    told = Alerts(AlertSettings.parse(lambda one: heard.append(one.key)))
    senders = [
        threading.Thread(target=lambda n=n: [told.send(alert(f"{n} {i % 10}")) for i in range(20)]) for n in range(8)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert told.flush(PATIENT)
    assert sorted(heard) == sorted(f"{n} {i}" for n in range(8) for i in range(10))
    assert told.counts["call"] == {"sent": 80, "failed": 0, "dropped": 0, "suppressed": 80}


def test_no_thread_to_be_had_is_no_error(monkeypatch, caplog):
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
def test_send_never_raises(caplog, wrong):
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
    with alerts._lines[0]._changed:
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
def test_a_forked_child_sends_its_own_alerts_and_only_these():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.strip() == "0 ['in flight', 'waiting']", done.stderr


def test_a_process_that_ends_sends_what_is_waiting(serve):
    server = serve()
    script = f"""
from runguard.alerts import Alert, Alerts, AlertSettings
Alerts(AlertSettings.parse({{"webhook": {server.url()!r}}})).send(Alert("trip", "key", "info", "the last word"))
"""
    subprocess.run([sys.executable, "-c", script], timeout=50, check=True)
    assert [body["text"] for body in server.bodies()] == ["the last word"]


# ---- where alerts do not go ---------------------------------------------------------------------------------------

REFUSED = {
    "0.0.0.0": "unspecified",
    "10.1.2.3": "private",
    "100.100.100.200": "private",
    "127.0.0.2": "loopback",
    "168.63.129.16": "cloud-internal",
    "169.254.169.254": "link-local",
    "172.31.255.255": "private",
    "192.0.0.192": "reserved",
    "192.168.1.1": "private",
    "198.18.0.1": "reserved",
    "224.0.0.1": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "reserved",
    "::": "unspecified",
    "::1": "loopback",
    "::127.0.0.1": "reserved",
    "::ffff:127.0.0.1": "loopback",
    "::ffff:169.254.169.254": "link-local",
    "64:ff9b::a9fe:a9fe": "link-local",
    "64:ff9b::10.0.0.1": "private",
    "64:ff9b:1::1": "reserved",
    "100::1": "reserved",
    "2001::1": "reserved",
    "2001:db8::1": "reserved",
    "2002:a00:1::1": "reserved",
    "3fff::1": "reserved",
    "5f00::1": "reserved",
    "fd00:ec2::254": "private",
    "fe80::1": "link-local",
    "fe80::1%1": "link-local",
    "fec0::1": "private",
    "ff02::1": "multicast",
}


@pytest.mark.parametrize(("address", "word"), REFUSED.items())
def test_addresses_that_are_not_public_are_refused(address, word):
    assert refusal(ip_address(address)) == word


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "169.253.1.1",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_public_addresses_are_not(address):
    assert refusal(ip_address(address)) == ""


def point(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    """The resolver answers with these addresses; what is asked of it is kept."""
    asked: list[str] = []

    def lookup(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in found]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, found, strict=True)
        ]

    monkeypatch.setattr(addresses, "getaddrinfo", lookup)
    return asked


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every attempt to connect is kept, and fails."""
    tried: list[Any] = []

    class Never:
        def __init__(self, *_: Any) -> None:
            pass

        def settimeout(self, _: float) -> None:
            pass

        def connect(self, sockaddr: Any) -> None:
            tried.append(sockaddr)
            raise ConnectionRefusedError

        def close(self) -> None:
            pass

    monkeypatch.setattr(
        transport, "socket", SimpleNamespace(socket=Never, SOCK_STREAM=socket.SOCK_STREAM, gaierror=socket.gaierror)
    )
    return tried


@pytest.mark.parametrize(
    "bad", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "0.0.0.0", "::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1"]
)
def test_a_name_that_leads_inside_is_never_connected_to(monkeypatch, no_connection, caplog, bad):
    point(monkeypatch, "93.184.215.14", bad)  # one good address does not excuse a bad one
    told = alerts(webhook=f"https://alerts.example/{CANARY}")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == []
    assert "set allow_private = true if that is meant" in caplog.text
    assert CANARY not in caplog.text


def test_the_connection_goes_to_the_checked_address_and_the_name_is_looked_up_once(monkeypatch, no_connection):
    asked = point(monkeypatch, "93.184.215.14", "2606:4700::1111")
    endpoint = AlertSettings.parse({"webhook": "https://alerts.example:8443/x"}).receivers[0].endpoint
    with pytest.raises(transport.UndeliveredError):
        transport.post(endpoint, {}, b"{}", 1)
    assert asked == ["alerts.example"]
    assert no_connection == [("93.184.215.14", 8443), ("2606:4700::1111", 8443)]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://alerts.example/x", "alerts.example"),
        ("https://alerts.example:8443/x", "alerts.example:8443"),
        ("http://[::1]:80/", "[::1]"),
    ],
)
def test_the_host_header_is_the_name_as_it_is_written(monkeypatch, url, host):
    said: list[bytes] = []
    wire = SimpleNamespace(
        sendall=said.append, makefile=lambda _: io.BytesIO(b"HTTP/1.1 204 No Content\r\n\r\n"), close=lambda: None
    )
    monkeypatch.setattr(transport._Pinned, "connect", lambda connection: setattr(connection, "sock", wire))
    transport.post(AlertSettings.parse({"webhook": url}).receivers[0].endpoint, {}, b"{}", 1)
    assert f"\r\nHost: {host}\r\n".encode() in b"".join(said)


def test_a_name_that_changes_its_mind_gains_nothing(monkeypatch, no_connection):
    """DNS rebinding: public when it is checked, inside when it is asked again."""
    answers = iter(["93.184.215.14", "169.254.169.254", "169.254.169.254"])

    def lookup(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(addresses, "getaddrinfo", lookup)
    told = alerts(webhook="https://alerts.example/x")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == [("93.184.215.14", 443)]


def test_private_places_are_reached_when_that_is_meant(monkeypatch, no_connection):
    point(monkeypatch, "10.0.0.7")
    told = alerts(webhook="https://alerts.internal/x", allow_private=True, deadline_seconds=0.1)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection[0] == ("10.0.0.7", 443)


def test_localhost_must_be_loopback(monkeypatch, no_connection, caplog):
    point(monkeypatch, "93.184.215.14")
    told = alerts(webhook="http://localhost/x")
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert no_connection == []
    assert "not loopback on this machine" in caplog.text


def test_localhost_is_reached(serve):
    server = serve()
    told = alerts(webhook=server.url(host="localhost"))
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert server.requests[0][1]["host"] == f"localhost:{server.port}"


def test_a_name_that_cannot_be_looked_up_is_tried_again(monkeypatch, caplog):
    asked = []

    def away(host: str, port: int, **_: Any) -> None:
        asked.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(addresses, "getaddrinfo", away)
    told = alerts(webhook="https://alerts.example/x", deadline_seconds=0.3)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert len(asked) >= 2
    assert "the name could not be looked up" in caplog.text


BAD_URLS = {
    "http://alerts.example/x": "must begin with https://",
    "ftp://alerts.example/x": "must be a URL that begins with https://",
    "file:///etc/passwd": "must be a URL that begins with https://",
    "alerts.example/x": "must be a URL that begins with https://",
    "https:///x": "must be a URL that begins with https://",
    "https://alerts.example:0/x": "must be a URL that begins with https://",
    "https://user:pass@alerts.example/x": "user and password in a URL are refused",
    "https://user@alerts.example/x": "user and password in a URL are refused",
    "https://alerts.example/x#part": "fragment",
    "https://alerts.example:99999/x": "not a valid URL",
    "https://[::1/x": "not a valid URL",
    "https://alerts.example/a b": "characters that a URL cannot have",
    "https://alerts.example/a\r\nX-Evil: 1": "characters that a URL cannot have",
    "https://alerts.example\\@127.0.0.1/": "characters that a URL cannot have",
    "https://bücher.example/": "characters that a URL cannot have",
    "https://alerts..example/": "the host is not a valid name",
    "https://-alerts.example/": "the host is not a valid name",
    "https://fe80::1%25eth0/": "not a valid URL",
    "https://2130706433/": "write the address in its usual form",
    "https://0x7f000001/": "write the address in its usual form",
    "https://0x7f.1/": "write the address in its usual form",
    "https://0177.0.0.1/": "write the address in its usual form",
    "https://127.1/": "write the address in its usual form",
    "http://2130706433/": "write the address in its usual form",
    "https://169.254.169.254/latest/meta-data": "the address is link-local; set allow_private = true if that is meant",
    "https://10.0.0.1/": "the address is private",
    "https://0.0.0.0/": "the address is unspecified",
    "https://[::]/": "the address is unspecified",
    "https://[::ffff:127.0.0.1]/": "the address is loopback",
    "https://[0:0:0:0:0:ffff:7f00:1]/": "the address is loopback",
    "https://[fd00::1]/": "the address is private",
    "https://[64:ff9b::a9fe:a9fe]/": "the address is link-local",
    "http://[::ffff:127.0.0.1]/": "the address is loopback",
    "http://localhost.evil.example/": "must begin with https://",
    "http://127.0.0.1.evil.example/": "must begin with https://",
    "https://" + "a" * 3000: "longer than 2048 characters",
}


@pytest.mark.parametrize(("url", "message"), BAD_URLS.items())
@pytest.mark.parametrize("setting", ["slack_webhook", "webhook"])
def test_urls_that_cannot_be_meant_are_refused_when_they_are_read(setting, url, message):
    with pytest.raises(PolicyError) as raised:
        AlertSettings.parse({setting: url})
    assert str(raised.value).startswith(f"alerts.{setting}: ")
    assert message in str(raised.value)
    assert url not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x",
        "http://127.9.9.9/",
        "http://[::1]:8080/",
        "http://localhost/",
        "https://hooks.slack.com/services/T/B/X",
        "https://8.8.8.8/",
    ],
)
def test_urls_that_can_be_meant_are_taken(url):
    assert len(AlertSettings.parse({"webhook": url}).receivers) == 1


def test_plain_http_stays_refused_where_private_places_are_allowed():
    with pytest.raises(PolicyError, match="must begin with https"):
        AlertSettings.parse({"webhook": "http://10.0.0.1/", "allow_private": True})
    assert AlertSettings.parse({"webhook": "https://10.0.0.1/", "allow_private": True})


# ---- TLS
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A self-signed certificate for alerts.example and 127.0.0.1, with its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "alerts.example")])
    start = datetime.now(UTC) - timedelta(days=1)  # noqa: TID251
    names = [x509.DNSName("alerts.example"), x509.IPAddress(ip_address("127.0.0.1"))]
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + built.public_bytes(serialization.Encoding.PEM))
    return str(path)


@pytest.fixture
def tls(serve: Callable[..., Server], certificate: str) -> tuple[Server, list[str | None]]:
    """A TLS server, and the names that clients asked it for."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _sock, name, _context: names.append(name)
    return serve(tls=context), names


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, certificate: str) -> Iterator[None]:
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    transport._trust.cache_clear()
    yield
    transport._trust.cache_clear()


def test_an_unverified_certificate_is_refused_and_not_tried_again(tls, caplog):
    server, _ = tls
    told = alerts(webhook=server.url(scheme="https"), deadline_seconds=PATIENT, timeout_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert server.requests == []
    assert "the certificate is not trusted (self-signed certificate)" in caplog.text


def test_a_trusted_certificate_is_checked_against_the_name_on_a_pinned_connection(tls, trusting, monkeypatch):
    server, names = tls
    point(monkeypatch, "127.0.0.1")
    told = alerts(
        webhook=server.url(scheme="https", host="alerts.example"), allow_private=True, timeout_seconds=PATIENT
    )
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert names == ["alerts.example"]
    assert server.requests[0][1]["host"] == f"alerts.example:{server.port}"


def test_a_trusted_certificate_of_another_name_is_refused(tls, trusting, monkeypatch, caplog):
    server, _ = tls
    point(monkeypatch, "127.0.0.1")
    told = alerts(webhook=server.url(scheme="https", host="other.example"), allow_private=True, timeout_seconds=PATIENT)
    told.send(alert())
    assert sent(told) == {"failed": 1}
    assert server.requests == []
    assert "the certificate is not trusted" in caplog.text


# ---- secrets
# ----------------------------------------------------------------------------------------------------------

SECRETS = {
    "sk-proj-AbCdEf0123456789xyz": "***",
    "sk-ant-api03-AbCdEf0123456789": "***",
    "sk_live_AbCdEf0123456789": "***",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv": "***",
    "ya29.a0AfH6SMBx": "***",
    "xoxb-123456789012-abcdefABCDEF": "***",
    "xapp-1-A0123-abcdef": "***",
    "ghp_0123456789abcdefghij": "***",
    "github_pat_0123456789abcdefghij": "***",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "***",
    "Bearer abcdef123456": "Bearer ***",
    "basic dXNlcjpwYXNzd29yZA==": "basic ***",
    "OPENAI_API_KEY=abc123": "OPENAI_API_KEY=***",
    '{"password": "hunter2"}': '{"password": "***"}',
    "token: abcdef": "token: ***",
    "redis://user:pw@cache:6379/0": "redis://cache:6379/***",
    "https://hooks.slack.com/services/T00/B00/XXX": "https://hooks.slack.com/***",
    "https://alerts.example?key=abc": "https://alerts.example/***",
    "-----BEGIN EC PRIVATE KEY----- MHcCAQ== -----END EC PRIVATE KEY-----": "***",
    "sk-\u200bproj-AbCdEf0123456789xyz": "***",
}


@pytest.mark.parametrize(("text", "masked"), SECRETS.items())
def test_secrets_are_masked(text, masked):
    assert mask(f"before {text} after") == f"before {masked} after"


@pytest.mark.parametrize(
    "text",
    [
        (
            "stopped by stall of tool 'parse_document': 6 equal failures, limit 6 in root→extractor; 6 model "
            "calls, 1200 tokens so far"
        ),
        "tokens: 1200, max_tokens=50",
        "task-force-of-many-long-words and risk_management_system",
        "a basic understanding",
        "user:docs/alice of https://alerts.example",
        "digest 0123456789abcdef0123456789abcdef",
    ],
)
def test_ordinary_texts_stay_as_they_are(text):
    assert mask(text) == text


def test_a_text_becomes_one_line_without_tricks():
    assert mask("a\r\nb\x00c\x1b[31m \u202egnp.exe\u2028d") == "a b c [31m gnp.exe d"


@pytest.mark.parametrize(
    "piece",
    [
        "eyJ-",
        "eyJ",
        "sk-",
        "a",
        "https://",
        "a://b:",
        "bearer ",
        "password=",
        "-----BEGIN ",
        "-----BEGIN KEY-----",
        "@",
        "token",
        "\u200b",
        "xox",
    ],
)
def test_a_megabyte_of_anything_is_cut_and_done(piece):
    text = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    assert len(mask(text)) <= 1_000
    assert time.process_time() - begin < 1.0  # it takes about a millisecond; what is not linear takes minutes
    begin = time.process_time()
    mask(text, 200_000)
    assert time.process_time() - begin < 10.0


@pytest.mark.parametrize("start", [*range(60, 104, 3), *range(570, 615, 3)])
def test_a_key_that_crosses_a_cut_does_not_show_its_first_half(start):
    """At the end of what is shown, and at the end of what is looked at,
    which is shown when much before it was masked.
    """
    before = f"password={'x' * 120} " * 5
    text = before[:start].rstrip() + " sk-proj-AbCdEf0123456789AbCdEf0123456789 and so on" + " more" * 500
    assert "sk-" not in mask(text, 100)


def everything_said(server: Server) -> str:
    return "\n".join(f"{path} {headers} {body.decode()}" for path, headers, body, _ in server.requests)


def flat(body: bytes) -> list[str]:
    """Every text of a JSON, at every depth."""
    found: list[str] = []

    def walk(value: Any) -> None:
        for item in (
            (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            walk(item)
        found.extend([value] if isinstance(value, str) else [])

    walk(json.loads(body))
    return found


def test_the_canary_is_in_no_message_no_log_and_no_repr(serve, caplog):
    """Whatever an alert holds, and whatever the receivers' own secrets look like, they do not leave."""
    hook, failing = serve(), serve(400)
    failing.body = f"{{'error': 'bad {SIGNING} for /hook/{CANARY}'}}".encode()
    heard: list[Alert] = []
    settings = AlertSettings.parse(
        [
            {
                "slack_webhook": hook.url("/slack"),
                "webhook": {"url": hook.url("/hook"), "secret": SIGNING},
                "log": True,
                "call": heard.append,
            },
            {"webhook": failing.url(), "pagerduty_key": "routing" + CANARY, "pagerduty_url": failing.url("/pd")},
        ]
    )
    told = Alerts(settings)
    with caplog.at_level(logging.DEBUG):
        told.send(
            alert(
                f"key with {SIGNING}",
                text=f"routing{CANARY} and sk-{CANARY} and {SIGNING}",
                facts={
                    "url": failing.url(),
                    "password": CANARY,
                    "note": f"Bearer {CANARY}",
                    f"x-{SIGNING}": 1,
                    "store": f"redis://u:{CANARY}@h/0",
                },
            )
        )
        assert told.flush(PATIENT)
    assert {name: (counts["sent"], counts["failed"]) for name, counts in told.counts.items()} == {
        "slack": (1, 0),
        "webhook": (1, 0),
        "log": (1, 0),
        "call": (1, 0),
        "webhook-2": (0, 1),
        "pagerduty": (0, 1),
    }
    records = "".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    for place in (
        everything_said(hook),
        caplog.text,
        records,
        repr(heard),
        repr(settings),
        str(settings),
        repr(asdict(settings)),
        json.dumps(settings.to_dict()),
    ):
        assert len(place) > 100
        assert CANARY not in place
    leaks = [text for _, _, body, _ in failing.requests for text in flat(body) if CANARY in text]
    assert len(failing.requests) == 2
    assert leaks == ["routing" + CANARY]  # where it belongs: the routing key, once


def test_settings_from_the_environment_are_pickled_by_name_and_others_are_not(monkeypatch, serve):
    server = serve()
    monkeypatch.setenv("HOOK", server.url())
    monkeypatch.setenv("SIGN", SIGNING)
    monkeypatch.setenv("PD_KEY", CANARY)
    settings = AlertSettings.parse(
        {"webhook": {"url": "env:HOOK", "secret": "env:SIGN"}, "pagerduty_key": "env:PD_KEY"}
    )
    data = pickle.dumps(settings)
    assert CANARY.encode() not in data
    assert b"env:HOOK" in data
    assert pickle.loads(data) == settings
    told = Alerts(pickle.loads(pickle.dumps(AlertSettings.parse({"webhook": "env:HOOK"}))))
    told.send(alert())
    assert sent(told) == {"sent": 1}
    written_out = AlertSettings.parse({"webhook": server.url()})
    with pytest.raises(TypeError, match="env:NAME") as raised:
        pickle.dumps(written_out)
    assert CANARY not in str(raised.value)
    assert copy.deepcopy(settings) == settings


def test_a_secret_shows_itself_to_nobody():
    secret = Secret(CANARY)
    assert CANARY not in f"{secret} {secret!r} {[secret]} {secret!s:>40}" % ()
    assert secret.reveal() == CANARY
    assert secret == Secret(CANARY)
    assert secret != Secret("other")
    endpoint = Endpoint.of(Secret(f"https://alerts.example/{CANARY}"), "x", allow_private=False)
    assert str(endpoint) == "https://alerts.example/***"
    assert CANARY not in repr(endpoint)


def test_secrets_come_from_the_environment(monkeypatch, serve):
    server = serve()
    monkeypatch.setenv("ALERT_HOOK", server.url("/from/env") + "\n")  # as from a mounted file
    monkeypatch.setenv("ALERT_AUTH", "Bearer from-env")
    told = alerts(webhook={"url": "env:ALERT_HOOK", "headers": {"X-Auth": "env:ALERT_AUTH"}})
    monkeypatch.delenv("ALERT_HOOK")  # read once, when the settings were
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert server.requests[0][0] == "/from/env"
    assert server.requests[0][1]["x-auth"] == "Bearer from-env"


@pytest.mark.parametrize("setting", ["slack_webhook", "pagerduty_key", "webhook"])
def test_a_variable_that_is_not_set_is_named(monkeypatch, setting):
    monkeypatch.delenv("NO_SUCH_THING", raising=False)
    with pytest.raises(PolicyError, match=rf"^alerts\.{setting}: the environment variable NO_SUCH_THING is not set$"):
        AlertSettings.parse({setting: "env:NO_SUCH_THING"})
    monkeypatch.setenv("NO_SUCH_THING", " ")
    with pytest.raises(PolicyError, match="NO_SUCH_THING is empty"):
        AlertSettings.parse({setting: "env:NO_SUCH_THING"})


# ---- settings
# ---------------------------------------------------------------------------------------------------------

HOOK = f"https://alerts.example/{CANARY}"
BAD_SETTINGS: list[tuple[Any, str]] = [
    ({"slack_webhok": HOOK}, "alerts.slack_webhok: no such setting; did you mean 'slack_webhook'?"),
    ({"zzz": 1}, "alerts.zzz: no such setting; known: slack_webhook, pagerduty_key, webhook, log, call,"),
    ({HOOK: True}, "alerts.https://alerts.example/***: no such setting"),
    ({7: True}, "alerts.int: no such setting"),
    (
        HOOK,
        (
            "alerts: give a table such as {'slack_webhook': 'env:SLACK_WEBHOOK'}, a function, or a list of these, "
            "not a str"
        ),
    ),
    (7, "alerts: give a table"),
    ([{"log": True}, [print]], "alerts[1]: give a table"),
    (
        [{"log": True}, {"webhook": {"url": HOOK, "secrets": CANARY}}],
        "alerts[1].webhook.secrets: no such setting; did you mean 'secret'?",
    ),
    ({"slack_webhook": b"x"}, "alerts.slack_webhook: must be a text, not a bytes"),
    ({"slack_webhook": ""}, "alerts.slack_webhook: is empty"),
    ({"slack_webhook": "env:"}, "alerts.slack_webhook: env: must be followed by the name"),
    ({"slack_webhook": "env:A B"}, "alerts.slack_webhook: env: must be followed by the name"),
    ({"webhook": {"secret": CANARY}}, "alerts.webhook.url: missing"),
    ({"webhook": {"url": HOOK, "secret": "canary0"}}, "alerts.webhook.secret: shorter than 16 characters"),
    (
        {"webhook": {"url": HOOK, "headers": [CANARY]}},
        "alerts.webhook.headers: give a table of names and values, not a list",
    ),
    ({"webhook": {"url": HOOK, "headers": {"Host": CANARY}}}, "alerts.webhook.headers.Host: is set by RunGuard itself"),
    ({"webhook": {"url": HOOK, "headers": {"X-RunGuard-Signature": CANARY}}}, "is set by RunGuard itself"),
    (
        {"webhook": {"url": HOOK, "headers": {"X-A": f"{CANARY}\r\nX-B: 1"}}},
        "alerts.webhook.headers.X-A: must be one line of printable ASCII",
    ),
    (
        {"webhook": {"url": HOOK, "headers": {f"X {CANARY}": "1"}}},
        "alerts.webhook.headers: has a name that no header can have",
    ),
    ({"pagerduty_key": f"{CANARY} "}, "alerts.pagerduty_key: must be the integration's routing key"),
    ({"pagerduty_url": HOOK}, "alerts.pagerduty_url: does nothing without pagerduty_key"),
    ({"pagerduty_url": HOOK, "log": True}, "alerts.pagerduty_url: does nothing without pagerduty_key"),
    ({"timeout_seconds": 1}, "alerts: names no receiver; add one of slack_webhook,"),
    ({"log": "loud"}, "alerts.log: must be true, false or one of debug, info, warning, error, critical"),
    ({"log": 1}, "alerts.log: must be true"),
    ({"call": "package.module:function"}, "alerts.call: must be a function of one alert, not a str"),
    ({"log": True, "allow_private": "yes"}, "alerts.allow_private: must be true or false, not a str"),
    ({"log": True, "timeout_seconds": "2"}, "alerts.timeout_seconds: must be a number of seconds, not a str"),
    ({"log": True, "timeout_seconds": True}, "alerts.timeout_seconds: must be a number of seconds, not a bool"),
    ({"log": True, "timeout_seconds": 0}, "alerts.timeout_seconds = 0: must be more than 0 and at most 60 seconds"),
    ({"log": True, "deadline_seconds": float("nan")}, "alerts.deadline_seconds = nan: must be more than 0"),
    ({"log": True, "deadline_seconds": float("inf")}, "alerts.deadline_seconds = inf: must be more than 0"),
    (
        {"log": True, "timeout_seconds": 5, "deadline_seconds": 3},
        "alerts.timeout_seconds = 5: one attempt cannot take longer than deadline_seconds = 3",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=[message[:60] for _, message in BAD_SETTINGS])
def test_bad_settings_are_named_and_no_secret_is_shown(settings, message):
    with pytest.raises(PolicyError) as raised:
        AlertSettings.parse(settings)
    assert message in str(raised.value)
    assert CANARY not in str(raised.value)
    assert raised.value.__context__ is None or CANARY not in repr(raised.value.__context__)


def test_settings_have_defaults_and_names():
    settings = AlertSettings.parse(
        [
            {"slack_webhook": HOOK, "pagerduty_key": CANARY, "webhook": HOOK, "log": True, "call": print},
            {"webhook": HOOK, "log": False},
        ]
    )
    assert [receiver.name for receiver in settings.receivers] == [
        "slack",
        "pagerduty",
        "webhook",
        "log",
        "call",
        "webhook-2",
    ]
    assert {(receiver.timeout_s, receiver.deadline_s) for receiver in settings.receivers} == {(2.0, 60.0)}
    assert str(settings.receivers[1].endpoint) == "https://events.pagerduty.com/***"
    assert AlertSettings.parse(settings) is settings
    assert settings.to_dict()["receivers"][2]["url"] == "https://alerts.example/***"
    assert AlertSettings.parse({"log": True, "deadline_seconds": 1}).receivers[0].timeout_s == 1.0


@pytest.mark.parametrize("nothing", [None, {}, [], {"log": False}, {"slack_webhook": None}])
def test_nobody_to_tell_is_fine(nothing):
    settings = AlertSettings.parse(nothing)
    assert not settings
    told = Alerts(settings)
    told.send(alert())
    assert told.flush(0)
    assert told.counts == {}


def test_settings_and_alerts_are_frozen():
    with pytest.raises(AttributeError):
        AlertSettings().receivers = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        alert().text = "other"  # type: ignore[misc]


def test_an_alert_keeps_its_facts_to_itself():
    facts = {"calls": 1}
    one = alert(facts=facts)
    facts["calls"] = 2
    assert one.facts == {"calls": 1}
    assert hash(one) == hash(alert(facts={}))
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize("wrong", [{"kind": "other"}, {"severity": "loud"}, {"key": ""}, {"key": 7}, {"text": None}])
def test_an_alert_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        alert(**wrong)


# ---- hostile facts
# ----------------------------------------------------------------------------------------------------


class Hostile:
    def __str__(self) -> str:
        raise SystemExit("never asked")

    __repr__ = __str__


def test_every_fact_becomes_bounded_json(serve):
    server = serve()
    told = alerts(webhook=server.url())
    facts: dict[Any, Any] = {
        "nan": float("nan"),
        "inf": float("-inf"),
        "huge": 10**10_000,
        "object": Hostile(),
        "list": [1],
        "lone": "\ud800",
        7: "seven",
    }
    told.send(
        alert(text="😀" * 5_000, facts=facts | {f"n{n}" + "x" * 500: "😀" * 5_000 for n in range(100)}, at=float("nan"))
    )
    assert sent(told) == {"sent": 1}
    body = server.requests[0][2]
    assert len(body) < 128_000
    got = json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert got["facts"]["nan"] == "nan"
    assert got["facts"]["inf"] == "-inf"
    assert got["facts"]["huge"] == "a number of 33220 bits"
    assert got["facts"]["object"] == "Hostile"
    assert got["facts"]["list"] == "list"
    assert got["facts"]["int"] == "seven"
    assert got["facts"]["facts_left_out"] == len(facts) + 100 - 32
    assert got["at"] == 0.0


# ---- signatures
# -------------------------------------------------------------------------------------------------------


def test_a_signature_is_what_anybody_can_compute():
    """Fixed, because receivers in other languages rely on it; computed with ``openssl dgst -sha256 -hmac``."""
    expected = "v1=6cee4736a889a04e2d81c8397febddeb6db6f8b60d7eacee906bb482211159be"
    assert messages.signature("a-secret-of-16-chars", "1700000000", b'{"v":1}') == expected


def verified(**over: Any) -> bool:
    body = b'{"v":1}'
    good = {
        "secret": SIGNING,
        "timestamp": "1700000000",
        "body": body,
        "signature": messages.signature(SIGNING, "1700000000", body),
        "now": 1_700_000_100.0,
    }
    return verify_signature(**{**good, **over})


def test_a_good_signature_is_verified():
    assert verified()
    assert verified(timestamp=1_700_000_000)
    assert verified(now=1_700_000_300.0)
    assert verified(now=1_700_000_301.0, tolerance_seconds=301)


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": SIGNING + "x"},
        {"timestamp": "1700000001"},
        {"timestamp": "1700000000 "},
        {"timestamp": "-1"},
        {"timestamp": "١٧٠٠٠٠٠٠٠٠"},
        {"timestamp": "9" * 5_000},
        {"timestamp": None},
        {"body": b'{"v":2}'},
        {"body": '{"v":1}'},
        {"signature": ""},
        {"signature": "v1="},
        {"signature": "v1=é"},
        {"signature": None},
        {"now": 1_700_000_301.0},
        {"now": 1_699_999_699.0},
    ],
)
def test_anything_else_is_not(wrong):
    assert verified(**wrong) is False


def test_an_empty_secret_is_no_secret():
    with pytest.raises(ValueError, match="empty"):
        verified(secret="")
