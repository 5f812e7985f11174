"""A Pydantic AI agent whose parser never gets further: RunGuard stops it.

    python examples/frameworks/pydantic_ai_agent.py

The model is a script: no key, no network. Put the name of your own model in its place.
"""

import itertools

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import RequestUsage, UsageLimits

from runguard.pydantic_ai import RunGuard

attempts = itertools.count(1)


def stubborn(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Answers every failure with one more attempt."""
    n = next(attempts)
    call = ToolCallPart("parse_document", {"hint": f"attempt {n}"}, f"call {n}")
    return ModelResponse([call], usage=RequestUsage(input_tokens=400 * n, output_tokens=40))


def parse_document(hint: str) -> str:
    """Parse the document."""
    return '{"status": "partial_parse_error", "data": null}'


def main() -> None:
    guard = RunGuard(max_usd=0.50)
    agent = Agent(FunctionModel(stubborn, model_name="gpt-5-mini"), tools=[parse_document], capabilities=[guard])
    result = agent.run_sync("Extract the invoice.", usage_limits=UsageLimits(request_limit=500))
    print(result.output)
    print(f"{guard.spend()['calls']} model calls, ${guard.spend()['usd']}: {guard.trips[0]}")


if __name__ == "__main__":
    main()
