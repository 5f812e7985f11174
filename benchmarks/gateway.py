"""What the gateway adds to a request and to each piece of a stream, beside a plain reverse proxy in the same run.

``python benchmarks/gateway.py``: a provider that answers at once, a proxy of the same libraries without a guard, and
the gateway, on loopback. Requests go to all three in turn, so that they meet the same machine.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runguard.engine.guard import Guard
from runguard.gateway.access import Upstreams
from runguard.gateway.proxy import Gateway
from runguard.gateway.serving import listen, served_in_background
from runguard.policy.settings import Policy

MODEL = "a-model"
PATH = "/v1/chat/completions"
HEAD = {"id": "c", "object": "chat.completion.chunk", "model": MODEL}
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 250, "total_tokens": 1_250}


def provider(chunks: int) -> Starlette:
    """A model that answers at once, whole or in so many pieces."""
    message = {"role": "assistant", "content": "fine"}
    whole = {**HEAD, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}
    delta: dict[str, Any] = {**HEAD, "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
    piece = f"data: {json.dumps(delta)}\n\n".encode()
    end = f"data: {json.dumps({**HEAD, 'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n".encode()

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(chunks):
            yield piece
        yield end

    async def answer(request: Request) -> Response:
        body = await request.json()
        return (
            StreamingResponse(stream(), media_type="text/event-stream") if body.get("stream") else JSONResponse(whole)
        )

    return Starlette(routes=[Route(PATH, answer, methods=["POST"])])


def plain_proxy(upstream: str) -> tuple[Starlette, httpx.AsyncClient]:
    """The shortest reverse proxy on the same libraries."""
    client = httpx.AsyncClient(timeout=None)

    async def forward(request: Request) -> Response:
        body = await request.body()
        asked = httpx.Request("POST", upstream + PATH, headers={"content-type": "application/json"}, content=body)
        response = await client.send(asked, stream=True)
        kind = response.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            return Response(await response.aread(), response.status_code, {"content-type": kind})

        async def pieces() -> AsyncIterator[bytes]:
            async for chunk in response.aiter_raw():
                yield chunk
            await response.aclose()

        return StreamingResponse(pieces(), response.status_code, {"content-type": kind})

    return Starlette(routes=[Route(PATH, forward, methods=["POST"])]), client


async def nothing() -> None:
    """There is nothing to close."""


def serve(open_until_end: ExitStack, app: Any, close: Any = nothing) -> str:
    listening = listen("127.0.0.1", 0)
    open_until_end.enter_context(served_in_background(app, listening, close))
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def history(turns: int) -> list[dict[str, Any]]:
    """A conversation with tool calls, as a coding agent sends it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn in range(turns):
        call = {"id": f"c-{turn}", "type": "function", "function": {"name": "read", "arguments": f'{{"page": {turn}}}'}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c-{turn}", "content": f"page {turn}: " + "words of a page " * 100},
        ]
    return messages


async def one(client: httpx.AsyncClient, url: str, body: bytes) -> float:
    begin = time.perf_counter()
    async with client.stream("POST", url + PATH, content=body, headers={"content-type": "application/json"}) as answer:
        async for _ in answer.aiter_raw():
            pass
    return (time.perf_counter() - begin) * 1_000


async def measure(urls: Sequence[str], bodies: Sequence[bytes], at_once: int) -> list[float]:
    """The median milliseconds of a request to each address, ``at_once`` of them together."""
    took: list[list[float]] = [[] for _ in urls]
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        for start in range(0, len(bodies), at_once):
            for place, url in enumerate(urls):
                some = [one(client, url, body) for body in bodies[start : start + at_once]]
                took[place] += await asyncio.gather(*some)
    return [statistics.median(one) for one in took]


def asked(number: int, turns: int, *, stream: bool) -> bytes:
    """A request of a conversation that grows; of a conversation of its own where it has one turn."""
    messages = history(turns + number if turns > 1 else turns)
    if turns == 1:
        messages[0] = {"role": "user", "content": f"go {number}"}
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 300, "stream": stream}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=500)
    options = parser.parse_args()
    with ExitStack() as open_until_end:
        upstream = serve(open_until_end, provider(options.chunks))
        app, client = plain_proxy(upstream)
        proxy = serve(open_until_end, app, client.aclose)
        policy = Policy.build(prices={MODEL: {"input": 1, "output": 10}}, max_usd=100)
        gateway = Gateway(Guard(policy), upstreams=Upstreams({"openai": f"{upstream}/v1"}))
        guarded = serve(open_until_end, gateway, gateway.aclose)
        urls = (upstream, proxy, guarded)
        asyncio.run(measure(urls, [asked(n, 1, stream=False) for n in range(20)], 1))  # warm up
        print(f"{'':34}{'provider':>10}{'proxy':>10}{'gateway':>10}  gateway / proxy")
        for name, turns, stream, at_once, count in (
            ("a request, 1 turn", 1, False, 1, options.requests),
            ("a request of 100 turns or more", 100, False, 1, options.requests // 3),
            (f"a stream of {options.chunks} pieces", 1, True, 1, options.requests // 10),
            (f"200 streams of {options.chunks} pieces at once", 1, True, 200, 200),
        ):
            bodies = [asked(n, turns, stream=stream) for n in range(count)]
            direct, plain, ours = asyncio.run(measure(urls, bodies, at_once))
            print(f"{name:34}{direct:8.2f}ms{plain:8.2f}ms{ours:8.2f}ms  {ours / plain:.2f}", end="")
            print(f"   {(ours - plain) * 1_000 / options.chunks:.1f} µs a piece" if stream and at_once == 1 else "")


if __name__ == "__main__":
    main()
