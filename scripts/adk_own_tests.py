"""Run ADK's own unit tests without and with the guard, and list those that fail only with it.

    ADK_TESTS=/path/to/adk-python make test-adk-own
    TESTS="tests/unittests/runners" ADK_TESTS=/path/to/adk-python make test-adk-own

The checkout is installed into an environment of its own, `.venv-adk-own`, with what its tests need.
Tests that fail only with the guard run once more in both ways: ADK has tests that fail now and then.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[1]
SUITE = "tests/unittests"
PLUGIN = "adk_guarded"  # scripts/adk_guarded.py


def install(checkout: Path) -> Path:
    """Return the Python of an environment that has the checkout, what its tests need, and RunGuard."""
    folder = ROOT / ".venv-adk-own"
    python = folder / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    needed = ["--editable", f"{checkout}[test]", "--editable", str(ROOT), "pytest", "pytest-asyncio", "pytest-xdist"]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *needed], check=True)
    return python


def results_of(python: Path, checkout: Path, tests: list[str], *, guarded: bool, workers: str = "0") -> dict[str, str]:
    """Run tests of a checkout; return the outcome of each: passed, failed or skipped."""
    with tempfile.TemporaryDirectory(prefix="runguard-adk-own-") as folder:
        report = Path(folder) / "results.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "-p", "no:runguard"]  # RunGuard's own pytest plugin is not the subject
        command += ["-p", PLUGIN] if guarded else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
        environment.pop("RUNGUARD_MODE", None)
        ended = subprocess.run(
            [*command, *tests], cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest wrote no report:\n{ended.stdout[-2_000:]}{ended.stderr[-2_000:]}")
        return read_report(report)


def read_report(path: Path) -> dict[str, str]:
    """Return the outcomes in a JUnit file by the id of each test."""
    found = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('file')}::{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def only_guarded(plain: dict[str, str], guarded: dict[str, str]) -> list[str]:
    """Return the tests that pass without the guard and do not pass with it."""
    return sorted(name for name, outcome in plain.items() if outcome == "passed" and guarded.get(name) != "passed")


def compare(python: Path, checkout: Path, tests: list[str], workers: str = "0") -> list[str]:
    """Run the tests both ways; return those that fail only with the guard, in two runs."""
    plain = results_of(python, checkout, tests, guarded=False, workers=workers)
    guarded = results_of(python, checkout, tests, guarded=True, workers=workers)
    counts = [sum(outcome == "passed" for outcome in found.values()) for found in (plain, guarded)]
    print(f"{len(plain)} tests: {counts[0]} pass without the guard, {counts[1]} with it", flush=True)
    suspects = only_guarded(plain, guarded)
    if not suspects:
        return []
    files = sorted({name.partition("::")[0] for name in suspects})
    again = [results_of(python, checkout, files, guarded=with_guard) for with_guard in (False, True)]
    return [name for name in only_guarded(*again) if name in suspects]


def main() -> int:
    given = os.environ.get("ADK_TESTS", "")
    checkout = Path(given).expanduser().resolve()
    if not given or not (checkout / SUITE).is_dir():
        print(f"ADK_TESTS must name a checkout of adk-python, with {SUITE} in it; it is {given!r}", file=sys.stderr)
        return 2
    tests = os.environ.get("TESTS", "").split() or [SUITE]
    failing = compare(install(checkout), checkout, tests, os.environ.get("WORKERS", "4"))
    for name in failing:
        print(f"fails only with the guard: {name}")
    print(f"{len(failing)} tests fail only with the guard")
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main())
