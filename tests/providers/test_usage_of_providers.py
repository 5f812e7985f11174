"""Usage as Gemini, OpenAI, Anthropic and LiteLLM report it."""

import copy
import os
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from runguard.pricing.rates import Usage
from runguard.providers.messages import Reading, read
from runguard.providers.streams import StreamReading
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
