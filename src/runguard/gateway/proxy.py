"""The gateway as a web application: one request in, one request to the provider, and the guard between them.

``Gateway`` is an ASGI application. ``gateway/serving`` serves it. Each request to a model is an ``Exchange``:

1. ``Access`` admits it and says who pays; ``Upstreams`` says where it goes.
2. ``Conversations`` finds its run, and shows the rules the tool results in its transcript.
3. The run is asked for permission, as by every adapter. A stop becomes an answer in the format of the provider.
4. The request goes on, byte for byte where it carries no notice and no lower limit, and so does the answer. The call is
   settled before the last byte of its answer leaves: the program may send its next request at once.

Requests that ask no model pass through unread.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, Final

import httpx
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.core.decision import Trip, printable
from runguard.core.identity import LruDict
from runguard.engine.guard import Controls, Guard
from runguard.gateway.access import Access, Refused, Target, Upstreams, agent_of, session_of
from runguard.gateway.conversations import Asked, Call, Conversations, Strand
from runguard.gateway.formats import AnswerReader, Body, Inflater, WireFormat, format_of
from runguard.termination.conditions import Ended

_log: Final = logging.getLogger("runguard")
_BUFFERED: Final = 32_000_000  # bytes of a whole answer that is held back until it is settled
_CONNECT_S: Final = 30.0
_STORED_KEPT: Final = 10_000
_STORED_TOKENS: Final = 128_000  # of a conversation that the provider keeps, where nothing tells its size
_PATHS_KEPT: Final = 100
_SWEEP_S: Final = 30.0
# Headers of one connection, not of a request; and those that httpx sets anew.
_OF_CONNECTION: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect", "accept-encoding"),
    }
)
_OF_ANSWER: Final = _OF_CONNECTION - {"content-length"}
# Paid later, or over a connection that stays open: neither can be reserved.
_UNBOUNDED: Final = re.compile(r"/batches$|:batchGenerateContent$|/realtime(/|$)", re.IGNORECASE)
_MODELS: Final = re.compile(
    r"/(images|audio|videos|threads|runs|interactions|complete|rerank|fine_tuning)(/|$)"
    r"|:\w*(predict|embed|generate|interact)\w*$",
    re.IGNORECASE,
)


@dataclass(slots=True)
class Tally:
    """What passed through, for the summary."""

    requests: int = 0  # of any kind
    calls: int = 0  # of models, that were sent
    refused: int = 0  # of models, that were not sent
    unguarded: int = 0  # that may be paid, and are not understood


class Gateway(Controls):
    """The application. Close it with ``aclose`` on the event loop that served it."""

    def __init__(
        self,
        guard: Guard,
        *,
        access: Access | None = None,
        upstreams: Upstreams | None = None,
        conversations: Conversations | None = None,
        tells_reason: bool = False,
    ) -> None:
        """``tells_reason``: a stop says which limit it met, for programs whose user is the developer."""
        self.guard, self.access, self.upstreams = guard, access or Access(), upstreams or Upstreams()
        self.conversations = conversations or Conversations(guard)
        self.tally, self.tells_reason = Tally(), tells_reason
        self.stored = LruDict[str, int](_STORED_KEPT)  # tokens of what the provider keeps, by its name
        self._sweeper: asyncio.Task[None] | None = None
        self._warned = LruDict[str, None](_PATHS_KEPT)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self.client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), limits=limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        admitted = self.access.admit(scope, headers)
        if isinstance(admitted, Refused):
            await _send_json(send, admitted.status, {"error": {"message": f"RunGuard: {admitted.text}"}})
            return
        self.tally.requests += 1
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        target = self.upstreams.target(admitted, scope["query_string"].decode("latin-1"), headers)
        try:
            await Exchange(self, scope, headers, receive, send, target).run()
        except Exception as error:
            self.guard.faults.note("gateway", error)
            raise

    def note_unguarded(self, path: str) -> None:
        """Count a request that may be paid and is not understood. Logged once for each path."""
        self.tally.unguarded += 1
        if path not in self._warned:
            self._warned[path] = None
            _log.warning("runguard.unguarded: requests to %s pass through: what they cost is not known here", path)

    def saved_usd(self) -> Decimal | None:
        """Return what the refused calls would have cost, at the average of those that were made."""
        spent, calls = self.spend(), self.tally.calls
        if spent["usd"] is None or spent["unpriced_calls"] or not calls:
            return None
        return Decimal(spent["usd"]) * self.tally.refused / calls

    async def _sweep(self) -> None:
        """End idle runs, also while no request comes."""
        while True:
            await asyncio.sleep(min(self.conversations.idle_s / 2, _SWEEP_S))
            self.guard.faults.attempt("gateway", self.conversations.expire)

    async def aclose(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.conversations.end()
        await self.client.aclose()


class Exchange:
    """One request and its answer."""

    def __init__(
        self, gateway: Gateway, scope: Scope, headers: Headers, receive: Receive, send: Send, target: Target
    ) -> None:
        self._gateway, self._guard, self._scope, self._headers = gateway, gateway.guard, scope, headers
        self._receive, self._send, self._target = receive, send, target
        self._query: str = scope["query_string"].decode("latin-1")
        self._has_begun = False  # to answer
        self._left = False  # the client

    async def run(self) -> None:
        """Answer the request. Ends quietly when the client leaves."""
        is_post = self._scope["method"] == "POST"
        wire = format_of(self._target.path) if is_post else None
        try:
            if wire is not None and self._guard.policy.mode != "off":
                await self._guarded(wire)
            elif is_post and _UNBOUNDED.search(self._target.path) and self._guard.must_hold():
                text = "this kind of request is paid later, so that no budget can be reserved for it; it was not sent"
                await self._json(403, {"error": {"message": f"RunGuard: {text}", "type": "runguard_unbounded"}})
            else:
                if is_post and _MODELS.search(self._target.path):
                    self._gateway.note_unguarded(self._target.path)
                await self._pass()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._left or task is None or task.uncancel() > 0:
                raise
        except (_ClientLeftError, _CutError):
            return
        except _TooLargeError:
            text = f"the request is larger than {self._gateway.access.max_body:,} bytes"
            await self._json(413, {"error": {"message": f"RunGuard: {text}", "type": "request_too_large"}})

    # ---- requests to a model ----------------------------------------------------------------------------------------

    async def _guarded(self, wire: WireFormat) -> None:
        raw, encoding = await self._body(), self._headers.get("content-encoding", "").strip().lower()
        body = _parsed(raw, encoding)
        try:
            asked = self._asked(wire, body) if body is not None else None
        except Exception as error:
            self._guard.faults.note("gateway", error)
            asked = None
        if body is None or asked is None:
            await self._unreadable(wire, raw, encoding)
            return
        watcher = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            read = partial(self._described, wire, body)
            strand, reply = await self._gateway.conversations.ask(asked, read)
            if isinstance(reply, Permission):
                call = GuardedCall(self._gateway, strand, reply, wire, body)
                try:
                    await self._forward(call, raw)
                finally:
                    call.fail(None)  # if nothing has closed it
            else:
                self._gateway.tally.refused += 1
                await self._stop(strand, wire, body, reply)
        finally:
            watcher.cancel()

    def _described(self, wire: WireFormat, body: Body) -> ModelRequest:
        hidden, kept, path = 0, wire.stored(body), self._target.path
        if kept:
            known = self._gateway.stored.get(kept)
            limit = self._guard.context_limit(wire.model(body, path), quiet=True)
            hidden = known if known is not None else limit or _STORED_TOKENS
        return wire.request(body, path, hidden)

    def _asked(self, wire: WireFormat, body: Body) -> Asked:
        payer = self._gateway.access.payer(self._headers, self._query)
        return Asked.of(wire, body, payer, agent_of(self._headers), session_of(self._headers))

    async def _unreadable(self, wire: WireFormat, raw: bytes, encoding: str) -> None:
        """Refuse a request that nobody can reserve for, or pass it on where no budget holds."""
        if not self._guard.must_hold():
            self._gateway.note_unguarded(self._target.path)
            await self._pass(raw)
            return
        status, problem = 400, "it is no JSON object"
        if not Inflater(encoding).is_readable:
            status, problem = 415, f"its encoding {printable(encoding)} is unknown: send gzip or none"
        text = f"RunGuard: this request was not sent, because no budget can be reserved for it: {problem}"
        await self._json(status, wire.error("invalid_request_error", text, status))

    async def _forward(self, call: "GuardedCall", raw: bytes) -> None:
        content, headers = raw, self._request_headers()
        changed = call.permission.changed(call.wire.changed, call.body)
        if changed is not call.body:
            content = json.dumps(changed).encode()
            headers = [(name, value) for name, value in headers if name != b"content-encoding"]
        request = httpx.Request(self._scope["method"], self._target.url, headers=headers, content=content)
        self._gateway.tally.calls += 1
        try:
            response = await call.permission.during(self._gateway.client.send(request, stream=True))
        except BaseException as error:
            call.fail(error)
            if (end := call.permission.interrupted) is not None:
                await self._stop(call.strand, call.wire, call.body, end)
            elif isinstance(error, httpx.HTTPError):
                await self._unreachable(call.wire, error)
            else:
                raise
            return
        try:
            await self._answer(call, response)
        finally:
            await asyncio.shield(response.aclose())  # also where the client leaves just now

    async def _answer(self, call: "GuardedCall", response: httpx.Response) -> None:
        if not 200 <= response.status_code < 300:
            call.refused_by_provider(response)
            await self._begin(response)
            await self._relay(response.aiter_raw())
            return
        encoding = response.headers.get("content-encoding", "").lower()
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        reader = AnswerReader(call.wire, encoding, is_stream=is_stream)
        held: list[bytes] = []
        try:
            if is_stream or call.wire.is_streamed(call.body, self._target.path):
                await self._begin(response)
            async for chunk in call.permission.pieces(response.aiter_raw()):
                if reader.feed(chunk):
                    call.answered(reader)
                held.append(chunk)
                if not self._has_begun and reader.size > _BUFFERED:  # too large to hold back
                    await self._begin(response)
                if self._has_begun:  # without events, the newest piece waits: it may be the end
                    last = [] if is_stream else [held.pop()]
                    await self._piece(b"".join(held))
                    held = last
        except BaseException as error:
            call.fail(error, reader)
            if not isinstance(error, httpx.HTTPError):
                raise
            if self._has_begun:
                raise _CutError from error
            await self._unreachable(call.wire, error)
            return
        if (end := call.permission.interrupted) is not None:
            call.fail(None, reader)
            if not self._has_begun:
                await self._stop(call.strand, call.wire, call.body, end)
            elif not is_stream:
                raise _CutError
            else:
                await self._piece(b"" if encoding not in ("", "identity") else call.wire.cut(self._stop_text(end)))
                await self._piece(b"", is_last=True)
            return
        reader.end()
        call.answered(reader)
        if not self._has_begun:
            await self._begin(response)
        await self._piece(b"".join(held), is_last=True)

    def _stop_text(self, end: Trip | Ended) -> str:
        """Return what the program gets as the answer."""
        if not isinstance(end, Trip):
            return end.reason
        tells_reason = self._gateway.tells_reason and self._guard.policy.stop_text is None
        text = self._guard.stop_text(end)
        return f"{text}\n\nRunGuard {end}" if tells_reason else text

    async def _stop(self, strand: Strand, wire: WireFormat, body: Body, end: Trip | Ended) -> None:
        path, text = self._target.path, self._stop_text(end)
        rule = end.rule if isinstance(end, Trip) else "termination"
        headers = [(b"x-runguard-stop", rule.encode("latin-1", "replace"))]
        if self._guard.policy.on_stop == "raise" or wire.asks_for_data(body):  # it cannot be said as a text
            headers.append((b"x-should-retry", b"false"))  # what the clients of OpenAI and Anthropic heed
            await self._json(429, wire.error("runguard_stop", text, 429), headers)
            return
        strand.has_answered = True  # the next request of the program is another turn
        if not wire.is_streamed(body, path):
            await self._json(200, wire.stop(body, path, text), headers)
            return
        if wire.provider == "gemini" and "alt=sse" not in self._query:
            await self._json(200, [wire.stop(body, path, text)], headers)
            return
        headers += [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(200, headers)
        await self._piece(wire.stop_events(body, path, text), is_last=True)

    async def _unreachable(self, wire: WireFormat | None, error: Exception) -> None:
        text = f"RunGuard: the provider cannot be reached: {type(error).__name__}"
        data = wire.error("api_error", text, 502) if wire is not None else {"error": {"message": text}}
        await self._json(502, data)

    # ---- everything else --------------------------------------------------------------------------------------------

    async def _pass(self, content: bytes | AsyncIterator[bytes] | None = None) -> None:
        """Send a request on unread, and its answer back. ``content``: its body, where that has been received."""
        headers = self._request_headers()
        if content is None and ("content-length" in self._headers or "transfer-encoding" in self._headers):
            content = self._chunks()
            if (length := self._headers.get("content-length")) is not None:
                headers.append((b"content-length", length.encode()))
        request = httpx.Request(self._scope["method"], self._target.url, headers=headers, content=content)
        try:
            response = await self._gateway.client.send(request, stream=True)
        except httpx.HTTPError as error:
            await self._unreachable(None, error)
            return
        watcher = asyncio.create_task(self._watch(asyncio.current_task()))
        try:
            await self._begin(response)
            await self._relay(response.aiter_raw())
        finally:
            watcher.cancel()
            await asyncio.shield(response.aclose())  # also where the client leaves just now

    async def _relay(self, chunks: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in chunks:
                await self._piece(chunk)
        except httpx.HTTPError as error:
            raise _CutError from error
        await self._piece(b"", is_last=True)

    # ---- the client -------------------------------------------------------------------------------------------------

    def _request_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers for the provider. Of the encodings of the answer, keep those that can be read here."""
        named = {name.strip().lower() for name in self._headers.get("connection", "").split(",")}
        trusted = self._gateway.access.user_header.lower()
        kept = [
            (name, value)
            for name, value in self._headers.raw
            if (text := name.decode("latin-1")) not in _OF_CONNECTION
            and text not in named
            and not text.startswith("x-runguard-")
            and text != trusted
        ]
        accepts = "gzip" if "gzip" in self._headers.get("accept-encoding", "") else "identity"
        return [*kept, (b"accept-encoding", accepts.encode())]

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise _ClientLeftError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def _body(self) -> bytes:
        most = self._gateway.access.max_body
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise _TooLargeError
        body = bytearray()
        async for chunk in self._chunks():
            body += chunk
            if len(body) > most:
                raise _TooLargeError
        return bytes(body)

    async def _watch(self, task: "asyncio.Task[Any] | None") -> None:
        """Cancel the exchange when the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        if task is not None:
            task.cancel()

    async def _begin(self, response: httpx.Response) -> None:
        headers = [
            (name, value) for name, value in response.headers.raw if name.lower().decode("latin-1") not in _OF_ANSWER
        ]
        await self._start(response.status_code, headers)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _piece(self, chunk: bytes, *, is_last: bool = False) -> None:
        if chunk or is_last:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

    async def _json(self, status: int, data: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self._has_begun = True
        await _send_json(self._send, status, data, headers)


class GuardedCall(Call):
    """The life of one model call at the gateway."""

    def __init__(self, gateway: Gateway, strand: Strand, permission: Permission, wire: WireFormat, body: Body) -> None:
        super().__init__(gateway.conversations, strand, permission, wire)
        self._gateway, self.body = gateway, body

    def answered(self, reader: AnswerReader) -> None:
        """Book the call: its answer is complete."""
        reading = reader.reading
        if reading.usage is None and self.body.get("background") is True:
            super().fail(None)  # it goes on at the provider
            return
        self.settle(reading, reader.said, estimated=reader.lacks_report)
        if reader.name and reading.usage is not None:
            names = filter(None, (reader.name, self.wire.stored(self.body)))
            self._gateway.stored.update(dict.fromkeys(names, reading.usage.input + reading.usage.output))

    def fail(self, error: BaseException | None, reader: AnswerReader | None = None) -> None:
        """Book what has come of a call that failed, or whose answer was cut."""
        if reader is not None and reader.is_final:
            self.answered(reader)
            return
        if isinstance(error, httpx.RequestError):
            error.request = httpx.Request("POST", "http://provider/")  # its headers tell of retries of the client
        super().fail(error, reader)

    def refused_by_provider(self, response: httpx.Response) -> None:
        """Close a call that the provider answered with an error, or with the address of another place."""
        if response.status_code < 400:
            self.permission.release()
        request = httpx.Request("POST", "http://provider/")
        super().fail(httpx.HTTPStatusError("refused", request=request, response=response))


class _TooLargeError(Exception):
    """The body of a request is beyond the limit."""


class _CutError(Exception):
    """The provider has broken off its answer. The server closes the connection of an answer that is not complete."""


class _ClientLeftError(Exception):
    """The client went away in the middle of its request."""


def _parsed(raw: bytes, encoding: str) -> Body | None:
    if encoding:
        inflater = Inflater(encoding.lower())
        raw = inflater.feed(raw)
        if not inflater.is_readable:
            return None
    with suppress(ValueError, RecursionError):
        data = json.loads(raw)
        return data if isinstance(data, dict) else None
    return None


async def _send_json(send: Send, status: int, data: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps(data).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
