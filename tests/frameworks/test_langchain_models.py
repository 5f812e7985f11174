"""``GuardedChatModel`` does what its model does: streams or not, has a profile, and pays for bound tools."""

import copy
import pickle
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel, Field

import runguard
from runguard import PolicyError, RunStoppedError
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.langchain.messages import usage_of
from runguard.testing.conformance import MODEL, Reply
from tests.frameworks.langchain_harness import ScriptedChat, called
from tests.kit.examples import each_row


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


def test_what_is_bound_to_the_model_of_an_agent_is_part_of_what_is_reserved() -> None:
    settings: Any = {"max_tokens": 10_000, "models": {"scripted-1": {"max_output_tokens": 100}}}
    bound: Any = _Whole().bind_tools([large]).with_config(tags=["bound twice"])
    guards = [RunGuardMiddleware(**settings) for _ in range(3)]
    for guard, model, tools in zip(guards, (_Whole(), bound, bound), ([], [], [look]), strict=True):
        create_agent(model, tools, middleware=[guard]).invoke({"messages": [HumanMessage("go")]})
    assert [[trip.rule for trip in guard.trips] for guard in guards] == [[], ["budget"], []]


def test_the_schema_of_structured_output_is_part_of_what_is_reserved() -> None:
    limits: Any = {"max_tokens": 10_000, "models": {"scripted-1": {"max_output_tokens": 100}}}
    guard = GuardedChatModel(_Plain(), **limits)
    guard.with_structured_output(_Table).invoke("go")
    assert [trip.rule for trip in guard.trips] == ["budget"]


# ---- A guarded model is a model of its own class.

PRICES: Any = {
    MODEL: {"input": 0, "output": 100},
    "dear": {"input": 0, "output": 1_000},
    "cheap": {"input": 0, "output": 10},
}
LIMITS: Any = {"prices": PRICES, "models": {name: {"max_output_tokens": 100} for name in PRICES}}


class _Stopping(_Whole):
    """It has a field with the name of a control, as ``ChatOpenAI`` has."""

    stop: list[str] | None = None
    temperature: float = 0.5


def test_it_is_a_model_of_the_same_class_and_shares_its_fields() -> None:
    plain: Any = _Stopping(stop=["END"], name="mine")
    guard: Any = GuardedChatModel(plain, max_model_calls=3)
    assert [isinstance(guard, kind) for kind in (_Stopping, GuardedChatModel)] == [True, True]
    assert [isinstance(plain, kind) for kind in (_Stopping, GuardedChatModel)] == [True, False]
    assert (guard.stop, guard.get_name(), guard._llm_type) == (["END"], "mine", "whole")
    assert guard.model_dump() == plain.model_dump()
    assert guard._get_llm_string() == plain._get_llm_string()
    plain.temperature = 0.9
    assert guard.temperature == 0.9
    guard.controls.stop("all", actor="ops", reason="drill")
    assert guard.invoke("go").content == guard.guard.stop_text(guard.trips[0])
    guard.resume("all")
    assert guard.invoke("go").content == "one two"


def test_copies_keep_the_guard_and_pickles_say_why_not() -> None:
    guard: Any = GuardedChatModel(_Stopping(), max_model_calls=3)
    with runguard.run():
        for one in (
            guard,
            copy.copy(guard),
            copy.deepcopy(guard),
            guard.model_copy(update={"temperature": 0.1}),
            guard,
        ):
            one.invoke("go")
    assert guard.spend()["calls"] == 3
    assert [trip.rule for trip in guard.trips] == ["model_calls"]
    with pytest.raises(TypeError, match="cannot be pickled: its guard lives in this process"):
        pickle.dumps(guard)


def test_fields_that_are_configured_later_keep_the_guard() -> None:
    from langchain_core.runnables import ConfigurableField

    guard: Any = GuardedChatModel(_Stopping(), max_model_calls=3)
    guard.configurable_fields(temperature=ConfigurableField("t")).invoke("go", {"configurable": {"t": 0.1}})
    assert guard.spend()["calls"] == 1


class _Through(_Pieces):
    """Its methods call each other, as those of many integrations do."""

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        pieces = list(self._stream(messages, stop=stop))
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage("".join(str(p.message.content) for p in pieces)))]
        )


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_method_that_calls_another_one_of_its_model_is_one_call(way: str) -> None:
    guard: Any = GuardedChatModel(_Through(), max_model_calls=10)
    await called(guard, "go", way)
    assert guard.spend()["calls"] == 1
    assert not guard.guard.runs


def test_a_stop_where_an_object_must_come_raises_the_typed_error() -> None:
    guard: Any = GuardedChatModel(_Whole(), max_model_calls=1)
    with runguard.run():
        guard.invoke("go")
        with pytest.raises(RunStoppedError, match="model_calls"):
            guard.bind_tools([look], tool_choice="look").invoke("go")
        with pytest.raises(RunStoppedError, match="model_calls"):
            guard.bind(response_format={"type": "json_schema"}).invoke("go")


# ---- Fallbacks.


class _Named(ScriptedChat):
    """It costs what its name costs."""


def _named(name: str, error: Exception | None = None) -> tuple[Any, list[int]]:
    made = [0]
    kind: Any = _Named
    chat = kind(lambda n, _: Reply("done", input_tokens=0, error=error), made)
    chat.model = name
    return chat, made


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_each_attempt_of_a_fallback_pays_its_own_price(around: bool, is_async: bool) -> None:
    dear, asked = _named("dear", ValueError("not today"))
    cheap, made = _named("cheap")
    settings: Any = {"max_usd": "0.15", **LIMITS}
    if around:
        model: Any = GuardedChatModel(dear.with_fallbacks([cheap]), **settings)
    else:
        model = GuardedChatModel(dear, **settings).with_fallbacks([cheap])
    with runguard.run():
        answers = [await model.ainvoke("go") if is_async else model.invoke("go") for _ in range(20)]
    assert answers[0].content == "done"
    assert made[0] < 20
    assert model.spend()["usd"] <= Decimal("0.15")
    assert model.spend()["reserved_usd"] == 0
    assert model.spend()["by_model"]["cheap"]["usd"] == Decimal("0.001") * made[0]
    assert asked[0] >= 1
    assert [trip.rule for trip in model.trips] == ["budget"]


@pytest.mark.parametrize(("limit", "calls"), [("0.05", 0), ("0.15", 1)])
def test_the_most_expensive_fallback_of_an_agent_is_reserved(limit: str, calls: int) -> None:
    cheap, made = _named("cheap", ConnectionRefusedError("not today"))
    dear, paid = _named("dear")
    guard = RunGuardMiddleware(max_usd=limit, max_wait_seconds=0, **LIMITS)
    create_agent(cheap.with_fallbacks([dear]), [], middleware=[guard]).invoke({"messages": [HumanMessage("go")]})
    assert (made[0], paid[0]) == (calls, calls)
    assert guard.spend()["usd"] == Decimal("0.1") * calls


def test_a_fallback_that_is_no_chat_model_is_rejected() -> None:
    from langchain_core.runnables import RunnableLambda

    with pytest.raises(PolicyError, match="give a chat model of LangChain"):
        GuardedChatModel(_Whole().with_fallbacks([RunnableLambda(lambda _: AIMessage("x"))]))  # type: ignore[arg-type]


# ---- A guard inside a guard.


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_of_two_guards_the_lower_limit_holds_and_a_refused_call_costs_nothing(way: str) -> None:
    made = [0]
    chat = ScriptedChat(lambda n, _: Reply("done"), made)
    inner = GuardedChatModel(chat, max_model_calls=2, **LIMITS)
    outer: Any = GuardedChatModel(inner, max_model_calls=100, **LIMITS)
    with runguard.run():
        for _ in range(5):
            await called(outer, "go", way)
    assert made == [2]
    assert (outer.spend()["calls"], inner.spend()["calls"]) == (2, 2)
    assert outer.spend()["usd"] == inner.spend()["usd"] == Decimal("0.02")
    assert [trip.rule for trip in inner.trips] == ["model_calls"]


@pytest.mark.parametrize("on_stop", ["stop", "raise"])
def test_a_call_that_the_guard_of_the_model_refuses_costs_the_agent_nothing(on_stop: Any) -> None:
    chat = ScriptedChat(lambda n, _: Reply("done"), [0])
    model = GuardedChatModel(chat, max_usd="0.001", on_stop=on_stop, **LIMITS)
    middleware = RunGuardMiddleware(max_usd=1, **LIMITS)
    agent: Any = create_agent(model, [], middleware=[middleware])
    if on_stop == "raise":
        with pytest.raises(RunStoppedError):
            agent.invoke({"messages": [HumanMessage("go")]})
    else:
        agent.invoke({"messages": [HumanMessage("go")]})
    assert len(model.trips) == 1
    assert middleware.spend()["usd"] == 0
    assert middleware.spend()["reserved_usd"] == 0


class _Echo(_Whole):
    """Takes any keyword, as the models of providers do. Each answer has a hundred tokens, or as many as it may."""

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        tokens = kwargs.get("n", 1) * min(kwargs.get("max_tokens", 100), 100)
        usage: Any = {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}
        metadata = {"model_name": kwargs.get("model", self.model)}
        message = AIMessage(str(kwargs), usage_metadata=usage, response_metadata=metadata)
        return ChatResult(generations=[ChatGeneration(message=message)])


_FIGURES: Any = {
    "prices": {"scripted-1": {"input": 0, "output": 100}, "dear-1": {"input": 0, "output": 1_000}},
    "models": {"scripted-1": {"max_output_tokens": 100}, "dear-1": {"max_output_tokens": 100}},
}


@each_row(("given", "usd"), [({}, "0.01"), ({"n": 5}, "0.05"), ({"model": "dear-1"}, "0.1")])
@each_row("by", ["keyword", "bind", "middleware"])
def test_the_keywords_of_a_call_are_passed_on_and_reserved(given: dict[str, Any], usd: str, by: str) -> None:
    def said(max_usd: str) -> tuple[str, Any]:
        settings: Any = {"max_usd": max_usd, **_FIGURES}
        if by == "middleware":
            guard: Any = RunGuardMiddleware(**settings)
            agent: Any = create_agent(_Echo(), middleware=[wrap_model_call(_adding(given)), guard])
            return agent.invoke({"messages": [HumanMessage("go")]})["messages"][-1].content, guard
        guard = GuardedChatModel(_Echo(), **settings)
        answer = guard.bind(**given).invoke("go") if by == "bind" else guard.invoke("go", **given)
        return str(answer.content), guard

    text, guard = said(usd)
    assert text == str(given)
    assert guard.spend()["usd"] == Decimal(usd)
    less = Decimal(usd) * Decimal("0.9")
    _, guard = said(str(less))
    assert guard.spend()["usd"] <= less


def _adding(settings: dict[str, Any]) -> Any:
    return lambda request, handler: handler(request.override(model_settings=settings))


@pytest.mark.parametrize("kind", ["model", "middleware"])
def test_what_the_provider_has_stored_is_reserved_after_its_first_answer(kind: str) -> None:
    held: list[int] = []

    class Stored(_Whole):
        def _generate(
            self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
        ) -> ChatResult:
            held.append(int(guard.spend()["reserved_usd"] * 1_000_000))
            usage: Any = {"input_tokens": 50_000, "output_tokens": 1_000, "total_tokens": 51_000}
            message = AIMessage("done", usage_metadata=usage, response_metadata={"id": f"{kind}-answer"})
            return ChatResult(generations=[ChatGeneration(message=message)])

    figures: Any = {"prices": {"scripted-1": {"input": 1, "output": 0}}, "max_usd": 1}
    guard: Any = RunGuardMiddleware(**figures) if kind == "middleware" else GuardedChatModel(Stored(), **figures)
    for name in ("base", "answer", "base"):
        given = {"previous_response_id": f"{kind}-{name}"}
        if kind == "model":
            guard.invoke("go", **given)
            continue
        agent: Any = create_agent(Stored(), middleware=[wrap_model_call(_adding(given)), guard])
        agent.invoke({"messages": [HumanMessage("go")]})
    assert held[0] < 100, "nothing is known before the first answer"
    assert 51_000 <= held[1] < 51_100
    assert 49_900 <= held[2] < 50_100


class _Parses(_Whole):
    """Calls ``parse`` for as long as it is offered."""

    offered: list[list[str]] = Field(default_factory=list)

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **more: Any) -> Any:
        self.offered.append([one["name"] for one in more["tools"]])
        calls = [{"name": "parse", "args": {"part": f"part {len(messages)}"}, "id": f"c{len(messages)}"}]
        is_left = "parse" in self.offered[-1] and len(self.offered) < 9
        message = AIMessage(str(messages[-1].content), tool_calls=calls if is_left else [])
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def parse(part: str) -> str:
    """Parse it."""
    return '{"status": "partial_parse_error"}'


def test_a_tool_that_keeps_failing_is_left_out_of_the_next_request() -> None:
    model: Any = GuardedChatModel(_Parses(), rules={"stall": {"withhold": 4}})
    result = create_agent(model, [parse, look]).invoke({"messages": [HumanMessage("go")]})
    assert model.offered == [["parse", "look"]] * 4 + [["look"]]
    assert result["messages"][-1].content.endswith("This tool is not offered any more in this turn.")


@pytest.mark.parametrize(
    ("details", "write", "hour"),
    [
        ({"cache_creation": 300}, 300, 0),
        ({"cache_creation": 0, "ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}, 300, 200),
        ({"cache_creation": 300, "ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}, 300, 200),
    ],
)
def test_cache_writes_are_known_in_total_and_by_their_lifetime(details: Any, write: int, hour: int) -> None:
    report = {"input_tokens": 1000, "output_tokens": 5, "total_tokens": 1005, "input_token_details": details}
    usage = usage_of(AIMessage("x", usage_metadata=report))
    assert usage is not None
    assert (usage.cache_write, usage.cache_write_1h) == (write, hour)
