"""A switch to a cheaper model in LangChain's middleware."""

from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

from runguard import Budget, PolicyError, Threshold
from runguard.langchain import RunGuardMiddleware
from runguard.openai_agents import AgentGuard
from runguard.pydantic_ai import RunGuard

# With 1,000 prompt and 250 output tokens a call of the large model costs $0.02, one of the small model $0.002.
SETTINGS: dict[str, Any] = {
    "prices": {"big-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}},
    "models": {name: {"context_window": 100_000, "max_output_tokens": 250} for name in ("big-1", "small-1")},
    "budgets": [Budget(usd="0.10", thresholds=[Threshold(0.5, model="small-1")])],
}
ASKED: list[str] = []


class NamedChat(BaseChatModel):
    """Notes the name of the model that each request goes to."""

    model: str = "big-1"

    @property
    def _llm_type(self) -> str:
        return "named"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        ASKED.append(self.model)
        calls = [{"name": "work", "args": {"q": len(ASKED)}, "id": f"c{len(ASKED)}"}] if len(ASKED) < 7 else []
        usage = {"input_tokens": 1_000, "output_tokens": 250, "total_tokens": 1_250}
        message = AIMessage(content="" if calls else "done", tool_calls=calls, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def work(q: int) -> str:
    """Works."""
    return f"did {q}"


@pytest.mark.parametrize(("mode", "switched"), [("enforce", 4), ("shadow", 0)])
async def test_the_agent_goes_on_with_the_cheaper_model(mode: Any, switched: int) -> None:
    ASKED.clear()
    guard = RunGuardMiddleware(**SETTINGS, mode=mode)
    agent = create_agent(NamedChat(), [work], middleware=[guard])
    result = await agent.ainvoke({"messages": [HumanMessage("go")]})
    assert result["messages"][-1].content == "done"
    assert ["big-1"] * (7 - switched) + ["small-1"] * switched == ASKED
    bill = guard.spend()
    assert bill["by_model"].get("small-1", {}).get("calls", 0) == switched
    assert bill["usd"] == Decimal("0.02") * (7 - switched) + Decimal("0.002") * switched


@pytest.mark.parametrize("guard", [AgentGuard, RunGuard])
def test_other_frameworks_reject_the_setting(guard: Any) -> None:
    with pytest.raises(PolicyError, match="the model cannot be switched here"):
        guard(**SETTINGS)
