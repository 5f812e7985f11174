"""One turn of LangChain is one run: before and after pauses, in fan-outs and threads, with nothing in the graph."""

import asyncio
import contextvars
import gc
import json
import logging
import operator
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.runtime import ServerInfo, get_runtime
from langgraph.types import Command, Send, interrupt

import runguard
from runguard import Budget, PolicyError
from runguard.background import FINALIZED
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.langchain.turns import _Handler
from runguard.testing.conformance import MODEL, Reply
from tests.frameworks.langchain_harness import ScriptedChat

PRICES: Any = {MODEL: {"input": 0, "output": 100}}  # $0.01 for a reply of 100 tokens
LIMITS: Any = {"prices": PRICES, "models": {MODEL: {"max_output_tokens": 100}}}
HI: Any = {"messages": [HumanMessage("go")]}
CONFIG: Any = {"configurable": {"thread_id": "t"}, "recursion_limit": 500}


@tool
def look(n: int) -> str:
    """Look something up."""
    return f"page {n}: {interrupt('may I?')}"


@tool
def read(n: int) -> str:
    """Read a page."""
    return f"page {n}"


def calling(name: str = "look", most: int = 60) -> tuple[ScriptedChat, list[int]]:
    """A model that always calls a tool, each time with another argument."""
    made = [0]
    script: Any = lambda n, _: Reply(calls=[(name, {"n": made[0]})]) if n <= most else Reply("gave up")  # noqa: E731
    return ScriptedChat(script, made), made


def talking(text: str = "done") -> tuple[ScriptedChat, list[int]]:
    made = [0]
    return ScriptedChat(lambda n, _: Reply(text), made), made


def react(model: Any, saver: Any, **compiled: Any) -> Any:
    graph = StateGraph(MessagesState)
    bound = model.bind_tools([look, read])

    def call(state: Any) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    async def acall(state: Any) -> Any:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph.add_node("model", RunnableLambda(call, acall))
    graph.add_node("tools", ToolNode([look, read]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=saver, **compiled)


def agent_of(kind: str, saver: Any, settings: dict[str, Any], **compiled: Any) -> tuple[Any, Any, list[int]]:
    """A guard, what it guards, and the calls of its model."""
    chat, made = calling(compiled.pop("tool", "look"))
    if kind == "graph":
        model = GuardedChatModel(chat, **settings)
        return model, react(model, saver, **compiled), made
    guard = RunGuardMiddleware(**settings)
    agent: Any = create_agent(chat, [look, read], middleware=[guard], checkpointer=saver, **compiled)
    return guard, agent, made


async def play(agent: Any, asked: Any, config: Any, is_async: bool) -> Any:
    if is_async:
        return await agent.ainvoke(asked, config)
    return await asyncio.to_thread(agent.invoke, asked, config)


def scopes() -> list[Any]:
    """What is kept of the chains, graphs and tools of roots."""
    handlers: list[Any] = [one for one in gc.get_objects() if isinstance(one, _Handler)]
    return [one for handler in handlers for one in handler.scopes]


KINDS = pytest.mark.parametrize("kind", ["middleware", "graph"])
WAYS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


# ---- Approvals.


@KINDS
@WAYS
async def test_a_turn_that_was_approved_many_times_is_one_run(kind: str, is_async: bool) -> None:
    guard, agent, made = agent_of(kind, InMemorySaver(), {"max_model_calls": 8})
    result = await play(agent, HI, CONFIG, is_async)
    for _ in range(20):
        if "__interrupt__" not in result:
            break
        assert not guard.guard.runs, "a paused run is not open"
        result = await play(agent, Command(resume="yes"), CONFIG, is_async)
    assert made == [8]
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert runguard.trip(result) is not None
    assert not guard.guard.runs
    assert not scopes()


@WAYS
async def test_approvals_of_the_middleware_of_langchain_are_one_run(is_async: bool) -> None:
    chat, made = calling("read")
    guard = RunGuardMiddleware(max_model_calls=5)
    asking: Any = HumanInTheLoopMiddleware(interrupt_on={"read": True})
    agent: Any = create_agent(chat, [read], middleware=[asking, guard], checkpointer=InMemorySaver())
    result = await play(agent, HI, CONFIG, is_async)
    for _ in range(20):
        if "__interrupt__" not in result:
            break
        result = await play(agent, Command(resume={"decisions": [{"type": "approve"}]}), CONFIG, is_async)
    assert made == [5]
    assert not guard.guard.runs


@WAYS
@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/guard.db"])
@pytest.mark.parametrize("limits", [(8, 8), (8, 9), (9, 8)])
async def test_two_guards_of_one_agent_count_a_call_once_after_approvals(
    limits: tuple[int, int], store: str, is_async: bool, tmp_path: Path
) -> None:
    class Second(RunGuardMiddleware):
        pass

    chat, made = calling()
    settings: Any = {"store": store.format(tmp_path)} if "sqlite" in store else {}
    first, second = limits
    guards = [RunGuardMiddleware(max_model_calls=first, **settings), Second(max_model_calls=second, **settings)]
    agent: Any = create_agent(chat, [look, read], middleware=guards, checkpointer=InMemorySaver())
    result = await play(agent, HI, CONFIG, is_async)
    for _ in range(20):
        if "__interrupt__" not in result:
            break
        result = await play(agent, Command(resume="yes"), CONFIG, is_async)
    assert made == [8]
    assert [guard.spend()["calls"] for guard in guards] == [8, 8]
    assert not any(guard.guard.runs for guard in guards)


@KINDS
@pytest.mark.parametrize("where", ["interrupt_before", "interrupt_after"])
@pytest.mark.parametrize("node", ["model", "tools"])
async def test_static_breakpoints_are_one_run(kind: str, where: str, node: str) -> None:
    guard, agent, made = agent_of(kind, InMemorySaver(), {"max_model_calls": 5}, tool="read", **{where: [node]})
    agent.invoke(HI, CONFIG)
    for _ in range(30):
        if not agent.get_state(CONFIG).next:
            break
        agent.invoke(None, CONFIG)
    assert made == [5]
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert not guard.guard.runs


@KINDS
@WAYS
async def test_a_turn_goes_on_in_another_worker_of_the_store(kind: str, is_async: bool, tmp_path: Path) -> None:
    saver, settings = InMemorySaver(), {"max_model_calls": 4, "store": f"sqlite:///{tmp_path}/guard.db"}
    calls, asked, trips = 0, HI, []
    for _ in range(10):
        guard, agent, made = agent_of(kind, saver, settings)
        result = await play(agent, asked, CONFIG, is_async)
        calls, asked, trips = calls + made[0], Command(resume="yes"), guard.trips
        assert await asyncio.to_thread(guard.flush, 10)
        assert not guard.guard.runs
        if "__interrupt__" not in result:
            break
    assert calls == 4
    assert [trip.rule for trip in trips] == ["model_calls"]


@KINDS
def test_a_new_message_begins_a_new_run(kind: str) -> None:
    guard, agent, made = agent_of(kind, InMemorySaver(), {"max_model_calls": 2})
    for turn in range(1, 4):
        agent.invoke({"messages": [HumanMessage("never mind")]}, CONFIG)
        assert made == [turn]
    assert not guard.trips
    agent.invoke(Command(resume="yes"), CONFIG)
    agent.invoke(Command(resume="yes"), CONFIG)
    assert made == [4]
    assert len(guard.trips) == 1


@KINDS
def test_a_caller_may_name_each_invocation_of_a_turn(kind: str) -> None:
    guard, agent, made = agent_of(kind, InMemorySaver(), {"max_model_calls": 4})
    result = agent.invoke(HI, {**CONFIG, "run_name": "question"})
    for number in range(12):
        if "__interrupt__" not in result:
            break
        result = agent.invoke(Command(resume="yes"), {**CONFIG, "run_name": f"approval {number}"})
    assert made == [4]
    assert not guard.guard.runs


def test_two_graphs_with_one_guard_may_use_threads_of_the_same_name() -> None:
    guard, made = RunGuardMiddleware(max_model_calls=3), []
    agents: list[Any] = []
    for name in ("first", "second"):
        chat, calls = calling()
        made.append(calls)
        agents.append(create_agent(chat, [look], middleware=[guard], checkpointer=InMemorySaver(), name=name))
    for agent in agents:
        agent.invoke(HI, CONFIG)
    for _ in range(6):
        for agent in agents:
            if agent.get_state(CONFIG).next:
                agent.invoke(Command(resume="yes"), CONFIG)
    assert made == [[3], [3]]
    assert not guard.guard.runs


@KINDS
def test_another_user_does_not_go_on_with_the_run_of_the_first(kind: str) -> None:
    guard, agent, made = agent_of(kind, InMemorySaver(), {"max_model_calls": 2, "app": "shop"})
    with runguard.run(user="ann") as anns:
        agent.invoke(HI, CONFIG)
    with runguard.run(user="bob") as bobs:
        agent.invoke(Command(resume="yes"), CONFIG)
    assert made == [2]
    assert (anns.calls, bobs.calls) == (1, 1)
    assert guard.spend("user:shop/ann")["calls"] == guard.spend("user:shop/bob")["calls"] == 1


def test_a_turn_that_failed_can_go_on_and_is_still_one_run() -> None:
    made = [0]

    def script(n: int, _: str) -> Reply:
        return Reply(error=ConnectionError("down")) if n % 2 else Reply(calls=[("read", {"n": n})])

    guard = RunGuardMiddleware(max_model_calls=4)
    agent: Any = create_agent(ScriptedChat(script, made), [read], middleware=[guard], checkpointer=InMemorySaver())
    asked: Any = HI
    for _ in range(6):
        try:
            agent.invoke(asked, CONFIG)
            break
        except ConnectionError:
            asked = None
    assert made == [4]
    assert not guard.guard.runs


async def test_a_termination_condition_counts_on_after_an_approval() -> None:
    condition = runguard.MaxIterationsTermination(6)
    guard, agent, made = agent_of("middleware", InMemorySaver(), {"termination_condition": condition})
    result = await agent.ainvoke(HI, CONFIG)
    for _ in range(10):
        if "__interrupt__" not in result:
            break
        result = await agent.ainvoke(Command(resume="yes"), CONFIG)
    assert made == [3], "each call makes two events, six are allowed"
    assert not guard.trips


# ---- One turn of a graph of one's own.


async def test_an_agent_in_the_background_of_a_turn_that_waits_leaves_its_run_alone() -> None:
    middleware, may_go_on, jobs = RunGuardMiddleware(max_model_calls=4), asyncio.Event(), list[asyncio.Task[Any]]()

    @tool
    async def wait() -> str:
        """Wait."""
        await may_go_on.wait()
        return "an answer"

    made = [0]
    waiting: Any = ScriptedChat(lambda n, _: Reply(calls=[("wait", {})]) if n == 1 else Reply("done"), made)
    inner = create_agent(waiting, [wait], middleware=[middleware])

    @tool
    async def begin() -> str:
        """Begin."""
        jobs.append(asyncio.create_task(inner.ainvoke(HI)))
        await asyncio.sleep(0.05)  # until it has called its tool
        return "It works on it."

    outer: Any = ScriptedChat(lambda n, _: Reply(calls=[("begin", {}) if n == 1 else ("look", {"n": n})]), [0])
    agent = create_agent(outer, [begin, look], middleware=[middleware], checkpointer=InMemorySaver())
    await agent.ainvoke(HI, CONFIG)
    may_go_on.set()
    await asyncio.wait_for(jobs.pop(), 10)
    for _ in range(4):
        await agent.ainvoke(Command(resume="yes"), CONFIG)
    assert (made[0], middleware.spend()["calls"]) == (2, 4 + 1), "its last call is a run of its own"
    assert [trip.rule for trip in middleware.trips] == ["model_calls"]


def _fanned_out(model: Any) -> Any:
    class State(TypedDict):
        items: list[int]
        said: Annotated[list[str], operator.add]

    def branch(state: Any) -> Any:
        return {"said": [str(model.invoke(f"classify {state['item']}").content)]}

    async def abranch(state: Any) -> Any:
        return {"said": [str((await model.ainvoke(f"classify {state['item']}")).content)]}

    graph = StateGraph(State)
    graph.add_node("branch", RunnableLambda(branch, abranch))
    graph.add_conditional_edges(START, lambda state: [Send("branch", {"item": n}) for n in state["items"]])
    graph.add_edge("branch", END)
    return graph.compile()


@WAYS
async def test_equal_answers_of_a_healthy_fan_out_are_no_loop(is_async: bool) -> None:
    chat, made = talking("positive")
    guard = GuardedChatModel(chat)
    result = await play(_fanned_out(guard), {"items": list(range(50)), "said": []}, {}, is_async)
    assert made == [50]
    assert result["said"] == ["positive"] * 50
    assert not guard.trips


@pytest.mark.parametrize("settings", [{"max_tool_calls": 2}, {"tools": {"read": {"max_calls": 2}}}])
def test_limits_on_tool_calls_stop_the_run_before_the_next_model_call(settings: dict[str, Any]) -> None:
    guard, agent, made = agent_of("graph", None, settings, tool="read")
    agent.invoke(HI, {"recursion_limit": 500})
    assert made == [3], "the third call was made before it could be seen"
    assert len(guard.trips) == 1


def test_an_unguarded_agent_with_a_guarded_model_is_one_run() -> None:
    chat, made = calling("read")
    guard = GuardedChatModel(chat, max_model_calls=4)
    agent: Any = create_agent(guard, [read])
    agent.invoke(HI, {"recursion_limit": 500})
    assert made == [4]
    assert not guard.guard.runs


def test_agents_of_one_graph_share_the_run_of_their_middleware() -> None:
    guard = RunGuardMiddleware(max_model_calls=3)
    made = [0]
    agents = [
        create_agent(ScriptedChat(lambda n, _: Reply("done"), made), [], middleware=[guard], name=f"agent{n}")
        for n in range(5)
    ]
    graph = StateGraph(MessagesState)
    for n, agent in enumerate(agents):
        graph.add_node(f"a{n}", agent)
        graph.add_edge(START if n == 0 else f"a{n - 1}", f"a{n}")
    graph.compile().invoke(HI)
    assert made == [3]
    assert not guard.guard.runs


def test_a_client_cannot_choose_who_pays() -> None:
    """Two threads send the same id of a human message."""
    chat, made = calling("read", most=2)
    guard = GuardedChatModel(chat, max_model_calls=3, app="shop", budgets=[Budget(calls=100, per="session")])
    agent = react(guard, InMemorySaver())
    for thread in ("victim", "thief"):
        made[0] = chat._calls = 0
        agent.invoke({"messages": [HumanMessage("go", id="same")]}, {"configurable": {"thread_id": thread}})
        assert made == [3]
    assert not guard.trips
    assert {status.scope: status.spent for status in guard.budgets()} == {
        "session:shop//victim": 3,
        "session:shop//thief": 3,
    }


@KINDS
def test_turns_at_the_same_time_with_the_same_name_of_their_run_are_apart(kind: str) -> None:
    """A client may choose ``run_id``, for example as the key of its request."""
    both = threading.Barrier(2)

    def script(_: int, newest: str) -> Reply:
        both.wait(10)
        read = int(newest.removeprefix("page ")) if newest.startswith("page") else 0
        return Reply(calls=[("read", {"n": read + 1})]) if read < 2 else Reply("done")

    def who(runtime: Any) -> str:
        return str(runtime.context["account"])

    chat: Any = ScriptedChat(script, [0])
    settings: Any = {"app": "shop", "user": who, "budgets": [Budget(calls=100, per="user")]}
    if kind == "graph":
        guard: Any = GuardedChatModel(chat, **settings)
        agent: Any = create_agent(guard, [read], context_schema=dict)
    else:
        guard = RunGuardMiddleware(**settings)
        agent = create_agent(chat, [read], middleware=[guard], context_schema=dict)
    name = uuid4()
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(agent.invoke, HI, {"run_id": name}, context={"account": user}) for user in ("ann", "bob")]
        for turn in turns:
            turn.result(20)
    assert {status.scope: status.spent for status in guard.budgets()} == {"user:shop/ann": 3, "user:shop/bob": 3}
    assert not guard.guard.runs


# ---- For whom.


@KINDS
def test_a_block_names_the_user_of_each_call(kind: str) -> None:
    settings = {"app": "shop", "budgets": [Budget(calls=2, per="user")]}
    guard, agent, made = agent_of(kind, None, settings, tool="read")
    for user in ("ann", "bob"):
        with runguard.run(user=user) as block:
            agent.invoke(HI, {"recursion_limit": 500})
        assert block.calls == 2
    assert made == [4]
    assert {status.scope for status in guard.budgets()} == {"user:shop/ann", "user:shop/bob"}


class _User:
    identity = "ann"


def _server(identity: str) -> Any:
    user: Any = _User()
    user.identity = identity
    return ServerInfo(assistant_id="a", graph_id="g", user=user)


@WAYS
async def test_a_function_names_the_user_from_the_runtime(is_async: bool) -> None:
    seen: list[Any] = []

    def who(runtime: Any) -> str:
        seen.append(type(runtime).__name__)
        return str(runtime.context["account"])

    chat, made = talking()
    guard = RunGuardMiddleware(app="shop", user=who, budgets=[Budget(calls=2, per="user")])
    agent: Any = create_agent(chat, [], middleware=[guard], context_schema=dict)
    for user in ("ann", "bob"):
        if is_async:
            await agent.ainvoke(HI, context={"account": user})
        else:
            agent.invoke(HI, context={"account": user})
    assert made == [2]
    assert seen == ["Runtime", "Runtime"]
    assert {status.scope for status in guard.budgets()} == {"user:shop/ann", "user:shop/bob"}


def test_the_user_of_a_graph_s_model_comes_from_the_runtime_too() -> None:
    chat, made = talking()
    guard = GuardedChatModel(
        chat, app="shop", user=lambda runtime: runtime.context["account"], budgets=[Budget(calls=9, per="user")]
    )

    def node(state: Any) -> Any:
        assert get_runtime().context == {"account": "ann"}
        return {"messages": [guard.invoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState, context_schema=dict)
    graph.add_node("model", node)
    graph.add_edge(START, "model")
    graph.compile().invoke(HI, context={"account": "ann"})
    assert [status.scope for status in guard.budgets()] == ["user:shop/ann"]
    with pytest.raises(PolicyError, match="user= raised"):
        guard.invoke("outside of a graph")
    assert made == [1]


def test_what_a_server_knows_of_its_user_is_read_through_the_runtime() -> None:
    who: Any = lambda runtime: runtime.server_info.user.identity  # noqa: E731
    guard = RunGuardMiddleware(app="shop", user=who, budgets=[Budget(calls=9, per="user")])
    with pytest.raises(PolicyError, match="user= raised AttributeError"):
        create_agent(talking()[0], [], middleware=[guard]).invoke(HI)
    assert guard._runs._whom.of(guard.guard, type("Runtime", (), {"server_info": _server("ann")}))["user"] == "ann"


# ---- Threads.


def _in_threads(call: Any, times: int) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda _: call(), range(times)))


@pytest.mark.parametrize("kind", ["middleware", "graph"])
@WAYS
async def test_agents_in_the_thread_pool_of_a_tool_belong_to_the_run(kind: str, is_async: bool) -> None:
    inner, made = talking()
    outer, _ = calling("delegate", most=1)
    settings = {"max_usd": "0.05", **LIMITS}
    guard: Any = RunGuardMiddleware(**settings) if kind == "middleware" else GuardedChatModel(inner, **settings)
    helper: Any = create_agent(inner, [], middleware=[guard]) if kind == "middleware" else create_agent(guard, [])

    @tool
    def delegate(n: int) -> str:
        """Ask helpers."""
        return str(len(_in_threads(lambda: helper.invoke(HI), 20)))

    if kind == "middleware":
        agent: Any = create_agent(outer, [delegate], middleware=[guard])
        paid = 4  # the outer agent's own call takes the fifth cent
    else:
        agent = create_agent(outer, [delegate])
        paid = 5
    await play(agent, HI, {"recursion_limit": 500}, is_async)
    assert made == [paid]
    assert guard.spend()["usd"] == Decimal("0.05")
    assert not guard.guard.runs


def test_model_calls_in_the_thread_pool_of_a_node_belong_to_the_run() -> None:
    chat, made = talking()
    guard = GuardedChatModel(chat, max_model_calls=5)
    graph = StateGraph(MessagesState)
    graph.add_node("many", lambda state: {"messages": [_in_threads(lambda: guard.invoke("x"), 20)[0]]})
    graph.add_edge(START, "many")
    graph.compile().invoke(HI)
    assert made == [5]
    assert not guard.guard.runs


@KINDS
def test_a_stream_whose_pieces_are_read_in_contexts_of_their_own_stays_in_its_block(kind: str) -> None:
    """A web server reads a synchronous stream in a thread pool."""
    budgets = [Budget(usd=5, per="user")]
    guard, agent, made = agent_of(kind, None, {"max_model_calls": 4, "budgets": budgets, **LIMITS}, tool="read")

    def answer() -> Iterator[Any]:
        with runguard.run(user="ann") as block:
            yield from agent.stream(HI, {"recursion_limit": 500})
        assert block.calls == 4

    pieces = answer()
    while contextvars.copy_context().run(next, pieces, None) is not None:
        pass
    assert made == [4]
    assert [(budget.scope, budget.spent) for budget in guard.budgets()] == [("user:/ann", Decimal("0.04"))]
    assert not guard.guard.runs


@WAYS
async def test_a_tool_that_asks_a_human_many_times_is_no_repetition(is_async: bool) -> None:
    @tool("look")
    def asking(n: int) -> str:
        """Fill in a form."""
        return f"page {n}: {[interrupt(f'question {number}') for number in range(20)]}"

    guard, (chat, made) = RunGuardMiddleware(), calling(most=1)
    agent: Any = create_agent(chat, [asking], middleware=[guard], checkpointer=InMemorySaver())
    result = await play(agent, HI, CONFIG, is_async)
    for _ in range(20):
        assert "__interrupt__" in result
        result = await play(agent, Command(resume="yes"), CONFIG, is_async)
    assert result["messages"][-1].content == "gave up"
    assert (made, guard.trips) == ([2], [])


def test_a_turn_that_is_resumed_twice_at_once_stays_one_run() -> None:
    first_is_inside, second_is_done, answers = threading.Event(), threading.Event(), [0]

    @tool("look")
    def slow(n: int) -> str:
        """Look something up."""
        answer = interrupt("may I?")
        answers[0] += 1
        if answers[0] == 1:
            first_is_inside.set()
            assert second_is_done.wait(10)
        return f"page {n}: {answer}"

    chat, made = calling()
    guard = RunGuardMiddleware(max_model_calls=3)
    agent: Any = create_agent(chat, [slow], middleware=[guard], checkpointer=InMemorySaver())
    agent.invoke(HI, CONFIG)
    first = threading.Thread(target=agent.invoke, args=(Command(resume="yes"), CONFIG))
    first.start()
    assert first_is_inside.wait(10)
    agent.invoke(Command(resume="yes"), CONFIG)
    second_is_done.set()
    first.join(10)
    assert (made, guard.guard.guard_errors) == ([3], 0)
    agent.invoke(Command(resume="yes"), CONFIG)
    assert made == [3]
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    assert not guard.guard.runs


# ---- Loops that are written by hand.


def test_a_loop_by_hand_without_a_block_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    chat, made = talking()
    guard = GuardedChatModel(chat, max_model_calls=5)
    with caplog.at_level(logging.WARNING, "runguard"):
        for _ in range(20):
            guard.invoke("go")
    assert made == [20]
    assert [line.split(":")[0] for line in caplog.messages] == ["runguard.no_turn"]
    assert "with runguard.run():" in caplog.text
    assert not guard.guard.runs


@pytest.mark.parametrize("in_block", [False, True])
def test_a_loop_over_a_chain_is_warned_about_without_a_block(in_block: bool, caplog: pytest.LogCaptureFixture) -> None:
    chat, made = calling("read")
    guard = GuardedChatModel(chat, max_model_calls=5)
    chain = RunnableLambda(lambda messages: messages) | guard.bind_tools([read])
    messages: list[Any] = [HumanMessage("go")]
    with caplog.at_level(logging.WARNING, "runguard"), runguard.run() if in_block else nullcontext():
        for _ in range(10):
            messages.append(chain.invoke(messages))
            messages += [read.invoke(asked) for asked in messages[-1].tool_calls]
    assert made == [5 if in_block else 10]
    assert caplog.text.count("runguard.no_turn") == (not in_block)


# ---- What stays as it was.


def test_nothing_of_the_guard_is_in_states_streams_and_checkpoints() -> None:
    saver = InMemorySaver()
    _, agent, _ = agent_of("middleware", saver, {"max_model_calls": 8})
    seen: list[Any] = list(
        agent.stream(HI, CONFIG, stream_mode=["values", "updates", "debug", "checkpoints", "tasks", "messages"])
    )
    seen += list(agent.get_state_history(CONFIG))
    seen += [saver.get_tuple(CONFIG), agent.get_state(CONFIG)]
    text = repr(seen) + json.dumps(agent.get_output_jsonschema()) + json.dumps(agent.get_input_jsonschema())
    assert "AgentRun" not in text
    assert "runguard" not in text.lower()
    assert set(agent.nodes) == {"__start__", "model", "tools"}


@KINDS
def test_a_dropped_stream_ends_its_run(kind: str) -> None:
    guard, agent, made = agent_of(kind, None, {"max_usd": 1, **LIMITS}, tool="read")
    stream = agent.stream(HI, {"recursion_limit": 500})
    next(stream)
    del stream
    gc.collect()
    assert FINALIZED.flush(10)
    assert made[0] >= 1
    assert not guard.guard.runs
    assert not scopes()


async def test_a_cancelled_turn_leaves_nothing() -> None:
    made = [0]
    guard = GuardedChatModel(ScriptedChat(lambda n, _: Reply(waits=True), made), max_usd=1, **LIMITS)
    task = asyncio.ensure_future(react(guard, None).ainvoke(HI))
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert made == [1]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert not guard.guard.runs
    assert guard.spend()["reserved_usd"] == 0
    assert not scopes()


# ---- The bill, and sizes.


def test_the_bill_of_a_run_is_known_in_a_hook_and_in_a_block() -> None:
    chat, _ = calling("read", most=2)
    guard = RunGuardMiddleware(max_usd=1, **LIMITS)
    agent: Any = create_agent(chat, [read], middleware=[guard])
    bills: list[Any] = []
    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("bill", lambda state: bills.append(guard.bill()))
    graph.add_edge(START, "agent")
    graph.add_edge("agent", "bill")
    with runguard.run() as block:
        result = graph.compile().invoke(HI)
    [bill] = bills
    assert (bill.usd, bill.calls) == (Decimal("0.03"), 3)
    assert bill.run == block.id
    assert (block.usd, block.calls) == (Decimal("0.03"), 3)
    assert "runguard" not in repr(result), "the stored messages are as without a guard"
    assert guard.bill() is None


@KINDS
def test_the_user_s_own_counter_sizes_requests(kind: str) -> None:
    seen: list[Any] = []

    def count(request: Any) -> int:
        seen.append(request)
        return 1_234

    settings = {"tokens": count, "max_usd": 1, "prices": {MODEL: {"input": 1, "output": 0}}}
    guard, agent, made = agent_of(kind, None, {**settings, "max_model_calls": 1}, tool="read")
    agent.invoke(HI, {"recursion_limit": 500})
    assert made == [1]
    request = seen[0]
    messages = request["messages"] if kind == "graph" else request.messages
    assert [message.content for message in messages] == ["go"]
    assert guard.spend()["calls"] == 1


async def test_an_output_schema_is_part_of_what_is_reserved() -> None:
    schema = {
        "title": "Answer",
        "type": "object",
        "description": "x" * 40_000,
        "properties": {"n": {"type": "integer"}},
    }
    limits: Any = {"max_tokens": 10_000, "models": {MODEL: {"max_output_tokens": 100}}}
    guard = RunGuardMiddleware(**limits)
    made = [0]
    agent: Any = create_agent(
        ScriptedChat(lambda n, _: Reply("done"), made), [], middleware=[guard], response_format=schema
    )
    with pytest.raises(runguard.RunStoppedError):
        await agent.ainvoke(HI)
    assert made == [0]
    assert isinstance(guard.trips[0].message, str)
    assert [trip.rule for trip in guard.trips] == ["budget"]


def test_a_message_of_a_stop_is_the_only_one_that_carries_a_trip() -> None:
    _, agent, _ = agent_of("middleware", None, {"max_model_calls": 2}, tool="read")
    result = agent.invoke(HI, {"recursion_limit": 500})
    carrying = [message for message in result["messages"] if runguard.trip(message) is not None]
    assert carrying == [result["messages"][-1]]
    assert isinstance(carrying[0], AIMessage)
