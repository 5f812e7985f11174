"""What RunGuard adds to a model and tool step of LangChain, the OpenAI Agents SDK and Pydantic AI.

    .venv-frameworks/bin/python benchmarks/frameworks.py [--quick] [--json]

CPU time of a step with a scripted model, interleaved with the framework's own hooks that do nothing. Ratios are taken
within one round, because CPU times move with the load of the machine and ratios hardly do.
"""

import argparse
import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from statistics import median
from typing import Any

from agents import Agent as OpenAIAgent
from agents import AgentHooks, Runner, function_tool, set_tracing_disabled
from agents.items import ModelResponse as OpenAIResponse
from agents.models.interface import Model
from agents.usage import Usage
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import UsageLimits

from runguard.langchain import RunGuardMiddleware
from runguard.openai_agents import AgentGuard
from runguard.pydantic_ai import RunGuard

MODEL, STEPS = "gpt-5-mini", 40
# one guard for all runs, as a program has it
MIDDLEWARE, AGENT_GUARD, CAPABILITY = RunGuardMiddleware(max_usd=5), AgentGuard(max_usd=5), RunGuard(max_usd=5)


def look_up(page: int) -> str:
    """Look something up."""
    return json.dumps({"page": page, "items": [f"item {n} of page {page}" for n in range(40)]})


class NoOpMiddleware(AgentMiddleware[Any, Any, Any]):
    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class ScriptedChat(BaseChatModel):
    model: str = MODEL
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        self.calls += 1
        usage: Any = {"input_tokens": 400, "output_tokens": 40, "total_tokens": 440}
        message = AIMessage("done", usage_metadata=usage)
        if self.calls <= STEPS:
            call: Any = {"name": "look_up", "args": {"page": self.calls}, "id": f"call {self.calls}"}
            message = AIMessage("", tool_calls=[call], usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


async def langchain(is_guarded: bool) -> str:
    middleware: Any = [MIDDLEWARE if is_guarded else NoOpMiddleware()]
    agent = create_agent(ScriptedChat(), tools=[look_up], middleware=middleware)
    result = await agent.ainvoke({"messages": [HumanMessage("go")]}, {"recursion_limit": 1_000})
    return str(result["messages"][-1].content)


class ScriptedModel(Model):
    model = MODEL
    calls = 0

    async def get_response(self, *_: Any, **__: Any) -> OpenAIResponse:
        self.calls += 1
        usage = Usage(1, 400, output_tokens=40, total_tokens=440)
        if self.calls > STEPS:
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            end = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
            return OpenAIResponse([end], usage, None)
        call = ResponseFunctionToolCall(
            type="function_call",
            name="look_up",
            arguments=json.dumps({"page": self.calls}),
            call_id=f"call {self.calls}",
        )
        return OpenAIResponse([call], usage, None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


async def openai_agents(is_guarded: bool) -> str:
    tools: Any = [function_tool(look_up)]
    agent: Any = OpenAIAgent(name="worker", model=ScriptedModel(), tools=tools, hooks=AgentHooks())
    result = await Runner.run(AGENT_GUARD.guarded(agent) if is_guarded else agent, "go", max_turns=500)
    return str(result.final_output)


class NoOpCapability(AbstractCapability[Any]):
    async def wrap_model_request(self, ctx: Any, *, request_context: Any, handler: Any) -> Any:
        return await handler(request_context)

    async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
        return await handler(args)


async def pydantic_ai(is_guarded: bool) -> str:
    calls = 0

    def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        nonlocal calls
        calls += 1
        done = calls > STEPS
        return ModelResponse([TextPart("done") if done else ToolCallPart("look_up", {"page": calls}, f"call {calls}")])

    capability: Any = CAPABILITY if is_guarded else NoOpCapability()
    agent = PydanticAgent(FunctionModel(script, model_name=MODEL), tools=[look_up], capabilities=[capability])
    return str((await agent.run("go", usage_limits=UsageLimits(request_limit=500))).output)


FRAMEWORKS: dict[str, Callable[[bool], Coroutine[Any, Any, str]]] = {
    "langchain": langchain,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
}


def seconds_per_step(framework: Callable[[bool], Coroutine[Any, Any, str]], is_guarded: bool) -> float:
    gc.collect()
    gc.disable()
    start = time.process_time()
    said = asyncio.run(framework(is_guarded))
    spent = time.process_time() - start
    gc.enable()
    assert said == "done", "the run was disturbed"
    return spent / STEPS


def measure(rounds: int) -> dict[str, dict[str, float]]:
    found = {}
    for name, framework in FRAMEWORKS.items():
        for is_guarded in (False, True):  # warm up
            seconds_per_step(framework, is_guarded)
        pairs = [(seconds_per_step(framework, False), seconds_per_step(framework, True)) for _ in range(rounds)]
        found[name] = {
            "step_ms": median(bare for bare, _ in pairs) * 1e3,
            "added_share": median(with_guard / bare for bare, with_guard in pairs) - 1,
            "added_us": median(with_guard - bare for bare, with_guard in pairs) * 1e6,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    set_tracing_disabled(True)
    found = measure(2 if options.quick else 25)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        print(
            f"{name:14} step {figures['step_ms']:6.2f} ms with a no-op hook, RunGuard adds "
            f"{figures['added_share']:6.1%} ({figures['added_us']:.0f} us)"
        )


if __name__ == "__main__":
    main()
