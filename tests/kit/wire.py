"""What the tests on the wire share: exact prices, bounded runs, and both sides' books."""

import asyncio
from decimal import Decimal
from typing import Any

from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, run
from tests.kit.gemini_server import Json
from tests.kit.money import FAR_AWAY, watched

# USD per million tokens of gemini-2.5-flash, as Google lists them.
FLASH = {"input": "0.30", "output": "2.50", "cached": "0.03", "audio": "1.00", "cached_audio": "0.10"}
CALL_USD = Decimal("0.000925")  # 1,000 prompt and 250 output tokens
MODES = {"unary": None, "sse": RunConfig(streaming_mode=StreamingMode.SSE)}


def guard(**policy: Any) -> RunGuardPlugin:
    """Fixed prices, a counter that makes the worst case of a standard call what it really costs, and an account that
    outlives the runs.
    """
    budgets = [*policy.pop("budgets", ()), Budget(usd=FAR_AWAY, per="app", window="month")]
    return watched(
        RunGuardPlugin(
            **{"prices": {"gemini-2.5-flash": FLASH}, "tokens": lambda request: 1_000, "budgets": budgets, **policy}
        )
    )


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
