"""A fault between the question and the permission is never a free pass: a plain reservation, or no call."""

import asyncio
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import LlmAgent

from runguard import Budget, GuardFailedError, RunStoppedError, guard, guard_async
from runguard.adk import GuardedLlm, RunGuardPlugin
from runguard.engine.money import Accounts
from runguard.testing import ScriptedModel, call, run

OPENING = ["open_now", "open", "_open"]
PRICED: dict[str, Any] = {
    "prices": {"scripted-1": {"input": 0, "output": 100}},
    "models": {"scripted-1": {"max_output_tokens": 100}},
}


def _broken(*_: Any, **__: Any) -> Any:
    raise LookupError("the guard's own fault")


@pytest.fixture(params=[OPENING, ["of_call"], ["dated_rates"]], ids=["opening", "finding", "pricing"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Break what opens a charge; or also what the plain reservation needs, so that no call can be made."""
    for name in request.param:
        owner = "runguard.engine.money.Accounts"
        if name not in OPENING:
            owner = "runguard.engine.budgets.AccountFinder" if name == "of_call" else "runguard.pricing.book.Pricing"
        monkeypatch.setattr(f"{owner}.{name}", _broken)
    return list(request.param)


@pytest.mark.parametrize("store", ["", "sqlite"])
@pytest.mark.parametrize("on_guard_error", ["allow", "block"])
def test_functions(broken: list[str], store: str, on_guard_error: Any, tmp_path: Path) -> None:
    """Ten calls of a dollar on two dollars."""
    where: Any = {"store": f"sqlite:///{tmp_path}/guard.db"} if store else {}
    made: list[int] = []
    ask = guard(lambda n: made.append(n), cost=1, max_usd=2, on_guard_error=on_guard_error, **where)
    for number in range(10):
        with pytest.raises(RunStoppedError) if len(made) >= _payable(broken, on_guard_error) else nullcontext():
            ask(number)
    assert len(made) == _payable(broken, on_guard_error)
    assert ask.flush(10)
    assert (ask.spend()["usd"], ask.spend()["reserved_usd"]) == (Decimal(len(made)), 0)


async def test_async_functions(broken: list[str]) -> None:
    made: list[int] = []

    async def send(n: int) -> None:
        await asyncio.sleep(0)
        made.append(n)

    ask = guard_async(send, cost=1, max_usd=2)
    results = await asyncio.gather(*(ask(n) for n in range(10)), return_exceptions=True)
    assert len(made) == _payable(broken, "allow")
    assert sum(isinstance(one, RunStoppedError | GuardFailedError) for one in results) == 10 - len(made)


@pytest.mark.parametrize("guarding", ["plugin", "guarded model"])
@pytest.mark.parametrize("on_guard_error", ["allow", "block"])
async def test_adk(broken: list[str], guarding: str, on_guard_error: Any) -> None:
    """Calls of $0.01 without end on $0.02."""
    plain = ScriptedModel(lambda n, _: call("look", n=n), output_tokens=100)
    policy: dict[str, Any] = {**PRICED, "budgets": [Budget(usd=0.02, per="app")], "on_guard_error": on_guard_error}

    def look(n: int) -> dict[str, int]:
        return {"page": n}

    is_plugin = guarding == "plugin"
    plugins = [RunGuardPlugin(**policy)] if is_plugin else []
    model: Any = plain if is_plugin else GuardedLlm(plain, on_stop="stop", **policy)
    await run(LlmAgent(name="solo", model=model, tools=[look]), "go", plugins=plugins)
    assert plain.calls == _payable(broken, on_guard_error)


def _payable(broken: list[str], on_guard_error: str) -> int:
    """How many calls can be reserved."""
    return 2 if broken == OPENING and on_guard_error == "allow" else 0


def test_without_a_budget_on_guard_error_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPENING:
        monkeypatch.setattr(Accounts, name, _broken)
    made: list[int] = []
    ask = guard(lambda n: made.append(n), max_model_calls=100)
    for number in range(5):
        ask(number)
    assert len(made) == 5
    strict = guard(lambda n: made.append(n), max_model_calls=100, on_guard_error="block")
    with pytest.raises(GuardFailedError):
        strict(1)
    assert len(made) == 5
