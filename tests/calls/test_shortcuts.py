"""What the common call leaves out makes no difference to any figure."""

import os
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import guard
from runguard.ledger.memory import MemoryLedger
from runguard.providers.messages import _ANSWER_NAMES as _NAMES
from runguard.providers.messages import _OWN, _read, read
from runguard.providers.usage import read_usage
from tests.kit.examples import each_row

REQUEST = {"model": "gpt-4o", "messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 100}
VALUES = st.sampled_from(["text", 3, None, [], [{"text": "a"}], {"cost": 0.5}, {"input_tokens": 3}])
COUNTS = st.integers(-2, 50)
DETAILS = ("cached_tokens", "audio_tokens", "reasoning_tokens", "web_search_requests")
REPORTS = st.fixed_dictionaries(
    {"prompt_tokens": COUNTS, "completion_tokens": COUNTS},
    optional={
        "total_tokens": COUNTS,
        "prompt_token_count": COUNTS,
        "thoughts_token_count": COUNTS,
        "cache_read_input_tokens": COUNTS,
        "cache_creation_input_tokens": COUNTS,
        "prompt_tokens_details": st.dictionaries(st.sampled_from(DETAILS), COUNTS),
        "completion_tokens_details": st.dictionaries(st.sampled_from(DETAILS), COUNTS),
        "server_tool_use": st.dictionaries(st.sampled_from(DETAILS), COUNTS),
    },
)


def test_a_call_of_fixed_cost_still_counts_its_tokens() -> None:
    answers: list[Any] = [{"text": "hello"}, {"usage": {"prompt_tokens": 7, "completion_tokens": 5}}]
    counted = guard(lambda **_: answers.pop(0), budget={"max_usd": 1}, cost=0.25)
    counted(**REQUEST)
    estimated = counted.spend()
    assert estimated["usd"] == Decimal("0.25")
    assert estimated["input_tokens"] > 100
    counted(**REQUEST)
    assert counted.spend()["input_tokens"] == estimated["input_tokens"] + 7
    assert counted.spend()["output_tokens"] == 5
    assert counted.spend()["by_model"]["gpt-4o"]["calls"] == 2
    assert counted.snapshot()["runs"][0]["model_calls"] == 2


@given(st.dictionaries(st.sampled_from([*sorted(_NAMES), "text", "other"]), VALUES, max_size=4))
def test_a_dict_without_known_names_reads_as_the_long_way_does(answer: dict[str, Any]) -> None:
    if answer.keys() <= {"usd", "sig", "result"}:
        answer["text"] = "x"
    short, long = read(answer), _read(answer, 0)
    assert short == long
    assert short.size == long.size


@each_row("name", sorted(_NAMES - _OWN - {"_hidden_params"}))
def test_each_name_by_itself_says_something(name: str) -> None:
    said = {
        "choices": [{"text": "x"}],
        "candidates": [{"content": {"parts": [{"text": "x"}]}}],
        "output": [{"type": "message", "content": [{"text": "x"}]}],
    }
    value = said.get(name) or ({"total_tokens": 3, "totalTokenCount": 3} if name.startswith("usage") else "x")
    assert read({name: value}) != read({"other": value})


@given(REPORTS, st.lists(st.sampled_from(["choices", "candidates", "output", "response"]), unique=True), st.booleans())
def test_an_answer_whose_words_are_not_needed_costs_the_same(report: Any, parts: list[str], is_empty: bool) -> None:
    grounding = {"web_search_queries": ["a", "b"]}
    said = {
        "choices": [] if is_empty else [{"message": {"content": "x"}}],
        "candidates": [{"content": {"parts": [{"text": "x"}]}, "grounding_metadata": grounding}],
        "output": [{"type": "web_search_call"}],
        "response": {"usage": report, "choices": [{"text": "y"}]},
    }
    answer = {"usage": report, "model": "m", **{name: said[name] for name in parts}}
    short, long = read(answer, said=False), read(answer)
    for name in ("usage", "usd", "model", "sig", "result", "results", "problems", "earlier", "size"):
        assert getattr(short, name) == getattr(long, name), name


@given(REPORTS)
def test_a_usage_reads_the_same_as_a_dict_and_as_an_object(report: dict[str, Any]) -> None:
    problems: list[str] = []
    others: list[str] = []
    assert read_usage(report, problems) == read_usage(SimpleNamespace(**report), others)
    assert problems == others


def test_open_calls_of_many_threads_leave_nothing_behind() -> None:
    seen: list[Decimal] = []

    def model(number: int) -> dict[str, Any]:
        seen.append(counted.spend()["reserved_usd"])
        if number % 3 == 0:
            raise ValueError("the provider failed")
        return {"usd": 0.01}

    def attempt(number: int) -> None:
        try:
            counted(number)
        except ValueError:
            return

    counted = guard(model, budget={"max_usd": 1_000}, cost=0.01)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, range(200)))
    assert min(seen) >= Decimal("0.01")
    assert max(seen) <= Decimal("0.08")
    assert (counted.spend()["reserved_usd"], counted.spend()["calls"]) == (0, 200)
    assert counted.budgets()[0].spent == counted.spend()["usd"]


async def test_the_hold_that_expires_first_is_charged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("runguard.ledger.memory.time.monotonic", lambda: clock[0])
    ledger = MemoryLedger()
    account = ledger.account("a#", "a", None, None, (100, 100, 100))
    for amount, ttl in ((1, 50.0), (2, 10.0), (4, 20.0), (8, 10.0)):
        await ledger.reserve([account], (amount, 0, 1), ttl=ttl)
    spent = []
    for clock[0] in (105.0, 110.0, 119.0, 120.0, 149.0, 151.0):
        ledger.hold_now([account], (1_000, 0, 0))
        spent.append(account.spent_usd)
    assert spent == [0, 10, 10, 14, 14, 15]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_the_calls_of_the_child_are_a_run_of_their_own() -> None:
    counted = guard(lambda: {"text": "hello"}, budget={"max_usd": 1}, cost=0.4)
    counted()
    counted()
    child = os.fork()
    if child == 0:
        try:
            counted()  # a third call of the same run would be refused
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
