"""Access control of the dashboard, before everything else.

Only the user who started the dashboard may see it: no other page in the same browser
(Origin and Sec-Fetch-Site), no foreign name that resolves to this machine (Host), no other user of this machine (the
token, which works once, then a cookie). The page changes nothing and answers only GET.
"""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
