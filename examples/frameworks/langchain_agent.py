"""A LangChain agent whose parser never gets further: RunGuard stops it.

    python examples/frameworks/langchain_agent.py

The model is a script: no key, no network. Put your own chat model in its place.
"""

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from runguard.langchain import RunGuardMiddleware


class StubbornModel(BaseChatModel):
    """Answers every failure with one more attempt."""

    model: str = "gpt-5-mini"
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.calls += 1
        call = {"name": "parse_document", "args": {"hint": f"attempt {self.calls}"}, "id": f"call {self.calls}"}
        usage = {"input_tokens": 400 * self.calls, "output_tokens": 40, "total_tokens": 400 * self.calls + 40}
        return ChatResult(generations=[ChatGeneration(message=AIMessage("", tool_calls=[call], usage_metadata=usage))])


def parse_document(hint: str) -> str:
    """Parse the document."""
    return '{"status": "partial_parse_error", "data": null}'


def main() -> None:
    model, guard = StubbornModel(), RunGuardMiddleware(max_usd=0.50)
    agent = create_agent(model, tools=[parse_document], middleware=[guard])
    result = agent.invoke({"messages": [HumanMessage("Extract the invoice.")]}, {"recursion_limit": 1_000})
    print(result["messages"][-1].content)
    print(f"{model.calls} model calls, ${guard.spend()['usd']}: {guard.trips[0]}")


if __name__ == "__main__":
    main()
