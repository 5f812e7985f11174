"""Every benchmark finds what it measures: a renamed function must not wait for the day on which somebody measures
again.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("script", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_benchmark_can_be_started(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {script}"], cwd=FOLDER, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
