"""Answers of providers, as their clients return them."""

from typing import Any

from hypothesis import strategies as st

from runguard.pricing.rates import Usage
from runguard.providers.streams import StreamReading


def streamed(*chunks: Any) -> StreamReading:
    stream = StreamReading()
    for chunk in chunks:
        stream.feed(chunk)
    return stream


CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-4o-2024-08-06",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": None,
            "message": {
                "role": "assistant",
                "content": "Looking.",
                "refusal": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "x", "n": 3}'}},
                    {"id": "c2", "type": "function", "function": {"name": "broken", "arguments": '{"q": '}},
                    {"id": "c3", "type": "function", "function": {"name": "bare", "arguments": ""}},
                ],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 40, "audio_tokens": 6, "cache_write_tokens": 5},
        "completion_tokens_details": {
            "reasoning_tokens": 8,
            "audio_tokens": 2,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    },
}


CHAT_USAGE = Usage(input=100, output=20, cached=40, cache_write=5, audio=6, audio_output=2, thinking=8)


CHAT_CALLS: tuple[tuple[str, Any], ...] = (("search", {"q": "x", "n": 3}), ("broken", '{"q": '), ("bare", {}))


def chat_chunk(delta: dict[str, Any] | None, *, index: int = 0, usage: dict[str, Any] | None = None) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": None}]
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-4o",
        "choices": choices,
        "usage": usage,
    }


NAMES = (
    "usage usage_metadata usageMetadata usd sig tokens response result results choices message delta content "
    "parts text tool_calls function name "
    "arguments candidates output type index item model prompt_tokens completion_tokens input_tokens "
    "output_tokens promptTokenCount total_tokens "
    "iterations prompt_tokens_details promptTokensDetails modality tokenCount functionCall args input partial "
    "chunk content_block cost data "
    "mime_type messages contents config tools max_tokens n _hidden_params response_cost"
)


KINDS = (
    "message_start message_delta content_block_start content_block_delta text_delta tool_use input_json_delta "
    "response.completed "
    "response.output_item.done response.output_text.delta function_call message text chunk image_url file"
)


names, kinds = st.sampled_from(NAMES.split()), st.sampled_from(KINDS.split())
