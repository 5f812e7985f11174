"""What the middleware for Microsoft Agent Framework sends, books and leaves behind."""

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

import runguard
from runguard import BudgetExceededError, RunStoppedError
from runguard.testing.conformance import MODEL, AgentSpec, Reply

pytest.importorskip("agent_framework", reason="agent-framework-core is not among the oldest supported frameworks")
from agent_framework import (
    Agent,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
)

from runguard.agent_framework import RunGuard
from tests.frameworks.agent_framework_harness import AgentFrameworkHarness, AgentFrameworkSession

_PRICES = {MODEL: {"input": 1.0, "output": 1.0}}


class Recorder(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A model that keeps its requests and answers as it is told."""

    def __init__(self, usage: Mapping[str, Any] | None = None, conversation: str | None = None) -> None:
        super().__init__()
        self.model, self.usage, self.conversation = MODEL, usage, conversation
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.closed = 0

    def _inner_get_response(
        self, *, messages: Sequence[Message], stream: bool, options: Mapping[str, Any], **_: Any
    ) -> Any:
        self.asked.append((list(messages), dict(options)))
        return self._build_response_stream(self._pieces()) if stream else self._whole()

    async def _whole(self) -> ChatResponse[Any]:
        usage: Any = self.usage
        return ChatResponse(
            messages=[Message(role="assistant", contents=["hello"])],
            usage_details=usage,
            conversation_id=self.conversation,
        )

    async def _pieces(self) -> AsyncIterator[ChatResponseUpdate]:
        try:
            for word in ("one ", "two ", "three"):
                yield ChatResponseUpdate(role="assistant", contents=[Content.from_text(word)])
        finally:
            self.closed += 1


async def test_a_budget_lowers_the_output_limit() -> None:
    client = Recorder()
    agent = Agent(
        client, middleware=[RunGuard(max_usd="0.005", prices=_PRICES, models={MODEL: {"max_output_tokens": 50_000}})]
    )
    await agent.run("Hi", options={"max_tokens": 20_000})
    assert 0 < client.asked[0][1]["max_tokens"] < 5_000


async def test_a_notice_stands_behind_the_request_and_stays_out_of_the_history() -> None:
    seen = []

    def script(number: int, newest: str) -> Reply:
        seen.append(newest)
        return Reply(calls=[("look", {"page": number})]) if number == 1 else Reply("done")

    spec = AgentSpec(script, tools={"look": lambda page: f"page {page}"})
    guard = RunGuard(max_model_calls=10, budget_notice=[0.1])
    result = await AgentFrameworkHarness().session(spec, guard).turn("Read it")
    assert seen[1].startswith("What is left for this work: 9 of 10 model calls"), seen
    assert not any("What is left" in content for _, _, content in result.events)


@pytest.mark.parametrize(
    ("reported", "tokens"),
    [
        ({"input_token_count": 100, "output_token_count": 5, "cache_read_input_token_count": 60}, 105),
        ({"input_token_count": 100, "output_token_count": 5, "cache_creation_input_token_count": 60}, 105),
        ({"input_token_count": 10, "output_token_count": 5, "cache_read_input_token_count": 90}, 105),
        (
            {
                "input_token_count": 100,
                "output_token_count": 5,
                "cache_read_input_token_count": 60,
                "anthropic.cache_read_input_tokens": 60,
            },
            165,
        ),
    ],
)
async def test_tokens_of_a_cache_are_counted_once(reported: Mapping[str, Any], tokens: int) -> None:
    guard = RunGuard()
    await Agent(Recorder(reported), middleware=[guard]).run("Hi")
    assert guard.spend()["tokens"] == tokens


async def test_a_stored_conversation_is_reserved_for() -> None:
    client = Recorder({"input_token_count": 90_000, "output_token_count": 10}, conversation="conv_af")
    guard = RunGuard(max_usd="0.15", prices=_PRICES, models={MODEL: {"max_output_tokens": 100}}, on_stop="raise")
    agent = Agent(client, middleware=[guard])
    with runguard.run():
        await agent.run("Hi", options={"conversation_id": "conv_af"})
        with pytest.raises(BudgetExceededError):
            await agent.run("Go on", options={"conversation_id": "conv_af"})
    assert len(client.asked) == 1


async def test_a_stream_that_its_reader_leaves_is_closed_and_booked() -> None:
    client, guard = Recorder(), RunGuard(max_usd=1, prices=_PRICES)
    stream = Agent(client, middleware=[guard]).run("Hi", stream=True)
    async with stream:
        async for _ in stream:
            break
    del stream
    gc.collect()
    assert client.closed == 1
    assert not guard.guard.runs
    assert guard.spend()["estimated_calls"] == 1
    assert guard.spend()["reserved_usd"] == 0


async def test_the_caller_of_a_stream_is_outside_of_the_run() -> None:
    guard = RunGuard(max_model_calls=1)
    first, second = (Agent(Recorder(), name=name, middleware=[guard]) for name in ("first", "second"))
    async for _ in first.run("Hi", stream=True):
        await second.run("Hi")
    assert not guard.trips, "an agent that the reader of a stream starts has a run of its own"


async def test_a_stop_carries_its_trip() -> None:
    def looping() -> Agent:
        spec = AgentSpec(lambda n, _: Reply(calls=[("look", {"n": n})]), tools={"look": lambda n: n})
        return AgentFrameworkSession(spec, guard).agent

    guard = RunGuard(max_model_calls=2)
    response = await looping().run("Hi")
    assert response.messages[-1].additional_properties["runguard"]["rule"] == "model_calls"
    assert response.additional_properties["runguard"]["model_calls"] == 2
    guard = RunGuard(max_model_calls=2, on_stop="raise")
    with pytest.raises(RunStoppedError):
        await looping().run("Hi")
    assert not guard.guard.runs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [(4, 100), (100, 4)])
async def test_of_two_guards_of_an_agent_both_hold(outer: int, inner: int, stream: bool) -> None:
    guards = [RunGuard(max_model_calls=most, max_usd=9, prices=_PRICES) for most in (outer, inner)]
    paid = RunGuard(max_usd=9, prices=_PRICES, tools={"page": {"price": "0.5"}})
    spec = AgentSpec(lambda n, _: Reply(calls=[("page", {"n": n})]), tools={"page": lambda n: f"page {n}"})
    session = AgentFrameworkSession(spec, None)
    agent: Agent[Any] = session.agent
    if stream:
        async for _ in agent.run("Go", stream=True, middleware=[paid, *guards]):
            pass
    else:
        await agent.run("Go", middleware=[paid, *guards])
    assert session.model_calls == 4
    assert [guard.spend()["calls"] for guard in (paid, *guards)] == [4, 4, 4]
    assert [len(guard.trips) for guard in guards] == [int(most == 4) for most in (outer, inner)]
    assert paid.spend()["tools_usd"] == 2
    assert not any(guard.guard.runs for guard in (paid, *guards))


async def test_an_agent_that_a_task_starts_after_the_run_is_a_run_of_its_own() -> None:
    guards = [RunGuard(max_model_calls=3), RunGuard(max_model_calls=2)]
    late: list[asyncio.Task[Any]] = []
    done = asyncio.Event()

    async def work() -> str:
        await done.wait()
        inner: Agent[Any] = AgentFrameworkSession(AgentSpec(lambda n, _: Reply("late")), guards[1]).agent
        return str((await inner.run("Go")).text)

    async def begin(n: int) -> str:
        late.append(asyncio.create_task(work()))
        return "begun"

    steps = [Reply(calls=[("begin", {"n": 1})]), Reply("done")]
    session = AgentFrameworkSession(AgentSpec(lambda n, _: steps[n - 1], tools={"begin": begin}), guards[0])
    await session.agent.run("Go")
    done.set()
    assert await late[0] == "late"
    assert [guard.spend()["calls"] for guard in guards] == [2, 1]
    assert [guard.guard.guard_errors for guard in guards] == [0, 0]
