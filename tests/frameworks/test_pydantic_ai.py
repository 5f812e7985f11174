"""The Pydantic AI adapter plays every conformance scenario."""

import pytest

from runguard.testing import conformance
from tests.frameworks.pydantic_harness import PydanticAIHarness


@pytest.mark.parametrize("name", conformance.SCENARIOS)
async def test_scenario(name: str) -> None:
    await conformance.check(PydanticAIHarness(), name)
