"""What the hooks cost in a real run, where each runs once in a few milliseconds and finds the caches cold.

    python benchmarks/cold.py [--quick] [--json]

Between two steps a checksum over a large block of memory and the handling of some events push code and data out of the
caches, as ADK, a client library and the answer of a model do in a real run. Then the hooks of one model and tool step
are called and timed alone, for RunGuard and for a plugin that does nothing, in turns. Beside it the same steps without
anything in between. CPU time of the thread; the ratios move less than the microseconds. What no load moves: how many
Python calls, bytecode instructions and distinct functions of RunGuard a step takes. Cold, the last one counts most.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

from google.adk.events import Event
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.sessions import InMemorySessionService

from hooks import UNLIMITED, Drive, NoOpPlugin
from runguard.adk import RunGuardPlugin

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.work import Work

EVICTED = 8 * 2**20  # bytes, several times a core's own cache
SHAPE = "structured"


class OtherWork:
    """What pushes the hooks out of the caches."""

    def __init__(self, event: Event) -> None:
        self._block, self._text = bytearray(os.urandom(1024)) * (EVICTED // 1024), event.model_dump_json()

    def __call__(self) -> None:
        zlib.crc32(self._block)
        for _ in range(3):
            Event.model_validate_json(self._text).model_copy(deep=True)


async def steps_of(plugin: BasePlugin, name: str) -> Drive:
    service = InMemorySessionService()
    session = await service.create_session(app_name="app", user_id="u")
    drive = await Drive(plugin, session, service, SHAPE, name).begin()
    await drive.steps(100)
    return drive


async def measured(count: int) -> dict[str, dict[str, float]]:
    """Median CPU microseconds of the hooks of one step: cold and warm, above the no-op plugin, and as a ratio to it."""
    guard = RunGuardPlugin(**UNLIMITED)
    drives = {"RunGuard": await steps_of(guard, "guarded"), "no-op": await steps_of(NoOpPlugin(name="noop"), "idle")}
    work = OtherWork(drives["RunGuard"].answer_event)
    out: dict[str, dict[str, float]] = {}
    gc.collect()
    gc.freeze()
    gc.disable()
    for where in ("cold", "warm"):
        spent: dict[str, list[float]] = {name: [] for name in drives}
        for number in range(count):
            for name in (*drives,) if number % 2 else (*reversed(drives),):
                if where == "cold":
                    work()
                else:
                    await drives[name].steps(1)
                start = time.thread_time_ns()
                await drives[name].steps(1)
                spent[name].append((time.thread_time_ns() - start) / 1e3)
        medians = {name: median(times) for name, times in spent.items()}
        pairs = zip(spent["RunGuard"], spent["no-op"], strict=True)
        out[where] = {
            **medians,
            "added": median(ours - idle for ours, idle in pairs),
            "ratio": medians["RunGuard"] / medians["no-op"],
        }
    gc.enable()
    assert not guard.snapshot()["guard_errors"], "the guard failed on these objects: nothing was measured"
    assert not guard.trips, "the guard stopped the run: nothing was measured"
    return out


async def counted() -> dict[str, int]:
    """Return what RunGuard's own code does in the hooks of one model and tool step."""
    drive, work = await steps_of(RunGuardPlugin(**UNLIMITED), "counted"), Work()
    with work.counted():
        await drive.steps(1)
    return {"calls": work.calls, "instructions": work.instructions, "functions": len(work.codes)}


def report(found: dict[str, dict[str, float]], work: dict[str, int]) -> str:
    lines = [
        "CPU microseconds of the hooks of one model and tool step, structured answer of 1 kB",
        "| caches | no-op plugin | RunGuard | added | x no-op |\n|---|---|---|---|---|",
    ]
    for where, row in found.items():
        lines.append(
            f"| {where} | {row['no-op']:.0f} | {row['RunGuard']:.0f} | {row['added']:.0f} | {row['ratio']:.1f} |"
        )
    lines += [
        f"\nWhat RunGuard adds is {found['cold']['added'] / found['warm']['added']:.1f} x as much cold.",
        "A step takes {calls} Python calls, {functions} distinct functions and {instructions:,} instructions.".format(
            **work
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 steps of each instead of 1,000")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found: dict[str, Any] = asyncio.run(measured(100 if options.quick else 1_000))
    work = asyncio.run(counted())
    text = f"load {load:.1f}\n{report(found, work)}"
    print(json.dumps({**found, "work": work, "load": load}, indent=1) if options.json else text)


if __name__ == "__main__":
    main()
