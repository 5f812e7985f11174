"""Model calls that ADK's hooks do not see."""

from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

from google.adk.agents import BaseAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, text
from tests.kit.money import guard

SMALL_USD = Decimal("0.002")


PRICES = {"scripted-1": {"input": 10, "output": 40}, "small-1": {"input": 1, "output": 4}}


HELLO = types.Content(role="user", parts=[types.Part(text="go")])


def two_prices(**policy: Any) -> RunGuardPlugin:
    return guard(**{"prices": PRICES, "models": {"*": {"max_output_tokens": 250}}, **policy})


def small(words: str = "advice", **options: Any) -> ScriptedModel:
    """A second model, at a tenth of the price."""
    return ScriptedModel([text(words)], model="small-1", **options)


async def ask(llm: BaseLlm, words: str = "?" * 2_900) -> list[LlmResponse]:
    """What code does that uses a model beside the agents.

    The words are about as long as the usage that models tell here.
    """
    config = types.GenerateContentConfig(max_output_tokens=250)
    request = LlmRequest(
        model=llm.model, contents=[types.Content(role="user", parts=[types.Part(text=words)])], config=config
    )
    return [response async for response in llm.generate_content_async(request)]


def consulting(model: BaseLlm, times: int = 1) -> Callable[..., Any]:
    async def consult(q: int) -> dict[str, Any]:
        answers = [await ask(model) for _ in range(times)]
        return {
            "q": q,
            "advice": [
                (response.content.parts or [])[0].text for got in answers for response in got if response.content
            ],
        }

    return consult


def booked(plugin: RunGuardPlugin) -> tuple[int, Decimal]:
    spent = plugin.spend()
    assert spent["estimated_calls"] == 0
    return spent["calls"], spent["usd"]


class Asking(BaseAgent):
    """An agent of the user's own that calls its model directly."""

    llm: Any
    times: int = 1

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        for _ in range(self.times):
            for response in await ask(self.llm):
                yield Event(
                    author=self.name, invocation_id=ctx.invocation_id, branch=ctx.branch, content=response.content
                )
