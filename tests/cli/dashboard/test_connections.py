"""Connections that send too little, too slowly or ask for something else, on the real server."""

import base64
import http.client
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.kit.dashboards import Served
from tests.kit.guarded_runs import guard

Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def dashboard(store: str, served: Callable[..., Served]) -> Iterator[Served]:
    """One that has said nothing on its terminal by its end."""
    guard(store).guard.check_store()
    one = served(store)
    yield one
    one.process.send_signal(signal.SIGINT)
    _, complaints = one.process.communicate(timeout=20)
    assert complaints == ""


@pytest.fixture
def connect(dashboard: Served) -> Iterator[Connect]:
    opened: list[socket.socket] = []

    def begin(data: bytes) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", dashboard.port), timeout=30)
        opened.append(link)
        link.sendall(data)
        return link

    yield begin
    for link in opened:
        link.close()


def head(dashboard: Served, *lines: str, path: str = "/") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{dashboard.port}", *lines]).encode() + b"\r\n"


def status(dashboard: Served) -> int:
    link = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=15)
    link.request("GET", "/")
    answer = link.getresponse().status
    link.close()
    return answer


def is_closed(link: socket.socket) -> bool:
    """Whether the server has ended it; a reset counts as well."""
    if not select.select([link], [], [], 0)[0]:
        return False
    try:
        return link.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


@pytest.mark.parametrize("version", ["13", "8", "none"])
def test_a_websocket_is_refused_plainly(dashboard: Served, connect: Connect, version: str) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = [
        "Connection: keep-alive, Upgrade",
        "Upgrade: WebSocket",
        f"Sec-WebSocket-Version: {version}",
        f"Sec-WebSocket-Key: {key}",
    ]
    for path in ("/", "/api/overview", "/ws"):
        link = connect(head(dashboard, *upgrade, path=path) + b"\r\n")
        answer = b""
        while piece := link.recv(4_096):  # it closes the connection, too
            answer += piece
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert answer.endswith(b"This page has no websocket.")
    assert status(dashboard) == 403


def test_bytes_that_drip_in_do_not_put_it_off(dashboard: Served, connect: Connect) -> None:
    link = connect(head(dashboard))
    for _ in range(100):
        time.sleep(0.25)
        try:
            link.sendall(b"X-Slow: a\r\n")
        except ConnectionError:
            break
        if is_closed(link):
            break
    else:
        pytest.fail("it was open for 25 seconds")


def test_half_requests_are_limited_in_number_and_keep_nobody_out(dashboard: Served, connect: Connect) -> None:
    links = [connect(b"GET / HT") for _ in range(300)]
    assert status(dashboard) == 403, "a whole request is answered beside them"
    assert sum(not is_closed(link) for link in links) <= 32
    assert status(dashboard) == 403
