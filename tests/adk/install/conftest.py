from collections.abc import Iterator

import pytest

import runguard
from runguard.adk import patching


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """Every test starts and ends without an installed guard, and without guards of earlier tests that something still
    holds.
    """
    runguard.uninstall()
    patching.IN_USE.plugins.clear()
    patching.IN_USE.per_agent.clear()
    patching.IN_USE.of_models.clear()
    patching.IN_USE.has_agent_conditions = False
    patching.unwrap_adk_if_unused()
    yield
    runguard.uninstall()
