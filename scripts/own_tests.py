"""Run the frameworks' own tests without the guard, with a no-op in its place, and with the guard.

    make test-own                                        # all
    make test-own SUITES="openai-agents" TESTS="tests/test_run.py"
    ADK_TESTS=/path/to/adk-python make test-own SUITES=adk

LangChain, LangGraph and OpenAI Agents come from their sources on PyPI, which contain the tests. ADK and Pydantic AI
come from a checkout that ADK_TESTS or PYDANTIC_AI_TESTS names. Each has an environment of its own below build/own.

What fails with the guard alone must be listed with its reason in own_tests.toml, beside this script. What fails with
the no-op, too, fails for anything around an agent. Tests that fail only with the guard run once more in both ways:
some fail now and then.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "build" / "own"
LISTED: Final = Path(__file__).with_suffix(".toml")
WAYS: Final = ("plain", "noop", "guard")
MOST_SHOWN: Final = 2_000
_PYTEST: Final = ("pytest", "pytest-asyncio", "pytest-mock", "pytest-xdist")


@dataclass(frozen=True)
class Suite:
    """One framework's own tests: where they come from, which, and what they need."""

    source: str  # a requirement on PyPI, or the variable that names a checkout
    tests: str
    needs: Sequence[str] = ()
    extras: str = ""

    @property
    def is_pinned(self) -> bool:
        return "==" in self.source


SUITES: Final[Mapping[str, Suite]] = {
    "langchain": Suite(
        "langchain==1.4.7",
        "tests/unit_tests",
        (*_PYTEST, "pytest-socket", "pytest-benchmark", "syrupy", "toml", "blockbuster", "langchain-tests"),
    ),
    "langgraph": Suite(
        "langgraph==1.2.22",
        "tests",
        (
            *_PYTEST,
            "pytest-repeat",
            "syrupy",
            "langgraph-checkpoint-sqlite",
            "psycopg[binary]",
            "pycryptodome",
            "redis",
        ),
    ),
    "openai-agents": Suite(
        "openai-agents==0.24.0",
        "tests",
        (
            *_PYTEST,
            "httpx",
            "inline-snapshot",
            "rich",
            "websockets",
            "fastapi",
            "aiosqlite",
            "cryptography",
            "fakeredis",
            "aiohttp",
        ),
    ),
    "adk": Suite("ADK_TESTS", "tests/unittests", _PYTEST, "test"),
    "pydantic-ai": Suite(
        "PYDANTIC_AI_TESTS",
        "tests",
        (*_PYTEST, "dirty-equals", "inline-snapshot", "pytest-examples", "pytest-recording"),
    ),
}


def sources_of(suite: Suite) -> Path | None:
    """Return the folder with the framework's tests, downloaded or checked out. None: there is none."""
    if not suite.is_pinned:
        given = os.environ.get(suite.source, "")
        folder = Path(given).expanduser().resolve()
        return folder if given and (folder / suite.tests).is_dir() else None
    name, _, version = suite.source.partition("==")
    unpacked = FOLDER / f"{name.replace('-', '_')}-{version}"
    if not unpacked.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", str(FOLDER), suite.source], check=True)
        with tarfile.open(unpacked.with_name(f"{unpacked.name}.tar.gz")) as archive:
            archive.extractall(FOLDER, filter="data")
    return unpacked


def install(name: str, suite: Suite, sources: Path) -> Path:
    """Return the Python of an environment that has the framework, what its tests need, and RunGuard."""
    folder = FOLDER / f"venv-{name}"
    python = folder / "bin" / "python"
    uv = str(Path(sys.executable).with_name("uv"))
    if not python.exists():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    framework = (
        [suite.source]
        if suite.is_pinned
        else ["--editable", f"{sources}[{suite.extras}]" if suite.extras else f"{sources}"]
    )
    needed = [*framework, "--editable", str(ROOT), *suite.needs]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *needed], check=True)
    return python


def results_of(
    python: Path, sources: Path, name: str, tests: Sequence[str], way: str, workers: str = "0"
) -> dict[str, str]:
    """Run tests of a framework in one of ``WAYS``; return the outcome of each: passed, failed or skipped."""
    with tempfile.TemporaryDirectory(prefix="runguard-own-") as folder:
        report = Path(folder) / "results.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "-p", "no:runguard"]  # RunGuard's own pytest plugin is not the subject
        command += ["--continue-on-collection-errors", *(["-p", "own_guards"] if way != "plain" else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "OWN_SUITE": name, "OWN_WAY": way}
        environment.pop("RUNGUARD_MODE", None)
        ended = subprocess.run(
            [*command, *tests], cwd=sources, env=environment, capture_output=True, text=True, check=False
        )
        if not report.exists():
            raise SystemExit(f"pytest wrote no report:\n{ended.stdout[-MOST_SHOWN:]}{ended.stderr[-MOST_SHOWN:]}")
        return read_report(report)


def read_report(path: Path) -> dict[str, str]:
    """Return the outcomes in a JUnit file by the id of each test."""
    found = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('file')}::{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        found[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return found


def only_guarded(*ways: Mapping[str, str]) -> list[str]:
    """Return the tests that pass in all ways but the last, and not in that one."""
    *before, guarded = ways
    named = [name for name in before[0] if all(outcomes.get(name) == "passed" for outcomes in before)]
    return sorted(name for name in named if guarded.get(name) != "passed")


def compare(python: Path, sources: Path, name: str, tests: Sequence[str], workers: str = "0") -> list[str]:
    """Run the tests in all ways; return those that fail only with the guard, in two runs."""
    ways = [results_of(python, sources, name, tests, way, workers) for way in WAYS]
    counts = [sum(outcome == "passed" for outcome in found.values()) for found in ways]
    print(f"{name}: {len(ways[0])} tests; {counts[0]} pass plain, {counts[1]} with a no-op, {counts[2]} with the guard")
    suspects = only_guarded(*ways)
    if not suspects:
        return []
    files = sorted({one.partition("::")[0] for one in suspects})
    again = [results_of(python, sources, name, files, way) for way in ("plain", "guard")]
    return [one for one in only_guarded(*again) if one in suspects]


def unlisted(name: str, failing: Sequence[str], listed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Print why the listed tests fail; return those that are not listed."""
    reasons, left = listed.get(name, {}), []
    for one in failing:
        reason = next((why for pattern, why in reasons.items() if fnmatchcase(one, pattern)), "")
        print(f"  {one}: {reason or 'NOT LISTED'}")
        if not reason:
            left.append(one)
    return left


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    listed = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    names = os.environ.get("SUITES", "").split() or list(SUITES)
    if unknown := [name for name in names if name not in SUITES]:
        print(f"SUITES names {', '.join(unknown)}; known are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    left: list[str] = []
    for name in names:
        suite = SUITES[name]
        sources = sources_of(suite)
        if sources is None:
            print(f"{name}: skipped; {suite.source} must name a checkout with {suite.tests} in it")
            continue
        tests = os.environ.get("TESTS", "").split() or [suite.tests]
        failing = compare(install(name, suite, sources), sources, name, tests, os.environ.get("WORKERS", "4"))
        print(f"{name}: {len(failing)} tests fail only with the guard", flush=True)
        left += unlisted(name, failing, listed)
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
