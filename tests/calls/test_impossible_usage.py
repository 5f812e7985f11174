"""Whatever figures a report of usage holds: what is booked is a count, and a call that was sent is never free."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runguard import guard
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.engine.guard import Guard
from runguard.policy.settings import Policy
from runguard.pricing.rates import Usage
from tests.kit.examples import each_row, examples

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
