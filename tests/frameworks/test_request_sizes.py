"""The size of a request, after any edits of its history: that of the same messages, measured from the beginning."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from agents import ModelSettings
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.function import AgentInfo, FunctionModel

from runguard.calls.model_calls import ModelRequest as Asked
from runguard.langchain.messages import request_of
from runguard.openai_agents.turns import Asked as OpenAIAsked
from runguard.providers.usage import GrowingPrompts
from runguard.pydantic_ai import RunGuard, _asked
from runguard.testing.conformance import MODEL
from tests.frameworks.langchain_harness import ScriptedChat
from tests.kit.examples import each_row

TEXTS = st.sampled_from(["", "a", "page", "größer", "x" * 90, "東京" * 40])
ARGS = st.fixed_dictionaries({"page": st.integers(0, 9), "words": st.lists(TEXTS, max_size=3), "name": TEXTS})
EDITS = ["append", "replace", "remove", "swap", "text in place", "argument in place", "nested in place"]
STEPS = st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 99), TEXTS, ARGS), min_size=1, max_size=12)


class LangChain:
    fixed, around = 2, 4  # bytes of a request without messages, and around each message

    def make(self, n: int, text: str, args: dict[str, Any]) -> Any:
        call: Any = {"name": "look", "args": args, "id": f"c{n}", "type": "tool_call"}
        return [HumanMessage(text), AIMessage(text, tool_calls=[call]), ToolMessage(text, tool_call_id=f"c{n}")][n % 3]

    def set_text(self, message: Any, text: str) -> None:
        message.content = text

    def args_of(self, message: Any) -> dict[str, Any] | None:
        return message.tool_calls[0]["args"] if isinstance(message, AIMessage) else None

    def held(self, message: Any) -> list[Any]:
        return [message.content, *([message.tool_calls] if isinstance(message, AIMessage) else [])]

    def read(self, history: list[Any], prompts: GrowingPrompts | None = None) -> Asked:
        return request_of(prompts or GrowingPrompts(), None, history, None, {})


class OpenAIItems:
    fixed, around = 0, 0

    def make(self, n: int, text: str, args: dict[str, Any]) -> Any:
        return [
            {"role": "user", "content": text},
            {"type": "function_call", "call_id": f"c{n}", "name": text, "arguments": args},
            {"type": "function_call_output", "call_id": f"c{n}", "output": text},
        ][n % 3]

    def set_text(self, item: Any, text: str) -> None:
        item[next(key for key in ("content", "name", "output") if key in item)] = text

    def args_of(self, item: Any) -> dict[str, Any] | None:
        found: dict[str, Any] | None = item.get("arguments")
        return found

    def held(self, item: Any) -> list[Any]:
        return [item]

    def read(self, history: list[Any], prompts: GrowingPrompts | None = None) -> Asked:
        return OpenAIAsked(MODEL, (None, history, ModelSettings(), [], None, [], None), {}).request(
            prompts or GrowingPrompts()
        )


class PydanticAI:
    fixed, around = 2, 4

    def make(self, n: int, text: str, args: dict[str, Any]) -> Any:
        return [
            ModelRequest([UserPromptPart(text)]),
            ModelResponse([TextPart(text), ToolCallPart("look", args, f"c{n}")]),
            ModelRequest([ToolReturnPart("look", text, f"c{n}")]),
        ][n % 3]

    def set_text(self, message: Any, text: str) -> None:
        message.parts[0].content = text

    def args_of(self, message: Any) -> dict[str, Any] | None:
        return message.parts[1].args if len(message.parts) > 1 else None

    def held(self, message: Any) -> list[Any]:
        calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
        return [message.parts[0].content, *(given for call in calls for given in (call.tool_name, call.args))]

    def read(self, history: list[Any], prompts: GrowingPrompts | None = None) -> Asked:
        parameters = ModelRequestParameters()
        request: Any = SimpleNamespace(
            messages=history,
            model=SimpleNamespace(model_name=MODEL),
            model_settings=None,
            model_request_parameters=parameters,
        )
        return _asked(prompts or GrowingPrompts(), request)


def size(value: Any) -> int:
    """Bytes of plain data, counted the simple way."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(len(name) + 6 + size(entry) for name, entry in value.items())
    return sum(2 + size(entry) for entry in value) if isinstance(value, list) else 4


def edit(kind: Any, history: list[Any], step: tuple[str, int, str, dict[str, Any]], n: int) -> None:
    how, at, text, args = step
    at = at % len(history) if history else 0
    if how == "append" or not history:
        history.append(kind.make(n, text, args))
    elif how == "replace":
        history[at] = kind.make(n, text, args)
    elif how == "remove":
        del history[at]
    elif how == "swap":
        history[at], history[-1] = history[-1], history[at]
    elif how == "text in place":
        kind.set_text(history[at], text)
    elif (given := kind.args_of(history[at])) is not None:
        if how == "argument in place":
            given["name"] = text
        else:
            given["words"].append(text)


@pytest.mark.parametrize("kind", [LangChain(), OpenAIItems(), PydanticAI()], ids=lambda kind: type(kind).__name__)
@given(STEPS)
def test_an_edited_history_has_the_size_of_its_messages(kind: Any, steps: list[Any]) -> None:
    history = [kind.make(n, "some text", {"page": n, "words": ["one"], "name": ""}) for n in range(6)]
    for n, step in enumerate(steps):
        edit(kind, history, step, n)
        asked = kind.read(history)
        held = [one for message in history for one in kind.held(message)]
        bytes_held = kind.fixed + sum(2 + size(one) for one in held) + kind.around * len(history)
        assert (asked.input_tokens, asked.likely_tokens) == (-(-bytes_held // 3), -(-bytes_held // 4))
        again = kind.read(copy.deepcopy(history))
        assert replace(asked, counts=None) == replace(again, counts=None)


@pytest.mark.parametrize("kind", [LangChain(), OpenAIItems(), PydanticAI()], ids=lambda kind: type(kind).__name__)
def test_the_calls_of_reading_a_request_do_not_grow_with_its_history(kind: Any) -> None:
    args: dict[str, Any] = {"page": 1, "words": ["one"], "name": "x"}

    def calls_of_next(length: int) -> int:
        history, prompts = [kind.make(n, "text", dict(args)) for n in range(length)], GrowingPrompts()
        kind.read(history, prompts)
        more = [*history, kind.make(0, "text", dict(args))]
        return calls_of(lambda: kind.read(more, prompts))

    assert calls_of_next(30) == calls_of_next(300)


def calls_of(do: Callable[[], Any]) -> int:
    count = 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        do()
    finally:
        sys.setprofile(before)
    return count


class _Limited(ScriptedChat):
    max_tokens: int = 700


class _Open(ScriptedChat, extra="allow"):
    pass


def test_an_output_limit_is_found_wherever_a_chat_model_keeps_it() -> None:
    def limit(model: Any, **settings: Any) -> int | None:
        return request_of(GrowingPrompts(), model, [HumanMessage("go")], None, settings).max_output_tokens

    script: Any = None
    kinds: list[Any] = [_Limited, _Open]
    limited, extended = (kind(script, [0]) for kind in kinds)
    assert (limit(ScriptedChat(script, [0])), limit(extended)) == (None, None)
    extended.max_output_tokens = 300
    assert limit(extended) == 300
    assert limit(limited) == 700
    assert limit(limited, max_completion_tokens=50) == 50


# ---- What a framework passes on to the provider as it is ------------------------------------------------------------


class _Many(ScriptedChat):
    n: int = 4


def _from_langchain(**settings: Any) -> Asked:
    script: Any = None
    return request_of(GrowingPrompts(), ScriptedChat(script, [0]), [HumanMessage("go")], None, settings)


def _from_openai(**settings: Any) -> Asked:
    given: Any = (None, "go", ModelSettings(**settings), [], None, [], None)
    return OpenAIAsked(MODEL, given, {}).request(GrowingPrompts())


def _from_pydantic_ai(**settings: Any) -> Asked:
    request: Any = SimpleNamespace(
        messages=[],
        model=SimpleNamespace(model_name=MODEL),
        model_settings=settings,
        model_request_parameters=ModelRequestParameters(),
    )
    return _asked(GrowingPrompts(), request)


@each_row(
    ("read", "name"),
    [
        (_from_langchain, "extra_body"),
        (_from_langchain, "model_kwargs"),
        (_from_openai, "extra_body"),
        (_from_openai, "extra_args"),
        (_from_pydantic_ai, "extra_body"),
    ],
)
def test_what_a_framework_passes_on_as_it_is_counts(read: Any, name: str) -> None:
    plain = read(max_tokens=100)
    assert (plain.candidates, plain.max_output_tokens, plain.fixed_output, plain.model) == (1, 100, False, MODEL)
    asked = read(max_tokens=100, **{name: {"n": 5, "max_completion_tokens": 900, "model": "dear-1"}})
    assert (asked.candidates, asked.max_output_tokens, asked.fixed_output) == (5, 900, True)
    assert asked.model == "dear-1"
    assert asked.input_tokens == plain.input_tokens or read is _from_langchain


def test_the_answers_that_a_chat_model_asks_for_are_counted() -> None:
    kind: Any = _Many
    many = kind(None, [0])

    def asked(**settings: Any) -> Asked:
        return request_of(GrowingPrompts(), many, [HumanMessage("go")], None, settings)

    assert asked().candidates == 4
    assert asked(n=7).candidates == 7
    assert asked(model="dear-1").model == "dear-1"
    assert (asked(max_tokens=50).max_output_tokens, asked(max_tokens=50).fixed_output) == (50, False)


# ---- Pydantic AI: parts of a request beside its messages ------------------------------------------------------------

BIG = "word " * 8_000


class Big(BaseModel):
    a: int = Field(description=BIG)


def big_tool(x: int) -> str:
    return "r"


big_tool.__doc__ = BIG
PARTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "instructions": {"instructions": BIG},
    "a tool": {"tools": [big_tool]},
    "an output tool": {"output_type": Big},
    "a native schema": {"output_type": NativeOutput(Big)},
    "a schema in the prompt": {"output_type": PromptedOutput(Big)},
}


async def reserved_tokens(**given: Any) -> int:
    """What one run reserves for its request. ``tokens=`` goes to the guard, everything else to the agent."""
    prices: Any = {MODEL: {"input": 1, "output": 1}}
    guard = RunGuard(max_usd=1, prices=prices, tokens=given.pop("tokens", None))
    seen: list[int] = []

    def answer(messages: list[Any], info: AgentInfo) -> ModelResponse:
        seen.append(int(guard.spend()["reserved_usd"] * 1_000_000))
        calls: list[Any] = [ToolCallPart(tool.name, {"a": 1}) for tool in info.output_tools]
        return ModelResponse(calls or [TextPart('{"a": 1}')])

    profile: Any = {"supports_json_schema_output": True}
    model = FunctionModel(answer, model_name=MODEL, profile=profile)
    await Agent(model, capabilities=[guard], model_settings={"max_tokens": 10}, **given).run("q")
    return seen[0] - 10


@pytest.mark.parametrize("part", [name for name in PARTS if name != "nothing"])
async def test_each_part_of_a_request_is_reserved_once(part: str) -> None:
    plain = await reserved_tokens()
    assert 10_000 <= await reserved_tokens(**PARTS[part]) - plain < 16_000


async def test_the_counter_of_the_user_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    async def later(request: Any) -> int:
        return 4_321 + len(request.messages)

    assert await reserved_tokens(tokens=lambda request: 1_234) == 1_234
    assert await reserved_tokens(tokens=later) == 4_322
    plain = await reserved_tokens()
    for nonsense in (0, -5, 1.5, float("nan"), None, "many", True):

        def count(request: Any, given: Any = nonsense) -> Any:
            return given

        caplog.clear()
        assert await reserved_tokens(tokens=count) == await reserved_tokens(tokens=count) == plain
        assert sum("counter_failed" in line for line in caplog.messages) == 1
