"""The table of ``make bench``: what RunGuard costs, from short forms of the benchmarks, in about two minutes.

    python benchmarks/table.py

Shares and ratios are taken within one process, in turns with a program that does without RunGuard. Counts do not move
with the load of the machine. ``benchmarks/README.md`` names the benchmark behind each line.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def of(name: str, *options: str) -> Any:
    """Return what a benchmark prints as JSON."""
    command = [sys.executable, str(HERE / name), "--json", *options]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def adk() -> Iterator[tuple[str, str]]:
    sizes = of("hooks_sizes.py", "--quick")["sizes"]
    for size, row in sizes.items():
        shares = sorted((row["added"], row["added_fastest"]))
        yield f"share of an ADK step, answer of {int(size) // 1000:,} kB", " to ".join(f"{s:.1%}" for s in shares)
    found = of("cold.py", "--quick")
    work = found["work"]
    yield "hooks of a model and a tool step, warm", f"{found['warm']['added']:.0f} µs"
    yield "the same with cold caches", f"{found['cold']['added']:.0f} µs"
    yield "the same in Python calls", f"{work['calls']}"
    yield "the same in bytecode instructions", f"{work['instructions']:,}"
    yield "the same in distinct functions", f"{work['functions']}"


def functions() -> Iterator[tuple[str, str]]:
    for name, row in of("guarded_functions.py", "--quick").items():
        yield f"guard: {name}", f"{row['us']:.1f} µs, {row['calls']:.0f} Python calls"


def growth() -> Iterator[tuple[str, str]]:
    for name, row in of("growth.py", "--quick").items():
        early, late = row["10"], row[max(row, key=int)]
        yield f"{name}: late step beside an early one", f"{late[1] / early[1]:.2f} times the instructions"


def fleet() -> Iterator[tuple[str, str]]:
    for row in of("fleet.py", "--quick")["rows"]:
        if row["workers"] == 16:
            name = f"Valkey, 16 workers, {row['accounts']}, {row['way']}"
            yield name, f"{row['calls_per_second']:,} calls/s, p99 {row['p99_ms']} ms, server {row['server_us']} µs"


def main() -> None:
    began = time.monotonic()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"google-adk {version('google-adk')}\n\n| what | figure |\n|---|---|"
    )
    for part in (adk, functions, growth, fleet):
        for name, figure in part():
            print(f"| {name} | {figure} |", flush=True)
    print(f"\nTook {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
