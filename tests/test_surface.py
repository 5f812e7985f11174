"""The public names, and what importing them costs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runguard
from tests.kit.examples import each_row

SOURCE = Path(runguard.__file__).parent

# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert runguard.__all__ == [
        "ADKCostBreaker",
        "AndTerminationCondition",
        "BreakerState",
        "Budget",
        "BudgetExceededError",
        "BudgetMonitor",
        "BudgetPlugin",
        "BudgetPolicy",
        "BudgetStatus",
        "CircuitOpenError",
        "CompressionTriggered",
        "ContextOverflowError",
        "CostGrowthError",
        "CostTermination",
        "DeadlineExceededError",
        "Decision",
        "ExternalTermination",
        "FinalAnswerTermination",
        "Finding",
        "FunctionCallTermination",
        "FunctionalTermination",
        "GuardFailedError",
        "GuardedLlm",
        "HandoffTermination",
        "InstallError",
        "LimitExceededError",
        "LoopDetectedError",
        "MaxIterationsTermination",
        "MaxMessageTermination",
        "ModelLimits",
        "NoProgressTermination",
        "OrTerminationCondition",
        "Policy",
        "PolicyError",
        "Price",
        "RemoteAgent",
        "RuleTermination",
        "RunGuardError",
        "RunGuardPlugin",
        "RunStoppedError",
        "Scope",
        "StateTermination",
        "TerminatedError",
        "TerminationCondition",
        "TerminationPlugin",
        "TerminationResult",
        "TextMentionTermination",
        "Threshold",
        "TimeoutTermination",
        "TokenUsageTermination",
        "ToolRule",
        "Trip",
        "UnpricedModelError",
        "guard",
        "guard_async",
        "install",
        "run",
        "terminate",
        "termination_reason",
        "tool",
        "trip",
        "uninstall",
    ]


@each_row("name", runguard.__all__)
def test_every_public_name_is_there(name: Any) -> None:
    assert getattr(runguard, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = runguard.no_such_name


@each_row(
    ("name", "module"),
    [
        ("RunGuardMiddleware", "runguard.langchain"),
        ("GuardedChatModel", "runguard.langchain"),
        ("guarded", "runguard.openai_agents"),
        ("AgentGuard", "runguard.openai_agents"),
        ("RunGuard", "runguard.pydantic_ai, runguard.strands or runguard.agent_framework"),
        ("RunGuardInterceptor", "runguard.agent_hooks"),
        ("RunGuardGateway", "runguard.litellm"),
    ],
)
def test_the_guard_of_another_framework_is_told_with_its_module(name: str, module: str) -> None:
    for statement in (f"from runguard import {name}", f"import runguard; runguard.{name}"):
        with pytest.raises(ImportError, match=f"^import {name} from {module}$"):
            exec(statement)
    for each in module.replace(" or ", ", ").split(", "):
        (file,) = (*SOURCE.glob(f"{each.partition('.')[2]}.py"), *SOURCE.glob(f"{each.partition('.')[2]}/__init__.py"))
        assert f'"{name}"' in file.read_text()


def test_a_name_of_runguard_itself_is_not_found_in_a_package_of_it() -> None:
    with pytest.raises(ImportError, match=r"^runguard\.adk has no Budget; write: from runguard import Budget$"):
        exec("from runguard.adk import Budget")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from runguard.adk import Nonsense")


def test_dir_shows_the_public_names() -> None:
    assert set(dir(runguard)) == {*runguard.__all__, "__version__"}


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()


# ---- what importing costs -------------------------------------------------------------------------------------------


def modules_after(statement: str) -> set[str]:
    """The modules that ``statement`` loads in a fresh interpreter."""
    script = (
        f"import sys, json; before = set(sys.modules); exec({statement!r}); "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    return set(
        json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    )


def third_party(modules: set[str]) -> set[str]:
    return {top for name in modules if (top := name.split(".")[0]) not in sys.stdlib_module_names and top != "runguard"}


def test_importing_the_package_loads_nothing_else_and_little_at_that() -> None:
    loaded = modules_after("import runguard")
    assert third_party(loaded) == set()
    assert {name for name in loaded if name.startswith("runguard")} == {"runguard"}
    assert len(loaded) < 60


@pytest.mark.parametrize(
    "name",
    [
        "Trip",
        "trip",
        "Finding",
        "Budget",
        "Threshold",
        "BudgetMonitor",
        "BreakerState",
        "RunStoppedError",
        "LoopDetectedError",
    ],
)
def test_names_of_the_pure_part_load_no_third_party_module(name: str) -> None:
    assert third_party(modules_after(f"import runguard; runguard.{name}")) == set()


@pytest.mark.parametrize("statement", ["import runguard; runguard.Policy", "import runguard.engine.guard"])
def test_policy_and_guard_do_without_any_framework(statement: str) -> None:
    assert "google" not in third_party(modules_after(statement))


def test_without_adk_the_error_says_what_to_install() -> None:
    script = """
import sys
sys.modules["google"] = None
sys.modules["google.adk"] = None
import runguard
try:
    runguard.install
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "runguard-agents[adk]" in said
