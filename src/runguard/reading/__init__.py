"""Reads what went into a model call and what came out of it, for any provider's library, without importing one.

Known by their shapes: google-genai, OpenAI (chat completions and responses), Anthropic, LiteLLM, ADK's ``LlmResponse``, the same as plain
JSON, and a dict of the caller's own: ``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ..., "result": ...}``.
"""

from runguard.reading.answers import Reading, earlier_in, read
from runguard.reading.prompts import Request, read_request
from runguard.reading.streams import StreamReading

__all__ = ["Reading", "Request", "StreamReading", "earlier_in", "read", "read_request"]
