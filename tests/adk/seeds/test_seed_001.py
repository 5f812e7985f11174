"""Seed 001, a guarded model for ADK: the seed's class in the form that ADK takes, on a stand-in for
``litellm.acompletion``.

Three things differ from the seed. ADK takes a ``BaseLlm`` as a model, so the class is one and translates requests and
answers. ``new_message`` is a ``Content``. A final event may have no content: ADK reports an error of the model in one
before it raises. The guard itself is the seed's code. The same class on the real LiteLLM is
``examples/guarded_litellm.py``.
"""

import json
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.adk.agents import Agent
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner, Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import PrivateAttr

from runguard import (
    BudgetExceededError,
    ContextOverflowError,
    LoopDetectedError,
    guard,
    guard_async,
)

Say = Callable[[int], tuple[str, dict[str, Any]] | str]


class FakeLiteLlm:
    """Answers like a provider behind LiteLLM: a tool call (name, arguments) or words."""

    def __init__(self, say: Say) -> None:
        self.say, self.calls = say, 0

    async def acompletion(self, *, model: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.calls += 1
        said = self.say(self.calls)
        function = None if isinstance(said, str) else SimpleNamespace(name=said[0], arguments=json.dumps(said[1]))
        tool_calls = [SimpleNamespace(id=f"c{self.calls}", function=function)] if function else None
        message = SimpleNamespace(content=said if isinstance(said, str) else None, tool_calls=tool_calls)
        return SimpleNamespace(
            choices=[SimpleNamespace(message=message)],
            usage=SimpleNamespace(prompt_tokens=1_000_000, completion_tokens=100_000),
        )


class GuardedGeminiModel(BaseLlm):
    """ADK-compatible model wrapper with RunGuard loop detection and budget cap."""

    _guarded: Any = PrivateAttr(default=None)
    _litellm: Any = PrivateAttr()
    _max_usd: float = PrivateAttr()
    _max_context_tokens: int = PrivateAttr()

    def __init__(
        self,
        litellm: FakeLiteLlm,
        model_name: str = "gemini/gemini-2.0-flash",
        max_usd: float = 2.0,
        max_context_tokens: int = 900_000,
    ) -> None:
        super().__init__(model=model_name)
        self._litellm, self._max_usd, self._max_context_tokens = litellm, max_usd, max_context_tokens

    def _build_guard(self) -> Any:
        async def _call_gemini(messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
            response = await self._litellm.acompletion(model=self.model, messages=messages, **kwargs)
            usage = response.usage
            input_tokens = usage.prompt_tokens if usage else 0
            output_tokens = usage.completion_tokens if usage else 0
            usd = (input_tokens * 0.075 + output_tokens * 0.30) / 1_000_000
            choice = response.choices[0]
            sig = "end_turn"
            tool_calls = getattr(choice.message, "tool_calls", None) or []
            if tool_calls:
                sig = tool_calls[0].function.name
            return {"response": response, "usd": usd, "sig": sig}

        return guard_async(
            _call_gemini,
            budget={"max_usd": self._max_usd},
            loop={"repeats": 3, "max_cycle_len": 4},
            context={"maxContextTokens": self._max_context_tokens, "headroom": 100_000},
            tokens=lambda msgs, **_: sum(len(str(m.get("content", ""))) // 4 for m in msgs),
        )

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if self._guarded is None:
            self._guarded = self._build_guard()
        messages = [
            {"role": content.role, "content": content.model_dump_json(exclude_none=True)}
            for content in llm_request.contents
        ]
        result = await self._guarded(messages)
        message = result["response"].choices[0].message
        part = types.Part(text=message.content)
        if message.tool_calls:
            function = message.tool_calls[0].function
            part = types.Part(function_call=types.FunctionCall(name=function.name, args=json.loads(function.arguments)))
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def search_tool(query: str) -> dict[str, str]:
    """Search."""
    return {"status": "error", "message": "permission denied"}


def summarize_tool(text: str) -> dict[str, str]:
    """Summarize."""
    return {"summary": text[:10]}


async def run_adk_agent(user_input: str, litellm: FakeLiteLlm, **limits: Any) -> str:
    agent = Agent(
        name="research_agent",
        model=GuardedGeminiModel(litellm, **limits),
        description="Research agent with RunGuard protection",
        instruction="You are a research assistant. Use the provided tools to answer questions.",
        tools=[search_tool, summarize_tool],
    )
    session_service = InMemorySessionService()
    session = await session_service.create_session(app_name="demo", user_id="u1")
    runner = Runner(agent=agent, app_name="demo", session_service=session_service)
    try:
        async for event in runner.run_async(
            user_id="u1", session_id=session.id, new_message=types.UserContent(user_input)
        ):
            if event.is_final_response() and event.content and event.content.parts:
                return event.content.parts[0].text or ""
        return ""
    except LoopDetectedError as e:
        return f"Loop detected (pattern: {e.pattern!r}). Agent aborted."
    except BudgetExceededError as e:
        return f"Budget cap reached (${e.spent:.3f}). Agent aborted."
    except ContextOverflowError as e:
        return f"Context limit approaching ({e.projected_tokens} tokens). Agent aborted."


async def test_a_healthy_run_answers() -> None:
    steps: list[tuple[str, dict[str, Any]] | str] = [
        ("search_tool", {"query": "moon"}),
        ("summarize_tool", {"text": "The moon is far."}),
        "It is far.",
    ]
    litellm = FakeLiteLlm(lambda n: steps[n - 1])
    assert await run_adk_agent("How far is the moon?", litellm) == "It is far."


async def test_two_tools_in_turn_are_a_cycle() -> None:
    litellm = FakeLiteLlm(
        lambda n: ("search_tool", {"query": f"{n}"}) if n % 2 else ("summarize_tool", {"text": f"{n}"})
    )
    assert (await run_adk_agent("Find it.", litellm)).startswith("Loop detected (pattern: (")
    assert litellm.calls == 6


# ---- a chat through one guarded model -------------------------------------------------------------------------------


async def chat(litellm: FakeLiteLlm, turns: list[str], **limits: Any) -> list[str]:
    """The user's messages in one session, answered by one model wrapper."""
    agent = Agent(
        name="research_agent",
        model=GuardedGeminiModel(litellm, max_usd=100, **limits),
        instruction="You are a research assistant.",
        tools=[search_tool, summarize_tool],
    )
    runner = InMemoryRunner(agent=agent, app_name="demo")
    session = await runner.session_service.create_session(app_name="demo", user_id="u1")
    answers: list[str] = []
    for said in turns:
        stream = runner.run_async(user_id="u1", session_id=session.id, new_message=types.UserContent(said))
        finals = [event.content async for event in stream if event.is_final_response()]
        answers += [part.text or "" for content in finals for part in (content.parts if content else None) or ()]
    return answers


async def test_a_healthy_chat_of_twenty_turns_answers_each() -> None:
    litellm = FakeLiteLlm(lambda n: f"answer {n}")
    assert await chat(litellm, [f"question {n}" for n in range(20)]) == [f"answer {n}" for n in range(1, 21)]


async def test_a_chat_that_searches_once_in_each_turn_is_healthy() -> None:
    litellm = FakeLiteLlm(lambda n: ("search_tool", {"query": f"{n}"}) if n % 2 else f"answer {n}")
    assert len(await chat(litellm, [f"question {n}" for n in range(10)])) == 10


async def test_a_label_for_each_of_twenty_mails_is_healthy() -> None:
    litellm = FakeLiteLlm(lambda n: "spam")
    assert await chat(litellm, [f"mail {n}" for n in range(20)]) == ["spam"] * 20


def refused_at(
    call: Callable[[Any], Any], request: Callable[[int], Any], caught: list[LoopDetectedError] | None = None
) -> int:
    """The number of the first call that is refused; 0: none of twenty."""
    for n in range(20):
        try:
            call(request(n))
        except LoopDetectedError as error:
            if caught is not None:
                caught.append(error)
            return n + 1
    return 0


GEMINI = [types.FinishReason.STOP, str(types.FinishReason.STOP), types.FinishReason.MAX_TOKENS, "FINISH_REASON_STOP"]
REASONS = ["end_turn", "stop", "STOP", "completed", "COMPLETE", "tool_use", "tool-calls", "model_length", *GEMINI]


@pytest.mark.parametrize("reason", REASONS, ids=repr)
def test_a_stop_reason_is_never_a_loop(reason: str) -> None:
    call = guard(lambda said: {"sig": reason, "usd": 0}, loop={"repeats": 3, "max_cycle_len": 4})
    assert refused_at(call, lambda n: f"question {n}") == 0
    named = guard(lambda said: {"usd": 0}, loop={"repeats": 3}, signature=lambda result: reason)
    assert refused_at(named, lambda n: f"question {n}") == 0


def test_the_same_words_for_the_same_request_are_a_loop() -> None:
    answer = {"choices": [{"message": {"content": "I will look into it."}}]}
    call = guard(lambda said: {"response": answer, "usd": 0, "sig": "end_turn"}, loop={"repeats": 3})
    assert refused_at(call, lambda n: [{"role": "user", "content": "Well?"}]) == 4


# ---- a routing cycle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False], ids=["with a signature", "without"])
def test_the_pattern_of_a_routing_cycle_names_the_agents(signed: bool) -> None:
    agents = ("triage_agent", "research_agent")
    made: list[str] = []

    def call_gemini(messages: list[dict[str, Any]]) -> dict[str, Any]:
        made.append(agents[len(made) % 2])
        asked = {"name": "transfer_to_agent", "arguments": json.dumps({"agent_name": made[-1]})}
        response = {"choices": [{"message": {"tool_calls": [{"id": f"c{len(made)}", "function": asked}]}}]}
        return {"response": response, "usd": 0.01, **({"sig": "transfer_to_agent"} if signed else {})}

    call = guard(call_gemini, loop={"repeats": 3, "max_cycle_len": 4})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Help."}]

    def next_request(n: int) -> list[dict[str, Any]]:
        if n:
            messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": "null"})
        return messages

    caught: list[LoopDetectedError] = []
    assert refused_at(call, next_request, caught) == 7, "after three rounds of two"
    assert sorted(caught[0].pattern) == sorted(agents)


def test_three_different_specialists_in_a_row_are_no_cycle() -> None:
    made: list[int] = []

    def call_gemini(said: str) -> dict[str, Any]:
        made.append(len(made))
        asked = {"name": "transfer_to_agent", "arguments": json.dumps({"agent_name": f"specialist_{len(made)}"})}
        response = {"choices": [{"message": {"tool_calls": [{"id": "c", "function": asked}]}}]}
        return {"response": response, "usd": 0.01, "sig": "transfer_to_agent"}

    call = guard(call_gemini, loop={"repeats": 3, "max_cycle_len": 4})
    assert refused_at(call, lambda n: f"part {n}") == 0


# ---- a guarded model in parallel branches ---------------------------------------------------------------------------
