"""LangChain's adapter plays every conformance scenario."""

import pytest

from runguard.testing import conformance
from tests.frameworks.langchain_harness import LangChainHarness


@pytest.mark.parametrize("name", conformance.SCENARIOS)
async def test_scenario(name: str) -> None:
    await conformance.check(LangChainHarness(), name)
