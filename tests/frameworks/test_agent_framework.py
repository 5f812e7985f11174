"""The middleware for Microsoft Agent Framework plays every conformance scenario."""

import pytest

from runguard.testing import conformance

pytest.importorskip("agent_framework", reason="agent-framework-core is not among the oldest supported frameworks")
from tests.frameworks.agent_framework_harness import AgentFrameworkHarness


@pytest.mark.parametrize(("name", "mode"), conformance.CASES)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(AgentFrameworkHarness(), name, mode)
