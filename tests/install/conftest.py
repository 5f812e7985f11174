from collections.abc import Iterator

import pytest

import runguard
from runguard.adk import runners


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """Every test starts and ends without an installed guard, and without guards of earlier tests that something still
    holds.
    """
    runguard.uninstall()
    runners._watch.plugins.clear()
    runners._watch.per_agent.clear()
    runners._watch.of_models.clear()
    runners._watch.kept = False
    runners.unpatch_if_unused()
    yield
    runguard.uninstall()
