"""Costs that are stated, left out or impossible: booked as they are, or unknown. Never almost nothing."""

import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import BudgetExceededError, UnpricedModelError, guard
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.core.money import MOST_USD, NANO, stated_nano, stated_usd
from runguard.engine.guard import Guard
from runguard.engine.tools import bound_of
from runguard.ledger.memory import MemoryLedger
from runguard.policy.settings import Policy, ToolRule
from runguard.pricing.rates import Usage
from runguard.providers.messages import _ANSWER_NAMES as _NAMES
from runguard.providers.messages import _OWN, _read, read
from runguard.providers.usage import read_usage
from runguard.replay.sources import nano_of
from tests.kit.examples import each_row, examples
from tests.kit.waiting import PATIENCE_S

BOOKED: list[Any] = [0, 0.1, "0.10", Decimal("2.5"), 999_999, 1_000_001, 2e6, 10**9, "1e9"]
WRONG: list[Any] = [10**10, 1e10, -1, -0.01, float("nan"), float("inf"), True, "much", "", [1], 10**5_000, "9" * 65]
TINY: list[Any] = ["1e-999999999", Decimal("1e-999999999"), 1e-300]

# what reads a stated cost: a result of a guarded function, and what it booked or None
READERS: dict[str, Callable[[Any], Any]] = {
    "usd of a result": lambda usd: read({"usd": usd}).usd,
    "usd beside tokens": lambda usd: read({"usd": usd, "tokens": 5}).usd,
    "a gateway": lambda usd: read({"usage": {"prompt_tokens": 1, "completion_tokens": 1, "cost": usd}}).usd,
    "LiteLLM": lambda usd: read({"_hidden_params": {"response_cost": usd}}).usd,
    "a tool's price_bound": lambda usd: _usd(
        bound_of(ToolRule(price=lambda args, answer: 0, price_bound=lambda args: usd), {})[0]
    ),
    "a recorded step": lambda usd: _usd(_recorded(usd)),
}


def _usd(nano: int | None) -> Decimal | None:
    return None if nano is None else Decimal(nano) / NANO


def _recorded(usd: Any) -> int | None:
    try:
        return nano_of(usd)
    except ValueError:
        return None


@each_row("reader", READERS.values())
def test_every_reader_takes_the_same_amounts(reader: Callable[[Any], Any]) -> None:
    for usd in BOOKED:
        assert reader(usd) == Decimal(str(usd)), usd
    for usd in WRONG:
        assert reader(usd) is None, usd
    for usd in TINY:
        assert reader(usd) == Decimal("1e-9"), usd


@each_row("usd", BOOKED)
@each_row("way", ["result", "function", "tokens"])
def test_a_guarded_call_books_what_it_states(usd: Any, way: str) -> None:
    call: Any
    if way == "result":
        call = guard(lambda _: {"usd": usd})
    elif way == "function":
        call = guard(lambda _: "text", cost=lambda _: usd)
    else:
        call = guard(lambda _: {"tokens": 5}, cost=lambda tokens_in, tokens_out: usd)
    call("hello")
    assert call.spend()["usd"] == Decimal(str(usd))
    assert call.spend()["estimated_calls"] == 0


@pytest.mark.parametrize("usd", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("way", ["result", "function"])
def test_a_cost_that_cannot_be_right_is_unknown_and_logged_once(
    usd: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runguard")
    call: Any
    if way == "result":
        call = guard(lambda _: {"usd": usd}, budget={"max_usd": 10})
    else:
        call = guard(lambda _: "text", cost=lambda _: usd, budget={"max_usd": 10})
    call("hello")
    assert call.spend()["unpriced_calls"] == 1
    logged = [record.getMessage().split(":")[0] for record in caplog.records]
    assert set(logged) == {"runguard.trip", "runguard.unreadable" if way == "result" else "runguard.cost_failed"}
    assert len(logged) == 2
    with pytest.raises(UnpricedModelError):
        call("hello")


@each_row("usd", WRONG[2:8])
def test_an_unknown_cost_of_a_known_model_is_an_estimate(usd: Any) -> None:
    """Without a usage, an answer of usual length is assumed."""
    call = guard(lambda _: {"usd": usd, "model": "gpt-4o"})
    call("hello")
    assert call.spend()["estimated_calls"] == 1
    assert call.spend()["usd"] > Decimal("0.0001")


@given(st.one_of(st.integers(), st.floats(), st.decimals(), st.text(max_size=70), st.booleans(), st.none()))
def test_an_amount_is_exact_or_unknown(value: Any) -> None:
    usd, nano = stated_usd(value), stated_nano(value)
    assert (usd is None) == (nano is None)
    if usd is not None and nano is not None:
        assert 0 <= usd <= MOST_USD
        assert 0 <= nano - usd * NANO < 1
        assert usd == Decimal(str(value)) or 0 < Decimal(str(value)) < usd == Decimal("1e-9")


@pytest.mark.parametrize("usd", [1_000_001, 200_000_000, 10**9])
def test_a_file_counts_every_amount_that_is_accepted(usd: int, tmp_path: Path) -> None:
    call = guard(lambda _: {"usd": usd}, budget={"per_day": 1}, store=f"sqlite:///{tmp_path}/r.db")
    call("hello")
    assert call.flush(PATIENCE_S)
    (status,) = call.budgets()
    assert status.spent == usd
    with pytest.raises(BudgetExceededError):
        call("hello")


# ---- What the common call leaves out makes no difference to any figure ----------------------------------------------


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


# ---- Whatever figures a report of usage holds: what is booked is a count, and a call that was sent is never free ----


MODEL = "m"
PROMPT = {"model": MODEL, "messages": [{"role": "user", "content": "How much is it? " * 20}]}
PRICES = {MODEL: {"input": 1, "output": 1}}
IMPOSSIBLE = (
    st.floats()
    | st.integers(max_value=-1)
    | st.integers(min_value=10**13)
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
    | st.decimals()
)
FIGURES = IMPOSSIBLE | st.integers(0, 1_000)
FIELDS = tuple(Usage.__slots__)
USAGES = st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, FIGURES)).map(lambda given: Usage(**given))  # type: ignore[arg-type]


def reports(figures: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = [("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens"), ("input", "output")]
    pairs.append(("prompt_token_count", "candidates_token_count"))
    return st.one_of(*(st.fixed_dictionaries({asked: figures, said: figures}) for asked, said in pairs))


def booked_by(answer: Any) -> dict[str, Any]:
    """What a guarded function has spent after one answer. Every figure can be asked for."""
    guarded = guard(lambda **_: answer, budget={"max_usd": 10**6, "max_tokens": 10**15}, prices=PRICES)
    guarded(**PROMPT)
    guarded.budgets()
    guarded.snapshot()
    return guarded.spend()


def are_counts(spent: dict[str, Any]) -> bool:
    figures = (spent["input_tokens"], spent["output_tokens"])
    return all(type(figure) is int and figure >= 0 for figure in figures) and spent["usd"] >= 0


@examples(150)
@given(reports(FIGURES) | USAGES)
def test_a_guarded_function_books_counts(report: Any) -> None:
    spent = booked_by({"model": MODEL, "usage": report})
    assert are_counts(spent)
    assert spent["input_tokens"] > 0
    assert spent["usd"] > 0


@each_row("figure", [math.nan, math.inf, -1, True, "12", 2.5, 10**13])
def test_a_usage_object_is_checked_like_any_report(figure: Any) -> None:
    spent = booked_by({"model": MODEL, "usage": Usage(figure, figure)})
    assert spent == booked_by({"model": MODEL, "usage": None})


def settled(usage: Any, *, past_the_adapter: bool = False) -> dict[str, Any]:
    """What a run has spent after an adapter has settled one call."""
    policy = {"prices": PRICES, "max_usd": 10**6, "max_tokens": 10**15, "telemetry": False}
    guard = Guard(Policy.validated(policy, "keywords"))
    run = AgentRun.start(guard, "agent")
    permission = run.ask_now(lambda: ModelRequest.of(MODEL, PROMPT))
    assert isinstance(permission, Permission)
    if past_the_adapter:
        (charge,) = permission.charges
        guard.settle(charge, usage)
    else:
        permission.settle(usage, size=30)
    guard.accounts.budgets(None)
    guard.snapshot()
    return guard.accounts.spend(None)


@examples(150)
@given(USAGES, st.booleans())
def test_an_adapter_books_counts(usage: Usage, past_the_adapter: bool) -> None:
    spent = settled(usage, past_the_adapter=past_the_adapter)
    assert are_counts(spent)
    if not past_the_adapter or not usage.is_possible:
        assert spent["input_tokens"] > 0
        assert spent["usd"] > 0


@each_row("figure", [math.nan, math.inf, -1, True, "12", 2.5, 10**13])
def test_figures_that_cannot_be_true_count_as_not_reported(figure: Any) -> None:
    assert settled(Usage(figure, figure)) == settled(None)
    assert settled(Usage(10, 5, thinking=figure)) == settled(Usage(10, 5))


def test_output_without_input_has_its_input_estimated() -> None:
    spent = settled(Usage(output=500))
    assert (spent["output_tokens"], spent["input_tokens"]) == (500, settled(None)["input_tokens"])
