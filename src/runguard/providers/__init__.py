"""Reads what went into a model call and what came out of it, for any provider's library, without importing one.

Known by their shapes: google-genai, OpenAI (chat completions and responses), Anthropic, LiteLLM, ADK's ``LlmResponse``,
the same as plain
JSON, and a dict of the caller's own: ``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ..., "result": ...}``.
"""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.providers.prompts import Request, read_request
    from runguard.providers.responses import Reading, earlier_in, read
    from runguard.providers.stream_reading import StreamReading

_HOMES = {
    "Reading": "runguard.providers.responses",
    "earlier_in": "runguard.providers.responses",
    "read": "runguard.providers.responses",
    "Request": "runguard.providers.prompts",
    "read_request": "runguard.providers.prompts",
    "StreamReading": "runguard.providers.stream_reading",
}

__all__ = ["Reading", "Request", "StreamReading", "earlier_in", "read", "read_request"]

__getattr__, __dir__ = lazy(__name__, _HOMES)
