"""One rule for every cost that is stated in dollars: booked as it is, or unknown. Never almost nothing."""

import logging
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard import BudgetExceededError, UnpricedModelError, guard
from runguard.core.money import MOST_USD, NANO, stated_nano, stated_usd
from runguard.engine.tools import bound_of
from runguard.policy.settings import ToolRule
from runguard.providers.messages import read
from runguard.replay.sources import nano_of
from tests.kit.examples import each_row
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
