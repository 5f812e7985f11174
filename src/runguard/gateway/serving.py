"""Serves an application over HTTP with bounded connections: the gateway, and the dashboard's page."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar, Final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import HANDLED_SIGNALS

_START_S: Final = 10.0
_STOP_S: Final = 10.0


class BoundedProtocol(H11Protocol):
    """uvicorn's own protocol with a deadline for each request, and limits on how many connections are open."""

    request_seconds: ClassVar[float] = 120.0  # for a complete request, of which a large body takes its time
    most_waiting: ClassVar[int] = 512  # connections without a complete request; one more closes the oldest
    most_open: ClassVar[int] = 4_096  # all connections; one more is closed at once
    log_level: ClassVar[str] = "critical"  # the gateway logs its own faults, and a program may have the terminal

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Connections closed just now are still listed until the next turn of the event loop.
        still_open = [
            one for one in self.connections if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]
        if len(still_open) > self.most_open:
            transport.abort()
            return
        self._wait()
        waiting = [(one._deadline.when(), one) for one in still_open if one._deadline is not None]
        if len(waiting) > self.most_waiting:
            min(waiting, key=lambda entry: entry[0])[1].transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """More bytes do not move the deadline."""
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.request_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def configured(
    app: ASGIApp, protocol: type[BoundedProtocol] = BoundedProtocol, *, keep_alive: int = 75
) -> uvicorn.Config:
    """Return the settings of a server that logs no request and adds no header of its own."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level=protocol.log_level,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=1,
    )


async def serve(app: ASGIApp, listening: socket.socket, close: Callable[[], Awaitable[None]]) -> None:
    """Serve until a signal asks to end, then call ``close`` on the same event loop."""
    try:
        await _Ending(configured(app)).serve(sockets=[listening])
    finally:
        await close()


class _Ending(uvicorn.Server):
    """A server that returns after a signal. uvicorn sends it again, and the process would die with calls unbooked."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Quiet(uvicorn.Server):
    """A server that leaves the signals of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def served_in_background(
    app: ASGIApp,
    listening: socket.socket,
    close: Callable[[], Awaitable[None]],
    protocol: type[BoundedProtocol] = BoundedProtocol,
) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve on a thread of its own while the block runs. Gives the event loop of that thread."""
    server = _Quiet(configured(app, protocol))
    loops: list[asyncio.AbstractEventLoop] = []
    ready = threading.Event()

    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        asyncio.get_running_loop().call_soon(ready.set)  # connections wait in the socket until it accepts
        try:
            await server.serve(sockets=[listening])
        finally:
            await close()

    thread = threading.Thread(target=asyncio.run, args=(work(),), name="runguard-gateway", daemon=True)
    thread.start()
    ready.wait(_START_S)
    try:
        yield loops[0]
    finally:
        server.should_exit = True
        thread.join(_STOP_S)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with the protocol named, asyncio sends small pieces at once; without it they wait 40 ms for the other side
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # allows a port that was just closed; a port in use is still refused
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1_024)
    except OSError:
        made.close()
        raise
    return made
