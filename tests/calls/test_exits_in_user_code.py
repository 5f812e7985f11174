"""A function of the user that ends the program or the task: the call was sent, so it is booked on the way out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from runguard import ToolRule, guard, guard_async, run
from runguard.calls.run import AgentRun
from runguard.calls.tool_calls import ToolUse
from runguard.engine.guard import Guard
from runguard.policy import Policy

EXITS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
each_exit = pytest.mark.parametrize("exit_type", EXITS)


def leaving(exit_type: type[BaseException]) -> Callable[..., Any]:
    def cost(result: Any) -> Any:
        raise exit_type

    return cost


def is_booked(*guards: Any) -> None:
    """One call, as an estimate of at least what was held; nothing is held any more."""
    for one in guards:
        spend = one.spend()
        assert (spend["calls"], spend["reserved_usd"], spend["estimated_calls"]) == (1, 0, 1), spend


@each_exit
def test_a_cost_function_that_leaves(exit_type: type[BaseException]) -> None:
    call = guard(lambda _: "text", budget={"max_usd": 1}, cost=leaving(exit_type))
    with pytest.raises(exit_type):
        call("hello")
    is_booked(call)
    assert call.spend()["usd"] == 1, "the first call holds the whole budget"


@each_exit
def test_a_cost_of_tokens_that_leaves(exit_type: type[BaseException]) -> None:
    def cost(tokens_in: int, tokens_out: int) -> float:
        raise exit_type

    call = guard(lambda _: {"tokens": 5}, budget={"max_usd": 1}, cost=cost)
    with pytest.raises(exit_type):
        call("hello")
    is_booked(call)


@each_exit
def test_a_cost_function_of_an_async_call_that_leaves(exit_type: type[BaseException]) -> None:
    async def model(_: str) -> str:
        return "text"

    call = guard_async(model, budget={"max_usd": 1}, cost=leaving(exit_type))
    task = call("hello")
    with pytest.raises(exit_type):  # driven by hand: asyncio itself ends at some of them
        task.send(None)
    is_booked(call)


@each_exit
def test_every_layer_around_is_booked(exit_type: type[BaseException]) -> None:
    call = guard(lambda _: {"usd": 0.1}, budget={"max_usd": 1})
    with run(budget={"max_usd": 2}, cost=leaving(exit_type)) as outer:
        with pytest.raises(exit_type):
            call("hello")
        assert outer.caller is not None
        is_booked(outer.caller.guard.accounts, call)


@each_exit
@pytest.mark.parametrize("way", ["to its end", "closed", "raised"])
def test_a_stream(exit_type: type[BaseException], way: str) -> None:
    def model(_: str) -> Iterator[Any]:
        yield {"usage": {"prompt_tokens": 5, "completion_tokens": 5}, "choices": []}
        if way == "raised":
            raise ConnectionError
        yield {"usage": {"prompt_tokens": 5, "completion_tokens": 9}, "choices": []}

    call = guard(model, budget={"max_usd": 1}, cost=leaving(exit_type))
    with run(budget={"max_usd": 2}) as outer:
        assert outer.caller is not None
        around = outer.caller.guard.accounts
        pieces: Any = call("hello")
        next(pieces)
        with pytest.raises(exit_type):
            pieces.close() if way == "closed" else list(pieces)
    assert call.spend()["calls"] == 1
    assert call.spend()["reserved_usd"] == around.spend()["reserved_usd"] == 0


@each_exit
def test_an_async_stream(exit_type: type[BaseException]) -> None:
    async def model(_: str) -> AsyncIterator[Any]:
        yield {"usage": {"prompt_tokens": 5, "completion_tokens": 5}, "choices": []}

    call = guard_async(model, budget={"max_usd": 1}, cost=leaving(exit_type))
    pieces: Any = call("hello")
    with pytest.raises(StopIteration):
        pieces.__anext__().send(None)
    with pytest.raises(exit_type):
        pieces.__anext__().send(None)
    is_booked(call)


@each_exit
def test_a_call_that_raised(exit_type: type[BaseException]) -> None:
    """What it reported before it broke is read by the same function."""

    def model(_: str) -> Iterator[Any]:
        yield {"usage": {"prompt_tokens": 5, "completion_tokens": 5}, "choices": []}
        raise ValueError

    call = guard(model, budget={"max_usd": 1}, cost=leaving(exit_type))
    with pytest.raises(exit_type):
        list(call("hello"))
    is_booked(call)


def many(call: Callable[[], Any]) -> None:
    for _ in range(5):
        call()


@each_exit
def test_a_cost_that_leaves_while_the_call_is_opened_holds_nothing(exit_type: type[BaseException]) -> None:
    asked = []

    def cost(tokens_in: int, tokens_out: int) -> float:
        asked.append(tokens_in)
        if len(asked) >= turn:
            raise exit_type
        return 0.1

    for turn in range(1, 6):
        asked.clear()
        call = guard(lambda **_: {"tokens": 5}, budget={"max_usd": 1}, cost=cost)
        with pytest.raises(exit_type):
            many(partial(call, messages=[{"role": "user", "content": "hello"}], max_tokens=9))
        assert call.spend()["reserved_usd"] == 0, turn


# ---- tools with a price ---------------------------------------------------------------------------------------------


@each_exit
@pytest.mark.parametrize("way", ["answered", "raised"])
async def test_every_guard_around_a_tool_is_paid(exit_type: type[BaseException], way: str) -> None:
    def leave(args: object, answer: object) -> int:
        raise exit_type

    def guarding() -> Guard:
        return Guard(Policy.build(max_usd=5, tools={"search": ToolRule(price=leave, price_bound=2)}))

    outer = AgentRun.start(guarding(), "outer")
    with outer.tools.inside(ToolUse("1", "delegate")):
        inner = AgentRun.start(guarding(), "inner")
        use = ToolUse("2", "search")
        assert len(inner.layers) == 2
        assert await inner.tools.check(use) is None
        with pytest.raises(exit_type):
            inner.tools.answered(use, "text") if way == "answered" else inner.tools.raised(use, ValueError())
    for layer in inner.layers:
        spend = layer.guard.accounts.spend()
        assert (spend["usd"], spend["estimated_calls"], spend["reserved_usd"]) == (2, 1, 0)
