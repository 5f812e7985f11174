"""A guarded function looks like the function."""

import asyncio
import functools
import inspect
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import (
    BudgetExceededError,
    PolicyError,
    guard,
    guard_async,
    run,
)
from tests.kit.examples import each_row
from tests.kit.functions import (
    Model,
    _stopped,
    held,
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
