"""A provider on this machine: real HTTP, answers by a script, and the provider's books. Each provider's wire format is
a subclass.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An answer that the provider works on and bills, or with a status a refusal that costs nothing."""

    text: str = "fine"
    call: tuple[str, Json] | None = None  # a tool and its arguments
    input: int = 1_000
    output: int = 250
    status: int = 200
    chunks: int = 4  # pieces that a streamed text comes in
    cut_after: int | None = None  # events after which the connection of a stream breaks
    usage: Json | None = None  # what the provider reports instead of input and output

    @property
    def pieces(self) -> list[str]:
        size = max(1, -(-len(self.text) // self.chunks))
        return [self.text[start : start + size] for start in range(0, len(self.text), size)]


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    path: str
    body: Json
    headers: dict[str, str]


class JsonHandler(BaseHTTPRequestHandler):
    """Answers with JSON, or with events in chunks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that its parent gave it
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client hung up
            self.close_connection = True

    def body(self) -> Json:
        found: Json = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return found

    def send(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class _Http(ThreadingHTTPServer):
    request_queue_size = 256  # a client whose connection is not taken at once tries again only after a second
    daemon_threads = True
    block_on_close = False


class LocalServer:
    """A server on a free port, with a thread of its own."""

    def __init__(self, handler: type[JsonHandler]) -> None:
        self._http = _Http(("127.0.0.1", 0), type("Handler", (handler,), {"provider": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), name="provider", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


class SseServer(LocalServer):
    """The script is a list of replies, of which the last repeats, or a function of (n, request) with n from 1."""

    paths: tuple[str, ...] = ()
    keys: tuple[tuple[str, str], ...] = ()  # headers, and what one of them has to be

    def __init__(self) -> None:
        self._script: Callable[[int, Asked], Reply] = lambda n, request: Reply()
        self._lock = threading.Lock()
        self.requests: list[Asked] = []
        self.billed: list[Reply] = []
        super().__init__(_Handler)

    def script(self, *replies: Reply) -> None:
        self._script = lambda n, request: replies[min(n, len(replies)) - 1]

    def answer_by(self, decide: Callable[[int, Asked], Reply]) -> None:
        self._script = decide

    def arrived(self, request: Asked) -> Reply:
        with self._lock:
            self.requests.append(request)
            reply = self._script(len(self.requests), request)
            if reply.status == 200:
                self.billed.append(reply)
        return reply

    def number(self, request: Asked) -> int:
        """The place of a request among all that came, from 1."""
        with self._lock:
            return next(number for number, one in enumerate(self.requests, 1) if one is request)

    # ---- the wire format --------------------------------------------------------------------------------------------

    def whole(self, request: Asked, reply: Reply) -> Json:
        raise NotImplementedError

    def events(self, request: Asked, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """Names, "" where the format has none, and data."""
        raise NotImplementedError


class _Handler(JsonHandler):
    provider: SseServer

    def do_POST(self) -> None:
        body = self.body()
        path = self.path.partition("?")[0]
        wrong = (
            404
            if path not in self.provider.paths
            else 0
            if any(self.headers.get(name) == key for name, key in self.provider.keys)
            else 401
        )
        if wrong:
            self.send(wrong, {"error": {"type": "invalid_request_error", "message": path}})
            return
        request = Asked(path, body, {header.lower(): value for header, value in self.headers.items()})
        reply = self.provider.arrived(request)
        if reply.status != 200:
            self.send(
                reply.status, {"type": "error", "error": {"type": "rate_limit_error", "message": "later", "code": None}}
            )
        elif body.get("stream"):
            self._stream(list(self.provider.events(request, reply)), reply)
        else:
            self.send(200, self.provider.whole(request, reply))

    def _stream(self, events: Sequence[tuple[str, Json | str]], reply: Reply) -> None:
        self.begin_stream()
        for number, (name, data) in enumerate(events):
            if number == reply.cut_after:
                self.hang_up()
                return
            shown = data if isinstance(data, str) else json.dumps(data)
            self.event((f"event: {name}\n" if name else "") + f"data: {shown}\n\n")
        self.end_stream()
