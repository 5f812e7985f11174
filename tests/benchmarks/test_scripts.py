"""Every benchmark finds what it measures: a renamed function must not wait for the day on which somebody measures
again.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
ELSEWHERE = ("frameworks",)  # needs the other frameworks: tests/frameworks starts it
IMPORT_ALL = """
import importlib, sys, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException:
        print(name, traceback.format_exc(), sep=": ")
"""


def test_every_benchmark_can_be_started() -> None:
    scripts = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ELSEWHERE)
    assert scripts
    command = [sys.executable, "-c", IMPORT_ALL, *scripts]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == ""
