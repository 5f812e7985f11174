"""``runguard dashboard``: the command, and its web application of two pages, two data endpoints and static files.

The page changes nothing and answers only GET. ``gateway_commands`` serves it beside a program.
"""

import errno
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from decimal import Decimal
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final
from urllib.parse import parse_qs

import anyio.to_thread
import click
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runguard.cli.main import DASHBOARD_PORT, CommandError
from runguard.cli.store_commands import look_at
from runguard.core.errors import RunGuardError
from runguard.core.identity import LruDict
from runguard.gateway.serving import BoundedProtocol, configured, listen
from runguard.view.store import BY, StoreView
from runguard.view.story import plain

# ---- the command


def run(store: str | None, port: str, host: str, no_open: bool, as_json: bool) -> None:
    if not address_of(host, "a loopback address, 127.0.0.1 or ::1").is_loopback:
        forward = f"ssh -L {DASHBOARD_PORT}:127.0.0.1:{DASHBOARD_PORT} this-machine"
        raise CommandError(
            f"--host {host}: the page has no users or passwords, so it listens on loopback only (127.0.0.1 or "
            f"::1). From another machine, forward the port: {forward}"
        )
    if port != "auto" and not (port.isdecimal() and int(port) <= 65_535):
        raise CommandError(f"--port {port}: must be a number up to 65535, or auto")
    view, _ = look_at(store)
    do = ", perhaps by another dashboard; choose another one with --port, or pass --port auto for any free one"
    with listening_on(host, 0 if port == "auto" else int(port), do) as listening:
        token = secrets.token_urlsafe(24)
        name, number = listening.getsockname()[:2]
        address = f"http://{f'[{name}]' if ':' in name else name}:{number}/?token={token}"
        text = (
            f"RunGuard dashboard for {view.name}\n\n  {address}\n\nThe link works once, in one browser. Ctrl+C ends it."
        )
        # JSON on one line, because a caller reads it while this process runs
        click.echo(json.dumps({"ok": True, "url": address, "store": view.name}) if as_json else text)
        sys.stdout.flush()
        try:
            if not no_open and has_screen():
                webbrowser.open(address)
            serve(view, token, listening)
        except KeyboardInterrupt:
            pass


def has_screen() -> bool:
    """Return whether there is a screen; without one, a text browser would take over the terminal."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def address_of(host: str, wanted: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise CommandError(f"--host {host}: must be {wanted}") from None


def listening_on(host: str, port: int, do: str) -> socket.socket:
    """Return a socket that listens; ``do`` says what to do about a port in use."""
    try:
        return listen("127.0.0.1" if host == "localhost" else host.strip("[]"), port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} is in use{do}") from None
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror}") from None


# ---- the application


def serve(view: StoreView, token: str, listening: socket.socket) -> None:
    """Serve the page until interrupted."""
    config = configured(make_app(view, token, listening.getsockname()[1]), PageProtocol, keep_alive=5)
    uvicorn.Server(config).run(sockets=[listening])


def make_app(view: StoreView, token: str, port: int) -> Starlette:
    looks, folder = Looks(view), files("runguard.cli.dashboard") / "static"

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
            Mount("/static", StaticFiles(packages=[("runguard.cli.dashboard", "static")])),
        ],
        middleware=[Middleware(Gate, token=token, port=port)],
        exception_handlers={RunGuardError: away},
    )


# ---- limits of connections: a deadline for each request, and how many may be open


class PageProtocol(BoundedProtocol):
    """The limits of a page for one person."""

    request_seconds = 5.0
    most_waiting = 32
    most_open = 128
    log_level = "error"  # do not log refused or broken requests to the terminal


# ---- access control, before everything else
# Only the user who started the dashboard may see it: no other page in the same browser (Origin and Sec-Fetch-Site), no
# foreign name that resolves to this machine (Host), no other user of this machine (the token, which works once, then a
# cookie).

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_OPEN: Final = frozenset({"/static/page.css", "/static/icon.svg"})  # the page of a refusal
_REFUSAL: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>RunGuard: no access</title>
<link rel="icon" href="/static/icon.svg"><link rel="stylesheet" href="/static/page.css"></head>
<body><main class="refusal"><h1>No access</h1><p>{reason}</p></main></body></html>
"""
USED: Final = (
    "The link in the terminal works once, in one browser, and this one does not hold its cookie. Look at the "
    "terminal where "
    "<code>runguard dashboard</code> runs: open the address it printed, or start it again for a new one."
)
ELSEWHERE: Final = (
    "This page cannot be opened from another site. Copy the address from the terminal into the address bar."
)
WRONG_NAME: Final = "This page answers at 127.0.0.1 and localhost only, with the port that the terminal names."


class Gate:
    """Allows only requests of the page itself, in the browser that exchanged the token."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token, self._used = app, token, False
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")} | (
            {"127.0.0.1", "localhost", "[::1]"} if port == 80 else set()
        )
        # browsers share cookies between ports
        self._cookie, self._secret = f"runguard_{port}", secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: the server answers with 403
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if host not in self._hosts:
            return _page(WRONG_NAME, 421)
        if scope["method"] != "GET":
            return PlainTextResponse("This page is read-only.", 405, {"Allow": "GET"})
        if headers.get("upgrade", "").lower() == "websocket":
            return PlainTextResponse("This page has no websocket.", 400, {"Connection": "close"})
        if (
            headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
            or headers.get("origin", f"http://{host}").lower() != f"http://{host}"
        ):
            return _page(ELSEWHERE, 403)
        if scope["path"] in _OPEN:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._is_known(headers):
            return RedirectResponse(scope["path"], 303) if given else None
        if (
            scope["path"] == "/"
            and given
            and not self._used
            and hmac.compare_digest(given.encode(), self._token.encode())
        ):
            self._used = True
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, self._secret, path="/", httponly=True, samesite="strict")
            return answer
        return _page(USED, 403)

    def _is_known(self, headers: Headers) -> bool:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._secret.encode())


def _page(reason: str, status: int) -> Response:
    return HTMLResponse(_REFUSAL.format(reason=reason), status)


# ---- the data of the page, from a view of the store

RANGES: Final = {"15m": 900.0, "1h": 3_600.0, "1d": 86_400.0, "7d": 604_800.0, "30d": 2_592_000.0}
_FRESH_S: Final = 1.0
_RESTS: Final = 5  # slow reads are made less often, because runs need the store more
_LONGEST_REST_S: Final = 20.0
_ANSWERS_KEPT: Final = 64
_ROWS: Final = 50


class Looks:
    """Reads the store once for all open browsers, and caches results for a moment. Blocking: call it on threads."""

    def __init__(self, view: StoreView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._kept = LruDict[tuple[str, ...], tuple[float, Any]](_ANSWERS_KEPT)

    def overview(self, by: str, within: str) -> dict[str, Any]:
        view = self._view
        now = self._once(("now",), view.now)
        budgets = self._once(("budgets",), lambda: view.budgets(limit=_ROWS + 1))
        running = self._once(("running",), view.running)
        trips, costs = self._once(("trips",), self._trips)
        spend = self._once(("spend", by, within), lambda: view.spend(now - RANGES[within], now, by))
        stops, breakers = self._once(("control",), lambda: (view.stops(), view.breakers()))
        return {
            "store": view.name,
            "now": now,
            "spend": plain(spend),
            "budgets": plain(budgets[:_ROWS]),
            "budgets_left_out": len(budgets) > _ROWS,
            "running": plain(running[:_ROWS]),
            "running_left_out": max(len(running) - _ROWS, 0),
            "trips": [{**_line(trip), "usd": plain(costs[trip["id"]])} for trip in trips[:_ROWS]],
            "trips_left_out": len(trips) > _ROWS,
            "stops": [
                {"scope": stop.scope, "actor": stop.actor, "reason": stop.reason, "at": stop.at} for stop in stops
            ],
            "breakers": plain(breakers),
            "unreadable": view.unreadable.total,
            "is_empty": not (budgets or running or trips or view.calls_known),
        }

    def _trips(self) -> tuple[list[dict[str, Any]], dict[str, Decimal | None]]:
        trips = self._view.trips(_ROWS + 1)
        return trips, self._view.costs(trips[:_ROWS])

    def story(self, trip_id: str) -> dict[str, Any] | None:
        story = self._once(("story", trip_id), lambda: self._view.story(trip_id))
        return (
            None
            if story is None
            else {"store": self._view.name, "now": self._once(("now",), self._view.now), **plain(story)}
        )

    def _once(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or time.monotonic() >= kept[0]:
                begin = time.monotonic()
                try:
                    answer = ask()
                except RunGuardError as error:  # waiting callers get the same error without another read
                    answer = error
                end = time.monotonic()
                kept = self._kept[key] = end + max(_FRESH_S, min(_RESTS * (end - begin), _LONGEST_REST_S)), answer
                self._kept.move_to_end(key)
        if isinstance(kept[1], RunGuardError):
            raise RunGuardError(str(kept[1]))
        return kept[1]


def _line(trip: dict[str, Any]) -> dict[str, Any]:
    """Return a trip as one line of the list."""
    names = (
        "id",
        "rule",
        "tool",
        "app",
        "user_id",
        "agent_path",
        "model_calls",
        "estimated",
        "at",
        "shadow",
        "branch",
        "message",
    )
    return {name: trip.get(name) for name in names}
