"""Pydantic AI: what the rules see of tool calls that fail, and where agents that tools start belong."""

import asyncio
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from threading import Thread
from typing import Any

import pytest
from pydantic_ai import Agent, ModelRetry, Tool
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage, UsageLimits

from runguard import RunStoppedError
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import MODEL
from tests.frameworks.pydantic_harness import said

ENDLESS = UsageLimits(request_limit=None)
MOST = 40


def retry(city: str) -> str:
    raise ModelRetry("The weather service could not parse the answer of its provider.")


def fail(city: str) -> str:
    raise ConnectionError("no route to the weather service")


def weather(days: int) -> str:
    return f"sunny for {days} days"


async def hang(city: str) -> str:
    await asyncio.sleep(60)
    return "sunny"


def same(n: int) -> dict[str, Any]:
    return {"city": f"town of the {n}th kind, {'abcdefghijklmnopqrstuvwxyz'[n % 26] * 3}"}


def wrong(n: int) -> dict[str, Any]:
    return {"days": f"{'abcdefghijklmnopqrstuvwxyz'[n % 26] * 3} days"}


FAILING: dict[str, tuple[list[Any], str, Callable[[int], dict[str, Any]]]] = {
    "a retry request": ([Tool(retry, max_retries=MOST)], "retry", same),
    "an unknown tool": ([Tool(weather, max_retries=MOST)], "forecast", same),
    "arguments that do not validate": ([Tool(weather, max_retries=MOST)], "weather", wrong),
    "a time-out": ([Tool(hang, max_retries=MOST, timeout=0.01)], "hang", same),
}


def asking(tool: str, args: Callable[[int], dict[str, Any]]) -> tuple[FunctionModel, list[int]]:
    """A model that calls a tool again and again, each time with other arguments."""
    made: list[int] = []

    def call() -> tuple[str, dict[str, Any], str] | None:
        made.append(1)
        return (tool, args(len(made)), f"call-{len(made)}") if len(made) < MOST else None

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        part = call()
        return ModelResponse(
            [ToolCallPart(*part) if part else TextPart("gave up")], usage=RequestUsage(input_tokens=9, output_tokens=9)
        )

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        if (part := call()) is None:
            yield "gave up"
        else:
            yield {0: DeltaToolCall(part[0], json.dumps(part[1]), tool_call_id=part[2])}

    return FunctionModel(answer, stream_function=stream, model_name=MODEL), made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", FAILING)
async def test_a_tool_that_fails_again_and_again_is_recognised_whatever_its_arguments(way: str, stream: bool) -> None:
    tools, name, args = FAILING[way]
    guard, (model, made) = RunGuard(), asking(name, args)
    agent: Agent[Any, str] = Agent(model, tools=tools, capabilities=[guard], retries=MOST)
    text = await said(agent, "x", stream, usage_limits=ENDLESS)
    assert len(made) <= 7
    assert {trip.rule for trip in guard.trips} <= {"tool_failures", "no_news", "stall", "repetition"}
    assert text == guard.guard.stop_text(guard.trips[0])


async def test_a_retry_about_a_missing_item_is_no_failure() -> None:
    names = iter(["ann", "bob", "cid", "dee", "eve", "fay", "gus", "hal"])

    def find(name: str) -> str:
        if name != "hal":
            raise ModelRetry(f"No customer named {name} was found.")
        return "customer 7"

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        name = next(names, None)
        return ModelResponse([ToolCallPart("find", {"name": name}) if name else TextPart("found")])

    guard = RunGuard()
    agent: Agent[Any, str] = Agent(
        FunctionModel(answer, model_name=MODEL), tools=[Tool(find, max_retries=MOST)], capabilities=[guard]
    )
    assert (await agent.run("x")).output == "found"
    assert not guard.trips


async def test_calls_of_unknown_tools_count_and_cost_nothing() -> None:
    guard = RunGuard(
        max_tool_calls=3, max_usd=1, prices={MODEL: {"input": 0, "output": 0}}, tools={"*": {"price": "0.1"}}
    )
    model, made = asking("forecast", same)
    agent: Agent[Any, str] = Agent(model, tools=[weather], capabilities=[guard], retries=MOST)
    await agent.run("x", usage_limits=ENDLESS)
    assert len(made) == 4, "three calls are allowed; the fourth was made before it could be seen"
    assert [trip.rule for trip in guard.trips] == ["tool_calls"]
    assert guard.spend()["tools_usd"] == 0


async def test_an_output_that_does_not_validate_is_no_tool_call() -> None:
    numbers = itertools.count()

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        [output] = info.output_tools
        value: Any = "many" if next(numbers) < 3 else 7
        return ModelResponse([ToolCallPart(output.name, {"response": value})])

    guard = RunGuard(max_tool_calls=1)
    agent: Agent[Any, int] = Agent(
        FunctionModel(answer, model_name=MODEL), output_type=int, capabilities=[guard], retries=5
    )
    assert (await agent.run("x")).output == 7
    assert not guard.trips


async def test_a_tool_that_times_out_opens_its_breaker_for_all_runs() -> None:
    guard = RunGuard()
    for _ in range(2):
        model, _made = asking("hang", same)
        agent: Agent[Any, str] = Agent(model, tools=FAILING["a time-out"][0], capabilities=[guard])
        await agent.run("x", usage_limits=ENDLESS)
    assert guard.snapshot()["breakers"] == {"hang": "open"}


# ---- Agents that a tool starts in threads.


def _in_a_pool(ask: Callable[[int], str]) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(ask, range(6)))


def _in_threads(ask: Callable[[int], str]) -> list[str]:
    found: list[str] = []
    threads = [Thread(target=lambda n=n: found.append(ask(n))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("start", [_in_a_pool, _in_threads])
async def test_agents_in_the_threads_of_a_tool_spend_the_budget_of_its_run(start: Any, is_async: bool) -> None:
    prices: Any = {MODEL: {"input": 0, "output": 100}}  # a call of 500 tokens costs five cents
    guard = RunGuard(max_usd="0.12", prices=prices, models={MODEL: {"max_output_tokens": 500}})
    paid: list[int] = []

    def inner_answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        paid.append(1)
        return ModelResponse([TextPart("ok")], usage=RequestUsage(input_tokens=1, output_tokens=500))

    def outer_answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        part: Any = ToolCallPart("delegate", {}) if len(messages) == 1 else TextPart("done")
        return ModelResponse([part], usage=RequestUsage(input_tokens=1, output_tokens=1))

    inner: Agent[Any, str] = Agent(FunctionModel(inner_answer, model_name=MODEL), capabilities=[guard])

    def ask(n: int) -> str:
        try:
            return inner.run_sync(f"task {n}").output
        except RunStoppedError:  # the run around it was stopped before it began
            return "stopped"

    def delegate() -> str:
        return " ".join(start(ask))

    async def delegate_in_loop() -> str:
        return await asyncio.to_thread(delegate)

    tool = Tool(delegate_in_loop if is_async else delegate, name="delegate")
    outer: Agent[Any, str] = Agent(FunctionModel(outer_answer, model_name=MODEL), tools=[tool], capabilities=[guard])
    await outer.run("x", model_settings={"max_tokens": 10})
    assert len(paid) == 2
    assert guard.spend()["usd"] < Decimal("0.12")
    assert len({trip.run_id for trip in guard.trips}) == 1
    assert not guard.guard.runs


# ---- Agents that a tool calls.


@pytest.mark.parametrize("on_stop", ["stop", "raise"])
async def test_an_agent_that_starts_after_the_stop_ends_as_the_others_do(on_stop: Any) -> None:
    guard = RunGuard(max_model_calls=4, on_stop=on_stop)
    made = [0]

    def looks(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        made[0] += 1
        return ModelResponse([ToolCallPart("look", {"n": made[0]})])

    inner = Agent(FunctionModel(looks), capabilities=[guard])
    outer = Agent(FunctionModel(lambda messages, info: ModelResponse([ToolCallPart("ask", {})])), capabilities=[guard])

    @inner.tool_plain
    def look(n: int) -> str:
        return f"page {n}"

    @outer.tool_plain
    async def ask() -> str:
        return "".join([(await inner.run("go")).output for _ in range(2)])

    if on_stop == "raise":
        with pytest.raises(RunStoppedError):
            await outer.run("go")
    else:
        assert (await outer.run("go")).output == guard.guard.stop_text(guard.trips[0])
    assert made == [3]
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
