"""What the tests on the wire share: exact prices, bounded runs, and both sides' books."""

import asyncio
from decimal import Decimal
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode  # type: ignore[attr-defined]
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, run

from .gemini_server import Json

# USD per million tokens of gemini-2.5-flash, as Google lists them.
FLASH = {"input": "0.30", "output": "2.50", "cached": "0.03", "audio": "1.00", "cached_audio": "0.10"}
CALL_USD = Decimal("0.000925")  # 1,000 prompt and 250 output tokens
FAR_AWAY = Decimal(1_000_000)
MODES = {"unary": None, "sse": RunConfig(streaming_mode=StreamingMode.SSE)}


def guard(**policy: Any) -> RunGuardPlugin:
    """Fixed prices, a counter that makes the worst case of a standard call what it really costs, and an account that
    outlives the runs.
    """
    budgets = [*policy.pop("budgets", ()), Budget(usd=FAR_AWAY, per="app", window="month")]
    return RunGuardPlugin(
        **{"prices": {"gemini-2.5-flash": FLASH}, "tokens": lambda request: 1_000, "budgets": budgets, **policy}
    )


def agent(name: str, model: Any, *, max_output: int | None = 250, **options: Any) -> LlmAgent:
    return LlmAgent(
        name=name,
        model=model,
        generate_content_config=types.GenerateContentConfig(max_output_tokens=max_output),
        **options,
    )


def step(q: int) -> dict[str, int]:
    """A tool that gets somewhere: a new answer to every new argument."""
    return {"done": q}


def forgive(callback_context: Any, llm_request: LlmRequest, error: Exception) -> LlmResponse:
    """An agent's own answer to a model that failed."""
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text="later")]))


async def play(
    root: Any, message: str = "go", *, mode: str = "unary", seconds: float = 10, **options: Any
) -> Recording:
    """One user turn that must end by itself."""
    if MODES[mode] is not None:
        options.setdefault("run_config", MODES[mode])
    async with asyncio.timeout(seconds):
        return await run(root, message, **options)


def price(used: Json) -> Decimal:
    """What Google's list asks for a ``usageMetadata``, by hand."""

    def heard(details: str) -> int:
        return sum(int(part["tokenCount"]) for part in used.get(details, ()) if part["modality"] == "AUDIO")

    audio, cached_audio, cached = (
        heard("promptTokensDetails"),
        heard("cacheTokensDetails"),
        used.get("cachedContentTokenCount", 0),
    )
    plain = used.get("promptTokenCount", 0) + used.get("toolUsePromptTokenCount", 0) - cached - audio + cached_audio
    said = used.get("candidatesTokenCount", 0) + used.get("thoughtsTokenCount", 0)
    nano = (
        plain * 300 + (cached - cached_audio) * 30 + (audio - cached_audio) * 1_000 + cached_audio * 100 + said * 2_500
    )
    return Decimal(nano) / 1_000_000_000


def figures(plugin: Any) -> tuple[int, int, Decimal]:
    """Calls, how many of them are estimates, and dollars."""
    spent = plugin.spend()
    return spent["calls"], spent["estimated_calls"], spent["usd"]


def assert_nothing_reserved(plugin: RunGuardPlugin) -> None:
    """Whatever a call held was given back or booked, and what was booked is what was spent."""
    assert plugin.spend()["reserved_usd"] == 0
    assert [status for status in plugin.budgets() if status.reserved] == []
    assert [status.spent for status in plugin.budgets("app:app") if status.window == "month"] == [
        plugin.spend("app:app")["usd"]
    ]
    assert plugin.snapshot()["runs"] == []
    assert plugin.snapshot()["guard_errors"] == 0
