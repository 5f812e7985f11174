"""LangChain's adapter plays every conformance scenario in every mode."""

import pytest

from runguard.testing import conformance
from tests.frameworks.langchain_harness import LangChainHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(LangChainHarness(), name, mode)
