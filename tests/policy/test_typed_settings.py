"""The typed keywords are those of the policy and of guarded functions."""

import runpy
from pathlib import Path

from runguard.calls.function_settings import ELSEWHERE, ONLY_AGENTS
from runguard.calls.functions import _OWN
from runguard.policy import Policy
from runguard.policy.keywords import CommonSettings, FunctionSettings, PolicySettings


def test_the_keywords_are_written_from_the_policy() -> None:
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "settings_table.py"))
    assert made["KEYWORDS"].read_text(encoding="utf-8") == made["keywords"](), "run: python docs/settings_table.py"


def test_an_agents_guard_takes_every_setting_of_the_policy() -> None:
    assert set(PolicySettings.__annotations__) == set(Policy.model_fields)


def test_a_functions_guard_takes_what_is_not_about_agents() -> None:
    shared = set(Policy.model_fields) - set(ELSEWHERE) - ONLY_AGENTS - {"tokens"}
    assert set(CommonSettings.__annotations__) == shared
    assert set(FunctionSettings.__annotations__) == shared | set(_OWN) | {"name"}
