"""A clean process between tests, and no imports that fail again and again."""

import asyncio
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from google.adk.agents import LlmAgent

import runguard
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.money import looked_through

# ADK tries these imports again and again while it runs; where the package behind is missing, each try compiles the
# module anew.
_OPTIONAL = {
    "anthropic": "google.adk.models.anthropic_llm",
    "litellm": "google.adk.models.lite_llm",
    "a2a": "google.adk.agents.remote_a2a_agent",
}
for package, module in _OPTIONAL.items():
    if find_spec(package) is None:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def warm_process() -> None:
    """One run before all: what ADK imports in its first one takes half a second, which is no business of a test about
    time.
    """

    def look(n: int) -> dict[str, int]:
        return {"n": n}

    agent = LlmAgent(name="first", model=ScriptedModel([call("look", n=1), text("done")]), tools=[look])
    asyncio.run(run(agent, "go", plugins=[RunGuardPlugin()]))


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """No test sees another test's installed guard, and no guard that it makes keeps money reserved."""
    with looked_through():
        yield
    runguard.uninstall()
