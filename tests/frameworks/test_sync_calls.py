"""Synchronous LangChain agents: waiting goes on in another thread, and the cap and other calls do not notice."""

import threading
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

from runguard import Budget, guard
from runguard.langchain import GuardedChatModel, RunGuardMiddleware
from runguard.termination import FunctionalTermination
from runguard.testing.conformance import MODEL, Reply
from tests.frameworks.langchain_harness import ScriptedChat

PRICES: Any = {MODEL: {"input": 0, "output": 100}}  # $0.01 for a reply of 100 tokens
LIMITS: Any = {"prices": PRICES, "models": {MODEL: {"max_output_tokens": 100}}}


def _calls(calls: list[Any], times: int = 1, seconds: float = 40.0) -> None:
    """Make every call in threads, ``times`` each; fail where one does not come back."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a call did not come back"


@pytest.mark.parametrize("store", ["", "sqlite"])
@pytest.mark.parametrize("on_guard_error", ["allow", "block"])
def test_a_budget_per_user_holds_over_synchronous_calls(
    store: str, on_guard_error: Literal["allow", "block"], tmp_path: Path
) -> None:
    """Calls of $0.01 on $0.10 a day: ten are made, however many threads ask at once, and nothing stays held."""
    where: Any = {"store": f"sqlite:///{tmp_path}/guard.db"} if store else {}
    made = [0]
    chat = ScriptedChat(lambda n, _: Reply("done"), made)
    budgets = [Budget(usd=0.10, per="user", window="1d")]
    middleware = RunGuardMiddleware(
        user="ann", budgets=budgets, on_guard_error=on_guard_error, max_wait_seconds=5, **LIMITS, **where
    )
    agent: Any = create_agent(chat, [], middleware=[middleware])
    _calls([lambda: agent.invoke({"messages": [HumanMessage("go")]})], 30)
    assert middleware.flush(10)
    spend = middleware.spend()
    assert made[0] == 10
    assert (spend["usd"], spend["reserved_usd"]) == (Decimal("0.10"), 0)
    assert middleware.guard.guard_errors == 0


def test_a_condition_may_make_a_guarded_call(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    judge = guard(lambda: {"usd": 0.01}, budget={"max_usd": 1}, store=store)

    def is_over(events: Any) -> bool:
        judge()
        return False

    def look(n: int) -> str:
        """Look something up."""
        return f"page {n}"

    chat = ScriptedChat(lambda n, _: Reply(calls=[("look", {"n": n})]) if n < 4 else Reply("done"), [0])
    condition = FunctionalTermination(is_over)
    middleware = RunGuardMiddleware(store=store, max_usd=1, termination_condition=condition, **LIMITS)
    agent: Any = create_agent(chat, [look], middleware=[middleware])
    model = GuardedChatModel(ScriptedChat(lambda n, _: Reply("done"), [0]), store=store, max_usd=1, **LIMITS)
    _calls([lambda: agent.invoke({"messages": [HumanMessage("go")]}), lambda: model.invoke("go")], 3)
    assert judge.spend()["calls"] >= 1
