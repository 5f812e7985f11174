"""A guarded function looks like the function, and its errors carry data and say what to do next."""

import asyncio
import functools
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest

import runguard
from runguard import (
    Budget,
    BudgetExceededError,
    CircuitOpenError,
    ContextOverflowError,
    LimitExceededError,
    LoopDetectedError,
    PolicyError,
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
    held,
    in_threads,
    in_time,
    refused,
    swallowing,
)


def test_the_decorator_with_settings_makes_one_run_per_function() -> None:
    settings = guard(budget={"max_calls": 1})
    one, other = settings(Model()), settings(Model())
    assert refused(swallowing(one, 3)) == refused(swallowing(other, 3)) == 2


def test_methods_are_guarded_too() -> None:
    class Agent:
        made = 0

        @guard(budget={"max_calls": 2})
        def ask(self, word: str) -> Any:
            self.made += 1
            return self, word

        @staticmethod
        @guard(budget={"max_calls": 1})
        def still(word: str) -> str:
            return word

        @classmethod
        @guard(budget={"max_calls": 1})
        def of_all(cls) -> Any:
            return cls

        @guard_async(budget={"max_calls": 1})
        async def later(self) -> Any:
            return self

    agent = Agent()
    assert agent.ask("hi") == (agent, "hi")
    assert refused(swallowing(agent.ask, 3, "again")) == 2
    assert agent.made == 2
    assert agent.ask.spend()["calls"] == 2
    assert (Agent.still("x"), Agent.of_all()) == ("x", Agent)  # type: ignore[call-arg]  # class methods are not bound
    assert asyncio.run(agent.later()) is agent
    assert inspect.iscoroutinefunction(agent.later)


@each_row("what", ["partial", "bound method", "object", "builtin", "lambda"])
def test_whatever_can_be_called_can_be_guarded(what: str) -> None:
    model = Model()
    kinds: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(model, 1),
        "bound method": model.__call__,
        "object": model,
        "builtin": len,
        "lambda": lambda *args: model(),
    }
    call = guard(kinds[what], budget={"max_calls": 1})
    assert refused(swallowing(call, 3, "x")) == 2


async def test_what_async_code_can_be() -> None:
    async def coroutine() -> Any:
        return 1

    class Client:
        async def __call__(self) -> Any:
            return 1

    for fn in (coroutine, functools.partial(coroutine), Client(), lambda: coroutine(), lambda: 1):
        call = guard_async(fn, budget={"max_calls": 1})
        assert inspect.iscoroutinefunction(call)
        assert await call() == 1
        with pytest.raises(BudgetExceededError):
            await call()


def test_mixing_up_the_two_is_told() -> None:
    async def coroutine() -> None: ...

    async def generator() -> Any:
        yield 1

    def plain() -> Any:
        yield 1

    for fn in (coroutine, generator, functools.partial(coroutine)):
        with pytest.raises(PolicyError, match="guard_async"):
            guard(fn)
    with pytest.raises(PolicyError, match=r"use guard$"):
        guard_async(plain)
    hidden = guard(lambda: coroutine(), budget={"max_calls": 5})
    with pytest.raises(PolicyError, match="guard_async"):
        hidden()  # type: ignore[unused-coroutine]
    assert (hidden.spend()["calls"], held(hidden)) == (0, Decimal(0))
    for wrong in ({"max_usd": 1}, 3, "text"):
        with pytest.raises(PolicyError, match="keyword"):
            guard(wrong)  # type: ignore[call-overload]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"budget": {"max_ussd": 1}}, r"budget\.max_ussd: .*'max_usd'"),
    ({"budget": {"max_usd": -1}}, r"budget\.max_usd = -1"),
    ({"budget": {"max_usd": float("nan")}}, r"budget\.max_usd = nan"),
    ({"budget": {"max_usd": True}}, r"budget\.max_usd = True"),
    ({"budget": {"max_tokens": 0}}, r"budget\.max_tokens = 0"),
    ({"budget": {"max_calls": 1.5}}, r"budget\.max_calls = 1\.5"),
    ({"budget": {"per_hour": {}}}, r"budget\.per_hour = \{\}"),
    ({"budget": {"per_hour": "lots"}}, r"budget\.per_hour\.max_usd = 'lots'"),
    ({"budget": {"per_hour": {"max_usdd": 1}}}, r"budget\.per_hour\.max_usdd: .*'max_usd'"),
    ({"budget": {"perHour": 1, "per_hour": 2}}, r"budget\.per_hour: given twice"),
    ({"budget": {7: 1}}, r"budget\.7"),
    ({"budget": 3}, r"budget = 3"),
    ({"budget": [1]}, r"budget = \[1\]"),
    ({"loop": {"repeat": 3}}, r"loop\.repeat: .*'repeats'"),
    ({"loop": {"repeats": 1}}, r"loop\.repeats = 1"),
    ({"loop": {"max_cycle_len": 0}}, r"loop\.max_cycle_len = 0"),
    ({"loop": 3}, r"loop = 3"),
    ({"context": {"max_tokens": 5}}, r"context\.max_tokens: .*'max_context_tokens'"),
    ({"context": {"maxContextTokens": 10, "headroom": 10}}, r"context\.headroom = 10"),
    ({"context": {"max_context_tokens": -1}}, r"context\.max_context_tokens = -1"),
    ({"breaker": {"failure": 1}}, r"breaker\.failure: .*'failures'"),
    ({"breaker": {"failures": 0}}, r"breaker\.failures = 0"),
    ({"breaker": {"reset_seconds": -1}}, r"breaker\.reset_seconds = -1"),
    ({"tokens": 5}, r"tokens = 5"),
    ({"signature": "x"}, r"signature = 'x'"),
    ({"cost": -1}, r"cost = -1"),
    ({"cost": True}, r"cost = True"),
    ({"cost": float("nan")}, r"cost = nan"),
    ({"cost": lambda a, b, c: 1}, r"cost takes 3 arguments"),
    ({"on_trip": 3}, r"on_trip = 3"),
    ({"store": "files:///x"}, r"store = 'files:…'"),
    ({"mode": "enforced"}, r"mode = 'enforced'"),
    ({"budgt": {}}, r"budgt: .*'budget'"),
    ({"lop": True}, r"lop: .*'loop'"),
    ({"cycle_repeats": 3}, r"cycle_repeats: use loop=\{'repeats'"),
    ({"max_context_tokens": 3}, r"max_context_tokens: use context="),
    ({"rules": {"cycle": False}}, r"rules: .*loop="),
]


@each_row(("keywords", "message"), WRONG)
def test_what_cannot_be_meant_fails_before_the_first_call(keywords: dict[str, Any], message: str) -> None:
    for make in (guard, guard_async, lambda **given: guard(Model(), **given), lambda **given: run(**given).__enter__()):
        with pytest.raises(PolicyError, match=message):
            make(**keywords)


@each_row(
    ("keywords", "message"),
    [({"usr": "x"}, "'user'"), ({"user": 3}, "user = 3"), ({"labels": {"a": 1}}, "labels"), ({"labels": 3}, "labels")],
)
def test_a_run_of_nobody_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message), run(**keywords):
        pass


def test_type_checkers_see_the_functions_own_signature(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        from runguard.calls.functions import guard, guard_async

        @guard
        def bare(x: int) -> str: ...

        @guard(budget={"max_usd": 2.0})
        def told(x: int) -> str: ...

        @guard_async(loop=True)
        async def later(x: int) -> str: ...

        reveal_type(bare)
        reveal_type(told)
        reveal_type(later)
        bare("wrong")
        """)
    )
    home = Path(runguard.__file__).parent
    checked = subprocess.run(  # the rest of the package is left aside: reading it takes half a minute
        [
            sys.executable,
            "-m",
            "mypy",
            "--follow-imports=skip",
            "--config-file=",
            str(program),
            str(home / "calls" / "functions.py"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(home.parent)},
    ).stdout
    told = [line for line in checked.replace("builtins.", "").splitlines() if "program.py" in line]
    assert sum("GuardedFunction[[x: int], str]" in line for line in told) == 2, checked
    assert sum("[[x: int], " in line and "Coroutine[Any, Any, str]]" in line for line in told) == 1, checked
    assert sum("[arg-type]" in line for line in told) == 1, checked


def test_names_stand_in_trips_and_figures() -> None:
    call = guard(Model(), name="planner", budget={"max_calls": 1})
    error = _stopped(call)
    assert error.trip.agent_path == ("planner",)
    assert error.trip.app == "planner"
    assert list(call.spend()["by_agent"]) == ["planner"]


def test_nothing_of_the_answers_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    call = guard(Model({"usd": 0.1, "sig": "s", "result": "a secret"}), budget={"max_usd": 0.2}, loop=True)
    swallowing(call, 4, "another secret")
    assert "runguard.trip" in caplog.text
    assert "secret" not in caplog.text


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
