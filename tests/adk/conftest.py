"""A clean process between tests, and quick ones on old versions of ADK."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import runguard

# Old versions of ADK try these imports before every model call; where the package behind is missing, each try compiles the module anew.
for package, module in (("anthropic", "google.adk.models.anthropic_llm"), ("litellm", "google.adk.models.lite_llm")):
    if find_spec(package) is None:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the environment's policy or another test's installed guard."""
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)
    yield
    runguard.uninstall()
