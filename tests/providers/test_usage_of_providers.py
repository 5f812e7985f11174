"""Usage as Gemini, OpenAI, Anthropic and LiteLLM report it."""

import copy
import os
from collections import OrderedDict
from dataclasses import dataclass, replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.errors import PolicyError
from runguard.policy import Policy
from runguard.pricing.book import ModelLimits, Price, Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.messages import Reading, read, read_request
from runguard.providers.streams import StreamReading
from runguard.providers.usage import CallUsage, Counts, EventUsage, read_usage
from runguard.replay.sources import run_of
from runguard.replay.steps import Asked, Faults
from tests.kit.examples import each_row
from tests.kit.provider_answers import CHAT, CHAT_CALLS, CHAT_USAGE, chat_chunk, streamed

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices


def forms(payload: dict[str, Any], kind: type[Any] | None) -> list[Any]:
    """The same answer as JSON and, where there is a library, as its object and as that object's dump."""
    if kind is None:
        return [payload]
    made = kind.model_validate(copy.deepcopy(payload))
    return [payload, made, made.model_dump(), made.model_dump(exclude_none=True)]


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


def test_gemini_in_every_form() -> None:
    for form in forms(GEMINI, gemini_type()):
        reading = read(form)
        assert reading == Reading(
            GEMINI_USAGE, "gemini-2.5-flash", (("search", {"q": "invoice"}),), "Let me look. One moment."
        )


@each_row(
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
def test_output_of_gemini_is_what_the_total_leaves(counts: dict[str, Any], output: int) -> None:
    usage = read({"usageMetadata": counts}).usage
    assert usage is not None
    assert (usage.input, usage.output) == (10, output)


def test_adk_response_is_read_like_the_one_it_was_made_of() -> None:
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
def test_gemini_stream_takes_the_last_usage(typed: bool) -> None:
    chunks = [gemini_type().model_validate(chunk) for chunk in GEMINI_CHUNKS] if typed else GEMINI_CHUNKS
    stream = streamed(*chunks)
    assert stream.reading() == Reading(Usage(9, 4), "gemini-2.5-flash", (("f", {"a": 1}),), "Hello")
    assert stream.chars >= len("thinking" + "Hello" + "f" + "a")


def test_adk_stream_ends_with_the_whole_which_is_not_said_twice() -> None:
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


def test_chat_completion_in_every_form() -> None:
    chat = pytest.importorskip("openai.types.chat")
    for form in forms(CHAT, chat.ChatCompletion):
        assert read(form) == Reading(CHAT_USAGE, "gpt-4o-2024-08-06", CHAT_CALLS, "Looking.")


def test_thinking_that_the_completion_leaves_out_is_in_the_total() -> None:
    usage = read({"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 40}}).usage
    assert usage == Usage(10, 30)


def test_a_total_that_is_too_small_takes_nothing_away() -> None:
    assert read({"usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 3}}).usage == Usage(10, 5)


def test_embeddings_have_input_only() -> None:
    create = pytest.importorskip("openai.types.create_embedding_response")
    payload = {
        "object": "list",
        "model": "text-embedding-3-small",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.1]}],
        "usage": {"prompt_tokens": 8, "total_tokens": 8},
    }
    for form in forms(payload, create.CreateEmbeddingResponse):
        assert read(form) == Reading(Usage(8, 0), "text-embedding-3-small")


def test_custom_and_older_calls() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "custom", "id": "c", "custom": {"name": "sql", "input": "select 1"}}],
    }
    assert read({"choices": [{"index": 0, "message": message}]}).calls == (("sql", "select 1"),)
    message = {"role": "assistant", "content": None, "function_call": {"name": "old", "arguments": '{"a": 1}'}}
    assert read({"choices": [{"index": 0, "message": message}]}).calls == (("old", {"a": 1}),)


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
def test_chat_chunks_are_joined(typed: bool) -> None:
    chat = pytest.importorskip("openai.types.chat")
    stream = streamed(
        *([chat.ChatCompletionChunk.model_validate(chunk) for chunk in CHAT_CHUNKS] if typed else CHAT_CHUNKS)
    )
    assert stream.reading() == CHAT_STREAMED
    assert stream.chars == len("Looking." + "search" + '{"q": "x"}' + "fetch" + '{"u": 1}')


def test_a_stream_left_in_the_middle_tells_what_came_and_no_usage() -> None:
    stream = streamed(*CHAT_CHUNKS[:5])
    assert stream.reading() == Reading(None, "gpt-4o", (("search", '{"q": '),), "Looking.")
    assert stream.chars == len("Looking." + "search" + '{"q": ')


def test_cumulative_usage_in_every_chunk_is_not_summed() -> None:
    told = [{"prompt_tokens": 10, "completion_tokens": n, "total_tokens": 10 + n} for n in (1, 2, 3)]
    assert streamed(*(chat_chunk({"content": "x"}, usage=usage) for usage in told)).reading().usage == Usage(10, 3)


def test_calls_that_share_an_index_or_have_none_are_kept_apart() -> None:
    def whole(id_: str, name: str, **index: int) -> dict[str, Any]:
        return chat_chunk(
            {"tool_calls": [{**index, "id": id_, "type": "function", "function": {"name": name, "arguments": "{}"}}]}
        )

    assert streamed(whole("a", "f", index=0), whole("b", "g", index=0)).reading().calls == (("f", {}), ("g", {}))
    assert streamed(whole("a", "f"), whole("b", "g")).reading().calls == (("f", {}), ("g", {}))


def test_other_choices_and_reasoning_are_paid_but_not_said() -> None:
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
    Usage(50, 20, cached=10, cache_write=4, thinking=8, searches=1),
    "gpt-5-2025-08-07",
    (("search", {"q": "x"}), ("sql", "select 1")),
    "Hi!",
)


def test_response_in_every_form() -> None:
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
def test_response_events_end_with_the_whole(typed: bool) -> None:
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


def test_message_in_every_form_counts_what_the_cache_took() -> None:
    anthropic = pytest.importorskip("anthropic.types")
    for form in forms(MESSAGE, anthropic.Message):
        assert read(form) == Reading(MESSAGE_USAGE, "claude-sonnet-4-5-20250929", (("search", {"q": "x"}),), "Hello")


def test_rounds_of_a_compacted_message_are_all_paid() -> None:
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
def test_message_events_give_input_first_and_output_last(typed: bool) -> None:
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


def test_what_a_cache_keeps_for_an_hour_is_known_whole_and_streamed() -> None:
    written = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}
    usage = {**MESSAGE["usage"], "cache_creation": written}
    assert read({**MESSAGE, "usage": usage}).usage == replace(MESSAGE_USAGE, cache_write_1h=200)
    events = message_events()
    events[0]["message"]["usage"]["cache_creation"] = written
    assert streamed(*events).reading().usage == Usage(4310, 50, cached=4000, cache_write=300, cache_write_1h=200)
    litellm = {"cached_tokens": 4000, "cache_creation_tokens": 300, "cache_creation_token_details": written}
    chat = {"prompt_tokens": 4310, "completion_tokens": 50, "prompt_tokens_details": litellm}
    assert read({"usage": chat}).usage == Usage(4310, 50, cached=4000, cache_write=300, cache_write_1h=200)


def test_events_that_the_library_adds_say_nothing_twice() -> None:
    events: list[Any] = message_events()
    events.insert(6, SimpleNamespace(type="text", text="Hel", snapshot="Hel"))
    events[-1] = {"type": "message_stop", "message": MESSAGE}
    assert streamed(*events).reading().text == "Hello"


# ---- LiteLLM --------------------------------------------------------------------------------------------------------


def test_litellm_response_with_its_cost() -> None:
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


def test_litellm_passes_on_what_anthropic_cached_within_the_prompt() -> None:
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


def test_litellm_without_usage_tells_none() -> None:
    utils = pytest.importorskip("litellm.types.utils")
    assert read(utils.ModelResponse()).usage is None
    zeros = utils.ModelResponse(usage=utils.Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0))
    assert read(zeros).usage is None
    assert "zero" in read(zeros).problems[0]


def test_litellm_chunks_are_joined() -> None:
    utils = pytest.importorskip("litellm.types.utils")
    stream = StreamReading()
    for chunk in CHAT_CHUNKS:
        made = utils.ModelResponseStream(
            **{key: value for key, value in copy.deepcopy(chunk).items() if value is not None}
        )
        stream.feed(made)
    assert stream.reading() == CHAT_STREAMED


# ---- Costs and usage that the caller states, and counts that are not valid


os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices


# ---- who states a cost ----------------------------------------------------------------------------------------------


def test_a_gateway_states_what_it_charged() -> None:
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


def test_a_gateway_behind_the_library_of_openai_is_heard() -> None:
    chat = pytest.importorskip("openai.types.chat")
    payload = copy.deepcopy(CHAT)
    payload["usage"]["cost"] = 0.125  # type: ignore[index]
    assert read(chat.ChatCompletion.model_validate(payload)).usd == Decimal("0.125")


# ---- what the caller tells of its own -------------------------------------------------------------------------------


def test_dict_of_the_callers_own() -> None:
    reading = read({"usd": 0.01, "sig": "search", "tokens": 900, "result": {"hits": 0}})
    assert reading == Reading(usage=Usage(output=900), usd=Decimal("0.01"), sig="search", result={"hits": 0})


@each_row(
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
def test_tokens_in_the_callers_own_words(told: dict[str, Any], usage: Usage | None) -> None:
    assert read(told).usage == usage


def test_the_callers_word_goes_before_the_response() -> None:
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


@each_row(
    "usd",
    [float("nan"), float("inf"), -0.01, 10**400, Decimal("NaN"), Decimal("sNaN"), Decimal(-1), "much", True, 1e300],
)
def test_an_amount_that_cannot_be_meant_is_not_told_and_that_is_said(usd: Decimal | float | str) -> None:
    reading = read({"usd": usd, "sig": "s"})
    assert reading.usd is None
    assert any("usd" in problem for problem in reading.problems)


@each_row("usd", [0, 0.1, 1, Decimal("0.1"), 1_000_000])
def test_an_amount_is_exact(usd: Decimal | float) -> None:
    assert read({"usd": usd}).usd == Decimal(str(usd))
    assert read({"usd": usd}).problems == ()


def test_results_without_a_name_are_a_problem() -> None:
    assert read({"sig": "s", "results": [{"result": 1}]}).problems == ("results: an entry names no tool",)


# ---- counts that are none -------------------------------------------------------------------------------------------


@each_row("count", [-1, 1.5, float("nan"), 10**30])
def test_a_broken_count_makes_the_usage_untold(count: float) -> None:
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
def test_zeros_alone_are_not_told(names: tuple[str, str]) -> None:
    reading = read({"usage": dict.fromkeys(names, 0)})
    assert reading.usage is None
    assert reading.problems == ("usage: zero tokens in and out, which means not reported",)


def test_a_broken_detail_leaves_the_rest() -> None:
    reading = read(
        {"usage": {"prompt_tokens": 5, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": -1}}}
    )
    assert reading.usage == Usage(5, 5)
    assert reading.problems == ("cached_tokens: not a count of tokens",)


def test_output_alone_is_told_with_a_word_about_the_input() -> None:
    reading = read({"usage": {"output_tokens": 5}})
    assert reading.usage == Usage(0, 5)
    assert reading.problems == ("usage: no input tokens reported",)


@pytest.mark.parametrize("mock", [Mock, MagicMock])
def test_a_stand_in_of_a_test_tells_only_what_was_set(mock: Any) -> None:
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


def test_objects_of_any_class_are_asked_by_name() -> None:
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


# ---- several requests for one call ----------------------------------------------------------------------------------


def look_up(q: str) -> str:
    return q


class Session:
    """As a session of MCP: not callable, and the client calls its tools."""

    def call_tool(self, name: str) -> None: ...


@each_row(
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
def test_functions_among_the_tools_may_make_several_requests_of_a_call(config: Any, rounds: int) -> None:
    request = read_request((), {"model": "gemini-2.5-flash", "contents": "go", "config": config})
    assert (request.rounds, request.hides_rounds, request.answered) == (rounds, False, 0)


def test_functions_outside_of_a_config_are_the_callers_own() -> None:
    assert read_request((), {"model": "m", "messages": "go", "tools": [look_up]}).rounds == 1


def test_rounds_that_a_prompt_ends_with_are_known() -> None:
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
        assert (request.answered, request.hides_rounds) == (rounds, True)


class Answered:
    """A response of google-genai whose client asked twice before."""

    def __init__(self, history: Any) -> None:
        self.usage_metadata = {"prompt_token_count": 10, "total_token_count": 15}
        self.candidates = [{"content": {"parts": [{"text": "done"}]}}]
        self.automatic_function_calling_history = history


def test_the_requests_before_the_last_are_told() -> None:
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


@each_row("history", [None, [], "text", [None], [object()], [{"parts": None}], {"role": "model"}, 3])
def test_a_history_that_tells_nothing(history: Any) -> None:
    assert read(Answered(history)).earlier == ()


# ---- Web searches on the model's side, as providers report them


GEMINI_USAGE_SEARCHES = {"prompt_token_count": 10, "candidates_token_count": 5, "total_token_count": 15}


@each_row(
    ("answer", "searches"),
    [
        ({"usage": {"input_tokens": 10, "output_tokens": 5, "server_tool_use": {"web_search_requests": 3}}}, 3),
        (
            {
                "usage": {"input_tokens": 10, "output_tokens": 5, "input_tokens_details": {}},
                "output": [
                    {"type": "web_search_call"},
                    {"type": "web_search_call", "action": {"type": "search"}},
                    {"type": "web_search_call", "action": {"type": "open_page"}},
                    {"type": "message"},
                ],
            },
            2,
        ),
        (
            {
                "usage_metadata": GEMINI_USAGE_SEARCHES,
                "candidates": [{"grounding_metadata": {"web_search_queries": ["a", "b"]}, "content": {"parts": []}}],
            },
            2,
        ),
        ({"usage": {"prompt_tokens": 9, "completion_tokens": 1, "server_tool_use": {"web_search_requests": 1}}}, 1),
        ({"usage": {"input_tokens": 10, "output_tokens": 5, "server_tool_use": {"web_search_requests": "2"}}}, 0),
        ({"usage": {"input_tokens": 10, "output_tokens": 5}}, 0),
    ],
)
def test_searches_are_read_from_complete_answers(answer: dict[str, Any], searches: int) -> None:
    usage = read(answer).usage
    assert usage is not None
    assert usage.searches == searches


def test_searches_of_a_stream_are_the_most_that_a_chunk_reports() -> None:
    call = CallUsage()
    call.add({"partial": True, "grounding_metadata": {"web_search_queries": ["a"]}})
    call.add({"usage_metadata": GEMINI_USAGE_SEARCHES, "groundingMetadata": {"webSearchQueries": ["a", "b"]}})
    call.add({"usage_metadata": GEMINI_USAGE_SEARCHES, "grounding_metadata": {"grounding_chunks": []}})
    assert call.bill(10).usage == Usage(input=10, output=5, searches=2)
    call.add({"partial": True, "grounding_metadata": {"web_search_queries": ["a", "b", "c"]}})
    assert call.bill(10).usage == Usage(input=10, output=5, searches=3)


def test_searches_before_the_report_and_without_one_count_too() -> None:
    call = CallUsage()
    call.add({"partial": True, "grounding_metadata": {"web_search_queries": ["a"]}})
    assert call.bill(10).usage.searches == 1
    call.add({"usage_metadata": GEMINI_USAGE_SEARCHES})
    assert call.bill(10).usage == Usage(input=10, output=5, searches=1)


def rates(**given: Any) -> Rates:
    found = Pricing({"m": Price(input=1, output=1)}, {"m*": ModelLimits(**given)}).rates("m", 0)
    assert isinstance(found, Rates)
    return found


def test_a_search_costs_its_price_beside_the_tokens() -> None:
    assert rates(search_price="0.01").cost(Usage(1_000, 0, searches=3)) == 30_000_000 + 1_000_000
    assert rates(search_price="0.01", search_billing="call").cost(Usage(1_000, 0, searches=3)) == 11_000_000
    assert rates().cost(Usage(1_000, 0, searches=3)) == 1_000_000


def test_the_price_of_the_most_searches_is_reserved() -> None:
    assert rates(search_price="0.01", max_searches=4).worst(1_000, 0) == 41_000_000
    assert rates(search_price="0.01", search_billing="call", max_searches=4).worst(1_000, 0) == 11_000_000
    assert rates(search_price="0.01", max_searches=0).worst(1_000, 0) == 1_000_000
    assert rates(search_price="0.01").affordable_output(11_000_000, 1_000) == 0
    assert rates(search_price="0.01").affordable_output(10_999_999, 1_000) == -1


def test_a_contradicting_report_keeps_its_searches() -> None:
    assert rates(search_price="0.01").cost(Usage(10, 0, cached=20, searches=1)) >= 10_000_000


@pytest.mark.parametrize("price", [-1, "much", True])
def test_a_price_that_is_not_an_amount_is_rejected(price: object) -> None:
    with pytest.raises(PolicyError, match="search_price"):
        Policy.validated({"models": {"m": {"search_price": price}}}, "keywords")


# ---- The one reader of usage, without a framework: what counts as reported, what is estimated, and that no figure
# falls


NAMES = {
    "prompt": ("prompt_token_count", "promptTokenCount"),
    "candidates": ("candidates_token_count", "candidatesTokenCount"),
    "thoughts": ("thoughts_token_count", "thoughtsTokenCount"),
    "tool": ("tool_use_prompt_token_count", "toolUsePromptTokenCount"),
    "total": ("total_token_count", "totalTokenCount"),
    "cached": ("cached_content_token_count", "cachedContentTokenCount"),
    "write": ("cache_creation_input_tokens", "cacheCreationInputTokens"),
}
REPORTS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, st.integers(0, 5_000)))


def spelled(counts: dict[str, int], how: int) -> dict[str, int]:
    return {NAMES[name][how]: count for name, count in counts.items()}


def response(counts: dict[str, int] | None, words: str = "", *, partial: bool = False, **more: Any) -> dict[str, Any]:
    content = {"parts": [{"text": words}]} if words else None
    return {
        "usage_metadata": None if counts is None else spelled(counts, 0),
        "content": content,
        "partial": partial,
        **more,
    }


@given(counts=REPORTS)
def test_objects_and_both_spellings_of_json_are_read_alike(counts: Any) -> None:
    snake, camel, typed = (
        read_usage(report, [])
        for report in (spelled(counts, 0), spelled(counts, 1), SimpleNamespace(**spelled(counts, 0)))
    )
    assert snake == camel == typed


@given(counts=REPORTS)
def test_output_follows_the_total_or_else_the_parts(counts: Any) -> None:
    read = read_usage(spelled(counts, 0), [])
    get = counts.get
    prompt, answer, total = get("prompt", 0) + get("tool", 0), get("candidates", 0), get("total", 0)
    if get("cached", 0) + get("write", 0) > prompt:
        prompt += get("cached", 0) + get("write", 0)
    if not any(count for name, count in counts.items() if name != "write"):
        assert read is None or counts.keys() > {"write"}
        return
    assert read is not None
    usage = read.usage()
    assert usage.input == prompt
    assert usage.output == (total - prompt if total >= prompt + answer else answer + get("thoughts", 0))


@given(chunks=st.lists(REPORTS, min_size=1, max_size=5), last=REPORTS)
def test_no_figure_falls_within_a_call(chunks: list[Any], last: Any) -> None:
    call, seen = CallUsage(), Counts()
    for chunk in [*chunks, last]:
        call.add(response(chunk, partial=True))
        if (counts := read_usage(spelled(chunk, 0), [])) is not None:
            seen.add(counts)
    call.add(response({"prompt": 0, "candidates": 0, "total": 0}))
    assert call.reported == (None if seen == Counts() else seen.usage())


@given(counts=REPORTS, words=st.text(min_size=1, max_size=200))
def test_a_report_with_the_answer_or_behind_it_is_the_bill(counts: Any, words: str) -> None:
    read = read_usage(spelled(counts, 0), [])
    with_it, behind = CallUsage(), CallUsage()
    with_it.add(response(counts, words))
    behind.add(response(None, words))
    assert behind.bill(50).estimated
    behind.add(response(counts, partial=True))
    assert with_it.bill(50) == behind.bill(50)
    if read is not None and not read.lacks_input and not read.is_undivided:
        usage, is_known = read.usage(), bool(read.answer or read.beside or read.total)
        expected = usage if is_known else replace(usage, output=with_it.text_tokens)  # unknown is never zero
        assert with_it.bill(50) == (expected, not is_known)


@pytest.mark.parametrize("report", [{"total": 900}, {"prompt": 0, "candidates": 0, "total": 900}])
def test_a_total_alone_is_not_added_to_an_estimate(report: dict[str, Any]) -> None:
    call = CallUsage()
    call.add(response(report, "words"))
    assert call.bill(500) == (Usage(output=900), True)
    assert call.prompt is None


def test_audio_is_counted_in_any_spelling() -> None:
    for report in (
        {"promptTokenCount": 9, "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 4}]},
        {"prompt_token_count": 9, "prompt_tokens_details": [{"modality": "audio", "token_count": 4}]},
    ):
        counts = read_usage(report, [])
        assert counts is not None
        assert counts.usage() == Usage(input=9, audio=4)


# ---- events ---------------------------------------------------------------------------------------------------------

CALL = {"content": {"parts": [{"function_call": {"name": "look", "args": {}}}]}}
PLAIN = {"prompt": 900, "candidates": 250, "total": 1_150}


def test_words_and_function_calls_of_one_answer_are_one_call() -> None:
    """LiteLLM passes them on in two events, and reports once."""
    reader = EventUsage()
    first = reader.read(response(PLAIN, "let me look", author="a"), is_answer=True)
    assert first is not None
    assert reader.read({**response(None, author="a"), **CALL}, is_answer=True) is None


def test_the_next_call_of_the_same_agent_is_one_of_its_own() -> None:
    reader = EventUsage()
    reader.read({**response(PLAIN, author="a"), **CALL}, is_answer=True)
    reader.pass_by(
        {"author": "a", "content": {"parts": [{"function_response": {"name": "look", "response": {"seen": 1}}}]}}
    )
    taken = reader.read({**response(None, author="a"), **CALL}, is_answer=True)
    assert taken is not None
    assert taken.estimated


def test_a_report_behind_its_answer_replaces_the_estimate_and_is_not_the_next_calls() -> None:
    reader = EventUsage()
    first = reader.read(response(None, "word " * 80, author="a"), is_answer=True)
    assert first == (Usage(output=100), True, None)
    assert reader.read(response(PLAIN, author="a", partial=True)) == (Usage(900, 250), False, Usage(output=100))
    assert reader.read(response({"prompt": 10, "candidates": 5, "total": 15}, "x", author="a")) == (
        Usage(10, 5),
        False,
        None,
    )


def test_branches_that_stream_side_by_side_are_told_apart() -> None:
    reader = EventUsage()
    for branch, prompt in (("b", 100), ("c", 200)):
        reader.read(
            response(
                {"prompt": prompt, "candidates": 5, "total": prompt + 5}, "x", partial=True, author="a", branch=branch
            )
        )
    for branch, prompt in (("c", 200), ("b", 100)):
        assert reader.read(response(None, "x", author="a", branch=branch)) == (Usage(prompt, 5), False, None)


# ---- the neutral format ---------------------------------------------------------------------------------------------


@each_row(
    ("tokens", "expected"),
    [
        ({"input_tokens": 0, "output_tokens": 0}, (100, 25, True)),
        ({}, (100, 25, True)),
        ({"input_tokens": 0, "output_tokens": 7}, (100, 7, True)),
        ({"input_tokens": 90, "output_tokens": 0}, (90, 0, False)),
        ({"input_tokens": 90, "output_tokens": 7}, (90, 7, False)),
    ],
)
def test_zeros_in_a_recording_are_estimated(tokens: dict[str, Any], expected: tuple[int, int, bool]) -> None:
    steps = [
        {"kind": "message", "agent": "user", "text": "x" * 400},
        {"kind": "model", "agent": "a", "text": "y" * 100, **tokens},
    ]
    (asked,) = [step for step in run_of({"id": "r", "steps": steps}, "here", Faults()).steps if isinstance(step, Asked)]
    assert asked.usage is not None
    assert (asked.usage.input, asked.usage.output, asked.estimated) == expected
