"""A clean process between tests, and how much is tried: a sample, or everything with ``RUNGUARD_FAULTS=long`` (``make
faults``).
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import runguard
from runguard.adk.patching import IN_USE

# ADK tries this import again and again while it runs; where the package behind is missing, each try compiles the module
# anew.
if find_spec("a2a") is None:
    sys.modules.setdefault("google.adk.agents.remote_a2a_agent", None)  # type: ignore[arg-type]


@pytest.fixture
def is_long() -> bool:
    """Whether everything is to be tried that can be."""
    return os.environ.get("RUNGUARD_FAULTS") == "long"


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees another test's installed guard."""
    for name in ("has_agent_conditions", "has_run_conditions"):
        monkeypatch.setattr(IN_USE, name, False)
    yield
    runguard.uninstall()
