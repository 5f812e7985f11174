"""Every name in docs/reference/aliases.md exists, both forms of a setting do the same; keywords follow the policy."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import runguard
import runguard.adk
from runguard import Budget
from runguard.calls.function_settings import ELSEWHERE, ONLY_AGENTS, GuardSettings
from runguard.calls.functions import _OWN, _settings
from runguard.policy import RULES, Policy
from runguard.policy.keywords import CommonSettings, FunctionSettings, PolicySettings
from runguard.termination import AndTerminationCondition, MaxMessageTermination, OrTerminationCondition
from tests.kit.examples import each_row

DOCS = Path(runguard.__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "aliases.md"


def rows(heading: str) -> list[tuple[str, str]]:
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(.+?)` \| (.+?) \|$", section, re.MULTILINE)
    assert found, heading
    return [(name, modern.replace("\\|", "|")) for name, modern in found]


def keywords(text: str) -> dict[str, Any]:
    made: dict[str, Any] = eval(f"dict({text.strip('`')})", {"Budget": Budget})
    return made


def effect(policy: Policy) -> Any:
    """What a policy does: the rungs of every rule, and the settings that are not just another way to write them."""
    rungs = {rule: (policy.rungs(rule), policy.is_explicit(rule)) for rule in RULES}
    return rungs, policy.model_dump(exclude={"rules", "max_identical_tool_results", "max_event_cost_ratio"})


@each_row(("seed", "modern"), rows("Settings of `install`, `RunGuardPlugin` and `ADKCostBreaker`"))
def test_settings_of_a_policy_do_the_same(seed: str, modern: str) -> None:
    assert effect(Policy.build(**keywords(seed))) == effect(Policy.build(**keywords(modern)))


def of_guard(text: str) -> tuple[GuardSettings, Any]:
    settings = _settings(keywords(text))
    return settings, effect(settings.policy)


@pytest.mark.parametrize(("seed", "modern"), rows("Settings of `guard` and `guard_async`"))
def test_settings_of_a_guarded_function_do_the_same(seed: str, modern: str) -> None:
    assert of_guard(seed) == of_guard(modern)


@pytest.mark.parametrize(("seed", "modern"), rows("Conditions"))
def test_conditions_do_the_same(seed: str, modern: str) -> None:
    names = {
        "a": MaxMessageTermination(3),
        "b": MaxMessageTermination(5),
        "OrTerminationCondition": OrTerminationCondition,
        "AndTerminationCondition": AndTerminationCondition,
    }
    first, second = eval(seed, names), eval(modern.strip("`"), names)
    assert type(first) is type(second)
    assert first.conditions == second.conditions


@each_row("name", [name for name, _ in rows("Classes, functions and members")])
def test_every_name_exists(name: str) -> None:
    found: Any = runguard
    for part in name.split(".")[1:]:
        if isinstance(found, type) and part in getattr(found, "__annotations__", {}):
            return
        found = getattr(found, part)


def test_the_same_names_are_the_same_objects() -> None:
    for name, modern in rows("Classes, functions and members"):
        for path in re.findall(r"`(runguard\.[\w.]+)`", modern):
            found: Any = runguard
            for part in path.split(".")[1:]:
                found = getattr(found, part)
            if path.rpartition(".")[2] == name.rpartition(".")[2]:
                assert found is getattr(runguard, name.rpartition(".")[2])


def test_the_page_is_linked() -> None:
    assert "reference/aliases.md" in (DOCS / "coming-from.md").read_text(encoding="utf-8")
    assert "aliases" in (DOCS / "reference" / "index.md").read_text(encoding="utf-8")


# ---- The typed keywords are those of the policy and of guarded functions --------------------------------------------


def test_the_keywords_are_written_from_the_policy() -> None:
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "settings_table.py"))
    assert made["KEYWORDS"].read_text(encoding="utf-8") == made["keywords"](), "run: python docs/settings_table.py"


def test_an_agents_guard_takes_every_setting_of_the_policy() -> None:
    assert set(PolicySettings.__annotations__) == set(Policy.model_fields)


def test_a_functions_guard_takes_what_is_not_about_agents() -> None:
    shared = set(Policy.model_fields) - set(ELSEWHERE) - ONLY_AGENTS - {"tokens"}
    assert set(CommonSettings.__annotations__) == shared
    assert set(FunctionSettings.__annotations__) == shared | set(_OWN) | {"name"}
