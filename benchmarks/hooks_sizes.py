"""What RunGuard adds to a step of a real Runner whose tool answers with 1 kB, 10 kB, 60 kB or 1 MB of fields.

    python benchmarks/hooks_sizes.py [--quick] [--json]

CPU time of a model and tool step, interleaved with a plugin that does nothing, and the Python calls that RunGuard adds
to a step. Ratios are taken within one round, because CPU times move with the load of the machine and ratios hardly do.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService

from hooks import NoOpPlugin, script
from runguard import testing
from runguard.adk import RunGuardPlugin

SIZES = {1_000: 12, 10_000: 12, 60_000: 6, 1_000_000: 2}  # bytes of an answer -> steps of a run
GOALS = {1_000: 0.03, 60_000: 0.06}  # what RunGuard may add to a step
CALLS_GOAL = 120


def fields(size: int, page: int) -> dict[str, Any]:
    """Fields whose JSON has about ``size`` bytes, other ones on each page."""
    row = {"id": 0, "name": "", "ok": True, "price": 1.5}
    count = max(size // 62, 1)
    return {
        "page": page,
        "items": [{**row, "id": page * 10**6 + n, "name": f"item {n} of {page}"} for n in range(count)],
    }


async def one_run(plugins: list[BasePlugin], size: int, steps: int) -> float:
    """CPU seconds per step."""

    def lookup(query: str, page: int) -> dict[str, Any]:
        """Look something up."""
        return fields(size, page)

    agent = LlmAgent(name="worker", model=testing.ScriptedModel(script(steps)), tools=[lookup])
    runner = Runner(app=App(name="app", root_agent=agent, plugins=plugins), session_service=InMemorySessionService())
    gc.collect()
    gc.disable()
    start = time.thread_time()
    recording = await testing.run(agent, runner=runner)
    spent = time.thread_time() - start
    gc.enable()
    assert recording.texts == ["done"], "the run was disturbed"
    return spent / steps


KINDS: dict[str, Callable[[], list[BasePlugin]]] = {
    "no-op": lambda: [NoOpPlugin(name="noop")],
    "RunGuard": lambda: [RunGuardPlugin()],
}


async def times(size: int, steps: int, rounds: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in (*KINDS,) if number % 2 else reversed(KINDS):
            seconds = await one_run(KINDS[kind](), size, steps)
            if number:  # the first round warms up
                spent[kind].append(seconds)
    ratios = [guarded / idle - 1 for guarded, idle in zip(spent["RunGuard"], spent["no-op"], strict=True)]
    fastest = {kind: min(values) for kind, values in spent.items()}
    return {
        "step_us": 1e6 * fastest["no-op"],
        "added": median(ratios),
        "added_fastest": fastest["RunGuard"] / fastest["no-op"] - 1,
    }


async def python_calls(size: int) -> float:
    """Python calls that RunGuard adds to a step, from runs of 10 and 30 steps."""
    counted: dict[str, float] = {}
    for kind, plugins in KINDS.items():
        totals = []
        for steps in (10, 30):
            total = 0

            def count(frame: Any, event: str, arg: Any) -> None:
                nonlocal total
                total += event == "call"

            made = plugins()
            sys.setprofile(count)
            try:
                await one_run(made, size, steps)
            finally:
                sys.setprofile(None)
            totals.append(total)
        counted[kind] = (totals[1] - totals[0]) / 20
    return counted["RunGuard"] - counted["no-op"]


async def measure(quick: bool) -> dict[str, Any]:
    await one_run(KINDS["RunGuard"](), 1_000, 2)
    return {
        "sizes": {size: await times(size, steps, 3 if quick else 15) for size, steps in SIZES.items()},
        "python_calls": await python_calls(1_000),
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    yield "| answer | step with a no-op plugin | RunGuard adds (median) | of the fastest runs | goal |"
    yield "|---|---|---|---|---|"
    for size, row in result["sizes"].items():
        goal = f"{GOALS[size]:.0%}" if size in GOALS else ""
        added = f"{row['added']:.1%} | {row['added_fastest']:.1%}"
        yield f"| {size // 1000:,} kB | {row['step_us']:,.0f} µs | {added} | {goal} |"
    yield f"\nPython calls that RunGuard adds to a step with 1 kB: {result['python_calls']:.0f} (goal {CALLS_GOAL})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    result = asyncio.run(measure(options.quick))
    print(json.dumps(result, indent=1) if options.json else "\n".join(lines(result)))


if __name__ == "__main__":
    main()
