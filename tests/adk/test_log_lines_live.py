"""Hostile names of users, sessions and tools on real ADK: no record of the log contains a control character."""

import logging
import unicodedata
from typing import Any

import pytest

from runguard import Budget
from runguard.testing import ScriptedModel, call, text
from tests.kit.adk_runs import play
from tests.kit.money import agent, guard
from tests.kit.tools import step

HOSTILE = "eve\n2026-01-01 CRITICAL root: all is well\r\x1b[2J\x85\u2028\u202e"


async def test_no_log_record_of_a_run_with_hostile_names_contains_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "runguard")

    def fails(trip: Any) -> None:
        raise ValueError(HOSTILE)

    policy: dict[str, Any] = {
        "budgets": [Budget(usd="0.20", per="user"), Budget(tokens=20_000, per="session")],
        "on_trip": fails,
    }
    for script in ([call(HOSTILE, q=1)], [call("step", q=1)], [*(call("step", q=n) for n in range(30)), text("done")]):
        plugin = guard(**policy)
        # An unknown tool is an exception on older versions of ADK.
        await play(
            agent("a", ScriptedModel(script), tools=[step]),
            plugins=[plugin],
            user_id=HOSTILE,
            session_id=HOSTILE,
            catch=True,
        )
        assert plugin.flush(5)
    messages = [record.getMessage() for record in caplog.records if record.name == "runguard"]
    assert any("eve\\n2026" in message for message in messages), "the threshold warning names the user"
    for message in messages:
        assert [sign for sign in message if unicodedata.category(sign) in ("Cc", "Zl", "Zp") or sign == "\u202e"] == []
