"""Models whose calls fail or stop at a known point."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from decimal import Decimal
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, text
from tests.kit.adk_runs import play
from tests.kit.money import CALL_USD, SSE, agent, assert_nothing_reserved, figures, guard

PROMPT_USD = Decimal("0.01")


class RefusedError(Exception):
    """The provider answered with a status: it has billed nothing."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


def said(
    words: str, usage: tuple[int, int] | None = None, *, partial: bool = False, model: str | None = None
) -> LlmResponse:
    """A response or a chunk, with prompt and output tokens where told."""
    told = usage and types.GenerateContentResponseUsageMetadata(
        prompt_token_count=usage[0], candidates_token_count=usage[1], total_token_count=sum(usage)
    )
    content = types.Content(role="model", parts=[types.Part(text=words)])
    return LlmResponse(content=content, usage_metadata=told or None, partial=partial, model_version=model)


class Chunks(ScriptedModel):
    """Its first call answers with just these responses;

    an exception among them is raised, a function called. Later calls say "fine".
    """

    def __init__(self, *first: Any, **options: Any) -> None:
        super().__init__([text("fine")], **options)
        self._first = first

    _first: Any = ()

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        first, self._first = self._first, ()
        if not first:
            async for response in super().generate_content_async(llm_request, stream):
                yield response
            return
        self._calls += 1
        for entry in first:
            await asyncio.sleep(0)
            if isinstance(entry, BaseException):
                raise entry
            if callable(entry):
                await entry()
                continue
            yield entry


async def assert_usable(plugin: RunGuardPlugin, root: Any, service: InMemorySessionService, **options: Any) -> None:
    """Nothing is held any more, and the user's next turn finds a whole session and costs one call."""
    assert_nothing_reserved(plugin)
    calls, estimated, usd = figures(plugin)
    result = await play(
        root, "and now?", plugins=[plugin, *options.pop("plugins", ())], session_service=service, **options
    )
    assert result.texts[-1] == "fine"
    assert result.trips == []
    assert figures(plugin) == (calls + 1, estimated, usd + CALL_USD)
    assert_calls_answered(result.session)
    assert_nothing_reserved(plugin)


class Meddler(BasePlugin):
    """A plugin behind ours that does something instead of the first call."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(name="meddler")
        self.act: Callable[[], Any] | None = act

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> LlmResponse | None:
        act, self.act = self.act, None
        return act() if act is not None else None


def recover(callback_context: Any, llm_request: LlmRequest, error: Exception) -> LlmResponse:
    return said("never mind")


async def stream(*first: Any, **policy: Any) -> tuple[RunGuardPlugin, Chunks, LlmAgent, InMemorySessionService]:
    model, plugin, service = Chunks(*first), guard(**{"max_usd": "0.10", **policy}), InMemorySessionService()
    root = agent("a", model)
    await play(root, plugins=[plugin], session_service=service, run_config=SSE, catch=True)
    assert model.calls == 1
    return plugin, model, root, service


def usage(**counts: Any) -> types.GenerateContentResponseUsageMetadata:
    return types.GenerateContentResponseUsageMetadata(**counts)
