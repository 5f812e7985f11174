"""Costs and usage that the caller states, and counts that are not valid."""

import copy
import os
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from runguard.pricing.rates import Usage
from runguard.providers.messages import Reading, read, read_request
from tests.kit.examples import each_row
from tests.kit.provider_answers import CHAT, CHAT_CALLS, CHAT_USAGE, streamed

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
