import gc
from collections.abc import Iterator

import pytest

import runguard
from runguard.adk import runners


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """Every test starts and ends without an installed guard, and without guards that earlier tests dropped."""
    runguard.uninstall()
    gc.collect()
    runners.unpatch_if_unused()
    yield
    runguard.uninstall()
