"""The OpenAI Agents adapter plays every conformance scenario."""

import pytest

from runguard.testing import conformance
from tests.frameworks.openai_harness import OpenAIAgentsHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(OpenAIAgentsHarness(), name, mode)
