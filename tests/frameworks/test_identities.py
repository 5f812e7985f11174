"""Whom a budget is for: a guard rejects what is no text, and a budget per user that no user was given for."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from agents import Agent, Runner
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.test import TestModel

from runguard import Budget
from runguard.core.errors import PolicyError
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.openai_agents import AgentGuard, guarded
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.langchain_harness import ScriptedChat
from tests.frameworks.openai_harness import ScriptedModel


def _chat(made: list[int]) -> ScriptedChat:
    return ScriptedChat(lambda n, _: Reply("done"), made)


GUARDS: dict[str, Callable[..., Any]] = {
    "middleware": RunGuardMiddleware,
    "chat model": lambda **given: GuardedChatModel(_chat([0]), **given),
    "guarded": lambda **given: guarded(Agent("one"), **given),
    "agent guard": AgentGuard,
    "capability": RunGuard,
}
_NO_SESSION = ("middleware", "chat model")  # the thread is the session
_TAKES_FUNCTIONS = ("guarded", "agent guard", "capability")


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("value", [123, None, lambda: "ann", b"ann", ["ann"]])
@pytest.mark.parametrize("name", ["app", "user", "session"])
def test_what_is_no_text_is_rejected(guard: str, name: str, value: Any) -> None:
    if name == "session" and guard in _NO_SESSION:
        pytest.skip("takes no session")
    if callable(value) and name != "app" and guard in _TAKES_FUNCTIONS:
        pytest.skip("takes a function of what the framework knows of a run")
    if name == "user" and guard in _NO_SESSION and callable(value):
        pytest.skip("takes a function that names the user")
    with pytest.raises(PolicyError, match=f"^{name} = .*: give a text"):
        GUARDS[guard](**{name: value})


async def _middleware(made: list[int], config: Any = None, **given: Any) -> None:
    agent: Any = create_agent(_chat(made), [], middleware=[RunGuardMiddleware(**given)])
    await agent.ainvoke({"messages": [HumanMessage("go")]}, config)


async def _chat_model(made: list[int], **given: Any) -> None:
    GuardedChatModel(_chat(made), **given).invoke("go")


async def _openai(made: list[int], **given: Any) -> None:
    model = ScriptedModel(AgentSpec(lambda n, _: Reply("done")), made)
    await Runner.run(guarded(Agent("one", model=model), **given), "go")


class _Counted(TestModel):
    made: list[int]

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        self.made[0] += 1
        return await super().request(*args, **kwargs)


async def _pydantic(made: list[int], **given: Any) -> None:
    model = _Counted()
    model.made = made
    await PydanticAgent(model, capabilities=[RunGuard(**given)]).run("go")


RUNS = [_middleware, _chat_model, _openai, _pydantic]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("per", ["user", "session", "user+agent", "user:a*"])
async def test_a_budget_per_user_without_a_user_is_rejected_at_the_first_call(run: Any, per: str) -> None:
    made = [0]
    with pytest.raises(PolicyError, match=f"per = '{per.split('+')[0].split(':')[0]}.*give "):
        await run(made, budgets=[Budget(calls=5, per=per)])
    assert made == [0]


@pytest.mark.parametrize("run", RUNS)
async def test_in_shadow_mode_it_is_a_warning(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = [0]
    with caplog.at_level(logging.WARNING, "runguard"):
        await run(made, budgets=[Budget(calls=5, per="user")], mode="shadow")
    assert made == [1]
    assert [line for line in caplog.messages if line.startswith("runguard.unnamed:")]


async def test_a_thread_is_a_session() -> None:
    made = [0]
    config = {"configurable": {"thread_id": "t1"}}
    await _middleware(made, config, budgets=[Budget(calls=5, per="session")])
    assert made == [1]
