"""The web application: two pages, two data endpoints, static files."""

import asyncio
import socket
from importlib.resources import files
from typing import Any, Final

import anyio.to_thread
import h11
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from runguard.core.errors import RunGuardError
from runguard.dashboard.access import Gate
from runguard.dashboard.data import RANGES, Looks
from runguard.view.spend_over_time import BY
from runguard.view.store_view import StoreView

REQUEST_SECONDS: Final = 5.0  # for a complete request
MOST_WAITING: Final = 32  # connections without a complete request; one more closes the oldest
MOST_OPEN: Final = 128  # all connections; one more is closed at once


class BoundedProtocol(H11Protocol):
    """uvicorn's own protocol with a deadline for each request."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Connections closed just now are still listed until the next turn of the event loop.
        still_open = [
            one for one in self.connections if isinstance(one, BoundedProtocol) and not one.transport.is_closing()
        ]
        if len(still_open) > MOST_OPEN:
            transport.abort()
            return
        self._wait()
        waiting = [(one._deadline.when(), one) for one in still_open if one._deadline is not None]
        if len(waiting) > MOST_WAITING:
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
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def make_app(view: StoreView, token: str, port: int) -> Starlette:
    looks, folder = Looks(view), files("runguard.dashboard") / "static"

    def page(name: str) -> Any:
        text = (folder / name).read_text(encoding="utf-8")

        async def answer(_: Request) -> Response:
            return HTMLResponse(text)

        return answer

    async def overview(request: Request) -> Response:
        by, within = request.query_params.get("by", "app"), request.query_params.get("range", "1h")
        if by not in BY or within not in RANGES:
            return JSONResponse({"error": f"by is one of {', '.join(BY)}; range is one of {', '.join(RANGES)}"}, 400)
        return JSONResponse(await anyio.to_thread.run_sync(looks.overview, by, within))

    async def story(request: Request) -> Response:
        found = await anyio.to_thread.run_sync(looks.story, request.path_params["trip"])
        if found is None:
            return JSONResponse({"error": "no such trip in this store; it may have been purged"}, 404)
        return JSONResponse(found)

    async def away(_: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 503)

    return Starlette(
        routes=[
            Route("/", page("overview.html"), methods=["GET"]),
            Route("/trips/{trip}", page("story.html"), methods=["GET"]),
            Route("/api/overview", overview, methods=["GET"]),
            Route("/api/trips/{trip}", story, methods=["GET"]),
            Mount("/static", StaticFiles(packages=[("runguard.dashboard", "static")])),
        ],
        middleware=[Middleware(Gate, token=token, port=port)],
        exception_handlers={RunGuardError: away},
    )


def serve(view: StoreView, token: str, listening: socket.socket) -> None:
    """Until interrupted."""
    config = uvicorn.Config(
        make_app(view, token, listening.getsockname()[1]),
        http=BoundedProtocol,
        ws="none",
        log_level="error",  # do not log refused or broken requests to the terminal
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])
