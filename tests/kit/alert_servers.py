"""Servers that receive alerts."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from runguard import background
from runguard.alerts import Alert, Alerts, AlertSettings
from runguard.reporting import delivery as sending

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


@pytest.fixture(autouse=True)
def short_pauses_and_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sending, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(sending, "_LONGEST_PAUSE_S", 0.1)
    yield
    assert all(queue.flush(0) for queue in list(background.QUEUES)), (
        "an alert of this test would be tried again during the next one"
    )


def alerts(**settings: Any) -> Alerts:
    return Alerts(AlertSettings.parse(settings))


def sent(told: Alerts, name: str = "webhook") -> dict[str, int]:
    """The counts that are not zero, once everything is done."""
    assert told.flush(PATIENT)
    return {what: number for what, number in told.counts[name].items() if number}


def hang(server: Server, _: BaseHTTPRequestHandler) -> None:
    """Take the request and say nothing."""
    server.release.wait(PATIENT)


HOOK = f"https://alerts.example/{CANARY}"
