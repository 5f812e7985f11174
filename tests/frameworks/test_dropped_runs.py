"""Runs that fail, are cancelled or are dropped: the collector ends them, and nothing hangs or stays open."""

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
        return Reply(error=ConnectionError("down")) if KIND == "failed" else Reply(waits=True)

    async def one(harness, guard):
        session = harness.session(AgentSpec(script, tools={"look": lambda n: "x"}), guard)
        turn = asyncio.ensure_future(session.turn("go"))
        if KIND == "cancelled":
            while session.model_calls < 2:
                await asyncio.sleep(0)
            turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)

    async def main():
        harness = Harness()
        guard = harness.guard(max_usd=1_000, prices={MODEL: {"input": 1, "output": 1}})
        await one(harness, guard)
        gc.collect()
        gc.freeze()
        THRESHOLD
        for _ in range(RUNS):
            await one(harness, guard)
        gc.collect()
        await asyncio.sleep(0.05)
        assert FINALIZED.flush(10)
        return guard

    guard = asyncio.run(main())
    gc.unfreeze()
    gc.collect()
    assert FINALIZED.flush(10)
    assert len(guard.guard.runs) == 0, len(guard.guard.runs)
    assert guard.spend()["reserved_usd"] == 0, guard.spend()
"""


@pytest.mark.parametrize("threshold", ["pass", "gc.set_threshold(1)"])
@pytest.mark.parametrize("kind", ["failed", "cancelled"])
@pytest.mark.parametrize("framework", HARNESSES)
def test_the_collector_ends_what_no_hook_ends(framework: str, kind: str, threshold: str) -> None:
    code = textwrap.dedent(CODE).replace("HARNESS", HARNESSES[framework]).replace("THRESHOLD", threshold)
    code = f"KIND, RUNS = {kind!r}, {150 if threshold == 'pass' else 40}\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3_000:]
