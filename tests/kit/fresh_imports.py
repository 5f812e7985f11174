"""What fresh processes have imported: ADK with all that its first run imports, and RunGuard without any guard."""

import asyncio
from contextlib import suppress

from google.adk.agents import LlmAgent

import runguard.adk  # noqa: F401
from runguard.testing import ScriptedModel, call, run, text

with suppress(ImportError):  # not every environment has A2A
    from tests.kit import a2a_servers  # noqa: F401


def look(n: int) -> dict[str, int]:
    return {"n": n}


asyncio.run(run(LlmAgent(name="first", model=ScriptedModel([call("look", n=1), text("done")]), tools=[look])))
