"""An agent of the OpenAI Agents SDK whose parser never gets further: RunGuard stops it.

    python examples/frameworks/openai_agent.py

The model is a script: no key, no network. Leave ``model`` out to use OpenAI.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.items import ModelResponse
from agents.models.interface import Model
from agents.usage import Usage
from openai.types.responses import ResponseFunctionToolCall

from runguard.openai_agents import AgentGuard


class StubbornModel(Model):
    """Answers every failure with one more attempt."""

    model = "gpt-5-mini"
    calls = 0

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        self.calls += 1
        arguments = json.dumps({"hint": f"attempt {self.calls}"})
        call = ResponseFunctionToolCall(
            type="function_call", name="parse_document", arguments=arguments, call_id=f"call {self.calls}"
        )
        tokens = 400 * self.calls
        return ModelResponse([call], Usage(1, tokens, output_tokens=40, total_tokens=tokens + 40), None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


@function_tool
def parse_document(hint: str) -> str:
    """Parse the document."""
    return '{"status": "partial_parse_error", "data": null}'


def main() -> None:
    set_tracing_disabled(True)  # tracing would send this run to OpenAI
    model, guard = StubbornModel(), AgentGuard(max_usd=0.50)
    agent = guard.guarded(Agent(name="extractor", model=model, tools=[parse_document]))
    result = Runner.run_sync(agent, "Extract the invoice.", max_turns=500)
    print(result.final_output)
    print(f"{model.calls} model calls, ${guard.spend()['usd']}: {guard.trips[0]}")


if __name__ == "__main__":
    main()
