"""The Strands plugin plays every conformance scenario."""

import pytest

from runguard.testing import conformance

pytest.importorskip("strands", reason="strands-agents is not among the oldest supported frameworks")
from tests.frameworks.strands_harness import StrandsHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(StrandsHarness(), name, mode)
