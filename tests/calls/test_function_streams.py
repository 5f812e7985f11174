"""Guarded functions that return a stream, synchronous or asynchronous."""

import asyncio
import copy
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any, Self

import pytest

from runguard import (
    BudgetExceededError,
    LoopDetectedError,
    RunStoppedError,
    UnpricedModelError,
    guard,
    guard_async,
    run,
)
from tests.kit.examples import each_row
from tests.kit.functions import held
from tests.kit.streams import PRICES, USAGE, AsyncProvider, chunk, pieces
from tests.kit.waiting import PATIENCE_S


class Provider:
    """What OpenAI's client gives back: an iterator that is also a context manager, with things of its own."""

    def __init__(self, **how: Any) -> None:
        self.inner = pieces(**how)
        self.closed = self.entered = False
        self.response = "headers"

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.inner)

    def __enter__(self) -> Self:
        self.entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True


async def async_pieces(**how: Any) -> AsyncIterator[Any]:
    for piece in pieces(**how):
        await asyncio.sleep(0)
        yield piece


async def _provider(**how: Any) -> AsyncProvider:
    return AsyncProvider(**how)


def _iterator() -> Iterator[Any]:
    return iter(list(pieces()))


def guarded(fn: Callable[..., Any], **settings: Any) -> Any:
    is_async = fn is AsyncProvider or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)
    return (guard_async if is_async else guard)(fn, **settings)


def dollars(fn: Callable[..., Any], **more: Any) -> Any:
    return guarded(fn, budget={"max_usd": 1.2}, prices=PRICES, **more)


# Streams of both kinds are read in the same way, each by the statement that is made for it.


async def opened(call: Any, **how: Any) -> Any:
    stream = call(**how)
    return await stream if asyncio.iscoroutine(stream) else stream


async def step(stream: Any) -> Any:
    return await anext(stream) if hasattr(stream, "__anext__") else next(stream)


async def read(stream: Any) -> list[Any]:
    return [piece async for piece in stream] if hasattr(stream, "__anext__") else list(stream)


async def leave(stream: Any, how: str) -> None:
    if how in ("close", "aclose"):
        for _ in range(1 if hasattr(stream, "__anext__") else 2):
            closing = getattr(stream, how)()
            if closing is not None:
                await closing
    elif how == "cancelled":
        task = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how in ("left", "raised in the block"):
        with suppress(ZeroDivisionError):
            if hasattr(stream, "__anext__"):
                async with stream:
                    _ = how == "left" or 1 / 0
            else:
                with stream:
                    _ = how == "left" or 1 / 0


@pytest.mark.parametrize("fn", [pieces, Provider, _iterator, async_pieces, _provider, AsyncProvider])
async def test_a_stream_passes_every_piece_on_and_is_booked_at_its_end(fn: Callable[..., Any]) -> None:
    call = dollars(fn)
    stream = await opened(call)
    assert await step(stream) == chunk("one ")
    assert (call.spend()["calls"], held(call)) == (0, Decimal("1.2"))  # under way, and nobody knows what it costs
    assert await read(stream) == [chunk("two "), USAGE]
    assert figures(call) == (Decimal("0.5"), 1, 0, Decimal(0))
    assert await read(stream) == []
    assert call.spend()["calls"] == 1


@pytest.mark.parametrize("how", ["close", "dropped"])
@pytest.mark.parametrize("fn", [pieces, async_pieces])
async def test_a_generator_that_was_never_asked_for_a_piece_costs_nothing(fn: Callable[..., Any], how: str) -> None:
    call = dollars(fn)
    stream = await opened(call)
    if how == "close":
        await leave(stream, how)
        assert await read(stream) == []
    del stream
    gc.collect(1)
    assert call.flush(5)
    assert (call.spend()["calls"], held(call)) == (0, Decimal(0))
    assert not call.trips
    assert len(await read(await opened(call))) == 3


ENDS = ["close", "dropped", "left", "raised in the block"]


@pytest.mark.parametrize(
    ("fn", "how"),
    [
        *((fn, how) for fn in (pieces, Provider) for how in ENDS),
        *((fn, how) for fn in (async_pieces, _provider) for how in (*ENDS, "aclose", "cancelled")),
    ],
)
async def test_a_stream_that_is_left_early_is_booked_as_an_estimate(fn: Callable[..., Any], how: str) -> None:
    call = guarded(fn, budget={"max_usd": 5}, cost=0.3)
    stream = await opened(call)
    await step(stream)
    await leave(stream, how)
    del stream
    gc.collect(1)  # what a test has just made is young
    assert call.flush(5)
    assert figures(call) == (Decimal("0.3"), 1, 1, Decimal(0))


@pytest.mark.parametrize("error", [ConnectionError("cut"), KeyboardInterrupt(), ZeroDivisionError()])
@pytest.mark.parametrize("fn", [pieces, async_pieces])
def test_an_error_in_the_middle_comes_through_and_is_booked(fn: Callable[..., Any], error: BaseException) -> None:
    call = guarded(fn, budget={"max_usd": 5}, cost=0.3)

    async def go() -> None:
        stream = await opened(call, raises=error)
        await step(stream)
        await step(stream)
        with pytest.raises(type(error)) as raised:
            await step(stream)
        assert raised.value is error
        assert figures(call) == (Decimal("0.3"), 1, 1, Decimal(0))
        assert await read(await opened(call))  # and the next one goes

    asyncio.run(go())


@pytest.mark.parametrize("fn", [Provider, _provider])
async def test_the_providers_stream_keeps_what_it_can_do(fn: Callable[..., Any]) -> None:
    call = dollars(fn)
    stream = await opened(call)
    assert stream.response == "headers"
    inner = stream._inner
    assert len(await read(stream)) == 3
    await leave(stream, "left")
    assert inner.entered
    assert inner.closed
    with pytest.raises(AttributeError):
        stream.nothing_of_that_name  # noqa: B018
    assert copy.copy(stream) is not stream  # asks for attributes of one that is not made yet
    assert call.spend()["usd"] == Decimal("0.5")


def figures(call: Any) -> tuple[Any, int, int, Decimal]:
    spend = call.spend()
    return spend["usd"], spend["calls"], spend["estimated_calls"], held(call)


def test_after_a_trip_no_stream_is_begun() -> None:
    begun = []

    def counted() -> Iterator[Any]:
        begun.append(True)
        yield from pieces()

    call = dollars(counted)
    for _ in range(2):
        list(call())
    for _ in range(3):
        with pytest.raises(BudgetExceededError):
            call()
    assert (len(begun), call.spend()["usd"]) == (2, 1)


def test_a_providers_stream_that_was_never_read_has_been_asked_for() -> None:
    call = dollars(Provider, max_model_calls=5)
    call().close()
    assert (call.spend()["calls"], call.spend()["estimated_calls"], held(call)) == (1, 1, Decimal(0))


LAST_WORDS = {
    "chat": (USAGE,),
    "chat, with its end": ({**USAGE, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},),
    "gemini": (
        {
            "modelVersion": "m",
            "candidates": [{"finishReason": "STOP"}],
            "usageMetadata": {"promptTokenCount": 400_000, "totalTokenCount": 500_000},
        },
    ),
    "messages": (
        {"type": "message_start", "message": {"model": "m", "usage": {"input_tokens": 400_000, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 100_000}},
    ),
    "responses": (
        {
            "type": "response.completed",
            "response": {"model": "m", "output": [], "usage": {"input_tokens": 400_000, "output_tokens": 100_000}},
        },
    ),
}


SO_FAR = {
    "chat": ({**USAGE, "choices": [{"index": 0, "delta": {"content": "one "}}]},),
    "gemini": (
        {
            "modelVersion": "m",
            "candidates": [{"content": {"parts": [{"text": "one "}]}}],
            "usageMetadata": {"promptTokenCount": 400_000, "totalTokenCount": 500_000},
        },
    ),
    "messages": (
        LAST_WORDS["messages"][0],
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 100_000}},
    ),
}


@each_row("told", LAST_WORDS.values())
def test_a_stream_left_after_the_last_word_is_exact(told: tuple[Any, ...]) -> None:
    call = dollars(lambda: iter([*told, "more"]))
    stream: Any = call()
    for _ in told:
        next(stream)
    stream.close()
    assert (call.spend()["usd"], call.spend()["estimated_calls"], held(call)) == (Decimal("0.5"), 0, Decimal(0))


@pytest.mark.parametrize("told", SO_FAR.values(), ids=SO_FAR)
def test_a_stream_left_after_usage_so_far_is_marked(told: tuple[Any, ...]) -> None:
    """More may come, and be billed."""
    call = dollars(lambda: iter([*told, "more"]))
    stream: Any = call()
    for _ in told:
        next(stream)
    stream.close()
    assert (call.spend()["usd"], call.spend()["calls"], call.spend()["estimated_calls"], held(call)) == (
        Decimal("0.5"),
        1,
        1,
        Decimal(0),
    )
    assert call.budgets()[0].limit - held(call) > 0
    list(call())  # and what it took is known to the next one


def test_a_stream_left_early_costs_at_least_what_was_heard() -> None:
    usage = {"promptTokenCount": 400_000, "totalTokenCount": 400_000}
    first = {"modelVersion": "m", "candidates": [{"content": {"parts": [{"text": "x" * 400}]}}], "usageMetadata": usage}
    call = dollars(lambda: iter([first, "more"]))
    stream: Any = call()
    next(stream)
    stream.close()
    assert (call.spend()["output_tokens"], call.spend()["estimated_calls"]) == (100, 1)


def test_a_stream_left_after_it_told_its_cost_is_marked_and_costs_that() -> None:
    call = guard(lambda: iter([{"usd": 0.3}, "more"]), budget={"max_usd": 1})
    stream: Any = call()
    next(stream)
    stream.close()
    assert (call.spend()["usd"], call.spend()["estimated_calls"]) == (Decimal("0.3"), 1)


def test_streams_that_are_left_early_go_round_in_circles_too() -> None:
    asks = {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "search", "arguments": "{}"}}]}}
    call = guard(lambda: iter([{**USAGE, "choices": [asks]}, "more"]), loop={"repeats": 3})
    for _ in range(3):
        stream: Any = call()
        next(stream)
        stream.close()
    with pytest.raises(LoopDetectedError) as found:
        call()
    assert found.value.pattern == ("search",)


@pytest.mark.parametrize("left", [False, True])
def test_cost_and_signature_get_the_last_piece_of_a_stream(left: bool) -> None:
    seen: list[Any] = []

    def cost(piece: Any) -> Decimal:
        seen.append(piece)
        return Decimal("0.1")

    call = guard(
        lambda: iter([chunk("one "), USAGE]),
        cost=cost,
        signature=lambda piece: piece["model"],
        budget={"max_usd": 1},
        loop={"repeats": 3},
    )
    for _ in range(3):
        stream: Any = call()
        assert [next(stream), next(stream)] == [chunk("one "), USAGE]
        if left:
            stream.close()
        else:
            assert list(stream) == []
    assert seen == [USAGE] * 3
    assert call.spend()["usd"] == Decimal("0.3")
    with pytest.raises(LoopDetectedError) as found:
        call()
    assert found.value.pattern == ("m",)


class _Snapshot:
    """What Anthropic's library makes: entered, it gives a stream that can also be read past whoever holds it."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    @property
    def current_message_snapshot(self) -> Any:
        if self.broken:
            raise AssertionError
        return {
            "model": "m",
            "content": [],
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 400_000, "output_tokens": 100_000},
        }


class MessageStreamManager:
    def __init__(self, broken: bool = False, fails: bool = False) -> None:
        self.broken, self.fails = broken, fails

    def __enter__(self) -> _Snapshot:
        if self.fails:
            raise ConnectionError
        return _Snapshot(self.broken)

    def __exit__(self, *error: object) -> None:
        pass


def test_what_has_to_be_entered_is_booked_from_what_it_knows() -> None:
    call = dollars(MessageStreamManager)
    with call():
        pass
    assert (call.spend()["usd"], call.spend()["estimated_calls"], held(call)) == (Decimal("0.5"), 0, Decimal(0))
    assert copy.copy(call()) is not None  # asks for attributes of one that is not made yet


def test_what_has_to_be_entered_and_knows_nothing_is_an_estimate() -> None:
    call = guard(MessageStreamManager, budget={"max_usd": 5}, cost=0.3)
    with call(broken=True):
        pass
    with pytest.raises(ConnectionError), call(fails=True):
        pass
    assert (call.spend()["usd"], call.spend()["calls"], call.spend()["estimated_calls"], held(call)) == (
        Decimal("0.6"),
        2,
        2,
        Decimal(0),
    )


def test_no_other_context_manager_is_touched() -> None:
    class Response:
        """As a client of HTTP gives it: the request was made, whether or not it is entered."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    call = guard(Response, budget={"max_usd": 1})
    assert type(call()) is Response
    with pytest.raises(UnpricedModelError):
        call()


def test_a_stream_of_unknown_price_that_is_left_early_is_the_last() -> None:
    begun = []

    def counted() -> Iterator[str]:
        begun.append(True)
        while True:
            yield "words "

    call = guard(counted, budget={"max_usd": 1})
    for _ in range(3):
        try:
            stream: Any = call()
            next(stream)
            stream.close()
        except UnpricedModelError:
            continue
    assert len(begun) == 1
    assert call.spend()["unpriced_calls"] == 1


def test_a_refusal_of_the_provider_before_the_first_piece_is_free() -> None:
    class Refused(Exception):  # noqa: N818
        status_code = 429

    def refusing() -> Iterator[Any]:
        raise Refused
        yield  # type: ignore[unreachable]

    call = guard(refusing, budget={"max_usd": 5}, cost=0.3)
    with pytest.raises(Refused):
        list(call())
    assert (call.spend()["usd"], call.spend()["calls"], held(call)) == (0, 1, Decimal(0))


def test_a_generator_can_be_sent_to_and_that_is_a_beginning() -> None:
    def talks() -> Iterator[Any]:
        heard = yield "hello"
        yield heard

    call = guard(talks, budget={"max_calls": 2})
    stream: Any = call()
    assert stream.send(None) == "hello"
    assert stream.send("word") == "word"
    del stream
    gc.collect(1)
    assert call.flush(5)
    assert call.spend()["calls"] == 1
    stream = call()
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())
    assert (call.spend()["calls"], held(call)) == (2, Decimal(0))


def test_a_call_made_while_the_first_answer_is_still_read_does_not_hang() -> None:
    call = guard(lambda n: iter([f"piece {n}", {"usd": 0.1}]), budget={"max_usd": 1})
    results: list[Any] = []

    def work() -> None:
        results.extend(list(call(2)) for _ in call(1))
        results.append(list(call(3)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(results) == 3
    assert (call.spend()["usd"], held(call)) == (Decimal("0.4"), Decimal(0))


def test_another_thread_waits_for_the_first_stream_to_end() -> None:
    call = guard(lambda: iter(["piece", {"usd": 0.1}]), budget={"max_usd": 1})
    first = call()
    next(first)
    began = threading.Event()

    def second() -> None:
        call()
        began.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not began.wait(0.05)
    list(first)
    assert began.wait(PATIENCE_S)
    thread.join()


def test_a_stream_may_be_read_in_another_thread_than_it_was_asked_for() -> None:
    call = dollars(pieces)
    stream, read = call(), []
    thread = threading.Thread(target=lambda: read.extend(stream))
    thread.start()
    thread.join()
    assert len(read) == 3
    assert (call.spend()["usd"], held(call)) == (Decimal("0.5"), Decimal(0))


def test_a_sync_function_may_give_an_async_stream() -> None:
    call = dollars(lambda: AsyncProvider())

    async def read() -> int:
        return len([piece async for piece in call()])

    assert asyncio.run(read()) == 3
    assert (call.spend()["usd"], held(call)) == (Decimal("0.5"), Decimal(0))


def test_a_run_that_is_over_books_the_stream_that_outlives_it() -> None:
    call = dollars(pieces)
    with run(user="alice"):
        stream: Any = call()
        next(stream)
    list(stream)
    assert call.spend()["usd"] == Decimal("0.5")


# ---- asynchronous streams -------------------------------------------------------------------------------------------


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


async def test_an_async_call_made_while_the_first_answer_is_still_read_does_not_hang() -> None:
    async def talks(n: int) -> AsyncIterator[Any]:
        yield f"piece {n}"
        yield {"usd": 0.1}

    call = guard_async(talks, budget={"max_usd": 1})

    async def nested() -> int:
        return sum([len(await read(call(2))) async for _ in call(1)])

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
    results = await asyncio.gather(*(read(call()) for _ in range(30)), return_exceptions=True)
    assert sum(isinstance(result, RunStoppedError) for result in results) == 20
    assert (begun, call.spend()["usd"], held(call)) == (10, 1, Decimal(0))


async def test_stacked_async_generators_are_one_call_for_the_run() -> None:
    call = guard_async(guard_async(async_pieces))
    with run(budget={"max_calls": 2}):
        assert len(await read(call())) == len(await read(call())) == 3
        with pytest.raises(BudgetExceededError):
            await read(call())


async def test_a_refused_inner_generator_costs_the_outer_guard_nothing() -> None:
    inner = guard_async(async_pieces, budget={"max_calls": 1})
    outer = guard_async(inner, budget={"max_usd": 5}, cost=0.5)
    await read(outer())
    for _ in range(3):
        with pytest.raises(BudgetExceededError):
            await read(outer())
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
    call = dollars(_both_ways if is_async else BothWays)
    stream = await call() if is_async else call()
    read = [piece async for piece in stream] if is_read_async else list(stream)
    assert read == list(pieces())
    assert (call.spend()["usd"], call.spend()["calls"], held(call)) == (Decimal("0.5"), 1, Decimal(0))
    await stream.close() if is_async else stream.close()
