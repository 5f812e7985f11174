"""Streams of a provider, synchronous and asynchronous."""

import asyncio
from collections.abc import Iterator
from typing import Any, Self

PRICES = {"m": {"input": 1, "output": 1}}  # dollars per million tokens


# half a dollar
USAGE = {"model": "m", "choices": [], "usage": {"prompt_tokens": 400_000, "completion_tokens": 100_000}}


def chunk(words: str) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": 0, "delta": {"content": words}}]}


def pieces(**how: Any) -> Iterator[Any]:
    yield chunk("one ")
    yield chunk("two ")
    if how.get("raises"):
        raise how["raises"]
    yield USAGE


class AsyncProvider:
    def __init__(self, **how: Any) -> None:
        self.inner = pieces(**how)
        self.closed = self.entered = False
        self.response = "headers"

    def __aiter__(self) -> "AsyncProvider":
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        try:
            return next(self.inner)
        except StopIteration:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.closed = True
