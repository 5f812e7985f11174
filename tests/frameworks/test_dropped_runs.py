"""Runs that fail, are cancelled or are dropped: the collector ends them, and nothing hangs or stays open."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.timeout(180)  # processes that import a framework
ROOT = Path(__file__).parents[2]
HARNESSES: Final = {
    "langchain": "from tests.frameworks.langchain_harness import LangChainHarness as Harness",
    "openai": "from tests.frameworks.openai_harness import OpenAIAgentsHarness as Harness",
    "pydantic": "from tests.frameworks.pydantic_harness import PydanticAIHarness as Harness",
}
RUNS: Final = 150 if os.environ.get("RUNGUARD_FAULTS") == "long" else 24
CODE: Final = """
    import asyncio, faulthandler, gc, logging, sys
    faulthandler.dump_traceback_later(150, exit=True)
    logging.disable(logging.CRITICAL)
    HARNESS
    from runguard.background import FINALIZED
    from runguard.testing.conformance import MODEL, AgentSpec, Reply

    def script(number, _):
        if number == 1:
            return Reply(calls=[("look", {"n": 1})])
        return Reply(error=ConnectionError("down")) if kind == "failed" else Reply(waits=True)

    async def one(harness, guard):
        session = harness.session(AgentSpec(script, tools={"look": lambda n: "x"}), guard)
        turn = asyncio.ensure_future(session.turn("go"))
        if kind == "cancelled":
            while session.model_calls < 2:
                await asyncio.sleep(0)
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)

    async def main(runs, threshold):
        harness = Harness()
        guard = harness.guard(max_usd=1_000, prices={MODEL: {"input": 1, "output": 1}})
        await one(harness, guard)
        gc.collect()
        gc.freeze()
        gc.set_threshold(threshold)
        for _ in range(runs):
            await one(harness, guard)
        gc.collect()
        await asyncio.sleep(0.05)
        assert FINALIZED.flush(10)
        return guard

    usual = gc.get_threshold()[0]
    for kind in ("failed", "cancelled"):
        for runs, threshold in ((RUNS, usual), (RUNS // 4, 1)):
            guard = asyncio.run(main(runs, threshold))
            gc.set_threshold(usual)
            gc.unfreeze()
            gc.collect()
            assert FINALIZED.flush(10)
            assert len(guard.guard.runs) == 0, (kind, threshold, len(guard.guard.runs))
            assert guard.spend()["reserved_usd"] == 0, (kind, threshold, guard.spend())
"""


@pytest.mark.parametrize("framework", HARNESSES)
def test_the_collector_ends_what_no_hook_ends(framework: str) -> None:
    code = textwrap.dedent(CODE).replace("HARNESS", HARNESSES[framework]).replace("RUNS", str(RUNS))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
