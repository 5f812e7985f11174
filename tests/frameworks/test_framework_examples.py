"""The examples and the benchmark of other frameworks, started as their pages say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # processes that import a framework
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "frameworks").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_ends_with_a_stop(example: Path) -> None:
    place = example.relative_to(ROOT)
    assert f"python {place}\n" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    keyless = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    done = subprocess.run(
        [sys.executable, str(place)], cwd=ROOT, env=keyless, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    text, figures = done.stdout.splitlines()
    assert text == "I stopped because a step kept failing in the same way."
    assert figures.startswith("6 model calls, $0.00258: stopped by stall of tool 'parse_document'")


def test_benchmark_measures_every_framework() -> None:
    command = [sys.executable, "benchmarks/frameworks.py", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {"langchain", "openai-agents", "pydantic-ai"}
