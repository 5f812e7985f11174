"""``GuardedChatModel`` does what its model does: streams or not, has a profile, and pays for bound tools."""

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from runguard.langchain import GuardedChatModel


class _Whole(BaseChatModel):
    """A chat model that does not stream."""

    model: str = "scripted-1"

    @property
    def _llm_type(self) -> str:
        return "whole"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[Any, Any]:
        return self.bind(tools=[{"name": one.name, "about": one.description} for one in tools], **kwargs)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("one two"))])


class _Pieces(_Whole):
    def _stream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Iterator[ChatGenerationChunk]:
        for piece in ("one", " ", "two"):
            yield ChatGenerationChunk(message=AIMessageChunk(content=piece))


@tool
def look(word: str) -> str:
    """Look it up."""
    return word


def _texts(pieces: list[Any]) -> list[str]:
    return [str(piece.content) for piece in pieces if piece.content]


@pytest.mark.parametrize(
    ("model", "with_tools", "texts"),
    [
        (_Whole(), False, ["one two"]),
        (_Whole(), True, ["one two"]),
        (_Pieces(), False, ["one", " ", "two"]),
        (_Pieces(), True, ["one", " ", "two"]),
        (_Pieces(disable_streaming=True), False, ["one two"]),
        (_Pieces(disable_streaming="tool_calling"), True, ["one two"]),
    ],
)
async def test_it_streams_as_its_model_does(model: Any, with_tools: bool, texts: list[str]) -> None:
    guard = GuardedChatModel(model, max_model_calls=10)
    for one in (guard, model):
        used: Any = one.bind_tools([look]) if with_tools else one
        assert _texts(list(used.stream("go"))) == texts
        assert _texts([piece async for piece in used.astream("go")]) == texts
        agent: Any = create_agent(one, [look] if with_tools else [])
        asked: Any = {"messages": [HumanMessage("go")]}
        assert _texts([piece for piece, _ in agent.stream(asked, stream_mode="messages")]) == texts
        assert _texts([piece async for piece, _ in agent.astream(asked, stream_mode="messages")]) == texts
    assert guard.spend()["calls"] == 4
    assert not guard.guard.runs


def test_it_shows_the_profile_of_its_model() -> None:
    profile: Any = {"max_input_tokens": 4_096, "structured_output": True}
    assert GuardedChatModel(_Whole(profile=profile)).profile == profile
    assert GuardedChatModel(_Whole()).profile == _Whole().profile


class _Table(BaseModel):
    """What to fill in."""

    text: str = Field(description="x" * 40_000)


class _Plain(_Whole):
    """Its tools are not visible in what ``bind_tools`` returns."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


@tool(description="x" * 40_000)
def large(word: str) -> str:
    return word


@pytest.mark.parametrize("kind", [_Whole, _Plain])
def test_bound_tools_are_part_of_what_is_reserved(kind: type[_Whole]) -> None:
    """A limit of 10,000 tokens cannot pay for 40,000 bytes of tools."""
    limits: Any = {"max_tokens": 10_000, "models": {"scripted-1": {"max_output_tokens": 100}}}
    plain = GuardedChatModel(kind(), **limits)
    plain.invoke("go")
    assert not plain.trips
    guard = GuardedChatModel(kind(), **limits)
    guard.bind_tools([large]).invoke("go")
    assert [trip.rule for trip in guard.trips] == ["budget"]


def test_the_schema_of_structured_output_is_part_of_what_is_reserved() -> None:
    limits: Any = {"max_tokens": 10_000, "models": {"scripted-1": {"max_output_tokens": 100}}}
    guard = GuardedChatModel(_Plain(), **limits)
    guard.with_structured_output(_Table).invoke("go")
    assert [trip.rule for trip in guard.trips] == ["budget"]
