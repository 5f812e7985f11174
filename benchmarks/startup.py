"""What RunGuard adds to the start of an ADK program: milliseconds in fresh processes that have imported google.adk.

python benchmarks/startup.py [--runs 15] [--json]

The modules are compiled before the first measured process, as they are in an installed package.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median

TARGET_MS = 150
PROGRAM = """
import json, sys, time
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
before = set(sys.modules)
cpu, wall = [time.process_time()], [time.perf_counter()]
def lap():
    cpu.append(time.process_time())
    wall.append(time.perf_counter())
from runguard.adk import RunGuardPlugin
lap()
RunGuardPlugin(max_usd=1)
lap()
added = set(sys.modules) - before
print(json.dumps({
    "import": 1000 * (cpu[1] - cpu[0]),
    "construct": 1000 * (cpu[2] - cpu[1]),
    "both": 1000 * (cpu[2] - cpu[0]),
    "both, by the clock": 1000 * (wall[2] - wall[0]),
    "modules": len(added),
    "modules of others": len([name for name in added if not name.startswith("runguard")]),
}))
"""


def measured(cache: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = cache
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        measured(cache)  # compiles
        runs = [measured(cache) for _ in range(options.runs)]
    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    if options.json:
        print(json.dumps({"median": medians, "runs": options.runs, "target_ms": TARGET_MS}, indent=1))
        return
    print(f"RunGuardPlugin(max_usd=1) after google.adk, fresh processes (median of {options.runs})\n| | |\n|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value:.0f}{'' if name.startswith('modules') else ' ms'} |")
    added = medians["both"]
    print(f"\nadded: {added:.0f} ms of CPU, target <= {TARGET_MS}{'' if added <= TARGET_MS else ' (over)'}")


if __name__ == "__main__":
    main()
