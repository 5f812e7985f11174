"""Pydantic AI: one turn is one run, whoever asks for it, and however often it waits for a human."""

import asyncio
import gc
import itertools
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import (
    Agent,
    ApprovalRequired,
    CallDeferred,
    DeferredToolRequests,
    DeferredToolResults,
    ExternalToolset,
    RunContext,
    Tool,
    ToolDefinition,
)
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.usage import RequestUsage, RunUsage, UsageLimits

from runguard import Budget, PolicyError
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import MODEL
from tests.kit.examples import each_row

ENDLESS = UsageLimits(request_limit=None)
PRICES: Any = {MODEL: {"input": 0, "output": 1}}  # dollars per million tokens
LIMITS: Any = {MODEL: {"max_output_tokens": 100_000}}
MOST = 30


def delete(ctx: RunContext[Any], row: int) -> str:
    if not ctx.tool_call_approved:
        raise ApprovalRequired
    return "deleted"


class Conversation:
    """An agent whose tool a human has to approve each time, and whose history travels as JSON."""

    def __init__(self, guard: RunGuard, *, tools: Any = (delete,), calls: int = MOST, stream: bool = False) -> None:
        self.calls, self._stream, self._limit, self._history = 0, stream, calls, b"[]"
        model = FunctionModel(self._answer, stream_function=self._pieces, model_name=MODEL)
        outputs: Any = [str, DeferredToolRequests]
        here = [tool for tool in tools if not isinstance(tool, ExternalToolset)]
        elsewhere = [tool for tool in tools if isinstance(tool, ExternalToolset)]
        self.agent: Agent[Any, Any] = Agent(
            model, capabilities=[guard], tools=here, toolsets=elsewhere, output_type=outputs
        )

    def _next(self) -> ToolCallPart | None:
        self.calls += 1
        return ToolCallPart("delete", {"row": self.calls}, f"call-{id(self)}-{self.calls}") if self._more else None

    @property
    def _more(self) -> bool:
        return self.calls <= self._limit

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        call, usage = self._next(), RequestUsage(input_tokens=10, output_tokens=100)
        return ModelResponse([call or TextPart("done")], usage=usage)

    async def _pieces(self, messages: list[ModelMessage], info: AgentInfo) -> Any:
        if (call := self._next()) is None:
            yield "done"
        else:
            yield {0: DeltaToolCall("delete", call.args_as_json_str(), tool_call_id=call.tool_call_id)}

    async def turn(self, prompt: str | None, results: DeferredToolResults | None = None) -> Any:
        given: Any = {"message_history": ModelMessagesTypeAdapter.validate_json(self._history)}
        given |= {"deferred_tool_results": results, "usage_limits": ENDLESS}
        if self._stream:
            async with self.agent.run_stream(prompt, **given) as streamed:
                output = await streamed.get_output()
                self._history = streamed.all_messages_json()
                return output
        result = await self.agent.run(prompt, **given)
        self._history = result.all_messages_json()
        return result.output

    async def approve_all(self, prompt: str | None = None, *, denied: bool = False) -> Any:
        """Approve whatever the agent asks for, until it is done."""
        output = await self.turn("delete them all")
        for _ in range(MOST):
            if not isinstance(output, DeferredToolRequests):
                break
            output = await self.turn(prompt, answers_to(output, approved=not denied))
        return output


def answers_to(asked: DeferredToolRequests, *, approved: bool = True) -> DeferredToolResults:
    results = DeferredToolResults(approvals={call.tool_call_id: approved for call in asked.approvals})
    results.calls |= {call.tool_call_id: "done elsewhere" for call in asked.calls}
    return results


WAITING: dict[str, Callable[[], list[Any]]] = {
    "the tool asks for it": lambda: [delete],
    "the tool always needs it": lambda: [Tool(_delete_plainly, name="delete", requires_approval=True)],
    "somebody else executes the tool": lambda: [Tool(_delete_elsewhere, name="delete")],
    "the tool is declared alone": lambda: [
        ExternalToolset([ToolDefinition(name="delete", parameters_json_schema=_SCHEMA)])
    ],
}
_SCHEMA: Any = {"type": "object", "properties": {"row": {"type": "integer"}}}


def _delete_plainly(row: int) -> str:
    return "deleted"


def _delete_elsewhere(row: int) -> str:
    raise CallDeferred


# ---- One turn is one run.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAITING)
async def test_a_turn_is_one_run_however_often_a_human_approves(way: str, stream: bool) -> None:
    guard = RunGuard(max_model_calls=8)
    conversation = Conversation(guard, tools=WAITING[way](), stream=stream)
    output = await conversation.approve_all()
    assert conversation.calls == 8
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert output == guard.guard.stop_text(guard.trips[0])
    assert not guard.guard.runs
    assert guard.guard.pauses.waiting == 0


async def test_a_turn_that_is_resumed_several_times_at_once_is_one_run() -> None:
    guard = RunGuard(max_model_calls=8)
    conversation = Conversation(guard)
    agent, first = conversation.agent, await conversation.agent.run("delete them all")

    async def go_on(result: Any) -> None:
        for _ in range(MOST):
            if not isinstance(result.output, DeferredToolRequests):
                return
            answers, history = answers_to(result.output), result.all_messages()
            result = await agent.run(message_history=history, deferred_tool_results=answers, usage_limits=ENDLESS)

    await asyncio.gather(*[go_on(first) for _ in range(4)])
    assert (conversation.calls, guard.guard.guard_errors) == (8, 0)
    assert not guard.guard.runs
    assert guard.guard.pauses.waiting == 0


async def test_an_approval_with_a_message_goes_on_with_the_turn() -> None:
    guard = RunGuard(max_model_calls=8)
    conversation = Conversation(guard)
    await conversation.approve_all("yes, and hurry")
    assert conversation.calls == 8


async def test_a_turn_goes_on_in_another_worker_of_the_store(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'guard.db'}"
    guards = [RunGuard(max_model_calls=5, store=store, app="shop", user="ann") for _ in range(2)]
    workers = [Conversation(guard) for guard in guards]
    output: Any = None
    history, made = b"[]", 0
    for turn in range(MOST):
        worker, guard = workers[turn % 2], guards[turn % 2]
        worker._history, worker.calls = history, made
        output = await worker.turn(None if turn else "go", answers_to(output) if turn else None)
        history, made = worker._history, worker.calls
        assert guard.flush(5)
        if not isinstance(output, DeferredToolRequests):
            break
    assert made == 5
    assert sum(len(guard.trips) for guard in guards) == 1
    assert not any(guard.guard.runs for guard in guards)


async def test_the_next_message_begins_a_new_run() -> None:
    guard = RunGuard(max_model_calls=3)
    conversation = Conversation(guard, calls=2)
    assert await conversation.approve_all() == "done"
    assert await conversation.turn("thanks") == "done"
    assert conversation.calls == 4
    assert not guard.trips


async def test_another_user_does_not_go_on_with_the_run() -> None:
    guard = RunGuard(max_model_calls=2, user=lambda ctx: ctx.deps or "")
    conversation = Conversation(guard)
    output = await conversation.agent.run("go", deps="ann")
    both = await asyncio.gather(
        *(
            conversation.agent.run(
                message_history=output.all_messages(), deferred_tool_results=answers_to(output.output), deps=user
            )
            for user in ("bob", "ann")
        )
    )
    assert all(isinstance(result.output, DeferredToolRequests) for result in both)
    spent = {name: guard.spend(f"user:/{name}")["calls"] for name in ("ann", "bob")}
    assert spent == {"ann": 2, "bob": 1}


# ---- A tool that waits is not paid.


@pytest.mark.parametrize("way", WAITING)
async def test_a_tool_that_waits_costs_nothing_until_it_is_executed(way: str) -> None:
    guard = RunGuard(max_usd=1, prices=PRICES, models=LIMITS, tools={"delete": {"price": "0.04", "max_calls": 3}})
    conversation = Conversation(guard, tools=WAITING[way](), calls=3)
    output = await conversation.turn("go")
    assert isinstance(output, DeferredToolRequests)
    assert guard.spend()["tools_usd"] == 0
    assert guard.spend()["reserved_usd"] == 0
    while isinstance(output, DeferredToolRequests):
        output = await conversation.turn(None, answers_to(output))
    assert output == "done"
    assert guard.spend()["tools_usd"] == Decimal("0.12")
    assert not guard.trips


async def test_a_tool_that_a_human_refuses_costs_nothing() -> None:
    guard = RunGuard(max_usd=1, prices=PRICES, models=LIMITS, tools={"delete": {"price": "0.04"}})
    conversation = Conversation(guard, calls=3)
    assert await conversation.approve_all(denied=True) == "done"
    assert guard.spend()["tools_usd"] == 0


async def test_calls_that_others_execute_count_against_their_limit() -> None:
    guard = RunGuard(tools={"delete": {"max_calls": 4}})
    conversation = Conversation(guard, tools=WAITING["the tool is declared alone"]())
    await conversation.approve_all()
    assert conversation.calls == 5, "four calls are allowed; the fifth was made before it could be seen"
    assert [trip.rule for trip in guard.trips] == ["tool_limit"]


# ---- For whom a run is.


def answering(tokens: int = 100) -> FunctionModel:
    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return ModelResponse([TextPart("hello")], usage=RequestUsage(input_tokens=1, output_tokens=tokens))

    return FunctionModel(answer, model_name=MODEL)


@each_row("way", ["run", "run_sync", "run_stream", "iter"])
def test_a_function_names_the_user_from_the_context_of_the_run(way: str) -> None:
    def user(ctx: RunContext[str]) -> str:
        return ctx.deps

    guard = RunGuard(
        app="shop", user=user, session=lambda ctx: ctx.conversation_id, budgets=[Budget(calls=9, per="user")]
    )

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        yield "hello"

    agent = Agent(
        FunctionModel(stream_function=stream) if way == "run_stream" else answering(),
        deps_type=str,
        capabilities=[guard],
    )

    async def turn() -> None:
        if way == "run":
            await agent.run("hi", deps="ann")
        elif way == "iter":
            async with agent.iter("hi", deps="ann") as run:
                _ = [node async for node in run]
        else:
            async with agent.run_stream("hi", deps="ann") as streamed:
                await streamed.get_output()

    if way == "run_sync":
        agent.run_sync("hi", deps="ann")
    else:
        asyncio.run(turn())
    assert [status.scope for status in guard.budgets()] == ["user:shop/ann"]


async def test_a_budget_per_user_without_a_user_is_an_error() -> None:
    guard = RunGuard(budgets=[Budget(usd=1, per="user")], prices=PRICES)
    agent: Agent[Any, str] = Agent(answering(), capabilities=[guard])
    with pytest.raises(PolicyError, match="needs a user"):
        await agent.run("hi")
    assert not guard.guard.runs


async def test_runs_at_once_with_the_same_id_are_guarded_each_by_its_own_user() -> None:
    """An app may take the id of a run from its client."""
    guard = RunGuard(user=lambda ctx: ctx.deps, max_model_calls=3)
    inside, first_is_done = asyncio.Event(), asyncio.Event()
    made = {"ann": 0, "bob": 0}

    def agent_of(user: str) -> Agent[str, str]:
        async def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            made[user] += 1
            if user == "ann" and made["ann"] == 1:
                inside.set()
                await first_is_done.wait()
            if user == "bob":
                return ModelResponse([TextPart("done")])
            return ModelResponse([ToolCallPart("look", {"n": made[user]})])

        return Agent(FunctionModel(answer, model_name=MODEL), deps_type=str, capabilities=[guard], tools=[look])

    def look(n: int) -> str:
        return f"page {n}"

    slow = asyncio.ensure_future(agent_of("ann").run("x", deps="ann", run_id="same", usage_limits=ENDLESS))
    await inside.wait()
    await agent_of("bob").run("x", deps="bob", run_id="same")
    first_is_done.set()
    await slow
    assert made == {"ann": 3, "bob": 1}
    assert {user: guard.spend(f"user:/{user}")["calls"] for user in made} == {"ann": 3, "bob": 1}


# ---- Agents beside the tools.


@pytest.mark.parametrize("place", ["validator", "instructions"])
@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_an_agent_that_a_hook_starts_belongs_to_the_run(place: str, is_sync: bool) -> None:
    guard, made = RunGuard(max_model_calls=6), {"worker": 0, "judge": 0}

    def answers(name: str) -> FunctionModel:
        def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            made[name] += 1
            return ModelResponse([TextPart("done")])

        return FunctionModel(answer, model_name=MODEL)

    judge: Agent[Any, str] = Agent(answers("judge"), capabilities=[guard])
    agent: Agent[Any, str] = Agent(answers("worker"), capabilities=[guard], retries=20)

    async def judged(*_: Any) -> str:
        for _number in range(9):
            await judge.run("is this fine?")
        return "yes"

    if place == "validator":
        agent.output_validator(judged)
    else:
        agent.instructions(judged)
    if is_sync:
        await asyncio.to_thread(agent.run_sync, "x")
    else:
        await agent.run("x")
    assert sum(made.values()) == 6
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert not guard.guard.runs


# ---- The bill of one run.


@pytest.mark.parametrize("way", ["run", "run_stream", "iter"])
async def test_the_metadata_of_a_result_holds_the_bill_of_its_run(way: str) -> None:
    guard = RunGuard(prices=PRICES, models=LIMITS)
    numbers = itertools.count(1)

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        part: Any = ToolCallPart("look", {"n": 1}) if next(numbers) == 1 else TextPart("done")
        return ModelResponse([part], usage=RequestUsage(input_tokens=10, output_tokens=100))

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        for part in answer(messages, info).parts:
            yield part.content if isinstance(part, TextPart) else {0: DeltaToolCall("look", '{"n": 1}')}

    seen: list[Any] = []

    def look(ctx: RunContext[Any], n: int) -> str:
        seen.append(guard.bill(ctx)["runguard"]["model_calls"])
        return "page"

    model = FunctionModel(answer, stream_function=stream, model_name=MODEL)
    agent: Agent[Any, str] = Agent(model, capabilities=[guard], metadata=guard.bill, tools=[look])
    if way == "run":
        metadata = (await agent.run("x", metadata={"mine": 1})).metadata
        assert metadata is not None
        assert metadata["mine"] == 1
    elif way == "run_stream":
        async with agent.run_stream("x") as streamed:
            await streamed.get_output()
        metadata = streamed.metadata
    else:
        async with agent.iter("x") as run:
            _ = [node async for node in run]
        metadata = run.metadata
    assert metadata is not None
    bill = metadata["runguard"]
    spend = guard.spend()
    assert (bill["model_calls"], bill["tokens"], Decimal(bill["usd"])) == (
        2,
        spend["input_tokens"] + spend["output_tokens"],
        spend["usd"],
    )
    assert bill["run"]
    assert seen == [1]
    gc.collect()
    assert guard.bill(RunContext(deps=None, model=model, usage=RunUsage())) == {}
