"""The typed keywords have the names and the descriptions of the policy."""

import ast
import inspect
from collections.abc import Mapping

import pytest

from runguard.calls.function_settings import _NOT_HERE, _PLACES
from runguard.calls.functions import _OWN
from runguard.policy import Policy
from runguard.policy import settings as typed_settings
from runguard.policy.settings import CommonSettings, FunctionSettings, PolicySettings


def descriptions() -> Mapping[str, str]:
    """The text under each keyword."""
    found = {}
    for node in ast.parse(inspect.getsource(typed_settings)).body:
        if isinstance(node, ast.ClassDef) and node.name in ("CommonSettings", "PolicySettings"):
            for one, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    assert isinstance(after, ast.Expr), f"{one.target.id} has no description"
                    found[one.target.id] = ast.literal_eval(after.value)
    return found


def test_an_agents_guard_takes_every_setting_of_the_policy() -> None:
    assert set(PolicySettings.__annotations__) == set(Policy.model_fields)


def test_a_functions_guard_takes_what_is_not_about_agents() -> None:
    shared = set(Policy.model_fields) - set(_PLACES) - _NOT_HERE - {"tokens"}
    assert set(CommonSettings.__annotations__) == shared
    assert set(FunctionSettings.__annotations__) == shared | set(_OWN) | {"name"}


@pytest.mark.parametrize("name", Policy.model_fields)
def test_descriptions_are_those_of_the_policy(name: str) -> None:
    assert descriptions()[name] == Policy.model_fields[name].description
