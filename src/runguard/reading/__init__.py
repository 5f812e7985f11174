"""Reads what went into a model call and what came out of it, for any provider's library, without importing one.

Known by their shapes: google-genai, OpenAI (chat completions and responses), Anthropic, LiteLLM, ADK's ``LlmResponse``, the same as plain
JSON, and a dict of the caller's own: ``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ..., "result": ...}``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from runguard.reading.answers import Reading, earlier_in, read
    from runguard.reading.prompts import Request, read_request
    from runguard.reading.streams import StreamReading

_HOMES: Final = {
    **dict.fromkeys(("Reading", "earlier_in", "read"), "answers"),
    **dict.fromkeys(("Request", "read_request"), "prompts"),
    **dict.fromkeys(("StreamReading",), "streams"),
}

__all__ = ["Reading", "Request", "StreamReading", "earlier_in", "read", "read_request"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
