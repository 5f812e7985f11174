"""Reads what went into a model call and what came out of it, for any provider's library, without importing one.

Known by their shapes: google-genai, OpenAI (chat completions and responses), Anthropic, LiteLLM, ADK's ``LlmResponse``,
the same as plain JSON, and a dict of the caller's own:
``{"usd": 0.01, "sig": "search", "tokens": 900, "response": ..., "result": ...}``.
"""
