"""Trees of agents: each of several guards counts each call once, and what ends or outlives whom."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

import pytest
from agents import Agent as OpenAIAgent
from agents import Runner, function_tool
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import Tool
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

import runguard
from runguard import Budget, openai_agents, pydantic_ai
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.termination import TokenUsageTermination
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply, nothing_left
from tests.frameworks import adk_harness, langchain_harness, openai_harness, pydantic_harness
from tests.frameworks.newest import NEWEST

Ask = Callable[[str], Awaitable[str]]
_CALLS = 2  # of each agent with a tool: it calls the tool, and answers


class SecondMiddleware(RunGuardMiddleware):
    """LangChain takes one middleware of each name."""


def _spec(ask: Ask | None, asks: int = 1) -> AgentSpec:
    def script(number: int, _: str) -> Reply:
        return Reply(calls=[("ask", {"q": f"{number}"})]) if ask is not None and number <= asks else Reply("done")

    return AgentSpec(script, "agent")


async def _look(q: str) -> str:
    """Look."""
    return "an answer"


def _langchain(guards: Sequence[Any], ask: Ask | None, asks: int = 1) -> Ask:
    model: Any = langchain_harness.ScriptedChat(_spec(ask, asks).script, [0])
    agent = create_agent(model, [langchain_tool("ask")(ask)] if ask is not None else [], middleware=guards)
    return _invoked(agent)


def _invoked(agent: Any) -> Ask:
    async def run(q: str) -> str:
        return str((await agent.ainvoke({"messages": [HumanMessage(q)]}))["messages"][-1].content)

    return run


def _pydantic(guards: Sequence[Any], ask: Ask | None, asks: int = 1) -> Ask:
    made = 0

    def script(messages: Any, info: Any) -> ModelResponse:
        nonlocal made
        made += 1
        is_call = ask is not None and made <= asks
        return ModelResponse([ToolCallPart("ask", {"q": f"{made}"}) if is_call else TextPart("done")])

    agent: Any = PydanticAgent(
        FunctionModel(script, model_name=MODEL),
        tools=[Tool(ask, name="ask")] if ask is not None else [],
        capabilities=guards,
    )

    async def run(q: str) -> str:
        return str((await agent.run(q)).output)

    return run


def _openai(guards: Sequence[Any], ask: Ask | None, asks: int = 1) -> Ask:
    tools: Any = [function_tool(ask, name_override="ask")] if ask is not None else []
    agent: Any = OpenAIAgent(name="agent", model=openai_harness.ScriptedModel(_spec(ask, asks), [0]), tools=tools)
    for guard in reversed(guards):
        agent = guard.guarded(agent)

    async def run(q: str) -> str:
        return str((await Runner.run(agent, q)).final_output)

    return run


_FRAMEWORKS: dict[str, Any] = {
    "langchain": (_langchain, RunGuardMiddleware, SecondMiddleware),
    "pydantic_ai": (_pydantic, pydantic_ai.RunGuard, pydantic_ai.RunGuard),
    "openai_agents": (_openai, openai_agents.AgentGuard, openai_agents.AgentGuard),
}

# frameworks whose oldest supported release is the newest one
if find_spec("strands") is not None:
    from strands import Agent as StrandsAgent
    from strands import tool as strands_tool

    from runguard import strands
    from tests.frameworks import strands_harness

    class SecondPlugin(strands.RunGuard):
        """Strands takes one plugin of each name."""

        name = "second"

    def _strands(guards: Sequence[Any], ask: Ask | None, asks: int = 1) -> Ask:
        model = strands_harness.ScriptedModel(_spec(ask, asks), [0])
        tools: Any = [strands_tool(name="ask")(ask)] if ask is not None else []
        agent = StrandsAgent(model=model, tools=tools, plugins=[*guards], callback_handler=None)

        async def run(q: str) -> str:
            return str(await agent.invoke_async(q)).strip()

        return run

    _FRAMEWORKS["strands"] = (_strands, strands.RunGuard, SecondPlugin)

if find_spec("agent_framework") is not None:
    from agent_framework import Agent as FrameworkAgent
    from agent_framework import FunctionTool

    from runguard import agent_framework
    from tests.frameworks import agent_framework_harness

    def _agent_framework(guards: Sequence[Any], ask: Ask | None, asks: int = 1) -> Ask:
        client: Any = agent_framework_harness.ScriptedClient(_spec(ask, asks), [0])
        tools = [FunctionTool(name="ask", description="Ask.", func=ask)] if ask is not None else []
        agent: Any = FrameworkAgent(client, tools=tools, middleware=[*guards])

        async def run(q: str) -> str:
            return str((await agent.run(q)).text)

        return run

    _FRAMEWORKS["agent_framework"] = (_agent_framework, agent_framework.RunGuard, agent_framework.RunGuard)

_HARNESSES: list[Harness] = [
    adk_harness.AdkHarness(),
    langchain_harness.LangChainHarness(),
    openai_harness.OpenAIAgentsHarness(),
    pydantic_harness.PydanticAIHarness(),
    *(harness() for harness in NEWEST),
]


@pytest.mark.parametrize("inner", ["", "A", "B", "AB", "BA"])
@pytest.mark.parametrize("outer", ["A", "AB"])
@pytest.mark.parametrize("framework", _FRAMEWORKS)
async def test_each_guard_counts_each_call_once(framework: str, outer: str, inner: str) -> None:
    build, first, second = _FRAMEWORKS[framework]
    limits: Any = {"max_model_calls": 2 * _CALLS, "max_tool_calls": 2}  # one of each agent
    guards = {"A": first(**limits), "B": second(**limits)}
    sub = build([guards[name] for name in inner], _look)

    async def ask(q: str) -> str:
        """Ask."""
        return str(await sub(q))

    with runguard.run() as turn:
        assert await build([guards[name] for name in outer], ask)("go") == "done"
    seen = bool(inner) or framework == "openai_agents"  # there, the agents of a tool are guarded, too
    expected = {
        name: (_CALLS if name in outer else 0) + (_CALLS if seen and name in outer + inner else 0) for name in guards
    }
    assert {name: guard.spend()["calls"] for name, guard in guards.items()} == expected
    assert (guards["A"].trips, guards["B"].trips, turn.trips) == ([], [], [])


@pytest.mark.parametrize("framework", _FRAMEWORKS)
async def test_a_limit_around_two_guards_counts_each_call_once(framework: str) -> None:
    build, first, second = _FRAMEWORKS[framework]
    with runguard.run(max_model_calls=_CALLS) as turn:
        assert await build([first(max_model_calls=50), second(max_model_calls=50)], _look)("go") == "done"
    assert (turn.calls, turn.trips) == (_CALLS, [])


@pytest.mark.parametrize("inner_has_middleware", [False, True])
async def test_a_guarded_model_in_a_guarded_agent_is_counted_once_by_a_guard_around(inner_has_middleware: bool) -> None:
    around = RunGuardMiddleware(max_model_calls=50)
    model: Any = GuardedChatModel(langchain_harness.ScriptedChat(_spec(None).script, [0]), max_model_calls=50)
    sub = _invoked(create_agent(model, [], middleware=[around] if inner_has_middleware else []))

    async def ask(q: str) -> str:
        """Ask."""
        return await sub(q)

    assert await _langchain([around], ask)("go") == "done"
    assert (around.spend()["calls"], model.spend()["calls"]) == (_CALLS + 1, 1)


@pytest.mark.parametrize("framework", _FRAMEWORKS)
async def test_the_cap_of_a_guard_holds_for_an_agent_that_another_one_guards(framework: str) -> None:
    build, first, second = _FRAMEWORKS[framework]
    capped, other = first(max_model_calls=1), second(max_model_calls=50)
    asked = 0
    sub = build([other], None)

    async def ask(q: str) -> str:
        """Ask."""
        nonlocal asked
        asked += 1
        return str(await sub(q))

    await build([capped, other], ask)("go")
    assert asked <= 1
    assert (capped.spend()["calls"], other.spend()["calls"]) == (1, 1)
    assert [trip.rule for trip in capped.trips] == ["model_calls"]


@pytest.mark.parametrize("framework", [name for name in _FRAMEWORKS if name != "pydantic_ai"])
async def test_a_condition_around_two_guards_counts_each_answer_once(framework: str) -> None:
    build, first, second = _FRAMEWORKS[framework]
    reply = Reply()
    condition = TokenUsageTermination(max_total=2 * _CALLS * (reply.input_tokens + reply.output_tokens) + 1)
    outer, inner = first(max_model_calls=50, termination_condition=condition), second(max_model_calls=50)
    sub = build([outer, inner], _look)

    async def ask(q: str) -> str:
        """Ask."""
        return str(await sub(q))

    assert await build([outer, inner], ask)("go") == "done"


class TwoAttempts(AgentMiddleware[Any, Any, Any]):
    """Asks the model twice, as a retry does whose first attempt was answered and billed."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        await handler(request)
        return await handler(request)


async def test_each_attempt_between_the_guards_of_an_inner_agent_is_counted() -> None:
    around, within = RunGuardMiddleware(max_model_calls=50), SecondMiddleware(max_model_calls=50)
    sub = _langchain([around, TwoAttempts(), within], None)

    async def ask(q: str) -> str:
        """Ask."""
        return await sub(q)

    assert await _langchain([around, within], ask)("go") == "done"
    assert (around.spend()["calls"], within.spend()["calls"]) == (_CALLS + 1, _CALLS + 2)


@pytest.mark.parametrize("framework", _FRAMEWORKS)
async def test_an_agent_in_the_background_goes_on_when_the_run_that_began_it_has_ended(framework: str) -> None:
    build, first, _ = _FRAMEWORKS[framework]
    guard = first(budgets=[Budget(calls=2 * _CALLS, per="app")], tools={"ask": {"price": "0.5"}})
    has_ended, jobs = asyncio.Event(), list[asyncio.Task[str]]()

    async def look(q: str) -> str:
        """Look."""
        await has_ended.wait()
        return "an answer"

    sub = build([guard], look)

    async def ask(q: str) -> str:
        """Ask."""
        jobs.append(asyncio.create_task(sub(q)))
        await asyncio.sleep(0.05)  # until it has called its tool
        return "It works on it."

    assert await build([guard], ask)("go") == "done"
    has_ended.set()
    assert await asyncio.wait_for(jobs.pop(), 10) == "done"
    await nothing_left(guard)
    assert (guard.trips, guard.guard.guard_errors) == ([], 0)
    [budget] = guard.budgets()
    assert budget.spent == 2 * _CALLS
    assert await build([guard], None)("go") != "done", "the budget is used up"


@pytest.mark.parametrize("framework", _FRAMEWORKS)
async def test_limits_hold_for_an_agent_that_outlives_its_run(framework: str) -> None:
    build, first, _ = _FRAMEWORKS[framework]
    guard, has_ended, jobs = first(max_model_calls=6), asyncio.Event(), list[asyncio.Task[str]]()

    async def look(q: str) -> str:
        """Look."""
        await has_ended.wait()
        return f"the answer to {q}"

    sub = build([guard], look, asks=15)

    async def ask(q: str) -> str:
        """Ask."""
        jobs.append(asyncio.create_task(sub(q)))
        await asyncio.sleep(0.05)  # until it has called its tool
        return "It works on it."

    assert await build([guard], ask)("go") == "done"
    has_ended.set()
    assert await asyncio.wait_for(jobs.pop(), 10) != "done"
    await nothing_left(guard)
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert guard.spend()["calls"] == _CALLS + 1 + 6, "its first call was part of the run that has ended"


async def test_a_stop_holds_for_an_agent_that_outlives_its_run() -> None:
    guard = pydantic_ai.RunGuard()
    is_at_work, may_go_on, jobs = asyncio.Event(), asyncio.Event(), list[asyncio.Future[str]]()

    async def look(q: str) -> str:
        """Look."""
        is_at_work.set()
        await may_go_on.wait()
        return "an answer"

    sub = _pydantic([guard], look)

    async def ask(q: str) -> str:
        """Ask."""
        jobs.append(asyncio.ensure_future(sub(q)))
        await is_at_work.wait()
        guard.stop(f"run:{next(iter(guard.guard.runs))}")
        return "It works on it."

    await _pydantic([guard], ask)("go")
    may_go_on.set()
    assert await asyncio.wait_for(jobs.pop(), 10) != "done"
    assert guard.spend()["calls"] == 2


@pytest.mark.parametrize(("outer", "inner"), [("AB", "AB"), ("AB", "BA"), ("A", "AB"), ("AB", "B")])
async def test_paid_tools_of_an_inner_agent_are_paid_once_by_each_guard(outer: str, inner: str) -> None:
    limits: Any = {"max_model_calls": 20, "tools": {"pay": {"price": "0.5"}}}
    guards = {"A": RunGuardMiddleware(**limits), "B": SecondMiddleware(**limits)}

    @langchain_tool
    def pay(n: int) -> str:
        """Pay."""
        return f"paid {n}: {interrupt('may I?')}"

    script: Any = lambda n, _: Reply(calls=[("pay", {"n": n})]) if n < 4 else Reply("done")  # noqa: E731
    model: Any = langchain_harness.ScriptedChat(script, [0])
    sub = _invoked(create_agent(model, [pay], middleware=[guards[name] for name in inner]))

    @langchain_tool
    async def ask(q: str) -> str:
        """Ask."""
        return await sub(q)

    asking: Any = langchain_harness.ScriptedChat(_spec(sub).script, [0])
    agent: Any = create_agent(asking, [ask], middleware=[guards[name] for name in outer], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "t"}}
    await agent.ainvoke({"messages": [HumanMessage("go")]}, config)
    for _ in range(3):
        result = await agent.ainvoke(Command(resume="yes"), config)
    assert result["messages"][-1].content == "done"
    for name, guard in guards.items():
        spend = guard.spend()
        made = 4 + (_CALLS if name in outer else 0)
        assert (spend["calls"], spend["tools_usd"], spend["reserved_usd"]) == (made, Decimal("1.5"), 0), name
        assert (guard.trips, guard.guard.guard_errors, len(guard.guard.runs)) == ([], 0, 0)


@pytest.mark.parametrize("harness", _HARNESSES, ids=lambda harness: harness.name)
async def test_a_loop_of_one_of_several_agents_that_were_called_at_once_ends_that_agent_alone(harness: Harness) -> None:
    async def parse(n: int) -> dict[str, str]:
        return {"status": "partial_parse_error"}

    looping = AgentSpec(lambda n, _: Reply(calls=[("parse", {"n": 1})] if n < 40 else ()), "looping", {"parse": parse})
    working = [AgentSpec(lambda n, _: Reply("good work"), f"working{number}") for number in range(2)]
    calls = [(one.name, {"request": "go"}) for one in (looping, *working)]
    root = AgentSpec(
        lambda n, _: Reply(calls=calls) if n == 1 else Reply("all done"), "root", agents=[looping, *working]
    )
    guard = harness.guard()
    session = harness.session(root, guard)
    result = await session.turn("go")
    assert [trip.rule for trip in guard.trips] == ["repetition"]
    assert result.text == "all done"
    assert sum("good work" in answer for kind, _, answer in result.events if kind == "answer") == len(working)
    assert session.model_calls <= 2 + len(working) + 10
    await nothing_left(guard)
