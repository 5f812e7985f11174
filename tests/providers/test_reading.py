"""What providers really send, through their own libraries' types and as plain JSON; and nothing that is handed in can
raise.
"""

import copy
import json
import os
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.pricing.rates import Usage
from runguard.providers import fields as asking
from runguard.providers.answers import MAX_ARGUMENTS, MAX_CALLS, TEXT_CHARS, Reading, read
from runguard.providers.prompts import Request, read_request
from runguard.providers.streams import StreamReading

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices


def forms(payload: dict[str, Any], kind: type[Any] | None) -> list[Any]:
    """The same answer as JSON and, where there is a library, as its object and as that object's dump."""
    if kind is None:
        return [payload]
    made = kind.model_validate(copy.deepcopy(payload))
    return [payload, made, made.model_dump(), made.model_dump(exclude_none=True)]


def streamed(*chunks: Any) -> StreamReading:
    stream = StreamReading()
    for chunk in chunks:
        stream.feed(chunk)
    return stream


# ---- Gemini ---------------------------------------------------------------------------------------------------------

GEMINI = {
    "candidates": [
        {
            "content": {
                "role": "model",
                "parts": [
                    {"text": "I should search.", "thought": True},
                    {"text": "Let me look. "},
                    {"text": "One moment."},
                    {"functionCall": {"name": "search", "args": {"q": "invoice"}}},
                ],
            },
            "finishReason": "STOP",
        }
    ],
    "modelVersion": "gemini-2.5-flash",
    "usageMetadata": {
        "promptTokenCount": 100,
        "candidatesTokenCount": 20,
        "thoughtsTokenCount": 30,
        "toolUsePromptTokenCount": 7,
        "cachedContentTokenCount": 40,
        "totalTokenCount": 157,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 75}, {"modality": "AUDIO", "tokenCount": 25}],
        "toolUsePromptTokensDetails": [{"modality": "AUDIO", "tokenCount": 2}],
        "cacheTokensDetails": [{"modality": "AUDIO", "tokenCount": 11}, {"modality": "TEXT", "tokenCount": 29}],
        "candidatesTokensDetails": [{"modality": "AUDIO", "tokenCount": 3}],
    },
}
GEMINI_USAGE = Usage(input=107, output=50, cached=40, audio=27, cached_audio=11, audio_output=3, thinking=30)


def gemini_type() -> Any:
    types = pytest.importorskip("google.genai.types")
    return types.GenerateContentResponse


def test_gemini_in_every_form():
    for form in forms(GEMINI, gemini_type()):
        reading = read(form)
        assert reading == Reading(
            GEMINI_USAGE, "gemini-2.5-flash", (("search", {"q": "invoice"}),), "Let me look. One moment."
        )


@pytest.mark.parametrize(
    ("counts", "output"),
    [
        # thoughts within candidates
        ({"promptTokenCount": 10, "candidatesTokenCount": 50, "thoughtsTokenCount": 20, "totalTokenCount": 60}, 50),
        # beside them
        ({"promptTokenCount": 10, "candidatesTokenCount": 50, "thoughtsTokenCount": 20, "totalTokenCount": 80}, 70),
        ({"promptTokenCount": 10, "candidatesTokenCount": 50, "thoughtsTokenCount": 20}, 70),
        ({"promptTokenCount": 10, "totalTokenCount": 10}, 0),
        ({"promptTokenCount": 10, "responseTokenCount": 5}, 5),  # live
    ],
)
def test_output_of_gemini_is_what_the_total_leaves(counts, output):
    usage = read({"usageMetadata": counts}).usage
    assert usage is not None
    assert (usage.input, usage.output) == (10, output)


def test_adk_response_is_read_like_the_one_it_was_made_of():
    module = pytest.importorskip("google.adk.models.llm_response")
    response = module.LlmResponse.create(gemini_type().model_validate(GEMINI))
    reading = read(response)
    assert reading.usage == GEMINI_USAGE
    assert (reading.model, reading.calls, reading.text) == (
        "gemini-2.5-flash",
        (("search", {"q": "invoice"}),),
        "Let me look. One moment.",
    )
    assert read(response.model_dump()).usage == GEMINI_USAGE


def gemini_chunk(parts: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "candidates": [{"content": {"role": "model", "parts": parts}}],
        "modelVersion": "gemini-2.5-flash",
        **({"usageMetadata": usage} if usage else {}),
    }


GEMINI_CHUNKS = [
    gemini_chunk([{"text": "thinking", "thought": True}], {"promptTokenCount": 9, "totalTokenCount": 9}),
    gemini_chunk([{"text": "Hel"}], {"promptTokenCount": 9, "candidatesTokenCount": 1, "totalTokenCount": 10}),
    gemini_chunk(
        [{"text": "lo"}, {"functionCall": {"name": "f", "args": {"a": 1}}}],
        {"promptTokenCount": 9, "candidatesTokenCount": 4, "totalTokenCount": 13},
    ),
]


@pytest.mark.parametrize("typed", [False, True])
def test_gemini_stream_takes_the_last_usage(typed):
    chunks = [gemini_type().model_validate(chunk) for chunk in GEMINI_CHUNKS] if typed else GEMINI_CHUNKS
    stream = streamed(*chunks)
    assert stream.reading() == Reading(Usage(9, 4), "gemini-2.5-flash", (("f", {"a": 1}),), "Hello")
    assert stream.chars >= len("thinking" + "Hello" + "f" + "a")


def test_adk_stream_ends_with_the_whole_which_is_not_said_twice():
    module = pytest.importorskip("google.adk.models.llm_response")
    types = pytest.importorskip("google.genai.types")

    def said(text: str, **more: Any) -> Any:
        return module.LlmResponse(content=types.Content(role="model", parts=[types.Part(text=text)]), **more)

    stream = streamed(said("first. "), said("Hel", partial=True), said("lo", partial=True), said("Hello"))
    assert stream.reading().text == "first. Hello"
    assert stream.chars == len("first. Hello")
    stream.feed(said(" More", partial=True))
    assert stream.reading().text == "first. Hello More"


# ---- OpenAI: chat completions ---------------------------------------------------------------------------------------

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
CHAT_CALLS = (("search", {"q": "x", "n": 3}), ("broken", '{"q": '), ("bare", {}))


def test_chat_completion_in_every_form():
    chat = pytest.importorskip("openai.types.chat")
    for form in forms(CHAT, chat.ChatCompletion):
        assert read(form) == Reading(CHAT_USAGE, "gpt-4o-2024-08-06", CHAT_CALLS, "Looking.")


def test_thinking_that_the_completion_leaves_out_is_in_the_total():
    usage = read({"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 40}}).usage
    assert usage == Usage(10, 30)


def test_a_total_that_is_too_small_takes_nothing_away():
    assert read({"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 3}}).usage == Usage(10, 5)


def test_embeddings_have_input_only():
    create = pytest.importorskip("openai.types.create_embedding_response")
    payload = {
        "object": "list",
        "model": "text-embedding-3-small",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    for form in forms(payload, create.CreateEmbeddingResponse):
        assert read(form) == Reading(Usage(8, 0), "text-embedding-3-small")


def test_custom_and_older_calls():
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "custom", "id": "c", "custom": {"name": "sql", "input": "select 1"}}],
    }
    assert read({"choices": [{"index": 0, "message": message}]}).calls == (("sql", "select 1"),)
    message = {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": '{"a": 1}'}}
    assert read({"choices": [{"index": 0, "message": message}]}).calls == (("old", {"a": 1}),)


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


CHAT_CHUNKS = [
    chat_chunk({"role": "assistant", "content": ""}),
    chat_chunk({"content": "Loo"}),
    chat_chunk({"content": "king."}),
    chat_chunk(
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "search", "arguments": ""}}]}
    ),
    chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"q": '}}]}),
    chat_chunk(
        {
            "tool_calls": [
                {"index": 1, "id": "c2", "type": "function", "function": {"name": "fetch", "arguments": '{"u"'}}
            ]
        }
    ),
    chat_chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"x"}'}}]}),
    chat_chunk({"tool_calls": [{"index": 1, "function": {"arguments": ": 1}"}}]}),
    chat_chunk(None, usage={"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}),
]
CHAT_STREAMED = Reading(Usage(10, 5), "gpt-4o", (("search", {"q": "x"}), ("fetch", {"u": 1})), "Looking.")


@pytest.mark.parametrize("typed", [False, True])
def test_chat_chunks_are_joined(typed):
    chat = pytest.importorskip("openai.types.chat")
    stream = streamed(
        *([chat.ChatCompletionChunk.model_validate(chunk) for chunk in CHAT_CHUNKS] if typed else CHAT_CHUNKS)
    )
    assert stream.reading() == CHAT_STREAMED
    assert stream.chars == len("Looking." + "search" + '{"q": "x"}' + "fetch" + '{"u": 1}')


def test_a_stream_left_in_the_middle_tells_what_came_and_no_usage():
    stream = streamed(*CHAT_CHUNKS[:5])
    assert stream.reading() == Reading(None, "gpt-4o", (("search", '{"q": '),), "Looking.")
    assert stream.chars == len("Looking." + "search" + '{"q": ')


def test_cumulative_usage_in_every_chunk_is_not_summed():
    told = [{"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n} for n in (1, 2, 3)]
    assert streamed(*(chat_chunk({"content": "x"}, usage=usage) for usage in told)).reading().usage == Usage(10, 3)


def test_calls_that_share_an_index_or_have_none_are_kept_apart():
    def whole(id_: str, name: str, **index: int) -> dict[str, Any]:
        return chat_chunk(
            {"tool_calls": [{**index, "id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}]}
        )

    assert streamed(whole("a", "f", index=0), whole("b", "g", index=0)).reading().calls == (("f", {}), ("g", {}))
    assert streamed(whole("a", "f"), whole("b", "g")).reading().calls == (("f", {}), ("g", {}))


def test_other_choices_and_reasoning_are_paid_but_not_said():
    stream = streamed(
        chat_chunk({"content": "one"}),
        chat_chunk({"content": "two"}, index=1),
        chat_chunk({"reasoning_content": "why"}),
    )
    assert stream.reading().text == "one"
    assert stream.chars == 9


# ---- OpenAI: responses ----------------------------------------------------------------------------------------------

RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "gpt-5-2025-08-07",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "output": [
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "secret"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "Hi", "annotations": []},
                {"type": "output_text", "text": "!", "annotations": []},
            ],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "search",
            "arguments": '{"q": "x"}',
            "status": "completed",
        },
        {"type": "custom_tool_call", "id": "ct", "call_id": "c2", "name": "sql", "input": "select 1"},
    ],
    "usage": {
        "input_tokens": 50,
        "input_tokens_details": {"cached_tokens": 10, "cache_write_tokens": 4},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 8},
        "total_tokens": 70,
    },
}
RESPONSE_READ = Reading(
    Usage(50, 20, cached=10, cache_write=4, thinking=8),
    "gpt-5-2025-08-07",
    (("search", {"q": "x"}), ("sql", "select 1")),
    "Hi!",
)


def test_response_in_every_form():
    responses = pytest.importorskip("openai.types.responses")
    for form in forms(RESPONSE, responses.Response):
        assert read(form) == RESPONSE_READ


def response_events() -> list[dict[str, Any]]:
    created = {**RESPONSE, "output": [], "usage": None}
    call = RESPONSE["output"][3]
    place = {"item_id": "m", "output_index": 0, "content_index": 0, "logprobs": []}
    return [
        {"type": "response.created", "sequence_number": 0, "response": created},
        {"type": "response.in_progress", "sequence_number": 1, "response": created},
        {"type": "response.output_text.delta", "sequence_number": 2, "delta": "Hi", **place},
        {"type": "response.output_text.delta", "sequence_number": 3, "delta": "!", **place},
        {"type": "response.output_text.done", "sequence_number": 4, "text": "Hi!", **place},
        {
            "type": "response.function_call_arguments.delta",
            "sequence_number": 5,
            "delta": '{"q": "x"}',
            "item_id": "fc",
            "output_index": 1,
        },
        {"type": "response.output_item.done", "sequence_number": 6, "item": call, "output_index": 1},
        {"type": "response.completed", "sequence_number": 7, "response": RESPONSE},
    ]


@pytest.mark.parametrize("typed", [False, True])
def test_response_events_end_with_the_whole(typed):
    responses = pytest.importorskip("openai.types.responses")
    pydantic = pytest.importorskip("pydantic")
    events: list[Any] = response_events()
    if typed:
        events = [pydantic.TypeAdapter(responses.ResponseStreamEvent).validate_python(event) for event in events]
    early, whole = streamed(*events[:-1]), streamed(*events)
    assert early.reading() == Reading(None, "gpt-5-2025-08-07", (("search", {"q": "x"}),), "Hi!")
    assert early.chars == len("Hi!" + '{"q": "x"}')
    assert whole.reading() == RESPONSE_READ


# ---- Anthropic ------------------------------------------------------------------------------------------------------

MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-sonnet-4-5-20250929",
    "content": [
        {"type": "thinking", "thinking": "secret", "signature": "s"},
        {"type": "text", "text": "Hello"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "tool_use", "id": "t1", "name": "search", "input": {"q": "x"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 10,
        "cache_creation_input_tokens": 300,
        "cache_read_input_tokens": 4000,
        "output_tokens": 50,
        "output_tokens_details": {"thinking_tokens": 30},
    },
}
MESSAGE_USAGE = Usage(4310, 50, cached=4000, cache_write=300, thinking=30)


def test_message_in_every_form_counts_what_the_cache_took():
    anthropic = pytest.importorskip("anthropic.types")
    for form in forms(MESSAGE, anthropic.Message):
        assert read(form) == Reading(MESSAGE_USAGE, "claude-sonnet-4-5-20250929", (("search", {"q": "x"}),), "Hello")


def test_rounds_of_a_compacted_message_are_all_paid():
    rounds = [
        {"type": "compaction", "input_tokens": 1000, "output_tokens": 40},
        {"type": "message", "input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 2},
    ]
    usage = read({"usage": {"input_tokens": 10, "output_tokens": 5, "iterations": rounds}}).usage
    assert usage == Usage(1012, 45, cached=2)


def message_events() -> list[dict[str, Any]]:
    start = {
        **MESSAGE,
        "content": [],
        "stop_reason": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 300,
            "cache_read_input_tokens": 4000,
            "output_tokens": 1,
        },
    }
    return [
        {"type": "message_start", "message": start},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "secret"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "t1", "name": "search", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"q":'}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ' "x"}'}},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 20},
        },
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"input_tokens": 0, "output_tokens": 50},
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("typed", [False, True])
def test_message_events_give_input_first_and_output_last(typed):
    anthropic = pytest.importorskip("anthropic.types")
    pydantic = pytest.importorskip("pydantic")
    events: list[Any] = message_events()
    if typed:
        events = [pydantic.TypeAdapter(anthropic.RawMessageStreamEvent).validate_python(event) for event in events]
    stream = streamed(*events)
    expected = Usage(4310, 50, cached=4000, cache_write=300)
    assert stream.reading() == Reading(expected, "claude-sonnet-4-5-20250929", (("search", {"q": "x"}),), "Hello")
    assert stream.chars == len("secret" + "Hello" + "search" + '{"q": "x"}')
    assert streamed(*events[:6]).reading().usage == Usage(4310, 1, cached=4000, cache_write=300)


def test_events_that_the_library_adds_say_nothing_twice():
    events: list[Any] = message_events()
    events.insert(6, SimpleNamespace(type="text", text="Hel", snapshot="Hel"))
    events[-1] = {"type": "message_stop", "message": MESSAGE}
    assert streamed(*events).reading().text == "Hello"


# ---- LiteLLM --------------------------------------------------------------------------------------------------------


def test_litellm_response_with_its_cost():
    utils = pytest.importorskip("litellm.types.utils")
    response = utils.ModelResponse(**copy.deepcopy(CHAT))
    assert read(response).usage == CHAT_USAGE
    assert read(response).usd is None
    response._hidden_params["response_cost"] = 0.00012
    reading = read(response)
    assert reading.usd == Decimal("0.00012")
    assert (reading.model, reading.calls, reading.text) == ("gpt-4o-2024-08-06", CHAT_CALLS, "Looking.")
    response._hidden_params["response_cost"] = float("nan")
    reading = read(response)
    assert reading.usd is None
    assert "response_cost" in reading.problems[0]


def test_litellm_passes_on_what_anthropic_cached_within_the_prompt():
    utils = pytest.importorskip("litellm.types.utils")
    usage = utils.Usage(
        prompt_tokens=4310,
        completion_tokens=50,
        total_tokens=4360,
        cache_read_input_tokens=4000,
        cache_creation_input_tokens=300,
    )
    response = utils.ModelResponse(model="claude-sonnet-4-5", usage=usage)
    assert read(response).usage == Usage(4310, 50, cached=4000, cache_write=300)


def test_litellm_without_usage_tells_none():
    utils = pytest.importorskip("litellm.types.utils")
    assert read(utils.ModelResponse()).usage is None
    zeros = utils.ModelResponse(usage=utils.Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0))
    assert read(zeros).usage is None
    assert "zero" in read(zeros).problems[0]


def test_litellm_chunks_are_joined():
    utils = pytest.importorskip("litellm.types.utils")
    stream = StreamReading()
    for chunk in CHAT_CHUNKS:
        made = utils.ModelResponseStream(
            **{key: value for key, value in copy.deepcopy(chunk).items() if value is not None}
        )
        stream.feed(made)
    assert stream.reading() == CHAT_STREAMED


# ---- who states a cost ----------------------------------------------------------------------------------------------


def test_a_gateway_states_what_it_charged():
    assert read({"usage": {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.25}}).usd == Decimal("0.25")
    own_key = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cost": 0.01,
        "is_byok": True,
        "cost_details": {"upstream_inference_cost": 0.2},
    }
    assert read({"usage": own_key}).usd == Decimal("0.21")
    assert read({"usage": {**own_key, "cost_details": {}}}).usd is None  # a fee without the bill is no cost
    assert read({"usage": {"prompt_tokens": 1, "cost": {"total_cost": 0.5}}}).usd == Decimal("0.5")


def test_a_gateway_behind_the_library_of_openai_is_heard():
    chat = pytest.importorskip("openai.types.chat")
    payload = copy.deepcopy(CHAT)
    payload["usage"]["cost"] = 0.125  # type: ignore[index]
    assert read(chat.ChatCompletion.model_validate(payload)).usd == Decimal("0.125")


# ---- what the caller tells of its own -------------------------------------------------------------------------------


def test_dict_of_the_callers_own():
    reading = read({"usd": 0.01, "sig": "search", "tokens": 900, "result": {"hits": 0}})
    assert reading == Reading(usage=Usage(output=900), usd=Decimal("0.01"), sig="search", result={"hits": 0})


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ({"input_tokens": 5, "output_tokens": 3}, Usage(5, 3)),
        ({"prompt_tokens": 5, "completion_tokens": 3}, Usage(5, 3)),
        ({"usage": {"input": 5, "output": 3}}, Usage(5, 3)),
        ({"usage": Usage(5, 3, cached=1)}, Usage(5, 3, cached=1)),
        ({"tokens": {"input_tokens": 5, "output_tokens": 3}}, Usage(5, 3)),
        ({"tokens": (5, 3)}, Usage(5, 3)),
        ({"usage": 8}, Usage(0, 8)),
        ({"tokens": True}, None),
        ({"tokens": "8"}, None),
        ({"usd": 1}, None),
    ],
)
def test_tokens_in_the_callers_own_words(told, usage):
    assert read(told).usage == usage


def test_the_callers_word_goes_before_the_response():
    reading = read(
        {
            "usd": "0.5",
            "sig": 7,
            "response": CHAT,
            "input_tokens": 1,
            "output_tokens": 2,
            "results": [("search", {"q": "x"}, "hit"), {"tool": "f", "args": 1, "result": 2}],
        }
    )
    assert reading.usd == Decimal("0.5")
    assert reading.usage == Usage(1, 2)
    assert (reading.model, reading.calls, reading.text, reading.sig) == ("gpt-4o-2024-08-06", CHAT_CALLS, "Looking.", 7)
    assert reading.results == (("search", {"q": "x"}, "hit"), ("f", 1, 2))
    assert read({"sig": "s", "response": CHAT}).usage == CHAT_USAGE


@pytest.mark.parametrize(
    "usd",
    [float("nan"), float("inf"), -0.01, 10**400, Decimal("NaN"), Decimal("sNaN"), Decimal(-1), "much", True, 1e300],
)
def test_an_amount_that_cannot_be_meant_is_not_told_and_that_is_said(usd):
    reading = read({"usd": usd, "sig": "s"})
    assert reading.usd is None
    assert any("usd" in problem for problem in reading.problems)


@pytest.mark.parametrize("usd", [0, 0.1, 1, Decimal("0.1"), 1_000_000])
def test_an_amount_is_exact(usd):
    assert read({"usd": usd}).usd == Decimal(str(usd))
    assert read({"usd": usd}).problems == ()


def test_results_without_a_name_are_a_problem():
    assert read({"sig": "s", "results": [{"result": 1}]}).problems == ("results: an entry names no tool",)


# ---- counts that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 1.5, float("nan"), 10**30])
def test_a_broken_count_makes_the_usage_untold(count):
    reading = read({"usage": {"prompt_tokens": count, "completion_tokens": 5}})
    assert reading.usage is None
    assert reading.problems == ("prompt_tokens: not a count of tokens",)


@pytest.mark.parametrize(
    "names",
    [
        ("prompt_tokens", "completion_tokens"),
        ("input_tokens", "output_tokens"),
        ("promptTokenCount", "totalTokenCount"),
    ],
)
def test_zeros_alone_are_not_told(names):
    reading = read({"usage": dict.fromkeys(names, 0)})
    assert reading.usage is None
    assert reading.problems == ("usage: zero tokens in and out, which means not reported",)


def test_a_broken_detail_leaves_the_rest():
    reading = read(
        {"usage": {"prompt_tokens": 5, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": -1}}}
    )
    assert reading.usage == Usage(5, 5)
    assert reading.problems == ("cached_tokens: not a count of tokens",)


def test_output_alone_is_told_with_a_word_about_the_input():
    reading = read({"usage": {"output_tokens": 5}})
    assert reading.usage == Usage(0, 5)
    assert reading.problems == ("usage: no input tokens reported",)


@pytest.mark.parametrize("mock", [Mock, MagicMock])
def test_a_stand_in_of_a_test_tells_only_what_was_set(mock):
    blank = mock()
    assert read(blank) == Reading()
    assert streamed(blank, blank).reading() == Reading()
    answer = mock()
    answer.usage.prompt_tokens = 10
    answer.usage.completion_tokens = 5
    answer.choices = [mock()]
    answer.choices[0].message.content = "hi"
    answer.model = "gpt-4o"
    assert read(answer) == Reading(Usage(10, 5), "gpt-4o", (), "hi")


def test_objects_of_any_class_are_asked_by_name():
    @dataclass(slots=True)
    class Counts:
        input_tokens: int
        output_tokens: int

    class Lazy:
        @property
        def usage(self) -> Counts:
            return Counts(3, 4)

        @property
        def model(self) -> str:
            raise RuntimeError("no model")

        content = "said"

    assert read(Lazy()) == Reading(Usage(3, 4), text="said")
    assert read(SimpleNamespace(usage=OrderedDict(input_tokens=1, output_tokens=2))).usage == Usage(1, 2)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_text_calls_and_arguments_are_bounded():
    blocks = [{"type": "text", "text": "x" * 7_000}] * 3 + [{"type": "tool_use", "name": "f", "input": {}}] * 1_000
    reading = read({"content": blocks})
    assert len(reading.text) == TEXT_CHARS
    assert len(reading.calls) == MAX_CALLS
    long = json.dumps({"a": "x" * MAX_ARGUMENTS})
    message = {"tool_calls": [{"function": {"name": "f", "arguments": long}}]}
    assert read({"choices": [{"message": message}]}).calls == (("f", long),)


def test_a_stream_keeps_its_bounds_and_counts_on():
    stream = streamed(*["x" * 1_000] * 50)
    assert len(stream.reading().text) == TEXT_CHARS
    assert stream.chars == 50_000
    for n in range(1_000):
        stream.feed(
            chat_chunk({"tool_calls": [{"index": n, "id": str(n), "function": {"name": "f", "arguments": "{}"}}]})
        )
    assert len(stream.reading().calls) == MAX_CALLS


def test_arguments_that_no_parser_takes_stay_text():
    for text in ("[" * 100_000, "9" * 10_000):
        assert read(
            {"choices": [{"message": {"tool_calls": [{"function": {"name": "f", "arguments": text}}]}}]}
        ).calls == (("f", text),)


def test_classes_made_on_the_fly_are_not_kept():
    for n in range(2_000):
        read(type(f"Answer{n}", (), {"content": "x"})())
    assert len(asking._ways) <= asking._KINDS


# ---- nothing raises -------------------------------------------------------------------------------------------------


class Hostile:
    """Every way to ask it fails."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")

    __getattr__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __repr__ = __str__ = __contains__ = _fail  # type: ignore[assignment]
    __hash__ = object.__hash__


class HostileDict(dict[str, Any]):
    def get(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __getitem__ = __contains__ = __iter__ = get  # type: ignore[assignment]


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("hostile")

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("hostile")


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
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=4)
    | kinds
    | st.builds(object)
    | st.builds(Hostile)
    | st.just(Decimal("sNaN"))
    | st.just("AUDIO")
    | st.just(HostileDict(usage=1))
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.dictionaries(names, inner, max_size=6)
    return (
        some
        | st.lists(inner, max_size=3)
        | st.builds(lambda d: SimpleNamespace(**d), some)
        | st.builds(HostileList, st.lists(inner, max_size=2))
        | st.tuples(inner, inner)
    )


anything = st.recursive(atoms, nested, max_leaves=25)


@given(st.lists(anything, min_size=1, max_size=4))
def test_whatever_is_handed_in_is_read_without_a_word(values):
    stream = StreamReading()
    for value in values:
        told = read(value)
        assert type(told) is Reading
        check(told)
        stream.feed(value)
    check(stream.reading())
    assert stream.chars >= 0


def check(reading: Reading) -> None:
    usage = reading.usage
    if usage is not None:
        counts = (
            usage.input,
            usage.output,
            usage.cached,
            usage.cache_write,
            usage.audio,
            usage.cached_audio,
            usage.audio_output,
            usage.thinking,
        )
        assert all(type(count) is int and count >= 0 for count in counts)
        assert usage.input or usage.output
    assert type(reading.model) is str
    assert type(reading.text) is str
    assert len(reading.text) <= TEXT_CHARS
    assert reading.usd is None or (reading.usd.is_finite() and reading.usd >= 0)
    assert all(type(name) is str for name, _ in reading.calls)


@given(st.lists(anything, max_size=3), st.dictionaries(names, anything, max_size=5))
def test_whatever_is_asked_is_read_without_a_word(args, kwargs):
    asked = read_request(tuple(args), kwargs)
    assert asked.input_tokens is None or asked.input_tokens > 0
    assert asked.max_output_tokens is None or asked.max_output_tokens >= 0
    assert asked.candidates >= 1
    assert type(asked.model) is str


def test_one_hostile_part_does_not_hide_the_usage():
    reading = read({"usage": {"prompt_tokens": 5, "completion_tokens": 5}, "choices": HostileList([1])})
    assert reading.usage == Usage(5, 5)
    assert reading.problems == ("the content could not be read: RuntimeError",)


def test_a_hostile_chunk_does_not_end_the_reading():
    stream = streamed("a", {"choices": [{"delta": {"tool_calls": HostileList([1])}}]}, "b")
    assert stream.reading().text == "ab"
    assert stream.reading().problems == ("a chunk could not be read: RuntimeError",)


# ---- requests -------------------------------------------------------------------------------------------------------

MESSAGES = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "What is the weather in Rome today?"},
]
SAID = sum(len(message["content"]) for message in MESSAGES)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"messages": MESSAGES}),
        ((MESSAGES,), {}),
        (({"messages": MESSAGES},), {}),
        ((), {"json": {"messages": MESSAGES}}),
        ((), {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:]}),
        ((), {"instructions": MESSAGES[0]["content"], "input": MESSAGES[1]["content"]}),
        ((MESSAGES[0]["content"], MESSAGES[1]["content"]), {}),
        ((), {"contents": [MESSAGES[1]["content"]], "config": {"system_instruction": MESSAGES[0]["content"]}}),
        (
            (
                {
                    "contents": [{"parts": [{"text": MESSAGES[1]["content"]}]}],
                    "systemInstruction": {"parts": [{"text": MESSAGES[0]["content"]}]},
                },
            ),
            {},
        ),
    ],
)
def test_a_prompt_is_found_wherever_it_stands_and_reckoned_high(args, kwargs):
    tokens = read_request(args, kwargs).input_tokens
    assert tokens is not None
    assert SAID / 3 <= tokens <= SAID / 3 + 30


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((5, None, 2.5), {"timeout": 5}),
        (([1, 2],), {}),
        ((Mock(),), {"messages": Mock()}),
        ((object(),), {"messages": []}),
    ],
)
def test_without_a_prompt_nothing_is_reckoned(args, kwargs):
    assert read_request(args, kwargs) == Request()


@pytest.mark.parametrize(
    ("args", "kwargs", "model"),
    [
        ((), {"model": "gpt-4o"}, "gpt-4o"),
        (("gpt-4o", MESSAGES), {}, "gpt-4o"),
        (("vertex_ai/gemini-2.5-flash", MESSAGES), {}, "vertex_ai/gemini-2.5-flash"),
        (("hello", MESSAGES), {}, ""),
        (("gpt-4o is a model",), {}, ""),
        (("gemini",), {"model": "claude-sonnet-4-5"}, "claude-sonnet-4-5"),
        ((), {"model": 5}, ""),
        ((), {"model": "x" * 1_000}, ""),
    ],
)
def test_the_model_is_named_or_looks_like_one(args, kwargs, model):
    assert read_request(args, kwargs).model == model


@pytest.mark.parametrize(
    ("kwargs", "limit", "candidates"),
    [
        ({"max_tokens": 100}, 100, 1),
        ({"max_completion_tokens": 100, "max_tokens": 50}, 100, 1),
        ({"max_output_tokens": 100}, 100, 1),
        ({"max_tokens": 100, "n": 4}, 400, 4),
        ({"n": 4}, None, 4),
        ({"config": {"max_output_tokens": 100, "candidate_count": 2}}, 200, 2),
        ({"generationConfig": {"maxOutputTokens": 100, "candidateCount": 2}}, 200, 2),
        ({"max_tokens": True, "n": True}, None, 1),
        ({"max_tokens": -1, "n": 0}, None, 1),
        ({"max_tokens": 1.5, "n": 10**9}, None, 1),
    ],
)
def test_every_candidate_may_reach_the_limit(kwargs, limit, candidates):
    asked = read_request((), kwargs)
    assert (asked.max_output_tokens, asked.candidates) == (limit, candidates)


@pytest.mark.parametrize(
    "kwargs", [{"previous_response_id": "r"}, {"conversation": "c"}, {"config": {"cached_content": "cachedContents/1"}}]
)
def test_what_the_provider_keeps_is_not_seen(kwargs):
    assert read_request((), {"input": "x", **kwargs}).unseen
    assert not read_request((), {"input": "x", **dict.fromkeys(kwargs)}).unseen


def test_types_of_genai_are_measured_as_their_json():
    types = pytest.importorskip("google.genai.types")
    body: dict[str, Any] = {
        "role": "user",
        "parts": [
            {"text": "What is the weather?"},
            {"functionResponse": {"name": "f", "response": {"result": "rain"}}},
        ],
    }
    tool = {
        "functionDeclarations": [
            {
                "name": "weather",
                "description": "Tells the weather.",
                "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
            }
        ]
    }
    config = types.GenerateContentConfig(
        max_output_tokens=50, candidate_count=2, system_instruction="Be brief.", tools=[tool]
    )
    typed = read_request(
        (), {"model": "gemini-2.5-flash", "contents": [types.Content.model_validate(body)], "config": config}
    )
    plain = read_request(
        (),
        {
            "model": "gemini-2.5-flash",
            "contents": [body],
            "config": {"system_instruction": "Be brief.", "tools": [tool]},
        },
    )
    assert typed.max_output_tokens == 100
    assert typed.input_tokens is not None
    assert plain.input_tokens is not None
    assert abs(typed.input_tokens - plain.input_tokens) <= 12
    without = read_request((), {"contents": [body]}).input_tokens
    assert without is not None
    assert (
        plain.input_tokens - without
        >= len("Be brief." + "weather" + "Tells the weather." + "OBJECT" + "city" + "STRING") // 3
    )


def test_a_request_of_adk_is_at_least_what_adk_would_be_reserved():
    module = pytest.importorskip("google.adk.models.llm_request")
    types = pytest.importorskip("google.genai.types")
    estimate = pytest.importorskip("runguard.adk.estimate")
    contents = [types.Content(role="user", parts=[types.Part(text="Wie wird das Wetter in Köln? " * 20)])] * 5
    request = module.LlmRequest(
        model="gemini-2.5-flash",
        contents=contents,
        config=types.GenerateContentConfig(max_output_tokens=9, system_instruction="Be brief."),
    )
    asked = read_request((request,), {})
    reserved = estimate.project(request, None).upper
    assert (asked.model, asked.max_output_tokens) == ("gemini-2.5-flash", 9)
    assert asked.input_tokens is not None
    assert reserved <= asked.input_tokens <= reserved * 1.2


def test_messages_of_the_libraries_can_be_sent_back():
    chat = pytest.importorskip("openai.types.chat")
    message = chat.ChatCompletion.model_validate(CHAT).choices[0].message
    tokens = read_request((), {"messages": [*MESSAGES, message]}).input_tokens
    assert tokens is not None
    assert (
        tokens
        > (read_request((), {"messages": MESSAGES}).input_tokens or 0)
        + len('Looking.{"q": "x", "n": 3}searchbroken') // 3
    )


PIXELS = "iVBORw0KGgo" * 50_000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}},
        {"inline_data": {"mime_type": "image/png", "data": PIXELS.encode()}},
        {"inlineData": {"mimeType": "image/png", "data": PIXELS}},
        {"file_data": {"mime_type": "image/png", "file_uri": "gs://bucket/a.png"}},
    ],
)
def test_an_image_costs_what_images_cost_not_what_its_letters_would(part):
    asked = read_request((), {"messages": [{"role": "user", "content": [part]}]})
    assert asked.input_tokens is not None
    assert 1_500 <= asked.input_tokens <= 1_700
    assert asked.audio_tokens == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "A" * 400_000, "format": "wav"}},
        {"inline_data": {"mime_type": "audio/wav", "data": b"A" * 300_000}},
        {"inlineData": {"mimeType": "audio/wav", "data": "A" * 400_000}},
    ],
)
def test_audio_is_told_apart(part):
    asked = read_request((), {"messages": [{"role": "user", "content": [part]}]})
    assert asked.audio_tokens == 601
    assert asked.input_tokens is not None
    assert asked.audio_tokens <= asked.input_tokens <= asked.audio_tokens + 50


def test_other_scripts_count_by_their_bytes():
    assert (read_request(("天気はどうですか",), {}).input_tokens or 0) == 8
    assert read_request(("\ud800",), {}).input_tokens == 1


def test_lists_of_token_numbers_are_tokens():
    tokens = read_request((), {"input": list(range(100_000))}).input_tokens
    assert tokens is not None
    assert 100_000 <= tokens <= 150_000


def test_functions_and_classes_given_as_tools_or_schemas_count():
    def weather(city: str, day: str) -> str:
        """Tells the weather of a city on a day."""
        return city + day

    tokens = read_request((), {"tools": [weather]}).input_tokens
    assert tokens is not None
    assert tokens > len(weather.__doc__ or "") // 3 + 40


def test_a_request_that_contains_itself_or_too_much_is_too_large_and_soon_said():
    loop: list[Any] = ["x"]
    loop.append(loop)
    assert (read_request((), {"messages": loop}).input_tokens or 0) > 20_000_000
    assert (read_request((), {"messages": [{"content": "x"}] * 300_000}).input_tokens or 0) > 20_000_000


def test_no_code_of_an_argument_runs():
    class Agent:
        def __init__(self) -> None:
            self.model = "gpt-4o"
            self.messages = MESSAGES

        @property
        def prompt(self) -> str:
            raise AssertionError("asked")

    asked = read_request((Agent(),), {})
    assert asked.model == "gpt-4o"
    assert (asked.input_tokens or 0) >= SAID // 3

    def generated() -> Any:
        raise AssertionError("consumed")
        yield

    assert read_request((), {"messages": generated()}).input_tokens is None


# ---- what it costs to have this -------------------------------------------------------------------------------------


def test_importing_it_loads_no_library_of_a_provider():
    script = (
        "import sys, runguard.providers; print([m for m in ('google', 'openai', 'anthropic', 'litellm', "
        "'genai_prices') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )
    assert find_spec("google.genai") is not None  # else the line above says nothing


# ---- several requests for one call
# --------------------------------------------------------------------------------------


def look_up(q: str) -> str:
    return q


class Session:
    """As a session of MCP: not callable, and the client calls its tools."""

    def call_tool(self, name: str) -> None: ...


@pytest.mark.parametrize(
    ("config", "rounds"),
    [
        ({"tools": [look_up]}, 10),
        ({"tools": [Session()]}, 10),
        ({"tools": [look_up], "automatic_function_calling": {"maximum_remote_calls": 3}}, 3),
        ({"tools": [look_up], "automaticFunctionCalling": {"maximumRemoteCalls": 3}}, 3),
        ({"tools": [look_up], "automatic_function_calling": {"maximum_remote_calls": None}}, 10),
        ({"tools": [look_up], "automatic_function_calling": {"maximum_remote_calls": 0}}, 1),
        ({"tools": [look_up], "automatic_function_calling": {"disable": True}}, 1),
        ({"tools": [{"function_declarations": [{"name": "look_up"}]}]}, 1),
        ({"tools": look_up}, 1),
        ({"tools": []}, 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_functions_among_the_tools_may_make_several_requests_of_a_call(config: Any, rounds: int):
    request = read_request((), {"model": "gemini-2.5-flash", "contents": "go", "config": config})
    assert (request.rounds, request.untold, request.answered) == (rounds, False, 0)


def test_functions_outside_of_a_config_are_the_callers_own():
    assert read_request((), {"model": "m", "messages": "go", "tools": [look_up]}).rounds == 1


def test_rounds_that_a_prompt_ends_with_are_known():
    asked = {"role": "model", "parts": [{"function_call": {"name": "look_up"}}]}
    answered = {"role": "user", "parts": [{"function_response": {"name": "look_up"}}]}
    word = {"role": "user", "parts": [{"text": "go"}]}
    silent = {"tools": [look_up], "automatic_function_calling": {"ignore_call_history": True}}
    for contents, rounds in (
        ([word], 0),
        ([word, asked, answered], 1),
        ([word, asked, answered, word, asked, answered, asked, answered], 2),
    ):
        request = read_request((), {"contents": contents, "config": silent})
        assert (request.answered, request.untold) == (rounds, True)


class Answered:
    """A response of google-genai whose client asked twice before."""

    def __init__(self, history: Any) -> None:
        self.usage_metadata = {"prompt_token_count": 10, "total_token_count": 15}
        self.candidates = [{"content": {"parts": [{"text": "done"}]}}]
        self.automatic_function_calling_history = history


def test_the_requests_before_the_last_are_told():
    asked = {"role": "model", "parts": [{"function_call": {"name": "look_up", "args": {"q": "x" * 300}}}]}
    answered = {"role": "user", "parts": [{"function_response": {"name": "look_up"}}]}
    word = {"role": "user", "parts": [{"text": "go"}]}
    reading = read(Answered([word, asked, answered, asked, asked, answered]))
    assert reading.usage == Usage(10, 5)
    newest, oldest = reading.earlier
    assert newest.input == oldest.input == 0  # nobody told
    assert newest.output > oldest.output > 100
    wrapped = read({"response": Answered([word, asked, answered]), "sig": "x"})
    assert len(wrapped.earlier) == 1


@pytest.mark.parametrize("history", [None, [], "text", [None], [object()], [{"parts": None}], {"role": "model"}, 3])
def test_a_history_that_tells_nothing(history: Any):
    assert read(Answered(history)).earlier == ()
