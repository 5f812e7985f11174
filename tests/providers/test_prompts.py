"""The size of a request, estimated before it is sent."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import runguard
from runguard.providers import usage
from runguard.providers.messages import Request, is_framework_tool, read_request
from runguard.providers.usage import GrowingPrompts, measure
from tests.kit.examples import each_row
from tests.kit.provider_answers import CHAT

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its import would ask the network for prices


MESSAGES = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "What is the weather in Rome today?"},
]


SAID = sum(len(message["content"]) for message in MESSAGES)


@each_row(
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
def test_a_prompt_is_found_wherever_it_stands_and_reckoned_high(args: Any, kwargs: dict[str, Any]) -> None:
    tokens = read_request(args, kwargs).input_tokens
    assert tokens is not None
    assert SAID / 3 <= tokens <= SAID / 3 + 30


@each_row(
    ("args", "kwargs"),
    [
        ((), {}),
        ((5, None, 2.5), {"timeout": 5}),
        (([1, 2],), {}),
        ((Mock(),), {"messages": Mock()}),
        ((object(),), {"messages": []}),
    ],
)
def test_without_a_prompt_nothing_is_reckoned(args: Any, kwargs: dict[str, Any]) -> None:
    assert read_request(args, kwargs) == Request()


@each_row(
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
def test_the_model_is_named_or_looks_like_one(
    args: tuple[Any, ...] | tuple[str, list[Any]] | tuple[str], kwargs: dict[str, Any], model: str
) -> None:
    assert read_request(args, kwargs).model == model


@each_row(
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
def test_every_candidate_may_reach_the_limit(kwargs: dict[str, Any], limit: int | None, candidates: int) -> None:
    asked = read_request((), kwargs)
    assert (asked.max_output_tokens, asked.candidates) == (limit, candidates)


@pytest.mark.parametrize(
    "kwargs", [{"previous_response_id": "r"}, {"conversation": "c"}, {"config": {"cached_content": "cachedContents/1"}}]
)
def test_what_the_provider_keeps_is_not_seen(kwargs: dict[str, Any]) -> None:
    assert read_request((), {"input": "x", **kwargs}).unseen
    assert not read_request((), {"input": "x", **dict.fromkeys(kwargs)}).unseen


def test_types_of_genai_are_measured_as_their_json() -> None:
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


def test_a_request_of_adk_is_at_least_what_adk_would_be_reserved() -> None:
    module = pytest.importorskip("google.adk.models.llm_request")
    types = pytest.importorskip("google.genai.types")
    estimate = pytest.importorskip("runguard.adk.runs")
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


def test_messages_of_the_libraries_can_be_sent_back() -> None:
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


@each_row(
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
def test_an_image_costs_what_images_cost_not_what_its_letters_would(part: dict[str, Any]) -> None:
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
def test_audio_is_told_apart(part: dict[str, Any]) -> None:
    asked = read_request((), {"messages": [{"role": "user", "content": [part]}]})
    assert asked.audio_tokens == 601
    assert asked.input_tokens is not None
    assert asked.audio_tokens <= asked.input_tokens <= asked.audio_tokens + 50


def test_other_scripts_count_by_their_bytes() -> None:
    assert (read_request(("天気はどうですか",), {}).input_tokens or 0) == 8
    assert read_request(("\ud800",), {}).input_tokens == 1


def test_lists_of_token_numbers_are_tokens() -> None:
    tokens = read_request((), {"input": list(range(100_000))}).input_tokens
    assert tokens is not None
    assert 100_000 <= tokens <= 150_000


def test_functions_and_classes_given_as_tools_or_schemas_count() -> None:
    def weather(city: str, day: str) -> str:
        """Tells the weather of a city on a day."""
        return city + day

    tokens = read_request((), {"tools": [weather]}).input_tokens
    assert tokens is not None
    assert tokens > len(weather.__doc__ or "") // 3 + 40


def test_a_request_that_contains_itself_or_too_much_is_too_large_and_soon_said() -> None:
    loop: list[Any] = ["x"]
    loop.append(loop)
    assert (read_request((), {"messages": loop}).input_tokens or 0) > 20_000_000
    assert (read_request((), {"messages": [{"content": "x"}] * 300_000}).input_tokens or 0) > 20_000_000


def test_no_code_of_an_argument_runs() -> None:
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
        yield  # type: ignore[unreachable]

    assert read_request((), {"messages": generated()}).input_tokens is None


# ---- A conversation is measured once: each further call measures what is new, and notices edits of what is old


contents = st.one_of(
    st.text(max_size=40),
    st.none(),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=20)}), max_size=3),
    st.just([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200}}]),
    st.just([{"type": "input_audio", "input_audio": {"data": "A" * 4_000, "format": "wav"}}]),
)
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": contents})
steps = st.lists(st.lists(messages, max_size=4), min_size=1, max_size=8)


@given(begin=st.lists(messages, min_size=0, max_size=12), steps=steps, cut=st.integers(0, 5))
@settings(deadline=None)
def test_it_measures_what_measuring_the_whole_gives(begin: list[Any], steps: list[list[Any]], cut: int) -> None:
    prompts, conversation = GrowingPrompts(), list(begin)
    for number, more in enumerate(steps):
        conversation = [*conversation, *more] if number % 2 else conversation
        if not number % 2:
            conversation += more
        if number == cut:
            del conversation[1 : 1 + cut]
        assert prompts.measure(conversation) == measure(conversation)


def talk(length: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"message {n}"} for n in range(length)]


@each_row("at", [0, 1, 20, 38, 39])
def test_an_edit_in_place_is_noticed_within_a_round(at: int) -> None:
    prompts, conversation = GrowingPrompts(), talk(40)
    prompts.measure(conversation)
    conversation[at]["content"] += "x" * 10_000
    looks = [prompts.measure(conversation) for _ in range(40)]
    assert looks[-1] == measure(conversation)
    if at >= 38:
        assert looks[0] == measure(conversation), "the newest messages are measured at every call"


def test_a_replaced_message_is_noticed_at_once() -> None:
    prompts, conversation = GrowingPrompts(), talk(40)
    prompts.measure(conversation)
    conversation[20] = {"role": "user", "content": "x" * 10_000}
    assert prompts.measure(conversation) == measure(conversation)


def test_two_conversations_in_turn_are_both_known_and_a_third_takes_the_place_of_the_oldest() -> None:
    prompts = GrowingPrompts()
    for conversation in [talk(n) for n in (30, 40, 50)] * 3:
        assert prompts.measure(conversation) == measure(conversation)
    assert len(prompts._known) == usage._CONVERSATIONS


def test_only_what_is_new_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = 0

    def counting(value: Any) -> tuple[int, int]:
        nonlocal measured
        measured += len(value)
        return measure(value)

    prompts, conversation = GrowingPrompts(), talk(1_000)
    prompts.measure(conversation)
    monkeypatch.setattr(usage, "measure", counting)
    for _ in range(100):
        conversation += talk(2)
        prompts.measure(conversation)
    assert measured <= 100 * (2 + 3)


def test_a_run_that_is_over_keeps_no_prompt() -> None:
    class Text(str):
        __slots__ = ("__weakref__",)

    ask = runguard.guard(lambda **_: {"usd": 0.1}, budget={"max_usd": 5})
    text = Text("hello")
    gone = weakref.ref(text)
    with runguard.run():
        ask(messages=[*talk(20), {"role": "user", "content": text}])
    del text
    gc.collect()
    assert gone() is None


# ---- The names of ADK's own tools are written once


SOURCE = Path(runguard.__file__).parent


@each_row("name", ["transfer_to_agent", "exit_loop", "finish_task", "adk_request_credential"])
def test_tools_of_the_framework(name: str) -> None:
    assert is_framework_tool(name)


@each_row("name", ["search", "transfer", "", "request_input"])
def test_tools_of_the_user(name: str) -> None:
    assert not is_framework_tool(name)


def test_the_list_exists_once() -> None:
    holders = [path.name for path in SOURCE.rglob("*.py") if '"set_model_response"' in path.read_text(encoding="utf-8")]
    assert holders == ["messages.py"]
