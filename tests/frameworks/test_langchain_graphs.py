"""A guarded chat model in a ``StateGraph``, and agents of LangChain beside the conformance scenarios."""

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import runguard
from runguard.core.errors import PolicyError, RunStoppedError
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.testing.conformance import Reply
from tests.frameworks.langchain_harness import ScriptedChat


@tool
def parse(doc: str) -> str:
    """Parse a document."""
    return json.dumps({"status": "partial_parse_error"})


def _graph(model: Any) -> Any:
    graph = StateGraph(MessagesState)
    bound = model.bind_tools([parse])
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([parse]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def _stubborn(n: int, newest: str) -> Reply:
    return Reply(calls=[("parse", {"doc": "a"})]) if n <= 60 else Reply("gave up")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_loop_in_a_graph_is_stopped_before_the_next_model_call(is_async: bool) -> None:
    counter = [0]
    model = GuardedChatModel(
        ScriptedChat(_stubborn, counter), max_usd=1, prices={"scripted-1": {"input": 1, "output": 1}}
    )
    graph, asked, config = _graph(model), {"messages": [HumanMessage("parse it")]}, {"recursion_limit": 500}
    result = await graph.ainvoke(asked, config) if is_async else graph.invoke(asked, config)
    [trip] = model.trips
    last = result["messages"][-1]
    assert (trip.rule, counter[0]) == ("repetition", 9)
    assert last.content == model.guard.stop_text(trip)
    assert last.response_metadata["runguard"]["id"] == trip.id
    found = [runguard.trip(one) for one in (last, last.model_dump(), result, *result["messages"][:-1])]
    assert [one and one.id for one in found] == [trip.id] * 3 + [None] * (len(found) - 3)
    assert not last.tool_calls
    answered = {one.tool_call_id for one in result["messages"] if isinstance(one, ToolMessage)}
    assert all(
        call["id"] in answered for one in result["messages"] if isinstance(one, AIMessage) for call in one.tool_calls
    )
    assert model.spend()["calls"] == 9
    assert not model.guard.runs


def test_the_next_human_message_begins_a_new_run() -> None:
    counter = [0]
    model = GuardedChatModel(ScriptedChat(lambda n, _: Reply("hello"), counter), max_model_calls=1)
    for _ in range(3):
        assert _graph(model).invoke({"messages": [HumanMessage("hi")]})["messages"][-1].content == "hello"
    assert (counter[0], model.trips) == (3, [])


def test_on_stop_raise_raises_the_typed_error() -> None:
    model = GuardedChatModel(ScriptedChat(_stubborn, [0]), on_stop="raise")
    with pytest.raises(RunStoppedError, match="repetition"):
        _graph(model).invoke({"messages": [HumanMessage("parse it")]}, {"recursion_limit": 500})


async def test_streamed_pieces_pass_through_and_their_usage_is_booked() -> None:
    model = GuardedChatModel(
        ScriptedChat(lambda n, _: Reply("hello", input_tokens=7, output_tokens=5), [0]),
        max_usd=1, prices={"scripted-1": {"input": 1, "output": 1}},
    )  # fmt: skip
    assert [piece.content async for piece in model.astream([HumanMessage("hi")]) if piece.content] == ["hello"]
    spend = model.spend()
    assert (spend["input_tokens"], spend["output_tokens"], spend["estimated_calls"]) == (7, 5, 0)


def test_a_wrong_model_or_setting_is_rejected_with_what_to_do() -> None:
    with pytest.raises(PolicyError, match="give a chat model of LangChain"):
        GuardedChatModel("gpt-5-mini")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="max_usd"):
        RunGuardMiddleware(max_uds=1)  # type: ignore[call-arg]


async def test_on_stop_raise_of_the_middleware_raises_the_typed_error() -> None:
    guard = RunGuardMiddleware(on_stop="raise")
    agent = create_agent(ScriptedChat(_stubborn, [0]), [parse], middleware=[guard])
    with pytest.raises(RunStoppedError):
        await agent.ainvoke({"messages": [HumanMessage("go")]}, {"recursion_limit": 500})
