"""Errors carry data and say what to do next."""

import asyncio
import pickle
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest

from runguard import (
    Budget,
    BudgetExceededError,
    CircuitOpenError,
    ContextOverflowError,
    LimitExceededError,
    LoopDetectedError,
    RunStoppedError,
    UnpricedModelError,
    guard,
    guard_async,
    run,
)
from tests.kit.examples import each_row
from tests.kit.functions import (
    DIME,
    Model,
    _stopped,
    in_threads,
    in_time,
    refused,
    swallowing,
)

# ---- errors are data ------------------------------------------------------------------------------------------------


ERRORS: dict[str, tuple[Callable[[], RunStoppedError], type[RunStoppedError], tuple[str, ...]]] = {
    "budget": (
        lambda: _stopped(guard(Model(), budget={"max_usd": 0.2})),
        BudgetExceededError,
        ("spent", "limit", "scope", "reserved"),
    ),
    "tokens": (
        lambda: _stopped(guard(Model({"tokens": 5}), budget={"max_tokens": 9})),
        BudgetExceededError,
        ("spent", "limit", "scope", "reserved"),
    ),
    "loop": (
        lambda: _stopped(guard(Model({"sig": "a"}), loop=True)),
        LoopDetectedError,
        ("pattern", "repeats", "limit"),
    ),
    "context": (
        lambda: _stopped(guard(Model(), context={"max_context_tokens": 5}, tokens=len), "x" * 6),
        ContextOverflowError,
        ("projected_tokens", "limit"),
    ),
    "breaker": (lambda: _stopped(guard(Model(OSError()), breaker={"failures": 2})), CircuitOpenError, ("retry_after",)),
    "unpriced": (lambda: _stopped(guard(Model("?"), budget={"max_usd": 1})), UnpricedModelError, ("spent", "scope")),
    "calls": (lambda: _stopped(guard(Model(), max_model_calls=1)), LimitExceededError, ("observed", "limit")),
}


@each_row("name", ERRORS)
def test_every_error_tells_its_figures_and_survives_pickling(name: str) -> None:
    make, kind, figures = ERRORS[name]
    error = make()
    assert type(error) is kind
    assert isinstance(error, RuntimeError)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert str(copy) == str(error) == error.trip.message
        assert copy.trip == error.trip
        assert [getattr(copy, figure) for figure in figures] == [getattr(error, figure) for figure in figures]
    assert all(getattr(error, figure) is not None for figure in figures)
    assert error.trip.rule in str(error)


def test_a_budget_error_names_what_is_held() -> None:
    error: list[BudgetExceededError] = []

    def model() -> Any:
        if not error:
            error.append(None)  # type: ignore[arg-type]
            error[0] = _stopped(lambda: in_time(call))  # type: ignore[call-overload]
        return {"usd": 0.1}

    call = guard(model, budget={"max_usd": 0.15}, cost=0.1, max_wait_seconds=0)
    call()
    assert (error[0].spent, error[0].reserved, error[0].limit) == (Decimal(0), DIME, Decimal("0.15"))


# ---- what to do next ------------------------------------------------------------------------------------------------


@each_row(
    ("keywords", "result", "advice"),
    [
        ({"loop": {"repeats": 2}}, {"sig": "a"}, r"loop=\{'repeats'"),
        ({"budget": {"max_usd": 1}}, {"answer": "x"}, r"cost=.*prices="),
        ({"budget": {"max_usd": 0.1}}, {"usd": 0.1}, r"fresh budget"),
        (
            {"context": {"max_context_tokens": 10}, "tokens": lambda: 11},
            {"usd": 0.1},
            r"context=\{'max_context_tokens'",
        ),
    ],
)
def test_a_stop_says_what_to_do_in_the_words_of_guard(
    keywords: dict[str, Any], result: dict[str, Any], advice: str
) -> None:
    trip = _stopped(guard(Model(result), **keywords)).trip
    assert re.search(advice, trip.resume)
    assert "rules." not in trip.resume
    assert "plugin" not in trip.resume


def test_an_unknown_model_is_named_with_the_line_that_gives_it_a_price() -> None:
    call = guard(
        Model({"model": "acme-1", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}), budget={"max_usd": 1}
    )
    stopped = _stopped(call)
    assert isinstance(stopped, UnpricedModelError)
    assert "'acme-1' has no known price" in str(stopped)
    assert "prices={'acme-1'" in str(stopped)
    assert stopped.trip.tokens == 15


def test_reset_inside_of_a_run_begins_afresh_there() -> None:
    call = guard(Model(), budget={"max_calls": 1})
    with run(user="alice"):
        assert refused(swallowing(call, 3)) == 2
        call.reset()
        assert refused(swallowing(call, 3)) == 2


def test_what_another_worker_has_granted_lets_a_stopped_one_go_on(tmp_path: Path) -> None:
    one, two = (
        guard(Model(), budget=Budget(calls=1, per="user"), store=f"sqlite:///{tmp_path}/guard.db") for _ in range(2)
    )
    with run(user="alice", app="chat"):
        assert refused(swallowing(one, 3)) == 2
        two.extend("user:chat/alice", calls=1)
        assert two.flush(5)
        assert refused(swallowing(one, 3)) == 2


def test_a_free_first_call_does_not_let_everybody_in() -> None:
    costs = iter([0.0, *[0.5] * 99])
    call = guard(lambda: {"usd": next(costs)}, budget={"max_usd": 1})
    results = in_threads([lambda: swallowing(call, 1)] * 20)
    assert sum(isinstance(result, dict) for results_of_one in results for result in results_of_one) == 3
    assert call.spend()["usd"] == 1


def test_a_fan_out_inside_of_a_call_that_goes_alone_stays_within_its_cap() -> None:
    async def model() -> dict[str, float]:
        await asyncio.sleep(0.01)
        return {"usd": 0.5}

    inner = guard_async(model, budget={"max_usd": 1}, max_wait_seconds=5)

    async def agent() -> dict[str, float]:
        await asyncio.gather(*(inner() for _ in range(20)), return_exceptions=True)
        return {"usd": 0.1}

    asyncio.run(guard_async(agent, budget={"max_usd": 100})())
    assert inner.spend()["usd"] == 1


def test_a_stricter_layer_on_a_shared_account_is_heard(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/guard.db"
    call = guard(Model({"usd": 0.5}), budget={"per_day": 1}, store=store, name="chat")
    for around in ({"budget": {"per_day": 100}}, {"budget": {"per_day": 1}, "mode": "shadow"}):
        with run(app="chat", store=store, **around):
            for _ in range(5):
                swallowing(call, 1)
                assert call.flush(5)
    assert call.spend()["usd"] == 1


def test_a_signature_that_is_content_is_in_no_trip() -> None:
    secret = "my password is hunter2"
    trip = _stopped(guard(Model({"sig": secret}), loop={"repeats": 2})).trip
    assert "hunter2" not in repr(trip)
    error = _stopped(guard(Model({"sig": "search.web"}), loop={"repeats": 2}))
    assert isinstance(error, LoopDetectedError)
    assert error.pattern == ("search.web",)


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_a_refusal_of_an_open_breaker_is_told_like_every_decision(mode: Literal["enforce", "shadow"]) -> None:
    heard: list[Any] = []

    def away() -> None:
        raise ConnectionError("away")

    call = guard(away, breaker={"failures": 1, "reset_seconds": 60}, on_decision=heard.append, mode=mode)
    assert len(swallowing(call, 3)) == 3
    assert call.flush(5)
    assert {(decision.action.word, decision.finding.rule, decision.enforced) for decision in heard} == {
        ("block", "breaker", mode == "enforce")
    }
