"""How many machine instructions RunGuard adds to a step of a real ADK run, counted by valgrind.

    python benchmarks/instructions.py [--steps 20] [--json]

The load of the machine does not move a count of instructions, as it moves every time. One process under callgrind runs
a real ``Runner`` with a scripted model: first with a plugin that does nothing, then with RunGuard, each once to warm
up. Counting starts when everything is imported. Needs valgrind (``apt install valgrind``, ``dnf install valgrind``,
``brew install valgrind`` on Linux); without it the program says so and ends with 2. Takes about two minutes.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MISSING = (
    "This benchmark needs valgrind, which was not found: install it (Debian, Ubuntu: apt install valgrind; "
    "Fedora: dnf install valgrind), then run it again."
)
TOOLS = ("valgrind", "callgrind_control")


# ---- under valgrind -------------------------------------------------------------------------------------------------


def control(*options: str) -> None:
    subprocess.run(["callgrind_control", *options, str(os.getpid())], check=True, capture_output=True)


async def work(steps: int) -> None:
    from google.adk.plugins.base_plugin import BasePlugin

    from hooks import NoOpPlugin, one_run
    from runguard.adk import RunGuardPlugin

    kinds: dict[str, Callable[[], list[BasePlugin]]] = {
        "no-op plugin": lambda: [NoOpPlugin(name="noop")],
        "RunGuard": lambda: [RunGuardPlugin()],
        "RunGuard, max_usd": lambda: [RunGuardPlugin(max_usd=100, on_unpriced={"input": 1, "output": 4})],
    }
    for make in kinds.values():
        await one_run(make(), 5)
    control("--instr=on")
    for name, make in kinds.items():
        plugins = make()
        await one_run(plugins, 2)
        for count in (steps, 3 * steps):
            control("--zero")
            await one_run(plugins, count)
            control(f"--dump={name}/{count}")


# ---- around it ------------------------------------------------------------------------------------------------------


def counted(steps: int) -> dict[str, float]:
    """Instructions per step, by plugin."""
    with tempfile.TemporaryDirectory(prefix="runguard-instructions-") as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        program = [sys.executable, str(HERE / "instructions.py"), "--work", "--steps", str(steps)]
        surroundings = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(HERE)}
        done = subprocess.run([*command, *program], env=surroundings, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"valgrind ended with {done.returncode}:\n{done.stderr[-2_000:]}")
        counts: dict[str, dict[int, int]] = {}
        for dump in sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])):
            text = dump.read_text(errors="replace")
            trigger = re.search(r"^desc: Trigger: dump (.*)/(\d+)$", text, re.MULTILINE)
            total = re.search(r"^summary: (\d+)", text, re.MULTILINE)
            if trigger and total:
                counts.setdefault(trigger[1], {})[int(trigger[2])] = int(total[1])
    # the difference of a long and a short run: what a run costs beside its steps falls out
    return {name: (found[3 * steps] - found[steps]) / (2 * steps) for name, found in counts.items()}


def report(found: dict[str, float]) -> str:
    base = found["no-op plugin"]
    lines = ["| | instructions per step | added | added, % |\n|---|---|---|---|"]
    for name, count in found.items():
        lines.append(f"| {name} | {count:,.0f} | {count - base:,.0f} | {100 * (count / base - 1):.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="model and tool steps of a run")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)  # the process that is counted
    options = parser.parse_args()
    if options.work:
        asyncio.run(work(options.steps))
        return 0
    if any(shutil.which(tool) is None for tool in TOOLS):
        print(MISSING, file=sys.stderr)
        return 2
    found: dict[str, Any] = counted(options.steps)
    print(json.dumps(found, indent=1) if options.json else report(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
