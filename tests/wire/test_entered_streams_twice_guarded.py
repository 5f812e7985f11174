"""A stream helper of Anthropic's client with one guard around another. Real client, real HTTP."""

from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest

import runguard
from tests.kit.anthropic_server import AnthropicServer

CALL_USD = Decimal("0.002")  # 1,000 in and 250 out
REQUEST: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 250,
    "messages": [{"role": "user", "content": "go"}],
}
SETTINGS: dict[str, Any] = {
    "prices": {"claude-sonnet-4-5": {"input": 1, "output": 4}},
    "tokens": lambda *args, **kwargs: 1_000,
}


@pytest.fixture
async def server() -> AsyncIterator[AnthropicServer]:
    made = AnthropicServer()
    yield made
    made.close()


def figures(guarded: Any) -> tuple[int, int, Decimal, Decimal]:
    spent = guarded.spend()
    return spent["calls"], spent["estimated_calls"], spent["usd"], spent["reserved_usd"]


def test_both_guards_book_the_call_when_the_stream_ends(server: AnthropicServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(api_key="a-dummy-key", base_url=server.url, max_retries=0) as client:
        inner = runguard.guard(client.messages.stream, budget={"max_usd": 1}, **SETTINGS)
        outer = runguard.guard(inner, budget={"max_usd": CALL_USD * 2}, **SETTINGS)
        for _ in range(2):
            with outer(**REQUEST) as stream:
                assert stream.get_final_message().usage.output_tokens == 250
        assert figures(outer) == figures(inner) == (2, 0, CALL_USD * 2, Decimal(0))
        with pytest.raises(runguard.BudgetExceededError):
            outer(**REQUEST)
    assert len(server.requests) == 2


async def test_both_guards_book_an_async_call_when_the_stream_ends(server: AnthropicServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(api_key="a-dummy-key", base_url=server.url, max_retries=0) as client:
        inner = runguard.guard_async(client.messages.stream, budget={"max_usd": 1}, **SETTINGS)
        outer = runguard.guard_async(inner, budget={"max_usd": CALL_USD * 2}, **SETTINGS)
        for _ in range(2):
            async with await outer(**REQUEST) as stream:
                assert [event async for event in stream]
        assert figures(outer) == figures(inner) == (2, 0, CALL_USD * 2, Decimal(0))
    assert len(server.requests) == 2
