"""An ADK agent on any model that LiteLLM reaches. The one method that calls the model is guarded; nothing else changes.

    python examples/guarded_litellm.py "What is known about the moon?"

It needs google-adk, litellm, mcp (LiteLLM wants it for tools) and the provider's key, here GEMINI_API_KEY.
"""

import asyncio
import sys
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

try:
    from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
except ImportError as error:
    sys.exit(f"This example needs litellm and mcp: pip install litellm mcp ({error})")

from runguard import BudgetExceededError, ContextOverflowError, LoopDetectedError, guard_async

LIBRARY = {
    "moon": "The moon is 384,400 km away. It has no air.",
    "sun": "The sun is 150 million km away. It is a star.",
}


def search(query: str) -> dict[str, str]:
    """Find an article."""
    found = next((article for word, article in LIBRARY.items() if word in query.lower()), None)
    return (
        {"status": "found", "article": found}
        if found
        else {"status": "error", "message": "permission denied: the archive"}
    )


def summarize(text: str) -> dict[str, str]:
    """Shorten a text to its first sentence."""
    return {"status": "ok", "summary": text.partition(". ")[0]}


class GuardedClient(LiteLLMClient):
    """What ADK's LiteLlm calls models with.

    Make one for each session: limits and memory of the guard are the client's own.
    """

    def __init__(self, max_usd: float, max_context_tokens: int = 900_000) -> None:
        self.acompletion = guard_async(  # type: ignore[method-assign]
            super().acompletion,
            budget={"max_usd": max_usd},
            # A third round stops the run: of equal tool calls, or of the same tools with other arguments whose results
            # bring nothing new.
            # Both are read from answers and requests. "by": "name" stops at a tool's third call in a row, whatever came
            # of it.
            loop={"repeats": 3, "max_cycle_len": 4, "by": "result"},
            context={"maxContextTokens": max_context_tokens, "headroom": 100_000},
            tokens=lambda messages, **_: sum(len(str(message.get("content") or "")) // 4 for message in messages),
        )


def research_agent(model: Any) -> LlmAgent:
    return LlmAgent(
        name="research_agent",
        model=model,
        description="Research agent with RunGuard protection",
        instruction="You are a research assistant. Use the provided tools to answer questions.",
        tools=[search, summarize],
        # With a limit to each answer the most that a call can cost is known before it is made.
        generate_content_config=types.GenerateContentConfig(max_output_tokens=2_000),
    )


async def run_adk_agent(
    user_input: str, model: str = "gemini/gemini-2.5-flash", max_usd: float = 1.50, **provider: Any
) -> str:
    agent = research_agent(LiteLlm(model=model, llm_client=GuardedClient(max_usd), **provider))
    sessions = InMemorySessionService()
    session = await sessions.create_session(app_name="demo", user_id="u1")
    runner = Runner(agent=agent, app_name="demo", session_service=sessions)
    answer = ""
    try:
        async for event in runner.run_async(
            user_id="u1", session_id=session.id, new_message=types.UserContent(user_input)
        ):
            if event.is_final_response() and event.content and event.content.parts:
                answer = event.content.parts[0].text or ""
    except LoopDetectedError as e:
        return f"Loop detected (pattern: {e.pattern!r}). Agent aborted."
    except BudgetExceededError as e:
        return f"Budget cap reached (${e.spent:.3f}). Agent aborted."
    except ContextOverflowError as e:
        return f"Context limit approaching ({e.projected_tokens} tokens). Agent aborted."
    return answer


if __name__ == "__main__":
    print(asyncio.run(run_adk_agent(" ".join(sys.argv[1:]) or "What is known about the moon?")))
