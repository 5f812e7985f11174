"""Web searches on the model's side, as providers report them."""

from typing import Any

import pytest

from runguard.core.errors import PolicyError
from runguard.policy import Policy
from runguard.pricing.book import ModelLimits, Price, Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.providers.messages import read
from runguard.providers.usage import CallUsage
from tests.kit.examples import each_row

GEMINI_USAGE = {"prompt_token_count": 10, "candidates_token_count": 5, "total_token_count": 15}


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
                "usage_metadata": GEMINI_USAGE,
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
    call.add({"usage_metadata": GEMINI_USAGE, "groundingMetadata": {"webSearchQueries": ["a", "b"]}})
    call.add({"usage_metadata": GEMINI_USAGE, "grounding_metadata": {"grounding_chunks": []}})
    assert call.bill(10).usage == Usage(input=10, output=5, searches=2)
    call.add({"partial": True, "grounding_metadata": {"web_search_queries": ["a", "b", "c"]}})
    assert call.bill(10).usage == Usage(input=10, output=5, searches=3)


def test_searches_before_the_report_and_without_one_count_too() -> None:
    call = CallUsage()
    call.add({"partial": True, "grounding_metadata": {"web_search_queries": ["a"]}})
    assert call.bill(10).usage.searches == 1
    call.add({"usage_metadata": GEMINI_USAGE})
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
