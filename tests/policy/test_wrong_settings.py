"""A wrong name, type or nested value in any constructor gives one line: path, value, and what would be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runguard
from runguard import adk, policy, termination
from runguard.errors import PolicyError
from runguard.pricing import book as given
from tests.kit.examples import each_row

# Any: every call here is one that a type checker rejects.
Budget: Any = runguard.Budget
BudgetMonitor: Any = runguard.BudgetMonitor
BudgetPolicy: Any = runguard.BudgetPolicy
Threshold: Any = runguard.Threshold
ToolRule: Any = runguard.ToolRule
BudgetPlugin: Any = adk.BudgetPlugin
Policy: Any = policy.Policy
ModelLimits: Any = given.ModelLimits
Price: Any = given.Price
guard: Any = runguard.guard

MODEL = "gemini-2.5-flash"
PRICES = {"m": {"inputt": 3, "output": 15}}


def call(**keywords: Any) -> dict[str, Any]:
    return keywords


async def call_async(**keywords: Any) -> dict[str, Any]:
    return keywords


def enter_run(**keywords: Any) -> None:
    runguard.run(**keywords).__enter__()


# Takes the settings of a policy.
DOORS: dict[str, Callable[..., Any]] = {
    "Policy": Policy,
    "Policy.build": Policy.build,
    "RunGuardPlugin": adk.RunGuardPlugin,
    "install": runguard.install,
    "GuardedLlm": lambda **keywords: adk.GuardedLlm(MODEL, **keywords),
    "ADKCostBreaker": adk.ADKCostBreaker,
    "guard": lambda **keywords: guard(call, **keywords),
    "guard_async": lambda **keywords: runguard.guard_async(call_async, **keywords),
    "run": enter_run,
}
WRONG_IN_A_POLICY: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"max_usdd": 5}, "max_usdd: no such setting; did you mean 'max_usd'?"),
    "a type": ({"max_usd": "x"}, "max_usd = 'x': not a number of dollars"),
    "a choice": ({"mode": "enforc"}, "mode = 'enforc': input should be 'enforce', 'shadow' or 'off'"),
    "a tool's name": ({"tools": {"a": {"poling": True}}}, "tools.a.poling: no such setting; did you mean 'polling'?"),
    "a tool's type": ({"tools": {"a": {"polling": "yes"}}}, "tools.a.polling = 'yes': input should be a valid boolean"),
    "a budget's name": ({"budgets": [{"usdd": 5}]}, "budgets.0.usdd: no such setting"),
    "a budget's type": ({"budgets": [{"usd": "x"}]}, "budgets.0.usd = 'x': not a number of dollars"),
    "a price's name": ({"prices": PRICES}, "prices.m.inputt: no such setting; did you mean 'input'?"),
    "a price's type": ({"prices": {"m": {"input": [], "output": 1}}}, "prices.m.input"),
    "a model's name": (
        {"models": {"m": {"context_windw": 3}}},
        "models.m.context_windw: no such setting",
    ),
    "an alert's name": ({"alerts": {"slack_webhok": "env:URL"}}, "alerts.slack_webhok: no such setting"),
    "an alert's type": ({"alerts": [{"slack_webhook": 3}]}, "alerts[0].slack_webhook: must be a text"),
    "a function": ({"on_trip": 3}, "on_trip = 3: input should be callable"),
    "a store": ({"store": "sqlit:///x"}, "no such store"),
}
OWN: dict[str, tuple[Callable[[], Any], str]] = {
    "Budget name": (lambda: Budget(usdd=5), "Budget.usdd: no such setting; did you mean 'usd'?"),
    "Budget type": (lambda: Budget(usd="x"), "usd = 'x': not a number of dollars"),
    "Budget scope": (lambda: Budget(usd=5, per="usr"), "per = 'usr': no scope 'usr'; did you mean 'user'?"),
    "Budget threshold": (lambda: Budget(usd=5, thresholds=["x"]), "thresholds"),
    "Threshold name": (lambda: Threshold(0.5, recuring=True), "Threshold.recuring: no such setting"),
    "Threshold type": (lambda: Threshold("x"), "percent must be a fraction"),
    "Threshold missing": (lambda: Threshold(), "Threshold.percent: missing"),
    "ToolRule name": (lambda: ToolRule(poling=True), "ToolRule.poling: no such setting; did you mean 'polling'?"),
    "ToolRule type": (
        lambda: ToolRule(failed=3),
        "failed = 3: input should be a valid dictionary or callable",
    ),
    "ToolRule position": (
        lambda: ToolRule(True),
        "ToolRule takes no settings without a name",
    ),
    "tool name": (lambda: runguard.tool(poling=True), "poling: no such setting; did you mean 'polling'?"),
    "Price name": (lambda: Price(inputt=3, output=1), "Price.inputt: no such setting; did you mean 'input'?"),
    "Price tier": (
        lambda: Price(input=1, output=2, tiers=[{"above": 9, "inputt": 3, "output": 4}]),
        "Price.tiers.0.inputt: no such setting; did you mean 'input'?",
    ),
    "ModelLimits name": (lambda: ModelLimits(context_windw=3), "ModelLimits.context_windw: no such setting"),
    "rule": (
        lambda: Policy(rules={"repetiton": {"stop": 3}}),
        "rules.repetiton: no such rule; did you mean",
    ),
    "rung": (
        lambda: Policy(rules={"repetition": {"stp": 3}}),
        "rules.repetition.stp: no such rung; did you",
    ),
    "rung type": (lambda: Policy(rules={"repetition": {"stop": "x"}}), "rules.repetition.stop = 'x'"),
    "BudgetPolicy name": (lambda: BudgetPolicy(max_tokns=5), "BudgetPolicy.max_tokns: no such setting"),
    "BudgetPolicy type": (lambda: BudgetPolicy(max_tokens="x"), "max_tokens must be a whole number"),
    "BudgetMonitor name": (
        lambda: BudgetMonitor(max_tokns=5),
        "BudgetMonitor.max_tokns: no such setting",
    ),
    "BudgetMonitor type": (lambda: BudgetMonitor("x"), "max_tokens must be a whole number"),
    "BudgetPlugin name": (
        lambda: BudgetPlugin(BudgetPolicy(9), nam="x"),
        "BudgetPlugin.nam: no such setting",
    ),
    "BudgetPlugin type": (lambda: BudgetPlugin(3), "policy_or_monitor = 3: give a BudgetPolicy or a BudgetMonitor"),
    "budget= name": (lambda: guard(call, budget={"max_usdd": 3}), "budget.max_usdd: no such setting"),
    "budget= type": (lambda: guard(call, budget={"max_usd": "x"}), "budget.max_usd = 'x': not a number"),
    "budget= window": (
        lambda: guard(call, budget={"per_day": {"usd": 3}}),
        "budget.per_day.usd: no such",
    ),
    "loop= name": (lambda: guard(call, loop={"repeatss": 3}), "loop.repeatss: no such setting"),
    "loop= type": (lambda: guard(call, loop={"repeats": "x"}), "loop.repeats = 'x': input should be"),
    "breaker= name": (
        lambda: guard(call, breaker={"failurs": 3}),
        "breaker.failurs: no such setting",
    ),
    "context= name": (
        lambda: guard(call, context={"headrom": 3}),
        "context.headrom: no such setting",
    ),
    "name= type": (lambda: guard(call, name=3), "name = 3: give a text"),
    "run user": (lambda: enter_run(user=3), "user = 3: give a text"),
}
CONDITIONS = [
    kind
    for kind in (getattr(termination, name) for name in termination.__all__)
    if isinstance(kind, type)
    and issubclass(kind, termination.TerminationCondition)
    and kind not in (termination.TerminationCondition, termination.RuleTermination)  # the latter takes rungs by name
]


def message_of(make: Callable[[], Any]) -> str:
    with pytest.raises(PolicyError) as raised:
        make()
    text = str(raised.value)
    assert "\n" not in text
    assert "pydantic" not in text
    return text


@each_row("wrong", WRONG_IN_A_POLICY)
@each_row("door", DOORS)
def test_wrong_settings_of_a_policy(door: str, wrong: str) -> None:
    keywords, expected = WRONG_IN_A_POLICY[wrong]
    assert expected in message_of(lambda: DOORS[door](**keywords))


@each_row("wrong", OWN)
def test_wrong_settings_elsewhere(wrong: str) -> None:
    make, expected = OWN[wrong]
    assert expected in message_of(make)


@each_row("kind", CONDITIONS)
def test_wrong_name_in_a_termination_condition(kind: Any) -> None:
    text = message_of(lambda: kind(max_mesages=3))
    assert text.startswith(f"{kind.__name__}.max_mesages: no such setting")


def test_wrong_type_in_a_termination_condition() -> None:
    kind: Any = termination.MaxMessageTermination
    assert message_of(lambda: kind("x")) == "max_messages = 'x': give a whole number"


@pytest.mark.parametrize("wrong", [name for name in WRONG_IN_A_POLICY if name != "a function"])
def test_wrong_settings_in_a_file(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keywords, expected = WRONG_IN_A_POLICY[wrong]
    file = tmp_path / "runguard.toml"
    file.write_text("\n".join(f"{name} = {toml(value)}" for name, value in keywords.items()))
    monkeypatch.setenv("RUNGUARD_POLICY", str(file))
    text = message_of(Policy.build)
    assert expected in text
    assert str(file) in text


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
