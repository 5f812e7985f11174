"""LiteLLM's streams can be read with ``for`` and with ``async for``: guarded, they are read as their caller means."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from runguard import guard, guard_async
from tests.kit.openai_server import KEY, OpenAIServer
from tests.kit.sse_server import Reply

if importlib.util.find_spec("litellm") is None:  # not imported here: that takes seconds, in every worker
    pytest.skip("litellm is not installed", allow_module_level=True)

WORDS = "Hello there, it is a fine day."
BUDGET: Any = {"max_usd": 1}


@pytest.fixture
def asked() -> Iterator[dict[str, Any]]:
    server = OpenAIServer()
    server.script(Reply(WORDS))
    yield {
        "model": "openai/gpt-4o",
        "messages": [{"role": "user", "content": "Hello"}],
        "api_base": f"{server.url}/v1",
        "api_key": KEY,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    server.close()


def _text(pieces: list[Any]) -> str:
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


async def test_an_async_stream_is_read_and_booked(asked: dict[str, Any]) -> None:
    import litellm

    call = guard_async(litellm.acompletion, budget=BUDGET)
    stream: Any = await call(**asked)
    assert _text([piece async for piece in stream]) == WORDS
    spent = call.spend()
    assert (spent["calls"], spent["estimated_calls"], spent["reserved_usd"]) == (1, 0, 0)
    assert spent["usd"] > 0


def test_a_sync_stream_is_read_and_booked(asked: dict[str, Any]) -> None:
    import litellm

    call = guard(litellm.completion, budget=BUDGET)
    stream: Any = call(**asked)
    assert _text(list(stream)) == WORDS
    spent = call.spend()
    assert (spent["calls"], spent["estimated_calls"], spent["reserved_usd"]) == (1, 0, 0)
