"""Guarded functions that return an asynchronous stream."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import pytest

from runguard import (
    BudgetExceededError,
    RunStoppedError,
    guard,
    guard_async,
    run,
)
from tests.kit.functions import held
from tests.kit.streams import PRICES, USAGE, AsyncProvider, chunk, pieces
from tests.kit.waiting import PATIENCE_S


async def async_pieces(**how: Any) -> AsyncIterator[Any]:
    for piece in pieces(**how):
        await asyncio.sleep(0)
        yield piece


def async_dollars(fn: Callable[..., Any], **more: Any) -> Any:
    return guard_async(fn, budget={"max_usd": 1.2}, prices=PRICES, **more)


async def _provider() -> AsyncProvider:
    return AsyncProvider()


@pytest.mark.parametrize("fn", [async_pieces, _provider, AsyncProvider])
async def test_an_async_stream_passes_every_piece_on_and_is_booked_at_its_end(fn: Callable[..., Any]) -> None:
    call = async_dollars(fn)
    stream = call()
    stream = stream if hasattr(stream, "__anext__") else await stream
    assert await anext(stream) == chunk("one ")
    assert (call.spend()["calls"], held(call)) == (0, Decimal("1.2"))
    assert [piece async for piece in stream] == [chunk("two "), USAGE]
    assert (call.spend()["usd"], call.spend()["calls"], held(call)) == (Decimal("0.5"), 1, Decimal(0))


async def test_a_refused_async_generator_stays_refused() -> None:
    begun = []

    async def counted() -> AsyncIterator[Any]:
        begun.append(True)
        yield {"usd": 0.1}

    call = guard_async(counted, budget={"max_calls": 1})
    assert [piece async for piece in call()] == [{"usd": 0.1}]
    stream = call()
    for _ in range(3):  # a loop that swallows errors must not get at the provider
        with pytest.raises(BudgetExceededError):
            await anext(stream)
    assert len(begun) == 1


@pytest.mark.parametrize("how", ["closed", "dropped"])
async def test_an_async_generator_that_was_never_asked_for_a_piece_costs_nothing(how: str) -> None:
    call = async_dollars(async_pieces)
    stream = call()
    if how == "closed":
        await stream.aclose()
        assert [piece async for piece in stream] == []
    del stream
    gc.collect()
    assert call.flush(5)
    assert (call.spend()["calls"], held(call)) == (0, Decimal(0))
    assert not call.trips


@pytest.mark.parametrize("how", ["aclose", "close", "dropped", "left", "cancelled"])
@pytest.mark.parametrize("fn", [async_pieces, _provider])
async def test_an_async_stream_that_is_left_early_is_booked_as_an_estimate(fn: Callable[..., Any], how: str) -> None:
    call = guard_async(fn, budget={"max_usd": 5}, cost=0.3)
    stream = call()
    stream = stream if hasattr(stream, "__anext__") else await stream
    await anext(stream)
    if how in ("aclose", "close"):
        await getattr(stream, how)()
    elif how == "left":
        async with stream:
            pass
    elif how == "cancelled":
        task = asyncio.ensure_future(_read(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    del stream
    gc.collect()
    assert call.flush(5)
    spend = call.spend()
    assert (spend["usd"], spend["calls"], spend["estimated_calls"], held(call)) == (Decimal("0.3"), 1, 1, Decimal(0))


async def _read(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


async def test_the_async_providers_stream_keeps_what_it_can_do() -> None:
    call = async_dollars(_provider)
    async with await call() as stream:
        assert stream.response == "headers"
        inner = stream._inner
        assert inner.entered
        assert len(await _read(stream)) == 3
    assert inner.closed
    assert call.spend()["usd"] == Decimal("0.5")


@pytest.mark.parametrize("error", [ConnectionError("cut"), ZeroDivisionError()])
async def test_an_error_in_the_middle_of_an_async_stream(error: Exception) -> None:
    call = guard_async(async_pieces, budget={"max_usd": 5}, cost=0.3)
    with pytest.raises(type(error)) as raised:
        await _read(call(raises=error))
    assert raised.value is error
    assert (call.spend()["usd"], call.spend()["estimated_calls"], held(call)) == (Decimal("0.3"), 1, Decimal(0))


async def test_an_async_call_made_while_the_first_answer_is_still_read_does_not_hang() -> None:
    async def talks(n: int) -> AsyncIterator[Any]:
        yield f"piece {n}"
        yield {"usd": 0.1}

    call = guard_async(talks, budget={"max_usd": 1})

    async def nested() -> int:
        return sum([len(await _read(call(2))) async for _ in call(1)])

    assert await asyncio.wait_for(nested(), PATIENCE_S) == 4
    assert (call.spend()["usd"], held(call)) == (Decimal("0.3"), Decimal(0))


async def test_streams_at_once_stay_within_the_cap() -> None:
    begun = 0

    async def talks() -> AsyncIterator[Any]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.005)
        yield {"usd": 0.1}

    call = guard_async(talks, budget={"max_usd": 1})
    results = await asyncio.gather(*(_read(call()) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(result, RunStoppedError) for result in results) == 20
    assert (begun, call.spend()["usd"], held(call)) == (10, 1, Decimal(0))


async def test_stacked_async_generators_are_one_call_for_the_run() -> None:
    call = guard_async(guard_async(async_pieces))
    with run(budget={"max_calls": 2}):
        assert len(await _read(call())) == len(await _read(call())) == 3
        with pytest.raises(BudgetExceededError):
            await _read(call())


async def test_a_refused_inner_generator_costs_the_outer_guard_nothing() -> None:
    inner = guard_async(async_pieces, budget={"max_calls": 1})
    outer = guard_async(inner, budget={"max_usd": 5}, cost=0.5)
    await _read(outer())
    for _ in range(3):
        with pytest.raises(BudgetExceededError):
            await _read(outer())
    assert (outer.spend()["usd"], outer.spend()["calls"], held(outer)) == (Decimal("0.5"), 1, Decimal(0))


async def test_two_who_ask_for_the_first_piece_at_once_are_one_call() -> None:
    async def slow() -> AsyncIterator[Any]:
        await asyncio.sleep(0.01)
        yield 1

    def count(*_: Any) -> Any:
        return asyncio.sleep(0.01, 5)

    call = guard_async(slow, budget={"max_calls": 5}, context={"max_context_tokens": 100}, tokens=count)
    stream: Any = call()
    results = await asyncio.gather(anext(stream), anext(stream), return_exceptions=True)
    assert sum(isinstance(result, RuntimeError) for result in results) == 1
    await stream.aclose()
    assert (call.spend()["calls"], held(call)) == (1, Decimal(0))


async def test_off_leaves_the_stream_as_it_is() -> None:
    assert type(guard_async(async_pieces, mode="off")()) is type(async_pieces())
    assert type(guard(pieces, mode="off")()) is type(pieces())


class BothWays:
    """A stream that can be read with ``for`` and with ``async for``, such as LiteLLM's."""

    def __init__(self) -> None:
        self._pieces = pieces()

    def __iter__(self) -> "BothWays":
        return self

    def __next__(self) -> Any:
        return next(self._pieces)

    def __aiter__(self) -> "BothWays":
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._pieces)
        except StopIteration:
            raise StopAsyncIteration from None


async def _both_ways() -> BothWays:
    return BothWays()


@pytest.mark.parametrize("is_read_async", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_stream_of_both_kinds_is_read_either_way(is_async: bool, is_read_async: bool) -> None:
    call: Any = async_dollars(_both_ways) if is_async else guard(BothWays, budget={"max_usd": 1.2}, prices=PRICES)
    stream = await call() if is_async else call()
    read = [piece async for piece in stream] if is_read_async else list(stream)
    assert read == list(pieces())
    assert (call.spend()["usd"], call.spend()["calls"], held(call)) == (Decimal("0.5"), 1, Decimal(0))
    await stream.close() if is_async else stream.close()
