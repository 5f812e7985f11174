"""The stream helpers of Anthropic's and OpenAI's own clients, ``with client.messages.stream(...) as stream``, and the
streams of LiteLLM. Real clients, real HTTP.
"""

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any

import pytest

import runguard
from tests.kit.anthropic_server import AnthropicServer
from tests.kit.openai_server import OpenAIServer
from tests.kit.sse_server import Reply, SseServer

KEY = "a-dummy-key"
PRICE = {"input": 1, "output": 4}  # dollars per million tokens
CALL_USD = Decimal("0.002")  # 1,000 in and 250 out
PROMPT = [{"role": "user", "content": "go"}]
CLAUDE: dict[str, Any] = {"model": "claude-sonnet-4-5", "max_tokens": 250, "messages": PROMPT}
CHAT: dict[str, Any] = {
    "model": "gpt-4o-mini",
    "max_tokens": 250,
    "messages": PROMPT,
    "stream_options": {"include_usage": True},
}
RESPONSES: dict[str, Any] = {"model": "gpt-4o-mini", "max_output_tokens": 250, "input": "go"}
REQUESTS = {"messages": CLAUDE, "chat": CHAT, "responses": RESPONSES}
FINAL = {"messages": "get_final_message", "chat": "get_final_completion", "responses": "get_final_response"}
KINDS = list(REQUESTS)
kinds = pytest.mark.parametrize("kind", KINDS)
ways = pytest.mark.parametrize("way", ["sync", "async", "async, by guard"])


class Setup:
    """One provider's server, its real clients, and its method that gives a stream to be entered."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.server: SseServer = AnthropicServer() if kind == "messages" else OpenAIServer()
        # not at the top: that takes a second, in every test process
        library: Any = pytest.importorskip("anthropic" if kind == "messages" else "openai")
        url = self.server.url if kind == "messages" else f"{self.server.url}/v1"
        self.client = getattr(library, "Anthropic" if kind == "messages" else "OpenAI")(
            api_key=KEY, base_url=url, max_retries=0
        )
        self.aio = getattr(library, "AsyncAnthropic" if kind == "messages" else "AsyncOpenAI")(
            api_key=KEY, base_url=url, max_retries=0
        )

    def _stream(self, client: Any) -> Callable[..., Any]:
        where = {
            "messages": lambda: client.messages,
            "chat": lambda: client.chat.completions,
            "responses": lambda: client.responses,
        }
        return where[self.kind]().stream  # type: ignore[no-any-return]

    def guard(self, **keywords: Any) -> Any:
        return runguard.guard(self._stream(self.client), **self._keywords(keywords))

    def guard_async(self, **keywords: Any) -> Any:
        return runguard.guard_async(self._stream(self.aio), **self._keywords(keywords))

    def guarded(self, way: str) -> Any:
        if way == "async, by guard":
            return runguard.guard(self._stream(self.aio), **self._keywords({}))
        return self.guard() if way == "sync" else self.guard_async()

    @staticmethod
    def _keywords(keywords: dict[str, Any]) -> dict[str, Any]:
        prices = {"claude-sonnet-4-5": PRICE, "gpt-4o-mini": PRICE}
        return {
            "prices": prices,
            "tokens": lambda *args, **kwargs: 1_000,
            "budget": {"max_usd": CALL_USD * 3},
            **keywords,
        }

    @property
    def request(self) -> dict[str, Any]:
        return dict(REQUESTS[self.kind])


@pytest.fixture
async def setup(kind: str) -> AsyncIterator[Setup]:
    made = Setup(kind)
    yield made
    made.client.close()
    await made.aio.close()
    made.server.close()


def figures(guarded: Any) -> tuple[int, int, Decimal, Decimal]:
    spent = guarded.spend()
    return spent["calls"], spent["estimated_calls"], spent["usd"], spent["reserved_usd"]


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a guarded stream as its kind is entered."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            yield stream
    else:
        with manager as stream:
            yield stream


async def read(stream: Any) -> list[Any]:
    return [event async for event in stream] if hasattr(stream, "__anext__") else list(stream)


@kinds
@ways
async def test_events_are_passed_on_and_booked(setup: Setup, way: str) -> None:
    guarded = setup.guarded(way)
    for _ in range(3):
        async with entered(guarded(**setup.request)) as stream:
            assert len(await read(stream)) > 4
    assert figures(guarded) == (3, 0, CALL_USD * 3, Decimal(0))
    with pytest.raises(runguard.BudgetExceededError):
        async with entered(guarded(**setup.request)):
            pass
    assert len(setup.server.requests) == 3


@pytest.mark.parametrize("kind", ["messages"])
async def test_one_may_await_it_first(setup: Setup) -> None:
    guarded = setup.guard_async()
    async with await guarded(**setup.request) as stream:
        assert [event async for event in stream]
    assert figures(guarded) == (1, 0, CALL_USD, Decimal(0))


@kinds
@ways
async def test_the_final_message_is_exact_and_known_at_once(setup: Setup, way: str) -> None:
    setup.server.script(Reply("one two three"))
    guarded = setup.guarded(way)
    async with entered(guarded(**setup.request)) as stream:
        final = getattr(stream, FINAL[setup.kind])()
        final = final if way == "sync" else await final
        assert figures(guarded) == (1, 0, CALL_USD, Decimal(0)), "booked when it ended, not when the block was left"
        assert way == "sync" or await stream.until_done() in (None, stream)
    assert "one two three" in str(final)
    assert figures(guarded) == (1, 0, CALL_USD, Decimal(0))


@pytest.mark.parametrize("kind", ["messages"])
def test_text_that_is_read_past_the_guard_is_booked_from_what_the_stream_knows(setup: Setup) -> None:
    setup.server.script(Reply("one two three"))
    guarded = setup.guard()
    with guarded(**setup.request) as stream:
        assert "".join(stream.text_stream) == "one two three"
    assert figures(guarded) == (1, 0, CALL_USD, Decimal(0))


@pytest.mark.parametrize("kind", ["messages"])
def test_text_that_is_left_in_the_middle_is_an_estimate(setup: Setup) -> None:
    """The prompt was told; of the output, what was heard: two of four pieces of 100 letters."""
    setup.server.script(Reply("x" * 400))
    guarded = setup.guard()
    with guarded(**setup.request) as stream:
        for number, _ in enumerate(stream.text_stream, 1):
            if number == 2:
                break
    assert figures(guarded) == (1, 1, Decimal("0.0012"), Decimal(0))


@kinds
@ways
@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["left", "raised in the block"])
async def test_a_stream_that_is_left_in_the_middle_is_an_estimate(
    setup: Setup, way: str, error: Exception | None
) -> None:
    setup.server.script(Reply("x" * 400))
    guarded = setup.guarded(way)
    with suppress(ZeroDivisionError):
        async with entered(guarded(**setup.request)) as stream:
            await anext(stream) if hasattr(stream, "__anext__") else next(stream)
            if error is not None:
                raise error
    calls, estimated, usd, held = figures(guarded)
    assert (calls, estimated, held) == (1, 1, Decimal(0))
    assert usd >= Decimal("0.001"), "the prompt at least"


@kinds
def test_a_stream_that_breaks_is_an_estimate(setup: Setup) -> None:
    setup.server.script(Reply("x" * 400, cut_after=5))
    guarded = setup.guard()
    with pytest.raises(Exception) as broke, guarded(**setup.request) as stream:  # noqa: PT011 - whatever the transport says
        list(stream)
    assert not isinstance(broke.value, runguard.RunGuardError)
    calls, estimated, usd, held = figures(guarded)
    assert (calls, estimated, held) == (1, 1, Decimal(0))
    assert Decimal("0.001") <= usd <= CALL_USD


@kinds
async def test_what_the_provider_refused_costs_nothing(setup: Setup) -> None:
    setup.server.script(Reply(status=429), Reply(status=429), Reply())
    guarded, guarded_async = setup.guard(), setup.guard_async()
    with pytest.raises(Exception, match="429"), guarded(**setup.request):
        pass
    with pytest.raises(Exception, match="429"):
        async with guarded_async(**setup.request):
            pass
    assert figures(guarded) == figures(guarded_async) == (1, 0, Decimal(0), Decimal(0))
    with guarded(**setup.request) as stream:
        list(stream)
    assert figures(guarded) == (2, 0, CALL_USD, Decimal(0))


@kinds
def test_one_that_is_never_entered_was_never_asked_for(setup: Setup) -> None:
    guarded = setup.guard()
    manager = guarded(**setup.request)
    assert guarded.spend()["reserved_usd"] > 0
    del manager
    gc.collect(1)
    assert guarded.flush(5)
    assert figures(guarded) == (0, 0, Decimal(0), Decimal(0))
    assert not setup.server.requests


@pytest.mark.parametrize("kind", ["messages"])
def test_one_is_entered_once(setup: Setup) -> None:
    """The client would ask the provider again, and nobody would have been asked."""
    guarded = setup.guard()
    manager = guarded(**setup.request)
    with manager as stream:
        list(stream)
    with pytest.raises(RuntimeError, match="once"), manager:
        pass
    assert len(setup.server.requests) == 1


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, how) for kind in KINDS for how in ("events", "final")), ("messages", "text")]
)
def test_tools_asked_for_in_a_stream_go_round_in_circles_too(setup: Setup, how: str) -> None:
    setup.server.script(Reply("", call=("search", {"q": "moon"})))
    guarded = setup.guard(loop={"repeats": 3}, budget={"max_usd": 1})
    for _ in range(3):
        with guarded(**setup.request) as stream:
            if how == "events":
                list(stream)
            elif how == "final":
                getattr(stream, FINAL[setup.kind])()
            else:
                list(stream.text_stream)
    with pytest.raises(runguard.LoopDetectedError) as found:
        guarded(**setup.request)
    assert found.value.pattern == ("search",)
    assert len(setup.server.requests) == 3


@pytest.fixture
def chat() -> Iterator[Setup]:
    made = Setup("chat")
    yield made
    made.client.close()
    made.server.close()


def test_plain_streams_of_the_client_are_booked(chat: Setup) -> None:
    guarded = runguard.guard(chat.client.chat.completions.create, **Setup._keywords({}))
    assert len(list(guarded(**CHAT, stream=True))) == 7
    with guarded(**CHAT, stream=True) as stream:
        for chunk in stream:
            if chunk.usage is not None:
                break
    assert figures(guarded) == (2, 0, CALL_USD * 2, Decimal(0)), (
        "left after the provider's last word, nothing is missing"
    )


# ---- one guard around another ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["messages"])
def test_both_guards_book_the_call_when_the_stream_ends(setup: Setup) -> None:
    inner = setup.guard(budget={"max_usd": 1})
    outer = runguard.guard(inner, **Setup._keywords({"budget": {"max_usd": CALL_USD * 2}}))
    for _ in range(2):
        with outer(**setup.request) as stream:
            assert stream.get_final_message().usage.output_tokens == 250
    assert figures(outer) == figures(inner) == (2, 0, CALL_USD * 2, Decimal(0))
    with pytest.raises(runguard.BudgetExceededError):
        outer(**setup.request)
    assert len(setup.server.requests) == 2


@pytest.mark.parametrize("kind", ["messages"])
async def test_both_guards_book_an_async_call_when_the_stream_ends(setup: Setup) -> None:
    inner = setup.guard_async(budget={"max_usd": 1})
    outer = runguard.guard_async(inner, **Setup._keywords({"budget": {"max_usd": CALL_USD * 2}}))
    for _ in range(2):
        async with await outer(**setup.request) as stream:
            assert [event async for event in stream]
    assert figures(outer) == figures(inner) == (2, 0, CALL_USD * 2, Decimal(0))
    assert len(setup.server.requests) == 2


# ---- LiteLLM: its streams can be read with ``for`` and with ``async for`` -------------------------------------------


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_stream_of_litellm_is_read_as_its_caller_means_and_booked(is_async: bool) -> None:
    litellm, server = pytest.importorskip("litellm"), OpenAIServer()
    server.script(Reply("Hello there, it is a fine day."))
    asked: dict[str, Any] = {**CHAT, "model": "openai/gpt-4o", "api_base": f"{server.url}/v1", "api_key": KEY}
    call: Any = (
        runguard.guard_async(litellm.acompletion, budget={"max_usd": 1})
        if is_async
        else runguard.guard(litellm.completion, budget={"max_usd": 1})
    )
    stream = await call(**asked, stream=True) if is_async else call(**asked, stream=True)
    pieces = [piece async for piece in stream] if is_async else list(stream)
    words = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert words == "Hello there, it is a fine day."
    assert figures(call)[:2] == (1, 0)
    assert figures(call)[3] == 0
    assert figures(call)[2] > 0
    server.close()
