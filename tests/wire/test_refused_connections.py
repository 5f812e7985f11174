"""Real clients and a provider that is not there: nothing was sent, so nothing is billed. A connection that is lost
later may have been billed.
"""

import asyncio
import socket
import struct
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import httpx
import pytest
from google.adk.agents import LoopAgent
from google.adk.models import Gemini
from google.genai import Client, types

import runguard
from runguard import Budget
from runguard.adk import GuardedLlm
from runguard.testing import assert_stopped
from tests.kit.money import agent, figures
from tests.kit.wire import CALL_USD, FLASH, forgive, guard, play

from .conftest import MODEL, HttpxGemini

Ask = Callable[..., Any]
NOTHING = (Decimal(0), 0)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Resetting:
    """Takes connections, reads the request and resets them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port, self.requests = self._socket.getsockname()[1], 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._socket.accept()
            except OSError:
                return
            with line:
                if line.recv(65_536):
                    self.requests += 1
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


@pytest.fixture
def resetting() -> Iterator[Resetting]:
    server = Resetting()
    yield server
    server.close()


@pytest.fixture
async def models() -> AsyncIterator[Callable[..., Gemini]]:
    made: list[Gemini] = []

    def make(port: int, transport: str = "httpx", **options: Any) -> Gemini:
        kind = HttpxGemini if transport == "httpx" else Gemini
        made.append(kind(model=MODEL, base_url=f"http://127.0.0.1:{port}", **options))
        return made[-1]

    yield make
    for model in made:
        await model.api_client.aio.aclose()
        model.api_client.close()


def taken(guarded: Any) -> tuple[Decimal, int]:
    spent = guarded.spend()
    return spent["usd"], spent["tokens"]


# ---- agents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["unary", "sse"])
async def test_ten_refused_connections_leave_the_budget_as_it_was(models: Callable[..., Gemini], mode: str) -> None:
    """A cap that an estimate for each of three attempts would have used up."""
    plugin = guard(budgets=[Budget(usd=CALL_USD * 3, per="app"), Budget(tokens=3_750, per="app", window="1d")])
    model = models(closed_port())
    for turn in range(10):
        result = await play(agent("a", model), session_id=f"s{turn}", plugins=[plugin], mode=mode, catch=True)
        assert isinstance(result.error, httpx.ConnectError)
    assert taken(plugin) == NOTHING
    assert plugin.spend()["calls"] == 10
    assert {status.unit: status.spent for status in plugin.budgets("app:app") if status.window != "month"} == {
        "usd": 0,
        "tokens": 0,
    }


async def test_a_connection_that_the_default_transport_could_not_make_costs_nothing(
    models: Callable[..., Gemini], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over aiohttp the client connects a second time by itself, after a pause."""
    monkeypatch.setattr("random.randint", lambda least, most: least)
    plugin = guard(max_usd=1)
    result = await play(agent("a", models(closed_port(), "default")), plugins=[plugin], catch=True)
    assert result.error is not None
    assert (figures(plugin), taken(plugin)) == ((1, 0, Decimal(0)), NOTHING)


async def test_each_attempt_counts_as_a_model_call(models: Callable[..., Gemini]) -> None:
    plugin = guard(max_model_calls=4)
    hopeful = agent("a", models(closed_port()), on_model_error_callback=forgive)
    result = await play(LoopAgent(name="loop", sub_agents=[hopeful], max_iterations=10), plugins=[plugin])
    assert assert_stopped(result, "model_calls").model_calls == 4
    assert (plugin.spend()["calls"], *taken(plugin)) == (4, Decimal(0), 0)


async def test_a_connection_that_is_reset_is_booked(models: Callable[..., Gemini], resetting: Resetting) -> None:
    plugin = guard(max_usd=1)
    await play(agent("a", models(resetting.port)), plugins=[plugin], catch=True)
    assert resetting.requests == 1
    calls, estimated, usd = figures(plugin)
    assert (calls, estimated) == (1, 1)
    assert usd > 0


async def test_a_client_that_retries_may_have_got_further_before(models: Callable[..., Gemini]) -> None:
    """google-genai retries read time-outs too, and reports only its last attempt."""
    plugin = guard(max_usd=1)
    retries = types.HttpRetryOptions(attempts=2, initial_delay=0.01, max_delay=0.01)
    await play(agent("a", models(closed_port(), retry_options=retries)), plugins=[plugin], catch=True)
    assert figures(plugin)[:2] == (1, 1)
    assert figures(plugin)[2] > 0


async def test_a_guarded_model_that_cannot_connect_costs_nothing(models: Callable[..., Gemini]) -> None:
    guarded = GuardedLlm(models(closed_port()), prices={MODEL: FLASH}, tokens=lambda request: 1_000, max_usd=CALL_USD)
    for _ in range(3):
        result = await play(agent("a", guarded), catch=True)
        assert isinstance(result.error, httpx.ConnectError)
    assert (guarded.guard.accounts.spend()["calls"], guarded.guard.accounts.spend()["usd"]) == (3, 0)


# ---- functions ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(kind: str, url: str, retries: int = 0) -> AsyncIterator[Ask]:
    """A function that asks a provider at ``url`` with one of the clients."""
    message = [{"role": "user", "content": "go"}]
    if kind == "httpx":
        yield lambda: httpx.post(url, timeout=5)
    elif kind == "requests":
        requests = pytest.importorskip("requests")
        yield lambda: requests.post(url, timeout=5)
    elif kind == "urllib":
        yield lambda: urllib.request.urlopen(url, timeout=5)
    elif kind == "aiohttp":
        async with pytest.importorskip("aiohttp").ClientSession() as session:
            yield lambda: session.post(url)
    elif kind == "google-genai":
        client = Client(http_options=types.HttpOptions(base_url=url))
        yield lambda: client.models.generate_content(model=MODEL, contents="go")
        client.close()
    elif kind == "openai":
        async with pytest.importorskip("openai").AsyncOpenAI(
            api_key="key", base_url=url, max_retries=retries
        ) as openai:
            yield lambda: openai.chat.completions.create(model=MODEL, messages=message, max_tokens=250)
    elif kind == "anthropic":
        async with pytest.importorskip("anthropic").AsyncAnthropic(
            api_key="key", base_url=url, max_retries=retries
        ) as client:
            yield lambda: client.messages.create(model=MODEL, messages=message, max_tokens=250)
    else:
        litellm = pytest.importorskip("litellm")
        provider = {"api_base": url, "api_key": "key", "max_retries": retries}
        yield lambda: litellm.acompletion(
            model=f"{kind.removeprefix('litellm ')}/{MODEL}", messages=message, max_tokens=250, **provider
        )


PLAIN = ["httpx", "requests", "urllib", "google-genai"]
AWAITED = ["aiohttp", "openai", "anthropic", "litellm openai", "litellm anthropic", "litellm gemini"]
ERRORS = (Exception,)


async def fail(kind: str, ask: Ask, **limits: Any) -> Any:
    """Guard the function and let it fail."""
    keywords = {"prices": {MODEL: FLASH}, "tokens": lambda **_: 1_000, **limits}
    asked = {"model": MODEL, "max_tokens": 250}
    if kind in PLAIN:
        guarded = runguard.guard(lambda model, max_tokens: ask(), **keywords)
        with pytest.raises(ERRORS) as failed:
            await asyncio.to_thread(guarded, **asked)
    else:

        async def call(model: str, max_tokens: int) -> Any:
            return await ask()

        guarded = runguard.guard_async(call, **keywords)
        with pytest.raises(ERRORS) as failed:
            await guarded(**asked)
    assert not isinstance(failed.value, runguard.RunGuardError)
    return guarded


@pytest.mark.parametrize("kind", [*PLAIN, *AWAITED])
async def test_a_function_whose_client_cannot_connect_costs_nothing(kind: str) -> None:
    async with asking(kind, f"http://127.0.0.1:{closed_port()}") as ask:
        guarded = await fail(kind, ask, budget={"max_usd": 1, "max_tokens": 10_000})
    assert (figures(guarded), taken(guarded)) == ((1, 0, Decimal(0)), NOTHING)
    assert guarded.spend()["reserved_usd"] == 0


@pytest.mark.parametrize("kind", [*PLAIN, *AWAITED])
async def test_a_function_whose_connection_is_reset_is_booked(kind: str, resetting: Resetting) -> None:
    async with asking(kind, f"http://127.0.0.1:{resetting.port}") as ask:
        guarded = await fail(kind, ask, budget={"max_usd": 1})
    assert resetting.requests
    assert figures(guarded)[:2] == (1, 1)
    assert figures(guarded)[2] > 0


@pytest.mark.parametrize("kind", ["openai", "anthropic", "litellm openai"])
async def test_a_function_whose_client_retried_is_booked(kind: str) -> None:
    async with asking(kind, f"http://127.0.0.1:{closed_port()}", retries=1) as ask:
        guarded = await fail(kind, ask, budget={"max_usd": 1})
    assert figures(guarded)[:2] == (1, 1)


async def test_a_name_that_does_not_resolve_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    guarded = await fail("httpx", lambda: httpx.post("http://provider.invalid", timeout=5), budget={"max_usd": 1})
    assert (figures(guarded), taken(guarded)) == ((1, 0, Decimal(0)), NOTHING)


async def test_a_connection_that_takes_too_long_costs_nothing() -> None:
    """A server whose queue is full drops what knocks."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            timeout = httpx.Timeout(5, connect=0.1)
            guarded = await fail(
                "httpx", lambda: httpx.post(f"http://127.0.0.1:{port}", timeout=timeout), budget={"max_usd": 1}
            )
        finally:
            for one in waiting:
                one.close()
    assert (figures(guarded), taken(guarded)) == ((1, 0, Decimal(0)), NOTHING)
