"""A guarded model in a guarded agent, with one store: each call is booked once, and each attempt of a retry counts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

from runguard import Budget
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from tests.frameworks.langchain_harness import called

_ASK: Any = {"messages": [HumanMessage("Hi")]}


class TwoAttempts(AgentMiddleware[Any, Any, Any]):
    """Asks the model twice, as a retry does whose first attempt was answered and billed."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        handler(request)
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        await handler(request)
        return await handler(request)


def _answers() -> Any:
    while True:
        yield AIMessage("Hello.", usage_metadata={"input_tokens": 10, "output_tokens": 5, "total_tokens": 15})


def _guards(store: str, calls: int = 10) -> tuple[RunGuardMiddleware, GuardedChatModel]:
    settings: Any = {"store": store, "app": "docs"}
    model = GuardedChatModel(
        GenericFakeChatModel(messages=_answers()), budgets=[Budget(calls=calls, per="app")], **settings
    )
    return RunGuardMiddleware(budgets=[Budget(calls=10, per="app")], **settings), model


def _booked(middleware: RunGuardMiddleware) -> tuple[Any, Any]:
    middleware.guard.flush(10)
    [budget] = middleware.budgets()
    return budget.spent, budget.reserved


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/guard.db"


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
async def test_a_call_is_booked_once(store: str, way: str) -> None:
    middleware, model = _guards(store)
    agent = create_agent(model, tools=[], middleware=[middleware])
    await called(agent, _ASK, way, **({"stream_mode": "messages"} if "stream" in way else {}))
    assert _booked(middleware) == (1, 0)


async def test_attempts_at_the_same_time_are_all_booked(store: str) -> None:
    class AtOnce(TwoAttempts):
        async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            return (await asyncio.gather(handler(request), handler(request)))[0]

    middleware, model = _guards(store)
    await create_agent(model, tools=[], middleware=[middleware, AtOnce()]).ainvoke(_ASK)
    assert _booked(middleware) == (2, 0)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
async def test_each_attempt_between_the_guards_is_booked(store: str, way: str) -> None:
    middleware, model = _guards(store)
    agent = create_agent(model, tools=[], middleware=[middleware, TwoAttempts()])
    await called(agent, _ASK, way)
    assert _booked(middleware) == (2, 0)


def test_the_lower_cap_of_the_inner_guard_holds(store: str) -> None:
    middleware, model = _guards(store, calls=1)
    agent = create_agent(model, tools=[], middleware=[middleware])
    agent.invoke(_ASK)
    agent.invoke(_ASK)
    assert [trip.rule for trip in model.trips] == ["budget"]
    assert model.spend()["calls"] == 1
