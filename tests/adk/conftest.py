"""A clean process between tests, and no imports that fail again and again."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import runguard

# ADK tries these imports again and again while it runs; where the package behind is missing, each try compiles the module anew.
_OPTIONAL = {
    "anthropic": "google.adk.models.anthropic_llm",
    "litellm": "google.adk.models.lite_llm",
    "a2a": "google.adk.agents.remote_a2a_agent",
}
for package, module in _OPTIONAL.items():
    if find_spec(package) is None:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the environment's policy or another test's installed guard."""
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield
    runguard.uninstall()
