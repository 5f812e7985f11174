"""A fault of an adapter's own code: the run goes on with its paid answer, and nothing stays reserved."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import HumanMessage

import runguard
from runguard.langchain import RunGuardMiddleware
from runguard.testing.conformance import MODEL, AgentSpec, Harness, Reply
from tests.frameworks.langchain_harness import LangChainHarness, ScriptedChat
from tests.frameworks.openai_harness import OpenAIAgentsHarness
from tests.frameworks.pydantic_harness import PydanticAIHarness

# Each with the functions that read a request and the usage of an answer.
LANGCHAIN, OPENAI, PYDANTIC = (
    "runguard.langchain.middleware",
    "runguard.openai_agents.turns",
    "runguard.pydantic_ai",
)
HARNESSES = [
    pytest.param(LangChainHarness(), f"{LANGCHAIN}._asked", f"{LANGCHAIN}.usage_of", id="langchain"),
    pytest.param(OpenAIAgentsHarness(), f"{OPENAI}.Asked.request", f"{OPENAI}.usage_of", id="openai"),
    pytest.param(PydanticAIHarness(), f"{PYDANTIC}._asked", f"{PYDANTIC}._usage_of", id="pydantic"),
]
PRICES: Any = {MODEL: {"input": 1.0, "output": 1.0}}


def _broken(*_: Any, **__: Any) -> Any:
    raise LookupError("an adapter's own fault")


@pytest.mark.parametrize(("harness", "request_reader", "usage_reader"), HARNESSES)
async def test_an_answer_that_cannot_be_read_is_kept_and_estimated(
    harness: Harness, request_reader: str, usage_reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_reader, _broken)
    guard = harness.guard(max_usd=1, prices=PRICES)
    result = await harness.session(AgentSpec(lambda n, _: Reply("done")), guard).turn("go")
    assert (result.text, result.error) == ("done", None)
    spend = guard.spend()
    assert (spend["calls"], spend["estimated_calls"], spend["reserved_usd"]) == (1, 1, 0)
    assert guard.guard.guard_errors == 1


@pytest.mark.parametrize(("harness", "request_reader", "usage_reader"), HARNESSES)
@pytest.mark.parametrize(("on_guard_error", "calls"), [("allow", 1), ("block", 0)])
async def test_on_guard_error_decides_about_a_request_that_cannot_be_read(
    harness: Harness,
    request_reader: str,
    usage_reader: str,
    on_guard_error: str,
    calls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_reader, _broken)
    guard = harness.guard(on_guard_error=on_guard_error)
    spec = AgentSpec(lambda n, _: Reply("done"), tools={"look": lambda: "x"})
    session = harness.session(spec, guard)
    result = await session.turn("go")
    assert (session.model_calls, result.error) == (calls, None)
    assert guard.guard.guard_errors == 2  # it is read twice


@pytest.mark.parametrize(("harness", "request_reader", "usage_reader"), HARNESSES)
async def test_a_call_that_a_guard_inside_of_the_model_refuses_is_not_paid(
    harness: Harness, request_reader: str, usage_reader: str
) -> None:
    def script(n: int, _: str) -> Reply:
        inner()
        return Reply("done")

    inner = runguard.guard(max_model_calls=1)(lambda: {"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    guard = harness.guard(max_usd=1, prices=PRICES)
    with runguard.run():
        inner()
        result = await harness.session(AgentSpec(script), guard).turn("go")
    assert isinstance(result.error, runguard.RunStoppedError)
    spend = guard.spend()
    assert (spend["calls"], float(spend["usd"]), spend["reserved_usd"]) == (0, 0, 0)


class _Retry(AgentMiddleware[Any, Any, Any]):
    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        for _ in range(2):
            try:
                return await handler(request)
            except ConnectionError:
                pass
        return await handler(request)


async def test_the_middleware_sees_every_attempt_of_a_retry_before_it() -> None:
    guard = RunGuardMiddleware(max_usd=1, prices=PRICES)

    def script(n: int, _: str) -> Reply:
        return Reply(error=ConnectionError("reset")) if n < 3 else Reply("done")

    agent: Any = create_agent(ScriptedChat(script, [0]), [], middleware=[_Retry(), guard])
    result = await agent.ainvoke({"messages": [HumanMessage("go")]})
    assert result["messages"][-1].content == "done"
    assert guard.spend()["calls"] == 3
