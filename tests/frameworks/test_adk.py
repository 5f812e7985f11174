"""The ADK adapter plays every conformance scenario."""

import pytest

from runguard.testing import conformance
from tests.frameworks.adk_harness import AdkHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(AdkHarness(), name, mode)
